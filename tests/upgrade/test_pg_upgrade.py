"""pg_upgrade makes a new cluster of the same files, and delivery goes on. To a newer server: tests/majors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from support import catalog
from support.cluster import Cluster
from support.finished import column, value
from support.rows import fill

DB = psycopg.Connection[Any]

IDENTIFIER = "select system_identifier from pg_control_system()"
CLAIM = "select id from ulak.claim('w', 1, 'filled_pull')"


class Upgraded:
    def __init__(self, old: Cluster, new: Cluster) -> None:
        self.cluster = new
        for name in ("shop", "held"):
            old.install(old.create_database(name))
            with old.connect(name) as db:
                fill(db)
        old.execute("insert into ulak_private.cluster_identity (system_identifier) values (0)", "held")
        with old.connect("shop") as db:
            self.rows = catalog.contents(db)
            self.identifier = value(db, IDENTIFIER)
        for cluster in (old, new):
            cluster.stop()
        new.take_over(old)
        new.start()


@pytest.fixture(scope="module")
def upgraded() -> Iterator[Upgraded]:
    settings = {"shared_preload_libraries": ""}
    old, new = (Cluster.create(settings=settings, in_memory=True) for _ in range(2))
    yield Upgraded(old, new)
    new.remove()
    old.remove()


@pytest.fixture
def db(upgraded: Upgraded) -> Iterator[DB]:
    with upgraded.cluster.connect("shop") as connection:
        yield connection


def test_every_row_comes_over_and_nothing_is_held(upgraded: Upgraded, db: DB) -> None:
    after = catalog.contents(db)

    assert catalog.lost(upgraded.rows, after) == catalog.lost(after, upgraded.rows) == []
    assert value(db, IDENTIFIER) != upgraded.identifier
    assert value(db, "select status from ulak.health_check() where component = 'cluster'") == "ok"
    assert len(column(db, CLAIM)) == 1


def test_what_was_held_before_stays_held(upgraded: Upgraded) -> None:
    with upgraded.cluster.connect("held") as db:
        assert column(db, CLAIM) == []
        db.execute("call ulak.run_maintenance()")
        assert column(db, CLAIM) == []


def test_a_dump_that_was_made_before_maintenance_is_held_elsewhere(
    upgraded: Upgraded, cluster: Cluster, empty_database: str, db: DB, tmp_path: Path
) -> None:
    """It names the cluster that was, and lacks what pg_upgrade took along."""
    assert column(db, "select system_identifier from ulak_private.cluster_identity") == [upgraded.identifier]

    cluster.restore(empty_database, upgraded.cluster.dump("shop", tmp_path / "dump"))

    with cluster.connect(empty_database) as restored:
        assert column(restored, CLAIM) == []


def test_maintenance_writes_down_which_cluster_it_is_now(upgraded: Upgraded, db: DB) -> None:
    for _ in range(2):
        db.execute("call ulak.run_maintenance()")

    identifier = value(db, IDENTIFIER)
    for table in ("cluster_identity", "cluster_home"):
        assert column(db, f"select system_identifier from ulak_private.{table}") == [identifier]
    event = "select old_value, new_value from ulak.event_log where event = 'cluster.upgraded'"
    assert db.execute(event).fetchall() == [([str(upgraded.identifier)], [str(identifier)])]
