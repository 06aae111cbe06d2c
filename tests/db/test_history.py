"""history(): attempts with time, outcome and latency; and what it costs a settle."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import psycopg
from support.queue import Queue


def attempts(queue: Queue, id: int, now: float = 0) -> list[tuple[Any, ...]]:
    query = "select message, attempt, outcome, milliseconds::float, error from ulak.history(%s, %s)"
    return queue.db.execute(query, [id, queue.at(now)]).fetchall()


def test_each_attempt_has_its_outcome_and_its_time(queue: Queue) -> None:
    queue.endpoint(policy={"backoff": "fixed", "base_delay_seconds": 10})
    id = queue.send()
    queue.fail(queue.claim_one(now=1), "[RETRYABLE] HTTP 503", now=1.25)
    queue.complete(queue.claim_one(now=20), now=20.5)

    assert attempts(queue, id) == [
        (id, 1, "failed", 250.0, "[RETRYABLE] HTTP 503"),
        (id, 2, "delivered", 500.0, None),
    ]


def test_an_attempt_in_flight_counts_until_now(queue: Queue) -> None:
    queue.endpoint()
    id = queue.send()
    queue.claim_one(now=1)

    assert attempts(queue, id, now=4) == [(id, 1, "in flight", 3000.0, None)]


def test_a_worker_that_went_silent_leaves_an_attempt(queue: Queue) -> None:
    queue.endpoint()
    id = queue.send()
    queue.claim_one(lease=30)
    queue.recover(now=31)

    ((_, attempt, outcome, milliseconds, error),) = attempts(queue, id)

    assert (attempt, outcome, milliseconds) == (1, "failed", 31000.0)
    assert "lease expired" in error


def test_a_message_that_was_given_back_has_no_attempt(queue: Queue) -> None:
    queue.endpoint()
    id = queue.send()
    queue.release(queue.claim_one())

    assert attempts(queue, id) == []


def test_a_redriven_message_brings_the_attempts_of_its_dead_letter(queue: Queue) -> None:
    queue.endpoint(policy={"max_retries": 0})
    old = queue.send()
    queue.fail(queue.claim_one(), "first", now=1)
    new = queue.call("redrive_message", queue.dead(old)["id"], now=queue.at(2))
    queue.complete(queue.claim_one(now=3), now=4)

    assert [(row[0], row[2]) for row in attempts(queue, new)] == [(old, "failed"), (new, "delivered")]


def test_a_message_of_a_replayed_range_brings_the_attempts_of_the_one_it_was_made_from(queue: Queue) -> None:
    endpoint = queue.endpoint(policy={"max_retries": 0})
    queue.endpoint("other")
    old = queue.send()
    queue.fail(queue.claim_one(), "first", now=1)

    queue.call("replay_range", endpoint, queue.at(-1), queue.at(9), now=queue.at(10))
    again = queue.claim_one(now=11)
    queue.complete(again, now=12)
    queue.call("replay_range", endpoint, queue.at(9), queue.at(20), to="other", now=queue.at(21))
    last = queue.claim_one(now=22)
    queue.complete(last, now=23)

    assert [(row[0], row[2]) for row in attempts(queue, last.id)] == [
        (old, "failed"),
        (again.id, "delivered"),
        (last.id, "delivered"),
    ]


def test_the_cycles_of_a_message_outlive_the_event_log_and_the_archive(queue: Queue) -> None:
    queue.endpoint(policy={"max_retries": 0})
    first = queue.send()
    queue.fail(queue.claim_one(), "first", now=1)
    second = queue.call("redrive_message", queue.dead(first)["id"], now=queue.at(2))
    queue.fail(queue.claim_one(now=3), "second", now=4)
    third = queue.call("replay_message", second, now=queue.at(5))
    queue.db.execute("delete from ulak.event_log")
    queue.db.execute("delete from ulak_private.archived")

    assert [(row[0], row[4]) for row in attempts(queue, third)] == [
        (first, "[RETRYABLE] first"),
        (second, "[RETRYABLE] second"),
    ]
    assert queue.message(third)["made_from"] == second


def test_an_archived_message_keeps_its_attempts(queue: Queue) -> None:
    queue.endpoint(policy={"backoff": "fixed", "base_delay_seconds": 1})
    id = queue.send()
    queue.fail(queue.claim_one(), "again", now=1)
    queue.complete(queue.claim_one(now=3), now=4)

    assert [row[2] for row in attempts(queue, id)] == ["failed", "delivered"]


def test_deliveries_write_no_attempt(queue: Queue) -> None:
    queue.endpoint()
    queue.send_many(3)
    for claim in queue.claim(3):
        queue.complete(claim)

    assert queue.value("select count(*) from ulak.attempts") == 0


def test_an_unknown_message_is_an_error(queue: Queue) -> None:
    assert queue.refuses("history", 10**12).sqlstate == "P0002"


def test_maintenance_forgets_old_attempts(db: psycopg.Connection[Any]) -> None:
    queue = Queue(db)
    queue.endpoint(policy={"max_retries": 5})
    queue.send_many(2)
    first, second = queue.claim(2)
    queue.fail(first)
    queue.fail(second, now=2 * 86400)

    db.execute("call ulak.run_maintenance(%s)", [queue.base + timedelta(days=31)])

    assert queue.column("select message_id from ulak.attempts") == [second.id]
    (row,) = queue.rows("select * from ulak.maintenance_status where step = 'attempts_retention'")
    assert (row["state"], row["total_rows"]) == ("ok", 1)


def test_the_attempts_of_a_dead_letter_are_kept_as_long_as_the_letter(db: psycopg.Connection[Any]) -> None:
    queue = Queue(db)
    queue.endpoint(policy={"max_retries": 1})
    queue.call("configure", "event_log_retention_days", "1")
    queue.send()
    queue.fail(queue.claim_one())
    queue.fail(queue.claim_one(now=5 * 86400), now=5 * 86400)

    db.execute("call ulak.run_maintenance(%s)", [queue.base + timedelta(days=34)])
    assert queue.column("select attempt from ulak.attempts order by attempt") == [1, 2]

    db.execute("call ulak.run_maintenance(%s)", [queue.base + timedelta(days=36)])
    assert queue.value("select count(*) from ulak.dlq") == 0
    assert queue.value("select count(*) from ulak.attempts") == 0


def test_a_message_that_never_failed_has_an_empty_failure_history(queue: Queue) -> None:
    queue.endpoint()
    queue.bury(queue.send())
    queue.send()

    for view in ("queue", "archive", "messages", "dlq"):
        assert queue.column(f"select distinct failure_history from ulak.{view}") == [[]]
