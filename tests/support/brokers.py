"""A real broker of each protocol behind one interface, for what must be true of all of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from support.kafka import Kafka
from support.mosquitto import Mosquitto, Subscriber
from support.nats import Nats
from support.rabbitmq import RabbitMQ
from support.redis import Redis

PROTOCOLS = ("amqp", "kafka", "mqtt", "nats", "redis")
# As pytest's getfixturevalue().
Fixture = Callable[[str], Any]


@dataclass
class Broker:
    protocol: str
    # Of an endpoint: a place of its own within the broker, which takes everything.
    config: dict[str, Any]
    # The key by which the config names that place.
    route: str
    host: str
    port: int
    # Payloads in the order of their arrival, at least this many, if they come in time.
    read: Callable[[int], list[Any]]
    hang: Callable[[], object]
    go_on: Callable[[], object]

    def at(self, port: int) -> dict[str, Any]:
        """The config with another port."""
        if self.protocol == "kafka":
            return {**self.config, "broker": f"127.0.0.1:{port}"}
        if self.protocol == "nats":
            return {**self.config, "url": f"nats://127.0.0.1:{port}"}
        return {**self.config, "port": port}


def patience(protocol: str, seconds: float) -> dict[str, Any]:
    """How long a connection, and then a message, may take, as a config."""
    if protocol == "kafka":
        milliseconds = int(1000 * seconds)
        # librdkafka's own bounds.
        setup = min(max(milliseconds, 1000), 60_000)
        return {"options": {"socket.connection.setup.timeout.ms": setup, "message.timeout.ms": milliseconds}}
    if protocol == "redis":
        return {"connect_timeout": seconds, "command_timeout": seconds}
    return {"timeout": seconds}


def broker(protocol: str, fixture: Fixture, resources: ExitStack) -> Broker:
    return _MAKERS[protocol](fixture, resources, f"place-{uuid4().hex[:12]}")


def _amqp(fixture: Fixture, resources: ExitStack, place: str) -> Broker:
    rabbitmq: RabbitMQ = fixture("rabbitmq")
    rabbitmq.declare(place)
    resources.callback(rabbitmq.delete, place)
    found: list[Any] = []

    def read(_: int) -> list[Any]:
        # It has confirmed what is in the queue.
        found.extend(json.loads(each.body) for each in rabbitmq.take(place))
        return found

    config = rabbitmq.config(exchange=place, routing_key="orders")
    resources.callback(rabbitmq.resume)
    return Broker("amqp", config, "routing_key", rabbitmq.host, rabbitmq.port, read, rabbitmq.pause, rabbitmq.resume)


def _kafka(fixture: Fixture, resources: ExitStack, place: str) -> Broker:
    kafka: Kafka = fixture("kafka")
    kafka.create_topic(place)

    def read(count: int) -> list[Any]:
        return [json.loads(each.value) for each in kafka.read(place, count)]

    config = {"broker": kafka.broker, "topic": place}
    return Broker("kafka", config, "topic", "127.0.0.1", kafka.port, read, kafka.hang, kafka.go_on)


def _mqtt(fixture: Fixture, resources: ExitStack, place: str) -> Broker:
    mosquitto: Mosquitto = fixture("mosquitto")
    subscriber = resources.enter_context(Subscriber(mosquitto, place))
    resources.callback(mosquitto.go_on)

    def read(count: int) -> list[Any]:
        return [json.loads(each.payload) for each in subscriber.wait_for(count)]

    config = {"broker": "127.0.0.1", "port": mosquitto.port, "topic": place}
    return Broker("mqtt", config, "topic", "127.0.0.1", mosquitto.port, read, mosquitto.stop, mosquitto.go_on)


def _nats(fixture: Fixture, resources: ExitStack, place: str) -> Broker:
    server: Nats = fixture("nats")
    stream = server.create_stream(place, place, "ulak.ping")
    resources.callback(server.delete_stream, stream)
    resources.callback(server.go_on)

    def read(_: int) -> list[Any]:
        return [json.loads(each.payload) for each in server.stored(stream)]

    config = {"url": server.url, "subject": place}
    return Broker("nats", config, "subject", "127.0.0.1", server.port, read, server.stop, server.go_on)


def _redis(fixture: Fixture, resources: ExitStack, place: str) -> Broker:
    server: Redis = fixture("redis_server")
    resources.callback(server.reset)
    resources.callback(server.go_on)

    def read(_: int) -> list[Any]:
        return [json.loads(each["payload"]) for each in server.entries(place)]

    config = {"host": "127.0.0.1", "port": server.port, "stream_key": place}
    return Broker("redis", config, "stream_key", "127.0.0.1", server.port, read, server.stop, server.go_on)


_MAKERS: dict[str, Callable[[Fixture, ExitStack, str], Broker]] = {
    "amqp": _amqp,
    "kafka": _kafka,
    "mqtt": _mqtt,
    "nats": _nats,
    "redis": _redis,
}
