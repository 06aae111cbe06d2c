"""What an upgrade from the last release costs the senders: a queue of a million rows must not lock them out."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import psycopg
from support.finished import value

from bench.figures import Figure, Quantity
from bench.stage import Part, Stage

DB = psycopg.Connection[Any]

RELEASE = "0.2.0"

# As a release leaves them: most are done, some wait, some behind their ordering key. Each has what the upgrade makes an index of.
ROWS = """
    insert into ulak.queue (correlation_id, endpoint_id, status, attempts, updated_at, completed_at, ordering_key, next_retry_at, payload)
    select
        gen_random_uuid(),
        1,
        case when n %% 10 < 7 then 'completed' else 'pending' end,
        (n %% 10 < 7)::integer,
        now(),
        case when n %% 10 < 7 then now() end,
        case when n %% 10 = 9 then 'key ' || n %% 1000 end,
        case when n %% 10 = 9 and n > 1000 then 'infinity' else now() end,
        jsonb_build_object('n', n, 'text', repeat('x', 170))
    from generate_series(1, %s) n
"""

SEND = "select ulak.send('shop', '{\"n\": 1}', p_ordering_key => %s)"


class Sender:
    """One message per transaction, every other one with an ordering key. Notes when each began and how long it took."""

    def __init__(self, session: DB) -> None:
        self.took: list[float] = []
        self._session = session
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._send)
        self._thread.start()

    def _send(self) -> None:
        number = 0
        while not self._stop.is_set():
            number += 1
            began = time.perf_counter()
            try:
                self._session.execute(SEND, [f"key {number % 1000}" if number % 2 else None])
            except psycopg.errors.InvalidColumnReference:
                # It waited for the lock of the upgrade, inside a function of the release.
                self._session.execute(SEND, [f"key {number % 1000}" if number % 2 else None])
            self.took.append(time.perf_counter() - began)

    def end(self) -> None:
        self._stop.set()
        self._thread.join()


def last_release(stage: Stage) -> Iterator[Figure]:
    count = stage.scaled(1_000_000, 1000)
    name = stage.cluster.create_database("bench_upgrade")
    stage.cluster.install(name, RELEASE)
    with stage.cluster.connect(name) as db, stage.cluster.connect(name) as session:
        db.execute("select ulak.create_endpoint('shop', 'pull', '{}')")
        db.execute("select ulak.configure('max_queue_size', '0')")
        db.execute(ROWS, [count])
        db.execute("vacuum analyze ulak.queue")
        sender = Sender(session)
        try:
            time.sleep(min(1, stage.scale))
            before = len(sender.took)
            began = time.perf_counter()
            db.execute("alter extension ulak update")
            took = time.perf_counter() - began
            during = len(sender.took)
            time.sleep(min(1, stage.scale))
        finally:
            sender.end()
        # The send that the upgrade's end fell into belongs to it.
        longest = max(sender.took[before : during + 1])
        assert value(db, "select count(*) from ulak.queue") == count + len(sender.took)
    yield Figure(f"upgrade of {count:,} messages from {RELEASE}", Quantity(took, "s"))
    yield Figure("  the longest send() meanwhile", Quantity(longest * 1000, "ms", required=1000), headline=True)
    yield Figure("  sent meanwhile, one per transaction", Quantity((during - before) / took, "/s"))


PART = Part("An upgrade under load", {"last_release": last_release})
