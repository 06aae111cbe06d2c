"""A queue under test: what applications, workers and operators call, with a clock that the test moves."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import psycopg
from psycopg.pq import TransactionStatus
from psycopg.rows import class_row, dict_row
from psycopg.types.datetime import TimestamptzLoader
from psycopg.types.json import Jsonb

DB = psycopg.Connection[Any]
Begin = Callable[[], "Queue"]
Sessions = Callable[[int], list["Queue"]]

INFINITY = datetime.max.replace(tzinfo=UTC)


class InfinityLoader(TimestamptzLoader):
    """Python has no infinite time."""

    def load(self, data: Any) -> datetime:
        return INFINITY if bytes(data) == b"infinity" else super().load(data)


class Claim(NamedTuple):
    """A row of ulak.claim()."""

    id: int
    message_id: Any
    attempt: int
    endpoint: str
    payload: Any
    headers: Any
    metadata: Any
    correlation_id: Any
    ordering_key: str | None
    idempotency_key: str | None
    priority: int
    created_at: datetime
    expires_at: datetime | None
    lease_until: datetime


class Queue:
    """Times are seconds after `base`: the start of the transaction. Without one it is an hour from now, so that whatever
    the test sends is due by then."""

    def __init__(self, db: DB, base: datetime | None = None) -> None:
        self.db = db
        db.adapters.register_loader("timestamptz", InfinityLoader)
        ahead = 0 if db.info.transaction_status == TransactionStatus.INTRANS else 1
        self.base: datetime = base or self.value("select now() + %s * interval '1 hour'", ahead)

    def at(self, seconds: float) -> datetime:
        return self.base + timedelta(seconds=seconds)

    # Plain SQL.

    def value(self, query: str, *parameters: Any) -> Any:
        """The first column of the first row."""
        row = self.db.execute(query, parameters or None).fetchone()  # type: ignore[arg-type]
        return None if row is None else row[0]

    def column(self, query: str, *parameters: Any) -> list[Any]:
        return [row[0] for row in self.db.execute(query, parameters or None).fetchall()]  # type: ignore[arg-type]

    def rows(self, query: str, *parameters: Any) -> list[dict[str, Any]]:
        with self.db.cursor(row_factory=dict_row) as cursor:
            return cursor.execute(query, parameters or None).fetchall()  # type: ignore[arg-type]

    def call(self, function: str, *positional: Any, **named: Any) -> Any:
        """ulak.function(positional, p_named => named), or one of ulak_private; a named one that is None is left out."""
        schema = "" if "." in function else "ulak."
        given = {name: value for name, value in named.items() if value is not None}
        places = ["%s"] * len(positional) + [f"p_{name} => %s" for name in given]
        return self.value(
            f"select {schema}{function}({', '.join(places)})", *map(adapt, [*positional, *given.values()])
        )

    def refuses(self, function: str, *positional: Any, **named: Any) -> psycopg.errors.Diagnostic:
        """What the error says. Nothing of the transaction around it is lost."""
        try:
            with self.db.transaction():
                self.call(function, *positional, **named)
        except psycopg.Error as error:
            return error.diag
        raise AssertionError(f"ulak.{function}() was not refused")

    def empty(self) -> None:
        """No message, no endpoint, no trace of either: for tests that share a database. TRUNCATE would also throw away
        the plans of the functions under test."""
        for table in (
            "ulak_private.deliveries",
            "ulak_private.events",
            "ulak_private.archived",
            "ulak_private.letters",
            "ulak_private.idempotency_keys",
            "ulak_private.ordering_keys",
            "ulak.endpoints",
            "ulak.event_log",
            "ulak.handled",
        ):
            self.db.execute(f"delete from {table}")

    # Applications.

    def endpoint(self, name: str = "shop", config: Any = None, policy: Any = None, protocol: str = "pull") -> int:
        return int(self.call("create_endpoint", name, protocol, config or {}, retry_policy=policy))

    def send(self, endpoint: str = "shop", payload: Any = None, **options: Any) -> int:
        """Options are those of ulak.send(); times among them are seconds."""
        for name in ("scheduled_at", "expires_at"):
            if name in options:
                options[name] = self.at(options[name])
        return int(self.call("send", endpoint, Jsonb(payload or {"n": 1}), **options))

    def send_many(self, count: int, endpoint: str = "shop", priority: int = 0) -> list[int]:
        query = """
            select ulak.send_batch_with_priority(%s, array(select jsonb_build_object('n', n) from generate_series(1, %s) n), %s)
        """
        return list(self.value(query, endpoint, count, priority))

    # Workers.

    def claim(
        self,
        limit: int = 1,
        *,
        worker: str = "w",
        endpoint: str | None = None,
        lease: float | None = None,
        generation: int | None = None,
        now: float = 0,
    ) -> list[Claim]:
        with self.db.cursor(row_factory=class_row(Claim)) as cursor:
            return cursor.execute(
                "select * from ulak.claim(%s, %s, %s, make_interval(secs => %s), %s, %s)",
                [worker, limit, endpoint, lease, generation, self.at(now)],
            ).fetchall()

    def claim_one(self, **options: Any) -> Claim:
        (claim,) = self.claim(1, **options)
        return claim

    def heartbeat(self, claim: Claim, *, worker: str = "w", lease: float | None = None, now: float = 0) -> bool:
        return bool(self.call("heartbeat", *key(claim, worker), lease=seconds(lease), now=self.at(now)))

    def complete(self, claim: Claim, *, worker: str = "w", response: Any = None, now: float = 0) -> None:
        self.call("complete", *key(claim, worker), response=response, now=self.at(now))

    def fail(
        self,
        claim: Claim,
        error: str | None = "no luck",
        *,
        worker: str = "w",
        retry_after: float | None = None,
        permanent: bool | None = None,
        now: float = 0,
    ) -> None:
        options = {"retry_after": seconds(retry_after), "permanent": permanent, "now": self.at(now)}
        self.call("fail", *key(claim, worker), error, **options)

    def release(self, claim: Claim, *, worker: str = "w", delay: float | None = None, now: float = 0) -> None:
        self.call("release", *key(claim, worker), delay=seconds(delay), now=self.at(now))

    # Maintenance.

    def recover(self, now: float) -> int:
        return int(self.call("recover_stale_messages", now=self.at(now)))

    def expire(self, now: float) -> int:
        return int(self.call("mark_expired_messages", now=self.at(now)))

    # What became of it.

    def message(self, id: int) -> dict[str, Any]:
        """Wherever it is: while it is live, or in the archive."""
        for place in ("queue", "archive"):
            if rows := self.rows(f"select * from ulak.{place} where id = %s", id):
                rows[0].pop("archived_at", None)
                return rows[0]
        raise AssertionError(f"there is no message {id}")

    def status(self, id: int) -> str:
        return str(self.message(id)["status"])

    def due_in(self, id: int) -> float:
        """Seconds after base."""
        return float((self.message(id)["next_retry_at"] - self.base).total_seconds())

    def dead(self, id: int) -> dict[str, Any]:
        """The dead letter of a message."""
        (row,) = self.rows("select * from ulak.dlq where original_message_id = %s", id)
        return row

    def bury(self, id: int, error: str = "refused", now: float = 0) -> int:
        """Lets a waiting message fail for good and returns its id in ulak.dlq."""
        return int(self.call("archive_single_to_dlq", id, error, now=self.at(now)))

    def circuit(self, endpoint: str = "shop") -> dict[str, Any]:
        (row,) = self.rows("select * from ulak.endpoints where name = %s", endpoint)
        return row

    def state(self, endpoint: str = "shop") -> str:
        return str(self.circuit(endpoint)["circuit_state"])

    def events(self, pattern: str = "%") -> list[str]:
        return self.column("select event from ulak.event_log where event like %s order by id", pattern)


def key(claim: Claim, worker: str) -> tuple[int, str, int]:
    return claim.id, worker, claim.attempt


def seconds(value: float | None) -> timedelta | None:
    return None if value is None else timedelta(seconds=value)


def adapt(value: Any) -> Any:
    return Jsonb(value) if isinstance(value, dict | list) else value
