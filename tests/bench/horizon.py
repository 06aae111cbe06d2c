"""What is left of the speed when other sessions keep vacuum from removing the rows that the queue is done with."""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple, Self

import psycopg
from psycopg import IsolationLevel
from support.cluster import run
from support.site import Site

from bench import storage
from bench.delivery import fill
from bench.figures import Figure, Quantity
from bench.measure import percentile, processor_seconds
from bench.stage import Part, Stage
from bench.yardstick import PAYLOAD

RATE = 800
READERS = 4
BACKLOGS = 3


class Schedule:
    """What ulak.start(1) has pg_cron do, without waiting for its first minute."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._stopping = threading.Event()
        self._changing = threading.Lock()
        self._worker = 0
        # Of workers that have ended.
        self._used = 0.0
        self._threads = [threading.Thread(target=each) for each in (self._work, self._maintain)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *unused: object) -> None:
        self._stopping.set()
        while any(thread.is_alive() for thread in self._threads):
            # Again and again: it may just have begun anew.
            self._site.db.execute("select pg_terminate_backend(%s) where %s > 0", [self._worker] * 2)
            for thread in self._threads:
                thread.join(0.2)

    def processor(self) -> float:
        """Of the worker so far, in seconds."""
        with self._changing:
            return self._used + (processor_seconds(self._worker) if self._worker else 0)

    def _work(self) -> None:
        """It ends with each minute, and begins again."""
        while not self._stopping.is_set():
            with suppress(psycopg.errors.AdminShutdown), self._site.connect("ulak_worker") as db:
                self._worker = db.info.backend_pid
                db.execute("call ulak.run_worker(1)")
                with self._changing:
                    self._used += processor_seconds(self._worker)
                    self._worker = 0

    def _maintain(self) -> None:
        while not self._stopping.wait(60 - time.time() % 60):
            with self._site.connect() as db:
                db.execute("call ulak.run_maintenance()")
                db.execute((db.execute(f"select {storage.private(db, 'vacuum_command')}()").fetchone() or [""])[0])  # type: ignore[arg-type]


# What keeps vacuum from its work.


@contextmanager
def old_snapshot(site: Site) -> Iterator[None]:
    """A session that looked once and was forgotten."""
    with reader(site) as db:
        look(db)
        yield


@contextmanager
def readers(site: Site) -> Iterator[None]:
    """Reports that take five seconds each, one after the other, by several at once: the horizon moves, but lags."""
    stopping = threading.Event()

    def read(number: int) -> None:
        stopping.wait(5 * number / READERS)
        with reader(site) as db:
            while not stopping.is_set():
                look(db)
                stopping.wait(5)
                look(db)
                db.commit()

    threads = [threading.Thread(target=read, args=[number]) for number in range(READERS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stopping.set()
        for thread in threads:
            thread.join()


@contextmanager
def reader(site: Site) -> Iterator[psycopg.Connection[Any]]:
    db = site.connect(autocommit=False)
    db.isolation_level = IsolationLevel.REPEATABLE_READ
    try:
        yield db
    finally:
        db.close()


def look(db: psycopg.Connection[Any]) -> None:
    db.execute("select status, count(*) from ulak.queue group by 1").fetchall()


# What it does to others.


class Seen(NamedTuple):
    # Of the messages that were settled by the time the last one was sent.
    delivered: float
    send_p99: float
    settled_p99: float
    dead_rows: int
    # Of backlogs that were sent at once when all this was over, with the horizon still held: rate, and microseconds of the
    # worker's processor for each.
    drained: float
    processor: float


def watch(stage: Stage, holding: Callable[[Site], AbstractContextManager[None]], seconds: int) -> Seen:
    backlog = stage.scaled(10_000, 500)
    with stage.site() as site:
        site.db.execute("create extension pgstattuple")
        site.http("shop", stage.receiver)
        with Schedule(site) as schedule, holding(site):
            durations = send(stage, site, seconds)
            delivered = site.value(f"select count(*) from {storage.COMPLETED}")
            site.wait_until_settled()
            waited = site.value(f"""
                select percentile_cont(0.99) within group (order by extract(epoch from completed_at - created_at)::float)
                from {storage.COMPLETED}
            """)
            dead = site.value("select dead_tuple_count from pgstattuple(%s)", storage.tables_of(site.db).waiting)
            before = schedule.processor()
            took = [drain(site, backlog) for _ in range(BACKLOGS)]
            used = schedule.processor() - before
    return Seen(
        # One at least: what others lose is a part of it.
        max(1, delivered) / seconds,
        percentile(durations, 0.99),
        waited * 1000,
        dead,
        backlog / statistics.median(took),
        used * 1e6 / (backlog * BACKLOGS),
    )


def drain(site: Site, count: int) -> float:
    """Seconds until the worker has settled this many more messages, from its first claim of them."""
    last = site.value(f"select coalesce(max(id), 0) from {storage.COMPLETED}")
    fill(site, "shop", count)
    site.wait_until_settled(seconds=300)
    query = f"""
        select extract(epoch from max(completed_at) - min(processing_started_at))::float
        from {storage.COMPLETED} where id > %s
    """
    return float(site.value(query, last))


def send(
    stage: Stage, site: Site, seconds: int, rate: int = RATE, payload: str = json.dumps({"n": 1, "text": PAYLOAD})
) -> list[float]:
    """Eight clients, at the same rate whatever happens. Milliseconds from when each send was to begin to its end: one
    that waits for another to end counts."""
    folder = site.cluster.folder
    script, log = folder / "horizon.sql", folder / "horizon-log"
    script.write_text(f"select ulak.send('shop', '{payload}');\n")
    pgbench: list[str | Path] = [site.cluster.bin / "pgbench", "-n", "-M", "prepared", "-c", "8", "-j", "1"]
    pgbench += ["-R", str(rate), "-T", str(seconds), "-l", "--log-prefix", log, "-f", script]
    run([*pgbench, site.cluster.dsn(site.database)])
    durations = []
    for file in folder.glob("horizon-log.*"):
        durations += [int(line.split()[2]) / 1000 for line in file.read_text().splitlines()]
        file.unlink()
    return durations


def nobody(site: Site) -> AbstractContextManager[None]:
    return nullcontext()


# And for how long. Without them nothing piles up, so that a shorter time shows the same.
HOLDING: dict[str, tuple[Callable[[Site], AbstractContextManager[None]], int]] = {
    "nobody looks on": (nobody, 40),
    "one old snapshot": (old_snapshot, 120),
    f"{READERS} repeatable-read readers": (readers, 120),
}


def held(stage: Stage) -> Iterator[Figure]:
    seen = {
        f"{name}, {(seconds := stage.scaled(longest))} s": watch(stage, holding, seconds)
        for name, (holding, longest) in HOLDING.items()
    }
    stage.details["seen"] = {name: each._asdict() for name, each in seen.items()}
    base, *_ = seen.values()
    for name, each in seen.items():
        yield Figure(
            f"{RATE} messages/s, {name}",
            Quantity(each.delivered, "/s", "delivered"),
            Quantity(each.send_p99, "ms", "send p99"),
            Quantity(each.settled_p99, "ms", "send to settled p99"),
            Quantity(each.dead_rows, "rows", "dead"),
            *([] if each is base else [Quantity(1 - each.delivered / base.delivered, "share", "loss", aim=0.1)]),
            headline=True,
        )
    for name, each in seen.items():
        yield Figure(
            f"a backlog after that, {name}",
            Quantity(each.drained, "/s"),
            Quantity(each.processor, "us", "of processor each"),
            *([] if each is base else [Quantity(1 - each.drained / base.drained, "share", "loss", aim=0.1)]),
            headline=True,
        )


PART = Part(
    "Steady traffic and one worker while other sessions hold the horizon back; autovacuum, maintenance and VACUUM run as "
    "they do by pg_cron",
    {"held": held},
)
