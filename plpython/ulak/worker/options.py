"""The worker's settings, independent of transports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

# Files that PostgreSQL itself needs in a backend.
_OTHER_FILES = 200


class Options(NamedTuple):
    # Request slots. One endpoint may have seven eighths of them, which is worker_concurrency.
    slots: int
    batch_size: int
    poll_interval: float
    poll_interval_busy: float
    # Turns are at least this far apart while there is no backlog.
    turn_interval: float
    lease: float
    # Why there are fewer slots than worker_concurrency asks for.
    limited_by: str | None = None
    # How many messages may be held at once; None: as many as there is memory for.
    most_held: int | None = None


def parse(settings: Mapping[str, str], max_files: int = 1024) -> Options:
    """max_files is how many files a process may have open (-1: any number); each request needs a socket."""
    slots = -(-int(settings["worker_concurrency"]) * 8 // 7)
    # Twice: slow receivers have slots of their own.
    most = max(2, (max_files - _OTHER_FILES) // 2) if max_files >= 0 else slots
    limited_by = None
    if most < slots:
        limited_by = (
            f"a process may have {max_files} files open, which is enough for {most} requests in flight;"
            f" worker_concurrency asks for {settings['worker_concurrency']}"
        )
    return Options(
        slots=min(slots, most),
        limited_by=limited_by,
        batch_size=int(settings["batch_size"]),
        poll_interval=int(settings["poll_interval"]) / 1000,
        poll_interval_busy=int(settings["poll_interval_busy"]) / 1000,
        turn_interval=int(settings["turn_interval"]) / 1000,
        lease=float(settings["lease_seconds"]),
    )
