"""How fast one worker delivers to brokers, beside the same client in a bare loop against the same broker."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

from support.publisher import Publisher
from support.rabbitmq import RabbitMQ

from bench.delivery import Delivered, between, drain, fill
from bench.figures import Figure, Quantity
from bench.stage import Part, Section, Stage
from bench.yardstick import PAYLOAD, Bare

MESSAGES = 50_000
# What is asked of those whose bare loop is fast; of the others it is half of their bare loop.
FAST = 15_000


class Broker(NamedTuple):
    """A broker that is up: an endpoint's config for it, and the bare loop, which is given how many messages to send and
    returns when all are acknowledged."""

    protocol: str
    config: dict[str, Any]
    send: Callable[[int], None]


def bare_loop(broker: Broker, count: int) -> Bare:
    began, used = time.monotonic(), time.process_time()
    broker.send(count)
    took, used = time.monotonic() - began, time.process_time() - used
    return Bare(count, took, used, 0)


def deliver(stage: Stage, broker: Broker, count: int) -> Delivered:
    with stage.site() as site:
        site.db.execute("checkpoint")
        site.endpoint("shop", broker.config, None, broker.protocol)
        fill(site, "shop", count)
        return drain(site)


def compare(stage: Stage, broker: Broker, is_fast: bool) -> Iterator[Figure]:
    """In turn, since the machine may do other things as well."""
    count = stage.scaled(MESSAGES, 500)
    bares = [bare_loop(broker, count)]
    rounds = []
    for _ in range(stage.rounds(3)):
        one = deliver(stage, broker, count)
        bares.append(bare_loop(broker, count))
        rounds.append((between(*bares[-2:]), one))
    yield Figure(
        f"{broker.protocol}: bare loop, {count:,} messages",
        Quantity(median(bare.rate for bare in bares), "/s"),
        Quantity(median(bare.processor for bare in bares) * 1e6 / count, "us", "of processor each"),
        headline=True,
    )
    one = sorted((one for _, one in rounds), key=lambda one: one.rate)[len(rounds) // 2]
    part = median(one.rate / bare.rate for bare, one in rounds)
    rate, *others = one.quantities()
    if is_fast and 0.5 * median(bare.rate for bare in bares) > FAST:
        quantities = [replace(rate, required=FAST), *others, Quantity(part, "of", "the bare loop's")]
    else:
        quantities = [rate, *others, Quantity(part, "of", "the bare loop's", required=0.5)]
    yield Figure(f"{broker.protocol}: one worker", *quantities, headline=True)
    stage.details[broker.protocol] = [{"bare": bare._asdict(), "one": one._asdict()} for bare, one in rounds]


def body(n: int) -> bytes:
    """As fill() writes it."""
    return b'{"n": %d, "text": "%b"}' % (n, PAYLOAD.encode())


def to_amqp(stage: Stage) -> Iterator[Figure]:
    """Confirms, mandatory and persistent, with the same properties; as many unconfirmed as a worker may have."""
    with RabbitMQ() as broker:
        broker.declare("orders")

        def send(count: int) -> None:
            broker.purge("orders")
            assert Publisher(broker, "orders", (body(n) for n in range(count)), 2000).run() == count

        config = broker.config(exchange="orders", routing_key="order.created")
        yield from compare(stage, Broker("amqp", config, send), is_fast=False)


SECTIONS: dict[str, Section] = {"amqp": to_amqp}

PART = Part(
    "Delivery to brokers on the same machine, messages of 200 bytes, default settings of ulak; processor: of the worker, with "
    "its start",
    SECTIONS,
)
