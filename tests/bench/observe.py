"""How fast the administrator's views and functions answer with a million messages in the queue, and with ten thousand endpoints."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
from support.console import Console

from bench import storage
from bench.figures import Figure, Quantity, table
from bench.measure import processor_seconds
from bench.stage import QUIET, Part, Stage

DB = psycopg.Connection[Any]

LIMIT_MS = 50
# A page for people, drawn by Python.
LIMITS = {"report": 150}
# Of each look, with thousands of endpoints.
MANY_LIMIT_MS = 1000
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
    # Three days of counters.
    """
    insert into ulak.endpoint_stats (endpoint_id, minute, delivered, failed, latency_total_ms, latency_histogram)
    select e, date_trunc('minute', now()) - m * interval '1 minute', 1000, m %% 7, 12000,
        '[1:10]={1, 2, 3, 10, 50, 100, 30, 20, 5, 1}'
    from generate_series(1, %(endpoints)s) e, generate_series(0, 4320) m
    """,
    """
    insert into ulak.endpoint_totals
    select endpoint_id, sum(delivered), sum(failed), 1, array_fill(7::bigint, array[22]) from ulak.endpoint_stats group by 1
    """,
]

# One message every 10 ms, the first an hour ago.
SOURCE = """
    generate_series(1, %(messages)s) n
    cross join lateral (select now() - interval '1 hour' + n * interval '10 ms') m (t)
"""
WAITING = {
    "endpoint_id": "1 + n %% %(endpoints)s",
    "payload": "jsonb_build_object('n', n, 'text', repeat('x', 170))",
    "priority": "n %% 3",
    "next_retry_at": "t",
    "created_at": "least(t, now())",
}

# A few endpoints have thousands of messages, most have some, a tenth has none. Some are open, some disabled. All of them were busy
# in each minute of the last hour, and now and then for two days.
FILL_MANY = [
    "select ulak.configure('max_queue_size', '0')",
    """
    select ulak.create_endpoint('e' || n, 'http', '{"url": "https://example.com/hook"}') from generate_series(1, %(endpoints)s) n
    """,
    """
    update ulak.endpoints
    set enabled = id %% 100 <> 4,
        circuit_state = case when id %% 100 = 3 then 'open' else 'closed' end,
        circuit_failure_count = case when id %% 100 = 3 then 10 else 0 end,
        circuit_half_open_at = case when id %% 100 = 3 then now() + interval '1 hour' end,
        last_error = case when id %% 100 = 3 then '[RETRYABLE] HTTP 503' end,
        last_success_at = case when id %% 100 <> 3 then now() end
    """,
    """
    insert into ulak.endpoint_stats (endpoint_id, minute, delivered, failed, latency_total_ms, latency_histogram)
    select e, date_trunc('minute', now()) + interval '30 minutes' - m * interval '1 minute', 1000, m %% 7, 12000,
        '[1:10]={1, 2, 3, 10, 50, 100, 30, 20, 5, 1}'
    from generate_series(0, 2880) m, generate_series(1, %(endpoints)s) e
    where m <= 90 or (m + e) %% 40 = 0
    """,
    """
    insert into ulak.endpoint_totals
    select endpoint_id, sum(delivered), sum(failed), 1, array_fill(7::bigint, array[22]) from ulak.endpoint_stats group by 1
    """,
]


WAITING_MANY = WAITING | {
    "endpoint_id": "1 + floor(0.9 * %(endpoints)s * (n::bigint * 7919 %% 1000003 / 1000003.0) ^ 3)",
    "status": "case when n %% 500 = 0 then 'processing' else 'pending' end",
    "locked_by": "case when n %% 500 = 0 then 'worker' end",
    "lease_until": "case when n %% 500 = 0 then now() + interval '1 day' end",
}

DEAD_SOURCE = """
    generate_series(1, %(messages)s / 20) n
    cross join lateral (select 1 + n * 31 %% %(endpoints)s, now() - n * interval '3 seconds') m (e, t)
"""
DEAD = {
    "endpoint_id": "e",
    "message_id": "gen_random_uuid()",
    "original_created_at": "t",
    "failed_at": "t",
    "archived_at": "t",
    "attempts": "3",
    "retry_count": "3",
    "priority": "0",
    "endpoint_name": "'e' || e",
    "protocol": "'http'",
    "payload": "'{}'::jsonb",
    "last_error": "'[RETRYABLE] HTTP 503'",
}


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
        given = {"endpoints": endpoints, "messages": messages}
        for statement in FILL:
            db.execute(statement, given, prepare=False)  # type: ignore[call-overload]
        storage.insert(db, WAITING, SOURCE, given)
        yield from compare(stage, name, f"{waiting}, never vacuumed", messages)
        start = time.perf_counter()
        db.execute("call ulak.run_maintenance()")
        yield Figure(f"{waiting}: maintenance, which counts them all", Quantity(time.perf_counter() - start, "s"))
        db.execute("vacuum analyze")
        yield from compare(stage, name, f"{waiting}, vacuumed and analysed", messages)


def look_at_many(stage: Stage) -> Iterator[Figure]:
    """Each look for itself: none may follow the number of endpoints any further."""
    messages, endpoints = stage.scaled(1_000_000, 1000), stage.scaled(10_000, 100)
    with stage.database() as name, stage.cluster.connect(name) as db:
        given = {"endpoints": endpoints, "messages": messages}
        for statement in FILL_MANY:
            db.execute(statement, given, prepare=False)  # type: ignore[call-overload]
        storage.insert(db, WAITING_MANY, SOURCE, given)
        storage.insert(db, DEAD, DEAD_SOURCE, given, storage.DEAD)
        db.execute("vacuum analyze")
        # What a look of theirs begins with.
        backend = db.info.backend_pid
        before = processor_seconds(backend)
        db.execute("select ulak_private.sample_backlog()")
        first = processor_seconds(backend) - before
        db.execute("select ulak_private.sample_backlog(clock_timestamp() + interval '1 minute')")
        sampled = Quantity(
            (processor_seconds(backend) - before - first) * 1000, "ms", "of processor", required=MANY_LIMIT_MS
        )
        waiting = f"{messages:,} messages for {endpoints:,} endpoints"
        yield Figure(f"{waiting}: maintenance counts what waits", sampled)
        found = {}
        for look, query in LOOKS.items():
            with stage.cluster.connect(name) as session:
                session.prepare_threshold = None
                found[look] = measure(session, query.format(id=messages // 2 + 1))
            yield Figure(f"{waiting}: {look}", Quantity(found[look][2], "ms", "of processor", required=MANY_LIMIT_MS))
        stage.details[waiting] = found
        yield from add_counters(db, endpoints)


PAGES = (
    "/",
    "/messages",
    "/letters",
    "/letters?endpoint=e7",
    "/letters?error_like=%25nothing%25",
    "/endpoint?name=e7",
    "/search?q=no-such-key",
    "/act/redrive",
    "/act/redrive?filter=%24.x+%3E+1",
)


def look_at_the_console(stage: Stage) -> Iterator[Figure]:
    """Its pages as an administrator gets them. The very first one loads the session and is shown separately."""
    endpoints, letters = stage.scaled(2000, 50), stage.scaled(100_000, 1000)
    with stage.database() as name, stage.cluster.connect(name) as db, tempfile.TemporaryDirectory() as folder:
        given = {"endpoints": endpoints, "messages": 20 * letters}
        for statement in FILL_MANY:
            db.execute(statement, given, prepare=False)  # type: ignore[call-overload]
        storage.insert(db, DEAD, DEAD_SOURCE, given, storage.DEAD)
        db.execute("call ulak.run_maintenance()")
        db.execute("vacuum analyze")
        stage.cluster.ensure_login(db, "bench_console", "ulak_admin")
        db.execute("alter role bench_console password 'bench'")
        rules = stage.cluster.data / "pg_hba.conf"
        before = rules.read_text()
        rules.write_text(f"local all bench_console scram-sha-256\n{before}")
        stage.cluster.reload()
        try:
            with Console(stage.cluster, name, Path(folder) / "log") as console:
                cookies = console.login("bench_console", "bench").cookies
                for page in PAGES:
                    taken = []
                    for _ in range(ROUNDS):
                        start = time.perf_counter()
                        assert console.get(page, cookies).status == 200, page
                        taken.append((time.perf_counter() - start) * 1000)
                    what = f"console, {letters:,} dead letters of {endpoints:,} endpoints: {page}"
                    if page == PAGES[0]:
                        yield Figure(f"{what}, first look", Quantity(taken[0], "ms", required=MANY_LIMIT_MS))
                    yield Figure(what, Quantity(statistics.median(taken[1:]), "ms", required=MANY_LIMIT_MS))
        finally:
            rules.write_text(before)
            stage.cluster.reload()


def add_counters(db: DB, endpoints: int) -> Iterator[Figure]:
    """What a worker that has sent to all of them reports each second."""
    report = """
        select jsonb_agg(jsonb_build_object(
            'endpoint_id', e, 'delivered', 3, 'failed', 0, 'latency_total_ms', 12.3, 'latency_max_ms', 7.1,
            'latency_histogram', '[4:5]={1,2}'
        ))
        from generate_series(1, %s) e
    """
    row = db.execute(report, [endpoints]).fetchone()
    assert row is not None
    stats, backend, used = json.dumps(row[0]), db.info.backend_pid, []
    for _ in range(ROUNDS):
        before = processor_seconds(backend)
        db.execute("select ulak_private.add_endpoint_stats(%s, date_trunc('minute', now()))", [stats])
        used.append((processor_seconds(backend) - before) * 1000)
    quantity = Quantity(statistics.median(used[1:]), "ms", "of processor")
    yield Figure(f"a worker's report of {endpoints:,} endpoints", quantity)


PART = Part(
    "What an administrator's look costs; the slowest of the views and functions and the report, which Python draws",
    {
        "one": lambda stage: look(stage, 1),
        "twenty": lambda stage: look(stage, 20),
        "many": look_at_many,
        "console": look_at_the_console,
    },
    QUIET,
)
