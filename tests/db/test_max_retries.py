"""Retries of one message: as many as its sender asks for, whatever the endpoint's policy says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from psycopg.types.json import Jsonb
from support.queue import Queue

PAYLOAD = Jsonb({"n": 1})


@pytest.fixture(autouse=True)
def shop(queue: Queue) -> None:
    queue.endpoint("shop", policy={"max_retries": 2, "backoff": "fixed", "base_delay_seconds": 1})
    queue.call("create_event_type", "sold")
    queue.call("subscribe", "sold", "shop")


SENDERS: dict[str, Callable[[Queue, int], Any]] = {
    "send": lambda queue, given: queue.send(max_retries=given),
    "send_many": lambda queue, given: queue.call("send_many", "{shop}", PAYLOAD, max_retries=given),
    "send_messages": lambda queue, given: queue.call(
        "send_messages", "shop", Jsonb([{"payload": 1, "max_retries": given}])
    ),
    "publish": lambda queue, given: queue.call("publish", "sold", PAYLOAD, max_retries=given),
    "publish_batch": lambda queue, given: queue.call(
        "publish_batch", Jsonb([{"event_type": "sold", "payload": 1, "max_retries": given}])
    ),
}


def attempts_until_dead(queue: Queue, begin: float = 0) -> int:
    attempts = 0
    while not queue.value("select exists (select from ulak.dlq where status = 'failed')"):
        queue.fail(queue.claim_one(now=begin + 2 * attempts), now=begin + 2 * attempts)
        attempts += 1
    return attempts


@pytest.mark.parametrize("send", SENDERS.values(), ids=SENDERS)
@pytest.mark.parametrize("given", [0, 4])
def test_a_message_is_retried_as_often_as_its_sender_says(queue: Queue, send: Callable[..., Any], given: int) -> None:
    send(queue, given)

    assert attempts_until_dead(queue) == given + 1


def test_a_message_without_a_number_is_retried_as_the_endpoint_says(queue: Queue) -> None:
    queue.send()

    assert attempts_until_dead(queue) == 3


def test_a_lease_that_runs_out_counts_against_its_own_number(queue: Queue) -> None:
    id = queue.send(max_retries=0)
    queue.claim_one(lease=10)

    queue.recover(now=20)

    assert queue.status(id) == "failed"


def test_a_letter_that_is_redriven_or_replayed_has_its_number_again(queue: Queue) -> None:
    id = queue.send(max_retries=1)
    assert attempts_until_dead(queue) == 2

    again = queue.call("redrive_message", queue.dead(id)["id"], now=queue.at(100))
    assert attempts_until_dead(queue, 100) == 2

    queue.call("replay_message", again, now=queue.at(200))
    assert attempts_until_dead(queue, 200) == 2


def test_the_number_is_seen_wherever_the_message_is(queue: Queue) -> None:
    id = queue.send(max_retries=1)
    assert queue.value("select max_retries from ulak.queue where id = %s", id) == 1
    assert queue.value("select headers from ulak.queue where id = %s", id) is None

    attempts_until_dead(queue)

    assert queue.value("select max_retries from ulak.dlq") == 1
    assert queue.value("select max_retries from ulak.archive where id = %s", id) == 1


def test_explain_counts_by_the_message_s_own_number(queue: Queue) -> None:
    id = queue.send(max_retries=7)
    queue.fail(queue.claim_one())

    story = queue.rows("select * from ulak.explain(%s, p_now => %s)", id, queue.at(0))

    assert any("retry 1 of 7" in str(row) for row in story)


@pytest.mark.parametrize("given", [-1, 1001])
def test_a_number_out_of_range_is_refused(queue: Queue, given: int) -> None:
    errors = [
        queue.refuses("send", "shop", PAYLOAD, max_retries=given),
        queue.refuses("publish", "sold", PAYLOAD, max_retries=given),
        queue.refuses("send_messages", "shop", Jsonb([{"payload": 1, "max_retries": given}])),
        queue.refuses("publish_batch", Jsonb([{"event_type": "sold", "payload": 1, "max_retries": given}])),
    ]

    assert [error.sqlstate for error in errors] == ["22023"] * 4
