"""The demo's receivers: one that is well, one that fails at times, one that is down until it is told to come up.

python -m demo.receivers FOLDER   writes its pid and the ports into the folder and serves until it is ended.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from pathlib import Path

from support.files import write_whole
from support.requests import Requests

CHANCE = random.Random(7)


class Protocol(Requests):
    """Every answer is empty."""

    def __init__(self, failing: float) -> None:
        super().__init__()
        self._failing = failing

    def handle(self, head: bytes, body: bytes) -> None:
        self.transport.write(b"HTTP/1.1 %s\r\ncontent-length: 0\r\n\r\n" % self._status(body))

    def _status(self, body: bytes) -> bytes:
        if json.loads(body).get("amount", 0) < 0:
            return b"422 Unprocessable Content"
        return b"503 Service Unavailable" if CHANCE.random() < self._failing else b"200 OK"


async def serve(folder: Path) -> None:
    loop = asyncio.get_running_loop()
    well = await loop.create_server(lambda: Protocol(0), "127.0.0.1", 0)
    moody = await loop.create_server(lambda: Protocol(0.15), "127.0.0.1", 0)
    # Bound but not listening: the port is kept, and connections to it are refused.
    down = await loop.create_server(lambda: Protocol(0), "127.0.0.1", 0, start_serving=False)
    servers = {"shop": well, "partner": moody, "warehouse": down}
    ports = {name: server.sockets[0].getsockname()[1] for name, server in servers.items()}
    write_whole(folder / "receivers.pid", str(os.getpid()))
    write_whole(folder / "ports.json", json.dumps(ports))
    while not (folder / "warehouse-is-up").exists():
        await asyncio.sleep(0.1)
    await down.start_serving()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1])))
