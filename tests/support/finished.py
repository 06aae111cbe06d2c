"""Messages that are done, made in bulk: what the archive's tests and benches begin with."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import psycopg
from psycopg.sql import SQL

from support.messages import insert_messages

DB = psycopg.Connection[Any]


def value(db: DB, query: str, *parameters: Any) -> Any:
    """The first column of the first row."""
    row = db.execute(query, parameters).fetchone()  # type: ignore[arg-type]
    return None if row is None else row[0]


def column(db: DB, query: str, *parameters: Any) -> list[Any]:
    return [row[0] for row in db.execute(query, parameters).fetchall()]  # type: ignore[arg-type]


def finish(
    db: DB,
    count: int = 1,
    *,
    at: datetime,
    created_at: datetime | None = None,
    status: str = "completed",
    endpoint_id: int = 1,
    ordering_key: str | SQL | None = None,
    payload_bytes: int = 0,
) -> list[int]:
    """Messages in the archive that ended at a time, a millisecond apart; their ids."""
    ended_at = SQL("{} + (n - 1) * interval '1 ms'").format(at)
    return insert_messages(
        db,
        count,
        table="archived",
        created_at=created_at or at,
        endpoint_id=endpoint_id,
        status=status,
        attempts=1,
        updated_at=ended_at,
        completed_at=ended_at,
        archived_at=ended_at,
        ordering_key=ordering_key,
        payload=SQL("jsonb_build_object('n', n, 'text', repeat('x', {}))").format(payload_bytes),
    )


def hold_up(db: DB, gate: DB, created_at: datetime, id: int) -> None:
    """A session that archives this message, which is of this month, waits for the gate's transaction to end."""
    db.execute("select ulak.maintain_archive_partitions(0, %s)", [created_at])
    db.execute(
        f"""
        create function public.wait_for_gate() returns trigger language plpgsql
        as $$ begin perform pg_advisory_xact_lock(42); return new; end $$;
        create trigger wait_for_gate before insert on ulak_private.archive_{created_at:%Y_%m}
            for each row when (new.id = {id}) execute function public.wait_for_gate()
        """  # type: ignore[arg-type]
    )
    gate.execute("select pg_advisory_xact_lock(42)")
