"""Receivers that misbehave, each in its own way, over real sockets."""

from __future__ import annotations

import functools
import gzip
import socket
import struct
from collections.abc import Callable

from support.receiver import Certificate, Listener, read_requests

Behaviour = Callable[["Hostile", socket.socket], None]
# Seconds between two bytes of a slow answer.
PACE = 1


class Hostile(Listener):
    """Reads one request, then does its worst."""

    def __init__(self, behaviour: Behaviour, certificate: Certificate | None = None) -> None:
        self.behaviour = behaviour
        # Bytes that were taken from us before the other side gave up.
        self.sent = 0
        super().__init__(certificate=certificate)

    def serve(self, connection: socket.socket, number: int) -> None:
        for _ in read_requests(connection, number):
            self.behaviour(self, connection)
            return

    def send(self, connection: socket.socket, data: bytes) -> None:
        connection.sendall(data)
        self.sent += len(data)


def never_answers(server: Hostile, connection: socket.socket) -> None:
    server.wait()


def _drip(server: Hostile, connection: socket.socket, data: bytes) -> None:
    """One byte after the other, and never the last one."""
    for byte in data[:-1]:
        server.send(connection, bytes((byte,)))
        if server.wait(PACE):
            return
    server.wait()


def slow_headers(server: Hostile, connection: socket.socket) -> None:
    _drip(server, connection, b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")


def slow_body(server: Hostile, connection: socket.socket) -> None:
    server.send(connection, b"HTTP/1.1 200 OK\r\ncontent-length: 60\r\n\r\n")
    _drip(server, connection, b"x" * 60)


def closes_at_once(server: Hostile, connection: socket.socket) -> None:
    return


def closes_mid_body(server: Hostile, connection: socket.socket) -> None:
    server.send(connection, b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nhalf of it")


def resets(server: Hostile, connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def resets_instead_of_a_second_answer(server: Hostile, connection: socket.socket) -> None:
    """Keeps the connection open after one answer, and resets it when the next request has been read."""
    server.send(connection, b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
    for _ in read_requests(connection):
        resets(server, connection)
        return


def resets_the_first_connections(server: Hostile, connection: socket.socket) -> None:
    """The first eight connections are reset at their second request; every other one behaves."""
    if server.connections <= 8:
        return resets_instead_of_a_second_answer(server, connection)
    server.send(connection, b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
    for _ in read_requests(connection):
        server.send(connection, b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
    return None


def resets_after_one_answer(server: Hostile, connection: socket.socket) -> None:
    """One answer on the first connection; every request after that is met by a reset."""
    if server.connections == 1:
        resets_instead_of_a_second_answer(server, connection)
    else:
        resets(server, connection)


def invalid_status_line(server: Hostile, connection: socket.socket) -> None:
    server.send(connection, b"SMTP/9.9 come in\r\n\r\n")


def bad_chunking(server: Hostile, connection: socket.socket) -> None:
    server.send(connection, b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nnot-a-number\r\nabc\r\n")


def endless_headers(server: Hostile, connection: socket.socket) -> None:
    server.send(connection, b"HTTP/1.1 200 OK\r\n")
    lines = b"x-filler: " + b"y" * 1000 + b"\r\n"
    while not server.wait(0):
        server.send(connection, lines * 64)


def endless_small_headers(server: Hostile, connection: socket.socket) -> None:
    server.send(connection, b"HTTP/1.1 200 OK\r\n")
    while not server.wait(0):
        server.send(connection, b"a:\r\n" * 4096)


def endless_folded_header(server: Hostile, connection: socket.socket) -> None:
    server.send(connection, b"HTTP/1.1 200 OK\r\nx: ")
    while not server.wait(0):
        server.send(connection, b"y\r\n " * 4096)


def endless_interim_answers(server: Hostile, connection: socket.socket) -> None:
    while not server.wait(0):
        server.send(connection, b"HTTP/1.1 102 Processing\r\nx-filler: yyyy\r\n\r\n" * 64)


def endless_trailers(server: Hostile, connection: socket.socket) -> None:
    server.send(connection, b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n")
    lines = b"x-filler: " + b"y" * 1000 + b"\r\n"
    while not server.wait(0):
        server.send(connection, lines * 64)


def huge_body(server: Hostile, connection: socket.socket) -> None:
    """100 MB, as fast as they are taken."""
    server.send(connection, b"HTTP/1.1 200 OK\r\ncontent-length: 104857600\r\n\r\n")
    block = b"x" * 65536
    for _ in range(1600):
        server.send(connection, block)


@functools.cache
def bomb() -> bytes:
    """64 MB of zeros."""
    return gzip.compress(bytes(1 << 26), 9)


def gzip_bomb(server: Hostile, connection: socket.socket) -> None:
    head = f"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: {len(bomb())}\r\n\r\n"
    server.send(connection, head.encode() + bomb())


def gzip_bomb_in_transfer(server: Hostile, connection: socket.socket) -> None:
    server.send(connection, b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\nconnection: close\r\n\r\n" + bomb())


def answers(raw: bytes) -> Behaviour:
    """These bytes, then the end."""

    def behaviour(server: Hostile, connection: socket.socket) -> None:
        server.send(connection, raw)

    return behaviour


def closes_instead_of_a_second_answer(server: Hostile, connection: socket.socket) -> None:
    """Keeps the connection open after one answer, and closes it when the next request has been read."""
    server.send(connection, b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
    for _ in read_requests(connection):
        return


# Those that every libcurl judges alike.
BEHAVIOURS: list[Behaviour] = [
    never_answers,
    slow_headers,
    slow_body,
    closes_at_once,
    closes_mid_body,
    resets,
    invalid_status_line,
    bad_chunking,
    endless_headers,
    endless_small_headers,
    endless_folded_header,
    endless_interim_answers,
    huge_body,
    gzip_bomb,
]
