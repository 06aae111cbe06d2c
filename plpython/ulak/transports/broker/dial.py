"""A connection to host and port, with TLS if asked for, made step by step without ever waiting."""

from __future__ import annotations

import errno
import os
import socket
import ssl
from collections.abc import Callable
from functools import partial
from ipaddress import ip_address
from typing import Any, Protocol

from ulak.messages.delivery import PERMANENT
from ulak.safety.address import Guard
from ulak.transports.broker.background import Background
from ulak.transports.broker.errors import DialError, words
from ulak.worker.waiting import READABLE, WRITABLE

_Address = tuple[int, Any]


class Descriptors(Protocol):
    """As worker.waiting.Descriptors, of which these may be a part."""

    def watch(self, descriptor: int, events: int) -> None: ...

    def forget(self, descriptor: int) -> None: ...


class Dial:
    """Call advance() when one of its descriptors is ready, until it returns the socket, which doesn't block."""

    def __init__(
        self,
        descriptors: Descriptors,
        guard: Guard,
        host: str,
        port: int,
        context: ssl.SSLContext | None,
        deadline: float,
        clock: Callable[[], float],
        opened: socket.socket | None = None,
        name: str | None = None,
    ) -> None:
        """`opened`: a connection that is there already and goes on with TLS. `name`: of the certificate, if it isn't
        that of the host."""
        self.deadline = deadline
        self._descriptors = descriptors
        self._guard = guard
        self._host = host
        self._port = port
        self._context = context
        self._clock = clock
        self._left: list[_Address] = []
        self._name = name or host
        self._socket = opened
        self._answer: Background[list[_Address]] | None = None
        self._is_connected = opened is not None
        # When the address that is being tried has had its time.
        self._turn_ends = deadline
        self._problem = "no address"
        if opened is not None:
            # TLS gives the descriptor another owner.
            descriptor = opened.fileno()
            self._begin_tls()
            descriptors.watch(descriptor, WRITABLE)
            return
        if refusal := guard.host_refusal(host):
            raise DialError(f"config: {refusal}")
        if _is_address(host):
            self._judge([(socket.AF_INET6 if ":" in host else socket.AF_INET, (host, port))])
            self._connect_next()
        else:
            self._answer = Background(partial(_resolve, host, port))
            descriptors.watch(self._answer.descriptor, READABLE)

    def next_deadline(self) -> float:
        return min(self.deadline, self._turn_ends)

    def advance(self) -> socket.socket | None:
        """The socket once it can be used, and it is the caller's then. Raises DialError."""
        if self._clock() >= self.deadline:
            raise DialError(f"timeout: no connection to {self._host}:{self._port} in time ({self._problem})")
        if self._answer is not None:
            if not self._answer.is_done():
                return None
            found = self._take_answer()
            self._judge(found)
            self._connect_next()
            return None
        assert self._socket is not None
        if not self._is_connected:
            failed = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if failed or self._clock() >= self._turn_ends:
                self._problem = f"connect: {os.strerror(failed or errno.ETIMEDOUT)}"
                self._drop()
                self._connect_next()
                return None
            try:
                self._socket.getpeername()
            except OSError:
                # Neither failed nor connected.
                return None
            self._is_connected = True
            self._turn_ends = self.deadline
            self._begin_tls()
        return self._go_on_with_tls()

    def close(self) -> None:
        self._drop()
        if self._answer is not None:
            self._descriptors.forget(self._answer.descriptor)
            self._answer.close()
            self._answer = None

    def _take_answer(self) -> list[_Address]:
        assert self._answer is not None
        answer, self._answer = self._answer, None
        self._descriptors.forget(answer.descriptor)
        answer.close()
        return answer.result()

    def _judge(self, found: list[_Address]) -> None:
        """Checks the address that will be dialled, never the name."""
        blocked = None
        for family, where in found:
            refusal = self._guard.refusal(where[0])
            if refusal is None:
                self._left.append((family, where))
            else:
                blocked = refusal
        if not self._left and blocked is not None:
            # A forbidden address stays forbidden, however often it is tried.
            raise DialError(f"blocked: {blocked}", PERMANENT)

    def _connect_next(self) -> None:
        while self._left:
            now = self._clock()
            self._turn_ends = now + (self.deadline - now) / len(self._left)
            family, where = self._left.pop(0)
            try:
                self._socket = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
                self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                failed = self._socket.connect_ex(where)
            except OSError as error:
                failed = error.errno or errno.EIO
            if failed in (0, errno.EINPROGRESS):
                assert self._socket is not None
                self._descriptors.watch(self._socket.fileno(), WRITABLE)
                return
            self._problem = f"connect: {os.strerror(failed)}"
            self._drop()
        raise DialError(f"{self._problem} ({self._host}:{self._port})")

    def _begin_tls(self) -> None:
        if self._context is not None:
            assert self._socket is not None
            self._descriptors.forget(self._socket.fileno())
            try:
                self._socket = self._context.wrap_socket(
                    self._socket, server_hostname=self._name, do_handshake_on_connect=False
                )
            except (OSError, ValueError) as error:
                # It is closed, and has no descriptor any more.
                self._socket = None
                raise DialError(f"tls: {words(error)} ({self._host}:{self._port})") from None

    def _go_on_with_tls(self) -> socket.socket | None:
        opened = self._socket
        assert opened is not None
        if isinstance(opened, ssl.SSLSocket):
            try:
                opened.do_handshake()
            except ssl.SSLWantReadError:
                self._descriptors.watch(opened.fileno(), READABLE)
                return None
            except ssl.SSLWantWriteError:
                self._descriptors.watch(opened.fileno(), WRITABLE)
                return None
            except ssl.SSLCertVerificationError as error:
                raise DialError(f"tls: {words(error)} ({self._host}:{self._port})") from None
            except (OSError, ValueError) as error:
                raise DialError(f"tls: no handshake: {words(error)} ({self._host}:{self._port})") from None
        self._descriptors.forget(opened.fileno())
        self._socket = None
        return opened

    def _drop(self) -> None:
        if self._socket is not None:
            self._descriptors.forget(self._socket.fileno())
            self._socket.close()
            self._socket = None


def _resolve(host: str, port: int) -> list[_Address]:
    """Waits for the resolver, so it runs in a thread. Raises DialError."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise DialError(f"resolve: {host}: {words(error)}") from None
    return [(family, where) for family, _, _, _, where in found]


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True
