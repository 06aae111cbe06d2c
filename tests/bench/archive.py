"""How fast finished messages come back from the archive, and what the upkeep of the queue costs. How fast they get there, the parts `claim` and
`shape` show: settling archives."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from typing import Any

import psycopg
from support.finished import finish, value

from bench.figures import Figure, Quantity
from bench.stage import Part, Stage

DB = psycopg.Connection[Any]

PAYLOAD_BYTES = 170  # with its key and number about 200

REPLAY = "select ulak.replay_range(1, '-infinity', 'infinity', p_limit => %s, p_new_message_id => %s)"


def seconds(function: Callable[[], Any]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def replay(stage: Stage) -> Iterator[Figure]:
    count = stage.scaled(50_000, 2000)
    with stage.session() as db:
        db.execute("select ulak.create_endpoint('shop', 'pull', '{}')")
        finish(db, count, at=datetime.now(UTC), payload_bytes=PAYLOAD_BYTES)
        db.execute("analyze")
        same, own = (count / seconds(partial(db.execute, REPLAY, [count, is_new])) for is_new in (False, True))
        yield Figure(f"replay {count:,} messages", Quantity(same, "/s"))
        yield Figure(
            f"replay {count:,} messages with new message ids, each with an event of its own",
            Quantity(own, "/s"),
            Quantity(own / same, "of", "the rate without", required=0.3),
            headline=True,
        )
        yield from upkeep(db)


def upkeep(db: DB) -> Iterator[Figure]:
    vacuum = value(db, "select ulak_private.vacuum_command()")
    db.execute(vacuum)
    idle = min(seconds(lambda: db.execute(vacuum)) for _ in range(5))
    rows = value(db, "select count(*) from ulak.queue")
    yield Figure(f"vacuum of a queue of {rows:,} with nothing to do", Quantity(idle * 1000, "ms"))
    checks = "do $$ begin for n in 1..1000 loop perform ulak_private.is_adopted(); end loop; end $$"
    asked = min(seconds(lambda: db.execute(checks)) for _ in range(50))
    yield Figure("is this cluster adopted? (asked by each claim)", Quantity(asked * 1000, "us"))


PART = Part("The archive", {"replay": replay})
