"""Requests over HTTP/1.1 as asyncio reads them, for receivers that have to keep up with a worker."""

from __future__ import annotations

import asyncio
import re
from abc import abstractmethod

LENGTH = re.compile(rb"^content-length: *(\d+)", re.IGNORECASE | re.MULTILINE)


class Requests(asyncio.Protocol):
    """A connection that is kept: each request goes to handle() once it is whole."""

    def __init__(self) -> None:
        self._buffer = b""

    @abstractmethod
    def handle(self, head: bytes, body: bytes) -> None:
        """The head is request line and headers."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while True:
            head, end, rest = self._buffer.partition(b"\r\n\r\n")
            if not end:
                return
            found = LENGTH.search(head)
            length = int(found[1]) if found else 0
            if len(rest) < length:
                return
            body, self._buffer = rest[:length], rest[length:]
            self.handle(head, body)
