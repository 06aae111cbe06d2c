"""A receiver in a process of its own: it writes down every request before it answers, and outlives any server.

Told over stdin, one JSON object per line: {"path": "/a", "behaviour": {...}}, {"release": "/a"}. Answers each with a line.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from support.books import Arrival, read_arrivals
from support.ports import start_on_free_port
from support.requests import Requests
from support.sessions import wait_until


@dataclass(frozen=True)
class Behaviour:
    """What becomes of a request: with this probability this status after this delay, otherwise 200 at once."""

    status: int = 200
    probability: float = 1.0
    delay: float = 0.0
    # Only these attempts are treated so; none means all.
    attempts: list[int] = field(default_factory=list)
    # It gets no answer until it is released.
    hold: bool = False


# The side of the test.


class Recorder:
    """Starts the process; restart() brings it back on the same port, with what it has written."""

    def __init__(self, file: Path, prefix: Sequence[str] = ()) -> None:
        """`prefix` is a command that runs the rest of its arguments, on another machine for example."""
        self.file = file
        self._prefix = prefix
        self.file.touch()
        self._behaviours: dict[str, Behaviour] = {}
        self._read_up_to = 0
        self._seen: set[str] = set()
        # Not one that the kernel picks: it might give it to a connection before restart().
        start_on_free_port(self.start_at)

    def start_at(self, port: int) -> None:
        self.port = port
        command = [*self._prefix, sys.executable, "-m", "support.recorder", str(self.file), str(self.port)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._read()
        for path, behaviour in self._behaviours.items():
            self._tell({"path": path, "behaviour": asdict(behaviour)})

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def restart(self) -> None:
        self.kill()
        self.start_at(self.port)

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    def behave(self, path: str, behaviour: Behaviour) -> None:
        self._behaviours[path] = behaviour
        self._tell({"path": path, "behaviour": asdict(behaviour)})

    def release(self, path: str) -> None:
        """Answers what is held with 200, and holds no more."""
        self._behaviours.pop(path, None)
        self._tell({"release": path})

    def note(self, exchange: str, endpoint: str, body: bytes, webhook_id: str, attempt: int) -> None:
        """What arrived elsewhere, as if it had come here."""
        entry = {
            "exchange": exchange,
            "endpoint": endpoint,
            "token": json.loads(body)["token"],
            "webhook_id": webhook_id,
            "attempt": attempt,
            "status": 200,
        }
        with self.file.open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def arrivals(self) -> list[Arrival]:
        return read_arrivals(self.file)

    def count(self) -> int:
        """Requests until now; reads only what is new."""
        with self.file.open("rb") as file:
            file.seek(self._read_up_to)
            for line in file:
                if not line.endswith(b"\n"):
                    # Half written: its other half would come as the next line.
                    break
                self._read_up_to += len(line)
                self._seen.add(json.loads(line)["exchange"])
        return len(self._seen)

    def wait_for_more(self, count: int) -> None:
        """Until this many more requests have come."""
        goal = self.count() + count
        wait_until(lambda: self.count() >= goal, f"{count} more requests")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *unused: object) -> None:
        self.kill()

    def _tell(self, command: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        self._read()

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the recorder has ended")
        return line.strip()


# The side of the process.


class _Server:
    def __init__(self, file: Path) -> None:
        self._file = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._behaviours: dict[str, Behaviour] = {}
        self._held: dict[str, list[_Exchange]] = {}
        self._count = 0

    def handle(self, exchange: _Exchange) -> None:
        self._count += 1
        exchange.name = f"{os.getpid()}-{self._count}"
        behaviour = self._behaviours.get(exchange.path, Behaviour())
        meant = not behaviour.attempts or exchange.attempt in behaviour.attempts
        if not meant or random.random() >= behaviour.probability:
            behaviour = Behaviour()
        if behaviour.hold:
            self.write(exchange, 0)
            self._held.setdefault(exchange.path, []).append(exchange)
        elif behaviour.delay:
            self.write(exchange, 0)
            asyncio.get_running_loop().call_later(behaviour.delay, self.answer, exchange, behaviour.status)
        else:
            self.answer(exchange, behaviour.status)

    def answer(self, exchange: _Exchange, status: int) -> None:
        # A client that has hung up gets no answer, and its handler then has nothing to do.
        if exchange.transport.is_closing():
            return
        self.write(exchange, status)
        exchange.transport.write(f"HTTP/1.1 {status} Answer\r\ncontent-length: 0\r\n\r\n".encode())

    def write(self, exchange: _Exchange, status: int) -> None:
        entry = {
            "exchange": exchange.name,
            "endpoint": exchange.path.strip("/"),
            "token": exchange.token,
            "webhook_id": exchange.webhook_id,
            "attempt": exchange.attempt,
            "status": status,
        }
        os.write(self._file, (json.dumps(entry) + "\n").encode())

    def obey(self, line: str) -> None:
        command = json.loads(line)
        if "release" in command:
            self._behaviours.pop(command["release"], None)
            for exchange in self._held.pop(command["release"], []):
                self.answer(exchange, 200)
        else:
            self._behaviours[command["path"]] = Behaviour(**command["behaviour"])
        print("done", flush=True)


class _Exchange:
    """One request, and the connection to answer it on."""

    name: str

    def __init__(self, transport: asyncio.Transport, head: bytes, body: bytes) -> None:
        first, *lines = head.decode("latin-1").split("\r\n")
        pairs = (line.partition(":") for line in lines)
        headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        self.transport = transport
        self.path = first.split(" ")[1]
        self.webhook_id = headers.get("webhook-id", "")
        self.attempt = int(headers.get("ulak-attempt", 0))
        self.token = str(json.loads(body)["token"])


class _Connection(Requests):
    def __init__(self, server: _Server) -> None:
        super().__init__()
        self._server = server

    def handle(self, head: bytes, body: bytes) -> None:
        self._server.handle(_Exchange(self.transport, head, body))


async def _serve(file: Path, port: int) -> None:
    loop = asyncio.get_running_loop()
    server = _Server(file)
    await loop.create_server(lambda: _Connection(server), "127.0.0.1", port, backlog=1024, reuse_address=True)
    print("listening", flush=True)
    ended = asyncio.Event()

    def read_commands() -> None:
        for line in sys.stdin:
            loop.call_soon_threadsafe(server.obey, line)
        loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=read_commands, daemon=True).start()
    await ended.wait()


if __name__ == "__main__":
    asyncio.run(_serve(Path(sys.argv[1]), int(sys.argv[2])))
