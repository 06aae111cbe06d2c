"""A dump that is restored into another cluster sends nothing by itself; the same cluster and its standby go on."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from support.cluster import Cluster, run
from support.finished import column, value
from support.messages import insert_messages
from support.plain import create_cluster
from support.ports import start_on_free_port
from support.rows import fill
from support.sessions import wait_until

DB = psycopg.Connection[Any]

CLAIM = "select id from ulak.claim('w', 100, 'shop')"


@pytest.fixture(scope="module")
def other_cluster() -> Iterator[Cluster]:
    cluster = create_cluster(in_memory=True)
    yield cluster
    cluster.remove()


def send(db: DB, count: int = 1) -> None:
    if value(db, "select count(*) from ulak.endpoints where name = 'shop'") == 0:
        db.execute("select ulak.create_endpoint('shop', 'pull', '{}')")
    db.execute("select ulak.send('shop', '{}') from generate_series(1, %s)", [count])


def pretend_to_be_restored(db: DB) -> None:
    db.execute("update ulak_private.cluster_identity set system_identifier = 1")


def test_an_installation_delivers_at_once(db: DB) -> None:
    send(db, 2)

    assert value(db, "select ulak_private.is_adopted()") is True
    assert len(column(db, CLAIM)) == 2


def test_adopting_what_is_adopted_changes_nothing(db: DB) -> None:
    send(db)
    before = value(db, "select recorded_at from ulak_private.cluster_identity")

    assert value(db, "select ulak.adopt()") == 0

    assert value(db, "select recorded_at from ulak_private.cluster_identity") == before
    assert value(db, "select count(*) from ulak.event_log where event = 'cluster.adopted'") == 0


def test_a_restored_dump_holds_its_messages_until_it_is_adopted(
    cluster: Cluster, other_cluster: Cluster, database: str, db: DB, tmp_path: Path
) -> None:
    fill(db)
    send(db, 3)
    rows = "select 'queue', status, count(*) from ulak.queue group by 2"
    for table in ("dlq", "archive"):
        rows += f" union all select '{table}', status, count(*) from ulak.{table} group by 2"
    rows += " order by 1, 2"
    other_cluster.create_database("restored")

    other_cluster.restore("restored", cluster.dump(database, tmp_path / "dump", "--format=custom"))

    with other_cluster.connect("restored") as restored:
        assert restored.execute(rows).fetchall() == db.execute(rows).fetchall()
        assert value(restored, "select ulak_private.is_adopted()") is False
        assert column(restored, CLAIM) == []
        before = restored.execute(rows).fetchall()
        restored.execute("call ulak.run_maintenance('2100-01-01')")
        assert restored.execute(rows).fetchall() == before
        # New messages are accepted, and held with the others.
        send(restored)
        assert column(restored, CLAIM) == []
        live = value(restored, "select count(*) from ulak.queue where status in ('pending', 'processing')")

        assert value(restored, "select ulak.adopt()") == live

        assert len(column(restored, CLAIM)) == 4
        event = restored.execute(
            "select old_value, new_value, detail from ulak.event_log where event = 'cluster.adopted'"
        ).fetchall()
        ours = [str(value(session, "select system_identifier from pg_control_system()")) for session in (db, restored)]
        assert event == [([ours[0]], [ours[1]], {"released": live})]
    # What was restored there has no effect here.
    assert len(column(db, CLAIM)) == 3


def test_a_dump_restored_into_its_own_cluster_goes_on(
    cluster: Cluster, database: str, empty_database: str, db: DB, tmp_path: Path
) -> None:
    send(db, 2)
    dump = cluster.dump(database, tmp_path / "dump")

    cluster.restore(empty_database, dump)

    with cluster.connect(empty_database) as restored:
        assert len(column(restored, CLAIM)) == 2


def test_data_restored_into_a_fresh_installation_is_held_too(db: DB) -> None:
    """The installation has written its own identifier by then, and the other one comes on top."""
    db.execute("insert into ulak_private.cluster_identity (system_identifier) values (1)")
    send(db)

    assert column(db, CLAIM) == []
    assert value(db, "select ulak.adopt()") == 1
    assert value(db, "select count(*) from ulak_private.cluster_identity") == 1
    assert len(column(db, CLAIM)) == 1


def test_a_promoted_standby_goes_on_without_a_word(
    other_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other_cluster.install(other_cluster.create_database("primary"))
    with other_cluster.connect("primary") as primary:
        send(primary, 2)
    standby = Cluster(tmp_path_factory.mktemp("standby"))
    # Not every server that these tests run on has pg_basebackup.
    other_cluster.stop()
    shutil.copytree(other_cluster.data, standby.data)
    other_cluster.start()
    (standby.data / "standby.signal").touch()
    standby.configure({"primary_conninfo": other_cluster.dsn(user=other_cluster.superuser), "hot_standby": True})
    start_on_free_port(standby.start_at)
    try:
        standby.promote()
        with standby.connect("primary") as promoted:
            wait_until(lambda: not value(promoted, "select pg_is_in_recovery()"))

            assert len(column(promoted, CLAIM)) == 2
            assert value(promoted, "select timeline from ulak_private.cluster_home") == 1
            promoted.execute("call ulak.run_maintenance()")
            assert value(promoted, "select timeline from ulak_private.cluster_home") == 2
    finally:
        standby.stop("immediate")


@pytest.mark.parametrize("target", ["time", "immediate"])
def test_a_cluster_that_was_recovered_to_a_target_holds_its_messages_until_it_is_adopted(
    tmp_path: Path, target: str
) -> None:
    """In the original's place: only the timeline's history shows it. Messages sent after the target are gone, and those delivered after it
    wait again."""
    archive = tmp_path / "archive"
    archive.mkdir()
    original = Cluster.create(in_memory=True, settings={"archive_mode": "on", "archive_command": f"cp %p {archive}/%f"})
    try:
        original.install(original.create_database("shop"))
        with original.connect("shop") as db:
            send(db, 3)
        backup = tmp_path / "backup"
        run([original.bin / "pg_basebackup", "-d", original.dsn(), "-D", backup, "-c", "fast", "--no-sync"])
        with original.connect("shop") as db:
            moment = value(db, "select clock_timestamp()::text")
            db.execute("select ulak.complete(c.id, 'w', c.attempt) from ulak.claim('w', 3, 'shop') c")
            db.execute("select pg_switch_wal()")
            wait_until(lambda: value(db, "select last_archived_wal is not null from pg_stat_archiver"))
        original.stop()
        shutil.rmtree(original.data)
        shutil.copytree(backup, original.data)
        original.configure(
            {
                "restore_command": f"cp {archive}/%f %p",
                **({"recovery_target": "immediate"} if target == "immediate" else {"recovery_target_time": moment}),
                "recovery_target_action": "promote",
            }
        )
        (original.data / "recovery.signal").touch()

        original.start()

        with original.connect("shop") as db:
            wait_until(lambda: not value(db, "select pg_is_in_recovery()"))
            assert value(db, "select count(*) from ulak.queue where status = 'pending'") == 3
            assert column(db, CLAIM) == []
            (finding,) = column(db, """select finding from ulak.doctor() where "check" = 'cluster'""")
            why = "reached consistency" if target == "immediate" else "before 20"
            assert finding.startswith(f"these messages come from a recovery that was stopped ({why}")
            (told,) = column(db, "select detail from ulak.start() where item = 'cluster'")
            assert told == finding.replace("nothing is delivered", "they are held")
            assert value(db, "select what from ulak.explain(1) order by at nulls last limit 1 offset 1").endswith(
                "If this cluster is to deliver them: select ulak.adopt();"
            )
            db.execute("call ulak.run_maintenance()")
            assert column(db, CLAIM) == []

            assert value(db, "select ulak.adopt()") == 3

            assert len(column(db, CLAIM)) == 3
        # Its standbys have the same line in their history.
        original.configure({"recovery_target": "", "recovery_target_time": "", "restore_command": ""})
        standby = original.make_standby()
        try:
            original.stop("immediate")
            standby.promote()
            with standby.connect("shop") as db:
                assert value(db, "select ulak_private.is_adopted()") is True
        finally:
            standby.remove()
    finally:
        original.remove()


def test_maintenance_of_a_held_cluster_says_why_it_does_nothing(db: DB) -> None:
    insert_messages(db, endpoint_id=1, expires_at=value(db, "select now()") - timedelta(hours=2))
    pretend_to_be_restored(db)
    notices: list[str | None] = []
    db.add_notice_handler(lambda diagnostic: notices.append(diagnostic.message_hint))

    db.execute("call ulak.run_maintenance()")

    assert notices == ["If this cluster is to deliver them: select ulak.adopt();"]
    assert value(db, "select status from ulak.queue") == "pending"
    assert value(db, "select count(*) from ulak_private.maintenance_runs") == 0


def test_an_installation_that_took_itself_for_a_restore_is_completed_by_maintenance(
    cluster: Cluster, empty_database: str
) -> None:
    """row_security = off is how a restore is recognised; an administrator may have set it for other reasons."""
    with cluster.connect(empty_database) as db:
        db.execute("set row_security = off")
        db.execute("create extension ulak cascade")
        assert (
            value(
                db,
                "select count(*) from ulak_private.month_partitions where parent = 'ulak_private.archived'::regclass",
            )
            == 0
        )

        db.execute("call ulak.run_maintenance()")

        assert (
            value(
                db,
                "select count(*) from ulak_private.month_partitions where parent = 'ulak_private.archived'::regclass",
            )
            == 4
        )
        own = "select system_identifier from pg_control_system()"
        assert column(db, "select system_identifier from ulak_private.cluster_identity") == [value(db, own)]


def test_the_check_costs_a_claim_next_to_nothing(db: DB) -> None:
    db.execute("select ulak_private.is_adopted()")
    plan = value(db, "explain (analyze, format json) select ulak_private.is_adopted() from generate_series(1, 10000)")

    assert plan[0]["Execution Time"] / 10000 < 0.05
