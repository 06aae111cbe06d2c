"""How a process with threads of a library ends."""

from __future__ import annotations

import ctypes
import ssl  # noqa: F401 -- initializes OpenSSL, whose exit handler must be older than ours
from functools import cache


@cache
def skip_exit_handlers() -> None:
    """exit() ends the process at once, and its threads with it, with the status it was given. Otherwise OpenSSL's exit
    handler frees what a thread of librdkafka may be using: that crashes the thread, and a backend that crashes takes
    the whole server down. PostgreSQL's own work at exit is over before exit() is called.

    Handlers run from the newest to the oldest, so this one comes first.
    """
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)
