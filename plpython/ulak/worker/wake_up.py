"""The wake-up: waiting until a sender has committed, together with everything else that the kernel can tell of.

What the notification says is never read: that there was one is enough.
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
        """Wake-ups are kept from now on, until wait() asks: none is missed between a claim and the wait after it."""

    def wait(self, seconds: float = 0) -> bool:
        """Whether one has arrived since the last time, or does within this many seconds. To be asked often."""

    def let_go(self) -> None:
        """The worker doesn't wait for them any more."""

    def close(self) -> None: ...


class SignalWakeUp:
    """Of a backend: NOTIFY reaches it as SIGUSR1, like all messages between backends. While the worker listens, the
    signal is held back, and a descriptor tells that there is one."""

    def __init__(self) -> None:
        library = ctypes.CDLL(None, use_errno=True)
        self._signals = ctypes.create_string_buffer(_SIGSET_BYTES)
        library.sigaddset(self._signals, int(signal.SIGUSR1))
        # Not that of Python's signal module, which makes objects of all signals of the mask before.
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
        """PostgreSQL gets its signals then, and other sessions may wait for that."""
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
