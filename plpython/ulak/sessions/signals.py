"""The signals of a PostgreSQL backend, and threads beside it."""

from __future__ import annotations

import signal
from collections.abc import Callable
from threading import Thread

# PostgreSQL's handlers must run in the backend's own thread, and a new thread inherits the mask of its starter. The old
# mask is restored exactly, since PostgreSQL keeps some signals blocked on purpose.
BACKEND_SIGNALS = frozenset(
    (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGURG)
)


def start_thread(work: Callable[[], object]) -> None:
    """Runs work in a thread that gets no signal of the backend. It must not call plpy, and nobody waits for its end."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, BACKEND_SIGNALS)
    try:
        Thread(target=work, daemon=True).start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
