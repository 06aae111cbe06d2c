"""A private PostgreSQL cluster with the extension staged beside it, for tests, the demo, the bench and chaos."""

from __future__ import annotations

import contextlib
import fcntl
import lzma
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import sql

from support.files import write_whole
from support.ports import start_on_free_port
from support.sessions import hold, patience, wait_until

if TYPE_CHECKING:
    from support.janitor import Janitor

PROJECT = Path(__file__).resolve().parents[2]
PG_CONFIG = os.environ.get("PG_CONFIG", "pg_config")
WORK = Path(os.environ.get("ULAK_WORK", tempfile.gettempdir()))
# Cloning a database in memory takes a sixth of the time. Taken where it is at least as large as the tests need.
MEMORY = Path("/dev/shm")
MEMORY_NEEDED = 2 << 30

ROLES = ("ulak_admin", "ulak_application", "ulak_consumer", "ulak_monitor", "ulak_node", "ulak_worker")
TEMPLATE = "ulak_template"
NO_PG_CRON = "this server has no pg_cron"

Settings = dict[str, str | int | float | bool]

DEFAULTS: Settings = {
    "autovacuum_naptime": "10s",
    "cron.database_name": "postgres",
    # Debian 12's pg_cron makes every job wait for the longest one when background workers run them.
    "cron.use_background_workers": False,
    "fsync": False,
    "full_page_writes": False,
    "listen_addresses": "",
    "log_line_prefix": "%m [%p] %u@%d ",
    "max_connections": 100,
    "shared_preload_libraries": "pg_cron",
    "timezone": "UTC",
}


class CommandFailed(Exception):
    pass


def run(command: Sequence[str | Path], **options: Any) -> str:
    done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False, **options)
    if done.returncode != 0:
        raise CommandFailed(f"{' '.join(map(str, command))}: exit {done.returncode}\n{done.stdout}")
    return str(done.stdout)


def stage_extension(folder: Path, project: Path = PROJECT, pg_config: str = PG_CONFIG) -> Path:
    """`make install` into folder/stage, and the script of the last release beside it: nothing of the system is touched."""
    stage = folder / "stage"
    variables = [f"PG_CONFIG={pg_config}", f"BUILD={folder}/build", f"DESTDIR={stage}"]
    run(["make", "-s", "-C", str(project), "install", *variables])
    for path in (project / "sql/released").glob("ulak--*.sql.xz"):
        (control,) = stage.rglob("ulak.control")
        (control.parent / path.stem).write_bytes(lzma.decompress(path.read_bytes()))
    return stage


def major(pg_config: str = PG_CONFIG) -> int:
    """Of the server that pg_config belongs to."""
    return int(re.findall(r"\d+", run([pg_config, "--version"]))[0])


def extension_path(stage: Path, pg_config: str = PG_CONFIG) -> tuple[str, str]:
    """The setting that lets a server find what is staged, and its value. Before 18 there is only Debian's own."""
    if major(pg_config) < 18:
        return "extension_destdir", str(stage)
    share = run([pg_config, "--sharedir"]).strip()
    return "extension_control_path", f"{stage}{share}:$system"


def tail(file: Path, lines: int = 40) -> str:
    return "\n".join(file.read_text(errors="replace").splitlines()[-lines:]) if file.exists() else ""


def memory_folder() -> Path | None:
    """Where files live in memory, if there is plenty of it."""
    if not MEMORY.is_dir() or shutil.disk_usage(MEMORY).free < MEMORY_NEEDED:
        return None
    available = re.search(r"^MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return MEMORY if available and int(available[1]) << 10 >= 2 * MEMORY_NEEDED else None


def remove_abandoned() -> None:
    """Stops and removes the clusters of processes that were killed before they could do it."""
    for note in (*WORK.glob("cluster-*/owner"), *MEMORY.glob("ulak-cluster-*/owner")):
        # It can be locked while another process removes it.
        with contextlib.suppress(PermissionError, ValueError, FileNotFoundError, BlockingIOError), note.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not is_alive(int(file.read())):
                Cluster(note.parent).remove()


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


class Cluster:
    """`folder` holds data, log, staged extension; the socket has its own short path."""

    def __init__(self, folder: Path, pg_config: str = PG_CONFIG) -> None:
        self.folder = folder
        self.data = folder / "data"
        self.log = folder / "log"
        self.bin = Path(run([pg_config, "--bindir"]).strip())
        # The role that does everything, and the one that may end any session in a database that is to be dropped.
        self.user = self.superuser = "postgres"

    @classmethod
    def create(
        cls,
        folder: Path | None = None,
        *,
        settings: Settings | None = None,
        owned: bool = True,
        in_memory: bool = False,
        project: Path = PROJECT,
        pg_config: str = PG_CONFIG,
    ) -> Cluster:
        """Made and started. An owned cluster is removed by a later run if this process dies without doing so. One that
        may be in memory is there if there is room."""
        if folder is None and in_memory and (memory := memory_folder()):
            folder = Path(tempfile.mkdtemp(prefix="ulak-cluster-", dir=memory))
        elif folder is None:
            WORK.mkdir(parents=True, exist_ok=True)
            folder = Path(tempfile.mkdtemp(prefix="cluster-", dir=WORK))
        folder.mkdir(parents=True, exist_ok=True)
        if owned:
            write_whole(folder / "owner", str(os.getpid()))
        cluster = cls(folder, pg_config)
        defaults = cluster.prepare(project, pg_config)
        sockets = tempfile.mkdtemp(prefix="ulak-", dir="/tmp")
        initdb = [str(cluster.bin / "initdb"), "-D", str(cluster.data), "-U", cluster.user]
        run([*initdb, "-A", "trust", "-E", "UTF8", "--locale=C.UTF-8", "--no-sync", "--no-instructions"])
        cluster.configure(
            {
                **defaults,
                "cron.host": sockets,
                "unix_socket_directories": sockets,
                **(settings or {}),
            }
        )
        start_on_free_port(cluster.start_at)
        return cluster

    def prepare(self, project: Path, pg_config: str) -> Settings:
        """Puts there what the server is to find, before there is one, and returns its settings."""
        place, path = extension_path(stage_extension(self.folder, project, pg_config), pg_config)
        return {**DEFAULTS, place: path}

    def make_standby(self) -> Cluster:
        """A streaming standby of this cluster, started: with a port and a socket of its own, else as this one."""
        folder = Path(tempfile.mkdtemp(prefix=f"{self.folder.name}-standby-", dir=self.folder.parent))
        write_whole(folder / "owner", str(os.getpid()))
        standby = Cluster(folder)
        source = ["-h", self.host, "-p", str(self.port), "-U", self.user]
        run([self.bin / "pg_basebackup", "-D", standby.data, "-R", "-X", "stream", "-c", "fast", "--no-sync", *source])
        sockets = tempfile.mkdtemp(prefix="ulak-", dir="/tmp")
        standby.configure({"cron.host": sockets, "unix_socket_directories": sockets})
        start_on_free_port(standby.start_at)
        return standby

    def take_over(self, old: Cluster) -> None:
        """pg_upgrade of a cluster into this one, which is empty. Both are stopped; this one then has the other's address."""
        shutil.rmtree(self.host)
        self.configure({"cron.host": old.host, "port": old.port, "unix_socket_directories": old.host})
        with tempfile.TemporaryDirectory(prefix="ulak-", dir="/tmp") as sockets:
            places: list[str | Path] = ["-b", old.bin, "-B", self.bin, "-d", old.data, "-D", self.data]
            try:
                environment = {**os.environ, "PGCTLTIMEOUT": str(round(patience()))}
                run([self.bin / "pg_upgrade", *places, "-s", sockets, "-U", old.user], cwd=self.folder, env=environment)
            except CommandFailed as failure:
                logs = [tail(log) for log in sorted(self.folder.rglob("pg_upgrade_*.log"))]
                raise CommandFailed("\n".join([str(failure), *logs])) from None

    def promote(self) -> None:
        self._pg_ctl("promote")

    # Settings are appended to postgresql.conf: the last one counts.

    def configure(self, settings: Settings) -> None:
        with (self.data / "postgresql.conf").open("a") as file:
            for name, value in settings.items():
                text = {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)
                file.write("{} = '{}'\n".format(name, text.replace("'", "''")))

    def setting(self, name: str) -> str:
        return self._lines(name)[-1].split("'")[1]

    def has_setting(self, name: str) -> bool:
        return bool(self._lines(name))

    def _lines(self, name: str) -> list[str]:
        lines = (self.data / "postgresql.conf").read_text().splitlines()
        return [line for line in lines if line.startswith(name + " = ")]

    @property
    def port(self) -> int:
        return int(self.setting("port"))

    @property
    def host(self) -> str:
        return self.setting("unix_socket_directories")

    # The server's life.

    def start(self) -> None:
        self._pg_ctl("start", "-l", str(self.log))

    def start_at(self, port: int) -> None:
        self.configure({"port": port})
        self.start()

    def stop(self, mode: str = "fast") -> None:
        self._pg_ctl("stop", "-m", mode)

    def restart(self, mode: str = "fast") -> None:
        self.stop(mode)
        self.start()

    def reload(self) -> None:
        self._pg_ctl("reload")

    def kill(self) -> None:
        """kill -9 of the postmaster. Returns when its children are gone too: start() then is a crash recovery."""
        os.kill(self.postmaster_pid, signal.SIGKILL)
        self.thaw()
        wait_until(lambda: not self.processes(), message="the end of all backends")
        # Until somebody reaps it, the dead postmaster looks alive to the next one.
        for lock in (self.data / "postmaster.pid", *Path(self.host).glob(".s.PGSQL.*.lock")):
            lock.unlink()

    def freeze(self) -> None:
        """As a host whose storage hangs: the kernel still accepts connections, and no process answers."""
        # From then on there are no others.
        hold(self.postmaster_pid)
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)

    def thaw(self) -> None:
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def processes(self) -> list[int]:
        """Every process of the server: they work in its data directory."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if (process / "cwd").readlink() == self.data:
                    found.append(int(process.name))
        return found

    @property
    def postmaster_pid(self) -> int:
        return int((self.data / "postmaster.pid").read_text().splitlines()[0])

    def is_running(self) -> bool:
        return subprocess.run([self.bin / "pg_ctl", "-D", self.data, "status"], capture_output=True).returncode == 0

    def remove(self) -> None:
        if self.is_running():
            self.thaw()
            self.stop("immediate")
        # The process that made it may have been killed before it had a configuration.
        with contextlib.suppress(FileNotFoundError, LookupError):
            shutil.rmtree(self.host, ignore_errors=True)
        shutil.rmtree(self.folder)

    def _pg_ctl(self, *arguments: str) -> None:
        """Waits for the end of it. If it fails, the server's log says why."""
        options: list[str | Path] = ["-D", self.data, "-s", "-t", str(round(patience()))]
        try:
            run([self.bin / "pg_ctl", *options, *arguments], stdin=subprocess.DEVNULL)
        except CommandFailed as failure:
            raise CommandFailed(f"{failure}\n{tail(self.log)}") from None

    # Connections and programs.

    def dsn(self, database: str = "postgres", user: str | None = None) -> str:
        return f"host={self.host} port={self.port} dbname={database} user={user or self.user}"

    def connect(
        self, database: str = "postgres", role: str | None = None, autocommit: bool = True, **options: Any
    ) -> psycopg.Connection[Any]:
        """A role of the extension is entered through its login role (see install), so session_user is an ordinary
        member of it; any other role logs in as itself."""
        user = f"test_{role}" if role in ROLES else role
        return psycopg.connect(self.dsn(database, user), autocommit=autocommit, **options)

    def psql(self, database: str, command: str, *arguments: str) -> str:
        return self._psql(database, "-A", "-t", *arguments, "-c", command).rstrip("\n")

    def _psql(self, database: str, *arguments: str | Path) -> str:
        return run([self.bin / "psql", "-X", "-q", "-v", "ON_ERROR_STOP=1", "-d", self.dsn(database), *arguments])

    def dump(self, database: str, file: Path, *arguments: str) -> Path:
        run([self.bin / "pg_dump", "-d", self.dsn(database), "-f", file, *arguments])
        return file

    def restore(self, database: str, file: Path, *arguments: str) -> None:
        """Into an existing database: plain text by psql, everything else by pg_restore. Any error fails."""
        with file.open("rb") as opened:
            is_archive = opened.read(5) == b"PGDMP"
        if is_archive:
            run([self.bin / "pg_restore", "--exit-on-error", "-d", self.dsn(database), *arguments, file])
        else:
            self._psql(database, *arguments, "-f", file)

    # Databases.

    def execute(self, statement: str | sql.Composed, database: str = "postgres") -> None:
        with self.connect(database) as connection:
            connection.execute(statement)

    def create_database(self, name: str, template: str | None = None) -> str:
        """One that stays as long as the cluster, or until somebody drops it."""
        self._janitor(name, template).init()
        return name

    def drop_database(self, name: str) -> None:
        self._janitor(name).drop()

    @contextlib.contextmanager
    def database(self, name: str, template: str | None = None, options: str = "") -> Iterator[str]:
        """One for a while: empty, or a clone. Options are those of CREATE DATABASE."""
        with self._janitor(name, template, options):
            yield name

    def _janitor(self, *of: Any) -> Janitor:
        # Here, because it needs pytest, and the demo's machine has none.
        from support.janitor import Janitor

        return Janitor(self, *of)

    def install(self, database: str, version: str | None = None) -> None:
        """CREATE EXTENSION, of this version or of the project's own, and a login role for each of its roles."""
        wanted = sql.SQL("") if version is None else sql.SQL(" version {}").format(sql.Literal(version))
        with self.connect(database) as connection:
            # They have members, from a database before this one.
            connection.execute("set ulak.accept_roles = on")
            connection.execute(sql.SQL("create extension ulak{} cascade").format(wanted))
            # Another revision, which the bench compares with, may have fewer of them.
            for role in ROLES:
                if connection.execute("select to_regrole(%s)", [role]).fetchone() == (None,):
                    continue
                self.ensure_login(connection, f"test_{role}", member_of=role)
            self.ensure_login(connection, "nobody")

    def uninstall(self, database: str) -> None:
        self.execute("drop extension ulak cascade", database)

    def home_of_pg_cron(self) -> str | None:
        """The database that it lives in, if it is loaded."""
        is_loaded = self.has_setting("shared_preload_libraries") and "pg_cron" in self.setting(
            "shared_preload_libraries"
        )
        return self.setting("cron.database_name") if is_loaded else None

    def cron_waits_for_the_longest_job(self) -> bool:
        """In background workers. pg_cron 1.5 and newer don't."""
        with self.connect() as db:
            row = db.execute("select default_version from pg_available_extensions where name = 'pg_cron'").fetchone()
        assert row is not None
        # It may be written 1.4-1.
        return [int(number) for number in re.findall(r"\d+", row[0])[:2]] < [1, 5]

    def ensure_login(self, connection: psycopg.Connection[Any], name: str, member_of: str | None = None) -> None:
        if connection.execute("select from pg_roles where rolname = %s", [name]).fetchone() is None:
            connection.execute(sql.SQL("create role {} login").format(sql.Identifier(name)))
        if member_of is not None:
            connection.execute(sql.SQL("grant {} to {}").format(sql.Identifier(member_of), sql.Identifier(name)))


Connect = Callable[..., psycopg.Connection[Any]]
