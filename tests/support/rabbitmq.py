"""A real RabbitMQ on free ports of loopback, as a child process with a folder of its own."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Self

import pika
from pika.adapters.blocking_connection import BlockingChannel

from support.cluster import WORK, is_alive, memory_folder, run
from support.debian import unpacked_together
from support.files import write_whole
from support.ports import start_on_free_port
from support.receiver import Certificate
from support.sessions import hold, wait_until

# What it runs with. If they were installed, each would start a service.
PACKAGES = [
    "rabbitmq-server",
    "erlang-base",
    *(
        f"erlang-{part}"
        for part in (
            "asn1",
            "crypto",
            "eldap",
            "inets",
            "mnesia",
            "os-mon",
            "parsetools",
            "public-key",
            "runtime-tools",
            "ssl",
            "syntax-tools",
            "tools",
            "xmerl",
        )
    ),
]
USER = "ulak"
PASSWORD = "a password that must not be seen"
# May log in, and do nothing.
POWERLESS = "powerless"

CONFIG = """\
listeners.tcp.1 = 127.0.0.1:{port}
loopback_users = none
load_definitions = {folder}/definitions.json
disk_free_limit.absolute = 1MB
collect_statistics = none
max_message_size = 1000000
log.console = true
log.console.level = info
log.file = false
"""

# Clients have to show a certificate that its own has signed.
TLS = """\
listeners.ssl.1 = 127.0.0.1:{port}
ssl_options.cacertfile = {certificate}
ssl_options.certfile = {certificate}
ssl_options.keyfile = {key}
ssl_options.verify = verify_peer
ssl_options.fail_if_no_peer_cert = true
"""


class Message(NamedTuple):
    routing_key: str
    properties: pika.BasicProperties
    body: bytes


def programs() -> Path:
    """The folder that stands for /, with Erlang moved to where it was unpacked."""
    root = unpacked_together("rabbitmq", PACKAGES)
    launcher = root / "usr/lib/erlang/bin/erl"
    text = launcher.read_text()
    moved = text.replace("=/usr/lib/erlang\n", f"={root}/usr/lib/erlang\n")
    if moved != text:
        fresh = launcher.with_name(f"erl.{os.getpid()}")
        fresh.write_text(moved)
        fresh.chmod(0o755)
        fresh.rename(launcher)
    return root


def remove_abandoned() -> None:
    """Ends and removes the brokers of processes that were killed before they could do it."""
    for parent in (WORK, Path("/dev/shm")):
        for note in parent.glob("ulak-rabbitmq-*/owner"):
            with contextlib.suppress(PermissionError, ValueError, FileNotFoundError):
                owner, *children = map(int, note.read_text().split())
                if is_alive(owner):
                    continue
                for child in children:
                    if str(note.parent) in _environment(child):
                        with contextlib.suppress(ProcessLookupError):
                            os.killpg(child, signal.SIGKILL)
                shutil.rmtree(note.parent, ignore_errors=True)


def _environment(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def _group(leader: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            _state, _parent, group, *_ = stat.read_text().rpartition(")")[2].split()
            if int(group) == leader:
                found.append(int(stat.parent.name))
    return found


class RabbitMQ:
    """Made, and started with start()."""

    def __init__(self, certificate: Certificate | None = None) -> None:
        remove_abandoned()
        WORK.mkdir(parents=True, exist_ok=True)
        self.folder = Path(tempfile.mkdtemp(prefix="ulak-rabbitmq-", dir=memory_folder() or WORK))
        self.host = "127.0.0.1"
        self.certificate = certificate
        self._root = programs()
        (self._scripts,) = self._root.glob("usr/lib/rabbitmq/lib/rabbitmq_server-*/sbin")
        self._log = self.folder / "out"
        self._children: list[subprocess.Popen[bytes]] = []
        self._server: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        start_on_free_port(self._start_at, 4)
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    # Its life.

    def _start_at(self, port: int, tls_port: int, epmd_port: int, distribution_port: int) -> None:
        self.port = port
        self.tls_port = tls_port
        self._environment = self._make_environment(epmd_port, distribution_port)
        self._configure(self.certificate)
        self._epmd()
        self.start()

    def start(self) -> None:
        with self._log.open("wb") as log:
            self._server = self._spawn([self._scripts / "rabbitmq-server"], log)
        wait_until(self._is_started, "RabbitMQ", interval=0.05)

    def kill(self) -> None:
        """At once, as a power cut does."""
        if self._server is not None:
            os.killpg(self._server.pid, signal.SIGKILL)
            self._server.wait()
            self._children.remove(self._server)
            self._server = None

    def pause(self) -> None:
        """It keeps its connections and answers nothing."""
        assert self._server is not None
        for pid in _group(self._server.pid):
            hold(pid)

    def resume(self) -> None:
        assert self._server is not None
        os.killpg(self._server.pid, signal.SIGCONT)

    def remove(self) -> None:
        for child in reversed(self._children):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def control(self, *command: str) -> str:
        return run([self._scripts / "rabbitmqctl", "-q", *command], env=self._environment, cwd=self.folder)

    @contextlib.contextmanager
    def disk_alarm(self) -> Iterator[None]:
        """As if its disk were full: it takes nothing from publishers."""
        self.control("set_disk_free_limit", "1000000GB")
        try:
            yield
        finally:
            self.control("set_disk_free_limit", "1MB")

    def close_connections(self) -> None:
        self.control("close_all_connections", "the test wants it")

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def logged(self, text: str, since: int = 0) -> int:
        """How often it has logged this, beyond this many times."""
        return self.log.count(text) - since

    # As a client.

    def config(self, **more: Any) -> dict[str, Any]:
        """Of an endpoint."""
        return {"host": self.host, "port": self.port, "username": USER, "password": PASSWORD, **more}

    @contextlib.contextmanager
    def channel(self) -> Iterator[BlockingChannel]:
        credentials = pika.PlainCredentials(USER, PASSWORD)
        parameters = pika.ConnectionParameters(self.host, self.port, "/", credentials, heartbeat=0)
        connection = pika.BlockingConnection(parameters)
        try:
            yield connection.channel()
        finally:
            with contextlib.suppress(pika.exceptions.AMQPError):
                connection.close()

    def declare(self, exchange: str, kind: str = "topic", **arguments: Any) -> None:
        """An exchange, and a queue of the same name that gets all of it."""
        with self.channel() as channel:
            channel.exchange_declare(exchange, kind, durable=True)
            channel.queue_declare(exchange, durable=True, arguments=arguments)
            channel.queue_bind(exchange, exchange, "#")

    def delete(self, exchange: str) -> None:
        with self.channel() as channel:
            channel.exchange_delete(exchange)
            channel.queue_delete(exchange)

    def take(self, queue: str) -> list[Message]:
        """All that is in the queue."""
        found: list[Message] = []
        with self.channel() as channel:
            while True:
                method, properties, body = channel.basic_get(queue, auto_ack=True)
                if method is None:
                    return found
                found.append(Message(method.routing_key, properties, body))

    def purge(self, queue: str) -> None:
        with self.channel() as channel:
            channel.queue_purge(queue)

    def depth(self, queue: str) -> int:
        with self.channel() as channel:
            return int(channel.queue_declare(queue, passive=True).method.message_count)

    # How it is run.

    def _make_environment(self, epmd_port: int, distribution_port: int) -> dict[str, str]:
        folder = self.folder
        return {
            "PATH": f"{self._root}/usr/lib/erlang/bin:/usr/bin:/bin",
            "LANG": "C.UTF-8",
            # Its cookie is kept here.
            "HOME": str(folder),
            "ERL_EPMD_ADDRESS": self.host,
            "ERL_EPMD_PORT": str(epmd_port),
            "ERL_CRASH_DUMP_SECONDS": "0",
            "RABBITMQ_NODENAME": "ulak@localhost",
            "RABBITMQ_DIST_PORT": str(distribution_port),
            "RABBITMQ_MNESIA_BASE": str(folder / "data"),
            "RABBITMQ_LOG_BASE": str(folder / "log"),
            "RABBITMQ_LOGS": "-",
            "RABBITMQ_CONFIG_FILE": str(folder / "rabbitmq.conf"),
            "RABBITMQ_ADVANCED_CONFIG_FILE": str(folder / "advanced.config"),
            "RABBITMQ_CONF_ENV_FILE": str(folder / "none"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "plugins"),
            "RABBITMQ_GENERATED_CONFIG_DIR": str(folder / "generated"),
            "RABBITMQ_FEATURE_FLAGS_FILE": str(folder / "feature_flags"),
            "RABBITMQ_PID_FILE": str(folder / "pid"),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1} +S 2:2",
        }

    def _configure(self, certificate: Certificate | None) -> None:
        config = CONFIG.format(port=self.port, folder=self.folder)
        if certificate is not None:
            config += TLS.format(port=self.tls_port, certificate=certificate.certificate, key=certificate.key)
        (self.folder / "rabbitmq.conf").write_text(config)
        (self.folder / "plugins").write_text("[].\n")
        everything = {"vhost": "/", "configure": ".*", "write": ".*", "read": ".*"}
        definitions = {
            "vhosts": [{"name": "/"}, {"name": "shop"}],
            "users": [
                {"name": USER, "password": PASSWORD, "tags": "administrator"},
                {"name": POWERLESS, "password": PASSWORD, "tags": ""},
            ],
            "permissions": [
                {"user": USER, **everything},
                {"user": USER, **everything, "vhost": "shop"},
                {"user": POWERLESS, "vhost": "/", "configure": "^$", "write": "^$", "read": "^$"},
            ],
        }
        (self.folder / "definitions.json").write_text(json.dumps(definitions))

    def _epmd(self) -> None:
        """Erlang's own register of names. Started here, it isn't left behind as a daemon."""
        port = self._environment["ERL_EPMD_PORT"]
        with (self.folder / "epmd").open("wb") as log:
            self._spawn([self._root / "usr/lib/erlang/bin/epmd", "-address", self.host, "-port", port], log)

    def _spawn(self, command: list[str | Path], log: Any) -> subprocess.Popen[bytes]:
        child = subprocess.Popen(
            command,
            env=self._environment,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        self._children.append(child)
        pids = [os.getpid(), *(each.pid for each in self._children)]
        write_whole(self.folder / "owner", " ".join(map(str, pids)))
        return child

    def _is_started(self) -> bool:
        assert self._server is not None
        if self._server.poll() is not None:
            raise AssertionError(f"RabbitMQ ended: {self.log[-2000:]}")
        return "startup complete" in self.log
