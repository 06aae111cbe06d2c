"""pg_upgrade goes on delivering by itself; a dump that is restored into a newer server holds its messages until adopt()."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from support import catalog
from support.cluster import Cluster, major, run
from support.finished import column, value
from support.recorder import Behaviour, Recorder
from support.rows import fill
from support.sessions import wait_until

DB = psycopg.Connection[Any]

OLDER = os.environ["ULAK_OLDER"]
# As the quick start has it: pg_cron lives where ulak does.
SETTINGS = {"cron.database_name": "shop", "cron.max_running_jobs": 8, "max_worker_processes": 12}


@pytest.fixture(scope="module")
def recorder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorder]:
    with Recorder(tmp_path_factory.mktemp("recorder") / "arrivals") as recorder:
        yield recorder


@pytest.fixture(scope="module")
def old(recorder: Recorder) -> Iterator[Cluster]:
    """Messages in every state, some in flight; workers under pg_cron, which has delivered something."""
    cluster = Cluster.create(settings=SETTINGS, pg_config=OLDER)
    cluster.create_database("shop")
    # pg_cron's launcher ends where its database isn't there yet.
    cluster.restart()
    cluster.execute("create extension pg_cron", "shop")
    cluster.install("shop")
    cluster.execute("create role clerk login in role ulak_application")
    with cluster.connect("shop") as db:
        db.execute("select ulak.configure('http_allowed_networks', '127.0.0.0/8')")
        fill(db)
        db.execute("select ulak.disable_endpoint('filled_http')")
        db.execute(
            "select ulak.create_endpoint('web', 'http', jsonb_build_object('url', %s::text))", [recorder.url("/web")]
        )
        db.execute("create table orders (id bigint generated always as identity primary key, note text)")
        db.execute("insert into orders (note) values ('before')")
        assert "problem" not in column(db, "select status from ulak.start()")
        db.execute("select ulak.send('web', jsonb_build_object('token', n)) from generate_series(1, 10) n")
        wait_until(lambda: value(db, "select count(*) from ulak.messages where status = 'completed'") >= 10)
    yield cluster
    cluster.remove()


def send_what_is_held(db: DB, recorder: Recorder) -> None:
    """In flight, and waiting behind it in its ordering key, when the server goes down."""
    recorder.behave("/web", Behaviour(hold=True))
    send = (
        "select ulak.send('web', jsonb_build_object('token', n), p_ordering_key => 'k') from generate_series(11, 15) n"
    )
    db.execute(send)
    wait_until(lambda: value(db, "select count(*) from ulak.queue where status = 'processing' and ordering_key = 'k'"))


class Upgraded:
    """What was in the old cluster, and the new one, in which pg_cron isn't loaded yet."""

    def __init__(self, old: Cluster, recorder: Recorder) -> None:
        with old.connect("shop") as db:
            send_what_is_held(db, recorder)
        old.stop()
        recorder.release("/web")
        old.configure({"shared_preload_libraries": ""})
        old.start()
        with old.connect("shop") as db:
            self.rows = catalog.contents(db)
            self.identifier = value(db, "select system_identifier from pg_control_system()")
        old.stop()
        old.configure({"shared_preload_libraries": "pg_cron"})
        self.cluster = Cluster.create(settings=SETTINGS)
        self.cluster.stop()
        self.cluster.take_over(old)
        self.cluster.configure({"shared_preload_libraries": ""})
        self.cluster.start()


@pytest.fixture(scope="module")
def dumps(old: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Taken before the upgrade, by the programs of either version."""
    folder = tmp_path_factory.mktemp("dumps")
    old.dump("shop", folder / "whole", "--format=custom")
    parts = ["--format=custom", "--schema=ulak", "--schema=ulak_private", "--extension=ulak"]
    old.dump("shop", folder / "schema", *parts)
    old.dump("shop", folder / "data", *parts, "--data-only", "--load-via-partition-root")
    newer = Cluster(folder)
    if major() >= 17:
        newer_dump = [newer.bin / "pg_dump", "-d", old.dsn("shop"), "--exclude-extension=pg_cron"]
        run([*newer_dump, "--exclude-schema=cron", "-f", folder / "excluding"])
    return folder


@pytest.fixture(scope="module")
def upgraded(old: Cluster, recorder: Recorder, dumps: Path) -> Iterator[Upgraded]:
    upgraded = Upgraded(old, recorder)
    yield upgraded
    upgraded.cluster.remove()


@pytest.fixture
def db(upgraded: Upgraded) -> Iterator[DB]:
    with upgraded.cluster.connect("shop") as connection:
        yield connection


# In this order: the first ones look at what came over, then pg_cron is let loose.


def test_pg_upgrade_brings_every_row(upgraded: Upgraded, db: DB) -> None:
    after = catalog.contents(db)

    assert catalog.lost(upgraded.rows, after) == catalog.lost(after, upgraded.rows) == []


def test_pg_upgrade_leads_to_what_the_newer_server_would_install(upgraded: Upgraded, db: DB) -> None:
    upgraded.cluster.create_database("fresh")
    upgraded.cluster.install("fresh")
    with upgraded.cluster.connect("fresh") as fresh:
        found, expected = (catalog.without_view_texts(catalog.snapshot(each)) for each in (db, fresh))
        assert catalog.differences(found, expected) == []


def test_pg_upgrade_brings_roles_with_their_members(upgraded: Upgraded) -> None:
    with upgraded.cluster.connect("shop", "clerk") as clerk:
        clerk.execute("select ulak.send('web', '{\"token\": \"clerk\"}')")


def test_nothing_is_held_after_pg_upgrade(upgraded: Upgraded, db: DB) -> None:
    identifier = value(db, "select system_identifier from pg_control_system()")

    assert identifier != upgraded.identifier
    assert column(db, "select system_identifier from ulak_private.cluster_identity") == [upgraded.identifier]
    assert value(db, "select status from ulak.health_check() where component = 'cluster'") == "ok"
    assert value(db, "select count(*) from ulak.start() where item = 'cluster'") == 0
    assert value(db, """select count(*) from ulak.doctor() where "check" = 'cluster'""") == 0


def test_a_dump_of_the_upgraded_cluster_is_held_elsewhere(upgraded: Upgraded, db: DB, tmp_path: Path) -> None:
    """Also before maintenance has written down the new identifier: the dump lacks what pg_upgrade took along."""
    other = Cluster.create()
    try:
        other.create_database("restored")
        dump = upgraded.cluster.dump("shop", tmp_path / "dump", "--format=custom")
        restore_without_pg_cron(other, "restored", dump)
        with other.connect("restored") as restored:
            assert value(restored, "select ulak_private.is_adopted()") is False
    finally:
        other.remove()


def test_delivery_goes_on_by_itself_after_pg_upgrade(upgraded: Upgraded, recorder: Recorder) -> None:
    before = recorder.count()
    upgraded.cluster.configure({"shared_preload_libraries": "pg_cron"})
    upgraded.cluster.restart()
    with upgraded.cluster.connect("shop") as db:
        db.execute("select ulak.send('web', jsonb_build_object('token', n)) from generate_series(16, 25) n")
        waiting = """
            select count(*) from ulak.queue q join ulak.endpoints e on e.id = q.endpoint_id
            where e.name = 'web' and status in ('pending', 'processing')
        """
        wait_until(lambda: value(db, waiting) == 0, "everything to be delivered")

        assert recorder.count() >= before + 16
        event = "select old_value, new_value from ulak.event_log where event = 'cluster.upgraded'"
        wait_until(lambda: db.execute(event).fetchall(), "maintenance")
        identifier = value(db, "select system_identifier from pg_control_system()")
        assert db.execute(event).fetchall() == [([str(upgraded.identifier)], [str(identifier)])]
        assert column(db, "select system_identifier from ulak_private.cluster_identity") == [identifier]
        assert column(db, "select system_identifier from ulak_private.cluster_home") == [identifier]


def test_the_newer_pg_cron_is_used_after_its_update_and_start(upgraded: Upgraded, recorder: Recorder) -> None:
    with upgraded.cluster.connect("shop") as db:
        if upgraded.cluster.cron_waits_for_the_longest_job():
            pytest.skip("this pg_cron is as old as the other")
        assert value(db, "select ulak_private.has_seconds()") is False

        db.execute("alter extension pg_cron update")

        assert "problem" not in column(db, "select status from ulak.start()")
        schedules = "select distinct schedule from cron.job where jobname like 'ulak worker%%'"
        assert column(db, schedules) == ["2 seconds"]
        assert value(db, "select count(*) from cron.job where jobname like 'ulak watcher%%'") == 0
        before = recorder.count()
        db.execute("select ulak.send('web', '{\"token\": \"last\"}')")
        wait_until(lambda: recorder.count() > before, "the last delivery")


def restore_without_pg_cron(cluster: Cluster, database: str, dump: Path) -> None:
    """pg_cron can only be in one database of a cluster, and its jobs are for the cluster that they were made in."""
    contents = run([cluster.bin / "pg_restore", "--list", dump])
    wanted = dump.with_suffix(".list")
    wanted.write_text("".join(line for line in contents.splitlines(True) if "cron" not in line))
    cluster.restore(database, dump, f"--use-list={wanted}")


def restored_rows(db: DB) -> list[tuple[Any, ...]]:
    tables = ["queue", "dlq", "archive"]
    return db.execute(
        " union all ".join(f"select '{t}', status, count(*) from ulak.{t} group by 2" for t in tables)
        + " order by 1, 2"
    ).fetchall()


@pytest.mark.parametrize("kind", ["whole", "excluding", "schema", "data"])
def test_a_dump_of_the_older_server_is_held_by_the_newer(upgraded: Upgraded, dumps: Path, kind: str) -> None:
    """Into another database name, in the cluster that pg_upgrade made: its identifier isn't the old one."""
    dump = dumps / kind
    if not dump.exists():
        pytest.skip("pg_dump has no --exclude-extension before 17")
    cluster = upgraded.cluster
    name = cluster.create_database(f"restored_{kind}")
    if kind == "schema":
        cluster.execute("create extension plpython3u", name)
    elif kind == "data":
        cluster.install(name)
    if kind == "whole":
        restore_without_pg_cron(cluster, name, dump)
    else:
        cluster.restore(name, dump)

    with cluster.connect(name) as db:
        assert value(db, "select ulak_private.is_adopted()") is False
        assert value(db, "select count(*) from ulak.claim('w', 100, 'filled_pull')") == 0
        before = restored_rows(db)
        assert {table for table, _, _ in before} == {"queue", "dlq", "archive"}
        assert value(db, "select ulak.adopt()") > 0
        assert value(db, "select count(*) from ulak.claim('w', 100, 'filled_pull')") > 0
        db.execute("call ulak.run_maintenance()")
        assert column(db, "select last_error from ulak.maintenance_status where last_error is not null") == []
        db.execute("call ulak.run_worker(1, 0.1)")
