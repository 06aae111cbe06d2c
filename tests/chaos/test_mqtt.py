"""An MQTT broker is restarted while messages flow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from support.books import Arrival
from support.mosquitto import Mosquitto, Subscriber
from support.sessions import wait_until
from support.world import FULL, UNBROKEN, World

# While it is down, immediate retries would add up to thousands.
PATIENT = {"max_retries": 1000, "backoff": "fixed", "base_delay_seconds": 1}
RESTARTS = 20 if FULL else 2


class Topic:
    """What the subscriber got; it keeps its session over the broker's restarts."""

    def __init__(self, subscriber: Subscriber) -> None:
        self._subscriber = subscriber

    def arrivals(self) -> list[Arrival]:
        return [self._arrival(place) for place in range(len(self._subscriber.received))]

    def _arrival(self, place: int) -> Arrival:
        received = self._subscriber.received[place]
        token = json.loads(received.payload)["token"]
        attempt = int(received.properties["ulak-attempt"])
        return Arrival(place, "shop", token, received.properties["ulak-message-id"], attempt, True)


def test_an_mqtt_broker_is_restarted(world: World, close_books: Any, tmp_path: Path) -> None:
    """As a service is stopped: mosquitto saves its sessions when it ends. A killed one forgets what it has acknowledged and not yet handed
    on, and ulak can't know."""
    with Mosquitto(tmp_path / "mosquitto") as broker, Subscriber(broker, "orders") as subscriber:
        world.recorder = Topic(subscriber)  # type: ignore[assignment]
        config = {"broker": "127.0.0.1", "port": broker.port, "topic": "orders", "circuit_breaker": UNBROKEN}
        query = "select ulak.create_endpoint('shop', 'mqtt', %s, p_retry_policy => %s)"
        world.value(query, json.dumps(config), json.dumps(PATIENT))

        with world.workers():
            with world.producers():
                for _ in range(RESTARTS):
                    subscriber.wait_for(len(subscriber.received) + 50)
                    broker.leave()
                    broker.start()
            world.drain()
        delivered = world.value("select count(*) from ulak.messages where status = 'completed'")
        wait_until(lambda: len({each.token for each in world.recorder.arrivals()}) >= delivered, "the last of them")

        close_books(duplicates=True, repeated_attempts=True)
