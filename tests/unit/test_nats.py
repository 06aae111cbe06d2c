"""What a NATS server says, and what becomes of the message and of the connection."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.deliveries import settle_all
from support.nkeys import ACCOUNT, Key, User
from support.receiver import Listener
from support.sessions import wait_until
from support.stage import Clock
from ulak.messages.delivery import ConfigError, Endpoint, EndpointConfig, Message
from ulak.safety.address import Guard
from ulak.transports.broker.target import Address, Defaults
from ulak.transports.broker.transport import BrokerTransport
from ulak.transports.dispatcher import Dispatcher
from ulak.transports.nats import keys
from ulak.transports.nats.connection import NatsConnection
from ulak.transports.nats.operations import BadOperation, Operations, Reply
from ulak.transports.nats.servers import MOST_ADVERTISED, Servers
from ulak.transports.nats.target import Target

SAID = (
    b'INFO {"headers": true}\r\nPING\r\n+OK\r\nMSG _INBOX.a.1 1  23\r\n{"stream":"O", "seq":1}\r\n'
    b"HMSG _INBOX.a.2 1 16 16\r\nNATS/1.0 503\r\n\r\n\r\n-ERR 'Stale Connection'\r\nPONG\r\n"
)
MEANT: list[Any] = [
    {"headers": True},
    b"PING",
    Reply(b"_INBOX.a.1", b"", b'{"stream":"O", "seq":1}'),
    Reply(b"_INBOX.a.2", b"NATS/1.0 503\r\n\r\n", b""),
    "Stale Connection",
    b"PONG",
]


@given(st.lists(st.integers(0, len(SAID)), max_size=10).map(sorted))
def test_what_comes_in_pieces_means_the_same(cuts: list[int]) -> None:
    operations = Operations()
    pieces = [SAID[start:end] for start, end in zip([0, *cuts], [*cuts, len(SAID)], strict=True)]

    assert [each for piece in pieces for each in operations.read(piece)] == MEANT


@pytest.mark.parametrize(
    "said",
    [
        b"HTTP/1.1 400 Bad Request\r\n",
        b"MSG a 1 2000000000\r\n",
        b"MSG a 1 -1\r\n",
        b"MSG a 1 2\r\nabcd",
        b"HMSG a 1 5 2\r\n",
        b"HMSG a\r\n",
        b"INFO []\r\n",
        b"INFO " + b"[" * 100_000 + b"\r\n",
        b"\r\n",
        b"x" * 200_000,
    ],
)
def test_what_is_not_the_protocol_is_noticed(said: bytes) -> None:
    with pytest.raises(BadOperation):
        list(Operations().read(said))


@given(st.binary(max_size=200))
def test_bytes_of_any_kind_are_read_or_refused(said: bytes) -> None:
    with contextlib.suppress(BadOperation):
        list(Operations().read(said))


class Server(Listener):
    """Greets, and answers each message with the next of its answers, and the last of them for ever. In an answer, {} is the
    subject of the reply."""

    def __init__(self, *answers: str, info: dict[str, Any] | None = None, after: bytes = b"") -> None:
        self.answers = list(answers)
        self.info = {"headers": True, "jetstream": True, "max_payload": 1000, **(info or {})}
        self.after = after
        self.published: list[list[bytes]] = []
        self.options: dict[str, Any] = {}
        self.pings = 0
        # Connections that have ended, and of which everything was read.
        self.ended = 0
        super().__init__()

    def serve(self, connection: socket.socket, number: int) -> None:
        try:
            self.converse(connection)
        finally:
            self.ended += 1

    def converse(self, connection: socket.socket) -> None:
        connection.sendall(f"INFO {json.dumps(self.info)} \r\n".encode() + self.after)
        stream = connection.makefile("rb")
        while line := stream.readline():
            words = line.split() or [b""]
            if words[0] == b"CONNECT":
                self.options = json.loads(line[8:])
            elif words[0] == b"PING":
                self.pings += 1
                self.pinged(connection)
            elif words[0] == b"HPUB":
                message = [*words, stream.read(int(words[-1]) + 2)]
                answer = self.answers[0] if len(self.answers) == 1 else self.answers.pop(0)
                connection.sendall(answer.format(words[2].decode()).encode())
                # Once it is here, its answer is on the way.
                self.published.append(message)

    def pinged(self, connection: socket.socket) -> None:
        connection.sendall(b"PONG\r\n")


def reply(payload: str, headers: str = "") -> str:
    """To be formatted."""
    sizes = f"{len(headers)} {len(headers) + len(payload)}" if headers else f" {len(payload)}"
    text = (headers + payload).replace("{", "{{").replace("}", "}}")
    return f"{'H' if headers else ''}MSG {{}} 1 {sizes}\r\n{text}\r\n"


STORED = reply('{"stream":"ORDERS", "seq":1}')


@pytest.fixture
def clock() -> Clock:
    """Time-outs pass when a test sets it forward."""
    return Clock()


@pytest.fixture
def dispatcher(clock: Clock) -> Iterator[Dispatcher]:
    defaults = Defaults("1.0", 20.0, "/ulak")
    dispatcher = Dispatcher(
        {"nats": lambda given: BrokerTransport(Target, NatsConnection, given, Guard(True), defaults, clock)}, clock
    )
    yield dispatcher
    dispatcher.close()


def connections(dispatcher: Dispatcher) -> list[NatsConnection]:
    return list(dispatcher._members["nats"].transport._connections.values())  # type: ignore[attr-defined]


def step_until(dispatcher: Dispatcher, condition: Callable[[], bool]) -> None:
    wait_until(lambda: [dispatcher.step(0), condition()][1])


def endpoint(dispatcher: Dispatcher, server: Server, **config: object) -> Endpoint:
    given = {"url": f"nats://127.0.0.1:{server.port}", "subject": "orders", **config}
    return dispatcher.parse(EndpointConfig(7, "orders", 1, given, protocol="nats"))


def deliver(
    dispatcher: Dispatcher,
    to: Endpoint,
    *numbers: int,
    payload: str = "{}",
    meanwhile: Callable[[], object] = lambda: None,
) -> list[str | None]:
    """Errors, in the order of the messages."""
    messages = [Message(number, f"id-{number}", 1, payload) for number in numbers]
    dispatcher.start(to, messages)
    meanwhile()
    (ended,) = settle_all(dispatcher)
    return [ended.outcome.of(message).error for message in messages]


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (STORED, None),
        (reply('{"stream":"ORDERS","seq":1,"duplicate": true}'), None),
        (reply('{"stream":"error","domain":"hub","seq":1}'), None),
        (reply('{"seq":1, "stream":"ORDERS"}'), None),
        (
            reply(
                '{"error":{"code":503,"err_code":10077,"description":"maximum messages exceeded"},"stream":"O","seq":0}'
            ),
            "[RETRYABLE] refused: {}: maximum messages exceeded (10077)",
        ),
        (
            reply('{"error":{"code":400,"err_code":10054,"description":"message size exceeds maximum allowed"}}'),
            "[PERMANENT] refused: {}: message size exceeds maximum allowed (10054)",
        ),
        (reply("", "NATS/1.0 503\r\n\r\n"), "[RETRYABLE] unroutable: {}: no stream takes subject orders"),
        # A subscriber that answers to whatever it gets.
        (reply("thanks"), "[RETRYABLE] unroutable: {}: the answer isn't the acknowledgement of a stream"),
        (reply('{"ok": true}'), "[RETRYABLE] unroutable: {}: the answer isn't the acknowledgement of a stream"),
        (reply("[" * 10_000), "[RETRYABLE] unroutable: {}: the answer isn't the acknowledgement of a stream"),
        ("-ERR 'Stale Connection'\r\n", "[RETRYABLE] network: {}: Stale Connection"),
        ("-ERR 'User Authentication Expired'\r\n", "[RETRYABLE] login: {}: User Authentication Expired"),
        (
            "-ERR 'Permissions Violation for Publish to \"orders\"'\r\n",
            "[RETRYABLE] login: {}: Permissions Violation for Publish to orders",
        ),
        ("nonsense\r\n", "[RETRYABLE] network: {} doesn't speak the protocol of NATS"),
        ("PONG\r\n", "[RETRYABLE] network: {} answers to a ping that it was never sent"),
        ("MSG _INBOX.other.1 1 2\r\n{{}}\r\n", "[RETRYABLE] timeout: no acknowledgement from {} in time"),
    ],
)
def test_only_what_a_stream_has_taken_is_delivered(
    dispatcher: Dispatcher, clock: Clock, answer: str, error: str | None
) -> None:
    with Server(answer) as server:

        def meanwhile() -> None:
            # Only that message gets no answer.
            if error is not None and "timeout" in error:
                step_until(dispatcher, lambda: len(server.published) == 1)
                clock.now += 20

        found = deliver(dispatcher, endpoint(dispatcher, server), 1, meanwhile=meanwhile)

    assert found == [error and error.format(f"127.0.0.1:{server.port}")]


def test_each_message_has_the_answer_to_its_own(dispatcher: Dispatcher) -> None:
    with Server(STORED, reply('{"error":{"err_code":10054,"description":"no"}}'), STORED) as server:
        errors = deliver(dispatcher, endpoint(dispatcher, server), 1, 2, 3)

    assert [error is None for error in errors] == [True, False, True]


def test_a_message_larger_than_the_server_takes_never_leaves(dispatcher: Dispatcher) -> None:
    with Server(STORED) as server:
        (error,) = deliver(dispatcher, endpoint(dispatcher, server), 1, payload=f'"{"x" * 1000}"')
        assert deliver(dispatcher, endpoint(dispatcher, server), 2) == [None]
        first = wait_until(lambda: server.published and server.published[0], "a message")

    assert error == f"[PERMANENT] message: the message is larger than the 1000 bytes that 127.0.0.1:{server.port} takes"
    assert b"Nats-Msg-Id: id-2\r\n" in first[-1]


def test_a_login_is_what_the_config_says(dispatcher: Dispatcher) -> None:
    user = User.create()
    with Server(STORED, info={"nonce": "abc"}) as server:
        logins: list[tuple[dict[str, str], Callable[[dict[str, Any]], object]]] = [
            ({}, lambda sent: not {"user", "pass", "auth_token", "nkey", "jwt"} & sent.keys()),
            ({"token": "t"}, lambda sent: sent["auth_token"] == "t"),
            ({"username": "u", "password": "p"}, lambda sent: (sent["user"], sent["pass"]) == ("u", "p")),
            ({"nkey_seed": user.seed}, lambda sent: sent["nkey"] == user.public and len(sent["sig"]) == 86),
        ]
        for config, is_right in logins:
            fresh = endpoint(dispatcher, server, **config)._replace(config_version=len(config) + len(str(config)))
            assert deliver(dispatcher, fresh, 1) == [None]
            assert is_right(server.options), server.options


def test_a_greeting_that_goes_on_in_the_clear_is_not_believed(dispatcher: Dispatcher) -> None:
    with Server(STORED, after=b"PONG\r\n") as server:
        (error,) = deliver(dispatcher, endpoint(dispatcher, server, tls=True), 1)
        wait_until(lambda: server.ended == 1, "the end of the connection")

    assert error == f"[RETRYABLE] tls: 127.0.0.1:{server.port} said more in the clear than its greeting"
    assert server.options == {}


def test_a_server_that_cannot_do_tls_gets_no_login(dispatcher: Dispatcher, clock: Clock) -> None:
    with Server(STORED) as server:

        def meanwhile() -> None:
            step_until(dispatcher, lambda: connections(dispatcher)[0]._shaking is not None)
            clock.now += 20

        (error,) = deliver(
            dispatcher, endpoint(dispatcher, server, tls=True, token="hush-hush"), 1, meanwhile=meanwhile
        )
        wait_until(lambda: server.ended == 1, "the end of the connection")

    assert error is not None and error.startswith("[RETRYABLE] timeout: no connection ")
    assert server.options == {}


def test_a_server_without_headers_is_too_old(dispatcher: Dispatcher) -> None:
    with Server(STORED, info={"headers": False}) as server:
        (error,) = deliver(dispatcher, endpoint(dispatcher, server), 1)

    assert error == f"[RETRYABLE] network: 127.0.0.1:{server.port} has no headers: it is older than NATS 2.2"


def test_a_connection_that_answers_no_ping_is_dropped_while_it_is_idle(dispatcher: Dispatcher, clock: Clock) -> None:
    class Silent(Server):
        def pinged(self, connection: socket.socket) -> None:
            if self.pings == 1:
                connection.sendall(b"PONG\r\n")

    with Silent(STORED) as server:
        to = endpoint(dispatcher, server, options={"ping_interval": "10000", "max_pings_out": "1"})
        first = deliver(dispatcher, to, 1)
        clock.now += 10
        step_until(dispatcher, lambda: server.pings == 2)
        clock.now += 10
        step_until(dispatcher, lambda: not connections(dispatcher))

        server.pings = 0
        assert (first, deliver(dispatcher, to, 2)) == ([None], [None])
        assert server.connections == 2


def test_a_ping_that_another_server_left_unanswered_holds_nothing_up(dispatcher: Dispatcher) -> None:
    class Closed(Server):
        def pinged(self, connection: socket.socket) -> None:
            connection.sendall(b"-ERR 'Authorization Violation'\r\n")

    with Closed(STORED) as closed, Server("") as server:
        urls = [f"nats://127.0.0.1:{each.port}" for each in (closed, server)]
        to = endpoint(dispatcher, server, url=urls, jetstream=False)
        assert deliver(dispatcher, to, 1, 2) == [None, None]

    assert (closed.pings, server.pings) == (1, 2)


def test_servers_are_tried_in_turn_and_the_last_good_one_first() -> None:
    given = [Address("a", 1), Address("b", 2)]
    servers = Servers(given)

    servers.advertised(["b:2", "10.0.0.7:4222", "[::1]:5", "nonsense:x", "a:99999"], by=given[1])
    servers.worked(given[1])

    found = list(servers.in_turn())
    assert found == [given[1], given[0], Address("10.0.0.7", 4222, None, "b"), Address("::1", 5, None, "b")]


@pytest.mark.parametrize("urls", [None, "a:1", {"a": 1}, [[]], [f"host{n}:1" for n in range(1000)]])
def test_what_a_server_advertises_is_bounded(urls: object) -> None:
    servers = Servers([Address("a", 1)])

    servers.advertised(urls, by=Address("a", 1))

    assert len(list(servers.in_turn())) <= 1 + MOST_ADVERTISED


def test_a_seed_makes_the_key_that_the_server_knows() -> None:
    key = Key.create(20 << 3)

    signer = keys.signer(key.seed)

    assert signer.public == key.public


@pytest.mark.parametrize("seed", ["", "SU", "not base32!", "SU" + "A" * 56, "an account's", "\u00e9"])
def test_what_is_no_seed_of_a_user_is_an_error_of_the_config(seed: str) -> None:
    seed = Key.create(ACCOUNT).seed if seed == "an account's" else seed

    with pytest.raises(ConfigError, match="nkey_seed"):
        keys.signer(seed)


@pytest.mark.parametrize("text", ["", "-----BEGIN NATS USER JWT-----\nabc", "abc"])
def test_what_is_no_file_of_credentials_is_an_error_of_the_config(text: str) -> None:
    with pytest.raises(ConfigError, match="credentials_file"):
        keys.credentials(text)
