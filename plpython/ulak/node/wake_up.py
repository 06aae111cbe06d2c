"""The wake-up of a node: a notification arrives over its connection, whose socket becomes readable."""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Callable


class SocketWakeUp:
    """Implements session.WakeUp. A notification may also arrive with the answer to a query. Then the socket isn't
    readable, and an eventfd remembers it."""

    def __init__(self, socket: int, receive: Callable[[], None]) -> None:
        """receive() reads the socket, and calls arrived() for each notification."""
        self._socket = socket
        self._receive = receive
        self._arrived = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._both = select.epoll()
        self._both.register(self._arrived, select.EPOLLIN)
        self._is_held_back = False

    def fileno(self) -> int:
        return self._both.fileno()

    def hold_back(self) -> None:
        if not self._is_held_back:
            self._is_held_back = True
            self._both.register(self._socket, select.EPOLLIN)

    def arrived(self) -> None:
        """Also called by a signal handler."""
        if self._is_held_back:
            os.eventfd_write(self._arrived, 1)

    def take(self) -> bool:
        self._receive()
        return self._forget()

    def let_go(self) -> None:
        if self._is_held_back:
            self._is_held_back = False
            # libpq has closed it if the connection is lost.
            with contextlib.suppress(OSError):
                self._both.unregister(self._socket)
            self._forget()

    def close(self) -> None:
        self._is_held_back = False
        self._both.close()
        os.close(self._arrived)

    def _forget(self) -> bool:
        with contextlib.suppress(BlockingIOError):
            return os.eventfd_read(self._arrived) > 0
        return False
