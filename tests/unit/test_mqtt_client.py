"""The MQTT client over bytes: what a broker's acknowledgements mean, with any version of the library."""

from __future__ import annotations

import socket
import time
from collections import deque

import pytest
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from support.deliveries import SETTINGS, settle_all
from support.receiver import Listener
from ulak.messages.delivery import EndpointConfig, Message
from ulak.transports.broker.target import Defaults
from ulak.transports.dispatcher import Dispatcher
from ulak.transports.mqtt import reasons
from ulak.transports.mqtt.client import Client, Pipe
from ulak.transports.mqtt.target import Target
from ulak.transports.registry import transports


class Broker:
    """The other end of a pipe: what was written to it, and which messages were acknowledged."""

    def __init__(self, is_5: bool = True, **config: object) -> None:
        self.written = bytearray()
        self.acknowledged: list[int] = []
        config = {"broker": "127.0.0.1", "topic": "orders", **config}
        self.target = Target(EndpointConfig(1, "shop", 1, config, protocol="mqtt"), Defaults("1.0", 10.0, "/ulak"))
        self.pipe = Pipe(self.written.extend)
        self.client = Client(self.target, "test", is_5, True, self.pipe, self.acknowledged.append)

    def publish(self, qos: int) -> int:
        return int(self.client.publish("orders", b"{}", qos).mid)


CONNACK = b"\x20\x03\x00\x00\x00"


def test_the_greeting_says_what_the_broker_takes() -> None:
    broker = Broker()
    properties = Properties(PacketTypes.CONNACK)
    properties.ReceiveMaximum = 20
    properties.MaximumPacketSize = 1000
    properties.MaximumQoS = 1
    properties.RetainAvailable = 0
    packed = b"\x00\x00" + properties.pack()

    broker.client.read(b"\x20" + bytes([len(packed)]) + packed)

    greeting = broker.client.greeting
    assert greeting is not None
    assert (greeting.code, greeting.receive_maximum, greeting.largest_packet) == (0, 20, 1000)
    assert (greeting.largest_qos, greeting.may_retain) == (1, False)


def test_a_library_that_dials_by_itself_reaches_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if another version of it didn't ask us for its connection."""
    monkeypatch.delattr(Client, "_create_socket_connection")
    hosts = []

    def dial(address: tuple[str, int], *_: object, **__: object) -> None:
        hosts.append(address[0])
        raise OSError

    monkeypatch.setattr(socket, "create_connection", dial)
    with pytest.raises(OSError):
        Broker()

    assert [host.endswith(".invalid") for host in hosts] == [True]


@pytest.mark.parametrize("acknowledgement", [b"", b"\x10", b"\x10\x00"])
def test_a_message_without_subscribers_is_delivered(acknowledgement: bytes) -> None:
    broker = Broker()
    broker.client.read(CONNACK)
    mid = broker.publish(1)

    broker.client.read(bytes([0x40, 2 + len(acknowledgement), 0, mid]) + acknowledgement)

    assert broker.acknowledged == [mid]
    assert broker.client.refusals == {}


@pytest.mark.parametrize("qos", [1, 2])
@pytest.mark.parametrize("reason", [0x80, 0x87, 0x90, 0x95, 0x97, 0xFE])
def test_a_refusal_ends_a_message_whatever_the_reason_and_the_qos(qos: int, reason: int) -> None:
    broker = Broker()
    broker.client.read(CONNACK)
    mid = broker.publish(qos)
    written = len(broker.written)

    broker.client.read(bytes([0x40 if qos == 1 else 0x50, 3, 0, mid, reason]))

    assert broker.acknowledged == [mid]
    assert broker.client.refusals == {mid: reason}
    assert len(broker.written) == written


def test_qos_2_is_acknowledged_at_its_end() -> None:
    broker = Broker()
    broker.client.read(CONNACK)
    mid = broker.publish(2)

    broker.client.read(bytes([0x50, 2, 0, mid]))
    between = list(broker.acknowledged)
    # The identifier isn't known any more: the message was taken all the same.
    broker.client.read(bytes([0x70, 3, 0, mid, 0x92]))

    assert between == []
    assert broker.written.endswith(bytes([0x62, 2, 0, mid]))
    assert broker.acknowledged == [mid]
    assert broker.client.refusals == {}


@pytest.mark.parametrize("packet", [b"\xe0\x00", b"\xe0\x01\x8b", b"\xe0\x02\x8e\x00"])
def test_a_farewell_closes_the_pipe_and_says_why(packet: bytes) -> None:
    broker = Broker()
    broker.client.read(CONNACK)

    broker.client.read(packet)

    assert broker.pipe.is_closed
    assert broker.client.farewell == (packet[2] if len(packet) > 2 else 0)


def test_a_broker_of_an_older_version_says_so() -> None:
    broker = Broker()

    broker.client.read(b"\x20\x02\x00\x01")

    assert broker.client.greeting is not None
    assert broker.client.greeting.code in (1, reasons.UNSUPPORTED_VERSION)


def test_a_packet_without_end_is_not_read() -> None:
    broker = Broker()
    broker.client.read(CONNACK)

    with pytest.raises(ValueError, match="too large"):
        broker.client.read(b"\x30\xff\xff\xff\x7f")


class Cautious(Listener):
    """Takes two messages at once, and acknowledges the older of them when it has two, or the last."""

    def __init__(self, last: int) -> None:
        self.most = 0
        self.last = last
        super().__init__()

    def serve(self, connection: socket.socket, number: int) -> None:
        connection.recv(1000)
        # Receive maximum: 2.
        connection.sendall(b"\x20\x06\x00\x00\x03\x21\x00\x02")
        seen, held, data = 0, deque[bytes](), b""
        while chunk := connection.recv(65536):
            data += chunk
            while len(data) > 1 and len(data) >= 2 + data[1]:
                packet, data = data[2 : 2 + data[1]], data[2 + data[1] :]
                held.append(packet[8:10])
                seen += 1
            self.most = max(self.most, len(held))
            while held and (len(held) > 1 or seen == self.last):
                connection.sendall(b"\x40\x02" + held.popleft())


def test_no_more_messages_are_in_flight_than_the_broker_accepts() -> None:
    dispatcher = Dispatcher(transports(SETTINGS, "1.0", 8, print, time.time))
    with Cautious(last=10) as broker:
        config = {"broker": "127.0.0.1", "port": broker.port, "topic": "orders"}
        endpoint = dispatcher.parse(EndpointConfig(1, "shop", 1, config, protocol="mqtt"))
        # Small enough for a length of one byte.
        dispatcher.start(endpoint, [Message(n, f"id-{n}", 1, "{}") for n in range(10)])

        settled = settle_all(dispatcher)
        dispatcher.close()

    assert [each.outcome.error for each in settled] == [None]
    assert broker.most == 2


def test_packets_may_come_byte_by_byte() -> None:
    broker = Broker()
    mid = broker.publish(1)
    for byte in CONNACK:
        broker.client.read(bytes([byte]))
    for byte in bytes([0x40, 2, 0, mid]):
        broker.client.read(bytes([byte]))

    assert broker.acknowledged == [mid]


@pytest.mark.parametrize(
    ("code", "prefix"),
    [(0x80, "[RETRYABLE]"), (0x87, "[RETRYABLE]"), (0x97, "[RETRYABLE]"), (0x90, "[PERMANENT]"), (0x95, "[PERMANENT]")],
)
def test_only_what_is_wrong_with_the_message_is_for_good(code: int, prefix: str) -> None:
    assert reasons.prefix(code) == prefix
    assert f"0x{code:02X}" in reasons.words(code)
