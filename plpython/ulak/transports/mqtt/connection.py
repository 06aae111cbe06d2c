"""A connection to an MQTT broker: one PUBLISH per message, as many at once as the broker allows."""

from __future__ import annotations

import uuid
from collections import deque
from typing import NamedTuple

from paho.mqtt.properties import VariableByteIntegers

from ulak.messages import bulkhead
from ulak.messages.delivery import RETRYABLE, Endpoint, Message, MessageError
from ulak.transports.broker import message as messages
from ulak.transports.broker.connection import Connection, Lost, Surroundings
from ulak.transports.broker.delivery import Delivery
from ulak.transports.mqtt import reasons
from ulak.transports.mqtt.client import Client, Pipe
from ulak.transports.mqtt.target import Target, text_problem

# How many times in each keepalive interval it is checked whether a ping is due.
_LOOKS = 4
_DISCONNECT = b"\xe0\x00"
# Bytes of a packet besides topic, properties and payload.
_OVERHEAD = 16
# How properties of a PUBLISH begin.
_CONTENT_TYPE, _USER_PROPERTY = b"\x03", b"\x26"


class _Properties(bytes):
    """Passed to the library in place of its own class, which needs 30 us per message, half of the total cost."""

    def pack(self) -> bytes:
        return bytes(VariableByteIntegers.encode(len(self))) + self


class _Packet(NamedTuple):
    topic: str
    body: bytes
    # None before version 5 of the protocol.
    properties: _Properties | None


class MqttConnection(Connection):
    """Speaks version 5. A broker that doesn't know it is dialled again with 3.1.1, which has no properties: only the
    payload is sent."""

    target: Target
    # Both belong to the current socket.
    _client: Client
    _pipe: Pipe

    def __init__(self, endpoint: Endpoint, surroundings: Surroundings) -> None:
        super().__init__(endpoint, surroundings)
        self._is_5 = True
        self._starts_clean = self.target.clean_session
        # Messages that wait because the broker's receive maximum is reached.
        self._unpublished: deque[tuple[Delivery, Message]] = deque()
        # By packet identifier: the message that the acknowledgement will be for.
        self._expected: dict[int, tuple[Delivery, Message]] = {}
        # QoS 0 is never acknowledged: these are delivered once they are written.
        self._unwritten: list[tuple[Delivery, Message]] = []
        self._receive_maximum = 0
        self._largest: int | None = None
        # Seconds between two checks whether a ping is due.
        self._look_seconds = 0.0
        self._says_goodbye = True

    def connected(self) -> None:
        self._pipe = Pipe(self.write)
        self._client = Client(
            self.target, self._client_id(), self._is_5, self._starts_clean, self._pipe, self._acknowledged
        )

    def received(self, data: bytes) -> None:
        self._client.read(data)
        if not self.is_open and self._client.greeting is not None:
            self._greeted()
        elif self._pipe.is_closed:
            raise Lost(self._farewell())
        else:
            self._publish_all()

    def send(self, delivery: Delivery) -> None:
        self._unpublished.extend([(delivery, message) for message in delivery.messages])
        self._publish_all()

    def timer_passed(self) -> None:
        self.timer_at = self._clock() + self._look_seconds
        self._client.loop_misc()
        if self._pipe.is_closed:
            raise Lost(f"timeout: {self.peer} doesn't answer to a ping")

    def lose(self, problem: str, prefix: str = RETRYABLE) -> None:
        if not self._is_5 and problem.startswith("network: ") and (topic := self._dotted()) is not None:
            problem = f"mqtt: dotted: {self.peer} closed the connection after a message for topic {topic}"
        # Without a DISCONNECT the broker publishes the will.
        self._says_goodbye = False
        super().lose(problem, prefix)

    def _dotted(self) -> str | None:
        """The topic that may have made the broker leave: NATS' gateway speaks 3.1.1 and accepts no dot in a topic."""
        for _, message in [*self._expected.values(), *self._unwritten][:1]:
            topic = self.target.topic.of(message)
            return topic if "." in topic else None
        return None

    def farewell(self) -> bytes:
        return _DISCONNECT if self._says_goodbye else b""

    def flush(self) -> None:
        super().flush()
        if self._unwritten and not self._unsent:
            written, self._unwritten = self._unwritten, []
            for delivery, message in written:
                self.acknowledge(delivery, message)

    def _client_id(self) -> str:
        """Client ids must be unique, and there are several workers, so each connection adds a random part. A session
        that is to be found again needs its id unchanged."""
        given = self.target.client_id
        return given if given and not self.target.clean_session else f"{given or 'ulak'}-{uuid.uuid4().hex[:12]}"

    def _greeted(self) -> None:
        greeting = self._client.greeting
        assert greeting is not None
        target = self.target
        if greeting.code in (1, reasons.UNSUPPORTED_VERSION) and self._is_5:
            self._is_5 = False
            self.dial_again()
        elif greeting.has_session and not self._starts_clean:
            # The session may hold half-finished messages of QoS 2, and the broker would mistake ours for one of them if
            # the packet identifiers match. So the session must start clean; say goodbye first, or the broker publishes
            # the will.
            self._starts_clean = True
            self.write(_DISCONNECT)
            self.flush()
            self.dial_again()
        elif greeting.code:
            # Wrong credentials aren't the message's fault.
            raise Lost(reasons.told(self.peer, greeting.code))
        elif target.qos > greeting.largest_qos:
            raise Lost(f"mqtt: {self.peer}: takes messages up to QoS {greeting.largest_qos}, not {target.qos}")
        elif target.retain and not greeting.may_retain:
            raise Lost(f"mqtt: {self.peer}: doesn't retain messages")
        else:
            self._receive_maximum = greeting.receive_maximum
            self._largest = greeting.largest_packet
            if greeting.keepalive:
                self._look_seconds = greeting.keepalive / _LOOKS
                self.timer_at = self._clock() + self._look_seconds
            self.open()

    def _publish_all(self) -> None:
        while self._unpublished and len(self._expected) < self._receive_maximum:
            delivery, message = self._unpublished.popleft()
            self.send_message(delivery, message)
            self.settle(delivery)

    def encode(self, message: Message) -> _Packet:
        topic = self.target.topic.of(message)
        made = messages.content(message, self.target.events)
        properties = _properties(message, made) if self._is_5 else None
        size = len(made.body) + len(topic.encode()) + len(properties or b"") + _OVERHEAD
        self.check_size(size, self._largest)
        return _Packet(topic, made.body, properties)

    def publish(self, delivery: Delivery, message: Message, encoded: _Packet) -> None:
        topic, body, properties = encoded
        try:
            published = self._client.publish(topic, body, self.target.qos, self.target.retain, properties)
        # The library can't encode the packet.
        except (ValueError, TypeError) as error:
            delivery.fail(message, bulkhead.unbuildable(error))
            return
        if published.rc != 0:
            self.refuse(delivery, message, RETRYABLE, f"mqtt: {self.peer}: can't be published: {int(published.rc)}")
        elif self.target.qos == 0:
            self._unwritten.append((delivery, message))
        else:
            self._expected[published.mid] = delivery, message

    def _acknowledged(self, mid: int) -> None:
        refusal = self._client.refusals.pop(mid, None)
        delivery, message = self._expected.pop(mid, (None, None))
        if delivery is None or message is None:
            return
        if refusal is None:
            self.acknowledge(delivery, message)
        else:
            self.refuse(delivery, message, reasons.prefix(refusal), reasons.told(self.peer, refusal))

    def _farewell(self) -> str:
        reason = self._client.farewell
        if reason is None:
            return f"network: {self.peer} doesn't speak the protocol of MQTT"
        return f"mqtt: {self.peer} closed the connection" + (f": {reasons.words(reason)}" if reason else "")


def _properties(message: Message, made: messages.Content) -> _Properties:
    # Attributes of an event have no prefix here: one replaces a header of the same name.
    found = messages.headers(message, made, "")
    packed: list[bytes] = []
    for name, value in found.items():
        if wrong := text_problem(name) or text_problem(value):
            raise MessageError(f"the message's {name[:100]} {wrong}")
        if name == messages.CONTENT_TYPE:
            packed += (_CONTENT_TYPE, _text(value))
        else:
            packed += (_USER_PROPERTY, _text(name), _text(value))
    return _Properties(b"".join(packed))


def _text(text: str) -> bytes:
    encoded = text.encode()
    return len(encoded).to_bytes(2, "big") + encoded
