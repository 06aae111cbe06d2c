"""The reference is what the catalog says."""

from __future__ import annotations

from typing import Any

import psycopg
from support import reference

DB = psycopg.Connection[Any]


def test_the_reference_is_what_the_catalog_says(db: DB) -> None:
    """If not: make reference."""
    assert reference.PATH.read_text() == reference.reference(db)


def test_the_reference_names_every_public_function_and_setting(db: DB) -> None:
    text = reference.reference(db)
    functions = db.execute(
        r"""
        select distinct proname from pg_proc
        where pronamespace = 'ulak'::regnamespace order by 1
        """
    ).fetchall()
    settings = db.execute("select name from ulak.settings order by 1").fetchall()

    assert [name for (name,) in functions if f"\n### {name}\n" not in text] == []
    assert [name for (name,) in settings if f"\n| `{name}` |" not in text] == []
