"""What the worker may rely on, whatever the transport. A new transport needs a case here."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import pytest
from support.deliveries import SETTINGS, settle_all
from support.kafka import Kafka
from support.mosquitto import Mosquitto, Subscriber
from support.nats import Nats
from support.rabbitmq import RabbitMQ
from support.receiver import Receiver
from support.redis import Redis
from support.sessions import PATIENCE
from ulak.messages.delivery import ConfigError, Endpoint, EndpointConfig, Message, Settled
from ulak.transports.dispatcher import Dispatcher
from ulak.transports.registry import transports


@dataclass
class Case:
    """A transport with a receiver that takes everything."""

    protocol: str
    config: dict[str, Any]
    dispatcher: Dispatcher
    # How many messages have arrived.
    arrived: Callable[[], int]
    # A config that parse() refuses.
    bad: dict[str, Any]
    lines: list[str] = field(default_factory=list)

    def endpoint(self, **config: Any) -> Endpoint:
        return self.dispatcher.parse(EndpointConfig(7, "orders", 3, {**self.config, **config}, protocol=self.protocol))

    def settle(self) -> list[Settled]:
        return settle_all(self.dispatcher)


@pytest.fixture(params=sorted(transports(SETTINGS, "1.0", 8, print, time.time)))
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    with ExitStack() as resources:
        lines: list[str] = []
        dispatcher = Dispatcher(transports(SETTINGS, "1.0", 8, lines.append, time.time))
        resources.callback(dispatcher.close)
        yield CASES[request.param](dispatcher, lines, request.getfixturevalue, resources)


def http(dispatcher: Dispatcher, lines: list[str], fixture: Any, resources: ExitStack) -> Case:
    receiver: Receiver = fixture("receiver")
    return Case("http", {"url": receiver.url}, dispatcher, lambda: len(receiver.requests), {"url": "ftp://x"})


def log(dispatcher: Dispatcher, lines: list[str], fixture: Any, resources: ExitStack) -> Case:
    return Case("log", {}, dispatcher, lambda: len(lines), {"max_bytes": -1}, lines)


def amqp(dispatcher: Dispatcher, lines: list[str], fixture: Any, resources: ExitStack) -> Case:
    broker: RabbitMQ = fixture("rabbitmq")
    broker.declare("contract")
    resources.callback(broker.delete, "contract")
    config = broker.config(exchange="contract", routing_key="a")
    return Case("amqp", config, dispatcher, lambda: broker.depth("contract"), {"host": "127.0.0.1"})


def mqtt(dispatcher: Dispatcher, lines: list[str], fixture: Any, resources: ExitStack) -> Case:
    broker: Mosquitto = fixture("mosquitto")
    subscriber = resources.enter_context(Subscriber(broker, "contract"))
    config = {"broker": "127.0.0.1", "port": broker.port, "topic": "contract"}
    # It gets them after they were acknowledged.
    return Case("mqtt", config, dispatcher, lambda: len(subscriber.wait_for(50)), {**config, "topic": "a/#"})


def nats(dispatcher: Dispatcher, lines: list[str], fixture: Any, resources: ExitStack) -> Case:
    server: Nats = fixture("nats")
    stream = server.create_stream(f"contract-{uuid4().hex}", "contract")
    resources.callback(server.delete_stream, stream)
    config = {"url": server.url, "subject": "contract", "stream": stream}
    return Case("nats", config, dispatcher, lambda: server.count(stream), {**config, "subject": "a.>"})


def redis(dispatcher: Dispatcher, lines: list[str], fixture: Any, resources: ExitStack) -> Case:
    server: Redis = fixture("redis_server")
    resources.callback(server.reset)
    config = {"host": "127.0.0.1", "port": server.port, "stream_key": "orders"}
    return Case("redis", config, dispatcher, lambda: len(server.entries("orders")), {**config, "minid": "yesterday"})


def kafka(dispatcher: Dispatcher, lines: list[str], fixture: Any, resources: ExitStack) -> Case:
    cluster: Kafka = fixture("kafka")
    topic = cluster.create_topic(f"contract-{uuid4()}")
    config = {"broker": cluster.broker, "topic": topic}
    return Case("kafka", config, dispatcher, lambda: len(cluster.read(topic, 50)), {**config, "broker": "nowhere"})


CASES: dict[str, Callable[..., Case]] = {
    "http": http,
    "log": log,
    "amqp": amqp,
    "kafka": kafka,
    "mqtt": mqtt,
    "nats": nats,
    "redis": redis,
}


def message(number: int, payload: str = '{"order": 1}', **fields: Any) -> Message:
    return Message(number, f"0190a5d2-5b9e-7000-8000-{number:012d}", 1, payload, **fields)


def test_each_delivery_arrives_and_is_settled_once(case: Case) -> None:
    endpoint = case.endpoint()
    for number in range(50):
        case.dispatcher.start(endpoint, [message(number)])

    settled = case.settle()

    assert sorted(each.messages[0].id for each in settled) == list(range(50))
    assert {(each.endpoint_id, each.outcome.error) for each in settled} == {(7, None)}
    assert case.arrived() == 50


def test_an_endpoint_is_what_the_worker_has_to_know(case: Case) -> None:
    endpoint = case.endpoint(max_in_flight=5)

    assert endpoint[:4] == (7, "orders", 3, case.protocol)
    assert endpoint.batch_size >= 1
    assert endpoint.max_in_flight == 5
    assert 0 < endpoint.longest < 3 * PATIENCE


def test_messages_are_grouped_in_their_order_and_within_the_batch_size(case: Case) -> None:
    endpoint = case.endpoint()
    messages = [message(number) for number in range(10)]

    groups = case.dispatcher.group(endpoint, messages)

    assert [each for group in groups for each in group] == messages
    assert max(len(group) for group in groups) <= endpoint.batch_size


@pytest.mark.parametrize("config", ["bad", None], ids=["bad", "unreadable"])
def test_a_config_that_cannot_be_used_is_an_error_of_that_config(case: Case, config: str | None) -> None:
    given = case.bad if config == "bad" else None

    with pytest.raises(ConfigError):
        case.dispatcher.parse(EndpointConfig(1, "bad", 1, given, protocol=case.protocol))


def test_a_message_that_cannot_be_read_fails_for_good_and_the_others_arrive(case: Case) -> None:
    endpoint = case.endpoint()
    case.dispatcher.start(endpoint, [message(1, "", problem="it can't be read: too large")])
    case.dispatcher.start(endpoint, [message(2)])

    outcomes = {each.messages[0].id: each.outcome for each in case.settle()}

    assert outcomes[1].error == "[PERMANENT] message: it can't be read: too large"
    assert outcomes[2].error is None


def test_whatever_a_message_holds_starting_it_raises_nothing(case: Case) -> None:
    endpoint = case.endpoint()
    awkward = [
        message(1, '"\u2028 \u202e caf\u00e9 \U0001f600"'),
        message(2, headers="[]"),
        message(3, headers='{"x": "a\\nb"}'),
        message(4, headers="not json"),
        message(5, "[" * 10_000 + "]" * 10_000, headers="[" * 100_000),
    ]
    for each in awkward:
        case.dispatcher.start(endpoint, [each])

    settled = case.settle()

    assert len(settled) == len(awkward)


def test_nothing_under_way_is_nothing_to_wait_for(case: Case) -> None:
    case.endpoint()

    assert case.dispatcher.in_flight == 0
    assert case.dispatcher.step(0) == []


def test_a_protocol_without_a_transport_is_an_error_of_the_config() -> None:
    dispatcher = Dispatcher({})

    with pytest.raises(ConfigError, match="no worker delivers protocol pull"):
        dispatcher.parse(EndpointConfig(1, "orders", 1, {}, protocol="pull"))
