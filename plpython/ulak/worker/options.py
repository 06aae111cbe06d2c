"""The settings that the worker lives by, parsed from what the database tells."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ulak.http.address import Guard
from ulak.http.model import Settings


@dataclass(frozen=True, slots=True)
class Options:
    # Requests in flight, of which one endpoint may have seven eighths: worker_concurrency.
    slots: int
    batch_size: int
    poll_interval: float
    poll_interval_busy: float
    lease: float
    guard: Guard
    endpoint: Settings
    # Why there are fewer slots than worker_concurrency asks for.
    limited_by: str | None = None


# Files that PostgreSQL itself needs in a backend.
_OTHER_FILES = 200


def parse(settings: Mapping[str, str], version: str, max_files: int = 1024) -> Options:
    """max_files is what the operating system lets a process have open (-1: any number); each request needs a socket."""
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
        lease=float(settings["lease_seconds"]),
        guard=Guard(
            allow_internal=settings["http_allow_internal_urls"] == "true",
            allowed=settings["http_allowed_networks"].split(","),
        ),
        endpoint=Settings(
            http_timeout=float(settings["http_timeout"]),
            http_connect_timeout=float(settings["http_connect_timeout"]),
            capture_response=settings["capture_response"] == "true",
            response_body_max_size=int(settings["response_body_max_size"]),
            cloudevents_source=settings["cloudevents_source"],
            user_agent=f"ulak/{version}",
        ),
    )
