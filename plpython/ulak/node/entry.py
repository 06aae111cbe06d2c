"""Where docker/worker.py enters: works for one database as long as the connection lasts."""

from __future__ import annotations

import time

from psycopg import pq

from ulak.database import Database
from ulak.node.session import Connection, Process
from ulak.run import run
from ulak.worker.tuning import LOOK_SECONDS, NODE_SESSION_SECONDS, STOPPED_LOOK_SECONDS


def work(connection: pq.abc.PGconn, host: str, stamp: str, process: Process) -> str:
    """Why it ended: over (the session is old), restart (there is another build), or told (by a signal). stop() ends the
    run but not the session, which waits for start(). Raises Lost, or whatever ended the run."""
    session = Connection(connection, process)
    try:
        session.call("select ulak._enter_node_session()")
        until = time.monotonic() + NODE_SESSION_SECONDS
        is_waiting = False
        while process.leave is None:
            taken = session.call("select slot, name from ulak._take_node_slot($1)", ("text",), (host,))
            if not taken:
                if not is_waiting:
                    process.log("stopped: waiting for ulak.start()")
                is_waiting = True
                _wait(STOPPED_LOOK_SECONDS, process)
                continue
            is_waiting = False
            process.log(f"delivering as {taken[0]['name']}")
            ended = _run(session, taken[0]["slot"], taken[0]["name"], stamp, until)
            if ended in ("over", "restart") and process.leave is None:
                return ended
        return "told"
    finally:
        session.close()


def _run(session: Connection, slot: int, name: str, stamp: str, until: float) -> str:
    # libpq hands out notifications whenever they come, however long the session lasts.
    database = Database(session, slot, name, stamp, may_listen=True)
    ended = run(database, max(0.0, until - time.monotonic()))
    session.call("select ulak._leave_node_slot($1)", ("int",), (slot,))
    return ended


def _wait(seconds: float, process: Process) -> None:
    end = time.monotonic() + seconds
    while process.leave is None and time.monotonic() < end:
        time.sleep(LOOK_SECONDS)
