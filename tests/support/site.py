"""A database with real workers in sessions of their own, and what the tests of the worker ask of it."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import psycopg

from support.cluster import Cluster
from support.queue import Queue
from support.sessions import PATIENCE, Running, wait_until

# Not a count: it is asked again and again, and the workers have the machine's other core.
SETTLED = """
    select not exists (select from ulak.queue where status = 'pending')
        and not exists (select from ulak.queue where status = 'processing')
"""


# Retries come after a second and never run out, and no circuit opens: what happens is due to the receiver alone.
PATIENT = {"max_retries": 1000, "backoff": "fixed", "base_delay_seconds": 1}
UNBROKEN = {"threshold": 1000}
# The longest that an endpoint may have. A request that a test holds back must not end by itself.
LONGEST_TIMEOUT = 300
# How long a worker runs: longer than anything waits for what it does. One with more time would poll instead of being notified.
LONG = 3600


class Site(Queue):
    """Requests may go to loopback. A retry comes after the default backoff, 10 s at first, unless the endpoint's policy is PATIENT or LATER."""

    def __init__(self, cluster: Cluster, database: str) -> None:
        self.cluster = cluster
        self.database = database
        self.workers: list[WorkerSession] = []
        super().__init__(self.connect())
        self.configure(http_allowed_networks="127.0.0.0/8")

    def connect(self, role: str | None = None, **options: Any) -> psycopg.Connection[Any]:
        return self.cluster.connect(self.database, role, client_encoding="utf8", **options)

    def configure(self, **settings: Any) -> None:
        for name, value in settings.items():
            self.call("configure", name, None if value is None else str(value))

    def http(self, name: str, url: str, policy: Any = None, **config: Any) -> int:
        return self.endpoint(name, {"url": url, **config}, policy, "http")

    def begin(
        self, slot: int | None, seconds: float = LONG, role: str = "ulak_worker", is_scheduled: bool = False
    ) -> WorkerSession:
        self.workers.append(WorkerSession(self.connect(role), slot, seconds, is_scheduled))
        return self.workers[-1]

    def start(self, slot: int | None = None, seconds: float = LONG, role: str = "ulak_worker") -> WorkerSession:
        """A worker that has registered."""
        worker = self.begin(slot, seconds, role)
        query = "select exists (select from ulak.workers where pid = %s and state = 'running')"
        wait_until(lambda: worker.call.is_done() or self.value(query, worker.pid), message="a worker")
        return worker

    def wait_until_settled(self, *, seconds: float = PATIENCE) -> None:
        wait_until(lambda: self.value(SETTLED), "an empty queue", seconds=seconds)

    def wait_for_status(self, id: int, status: str) -> dict[str, Any]:
        wait_until(lambda: self.status(id) == status, f"message {id} being {status}")
        return self.message(id)

    def wait_for_error(self, id: int, expected: str) -> str:
        """A last_error with this text in it."""

        def error() -> str:
            told = str(self.message(id)["last_error"] or "")
            return told if expected in told else ""

        return wait_until(error, f"{expected} as an error of message {id}")

    def worker_row(self, worker: WorkerSession) -> dict[str, Any]:
        (row,) = self.rows("select * from ulak.workers where pid = %s", worker.pid)
        return row

    def end(self) -> None:
        """Without a look at what is left: for a database that isn't used again."""
        for worker in self.workers:
            worker.end()
        self.db.close()

    def close(self) -> None:
        """Ends the workers and leaves the database as it was made."""
        for worker in self.workers:
            worker.end()
        self.empty()
        self.db.execute("truncate ulak.workers, ulak_private.schedule, ulak.setting_values, ulak_private.secrets")
        self.db.execute("truncate ulak.endpoint_stats, ulak.endpoint_totals")
        self.db.close()


class WorkerSession:
    """`call ulak.run_worker()` in a thread of its own."""

    def __init__(
        self, connection: psycopg.Connection[Any], slot: int | None, seconds: float | None, is_scheduled: bool = False
    ) -> None:
        self.connection = connection
        self.pid = connection.info.backend_pid
        self.notices: list[str] = []
        connection.add_notice_handler(lambda notice: self.notices.append(notice.message_primary or ""))
        call = "call ulak.run_worker(%s::integer, %s" + (", p_is_scheduled => true)" if is_scheduled else ")")
        self.call = Running(lambda: connection.execute(call, [slot, seconds]))  # type: ignore[call-overload]

    def result(self) -> None:
        """Waits for the end of the call, and raises its error."""
        self.call.result()

    def end(self) -> None:
        if not self.call.is_done():
            with psycopg.connect(self.connection.info.dsn, autocommit=True) as other:
                other.execute("select pg_terminate_backend(%s)", [self.pid])
        with suppress(psycopg.Error):
            self.call.result()
        self.connection.close()
