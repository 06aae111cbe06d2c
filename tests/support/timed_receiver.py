"""A receiver in a process of its own that answers after a delay and notes when each request came.

python -m support.timed_receiver 0.05   prints its port; GET gives the times of all requests so far, and forgets them.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"


class Protocol(asyncio.Protocol):
    """The clock is the machine's: the same in every process."""

    arrivals: list[tuple[float, str]] = []  # noqa: RUF012

    def __init__(self, delay: float) -> None:
        self._delay = delay
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
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
            if head.startswith(b"GET"):
                self._tell()
                continue
            self.arrivals.append((now, body.decode()))
            if self._delay:
                asyncio.get_running_loop().call_later(self._delay, self._answer)
            else:
                self._answer()

    def _answer(self) -> None:
        if not self._transport.is_closing():
            self._transport.write(ANSWER)

    def _tell(self) -> None:
        body = json.dumps(self.arrivals).encode()
        self.arrivals.clear()
        self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)


class TimedReceiver:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        self.url = f"http://127.0.0.1:{int(process.stdout.readline())}/"

    def arrivals(self) -> list[tuple[float, str]]:
        """By time.monotonic(), with the body; only those since the last call."""
        with urllib.request.urlopen(self.url) as answer:
            return [(at, body) for at, body in json.load(answer)]


@contextmanager
def timed_receiver(delay: float = 0) -> Iterator[TimedReceiver]:
    command = [sys.executable, "-m", "support.timed_receiver", str(delay)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield TimedReceiver(process)
        finally:
            process.terminate()


async def serve(delay: float) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Protocol(delay), "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(float(sys.argv[1])))
