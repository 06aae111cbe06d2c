"""What an application can ask about a message that it sent."""

from __future__ import annotations

from typing import Any

import pytest
from support.cluster import Connect
from support.queue import DB, Queue


@pytest.fixture
def id(queue: Queue) -> int:
    queue.endpoint("shop")
    return queue.send(idempotency_key="k", expires_at=7200)


def status(queue: Queue, id: int) -> dict[str, Any]:
    (row,) = queue.rows("select * from ulak.message_status(%s)", id)
    return row


def test_a_waiting_message(queue: Queue, id: int) -> None:
    assert status(queue, id) == {
        "id": id,
        "endpoint": "shop",
        "status": "pending",
        "attempts": 0,
        "retry_count": 0,
        "next_retry_at": queue.base,
        "last_error": None,
        "created_at": queue.base,
        "completed_at": None,
        "failed_at": None,
    }


def test_a_message_in_flight_has_no_next_time(queue: Queue, id: int) -> None:
    queue.claim_one()

    now = status(queue, id)
    assert (now["status"], now["attempts"], now["next_retry_at"]) == ("processing", 1, None)


def test_a_message_that_waits_for_a_retry_says_why_and_until_when(queue: Queue, id: int) -> None:
    queue.fail(queue.claim_one(), "no answer", retry_after=60)

    now = status(queue, id)
    assert (now["status"], now["attempts"], now["retry_count"]) == ("pending", 1, 1)
    assert now["last_error"] == "[RETRYABLE] no answer"
    assert now["next_retry_at"] == queue.at(60)


def test_a_delivered_message(queue: Queue, id: int) -> None:
    queue.complete(queue.claim_one(), now=5)

    now = status(queue, id)
    assert (now["status"], now["completed_at"], now["next_retry_at"]) == ("completed", queue.at(5), None)


def test_a_dead_message(queue: Queue, id: int) -> None:
    queue.fail(queue.claim_one(), "gone", permanent=True, now=5)

    now = status(queue, id)
    assert (now["status"], now["failed_at"], now["last_error"]) == ("failed", queue.at(5), "[PERMANENT] gone")


def test_an_expired_message(queue: Queue, id: int) -> None:
    queue.expire(now=7200)

    assert status(queue, id)["status"] == "expired"


def test_an_archived_message_even_of_an_endpoint_that_is_gone(queue: Queue, id: int) -> None:
    queue.complete(queue.claim_one(), now=5)
    before = status(queue, id)
    assert queue.value("select count(*) from ulak.queue") == 0

    queue.call("drop_endpoint", "shop")
    assert status(queue, id) == {**before, "endpoint": None}


def test_a_message_that_never_was(queue: Queue) -> None:
    assert queue.rows("select * from ulak.message_status(-1)") == []
    assert queue.rows("select * from ulak.message_status(null)") == []


@pytest.mark.parametrize("role", ["ulak_application", "ulak_monitor"])
def test_a_role_that_may_not_see_payloads_may_ask_for_the_status(connect: Connect, db: DB, role: str) -> None:
    db.execute("select ulak.create_endpoint('shop', 'pull', '{}')")
    row = db.execute("select ulak.send('shop', '1')").fetchone()

    assert connect(role).execute("select status from ulak.message_status(%s)", row).fetchone() == ("pending",)
