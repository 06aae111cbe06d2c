"""The archive's months: made in time, filled from the default partition, dropped when their time is over."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from support.cluster import Cluster, Connect
from support.finished import column, finish, value

DB = psycopg.Connection[Any]

PARTITIONS = (
    "select name from ulak_private.month_partitions where parent = 'ulak_private.archived'::regclass order by name"
)


def month(year: int, number: int, day: int = 1, hour: int = 0) -> datetime:
    return datetime(year, number, day, hour, tzinfo=UTC)


def maintain(db: DB, now: datetime, ahead: int = 3) -> Any:
    return value(db, "select ulak.maintain_archive_partitions(%s, %s)", ahead, now)


def cleanup(db: DB, months: int | None, now: datetime) -> Any:
    return value(db, "select ulak.cleanup_old_archive_partitions(%s, %s)", months, now)


def partition_of(db: DB, message: int) -> Any:
    return value(db, "select tableoid::regclass::text from ulak_private.archived where id = %s", message)


def longest_wait(db: DB, function: str) -> Any:
    """That a function waits for a lock."""
    settings = column(db, "select unnest(proconfig) from pg_proc where oid = %s::regproc", function)
    return dict(each.split("=", 1) for each in settings)["lock_timeout"]


def drop_months(db: DB) -> DB:
    """So that a test has a calendar of its own."""
    for name in column(db, "select name from ulak_private.month_partitions"):
        db.execute(f"drop table ulak_private.{name}")  # type: ignore[arg-type]
    return db


@pytest.fixture
def empty(alone: DB) -> DB:
    return drop_months(alone)


@pytest.fixture
def bare(db: DB) -> DB:
    """As `empty`, for tests with several sessions."""
    # A session that waits for a lock it must not need is cancelled before pytest's time-out.
    db.execute("set statement_timeout = '10min'")
    return drop_months(db)


def test_an_installation_has_this_month_and_the_next_three(alone: DB) -> None:
    expected = """
        select to_char(%s::timestamptz at time zone 'UTC' + make_interval(months => n), '"archive_"YYYY_MM')
        from generate_series(0, 3) n
    """
    now = value(alone, "select now()")

    # The month may have ended since it was installed.
    assert column(alone, PARTITIONS) in (column(alone, expected, now), column(alone, expected, now - timedelta(days=1)))


def test_months_are_ordinary_tables_and_no_members_of_the_extension(alone: DB) -> None:
    members = """
        select objid::regclass::text from pg_depend
        where deptype = 'e' and classid = 'pg_class'::regclass and objid::regclass::text ~ '^ulak_private.(archive|events)'
        order by 1
    """

    assert column(alone, members) == [
        "ulak_private.archive_default",
        "ulak_private.archived",
        "ulak_private.events",
        "ulak_private.events_default",
    ]


def test_nothing_is_made_where_nothing_is_missing(alone: DB) -> None:
    first = min(column(alone, PARTITIONS))

    assert maintain(alone, value(alone, "select to_timestamp(%s, '\"archive_\"YYYY_MM')", first)) == 0


@pytest.mark.parametrize("zone", ["UTC", "America/New_York", "Pacific/Kiritimati"])
@pytest.mark.parametrize("style", ["ISO", "German", "SQL, DMY"])
def test_months_begin_at_midnight_utc_wherever_the_session_is(empty: DB, zone: str, style: str) -> None:
    empty.execute(f"set local timezone = '{zone}'")  # type: ignore[arg-type]
    empty.execute(f"set local datestyle = '{style}'")  # type: ignore[arg-type]

    maintain(empty, datetime(2030, 12, 31, 23, 59, tzinfo=UTC), ahead=1)

    empty.execute("set local timezone = 'UTC'")
    empty.execute("set local datestyle = 'ISO'")
    bounds = """
        select relname, pg_get_expr(relpartbound, oid) from pg_class
        where relispartition and relname ~ '^archive_2' and relkind = 'r' order by 1
    """
    assert empty.execute(bounds).fetchall() == [
        ("archive_2030_12", "FOR VALUES FROM ('2030-12-01 00:00:00+00') TO ('2031-01-01 00:00:00+00')"),
        ("archive_2031_01", "FOR VALUES FROM ('2031-01-01 00:00:00+00') TO ('2031-02-01 00:00:00+00')"),
    ]


def test_the_last_instant_of_a_month_and_the_first_of_the_next_are_kept_apart(empty: DB) -> None:
    maintain(empty, month(2031, 2))
    last, first = (finish(empty, at=at)[0] for at in (month(2031, 3) - timedelta(microseconds=1), month(2031, 3)))

    assert partition_of(empty, last) == "ulak_private.archive_2031_02"
    assert partition_of(empty, first) == "ulak_private.archive_2031_03"


def test_each_month_s_end_makes_one_more_month(empty: DB) -> None:
    assert maintain(empty, month(2030, 10, 31, 23)) == 4
    assert maintain(empty, month(2030, 11)) == 1
    assert maintain(empty, month(2030, 11, 30, 23)) == 0
    assert maintain(empty, month(2030, 12)) == 1

    assert column(empty, PARTITIONS) == [f"archive_{name}" for name in (
        "2030_10", "2030_11", "2030_12", "2031_01", "2031_02", "2031_03",
    )]  # fmt: skip


def test_months_without_maintenance_are_made_up_for_and_the_default_is_emptied(empty: DB) -> None:
    maintain(empty, month(2030, 1), ahead=0)
    # Maintenance is off from February to April; workers archive on.
    messages = {at: finish(empty, 2, at=at) for at in (month(2030, n, 10) for n in (1, 2, 3, 4))}
    assert value(empty, "select count(*) from ulak_private.archive_default") == 6

    assert maintain(empty, month(2030, 5)) == 7

    assert value(empty, "select count(*) from ulak_private.archive_default") == 0
    for at, ids in messages.items():
        assert {partition_of(empty, id) for id in ids} == {f"ulak_private.archive_{at:%Y_%m}"}
    assert column(empty, PARTITIONS) == [f"archive_2030_{n:02}" for n in range(1, 9)]


def test_rows_of_a_far_month_in_the_default_get_their_month(empty: DB) -> None:
    old = finish(empty, at=month(2030, 6), created_at=month(1999, 12, 31, 23))[0]
    new = finish(empty, at=month(2030, 6), created_at=month(2050, 1))[0]
    before = column(empty, "select to_jsonb(a) from ulak.archive a order by id")

    maintain(empty, month(2030, 6), ahead=0)

    assert partition_of(empty, old) == "ulak_private.archive_1999_12"
    assert partition_of(empty, new) == "ulak_private.archive_2050_01"
    assert column(empty, "select to_jsonb(a) from ulak.archive a order by id") == before
    assert column(empty, PARTITIONS) == ["archive_1999_12", "archive_2030_06", "archive_2050_01"]


def test_a_month_made_from_the_default_is_like_any_other(empty: DB) -> None:
    finish(empty, at=month(2030, 6))

    maintain(empty, month(2030, 6), ahead=1)

    facts = """
        select
            (select array_agg(replace(pg_get_indexdef(indexrelid), relname, 'month') order by 1)
             from pg_index where indrelid = c.oid),
            (select array_agg(conname order by 1) from pg_constraint where conrelid = c.oid),
            relowner
        from pg_class c where relname = any (array['archive_2030_06', 'archive_2030_07']) order by relname
    """
    drained, fresh = empty.execute(facts).fetchall()
    assert drained == fresh
    assert [index.split(" USING ")[1] for index in drained[0]] == [
        "btree (id)",
        "brin (created_at) WITH (pages_per_range='64', autosummarize='on')",
        "btree (event_created_at) WHERE (event_created_at IS NOT NULL)",
    ]


@pytest.mark.parametrize("ahead", [-1, 121, None])
def test_a_nonsensical_number_of_months_is_refused(alone: DB, ahead: int | None) -> None:
    with pytest.raises(psycopg.errors.InvalidParameterValue), alone.transaction():
        alone.execute("select ulak.maintain_archive_partitions(%s)", [ahead])


def test_a_table_in_the_way_is_an_error_that_says_how_to_fix_it(empty: DB) -> None:
    maintain(empty, month(2030, 1))
    empty.execute("alter table ulak_private.archived detach partition ulak_private.archive_2030_02")

    with pytest.raises(psycopg.errors.DuplicateTable) as caught, empty.transaction():
        maintain(empty, month(2030, 1))

    empty.execute((caught.value.diag.message_hint or "").split(" or: ")[0].encode())
    assert maintain(empty, month(2030, 1)) == 0


def test_writers_of_existing_months_go_on_while_months_are_made(bare: DB, connect: Connect) -> None:
    maintain(bare, month(2030, 1), ahead=0)
    maintenance = connect(autocommit=False)
    maintain(maintenance, month(2030, 2))
    bare.execute("set lock_timeout = '1s'")

    finish(bare, at=month(2030, 1))

    maintenance.commit()
    assert len(column(bare, PARTITIONS)) == 5


def test_making_a_month_gives_up_soon_while_the_archive_is_being_read(bare: DB, connect: Connect) -> None:
    finish(bare, at=month(2030, 1))
    reader = connect(autocommit=False)
    reader.execute("select count(*) from ulak.archive")

    with pytest.raises(psycopg.errors.LockNotAvailable, match="in use") as caught:
        maintain(bare, month(2030, 1))

    assert caught.value.diag.message_detail == "Month 2030_01 was not created."
    assert longest_wait(bare, "ulak_private.make_archive_partition") == "500ms"
    assert column(bare, PARTITIONS) == []
    assert value(bare, "select count(*) from ulak_private.archive_default") == 1
    reader.rollback()
    assert maintain(bare, month(2030, 1)) == 4
    assert value(bare, "select count(*) from ulak_private.archive_default") == 0


def test_two_at_once_make_each_month_once(bare: DB, connect: Connect) -> None:
    first = connect(autocommit=False)
    assert maintain(first, month(2030, 1)) == 4
    second = connect()

    # The second waits for the first, not for long.
    with pytest.raises(psycopg.errors.LockNotAvailable):
        maintain(second, month(2030, 1))

    first.commit()
    assert maintain(second, month(2030, 1)) == 0


@pytest.mark.parametrize(
    ("retention", "now", "kept"),
    [
        (1, month(2030, 12, 31, 23), ["2030_11", "2030_12"]),
        (1, month(2031, 1), ["2030_12"]),
        (6, month(2030, 7), ["2030_01", "2030_02", "2030_03", "2030_04", "2030_05", "2030_06", "2030_07", "2030_08",
                             "2030_09", "2030_10", "2030_11", "2030_12"]),
        (6, month(2030, 8, 1), [f"2030_{n:02}" for n in range(2, 13)]),
        (6, month(2031, 2, 28), [f"2030_{n:02}" for n in range(8, 13)]),
        (120, month(2031, 1), [f"2030_{n:02}" for n in range(1, 13)]),
    ],
)  # fmt: skip
def test_retention_drops_the_months_that_are_over_and_no_other(
    empty: DB, retention: int, now: datetime, kept: list[str]
) -> None:
    maintain(empty, month(2030, 1), ahead=11)

    assert cleanup(empty, retention, now) == 12 - len(kept)

    assert column(empty, PARTITIONS) == [f"archive_{name}" for name in kept]


def test_without_a_retention_the_setting_decides_and_drops_are_logged(empty: DB) -> None:
    maintain(empty, month(2030, 1), ahead=5)
    empty.execute("select ulak.configure('archive_retention_months', '2')")

    assert cleanup(empty, None, month(2030, 5)) == 2

    logged = "select detail ->> 'partition' from ulak.event_log where event = 'archive.dropped' order by id"
    assert column(empty, logged) == ["archive_2030_01", "events_2030_01", "archive_2030_02", "events_2030_02"]


@pytest.mark.parametrize("retention", [0, -1])
def test_a_retention_below_one_month_is_refused(alone: DB, retention: int) -> None:
    with pytest.raises(psycopg.errors.InvalidParameterValue), alone.transaction():
        cleanup(alone, retention, month(2099, 1))


def test_retention_leaves_the_default_partition_and_what_an_administrator_attached(empty: DB) -> None:
    empty.execute("create table ulak_private.archive_before_2000 (like ulak_private.archived)")
    empty.execute(
        "alter table ulak_private.archived attach partition ulak_private.archive_before_2000 for values from (minvalue) to ('2000-01-01Z')"
    )

    assert cleanup(empty, 1, month(2040, 1)) == 0


def test_a_month_is_not_dropped_by_an_older_snapshot(bare: DB, connect: Connect) -> None:
    """It wouldn't see what has come to need an event of the month since."""
    maintain(bare, month(2030, 1), ahead=0)
    old = connect(autocommit=False)
    old.execute("set transaction isolation level repeatable read")

    with pytest.raises(psycopg.errors.ActiveSqlTransaction):
        cleanup(old, 1, month(2031, 1))

    assert column(bare, PARTITIONS) == ["archive_2030_01"]


def test_maintenance_drops_months_whatever_isolation_its_session_prefers(bare: DB) -> None:
    maintain(bare, month(2030, 1), ahead=0)
    bare.execute("set default_transaction_isolation = 'repeatable read'")

    bare.execute("call ulak.run_maintenance(%s)", [month(2031, 1)])

    assert "archive_2030_01" not in column(bare, PARTITIONS)
    assert value(bare, "show default_transaction_isolation") == "repeatable read"


def test_dropping_a_month_gives_up_soon_while_the_archive_is_being_read(bare: DB, connect: Connect) -> None:
    maintain(bare, month(2030, 1), ahead=0)
    reader = connect(autocommit=False)
    reader.execute("select count(*) from ulak.archive")

    with pytest.raises(psycopg.errors.LockNotAvailable, match="in use") as caught:
        cleanup(bare, 1, month(2031, 1))

    assert caught.value.diag.message_detail == "Month 2030_01 was not dropped."
    assert longest_wait(bare, "ulak_private.drop_archive_partition") == "100ms"
    assert column(bare, PARTITIONS) == ["archive_2030_01"]


def test_a_million_messages_of_ten_months_need_a_fortieth_of_a_b_tree(bare: DB) -> None:
    maintain(bare, month(2030, 1), ahead=9)
    for name in column(bare, PARTITIONS):
        # What the test doesn't need costs it time.
        bare.execute(f"alter table ulak_private.{name} set unlogged")  # type: ignore[arg-type]
        bare.execute(f"drop index ulak_private.{name}_id_idx")  # type: ignore[arg-type]
    bare.execute(
        """
        insert into ulak_private.archived (id, endpoint_id, event_id, message_id, status, created_at)
        select n, 1, 0, '00000000-0000-0000-0000-000000000000', 'completed', '2030-01-01Z'::timestamptz + n * interval '26 s'
        from generate_series(0, 999999) n
        """
    )
    assert value(bare, "select count(*) from ulak_private.archive_default") == 0
    sizes = {"brin": 0, "btree": 0}
    for name in column(bare, PARTITIONS):
        bare.execute("select brin_summarize_new_values(%s)", [f"ulak_private.{name}_created_at_idx"])
        bare.execute(f"create index {name}_btree on ulak_private.{name} (created_at)")  # type: ignore[arg-type]
        sizes["brin"] += value(bare, "select pg_relation_size(%s)", f"ulak_private.{name}_created_at_idx")
        sizes["btree"] += value(bare, "select pg_relation_size(%s)", f"ulak_private.{name}_btree")

    assert sizes["btree"] >= 40 * sizes["brin"]


def test_drop_extension_takes_months_along_that_were_made_later(cluster: Cluster, empty_database: str) -> None:
    cluster.install(empty_database)
    with cluster.connect(empty_database) as connection:
        maintain(connection, month(2040, 1))

        connection.execute("drop extension ulak")

        assert value(connection, "select to_regclass('ulak_private.archive_2040_01')") is None
