"""What a Redis server answers to XADD, and what becomes of the message and of the connection."""

from __future__ import annotations

import socket

import pytest
from support.deliveries import settle_all
from support.receiver import Listener
from ulak.messages.delivery import Endpoint, EndpointConfig, Message
from ulak.transports.dispatcher import Dispatcher


class Server(Listener):
    """Answers each command but PING with the next of its answers, and the last of them for ever."""

    def __init__(self, *answers: str) -> None:
        self.answers = list(answers)
        self.commands: list[list[bytes]] = []
        super().__init__()

    def serve(self, connection: socket.socket, number: int) -> None:
        stream = connection.makefile("rb")
        while line := stream.readline():
            command = [stream.read(int(stream.readline()[1:]) + 2)[:-2] for _ in range(int(line[1:]))]
            self.commands.append(command)
            if command[0] in (b"PING", b"AUTH", b"SELECT"):
                connection.sendall(b"+OK\r\n")
            else:
                answer = self.answers[0] if len(self.answers) == 1 else self.answers.pop(0)
                connection.sendall(f"{answer}\r\n".encode())


ADDED = "$3\r\n1-0"


def endpoint(dispatcher: Dispatcher, server: Server, **config: object) -> Endpoint:
    given = {"host": "127.0.0.1", "port": server.port, "stream_key": "orders", **config}
    return dispatcher.parse(EndpointConfig(7, "orders", 1, given, protocol="redis"))


def deliver(dispatcher: Dispatcher, to: Endpoint, *numbers: int) -> list[str | None]:
    """Errors, in the order of the messages."""
    messages = [Message(number, f"id-{number}", 1, f'"{number}"') for number in numbers]
    dispatcher.start(to, messages)
    (ended,) = settle_all(dispatcher)
    return [ended.outcome.of(message).error for message in messages]


@pytest.mark.parametrize(
    ("answer", "prefix"),
    [
        ("-OOM command not allowed when used memory > 'maxmemory'.", "[RETRYABLE]"),
        ("-LOADING Redis is loading the dataset in memory", "[RETRYABLE]"),
        ("-READONLY You can't write against a read only replica.", "[RETRYABLE]"),
        ("-MISCONF Redis is configured to save RDB snapshots", "[RETRYABLE]"),
        ("-NOPERM this user has no permissions to run the 'xadd' command", "[RETRYABLE]"),
        ("-MOVED 3999 127.0.0.1:6381", "[RETRYABLE]"),
        ("-CLUSTERDOWN Hash slot not served", "[RETRYABLE]"),
        ("-ERR something new", "[RETRYABLE]"),
        ("-WRONGTYPE Operation against a key holding the wrong kind of value", "[PERMANENT]"),
    ],
)
def test_only_errors_that_no_retry_can_fix_are_permanent(dispatcher: Dispatcher, answer: str, prefix: str) -> None:
    with Server(answer) as server:
        (error,) = deliver(dispatcher, endpoint(dispatcher, server), 1)

        assert error is not None
        code = answer[1:].partition(" ")[0]
        kind = "login" if code == "NOPERM" else "redis"
        assert error.startswith(f"{prefix} {kind}: 127.0.0.1:{server.port}: {code}")


def test_each_message_has_the_reply_to_its_own_command(dispatcher: Dispatcher) -> None:
    with Server(ADDED, "-WRONGTYPE", ADDED) as server:
        errors = deliver(dispatcher, endpoint(dispatcher, server), 1, 2, 3)

    assert [error is None for error in errors] == [True, False, True]


@pytest.mark.parametrize(("answer", "connections"), [("-READONLY", 2), ("-NOAUTH", 2), ("-OOM", 1), ("-WRONGTYPE", 1)])
def test_the_wrong_server_is_left_and_dialled_again(dispatcher: Dispatcher, answer: str, connections: int) -> None:
    with Server(answer, ADDED) as server:
        to = endpoint(dispatcher, server)
        refused = deliver(dispatcher, to, 1)

        assert deliver(dispatcher, to, 2) == [None]
        assert refused != [None]
        assert server.connections == connections


def test_a_command_is_what_the_config_and_the_message_say(dispatcher: Dispatcher) -> None:
    with Server(ADDED) as server:
        config = {"username": "ulak", "password": "open sesame", "db": 3, "maxlen": 1000, "nomkstream": True}
        deliver(dispatcher, endpoint(dispatcher, server, **config), 1)

        assert server.commands[:2] == [[b"AUTH", b"ulak", b"open sesame"], [b"SELECT", b"3"]]
        assert server.commands[2][:7] == [b"XADD", b"orders", b"NOMKSTREAM", b"MAXLEN", b"~", b"1000", b"*"]
        fields = server.commands[2][7:]
        assert dict(zip(fields[::2], fields[1::2], strict=True)) == {
            b"message_id": b"id-1",
            b"payload": b'"1"',
            b"attempt": b"1",
        }


def test_a_user_that_may_add_but_not_ping_is_accepted(dispatcher: Dispatcher) -> None:
    class Strict(Server):
        def serve(self, connection: socket.socket, number: int) -> None:
            connection.recv(1000)
            connection.sendall(b"-NOPERM this user has no permissions to run the 'ping' command\r\n")
            connection.recv(1000)
            connection.sendall(b"$3\r\n1-0\r\n")
            connection.recv(1000)

    with Strict(ADDED) as server:
        assert deliver(dispatcher, endpoint(dispatcher, server), 1) == [None]
