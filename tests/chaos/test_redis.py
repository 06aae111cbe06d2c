"""A Redis server is killed and comes back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from support.books import Arrival
from support.redis import Redis
from support.sessions import wait_until
from support.world import FULL, UNBROKEN, World

# While it is down, immediate retries would add up to thousands.
PATIENT = {"max_retries": 1000, "backoff": "fixed", "base_delay_seconds": 1}
DEATHS = 20 if FULL else 2


class Stream:
    """What is in the stream is what arrived; it is read only at the end."""

    def __init__(self, server: Redis) -> None:
        self._server = server

    def count(self) -> int:
        with self._server.client() as client:
            return int(client.xlen("orders"))

    def arrivals(self) -> list[Arrival]:
        return [
            Arrival(place, "shop", json.loads(each["payload"])["token"], each["message_id"], int(each["attempt"]), True)
            for place, each in enumerate(self._server.entries("orders"))
        ]


def test_a_redis_server_is_killed_and_comes_back(world: World, close_books: Any, tmp_path: Path) -> None:
    with Redis(tmp_path / "redis") as server:
        world.recorder = stream = Stream(server)  # type: ignore[assignment]
        config = {"host": "127.0.0.1", "port": server.port, "stream_key": "orders", "circuit_breaker": UNBROKEN}
        query = "select ulak.create_endpoint('shop', 'redis', %s, p_retry_policy => %s)"
        world.value(query, json.dumps(config), json.dumps(PATIENT))

        with world.workers():
            with world.producers():
                for _ in range(DEATHS):
                    before = stream.count()
                    wait_until(lambda before=before: stream.count() >= before + 50, "50 more entries")
                    server.restart()
            world.drain()

        # An entry whose acknowledgement was lost with its connection is a duplicate; and a worker that dies with its commit may
        # repeat an attempt.
        close_books(duplicates=True, repeated_attempts=True)
