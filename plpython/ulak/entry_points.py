"""Where SQL enters the Python: the bodies of ulak.run_worker() and its siblings."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import plpy

from ulak.messages.delivery import PERMANENT, ConfigError, Outcome, config_problem
from ulak.run import make_dispatcher
from ulak.run import run as run_in_slot
from ulak.sessions import login
from ulak.sessions.backend import Backend
from ulak.sessions.database import Database
from ulak.sessions.session import cancellable

# PostgreSQL queues notifications for a session until it is idle, so a longer run must not listen.
_LONGEST_LISTENING_RUN = 3600
# A run ends at most 6.4 s after the minute, or a little later if it still holds messages. The next run waits this long
# for its slot.
_HANDOVER_SECONDS = 8.0
# How often it checks whether the slot is free, and the watcher whether it was cancelled.
_LOOK_SECONDS = 0.1
# How often the watcher checks for missing workers; one that is missing twice in a row is started.
_WATCH_SECONDS = 1.0


def run(slot: int | None, seconds: float | None, is_scheduled: bool, stamp: str, search_path: str) -> None:
    """The body of ulak.run_worker(): takes a slot and works in it until the time is over. The caller has pinned the
    session's search_path; at the end it is restored."""
    plpy.execute("select ulak_private.enter_worker_session()")
    plpy.commit()
    # A scheduled run may start while the previous one is still ending.
    row = _take_slot(slot, seconds, is_scheduled, time.monotonic() + (_HANDOVER_SECONDS if is_scheduled else 0))
    if row is None:
        _leave(None, search_path)
        return
    # PostgreSQL queues notifications for this session until it ends.
    may_listen = row["seconds"] <= _LONGEST_LISTENING_RUN
    try:
        with cancellable():
            run_in_slot(Database(Backend(), row["slot"], row["name"], stamp, may_listen), row["seconds"])
    except Exception:
        with suppress(plpy.SPIError):
            _leave(row["slot"], search_path)
        raise
    _leave(row["slot"], search_path)


def _take_slot(slot: int | None, seconds: float | None, is_scheduled: bool, until: float) -> Mapping[str, Any] | None:
    plan = plpy.prepare(
        "select slot, name, seconds from ulak_private.take_worker_slot($1, $2, $3)", ("int4", "float8", "bool")
    )
    while True:
        taken = plpy.execute(plan, (slot, seconds, is_scheduled))
        plpy.commit()
        if len(taken) and taken[0]["slot"] is None:
            plpy.notice("no worker is wanted in this slot: start() or stop() were called")
            return None
        if len(taken):
            return taken[0]
        if time.monotonic() >= until:
            plpy.notice("another session runs this worker slot")
            return None
        time.sleep(_LOOK_SECONDS)


def _leave(slot: int | None, search_path: str) -> None:
    leave = plpy.prepare("select ulak_private.leave_worker_slot($1)", ("int4",))
    restore = plpy.prepare("select set_config('search_path', $1, false)", ("text",))
    plpy.execute(leave, (slot,))
    plpy.execute(restore, (search_path,))
    plpy.commit()


def watch(stamp: str) -> None:
    """The body of ulak_private.watch_workers(): a missing worker is started, in a session of its own."""
    with cancellable():
        _watch(Database(Backend(), 0, "watcher", stamp))


def _watch(database: Database) -> None:
    plpy.execute("select ulak_private.enter_worker_session('watcher')")
    plpy.commit()
    # start() holds this lock until it commits; after that its changes are visible.
    plpy.execute("select ulak_private.await_schedule()")
    parameters = login_parameters("ulak_worker")
    plpy.commit()
    end = time.monotonic() + 60.1 - time.time() % 60
    missing: set[int] = set()
    problem = None
    while time.monotonic() < end:
        leave, slots = database.missing_workers()
        if leave:
            return
        # Not at the first look: a slot is empty for a moment between two runs.
        for slot in missing & slots:
            try:
                login.leave_behind(parameters, f"call ulak.run_worker({slot}, p_is_scheduled => true)")
            except login.LoginError as error:
                # Warn once, not every second.
                if problem is None:
                    problem = str(error)
                    warn = plpy.prepare("select ulak_private.warn($1)", ("text",))
                    plpy.execute(warn, (f"ulak: worker {slot} can't be started: {problem}",))
        missing = slots
        next_look = min(end, time.monotonic() + _WATCH_SECONDS)
        while (wait := next_look - time.monotonic()) > 0:
            time.sleep(min(wait, _LOOK_SECONDS))
            database.check_interrupts()


def launch_watcher() -> str | None:
    """The body of ulak_private.launch_watcher(): why it failed, or None."""
    try:
        login.leave_behind(login_parameters("ulak_worker"), "call ulak_private.watch_workers()")
    except login.LoginError as error:
        return str(error)
    return None


def log_in(user: str) -> str | None:
    """The body of ulak_private.log_in(): why a session of this role can't be opened, or None."""
    try:
        login.log_in(login_parameters(user))
    except login.LoginError as error:
        return str(error)
    return None


def login_parameters(user: str) -> dict[str, str]:
    """As pg_cron would open a session of this role here."""
    row = plpy.execute("select host, port, database from ulak_private.login_parameters()")[0]
    return {
        "host": row["host"],
        "port": row["port"],
        "dbname": row["database"],
        "user": user,
        "connect_timeout": "5",
        "fallback_application_name": "ulak",
        # These apply before the session's first query, whatever is set for its database or role. We disconnect at once,
        # which must not end the session.
        "options": "-c search_path=pg_catalog,pg_temp -c client_connection_check_interval=0",
    }


def ping(endpoint_id: int) -> str:
    """The body of ulak_private.ping(): the outcome of one test request as JSON."""
    with cancellable():
        return _ping(Database(Backend(is_procedure=False), 0, "ping", ""), endpoint_id)


def _ping(database: Database, endpoint_id: int) -> str:
    # Imported here, since no worker needs it.
    from ulak import ping as pinging

    given = database.options()
    # The caller wants to see the answer.
    given = given._replace(settings={**given.settings, "capture_response": "true"})
    dispatcher = make_dispatcher(database, given, 1)
    config = database.endpoint_configs([endpoint_id])[0]
    start = time.monotonic()
    try:
        outcome = pinging.deliver(dispatcher.parse(config), dispatcher, lambda: plpy.execute("select 1"))
    except ConfigError as error:
        outcome = Outcome(f"{PERMANENT} {config_problem(error, config.secrets)}")
    milliseconds = round((time.monotonic() - start) * 1000, 3)
    dispatcher.close()
    return json.dumps(
        {
            "outcome": "delivered" if outcome.error is None else "failed",
            "status": (config.protocol == "http" and outcome.status) or None,
            "milliseconds": milliseconds,
            "error": database.error_text(outcome.error),
            "response": outcome.response and json.loads(database.response_text(outcome.response)),
        }
    )
