"""What may wait for one endpoint: a receiver that is down doesn't fill the queue for all."""

from __future__ import annotations

import psycopg
import pytest
from support.queue import Queue


def test_a_message_beyond_max_pending_is_refused_and_names_the_endpoint(queue: Queue) -> None:
    queue.endpoint("shop", {"max_pending": 3})
    queue.endpoint("other")
    queue.send_many(3, "shop")

    with (
        pytest.raises(psycopg.errors.ConfigurationLimitExceeded, match='endpoint "shop" is full'),
        queue.db.transaction(),
    ):
        queue.send("shop")

    queue.send("other")
    assert queue.value("select count(*) from ulak.queue") == 4


def test_what_was_claimed_makes_room(queue: Queue) -> None:
    queue.endpoint("shop", {"max_pending": 3})
    queue.send_many(3, "shop")
    assert len(queue.claim(2)) == 2

    queue.send_many(2, "shop")

    with pytest.raises(psycopg.errors.ConfigurationLimitExceeded), queue.db.transaction():
        queue.send("shop")


def test_what_exceeds_it_becomes_a_dead_letter_if_the_endpoint_says_so(queue: Queue) -> None:
    queue.endpoint("shop", {"max_pending": 2, "when_full": "dead_letter"})
    queue.send_many(2, "shop")

    over = queue.send("shop")
    queue.send_many(2, "shop")

    assert queue.status(over) == "failed"
    assert queue.value("select last_error from ulak.dlq where original_message_id = %s", over) == (
        '[PERMANENT] endpoint "shop" is full: its max_pending is 2'
    )
    assert queue.value("select count(*) from ulak.dlq") == 3


def test_a_batch_is_refused_as_a_whole_or_its_last_ones_become_dead_letters(queue: Queue) -> None:
    queue.endpoint("strict", {"max_pending": 4})
    queue.endpoint("loose", {"max_pending": 4, "when_full": "dead_letter"})

    with pytest.raises(psycopg.errors.ConfigurationLimitExceeded), queue.db.transaction():
        queue.send_many(5, "strict")
    ids = queue.send_many(5, "loose")

    assert queue.value("select count(*) from ulak.queue where status = 'pending'") == 4
    assert queue.column("select original_message_id from ulak.dlq") == [ids[-1]]


def test_the_setting_holds_for_endpoints_without_a_limit_of_their_own(queue: Queue) -> None:
    queue.endpoint("shop")
    queue.endpoint("large", {"max_pending": 5})
    queue.call("configure", "max_pending", "2")
    queue.send_many(5, "large")
    queue.send_many(2, "shop")

    with pytest.raises(psycopg.errors.ConfigurationLimitExceeded), queue.db.transaction():
        queue.send("shop")
    queue.call("configure", "max_pending", None)

    queue.send("shop")


def test_a_repeated_idempotency_key_needs_no_room(queue: Queue) -> None:
    queue.endpoint("shop", {"max_pending": 1})
    first = queue.send("shop", idempotency_key="k")

    assert queue.send("shop", idempotency_key="k") == first


def test_what_a_probe_found_free_is_a_promise_that_later_sends_go_by(queue: Queue) -> None:
    queue.endpoint("shop", {"max_pending": 100})

    first = queue.send("shop")

    safe_to = "select safe_to from ulak_private.endpoint_headroom"
    assert queue.value(safe_to) == first + 49
    queue.send_many(49, "shop")
    assert queue.value(safe_to) == first + 49


def test_a_limit_that_was_just_lifted_delays_no_sender(queue: Queue) -> None:
    """The sender has read it, and then asks how much room there is."""
    endpoint = queue.endpoint("shop")

    assert queue.value("select ulak_private.pending_room(%s, 5, 5)", endpoint) == 5
