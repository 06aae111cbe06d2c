"""What all transports to brokers share, over real sockets: a protocol of one line per message, answered by one line."""

from __future__ import annotations

import functools
import select
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.deliveries import settle_all
from support.receiver import Certificate, Listener, make_certificate
from support.sessions import patience, wait_until
from support.stage import Clock
from ulak.messages.delivery import ConfigError, Endpoint, EndpointConfig, Message, MessageError, Settled
from ulak.safety.address import Guard
from ulak.safety.mask import Mask
from ulak.transports.broker import target as broker_target
from ulak.transports.broker import tls
from ulak.transports.broker.connection import Connection, Lost, Surroundings
from ulak.transports.broker.delivery import Delivery
from ulak.transports.broker.target import Address, Defaults
from ulak.transports.broker.transport import BrokerTransport
from ulak.transports.dispatcher import Dispatcher
from ulak.transports.transport import Descriptors


class Target(broker_target.Target):
    batch_size = 10

    def __init__(self, config: EndpointConfig, defaults: Defaults) -> None:
        super().__init__(config, defaults)
        self.address: Address = self.given["address"]
        self.connect_timeout = 30
        self.mask = Mask(["open sesame"])


class LineConnection(Connection):
    def __init__(self, endpoint: Endpoint, surroundings: Surroundings) -> None:
        super().__init__(endpoint, surroundings)
        self._asked: list[tuple[Delivery, Message]] = []
        self._line = b""

    def connected(self) -> None:
        self.write(b"hello\n")

    def received(self, data: bytes) -> None:
        *lines, self._line = (self._line + data).split(b"\n")
        for line in lines:
            if line == b"welcome":
                self.open()
                continue
            if line == b"again":
                self.dial_again()
                continue
            if line == b"go away":
                raise Lost("the broker says: open sesame")
            delivery, message = self._asked.pop(0)
            if line == b"taken":
                self.acknowledge(delivery, message)
            else:
                self.refuse(delivery, message, "[RETRYABLE]", line.decode())

    def encode(self, message: Message) -> bytes:
        if message.problem is not None:
            raise MessageError(message.problem)
        return message.payload.encode() + b"\n"

    def publish(self, delivery: Delivery, message: Message, encoded: bytes) -> None:
        self.write(encoded)
        self._asked.append((delivery, message))


class Broker(Listener):
    """Answers each line as told."""

    def __init__(self, certificate: Certificate | None = None, client_authority: Certificate | None = None) -> None:
        self.answer: Callable[[str], str | None] = lambda line: "welcome" if line == "hello" else "taken"
        self.lines: list[str] = []
        super().__init__(certificate=certificate)
        if client_authority is not None:
            assert self._context is not None
            self._context.verify_mode = ssl.CERT_REQUIRED
            self._context.load_verify_locations(client_authority.certificate)

    def serve(self, connection: socket.socket, number: int) -> None:
        for line in connection.makefile(encoding="utf-8"):
            self.lines.append(line.strip())
            answer = self.answer(line.strip())
            if answer == "close":
                return
            if answer is not None:
                connection.sendall(f"{answer}\n".encode())


@pytest.fixture
def broker() -> Iterator[Broker]:
    broker = Broker()
    yield broker
    broker.close()


ALL = Guard(allow_internal=True)


class Stage:
    """Time-outs pass when a test sets the clock forward."""

    def __init__(self, guard: Guard = ALL) -> None:
        self.clock = Clock()
        self.dispatcher = Dispatcher({"line": lambda descriptors: self._make(descriptors, guard)}, self.clock)

    def _make(self, descriptors: Descriptors, guard: Guard) -> BrokerTransport:
        defaults = Defaults("1.0", 60.0, "/ulak")
        self.transport = BrokerTransport(Target, LineConnection, descriptors, guard, defaults, self.clock)
        return self.transport

    def endpoint(self, port: int, host: str = "127.0.0.1", version: int = 1, **target: Any) -> Endpoint:
        context = target.pop("tls", None)
        given = {"address": Address(host, port, context), **target}
        return self.dispatcher.parse(EndpointConfig(7, "orders", version, given, protocol="line"))

    def settle(self) -> list[Settled]:
        return settle_all(self.dispatcher)

    def errors(self) -> list[str | None]:
        return [each.outcome.of(message).error for each in self.settle() for message in each.messages]

    def step_until(self, condition: Callable[[], bool]) -> None:
        wait_until(lambda: [self.dispatcher.step(0), condition()][1])

    @property
    def connection(self) -> LineConnection:
        found = self.transport._connections[7]
        assert isinstance(found, LineConnection)
        return found


@pytest.fixture
def stage() -> Iterator[Stage]:
    stage = Stage()
    yield stage
    stage.dispatcher.close()


def message(number: int, **fields: Any) -> Message:
    return Message(number, f"id-{number}", 1, f'"{number}"', **fields)


def test_deliveries_wait_for_the_connection_and_share_it(stage: Stage, broker: Broker) -> None:
    endpoint = stage.endpoint(broker.port)
    for number in range(5):
        stage.dispatcher.start(endpoint, [message(number)])

    assert stage.errors() == [None] * 5
    stage.dispatcher.start(endpoint, [message(9)])
    assert stage.errors() == [None]
    assert broker.connections == 1
    assert broker.lines == ["hello", '"0"', '"1"', '"2"', '"3"', '"4"', '"9"']


def test_what_waited_for_the_connection_is_sent_in_turns_with_the_others(
    stage: Stage, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred deliveries, each of which takes 10 ms to be written: no turn takes longer than 100 ms."""
    endpoint = stage.endpoint(broker.port)
    for number in range(100):
        stage.dispatcher.start(endpoint, [message(number)])
    turns: list[int] = []
    send = stage.connection.send

    def slow(delivery: Delivery) -> None:
        stage.clock.now += 0.01
        turns[-1] += 1
        send(delivery)

    monkeypatch.setattr(stage.connection, "send", slow)

    def are_settled() -> bool:
        turns.append(0)
        stage.dispatcher.step(0.1)
        return not stage.dispatcher.in_flight

    wait_until(are_settled, "the end of all deliveries", interval=0)

    assert sum(turns) == 100
    assert max(turns) <= 10
    # In their order, also those that come when not all that waited are sent.
    assert broker.lines[1:] == [f'"{number}"' for number in range(100)]


def test_a_connection_that_is_dialled_again_still_has_what_waits_for_it(stage: Stage, broker: Broker) -> None:
    greetings = iter(("again", "welcome"))
    broker.answer = lambda line: next(greetings) if line == "hello" else "taken"
    stage.dispatcher.start(stage.endpoint(broker.port), [message(1)])

    assert stage.errors() == [None]
    assert broker.connections == 2
    assert broker.lines == ["hello", "hello", '"1"']


def test_each_message_of_a_delivery_has_its_own_outcome(stage: Stage, broker: Broker) -> None:
    broker.answer = lambda line: {"hello": "welcome", '"2"': "full"}.get(line, "taken")
    messages = [message(1), message(2), message(3, problem="can't be read")]
    stage.dispatcher.start(stage.endpoint(broker.port), messages)

    (settled,) = stage.settle()

    errors = [settled.outcome.of(each).error for each in messages]
    assert errors == [None, "[RETRYABLE] full", "[PERMANENT] message: can't be read"]


def test_what_is_under_way_when_the_broker_closes_has_failed(stage: Stage, broker: Broker) -> None:
    broker.answer = lambda line: {"hello": "welcome", '"2"': "close"}.get(line, "taken")
    stage.dispatcher.start(stage.endpoint(broker.port), [message(1), message(2), message(3)])

    errors = stage.errors()

    assert errors[0] is None
    assert errors[1:] == [f"[RETRYABLE] network: 127.0.0.1:{broker.port} closed the connection"] * 2


class Leaving(Listener):
    """Takes the first message, and leaves when it is told to, without having read the others: the connection is reset."""

    def __init__(self) -> None:
        self.has_answered = threading.Event()
        self.may_leave = threading.Event()
        super().__init__()

    def serve(self, connection: socket.socket, number: int) -> None:
        connection.recv(100)
        connection.sendall(b"welcome\n")
        connection.recv(100)
        connection.sendall(b"taken\n")
        self.has_answered.set()
        self.may_leave.wait(patience())
        connection.close()


def test_what_a_broker_acknowledged_before_it_left_is_delivered(stage: Stage) -> None:
    with Leaving() as broker:
        endpoint = stage.endpoint(broker.port)
        stage.dispatcher.start(endpoint, [message(1)])
        stage.step_until(lambda: stage.connection.is_open)
        assert broker.has_answered.wait(patience()), "no answer"
        stage.dispatcher.start(endpoint, [message(2)])
        broker.may_leave.set()
        opened = stage.connection._socket
        assert opened is not None
        # 7: closed.
        wait_until(lambda: opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1) == b"\x07", message="the reset")

        stage.dispatcher.start(endpoint, [message(3)])

        errors = stage.errors()
    assert errors[0] is None
    assert all("[RETRYABLE] network:" in str(error) for error in errors[1:])


def test_a_late_look_is_not_taken_for_a_delay_of_the_broker(stage: Stage, broker: Broker) -> None:
    endpoint = stage.endpoint(broker.port)
    stage.dispatcher.start(endpoint, [message(1)])
    stage.settle()
    stage.dispatcher.start(endpoint, [message(2)])

    assert select.select([stage.connection._socket], [], [], patience())[0], "no answer"
    stage.clock.now += 60

    assert stage.errors() == [None]


def test_the_next_delivery_dials_again(stage: Stage, broker: Broker) -> None:
    broker.answer = lambda line: {"hello": "welcome", '"1"': "close"}.get(line, "taken")
    endpoint = stage.endpoint(broker.port)
    stage.dispatcher.start(endpoint, [message(1)])
    stage.settle()

    stage.dispatcher.start(endpoint, [message(2)])

    assert stage.errors() == [None]
    assert broker.connections == 2


def test_an_idle_connection_that_is_closed_fails_nothing(stage: Stage, broker: Broker) -> None:
    broker.answer = lambda line: {"hello": "welcome", '"2"': "taken"}.get(line, "taken\ngo away")
    endpoint = stage.endpoint(broker.port)
    stage.dispatcher.start(endpoint, [message(1)])
    assert stage.errors() == [None]
    stage.step_until(lambda: not stage.transport._connections)

    stage.dispatcher.start(endpoint, [message(2)])

    assert stage.errors() == [None]


def test_a_brokers_answer_is_shown_without_secrets(stage: Stage, broker: Broker) -> None:
    broker.answer = lambda line: "go away"
    stage.dispatcher.start(stage.endpoint(broker.port), [message(1)])

    assert stage.errors() == ["[RETRYABLE] the broker says: ****"]


def test_a_broker_that_does_not_answer_is_given_up_in_time(stage: Stage, broker: Broker) -> None:
    broker.answer = lambda line: "welcome" if line == "hello" else None
    stage.dispatcher.start(stage.endpoint(broker.port), [message(1)])
    stage.step_until(lambda: '"1"' in broker.lines)
    stage.clock.now += 60

    assert stage.errors() == [f"[RETRYABLE] timeout: no acknowledgement from 127.0.0.1:{broker.port} in time"]


def test_so_is_one_that_does_not_greet(stage: Stage, broker: Broker) -> None:
    broker.answer = lambda line: None
    stage.dispatcher.start(stage.endpoint(broker.port), [message(1)])
    stage.step_until(lambda: broker.lines == ["hello"])
    stage.clock.now += 30

    assert stage.errors() == [f"[RETRYABLE] timeout: no connection to 127.0.0.1:{broker.port} in time"]


def test_nobody_listens(stage: Stage) -> None:
    # Nobody else gets the port, and nobody listens at it.
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        stage.dispatcher.start(stage.endpoint(port), [message(1)])

        assert stage.errors() == [f"[RETRYABLE] connect: Connection refused (127.0.0.1:{port})"]


def test_a_name_is_resolved_and_what_it_stands_for_is_dialled(stage: Stage, broker: Broker) -> None:
    stage.dispatcher.start(stage.endpoint(broker.port, "localhost"), [message(1)])

    assert stage.errors() == [None]


def test_an_unknown_host_name_is_in_the_error(stage: Stage, broker: Broker) -> None:
    stage.dispatcher.start(stage.endpoint(broker.port, "nowhere.invalid"), [message(1)])

    (error,) = stage.errors()

    assert error is not None and error.startswith("[RETRYABLE] resolve: nowhere.invalid: ")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_an_address_that_is_forbidden_is_not_dialled(broker: Broker, host: str) -> None:
    stage = Stage(Guard())
    stage.dispatcher.start(stage.endpoint(broker.port, host), [message(1)])

    (error,) = stage.errors()

    assert error is not None and error.startswith("[PERMANENT] blocked: address ")
    assert "select ulak.configure('http_allowed_networks'" in error
    assert broker.connections == 0
    stage.dispatcher.close()


def test_a_new_config_has_a_connection_of_its_own_and_the_old_one_ends(stage: Stage, broker: Broker) -> None:
    stage.dispatcher.start(stage.endpoint(broker.port), [message(1)])
    stage.dispatcher.start(stage.endpoint(broker.port, version=2), [message(2)])

    assert stage.errors() == [None, None]
    assert broker.connections == 2
    assert len(stage.transport._connections) == 1
    assert not stage.transport._leaving


def test_idle_connections_beyond_a_number_are_closed(
    stage: Stage, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LineConnection, "most_links", 2)
    for id in range(5):
        endpoint = stage.endpoint(broker.port)._replace(id=id)
        stage.dispatcher.start(endpoint, [message(id)])
        stage.settle()

    assert sorted(stage.transport._connections) == [3, 4]


def test_tls_is_verified_by_the_authority_that_the_config_names(stage: Stage, certificate: Certificate) -> None:
    broker = Broker(certificate)
    trusting = stage.endpoint(
        broker.port, "localhost", tls=lambda: tls.context(str(certificate.certificate), None, None)
    )
    stage.dispatcher.start(trusting, [message(1)])
    assert stage.errors() == [None]

    doubting = stage.endpoint(broker.port, "localhost", version=2, tls=lambda: tls.context(None, None, None))
    stage.dispatcher.start(doubting, [message(2)])
    (error,) = stage.errors()
    assert error is not None and error.startswith("[RETRYABLE] tls: ")

    careless = stage.endpoint(broker.port, "localhost", version=3, tls=lambda: tls.context(None, None, None, False))
    stage.dispatcher.start(careless, [message(3)])
    assert stage.errors() == [None]
    broker.close()


def test_a_certificate_for_another_name_is_refused(stage: Stage, tmp_path: Path) -> None:
    elsewhere = make_certificate(tmp_path, ("elsewhere.example.com",))
    with Broker(elsewhere) as broker:
        trusting = lambda verify: lambda: tls.context(str(elsewhere.certificate), None, None, verify)  # noqa: E731
        stage.dispatcher.start(stage.endpoint(broker.port, "localhost", tls=trusting(True)), [message(1)])
        (error,) = stage.errors()
        stage.dispatcher.start(stage.endpoint(broker.port, "localhost", version=2, tls=trusting(False)), [message(2)])

        assert stage.errors() == [None]
    told = "Hostname mismatch, certificate is not valid for 'localhost'."
    assert error == f"[RETRYABLE] tls: {told} (localhost:{broker.port})"
    assert broker.lines == ["hello", '"2"']


def test_a_certificate_is_shown_to_a_broker_that_wants_one(
    stage: Stage, certificate: Certificate, tmp_path: Path
) -> None:
    """With TLS 1.3 the broker refuses when our side of the handshake is done: by an alert, and then it resets."""
    stranger = make_certificate(tmp_path, file="stranger")
    with Broker(certificate, client_authority=certificate) as broker:
        errors = []
        for version, own in enumerate((certificate, None, stranger)):
            files = (None, None) if own is None else (str(own.certificate), str(own.key))
            context = functools.partial(tls.context, str(certificate.certificate), *files)
            stage.dispatcher.start(stage.endpoint(broker.port, version=version, tls=context), [message(version)])
            errors += stage.errors()

    assert errors == [
        None,
        f"[RETRYABLE] tls: 127.0.0.1:{broker.port}: tlsv13 alert certificate required",
        f"[RETRYABLE] tls: 127.0.0.1:{broker.port}: tlsv1 alert unknown ca",
    ]
    assert broker.lines == ["hello", '"0"']


def test_a_file_that_cannot_be_used_is_an_error_of_the_config(stage: Stage, broker: Broker) -> None:
    with pytest.raises(ConfigError, match="a file that the config names"):
        tls.context("/dev/zero", None, None)
    stage.dispatcher.start(stage.endpoint(broker.port, tls=lambda: tls.context("/nowhere", None, None)), [message(1)])

    (error,) = stage.errors()

    assert error is not None and error.startswith("[RETRYABLE] config: a file that the config names")


@pytest.mark.parametrize("is_secure", [False, True], ids=["plain", "tls"])
def test_large_deliveries_go_on_where_the_sockets_buffer_was_full(
    stage: Stage, certificate: Certificate, is_secure: bool
) -> None:
    large = Message(1, "id", 1, '"' + "x" * 5_000_000 + '"')
    context = (lambda: tls.context(str(certificate.certificate), None, None)) if is_secure else None
    with Broker(certificate if is_secure else None) as broker:
        endpoint = stage.endpoint(broker.port, tls=context)
        stage.dispatcher.start(endpoint, [large])
        stage.dispatcher.start(endpoint, [message(2)])

        assert stage.errors() == [None, None]
    assert broker.lines[1:] == [large.payload, '"2"']
