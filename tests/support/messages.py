"""Messages that are put into ulak's tables, each with its event: in states, at times and in numbers that no call makes."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import psycopg
from psycopg.sql import SQL, Composable, Identifier, Literal
from psycopg.types.json import Jsonb

DB = psycopg.Connection[Any]

OF_EVENTS = ("payload", "headers", "metadata", "sent_by", "max_retries")


def insert_messages(
    db: DB, count: int = 1, *, table: str = "deliveries", created_at: datetime | None = None, **columns: Any
) -> list[int]:
    """Their ids, in the order in which they were numbered. All have the same values; a piece of SQL may use n, which counts from 1."""
    columns = {"payload": SQL("jsonb_build_object('n', n)"), **columns}
    body = {name: columns.pop(name) for name in OF_EVENTS if name in columns}
    statement = """
        with message as materialized (
            select nextval('ulak.queue_id_seq') as id, coalesce({created_at}, now()) as created_at, n
            from generate_series(1, {count}) n
        ),
        event as (
            insert into ulak_private.events (id, created_at, {body})
            select id, created_at, {body_values} from message
        )
        insert into {table} (id, event_id, created_at, {columns})
        select id, id, created_at, {values} from message order by n
        returning id
    """
    query = SQL(statement).format(
        table=Identifier("ulak_private", table),
        count=count,
        created_at=as_sql(created_at),
        body=names(body),
        body_values=values(body),
        columns=names(columns),
        values=values(columns),
    )
    return [id for (id,) in db.execute(query).fetchall()]


def names(columns: dict[str, Any]) -> Composable:
    return SQL(", ").join(map(Identifier, columns))


def values(columns: dict[str, Any]) -> Composable:
    return SQL(", ").join(map(as_sql, columns.values()))


def as_sql(value: Any) -> Composable:
    if isinstance(value, dict | list):
        value = Jsonb(value)
    return value if isinstance(value, Composable) else Literal(value)
