"""pg_dump carries every row and every object, and DROP EXTENSION leaves nothing behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psycopg
import pytest
from support import catalog
from support.cluster import ROLES, Cluster
from support.rows import fill

DB = psycopg.Connection[Any]


# The workers and the maintenance runs of one cluster mean nothing in another.
NOT_CARRIED = [
    "ulak.workers: 1",
    "ulak_private.maintenance_runs: 1",
    "ulak_private.ordering_keys: 1",
    "ulak_private.schedule: 1",
]


def test_every_table_and_sequence_is_registered_for_pg_dump(db: DB) -> None:
    forgotten = db.execute(
        """
        select c.oid::regclass::text
        from pg_class c
        join pg_depend d on d.classid = 'pg_class'::regclass and d.objid = c.oid and d.deptype = 'e'
        join pg_extension e on e.oid = d.refobjid and extname = 'ulak'
        where relkind in ('r', 'S') and c.oid <> all (coalesce(extconfig, '{}'))
        union all
        -- The sequence of an identity column is no member itself; its position is lost unless it is registered.
        select s.oid::regclass::text
        from pg_class s
        join pg_depend owned on owned.objid = s.oid and owned.deptype in ('a', 'i')
        join pg_depend d on d.objid = owned.refobjid and d.deptype = 'e'
        join pg_extension e on e.oid = d.refobjid and extname = 'ulak'
        where owned.classid = 'pg_class'::regclass
            and d.classid = 'pg_class'::regclass
            and s.relkind = 'S'
            and s.oid <> all (coalesce(extconfig, '{}'))
        """
    ).fetchall()

    assert sorted({name for (name,) in forgotten}) == []


def test_the_rows_of_these_tests_reach_every_table(db: DB) -> None:
    fill(db)

    empty = [table for table, rows in catalog.contents(db).items() if rows == []]

    # A monthly partition beside the filled one may be empty.
    assert [table for table in empty if not table.startswith(("ulak_private.archive_2", "ulak_private.events_2"))] == []


@pytest.mark.parametrize("format", ["plain", "custom"])
def test_a_dump_restores_every_row_and_object(
    cluster: Cluster, database: str, db: DB, empty_database: str, tmp_path: Path, format: str
) -> None:
    fill(db)

    cluster.restore(empty_database, cluster.dump(database, tmp_path / "dump", f"--format={format}"))

    with cluster.connect(empty_database) as restored:
        before, after = catalog.contents(db), catalog.contents(restored)
        # It names a table of its own database.
        del before["ulak_private.cluster_home"], after["ulak_private.cluster_home"]
        assert catalog.lost(before, after) == NOT_CARRIED
        assert catalog.lost(after, before) == []
        assert catalog.differences(catalog.snapshot(db), catalog.snapshot(restored)) == []


def test_a_restored_database_goes_on_from_the_last_id(
    cluster: Cluster, database: str, db: DB, empty_database: str, tmp_path: Path
) -> None:
    fill(db)
    cluster.restore(empty_database, cluster.dump(database, tmp_path / "dump"))

    with cluster.connect(empty_database) as restored:
        query = "select ulak.send('filled_pull', '{}') > (select max(id) from ulak.queue)"

        assert restored.execute(query).fetchone() == (True,)


CATALOG_SIZES = """
    select
        relname,
        xpath('//n/text()', query_to_xml(format('select count(*) as n from %s', oid::regclass), true, true, ''))::text
    from pg_class
    where relnamespace = 'pg_catalog'::regnamespace and relkind = 'r' and not relisshared and relname <> 'pg_statistic'
    order by 1
"""


def test_drop_extension_leaves_nothing_but_roles(cluster: Cluster, empty_database: str) -> None:
    with cluster.connect(empty_database) as connection:
        connection.execute("create extension plpython3u")
        before = connection.execute(CATALOG_SIZES).fetchall()
        cluster.install(empty_database)
        fill(connection)
        assert connection.execute(CATALOG_SIZES).fetchall() != before

        connection.execute("drop extension ulak")

        assert connection.execute(CATALOG_SIZES).fetchall() == before
        named = "select count(*) from pg_roles where rolname like 'ulak%'"
        assert connection.execute(named).fetchone() == (len(ROLES),)
