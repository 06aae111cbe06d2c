"""How fast maintenance archives what 0.2.0 has finished and left in the queue, alone and while others send and deliver; and what comes back.
What this version finishes is archived when it is settled: the parts `claim` and `shape` show what that costs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
from support.cluster import Cluster
from support.finished import finish, value

from bench import storage
from bench.figures import Figure, Quantity
from bench.stage import Part, Stage

DB = psycopg.Connection[Any]

PAYLOAD_BYTES = 170  # with its key and number about 200

SEND = "select ulak.send('shop', jsonb_build_object('text', repeat('x', 170)))"
DELIVER = "select count(ulak.complete(c.id, 'bench', c.attempt)) from ulak.claim('bench', 200, 'shop') c"


class Traffic:
    """One session that sends, one message per transaction, and one that takes and settles."""

    def __init__(self, cluster: Cluster, database: str) -> None:
        self.sent = self.delivered = 0
        self._stop = threading.Event()
        self._sessions = [cluster.connect(database) for _ in range(2)]
        self._threads = [threading.Thread(target=part) for part in (self._send, self._deliver)]
        for thread in self._threads:
            thread.start()

    def _send(self) -> None:
        while not self._stop.is_set():
            self._sessions[0].execute(SEND)
            self.sent += 1

    def _deliver(self) -> None:
        while not self._stop.is_set():
            self.delivered += value(self._sessions[1], DELIVER)

    def end(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        for session in self._sessions:
            session.close()


@contextmanager
def traffic(cluster: Cluster, database: str) -> Iterator[Traffic]:
    going = Traffic(cluster, database)
    try:
        yield going
    finally:
        going.end()


def seconds(function: Callable[[], Any]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def archive(db: DB, count: int) -> float:
    """Seconds of a whole run of maintenance, which has hardly anything else to do."""
    now = datetime.now(UTC)
    finish(db, count, at=now - timedelta(hours=3), payload_bytes=PAYLOAD_BYTES)
    took = seconds(lambda: db.execute("call ulak.run_maintenance()"))
    moved = value(db, "select rows from ulak.maintenance_status where step = 'archive'")
    assert moved == count, f"{moved} messages were moved"
    return took


@contextmanager
def shop(stage: Stage) -> Iterator[DB]:
    with stage.database() as name, stage.cluster.connect(name) as db:
        db.execute("select ulak.create_endpoint('shop', 'pull', '{}')")
        yield db


def move_plainly(db: DB, count: int) -> float:
    """The yardstick: seconds to move as many rows from one plain table to another, by batches as maintenance does."""
    for table in ("source", "target"):
        storage.create_plain(db, table)
    db.execute(
        """
        insert into source (endpoint_id, payload, status, updated_at)
        select 1, jsonb_build_object('n', n, 'text', repeat('x', %s)), 'completed', now() from generate_series(1, %s) n
        """,
        [PAYLOAD_BYTES, count],
    )
    move = """
        with moved as (delete from source where id = any (array(select id from source order by id limit 1000)) returning *)
        insert into target select * from moved
    """

    def move_all() -> None:
        while db.execute(move, prepare=True).rowcount:
            pass

    return seconds(move_all)


def moving(stage: Stage) -> Iterator[Figure]:
    count = stage.scaled(50_000, 2000)
    with shop(stage) as db:
        plain = count / move_plainly(db, count)
        yield Figure(f"move {count:,} rows from one plain table to another, alone", Quantity(plain, "/s"))
        yield Figure(f"archive {count:,} messages of 0.2.0, alone", Quantity(count / archive(db, count), "/s"))
        with traffic(stage.cluster, db.info.dbname) as going:
            time.sleep(min(1, stage.scale))
            sent, delivered, began = going.sent, going.delivered, time.perf_counter()
            rate = count / archive(db, count)
            took = time.perf_counter() - began
            sent, delivered = going.sent - sent, going.delivered - delivered
        yield Figure(
            f"archive {count:,} messages of 0.2.0 while others send and deliver",
            Quantity(rate, "/s"),
            Quantity(rate / plain, "of", "the plain tables'", required=0.2),
            headline=True,
        )
        yield Figure("  sent meanwhile, one per transaction", Quantity(sent / took, "/s"))
        yield Figure("  delivered meanwhile", Quantity(delivered / took, "/s"))
        month = "date_trunc('month', now()), date_trunc('month', now()) + interval '1 month'"
        replayed = seconds(lambda: db.execute(f"select ulak.replay_range(1, {month}, p_limit => {count})"))
        yield Figure(f"replay {count:,} messages", Quantity(count / replayed, "/s"))
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


PART = Part("The archive", {"moving": moving})
