"""A run of a worker, wherever it lives: with the settings as they are, and anew when they change."""

from __future__ import annotations

import gc
import resource
import time

from ulak.database import Database, WorkerOptions
from ulak.session import Cancelled
from ulak.transports import transports
from ulak.worker import options
from ulak.worker.dispatcher import Dispatcher
from ulak.worker.loop import Worker
from ulak.worker.port import Busy, Refused
from ulak.worker.tuning import CYCLE_SEARCH


def run(database: Database, seconds: float) -> str:
    """Until its time is over, or it was told to leave: returns why, as Worker.run() does."""
    until = time.monotonic() + seconds
    thresholds = gc.get_threshold()
    gc.set_threshold(CYCLE_SEARCH)
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
    database.commit()
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    chosen = options.parse(given.settings, files)
    database.note_limit(chosen.limited_by)
    # Twice: slow receivers have slots of their own.
    dispatcher = make_dispatcher(database, given, chosen.slots * 2)
    worker = Worker(database, chosen, given.fingerprint, until, dispatcher)
    try:
        ended = _end_well(database, worker)
    finally:
        # A node's process goes on after the run: no request may be left under way.
        dispatcher.close()
    return ended


def _end_well(database: Database, worker: Worker) -> str:
    try:
        ended = worker.run()
    except (Exception, Cancelled) as error:
        # A cancel, or a bug of ours. The transaction is sound: only the call that failed was undone.
        _break_off(database, worker, error)
        raise
    worker.close("running" if ended == "settings" else "stopped")
    return ended


def _break_off(database: Database, worker: Worker, error: BaseException) -> None:
    """What can still be done; if it can't, the leases run out."""
    cause = error.__cause__ if isinstance(error, Cancelled) else error
    try:
        database.commit()
        worker.close("stopped", f"{type(cause).__name__}: {cause}")
    except (database.session.Error, Busy, Refused) as another:
        database.session.warn(f"the worker could not give back what it held: {another}")
