"""A real HTTP(S) receiver on loopback: answers as told and remembers what arrived."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from support.sessions import wait_until


@dataclass(frozen=True)
class Received:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    # Which connection it came over, counted from 1.
    connection: int


@dataclass(frozen=True)
class Answer:
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    # Seconds before the answer.
    delay: float = 0
    # The connection is closed after the answer, without announcing it.
    close: bool = False


@dataclass(frozen=True)
class Certificate:
    certificate: Path
    key: Path


class Listener:
    """Accepts connections on a free port; each is served by serve() in a thread of its own."""

    def __init__(self, host: str = "127.0.0.1", certificate: Certificate | None = None, port: int = 0) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=1024)
        self._context = _server_context(certificate) if certificate else None
        self.port: int = self._socket.getsockname()[1]
        scheme = "https" if certificate else "http"
        self.origin = f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.port}"
        self.url = self.origin + "/hook"
        self.connections = 0
        self._open: set[socket.socket] = set()
        self._closing = threading.Event()
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def serve(self, connection: socket.socket, number: int) -> None:
        raise NotImplementedError

    def on(self, name: str) -> str:
        """The url with another host name for the same port."""
        scheme, _, path = self.url.partition("://")
        return f"{scheme}://{name}:{self.port}/{path.partition('/')[2]}"

    def close(self) -> None:
        """Stops listening and drops every connection, as a receiver that dies does."""
        self._closing.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._accepting.join()
        for connection in list(self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def wait(self, seconds: float | None = None) -> bool:
        """Sleeps until close(), or for so many seconds; true if it was closed."""
        return self._closing.wait(seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            self.connections += 1
            threading.Thread(target=self._run, args=(connection, self.connections), daemon=True).start()

    def _run(self, plain: socket.socket, number: int) -> None:
        connection = plain
        try:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._open.add(plain)
            if self._context is not None:
                connection = self._context.wrap_socket(plain, server_side=True)
                self._open.discard(plain)
                self._open.add(connection)
            self.serve(connection, number)
        except OSError:
            pass
        finally:
            self._open.discard(plain)
            self._open.discard(connection)
            connection.close()


class Receiver(Listener):
    """HTTP/1.1 with keep-alive. `answer` decides each answer; without it all is 200 and empty."""

    def __init__(
        self,
        answer: Callable[[Received], Answer] | Answer | None = None,
        host: str = "127.0.0.1",
        certificate: Certificate | None = None,
        port: int = 0,
    ) -> None:
        self.answer = answer or Answer()
        self.requests: list[Received] = []
        super().__init__(host, certificate, port)

    def wait_for(self, count: int) -> list[Received]:
        """The requests, once there are this many."""
        wait_until(lambda: len(self.requests) >= count, f"request {count}")
        return list(self.requests)

    def serve(self, connection: socket.socket, number: int) -> None:
        for request in read_requests(connection, number):
            self.requests.append(request)
            answer = self.answer if isinstance(self.answer, Answer) else self.answer(request)
            if answer.delay and self.wait(answer.delay):
                return
            connection.sendall(render(answer))
            if answer.close:
                return


def read_requests(connection: socket.socket, number: int = 0) -> Iterator[Received]:
    """Requests of one connection until it ends; bodies by content-length, which is all that libcurl sends here."""
    buffer = b""
    while True:
        while b"\r\n\r\n" not in buffer:
            chunk = connection.recv(65536)
            if not chunk:
                return
            buffer += chunk
        head, _, buffer = buffer.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        method, path, _ = first.split(" ", 2)
        pairs = (line.partition(":") for line in lines)
        headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        length = int(headers.get("content-length", 0))
        while len(buffer) < length:
            chunk = connection.recv(1 << 20)
            if not chunk:
                return
            buffer += chunk
        body, buffer = buffer[:length], buffer[length:]
        yield Received(method, path, headers, body, number)


def render(answer: Answer) -> bytes:
    headers = {"content-length": str(len(answer.body)), **answer.headers}
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 {answer.status} Answer\r\n{lines}\r\n".encode("latin-1") + answer.body


def make_certificate(
    folder: Path,
    names: tuple[str, ...] = ("localhost", "127.0.0.1"),
    days: tuple[int, int] = (-2, 30),
    file: str = "server",
    authority: Certificate | None = None,
) -> Certificate:
    """Valid between these days from today; signed by an authority, or by itself, being its own authority then."""
    key = signing_key = ec.generate_private_key(ec.SECP256R1())
    subject = issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0])])
    if authority is not None:
        signing_key = serialization.load_pem_private_key(authority.key.read_bytes(), None)  # type: ignore[assignment]
        issuer = x509.load_pem_x509_certificate(authority.certificate.read_bytes()).subject
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + datetime.timedelta(days=days[0]))
        .not_valid_after(now + datetime.timedelta(days=days[1]))
        .add_extension(x509.SubjectAlternativeName([_general_name(name) for name in names]), critical=False)
        .add_extension(x509.BasicConstraints(ca=authority is None, path_length=None), critical=True)
        .sign(signing_key, hashes.SHA256())
    )
    made = Certificate(folder / f"{file}.crt", folder / f"{file}.key")
    made.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    made.key.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return made


def shown_by_client(authority: Certificate) -> dict[str, str]:
    """Keys of a broker's config: a certificate that this authority has signed."""
    made = make_certificate(authority.key.parent, ("client",), file="client", authority=authority)
    return {"tls_cert": str(made.certificate), "tls_key": str(made.key)}


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _server_context(certificate: Certificate) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate.certificate, certificate.key)
    return context
