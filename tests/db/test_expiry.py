"""Messages that were not delivered in time are never delivered."""

from __future__ import annotations

from typing import Any

import pytest
from support.queue import Queue


@pytest.fixture(autouse=True)
def shop(queue: Queue) -> int:
    return queue.endpoint(policy={"backoff": "fixed", "base_delay_seconds": 10})


def test_a_waiting_message_past_its_time_is_expired(queue: Queue) -> None:
    id = queue.send(expires_at=60)
    forever = queue.send()

    assert queue.expire(now=59.9) == 0
    assert queue.expire(now=60) == 1

    message = queue.message(id)
    assert (message["status"], message["updated_at"]) == ("expired", queue.at(60))
    assert queue.expire(now=100_000) == 0
    assert [claim.id for claim in queue.claim(10, now=0)] == [forever]


def test_a_message_in_flight_is_not_expired_and_may_still_be_delivered(queue: Queue) -> None:
    queue.send(expires_at=60)
    claim = queue.claim_one(now=59)

    assert queue.expire(now=61) == 0
    queue.complete(claim, now=62)

    assert queue.status(claim.id) == "completed"


def test_a_message_that_fails_past_its_time_expires_instead_of_being_retried(queue: Queue) -> None:
    queue.send(expires_at=60)
    claim = queue.claim_one(now=55)
    queue.fail(claim, now=56)

    assert queue.claim(10, now=66) == []
    assert queue.expire(now=66) == 1
    assert queue.status(claim.id) == "expired"


def test_an_expired_message_is_no_dead_letter(queue: Queue) -> None:
    queue.send(expires_at=60)

    queue.expire(now=60)

    assert queue.value("select count(*) from ulak.dlq") == 0


def test_a_scheduled_message_expires_too(queue: Queue) -> None:
    id = queue.send(scheduled_at=100, expires_at=160)

    assert queue.expire(now=160) == 1
    assert queue.status(id) == "expired"


def test_a_message_behind_its_key_expires_without_disturbing_the_key(queue: Queue) -> None:
    first, second, third = (queue.send(ordering_key="k", expires_at=expiry) for expiry in (1000, 60, 1000))

    assert queue.expire(now=60) == 1

    assert [queue.status(id) for id in (first, second, third)] == ["pending", "expired", "pending"]
    queue.complete(queue.claim_one(now=61), now=61)
    assert queue.claim_one(now=61).id == third


def test_a_head_that_expires_lets_the_next_one_go(queue: Queue) -> None:
    queue.send(ordering_key="k", expires_at=60)
    queue.send(ordering_key="k", expires_at=70)
    third = queue.send(ordering_key="k")

    assert queue.expire(now=75) == 2

    assert queue.claim_one(now=75).id == third


def test_an_expired_message_frees_its_idempotency_key(queue: Queue) -> None:
    first = queue.send(idempotency_key="once", expires_at=60)
    assert queue.send(idempotency_key="once", expires_at=60) == first

    queue.expire(now=60)

    assert queue.send(idempotency_key="once") != first


def test_the_sweep_takes_no_more_than_its_limit(queue: Queue) -> None:
    for _ in range(5):
        queue.send(expires_at=60)

    taken = [queue.call("mark_expired_messages", limit=2, now=queue.at(60)) for _ in range(4)]

    assert taken == [2, 2, 1, 0]


@pytest.mark.parametrize("options", [{"expires_at": -60}, {"expires_at": 0}, {"expires_at": -60, "ordering_key": "k"}])
def test_a_message_that_is_sent_too_late_expires_at_once_and_is_never_delivered(
    queue: Queue, options: dict[str, Any]
) -> None:
    late = queue.send(**options)
    after = queue.send(ordering_key="k") if "ordering_key" in options else None

    assert [claim.id for claim in queue.claim(10, now=0)] == []
    assert queue.expire(now=0) == 1

    assert queue.status(late) == "expired"
    assert [claim.id for claim in queue.claim(10, now=0)] == ([after] if after else [])


def test_a_message_that_expires_before_it_is_due_expires_then(queue: Queue) -> None:
    id = queue.send(scheduled_at=100, expires_at=50)

    assert queue.expire(now=49) == 0
    assert queue.expire(now=50) == 1
    assert queue.status(id) == "expired"


def test_an_event_that_is_published_too_late_expires_too(queue: Queue) -> None:
    queue.db.execute("select ulak.create_event_type('sold')")
    queue.db.execute("select ulak.subscribe('sold', 'shop')")

    assert queue.value("select ulak.publish('sold', '1', p_expires_at => '2001-01-01')") == 1
    assert queue.expire(now=0) == 1
