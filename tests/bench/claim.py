"""What a claim costs beside a million messages that it must not take, and what a message's whole way costs.

python -m bench.claim
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
from bench.measure import Measured, Sample, interleave, table
from support.cluster import WORK, Cluster, Settings

DB = psycopg.Connection[Any]

LIMIT = 500
ROUNDS = 15
OTHERS = 1_000_000
MESSAGES = 50_000
FEW = 10_000

# Autovacuum, checkpoints and analyze come when the bench says so.
QUIET: Settings = {
    "autovacuum": False,
    "checkpoint_timeout": "1h",
    "max_wal_size": "16GB",
    "shared_buffers": "1GB",
    "synchronous_commit": False,
}

DUE = """
    insert into ulak.queue (endpoint_id, payload)
    select e.id, jsonb_build_object('order', n, 'text', repeat('x', 160))
    from generate_series(1, %s) n
    join ulak.endpoints e on e.name like 'busy%%'
"""

# Rows beside those that are due: where they belong to, and what they are.
KINDS: dict[str, tuple[str, str, str]] = {
    "due next week": ("like 'busy%%'", "pending", "now() + interval '7 days'"),
    "of a disabled endpoint": ("= 'disabled'", "pending", "now()"),
    "of an open circuit": ("= 'open'", "pending", "now()"),
    "completed": ("like 'busy%%'", "completed", "now()"),
}

OTHER = """
    insert into ulak.queue (endpoint_id, payload, status, next_retry_at)
    select e.id, jsonb_build_object('order', n, 'text', repeat('x', 160)), '{1}', {2}
    from generate_series(1, %s / (select count(*)::integer from ulak.endpoints where name {0})) n
    join ulak.endpoints e on e.name {0}
"""

STATISTICS: dict[str, str] = {
    # Gathered when the queue was nearly empty.
    "stale": "checkpoint",
    "fresh": "analyze",
    "none": """
        set allow_system_table_mods = on;
        delete from pg_statistic where starelid = any (array['ulak.queue'::regclass, 'ulak.endpoints'::regclass]);
        update pg_class set reltuples = -1, relpages = 0
        where oid in (select indexrelid from pg_index where indrelid = 'ulak.queue'::regclass)
            or oid in ('ulak.queue'::regclass, 'ulak.endpoints'::regclass);
    """,
}


def say(line: str = "") -> None:
    print(line, flush=True)


def processor(db: DB) -> float:
    """What the backend has used so far, in microseconds."""
    return int(Path(f"/proc/{db.info.backend_pid}/schedstat").read_text().split()[0]) / 1000


def sample(db: DB, work: Callable[[], int]) -> Sample:
    """Of each of the messages that `work` says it has done."""
    used, began = processor(db), time.perf_counter()
    messages = work()
    elapsed = (time.perf_counter() - began) * 1e6
    return Sample(elapsed / messages, (processor(db) - used) / messages)


def prepare(cluster: Cluster, name: str) -> None:
    """Four busy endpoints with enough due messages for all rounds."""
    cluster.install(cluster.create_database(name))
    with cluster.connect(name) as db:
        db.execute("select ulak.create_endpoint('busy ' || n, 'pull', '{}') from generate_series(1, 4) n")
        db.execute("select ulak.create_endpoint(name, 'pull', '{}') from unnest(array['disabled', 'open']) name")
        db.execute("select ulak.disable_endpoint('disabled')")
        db.execute(
            "update ulak.endpoints set circuit_state = 'open', circuit_half_open_at = 'infinity' where name = 'open'"
        )
        db.execute(DUE, [100])
        db.execute("analyze")


def variants(cluster: Cluster) -> Iterator[tuple[str, str]]:
    """A database for each kind of other rows and each state of the statistics: what it is, and its name."""
    prepare(cluster, "base")
    for number, kind in enumerate(["nothing", *KINDS]):
        stale = cluster.create_database(f"stale_{number}", "base")
        with cluster.connect(stale) as db:
            if kind in KINDS:
                db.execute(OTHER.format(*KINDS[kind]), [OTHERS])  # type: ignore[arg-type]
            db.execute(DUE, [(ROUNDS + 1) * LIMIT // 4])
            # Hint bits and the visibility map, which no other statement should have to set.
            db.execute("vacuum ulak.queue")
        for state, statement in STATISTICS.items():
            name = stale if state == "stale" else cluster.create_database(f"{state}_{number}", stale)
            cluster.execute(statement, name)
            yield f"{kind}, {state}", name


def claim(db: DB) -> int:
    row = db.execute("select count(*) from ulak.claim('bench', %s)", [LIMIT], prepare=True).fetchone()
    assert row is not None and row[0] == LIMIT, f"{row} messages were claimed"
    return LIMIT


def claims(cluster: Cluster) -> dict[str, Measured]:
    databases = dict(variants(cluster))
    cluster.execute("checkpoint")
    sessions = {what: cluster.connect(name) for what, name in databases.items()}
    for session in sessions.values():
        session.execute("set jit = off")
    measured = interleave({what: partial(sample, db, partial(claim, db)) for what, db in sessions.items()}, ROUNDS)
    for session in sessions.values():
        session.close()
    return measured


# The whole way of messages, by one client.


class Way:
    """How a client claims and settles, and what it has to do with."""

    def __init__(self, name: str, messages: int, config: str = "{}", ordering: str = "null", error: str | None = None):
        self.name = name
        self.messages = messages
        self.config = config
        self.ordering = ordering
        self.error = error

    def run(self, cluster: Cluster) -> Sample:
        cluster.install(cluster.create_database("way"))
        with cluster.connect("way") as db:
            db.execute(
                "select ulak.create_endpoint('busy ' || n, 'pull', %s) from generate_series(1, 4) n", [self.config]
            )
            db.execute(DUE, [self.messages // 4])
            db.execute(f"update ulak.queue set ordering_key = {self.ordering}")  # type: ignore[arg-type]
            db.execute("vacuum full ulak.queue")
            db.execute("set jit = off")
            result = sample(db, lambda: sum(self.deliver(db)))
        cluster.drop_database("way")
        return result

    def deliver(self, db: DB) -> Iterator[int]:
        done = 0
        while done < self.messages:
            rows = db.execute("select id, attempt from ulak._claim('bench', %s)", [LIMIT], prepare=True).fetchall()
            ids, attempts = zip(*rows, strict=True)
            errors = None if self.error is None else [self.error] * len(rows)
            db.execute(
                "select ulak._settle_many('bench', %s::bigint[], %s::integer[], %s::text[])",
                [list(ids), list(attempts), errors],
                prepare=True,
            )
            done += len(rows)
            yield len(rows)


class OneByOne(Way):
    """As an external worker does: one report each."""

    def deliver(self, db: DB) -> Iterator[int]:
        done = 0
        while done < self.messages:
            rows = db.execute("select id, attempt from ulak.claim('bench', 100)", prepare=True).fetchall()
            for id, attempt in rows:
                db.execute("select ulak.complete(%s, 'bench', %s)", [id, attempt], prepare=True)
            done += len(rows)
            yield len(rows)


WAYS = [
    Way("delivered", MESSAGES),
    Way("delivered, 1,000 ordering keys", FEW, ordering="'key ' || id % 1000"),
    Way("delivered, rate limit and cap", FEW, '{"rate_limit": {"limit": 1000000}, "max_in_flight": 10000}'),
    Way(
        "failed, to be retried",
        FEW,
        '{"circuit_breaker": {"mode": "rate", "min_requests": 1000000}}',
        error="[RETRYABLE] 503",
    ),
    Way("dead", FEW, error="[PERMANENT] 400"),
    OneByOne("delivered one by one", FEW),
]


def main() -> None:
    cluster = Cluster.create(settings=QUIET)
    try:
        ways = {way.name: way.run(cluster) for way in WAYS}
        say("one client, synchronous_commit = off; per message")
        say()
        rows = [[name, f"{way.elapsed:.0f} us", f"{way.processor:.0f} us"] for name, way in ways.items()]
        say(table(["claimed by 500 and settled", "time", "server's cpu"], rows))
        say()
        measured = claims(cluster)
    finally:
        cluster.remove()

    say(f"claims of {LIMIT}; medians of {ROUNDS} interleaved rounds, per message and beside nothing else = 1")
    say()
    rows, met = [], True
    for name, part in measured.items():
        beside = measured["nothing, " + name.split(", ")[1]]
        ratio = statistics.median(s.processor for s in part.samples) / statistics.median(
            s.processor for s in beside.samples
        )
        met &= min(ratio, part.times(beside)) <= 1.5
        rows.append(
            [name, f"{part.elapsed:.1f} us", f"{part.times(beside):.2f}", f"{part.processor:.1f} us", f"{ratio:.2f}"]
        )
    say(table([f"beside {OTHERS:,} rows, statistics", "time", "ratio", "server's cpu", "ratio"], rows))
    say()
    fast = ways["delivered"].elapsed <= 60
    say(f"{'ok    ' if met else 'MISSED'}  no claim takes more than 1.5 times as long because of other rows")
    say(f"{'ok    ' if fast else 'MISSED'}  claim and settle take 60 us a message or less")
    result = {
        "ways": {name: way._asdict() for name, way in ways.items()},
        "claims": {name: [each._asdict() for each in part.samples] for name, part in measured.items()},
    }
    path = WORK / "bench-claim.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    say(f"all samples: {path}")
    if not (met and fast):
        sys.exit(1)


if __name__ == "__main__":
    main()
