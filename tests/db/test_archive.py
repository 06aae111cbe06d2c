"""Finished messages move to the archive: whole, oldest first, and only when they are old enough."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from support.cluster import Connect
from support.finished import column, finish, value

DB = psycopg.Connection[Any]

NOW = datetime(2031, 3, 15, 12, tzinfo=UTC)
LONG_AGO = NOW - timedelta(hours=2)

QUEUED = "select id from ulak.queue order by id"
ARCHIVED = "select id from ulak.archive order by id"


def archive(db: DB, older_than: int | None = 3600, batch: int | None = 1000, now: datetime = NOW) -> Any:
    return value(db, "select ulak.archive_completed_messages(%s, %s, %s)", older_than, batch, now)


@pytest.mark.parametrize("status", ["completed", "failed", "expired"])
def test_a_finished_message_arrives_with_everything_it_had(alone: DB, status: str) -> None:
    alone.execute(
        """
        insert into ulak_private.deliveries (
            endpoint_id, next_retry_at, created_at, updated_at, processing_started_at, completed_at, failed_at,
            first_failed_at, scheduled_at, expires_at, correlation_id, generation, attempts, retry_count, priority,
            status, payload, last_error, idempotency_key, payload_hash, ordering_key, headers, metadata, response,
            failure_history, made_from
        )
        select
            7, t + interval '1 s', t, t + interval '2 s', t + interval '3 s', t + interval '4 s', t + interval '5 s',
            t + interval '6 s', t, t + interval '7 s', gen_random_uuid(), 8, 9, 4, 5,
            %s, '{"a": 1}', '[RETRYABLE] no', 'i', 'h', 'o', '{"b": 2}', '{"c": 3}', '{"d": 4}',
            '[{"e": 5}]', 6
        from (select %s::timestamptz) as message (t)
        """,
        [status, LONG_AGO],
    )
    sent = value(alone, "select to_jsonb(q) from ulak.queue q")
    assert {name for name, cell in sent.items() if cell is None} == {
        "lease_until",
        "locked_by",
        "max_retries",
        "sent_by",
    }

    assert archive(alone) == 1

    assert value(alone, "select to_jsonb(a) - 'archived_at' from ulak.archive a") == sent
    assert value(alone, "select archived_at from ulak.archive") == NOW
    assert column(alone, QUEUED) == []


def test_every_column_of_the_queue_is_in_the_archive(alone: DB) -> None:
    columns = """
        select attname, atttypid::regtype::text from pg_attribute
        where attrelid = %s::regclass and attnum > 0 and not attisdropped
    """

    queue = set(alone.execute(columns, ["ulak.queue"]).fetchall())
    archived = set(alone.execute(columns, ["ulak.archive"]).fetchall())

    assert archived - queue == {("archived_at", "timestamp with time zone")}
    assert queue - archived == set()


def test_messages_that_wait_or_are_in_flight_stay(alone: DB) -> None:
    alone.execute(
        """
        insert into ulak_private.deliveries (endpoint_id, payload, updated_at, status, locked_by, lease_until)
        values (1, '{}', %(t)s, 'pending', null, null), (1, '{}', %(t)s, 'processing', 'worker', %(t)s)
        """,
        {"t": LONG_AGO},
    )

    assert archive(alone, 0) == 0


def test_a_message_stays_until_it_has_been_done_for_long_enough(alone: DB) -> None:
    finish(alone, at=LONG_AGO)
    hour_later = LONG_AGO + timedelta(hours=1)

    assert archive(alone, 3600, now=hour_later) == 0
    assert archive(alone, 3600, now=hour_later + timedelta(microseconds=1)) == 1


def test_without_an_age_the_setting_decides(alone: DB) -> None:
    finish(alone, at=NOW - timedelta(seconds=100))
    alone.execute("select ulak.configure('archive_after', '101')")

    assert archive(alone, None) == 0
    alone.execute("select ulak.configure('archive_after', '99')")
    assert archive(alone, None) == 1


def test_the_oldest_go_first_and_no_more_than_asked_for(alone: DB) -> None:
    late, early, middle = (finish(alone, at=LONG_AGO + timedelta(minutes=minute))[0] for minute in (3, 1, 2))

    assert archive(alone, batch=2) == 2

    assert column(alone, ARCHIVED) == sorted([early, middle])
    assert column(alone, QUEUED) == [late]


def test_a_locked_message_is_left_for_later(db: DB, connect: Connect) -> None:
    locked, free = finish(db, 2, at=LONG_AGO)
    other = connect(autocommit=False)
    other.execute("select from ulak.queue where id = %s for update", [locked])
    db.execute("set lock_timeout = '1s'")

    assert archive(db) == 1

    assert column(db, ARCHIVED) == [free]
    other.rollback()
    assert archive(db) == 1


def test_a_move_that_is_rolled_back_leaves_all_where_it_was(alone: DB) -> None:
    ids = finish(alone, 3, at=LONG_AGO)

    with alone.transaction(force_rollback=True):
        assert archive(alone) == 3

    assert column(alone, QUEUED) == ids
    assert column(alone, ARCHIVED) == []


@pytest.mark.parametrize(("older_than", "batch"), [(-1, 10), (0, 0), (0, -1), (0, None)])
def test_nonsense_is_refused(alone: DB, older_than: int, batch: int | None) -> None:
    with pytest.raises(psycopg.errors.InvalidParameterValue), alone.transaction():
        archive(alone, older_than, batch)


@pytest.mark.parametrize("statistics", ["missing", "of an empty queue", "of a queue without finished messages"])
def test_a_batch_never_reads_the_whole_queue_whatever_the_statistics_say(db: DB, statistics: str) -> None:
    db.execute("alter table ulak_private.deliveries set (autovacuum_enabled = off)")
    if statistics == "of an empty queue":
        db.execute("analyze ulak_private.deliveries")
    db.execute(
        "insert into ulak_private.deliveries (endpoint_id, payload) select 1, '{}' from generate_series(1, 5000)"
    )
    if statistics == "of a queue without finished messages":
        db.execute("analyze ulak_private.deliveries")
    finish(db, 3000, at=LONG_AGO)
    read = """
        select seq_scan, seq_tup_read, idx_tup_fetch from pg_stat_xact_all_tables where relid = 'ulak_private.deliveries'::regclass
    """

    with db.transaction():
        before = db.execute(read).fetchone()
        assert archive(db, batch=100) == 100
        after = db.execute(read).fetchone()

    assert before is not None
    assert after is not None
    scans, rows_by_scan, rows_by_index = (now - then for then, now in zip(before, after, strict=True))
    assert (scans, rows_by_scan) == (0, 0)
    assert rows_by_index <= 200


def test_a_batch_that_goes_on_where_the_last_one_ended_passes_no_dead_rows(db: DB, connect: Connect) -> None:
    """While an old snapshot keeps vacuum from removing them, every batch would otherwise visit all earlier rows."""
    finish(db, 2000, at=LONG_AGO)
    old = connect(autocommit=False)
    old.execute("set transaction isolation level repeatable read")
    old.execute("select from ulak.queue limit 1")
    batch = "select moved, reached from ulak_private.archive_batch(%s, %s, 1000, %s)"
    moved, reached = db.execute(batch, [NOW, "-infinity", NOW]).fetchone() or (0, None)
    assert moved == 1000

    visited = "select pg_stat_get_xact_tuples_returned('ulak_private.deliveries_finished_idx'::regclass)"
    with db.transaction():
        before = value(db, visited)
        db.execute(batch, [NOW, reached, NOW])
        after = value(db, visited)

    assert 1000 <= after - before <= 1001
    assert value(db, "select count(*) from ulak.archive") == 2000
