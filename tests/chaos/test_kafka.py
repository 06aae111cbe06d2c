"""A Kafka cluster goes away and comes back under load, and workers are terminated with its producers at work."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import uuid4

from psycopg.types.json import Jsonb
from support.kafka import Kafka, Relay
from support.receiver import make_certificate
from support.sessions import wait_until
from support.world import FULL, PATIENT, UNBROKEN, World

ROUNDS = 20 if FULL else 2
PARTITIONS = 3


class Shop:
    """A Kafka endpoint in a world of HTTP: what a consumer reads is what arrived."""

    def __init__(self, world: World, kafka: Kafka, broker: str, **options: Any) -> None:
        self.world = world
        self.kafka = kafka
        self.topic = kafka.create_topic(f"shop-{uuid4()}", PARTITIONS)
        config = {
            "broker": broker,
            "topic": self.topic,
            "circuit_breaker": UNBROKEN,
            "options": {"message.timeout.ms": 5000, **options},
        }
        create = "select ulak.create_endpoint('shop', 'kafka', %s, p_retry_policy => %s)"
        world.value(create, Jsonb(config), Jsonb(PATIENT))

    def wait_for_more(self, count: int) -> None:
        completed = "select count(*) from ulak.messages where status = 'completed'"
        goal = self.world.value(completed) + count
        wait_until(lambda: self.world.value(completed) >= goal, f"{count} more messages")

    def write_down(self) -> None:
        """A partition's messages are read in the order in which they came, and a key has one partition."""
        sent = self.world.value("select count(*) from shop.orders")
        for each in self.kafka.read(self.topic, sent, PARTITIONS):
            self.world.recorder.note(
                f"{each.partition}-{each.offset}",
                "shop",
                each.value,
                each.headers["ulak-message-id"],
                int(each.headers["ulak-attempt"]),
            )


def test_a_broker_goes_away_and_comes_back_under_load(world: World, kafka: Kafka, close_books: Any) -> None:
    shop = Shop(world, kafka, kafka.broker)

    with world.workers():
        with world.producers() as producers:
            for _ in range(ROUNDS):
                shop.wait_for_more(50)
                kafka.down()
                producers.wait_for(20)
                kafka.up()
            shop.wait_for_more(50)
        world.drain()
    shop.write_down()

    # Acknowledgements that were lost with a connection make librdkafka send again, which this cluster doesn't notice.
    close_books(duplicates=True, repeated_attempts=True)


def test_workers_are_terminated_while_they_produce(
    world: World, kafka: Kafka, close_books: Any, tmp_path: Path
) -> None:
    """librdkafka's threads are in the middle of TLS then: if one of them crashed, so would the server."""
    crash = "was terminated by signal"
    before = world.cluster.log.read_text(errors="replace").count(crash)
    certificate = make_certificate(tmp_path)
    secure = {
        "security.protocol": "ssl",
        "ssl.ca.location": str(certificate.certificate),
        "broker.address.family": "v4",
        "ssl.endpoint.identification.algorithm": "none",
    }
    with Relay(kafka, certificate) as relay:
        shop = Shop(world, kafka, relay.broker, **secure)
        with world.producers(), world.workers():
            for _ in range(2 * ROUNDS):
                shop.wait_for_more(30)
                world.terminate(world.wait_for_worker())
        world.deliver_the_rest()
    shop.write_down()

    assert world.cluster.log.read_text(errors="replace").count(crash) == before
    close_books(duplicates=True, repeated_attempts=True)
