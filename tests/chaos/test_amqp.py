"""RabbitMQ is killed and comes back while messages are published to it."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

from psycopg.types.json import Jsonb
from support import books
from support.books import Allowance, Arrival
from support.rabbitmq import RabbitMQ
from support.world import FULL, UNBROKEN, World

ORDERS = 1500 if FULL else 100
KILLS = 3 if FULL else 1
# While it is down, immediate retries would add up to thousands.
PATIENT = {"max_retries": 1000, "backoff": "fixed", "base_delay_seconds": 1}


def test_rabbitmq_is_killed_and_started_again(world: World, rabbitmq: RabbitMQ, row: dict[str, Any]) -> None:
    rabbitmq.declare("chaos")
    config = rabbitmq.config(exchange="chaos", routing_key="order", circuit_breaker=UNBROKEN, timeout=5)
    world.value("select ulak.create_endpoint('shop', 'amqp', %s, %s)", Jsonb(config), Jsonb(PATIENT))

    with world.workers():
        with world.producers() as producers:
            for _ in range(KILLS):
                producers.wait_for(ORDERS)
                rabbitmq.kill()
                producers.wait_for(ORDERS)
                rabbitmq.start()
            producers.wait_for(ORDERS)
        world.drain()

    # What was confirmed is there, in the order of its key; what was not, may be there twice.
    report = books.audit(replace(world.ledger(), arrivals=arrivals(rabbitmq)), Allowance(duplicates=True))
    row.update(asdict(report), verdict=report.verdict)
    assert not report.problems, f"\n{report}"
    assert report.delivered == report.sent > ORDERS


def arrivals(rabbitmq: RabbitMQ) -> list[Arrival]:
    """What a consumer gets, in its order."""
    return [
        Arrival(
            at,
            "shop",
            json.loads(each.body)["token"],
            each.properties.message_id,
            each.properties.headers["ulak-attempt"],
            accepted=True,
        )
        for at, each in enumerate(rabbitmq.take("chaos"))
    ]
