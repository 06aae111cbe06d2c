"""Only the holder of the lease can report; nobody else changes anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.queue import Claim, Queue

Report = Callable[..., None]

REPORTS: dict[str, tuple[Any, ...]] = {"complete": (), "fail": ("no luck",), "release": ()}


pytestmark = pytest.mark.usefixtures("shop")


@pytest.fixture
def claim(queue: Queue) -> Claim:
    queue.send(payload={"order": 1})
    return queue.claim_one(lease=60)


def contents(queue: Queue) -> list[Any]:
    """Everything that a report could change."""
    tables = ["ulak.queue", "ulak.dlq", "ulak.endpoints", "ulak.event_log", "ulak_private.ordering_keys"]
    return [queue.rows(f"select * from {table} order by 1") for table in tables]


def test_a_completed_message_is_done(queue: Queue, claim: Claim) -> None:
    queue.complete(claim, response={"status": 200}, now=10)

    message = queue.message(claim.id)
    assert message["status"] == "completed"
    assert message["completed_at"] == message["updated_at"] == queue.at(10)
    assert message["response"] == {"status": 200}
    assert (message["locked_by"], message["lease_until"]) == (None, None)
    assert queue.claim(10, now=100_000) == []


def test_a_failed_message_is_tried_again_later(queue: Queue, claim: Claim) -> None:
    queue.fail(claim, "connection refused", now=10)

    message = queue.message(claim.id)
    assert message["status"] == "pending"
    assert message["last_error"] == "[RETRYABLE] connection refused"
    assert (message["attempts"], message["retry_count"]) == (1, 1)
    assert message["first_failed_at"] == message["updated_at"] == queue.at(10)
    assert (message["locked_by"], message["lease_until"], message["failed_at"]) == (None, None, None)
    assert queue.due_in(claim.id) == 10 + 10
    assert queue.claim(now=19.9) == []
    assert queue.claim_one(now=20).attempt == 2


def test_the_first_failure_of_a_cycle_is_remembered(queue: Queue, claim: Claim) -> None:
    queue.fail(claim, now=10)
    queue.fail(queue.claim_one(now=20), now=30)

    assert queue.message(claim.id)["first_failed_at"] == queue.at(10)


def test_a_delay_that_the_receiver_asked_for_overrides_the_backoff(queue: Queue, claim: Claim) -> None:
    queue.fail(claim, retry_after=7, now=10)

    assert queue.due_in(claim.id) == 17


def test_a_retry_does_not_come_before_the_schedule(queue: Queue) -> None:
    """A worker with a clock that is ahead may have claimed it too early."""
    id = queue.send(scheduled_at=100)
    claim = queue.claim_one(now=100)

    queue.fail(claim, now=5)

    assert queue.due_in(id) == 100


def test_a_released_message_is_due_again_and_has_spent_nothing(queue: Queue, claim: Claim) -> None:
    queue.release(claim, now=10)

    message = queue.message(claim.id)
    assert message["status"] == "pending"
    assert (message["attempts"], message["retry_count"], message["last_error"]) == (1, 0, None)
    assert queue.claim_one(now=10).attempt == 2


def test_a_message_can_be_released_for_later(queue: Queue, claim: Claim) -> None:
    queue.release(claim, delay=30, now=10)

    assert queue.claim(now=39.9) == []
    assert len(queue.claim(now=40)) == 1


def test_releasing_for_ever_spends_no_budget(queue: Queue) -> None:
    queue.endpoint("once", policy={"max_retries": 0})
    id = queue.send("once")

    for attempt in range(1, 21):
        claim = queue.claim_one(endpoint="once")
        assert claim.attempt == attempt
        queue.release(claim)

    assert queue.message(id)["retry_count"] == 0


def test_a_heartbeat_extends_the_lease_from_now_on(queue: Queue, claim: Claim) -> None:
    assert queue.heartbeat(claim, lease=60, now=50)

    assert queue.message(claim.id)["lease_until"] == queue.at(110)
    assert queue.recover(now=109) == 0


def test_a_heartbeat_without_a_lease_renews_by_what_the_claim_asked_for(queue: Queue, claim: Claim) -> None:
    for now in (50, 70):
        assert queue.heartbeat(claim, now=now)
        assert queue.message(claim.id)["lease_until"] == queue.at(now + 60)


def test_a_heartbeat_without_a_lease_renews_by_what_the_last_one_asked_for(queue: Queue, claim: Claim) -> None:
    assert queue.heartbeat(claim, lease=300, now=50)
    assert queue.heartbeat(claim, now=100)

    assert queue.message(claim.id)["lease_until"] == queue.at(400)


def test_a_heartbeat_does_not_revive_a_lease_that_ran_out(queue: Queue, claim: Claim) -> None:
    before = contents(queue)

    assert not queue.heartbeat(claim, now=60)

    assert contents(queue) == before


def test_a_report_after_the_lease_counts_if_the_message_was_not_taken_back(queue: Queue, claim: Claim) -> None:
    queue.complete(claim, now=1000)

    assert queue.status(claim.id) == "completed"


@pytest.mark.parametrize("report", REPORTS)
def test_another_workers_report_changes_nothing(queue: Queue, claim: Claim, report: str) -> None:
    before = contents(queue)

    error = queue.refuses(report, claim.id, "somebody else", claim.attempt, *REPORTS[report])

    assert error.sqlstate == "55000"
    assert "w" in (error.message_detail or "")
    assert contents(queue) == before


@pytest.mark.parametrize("report", REPORTS)
@pytest.mark.parametrize("is_claimed", [True, False])
def test_a_report_that_names_no_worker_changes_nothing(
    queue: Queue, claim: Claim, report: str, is_claimed: bool
) -> None:
    if not is_claimed:
        queue.call("release", claim.id, "w", claim.attempt)
    before = contents(queue)

    error = queue.refuses(report, claim.id, None, claim.attempt, *REPORTS[report])

    assert error.sqlstate == "55000"
    assert contents(queue) == before


@pytest.mark.parametrize("report", REPORTS)
def test_a_workers_own_earlier_claim_is_fenced(queue: Queue, claim: Claim, report: str) -> None:
    queue.recover(now=60)
    again = queue.claim_one(now=1000)
    assert again.attempt == claim.attempt + 1
    before = contents(queue)

    error = queue.refuses(report, claim.id, "w", claim.attempt, *REPORTS[report])

    assert error.sqlstate == "55000"
    assert contents(queue) == before
    assert not queue.heartbeat(claim, now=1000)
    assert queue.heartbeat(again, now=1000)


@pytest.mark.parametrize("report", REPORTS)
@pytest.mark.parametrize("settled_by", REPORTS)
def test_a_second_report_is_refused(queue: Queue, claim: Claim, settled_by: str, report: str) -> None:
    queue.call(settled_by, claim.id, "w", claim.attempt, *REPORTS[settled_by])
    before = contents(queue)

    error = queue.refuses(report, claim.id, "w", claim.attempt, *REPORTS[report])

    assert error.sqlstate == "55000"
    assert contents(queue) == before


@pytest.mark.parametrize("report", REPORTS)
def test_a_report_about_a_message_that_is_gone_says_so(queue: Queue, report: str) -> None:
    error = queue.refuses(report, 999_999_999, "w", 1, *REPORTS[report])

    assert error.sqlstate == "55000"
    assert error.message_detail == "There is no such message."


def test_a_heartbeat_for_a_message_that_is_settled_or_gone_is_a_quiet_false(queue: Queue, claim: Claim) -> None:
    queue.complete(claim)

    assert not queue.heartbeat(claim)
    assert queue.call("heartbeat", 999_999_999, "w", 1) is False


@pytest.mark.parametrize("delay", ["-1 s", "1 day 1 s"])
def test_a_delay_that_makes_no_sense_is_refused(queue: Queue, claim: Claim, delay: str) -> None:
    assert queue.refuses("release", claim.id, "w", 1, delay).sqlstate == "22023"
    assert queue.refuses("fail", claim.id, "w", 1, "no luck", delay).sqlstate == "22023"
    assert queue.status(claim.id) == "processing"


def test_a_lease_that_makes_no_sense_is_refused(queue: Queue, claim: Claim) -> None:
    assert queue.refuses("heartbeat", claim.id, "w", 1, "0 s").sqlstate == "22023"


def test_many_outcomes_are_settled_at_once_and_the_stale_ones_are_left_out(queue: Queue) -> None:
    ids = queue.send_many(6)
    queue.claim(6, lease=60)
    queue.db.execute("update ulak.queue set attempts = 2 where id = %s", [ids[0]])
    queue.db.execute("update ulak.queue set locked_by = 'other' where id = %s", [ids[1]])

    settled = queue.value(
        "select ulak_private.settle_many('w', %s, %s, %s, %s)",
        [*ids, 999_999_999],
        [1] * 7,
        [None, None, None, "[RETRYABLE] a", "[PERMANENT] b", "[RETRYABLE] c", None],
        [None, None, None, None, None, 99, None],
    )

    assert sorted(settled) == ids[2:]
    statuses = [queue.status(id) for id in ids]
    assert statuses == ["processing", "processing", "completed", "pending", "failed", "pending"]
    assert queue.message(ids[5])["next_retry_at"] - queue.message(ids[3])["next_retry_at"] == queue.at(89) - queue.at(0)


def test_an_outcome_given_twice_counts_once(queue: Queue, claim: Claim) -> None:
    settled = queue.value(
        "select ulak_private.settle_many('w', %s, %s, %s)",
        [claim.id] * 3,
        [1] * 3,
        ["[RETRYABLE] a", "[RETRYABLE] b", None],
    )

    assert settled == [claim.id]
    assert queue.status(claim.id) == "completed"
    assert queue.message(claim.id)["retry_count"] == 0


def test_many_leases_are_renewed_or_given_back_at_once(queue: Queue) -> None:
    ids = queue.send_many(3)
    queue.claim(3, lease=60)
    queue.db.execute("update ulak.queue set locked_by = 'other' where id = %s", [ids[1]])
    held = [ids[0], ids[2]]

    renewed = queue.value("select ulak_private.heartbeat_many('w', %s, %s, '100 s', %s)", ids, [1] * 3, queue.at(10))
    released = queue.value("select ulak_private.release_many('w', %s, %s, '5 s', %s)", ids, [1] * 3, queue.at(10))

    assert sorted(renewed) == sorted(released) == held
    assert [queue.due_in(id) for id in held] == [15, 15]
    assert queue.status(ids[1]) == "processing"
