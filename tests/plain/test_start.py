"""start() and what it says where no worker runs in the database: maintenance alone, by pg_cron or by another scheduler."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from support.cluster import NO_PG_CRON
from support.errors import refused
from support.finished import column, value
from support.plain import OWNER, SUPERUSER, PlainCluster
from support.queue import DB
from support.sessions import wait_until

JOBS = "select jobname, username, database from cron.job order by jobname"
END_JOBS = """
    select pg_terminate_backend(pid) from pg_stat_activity
    where datname = current_database() and usename = current_user and backend_type = 'client backend' and pid <> pg_backend_pid()
"""


@pytest.fixture
def cron(plain: PlainCluster, plain_template: str) -> Iterator[DB]:
    """The owner's session where pg_cron lives. Another database has ulak: the roles have members, and are known."""
    name = plain.home_of_pg_cron()
    if name is None:
        pytest.skip(NO_PG_CRON)
    plain.install(name)
    with plain.connect(name) as connection:
        yield connection
        connection.execute("select cron.unschedule(jobid) from cron.job")
        # One that pg_cron has started in this minute.
        wait_until(lambda: connection.execute(END_JOBS).fetchall() == [], "the end of pg_cron's jobs")
    plain.uninstall(name)


def report(db: DB, call: str) -> list[tuple[Any, ...]]:
    return db.execute(f"select item, status, fix from {call}").fetchall()  # type: ignore[arg-type]


@pytest.mark.parametrize("call", ["ulak.start()", "ulak.start(0)"])
def test_pg_cron_runs_the_maintenance_as_the_owner(cron: DB, call: str) -> None:
    database = cron.info.dbname

    rows = cron.execute(f"select * from {call}").fetchall()  # type: ignore[arg-type]

    jobs = [f"ulak {what} in {database}" for what in ("log", "maintenance", "vacuum")]
    assert cron.execute(JOBS).fetchall() == [(name, OWNER, database) for name in jobs]
    assert [row[0] for row in rows if row[1] == "done"] == jobs
    assert [row for row in rows if row[1] == "problem"] == []
    assert [row[1] for row in cron.execute(f"select * from {call}").fetchall() if row[0] in jobs] == ["unchanged"] * 3


def test_what_pg_cron_runs_works_with_the_owners_rights(cron: DB) -> None:
    cron.execute("select * from ulak.start(0)")

    for (command,) in cron.execute("select command from cron.job where jobname not like 'ulak log %'").fetchall():
        cron.execute(command)
    # Several statements, which pg_cron sends as one.
    cron.execute(value(cron, "select command from cron.job where jobname like 'ulak log %%'"), prepare=False)
    cron.execute("reset search_path")

    # If pg_cron ran it at the same time, the one that came second left it to the first.
    states = "select distinct state from ulak.maintenance_status where step <> 'vacuum'"
    wait_until(lambda: column(cron, states) == ["ok"], "the end of each step")
    assert (
        value(cron, "select vacuum_count > 0 from pg_stat_all_tables where relid = 'ulak_private.deliveries'::regclass")
        is True
    )


def test_workers_are_a_problem_that_it_names(cron: DB) -> None:
    rows = report(cron, "ulak.start(2)")

    assert ("workers", "problem", "select * from ulak.start(0); -- has pg_cron run the maintenance") in rows
    assert rows[-1][:2] == ("schedule", "not done")
    assert cron.execute(JOBS).fetchall() == []


def test_stop_takes_the_jobs_out(cron: DB) -> None:
    cron.execute("select * from ulak.start(0)")

    cron.execute("select * from ulak.stop()")

    assert cron.execute(JOBS).fetchall() == []


def test_recurring_messages_are_sent_as_the_owner(cron: DB) -> None:
    cron.execute("select ulak.create_endpoint('shop', 'pull', '{}')")

    cron.execute("select * from ulak.schedule('never', '0 0 30 2 *', 'shop', '1')")

    assert cron.execute(JOBS).fetchall() == [(f"ulak recurring never in {cron.info.dbname}", OWNER, cron.info.dbname)]
    cron.execute(value(cron, "select command from cron.job"))
    assert value(cron, "select count(*) from ulak.queue") == 1
    cron.execute("select * from ulak.unschedule('never')")
    assert cron.execute(JOBS).fetchall() == []


def test_where_pg_cron_lives_elsewhere_the_owner_is_told_what_to_run_there(
    plain: PlainCluster, cron: DB, shop: DB
) -> None:
    plain.as_superuser(
        f"grant execute on function cron.schedule_in_database(text, text, text, text, text, boolean) to {OWNER}",
        cron.info.dbname,
    )
    (row,) = [row for row in shop.execute("select * from ulak.start(0)").fetchall() if row[0] == "schedule"]

    assert row[1:3] == ("to do", f'pg_cron lives in database "{cron.info.dbname}", where {OWNER} has to run this')
    assert row[3] == rf"select ulak_private.commands_elsewhere(0) as ulak \gset \c {cron.info.dbname} \\ :ulak \c shop"
    cron.execute(value(shop, "select ulak_private.commands_elsewhere(0)"))
    assert cron.execute(JOBS).fetchall() == [
        ("ulak log in shop", OWNER, cron.info.dbname),
        ("ulak maintenance in shop", OWNER, "shop"),
        ("ulak vacuum in shop", OWNER, "shop"),
    ]


def test_an_owner_that_may_not_use_pg_cron_gets_the_reason(plain: PlainCluster, cron: DB) -> None:
    cron.execute("""select ulak.create_endpoint('shop', 'http', '{"url": "https://example.com/"}')""")
    plain.as_superuser(f"revoke usage on schema cron from {OWNER}", cron.info.dbname)
    try:
        rows = report(cron, "ulak.start(0)")
        findings = column(cron, """select finding from ulak.doctor() where "check" = 'pg_cron'""")
    finally:
        plain.as_superuser(f"grant usage on schema cron to {OWNER}", cron.info.dbname)

    fix = f"grant usage on schema cron to {OWNER}; -- by an administrator of the server"
    assert ("pg_cron", "problem", fix) in rows
    assert findings == [f"role {OWNER} may not use it"]


@pytest.fixture(scope="module")
def without_pg_cron() -> Iterator[DB]:
    cluster = PlainCluster.create(settings={"shared_preload_libraries": ""}, in_memory=True)
    cluster.create_database("shop")
    cluster.install("shop")
    with cluster.connect("shop") as connection:
        yield connection
    cluster.remove()


def test_without_pg_cron_it_says_what_another_scheduler_has_to_run(without_pg_cron: DB) -> None:
    db = without_pg_cron

    rows = report(db, "ulak.start(0)")

    has_files = value(db, "select exists (select from pg_available_extensions where name = 'pg_cron')")
    fix = "load pg_cron and restart" if has_files else "install pg_cron"
    assert ("pg_cron", "problem", f"-- the way your service does it: {fix}") in rows
    # Nobody here is root.
    assert [row for row in rows if "apt-get" in (row[2] or "")] == []
    assert rows[-1][:2] == ("schedule", "not done")
    detail = value(db, "select detail from ulak.start(0) where item = 'schedule'")
    assert detail.endswith("Any other scheduler can run, each minute: call ulak.run_maintenance();")
    error = refused(db, "select * from ulak.schedule('daily', '0 6 * * *', 'shop', '1')")
    assert error.sqlstate in ("55000", "42704")


def test_a_member_of_ulak_worker_can_be_that_scheduler(without_pg_cron: DB) -> None:
    """Autovacuum does the rest."""
    db = without_pg_cron
    dsn = db.info.dsn + " user=test_ulak_worker"
    with psycopg.connect(dsn, autocommit=True) as scheduler:
        scheduler.execute("call ulak.run_maintenance()")

    assert column(db, "select distinct state from ulak.maintenance_status where step <> 'vacuum'") == ["ok"]
    assert value(db, "select rolsuper from pg_roles where rolname = %s", SUPERUSER) is True
