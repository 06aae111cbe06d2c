"""What a send costs: next to a plain insert of the same row, in a queue that is long, and in batches.

python -m bench.send
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

from bench.measure import Measured, Pgbench, Sample, interleave, table
from psycopg import sql
from support.cluster import WORK, Cluster, Settings

ROUNDS = 11
SENDS = 2_000
BATCHES = 10
BATCH = 1_000
DEPTHS = {"empty": 0, "100k": 100_000, "900k": 900_000}

# 200 bytes, as an order might look.
PAYLOAD = json.dumps(
    {
        "order": 123456789,
        "customer": "0123456789abcdef",
        "items": [{"sku": "A-1000", "count": 3}, {"sku": "B-2000", "count": 1}],
        "total": 129.95,
        "currency": "EUR",
        "note": "please ring twice, and wait",
    }
)

STATEMENTS = {
    "plain": "insert into plain (endpoint_id, payload) values (1, :payload)",
    "send": "select ulak.send('shop', :payload)",
    "plain batch": f"""
        insert into plain (endpoint_id, payload)
        select 1, p from unnest(array_fill(:payload::jsonb, array[{BATCH}])) p
    """,
    "send_batch": f"select ulak.send_batch('shop', array_fill(:payload::jsonb, array[{BATCH}]))",
    "plain, with a key": """
        insert into plain (endpoint_id, payload, idempotency_key, payload_hash)
        values (1, :payload, gen_random_uuid()::text, repeat('x', 64))
    """,
    "send, with a key": "select ulak.send('shop', :payload, p_idempotency_key => gen_random_uuid()::text)",
    "send, with an ordering key": "select ulak.send('shop', :payload, p_ordering_key => gen_random_uuid()::text)",
}

# Autovacuum and checkpoints come when they like; a round must not pay for another one's rows.
QUIET: Settings = {
    "autovacuum": False,
    "checkpoint_timeout": "1h",
    "max_wal_size": "16GB",
    "shared_buffers": "512MB",
    "synchronous_commit": False,
}


class Bench:
    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._pgbench = Pgbench(cluster, cluster.folder)
        self._scripts: dict[str, Path] = {
            name: self._pgbench.script(f"script {number}", statement)
            for number, (name, statement) in enumerate(STATEMENTS.items())
        }

    def prepare(self, database: str, depth: int) -> float:
        """A database with so many messages waiting, in both tables. Returns how long one count of them takes, in ms."""
        self._cluster.install(self._cluster.create_database(database))
        with self._cluster.connect(database) as db:
            db.execute("select ulak.create_endpoint('shop', 'pull', '{}')")
            db.execute("create table plain (like ulak.queue including all)")
            fill = "insert into {} (endpoint_id, payload) select 1, %s from generate_series(1, %s)"
            for relation in (sql.Identifier("plain"), sql.Identifier("ulak", "queue")):
                db.execute(sql.SQL(fill).format(relation), [PAYLOAD, depth])
                db.execute(sql.SQL("vacuum analyze {}").format(relation))
            row = db.execute("explain (analyze, format json) select ulak._count_live(1000000)").fetchone()
            db.execute("checkpoint")
            assert row is not None
            return float(row[0][0]["Execution Time"])

    def sample(self, database: str, name: str, transactions: int) -> Sample:
        return self._pgbench.run(database, self._scripts[name], transactions, {"payload": PAYLOAD})

    def sample_afresh(self, database: str, name: str, transactions: int) -> Sample:
        self._cluster.execute("truncate plain, ulak.queue", database)
        return self.sample(database, name, transactions)


def say(line: str = "") -> None:
    print(line, flush=True)


class Verdicts:
    def __init__(self) -> None:
        self.all: dict[str, dict[str, Any]] = {}

    def add(self, what: str, value: float, target: float, *, at_least: bool = False) -> None:
        is_met = value >= target if at_least else value <= target
        self.all[what] = {"value": value, "target": target, "met": is_met}
        sign = ">=" if at_least else "<="
        say(f"{'ok    ' if is_met else 'MISSED'}  {what}: {value:,.2f} {sign} {target:,.2f}")


def rate(measured: Measured) -> float:
    return BATCH * 1e6 / measured.elapsed


def measure_single(bench: Bench) -> dict[str, Measured]:
    parts = {}
    for depth, waiting in DEPTHS.items():
        sample = bench.sample if waiting else bench.sample_afresh
        for name in ("plain", "send"):
            parts[f"{name} {depth}"] = partial(sample, depth, name, SENDS)
    return interleave(parts, ROUNDS)


def measure_afresh(bench: Bench, names: list[str], transactions: int) -> dict[str, Measured]:
    return interleave({name: partial(bench.sample_afresh, "empty", name, transactions) for name in names}, ROUNDS)


def show_single(single: dict[str, Measured], counts: dict[str, float]) -> None:
    rows = []
    for depth, waiting in DEPTHS.items():
        plain, send = single[f"plain {depth}"], single[f"send {depth}"]
        rows.append(
            [
                f"{waiting:,}",
                f"{plain.elapsed:.0f} us",
                f"{send.elapsed:.0f} us",
                f"{send.times(plain):.2f}",
                f"{send.times_processor(plain):.2f}",
                f"{send.times(single['send empty']):.2f}",
                f"{counts[depth]:.1f} ms",
            ]
        )
    say(table(["waiting", "plain insert", "send()", "ratio", "ratio of cpu", "to an empty queue", "a count"], rows))
    say()


def show_options(options: dict[str, Measured]) -> None:
    plain = options["plain, with a key"]
    rows = [
        [name, f"{part.elapsed:.0f} us", f"{part.times(plain):.2f}", f"{part.times_processor(plain):.2f}"]
        for name, part in options.items()
    ]
    say(table(["with options", "time", "ratio", "ratio of cpu"], rows))
    say()


def show_batch(batch: dict[str, Measured]) -> None:
    plain = batch["plain batch"]
    rows = [
        [name, f"{rate(part):,.0f}/s", f"{plain.times(part):.2f}", f"{part.processor / BATCH:.1f} us"]
        for name, part in batch.items()
    ]
    say(table([f"{BATCH:,} at once", "messages", "of plain", "cpu of each"], rows))
    say()


def judge(single: dict[str, Measured], batch: dict[str, Measured]) -> Verdicts:
    verdicts = Verdicts()
    empty = single["send empty"]
    verdicts.add("send() over a plain insert", empty.times(single["plain empty"]), 1.6)
    for depth in ("100k", "900k"):
        verdicts.add(f"send() at {DEPTHS[depth]:,} over an empty queue", single[f"send {depth}"].times(empty), 1.2)
    enough = min(40_000, 0.6 * rate(batch["plain batch"]))
    verdicts.add("messages/s by send_batch()", rate(batch["send_batch"]), enough, at_least=True)
    return verdicts


def main() -> None:
    cluster = Cluster.create(settings=QUIET)
    try:
        bench = Bench(cluster)
        counts = {name: bench.prepare(name, depth) for name, depth in DEPTHS.items()}
        single = measure_single(bench)
        options = measure_afresh(bench, [name for name in STATEMENTS if "with" in name], SENDS)
        batch = measure_afresh(bench, [name for name in STATEMENTS if "batch" in name], BATCHES)
    finally:
        cluster.remove()

    say(f"one client, prepared, {len(PAYLOAD)} bytes, synchronous_commit = off; medians of {ROUNDS} interleaved rounds")
    say()
    show_single(single, counts)
    show_options(options)
    show_batch(batch)
    verdicts = judge(single, batch)

    samples = {name: [s._asdict() for s in part.samples] for name, part in {**single, **options, **batch}.items()}
    path = WORK / "bench-send.json"
    path.write_text(json.dumps({"verdicts": verdicts.all, "count_ms": counts, "samples": samples}, indent=1) + "\n")
    say(f"all samples: {path}")
    if not all(verdict["met"] for verdict in verdicts.all.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
