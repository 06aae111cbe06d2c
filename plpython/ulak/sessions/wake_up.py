"""The wake-up of a backend: NOTIFY reaches it as SIGUSR1, like all messages between backends."""

from __future__ import annotations

import ctypes
import os
import signal

_SIGSET_BYTES = 128
_BLOCK = int(signal.SIG_BLOCK)
_UNBLOCK = int(signal.SIG_UNBLOCK)


class SignalWakeUp:
    """Implements session.WakeUp. While the worker listens, the signal is blocked, and a signalfd becomes readable when
    it arrives."""

    def __init__(self) -> None:
        library = ctypes.CDLL(None, use_errno=True)
        self._signals = ctypes.create_string_buffer(_SIGSET_BYTES)
        library.sigaddset(self._signals, int(signal.SIGUSR1))
        # Not the function of Python's signal module, which makes an object of every signal in the old mask.
        self._set_mask = library.pthread_sigmask
        self._descriptor: int = library.signalfd(-1, self._signals, os.O_CLOEXEC | os.O_NONBLOCK)
        if self._descriptor < 0:
            raise OSError(ctypes.get_errno(), "no signalfd")

    def fileno(self) -> int:
        return self._descriptor

    def hold_back(self) -> None:
        self._set_mask(_BLOCK, self._signals, None)

    def take(self) -> bool:
        """Lets PostgreSQL handle its signals, which other sessions may be waiting for."""
        self.let_go()
        self.hold_back()
        return True

    def let_go(self) -> None:
        self._set_mask(_UNBLOCK, self._signals, None)

    def close(self) -> None:
        self.let_go()
        os.close(self._descriptor)
