"""nats-server as a child process on loopback, and a client of a few lines that makes streams and reads what is in them."""

from __future__ import annotations

import base64
import json
import shutil
import signal
import socket
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Self

from support.ports import start_on_free_port
from support.receiver import Certificate
from support.sessions import hold, patience, wait_until


class Received(NamedTuple):
    subject: str
    headers: dict[str, str]
    payload: bytes


class Nats:
    """config: further lines of its configuration; login: what a client of the tests sends in its CONNECT."""

    def __init__(
        self,
        folder: Path,
        *config: str,
        login: dict[str, str] | None = None,
        certificate: Certificate | None = None,
        jetstream: bool = True,
    ) -> None:
        self.folder = folder
        self.config = config
        self.login = login or {}
        self.certificate = certificate
        self.jetstream = jetstream
        start_on_free_port(self._start_at)

    def _start_at(self, port: int) -> None:
        self.port = port
        self.start()

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        lines = [f"listen: 127.0.0.1:{self.port}", f'server_name: "{self.folder.name}"', *self.config]
        if self.jetstream:
            lines.append(f'jetstream: {{store_dir: "{self.folder}/jetstream"}}')
        if self.certificate is not None:
            own = self.certificate
            lines.append(
                f'tls: {{cert_file: "{own.certificate}", key_file: "{own.key}", ca_file: "{own.certificate}", verify: true}}'
            )
        (self.folder / "config").write_text("\n".join(lines) + "\n")
        program = shutil.which("nats-server")
        assert program is not None
        command = [program, "-c", str(self.folder / "config"), "-l", str(self.folder / "log")]
        self._process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        wait_until(self._answers, message="nats-server")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def restart(self) -> None:
        self.kill()
        self.start()

    def stop(self) -> None:
        """Its kernel accepts connections and bytes, and it answers nothing."""
        hold(self._process.pid)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def reload(self, *config: str) -> None:
        """With other lines of configuration."""
        self.config = config
        text = (self.folder / "config").read_text().splitlines()
        (self.folder / "config").write_text("\n".join([*text[:2], *config, *text[2 + len(config) :]]) + "\n")
        self._process.send_signal(signal.SIGHUP)

    @contextmanager
    def client(self, **login: str) -> Iterator[Client]:
        client = Client(self.port, login or self.login, self.certificate)
        try:
            yield client
        finally:
            client.close()

    def create_stream(self, name: str, *subjects: str, **config: Any) -> str:
        with self.client() as client:
            client.api(f"STREAM.CREATE.{name}", {"name": name, "subjects": subjects, "storage": "file", **config})
        return name

    def update_stream(self, name: str, *subjects: str, **config: Any) -> None:
        with self.client() as client:
            client.api(f"STREAM.UPDATE.{name}", {"name": name, "subjects": subjects, "storage": "file", **config})

    def delete_stream(self, name: str) -> None:
        with self.client() as client:
            client.api(f"STREAM.DELETE.{name}", {})

    def count(self, stream: str) -> int:
        with self.client() as client:
            return int(client.api(f"STREAM.INFO.{stream}", {})["state"]["messages"])

    def connections(self) -> int:
        """Of clients, ever, this one included."""
        with self.client() as client:
            return int(client.info["client_id"])

    def stored(self, stream: str) -> list[Received]:
        """What is in a stream, in its order."""
        with self.client() as client:
            state = client.api(f"STREAM.INFO.{stream}", {})["state"]
            found = []
            for number in range(max(1, state["first_seq"]), state["last_seq"] + 1):
                one = client.api(f"STREAM.MSG.GET.{stream}", {"seq": number})["message"]
                headers = parse_headers(base64.b64decode(one.get("hdrs", "")))
                found.append(Received(one["subject"], headers, base64.b64decode(one.get("data", ""))))
            return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *unused: object) -> None:
        self.kill()

    def _answers(self) -> bool:
        try:
            with self.client():
                return True
        except OSError:
            assert self._process.poll() is None, (self.folder / "log").read_text()
            return False


class Client:
    """Waits for each answer."""

    def __init__(self, port: int, login: dict[str, str], certificate: Certificate | None) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), patience())
        # Unbuffered, since TLS begins behind the first line.
        line = b""
        while not line.endswith(b"\r\n"):
            byte = self._socket.recv(1)
            if not byte:
                raise ConnectionError
            line += byte
        self.info = json.loads(line[5:])
        if certificate is not None:
            context = ssl.create_default_context(cafile=str(certificate.certificate))
            context.load_cert_chain(certificate.certificate, certificate.key)
            self._socket = context.wrap_socket(self._socket, server_hostname="127.0.0.1")
        self._stream = self._socket.makefile("rb")
        options = {"verbose": False, "headers": True, "no_responders": True, **login}
        self.write(f"CONNECT {json.dumps(options)}\r\nPING\r\n")
        self.is_well = self._line() == b"PONG"
        self._number = 0
        if self.is_well:
            self.write("SUB _INBOX.tests 1\r\n")

    def write(self, text: str) -> None:
        self._socket.sendall(text.encode())

    def subscribe(self, subject: str) -> None:
        """Returns once the server knows of it."""
        self.write(f"SUB {subject} 2\r\nPING\r\n")
        assert self._line() == b"PONG"

    def publish(self, subject: str, payload: str) -> None:
        self.write(f"PUB {subject} {len(payload.encode())}\r\n{payload}\r\n")

    def take(self) -> Received:
        """The next message."""
        while (line := self._line()).split()[0] not in (b"MSG", b"HMSG"):
            if line == b"PING":
                self.write("PONG\r\n")
        words = line.split()
        data = self._stream.read(int(words[-1]) + 2)[:-2]
        size = int(words[-2]) if words[0] == b"HMSG" else 0
        return Received(words[1].decode(), parse_headers(data[:size]), data[size:])

    def api(self, name: str, request: dict[str, Any]) -> dict[str, Any]:
        payload = json.dumps(request)
        self.write(f"PUB $JS.API.{name} _INBOX.tests {len(payload.encode())}\r\n{payload}\r\n")
        answer: dict[str, Any] = json.loads(self.take().payload)
        assert "error" not in answer, answer
        return answer

    def close(self) -> None:
        self._stream.close()
        self._socket.close()

    def _line(self) -> bytes:
        line = self._stream.readline()
        if not line:
            raise ConnectionError
        return line.rstrip()


def parse_headers(block: bytes) -> dict[str, str]:
    pairs = (line.partition(":") for line in block.decode().split("\r\n")[1:] if line)
    return {name: value.strip() for name, _, value in pairs}
