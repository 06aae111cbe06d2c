"""The wake-up: a descriptor that tells when a sender has committed, so that the worker can wait for it in epoll, too.

The notification's content is never read: its arrival is enough.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
from typing import Protocol

_SIGSET_BYTES = 128
_BLOCK = int(signal.SIG_BLOCK)
_UNBLOCK = int(signal.SIG_UNBLOCK)


class WakeUp(Protocol):
    def fileno(self) -> int:
        """Readable when a wake-up has arrived while it was held back."""

    def hold_back(self) -> None:
        """Keeps wake-ups from now on until wait() asks, so that none is missed between a claim and the next wait."""

    def wait(self, seconds: float = 0) -> bool:
        """Whether one has arrived since the last call, or does within this many seconds. Must be called often."""

    def let_go(self) -> None:
        """Ends hold_back(): the worker no longer waits for wake-ups."""

    def close(self) -> None: ...


class SignalWakeUp:
    """For a backend: NOTIFY reaches it as SIGUSR1, like all messages between backends. While the worker listens, the
    signal is blocked, and a signalfd becomes readable when it arrives."""

    def __init__(self) -> None:
        library = ctypes.CDLL(None, use_errno=True)
        self._signals = ctypes.create_string_buffer(_SIGSET_BYTES)
        library.sigaddset(self._signals, int(signal.SIGUSR1))
        # Not the function of Python's signal module, which makes an object of every signal in the old mask.
        self._set_mask = library.pthread_sigmask
        self._descriptor: int = library.signalfd(-1, self._signals, os.O_CLOEXEC | os.O_NONBLOCK)
        if self._descriptor < 0:
            raise OSError(ctypes.get_errno(), "no signalfd")
        self._poll = select.poll()
        self._poll.register(self._descriptor, select.POLLIN)
        self.is_held_back = False

    def fileno(self) -> int:
        return self._descriptor

    def hold_back(self) -> None:
        self._set_mask(_BLOCK, self._signals, None)
        self.is_held_back = True

    def wait(self, seconds: float = 0) -> bool:
        """Also lets PostgreSQL handle its signals, which other sessions may be waiting for."""
        if not self._poll.poll(seconds * 1000):
            return False
        self._set_mask(_UNBLOCK, self._signals, None)
        if self.is_held_back:
            self._set_mask(_BLOCK, self._signals, None)
        return True

    def let_go(self) -> None:
        self._set_mask(_UNBLOCK, self._signals, None)
        self.is_held_back = False

    def close(self) -> None:
        self.let_go()
        os.close(self._descriptor)
