"""How fast the administrator's views and functions answer with a million messages in the queue."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

import psycopg

from bench.figures import Figure, Quantity, table
from bench.measure import processor_seconds
from bench.stage import QUIET, Part, Stage

DB = psycopg.Connection[Any]

LIMIT_MS = 50
# A page for people, drawn by Python.
LIMITS = {"report": 150}
ROUNDS = 7

# The id is that of a message in the middle.
LOOKS = {
    "top": "select * from ulak.top",
    "retry_schedule": "select * from ulak.retry_schedule",
    "get_endpoint_health()": "select * from ulak.get_endpoint_health()",
    "get_endpoint_health(name)": "select * from ulak.get_endpoint_health('e1')",
    "get_worker_status": "select * from ulak.get_worker_status()",
    "health_check": "select * from ulak.health_check()",
    "metrics": "select * from ulak.metrics()",
    "metrics_text": "select ulak.metrics_text()",
    "explain": "select * from ulak.explain({id})",
    "history": "select * from ulak.history({id})",
    "doctor": "select * from ulak.doctor()",
    "dlq_summary": "select * from ulak.dlq_summary()",
    "maintenance_status": "select * from ulak.maintenance_status",
    "help": "select * from ulak.help()",
    "curl": "select ulak.curl({id})",
    "report": "select ulak.report()",
}

FILL = [
    "select ulak.configure('max_queue_size', '0')",
    """
    select ulak.create_endpoint('e' || n, 'http', '{"url": "https://example.com/hook"}') from generate_series(1, %(endpoints)s) n
    """,
    """
    insert into ulak.queue (endpoint_id, payload, priority, next_retry_at, created_at)
    select 1 + n %% %(endpoints)s, jsonb_build_object('n', n, 'text', repeat('x', 170)), n %% 3, t, least(t, now())
    from generate_series(1, %(messages)s) n
    cross join lateral (select now() - interval '1 hour' + n * interval '10 ms') m (t)
    """,
    # Three days of counters.
    """
    insert into ulak.endpoint_stats (endpoint_id, minute, delivered, failed, latency_total_ms, latency_histogram)
    select e, date_trunc('minute', now()) - m * interval '1 minute', 1000, m %% 7, 12000,
        array[1, 2, 3, 10, 50, 100, 30, 20, 5, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
    from generate_series(1, %(endpoints)s) e, generate_series(0, 4320) m
    """,
    """
    insert into ulak.endpoint_totals
    select endpoint_id, sum(delivered), sum(failed), 1, array_fill(7::bigint, array[22]) from ulak.endpoint_stats group by 1
    """,
]


def measure(db: DB, query: str) -> tuple[float, float, float]:
    """Milliseconds: of the first call in a session, of the later ones, and of those what the processor took."""
    elapsed, used = [], []
    for _ in range(ROUNDS):
        before, start = processor_seconds(db.info.backend_pid), time.perf_counter()
        db.execute(query).fetchall()  # type: ignore[arg-type]
        elapsed.append((time.perf_counter() - start) * 1000)
        used.append((processor_seconds(db.info.backend_pid) - before) * 1000)
    return elapsed[0], statistics.median(elapsed[1:]), statistics.median(used[1:])


def compare(stage: Stage, database: str, state: str, messages: int) -> Iterator[Figure]:
    """The slowest of them is the figure; all of them are printed."""
    found = {}
    for name, query in LOOKS.items():
        with stage.cluster.connect(database) as db:
            db.prepare_threshold = None
            db.execute("select 1").fetchall()
            found[name] = measure(db, query.format(id=messages // 2))
    stage.details[state] = found
    rows = [(name, *(f"{each:.1f} ms" for each in times)) for name, times in found.items()]
    print(f"\n{state}\n{table(('', 'first call', 'later', 'processor'), rows)}\n", flush=True)
    used = {name: times[2] for name, times in found.items()}
    report = used.pop("report")
    slowest = max(used, key=lambda name: used[name])
    quantity = Quantity(used[slowest], "ms", "of processor", required=LIMIT_MS)
    yield Figure(f"{state}: slowest of {len(used)}, {slowest}", quantity)
    yield Figure(f"{state}: report", Quantity(report, "ms", "of processor", required=LIMITS["report"]))


def look(stage: Stage, endpoints: int) -> Iterator[Figure]:
    messages = stage.scaled(1_000_000, 1000)
    waiting = f"{messages:,} messages for {endpoints} endpoint{'s' if endpoints > 1 else ''}"
    with stage.database() as name, stage.cluster.connect(name) as db:
        db.execute("analyze")
        for statement in FILL:
            db.execute(statement, {"endpoints": endpoints, "messages": messages}, prepare=False)  # type: ignore[call-overload]
        yield from compare(stage, name, f"{waiting}, never vacuumed", messages)
        start = time.perf_counter()
        db.execute("call ulak.run_maintenance()")
        yield Figure(f"{waiting}: maintenance, which counts them all", Quantity(time.perf_counter() - start, "s"))
        db.execute("vacuum analyze")
        yield from compare(stage, name, f"{waiting}, vacuumed and analysed", messages)


PART = Part(
    "What an administrator's look costs; the slowest of the views and functions and the report, which Python draws",
    {"one": lambda stage: look(stage, 1), "twenty": lambda stage: look(stage, 20)},
    QUIET,
)
