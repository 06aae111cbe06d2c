"""PgBouncer in front of a cluster: clients log in as one role, and share one connection to the server."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from support.cluster import Cluster
from support.ports import start_on_free_port
from support.sessions import wait_until

CONFIG = """\
[databases]
{database} = host={host} port={server_port} pool_size=1
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = trust
auth_file = {folder}/users
pool_mode = {mode}
"""


@contextmanager
def pgbouncer(cluster: Cluster, database: str, login: str, mode: str, folder: Path) -> Iterator[str]:
    """The connection string of the login. mode: transaction or session."""
    (folder / "users").write_text(f'"{login}" ""\n')
    settings = {"database": database, "host": cluster.host, "server_port": cluster.port, "folder": folder, "mode": mode}
    with run_pgbouncer(folder, lambda port: CONFIG.format(port=port, **settings)) as port:
        yield f"host=127.0.0.1 port={port} dbname={database} user={login}"


@contextmanager
def run_pgbouncer(folder: Path, config: Callable[[int], str]) -> Iterator[int]:
    """Its port. `config` gives the configuration for one."""
    log = folder / "pgbouncer.log"

    def start(port: int) -> tuple[subprocess.Popen[bytes], int]:
        (folder / "pgbouncer.ini").write_text(config(port))
        with log.open("w") as lines:
            pooler = subprocess.Popen(["pgbouncer", folder / "pgbouncer.ini"], stdout=lines, stderr=lines)

        def is_up() -> bool:
            assert pooler.poll() is None, log.read_text()
            return "process up" in log.read_text()

        wait_until(is_up, "pgbouncer")
        return pooler, port

    pooler, port = start_on_free_port(start)
    try:
        yield port
    finally:
        pooler.terminate()
        pooler.wait()
