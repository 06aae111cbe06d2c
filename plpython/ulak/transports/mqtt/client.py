"""The client library over our own connection: we feed it the bytes that arrive, and send the bytes that it writes.

Of paho's two versions (1.6 in Debian 12, 2 in Debian 13) the same methods are used, and some of those that handle a
packet are extended: version 1.6 reads the reason of an acknowledgement and tells nobody, both go on with a message that
was refused in the first step of QoS 2, both break at a reason that the broker should not have given, and both take
packets without end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paho.mqtt import client as paho
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from ulak.transports.mqtt import reasons
from ulak.transports.mqtt.target import Target

# Nothing resolves it: the library is told nothing that it could dial, should it ever try.
_NOWHERE = "our-own-connection.invalid"
# After this many seconds of silence the broker is pinged.
KEEPALIVE = 60
# Bytes of a packet. We subscribe to nothing, so brokers have only acknowledgements to send.
LONGEST_PACKET = 65536
# Packets in one read besides acknowledgements: answers to pings, and messages without a subscription.
UNASKED_PACKETS = 100
# Seconds that a broker keeps a session that isn't clean.
SESSION_EXPIRY = 3600
# MQTT 5's defaults, unless the broker says otherwise.
RECEIVE_MAXIMUM = 65535


class Pipe:
    """Stands in for a socket, as far as the client uses one."""

    def __init__(self, write: Callable[[bytes], object]) -> None:
        self._write = write
        self._data = b""
        self._position = 0
        self.is_closed = False

    def feed(self, data: bytes) -> None:
        self._data = self._data[self._position :] + data
        self._position = 0

    @property
    def has_more(self) -> bool:
        return self._position < len(self._data)

    def recv(self, size: int) -> bytes:
        start = self._position
        if start >= len(self._data):
            raise BlockingIOError
        self._position = min(start + size, len(self._data))
        return self._data[start : self._position]

    def send(self, data: bytes) -> int:
        self._write(data)
        return len(data)

    def close(self) -> None:
        self.is_closed = True

    def setblocking(self, _: bool) -> None:
        """It never blocks."""

    def fileno(self) -> int:
        return -1


class Greeting:
    """The broker's answer to CONNECT: 0 or a reason, and its limits."""

    def __init__(self, code: int, has_session: bool, properties: object) -> None:
        self.code = code
        # The broker continues an earlier session.
        self.has_session = has_session
        self.receive_maximum: int = getattr(properties, "ReceiveMaximum", RECEIVE_MAXIMUM)
        self.largest_packet: int | None = getattr(properties, "MaximumPacketSize", None)
        self.largest_qos: int = getattr(properties, "MaximumQoS", 2)
        self.may_retain: bool = bool(getattr(properties, "RetainAvailable", 1))
        self.keepalive: int = getattr(properties, "ServerKeepAlive", KEEPALIVE)


class Client(paho.Client):  # type: ignore[misc]
    def __init__(
        self,
        target: Target,
        client_id: str,
        is_5: bool,
        starts_clean: bool,
        pipe: Pipe,
        acknowledged: Callable[[int], object],
    ) -> None:
        options: dict[str, Any] = {"client_id": client_id, "protocol": paho.MQTTv5 if is_5 else paho.MQTTv311}
        if not is_5:
            options["clean_session"] = starts_clean
        if hasattr(paho, "CallbackAPIVersion"):
            options["callback_api_version"] = paho.CallbackAPIVersion.VERSION2
        super().__init__(reconnect_on_failure=False, **options)
        self.greeting: Greeting | None = None
        # The reason of the broker's DISCONNECT.
        self.farewell: int | None = None
        # Reasons by packet identifier, until the acknowledgement is reported.
        self.refusals: dict[int, int] = {}
        self._pipe = pipe
        self._packets_left = 0
        self.on_connect = self._greeted
        self.on_publish = lambda _client, _userdata, mid, *_: acknowledged(mid)
        if target.username is not None:
            self.username_pw_set(target.username, target.password)
        if target.will is not None:
            self.will_set(*target.will)
        self._connect(target, is_5, starts_clean)

    def read(self, data: bytes) -> None:
        """Handles complete packets. A broker that sends far more packets than we asked for doesn't speak MQTT."""
        self._pipe.feed(data)
        # A message of QoS 2 is acknowledged in two packets.
        self._packets_left = 2 * len(self._out_messages) + UNASKED_PACKETS
        while self._pipe.has_more and not self._pipe.is_closed:
            self.loop_read()
            if self._in_packet["remaining_length"] > LONGEST_PACKET:
                raise ValueError("the packet is too large")

    def _connect(self, target: Target, is_5: bool, starts_clean: bool) -> None:
        options: dict[str, Any] = {}
        if is_5:
            options["clean_start"] = starts_clean
            if not target.clean_session:
                options["properties"] = Properties(PacketTypes.CONNECT)
                options["properties"].SessionExpiryInterval = SESSION_EXPIRY
        # The library must not queue: the connection respects the broker's maximum, which isn't known yet.
        self.max_inflight_messages_set(RECEIVE_MAXIMUM)
        self.connect_async(_NOWHERE, target.address.port, KEEPALIVE, **options)
        self.reconnect()

    def _greeted(self, _client: object, _userdata: object, flags: Any, reason: Any, properties: Any = None) -> None:
        code = reason if isinstance(reason, int) else int(reason.value)
        has_session = flags["session present"] if isinstance(flags, dict) else flags.session_present
        self.greeting = Greeting(code, bool(has_session), properties)
        self._keepalive = self.greeting.keepalive

    # Overridden methods of the library.

    def _create_socket_connection(self) -> Pipe:
        return self._pipe

    def _packet_handle(self) -> Any:
        self._packets_left -= 1
        if self._packets_left < 0:
            raise ValueError("too many packets")
        return super()._packet_handle()

    def _handle_pubackcomp(self, cmd: str) -> Any:
        reason = self._take_reason()
        # Once a message of QoS 2 is accepted, the rest of the exchange only releases the identifier.
        if cmd == "PUBACK":
            self._note(reason)
        return super()._handle_pubackcomp(cmd)

    def _handle_pubrec(self) -> Any:
        if self._note(self._take_reason()):
            # Nothing follows: it ends like a message of QoS 1.
            return super()._handle_pubackcomp("PUBACK")
        return super()._handle_pubrec()

    def _handle_disconnect(self) -> Any:
        packet = self._in_packet["packet"]
        self.farewell = packet[0] if packet else 0
        self._sock_close()
        return paho.MQTT_ERR_SUCCESS

    def _take_reason(self) -> int:
        """Cuts the reason and the properties off the packet: the library fails on some of them, and needs neither."""
        packet = self._in_packet["packet"]
        if len(packet) <= 2:
            return 0
        self._in_packet["packet"] = packet[:2]
        self._in_packet["remaining_length"] = 2
        return int(packet[2])

    def _note(self, reason: int) -> bool:
        """Whether it is a refusal."""
        if reason < reasons.FIRST_REFUSAL:
            return False
        self.refusals[int.from_bytes(self._in_packet["packet"][:2], "big")] = reason
        return True
