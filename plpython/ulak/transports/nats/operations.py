"""Parses a server's operations from bytes that arrive in any pieces."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

# Bytes of one line, or of one reply; acknowledgements are far shorter.
LONGEST = 65536

PING = b"PING"
PONG = b"PONG"


class BadOperation(ValueError):
    """The other end doesn't speak the protocol."""


class Info(dict[str, Any]):
    """The server's description of itself."""


class Problem(str):
    """The words of -ERR, without what they quote."""


class Reply(NamedTuple):
    """A message to our inbox."""

    subject: bytes
    headers: bytes
    payload: bytes


Operation = Info | Problem | Reply | bytes


class Operations:
    def __init__(self) -> None:
        self._rest = b""

    @property
    def is_at_end(self) -> bool:
        """Nothing follows the last operation."""
        return not self._rest

    def read(self, data: bytes) -> Iterator[Operation]:
        """The operations that are complete by now."""
        data = self._rest + data if self._rest else data
        self._rest = b""
        position = 0
        while (end := data.find(b"\r\n", position)) >= 0:
            if data.startswith((b"MSG ", b"HMSG "), position):
                words = data[position:end].split()
                # HMSG also has the size of its headers.
                headers = _size(words[-2]) if words[0] == b"HMSG" else 0
                size = _size(words[-1])
                if headers > size:
                    raise BadOperation
                start, stop = end + 2, end + 2 + size
                if len(data) < stop + 2:
                    break
                if data[stop : stop + 2] != b"\r\n":
                    raise BadOperation
                position = stop + 2
                yield Reply(words[1], data[start : start + headers], data[start + headers : stop])
            else:
                line = data[position:end]
                position = end + 2
                # The caller must handle INFO before it reads on.
                self._rest = data[position:] if line.startswith(b"INFO") else b""
                if (told := _operation(line)) is not None:
                    yield told
        self._rest = data[position:]
        if len(self._rest) > 2 * LONGEST:
            raise BadOperation


def _operation(line: bytes) -> Operation | None:
    name, _, rest = line.partition(b" ")
    if name == b"INFO":
        try:
            found = json.loads(rest)
        except (ValueError, RecursionError):
            raise BadOperation from None
        if not isinstance(found, dict):
            raise BadOperation
        return Info(found)
    if name == b"-ERR":
        return Problem(rest.decode("utf-8", "replace").strip(" '"))
    if name in (PING, PONG):
        return name
    if name == b"+OK":
        return None
    raise BadOperation


def _size(digits: bytes) -> int:
    if not digits.isdigit() or len(digits) > 9 or int(digits) > LONGEST:
        raise BadOperation
    return int(digits)
