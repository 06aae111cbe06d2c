"""Backups of a plain installation: pg_dump carries all of it, as ordinary tables and functions. And pg_upgrade, which providers run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support import catalog
from support.finished import column, value
from support.plain import SUPERUSER, PlainCluster, ProvidersCluster
from support.queue import DB
from support.rows import fill

CLAIM = "select id from ulak.claim('w', 1, 'filled_pull')"
# As the guide has it.
ROLES = """
    create role ulak_admin; create role ulak_application; create role ulak_consumer; create role ulak_monitor; create role ulak_node;
    create role ulak_worker login; grant ulak_admin to current_user;
"""


@pytest.fixture(scope="module")
def other() -> Iterator[PlainCluster]:
    cluster = PlainCluster.create(in_memory=True)
    yield cluster
    cluster.remove()


def objects(db: DB) -> catalog.Snapshot:
    return catalog.without_view_texts(catalog.snapshot(db))


@pytest.mark.parametrize("options", [["--format=custom"], []], ids=["custom", "text"])
def test_a_backup_is_restored_without_a_superuser(
    plain: PlainCluster, shop: DB, bare: str, tmp_path: Path, options: list[str]
) -> None:
    fill(shop)

    plain.restore(bare, plain.dump(shop.info.dbname, tmp_path / "dump", *options))

    with plain.connect(bare) as restored:
        assert catalog.differences(objects(shop), objects(restored)) == []
        before, after = catalog.contents(shop), catalog.contents(restored)
        assert catalog.lost(before, after) == catalog.lost(after, before) == []
        assert len(column(restored, CLAIM)) == 1
        restored.execute("call ulak.run_maintenance()")
        assert column(restored, "select last_error from ulak.maintenance_status where last_error is not null") == []


def test_in_another_cluster_its_messages_are_held_until_it_is_adopted(
    plain: PlainCluster, shop: DB, other: PlainCluster, script: Path, tmp_path: Path
) -> None:
    fill(shop)
    other.execute(ROLES)
    other.create_database("restored")

    other.restore("restored", plain.dump(shop.info.dbname, tmp_path / "dump"))

    with other.connect("restored") as restored:
        assert value(restored, "select ulak_private.is_adopted()") is False
        assert column(restored, CLAIM) == []
        assert value(restored, "select ulak.adopt()") > 0
        assert len(column(restored, CLAIM)) == 1
    # It can be upgraded where it is now.
    other.run_script("restored", script)


def test_after_pg_upgrade_delivery_goes_on() -> None:
    settings = {"shared_preload_libraries": ""}
    old = PlainCluster.create(settings=settings, in_memory=True)
    new = ProvidersCluster.create(settings=settings, in_memory=True)
    try:
        old.create_database("shop")
        old.install("shop")
        with old.connect("shop") as db:
            fill(db)
            identifier = value(db, "select ulak_private.system_identifier()")
        for cluster in (old, new):
            cluster.stop()
        old.user = SUPERUSER
        new.take_over(old)
        new.start()

        with new.connect("shop", "postgres") as db:
            assert value(db, "select ulak_private.system_identifier()") != identifier
            assert len(column(db, CLAIM)) == 1
            db.execute("call ulak.run_maintenance()")
            assert column(db, "select system_identifier from ulak_private.cluster_identity") != [identifier]
    finally:
        new.remove()
        old.remove()
