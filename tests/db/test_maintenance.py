"""run_maintenance(): every step in its turn, in short transactions, one run at a time, and a record of each."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from psycopg.sql import SQL
from support.cluster import Connect
from support.finished import column, hold_up, value
from support.messages import insert_messages
from support.sessions import Running, wait_until, wait_until_blocked

DB = psycopg.Connection[Any]

NOW = datetime(2031, 3, 15, 12, 5, tzinfo=UTC)
LONG_AGO = NOW - timedelta(hours=2)

# Other chapters add steps of their own behind these.
STEPS = [
    "recover",
    "expire",
    "partitions",
    "idempotency_keys",
    "archive_retention",
    "dlq_retention",
    "event_log_retention",
    "stats_retention",
    "inbox_retention",
    "ordering",
]


def run(db: DB, now: datetime | None = NOW, budget: str = "1 hour") -> list[str]:
    """Notices and warnings of the run."""
    messages: list[str] = []

    def remember(diagnostic: psycopg.errors.Diagnostic) -> None:
        messages.append(f"{diagnostic.severity}: {diagnostic.message_primary}")

    db.add_notice_handler(remember)
    db.execute("call ulak.run_maintenance(%s, %s)", [now, budget])
    db.remove_notice_handler(remember)
    return messages


def status(db: DB, of: str) -> dict[str, Any]:
    return dict(db.execute(f"select step, {of} from ulak.maintenance_status").fetchall())  # type: ignore[arg-type]


def add_shop(db: DB) -> None:
    db.execute("select ulak.create_endpoint('shop', 'pull', '{}', '{\"max_retries\": 5}')")


def add_key(db: DB) -> None:
    """An idempotency key that is free again."""
    db.execute(
        """
        insert into ulak_private.idempotency_keys (endpoint_id, idempotency_key, message_id, payload_hash, free_at, sent_by)
        values (1, 'k', 1, 'hash', now() - interval '1 s', 'shop')
        """
    )


def break_expiry(db: DB) -> None:
    db.execute(
        """
        create or replace function ulak.mark_expired_messages(p_now timestamptz default null, p_limit integer default 0)
        returns integer
        language plpgsql
        as $$ begin raise exception 'no luck' using detail = 'None at all.'; end $$
        """
    )


def test_a_run_does_all_that_is_due_and_counts_it(db: DB) -> None:
    add_shop(db)
    db.execute(
        """
        insert into ulak_private.deliveries (id, endpoint_id, event_id, status, locked_by, lease_until, processing_started_at, expires_at,
            attempts, ordering_key, next_retry_at)
        values
            (1001, 1, 0, 'processing', 'w', %(old)s, %(old)s, null, 1, null, now()),
            (1002, 1, 0, 'pending', null, null, null, %(old)s, 0, null, now()),
            (1003, 1, 0, 'pending', null, null, null, %(old)s, 0, null, now()),
            (1004, 1, 0, 'pending', null, null, null, null, 0, 'orphan', 'infinity')
        """,
        {"old": LONG_AGO},
    )
    old = NOW - timedelta(days=31)
    for statement in (
        "select ulak_private.make_archive_partition('2030-08-01Z')",
        "select ulak_private.make_archive_partition('2030-09-01Z')",
        """
        insert into ulak_private.letters (original_message_id, endpoint_id, message_id, original_created_at, failed_at, archived_at,
            attempts, retry_count, priority, endpoint_name, protocol, event_id)
        select n, 1, gen_random_uuid(), %(old)s, %(old)s, %(old)s, 1, 1, 0, 'shop', 'pull', 0
        from generate_series(1, 2) n
        """,
        """
        insert into ulak_private.idempotency_keys (endpoint_id, idempotency_key, message_id, payload_hash, free_at, sent_by)
        select 1, n, n, 'hash', case when n > 3 then %(old)s::timestamptz + interval '1 year' else %(old)s end, 'shop' from generate_series(1, 7) n
        """,
        "insert into ulak.event_log (event, created_at) select 'old', %(old)s from generate_series(1, 4)",
        "insert into ulak.endpoint_stats (endpoint_id, minute) select n, %(old)s from generate_series(1, 5) n",
        "insert into ulak.handled (consumer, key, handled_at) select 'c', n, %(old)s from generate_series(1, 6) n",
    ):
        db.execute(statement, {"old": old})  # type: ignore[arg-type]
    # The event log holds entries of the real present too, which is long ago here.
    log = value(db, "select count(*) from ulak.event_log")

    run(db, NOW.replace(minute=10))

    rows = {step: rows for step, rows in status(db, "rows").items() if step in STEPS}
    assert rows.pop("partitions") >= 4
    assert rows.pop("archive_retention") >= 1
    assert rows.pop("event_log_retention") >= log
    assert rows == {
        "recover": 1,
        "expire": 2,
        "idempotency_keys": 3,
        "dlq_retention": 2,
        "stats_retention": 5,
        "inbox_retention": 6,
        "ordering": 1,
    }
    left = "select id, status, next_retry_at = 'infinity' from ulak.queue order by id"
    assert db.execute(left).fetchall() == [
        (1001, "pending", False),
        (1004, "pending", False),
    ]
    # The expired ones were of the real present: their month is dropped at once.
    assert value(db, "select count(*) from ulak.archive") == 0
    assert value(db, "select count(*) from ulak_private.idempotency_keys") == 4
    months = column(
        db,
        "select name from ulak_private.month_partitions where parent = 'ulak_private.archived'::regclass and name > 'archive_2030_06' order by 1",
    )
    assert months[0] == "archive_2030_09"
    assert months[-1] == "archive_2031_06"
    for table in ("dlq", "endpoint_stats", "handled"):
        assert value(db, f"select count(*) from ulak.{table}") == 0


def test_every_step_is_recorded_with_its_start_and_duration(db: DB) -> None:
    assert set(status(db, "state").values()) == {"never ran"}
    before = value(db, "select clock_timestamp()")

    run(db, None)

    assert [step for step in status(db, "state") if step in STEPS] == STEPS
    assert {status(db, "state")[step] for step in STEPS} == {"ok"}
    started = status(db, "started_at")
    assert before < started["recover"] < started["expire"] < started["ordering"]
    assert all(status(db, "duration")[step] > timedelta(0) for step in STEPS)
    assert {status(db, "runs")[step] for step in STEPS} == {1}


def expire_later(db: DB, count: int) -> list[int]:
    """Messages that the step `expire` archives, in this order; their ids."""
    return insert_messages(
        db,
        count,
        created_at=LONG_AGO,
        endpoint_id=1,
        expires_at=SQL("{}::timestamptz + n * interval '1 us'").format(LONG_AGO),
    )


def test_batches_of_a_run_add_up_and_runs_are_told_apart(db: DB) -> None:
    add_shop(db)
    expire_later(db, 4500)

    run(db)

    assert status(db, "(rows, runs, total_rows)")["expire"] == ("4500", "1", "4500")
    expire_later(db, 10)
    run(db)
    assert status(db, "(rows, runs, total_rows)")["expire"] == ("10", "2", "4510")


def test_a_step_out_of_time_leaves_the_rest_to_the_next_run_and_the_others_get_their_turn(db: DB) -> None:
    add_shop(db)
    expire_later(db, 4500)

    run(db, budget="0")

    assert value(db, "select count(*) from ulak.archive") == 2000
    assert status(db, "state")["expire"] == "behind"
    assert {status(db, "runs")[step] for step in STEPS} == {1}
    run(db)
    assert value(db, "select count(*) from ulak.archive") == 4500
    assert status(db, "state")["expire"] == "ok"


def test_each_batch_is_committed_for_itself(db: DB, connect: Connect) -> None:
    add_shop(db)
    ids = expire_later(db, 4500)
    gate, worker = connect(autocommit=False), connect()
    hold_up(db, gate, LONG_AGO, ids[4200])

    going = Running(lambda: run(worker))
    wait_until_blocked(worker, db)

    assert value(db, "select count(*) from ulak.archive") == 4000
    assert value(db, "select count(*) from ulak.queue") == 500
    gate.rollback()
    going.result()
    # On a busy machine the step may have given up waiting.
    run(db)
    assert value(db, "select count(*) from ulak.archive") == 4500


def test_a_step_that_fails_is_recorded_and_logged_and_does_not_stop_the_others(db: DB) -> None:
    break_expiry(db)
    add_key(db)

    messages = run(db)

    assert messages == ["WARNING: ulak: maintenance step expire failed: no luck None at all."]
    states = status(db, "state")
    assert states.pop("expire") == "failed"
    assert {states[step] for step in STEPS if step != "expire"} == {"ok"}
    assert status(db, "last_error")["expire"] == "no luck None at all."
    assert status(db, "errors")["expire"] == 1
    assert status(db, "rows")["idempotency_keys"] == 1


def test_an_error_that_repeats_is_in_the_event_log_once_and_stays_visible_when_it_is_over(db: DB) -> None:
    definition = value(db, "select pg_get_functiondef('ulak.mark_expired_messages'::regproc)")
    break_expiry(db)
    run(db, None)
    run(db, None)
    logged = "select detail ->> 'step' from ulak.event_log where event = 'maintenance.failed'"
    assert column(db, logged) == ["expire"]
    db.execute(definition)

    run(db, None)

    assert status(db, "(state, last_error, errors)")["expire"] == ("ok", "no luck None at all.", "2")


def test_a_month_that_cannot_be_made_does_not_hold_up_the_next_one(db: DB) -> None:
    db.execute("create table ulak_private.archive_2031_04 ()")

    run(db)

    assert status(db, "state")["partitions"] == "failed"
    assert "archive_2031_04" in status(db, "last_error")["partitions"]
    months = column(
        db,
        "select name from ulak_private.month_partitions where parent = 'ulak_private.archived'::regclass and name > 'archive_2031_02' order by 1",
    )
    assert months == ["archive_2031_03", "archive_2031_05", "archive_2031_06"]


def test_a_month_that_is_being_read_is_dropped_by_a_later_run(db: DB, connect: Connect) -> None:
    db.execute("select ulak_private.make_archive_partition('2029-01-01Z')")
    db.execute("select ulak.maintain_archive_partitions(3, %s)", [NOW])
    reader = connect(autocommit=False)
    reader.execute("select count(*) from ulak_private.archive_2029_01")

    run(db)

    assert "was not dropped" in status(db, "last_error")["archive_retention"]
    assert value(db, "select to_regclass('ulak_private.archive_2029_01')") is not None
    reader.rollback()
    run(db)
    assert status(db, "state")["archive_retention"] == "ok"
    assert value(db, "select to_regclass('ulak_private.archive_2029_01')") is None


def test_a_second_run_at_the_same_time_leaves_with_a_notice(db: DB, connect: Connect) -> None:
    first, second, gate = connect(), connect(), connect(autocommit=False)
    gate.execute("lock table ulak_private.letters in access exclusive mode")
    going = Running(lambda: run(first))
    wait_until_blocked(first, db)

    assert run(second) == ["NOTICE: another run of maintenance is under way"]

    gate.rollback()
    going.result()
    assert {status(db, "runs")[step] for step in STEPS} == {1}


def test_a_run_that_was_cancelled_does_not_keep_others_out(db: DB, connect: Connect) -> None:
    first, gate = connect(), connect(autocommit=False)
    gate.execute("lock table ulak_private.letters in access exclusive mode")
    going = Running(lambda: run(first))
    wait_until_blocked(first, db)
    db.execute("select pg_cancel_backend(%s)", [first.info.backend_pid])
    with pytest.raises(psycopg.errors.QueryCanceled):
        going.result()
    gate.rollback()

    assert run(db) == []

    assert status(db, "state")["dlq_retention"] == "ok"
    assert first.info.transaction_status == psycopg.pq.TransactionStatus.IDLE


def test_a_lock_that_is_held_fails_one_step_only(db: DB, connect: Connect) -> None:
    gate = connect(autocommit=False)
    gate.execute("lock table ulak.handled in access exclusive mode")

    run(db)

    states = status(db, "state")
    assert states.pop("inbox_retention") == "failed"
    assert {states[step] for step in STEPS if step != "inbox_retention"} == {"ok"}


def test_only_the_workers_role_and_administrators_may_run_it(db: DB, connect: Connect) -> None:
    # The worker's role may not say what time it is.
    for role, now in (("ulak_worker", None), ("ulak_admin", NOW)):
        add_key(db)

        run(connect(role), now)

        assert status(db, "rows")["idempotency_keys"] == 1
        assert {status(db, "state")[step] for step in STEPS} == {"ok"}
    for role in ("ulak_application", "ulak_consumer", "ulak_monitor"):
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match="permission denied"):
            run(connect(role), None)


def test_the_monitor_sees_the_status(connect: Connect) -> None:
    assert set(status(connect("ulak_monitor"), "state")) >= {*STEPS, "vacuum"}


RETENTIONS = [
    ("cleanup_event_log", "event_log_retention_days", "event_log", "insert into ulak.event_log (event, created_at) values ('e', %s)"),
    ("cleanup_endpoint_stats", "stats_retention_days", "endpoint_stats", "insert into ulak.endpoint_stats (endpoint_id, minute) values (1, %s)"),
    ("cleanup_inbox", "inbox_retention_days", "handled", "insert into ulak.handled values ('c', gen_random_uuid(), %s)"),
]  # fmt: skip


def test_retention_deletes_what_is_older_and_nothing_else(db: DB) -> None:
    border = NOW - timedelta(days=10)
    for function, setting, table, insert in RETENTIONS:
        db.execute("select ulak.configure(%s, '10')", [setting])
        db.execute(f"truncate ulak.{table}")  # type: ignore[arg-type]
        for at in (border - timedelta(days=1), border - timedelta(microseconds=1), border, NOW):
            db.execute(insert, [at])  # type: ignore[arg-type]

        assert value(db, f"select ulak.{function}(p_now => %s)", NOW) == 2

        assert value(db, f"select count(*) from ulak.{table}") == 2
        assert value(db, f"select ulak.{function}(9, %s)", NOW) == 1
        for nonsense in (0, -1):
            with pytest.raises(psycopg.errors.InvalidParameterValue):
                db.execute(f"select ulak.{function}(%s)", [nonsense])  # type: ignore[arg-type]


def test_the_command_for_the_vacuum_job_runs_as_it_is(db: DB) -> None:
    insert_messages(db, 1000, endpoint_id=1)
    db.execute("delete from ulak.queue")
    db.execute("select pg_stat_force_next_flush()")

    def vacuumed() -> bool:
        db.execute(value(db, "select ulak_private.vacuum_command()"))
        return value(
            db, "select n_dead_tup = 0 from pg_stat_all_tables where relid = 'ulak_private.deliveries'::regclass"
        )

    # An automatic analyze beside it holds a snapshot for a moment.
    wait_until(vacuumed, "a vacuum that nothing holds back")
    assert status(db, "state")["vacuum"] == "ok"


def test_a_run_forgets_a_signing_secret_whose_grace_is_over(db: DB) -> None:
    config = '{"url": "https://example.com", "signing_secret": "the old one"}'
    db.execute("select ulak.create_endpoint('signed', 'http', %s)", [config])
    db.execute("select ulak.rotate_secret('signed', '1 day', 'the new one', %s)", [NOW])

    run(db, NOW + timedelta(hours=23))
    kept = column(db, "select previous_value from ulak_private.secrets")
    run(db, NOW + timedelta(days=1))

    assert kept == ["the old one"]
    assert column(db, "select previous_value from ulak_private.secrets") == [None]
    assert status(db, "rows")["secrets"] == 1
