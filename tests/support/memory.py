"""How much memory a process has of its own."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from support.sessions import wait_until

LINUX = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")


def resident(pid: int) -> int:
    """Bytes that are the process's own; the server's shared memory isn't counted."""
    text = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"^RssAnon:\s+(\d+) kB", text, re.MULTILINE)
    assert found
    return int(found[1]) * 1024


def peak_until(is_done: Callable[[], object], pid: int, message: str) -> int:
    """The most that it has until then."""
    peak = 0

    def look() -> object:
        nonlocal peak
        peak = max(peak, resident(pid))
        return is_done()

    wait_until(look, message, interval=0)
    return peak
