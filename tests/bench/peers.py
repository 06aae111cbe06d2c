"""Other queues in PostgreSQL, on the same server in the same minute: PgQ, and a table with SKIP LOCKED.

None of them does what the others do: PgQ hands whole batches to each of its consumers and leaves retries to them; a
table of one's own has no retries, no leases and no limits. What is taken is given to the client; nothing is sent by HTTP.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import psycopg
from support.cluster import CommandFailed, major
from support.debian import unpacked, version

from bench import storage
from bench.figures import Figure, Quantity
from bench.measure import Measured, Pgbench, Sample, interleave, sample
from bench.send import PAYLOAD
from bench.stage import QUIET, Part, Stage

DB = psycopg.Connection[Any]

BATCH = 500

TABLES = """
    create table deleted (
        id bigint generated always as identity primary key,
        payload jsonb not null,
        created_at timestamptz not null default now()
    );
    create table updated (
        id bigint generated always as identity primary key,
        payload jsonb not null,
        status text not null default 'pending',
        created_at timestamptz not null default now()
    );
    create index on updated (id) where status = 'pending';
"""

SEND = {
    "table": "insert into deleted (payload) values (:payload)",
    "PgQ": "select pgq.insert_event('bench', 'order', :payload)",
    "ulak": "select ulak.send('shop', :payload)",
}

TAKE = """
    delete from deleted where id = any (array(select id from deleted order by id limit %s for update skip locked))
    returning id, payload
"""
MARK = """
    update updated set status = 'processing'
    where id = any (array(
        select id from updated where status = 'pending' order by id limit %s for update skip locked
    ))
    returning id, payload
"""


# How a consumer takes all that waits. Each step is a transaction; how many it took.


def take(db: DB, limit: int) -> int:
    return len(db.execute(TAKE, [limit], prepare=True).fetchall())


def mark_and_finish(db: DB, limit: int) -> int:
    rows = db.execute(MARK, [limit], prepare=True).fetchall()
    db.execute("update updated set status = 'done' where id = any (%s)", [[row[0] for row in rows]], prepare=True)
    return len(rows)


def next_batch(db: DB, limit: int) -> int:
    """Of the size that the ticks have given it."""
    row = db.execute("select pgq.next_batch('bench', 'bench')", prepare=True).fetchone()
    assert row is not None
    if row[0] is None:
        return 0
    events = db.execute("select ev_id, ev_data from pgq.get_batch_events(%s)", row, prepare=True).fetchall()
    db.execute("select pgq.finish_batch(%s)", row, prepare=True)
    return len(events)


def claim_and_settle(db: DB, limit: int) -> int:
    """As the worker does."""
    rows = db.execute(
        "select id, attempt, payload from ulak_private.claim('bench', %s)", [limit], prepare=True
    ).fetchall()
    settle = "select ulak_private.settle_many('bench', %s::bigint[], %s::integer[], null)"
    db.execute(settle, [[row[0] for row in rows], [row[1] for row in rows]], prepare=True)
    return len(rows)


def claim_and_complete(db: DB, limit: int) -> int:
    """As an external worker does."""
    rows = db.execute("select id, attempt, payload from ulak.claim('bench', %s)", [limit], prepare=True).fetchall()
    for id, attempt, _ in rows:
        db.execute("select ulak.complete(%s, 'bench', %s)", [id, attempt], prepare=True)
    return len(rows)


Step = Callable[[DB, int], int]

CONSUMERS: dict[str, tuple[str, Step, int]] = {
    "table, deleted one by one": ("table", take, 1),
    f"table, deleted by {BATCH}": ("table", take, BATCH),
    "table, marked, then finished, one by one": ("table", mark_and_finish, 1),
    f"table, marked, then finished, by {BATCH}": ("table", mark_and_finish, BATCH),
    f"PgQ, batches of {BATCH}": ("PgQ", next_batch, BATCH),
    "ulak, claimed and completed one by one": ("ulak", claim_and_complete, 1),
    f"ulak, claimed and settled by {BATCH}": ("ulak", claim_and_settle, BATCH),
}


def drain(db: DB, step: Step, limit: int, count: int) -> int:
    done = 0
    while done < count and (taken := step(db, limit)):
        done += taken
    assert done == count, f"{done} of {count}"
    return done


# What they work with.


def fetch_pgq(stage: Stage) -> str | None:
    """Puts PgQ beside the staged extension and returns its version; None where it isn't to be had."""
    package = f"postgresql-{major()}-pgq3"
    try:
        folder = unpacked(package)
    except (CommandFailed, OSError) as failure:
        print(f"PgQ can't be had, and is left out: {failure}", flush=True)
        return None
    shutil.copytree(folder / "usr", stage.cluster.folder / "stage/usr", dirs_exist_ok=True)
    return version(package)


def prepare(stage: Stage, database: str) -> dict[str, str]:
    """The queues, empty; which there are, and their versions."""
    found = {"table": "", "ulak": ""}
    with stage.cluster.connect(database) as db:
        db.execute(TABLES)
        db.execute("select ulak.create_endpoint('shop', 'pull', '{}')")
        pgq = fetch_pgq(stage)
        if pgq is not None:
            db.execute("create extension pgq")
            db.execute("select pgq.create_queue('bench'), pgq.register_consumer('bench', 'bench')")
            # Fewer than come between two ticks, so that the ticker never finds it too early.
            db.execute("select pgq.set_queue_config('bench', 'ticker_max_count', %s)", [str(BATCH // 2)])
            found["PgQ"] = pgq
    stage.details["versions"] = {"pgq": pgq, "table": TABLES}
    return {name: found[name] for name in SEND if name in found}


def titled(name: str, versions: dict[str, str]) -> str:
    peer = name.split(",")[0]
    return name.replace(peer, f"{peer} {versions[peer]}".rstrip(), 1)


def sending(stage: Stage) -> Iterator[Figure]:
    with stage.database() as database:
        versions = prepare(stage, database)
        pgbench = Pgbench(stage.cluster, stage.cluster.folder)
        scripts = {
            name: pgbench.script(f"peer {number}", statement) for number, (name, statement) in enumerate(SEND.items())
        }
        parts: dict[str, Callable[[], Sample]] = {
            f"{name}, {clients} client{'s' * (clients > 1)}": partial(
                pgbench.run,
                database,
                scripts[name],
                stage.scaled(4000 * clients // 2, 80),
                {"payload": PAYLOAD},
                clients,
                {"synchronous_commit": "off"},
            )
            for clients in (1, 8)
            for name in versions
        }
        measured = interleave(parts, stage.rounds(3))
    for name, part in measured.items():
        yield Figure(f"sending: {titled(name, versions)}", *quantities(part), headline=True)


def fill(db: DB, consumer: str, count: int) -> None:
    """PgQ's batches are what came between two ticks, and there is a tick after every so many events."""
    if consumer.startswith("PgQ"):
        for _ in range(count // BATCH):
            db.execute("select pgq.insert_event('bench', 'order', %s) from generate_series(1, %s)", [PAYLOAD, BATCH])
            db.execute("select pgq.ticker('bench')")
    elif consumer.startswith("ulak"):
        storage.empty(db)
        db.execute("select ulak.send_batch('shop', array_fill(%s::jsonb, array[%s]))", [PAYLOAD, count])
        storage.vacuum(db)
    else:
        for table in ("deleted", "updated"):
            db.execute(f"truncate {table}")  # type: ignore[arg-type]
            fill = f"insert into {table} (payload) select %s from generate_series(1, %s)"
            db.execute(fill, [PAYLOAD, count])  # type: ignore[arg-type]
            db.execute(f"vacuum analyze {table}")  # type: ignore[arg-type]


def consume(stage: Stage, database: str, name: str) -> Sample:
    """In a new session, once it has its plans."""
    _, step, limit = CONSUMERS[name]
    count = stage.scaled(10_000, BATCH) // BATCH * BATCH if limit > 1 else stage.scaled(1000, 100)
    with stage.cluster.connect(database) as db:
        db.execute("set jit = off")
        db.execute("set synchronous_commit = off")
        fill(db, name, count + limit)
        step(db, limit)
        return sample(db, lambda: drain(db, step, limit, count))


def taking(stage: Stage) -> Iterator[Figure]:
    with stage.database() as database:
        versions = prepare(stage, database)
        names = [name for name, (peer, _, _) in CONSUMERS.items() if peer in versions]
        measured = interleave({name: partial(consume, stage, database, name) for name in names}, stage.rounds(3))
    for name, part in measured.items():
        yield Figure(f"taking: {titled(name, versions)}", *quantities(part), headline=True)


def quantities(measured: Measured) -> tuple[Quantity, Quantity]:
    return (
        Quantity(measured.rate, "/s"),
        Quantity(measured.processor, "us", "of the server's processor each"),
    )


PART = Part(
    f"Other queues beside ulak, without HTTP: one message of {len(PAYLOAD)} bytes per transaction sent, one client taking; "
    "synchronous_commit = off, medians of interleaved rounds",
    {"sending": sending, "taking": taking},
    QUIET,
)
