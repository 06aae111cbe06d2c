"""A connection over our own socket, from dialling to losing it. The protocol defines what is said over it."""

from __future__ import annotations

import contextlib
import socket
import ssl
from abc import abstractmethod
from functools import partial

from ulak.messages.delivery import Endpoint
from ulak.transports.broker.dial import dial
from ulak.transports.broker.errors import Lost as Lost
from ulak.transports.broker.errors import words
from ulak.transports.broker.link import Link
from ulak.transports.broker.link import Surroundings as Surroundings
from ulak.transports.broker.target import Address
from ulak.transports.transport import READABLE, WRITABLE

# Bytes of one read, and how many reads one connection gets before the others have their turn.
_READ_AT_ONCE = 256 * 1024
_READS = 4


class Connection(Link):
    # True: the broker speaks first, in the clear, and the protocol then calls begin_tls().
    tls_comes_later = False

    def __init__(self, endpoint: Endpoint, surroundings: Surroundings) -> None:
        super().__init__(endpoint, surroundings)
        self.address: Address = endpoint.target.address
        self._context: ssl.SSLContext | None = None
        # The socket is in _shaking during the TLS handshake, and in _socket once it can be used.
        self._shaking: ssl.SSLSocket | None = None
        self._socket: socket.socket | None = None
        self._unsent = bytearray()
        self._is_writing = False
        self._has_left = False

    # A protocol defines these, besides encode() and publish().

    @abstractmethod
    def connected(self) -> None:
        """The socket can be used: greet the broker, and call open() once it has accepted the greeting."""

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
        """Starts over with a new socket, within the time that is left: for another version of the protocol, or
        another address."""
        self.address = address or self.address
        self._hang_up()
        self._unsent.clear()
        self._is_writing = False
        self.dial()

    def begin_tls(self) -> None:
        """Starts TLS over the same socket; connected() is called when the handshake is done."""
        assert self._socket is not None and self._context is not None
        self.forget(self._socket.fileno())
        opened, self._socket = self._socket, None
        name = self.address.name or self.address.host
        try:
            self._shaking = self._context.wrap_socket(opened, server_hostname=name, do_handshake_on_connect=False)
        except (OSError, ValueError) as error:
            raise Lost(f"tls: {words(error)} ({self.peer})") from None
        self._shake_hands(self._shaking)

    @property
    def peer(self) -> str:
        return f"{self.address.host}:{self.address.port}"

    # Link and the transport call these.

    def dial(self) -> None:
        self.is_dialled = True
        where = self.address
        self._context = None if where.tls is None else where.tls()
        seconds = self._opens_until - self._clock()
        self.in_background(partial(dial, self._surroundings.guard, where.host, where.port, seconds), self._dialled)

    def ready(self, events: int) -> None:
        if self._shaking is not None:
            self._shake_hands(self._shaking)
        elif events & ~WRITABLE:
            self.hear()

    def hear(self) -> None:
        # A broker that never stops sending must not block the worker: the rest is read next time.
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

    def flush(self) -> None:
        while self._unsent and self._socket is not None:
            try:
                sent = self._socket.send(self._unsent)
            except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
                break
            del self._unsent[:sent]
        if self._is_writing != bool(self._unsent):
            self._watch_socket()

    def leave(self) -> int | None:
        """Says goodbye; the descriptor on which the broker will answer, if it does. Nothing is sent after it."""
        self._has_left = True
        last = self.farewell()
        if self._socket is None or not last or self._unsent:
            return None
        # If it can't be written at once, skip it.
        with contextlib.suppress(OSError):
            self._socket.send(last)
            return self._socket.fileno()
        return None

    def close(self) -> None:
        super().close()
        if not self._has_left:
            self.leave()
        self._hang_up()

    def _dialled(self, opened: socket.socket) -> None:
        self._socket = opened
        if self._context is not None and not self.tls_comes_later:
            self.begin_tls()
        else:
            self._watch_socket()
            self.connected()

    def _shake_hands(self, shaking: ssl.SSLSocket) -> None:
        try:
            shaking.do_handshake()
        except ssl.SSLWantReadError:
            self.watch(shaking.fileno(), READABLE)
            return
        except ssl.SSLWantWriteError:
            self.watch(shaking.fileno(), WRITABLE)
            return
        except ssl.SSLCertVerificationError as error:
            raise Lost(f"tls: {words(error)} ({self.peer})") from None
        except (OSError, ValueError) as error:
            raise Lost(f"tls: no handshake: {words(error)} ({self.peer})") from None
        self._socket, self._shaking = shaking, None
        self._watch_socket()
        self.connected()

    def _hang_up(self) -> None:
        self._drop_background(*self._background)
        for each in (self._shaking, self._socket):
            if each is not None:
                self.forget(each.fileno())
                each.close()
        self._shaking = self._socket = None

    def _watch_socket(self) -> None:
        if self._socket is not None:
            self._is_writing = bool(self._unsent)
            self.watch(self._socket.fileno(), READABLE | WRITABLE if self._is_writing else READABLE)
