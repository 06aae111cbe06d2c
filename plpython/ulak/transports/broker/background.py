"""Runs blocking work in a thread; a descriptor becomes readable when it is done."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Generic, TypeVar

from ulak.messages.delivery import RETRYABLE
from ulak.sessions.signals import start_thread
from ulak.transports.broker.errors import Lost

Result = TypeVar("Result")


class Background(Generic[Result]):
    """Nothing joins the thread: if it hangs it is left alone, and its result is dropped."""

    def __init__(self, work: Callable[[], Result]) -> None:
        self._result: list[Result] = []
        # Text and prefix instead of the exception, whose traceback would keep the thread's objects alive.
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
                # The text of an unknown error might quote a secret.
                self._problem = f"network: {type(error).__name__}", RETRYABLE
            finally:
                # Closing this end makes the other one readable.
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
        """Call it once the work is done. Raises Lost."""
        if not self._result:
            raise Lost(*self._problem)
        return self._result.pop()

    def close(self) -> None:
        self._ours.close()
