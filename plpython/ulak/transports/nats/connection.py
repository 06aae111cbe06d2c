"""A connection to a server of NATS. With JetStream each message is acknowledged by the stream that took it, at a
subject of its own; without, all that was written is with the server once it answers a ping.

dialled -> INFO -> (TLS) -> CONNECT and PING -> PONG: messages may go. A server that doesn't get so far is left for the
next one.
"""

from __future__ import annotations

import json
import re
import uuid
from collections import deque
from collections.abc import Mapping
from contextlib import suppress

from ulak.messages import cloudevents
from ulak.messages.delivery import PERMANENT, RETRYABLE, Endpoint, Message, MessageError
from ulak.transports.broker import message as messages
from ulak.transports.broker.connection import Connection, Lost, Surroundings
from ulak.transports.broker.delivery import Delivery
from ulak.transports.nats.operations import PING, PONG, BadOperation, Info, Operations, Problem, Reply
from ulak.transports.nats.target import Target

# JetStream's errors that no retry fixes: the message or its headers are larger than the stream accepts.
_PERMANENT = frozenset((10054, 10097))
# Wrong credentials or missing rights.
_LOGIN = re.compile(r"auth|permissions violation", re.IGNORECASE)
# Characters of an error that are kept.
_LONGEST_TOLD = 200

_NAME = re.compile(r"[!-9;-~]+")
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")


class NatsConnection(Connection):
    tls_comes_later = True

    target: Target

    def __init__(self, endpoint: Endpoint, surroundings: Surroundings) -> None:
        super().__init__(endpoint, surroundings)
        # Servers that haven't been tried, and the error if none accepts us.
        self._left = deque(each for each in self.target.servers.in_turn() if each != self.address)
        self._told: tuple[str, str] | None = None
        self._was_open = False
        self._operations = Operations()
        # Empty until the server has spoken.
        self._info = Info()
        self._inbox = f"_INBOX.{uuid.uuid4().hex}.".encode()
        # By number: the message that a reply to the inbox is for.
        self._expected: dict[int, tuple[Delivery, Message]] = {}
        self._number = 0
        # One entry per expected PONG: the delivery that was written before its PING, or None if the PING only checks
        # that the server is alive.
        self._pongs: deque[Delivery | None] = deque()

    def connected(self) -> None:
        # The server speaks first; after the TLS handshake it already has.
        if self._info:
            self._greet(self._info)

    def received(self, data: bytes) -> None:
        try:
            for each in self._operations.read(data):
                if isinstance(each, Reply):
                    self._answered(each)
                elif each == PONG:
                    self._ponged()
                elif each == PING:
                    self.write(b"PONG\r\n")
                elif isinstance(each, Info):
                    self._informed(each)
                    if self._socket is None:
                        return
                elif isinstance(each, Problem):
                    self._refused(each)
        except BadOperation:
            raise Lost(f"network: {self.peer} doesn't speak the protocol of NATS") from None

    def send(self, delivery: Delivery) -> None:
        super().send(delivery)
        if not self.target.jetstream and not delivery.is_settled:
            self._ping(delivery)

    def publish(self, delivery: Delivery, message: Message, encoded: tuple[bytes, bytes, bytes]) -> None:
        subject, headers, body = encoded
        sizes = b"%d %d" % (len(headers), len(headers) + len(body))
        if self.target.jetstream:
            self._number += 1
            self._expected[self._number] = delivery, message
            sizes = b"%b%d %b" % (self._inbox, self._number, sizes)
        self.write(b"HPUB %b %b\r\n%b%b\r\n" % (subject, sizes, headers, body))

    def timer_passed(self) -> None:
        if not self.is_open:
            raise Lost(f"timeout: no connection to {self.peer} in time")
        if self._pongs.count(None) >= self.target.most_pings:
            raise Lost(f"timeout: {self.peer} doesn't answer to a ping")
        self.timer_at = self._clock() + self.target.ping_seconds
        self._ping(None)

    def lose(self, problem: str, prefix: str = RETRYABLE) -> None:
        if self._was_open:
            super().lose(problem, prefix)
            return
        # With several servers, the error of the first one that isn't forbidden is reported.
        if self._told is None or (self._told[1] == PERMANENT and prefix != PERMANENT):
            self._told = problem, prefix
        if self._left and self._clock() < self._opens_until:
            following = self._left.popleft()
            self.guarded(lambda: self.dial_again(following))
        else:
            super().lose(*self._told)

    def dial(self) -> None:
        # These belong to the socket.
        self._operations = Operations()
        self._info = Info()
        self._pongs.clear()
        now = self._clock()
        self.timer_at = now + (self._opens_until - now) / (1 + len(self._left))
        super().dial()

    # The greeting, in its order.

    def _informed(self, info: Info) -> None:
        is_first = not self._info
        self._info = info
        if not is_first:
            self.target.servers.advertised(info.get("connect_urls"), self.address)
        elif not info.get("headers"):
            raise Lost(f"network: {self.peer} has no headers: it is older than NATS 2.2")
        elif not self.target.has_tls:
            if info.get("tls_required"):
                raise Lost(f'tls: {self.peer} asks for it: the config needs "tls": true')
            self._greet(info)
        elif self._operations.is_at_end:
            self.begin_tls()
        else:
            # An attacker in between could have injected it.
            raise Lost(f"tls: {self.peer} said more in the clear than its greeting")

    def _greet(self, info: Info) -> None:
        about = {
            "verbose": False,
            "pedantic": False,
            "headers": True,
            "no_responders": True,
            "echo": False,
            "protocol": 1,
            "tls_required": self.target.has_tls,
            "name": f"ulak endpoint {self.endpoint.name}",
            "lang": "ulak",
            "version": self._surroundings.version,
            **self.target.login(info.get("nonce") or ""),
        }
        self.write(f"CONNECT {json.dumps(about)}\r\n".encode())
        if self.target.jetstream:
            self.write(b"SUB %b* 1\r\n" % self._inbox)
        self._ping(None)

    def _welcomed(self) -> None:
        servers = self.target.servers
        servers.worked(self.address)
        servers.advertised(self._info.get("connect_urls"), self.address)
        self._was_open = True
        self.timer_at = self._clock() + self.target.ping_seconds
        self.open()

    # A message in the protocol's format.

    def encode(self, message: Message) -> tuple[bytes, bytes, bytes]:
        """Subject, headers and body."""
        target = self.target
        made = messages.content(message, target.events)
        if made.headers:
            _check(made.headers, made.content_type)
        if made.attributes:
            attributes = {name: cloudevents.header_value(value) for name, value in made.attributes.items()}
            made = made._replace(attributes={**attributes, "datacontenttype": made.content_type})
        lines = [f"NATS/1.0\r\nNats-Msg-Id: {message.message_id}\r\n"]
        if target.stream is not None:
            lines.append(f"Nats-Expected-Stream: {target.stream}\r\n")
        for name, value in messages.headers(message, made, "ce-", target.headers).items():
            lines.append(f"{name}: {value}\r\n")
        lines.append("\r\n")
        headers = "".join(lines).encode()
        self.check_size(len(headers) + len(made.body), self._info.get("max_payload"))
        return target.subject.of(message).encode(), headers, made.body

    # The server's answers.

    def _answered(self, reply: Reply) -> None:
        number = reply.subject[len(self._inbox) :]
        delivery, message = self._expected.pop(int(number), (None, None)) if number.isdigit() else (None, None)
        if delivery is None or message is None:
            return
        payload = reply.payload
        # For example {"stream":"ORDERS", "seq":7}. A duplicate counts, too: the stream has the message.
        if payload.startswith(b'{"stream":') and b'"seq"' in payload and b'"error"' not in payload:
            self.acknowledge(delivery, message)
        elif reply.headers.startswith(b"NATS/1.0 503"):
            told = f"unroutable: {self.peer}: no stream takes subject {self.target.subject.of(message)}"
            told += "" if self._info.get("jetstream") else " (the server has no JetStream)"
            self.refuse(delivery, message, RETRYABLE, told)
        else:
            self._judge(delivery, message, payload)

    def _judge(self, delivery: Delivery, message: Message, payload: bytes) -> None:
        try:
            answer = json.loads(payload)
        except (ValueError, RecursionError):
            answer = None
        answer = answer if isinstance(answer, dict) else {}
        error = answer.get("error")
        if isinstance(error, dict):
            code = error.get("err_code")
            told = f"refused: {self.peer}: {str(error.get('description'))[:_LONGEST_TOLD]} ({code})"
            self.refuse(delivery, message, PERMANENT if code in _PERMANENT else RETRYABLE, told)
        elif "stream" in answer and "seq" in answer:
            self.acknowledge(delivery, message)
        else:
            # Any subscriber of the subject may answer.
            told = f"unroutable: {self.peer}: the answer isn't the acknowledgement of a stream"
            self.refuse(delivery, message, RETRYABLE, told)

    def _ping(self, stands_for: Delivery | None) -> None:
        self._pongs.append(stands_for)
        self.write(b"PING\r\n")

    def _ponged(self) -> None:
        if not self._pongs:
            raise Lost(f"network: {self.peer} answers to a ping that it was never sent")
        delivery = self._pongs.popleft()
        if not self._was_open:
            self._welcomed()
        elif delivery is not None:
            for message in delivery.messages:
                self.acknowledge(delivery, message)

    def _refused(self, problem: Problem) -> None:
        told = problem.partition('"')[0][:_LONGEST_TOLD].strip()
        kind = "login" if _LOGIN.search(told) else "network"
        if not told.startswith("Permissions Violation for Publish"):
            raise Lost(f"{kind}: {self.peer}: {told}")
        # The connection stays open, but messages with this subject will never be acknowledged.
        flushed = [(each, message) for each in self._pongs if each is not None for message in each.messages]
        for delivery, message in (*self._expected.values(), *flushed):
            # A message without a subject was never sent.
            with suppress(ValueError):
                subject = self.target.subject.of(message)
                if json.dumps(subject, ensure_ascii=False) in problem:
                    self.refuse(delivery, message, RETRYABLE, f"login: {self.peer}: {told} {subject}")
        self._expected = {key: each for key, each in self._expected.items() if not each[0].is_settled}


def _check(own: Mapping[str, str], content_type: str) -> None:
    for name, value in (*own.items(), (messages.CONTENT_TYPE, content_type)):
        if not _NAME.fullmatch(name) or _CONTROL.search(value):
            raise MessageError(f"the message's header {name[:100]!r} can't be one of NATS")
