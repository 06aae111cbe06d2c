"""Replacing what waits beside claims, settlements and other senders: never a second message while one waits."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from support.cluster import Connect
from support.queue import Queue
from support.sessions import Running, wait_until_blocked


def replace(queue: Queue, payload: Any, **options: Any) -> int:
    return queue.send(payload=payload, idempotency_key="cart-7", if_waiting="replace", **options)


def waiting(queue: Queue) -> list[Any]:
    return queue.column("select payload from ulak.queue where status = 'pending' order by id")


@pytest.fixture
def queue(queue: Queue) -> Queue:
    queue.endpoint("shop")
    return queue


def test_a_claim_that_is_first_has_the_old_message_and_a_new_one_waits(queue: Queue, connect: Connect) -> None:
    first = replace(queue, {"n": 1})
    worker, sender = Queue(connect(), queue.base), Queue(connect(), queue.base)
    with worker.db.transaction():
        claim = worker.claim_one()
        sending = Running(lambda: replace(sender, {"n": 2}))
        wait_until_blocked(sender.db, queue.db)

    assert (claim.id, claim.payload) == (first, {"n": 1})
    assert sending.result() != first
    assert waiting(queue) == [{"n": 2}]
    worker.complete(claim)
    assert replace(queue, {"n": 3}) == sending.result()
    assert waiting(queue) == [{"n": 3}]


def test_a_replacement_that_is_first_is_what_the_claim_gets(queue: Queue, connect: Connect) -> None:
    first = replace(queue, {"n": 1})
    worker, sender = Queue(connect(), queue.base), Queue(connect(), queue.base)
    with sender.db.transaction():
        assert replace(sender, {"n": 2}) == first
        assert worker.claim() == []

    claim = worker.claim_one()
    assert (claim.id, claim.payload) == (first, {"n": 2})
    assert waiting(queue) == []


def test_of_two_senders_the_second_replaces_what_the_first_has_sent(queue: Queue, connect: Connect) -> None:
    one, other = Queue(connect(), queue.base), Queue(connect(), queue.base)
    with one.db.transaction():
        first = replace(one, {"n": 1})
        sending = Running(lambda: replace(other, {"n": 2}))
        wait_until_blocked(other.db, queue.db)

    assert sending.result() == first
    assert waiting(queue) == [{"n": 2}]


def test_of_two_replacements_the_last_to_commit_stays(queue: Queue, connect: Connect) -> None:
    first = replace(queue, {"n": 0})
    one, other = Queue(connect(), queue.base), Queue(connect(), queue.base)
    with one.db.transaction():
        replace(one, {"n": 1})
        sending = Running(lambda: replace(other, {"n": 2}))
        wait_until_blocked(other.db, queue.db)

    assert sending.result() == first
    assert waiting(queue) == [{"n": 2}]


def test_a_settlement_and_a_replacement_do_not_deadlock(queue: Queue, connect: Connect) -> None:
    replace(queue, {"n": 1})
    worker, sender = Queue(connect(), queue.base), Queue(connect(), queue.base)
    claim = worker.claim_one()
    with worker.db.transaction():
        worker.complete(claim)
        sending = Running(lambda: replace(sender, {"n": 2}))
        wait_until_blocked(sender.db, queue.db)

    assert sending.result() != claim.id
    assert waiting(queue) == [{"n": 2}]


def test_a_rolled_back_replacement_leaves_the_message_as_it_was(queue: Queue, connect: Connect) -> None:
    first = replace(queue, {"n": 1})
    with queue.db.transaction(force_rollback=True):
        assert replace(queue, {"n": 2}) == first

    assert waiting(queue) == [{"n": 1}]
    with pytest.raises(psycopg.errors.UniqueViolation):
        queue.send(payload={"n": 2}, idempotency_key="cart-7")
