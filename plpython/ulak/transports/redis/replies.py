"""Parses the server's replies from bytes that arrive in any pieces.

The parser of the client waits for the rest of a reply that was cut in two, and in version 4 forgets its beginning; what
XADD, AUTH and SELECT are answered with is small enough to be read here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

# Bytes of an incomplete reply; answers to our commands are far shorter.
LONGEST = 65536
# Characters of an error that are kept.
LONGEST_TOLD = 200
# Errors whose whole text comes from the server. ERR may quote the command.
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


class BadReply(ValueError):
    """The other end doesn't speak the protocol."""


class Refusal(str):
    """An error reply: its code, such as OOM, and words."""

    @property
    def code(self) -> str:
        return self.partition(" ")[0]

    @property
    def told(self) -> str:
        """The reply, cut before a quotation: that may contain part of the message or a password."""
        told = self[:LONGEST_TOLD]
        return told if self.code in _OWN_WORDS else re.split("[\"'`{\\[]", told)[0].rstrip(" ,:")


class Status(bytes):
    """A status or a number: an answer to AUTH, SELECT or PING, but never to XADD."""


class Replies:
    def __init__(self) -> None:
        self._rest = b""

    def read(self, data: bytes) -> Iterator[bytes | Refusal | None]:
        """The replies that are complete by now. To XADD: the id of the entry, or None if there is no such stream."""
        lines = (self._rest + data).split(b"\r\n")
        # After the last line break an incomplete line begins.
        complete = len(lines) - 1
        position = 0
        while position < complete:
            kind, line = lines[position][:1], lines[position][1:]
            if kind == b"$" and line != b"-1":
                # The length, then the text on the next line: an id has no line break.
                if not line.isdigit() or len(line) > 5:
                    raise BadReply
                if position + 1 == complete:
                    break
                position += 1
                if len(lines[position]) != int(line):
                    raise BadReply
                yield lines[position]
            elif kind == b"$":
                yield None
            elif kind == b"-":
                yield Refusal(line.decode("utf-8", "replace"))
            elif kind in (b"+", b":"):
                yield Status(line)
            else:
                raise BadReply
            position += 1
        self._rest = b"\r\n".join(lines[position:])
        if len(self._rest) > LONGEST:
            raise BadReply
