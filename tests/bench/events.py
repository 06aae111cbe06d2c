"""What events cost: publish() beside many patterns that don't match, and changes of a watched table beside
publish_batch(), replacing what waits, and settling where outcomes are announced."""

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
    """Of each of this many events, in an empty queue."""
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
    """A statement that updates this many rows, without and with a watch, beside publish_batch() of as many with ordering keys."""
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


def settled(db: DB, messages: int) -> Sample:
    """Claimed before, delivered by 64, as a worker has them."""
    storage.empty(db)
    db.execute("select ulak.send_batch('shop', array_fill(%s::jsonb, array[%s]))", [PAYLOAD, messages])
    claim = "select array_agg(id), array_agg(attempt) from ulak.claim('bench', 64, 'shop')"
    claims = [db.execute(claim).fetchall()[0] for _ in range(messages // 64)]

    def work() -> int:
        for ids, attempts in claims:
            db.execute("select ulak_private.settle_many('bench', %s, %s)", [ids, attempts])
        return 64 * len(claims)

    return sample(db, work)


def announce(stage: Stage) -> Iterator[Figure]:
    """Without, beside an endpoint that announces, and where each delivery becomes an event for a subscriber."""
    messages = stage.scaled(6_400, 64) // 64 * 64
    announcing = """'{"announce": ["delivered"]}'"""
    with ExitStack() as stack:
        parts: dict[str, Callable[[], Sample]] = {}
        for name, setup in (
            ("plain", "select 1"),
            ("beside", f"select ulak.create_endpoint('other', 'pull', {announcing})"),
            ("announced", f"select ulak.alter_endpoint('shop', {announcing})"),
        ):
            db = shop(stage, stack)
            db.execute("select ulak.create_endpoint('callbacks', 'pull', '{}')")
            db.execute("select ulak.subscribe('ulak.message.delivered', 'callbacks')")
            db.execute(setup)  # type: ignore[arg-type]
            parts[name] = partial(settled, db, messages)
        measured = interleave(parts, stage.rounds(5))
    plain = measured["plain"]
    yield Figure(
        f"settling {messages:,} deliveries by 64, each announced to a subscriber",
        Quantity(measured["announced"].processor, "us", "of processor each"),
        Quantity(plain.processor, "us", "where none is"),
        Quantity(measured["announced"].times_processor(plain), "times", "that"),
        Quantity(measured["beside"].least_times(plain), "times", "beside an endpoint that announces", required=1.2),
    )


PART = Part(
    "What events cost, one session, synchronous_commit = off; each beside the plain way in the same run",
    {"wildcards": wildcards, "watch": watch, "replace": replace, "announce": announce},
    QUIET,
)
