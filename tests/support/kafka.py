"""librdkafka's own cluster in a process of its own: it speaks Kafka's protocol over TCP and keeps what it is sent. A relay in
front of it adds what it lacks: TLS, SASL, and other addresses in its metadata."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import ssl
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from confluent_kafka import Consumer, TopicPartition

from support.receiver import Certificate
from support.sessions import hold, wait_until

# Requests by their number in the protocol, and errors by theirs.
PRODUCE, METADATA, API_VERSIONS, SASL_HANDSHAKE, SASL_AUTHENTICATE = 0, 3, 18, 17, 36
UNKNOWN_TOPIC = 3
NOT_ENOUGH_REPLICAS = 19
TOPIC_AUTHORIZATION_FAILED = 29
AUTHENTICATION_FAILED = 58
STORAGE_ERROR = 56


@dataclass(frozen=True)
class Consumed:
    topic: str
    partition: int
    offset: int
    key: str | None
    value: bytes
    headers: dict[str, str]
    at: int


class Kafka:
    """A cluster of one broker; topics are made as they are asked for, or by create_topic()."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "support.kafka"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.broker = self._answer()
        assert self.broker, "the cluster has ended, and says why above"
        self.port = int(self.broker.rpartition(":")[2])
        self.pid = self._process.pid

    def create_topic(self, topic: str, partitions: int = 1) -> str:
        self._tell("create", topic, partitions)
        return topic

    def refuse_topic(self, topic: str, error: int) -> None:
        """Its metadata is an error from now on; 0: no longer."""
        self._tell("topic-error", topic, error)

    def fail(self, request: int, *errors: int) -> None:
        """The next requests of this kind are answered with this error."""
        self._tell("errors", request, *errors)

    def clear(self, request: int) -> None:
        self._tell("clear", request)

    def slow_down(self, milliseconds: int) -> None:
        """How long every answer takes."""
        self._tell("rtt", milliseconds)

    def down(self) -> None:
        """It drops its connections and takes no others. What it was sent stays."""
        self._tell("down")

    def up(self) -> None:
        self._tell("up")

    def mend(self) -> None:
        """As it was at first, but for its topics."""
        os.kill(self.pid, signal.SIGCONT)
        self.up()
        self.slow_down(0)
        self.clear(PRODUCE)

    def hang(self) -> None:
        """It keeps its connections, and says nothing more."""
        hold(self.pid)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def read(self, topic: str, count: int, partitions: int = 1) -> list[Consumed]:
        """What a consumer gets from the beginning: at least this many."""
        consumer = Consumer(
            {
                "bootstrap.servers": self.broker,
                "group.id": "reader",
                "enable.auto.commit": False,
                "fetch.wait.max.ms": 10,
                "log_level": 0,
            }
        )
        try:
            # By number: the question where a partition begins takes half a second.
            consumer.assign([TopicPartition(topic, each, 0) for each in range(partitions)])
            found: list[Consumed] = []

            def is_all() -> bool:
                got = consumer.consume(10_000, 0.05)
                found.extend(_consumed(each) for each in got if each.error() is None)
                return len(found) >= count and not got

            wait_until(is_all, f"{count} messages of {topic}")
            return found
        finally:
            consumer.close()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    def _tell(self, *words: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(map(str, words)) + "\n")
        self._process.stdin.flush()
        assert self._answer() == "0", words

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


def _consumed(message: Any) -> Consumed:
    key = message.key()
    return Consumed(
        message.topic(),
        message.partition(),
        message.offset(),
        None if key is None else key.decode(),
        message.value(),
        {name: value.decode() for name, value in message.headers() or ()},
        message.timestamp()[1],
    )


@dataclass
class Relay:
    """Stands in front of a broker, on a port of its own that metadata then names, too."""

    kafka: Kafka
    certificate: Certificate | None = None
    # A client has to show a certificate that this one has signed.
    client_authority: Certificate | None = None
    # Logins for SASL/PLAIN.
    users: dict[str, str] | None = None
    # What metadata says instead of 127.0.0.1, in as many characters, and of its own port.
    advertised_host: str = "127.0.0.1"
    advertised_port: int = 0
    host: str = "127.0.0.1"
    port: int = 0
    connections: int = 0
    _ready: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Self:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        wait_until(self._ready.is_set, "the relay")
        return self

    def __exit__(self, *unused: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    @property
    def broker(self) -> str:
        return f"{self.host}:{self.port}"

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        context = None
        if self.certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self.certificate.certificate, self.certificate.key)
            if self.client_authority is not None:
                context.verify_mode = ssl.CERT_REQUIRED
                context.load_verify_locations(self.client_authority.certificate)
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, self.host, 0, ssl=context))
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        self._loop.run_forever()
        server.close()
        serving = asyncio.all_tasks(self._loop)
        for each in serving:
            each.cancel()
        self._loop.run_until_complete(asyncio.gather(*serving, return_exceptions=True))
        # One more turn, in which what their ends have asked for is done.
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self.kafka.port)
        asked: dict[int, tuple[int, int]] = {}
        back = asyncio.ensure_future(self._answers(there_reader, writer, asked))
        try:
            is_in = self.users is None
            while True:
                frame = await _frame(reader)
                kind, version, number = struct.unpack_from(">hhi", frame)
                if kind in (SASL_HANDSHAKE, SASL_AUTHENTICATE):
                    answer = self._sasl(kind, version, frame)
                    is_in = is_in or (kind == SASL_AUTHENTICATE and answer.startswith(b"\0\0"))
                    _write(writer, struct.pack(">i", number) + answer)
                    continue
                if not is_in and kind != API_VERSIONS:
                    break
                asked[number] = kind, version
                _write(there_writer, frame)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            back.cancel()
            writer.close()
            there_writer.close()

    async def _answers(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, asked: dict[int, tuple[int, int]]
    ) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                frame = await _frame(reader)
                kind, version = asked.pop(struct.unpack_from(">i", frame)[0])
                if kind == METADATA:
                    frame = frame.replace(
                        b"127.0.0.1" + struct.pack(">i", self.kafka.port),
                        self.advertised_host.encode() + struct.pack(">i", self.advertised_port or self.port),
                    )
                elif kind == API_VERSIONS and self.users is not None:
                    frame = _with_sasl(frame, version)
                _write(writer, frame)
        writer.close()

    def _sasl(self, kind: int, version: int, frame: bytes) -> bytes:
        if kind == SASL_HANDSHAKE:
            return struct.pack(">hi", 0, 1) + struct.pack(">h", 5) + b"PLAIN"
        _, name, password = frame.rpartition(b"\0" + next(iter(self.users or {"": ""})).encode() + b"\0")
        assert self.users is not None
        is_right = name != b"" and password.decode() in self.users.values()
        reason = b"Authentication failed"
        answer = (
            struct.pack(">hh", 0, -1) if is_right else struct.pack(">hh", AUTHENTICATION_FAILED, len(reason)) + reason
        )
        return answer + struct.pack(">i", 0) + (struct.pack(">q", 0) if version else b"")


async def _frame(reader: asyncio.StreamReader) -> bytes:
    (length,) = struct.unpack(">i", await reader.readexactly(4))
    return await reader.readexactly(length)


def _write(writer: asyncio.StreamWriter, frame: bytes) -> None:
    writer.write(struct.pack(">i", len(frame)) + frame)


def _with_sasl(frame: bytes, version: int) -> bytes:
    """The list of what the broker supports, and SASL."""
    number, error = struct.unpack_from(">ih", frame)
    added: Sequence[tuple[int, int, int]] = ((SASL_HANDSHAKE, 0, 1), (SASL_AUTHENTICATE, 0, 1))
    if version < 3 or error:
        (count,) = struct.unpack_from(">i", frame, 6)
        end = 10 + 6 * count
        more = b"".join(struct.pack(">hhh", *each) for each in added)
        return struct.pack(">ihi", number, error, count + 2) + frame[10:end] + more + frame[end:]
    count = frame[6] - 1
    end = 7 + 7 * count
    more = b"".join(struct.pack(">hhhb", *each, 0) for each in added)
    return frame[:6] + bytes([count + 3]) + frame[7:end] + more + frame[end:]


def _serve_cluster() -> None:
    """The process: answers each line of its input with a number, 0 for done."""
    library = ctypes.CDLL("librdkafka.so.1")
    pointer = ctypes.c_void_p
    for name in ("rd_kafka_conf_new", "rd_kafka_new", "rd_kafka_mock_cluster_new"):
        getattr(library, name).restype = pointer
    library.rd_kafka_mock_cluster_bootstraps.restype = ctypes.c_char_p
    problem = ctypes.create_string_buffer(512)
    configuration = pointer(library.rd_kafka_conf_new())
    for key, value in ((b"log_level", b"0"), (b"bootstrap.servers", b"127.0.0.1:1")):
        library.rd_kafka_conf_set(configuration, key, value, problem, 512)
    client = pointer(library.rd_kafka_new(0, configuration, problem, 512))
    cluster = pointer(library.rd_kafka_mock_cluster_new(client, 1))
    print(library.rd_kafka_mock_cluster_bootstraps(cluster).decode(), flush=True)
    for line in sys.stdin:
        print(_obey(library, cluster, *line.split()), flush=True)


def _obey(library: ctypes.CDLL, cluster: ctypes.c_void_p, verb: str, *words: str) -> int:
    result: int = 0
    if verb == "create":
        result = library.rd_kafka_mock_topic_create(cluster, words[0].encode(), int(words[1]), 1)
    elif verb == "topic-error":
        library.rd_kafka_mock_topic_set_error(cluster, words[0].encode(), int(words[1]))
    elif verb == "errors":
        errors = (ctypes.c_int * (len(words) - 1))(*map(int, words[1:]))
        library.rd_kafka_mock_push_request_errors_array(
            cluster, ctypes.c_int16(int(words[0])), ctypes.c_size_t(len(words) - 1), errors
        )
    elif verb == "clear":
        library.rd_kafka_mock_clear_request_errors(cluster, ctypes.c_int16(int(words[0])))
    elif verb == "rtt":
        result = library.rd_kafka_mock_broker_set_rtt(cluster, 1, int(words[0]))
    elif verb == "down":
        result = library.rd_kafka_mock_broker_set_down(cluster, 1)
    elif verb == "up":
        result = library.rd_kafka_mock_broker_set_up(cluster, 1)
    else:
        result = -1
    return result


if __name__ == "__main__":
    _serve_cluster()
