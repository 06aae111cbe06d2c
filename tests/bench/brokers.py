"""How fast one worker delivers to brokers, beside the usual client in a bare loop against the same broker."""

from __future__ import annotations

import asyncio
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

import nats
import redis
from confluent_kafka import Producer
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from support.deliveries import SETTINGS
from support.kafka import Kafka
from support.mosquitto import Mosquitto, make_client
from support.nats import Nats
from support.publisher import Publisher
from support.rabbitmq import RabbitMQ
from support.redis import Redis
from ulak.messages.delivery import EndpointConfig, Message
from ulak.transports.dispatcher import Dispatcher
from ulak.transports.registry import transports

from bench.delivery import Delivered, between, drain, fill
from bench.figures import Figure, Quantity
from bench.stage import Part, Section, Stage
from bench.yardstick import PAYLOAD, Bare

MESSAGES = 50_000
# What is asked of those whose bare loop is fast; of the others it is half of their bare loop.
FAST = 15_000
# As many as a worker may have under way to one broker.
MOST_UNACKNOWLEDGED = 2000


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


def to_redis(stage: Stage) -> Iterator[Figure]:
    """XADD in pipelines of 100, as many as a delivery of a worker has."""
    with Redis(stage.cluster.folder / "redis", "--appendonly", "no") as server, redis.Redis(port=server.port) as client:

        def send(count: int) -> None:
            client.delete("orders")
            for start in range(0, count, 100):
                pipeline = client.pipeline(transaction=False)
                for n in range(start, min(count, start + 100)):
                    fields = {"message_id": str(uuid.uuid4()), "payload": body(n), "attempt": 1}
                    pipeline.xadd("orders", {**fields, "created_at": "2026-11-17T12:00:00.123456+00:00"})
                assert len(pipeline.execute()) == min(count, start + 100) - start

        config = {"host": "127.0.0.1", "port": server.port, "stream_key": "orders"}
        yield from compare(stage, Broker("redis", config, send), is_fast=True)


def to_mqtt(stage: Stage) -> Iterator[Figure]:
    """QoS 1 with the same properties, as many in flight as the broker takes."""
    with Mosquitto(stage.cluster.folder / "mosquitto") as broker:

        def send(count: int) -> None:
            client = make_client("bare")
            left = count
            outstanding = 0

            def acknowledged(*_: Any) -> None:
                nonlocal left, outstanding
                left -= 1
                outstanding -= 1

            client.on_publish = acknowledged
            client.connect("127.0.0.1", broker.port)
            while not client.is_connected():
                client.loop(0.1)
            for n in range(count):
                properties = Properties(PacketTypes.PUBLISH)
                properties.ContentType = "application/json"
                properties.UserProperty = [
                    ("ulak-message-id", str(uuid.uuid4())),
                    ("ulak-attempt", "1"),
                    ("ulak-created-at", "2026-11-17T12:00:00.123456+00:00"),
                ]
                client.publish("orders", body(n), 1, properties=properties)
                outstanding += 1
                while outstanding >= 200:
                    client.loop(0.1)
            while left:
                client.loop(0.1)
            client.disconnect()

        config = {"broker": "127.0.0.1", "port": broker.port, "topic": "orders"}
        yield from compare(stage, Broker("mqtt", config, send), is_fast=False)


def to_kafka(stage: Stage) -> Iterator[Figure]:
    """Idempotent, with the same headers, and the reports fetched as they come."""
    with Kafka() as cluster:
        topic = cluster.create_topic("orders", 4)

        def send(count: int) -> None:
            producer = Producer(
                {"bootstrap.servers": cluster.broker, "enable.idempotence": True, "linger.ms": 0, "log_level": 0}
            )
            left = count

            def reported(error: Any, _: Any) -> None:
                nonlocal left
                assert error is None
                left -= 1

            for n in range(count):
                headers = [
                    ("ulak-message-id", str(uuid.uuid4())),
                    ("ulak-attempt", "1"),
                    ("content-type", "application/json"),
                    ("ulak-created-at", "2026-11-17T12:00:00.123456+00:00"),
                ]
                producer.produce(topic, body(n), headers=headers, on_delivery=reported)
                producer.poll(0)
            while left:
                producer.poll(0.1)

        yield from compare(stage, Broker("kafka", {"broker": cluster.broker, "topic": topic}, send), is_fast=True)


def to_nats(stage: Stage) -> Iterator[Figure]:
    """Into a stream of JetStream on disk. The bare loop is the usual client's, with as many unacknowledged as a worker may
    have. ulak speaks the protocol itself: its own client without a database, and a socket that only counts
    acknowledgements, are shown beside it."""
    with Nats(stage.cluster.folder / "nats") as server:
        server.create_stream("ORDERS", "orders")
        config = {"url": server.url, "subject": "orders"}

        def purged(send: Callable[[int], None]) -> Callable[[int], None]:
            def send_to_empty_stream(count: int) -> None:
                with server.client() as client:
                    client.api("STREAM.PURGE.ORDERS", {})
                send(count)

            return send_to_empty_stream

        def usual(count: int) -> None:
            asyncio.run(_publish_by_nats_py(server.url, count))

        def own(count: int) -> None:
            _publish_by_own_client(config, count)

        def counted(count: int) -> None:
            _publish_and_count(server.port, count)

        yield from compare(stage, Broker("nats", config, purged(usual)), is_fast=True)
        count = stage.scaled(MESSAGES, 500)
        for name, send in ("ulak's client without a database", own), ("a socket that counts acknowledgements", counted):
            bare = bare_loop(Broker("nats", config, purged(send)), count)
            yield Figure(
                f"nats: {name}, {count:,} messages",
                Quantity(bare.rate, "/s"),
                Quantity(bare.processor * 1e6 / count, "us", "of processor each"),
            )


async def _publish_by_nats_py(url: str, count: int) -> None:
    connection = await nats.connect(url)
    stream = connection.jetstream(publish_async_max_pending=MOST_UNACKNOWLEDGED)
    acknowledged = []
    for n in range(count):
        message_id = str(uuid.uuid4())
        headers = {
            "Nats-Msg-Id": message_id,
            "ulak-message-id": message_id,
            "ulak-attempt": "1",
            "content-type": "application/json",
            "ulak-created-at": "2026-11-17T12:00:00.123456+00:00",
        }
        acknowledged.append(await stream.publish_async("orders", body(n), headers=headers))
    await stream.publish_async_completed()
    assert all(each.exception() is None for each in acknowledged)
    await connection.close()


def _publish_by_own_client(config: dict[str, Any], count: int) -> None:
    dispatcher = Dispatcher(transports(SETTINGS, "bare", MOST_UNACKNOWLEDGED, print, time.time))
    endpoint = dispatcher.parse(EndpointConfig(1, "orders", 1, config, protocol="nats"))
    sent = left = count
    while left:
        while sent and left - sent + endpoint.batch_size <= MOST_UNACKNOWLEDGED:
            size = min(sent, endpoint.batch_size)
            dispatcher.start(endpoint, [_message(count - sent + n) for n in range(size)])
            sent -= size
        for each in dispatcher.step(1):
            assert each.outcome.error is None
            left -= len(each.messages)
    dispatcher.close()


def _message(n: int) -> Message:
    return Message(n, str(uuid.uuid4()), 1, body(n).decode(), created_at="2026-11-17 12:00:00.123456+00")


def _publish_and_count(port: int, count: int) -> None:
    with socket.create_connection(("127.0.0.1", port)) as opened:
        opened.recv(65536)
        opened.sendall(b'CONNECT {"verbose": false, "headers": true, "no_responders": true}\r\nSUB bare 1\r\n')
        left, sent, data = count, 0, b""
        while left:
            pieces = []
            while sent < count and sent - (count - left) < MOST_UNACKNOWLEDGED:
                given = body(sent)
                head = (
                    b"NATS/1.0\r\nNats-Msg-Id: %b\r\nulak-message-id: %b\r\nulak-attempt: 1\r\n"
                    b"content-type: application/json\r\nulak-created-at: 2026-11-17T12:00:00.123456+00:00\r\n\r\n"
                ) % ((str(uuid.uuid4()).encode(),) * 2)
                sizes = len(head), len(head) + len(given)
                pieces.append(b"HPUB orders bare %d %d\r\n%b%b\r\n" % (*sizes, head, given))
                sent += 1
            opened.sendall(b"".join(pieces))
            # One may be cut in two.
            data = data[-4:] + opened.recv(65536)
            assert b'"error"' not in data
            left -= data.count(b'"seq"')


SECTIONS: dict[str, Section] = {
    "kafka": to_kafka,
    "redis": to_redis,
    "mqtt": to_mqtt,
    "amqp": to_amqp,
    "nats": to_nats,
}

PART = Part(
    "Delivery to brokers on the same machine, messages of 200 bytes, default settings of ulak; processor: of the worker, with "
    "its start",
    SECTIONS,
)
