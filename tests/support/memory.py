"""How much memory a process has of its own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

LINUX = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")


def resident(pid: int) -> int:
    """Bytes that are the process's own; the server's shared memory isn't counted."""
    text = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"^RssAnon:\s+(\d+) kB", text, re.MULTILINE)
    assert found
    return int(found[1]) * 1024
