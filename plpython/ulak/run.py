"""A run of a worker, in the database or in a node; it starts over when settings change."""

from __future__ import annotations

import gc
import resource
import time
from functools import partial

from ulak.messages.delivery import MESSAGE, PERMANENT
from ulak.sessions.database import Database, WorkerOptions
from ulak.sessions.session import Cancelled
from ulak.transports.dispatcher import Dispatcher
from ulak.transports.registry import transports
from ulak.worker import options
from ulak.worker.loop import Worker
from ulak.worker.port import Busy, Refused
from ulak.worker.state import State

# Python looks for reference cycles after this many new objects (700 by default). A claim makes a thousand or more, none
# of them in a cycle.
_CYCLE_SEARCH = 20_000
# After this many runs in a row that ended with an error of the worker's own code, the next run is wary: it holds one
# message at a time, for this many seconds, to find the one that causes the error.
_SUSPICIOUS = 2
_WARY_SECONDS = 60.0
# How many of the messages held by a run that ended with an error are listed in the event log.
_MOST_HELD_TOLD = 100


def run(database: Database, seconds: float) -> str:
    """Works until the time is over or it is told to leave, and returns why, like Worker.run()."""
    until = time.monotonic() + seconds
    thresholds = gc.get_threshold()
    gc.set_threshold(_CYCLE_SEARCH)
    try:
        # A worker lives as long as its settings do.
        while (ended := _work(database, until)) == "settings":
            pass
    finally:
        gc.set_threshold(*thresholds)
        database.close()
    return ended


def make_dispatcher(database: Database, given: WorkerOptions, max_in_flight: int) -> Dispatcher:
    return Dispatcher(transports(given.settings, given.version, max_in_flight, database.log, database.session.now))


def _work(database: Database, until: float) -> str:
    given = database.options()
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    chosen = options.parse(given.settings, files)
    database.note_limit(chosen.limited_by)
    suspicion = database.suspicion()
    if suspicion >= _SUSPICIOUS:
        # To find the message that ended the previous runs.
        chosen = chosen._replace(most_held=1)
        until = min(until, time.monotonic() + _WARY_SECONDS)
    # Twice as many: slow receivers have their own slots.
    dispatcher = make_dispatcher(database, given, chosen.slots * 2)
    worker = Worker(State(database, chosen, given.fingerprint, until, dispatcher))
    try:
        ended = worker.run()
        worker.close("running" if ended == "settings" else "stopped")
    except (Exception, Cancelled) as error:
        # A cancel, or a bug of ours.
        _break_off(database, worker, error, suspicion)
        raise
    finally:
        # A node's process outlives the run, so no request may stay in flight.
        dispatcher.close()
    return ended


def _break_off(database: Database, worker: Worker, error: BaseException, suspicion: int) -> None:
    """Cleans up step by step; where a step fails, leases run out instead. A message that a wary run held alone when
    the worker's own code failed becomes a dead letter. After that, one more such run makes the next one wary again."""
    cause = error.__cause__ if isinstance(error, Cancelled) else error
    is_ours = not isinstance(error, Cancelled | Busy | Refused | OSError | database.session.Error)
    held = list(worker.unsettled())
    is_found = is_ours and suspicion >= _SUSPICIOUS and len(held) == 1
    noted: dict[str, object] = {}
    if not isinstance(error, Cancelled):
        noted = {"broken_by": f"{type(cause).__name__}: {cause}", "held": held[:_MOST_HELD_TOLD]}
    if is_ours:
        noted["suspicion"] = _SUSPICIOUS - 1 if is_found else suspicion + 1
    verdict = f"{PERMANENT} {MESSAGE} {suspicion + 1} runs of a worker in a row ended with it: {type(cause).__name__}"
    for step in (
        worker.store,
        partial(worker.bury, verdict) if is_found else worker.give_back,
        partial(worker.report_end, f"{type(cause).__name__}: {cause}", noted),
    ):
        try:
            step()
        except ConnectionError:
            return
        except Exception as another:
            database.session.warn(f"the worker could not end well: {another}")
