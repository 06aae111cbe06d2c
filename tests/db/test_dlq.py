"""The dead-letter queue: what is in it, and for how long."""

from __future__ import annotations

import pytest
from support.cluster import Connect
from support.queue import Queue

DAY = 86_400


pytestmark = pytest.mark.usefixtures("shop")


def test_a_waiting_message_can_be_taken_out_by_hand(queue: Queue) -> None:
    id = queue.send()

    letter_id = queue.call("archive_single_to_dlq", id, "the customer is gone", now=queue.at(5))

    letter = queue.dead(id)
    assert letter["id"] == letter_id
    assert letter["last_error"] == "[PERMANENT] the customer is gone"
    assert letter["failed_at"] == letter["archived_at"] == queue.at(5)
    assert queue.status(id) == "failed"
    assert queue.claim(10) == []
    assert queue.events("message.dead") == ["message.dead"]


def test_without_a_reason_the_last_error_or_the_operator_is_named(queue: Queue) -> None:
    untried, tried = queue.send(), queue.send(priority=9)
    queue.fail(queue.claim_one(), "timeout")

    for id in (untried, tried):
        queue.call("archive_single_to_dlq", id)

    assert queue.dead(tried)["last_error"] == "[RETRYABLE] timeout"
    assert queue.dead(untried)["last_error"] == "[PERMANENT] removed from the queue by postgres"


def test_a_message_in_flight_is_not_taken_out(queue: Queue) -> None:
    id = queue.send()
    queue.claim_one()

    error = queue.refuses("archive_single_to_dlq", id)

    assert error.sqlstate == "55000"
    assert error.message_detail == "Its status is processing."


def test_a_message_that_is_not_there_is_not_taken_out(queue: Queue) -> None:
    assert queue.refuses("archive_single_to_dlq", 999_999_999).sqlstate == "P0002"


def test_a_head_that_is_taken_out_lets_the_next_one_go(queue: Queue) -> None:
    first = queue.send(ordering_key="k")
    second = queue.send(ordering_key="k")

    queue.bury(first)

    assert queue.claim_one().id == second


def test_the_summary_counts_by_endpoint_the_worst_first(queue: Queue) -> None:
    queue.endpoint("other")
    ids = [queue.send("shop"), *queue.send_many(3, "other")]
    letters = [queue.bury(id, now=now) for now, id in enumerate(ids)]
    queue.call("redrive_message", letters[3])

    assert queue.rows("select * from ulak.dlq_summary()") == [
        {"endpoint": "other", "failed": 2, "redriven": 1, "oldest": queue.at(1), "newest": queue.at(3), "discarded": 0},
        {"endpoint": "shop", "failed": 1, "redriven": 0, "oldest": queue.at(0), "newest": queue.at(0), "discarded": 0},
    ]


def test_letters_are_kept_for_the_retention_and_no_longer(queue: Queue) -> None:
    old, new = queue.send_many(2)
    queue.bury(old, now=0)
    queue.bury(new, now=1)

    assert queue.call("cleanup_dlq", now=queue.at(30 * DAY)) == 0
    assert queue.call("cleanup_dlq", now=queue.at(30 * DAY + 0.5)) == 1
    assert queue.column("select original_message_id from ulak.dlq") == [new]


def test_retention_counts_from_the_entry_whatever_became_of_the_letter(queue: Queue) -> None:
    letter = queue.bury(queue.send())
    queue.call("redrive_message", letter, now=queue.at(20 * DAY))

    assert queue.call("cleanup_dlq", now=queue.at(31 * DAY)) == 1


def test_the_retention_can_be_configured_or_given(queue: Queue) -> None:
    queue.bury(queue.send())
    queue.call("configure", "dlq_retention_days", "5")

    assert queue.call("cleanup_dlq", 6, now=queue.at(5.5 * DAY)) == 0
    assert queue.call("cleanup_dlq", now=queue.at(5.5 * DAY)) == 1


def test_a_retention_below_a_day_is_refused(queue: Queue) -> None:
    assert queue.refuses("cleanup_dlq", 0).sqlstate == "22023"


def test_an_endpoint_with_unresolved_letters_is_not_dropped(connect: Connect) -> None:
    queue = Queue(connect())
    queue.endpoint()
    queue.bury(queue.send())

    assert queue.refuses("drop_endpoint", "shop").sqlstate == "55006"
