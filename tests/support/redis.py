"""redis-server as a child process on loopback: the program that Debian's redis-tools brings, with nothing of the system's."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path
from typing import Any, Self

import redis

from support.ports import start_on_free_port
from support.receiver import Certificate
from support.sessions import hold, wait_until

# One program under several names; it goes by the one that it is started with.
PROGRAM = "/usr/bin/redis-check-rdb"


class Redis:
    """Writes its commands to a file before it answers, so that kill() loses nothing that was acknowledged."""

    def __init__(self, folder: Path, *options: str, certificate: Certificate | None = None) -> None:
        self.folder = folder
        self.certificate = certificate
        self.options = ["--appendonly", "yes", "--appendfsync", "no", "--save", "", *options]
        self.password: str | None = None
        start_on_free_port(self._start_at)

    def _start_at(self, port: int) -> None:
        self.port = port
        self.start()

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        where = ["--bind", "127.0.0.1", "--dir", str(self.folder), "--logfile", str(self.folder / "log")]
        if self.certificate is None:
            where += ["--port", str(self.port)]
        else:
            where += ["--port", "0", "--tls-port", str(self.port), "--tls-auth-clients", "yes"]
            where += ["--tls-cert-file", str(self.certificate.certificate), "--tls-key-file", str(self.certificate.key)]
            where += ["--tls-ca-cert-file", str(self.certificate.certificate)]
        self._process = subprocess.Popen(["redis-server", *where, *self.options], executable=PROGRAM)
        wait_until(self._answers, message="redis-server")

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

    def client(self) -> redis.Redis:
        tls: dict[str, Any] = {}
        if self.certificate is not None:
            own = str(self.certificate.certificate)
            tls = {"ssl": True, "ssl_ca_certs": own, "ssl_certfile": own, "ssl_keyfile": str(self.certificate.key)}
        return redis.Redis(port=self.port, decode_responses=True, password=self.password, **tls)

    def config(self, **settings: str) -> None:
        """Until reset(); names have underscores for dashes."""
        with self.client() as client:
            for name, value in settings.items():
                client.config_set(name.replace("_", "-"), value)

    def entries(self, stream: str) -> list[dict[str, str]]:
        """What was added to a stream, in its order."""
        with self.client() as client:
            return [fields for _, fields in client.xrange(stream)]

    def reset(self) -> None:
        """As it was made."""
        with self.client() as client:
            client.config_set("maxmemory", "0")
            client.flushall()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *unused: object) -> None:
        self.kill()

    def _answers(self) -> bool:
        try:
            with self.client() as client:
                return bool(client.ping())
        except redis.exceptions.AuthenticationError:
            return True
        except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError):
            assert self._process.poll() is None, (self.folder / "log").read_text()
            return False
