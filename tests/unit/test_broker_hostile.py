"""A server that isn't a broker: each delivery ends, others go on, and no answer is read without a limit."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import pytest
from support.deliveries import settle_all
from support.receiver import Listener
from ulak.messages.delivery import Endpoint, EndpointConfig, Message
from ulak.transports.dispatcher import Dispatcher


class Impostor(Listener):
    def __init__(self, answer: Callable[[socket.socket], object]) -> None:
        self.answer = answer
        super().__init__()

    def serve(self, connection: socket.socket, number: int) -> None:
        connection.recv(1000)
        self.answer(connection)
        # Until the other end has had enough.
        while connection.recv(65536):
            pass


def endless(connection: socket.socket) -> None:
    while True:
        connection.sendall(b"x" * 65536)


def drip(connection: socket.socket) -> None:
    while True:
        connection.sendall(b"$")


ANSWERS: dict[str, Callable[[socket.socket], object]] = {
    "nothing": lambda connection: None,
    "the end": lambda connection: connection.shutdown(socket.SHUT_RDWR),
    "another protocol": lambda connection: connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n"),
    "zeros": lambda connection: connection.sendall(bytes(1000)),
    "too much": endless,
    "a long line": drip,
    "a huge length": lambda connection: connection.sendall(b"$2000000000\r\n" + b"\x20\xff\xff\xff\x7f"),
    "half a greeting": lambda connection: connection.sendall(b"\x20\x03\x00"),
    "an answer to nobody": lambda connection: connection.sendall(b"+PONG\r\n" * 10 + b"\x40\x02\x00\x01" * 10),
    "a broken greeting": lambda connection: connection.sendall(b"\x20\x09\x00\x00\x06\xff\xff\xff\xff\xff\xff"),
    "a refusal": lambda connection: connection.sendall(b"-ERR 'open sesame'\r\n"),
}


def endpoint(dispatcher: Dispatcher, protocol: str, port: int) -> Endpoint:
    config: dict[str, dict[str, Any]] = {
        "amqp": {"host": "127.0.0.1", "port": port, "exchange": "orders", "timeout": 0.3},
        "kafka": {
            "broker": f"127.0.0.1:{port}",
            "topic": "orders",
            "options": {"socket.connection.setup.timeout.ms": 1000, "message.timeout.ms": 1000},
        },
        "mqtt": {"broker": "127.0.0.1", "port": port, "topic": "orders", "timeout": 0.3},
        "nats": {"url": f"nats://127.0.0.1:{port}", "subject": "orders", "timeout": 0.3},
        "redis": {
            "host": "127.0.0.1",
            "port": port,
            "stream_key": "orders",
            "connect_timeout": 0.3,
            "command_timeout": 0.3,
        },
    }
    return dispatcher.parse(EndpointConfig(7, "orders", 1, config[protocol], protocol=protocol))


@pytest.mark.parametrize("protocol", ["amqp", "kafka", "mqtt", "nats", "redis"])
@pytest.mark.parametrize("answer", ANSWERS)
def test_an_impostor_gets_nothing_but_a_failure(dispatcher: Dispatcher, protocol: str, answer: str) -> None:
    with Impostor(ANSWERS[answer]) as impostor:
        to = endpoint(dispatcher, protocol, impostor.port)
        for number in range(3):
            dispatcher.start(to, [Message(number, f"id-{number}", 1, '"open sesame"')])
        settled = settle_all(dispatcher)

    errors = [str(each.outcome.error) for each in settled]
    assert len(errors) == 3
    assert all(error.startswith("[RETRYABLE] ") and "open sesame" not in error for error in errors), errors
