"""Headless Chromium: what it sees of a file, and a picture of it."""

from __future__ import annotations

import struct
import subprocess
import tempfile
import zlib
from pathlib import Path

# Nothing of the browser itself goes out, and it may run as root.
COMMAND = [
    "chromium",
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
]
SCHEMES = {"dark": "0", "light": "1"}


def _run(page: Path, *options: str) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [*COMMAND, f"--user-data-dir={profile}", *options, page.as_uri()]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)


def loaded(page: Path) -> str:
    """The document as the browser has built it."""
    return _run(page, "--dump-dom").stdout


def screenshot(page: Path, picture: Path, scheme: str, width: int = 1280, height: int = 2000) -> Path:
    _run(
        page,
        f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}",
        f"--window-size={width},{height}",
        f"--screenshot={picture}",
    )
    return picture


def pixel(picture: Path, x: int, y: int) -> tuple[int, int, int]:
    """Of a PNG that Chromium wrote: 8 bits a channel, not interlaced."""
    data = picture.read_bytes()
    width, _, depth, kind = struct.unpack("!IIBB", data[16:26])
    assert (depth, kind) in ((8, 2), (8, 6))
    size = 3 if kind == 2 else 4
    packed, place = b"", 8
    while place < len(data):
        (length,) = struct.unpack("!I", data[place : place + 4])
        if data[place + 4 : place + 8] == b"IDAT":
            packed += data[place + 8 : place + 8 + length]
        place += length + 12
    raw = zlib.decompress(packed)
    row = bytearray(width * size)
    for line in range(y + 1):
        start = line * (width * size + 1)
        row = _unfilter(raw[start], raw[start + 1 : start + 1 + width * size], row, size)
    return row[x * size], row[x * size + 1], row[x * size + 2]


def _unfilter(kind: int, line: bytes, above: bytearray, size: int) -> bytearray:
    row = bytearray(line)
    for i in range(len(row)):
        left = row[i - size] if i >= size else 0
        up = above[i]
        corner = above[i - size] if i >= size else 0
        row[i] = (row[i] + (0, left, up, (left + up) // 2, _paeth(left, up, corner))[kind]) & 255
    return row


def _paeth(left: int, up: int, corner: int) -> int:
    guess = left + up - corner
    return min((left, up, corner), key=lambda each: abs(guess - each))
