"""A connection over a socket of ours, from dialling a broker to losing it. A protocol defines what is said over it."""

from __future__ import annotations

import contextlib
import socket
import ssl
from abc import abstractmethod
from collections.abc import Callable
from typing import NamedTuple

from ulak.messages.delivery import Endpoint
from ulak.safety.mask import Mask
from ulak.transports.broker.delivery import Delivery
from ulak.transports.broker.dial import Dial
from ulak.transports.broker.errors import Lost as Lost
from ulak.transports.broker.link import Link
from ulak.transports.broker.link import Surroundings as Surroundings
from ulak.worker.waiting import READABLE, WRITABLE

# Bytes of one read, and how many reads one connection gets before the others have their turn.
_READ_AT_ONCE = 256 * 1024
_READS = 4


class Address(NamedTuple):
    host: str
    port: int
    # Makes the context of TLS, anew for each connection since files change; raises ConfigError.
    tls: Callable[[], ssl.SSLContext] | None = None
    # The name that the certificate must be for; None: the host.
    name: str | None = None


class Connection(Link):
    # The broker speaks first, in the clear, and the protocol calls begin_tls() when it has.
    tls_comes_later = False

    def __init__(
        self, endpoint: Endpoint, address: Address, mask: Mask, connect_timeout: float, surroundings: Surroundings
    ) -> None:
        super().__init__(endpoint, mask, connect_timeout, surroundings)
        self._address = address
        self._has_left = False
        self._socket: socket.socket | None = None
        self._unsent = bytearray()
        self._is_writing = False
        self._dial: Dial | None = None
        self._guarded(self._begin)

    # A protocol defines these, besides send().

    @abstractmethod
    def connected(self) -> None:
        """The socket is there: greet the broker, and call open() when it has taken the greeting."""

    @abstractmethod
    def received(self, data: bytes) -> None:
        """The broker has sent these bytes. May raise Lost."""

    def farewell(self) -> bytes:
        """The last bytes to write before the connection is closed, such as MQTT's DISCONNECT."""
        return b""

    # A protocol may call these.

    def write(self, data: bytes) -> None:
        self._unsent += data

    def dial_again(self, address: Address | None = None) -> None:
        """Begins anew over another socket, within the time that is left to open it. For a broker that wants
        another version of the protocol, or for another address."""
        self._address = address or self._address
        self._hang_up()
        self._unsent.clear()
        self._is_writing = False
        self._begin()

    def begin_tls(self) -> None:
        """Goes on with TLS over the same socket; connected() is called again when it is there."""
        assert self._socket is not None
        opened, self._socket = self._socket, None
        self._surroundings.descriptors.forget(opened.fileno())
        self._begin(opened)

    @property
    def peer(self) -> str:
        return f"{self._address.host}:{self._address.port}"

    # The transport calls these.

    def deliver(self, delivery: Delivery) -> None:
        super().deliver(delivery)
        self._guarded(self._flush)

    def next_deadline(self) -> float | None:
        deadline = super().next_deadline()
        if self._dial is None:
            return deadline
        dialled = self._dial.next_deadline()
        return dialled if deadline is None else min(deadline, dialled)

    def close(self) -> None:
        super().close()
        if not self._has_left:
            self.leave()
        self._hang_up()

    def leave(self) -> int | None:
        """Says goodbye; the descriptor of the broker's answer, if there is one. Nothing may be sent after it."""
        self._has_left = True
        last = self.farewell()
        if self._socket is None or not last or self._unsent:
            return None
        # If it can't be written at once, it is left out.
        with contextlib.suppress(OSError):
            self._socket.send(last)
            return self._socket.fileno()
        return None

    def _begin(self, opened: socket.socket | None = None) -> None:
        where = self._address
        has_tls = opened is not None or not self.tls_comes_later
        context = where.tls() if where.tls is not None and has_tls else None
        self._dial = Dial(
            self._surroundings.descriptors,
            self._surroundings.guard,
            where.host,
            where.port,
            context,
            self._opens_until,
            self._clock,
            opened,
            where.name,
        )

    def _hang_up(self) -> None:
        if self._dial is not None:
            self._dial.close()
            self._dial = None
        if self._socket is not None:
            self._surroundings.descriptors.forget(self._socket.fileno())
            self._socket.close()
            self._socket = None

    def ready(self, events: int) -> None:
        if self._dial is not None:
            made = self._dial.advance()
            if made is None:
                return
            self._dial = None
            self._socket = made
            self._watch()
            self.connected()
        elif events & ~WRITABLE:
            self._read()
        self._flush()

    def _read(self) -> None:
        # A broker that never stops sending must not keep the worker from everything else: the rest is read next time.
        for _ in range(_READS):
            if self._socket is None:
                return
            try:
                data = self._socket.recv(_READ_AT_ONCE)
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return
            if not data:
                raise Lost(f"network: {self.peer} closed the connection")
            self.received(data)
            # TLS may have buffered more than the kernel reports.
            if len(data) < _READ_AT_ONCE and not (isinstance(self._socket, ssl.SSLSocket) and self._socket.pending()):
                return

    def _flush(self) -> None:
        while self._unsent and self._socket is not None:
            try:
                sent = self._socket.send(self._unsent)
            except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
                break
            del self._unsent[:sent]
        if self._is_writing != bool(self._unsent):
            self._watch()

    def _watch(self) -> None:
        if self._socket is not None:
            self._is_writing = bool(self._unsent)
            events = READABLE | WRITABLE if self._is_writing else READABLE
            self._surroundings.descriptors.watch(self._socket.fileno(), events)

    def _hear_out(self) -> None:
        self._read()

    def _pass_time(self) -> None:
        if self._dial is not None and self._clock() >= self._dial.next_deadline():
            self.ready(0)
        # Input that arrived while the worker was busy elsewhere counts.
        self._read()
        super()._pass_time()
        self._flush()
