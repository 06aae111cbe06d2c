"""A function of ours with another text for a while: where it looks at the clock itself, and a test must not depend on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus


@contextmanager
def rewritten(db: psycopg.Connection[Any], function: str, before: str, after: str) -> Iterator[None]:
    """For all sessions, unless db is in a transaction."""
    definition: str = db.execute("select pg_get_functiondef(%s::regproc)", [function]).fetchone()[0]  # type: ignore[index]
    assert definition.count(before) == 1, definition
    db.execute(definition.replace(before, after))  # type: ignore[arg-type]
    try:
        yield
    finally:
        if db.info.transaction_status != TransactionStatus.INERROR:
            db.execute(definition)  # type: ignore[arg-type]
