"""How fast archived messages are replayed, and what the queue's upkeep costs: a vacuum that finds nothing, and the question whether this
cluster delivers. Messages are archived when they are settled: the parts `claim` and `shape` show what that costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
from support.finished import value

from bench import storage
from bench.claim import DELIVERED
from bench.figures import Figure, Quantity
from bench.stage import Part, Stage

DB = psycopg.Connection[Any]

TEXT = "x" * 170  # with its key and number about 200 bytes


def seconds(function: Callable[[], Any]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def replay(stage: Stage) -> Iterator[Figure]:
    count = stage.scaled(50_000, 2000)
    with stage.session() as db:
        db.execute("select ulak.create_endpoint('shop', 'pull', '{}')")
        for _ in range(count // 1000):
            db.execute(
                "select ulak.send_batch('shop', array(select jsonb_build_object('n', n, 'text', %s::text) from generate_series(1, 1000) n))",
                [TEXT],
            )
        delivered = sum(DELIVERED.deliver(db, count // 1000 * 1000))
        month = "date_trunc('month', now()), date_trunc('month', now()) + interval '1 month'"
        took = seconds(lambda: db.execute(f"select ulak.replay_range(1, {month}, p_limit => {delivered})"))
        assert value(db, "select count(*) from ulak.queue") == delivered
        yield Figure(f"replay {delivered:,} messages", Quantity(delivered / took, "/s"))
        yield from upkeep(db)


def upkeep(db: DB) -> Iterator[Figure]:
    vacuum = value(db, "select ulak_private.vacuum_command()")
    db.execute(vacuum)
    idle = min(seconds(lambda: db.execute(vacuum)) for _ in range(5))
    rows = value(db, f"select count(*) from {storage.tables_of(db).waiting}")
    yield Figure(f"vacuum of a queue of {rows:,} with nothing to do", Quantity(idle * 1000, "ms"))
    checks = "do $$ begin for n in 1..1000 loop perform ulak_private.is_adopted(); end loop; end $$"
    asked = min(seconds(lambda: db.execute(checks)) for _ in range(50))
    yield Figure("is this cluster adopted? (asked by each claim)", Quantity(asked * 1000, "us"))


PART = Part("The archive", {"replay": replay})
