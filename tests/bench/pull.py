"""External workers beside a plain table that is marked and finished by the same batches, and beside another revision.

16 consumers, batches of 25, 256-byte jobs: a backlog, a steady 400 jobs a second, the same under an old snapshot, and a
consumer that is killed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import psycopg
from psycopg import IsolationLevel
from psycopg.types.json import Jsonb
from support.cluster import Cluster

from bench.figures import Figure, Quantity
from bench.measure import Measured, Pgbench, Sample, interleave, percentile, processor_seconds
from bench.stage import Part, Stage, name_of

DB = psycopg.Connection[Any]

CONSUMERS = 16
BATCH = 25
RATE = 400
TEXT = "x" * 230
# How often a consumer of the plain table, or of the other revision, looks again if it found nothing.
POLL = 0.01
LEASE = 5

JOBS = """
    create table jobs (
        id bigint generated always as identity primary key,
        payload jsonb not null,
        status text not null default 'pending'
    );
    create index on jobs (id) where status = 'pending';
"""
PAYLOADS = f"jsonb_build_object('order', n, 'text', '{TEXT}') from generate_series(1, %s) n"
MARK = """
    with marked as (
        update jobs set status = 'processing'
        where id = any (array(
            select id from jobs where status = 'pending' order by id limit 25 for update skip locked
        ))
        returning id, payload
    )
    select coalesce(array_agg(id), '{}') as ids, array_agg(payload) as payloads from marked
"""
FINISH = "update jobs set status = 'done' where id = any ({})"
CLAIMED = """
    select coalesce(array_agg(id), array[]::bigint[]) as ids,
        coalesce(array_agg(attempt), array[]::integer[]) as attempts,
        array_agg(payload) as payloads
    from ulak.{} m
"""
CLAIM = CLAIMED.format("claim('c' || pg_backend_pid(), 25, 'shop')")
WORK = CLAIMED.format("work('c' || pg_backend_pid(), 25, 'shop', {}::bigint[], {}::integer[])")
# What work() writes, and nothing else: no rights, fences, priorities, ordering keys, limits, expired leases or recovery.
# The columns and months are filled in.
BARE_CLAIM = """
    with taken as (
        update ulak_private.deliveries q
        set status = 'processing', attempts = q.attempts + 1, locked_by = 'c' || pg_backend_pid(),
            lease_until = now() + interval '1 minute', processing_started_at = now(), updated_at = now()
        where q.ctid = any (array(
            select d.ctid from ulak_private.deliveries d
            where d.status = 'pending' and d.endpoint_id = 1 and d.priority = 0 and d.next_retry_at <= now()
            order by d.next_retry_at, d.id limit 25 for update skip locked
        ))
        returning q.id, q.event_id
    )
    select coalesce(array_agg(t.id), '{{}}') as ids, array_agg(e.payload) as payloads
    from taken t
    left join lateral (select e.payload from {events} e where e.id = t.event_id limit 1) e on true
"""
BARE_SETTLE = """
    with gone as (
        delete from ulak_private.deliveries q
        where q.id = any (:ids::bigint[]) and q.locked_by = 'c' || pg_backend_pid()
        returning q.*
    )
    insert into {archive} ({columns}, status, archived_at) select {columns}, 'completed', now() from gone
"""


def prepare(cluster: Cluster, name: str) -> None:
    with cluster.connect(name) as db:
        db.execute("select ulak.create_endpoint('shop', 'pull', '{}')")
        db.execute(JOBS)


# A backlog.


class Backlog:
    """The jobs of a round are added, and then taken and finished by all consumers at once."""

    def __init__(self, cluster: Cluster, name: str, count: int) -> None:
        self._cluster = cluster
        self._pgbench = Pgbench(cluster, cluster.folder)
        self._name = name
        self._count = count
        prepare(cluster, name)

    def plain(self) -> Sample:
        script = f"{oneline(MARK)} \\gset\n{FINISH.format(':ids')};"
        return self._drain(f"insert into jobs (payload) select {PAYLOADS}", script, "jobs")

    def work(self) -> Sample:
        return self._drain(self._send, f"{oneline(WORK.format(':ids', ':attempts'))} \\gset", "ulak.queue")

    def bare(self) -> Sample:
        """The statements that a turn can't do without, straight into the partitions of this month."""
        with self._cluster.connect(self._name) as db:
            row = db.execute(
                """
                select string_agg(a.attname, ', ' order by a.attname) as columns,
                    to_char(now() at time zone 'UTC', '"ulak_private.events_"YYYY_MM') as events,
                    to_char(now() at time zone 'UTC', '"ulak_private.archive_"YYYY_MM') as archive
                from pg_attribute a
                join pg_attribute b on b.attrelid = 'ulak_private.deliveries'::regclass and b.attname = a.attname
                where a.attrelid = 'ulak_private.archived'::regclass and a.attnum > 0 and a.attname <> 'status'
                """
            ).fetchone()
        assert row is not None
        columns, events, archive = row
        settle = oneline(BARE_SETTLE.format(columns=columns, archive=archive))
        return self._drain(self._send, f"{settle};\n{oneline(BARE_CLAIM.format(events=events))} \\gset", "ulak.queue")

    def one_by_one(self) -> Sample:
        """A claim of many, and a report of each."""
        script = f"{oneline(CLAIM)} \\gset\n" + "\n".join(
            f"select ulak.complete((:ids::bigint[])[{n}], 'c' || pg_backend_pid(), (:attempts::integer[])[{n}]);"
            for n in range(1, BATCH + 1)
        )
        return self._drain(self._send, script, "ulak.queue")

    @property
    def _send(self) -> str:
        return f"select ulak.send_batch('shop', array(select {PAYLOADS}))"

    def _drain(self, fill: str, script: str, table: str) -> Sample:
        with self._cluster.connect(self._name) as db:
            db.execute("truncate jobs")
            db.execute("delete from ulak.queue")
            db.execute(fill, [self._count])  # type: ignore[arg-type]
            db.execute("vacuum analyze")
        turns = self._count // BATCH
        path = self._cluster.folder / "turn.sql"
        path.write_text(f"{script}\n")
        taken = self._pgbench.run(
            self._name,
            path,
            turns,
            {"ids": "{}", "attempts": "{}"},
            clients=CONSUMERS,
        )
        with self._cluster.connect(self._name) as db:
            row = db.execute(f"select count(*) from {table} where status = 'pending'").fetchone()  # type: ignore[arg-type]
        assert row is not None
        return Sample(*(each * turns / (self._count - row[0]) for each in taken))


def oneline(text: str) -> str:
    return " ".join(text.split())


def backlog(stage: Stage) -> Iterator[Figure]:
    unit = CONSUMERS * BATCH
    count = stage.scaled(30_000, 3 * unit) // unit * unit
    parts: dict[str, Any] = {}
    with ExitStack() as stack:
        for build in stage.builds:
            ours = Backlog(stage.cluster_of(build), stack.enter_context(stage.database(build)), count)
            if build is None:
                parts |= {"plain": ours.plain, "bare": ours.bare, "work": ours.work}
            else:
                parts["against"] = ours.one_by_one
        measured = interleave(parts, stage.rounds(3))
    plain, work = measured["plain"], measured["work"]
    yield Figure(f"{count:,} waiting: a plain table", *per_job(plain))
    bare = measured["bare"]
    yield Figure(
        f"{count:,} waiting: the same rows by bare statements",
        *per_job(bare),
        Quantity(bare.of(plain), "of", "the plain table's rate"),
        Quantity(bare.times_processor(plain), "times", "its processor"),
    )
    quantities = [
        Quantity(work.of(plain), "of", "the plain table's rate", required=0.8),
        Quantity(work.times_processor(plain), "times", "its processor", required=1.5),
    ]
    if "against" in measured:
        old = measured["against"]
        yield Figure(f"{name_of(stage.against)}{count:,} waiting: claim(), and complete() for each", *per_job(old))
        quantities.append(Quantity(work.of(old), "of", f"the rate of {stage.against}", required=3))
    yield Figure(f"{count:,} waiting: work()", *per_job(work), *quantities, headline=True)


def per_job(measured: Measured) -> tuple[Quantity, ...]:
    return Quantity(measured.rate, "/s"), Quantity(measured.processor, "us", "of the server's processor")


# A steady stream.


class Stream(NamedTuple):
    sent: int
    done: int
    p50: float
    p99: float
    # Of the server, sending included, microseconds a job.
    processor: float


class Consumers:
    """Threads that each have a session; jobs carry the time when they were sent."""

    def __init__(self, cluster: Cluster, name: str, way: str) -> None:
        self._connect = partial(cluster.connect, name)
        self._way = way
        self._stop = threading.Event()
        self.delays: list[float] = []
        self._used: list[float] = []
        self._threads = [threading.Thread(target=self._run) for _ in range(CONSUMERS)]

    def stream(self, seconds: float) -> Stream:
        for thread in self._threads:
            thread.start()
        with self._connect() as db:
            sent = self._send(db, seconds)
            time.sleep(1)
            self._stop.set()
            for thread in self._threads:
                thread.join()
            used = sum(self._used) + processor_seconds(db.info.backend_pid)
        delays = self.delays or [0.0]
        return Stream(sent, len(self.delays), percentile(delays, 0.5), percentile(delays, 0.99), used * 1e6 / sent)

    def _send(self, db: DB, seconds: float) -> int:
        send = "insert into jobs (payload) values (%s)" if self._way == "plain" else "select ulak.send('shop', %s)"
        began, sent = time.monotonic(), 0
        while (now := time.monotonic()) < began + seconds:
            if sent > (now - began) * RATE:
                time.sleep(0.0005)
                continue
            db.execute(send, [Jsonb({"at": time.time(), "text": TEXT})], prepare=True)  # type: ignore[arg-type]
            sent += 1
        return sent

    def _run(self) -> None:
        with self._connect() as db:
            turn = getattr(self, f"_{self._way}")
            held: list[Any] = [[], []]
            while not self._stop.is_set():
                held = turn(db, held)
            self._used.append(processor_seconds(db.info.backend_pid))

    def _got(self, payloads: Any) -> None:
        now = time.time()
        self.delays += [now - each["at"] for each in payloads or ()]

    def _plain(self, db: DB, held: list[Any]) -> list[Any]:
        ids, payloads = db.execute(MARK, prepare=True).fetchone() or ([], [])
        self._got(payloads)
        if ids:
            db.execute(FINISH.format("%s"), [ids], prepare=True)  # type: ignore[arg-type]
        else:
            self._stop.wait(POLL)
        return held

    def _work(self, db: DB, held: list[Any]) -> list[Any]:
        ids, attempts, payloads = db.execute(WORK.format("%s", "%s"), held, prepare=True).fetchone() or ([], [], [])
        self._got(payloads)
        if not ids:
            (wait,) = db.execute("select ulak.listen()", prepare=True).fetchone() or (0.0,)
            list(db.notifies(timeout=wait, stop_after=1))
        return [ids, attempts]

    def _one_by_one(self, db: DB, held: list[Any]) -> list[Any]:
        ids, attempts, payloads = db.execute(CLAIM, prepare=True).fetchone() or ([], [], [])
        self._got(payloads)
        for job in zip(ids, attempts, strict=True):
            db.execute("select ulak.complete(%s, 'c' || pg_backend_pid(), %s)", job, prepare=True)
        if not ids:
            self._stop.wait(POLL)
        return held


def stream(stage: Stage, way: str, seconds: float, build: str | None = None, is_held: bool = False) -> Stream:
    cluster = stage.cluster_of(build)
    with stage.database(build) as name, cluster.connect(name, autocommit=False) as reader:
        prepare(cluster, name)
        if is_held:
            reader.isolation_level = IsolationLevel.REPEATABLE_READ
            reader.execute("select count(*) from ulak.queue")
        return Consumers(cluster, name, way).stream(seconds)


def streamed(found: Stream) -> tuple[Quantity, ...]:
    return (
        Quantity(found.p50 * 1e3, "ms", "p50"),
        Quantity(found.p99 * 1e3, "ms", "p99"),
        Quantity(found.processor, "us", "of the server's processor"),
    )


def steady(stage: Stage) -> Iterator[Figure]:
    seconds = stage.scaled(60, 8)
    plain = stream(stage, "plain", seconds)
    yield Figure(f"{RATE}/s: a plain table, polled every {POLL * 1e3:.0f} ms", *streamed(plain))
    if stage.against is not None:
        old = stream(stage, "one_by_one", seconds, stage.against)
        yield Figure(f"{name_of(stage.against)}{RATE}/s: claim() and complete(), polled", *streamed(old))
    work = stream(stage, "work", seconds)
    yield Figure(
        f"{RATE}/s: work() and listen()",
        *streamed(work),
        Quantity(work.p50 / plain.p50, "times", "the plain table's p50", required=1.5),
        Quantity(work.processor / plain.processor, "times", "its processor", required=1.5),
        headline=True,
    )


def snapshot(stage: Stage) -> Iterator[Figure]:
    seconds = stage.scaled(600, 30)
    for way in ("plain", "work"):
        found = stream(stage, way, seconds, is_held=True)
        yield Figure(
            f"{RATE}/s for {seconds} s under an old snapshot: {way}",
            Quantity(found.sent / seconds, "/s", "sent", required=0.98 * RATE if way == "work" else None),
            Quantity(found.done / found.sent, "of", "them done", required=0.98 if way == "work" else None),
            *streamed(found),
            headline=way == "work",
        )


def killed(stage: Stage) -> Iterator[Figure]:
    """One of two consumers is killed with a batch; the other one waits as it would."""
    with stage.database() as name, stage.cluster.connect(name) as db, stage.cluster.connect(name) as other:
        prepare(stage.cluster, name)
        db.execute(f"select ulak.send_batch('shop', array(select {PAYLOADS}))", [BATCH])
        with stage.cluster.connect(name) as victim:
            victim.execute(f"select count(*) from ulak.claim('victim', {BATCH}, 'shop', '{LEASE} s')")
            claimed_at = time.monotonic()
            db.execute("select pg_terminate_backend(%s)", [victim.info.backend_pid])
        done = 0
        held: list[Any] = [[], []]
        while done < BATCH:
            ids, attempts, _ = other.execute(WORK.format("%s", "%s"), held, prepare=True).fetchone() or ([], [], [])
            done, held = done + len(held[0]), [ids, attempts]
            if not ids and done < BATCH:
                (wait,) = other.execute("select ulak.listen()").fetchone() or (0.0,)
                list(other.notifies(timeout=wait, stop_after=1))
        yield Figure(
            f"a consumer killed, lease {LEASE} s: its last job done after the lease by",
            Quantity(time.monotonic() - claimed_at - LEASE, "s", required=2.0),
            headline=True,
        )


PART = Part(
    "External workers: 16 consumers, batches of 25, 256-byte jobs",
    {"backlog": backlog, "steady": steady, "snapshot": snapshot, "killed": killed},
    compares=True,
)
