"""A connection to Redis: one XADD per message, many of them before the first answer."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence

from redis.connection import Connection as Client

from ulak.messages import cloudevents
from ulak.messages.delivery import RETRYABLE, Endpoint, Message
from ulak.transports.broker import message as messages
from ulak.transports.broker.connection import Connection, Lost, Surroundings
from ulak.transports.broker.delivery import Delivery
from ulak.transports.redis.replies import BadReply, Refusal, Replies, Status
from ulak.transports.redis.target import Target


class RedisConnection(Connection):
    target: Target

    def __init__(self, endpoint: Endpoint, surroundings: Surroundings) -> None:
        super().__init__(endpoint, surroundings)
        self._replies = Replies()
        self._greetings = len(self.target.greeting)
        # Messages in the order in which Redis will answer.
        self._expected: deque[tuple[Delivery, Message]] = deque()
        # Used only to pack commands; it never connects.
        self._client = Client()

    def connected(self) -> None:
        for command in self.target.greeting:
            self._command(command)

    def received(self, data: bytes) -> None:
        ended: Refusal | None = None
        try:
            for reply in self._replies.read(data):
                if self._greetings:
                    self._greeted(reply)
                elif self._expected:
                    delivery, message = self._expected.popleft()
                    if isinstance(reply, Status):
                        raise BadReply
                    if isinstance(reply, bytes):
                        self.acknowledge(delivery, message)
                    elif reply is None:
                        told = "there is no such stream, and nomkstream forbids creating it"
                        self.refuse(delivery, message, RETRYABLE, f"redis: {self.peer}: {told}")
                    else:
                        self.refuse(delivery, message, reply.fact.prefix, self._told(reply))
                        ended = reply if reply.fact.ends_connection else ended
                else:
                    # For example that the server has too many clients.
                    unasked = f"redis: {self.peer}: a reply that no command asked for"
                    raise Lost(self._told(reply) if isinstance(reply, Refusal) else unasked)
        except BadReply:
            raise Lost(f"network: {self.peer} doesn't speak the protocol of Redis") from None
        if ended is not None:
            raise Lost(self._told(ended))

    def send(self, delivery: Delivery) -> None:
        # The time for connecting no longer counts.
        delivery.deadline = min(delivery.deadline, self._clock() + self.target.command_timeout)
        super().send(delivery)

    def publish(self, delivery: Delivery, message: Message, encoded: tuple[bytes, ...]) -> None:
        self._expected.append((delivery, message))
        self._command(encoded)

    def _command(self, command: Sequence[bytes | str]) -> None:
        for piece in self._client.pack_command(*command):
            self.write(piece)

    def encode(self, message: Message) -> tuple[bytes, ...]:
        made = messages.content(message)
        fields = [b"message_id", message.message_id.encode(), b"payload", made.body]
        fields += (b"attempt", b"%d" % message.attempt)
        if message.created_at is not None:
            fields += (b"created_at", cloudevents.rfc3339(message.created_at).encode())
        if message.correlation_id is not None:
            fields += (b"correlation_id", message.correlation_id.encode())
        if message.ordering_key is not None:
            fields += (b"ordering_key", message.ordering_key.encode())
        if made.content_type != cloudevents.JSON:
            fields += (b"content_type", made.content_type.encode())
        if made.headers:
            fields += (b"headers", json.dumps(made.headers, ensure_ascii=False).encode())
        return b"XADD", self.target.stream.of(message).encode(), *self.target.options, *fields

    def _greeted(self, reply: bytes | Refusal | None) -> None:
        # A user with the right to XADD may lack the right to PING.
        is_harmless = isinstance(reply, Refusal) and reply.code == "NOPERM" and self.target.greeting == (("PING",),)
        if not isinstance(reply, bytes) and not is_harmless:
            # Wrong credentials aren't the message's fault.
            raise Lost(self._told(reply) if reply is not None else f"redis: {self.peer}: no answer to the login")
        self._greetings -= 1
        if not self._greetings:
            self.open()

    def _told(self, reply: Refusal) -> str:
        hint = f" ({reply.fact.hint})" if reply.fact.hint else ""
        return f"{reply.fact.kind}: {self.peer}: {reply.told}{hint}"
