"""README's reference names everything that users can call."""

from __future__ import annotations

from typing import Any

import psycopg
from support.cluster import PROJECT

DB = psycopg.Connection[Any]


def test_every_public_function_has_a_line_in_the_readme(db: DB) -> None:
    readme = (PROJECT / "README.md").read_text()
    public = db.execute(
        r"""
        select distinct proname from pg_proc
        where pronamespace = 'ulak'::regnamespace and proname not like '\_%' order by 1
        """
    ).fetchall()

    # As `name(...)`, in the reference's tables and lists.
    assert [name for (name,) in public if f"`{name}(" not in readme and f"`ulak.{name}(" not in readme] == []


def test_every_setting_is_in_the_readme(db: DB) -> None:
    readme = (PROJECT / "README.md").read_text()
    names = db.execute("select name from ulak.settings order by 1").fetchall()

    assert [name for (name,) in names if f"`{name}`" not in readme] == []
