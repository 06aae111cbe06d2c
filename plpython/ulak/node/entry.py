"""Where docker/node/worker.py enters: works for one database as long as the connection lasts."""

from __future__ import annotations

import time

from psycopg import pq

from ulak.node.session import Connection, Process
from ulak.run import run
from ulak.sessions.database import Database
from ulak.sessions.session import cancellable
from ulak.transports.registry import missing_client

# A session is replaced after this time: a backend caches the catalog, so its memory grows.
_SESSION_SECONDS = 3600.0
# After stop(): how often a node checks whether start() was called, and whether it was told to leave.
_STOPPED_LOOK_SECONDS = 1.0
_LOOK_SECONDS = 0.1

# Logged once per process, not once per session.
_TOLD: list[str] = []


def work(connection: pq.abc.PGconn, host: str, stamp: str, process: Process) -> str:
    """Returns why it ended: over (the session is old), restart (there is another build), or told (by a signal). stop()
    ends the run but not the session, which waits for start(). Raises Lost, or whatever ended the run."""
    session = Connection(connection, process)
    try:
        session.call("select ulak_private.enter_node_session()")
        session.measure_clock()
        protocols = _protocols(session, process)
        until = time.monotonic() + _SESSION_SECONDS
        is_waiting = False
        while process.leave is None:
            taken = session.call("select slot, name from ulak_private.take_node_slot($1)", ("text",), (host,))
            if not taken:
                if not is_waiting:
                    process.log("stopped: waiting for ulak.start()")
                is_waiting = True
                _wait(_STOPPED_LOOK_SECONDS, process)
                continue
            is_waiting = False
            slot, name = taken[0]["slot"], taken[0]["name"]
            process.log(f"delivering as {name}")
            # libpq delivers notifications at once, however long the session lasts.
            database = Database(session, slot, name, stamp, may_listen=True, protocols=protocols)
            with cancellable():
                ended = run(database, max(0.0, until - time.monotonic()))
            session.call("select ulak_private.leave_node_slot($1)", ("int",), (slot,))
            if ended in ("over", "restart") and process.leave is None:
                return ended
        return "told"
    finally:
        session.close()


def _protocols(session: Connection, process: Process) -> list[str]:
    """Protocols whose client this machine has. Messages of the others would fail here, but may succeed elsewhere."""
    (row,) = session.call("select ulak_private.worker_protocols() as protocols")
    missing = {each: missing_client(each) for each in row["protocols"] if missing_client(each)}
    if missing and not _TOLD:
        _TOLD.append("missing")
        told = ", ".join(f"{protocol} (needs {package})" for protocol, package in missing.items())
        process.log(f"messages over these protocols are left to others: {told}")
    return [each for each in row["protocols"] if each not in missing]


def _wait(seconds: float, process: Process) -> None:
    end = time.monotonic() + seconds
    while process.leave is None and time.monotonic() < end:
        time.sleep(_LOOK_SECONDS)
