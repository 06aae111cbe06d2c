"""ALTER EXTENSION UPDATE to a version that has other code, but no steps. With steps: test_releases.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from support import catalog
from support.cluster import Cluster
from support.copies import NEXT, make_next_release, use
from support.rows import fill

DB = psycopg.Connection[Any]


@pytest.fixture
def next_project(tmp_path: Path) -> Path:
    return make_next_release(tmp_path)


@pytest.fixture
def fresh(cluster: Cluster, empty_database: str) -> Iterator[DB]:
    with cluster.connect(empty_database) as connection:
        yield connection


def test_an_upgraded_database_equals_a_fresh_one(db: DB, fresh: DB, next_project: Path) -> None:
    use(db, next_project)
    use(fresh, next_project)

    db.execute("alter extension ulak update")
    fresh.execute("create extension ulak cascade")

    versions = [c.execute("select extversion from pg_extension where extname = 'ulak'").fetchone() for c in (db, fresh)]
    assert versions == [(NEXT,), (NEXT,)]
    assert catalog.differences(catalog.snapshot(db), catalog.snapshot(fresh)) == []


def test_a_schema_change_that_the_upgrade_forgot_is_seen(db: DB, fresh: DB, next_project: Path) -> None:
    (next_project / "sql/schema/99_forgotten.sql").write_text(
        "alter table ulak_private.locks add column forgotten integer;\n"
    )
    use(db, next_project)
    use(fresh, next_project)

    db.execute("alter extension ulak update")
    fresh.execute("create extension ulak cascade")

    lines = catalog.differences(catalog.snapshot(db), catalog.snapshot(fresh))
    assert lines == ["column ulak_private.locks.forgotten: only right"]


def test_an_upgrade_keeps_every_row(db: DB, next_project: Path) -> None:
    fill(db)
    before = catalog.contents(db, by_partition=False)
    use(db, next_project)

    db.execute("alter extension ulak update")

    after = catalog.contents(db, by_partition=False)
    assert catalog.lost(before, after) == catalog.lost(after, before) == []


def test_an_upgrade_replaces_the_python_of_a_running_session(db: DB, next_project: Path) -> None:
    import_probe = """
        do $python$
        plpy.execute("select ulak_private.load_python()")
        from ulak import probe
        plpy.notice(probe.VALUE)
        $python$ language plpython3u
    """
    notices: list[str] = []
    db.add_notice_handler(lambda diagnostic: notices.append(str(diagnostic.message_primary)))
    with pytest.raises(psycopg.errors.ExternalRoutineException, match="cannot import name 'probe'"):
        db.execute(import_probe)
    use(db, next_project)

    db.execute("alter extension ulak update")
    db.execute(import_probe)

    assert notices == ["next"]


def test_replayed_code_locks_no_table_against_writers(db: DB, next_project: Path) -> None:
    """It would meet a worker or a sender, which lock the same tables in an order of their own, in a deadlock."""
    use(db, next_project)

    with db.transaction(force_rollback=True):
        db.execute("alter extension ulak update")
        locked = db.execute(
            """
            select l.relation::regclass::text
            from pg_locks l
            join pg_class c on c.oid = l.relation and c.relkind in ('r', 'p')
            join pg_namespace n on n.oid = c.relnamespace and n.nspname in ('ulak', 'ulak_private')
            where l.pid = pg_backend_pid()
                and l.mode in ('ShareLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock')
            """
        ).fetchall()

    assert locked == []
