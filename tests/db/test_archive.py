"""Finished messages move to the archive at once, and whole; the idempotency keys of delivered ones are kept for a time."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import psycopg
import pytest
from support.cluster import Connect
from support.messages import insert_messages
from support.queue import Queue

DB = psycopg.Connection[Any]

COLUMNS = """
    select attname, atttypid::regtype::text from pg_attribute where attrelid = %s::regclass and attnum > 0 and not attisdropped
"""


def whole(queue: Queue, **columns: Any) -> int:
    """A message with a value in every column that the caller doesn't give, but for what a claim sets."""
    times = ("processing_started_at", "completed_at", "failed_at", "first_failed_at", "scheduled_at", "expires_at")
    (id,) = insert_messages(
        queue.db,
        created_at=queue.at(-100),
        payload={"a": 1},
        headers={"b": "2"},
        metadata={"c": 3},
        sent_by="bank",
        max_retries=2,
        **{
            "endpoint_id": queue.value("select id from ulak.endpoints"),
            "event_created_at": queue.at(-100),
            "made_from": 6,
            "correlation_id": "00000000-0000-0000-0000-000000000001",
            "generation": 8,
            "attempts": 9,
            "retry_count": 4,
            "priority": 5,
            "last_error": "[RETRYABLE] no",
            "idempotency_key": "i",
            "payload_hash": "h",
            "ordering_key": "o",
            "response": {"d": 4},
            "failure_history": [{"e": 5}],
            "next_retry_at": queue.at(-90),
            "updated_at": queue.at(-80),
            **{name: queue.at(number - 70) for number, name in enumerate(times)},
            **columns,
        },
    )
    return id


HELD = {"status": "processing", "locked_by": "w", "attempts": 9}
# How a message ends, what it was before, and the columns that its end sets.
ENDS: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "completed": (HELD, "complete(%s, 'w', 9, p_now => %s)", {"completed_at": 10, "response": None}),
    "failed": (
        HELD,
        "fail(%s, 'w', 9, 'no', p_permanent => true, p_now => %s)",
        {"failed_at": 10, "last_error": "[PERMANENT] no"},
    ),
    "expired": ({"status": "pending"}, "mark_expired_messages(p_limit => sign(%s)::integer, p_now => %s)", {}),
    "cancelled": ({"status": "pending", "attempts": 0}, "cancel(%s, p_now => %s)", {}),
}


@pytest.mark.parametrize("status", ENDS)
def test_a_finished_message_arrives_with_everything_it_had(queue: Queue, status: str) -> None:
    queue.endpoint()
    before, end, changed = ENDS[status]
    id = whole(queue, **before, **({"lease_until": queue.at(60)} if before is HELD else {}))
    sent = queue.value("select to_jsonb(q) from ulak.queue q")
    assert {name for name, cell in sent.items() if cell is None} <= {"lease_until", "locked_by"}

    queue.db.execute(f"select ulak.{end}", [id, queue.at(10)])  # type: ignore[arg-type]

    (archived,) = queue.column("select to_jsonb(a) from ulak.archive a")
    assert queue.column("select id from ulak.queue") == []
    assert archived.pop("archived_at") == as_json(queue, queue.at(10))
    expected = {"status": status, "updated_at": queue.at(10), "locked_by": None, "lease_until": None}
    expected |= {name: queue.at(cell) if name.endswith("_at") else cell for name, cell in changed.items()}
    assert archived == sent | {name: as_json(queue, cell) for name, cell in expected.items()}


def as_json(queue: Queue, value: Any) -> Any:
    return queue.value("select to_jsonb(%s::timestamptz)", value) if isinstance(value, datetime) else value


def test_every_column_of_the_queue_is_in_the_archive(alone: DB) -> None:
    queue, archived = (
        set(alone.execute(COLUMNS, [table]).fetchall())
        for table in ("ulak_private.deliveries", "ulak_private.archived")
    )

    assert archived - queue == {("archived_at", "timestamp with time zone")}
    assert queue - archived == set()


# Idempotency keys.

FREE = "archive_completed_messages"
KEYS = "select idempotency_key from ulak_private.idempotency_keys order by 1"


def deliver(queue: Queue, *keys: str, now: float = 0) -> None:
    for key in keys:
        queue.send(idempotency_key=key)
        queue.complete(queue.claim_one(now=now), now=now)


def test_a_key_is_kept_until_its_message_was_delivered_long_enough_ago(queue: Queue) -> None:
    queue.endpoint()
    deliver(queue, "k", now=10)

    assert queue.call(FREE, 100, 1000, now=queue.at(109)) == 0
    assert queue.column(KEYS) == ["k"]
    # It returns how many messages it moved: none, because they are in the archive already.
    assert queue.call(FREE, 100, 1000, now=queue.at(110)) == 0
    assert queue.column(KEYS) == []


def test_without_an_age_the_setting_decides(queue: Queue) -> None:
    queue.call("configure", "archive_after", "100")
    queue.endpoint()
    deliver(queue, "k")

    for now, kept in ((99, ["k"]), (100, [])):
        queue.db.execute(f"select ulak.{FREE}(null, 1000, %s)", [queue.at(now)])  # type: ignore[arg-type]
        assert queue.column(KEYS) == kept


def test_the_keys_that_are_free_first_go_first_and_no_more_than_asked_for(queue: Queue) -> None:
    queue.endpoint()
    for key, now in (("late", 3), ("early", 1), ("middle", 2)):
        deliver(queue, key, now=now)

    queue.call(FREE, 0, 2, now=queue.at(60))

    assert queue.column(KEYS) == ["late"]


def test_keys_of_messages_that_wait_or_are_in_flight_stay(queue: Queue) -> None:
    queue.endpoint()
    for key in ("waits", "in flight"):
        queue.send(idempotency_key=key)
    queue.claim_one()

    queue.call(FREE, 0, 1000, now=queue.at(10**6))

    assert queue.column(KEYS) == ["in flight", "waits"]


@pytest.mark.parametrize(("older_than", "batch"), [(-1, 10), (0, 0), (0, -1), (0, None)])
def test_nonsense_is_refused(alone: DB, older_than: int, batch: int | None) -> None:
    with pytest.raises(psycopg.errors.InvalidParameterValue), alone.transaction():
        alone.execute("select ulak.archive_completed_messages(%s, %s)", [older_than, batch])


@pytest.mark.parametrize("statistics", ["missing", "of no keys", "of keys in use"])
def test_a_batch_never_reads_all_keys_whatever_the_statistics_say(db: DB, statistics: str) -> None:
    db.execute("alter table ulak_private.idempotency_keys set (autovacuum_enabled = off)")
    insert = """
        insert into ulak_private.idempotency_keys (endpoint_id, idempotency_key, message_id, payload_hash, free_at, sent_by)
        select %s, n, n, 'hash', case when %s then now() - n * interval '1 s' end, 'shop' from generate_series(1, %s) n
    """
    if statistics == "of no keys":
        db.execute("analyze ulak_private.idempotency_keys")
    db.execute(insert, [1, False, 5000])
    if statistics == "of keys in use":
        db.execute("analyze ulak_private.idempotency_keys")
    db.execute(insert, [2, True, 3000])
    read = """
        select seq_scan, seq_tup_read, idx_tup_fetch from pg_stat_xact_all_tables
        where relid = 'ulak_private.idempotency_keys'::regclass
    """

    with db.transaction():
        before = db.execute(read).fetchone()
        db.execute("select ulak.archive_completed_messages(3600, 100, now() + interval '2 hours')")
        after = db.execute(read).fetchone()
        freed = db.execute("select 8000 - count(*) from ulak_private.idempotency_keys").fetchone()

    assert before is not None
    assert after is not None
    scans, rows_by_scan, rows_by_index = (now - then for then, now in zip(before, after, strict=True))
    assert freed == (100,)
    assert (scans, rows_by_scan) == (0, 0)
    assert rows_by_index <= 200


def test_a_key_that_is_locked_is_left_for_later(db: DB, connect: Connect) -> None:
    queue, other = Queue(db), connect(autocommit=False)
    queue.endpoint()
    deliver(queue, "locked", "free")
    other.execute("select from ulak_private.idempotency_keys where idempotency_key = 'locked' for update")
    db.execute("set lock_timeout = '1s'")

    queue.call(FREE, 0, 1000, now=queue.at(60))

    assert queue.column(KEYS) == ["locked"]
    other.rollback()
    queue.call(FREE, 0, 1000, now=queue.at(60))
    assert queue.column(KEYS) == []
