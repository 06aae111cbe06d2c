"""Work that can't be done without waiting, in a thread beside the worker; a descriptor tells when it is done."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Generic, TypeVar

from ulak.messages.delivery import RETRYABLE
from ulak.sessions.signals import start_thread
from ulak.transports.broker.errors import Lost

Result = TypeVar("Result")


class Background(Generic[Result]):
    """Nobody waits for its end: a hanging thread is left alone, and its result is dropped."""

    def __init__(self, work: Callable[[], Result]) -> None:
        self._result: list[Result] = []
        # Words and prefix instead of the error itself, whose traceback would keep the objects of the thread alive.
        self._problem = ("", "")
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        self._ours = ours

        def run() -> None:
            try:
                self._result.append(work())
            except Lost as error:
                self._problem = str(error), error.prefix
            except Exception as error:
                # Its text might quote a secret.
                self._problem = f"network: {type(error).__name__}", RETRYABLE
            finally:
                # The end of the stream makes the other descriptor readable.
                theirs.close()

        start_thread(run)

    @property
    def descriptor(self) -> int:
        return self._ours.fileno()

    def is_done(self) -> bool:
        try:
            return self._ours.recv(1) == b""
        except BlockingIOError:
            return False

    def result(self) -> Result:
        """Once it is done. Raises Lost."""
        if not self._result:
            raise Lost(*self._problem)
        return self._result.pop()

    def close(self) -> None:
        self._ours.close()
