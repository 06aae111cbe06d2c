"""PgBouncer in front of a cluster: clients log in as one role, and share one connection to the server."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.cluster import Cluster, free_port
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
    port = free_port()
    (folder / "users").write_text(f'"{login}" ""\n')
    config = folder / "pgbouncer.ini"
    config.write_text(
        CONFIG.format(
            database=database, host=cluster.host, server_port=cluster.port, port=port, folder=folder, mode=mode
        )
    )
    log = folder / "pgbouncer.log"
    with log.open("w") as lines:
        pooler = subprocess.Popen(["pgbouncer", config], stdout=lines, stderr=lines)
    try:
        wait_until(lambda: "process up" in log.read_text(), message="pgbouncer")
        yield f"host=127.0.0.1 port={port} dbname={database} user={login}"
    finally:
        pooler.terminate()
        pooler.wait()
