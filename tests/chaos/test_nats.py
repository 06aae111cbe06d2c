"""A NATS server is killed and comes back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from support.books import Arrival
from support.nats import Nats
from support.sessions import wait_until
from support.world import FULL, UNBROKEN, World

# While it is down, immediate retries would add up to thousands.
PATIENT = {"max_retries": 1000, "backoff": "fixed", "base_delay_seconds": 1}
DEATHS = 20 if FULL else 2


class Stream:
    """What is in the stream is what arrived; it is read only at the end."""

    def __init__(self, server: Nats) -> None:
        self._server = server

    def count(self) -> int:
        return self._server.count("ORDERS")

    def arrivals(self) -> list[Arrival]:
        found = []
        for place, each in enumerate(self._server.stored("ORDERS")):
            token, headers = json.loads(each.payload)["token"], each.headers
            attempt = int(headers["ulak-attempt"])
            found.append(Arrival(place, "shop", token, headers["ulak-message-id"], attempt, True))
        return found


def test_a_nats_server_is_killed_and_comes_back(world: World, close_books: Any, tmp_path: Path) -> None:
    with Nats(tmp_path / "nats") as server:
        server.create_stream("ORDERS", "orders")
        world.recorder = stream = Stream(server)  # type: ignore[assignment]
        config = {"url": server.url, "subject": "orders", "stream": "ORDERS", "circuit_breaker": UNBROKEN}
        query = "select ulak.create_endpoint('shop', 'nats', %s, p_retry_policy => %s)"
        world.value(query, json.dumps(config), json.dumps(PATIENT))

        with world.workers():
            with world.producers():
                for _ in range(DEATHS):
                    before = stream.count()
                    wait_until(lambda before=before: stream.count() >= before + 50, "50 more messages")
                    server.restart()
            world.drain()

        # The stream drops copies by their id: those that were sent again because the acknowledgement was lost with the connection.
        close_books(repeated_attempts=True, first_copy_only=True)
