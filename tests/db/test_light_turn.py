"""A turn in light traffic: what is plain is stored and claimed in one statement, and the rest is left alone."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from support.queue import Queue

URL = {"url": "https://example.com/"}


@pytest.fixture(autouse=True)
def shop(queue: Queue) -> int:
    id = queue.endpoint("shop", URL, protocol="http")
    # A delivery was noted a moment ago.
    queue.db.execute("update ulak.endpoints set last_success_at = %s", [queue.at(0)])
    return id


def turn(
    queue: Queue,
    after: int,
    delivered: dict[int, int] | None = None,
    count: int = 16,
    now: float = 1,
    worker: str = "w",
) -> tuple[list[int], list[int]]:
    """The ids that were claimed, and those that were stored."""
    delivered = delivered or {}
    rows = queue.rows(
        "select * from ulak_private.light_turn(%s, %s, %s, interval '30 s', %s::bigint[], %s::integer[], %s)",
        worker,
        after,
        count,
        list(delivered),
        list(delivered.values()),
        queue.at(now),
    )
    return sorted(row["id"] for row in rows if row["is_new"]), sorted(row["id"] for row in rows if not row["is_new"])


def test_what_is_new_is_claimed_as_a_claim_does_it(queue: Queue) -> None:
    ids = [queue.send(), queue.send()]

    assert turn(queue, ids[0] - 1) == (ids, [])

    message = queue.message(ids[0])
    assert (message["status"], message["attempts"], message["locked_by"]) == ("processing", 1, "w")
    assert message["lease_until"] == queue.at(1) + timedelta(seconds=30)
    assert message["processing_started_at"] == message["updated_at"] == queue.at(1)


def test_what_was_delivered_is_stored_as_settling_does_it(queue: Queue) -> None:
    id = queue.send()
    turn(queue, id - 1)

    assert turn(queue, id, {id: 1}, now=2) == ([], [id])

    message = queue.message(id)
    assert (message["status"], message["attempts"], message["locked_by"]) == ("completed", 1, None)
    assert message["lease_until"] is None
    assert message["processing_started_at"] == queue.at(1)
    assert message["completed_at"] == message["updated_at"] == queue.at(2)


def test_both_are_done_at_once(queue: Queue) -> None:
    first = queue.send()
    turn(queue, first - 1)
    second = queue.send()

    assert turn(queue, first, {first: 1}) == ([second], [first])


def test_only_ids_behind_the_last_one_are_claimed(queue: Queue) -> None:
    ids = [queue.send() for _ in range(5)]

    assert turn(queue, ids[1], count=2) == (ids[2:4], [])


@pytest.mark.parametrize(
    "options",
    [{"ordering_key": "k"}, {"scheduled_at": 100}, {"expires_at": 0.5}],
    ids=["an ordering key", "for later", "expired"],
)
def test_a_message_that_is_not_plain_is_left_to_claim(queue: Queue, options: dict[str, Any]) -> None:
    id = queue.send("shop", **options)

    assert turn(queue, id - 1) == ([], [])


@pytest.mark.parametrize(
    "config",
    [{"rate_limit": {"limit": 5}}, {"max_in_flight": 5}, {"batch_size": 10}],
    ids=["a rate", "a cap", "batches"],
)
def test_a_message_of_an_endpoint_that_is_not_plain_is_left_to_claim(queue: Queue, config: dict[str, Any]) -> None:
    queue.endpoint("other", {**URL, **config}, protocol="http")
    id = queue.send("other")

    assert turn(queue, id - 1) == ([], [])
    assert queue.column("select id from ulak_private.claim('w', 10, p_protocols => '{http}')") == [id]


@pytest.mark.parametrize("change", ["enabled = false", "circuit_state = 'open', circuit_half_open_at = 'infinity'"])
def test_a_message_that_may_not_be_sent_now_is_not_claimed(queue: Queue, change: str) -> None:
    id = queue.send()
    queue.db.execute(f"update ulak.endpoints set {change}")  # type: ignore[arg-type]

    assert turn(queue, id - 1) == ([], [])


def test_a_message_for_pull_workers_is_not_claimed(queue: Queue) -> None:
    queue.endpoint("tasks", {}, protocol="pull")
    id = queue.send("tasks")

    assert turn(queue, id - 1) == ([], [])


def test_a_zombie_stores_nothing(queue: Queue) -> None:
    id = queue.send()
    turn(queue, id - 1)

    assert turn(queue, id, {id: 2}) == ([], [])
    assert turn(queue, id, {id: 1}, worker="another") == ([], [])
    queue.recover(now=100)
    assert turn(queue, id, {id: 1}) == ([], [])
    assert queue.status(id) == "pending"


@pytest.mark.parametrize(
    "change",
    [
        "circuit_failure_count = 1",
        "circuit_state = 'half_open'",
        """config = config || '{"circuit_breaker": {"mode": "rate"}}'""",
        "last_success_at = last_success_at - interval '10 seconds'",
        "last_success_at = null",
    ],
)
def test_a_delivery_that_its_endpoint_must_hear_of_is_told_to_it(queue: Queue, change: str) -> None:
    id = queue.send()
    turn(queue, id - 1)
    queue.db.execute(f"update ulak.endpoints set {change}")  # type: ignore[arg-type]

    assert turn(queue, id, {id: 1}) == ([], [id])

    heard = "select circuit_failure_count, circuit_state, last_success_at is not null from ulak.endpoints"
    assert queue.db.execute(heard).fetchone() in {(0, "closed", True), (0, "half_open", True)}


def test_what_was_claimed_has_all_that_a_request_needs(queue: Queue) -> None:
    id = queue.send("shop", {"n": 1}, headers={"x-n": "1"}, metadata={"m": 2})
    claimed = queue.rows("select * from ulak_private.light_turn('w', %s, 1, interval '30 s', '{}', '{}')", id - 1)

    queue.db.execute("update ulak.queue set status = 'pending', lease_until = null, locked_by = null")
    usual = queue.rows("select * from ulak_private.claim('w', 1, p_protocols => '{http}')")

    same = claimed[0].keys() & usual[0].keys() - {"attempt"}
    assert len(same) == 9
    assert {name: claimed[0][name] for name in same} == {name: usual[0][name] for name in same}
    assert claimed[0]["payload"] == {"n": 1}
