"""What an upgrade that alters tables costs the senders: a queue of a million messages must not lock them out."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psycopg
from support.copies import use
from support.finished import value
from support.releases import make_releases

from bench import storage
from bench.figures import Figure, Quantity
from bench.stage import Part, Stage

DB = psycopg.Connection[Any]

MESSAGE = {
    "endpoint_id": "1",
    "payload": "jsonb_build_object('n', n, 'text', repeat('x', 170))",
    "ordering_key": "case when n %% 10 = 9 then 'key ' || n %% 1000 end",
    "next_retry_at": "case when n %% 10 = 9 and n > 1000 then 'infinity' else now() end",
}

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
            self._session.execute(SEND, [f"key {number % 1000}" if number % 2 else None])
            self.took.append(time.perf_counter() - began)

    def end(self) -> None:
        self._stop.set()
        self._thread.join()


def made_up(stage: Stage) -> Iterator[Figure]:
    """To the second of two made-up versions: two columns, a view that is made again, and the code."""
    count = stage.scaled(1_000_000, 1000)
    with (
        TemporaryDirectory() as folder,
        stage.database() as name,
        stage.cluster.connect(name) as db,
        stage.cluster.connect(name) as session,
    ):
        use(db, make_releases(Path(folder)).second)
        db.execute("select ulak.create_endpoint('shop', 'pull', '{}')")
        db.execute("select ulak.configure('max_queue_size', '0')")
        storage.insert(db, MESSAGE, "generate_series(1, %s) n", [count])
        storage.vacuum(db)
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
    yield Figure(f"upgrade with {count:,} messages", Quantity(took, "s"))
    yield Figure("  the longest send() meanwhile", Quantity(longest * 1000, "ms", required=1000), headline=True)
    yield Figure("  sent meanwhile, one per transaction", Quantity((during - before) / took, "/s"))


PART = Part("An upgrade under load", {"made_up": made_up})
