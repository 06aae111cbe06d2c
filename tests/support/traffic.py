"""Traffic for chaos: producers whose own tables say what was committed, and workers that come back when they are killed."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Self

import psycopg

from support.cluster import Cluster
from support.sessions import patience, wait_until

# The business of the producers. `place` is drawn after the send, which serialises the senders of a key.
SHOP = """
    create schema shop;

    create table shop.orders (
        token text primary key,
        id bigint not null,
        endpoint text not null,
        ordering_key text,
        place bigint
    );

    create table shop.keys (
        endpoint text,
        ordering_key text,
        placed bigint not null,
        primary key (endpoint, ordering_key)
    );

    create function shop.place_order(p_token text, p_endpoint text, p_key text, p_expires_at timestamptz)
    returns void
    language plpgsql
    as $plpgsql$
    declare
        v_id bigint;
        v_place bigint;
    begin
        v_id := ulak.send(
            p_endpoint, jsonb_build_object('token', p_token), p_ordering_key => p_key, p_expires_at => p_expires_at
        );
        if p_key is not null then
            insert into shop.keys as k values (p_endpoint, p_key, 1)
            on conflict (endpoint, ordering_key) do update set placed = k.placed + 1
            returning placed into v_place;
        end if;
        insert into shop.orders values (p_token, v_id, p_endpoint, p_key, v_place);
    end
    $plpgsql$;
"""


# Between two tries to reach the server, or to start a worker there.
BREATH = 0.02


def stopwatch() -> Callable[[], float]:
    """The seconds since then: for the length of a scenario, for its row in the table, and for bounds in the full form."""
    began = time.monotonic()
    return lambda: time.monotonic() - began


class Producers:
    """Each places orders on its own connection, rolls some back, and goes on after any loss of the server."""

    def __init__(
        self,
        cluster: Cluster,
        database: str,
        endpoints: list[str],
        *,
        count: int = 2,
        pause: float = 0.01,
        keys: int = 5,
        expires_in: str | None = None,
    ) -> None:
        self.cluster = cluster
        self.database = database
        self.endpoints = endpoints
        self.pause = pause
        self.keys = keys
        self.expires_in = expires_in
        self.confirmed: set[str] = set()
        self.rolled_back: set[str] = set()
        self.unanswered: set[str] = set()
        # SQLSTATEs of orders that were refused; when the others were placed, and how long that took.
        self.refused: Counter[str] = Counter()
        self.durations: list[tuple[float, float]] = []
        self.elapsed = stopwatch()
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(n,), daemon=True) for n in range(count)]
        self._name = f"{random.getrandbits(32):08x}"

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *unused: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._stopping.set()
        wait_until(lambda: not any(thread.is_alive() for thread in self._threads), "the producers' end")

    def wait_for(self, count: int) -> None:
        """Until this many more orders are confirmed."""
        goal = len(self.confirmed) + count
        wait_until(lambda: len(self.confirmed) >= goal, f"{count} more orders")

    def _run(self, number: int) -> None:
        orders = 0
        while not self._stopping.wait(BREATH):
            with (
                contextlib.suppress(psycopg.OperationalError),
                self.cluster.connect(self.database, autocommit=False, connect_timeout=round(patience())) as db,
            ):
                while not self._stopping.wait(self.pause):
                    orders += 1
                    self._place(db, f"{self._name}-{number}-{orders}")

    def _place(self, db: psycopg.Connection[Any], token: str) -> None:
        endpoint = random.choice(self.endpoints)
        key = f"key {random.randrange(self.keys)}" if self.keys and random.random() < 0.5 else None
        query = "select shop.place_order(%s, %s, %s, now() + %s::interval)"
        started, duration = self.elapsed(), stopwatch()
        try:
            db.execute(query, [token, endpoint, key, self.expires_in])
            if random.random() < 0.1:
                db.rollback()
                self.rolled_back.add(token)
                return
            db.commit()
            self.confirmed.add(token)
            self.durations.append((started, duration()))
        except psycopg.OperationalError as error:
            if db.broken:
                # The shop's table says whether it was committed.
                self.unanswered.add(token)
                raise
            db.rollback()
            self.rolled_back.add(token)
            self.refused[error.sqlstate or "?"] += 1
        except psycopg.Error as error:
            db.rollback()
            self.rolled_back.add(token)
            self.refused[error.sqlstate or "?"] += 1


class Workers:
    """Sessions that run a worker and start it again whenever it ends, as systemd would."""

    def __init__(self, cluster: Cluster, database: str, slots: Iterable[int] = (1, 2)) -> None:
        self.cluster = cluster
        self.database = database
        self._stopping = threading.Event()
        # Backends that run one now.
        self._pids: set[int] = set()
        self._threads = [threading.Thread(target=self._run, args=(slot,), daemon=True) for slot in slots]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def stay_away(self) -> None:
        """Once they have ended."""
        self._stopping.set()

    def __exit__(self, *unused: object) -> None:
        self.stay_away()

        def have_ended() -> bool:
            # What pg_terminate_backend() does, and what works without a server too.
            for pid in list(self._pids):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
            return not any(thread.is_alive() for thread in self._threads)

        wait_until(have_ended, "the workers' end", interval=0.1)

    def _run(self, slot: int) -> None:
        while not self._stopping.wait(BREATH):
            with (
                contextlib.suppress(psycopg.Error),
                self.cluster.connect(self.database, connect_timeout=round(patience())) as db,
            ):
                self._pids.add(pid := db.info.backend_pid)
                try:
                    db.execute("call ulak.run_worker(%s, 3600)", [slot])
                finally:
                    self._pids.discard(pid)


# pg_cron's workers and those of class Workers look the same to the server.
WORKERS = """
    select pid from pg_stat_activity
    where datname = current_database() and application_name like 'ulak worker%'
    order by pid
"""


def worker_pids(db: psycopg.Connection[Any]) -> list[int]:
    return [row[0] for row in db.execute(WORKERS)]
