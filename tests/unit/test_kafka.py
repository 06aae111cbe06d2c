"""The Kafka producer as a connection of the worker, against a real cluster."""

from __future__ import annotations

import ctypes
import gc
import itertools
import select
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from copy import copy
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from confluent_kafka import KafkaError
from support.deliveries import settle_all
from support.kafka import PRODUCE, Kafka, Relay
from support.sessions import wait_until
from ulak.messages.delivery import ConfigError, Endpoint, EndpointConfig, Message, Settled
from ulak.safety import hosts
from ulak.safety.address import Guard
from ulak.sessions.signals import BACKEND_SIGNALS
from ulak.transports.broker.target import Defaults
from ulak.transports.broker.transport import BrokerTransport
from ulak.transports.dispatcher import Dispatcher
from ulak.transports.kafka import librdkafka, reach, verdict
from ulak.transports.kafka.connection import KafkaConnection
from ulak.transports.kafka.librdkafka import Problem, Producer, Record
from ulak.transports.kafka.target import Target
from ulak.transports.transport import Descriptors

ALL = Guard(allow_internal=True)
DEFAULTS = Defaults("1.0", 5.0, "/ulak")
# Of a topic that wasn't created: as many as this cluster gives it.
PARTITIONS = 4


class Stage:
    def __init__(self, broker: str, guard: Guard = ALL) -> None:
        self.broker = broker
        self.topic = f"unit-{uuid4()}"
        self.dispatcher = Dispatcher({"kafka": lambda descriptors: self._make(descriptors, guard)})

    def _make(self, descriptors: Descriptors, guard: Guard) -> BrokerTransport:
        self.transport = BrokerTransport(Target, KafkaConnection, descriptors, guard, DEFAULTS)
        return self.transport

    def endpoint(self, version: int = 1, **config: Any) -> Endpoint:
        given = {"broker": self.broker, "topic": self.topic, **config}
        return self.dispatcher.parse(EndpointConfig(7, "bus", version, given, protocol="kafka"))

    def settle(self, endpoint: Endpoint, *messages: Message) -> list[Settled]:
        self.dispatcher.start(endpoint, messages)
        return settle_all(self.dispatcher)

    def errors(self, endpoint: Endpoint, *messages: Message) -> list[str | None]:
        return [each.outcome.of(one).error for each in self.settle(endpoint, *messages) for one in each.messages]

    @property
    def connection(self) -> KafkaConnection:
        (found,) = self.transport._connections.values()
        assert isinstance(found, KafkaConnection)
        return found


@pytest.fixture
def silent() -> Iterator[str]:
    """A broker that accepts connections and never sends anything."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"127.0.0.1:{listening.getsockname()[1]}"


@pytest.fixture
def stage(kafka: Kafka) -> Iterator[Stage]:
    stage = Stage(kafka.broker)
    yield stage
    stage.dispatcher.close()


def message(number: int, **fields: Any) -> Message:
    return Message(number, f"id-{number}", 1, f'"{number}"', **fields)


def parsed(**config: Any) -> Target:
    given = {"broker": "a:1", "topic": "t", **config}
    return Target(EndpointConfig(1, "bus", 1, given, secrets=["from the table"]), DEFAULTS)


def break_producer(link: KafkaConnection) -> None:
    """As if the cluster had refused the order of its messages."""
    assert link._producer is not None
    library = ctypes.CDLL(librdkafka.NAME)
    handle = ctypes.c_void_p(link._producer._handle)
    library.rd_kafka_test_fatal_error(handle, KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER, b"a test")


def threads() -> dict[str, int]:
    """Of librdkafka in this process, and the signals that each holds back, as a set of bits."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):
            lines = (task / "status").read_text().splitlines()
            fields = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
            if fields["Name"].startswith("rdk:"):
                found[task.name] = int(fields["SigBlk"], 16)
    return found


def test_a_producer_has_the_options_of_the_config_and_fixed_ones() -> None:
    made = parsed(options={"linger.ms": "7", "delivery.timeout.ms": 2000, "request.required.acks": -1})

    assert made.properties["linger.ms"] == "7"
    assert made.properties["message.timeout.ms"] == 2000
    assert made.properties["acks"] == "all"
    assert made.properties["enable.idempotence"] is True
    assert "delivery.timeout.ms" not in made.properties and "request.required.acks" not in made.properties
    # So that librdkafka is always the first to give up.
    assert made.timeout > made.connect_timeout + 2


@pytest.mark.parametrize(
    "config",
    [{"broker": "a"}, {"broker": ""}, {"broker": "a:1,"}, {"topic": ""}, {"topic": "a b"}, {"topic": "a{"}],
)
def test_a_config_that_cannot_be_used_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        parsed(**config)


def test_brokers_are_a_list_or_a_text() -> None:
    assert parsed(broker="a:1, b:2").brokers == (("a", 1), ("b", 2))
    assert parsed(broker=["a:1", "[::1]:2"]).brokers == (("a", 1), ("::1", 2))


def test_secrets_of_the_options_are_masked() -> None:
    made = parsed(options={"sasl.password": "open sesame", "ssl.key.password": "key to it"})

    assert made.mask.hide("open sesame, key to it, from the table") == "****, ****, ****"


def test_brokers_that_are_a_secret_are_masked_one_by_one() -> None:
    given = {"broker": "kafka1:9092,kafka2:9092", "topic": "t"}
    made = Target(EndpointConfig(1, "bus", 1, given, secrets=[given["broker"]]), DEFAULTS)

    assert made.mask.hide("kafka2:9092: Failed to resolve 'kafka2'") == "****: Failed to resolve '****'"


@pytest.mark.parametrize(
    ("code", "prefix"),
    [
        (KafkaError.MSG_SIZE_TOO_LARGE, "[PERMANENT]"),
        (KafkaError.TOPIC_EXCEPTION, "[PERMANENT]"),
        (KafkaError._MSG_TIMED_OUT, "[RETRYABLE]"),
        (KafkaError.TOPIC_AUTHORIZATION_FAILED, "[RETRYABLE]"),
        (KafkaError._AUTHENTICATION, "[RETRYABLE]"),
        (KafkaError._UNKNOWN_TOPIC, "[RETRYABLE]"),
        (KafkaError.NOT_ENOUGH_REPLICAS, "[RETRYABLE]"),
    ],
)
def test_an_error_is_permanent_if_waiting_does_not_help(code: int, prefix: str) -> None:
    assert verdict.prefix(librdkafka.problem(code)) == prefix


def test_errors_have_the_codes_and_the_words_of_librdkafka() -> None:
    codes = {name.lstrip("_"): code for name, code in vars(verdict).items() if isinstance(code, int)}

    assert len(codes) == 17
    for name, code in codes.items():
        known = KafkaError(code)
        assert librdkafka.problem(code) == Problem(code, known.name(), known.str())
        assert known.name().lstrip("_") == name


def test_no_signal_of_postgresql_enters_a_thread_of_librdkafka(stage: Stage) -> None:
    assert stage.errors(stage.endpoint(), message(1)) == [None]

    masks = threads()
    assert masks
    for signal in BACKEND_SIGNALS:
        assert all(mask >> (signal - 1) & 1 for mask in masks.values())


def test_a_producer_leaves_nothing_behind(kafka: Kafka) -> None:
    wait_until(lambda: not threads(), message="those of other tests")
    stage = Stage(kafka.broker)
    endpoint = stage.endpoint()
    assert stage.errors(endpoint, message(1)) == [None]
    assert threads()
    kafka.hang()
    stage.dispatcher.start(endpoint, [message(2)])

    stage.dispatcher.close()

    wait_until(lambda: not threads(), message="the end of its threads")


def test_so_does_one_that_never_reached_its_cluster(silent: str) -> None:
    stage = Stage(silent)
    endpoint = stage.endpoint(options={"socket.connection.setup.timeout.ms": 1000})
    stage.dispatcher.start(endpoint, [message(1)])
    wait_until(lambda: [stage.dispatcher.step(0), threads()][1], message="a producer")

    stage.dispatcher.close()

    wait_until(lambda: not threads(), "the end of its threads")


def test_a_cluster_that_does_not_answer_is_given_up_in_time(silent: str) -> None:
    stage = Stage(silent)
    endpoint = stage.endpoint(options={"socket.connection.setup.timeout.ms": 1000})

    (error,) = stage.errors(endpoint, message(1))

    assert error is not None and silent in error
    assert error.startswith(("[RETRYABLE] network: ", "[RETRYABLE] timeout: "))
    stage.dispatcher.close()


def test_one_broker_of_several_is_enough(kafka: Kafka, stage: Stage) -> None:
    endpoint = stage.endpoint(broker=["127.0.0.1:1", "nowhere.invalid:9092", kafka.broker])

    assert stage.errors(endpoint, message(1)) == [None]


def test_an_unknown_host_name_is_in_the_error(stage: Stage) -> None:
    (error,) = stage.errors(stage.endpoint(broker="nowhere.invalid:9092"), message(1))

    assert error == "[RETRYABLE] resolve: nowhere.invalid:9092: the name has no address"


def test_an_option_that_librdkafka_refuses_is_an_error_of_the_config(stage: Stage) -> None:
    (error,) = stage.errors(stage.endpoint(options={"ssl.curves.list": "?", "security.protocol": "ssl"}), message(1))

    assert error is not None and error.startswith("[RETRYABLE] config: ")


def test_a_broker_that_the_cluster_names_later_is_judged_too(kafka: Kafka) -> None:
    with Relay(kafka) as relay:
        stage = Stage(relay.broker, Guard(allowed=["127.0.0.1/32"]))
        endpoint = stage.endpoint(options={"topic.metadata.refresh.interval.ms": 1000})
        assert stage.errors(endpoint, message(1)) == [None]

        relay.advertised_host = "127.0.0.2"
        told = (error for n in itertools.count(2) for error in stage.errors(endpoint, message(n)))
        error = next(filter(None, told))

    assert error.startswith("[PERMANENT] blocked: the cluster names broker 127.0.0.2:")
    stage.dispatcher.close()


def test_a_name_that_resolves_to_another_address_for_librdkafka_is_not_dialled(
    kafka: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reach, "_addresses", lambda *_: ["192.88.1.1"])
    with Relay(kafka) as relay:
        stage = Stage(f"localhost:{relay.port}", Guard())
        # By its name: a certificate is for that.
        endpoint = stage.endpoint(options={"security.protocol": "ssl"})
        (error,) = stage.errors(endpoint, message(1))

    assert error is not None and error.startswith(f"[PERMANENT] blocked: localhost:{relay.port}: address ")
    assert "is blocked (loopback" in error
    assert relay.connections == 0
    stage.dispatcher.close()


@pytest.mark.parametrize(
    ("broker", "address", "told"),
    [
        ("a.example.com:9092", "192.88.1.1", None),
        (
            "a.example.com:9092",
            "127.0.0.1",
            "blocked: the cluster names broker a.example.com:9092: address 127.0.0.1 is",
        ),
        ("b.test:9092", "192.88.1.1", "config: the cluster names broker b.test:9092: host b.test is not listed"),
        # What servers() has found is a host of the config.
        ("192.88.1.2:9092", "192.88.1.2", None),
        ("192.88.1.2:9092", "10.0.0.1", "blocked: 192.88.1.2:9092: address 10.0.0.1 is blocked"),
        ("192.88.1.2:9093", "192.88.1.2", "config: the cluster names broker 192.88.1.2:9093: host 192.88.1.2 is"),
        # As addresses of version 6 come, from a cluster and from us.
        ("::1:9092", "::1", "config: the cluster names broker ::1:9092: host ::1 is not listed"),
        ("[::1]:9092", "::1", "config: the cluster names broker [::1]:9092: host ::1 is not listed"),
        # Of such hosts librdkafka would dial b.test, or nothing.
        (
            "[b.test]x.example.com:9092",
            "192.88.1.1",
            "config: the cluster names broker [b.test]x.example.com:9092: its host",
        ),
        (
            "b.test:1]x.example.com:9092",
            "192.88.1.1",
            "config: the cluster names broker b.test:1]x.example.com:9092: its host",
        ),
        (
            "b.test\n.example.com:9092",
            "192.88.1.1",
            "config: the cluster names broker b.test\n.example.com:9092: its host",
        ),
        ("x.example.com", "192.88.1.1", "config: the cluster names broker x.example.com: its host"),
        ("", "192.88.1.1", "config: the cluster names broker : its host"),
    ],
)
def test_the_gate_judges_the_host_and_the_address(broker: str, address: str, told: str | None) -> None:
    listed = hosts.allowed("*.example.com")
    gate = reach.Gate(Guard(hosts=listed), {"192.88.1.2:9092": "a.example.com"})

    assert gate.may_dial(broker, address) is (told is None)
    assert [text.startswith(told or "?") for text, _ in gate.refusals] == ([] if told is None else [True])


def test_a_judge_that_fails_lets_nothing_pass(kafka: Kafka) -> None:
    asked = threading.Event()

    def fail(*_: str) -> bool:
        asked.set()
        raise ZeroDivisionError

    with Relay(kafka) as relay:
        producer = Producer({"log_level": 0}, fail)
        producer.dial(relay.broker)
        assert producer.produce(Record(b"t", b"1", None, []), -1, 1) is None
        wait_until(asked.is_set, "the judge")
        wait_until(lambda: any(not number for number, _ in producer.poll()), "an error")

    assert relay.connections == 0
    producer.ending()()


def test_a_producer_that_is_dropped_ends() -> None:
    before = set(threads())
    producer = Producer({"log_level": 0}, lambda *_: True)
    producer.dial("127.0.0.1:1")
    its_own = set(threads()) - before
    assert its_own

    del producer
    gc.collect()

    wait_until(lambda: not its_own & set(threads()), "the end of its threads")


@pytest.mark.parametrize("key", [None, b"", b"k\0k"])
@pytest.mark.parametrize("value", [b"", b"\0", b"x" * 100_000])
@pytest.mark.parametrize("headers", [0, 1, 40])
def test_a_record_arrives_as_it_is(kafka: Kafka, value: bytes, key: bytes | None, headers: int) -> None:
    topic = kafka.create_topic(f"unit-{uuid4()}", 3)
    producer = Producer({"log_level": 0}, lambda *_: True)
    producer.dial(kafka.broker)
    given = [(f"h\u00e9{n}".encode(), f"{n}\0\u00e9".encode() * (n % 3)) for n in range(headers)]

    for number in (1, 2):
        assert producer.produce(Record(topic.encode(), value, key, given), 2, number) is None
    reports: list[Any] = []
    wait_until(lambda: [reports.extend(producer.poll()), len(reports) == 2][1], "both reports")

    assert reports == [(1, None), (2, None)]
    for found in kafka.read(topic, 2, 3):
        # The reader takes an empty key for none.
        assert (found.partition, found.value, (found.key or "").encode()) == (2, value, key or b"")
        assert [(name.encode(), text.encode()) for name, text in found.headers.items()] == given
    producer.ending()()


def test_a_header_whose_name_librdkafka_would_cut_fails_its_message(stage: Stage) -> None:
    errors = stage.errors(stage.endpoint(), message(1, headers='{"x\\u0000y": "1"}'), message(2))

    assert errors == ["[PERMANENT] message: it can't be built: ValueError", None]


def test_a_message_whose_topic_cannot_be_made_needs_no_cluster(silent: str) -> None:
    stage = Stage(silent)
    endpoint = stage.endpoint(topic="orders.{kind}")

    (error,) = stage.errors(endpoint, message(1))

    assert error == "[PERMANENT] message: the message's metadata has no kind, which topic asks for"
    stage.dispatcher.close()


def test_each_message_of_a_delivery_has_its_own_outcome(stage: Stage) -> None:
    endpoint = stage.endpoint(options={"message.max.bytes": 5000})
    large = Message(2, "id-2", 1, '"' + "x" * 10_000 + '"')

    errors = stage.errors(endpoint, message(1), large, message(3, problem="can't be read"), message(4))

    assert errors[0] is None and errors[3] is None
    assert errors[1] is not None and errors[1].startswith("[PERMANENT] message: kafka: ")
    assert errors[2] == "[PERMANENT] message: can't be read"


def test_more_than_librdkafka_takes_is_tried_again(kafka: Kafka, stage: Stage) -> None:
    endpoint = stage.endpoint()
    assert stage.errors(endpoint, message(1)) == [None]
    cramped = copy(endpoint.target)
    cramped.properties = {**cramped.properties, "queue.buffering.max.messages": 1}
    kafka.slow_down(100)

    errors = stage.errors(endpoint._replace(target=cramped, config_version=2), message(2), message(3))

    assert errors[0] is None
    assert errors[1] is not None and errors[1].startswith("[RETRYABLE] kafka: ") and "as many messages" in errors[1]


def test_what_was_not_acknowledged_in_time_says_why(kafka: Kafka, stage: Stage) -> None:
    endpoint = stage.endpoint(options={"message.timeout.ms": 1000})
    assert stage.errors(endpoint, message(1)) == [None]
    kafka.down()

    (error,) = stage.errors(endpoint, message(2))

    assert error is not None and error.startswith(f"[RETRYABLE] kafka: {kafka.broker}: ")
    assert "(_MSG_TIMED_OUT): " in error and "Connection refused" in error


def test_an_error_of_before_is_not_the_reason_of_a_later_one(kafka: Kafka, stage: Stage) -> None:
    endpoint = stage.endpoint()
    assert stage.errors(endpoint, message(1)) == [None]
    kafka.down()
    stage.dispatcher.start(endpoint, [message(2)])
    wait_until(lambda: [stage.dispatcher.step(0), stage.connection._errors][1], message="an error")
    kafka.up()

    stage.settle(endpoint, message(3))

    assert not stage.connection._errors


def test_a_producer_that_cannot_go_on_is_replaced(kafka: Kafka, stage: Stage) -> None:
    endpoint = stage.endpoint()
    assert stage.errors(endpoint, message(1)) == [None]
    first = stage.connection
    kafka.fail(PRODUCE, KafkaError.NOT_ENOUGH_REPLICAS)
    stage.dispatcher.start(endpoint, [message(2)])
    break_producer(first)

    ((settled,), (error,)) = settle_all(stage.dispatcher), stage.errors(endpoint, message(3))

    assert str(settled.outcome.error).startswith("[RETRYABLE] kafka: ") and "a test (OUT_OF_ORDER" in str(
        settled.outcome.error
    )
    assert error is None
    assert stage.connection is not first


def test_one_that_cannot_go_on_while_it_is_idle_fails_nothing(kafka: Kafka, stage: Stage) -> None:
    endpoint = stage.endpoint()
    assert stage.errors(endpoint, message(1)) == [None]
    first = stage.connection
    break_producer(first)

    assert stage.errors(endpoint, message(2)) == [None]
    assert stage.connection is not first


def test_a_new_config_has_a_producer_of_its_own(kafka: Kafka, stage: Stage) -> None:
    wait_until(lambda: not threads(), message="the end of those of other tests")
    assert stage.errors(stage.endpoint(), message(1)) == [None]
    first, its_threads = stage.connection, set(threads())

    assert stage.errors(stage.endpoint(version=2), message(2)) == [None]

    assert stage.connection is not first
    wait_until(lambda: not its_threads & set(threads()), message="the end of the first")


def test_a_partition_that_is_not_there_yet_is_tried_again(kafka: Kafka, stage: Stage) -> None:
    kafka.create_topic(stage.topic, 2)

    assert stage.errors(stage.endpoint(partition=1), message(1)) == [None]
    (error,) = stage.errors(stage.endpoint(version=2, partition=2), message(2))

    assert error is not None and error.startswith("[RETRYABLE] kafka: ") and "_UNKNOWN_PARTITION" in error


def test_what_was_acknowledged_before_a_refusal_is_delivered(kafka: Kafka, stage: Stage) -> None:
    endpoint = stage.endpoint()
    assert stage.errors(endpoint, message(1)) == [None]
    link = stage.connection
    assert link._producer is not None and link._gate is not None
    stage.dispatcher.start(endpoint, [message(2)])
    # The cluster has it, and the report hasn't been read.
    descriptor = link._producer.descriptor
    wait_until(lambda: select.select([descriptor], [], [], 0)[0], message="the report")
    link._gate.may_dial("not a broker", "127.0.0.1")

    link.guarded(link.hear)

    assert link.is_lost
    assert [each.outcome.error for each in stage.transport._settled] == [None]


def test_a_worker_waits_for_reports_without_looking_for_them(kafka: Kafka, stage: Stage) -> None:
    endpoint = stage.endpoint(options={"message.timeout.ms": 300_000})
    assert stage.errors(endpoint, message(1)) == [None]
    kafka.hang()
    stage.dispatcher.start(endpoint, [message(2)])
    stage.dispatcher.step(0)

    left = stage.transport.timeout()
    kafka.go_on()

    assert left is not None and left > 200
    assert [each.outcome.error for each in settle_all(stage.dispatcher)] == [None]
