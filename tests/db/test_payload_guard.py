"""What was sent can't be changed."""

from __future__ import annotations

import psycopg
import pytest
from support.queue import Queue


@pytest.fixture
def id(queue: Queue) -> int:
    queue.endpoint()
    return queue.send(payload={"amount": 1})


@pytest.mark.parametrize(
    ("table", "change"),
    [
        ("ulak_private.events", "payload = '{\"amount\": 2}'"),
        ("ulak_private.events", "headers = '{}'"),
        ("ulak_private.deliveries", "message_id = gen_random_uuid(), priority = 1"),
        ("ulak.queue", "message_id = gen_random_uuid(), priority = 1"),
    ],
)
def test_a_message_can_not_be_changed_once_sent(queue: Queue, id: int, table: str, change: str) -> None:
    before = queue.message(id)

    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState) as caught, queue.db.transaction():
        queue.db.execute(f"update {table} set {change}")  # type: ignore[arg-type]

    assert (
        caught.value.diag.message_primary
        == "payload, headers, metadata and message_id of a message can't be changed once sent"
    )
    assert caught.value.diag.message_hint == "Send a new message."
    assert queue.message(id) == before


def test_the_payload_can_not_be_changed_through_a_view(queue: Queue, id: int) -> None:
    queue.complete(queue.claim_one())

    for view in ("queue", "archive", "dlq"):
        with pytest.raises(psycopg.errors.FeatureNotSupported), queue.db.transaction():
            queue.db.execute(f"update ulak.{view} set payload = '2'")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("table", "change"),
    [
        ("ulak_private.events", "payload = payload"),
        ("ulak_private.deliveries", "message_id = message_id, priority = 1"),
    ],
)
def test_an_update_that_names_what_was_sent_is_refused_even_if_it_keeps_it(
    queue: Queue, id: int, table: str, change: str
) -> None:
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState), queue.db.transaction():
        queue.db.execute(f"update {table} set {change}")  # type: ignore[arg-type]


def test_the_guard_ignores_updates_of_other_columns(queue: Queue, id: int) -> None:
    queue.db.execute("update ulak.queue set priority = 1")

    assert queue.message(id)["priority"] == 1


def test_the_payload_is_the_same_after_every_step_of_its_way(queue: Queue, id: int) -> None:
    message_id = queue.message(id)["message_id"]
    queue.fail(queue.claim_one())
    queue.fail(queue.claim_one(now=3600), permanent=True, now=3600)

    dead = queue.dead(id)
    again = queue.message(queue.call("redrive_message", dead["id"]))

    assert dead["payload"] == again["payload"] == {"amount": 1}
    assert dead["message_id"] == again["message_id"] == message_id
