"""A world to break: a database with producers, workers and a recording receiver, and books to be closed at the end."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import psycopg
from psycopg.types.json import Jsonb

from support import books
from support.books import NO_EXCUSE, Allowance, Ledger, Report
from support.cluster import Cluster, run
from support.recorder import Recorder
from support.sessions import patience, stop_between_transactions, wait_until, wait_until_gone
from support.site import LONGEST_TIMEOUT
from support.traffic import SHOP, Producers, Workers, worker_pids

FULL = os.environ.get("ULAK_CHAOS") == "full"

# Of producers: what they place while pg_cron lets a minute pass has to be delivered in the end.
PAUSES = {"loops": 0.01, "cron": 0.05}

# Retries come at once and never run out, and no circuit opens: what happens is due to the fault alone.
PATIENT = {"max_retries": 1000, "backoff": "schedule", "schedule": [0]}
UNBROKEN = {"threshold": 1000, "cooldown": 5}

UNDER_WAY = """
    select jsonb_agg(to_jsonb(q) - 'payload') from (
        select * from ulak.queue where status in ('pending', 'processing') order by id limit 3
    ) q
"""


class World:
    def __init__(self, cluster: Cluster, database: str, recorder: Recorder) -> None:
        self.cluster = cluster
        self.database = database
        self.recorder = recorder
        self._producers: list[Producers] = []
        with self.connect() as db:
            db.execute(SHOP)
            db.execute("select ulak.configure('http_allow_internal_urls', 'true')")

    def let_leases_be_short(self) -> None:
        """For scenarios that wait until one runs out. In others none may, however busy the machine is."""
        self.value("select ulak.configure('lease_seconds', '5')")

    # A new session each time: the server may have died since.

    def connect(self, **options: Any) -> psycopg.Connection[Any]:
        return self.cluster.connect(self.database, **options)

    def value(self, query: str, *parameters: Any) -> Any:
        with self.connect() as db:
            row = db.execute(query, parameters or None).fetchone()  # type: ignore[arg-type]
        return None if row is None else row[0]

    # The participants.

    def endpoint(self, name: str = "shop", policy: dict[str, Any] | None = None, **config: Any) -> str:
        """Its requests don't time out on a busy machine either: each of them would be a duplicate."""
        url = self.recorder.url(f"/{name}")
        config = {"url": url, "timeout": LONGEST_TIMEOUT, "circuit_breaker": UNBROKEN, **config}
        query = "select ulak.create_endpoint(%s, 'http', %s, p_retry_policy => %s)"
        self.value(query, name, Jsonb(config), Jsonb(policy or PATIENT))
        return name

    def producers(self, *endpoints: str, **options: Any) -> Producers:
        self._producers.append(Producers(self.cluster, self.database, list(endpoints) or ["shop"], **options))
        return self._producers[-1]

    def workers(self, *slots: int) -> Workers:
        return Workers(self.cluster, self.database, slots or (1, 2))

    def workers_by(self, runner: str) -> AbstractContextManager[Any]:
        """By "loops" of sessions, or by "cron"."""
        return self.by_cron() if runner == "cron" else self.workers()

    @contextmanager
    def by_cron(self) -> Iterator[None]:
        self.start_cron()
        yield
        self.stop_cron()

    def start_cron(self) -> None:
        self._cron("select status, fix from ulak.start()")

    def stop_cron(self) -> None:
        self._cron("select status, fix from ulak.stop()")
        wait_until(lambda: not self.worker_pids(), "workers to leave")

    def _cron(self, statement: str) -> None:
        """Does what start() and stop() say is to be done where pg_cron lives: their fix is a script for psql."""
        with self.connect() as db:
            rows = db.execute(statement).fetchall()  # type: ignore[arg-type]
        assert not [row for row in rows if row[0] in ("problem", "not done")], rows
        (script,) = [fix for status, fix in rows if status == "to do"]
        psql: list[str | Path] = [self.cluster.bin / "psql", "-X", "-v", "ON_ERROR_STOP=1", "-d"]
        run([*psql, self.cluster.dsn(self.database)], input=script)

    def worker_pids(self) -> list[int]:
        with self.connect() as db:
            return worker_pids(db)

    def wait_for_worker(self) -> int:
        return wait_until(self.worker_pids, "a worker")[0]

    def wait_for_server(self) -> None:
        def answers() -> bool:
            try:
                return bool(self.value("select true"))
            except psycopg.OperationalError:
                return False

        wait_until(answers, "the server")

    # Faults.

    def terminate(self, pid: int) -> None:
        with self.connect() as db:
            db.execute("select pg_terminate_backend(%s)", [pid])
            wait_until_gone(pid, db)

    def cancel(self, pid: int) -> None:
        self.value("select pg_cancel_backend(%s)", pid)

    def kill(self, pid: int) -> None:
        """kill -9 of one backend: the postmaster ends all others and recovers."""
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not os.path.exists(f"/proc/{pid}"), message="its end")
        self.wait_for_server()

    @contextmanager
    def stopped(self, pid: int) -> Iterator[None]:
        """Between two transactions: in one that has written, it would keep its locks, and everything would wait for it. And not for ever:
        stopped at a bad moment, it may hold what the whole server waits for."""
        resume = threading.Timer(patience(), os.kill, (pid, signal.SIGCONT))
        resume.start()
        try:
            stop_between_transactions(self.value, pid)
            yield
        finally:
            resume.cancel()
            os.kill(pid, signal.SIGCONT)

    def let_leases_run_out(self) -> int:
        """Ages every lease instead of waiting for its end, and takes the messages back."""
        with self.connect() as db:
            db.execute("update ulak.queue set lease_until = clock_timestamp() where status = 'processing'")
        return int(self.value("select ulak.recover_stale_messages()"))

    def let_retries_fall_due(self) -> None:
        with self.connect() as db:
            db.execute(
                """
                update ulak.queue set next_retry_at = clock_timestamp()
                where status = 'pending' and next_retry_at > clock_timestamp() and next_retry_at <> 'infinity'
                """
            )

    # The end.

    def live(self) -> int:
        return int(self.value("select count(*) from ulak.queue where status in ('pending', 'processing')"))

    def wait_for_delivered(self, count: int) -> None:
        """Until this many are delivered and not yet archived."""
        query = "select count(*) from ulak.archive where status = 'completed'"
        wait_until(lambda: self.value(query) >= count, f"{count} delivered messages")

    def drain(self) -> None:
        """Until nothing is under way; recovers and expires by the true clock meanwhile, as maintenance does."""

        def is_empty() -> bool:
            with self.connect() as db:
                db.execute("select ulak.recover_stale_messages(), ulak.mark_expired_messages()")
            return self.live() == 0

        try:
            wait_until(is_empty, "an empty queue")
        except TimeoutError as error:
            raise TimeoutError(f"{error}; {self.value(UNDER_WAY)}") from None

    def deliver_the_rest(self) -> None:
        """After faults that left no worker: what they held is taken back at once, and delivered."""
        wait_until(lambda: not self.worker_pids(), "the end of all workers")
        self.let_leases_run_out()
        with self.workers():
            self.drain()

    def ledger(self) -> Ledger:
        with self.connect() as db:
            return Ledger(
                orders=books.read_orders(db),
                confirmed=frozenset().union(*(each.confirmed for each in self._producers)),
                rolled_back=frozenset().union(*(each.rolled_back for each in self._producers)),
                unanswered=frozenset().union(*(each.unanswered for each in self._producers)),
                arrivals=self.recorder.arrivals(),
                ends=books.read_ends(db),
                dead_letters=books.read_dead_letters(db),
            )

    def audit(self, allowance: Allowance = NO_EXCUSE) -> Report:
        return books.audit(self.ledger(), allowance)

    def refused(self) -> set[str]:
        """SQLSTATEs that producers got."""
        return {state for each in self._producers for state in each.refused}
