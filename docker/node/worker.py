#!/usr/bin/python3
"""A delivery node: the worker of ulak as a process of its own, on any machine that reaches the database.

    apt-get install python3-psycopg python3-pycurl
    python3 worker.py --dsn "host=db1,db2 dbname=shop user=node_1 sslmode=verify-full sslrootcert=/etc/ulak/ca.pem"

What it runs comes from the database that it serves, so that its version is always the server's: this file fetches it,
sees by its hash that it is whole, and connects again when the connection is lost or a new version is there. A server
that is taken for the database decides what this process does, so over a network it wants sslmode=verify-full. The
password is libpq's to find: PGPASSFILE, PGSERVICEFILE or PGPASSWORD, never the command line, which everybody on a
machine can read.

SIGTERM and SIGINT let it deliver what is under way, and end it; a second one ends it within two seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import ipaddress
import os
import random
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

import psycopg
from psycopg import conninfo, pq

# Between two tries: a failover, however long it took, is noticed within a try and such a wait.
SHORTEST_WAIT = 0.25
LONGEST_WAIT = 1.0
# A server that owes an answer and says nothing for this long is given up.
ANSWER_SECONDS = 10.0
# The same message is not logged again before this time has passed.
REPEAT_SECONDS = 15.0

# Where neither --dsn nor the environment says otherwise. A cut line is noticed within about ten seconds, and of several
# hosts the primary is looked for, a few seconds at each.
DEFAULTS = {
    "connect_timeout": "3",
    "fallback_application_name": "ulak node",
    "keepalives_count": "3",
    "keepalives_idle": "5",
    "keepalives_interval": "2",
    "target_session_attrs": "primary",
    "tcp_user_timeout": "10000",
}

# Errors that an operator sees as one line. Everything else is a bug and comes with its traceback.
PASSING = (ConnectionError, psycopg.Error)

SOURCE = """
    select '', ulak_private.worker_stamp()
    union all select 'hash', ulak_private.python_stamp()
    union all select 'loader', ulak_private.python_loader()
    union all select module, source from ulak_private.python_source()
"""

Work = Callable[[Any, str, str, "Process"], str]


class Process:
    """The signals that the process got. Fetched code of any version reads this, so its names must not change."""

    def __init__(self) -> None:
        # None: go on. "restart": leave in good order. "stop": leave at once.
        self.leave: str | None = None
        # Ends a wait.
        self.wake: Callable[[], None] | None = None

    def log(self, line: str) -> None:
        # Not print(): a signal's handler may be in the midst of another one. Nobody need listen.
        with contextlib.suppress(OSError):
            os.write(2, f"ulak node: {line}\n".encode(errors="backslashreplace"))

    def tell(self, number: int, frame: object) -> None:
        self.leave = "restart" if self.leave is None else "stop"
        self.log("finishing what is under way" if self.leave == "restart" else "returning what is under way")
        if self.wake is not None:
            self.wake()

    def wait(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while self.leave is None and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, 0.1))


class Node:
    def __init__(self, dsn: str, name: str, process: Process) -> None:
        self._dsn = dsn
        self._name = name
        self._process = process
        self._stamp: str | None = None
        self._work: Work | None = None
        # The trouble that was told last, and when.
        self._told = ("", 0.0)
        self._tries = 0

    def run(self) -> None:
        wait = SHORTEST_WAIT
        while self._process.leave is None:
            began = time.monotonic()
            is_lost = True
            try:
                self._serve()
                is_lost = False
            except Exception as error:
                self._tries += 1
                is_known = isinstance(error, PASSING)
                self._tell(" ".join(str(error).split()) if is_known else traceback.format_exc())
            lasted = time.monotonic() - began
            if lasted > LONGEST_WAIT:
                wait = SHORTEST_WAIT
            if is_lost or lasted < wait:
                # Not all nodes at the same moment when a server comes back.
                self._process.wait(wait * random.uniform(0.5, 1.0))
                wait = min(LONGEST_WAIT, 2 * wait)

    def _tell(self, trouble: str) -> None:
        now = time.monotonic()
        if trouble != self._told[0] or now >= self._told[1] + REPEAT_SECONDS:
            self._told = (trouble, now)
            self._process.log(trouble)

    def _serve(self) -> None:
        connection = pq.PGconn.connect(rotated(self._dsn, self._tries).encode())
        try:
            if connection.status != pq.ConnStatus.OK:
                raise ConnectionError(pq.error_message(connection))
            source = self._fetch(connection)
            self._told = ("", 0.0)
            stamp = source.pop("")
            if stamp != self._stamp or self._work is None:
                self._work = load(source)
                self._stamp = stamp
                self._process.log(f"version {stamp.split()[-1]} from {connection.host.decode() or 'the local server'}")
            self._work(connection, self._name, stamp, self._process)
        finally:
            connection.finish()

    def _fetch(self, connection: pq.abc.PGconn) -> dict[str, str]:
        # Not exec_(), which waits for as long as a frozen server stays frozen.
        connection.nonblocking = 1
        connection.send_query(SOURCE.encode())
        results = []
        while (each := self._next_result(connection)) is not None:
            results.append(each)
        result = results[-1]
        if result.status != pq.ExecStatus.TUPLES_OK:
            raise psycopg.Error(f"the database has no code for a node: {pq.error_message(result)}")
        return {
            (result.get_value(row, 0) or b"").decode(): (result.get_value(row, 1) or b"").decode()
            for row in range(result.ntuples)
        }

    def _next_result(self, connection: pq.abc.PGconn) -> pq.abc.PGresult | None:
        while connection.flush() or connection.is_busy():
            wait = select.poll()
            wait.register(connection.socket, select.POLLIN)
            if not wait.poll(1000 * ANSWER_SECONDS):
                raise ConnectionError(f"the server has been silent for {ANSWER_SECONDS:.0f} seconds")
            connection.consume_input()
        return connection.get_result()


def load(source: dict[str, str]) -> Work:
    """Makes `import ulak` find these modules, as the extension's own loader does in a backend."""
    expected, loader = source.pop("hash"), source.pop("loader")
    if hashlib.sha256(repr((sorted(source.items()), loader)).encode()).hexdigest() != expected:
        raise psycopg.Error("the code that the database has for nodes doesn't match its hash")
    scope: dict[str, Any] = {}
    exec(compile(loader, "plpython/loader.py", "exec", dont_inherit=True), scope)
    scope["install"](source)
    from ulak.node.entry import work  # type: ignore[import-not-found,unused-ignore]

    return work  # type: ignore[no-any-return,unused-ignore]


def complete(dsn: str) -> str:
    """The connection's parameters, with those that a node adds. The search_path is pinned before the first query."""
    given = conninfo.conninfo_to_dict(dsn)
    for secret in ("password", "sslpassword"):
        if secret in given:
            refuse(f"--dsn has a {secret}, which everybody on this machine could read: use PGPASSFILE or PGPASSWORD")
    of_environment = {
        option.keyword.decode()
        for option in pq.Conninfo.get_defaults()
        if option.envvar and option.envvar.decode() in os.environ
    }
    given.pop("client_encoding", None)
    options = given.pop("options", os.environ.get("PGOPTIONS", ""))
    defaults: dict[str, Any] = {name: value for name, value in DEFAULTS.items() if name not in of_environment}
    return conninfo.make_conninfo(
        **{**defaults, **given},
        options=f"{options} -c search_path=pg_catalog,pg_temp".strip(),
        client_encoding="UTF8",
    )


def rotated(dsn: str, by: int) -> str:
    """Begins with another of several hosts. libpq goes on to the next one if a host can't be reached or is no primary,
    but not if it lets nobody in or hangs up."""
    given: dict[str, Any] = {**conninfo.conninfo_to_dict(dsn)}
    for name, variable in (("host", "PGHOST"), ("hostaddr", "PGHOSTADDR"), ("port", "PGPORT")):
        each = str(given.get(name) or os.environ.get(variable, "")).split(",")
        if len(each) > 1:
            by %= len(each)
            given[name] = ",".join(each[by:] + each[:by])
    return conninfo.make_conninfo(**given)


def exposed(dsn: str) -> str | None:
    """The host whose server anybody on the way could stand in for, or None. This process runs what the server says."""
    connection = pq.PGconn.connect_start(dsn.encode())
    try:
        known = {option.keyword: (option.val or b"").decode() for option in connection.info}
    finally:
        connection.finish()
    if known.get(b"sslmode") == "verify-full":
        return None
    names, addresses = known.get(b"host", "").split(","), known.get(b"hostaddr", "").split(",")
    for place in range(max(len(names), len(addresses))):
        host = (addresses[place : place + 1] or [""])[0] or (names[place : place + 1] or [""])[0]
        if host and host[0] not in "/@" and host != "localhost" and not _is_loopback(host):
            return host
    return None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def refuse(problem: str) -> NoReturn:
    print(f"ulak node: {problem}", file=sys.stderr)
    sys.exit(2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dsn", default="", help="where the database is; libpq takes the rest from its environment")
    parser.add_argument("--name", default=socket.gethostname(), help="its name in ulak.workers.host: this machine's")
    parser.add_argument("--insecure", action="store_true", help="over a network without sslmode=verify-full, too")
    arguments = parser.parse_args()
    try:
        dsn = complete(arguments.dsn)
        if not arguments.insecure and (host := exposed(dsn)):
            refuse(
                f"{host} could be anybody, and a node runs the code of its server: use sslmode=verify-full with "
                "sslrootcert, or --insecure in a network that you trust"
            )
    except psycopg.Error as error:
        refuse(f"--dsn can't be read: {error}")
    try:
        import pycurl  # noqa: F401
    except ImportError as error:
        refuse(f"{error}: apt-get install python3-pycurl")
    process = Process()
    signal.signal(signal.SIGTERM, process.tell)
    signal.signal(signal.SIGINT, process.tell)
    Node(dsn, arguments.name, process).run()
    process.log("ended")


if __name__ == "__main__":
    main()
    # Threads of a client library may still ask Python something: it must not be torn down before they are gone.
    os._exit(0)
