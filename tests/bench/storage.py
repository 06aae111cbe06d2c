"""Where a version keeps its messages, so that a part can fill, empty and vacuum them whatever version a database has.

c5472575 and earlier have a message as one row of the table ulak.queue with its payload, and it stays there for an hour after its delivery.
Since then ulak.queue is a view: a message is a narrow row of ulak_private.deliveries, its payload is in ulak_private.events, and what is
delivered is in the archive at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg

DB = psycopg.Connection[Any]

# Delivered messages of any version, with their times.
COMPLETED = """(
    select id, endpoint_id, created_at, processing_started_at, completed_at from ulak.queue where status = 'completed'
    union all
    select id, endpoint_id, created_at, processing_started_at, completed_at from ulak.archive where status = 'completed'
) completed"""

WAITING, DONE, DEAD = "waiting", "done", "dead"


@dataclass(frozen=True)
class Tables:
    waiting: str
    # Of messages that were delivered a moment ago.
    done: str
    dead: str
    # None: each message has its own payload.
    events: str | None
    # What empty() truncates.
    all: tuple[str, ...]


OLD = Tables("ulak.queue", "ulak.queue", "ulak.dlq", None, ("ulak.queue", "ulak.archive"))
NEW = Tables(
    "ulak_private.deliveries",
    "ulak_private.archived",
    "ulak_private.letters",
    "ulak_private.events",
    ("ulak_private.deliveries", "ulak_private.events", "ulak_private.archived", "ulak_private.idempotency_keys"),
)


def tables_of(db: DB) -> Tables:
    row = db.execute("select to_regclass('ulak_private.deliveries') is null").fetchone()
    assert row is not None
    return OLD if row[0] else NEW


def private(db: DB, name: str) -> str:
    """A private function by the name that it has there: c5472575 and earlier have one schema."""
    return f"ulak._{name}" if tables_of(db) is OLD else f"ulak_private.{name}"


def insert(
    db: DB,
    columns: Mapping[str, str],
    source: str,
    parameters: Sequence[Any] | Mapping[str, Any] = (),
    kind: str = WAITING,
) -> None:
    """Messages by the million: one for each row of the source, with these expressions as its columns, stored as send() stores it. Dead
    letters are those of messages that are not there any more."""
    tables = tables_of(db)
    table = getattr(tables, kind)
    id, created_at = ("original_message_id", "original_created_at") if kind == DEAD else ("id", "created_at")
    made = ", ".join(f"{expression} as {name}" for name, expression in columns.items())
    message = f"with message as materialized (select nextval('ulak.queue_id_seq') as {id}, {made} from {source})"
    if tables.events is None:
        names = ", ".join((id, *columns))
        statement = f"{message} insert into {table} ({names}) select {names} from message"
    else:
        names = ", ".join((id, *(name for name in columns if name != "payload")))
        statement = f"""
            {message},
            event as (
                insert into {tables.events} (id, created_at, payload)
                select {id}, {created_at if created_at in columns else "now()"}, payload from message
            )
            insert into {table} (event_id, {names}) select {id}, {names} from message
        """
    db.execute(statement, parameters or None)  # type: ignore[arg-type]


def empty(db: DB) -> None:
    """Waiting and delivered messages."""
    db.execute(f"truncate {', '.join(tables_of(db).all)}")  # type: ignore[arg-type]


def vacuum(db: DB, how: str = "analyze") -> None:
    """`how` is an option of VACUUM."""
    db.execute(f"vacuum ({how}) {', '.join(tables_of(db).all)}")  # type: ignore[arg-type]


def create_plain(db: DB, name: str) -> None:
    """The yardstick of sending: one table with the columns and indexes of waiting messages, payload and idempotency key included."""
    tables = tables_of(db)
    db.execute(f"create table {name} (like {tables.waiting} including all)")  # type: ignore[arg-type]
    if tables is NEW:
        db.execute(f"alter table {name} alter event_id drop not null, add column if not exists payload jsonb")  # type: ignore[arg-type]
        db.execute(
            f"create unique index on {name} (endpoint_id, idempotency_key) where idempotency_key is not null"  # type: ignore[arg-type]
        )


def archive(db: DB) -> None:
    """What was delivered. Settling does it, but with c5472575 and earlier it is a step of its own."""
    if tables_of(db) is OLD:
        while db.execute("select ulak.archive_completed_messages(0, 1000, clock_timestamp())").fetchone() != (0,):
            pass


def bytes_of(db: DB) -> int:
    """Of all tables of ulak with their indexes."""
    row = db.execute(
        "select sum(pg_total_relation_size(oid))::bigint from pg_class "
        "where relnamespace::regnamespace::text in ('ulak', 'ulak_private') and relkind in ('r', 'S')"
    ).fetchone()
    assert row is not None
    return int(row[0])
