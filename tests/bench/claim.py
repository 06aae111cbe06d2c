"""What a claim costs beside a million messages that it must not take, and what a message's whole way costs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import psycopg
from support.sessions import gather

from bench import storage
from bench.figures import Figure, Quantity, table
from bench.measure import Measured, Sample, interleave, sample
from bench.peers import TABLES, drain, mark_and_finish
from bench.stage import QUIET, Part, Stage

DB = psycopg.Connection[Any]

LIMIT = 500
BUSY = 4  # endpoints

MESSAGE = {"endpoint_id": "e.id", "payload": "jsonb_build_object('order', n, 'text', repeat('x', 160))"}

# Rows beside those that are due: which endpoints they belong to, where they are stored, and what they are.
KINDS: dict[str, tuple[str, str, dict[str, str]]] = {
    "due next week": ("like 'busy%%'", storage.WAITING, {"next_retry_at": "now() + interval '7 days'"}),
    "of a disabled endpoint": ("= 'disabled'", storage.WAITING, {}),
    "of an open circuit": ("= 'open'", storage.WAITING, {}),
    "completed": ("like 'busy%%'", storage.DONE, {"status": "'completed'"}),
}

# In this order: statistics of a nearly empty queue can't be had back.
STATISTICS: dict[str, str] = {
    "stale statistics": "select",
    "fresh statistics": "analyze",
    "no statistics": """
        set allow_system_table_mods = on;
        create temporary table unknown as
        select oid from pg_class
        where oid = 'ulak.endpoints'::regclass
            or relnamespace::regnamespace::text in ('ulak', 'ulak_private') and relname ~ '^(queue|_?deliveries|_?events|_?archived|archive)(_|$)';
        delete from pg_statistic where starelid in (select oid from unknown);
        update pg_class set reltuples = -1, relpages = 0
        where oid in (select oid from unknown) and relkind = 'r'
            or oid in (select indexrelid from pg_index where indrelid in (select oid from unknown));
    """,
}


def prepare(db: DB) -> None:
    """Busy endpoints, and two that nothing may be taken from."""
    db.execute("select ulak.create_endpoint('busy ' || n, 'pull', '{}') from generate_series(1, %s) n", [BUSY])
    db.execute("select ulak.create_endpoint(name, 'pull', '{}') from unnest(array['disabled', 'open']) name")
    db.execute("select ulak.disable_endpoint('disabled')")
    db.execute(
        "update ulak.endpoints set circuit_state = 'open', circuit_half_open_at = 'infinity' where name = 'open'"
    )
    add_due(db, 100)
    db.execute("analyze")


def add_due(db: DB, each: int) -> None:
    """This many messages for each busy endpoint."""
    storage.insert(db, MESSAGE, "generate_series(1, %s) n join ulak.endpoints e on e.name like 'busy%%'", [each])


def add_others(db: DB, kind: str, count: int) -> None:
    name, place, columns = KINDS[kind]
    each = f"%s / (select count(*)::integer from ulak.endpoints where name {name})"
    source = f"generate_series(1, {each}) n join ulak.endpoints e on e.name {name}"
    storage.insert(db, MESSAGE | columns, source, [count], place)


def claim(db: DB) -> int:
    row = db.execute("select count(*) from ulak.claim('bench', %s)", [LIMIT], prepare=True).fetchone()
    assert row is not None and row[0] == LIMIT, f"{row} messages were claimed"
    return LIMIT


def beside(stage: Stage) -> Iterator[Figure]:
    """One database for each kind of other rows. They are measured in turn, first with one state of the statistics."""
    others, rounds = stage.scaled(1_000_000, 10_000), stage.rounds(9)
    measured: dict[str, dict[str, Measured]] = {}
    with ExitStack() as stack:
        databases = {kind: stack.enter_context(stage.database()) for kind in ["nothing", *KINDS]}

        def fill(kind: str) -> None:
            with stage.cluster.connect(databases[kind]) as db:
                prepare(db)
                if kind in KINDS:
                    add_others(db, kind, others)
                add_due(db, len(STATISTICS) * (rounds + 1) * LIMIT // BUSY)
                # Hint bits and the visibility map, which no other statement should have to set.
                storage.vacuum(db, "analyze off")

        gather([partial(fill, kind) for kind in databases])
        for state, statement in STATISTICS.items():
            for name in databases.values():
                stage.cluster.execute(statement, name)
            stage.cluster.execute("checkpoint")
            measured[state] = claims(stage, databases, rounds)
    stage.details["claims"] = {
        state: {kind: [each._asdict() for each in part.samples] for kind, part in parts.items()}
        for state, parts in measured.items()
    }
    show(measured, others)
    yield Figure(f"claim of {LIMIT} beside nothing", *per_message(measured["fresh statistics"]["nothing"]))
    for kind in KINDS:
        # Whatever the statistics say: the worst.
        times = max(parts[kind].times(parts["nothing"]) for parts in measured.values())
        used = max(parts[kind].times_processor(parts["nothing"]) for parts in measured.values())
        yield Figure(
            f"claim of {LIMIT} beside {others:,} rows {kind}, times beside nothing",
            # The machine may have been busy with something else, or the clock too coarse: not both.
            Quantity(min(times, used), "times", required=1.5),
            headline=True,
        )


def claims(stage: Stage, databases: dict[str, str], rounds: int) -> dict[str, Measured]:
    """In new sessions, which have no plans of before."""
    with ExitStack() as stack:
        sessions = {kind: stack.enter_context(stage.cluster.connect(name)) for kind, name in databases.items()}
        for session in sessions.values():
            session.execute("set jit = off")
        return interleave({kind: partial(sample, db, partial(claim, db)) for kind, db in sessions.items()}, rounds)


def per_message(measured: Measured) -> tuple[Quantity, Quantity]:
    return (
        Quantity(measured.elapsed, "us", "a message"),
        Quantity(measured.processor, "us", "of the server's processor"),
    )


def show(measured: dict[str, dict[str, Measured]], others: int) -> None:
    rows = [
        (
            f"{kind}, {state}",
            f"{part.elapsed:.1f} us",
            f"{part.times(parts['nothing']):.2f}",
            f"{part.processor:.1f} us",
            f"{part.times_processor(parts['nothing']):.2f}",
        )
        for state, parts in measured.items()
        for kind, part in parts.items()
    ]
    print(f"\n{table((f'beside {others:,} rows', 'time', 'ratio', 'processor', 'ratio'), rows)}\n", flush=True)


# The whole way of messages, by one client.


class Way:
    """How a client claims and settles, and what it needs for that."""

    def __init__(self, name: str, messages: int, config: str = "{}", ordering: str = "null", error: str | None = None):
        self.name = name
        self.messages = messages
        self.config = config
        self.ordering = ordering
        self.error = error

    def run(self, stage: Stage, count: int, build: str | None = None) -> Sample:
        with stage.session(build) as db:
            db.execute(
                "select ulak.create_endpoint('busy ' || n, 'pull', %s) from generate_series(1, %s) n",
                [self.config, BUSY],
            )
            add_due(db, count // BUSY)
            table = storage.tables_of(db).waiting
            db.execute(f"update {table} set ordering_key = {self.ordering}")  # type: ignore[arg-type]
            storage.vacuum(db, "full")
            db.execute("set jit = off")
            db.execute("set synchronous_commit = off")
            return sample(db, lambda: sum(self.deliver(db, count)))

    def deliver(self, db: DB, count: int) -> Iterator[int]:
        done = 0
        claim, settle = (storage.private(db, name) for name in ("claim", "settle_many"))
        while done < count:
            rows = db.execute(f"select id, attempt from {claim}('bench', %s)", [LIMIT], prepare=True).fetchall()  # type: ignore[arg-type]
            ids, attempts = zip(*rows, strict=True)
            errors = None if self.error is None else [self.error] * len(rows)
            db.execute(
                f"select {settle}('bench', %s::bigint[], %s::integer[], %s::text[])",  # type: ignore[arg-type]
                [list(ids), list(attempts), errors],
                prepare=True,
            )
            done += len(rows)
            yield len(rows)


class OneByOne(Way):
    """As an external worker does: one report each."""

    def deliver(self, db: DB, count: int) -> Iterator[int]:
        done = 0
        while done < count:
            rows = db.execute("select id, attempt from ulak.claim('bench', 100)", prepare=True).fetchall()
            for id, attempt in rows:
                db.execute("select ulak.complete(%s, 'bench', %s)", [id, attempt], prepare=True)
            done += len(rows)
            yield len(rows)


DELIVERED = Way("delivered", 50_000)
OTHER_WAYS = [
    Way("delivered, 1,000 ordering keys", 10_000, ordering="'key ' || id % 1000"),
    Way("delivered, rate limit and cap", 10_000, '{"rate_limit": {"limit": 1000000}, "max_in_flight": 10000}'),
    Way(
        "failed, to be retried",
        10_000,
        '{"circuit_breaker": {"mode": "rate", "min_requests": 1000000}}',
        error="[RETRYABLE] 503",
    ),
    Way("dead", 10_000, error="[PERMANENT] 400"),
    OneByOne("delivered one by one", 10_000),
]


def plain_table(stage: Stage, count: int) -> Sample:
    """The yardstick: a table of one's own, whose rows are marked and then finished by as many."""
    with stage.database() as name, stage.cluster.connect(name) as db:
        db.execute(TABLES)
        db.execute(
            "insert into updated (payload) select jsonb_build_object('order', n, 'text', repeat('x', 160)) "
            "from generate_series(1, %s) n",
            [count],
        )
        db.execute("vacuum full updated")
        db.execute("set jit = off")
        db.execute("set synchronous_commit = off")
        return sample(db, lambda: drain(db, mark_and_finish, LIMIT, count))


def ways(stage: Stage) -> Iterator[Figure]:
    count = stage.scaled(DELIVERED.messages, LIMIT) // BUSY * BUSY
    parts = {"plain": partial(plain_table, stage, count), "ulak": partial(DELIVERED.run, stage, count)}
    measured = interleave(parts, rounds=stage.rounds(3), unmeasured=0)
    plain, ours = measured["plain"], measured["ulak"]
    yield Figure(f"rows of a plain table, marked by {LIMIT} and finished", *way_quantities(plain))
    yield Figure(
        f"claimed by {LIMIT} and settled: {DELIVERED.name}",
        *way_quantities(ours),
        Quantity(ours.least_times(plain), "times", "the plain table", required=2.5),
        headline=True,
    )
    for way in OTHER_WAYS:
        found = way.run(stage, stage.scaled(way.messages, LIMIT) // BUSY * BUSY)
        yield Figure(f"claimed by {LIMIT} and settled: {way.name}", *way_quantities(Measured([found])))


def way_quantities(measured: Measured) -> tuple[Quantity, ...]:
    return (
        Quantity(measured.rate, "/s"),
        Quantity(measured.elapsed, "us", "each"),
        Quantity(measured.processor, "us", "of the server's processor"),
    )


PART = Part(
    "Claim and settle, one client, synchronous_commit = off as the worker has it",
    {"ways": ways, "beside": beside},
    QUIET,
)
