"""What events cost: publish() beside many patterns that don't match, and changes of a watched table beside
publish_batch(), and replacing what waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import psycopg

from bench import storage
from bench.figures import Figure, Quantity
from bench.measure import Sample, interleave, sample
from bench.send import PAYLOAD
from bench.stage import QUIET, Part, Stage

DB = psycopg.Connection[Any]

EVENTS = 10_000


def shop(stage: Stage, stack: ExitStack) -> DB:
    """A session in a database with an endpoint and an event type."""
    db = stack.enter_context(stage.cluster.connect(stack.enter_context(stage.database())))
    db.execute("set synchronous_commit = off")
    db.execute("select ulak.create_endpoint('shop', 'pull', '{}')")
    db.execute("select ulak.create_event_type('order.placed')")
    return db


def taken(db: DB, statement: str, events: int) -> Sample:
    """Of each of so many events, in an empty queue."""
    storage.empty(db)

    def work() -> int:
        db.execute(statement, [PAYLOAD, events])
        return events

    return sample(db, work)


def wildcards(stage: Stage) -> Iterator[Figure]:
    others, events = stage.scaled(EVENTS, 10), stage.scaled(2_000, 10)
    publish = "select ulak.publish('order.placed', %s) from generate_series(1, %s)"
    with ExitStack() as stack:
        parts: dict[str, Callable[[], Sample]] = {}
        for name, pattern, count in (
            ("plain", "order.placed", 0),
            ("pattern", "order.*", 0),
            ("among", "order.*", others),
        ):
            db = shop(stage, stack)
            db.execute("select ulak.subscribe(%s, 'shop')", [pattern])
            db.execute("select ulak.subscribe('tenant' || n || '.*', 'shop') from generate_series(1, %s) n", [count])
            parts[name] = partial(taken, db, publish, events)
        measured = interleave(parts, stage.rounds(5))
    yield Figure(
        f"publish() to a subscriber of order.* among {others:,} subscriptions to other patterns",
        Quantity(measured["among"].processor, "us", "of processor each"),
        Quantity(measured["among"].times_processor(measured["pattern"]), "times", "that without them", required=1.2),
        Quantity(measured["pattern"].times_processor(measured["plain"]), "times", "that by its name", required=1.2),
    )


def watch(stage: Stage) -> Iterator[Figure]:
    """A statement that updates so many rows, without and with a watch, beside publish_batch() of as many with ordering keys."""
    rows = stage.scaled(EVENTS, 100)
    update = "update orders set total = total + 1 where %s::text is not null and id <= %s"
    batch = """
        select ulak.publish_batch(jsonb_agg(jsonb_build_object('event_type', 'order.placed', 'payload', %s::jsonb, 'ordering_key', n::text)))
        from generate_series(1, %s) n
    """
    with ExitStack() as stack:
        parts: dict[str, Callable[[], Sample]] = {}
        for name, statement in (("plain", update), ("watched", update), ("batch", batch)):
            db = shop(stage, stack)
            db.execute("select ulak.subscribe('order.placed', 'shop')")
            db.execute("create table orders (id int primary key, customer text, total int) with (fillfactor = 50)")
            db.execute("insert into orders select n, repeat('x', 100), n from generate_series(1, %s) n", [rows])
            db.execute("vacuum analyze orders")
            if name == "watched":
                db.execute("select ulak.watch('orders', 'order.placed')")
            parts[name] = partial(taken, db, statement, rows)
        measured = interleave(parts, stage.rounds(5))
    watched, published = measured["watched"], measured["batch"]
    yield Figure(
        f"an update of {rows:,} rows of a watched table beside publish_batch() of as many",
        Quantity(watched.processor, "us", "of processor a row"),
        Quantity(measured["plain"].processor, "us", "without the watch"),
        Quantity(watched.least_times(published), "times", "the batch's", required=1.5),
    )


def replace(stage: Stage) -> Iterator[Figure]:
    """Many times under one key, so that all but the first replace the one that waits, beside as many keys."""
    count = stage.scaled(2_000, 10)
    keyed = "select ulak.send('shop', %s, p_idempotency_key => n::text) from generate_series(1, %s) n"
    replacing = (
        "select ulak.send('shop', %s, p_idempotency_key => 'k', p_if_waiting => 'replace') from generate_series(1, %s)"
    )
    with ExitStack() as stack:
        parts: dict[str, Callable[[], Sample]] = {
            name: partial(taken, shop(stage, stack), statement, count)
            for name, statement in (("keyed", keyed), ("replacing", replacing))
        }
        measured = interleave(parts, stage.rounds(5))
    yield Figure(
        f"send() that replaces a waiting message, {count:,} times in a transaction",
        Quantity(measured["replacing"].processor, "us", "of processor each"),
        Quantity(measured["replacing"].times_processor(measured["keyed"]), "times", "that with a key of its own"),
    )


PART = Part(
    "What events cost, one session, synchronous_commit = off; each beside the plain way in the same run",
    {"wildcards": wildcards, "watch": watch, "replace": replace},
    QUIET,
)
