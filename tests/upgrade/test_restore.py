"""Dumps that are restored by parts, under another name, and with pg_cron in them; tables that are replicated beside ulak."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from support import catalog
from support.cluster import Cluster, CommandFailed, run
from support.finished import column, value
from support.rows import fill
from support.sessions import wait_until

DB = psycopg.Connection[Any]

# The workers and the maintenance runs of one cluster mean nothing in another.
NOT_CARRIED = [
    "ulak.workers: 1",
    "ulak_private.maintenance_runs: 1",
    "ulak_private.ordering_keys: 1",
    "ulak_private.schedule: 1",
]


@pytest.fixture(scope="module")
def other() -> Iterator[Cluster]:
    """Its pg_cron lives in a database of another name. A subscriber of a publication may connect to it."""
    settings = {"cron.database_name": "restored", "cron.max_running_jobs": 8, "wal_level": "logical"}
    cluster = Cluster.create(settings=settings, in_memory=True)
    yield cluster
    cluster.remove()


@pytest.fixture
def restored(other: Cluster) -> Iterator[str]:
    with other.database("restored") as name:
        yield name


@pytest.fixture
def shop(cluster: Cluster, cron_database: str) -> Iterator[DB]:
    """As the quick start has it: pg_cron and ulak in one database. Its jobs are there, and never run: February has no 30th."""
    with cluster.connect(cron_database) as db:
        fill(db)
        db.execute(
            """
            select cron.schedule_in_database(j.jobname, '0 0 30 2 *', j.command, j.database, j.username)
            from ulak_private.wanted_jobs(2) j
            """
        )
        yield db


def list_without_pg_cron(cluster: Cluster, dump: Path) -> str:
    contents = run([cluster.bin / "pg_restore", "--list", dump]).splitlines(keepends=True)
    wanted = dump.with_suffix(".list")
    wanted.write_text("".join(line for line in contents if "cron" not in line))
    return f"--use-list={wanted}"


def assert_carried(source: DB, target: DB) -> None:
    before, after = (catalog.contents(db, by_partition=False) for db in (source, target))
    # Each cluster has a home of its own.
    for rows in (before, after):
        del rows["ulak_private.cluster_home"]
    assert catalog.lost(before, after) == NOT_CARRIED
    lines = [line for line in catalog.lost(after, before) if not line.startswith("ulak_private.cluster_identity: ")]
    assert lines == []


def test_a_dump_with_pg_cron_in_it_is_restored_under_another_name(cluster: Cluster, shop: DB, tmp_path: Path) -> None:
    dump = cluster.dump(shop.info.dbname, tmp_path / "dump", "--format=custom")
    with cluster.database("renamed") as name:
        with pytest.raises(CommandFailed, match="can only create extension in database"):
            cluster.restore(name, dump, "--single-transaction")

        cluster.restore(name, dump, list_without_pg_cron(cluster, dump))

        with cluster.connect(name) as db:
            assert_carried(shop, db)
            assert catalog.differences(catalog.snapshot(shop), catalog.snapshot(db)) == []


def test_a_restored_table_is_watched_as_before_and_the_restore_itself_is_no_event(
    cluster: Cluster, db: DB, tmp_path: Path
) -> None:
    db.execute("select ulak.create_endpoint('shop', 'pull', '{}'), ulak.create_event_type('order.changed')")
    db.execute("select ulak.subscribe('order.changed', 'shop')")
    # In the restored table the columns have other numbers, and it has another oid.
    db.execute("create table orders (gone int, id int primary key, secret text, status text)")
    db.execute("alter table orders drop column gone")
    db.execute("select ulak.watch('orders', 'order.changed', p_columns => '{id,status}')")
    db.execute("insert into orders values (1, 'x', 'new')")
    dump = cluster.dump(db.info.dbname, tmp_path / "dump", "--format=custom")

    with cluster.database("watched") as name:
        cluster.restore(name, dump)
        with cluster.connect(name) as target:
            assert value(target, "select count(*) from ulak.queue") == 1
            target.execute("insert into orders values (2, 'x', 'new')")
            payloads = column(target, "select payload -> 'new' from ulak.queue order by id")
            assert payloads == [{"id": 1, "status": "new"}, {"id": 2, "status": "new"}]
            assert column(target, "select table_name from ulak.watch_list") == ["orders"]
            assert value(target, "select ulak.unwatch('orders', 'order.changed')") is True


# The schemas belong to the extension: without its name, pg_dump takes none of them, and none of their rows.
PARTS = ["--format=custom", "--schema=ulak", "--schema=ulak_private", "--extension=ulak"]


def test_the_schema_alone_is_restored_with_its_extension(
    cluster: Cluster, other: Cluster, restored: str, db: DB, tmp_path: Path
) -> None:
    fill(db)
    db.execute("create table orders (id integer)")
    dump = cluster.dump(db.info.dbname, tmp_path / "dump", *PARTS)
    other.execute("create extension plpython3u", restored)

    other.restore(restored, dump)

    with other.connect(restored) as target:
        assert_carried(db, target)
        assert catalog.differences(catalog.snapshot(db), catalog.snapshot(target)) == []
        assert value(target, "select ulak_private.is_adopted()") is False
        assert value(target, "select to_regclass('orders')") is None


def test_data_is_restored_into_a_fresh_installation_and_held(
    cluster: Cluster, other: Cluster, restored: str, db: DB, tmp_path: Path
) -> None:
    """Also messages of months that the installation has no partition for."""
    fill(db)
    db.execute("select ulak.maintain_archive_partitions()")
    dump = cluster.dump(db.info.dbname, tmp_path / "dump", *PARTS, "--data-only", "--load-via-partition-root")
    other.install(restored)

    other.restore(restored, dump)

    with other.connect(restored) as target:
        assert_carried(db, target)
        assert value(target, "select ulak_private.is_adopted()") is False
        held = value(target, "select count(*) from ulak.queue where status in ('pending', 'processing')")
        assert value(target, "select ulak.adopt()") == held
        target.execute("call ulak.run_maintenance()")
        assert column(target, "select last_error from ulak.maintenance_status where last_error is not null") == []
        assert value(target, "select count(*) from ulak_private.archive_default") == 0


def test_roles_that_are_missing_after_a_restore_are_reported_first(
    cluster: Cluster, other: Cluster, restored: str, db: DB, tmp_path: Path
) -> None:
    for role in ("bank app", "till"):
        db.execute(f'create role "{role}" in role ulak_application')
    try:
        db.execute("select ulak.create_endpoint('bank', 'pull', '{}')")
        db.execute("select ulak.grant_endpoint('bank', 'bank app', 'send'), ulak.grant_endpoint('bank', 'till')")
        db.execute("set role \"bank app\"; select ulak.send('bank', '{}'); reset role")
        dump = cluster.dump(db.info.dbname, tmp_path / "dump", *PARTS, "--data-only", "--load-via-partition-root")
    finally:
        for role in ("bank app", "till"):
            db.execute(f'drop role "{role}"')
    other.install(restored)
    other.restore(restored, dump)

    with other.connect(restored) as target:
        told = (
            "select \"check\", finding, fix from ulak.doctor() where severity = 'critical' and \"check\" <> 'settings'"
        )
        first, second, third = target.execute(told).fetchall()
        assert (first[0], second[0], third[0]) == ("missing roles", "missing roles", "cluster")
        assert first[1] == (
            'role "bank app" has grants on endpoints and has sent messages that wait, but does not exist in this cluster'
        )
        for _, _, fix in (first, second):
            target.execute(fix)
        assert [row[0] for row in target.execute(told).fetchall()] == ["cluster"]
        assert value(target, "select pg_has_role('till', 'ulak_consumer', 'usage')")
        target.execute('drop role "bank app"; drop role till')


@pytest.fixture
def jobs_of_another(cluster: Cluster, shop: DB, other: Cluster, restored: str, tmp_path: Path) -> Iterator[DB]:
    """A dump with pg_cron's jobs, restored beside the cluster that they are for."""
    dump = cluster.dump(shop.info.dbname, tmp_path / "dump", "--format=custom")
    # Its launcher has to find its database.
    other.restart()
    other.execute("create extension pg_cron", restored)
    other.restore(restored, dump)
    with other.connect(restored) as db:
        yield db


JOBS = """
    select distinct nodename, nodeport, database, split_part(jobname, ' in ', 2)
    from cron.job where jobname not like 'ulak log%' order by 4
"""


def test_jobs_that_a_restore_brought_are_named_and_put_right_by_start(cluster: Cluster, jobs_of_another: DB) -> None:
    """pg_cron would run them in the other cluster, whose address they have. Both have a database "postgres", and neither has "gone"."""
    db = jobs_of_another
    db.execute(
        "update cron.job set jobname = 'ulak vacuum in gone', database = 'gone' where jobname like 'ulak vacuum%'"
    )
    count = value(db, "select count(*) from cron.job")
    place = f"{cluster.host}:{cluster.port}"

    with db.transaction(force_rollback=True):
        findings = column(db, """select finding from ulak.doctor() where "check" = 'pg_cron'""")
        report = dict(db.execute("select item, detail from ulak.start()").fetchall())
        jobs = db.execute(JOBS).fetchall()

    assert f"{count} jobs run on {place}, which is not this server: it was promoted, restored or moved" in findings
    assert report["ulak vacuum in gone"] == "unscheduled"
    here = (db.info.host, db.info.port)
    assert jobs == [(*here, "postgres", "postgres"), (*here, "restored", "restored")]


def test_adopt_brings_jobs_here(jobs_of_another: DB) -> None:
    db = jobs_of_another

    assert value(db, "select ulak.adopt()") > 0

    assert db.execute(JOBS).fetchall() == [(db.info.host, db.info.port, "postgres", "postgres")]


# Replication of the user's own tables.

ORDERS = """
    create table orders (id integer primary key);
    create function announce() returns trigger language plpgsql as $$
    begin
        perform ulak.send('shop', jsonb_build_object('order', new.id));
        return new;
    end $$;
    create trigger announce after insert on orders for each row execute function announce();
    select ulak.create_endpoint('shop', 'pull', '{}');
"""
SENT = "select payload from ulak.queue order by id"


def test_rows_that_arrive_by_replication_are_announced_once(other: Cluster) -> None:
    """By the side that inserted them: triggers don't fire for what a subscription applies."""
    sides = []
    for name in ("publisher", "subscriber"):
        other.install(other.create_database(name))
        other.execute(ORDERS, name)
        sides.append(other.connect(name))
    publisher, subscriber = sides
    try:
        publisher.execute("insert into orders values (1)")
        publisher.execute("create publication orders for table orders")
        # Within one cluster, a subscription can't make its own slot.
        publisher.execute("select pg_create_logical_replication_slot('orders', 'pgoutput')")
        subscriber.execute(
            f"create subscription orders connection '{other.dsn('publisher')}' publication orders with (create_slot = false)"
        )

        publisher.execute("insert into orders values (2)")
        wait_until(lambda: column(subscriber, "select id from orders order by 1") == [1, 2], message="both orders")
        subscriber.execute("insert into orders values (3)")

        assert column(publisher, SENT) == [{"order": 1}, {"order": 2}]
        assert column(subscriber, SENT) == [{"order": 3}]
        assert all(value(side, "select ulak_private.is_adopted()") for side in sides)
    finally:
        subscriber.execute("drop subscription if exists orders")
        for side in sides:
            side.close()
        other.drop_database("subscriber")
        other.drop_database("publisher")


def test_everything_works_under_a_publication_for_all_tables(db: DB) -> None:
    """A row of a published table may be changed or deleted only if it can be identified."""
    db.execute("create publication everything for all tables")

    fill(db)
    db.execute("call ulak.run_worker(1, 0.1)")
    db.execute("select ulak.redrive_all()")
    for time in ("now()", "now() + interval '2 years'"):
        db.execute(f"call ulak.run_maintenance({time})")
    db.execute("insert into ulak_private.cluster_identity (system_identifier) values (0)")
    db.execute("select ulak.adopt()")

    assert column(db, "select last_error from ulak.maintenance_status where last_error is not null") == []


def test_every_table_that_ulak_changes_can_be_published(db: DB) -> None:
    """The months of the archive and of events are filled and dropped, but never changed."""
    unpublishable = column(
        db,
        """
        select c.oid::regclass::text
        from pg_class c
        where c.relnamespace::regnamespace::text in ('ulak', 'ulak_private')
            and c.relkind = 'r'
            and c.relpersistence = 'p'
            and c.relreplident <> 'f'
            and not exists (select from pg_index i where i.indrelid = c.oid and i.indisprimary)
        """,
    )

    assert [
        table for table in unpublishable if not table.startswith(("ulak_private.archive_2", "ulak_private.events_2"))
    ] == []
