"""Cancelling, rescheduling and discarding while others claim, settle and redrive: exactly one wins, and no key is forgotten."""

from __future__ import annotations

import random
from threading import Barrier

import psycopg
import pytest
from support.queue import Begin, Queue, Sessions
from support.sessions import Running, gather, patience, wait_until_blocked


@pytest.fixture
def queue(queue: Queue) -> Queue:
    queue.endpoint()
    return queue


def cancelled(queue: Queue) -> list[int]:
    return queue.column("select id from ulak.archive where status = 'cancelled' order by id")


def test_a_claim_that_was_first_wins(queue: Queue, begin: Begin, sessions: Sessions) -> None:
    id = queue.send()
    worker, (application,) = begin(), sessions(1)
    claim = worker.claim_one()
    cancel = Running(lambda: application.call("cancel", id))
    wait_until_blocked(application.db, queue.db)

    worker.db.commit()

    assert cancel.result() is False
    queue.complete(claim)
    assert queue.status(id) == "completed"


def test_a_claim_that_was_rolled_back_leaves_the_message_to_the_cancel(
    queue: Queue, begin: Begin, sessions: Sessions
) -> None:
    id = queue.send()
    worker, (application,) = begin(), sessions(1)
    worker.claim_one()
    cancel = Running(lambda: application.call("cancel", id))
    wait_until_blocked(application.db, queue.db)

    worker.db.rollback()

    assert cancel.result() is True
    assert queue.claim(10) == []


def test_a_cancel_that_is_not_committed_keeps_the_message_from_workers_until_it_is(queue: Queue, begin: Begin) -> None:
    first, second = queue.send_many(2)
    application = begin()
    assert application.call("cancel", first) is True

    assert [claim.id for claim in queue.claim(10)] == [second]

    application.db.rollback()
    assert [claim.id for claim in queue.claim(10)] == [first]


def test_of_cancels_and_claims_at_once_each_message_has_one_winner(queue: Queue, sessions: Sessions) -> None:
    ids = queue.send_many(400)
    barrier = Barrier(4, timeout=patience())

    def cancel(session: Queue) -> list[int]:
        barrier.wait()
        return [id for id in random.sample(ids, len(ids)) if session.call("cancel", id)]

    def claim(session: Queue) -> list[int]:
        barrier.wait()
        return [claim.id for _ in range(40) for claim in session.claim(10, worker=f"w{session.db.info.backend_pid}")]

    applications, workers = sessions(2), sessions(2)
    calls = [lambda s=s: cancel(s) for s in applications] + [lambda s=s: claim(s) for s in workers]  # type: ignore[misc]
    taken = gather(calls)

    assert sorted(id for each in taken for id in each) == ids
    assert cancelled(queue) == sorted(taken[0] + taken[1])
    assert queue.column("select id from ulak.queue where status = 'processing' order by id") == sorted(
        taken[2] + taken[3]
    )


def test_two_cancels_at_once_cancel_once(queue: Queue, begin: Begin, sessions: Sessions) -> None:
    id = queue.send()
    first, (second,) = begin(), sessions(1)
    assert first.call("cancel", id) is True
    other = Running(lambda: second.call("cancel", id))
    wait_until_blocked(second.db, queue.db)

    first.db.commit()

    assert other.result() is False
    assert cancelled(queue) == [id]


def test_a_purge_does_not_wait_for_what_a_worker_holds(queue: Queue, begin: Begin) -> None:
    ids = queue.send_many(3)
    worker = begin()
    held = worker.claim_one().id

    assert queue.value("select messages from ulak.purge('shop')") == 2

    worker.db.commit()
    assert cancelled(queue) == [id for id in ids if id != held]


@pytest.mark.parametrize("change", ["reschedule", "reprioritise"])
def test_a_message_that_is_changed_while_the_one_before_it_is_settled_is_not_forgotten(
    queue: Queue, begin: Begin, change: str
) -> None:
    """The session that settles the first finds the second locked, and there is no third message whose claim would find it parked."""
    first, second = (queue.send(ordering_key="k") for _ in range(2))
    claim = queue.claim(10)[0]
    assert claim.id == first
    application = begin()
    assert application.call(change, second, queue.at(5) if change == "reschedule" else 5) is True

    queue.complete(claim)
    application.db.commit()

    assert [claim.id for claim in queue.claim(10, now=10)] == [second]


@pytest.mark.parametrize("change", ["reschedule", "reprioritise"])
def test_a_message_that_is_changed_while_it_waits_behind_another_goes_on_waiting(queue: Queue, change: str) -> None:
    first, second = (queue.send(ordering_key="k") for _ in range(2))
    claim = queue.claim(10)[0]
    assert queue.call(change, second, queue.at(1) if change == "reschedule" else 5) is True

    assert queue.claim(10, now=10) == []
    queue.complete(claim, now=11)
    assert [claim.id for claim in queue.claim(10, now=12)] == [second]
    assert first < second


def test_a_rescheduled_head_holds_up_its_key_while_others_are_sent_and_claimed(
    queue: Queue, begin: Begin, sessions: Sessions
) -> None:
    first = queue.send(ordering_key="k")
    application = begin()
    application.call("reschedule", first, queue.at(60))
    (other,) = sessions(1)
    second = other.send(ordering_key="k")

    assert other.claim(10) == []
    application.db.commit()

    assert other.claim(10, now=59) == []
    (claim,) = other.claim(10, now=60)
    assert claim.id == first
    other.complete(claim, now=61)
    assert [claim.id for claim in other.claim(10, now=62)] == [second]


def test_a_cancelled_head_gives_way_although_another_session_holds_the_next_one(
    queue: Queue, begin: Begin, sessions: Sessions
) -> None:
    ids = [queue.send(ordering_key="k") for _ in range(3)]
    first, (second,) = begin(), sessions(1)
    first.call("cancel", ids[0])
    second.call("cancel", ids[1])
    first.db.commit()

    assert [claim.id for claim in queue.claim(10, now=1)] == [ids[2]]


def test_a_letter_is_redriven_or_discarded(queue: Queue, begin: Begin, sessions: Sessions) -> None:
    letter = queue.bury(queue.send())
    first, (second,) = begin(), sessions(1)
    assert first.value("select messages from ulak.discard('shop')") == 1
    redrive = Running(lambda: second.call("redrive_all"))
    wait_until_blocked(second.db, queue.db)

    first.db.commit()

    assert redrive.result() == 0
    assert queue.value("select status from ulak.dlq where id = %s", letter) == "discarded"


@pytest.mark.parametrize("first", ["redrive", "replay"])
@pytest.mark.parametrize("second", ["redrive", "replay", "replay_range"])
def test_only_one_of_two_operators_redrives_or_replays_a_letter(
    queue: Queue, begin: Begin, sessions: Sessions, first: str, second: str
) -> None:
    id = queue.send()
    letter = queue.bury(id)
    everything = ("shop", queue.at(-86400), queue.at(86400))

    def send_again(operator: Queue, how: str) -> bool:
        if how == "replay_range":
            return bool(operator.call("replay_range", *everything) == 1)
        try:
            operator.call("redrive_message", letter) if how == "redrive" else operator.call("replay_message", id)
        except psycopg.errors.ObjectNotInPrerequisiteState:
            return False
        return True

    anna, (berta,) = begin(), sessions(1)
    assert send_again(anna, first)
    other = Running(lambda: send_again(berta, second))
    wait_until_blocked(berta.db, queue.db)

    anna.db.commit()

    assert other.result() is False
    assert len(queue.column("select id from ulak.queue")) == 1
    assert queue.column("select status from ulak.dlq") == ["redriven"]
