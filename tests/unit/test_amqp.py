"""What is sent to a broker, and how its answers are understood, including those that RabbitMQ gives rarely or never."""

from __future__ import annotations

import select
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pika import frame, spec
from support.deliveries import settle_all
from support.receiver import Listener
from support.scripted_broker import Script, ScriptedBroker, Session
from support.sessions import patience, wait_until
from support.stage import Clock
from ulak.messages.delivery import ConfigError, Endpoint, EndpointConfig, Message, Outcome
from ulak.safety.address import Guard
from ulak.transports.amqp import frames
from ulak.transports.amqp.connection import AmqpConnection
from ulak.transports.amqp.target import Target
from ulak.transports.broker.connection import Lost
from ulak.transports.broker.target import Defaults
from ulak.transports.broker.transport import BrokerTransport
from ulak.transports.dispatcher import Dispatcher

Connect = Callable[..., "Client"]


class Client:
    """A worker's way to one broker. Its time-outs pass when a test sets the clock forward."""

    def __init__(self, broker: Any, **config: Any) -> None:
        self.broker = broker
        self.clock = Clock()
        port = broker.port
        defaults = Defaults("1.0", 5.0, "/ulak")
        self.dispatcher = Dispatcher(
            {"amqp": lambda given: BrokerTransport(Target, AmqpConnection, given, Guard(True), defaults, self.clock)},
            self.clock,
        )
        self.peer = f"127.0.0.1:{port}"
        self.config = {"host": "127.0.0.1", "port": port, "exchange": "orders", "routing_key": "created", **config}
        self.endpoint = self.parse()

    def parse(self, **config: Any) -> Endpoint:
        return self.dispatcher.parse(EndpointConfig(1, "shop", 1, {**self.config, **config}, protocol="amqp"))

    def start(self, *messages: Message) -> None:
        self.dispatcher.start(self.endpoint, messages)

    def settle(self) -> dict[int, Outcome]:
        """By message."""
        settled = settle_all(self.dispatcher)
        return {message.id: each.outcome.of(message) for each in settled for message in each.messages}

    def errors(self) -> list[str | None]:
        """In the order of the messages."""
        return [outcome.error for _, outcome in sorted(self.settle().items())]

    def step_until(self, condition: Callable[[], bool]) -> None:
        wait_until(lambda: [self.dispatcher.step(0), condition()][1])

    @property
    def connection(self) -> AmqpConnection:
        (found,) = self.dispatcher._members["amqp"].transport._connections.values()  # type: ignore[attr-defined]
        assert isinstance(found, AmqpConnection)
        return found


@pytest.fixture
def connect() -> Iterator[Connect]:
    """A client of a broker with this script, or of whatever listens."""
    opened: list[Any] = []

    def begin(script: Script | Listener, *, heartbeat: int = 0, frame_max: int = 131_072, **config: Any) -> Client:
        listener = script if isinstance(script, Listener) else ScriptedBroker(script, heartbeat, frame_max)
        client = Client(listener, **config)
        opened.extend((client.dispatcher, listener))
        return client

    yield begin
    for each in opened:
        each.close()


def message(number: int, payload: str = '{"order": 1}', **fields: Any) -> Message:
    return Message(number, f"0190a5d2-5b9e-7000-8000-{number:012d}", 1, payload, **fields)


def three() -> list[Message]:
    return [message(number) for number in (1, 2, 3)]


# Confirmations.


def test_one_confirmation_may_be_for_many(connect: Connect) -> None:
    def script(session: Session, each: Any) -> None:
        if session.published == 3:
            session.say(spec.Basic.Ack(3, multiple=True))

    client = connect(script)
    for each in three():
        client.start(each)

    assert client.errors() == [None] * 3


def test_confirmations_may_come_in_any_order(connect: Connect) -> None:
    def script(session: Session, each: Any) -> None:
        if session.published == 3:
            session.say(spec.Basic.Ack(2))
            session.say(spec.Basic.Nack(1))
            # Up to and including this one, which is the only one left.
            session.say(spec.Basic.Ack(3, multiple=True))

    client = connect(script)
    client.start(*three())

    first, *others = client.errors()
    assert first == f"[RETRYABLE] refused: {client.peer} didn't take the message: a queue is full, or failed"
    assert others == [None, None]


def test_zero_confirms_all(connect: Connect) -> None:
    def script(session: Session, each: Any) -> None:
        if session.published == 3:
            session.say(spec.Basic.Nack(0, multiple=True))

    client = connect(script)
    client.start(*three())

    assert all(error is not None and error.startswith("[RETRYABLE] refused") for error in client.errors())


def test_only_the_message_that_came_back_has_failed(connect: Connect) -> None:
    def script(session: Session, each: Any) -> None:
        if session.published == 3:
            session.say(spec.Basic.Return(312, "NO_ROUTE", "orders", "created"))
            session.give_back(spec.BasicProperties(message_id=message(2).message_id), b"{}")
            session.say(spec.Basic.Ack(3, multiple=True))

    client = connect(script)
    client.start(*three())

    first, second, third = client.errors()
    assert (first, third) == (None, None)
    assert second == (
        f"[RETRYABLE] unroutable: exchange 'orders' has no queue for routing key 'created' ({client.peer}: NO_ROUTE)"
    )


def test_an_unexpected_confirmation_is_ignored(connect: Connect) -> None:
    def script(session: Session, each: Any) -> None:
        if session.published == 1:
            session.say(spec.Basic.Ack(7))
            session.say(spec.Basic.Ack(1))
            session.say(spec.Basic.Ack(1))

    client = connect(script)
    client.start(message(1))

    assert client.errors() == [None]


def test_a_confirmation_that_came_while_the_worker_was_busy_counts(connect: Connect) -> None:
    def script(session: Session, each: Any) -> None:
        if isinstance(each, frame.Body):
            session.say(spec.Basic.Ack(session.published))

    client = connect(script)
    client.start(message(1))
    assert client.errors() == [None]
    client.start(message(2))

    # The client doesn't look meanwhile.
    assert select.select([client.connection._socket], [], [], patience())[0]
    client.clock.now += 5

    assert client.errors() == [None]
    assert client.broker.count(spec.Basic.Publish) == 2


# The channel, and the connection.


def test_a_channel_is_opened_again_and_counts_anew(connect: Connect) -> None:
    closed: list[bool] = []

    def script(session: Session, each: Any) -> None:
        if not isinstance(each, frame.Body):
            return
        if not closed:
            closed.append(True)
            session.say(spec.Channel.Close(404, "NOT_FOUND - no exchange 'orders' in vhost '/'", 60, 40))
        else:
            session.say(spec.Basic.Ack(session.published))

    client = connect(script)
    client.start(message(1))
    (error,) = client.errors()
    client.start(message(2))
    client.start(message(3))

    assert error == f"[RETRYABLE] channel: {client.peer} closed it: NOT_FOUND - no exchange 'orders' in vhost '/'"
    assert client.errors() == [None, None]
    assert client.broker.connections == 1


def test_only_what_is_too_large_fails_and_the_others_are_published_again(connect: Connect) -> None:
    closed: list[int] = []

    def script(session: Session, each: Any) -> None:
        if session.published == 3 and not closed:
            closed.append(1)
            told = "PRECONDITION_FAILED - message size 102 is larger than configured max size 100"
            session.say(spec.Channel.Close(406, told, 60, 40))
        elif closed and isinstance(each, frame.Body):
            session.say(spec.Basic.Ack(session.published, multiple=True))

    client = connect(script)
    large = '"' + "x" * 100 + '"'
    client.start(message(1), message(2, large), message(3))
    errors = client.errors()
    client.start(message(4, large), message(5))

    too_large = f"[PERMANENT] message: the message is larger than the 100 bytes that {client.peer} takes"
    assert errors == [None, too_large, None]
    assert client.errors() == [too_large, None]
    assert len(closed) == client.broker.connections == 1


def test_a_connection_that_is_closed_fails_what_is_unconfirmed(connect: Connect) -> None:
    def script(session: Session, each: Any) -> None:
        if session.published == 3:
            session.say(spec.Basic.Ack(1))
            session.say(spec.Connection.Close(320, "CONNECTION_FORCED - shutdown", 0, 0), 0)

    client = connect(script)
    client.start(*three())

    told = f"[RETRYABLE] network: {client.peer} closed the connection: CONNECTION_FORCED - shutdown"
    assert client.errors() == [None, told, told]
    client.step_until(lambda: client.broker.count(spec.Connection.CloseOk) == 1)


def test_what_comes_while_the_broker_is_blocked_waits_for_it(connect: Connect) -> None:
    def script(session: Session, each: Any) -> None:
        if isinstance(each, frame.Body) and session.published == 1:
            session.say(spec.Connection.Blocked("low on memory"), 0)
        elif isinstance(each, frame.Body):
            session.say(spec.Basic.Ack(session.published, multiple=True))

    client = connect(script)
    client.start(message(1))
    client.step_until(lambda: client.broker.count(spec.Basic.Publish) == 1 and not client.connection.is_open)
    client.start(message(2))
    client.clock.now += 5

    errors = client.errors()

    # The second was never written: the farewell follows whatever was.
    wait_until(lambda: client.broker.count(spec.Connection.Close) == 1, "the farewell")
    assert client.broker.count(spec.Basic.Publish) == 1
    assert set(errors) == {
        f"[RETRYABLE] timeout: no acknowledgement from {client.peer} in time:"
        " the broker accepts no messages at the moment: low on memory"
    }


@pytest.mark.parametrize("how", ["blocked", "flow"])
def test_what_waited_goes_on_when_the_broker_does(connect: Connect, how: str) -> None:
    sessions: list[Session] = []

    def script(session: Session, each: Any) -> None:
        if isinstance(each, frame.Body) and not sessions:
            sessions.append(session)
            session.say(*((spec.Connection.Blocked("x"), 0) if how == "blocked" else (spec.Channel.Flow(False), 1)))
            session.say(spec.Basic.Ack(1))
        elif isinstance(each, frame.Body):
            session.say(spec.Basic.Ack(session.published))

    client = connect(script)
    client.start(message(1))
    assert client.errors() == [None]
    client.start(message(2))
    client.start(message(3))
    assert not client.connection.is_open
    sessions[0].say(*((spec.Connection.Unblocked(), 0) if how == "blocked" else (spec.Channel.Flow(True), 1)))

    assert client.errors() == [None, None]


@pytest.mark.parametrize("how", ["blocked", "flow"])
def test_what_waited_does_not_go_on_before_its_channel_confirms(connect: Connect, how: str) -> None:
    """A message on a channel that doesn't confirm yet is not counted: the next confirmation would be taken for its."""
    sessions: list[Session] = []

    def script(session: Session, each: Any) -> None:
        if isinstance(each, frame.Body) and not sessions:
            sessions.append(session)
            session.say(*((spec.Connection.Blocked("x"), 0) if how == "blocked" else (spec.Channel.Flow(False), 1)))
        elif isinstance(each, frame.Body):
            session.say(spec.Basic.Ack(session.published))

    client = connect(script)
    client.start(message(1))
    client.step_until(lambda: bool(sessions) and not client.connection.is_open)
    client.start(message(2))
    sessions[0].say(spec.Channel.Close(404, "NOT_FOUND", 60, 40))
    sessions[0].say(*((spec.Connection.Unblocked(), 0) if how == "blocked" else (spec.Channel.Flow(True), 1)))

    first, second = client.errors()

    assert first == f"[RETRYABLE] channel: {client.peer} closed it: NOT_FOUND"
    assert second is None
    said = [type(each) for each in client.broker.heard]
    assert said[-2:] == [spec.Confirm.Select, spec.Basic.Publish]


def test_a_broker_that_returns_what_it_was_never_given_is_given_up(connect: Connect) -> None:
    def script(session: Session, each: Any) -> None:
        if isinstance(each, frame.Body):
            for number in range(10):
                session.say(spec.Basic.Return(312, "NO_ROUTE", "orders", "created"))
                session.give_back(spec.BasicProperties(message_id=f"unknown-{number}"), b"{}")

    client = connect(script)
    client.start(message(1))

    assert client.errors() == [f"[RETRYABLE] network: {client.peer} returns messages that it was never given"]


# Heartbeats.


def test_heartbeats_are_sent_while_nothing_else_is(connect: Connect) -> None:
    def script(session: Session, each: Any) -> None:
        if isinstance(each, frame.Body):
            session.say(spec.Basic.Ack(session.published))

    client = connect(script, heartbeat=60)
    # The shorter one counts.
    client.endpoint = client.parse(heartbeat=10)
    client.start(message(1))
    assert client.errors() == [None]

    # Twice in that time.
    client.clock.now += 5
    client.step_until(lambda: client.broker.heartbeats == 1)
    client.clock.now += 5
    client.step_until(lambda: client.broker.heartbeats == 2)


def test_a_broker_that_is_silent_for_two_heartbeats_is_given_up(connect: Connect) -> None:
    client = connect(lambda session, each: None, heartbeat=10, timeout=30)
    client.start(message(1))
    client.step_until(lambda: client.broker.count(spec.Basic.Publish) == 1)
    client.clock.now += 20
    client.step_until(lambda: client.broker.heartbeats == 1)
    client.clock.now += 5

    assert client.errors() == [f"[RETRYABLE] network: {client.peer} was silent for two heartbeats"]


def test_a_broker_may_be_told_to_send_no_heartbeats(connect: Connect) -> None:
    def script(session: Session, each: Any) -> None:
        if isinstance(each, frame.Body):
            session.say(spec.Basic.Ack(session.published))

    client = connect(script, heartbeat=60)
    client.endpoint = client.parse(heartbeat=0)
    client.start(message(1))

    assert client.errors() == [None]
    (tuned,) = [each for each in client.broker.heard if isinstance(each, spec.Connection.TuneOk)]
    assert tuned.heartbeat == 0


# Servers of another kind.


class Speaks(Listener):
    def __init__(self, data: bytes) -> None:
        self.data = data
        super().__init__()

    def serve(self, connection: socket.socket, number: int) -> None:
        connection.recv(100)
        connection.sendall(self.data)
        connection.recv(100)


NO_PLAIN = frame.Method(0, spec.Connection.Start(0, 9, {}, "EXTERNAL", "en_US")).marshal()
SECURE = frame.Method(0, spec.Connection.Secure("more")).marshal()


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"AMQP\x00\x01\x00\x00", "network: {peer} speaks another version of AMQP than 0-9-1"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "network: {peer} speaks no AMQP"),
        (b"\x01\x00\x00\x7f\xff\xff\xff", "network: {peer} speaks no AMQP"),
        (b"\x01\x00\x00\x00\x00\x00\x04\xff\xff\xff\xff\xce", "network: {peer}: the answer can't be read: KeyError"),
        (
            b"\x01\x00\x00\x00\x00\x00\x04\x00\x0a\x00\x0a!",
            "network: {peer}: the answer can't be read: InvalidFrameError",
        ),
        (b"", "network: {peer} closed the connection"),
        (NO_PLAIN, "login: {peer} offers no login by user name and password"),
        (SECURE, "login: {peer} asks for more than a user name and a password"),
    ],
)
def test_a_server_that_is_no_broker_is_reported(connect: Connect, data: bytes, told: str) -> None:
    class Closes(Speaks):
        def serve(self, connection: socket.socket, number: int) -> None:
            connection.recv(100)
            connection.sendall(data)
            if data:
                connection.recv(100)

    client = connect(Closes(data))
    client.start(message(1))

    assert client.errors() == ["[RETRYABLE] " + told.format(peer=client.peer)]


def test_a_broker_that_never_greets_is_given_up_in_time(connect: Connect) -> None:
    class Silent(Listener):
        def serve(self, connection: socket.socket, number: int) -> None:
            self.wait()

    client = connect(Silent())
    client.start(message(1))
    client.step_until(lambda: client.connection._socket is not None)
    client.clock.now += 5

    (error,) = client.errors()
    assert error is not None and error.startswith("[RETRYABLE] timeout: no ")


def test_a_password_that_a_broker_repeats_is_hidden(connect: Connect) -> None:
    def script(session: Session, each: Any) -> None:
        if isinstance(each, frame.Body):
            session.say(spec.Connection.Close(320, "I know it: very secret indeed", 0, 0), 0)

    client = connect(script, username="shop", password="very secret indeed")
    client.start(message(1))

    (error,) = client.errors()
    assert error is not None and error.endswith("closed the connection: I know it: ****")


# Frames.


@given(st.lists(st.binary(max_size=300), max_size=5), st.integers(1, 50))
def test_frames_are_found_however_the_bytes_are_cut(bodies: list[bytes], piece: int) -> None:
    data = b"".join(frame.Body(1, each).marshal() + frames.HEARTBEAT for each in bodies)
    reader = frames.Frames("peer")

    found = [each for start in range(0, len(data), piece) for each in reader.feed(data[start : start + piece])]

    assert [each.fragment for each in found if isinstance(each, frame.Body)] == bodies
    assert sum(isinstance(each, frame.Heartbeat) for each in found) == len(bodies)


@given(st.binary(max_size=200))
def test_bytes_that_mean_nothing_end_the_connection_and_nothing_else(data: bytes) -> None:
    reader = frames.Frames("peer")
    try:
        list(reader.feed(data))
    except (Lost, KeyError, ValueError):
        return
    # pika's own, and those of what it decodes with: the connection takes each of them for its end.
    except Exception as error:
        assert type(error).__module__ in ("pika.exceptions", "struct")


@pytest.mark.parametrize("size", [0, 1, 4087, 4088, 4089, 10_000])
def test_a_body_is_cut_into_frames_that_are_not_too_large(size: int) -> None:
    body = bytes(range(256)) * 40
    made = frames.content(spec.BasicProperties(message_id="x"), body[:size], 4096)

    reader = frames.Frames("peer")
    head, *rest = reader.feed(made)

    assert head.body_size == size
    assert b"".join(each.fragment for each in rest) == body[:size]
    assert all(len(each.marshal()) <= 4096 for each in rest)


# Configs.


@pytest.mark.parametrize(
    "wrong",
    [
        {"host": None},
        {"port": 0},
        {"port": True},
        {"exchange": "x" * 256},
        {"vhost": "x" * 256},
        {"exchange": "", "routing_key": ""},
        {"routing_key": "x" * 256},
        {"routing_key": "{"},
        {"heartbeat": -1},
        {"frame_max": 10},
    ],
)
def test_a_config_that_cannot_be_used_is_refused(connect: Connect, wrong: dict[str, Any]) -> None:
    client = connect(lambda session, each: None)

    with pytest.raises(ConfigError):
        client.parse(**wrong)


def test_the_port_follows_tls(connect: Connect) -> None:
    client = connect(lambda session, each: None)
    del client.config["port"]

    assert client.parse().target.address.port == 5672
    assert client.parse(tls=True).target.address.port == 5671


def test_the_handlers_are_methods_of_the_connection() -> None:
    from ulak.transports.amqp import connection

    assert all(getattr(AmqpConnection, each.__name__) is each for each in connection._HANDLERS.values())
