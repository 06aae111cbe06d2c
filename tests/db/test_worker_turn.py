"""A turn of a worker: what came back is settled, and what is new or due is claimed, by one call. Or only what is new is claimed."""

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


WISH = """
    row(100, row('{}'::bigint[], '{}'::integer[], 100), interval '30 s', '{http}'::text[], %s::bigint, null::bigint[], 64, 1000, 32768)
        ::ulak_private.wish
"""
TURN = (
    f"select (claimed).* from ulak_private.worker_turn(%s, %s::bigint[], %s::integer[], p_now => %s, p_wish => {WISH})"
)


NEW = """
    select * from ulak_private.claim_new(
        'w', %s, %s, 100, interval '30 s', '{http}', row('{}'::bigint[], '{}'::integer[], 100)::ulak_private.rooms, %s
    )
"""


def claim_new(queue: Queue, behind: int, last: int | None = None, now: float = 1) -> list[dict[str, Any]]:
    return queue.rows(NEW, behind, last, queue.at(now))


def turn(
    queue: Queue,
    behind: int | None,
    delivered: dict[int, int] | None = None,
    now: float = 1,
    worker: str = "w",
) -> tuple[list[int], list[int]]:
    """The ids that were claimed, and those that were stored."""
    delivered = delivered or {}
    before = {id for id in delivered if queue.status(id) == "completed"}
    (row,) = queue.rows(TURN, worker, list(delivered), list(delivered.values()), queue.at(now), behind)
    stored = {id for id in delivered if queue.status(id) == "completed"}
    return sorted(row["ids"]) if row["count"] else [], sorted(stored - before)


@pytest.mark.parametrize("is_last_known", [True, False])
def test_what_is_new_is_claimed_as_a_claim_does_it(queue: Queue, is_last_known: bool) -> None:
    ids = [queue.send(), queue.send()]
    last = ids[-1] if is_last_known else None

    rows = claim_new(queue, ids[0] - 1, last)

    assert [(row["id"], row["last_sent"]) for row in rows] == [(id, None if is_last_known else ids[-1]) for id in ids]
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


@pytest.mark.parametrize("options", [{"scheduled_at": 100}, {"expires_at": 0.5}], ids=["for later", "expired"])
def test_a_message_that_is_not_due_is_not_claimed(queue: Queue, options: dict[str, Any]) -> None:
    id = queue.send("shop", **options)

    assert turn(queue, id - 1) == turn(queue, None) == ([], [])
    assert claim_new(queue, id - 1) == []


@pytest.mark.parametrize(
    "config",
    [{"rate_limit": {"limit": 5}}, {"max_in_flight": 5}, {"batch_size": 10}],
    ids=["a rate", "a cap", "batches"],
)
def test_a_new_message_that_is_not_plain_is_claimed_all_the_same(queue: Queue, config: dict[str, Any]) -> None:
    queue.endpoint("other", {**URL, **config}, protocol="http")
    ids = [queue.send("other"), queue.send("shop", ordering_key="k")]

    assert [row["id"] for row in claim_new(queue, ids[0] - 1)] == [None, None]
    assert turn(queue, ids[0] - 1) == (ids, [])


def test_a_turn_claims_nothing_if_nobody_has_sent_unless_it_is_for_all(queue: Queue) -> None:
    old = queue.send()

    assert turn(queue, old) == ([], [])
    assert turn(queue, None) == ([old], [])


def test_new_messages_that_are_not_plain_are_noted(queue: Queue) -> None:
    ids = [queue.send(), queue.send("shop", ordering_key="k")]

    assert [row["id"] for row in claim_new(queue, ids[0] - 1)] == [ids[0], None]
    assert queue.status(ids[1]) == "pending"


def test_many_new_messages_are_a_backlog(queue: Queue) -> None:
    ids = [queue.send() for _ in range(65)]

    assert claim_new(queue, ids[0] - 1) == []
    assert [row["id"] for row in claim_new(queue, ids[0])] == ids[1:17]


@pytest.mark.parametrize("change", ["enabled = false", "circuit_state = 'open', circuit_half_open_at = 'infinity'"])
def test_a_message_that_may_not_be_sent_now_is_not_claimed(queue: Queue, change: str) -> None:
    id = queue.send()
    queue.db.execute(f"update ulak.endpoints set {change}")  # type: ignore[arg-type]

    assert claim_new(queue, id - 1) == []
    assert turn(queue, id - 1) == ([], [])


def test_a_message_for_pull_workers_is_not_claimed(queue: Queue) -> None:
    queue.endpoint("tasks", {}, protocol="pull")
    id = queue.send("tasks")

    assert claim_new(queue, id - 1) == []
    assert turn(queue, id - 1) == ([], [])


def test_a_turn_for_all_says_whether_any_message_waits(queue: Queue) -> None:
    def is_empty() -> bool:
        (row,) = queue.rows(TURN.replace("(claimed).*", "is_empty"), "w", None, None, queue.at(1), None)
        return bool(row["is_empty"])

    assert is_empty()

    queue.send(scheduled_at=1000)

    assert not is_empty()


def test_behind_an_old_snapshot_a_turn_claims_instead_of_asking_whether_any_message_waits(queue: Queue) -> None:
    """The question would pass everything that was claimed since."""
    queue.db.execute("select set_config('ulak_private.resume_points', '{}', false)")

    (row,) = queue.rows(TURN.replace("(claimed).*", "is_empty"), "w", None, None, queue.at(1), None)

    assert not row["is_empty"]


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
def test_a_delivery_that_its_endpoint_must_hear_of_is_reported_to_it(queue: Queue, change: str) -> None:
    id = queue.send()
    turn(queue, id - 1)
    queue.db.execute(f"update ulak.endpoints set {change}")  # type: ignore[arg-type]

    assert turn(queue, id, {id: 1}) == ([], [id])

    heard = "select circuit_failure_count, circuit_state, last_success_at is not null from ulak.endpoints"
    assert queue.db.execute(heard).fetchone() in {(0, "closed", True), (0, "half_open", True)}


def test_what_was_claimed_has_all_that_a_request_needs_whichever_way(queue: Queue) -> None:
    id = queue.send("shop", {"n": 1}, headers={"x-n": "1"}, metadata={"m": 2})
    (new,) = claim_new(queue, id - 1)
    queue.db.execute("update ulak.queue set status = 'pending', lease_until = null, locked_by = null")
    (usual,) = queue.rows(TURN, "w", None, None, queue.at(1), None)

    assert [new[name] for name in ("payload", "headers", "metadata")] == [{"n": 1}, {"x-n": "1"}, {"m": 2}]
    assert [usual["payloads"], usual["headers"], usual["metadata"]] == [['{"n": 1}'], ['{"x-n": "1"}'], ['{"m": 2}']]
    for column, columns in (
        ("id", "ids"),
        ("message_id", "message_ids"),
        ("endpoint_id", "endpoint_ids"),
        ("config_version", "config_versions"),
        ("created_at", "created_at"),
    ):
        assert [new[column]] == usual[columns]
