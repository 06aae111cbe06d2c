"""Leases that ran out: failures whose worker can't report them any more."""

from __future__ import annotations

import pytest
from support.queue import Queue


@pytest.fixture(autouse=True)
def shop(queue: Queue) -> int:
    return queue.endpoint(policy={"max_retries": 2, "backoff": "fixed", "base_delay_seconds": 10})


def test_a_message_whose_lease_ran_out_is_retried_with_backoff(queue: Queue) -> None:
    queue.endpoint(
        "web",
        {"url": "https://example.com"},
        {"max_retries": 2, "backoff": "fixed", "base_delay_seconds": 10},
        protocol="http",
    )
    id = queue.send("web")
    queue.claim_one(worker="anna", lease=60, endpoint="web")

    assert queue.recover(now=59.9) == 0
    assert queue.recover(now=60) == 1

    message = queue.message(id)
    assert message["status"] == "pending"
    assert (message["attempts"], message["retry_count"]) == (1, 1)
    assert message["last_error"] == '[RETRYABLE] lease expired: worker "anna" went silent'
    assert message["first_failed_at"] == queue.at(60)
    assert (message["locked_by"], message["lease_until"]) == (None, None)
    assert queue.due_in(id) == 70


def test_what_an_external_worker_held_is_due_when_its_lease_is_over(queue: Queue) -> None:
    """The lease was the wait."""
    id = queue.send()
    queue.claim_one(lease=60)

    assert queue.recover(now=61) == 1

    assert (queue.message(id)["retry_count"], queue.due_in(id)) == (1, 61)


def test_a_claim_takes_over_what_a_dead_worker_held(queue: Queue) -> None:
    id = queue.send()
    queue.claim_one(worker="anna", lease=60)

    assert queue.claim(worker="bert", now=59.9) == []
    claim = queue.claim_one(worker="bert", now=61)

    assert (claim.id, claim.attempt) == (id, 2)
    message = queue.message(id)
    assert (message["attempts"], message["retry_count"], message["locked_by"]) == (2, 1, "bert")
    assert message["last_error"] == '[RETRYABLE] lease expired: worker "anna" went silent'


@pytest.mark.parametrize("endpoint", [None, "shop"])
def test_a_session_looks_for_expired_leases_once_a_second(queue: Queue, endpoint: str | None) -> None:
    ids = [queue.send(), queue.send()]
    queue.claim_one(worker="anna", lease=60)
    queue.claim_one(worker="anna", lease=60.5)
    assert [claim.id for claim in queue.claim(5, now=60, endpoint=endpoint)] == ids[:1]

    assert queue.claim(5, now=60.9, endpoint=endpoint) == []
    assert [claim.id for claim in queue.claim(5, now=61, endpoint=endpoint)] == ids[1:]


def test_a_claim_of_one_endpoint_leaves_the_leases_of_others_alone(queue: Queue) -> None:
    queue.endpoint("other")
    id = queue.send()
    queue.claim_one(worker="anna", lease=60)

    queue.claim(endpoint="other", now=100)

    assert queue.message(id)["locked_by"] == "anna"
    assert queue.claim_one(endpoint="shop", now=100).id == id


def test_a_claim_sends_what_has_spent_its_retries_to_the_dead_letters(queue: Queue) -> None:
    id = queue.send()
    for attempt, now in enumerate((0, 100, 200), 1):
        assert queue.claim_one(lease=60, now=now).attempt == attempt

    assert queue.claim(now=300) == []

    assert (queue.status(id), queue.dead(id)["retry_count"]) == ("failed", 2)


def test_a_second_sweep_finds_nothing(queue: Queue) -> None:
    queue.send_many(3)
    queue.claim(3, lease=60)

    assert queue.recover(now=60) == 3
    assert queue.recover(now=60) == 0


def test_a_poison_message_that_kills_its_worker_every_time_ends_in_the_dlq(queue: Queue) -> None:
    id = queue.send()

    now = 0.0
    for attempt in (1, 2, 3):
        assert queue.claim_one(lease=60, now=now).attempt == attempt
        now += 60
        queue.recover(now)
        now += 10

    letter = queue.dead(id)
    assert queue.status(id) == "failed"
    assert (letter["attempts"], letter["retry_count"]) == (3, 2)
    assert "lease expired" in letter["last_error"]
    assert queue.events("message.dead") == ["message.dead"]


def test_what_is_in_flight_without_a_lease_is_taken_back(queue: Queue) -> None:
    id = queue.send()
    queue.db.execute("update ulak.queue set status = 'processing' where id = %s", [id])

    assert queue.recover(now=0) == 1

    assert queue.message(id)["last_error"] == '[RETRYABLE] lease expired: worker "nobody" went silent'


def test_a_renewed_lease_is_left_alone(queue: Queue) -> None:
    queue.send()
    claim = queue.claim_one(lease=60)
    queue.heartbeat(claim, lease=60, now=50)

    assert queue.recover(now=60) == 0


def test_a_lost_lease_says_nothing_about_the_receiver(queue: Queue) -> None:
    queue.call("alter_endpoint", "shop", {"circuit_breaker": {"threshold": 1}})
    queue.send()
    queue.claim_one(lease=60)

    queue.recover(now=60)

    assert queue.state() == "closed"
    assert queue.circuit()["circuit_failure_count"] == 0


def test_a_head_that_is_recovered_stays_the_head(queue: Queue) -> None:
    first = queue.send(ordering_key="k")
    queue.send(ordering_key="k")
    queue.claim_one(lease=60)

    queue.recover(now=60)

    assert [claim.id for claim in queue.claim(10, now=60)] == [first]


def test_a_head_that_dies_in_recovery_lets_the_next_one_go(queue: Queue) -> None:
    queue.endpoint("once", policy={"max_retries": 0})
    queue.send("once", ordering_key="k")
    second = queue.send("once", ordering_key="k")
    queue.claim_one(lease=60)

    queue.recover(now=60)

    assert queue.claim_one(now=60).id == second


def test_the_sweep_takes_no_more_than_its_limit(queue: Queue) -> None:
    queue.send_many(5)
    queue.claim(5, lease=60)

    taken = [queue.call("recover_stale_messages", limit=2, now=queue.at(60)) for _ in range(4)]

    assert taken == [2, 2, 1, 0]


def test_messages_of_many_endpoints_and_workers_are_recovered_at_once(queue: Queue) -> None:
    queue.endpoint("other", policy={"max_retries": 0})
    kept, dead = queue.send("shop"), queue.send("other")
    queue.claim_one(worker="anna", endpoint="shop", lease=60)
    queue.claim_one(worker="bert", endpoint="other", lease=60)

    assert queue.recover(now=60) == 2

    assert (queue.status(kept), queue.status(dead)) == ("pending", "failed")
    assert '"bert"' in queue.dead(dead)["last_error"]
