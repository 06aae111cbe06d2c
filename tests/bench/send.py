"""What a send costs: next to a plain insert of the same row, by several clients, in a queue that is long, in batches."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from support.cluster import Cluster
from support.sessions import gather

from bench import storage
from bench.figures import Figure, Quantity
from bench.measure import Measured, Pgbench, Sample, interleave
from bench.stage import QUIET, Part, Stage

BATCH = 1_000

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
    "plain insert": "insert into plain (endpoint_id, payload) values (1, :payload)",
    "send()": "select ulak.send('shop', :payload)",
    "plain batch": f"""
        insert into plain (endpoint_id, payload)
        select 1, p from unnest(array_fill(:payload::jsonb, array[{BATCH}])) p
    """,
    "send_batch()": f"select ulak.send_batch('shop', array_fill(:payload::jsonb, array[{BATCH}]))",
    "plain insert with a key": """
        insert into plain (endpoint_id, payload, idempotency_key, payload_hash)
        values (1, :payload, gen_random_uuid()::text, repeat('x', 64))
    """,
    "send() with an idempotency key": "select ulak.send('shop', :payload, p_idempotency_key => gen_random_uuid()::text)",
    "send() with an ordering key": "select ulak.send('shop', :payload, p_ordering_key => gen_random_uuid()::text)",
    "send() with the same ordering key": "select ulak.send('shop', :payload, p_ordering_key => 'k')",
}


class Shop:
    """A database with this many messages waiting, in ulak's queue and in a plain table like it. An empty one is emptied again before each
    sample."""

    def __init__(self, cluster: Cluster, database: str, waiting: int = 0) -> None:
        self._cluster = cluster
        self._database = database
        self._waiting = waiting
        self._pgbench = Pgbench(cluster, cluster.folder)
        self._scripts: dict[str, Path] = {
            name: self._pgbench.script(f"send {number}", statement)
            for number, (name, statement) in enumerate(STATEMENTS.items())
        }
        with cluster.connect(database) as db:
            db.execute("select ulak.create_endpoint('shop', 'pull', '{}')")
            # The limit is checked as always, and never reached.
            db.execute("select ulak.configure('max_queue_size', '100000000')")
            storage.create_plain(db, "plain")
        gather([self._fill, self._fill_plain])
        cluster.execute("checkpoint")

    def _fill(self) -> None:
        with self._cluster.connect(self._database) as db:
            columns = {"endpoint_id": "1", "payload": "%s::jsonb"}
            storage.insert(db, columns, "generate_series(1, %s)", [PAYLOAD, self._waiting])
            storage.vacuum(db)

    def _fill_plain(self) -> None:
        with self._cluster.connect(self._database) as db:
            fill = "insert into plain (endpoint_id, payload) select 1, %s from generate_series(1, %s)"
            db.execute(fill, [PAYLOAD, self._waiting])
            db.execute("vacuum analyze plain")

    def sample(self, name: str, transactions: int, clients: int = 1, commit: str = "off") -> Sample:
        if not self._waiting:
            with self._cluster.connect(self._database) as db:
                db.execute("truncate plain")
                storage.empty(db)
        return self._pgbench.run(
            self._database,
            self._scripts[name],
            transactions,
            {"payload": PAYLOAD},
            clients,
            {"synchronous_commit": commit},
        )


def compared(stage: Stage, parts: dict[str, Callable[[], Sample]], rounds: int) -> dict[str, Measured]:
    measured = interleave(parts, stage.rounds(rounds))
    stage.details.update({name: [each._asdict() for each in part.samples] for name, part in measured.items()})
    return measured


def figure(name: str, send: Measured, plain: Measured, required: float | None = None, headline: bool = False) -> Figure:
    return Figure(
        name,
        Quantity(send.rate, "/s"),
        Quantity(plain.rate, "/s", "plain"),
        Quantity(send.times(plain), "times", "its time", required=required),
        Quantity(send.times_processor(plain), "times", "its processor"),
        headline=headline,
    )


def clients(stage: Stage) -> Iterator[Figure]:
    """Eight clients take turns on the machine's cores, so the first call of each, which has to plan, weighs more: they
    send more."""
    cases = {
        f"send() beside a plain insert, {number} client{'s' * (number > 1)}, synchronous_commit {commit}": (
            number,
            commit,
        )
        for number in (1, 8)
        for commit in ("off", "on")
    }
    with stage.database() as database:
        shop = Shop(stage.cluster, database)
        parts: dict[str, Callable[[], Sample]] = {
            f"{case}: {statement}": partial(
                shop.sample, statement, stage.scaled(1500 if number == 1 else 6000, 80), number, commit
            )
            for case, (number, commit) in cases.items()
            for statement in ("plain insert", "send()")
        }
        measured = compared(stage, parts, 4)
    for case, (number, commit) in cases.items():
        required = 1.6 if (number, commit) == (1, "off") else None
        yield figure(case, measured[f"{case}: send()"], measured[f"{case}: plain insert"], required, headline=True)


def backlog(stage: Stage) -> Iterator[Figure]:
    depths = [0, stage.scaled(100_000, 100), stage.scaled(1_000_000, 1000)]
    with ExitStack() as stack:
        parts: dict[str, Callable[[], Sample]] = {}
        for depth in depths:
            shop = Shop(stage.cluster, stack.enter_context(stage.database()), depth)
            for statement in ("plain insert", "send()"):
                parts[f"{statement} at {depth:,}, 1"] = partial(shop.sample, statement, stage.scaled(1500, 50))
            parts[f"send() at {depth:,}, 8"] = partial(shop.sample, "send()", stage.scaled(6000, 80), 8)
            parts[f"send_batch() at {depth:,}, 1"] = partial(shop.sample, "send_batch()", stage.scaled(5, 2))
        measured = compared(stage, parts, 5)
    for depth in depths:
        send = measured[f"send() at {depth:,}, 1"]
        yield figure(f"send() with {depth:,} waiting, 1 client", send, measured[f"plain insert at {depth:,}, 1"])
    for function, number in (("send()", 1), ("send()", 8), ("send_batch()", 1)):
        for depth in depths[1:]:
            times = measured[f"{function} at {depth:,}, {number}"].times(measured[f"{function} at 0, {number}"])
            yield Figure(
                f"{function} with {depth:,} waiting, {number} client{'s' * (number > 1)}, times with an empty queue",
                Quantity(times, "times", required=1.2 if (function, number) == ("send()", 1) else None),
                headline=True,
            )


def options(stage: Stage) -> Iterator[Figure]:
    names = [name for name in STATEMENTS if "with" in name]
    with stage.database() as database:
        shop = Shop(stage.cluster, database)
        measured = compared(stage, {name: partial(shop.sample, name, stage.scaled(1500, 50)) for name in names}, 5)
    for name in names[1:]:
        yield figure(f"{name}, 1 client", measured[name], measured[names[0]])


def batch(stage: Stage) -> Iterator[Figure]:
    names = [name for name in STATEMENTS if "batch" in name]
    with stage.database() as database:
        shop = Shop(stage.cluster, database)
        measured = compared(stage, {name: partial(shop.sample, name, stage.scaled(10, 2)) for name in names}, 5)
    plain, send = (measured[name] for name in names)
    yield Figure(
        f"send_batch() of {BATCH:,} beside one plain insert",
        Quantity(BATCH * send.rate, "/s"),
        Quantity(BATCH * plain.rate, "/s", "plain"),
        Quantity(send.times(plain), "times", "its time", required=1.7),
        Quantity(send.processor / BATCH, "us", "of processor each"),
        headline=True,
    )


PART = Part(
    f"Sending, one message of {len(PAYLOAD)} bytes per transaction, beside a plain insert into a table with the same "
    "columns and indexes; medians of interleaved rounds; synchronous_commit off where nothing else is said",
    {"clients": clients, "backlog": backlog, "options": options, "batch": batch},
    QUIET,
)
