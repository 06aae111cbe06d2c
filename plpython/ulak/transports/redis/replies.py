"""Parses the server's replies from bytes that arrive in any pieces.

The parser of the client waits for the rest of a reply that was cut in two, and in version 4 forgets its beginning; what
XADD, AUTH and SELECT are answered with is small enough to be read here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from ulak.messages.delivery import PERMANENT, RETRYABLE

# Bytes of an incomplete reply; answers to our commands are far shorter.
LONGEST = 65536
# Characters of an error that are kept.
LONGEST_TOLD = 200


class Fact(NamedTuple):
    """What an error code means for the message and the connection."""

    kind: str = "redis"
    prefix: str = RETRYABLE
    # This server is no longer the right one, or has forgotten our login: dial again, perhaps to another one.
    ends_connection: bool = False
    hint: str = ""


# Errors whose whole text comes from the server. Any other, such as ERR, may quote the command.
_FACTS = {
    "CLUSTERDOWN": Fact(),
    "LOADING": Fact(),
    "MASTERDOWN": Fact(ends_connection=True),
    "MISCONF": Fact(),
    "MOVED": Fact(hint="a cluster isn't followed to another node: name the one that has the stream"),
    "NOAUTH": Fact("login", ends_connection=True),
    "NOPERM": Fact("login", hint="the user may not XADD to the stream"),
    "NOREPLICAS": Fact(),
    "OOM": Fact(hint="the server is full: raise its maxmemory, or give the endpoint a maxlen"),
    "READONLY": Fact(ends_connection=True, hint="it is a replica"),
    "WRONGPASS": Fact("login"),
    # The key isn't a stream: a retry won't help.
    "WRONGTYPE": Fact(prefix=PERMANENT),
}


class BadReply(ValueError):
    """The other end doesn't speak the protocol."""


class Refusal(str):
    """An error reply: its code, such as OOM, and words."""

    @property
    def code(self) -> str:
        return self.partition(" ")[0]

    @property
    def fact(self) -> Fact:
        return _FACTS.get(self.code, Fact())

    @property
    def told(self) -> str:
        """The reply, cut before a quotation: that may contain part of the message or a password."""
        told = self[:LONGEST_TOLD]
        return told if self.code in _FACTS else re.split("[\"'`{\\[]", told)[0].rstrip(" ,:")


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
