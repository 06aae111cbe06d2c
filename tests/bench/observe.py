"""How fast the administrator's views and functions answer with a million messages in the queue.

python -m bench.observe
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

import psycopg
from support.cluster import Cluster

DB = psycopg.Connection[Any]

MESSAGES = 1_000_000
LIMIT_MS = 50
# A page for people, drawn by Python.
LIMITS = {"report": 150}
ROUNDS = 7

# id: a message in the middle.
LOOKS = {
    "top": "select * from ulak.top",
    "retry_schedule": "select * from ulak.retry_schedule",
    "get_endpoint_health()": "select * from ulak.get_endpoint_health()",
    "get_endpoint_health(name)": "select * from ulak.get_endpoint_health('e1')",
    "get_worker_status": "select * from ulak.get_worker_status()",
    "health_check": "select * from ulak.health_check()",
    "metrics": "select * from ulak.metrics()",
    "metrics_text": "select ulak.metrics_text()",
    "explain": "select * from ulak.explain(500000)",
    "history": "select * from ulak.history(500000)",
    "doctor": "select * from ulak.doctor()",
    "dlq_summary": "select * from ulak.dlq_summary()",
    "maintenance_status": "select * from ulak.maintenance_status",
    "help": "select * from ulak.help()",
    "curl": "select ulak.curl(500000)",
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


def processor(pid: int) -> float:
    """Milliseconds that a backend has had a processor."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e6


def measure(cluster: Cluster, query: str) -> tuple[float, float, float]:
    """Milliseconds: of the first call in a session, of the later ones, and of those what the processor took."""
    with cluster.connect("looks") as db:
        db.prepare_threshold = None
        db.execute("select 1").fetchall()
        elapsed, used = [], []
        for _ in range(ROUNDS):
            before, start = processor(db.info.backend_pid), time.perf_counter()
            db.execute(query).fetchall()
            elapsed.append((time.perf_counter() - start) * 1000)
            used.append(processor(db.info.backend_pid) - before)
    return elapsed[0], statistics.median(elapsed[1:]), statistics.median(used[1:])


def compare(cluster: Cluster, state: str) -> list[str]:
    print(f"\n{state}\n{'':<28}{'first call':>12}{'later':>12}{'processor':>12}   (ms)")
    slow = []
    for name, query in LOOKS.items():
        first, later, used = measure(cluster, query)
        print(f"{name:<28}{first:>12.1f}{later:>12.1f}{used:>12.1f}", flush=True)
        if used > LIMITS.get(name, LIMIT_MS):
            slow.append(f"{name} ({state})")
    return slow


def fill(cluster: Cluster, endpoints: int) -> None:
    cluster.drop_database("looks")
    cluster.create_database("looks")
    cluster.install("looks")
    with cluster.connect("looks") as db:
        db.execute("analyze")
        for statement in FILL:
            db.execute(statement, {"endpoints": endpoints, "messages": MESSAGES}, prepare=False)  # type: ignore[call-overload]


def main() -> None:
    settings = {"autovacuum": False, "shared_buffers": "512MB", "max_wal_size": "4GB"}
    cluster = Cluster.create(settings=settings)  # type: ignore[arg-type]
    slow = []
    try:
        for endpoints in (1, 20):
            fill(cluster, endpoints)
            slow += compare(
                cluster,
                f"{MESSAGES:,} messages for {endpoints} endpoints, never vacuumed, statistics of an empty queue",
            )
            with cluster.connect("looks") as db:
                start = time.perf_counter()
                db.execute("call ulak.run_maintenance()")
                print(f"maintenance, which counts them all: {time.perf_counter() - start:.2f} s")
                db.execute("vacuum analyze")
                start = time.perf_counter()
                db.execute("call ulak.run_maintenance()")
                print(f"the same after a vacuum: {time.perf_counter() - start:.2f} s")
            slow += compare(cluster, f"{MESSAGES:,} messages for {endpoints} endpoints, vacuumed and analysed")
    finally:
        cluster.remove()
    if slow:
        sys.exit(f"\nslow: {', '.join(slow)}")
    print(f"\nall within {LIMIT_MS} ms of processor time, the report within {LIMITS['report']} ms")


if __name__ == "__main__":
    main()
