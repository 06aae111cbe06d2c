"""The server's replies, out of bytes that come in any pieces.

The parser of the client waits for the rest of a reply that was cut in two, and in version 4 forgets its beginning; what
XADD, AUTH and SELECT are answered with is small enough to be read here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

# Bytes of one reply; those to our commands are far shorter.
LONGEST = 65536
# Characters of an error that are passed on.
LONGEST_TOLD = 200
# Errors whose words are the server's own. ERR may quote the command.
_OWN_WORDS = frozenset(
    (
        "CLUSTERDOWN",
        "LOADING",
        "MASTERDOWN",
        "MISCONF",
        "MOVED",
        "NOAUTH",
        "NOPERM",
        "NOREPLICAS",
        "OOM",
        "READONLY",
        "WRONGPASS",
        "WRONGTYPE",
    )
)

_BULK, _ERROR, _STATUS, _NUMBER = b"$-+:"


class BadReply(ValueError):
    """The other end doesn't speak the protocol."""


class Refusal(str):
    """An error reply: its code, such as OOM, and words."""

    @property
    def code(self) -> str:
        return self.partition(" ")[0]

    @property
    def told(self) -> str:
        """The reply without its quotes, which may contain part of the message or a password."""
        told = self[:LONGEST_TOLD]
        return told if self.code in _OWN_WORDS else re.split("[\"'`{\\[]", told)[0].rstrip(" ,:")


class Status(bytes):
    """A status or a number, which AUTH, SELECT and PING are answered with, and XADD never is."""


class Replies:
    def __init__(self) -> None:
        self._rest = b""

    def read(self, data: bytes) -> Iterator[bytes | Refusal | None]:
        """The replies that are complete by now. To XADD: the id of the entry, or None if there is no such stream."""
        data = self._rest + data
        position = 0
        while (end := data.find(b"\r\n", position)) >= 0:
            kind = data[position]
            if kind == _BULK:
                length = _length(data[position + 1 : end])
                if length < 0:
                    position = end + 2
                    yield None
                    continue
                stop = end + 2 + length
                if len(data) < stop + 2:
                    break
                if data[stop : stop + 2] != b"\r\n":
                    raise BadReply
                position = stop + 2
                yield data[end + 2 : stop]
            else:
                line = data[position + 1 : end]
                position = end + 2
                if kind == _ERROR:
                    yield Refusal(line.decode("utf-8", "replace"))
                elif kind in (_STATUS, _NUMBER):
                    yield Status(line)
                else:
                    raise BadReply
        self._rest = data[position:]
        if len(self._rest) > LONGEST + 32:
            raise BadReply


def _length(digits: bytes) -> int:
    try:
        length = int(digits)
    except ValueError:
        raise BadReply from None
    if not -1 <= length <= LONGEST:
        raise BadReply
    return length
