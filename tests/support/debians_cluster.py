"""A cluster as Debian makes one: pg_createcluster, with its configuration apart from its data, in a folder of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psycopg

from support.cluster import WORK, CommandFailed, extension_path, major, stage_extension
from support.files import write_whole
from support.fixes import SETUP
from support.ports import free_port
from support.sessions import patience


def run_setup(*arguments: str) -> str:
    """What ulak-setup says, if all is well."""
    done = subprocess.run(
        [sys.executable, str(SETUP), *arguments], text=True, capture_output=True, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


class DebiansCluster:
    """15 main, say. Peer authentication, nothing preloaded, and the extension staged where it finds it."""

    def __init__(self) -> None:
        WORK.mkdir(parents=True, exist_ok=True)
        # remove_abandoned() removes it if this process is killed.
        self.folder = Path(tempfile.mkdtemp(prefix="cluster-", dir=WORK))
        write_whole(self.folder / "owner", str(os.getpid()))
        self.data = self.folder / "data"
        self.name = [str(major()), "main"]
        self.etc = self.folder / "etc" / self.name[0] / "main"
        self.sockets = tempfile.mkdtemp(prefix="ulak-", dir="/tmp")
        # Of a socket in a folder of its own: nobody can take it.
        self.port = free_port()
        self.environment = {**os.environ, "PG_CLUSTER_CONF_ROOT": str(self.folder / "etc"), "LC_ALL": "C.UTF-8"}
        (self.folder / "etc").mkdir()
        places = ["-d", self.data, "-l", self.folder / "log", "-s", self.sockets, "-p", str(self.port)]
        self._run(["pg_createcluster", *self.name, *places, "--", "--no-sync"])
        place, path = extension_path(stage_extension(self.folder))
        (self.etc / "pg_ctl.conf").write_text(f"pg_ctl_options = '-t {round(patience())}'\n")
        with (self.etc / "postgresql.conf").open("a") as file:
            file.write(f"{place} = '{path}'\nfsync = off\nlisten_addresses = ''\n")
        self._run(["pg_ctlcluster", *self.name, "start"])

    def setup(self, *arguments: str) -> str:
        """What ulak-setup says, if all is well."""
        done = self.try_setup(*arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def try_setup(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(SETUP), *arguments]
        return subprocess.run(command, env=self.environment, text=True, capture_output=True, stdin=subprocess.DEVNULL)

    def files(self) -> dict[str, str]:
        """The configuration, by its names."""
        return {str(path.relative_to(self.etc)): path.read_text() for path in self.etc.rglob("*.conf")}

    def connect(self, database: str = "postgres") -> psycopg.Connection[Any]:
        return psycopg.connect(host=self.sockets, port=self.port, dbname=database, autocommit=True)

    def value(self, query: str, database: str = "postgres") -> Any:
        with self.connect(database) as db:
            return (db.execute(query).fetchone() or [None])[0]  # type: ignore[arg-type]

    def started_at(self) -> Any:
        return self.value("select pg_postmaster_start_time()")

    def restart(self) -> None:
        self._run(["pg_ctlcluster", *self.name, "restart"])

    def remove(self) -> None:
        if (self.data / "postmaster.pid").exists():
            self._run(["pg_ctlcluster", "-m", "immediate", *self.name, "stop"])
        shutil.rmtree(self.sockets, ignore_errors=True)
        shutil.rmtree(self.folder)

    def _run(self, command: list[Any]) -> None:
        # Not a pipe: what stays must not keep it open. pg_ctlcluster adds the server's log if it fails.
        said = self.folder / "commands"
        with said.open("w") as log:
            done = subprocess.run(command, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        if done.returncode != 0:
            raise CommandFailed(f"{' '.join(map(str, command))}: exit {done.returncode}\n{said.read_text()}")
