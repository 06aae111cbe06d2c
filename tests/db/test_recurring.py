"""Recurring messages: a real pg_cron keeps the schedule, and each of its calls is one message."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row
from psycopg.types.json import Jsonb
from support.cluster import Cluster, Connect
from support.errors import refused

DB = psycopg.Connection[Any]

JOBS = (
    "select schedule, command, username, database from cron.job where jobname like 'ulak recurring %' order by jobname"
)


@pytest.fixture
def cron(cluster: Cluster, cron_database: str) -> Iterator[DB]:
    with cluster.connect(cron_database) as db:
        db.execute("select ulak.create_endpoint('shop', 'pull', '{}')")
        yield db


def schedule(db: DB, arguments: str) -> dict[str, Any]:
    with db.cursor(row_factory=dict_row) as cursor:
        (row,) = cursor.execute(f"select * from ulak.schedule({arguments})").fetchall()  # type: ignore[arg-type]
    return row


def test_a_schedule_is_one_job_that_its_name_replaces_and_ends(cron: DB) -> None:
    database = cron.info.dbname

    done = schedule(cron, "'daily', '0 6 * * *', 'shop', '1'")
    schedule(cron, "'hourly', '@hourly', 'shop', '2'")
    schedule(cron, "'daily', '0 7 * * *', 'shop', '3', 5, p_expires_after => '1 hour'")

    assert done == {"item": f"ulak recurring daily in {database}", "status": "done", "detail": "scheduled", "fix": None}
    assert cron.execute(JOBS).fetchall() == [
        (
            "0 7 * * *",
            "set transaction_read_only = off; select ulak_private.send_recurring('daily')",
            "ulak_worker",
            database,
        ),
        (
            "@hourly",
            "set transaction_read_only = off; select ulak_private.send_recurring('hourly')",
            "ulak_worker",
            database,
        ),
    ]
    query = "select name, cron, endpoint, payload, priority, expires_after::text from ulak.recurring_list order by name"
    assert cron.execute(query).fetchall() == [
        ("daily", "0 7 * * *", "shop", 3, 5, "01:00:00"),
        ("hourly", "@hourly", "shop", 2, 0, None),
    ]
    cron.execute("select * from ulak.unschedule('daily')")
    assert [row[0] for row in cron.execute(JOBS).fetchall()] == ["@hourly"]
    assert cron.execute("select name from ulak.recurring_list").fetchall() == [("hourly",)]


def test_what_pg_cron_calls_sends_once_for_each_minute(cluster: Cluster, cron: DB) -> None:
    schedule(
        cron,
        """
        'often', '* * * * *', 'shop', '{"n": 1}', 3, 'key', '{"x-a": "b"}', '{"c": "d"}', '1 hour'
        """,
    )
    command = cron.execute(JOBS).fetchall()[0][1]

    with cluster.connect(cron.info.dbname, "ulak_worker") as worker:
        cursor = worker.execute(command)
        cursor.nextset()
        first = cursor.fetchone()
        assert first is not None and first[0] is not None
    for _ in range(2):
        cron.execute("select ulak_private.send_recurring('often', '2030-01-01 00:00:59+00')")
    cron.execute("select ulak_private.send_recurring('often', '2030-01-01 00:01:00+00')")

    rows = cron.execute(
        """
        select idempotency_key, priority, ordering_key, headers, metadata, payload, expires_at is not null
        from ulak.queue order by id
        """
    ).fetchall()
    assert [row[0] for row in rows[1:]] == [
        "ulak.schedule often 2030-01-01T00:00Z",
        "ulak.schedule often 2030-01-01T00:01Z",
    ]
    assert [row[1:] for row in rows] == [(3, "key", {"x-a": "b"}, {"c": "d"}, {"n": 1}, True)] * 3
    assert cron.execute("select last_sent_at = '2030-01-01 00:01:00+00' from ulak.recurring_list").fetchone() == (True,)


def test_a_recurring_message_has_the_generation_of_the_setting(cron: DB) -> None:
    schedule(cron, "'often', '* * * * *', 'shop', '1'")
    cron.execute("select ulak.configure('generation', '4')")

    cron.execute("select ulak_private.send_recurring('often')")

    assert cron.execute("select generation from ulak.queue").fetchall() == [(4,)]


def test_a_job_whose_schedule_is_gone_sends_nothing(cron: DB) -> None:
    assert cron.execute("select ulak_private.send_recurring('gone')").fetchone() == (None,)
    assert cron.execute("select count(*) from ulak.queue").fetchone() == (0,)


def test_stop_leaves_what_recurs_and_a_start_brings_it_back(cron: DB) -> None:
    schedule(cron, "'daily', '0 6 * * *', 'shop', '1'")
    cron.execute("select cron.schedule('ulak worker 7 in ' || current_database(), '0 0 1 1 *', 'select 1')")

    cron.execute("select * from ulak.stop()")

    assert cron.execute("select count(*) from cron.job where jobname like 'ulak worker%'").fetchone() == (0,)
    assert len(cron.execute(JOBS).fetchall()) == 1
    wanted = "select schedule, command from ulak_private.wanted_jobs(1) where jobname like 'ulak recurring %'"
    assert cron.execute(wanted).fetchall() == [
        ("0 6 * * *", "set transaction_read_only = off; select ulak_private.send_recurring('daily')")
    ]


def test_where_pg_cron_lives_in_another_database_the_caller_is_told_what_to_run(cron: DB, db: DB) -> None:
    db.execute("select ulak.create_endpoint('shop', 'pull', '{}')")

    row = schedule(db, "'daily', '0 6 * * *', 'shop', '1'")

    assert row["status"] == "to do"
    before, command, after = row["fix"].split("$ulak$")
    assert (before, after) == ("select ", rf" as ulak \gset \c {cron.info.dbname} \\ :ulak \c {db.info.dbname}")
    cron.execute(command)
    assert cron.execute(JOBS).fetchall() == [
        (
            "0 6 * * *",
            "set transaction_read_only = off; select ulak_private.send_recurring('daily')",
            "ulak_worker",
            db.info.dbname,
        )
    ]
    with db.cursor(row_factory=dict_row) as cursor:
        (row,) = cursor.execute("select * from ulak.unschedule('daily')").fetchall()
    cron.execute(row["fix"].split("$ulak$")[1])
    assert cron.execute(JOBS).fetchall() == []


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ("'a b', '* * * * *', 'shop', '1'", "22023", "invalid name of a recurring message"),
        ("'a', '30 seconds', 'shop', '1'", "22023", "invalid cron expression '30 seconds'"),
        ("'a', '* * * *', 'shop', '1'", "22023", "invalid cron expression '* * * *'"),
        ("'a', null, 'shop', '1'", "22023", "invalid cron expression null"),
        ("'a', '99 * * * *', 'shop', '1'", "22023", "invalid schedule: 99 * * * *"),
        ("'a', '* * * * *', 'shpo', '1'", "42704", 'unknown endpoint "shpo"'),
        ("'a', '* * * * *', 'shop', null", "22004", "the payload is null"),
        ("'a', '* * * * *', 'shop', '1', 11", "22023", "priority must be between 0 and 10"),
        ("""'a', '* * * * *', 'shop', '1', p_headers => '{"host": "x"}'""", "42939", 'header "host" is reserved'),
        (
            "'a', '* * * * *', 'shop', '1', p_expires_after => '0'",
            "22023",
            "expires_after must be longer than 0 and at most a year",
        ),
    ],
)
def test_what_is_not_valid_is_refused(cron: DB, arguments: str, code: str, message: str) -> None:
    error = refused(cron, f"select * from ulak.schedule({arguments})")

    assert (error.sqlstate, (error.message_primary or "").replace("  ", " ")) == (code, message)
    assert cron.execute(JOBS).fetchall() == []
    assert cron.execute("select count(*) from ulak.recurring").fetchone() == (0,)


def test_an_unknown_name_can_not_be_unscheduled(cron: DB) -> None:
    schedule(cron, "'daily', '0 6 * * *', 'shop', '1'")

    error = refused(cron, "select * from ulak.unschedule('dayly')")

    assert (error.sqlstate, error.message_primary) == ("42704", 'nothing is scheduled by the name "dayly"')
    assert "daily" in (error.message_hint or "")


def test_without_pg_cron_the_error_says_how_to_get_it(cron: DB) -> None:
    cron.execute("drop extension pg_cron")
    try:
        error = refused(cron, "select * from ulak.schedule('a', '* * * * *', 'shop', '1')")
    finally:
        cron.execute("create extension pg_cron")

    assert (error.sqlstate, error.message_primary) == ("55000", "recurring messages need pg_cron")
    assert error.message_hint == "create extension pg_cron;"


def test_an_application_schedules_nothing(connect: Connect, db: DB) -> None:
    for role in ("ulak_application", "ulak_monitor", "ulak_worker"):
        assert refused(connect(role), "select * from ulak.schedule('a', '* * * * *', 'x', '1')").sqlstate == "42501"


def test_schedules_are_part_of_a_document(cron: DB) -> None:
    daily = {"cron": "0 6 * * *", "endpoint": "shop", "payload": {"a": None}, "priority": 5, "expires_after": "90 min"}
    document = {"schedules": {"daily": daily, "none": {"cron": "@hourly", "endpoint": "shop"}}}
    apply = "select name, action, fix from ulak.apply(%s, p_prune => true)"

    made = cron.execute(apply, [Jsonb(document)]).fetchall()
    jobs = cron.execute(JOBS).fetchall()
    again = cron.execute(apply, [Jsonb(document)]).fetchall()
    exported = cron.execute("select ulak.config() -> 'schedules'").fetchall()
    cron.execute("select * from ulak.apply(%s, true, true)", [Jsonb({"schedules": {}})])
    after_dry_run = cron.execute(JOBS).fetchall()
    altered = {"schedules": {"daily": {**daily, "cron": "0 7 * * *", "headers": {"x-a": "b"}}}}
    changed = cron.execute(apply, [Jsonb(altered)]).fetchall()

    assert made == [("daily", "create", None), ("none", "create", None)]
    assert [job[0] for job in jobs] == ["0 6 * * *", "@hourly"]
    assert again == []
    assert exported == [
        ({"daily": {**daily, "expires_after": "01:30:00"}, "none": {"cron": "@hourly", "endpoint": "shop"}},)
    ]
    assert after_dry_run == jobs
    assert changed == [("daily", "alter", None), ("none", "drop", None)]
    assert [job[0] for job in cron.execute(JOBS).fetchall()] == ["0 7 * * *"]


def test_where_pg_cron_lives_elsewhere_a_document_says_what_to_run(cron: DB, db: DB) -> None:
    db.execute("select ulak.create_endpoint('shop', 'pull', '{}')")
    document = {"schedules": {"daily": {"cron": "0 6 * * *", "endpoint": "shop", "payload": 1}}}

    ((action, fix),) = db.execute("select action, fix from ulak.apply(%s)", [Jsonb(document)]).fetchall()

    assert action == "create"
    assert "cron.schedule" in fix
