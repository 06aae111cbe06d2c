"""A gate before the workers: runs that have begun wait there, and no worker knows of them yet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg

DEFINITION = "select pg_get_functiondef('ulak_private.worker_stamp()'::regprocedure)"
WAIT = "perform pg_advisory_xact_lock_shared(hashtext('gate'), 0);"


@contextmanager
def gate(db: psycopg.Connection[Any]) -> Iterator[None]:
    """A run asks for its stamp before it takes its slot. A lock on what it reads there would hold up new sessions too."""
    definition: str = db.execute(DEFINITION).fetchone()[0]  # type: ignore[index]
    db.execute("select pg_advisory_lock(hashtext('gate'), 0)")
    db.execute(definition.replace("\nbegin\n", f"\nbegin\n{WAIT}\n"))  # type: ignore[arg-type]
    yield
    db.execute(definition)  # type: ignore[arg-type]
    db.execute("select pg_advisory_unlock(hashtext('gate'), 0)")
