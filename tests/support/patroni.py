"""Three members of a real Patroni with a real etcd, from the text of docker/OPERATIONS.md, on loopback.

Whatever comes to a member, and whatever it asks of etcd, goes over lines that can be cut.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Self

import psycopg

from support.cluster import DEFAULTS, PROJECT, WORK, Cluster, extension_path, memory_folder, stage_extension, tail
from support.ports import free_port, is_taken, start_on_free_port
from support.programs import start_program
from support.sessions import Result, Running, patience, wait_until

PYTHON = "/usr/bin/python3"
OPERATIONS = PROJECT / "docker" / "OPERATIONS.md"
# So that a failover takes half a minute less than with the defaults that the text has.
IN_A_HURRY = {"ttl": 20, "loop_wait": 5, "retry_timeout": 5}


def text_of(language: str) -> str:
    section = OPERATIONS.read_text().split("\n### With Patroni\n")[1].split("\n## ")[0]
    (text,) = re.findall(rf"^```{language}\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    return str(text)


class Lines:
    """TCP connections that are passed on until their line is cut. Then nothing comes through, and neither side is told."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._whole: dict[str, asyncio.Event] = {}
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def open(self, name: str, target: int) -> int:
        """The port from which that one is reached."""
        return int(self._call(self._open(name, target)))

    def cut(self, name: str) -> None:
        self._loop.call_soon_threadsafe(self._whole[name].clear)

    def mend(self, name: str) -> None:
        self._loop.call_soon_threadsafe(self._whole[name].set)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def _open(self, name: str, target: int) -> int:
        whole = self._whole.setdefault(name, asyncio.Event())
        whole.set()

        async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await whole.wait()
            try:
                there, back = await asyncio.open_connection("127.0.0.1", target)
            except OSError:
                writer.close()
                return
            await asyncio.gather(copy(reader, back), copy(there, writer))

        async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                while data := await reader.read(65536):
                    await whole.wait()
                    writer.write(data)
                    await writer.drain()
            await whole.wait()
            writer.close()

        server = await asyncio.start_server(pass_on, "127.0.0.1", 0)
        return int(server.sockets[0].getsockname()[1])


class Member(Cluster):
    """A server and the Patroni that looks after it."""

    def __init__(self, folder: Path, name: str, sockets: str) -> None:
        super().__init__(folder)
        # The server's lines are in it, too.
        self.log = folder / "patroni.log"
        self.name = name
        self.sockets = sockets
        self.config = folder / "patroni.yml"
        self.api = free_port()
        self.own_port = free_port()
        self.line_port = 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def port(self) -> int:
        return self.own_port

    @property
    def host(self) -> str:
        return self.sockets

    def run_patroni(self) -> None:
        program = shutil.which("patroni")
        assert program is not None
        modules = Path(program).parents[1] / "lib" / "python3" / "dist-packages"
        # The callback's psql has to find this server; on a machine of its own it would by itself.
        here = {"PGHOST": self.host, "PGPORT": str(self.port), "PGUSER": self.user, "PATH": os.environ["PATH"]}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [PYTHON, program, str(self.config)],
                env={**here, "PYTHONPATH": str(modules), "LANG": "C.UTF-8"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def is_leader(self) -> bool:
        return self.answers("select not pg_is_in_recovery()")

    def is_followed_by(self, member: Member) -> bool:
        return self.answers(
            "select exists (select from pg_stat_replication where application_name = %s and state = 'streaming')",
            member.name,
        )

    def answers(self, query: str, *parameters: str) -> bool:
        """With true. A server that doesn't answer at all isn't what it was asked for."""
        try:
            with self.connect(connect_timeout=round(patience())) as db:
                return db.execute(query, parameters).fetchone() == (True,)  # type: ignore[arg-type]
        except psycopg.Error:
            return False

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self.api, timeout=patience())
        try:
            connection.request("GET" if body is None else "POST", path, json.dumps(body) if body else None)
            answer = connection.getresponse()
            text = answer.read().decode()
            return json.loads(text) if text.startswith("{") else (answer.status, text)
        finally:
            connection.close()

    def signal(self, number: signal.Signals) -> None:
        """The whole machine: Patroni and its children first, so that it doesn't notice."""
        assert self._process is not None
        os.killpg(self._process.pid, number)
        for pid in (*self.processes(), *self.processes()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def die(self) -> None:
        """SIGKILL ends what is frozen, too. If it went on for a moment first, Patroni could take the lock from the new leader."""
        if self._process is not None:
            self.signal(signal.SIGKILL)
            self._process.wait()
            self._process = None
            wait_until(lambda: not self.processes(), "the end of all backends")


class Patroni:
    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="patroni-", dir=memory_folder() or WORK))
        self.lines = Lines()
        self.members: list[Member] = []
        self._etcd: subprocess.Popen[bytes] | None = None

    def start(self, count: int = 3) -> None:
        stage = stage_extension(self.folder)
        etcd_port = start_on_free_port(self._start_etcd, 2)
        callback = self.folder / "ulak-start"
        callback.write_text(text_of("sh").replace("-d app", "-d postgres"))
        callback.chmod(0o755)
        for number in range(1, count + 1):
            folder = self.folder / f"db{number}"
            folder.mkdir(mode=0o700)
            member = Member(folder, f"db{number}", tempfile.mkdtemp(prefix="ulak-", dir="/tmp"))
            self._configure(member, etcd_port, stage, callback)
            self.members.append(member)
        self.members[0].run_patroni()
        self.wait_until(self.members[0].is_leader, "the first leader")
        for member in self.members[1:]:
            member.run_patroni()
        self.wait_until(self.sync_standby, "a synchronous standby")

    def wait_until(self, predicate: Callable[[], Result], message: str) -> Result:
        try:
            return wait_until(predicate, message, interval=0.05)
        except TimeoutError as error:
            logs = [f"{member.name}:\n{tail(member.log)}" for member in self.members]
            raise TimeoutError("\n\n".join([str(error), *logs, f"etcd:\n{tail(self._etcd_log)}"])) from None

    @property
    def _etcd_log(self) -> Path:
        return self.folder / "etcd.log"

    def _start_etcd(self, port: int, peers_port: int) -> int:
        urls = [f"http://127.0.0.1:{each}" for each in (port, peers_port)]
        options = {
            "data-dir": str(self.folder / f"etcd-{port}"),
            "listen-client-urls": urls[0],
            "advertise-client-urls": urls[0],
            "listen-peer-urls": urls[1],
            "initial-advertise-peer-urls": urls[1],
            "initial-cluster": f"default={urls[1]}",
        }
        command = ["etcd", *(f"--{name}={value}" for name, value in options.items())]
        self._etcd = start_program(command, self._etcd_log, lambda: is_taken(port))
        return port

    def _configure(self, member: Member, etcd_port: int, stage: Path, callback: Path) -> None:
        """As the text says, but for addresses, and logins without a password."""
        import yaml  # type: ignore[import-untyped]  # Debian's, which Patroni needs.

        name = member.name
        member.line_port = self.lines.open(name, member.own_port)
        config = yaml.safe_load(text_of("yaml"))
        config["name"] = name
        config["restapi"] = {
            "listen": f"127.0.0.1:{member.api}",
            "connect_address": f"127.0.0.1:{self.lines.open(name, member.api)}",
        }
        # A proxy: etcd would tell its own address, and no line be in between.
        config["etcd3"] = {"hosts": f"127.0.0.1:{self.lines.open(name, etcd_port)}", "use_proxies": True}
        config["bootstrap"]["dcs"] |= IN_A_HURRY
        place, path = extension_path(stage)
        servers = config["postgresql"]
        servers["parameters"] = {
            **{
                key: ("on" if value else "off") if isinstance(value, bool) else value for key, value in DEFAULTS.items()
            },
            "fsync": "on",
            "full_page_writes": "on",
            "cron.host": member.host,
            "unix_socket_directories": member.host,
            place: path,
        }
        del servers["parameters"]["listen_addresses"]
        config["bootstrap"]["dcs"]["postgresql"]["parameters"]["cron.database_name"] = "postgres"
        servers["listen"] = f"127.0.0.1:{member.own_port}"
        servers["connect_address"] = f"127.0.0.1:{member.line_port}"
        servers["data_dir"], servers["bin_dir"] = str(member.data), str(member.bin)
        servers["pg_hba"] = [
            "local all all trust",
            "host all all 127.0.0.1/32 trust",
            "host replication all 127.0.0.1/32 trust",
        ]
        servers["pgpass"] = str(member.folder / "passwords")
        servers["callbacks"]["on_role_change"] = str(callback)
        member.config.write_text(yaml.safe_dump(config))

    # The cluster.

    def leader(self, other_than: Member | None = None) -> Member:
        def found() -> Member | None:
            return next((each for each in self.members if each is not other_than and each.is_leader()), None)

        leader = self.wait_until(found, "a leader")
        assert leader is not None
        return leader

    def sync_standby(self) -> str | None:
        with contextlib.suppress(OSError):
            members = self.members[0].ask("/cluster")["members"]
            return next((each["name"] for each in members if each["role"] == "sync_standby"), None)
        return None

    def dsn(self, user: str) -> str:
        ports = ",".join(str(member.line_port) for member in self.members)
        hosts = ",".join("127.0.0.1" for _ in self.members)
        return f"host={hosts} port={ports} dbname=postgres user={user} sslmode=disable"

    # What happens to a leader, and how it ends.

    def kill(self, member: Member) -> Callable[[], None]:
        member.die()
        return member.run_patroni

    def freeze(self, member: Member) -> Callable[[], None]:
        """Its watchdog resets it in the end. If it went on instead, Patroni 3.0 would now and then take the lock from the new
        leader: it writes it again by what it has cached (etcd3.py, _update_leader)."""
        member.signal(signal.SIGSTOP)

        def reset() -> None:
            member.die()
            member.run_patroni()

        return reset

    def cut_off(self, member: Member) -> Callable[[], None]:
        self.lines.cut(member.name)
        return lambda: self.lines.mend(member.name)

    def switch_over(self, member: Member) -> Callable[[], None]:
        # It is refused while no standby is fit to lead.
        ask = partial(member.ask, "/switchover", {"leader": member.name})
        return Running(lambda: wait_until(lambda: ask()[0] != 412, "a switchover", interval=0.5)).result

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *unused: object) -> None:
        for member in self.members:
            member.die()
            shutil.rmtree(member.sockets, ignore_errors=True)
        if self._etcd is not None:
            self._etcd.kill()
            self._etcd.wait()
        self.lines.close()
        shutil.rmtree(self.folder)
