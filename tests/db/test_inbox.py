"""A consumer's inbox: each key is handled once."""

from __future__ import annotations

import pytest
from support.queue import Queue

DAY = 86_400


def test_a_key_is_new_once(queue: Queue) -> None:
    assert [queue.call("mark_handled", "billing", "message 1") for _ in range(3)] == [True, False, False]


def test_consumers_do_not_see_each_others_keys(queue: Queue) -> None:
    assert queue.call("mark_handled", "billing", "message 1")
    assert queue.call("mark_handled", "shipping", "message 1")


def test_a_key_handled_in_a_transaction_that_is_rolled_back_is_new_again(queue: Queue) -> None:
    with queue.db.transaction(force_rollback=True):
        assert queue.call("mark_handled", "billing", "message 1")

    assert queue.call("mark_handled", "billing", "message 1")


def test_keys_are_forgotten_after_their_retention(queue: Queue) -> None:
    queue.call("mark_handled", "billing", "message 1")

    assert queue.call("cleanup_inbox", now=queue.at(29 * DAY)) == 0
    assert queue.call("cleanup_inbox", now=queue.at(31 * DAY)) == 1
    assert queue.call("mark_handled", "billing", "message 1")


@pytest.mark.parametrize(("consumer", "key"), [("", "k"), ("c", ""), ("c" * 513, "k"), ("c", "k" * 513)])
def test_a_key_that_is_empty_or_too_long_is_refused(queue: Queue, consumer: str, key: str) -> None:
    assert queue.refuses("mark_handled", consumer, key).sqlstate == "22023"


@pytest.mark.parametrize(("consumer", "key"), [(None, "k"), ("c", None)])
def test_a_key_that_is_null_is_refused(queue: Queue, consumer: str | None, key: str | None) -> None:
    assert queue.refuses("mark_handled", consumer, key).sqlstate == "22004"
