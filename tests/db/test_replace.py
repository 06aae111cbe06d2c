"""p_if_waiting: a message takes the place of the one that waits under its idempotency key."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from support.cluster import Connect
from support.queue import DB, Queue


@pytest.fixture
def queue(queue: Queue) -> Queue:
    queue.endpoint("shop")
    return queue


def send(queue: Queue, n: int, if_waiting: str = "replace", **options: Any) -> int:
    return queue.send(payload={"n": n}, idempotency_key="cart-7", if_waiting=if_waiting, **options)


def waiting(queue: Queue) -> list[Any]:
    return queue.column("select payload -> 'n' from ulak.queue where status = 'pending' order by id")


def test_a_waiting_message_gets_the_new_content_and_options_and_keeps_its_ids(queue: Queue) -> None:
    first = send(queue, 1, headers='{"x-a": "1"}', scheduled_at=100)
    before = queue.message(first)

    again = send(
        queue, 2, priority=3, headers='{"x-a": "2"}', metadata='{"m": 1}', max_retries=2, generation=4, scheduled_at=50
    )

    after = queue.message(first)
    assert again == first
    assert (after["payload"], after["headers"], after["metadata"]) == ({"n": 2}, {"x-a": "2"}, {"m": 1})
    assert (after["priority"], after["max_retries"], after["generation"]) == (3, 2, 4)
    assert after["next_retry_at"] == after["scheduled_at"] == queue.at(50)
    assert (after["message_id"], after["created_at"]) == (before["message_id"], before["created_at"])
    assert [each["n"] for each in queue.column("select payload from ulak.sent()")] == [2]
    claim = queue.claim_one(now=60)
    assert (claim.id, claim.payload) == (first, {"n": 2})
    queue.complete(claim, now=61)
    assert queue.value("select payload from ulak.archive where id = %s", first) == {"n": 2}


def test_a_debounce_waits_for_the_last_call_but_no_longer_than_the_bound(queue: Queue) -> None:
    for n, due in ((1, 10), (2, 20), (3, 90)):
        send(queue, n, scheduled_at=due, latest="30 seconds")

    assert queue.claim(now=29) == []
    assert queue.claim_one(now=30).payload == {"n": 3}


def test_a_first_message_is_bound_by_latest_too(queue: Queue) -> None:
    id = send(queue, 1, scheduled_at=100, latest="30 seconds")

    assert queue.message(id)["scheduled_at"] == queue.at(30)


def test_what_is_in_flight_or_finished_is_left_alone_and_a_new_message_has_the_key(queue: Queue) -> None:
    first = send(queue, 1)
    claim = queue.claim_one()

    second = send(queue, 2)
    queue.complete(claim)
    assert send(queue, 3) == second != first

    queue.complete(queue.claim_one())
    third = send(queue, 4)
    assert third not in (first, second)
    assert waiting(queue) == [4]
    assert queue.value("select payload -> 'n' from ulak.archive where id = %s", first) == 1


def test_what_waits_for_a_retry_is_cancelled_since_its_receiver_may_have_seen_it(queue: Queue) -> None:
    first = send(queue, 1)
    claim = queue.claim_one(now=0)
    queue.fail(claim, "no", now=1)

    second = send(queue, 2)

    assert second != first
    assert waiting(queue) == [2]
    assert queue.value("select status from ulak.archive where id = %s", first) == "cancelled"
    assert queue.message(second)["message_id"] != claim.message_id


def test_keep_and_error_never_change_what_waits(queue: Queue) -> None:
    first = send(queue, 1, "error")

    assert send(queue, 1, "keep") == first
    assert queue.refuses("send", "shop", '{"n": 2}', idempotency_key="cart-7", if_waiting="keep").sqlstate == "23505"
    refusal = queue.refuses("send", "shop", '{"n": 1}', idempotency_key="cart-7", if_waiting="error")
    assert refusal.message_primary == 'a message waits under idempotency key "cart-7"'
    assert refusal.sqlstate == "23505"
    assert waiting(queue) == [1]
    queue.claim_one()
    assert send(queue, 2, "error") != first


def test_a_message_of_another_ordering_key_loses_its_place(queue: Queue) -> None:
    first = send(queue, 1, ordering_key="a")
    behind = queue.send(payload={"n": 9}, ordering_key="a")

    assert send(queue, 2, ordering_key="a") == first
    second = send(queue, 3, ordering_key="b")

    assert second > behind
    assert {claim.id for claim in queue.claim(10)} == {behind, second}


def test_a_replacement_keeps_its_place_in_its_ordering_key(queue: Queue) -> None:
    ahead = queue.send(payload={"n": 0}, ordering_key="a")
    first = send(queue, 1, ordering_key="a")
    behind = queue.send(payload={"n": 9}, ordering_key="a")
    order = []

    send(queue, 2, ordering_key="a")
    for now in range(3):
        claim = queue.claim_one(now=now)
        order.append(claim.id)
        queue.complete(claim, now=now)

    assert order == [ahead, first, behind]


def test_a_replacement_needs_no_room_and_is_checked_as_a_message(queue: Queue) -> None:
    queue.call("alter_endpoint", "shop", {"max_pending": 1})
    first = send(queue, 1)

    assert send(queue, 2) == first
    assert (
        queue.refuses("send", "shop", "1", idempotency_key="cart-7", if_waiting="replace", priority=11).sqlstate
        == "22023"
    )
    assert waiting(queue) == [2]


@pytest.mark.parametrize(
    "options",
    [
        {"if_waiting": "replace"},
        {"if_waiting": "overwrite", "idempotency_key": "k"},
        {"latest": "1 minute", "idempotency_key": "k"},
        {"latest": "-1 minute", "idempotency_key": "k", "if_waiting": "replace"},
        {"latest": "1 minute", "idempotency_key": "k", "if_waiting": "error"},
    ],
)
def test_options_that_make_no_sense_are_refused(queue: Queue, options: dict[str, str]) -> None:
    assert queue.refuses("send", "shop", "1", **options).sqlstate == "22023"


def test_another_sender_replaces_nothing(db: DB, connect: Connect) -> None:
    queue = Queue(db)
    queue.endpoint("shop")
    send(queue, 1)
    application = connect("test_ulak_application")

    for if_waiting in ("replace", "error"):
        with pytest.raises(psycopg.errors.UniqueViolation, match="was used by another sender"):
            application.execute(
                "select ulak.send('shop', '2', p_idempotency_key => 'cart-7', p_if_waiting => %s)", [if_waiting]
            )
    assert waiting(queue) == [1]
