"""How fast finished messages leave the queue, alone and while others send and deliver; and what comes back.

python -m bench.archive
"""

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

DB = psycopg.Connection[Any]

COUNT = 50_000
PAYLOAD_BYTES = 170  # with its key and number about 200
REQUIRED = 20_000

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


def archive(db: DB) -> float:
    """Messages a second of a whole run of maintenance, which has hardly anything else to do."""
    now = datetime.now(UTC)
    finish(db, COUNT, at=now - timedelta(hours=3), payload_bytes=PAYLOAD_BYTES)
    took = seconds(lambda: db.execute("call ulak.run_maintenance()"))
    moved = value(db, "select rows from ulak.maintenance_status where step = 'archive'")
    assert moved == COUNT, f"{moved} messages were moved"
    return float(moved / took)


def report(name: str, result: str) -> None:
    print(f"{name:<58} {result}", flush=True)


def main() -> None:
    cluster = Cluster.create()
    try:
        cluster.install(database := cluster.create_database("bench"))
        db = cluster.connect(database)
        db.execute("select ulak.create_endpoint('shop', 'pull', '{}')")

        report(f"archive {COUNT:,} messages, alone", f"{archive(db):>9,.0f} messages/s")
        with traffic(cluster, database) as going:
            time.sleep(1)
            sent, delivered, began = going.sent, going.delivered, time.perf_counter()
            rate = archive(db)
            took = time.perf_counter() - began
            report(f"archive {COUNT:,} messages while others send and deliver", f"{rate:>9,.0f} messages/s")
            report("  sent meanwhile, one per transaction", f"{(going.sent - sent) / took:>9,.0f} messages/s")
            report("  delivered meanwhile", f"{(going.delivered - delivered) / took:>9,.0f} messages/s")

        month = "date_trunc('month', now()), date_trunc('month', now()) + interval '1 month'"
        replayed = seconds(lambda: db.execute(f"select ulak.replay_range(1, {month}, p_limit => {COUNT})"))
        report(f"replay {COUNT:,} messages", f"{COUNT / replayed:>9,.0f} messages/s")

        vacuum = value(db, "select ulak._vacuum_command()")
        db.execute(vacuum)
        idle = min(seconds(lambda: db.execute(vacuum)) for _ in range(5))
        rows = value(db, "select count(*) from ulak.queue")
        report(f"vacuum of a queue of {rows:,} with nothing to do", f"{idle * 1000:>9.1f} ms")
        checks = "do $$ begin for n in 1..1000 loop perform ulak._is_adopted(); end loop; end $$"
        asked = min(seconds(lambda: db.execute(checks)) for _ in range(50))
        report("is this cluster adopted? (asked by each claim)", f"{asked * 1000:>9.1f} us")
        db.close()
    finally:
        cluster.remove()
    assert rate >= REQUIRED, f"{rate:,.0f} messages/s while others send and deliver; {REQUIRED:,} are required"


if __name__ == "__main__":
    main()
