"""A receiver in a process of its own that answers after a delay and notes when each request came.

python -m support.timed_receiver 0.05   prints its port; GET gives the times of all requests so far, and forgets them.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

from support.requests import Requests

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"


class Protocol(Requests):
    """The clock is the machine's: the same in every process."""

    arrivals: list[tuple[float, str]] = []  # noqa: RUF012

    def __init__(self, delay: float) -> None:
        super().__init__()
        self._delay = delay
        self._now = 0.0

    def data_received(self, data: bytes) -> None:
        self._now = time.monotonic()
        super().data_received(data)

    def handle(self, head: bytes, body: bytes) -> None:
        if head.startswith(b"GET"):
            self._tell()
            return
        self.arrivals.append((self._now, body.decode()))
        if self._delay:
            asyncio.get_running_loop().call_later(self._delay, self._answer)
        else:
            self._answer()

    def _answer(self) -> None:
        if not self.transport.is_closing():
            self.transport.write(ANSWER)

    def _tell(self) -> None:
        body = json.dumps(self.arrivals).encode()
        self.arrivals.clear()
        self.transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)


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
