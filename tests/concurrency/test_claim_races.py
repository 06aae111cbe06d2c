"""Several sessions at once: each message is claimed, settled, recovered, redriven and handled once."""

from __future__ import annotations

from collections import Counter
from threading import Barrier
from typing import Any

import psycopg
import pytest
from support.queue import Begin, Queue, Sessions
from support.sessions import Running, gather, patience, wait_until, wait_until_blocked


@pytest.fixture
def queue(queue: Queue) -> Queue:
    queue.endpoint(policy={"max_retries": 2, "backoff": "fixed", "base_delay_seconds": 10})
    return queue


def fails_as_stale(report: Running) -> bool:
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState):
        report.result()
    return True


# Claims.


def test_a_worker_passes_over_a_new_message_that_another_session_has_locked(queue: Queue, begin: Begin) -> None:
    claim = """
        select id
        from ulak_private.claim_new('w', %s, null, 10, interval '30 s', '{pull}', row('{}'::bigint[], '{}'::integer[], 10)::ulak_private.rooms)
    """
    ids = [queue.send(), queue.send()]
    other = begin()
    other.db.execute("select from ulak_private.deliveries where id = %s for update", [ids[0]])

    assert queue.column(claim, ids[0] - 1) == ids[1:]
    other.db.rollback()
    assert queue.column(claim, ids[0] - 1) == ids[:1]


def test_eight_claimers_claim_each_of_many_messages_once(queue: Queue, sessions: Sessions) -> None:
    for name in ("second", "third", "fourth"):
        queue.endpoint(name)
    ids: list[int] = []
    for name in ("shop", "second", "third", "fourth"):
        for priority in (0, 5):
            ids += queue.send_many(2500, name, priority)
    claimed: list[int] = []

    def work(session: Queue) -> None:
        worker = f"worker {session.db.info.backend_pid}"

        def take() -> bool:
            claims = session.claim(150, worker=worker)
            claimed.extend(claim.id for claim in claims)
            return len(claimed) >= len(ids)

        wait_until(take, "the end of the messages")

    gather([lambda session=session: work(session) for session in sessions(8)])  # type: ignore[misc]

    assert sorted(claimed) == sorted(ids)
    assert queue.rows("select status, attempts, count(*) from ulak.messages group by 1, 2") == [
        {"status": "processing", "attempts": 1, "count": 20_000}
    ]


def test_a_claim_does_not_wait_for_another(queue: Queue, begin: Begin) -> None:
    queue.endpoint("limited", {"max_in_flight": 50})
    queue.send_many(4)
    queue.send_many(4, "limited")
    first, second = begin(), begin()

    taken = Counter(claim.endpoint for claim in first.claim(4))
    left = Counter(claim.endpoint for claim in second.claim(10))

    assert taken == {"shop": 2, "limited": 2}
    assert left == {"shop": 2}


def test_what_a_claimer_that_rolls_back_had_is_claimed_by_others(queue: Queue, begin: Begin) -> None:
    (id,) = queue.send_many(1)
    first = begin()
    first.claim_one()

    assert queue.claim() == []
    first.db.rollback()

    assert queue.claim_one().id == id


def test_a_cap_in_flight_holds_for_claimers_at_once(queue: Queue, sessions: Sessions) -> None:
    queue.endpoint("capped", {"max_in_flight": 5})
    queue.send_many(200, "capped")
    most: list[int] = []
    done: list[int] = []

    def work(session: Queue) -> None:
        worker = f"worker {session.db.info.backend_pid}"

        def take() -> bool:
            for claim in session.claim(3, worker=worker, endpoint="capped"):
                most.append(session.value("select count(*) from ulak.queue where status = 'processing'"))
                session.complete(claim, worker=worker)
                done.append(claim.id)
            return len(done) >= 200

        wait_until(take, "the end of the messages")

    gather([lambda session=session: work(session) for session in sessions(6)])  # type: ignore[misc]

    assert len(set(done)) == 200
    assert 1 <= max(most) <= 5


# Zombies.


def test_recovery_that_comes_first_fences_the_zombie(queue: Queue, begin: Begin) -> None:
    queue.send()
    claim = queue.claim_one(lease=60)
    recovery, zombie = begin(), begin()
    assert recovery.recover(now=60) == 1

    report = Running(lambda: zombie.complete(claim, now=61))
    wait_until_blocked(zombie.db, queue.db)
    recovery.db.commit()

    assert fails_as_stale(report)
    assert queue.status(claim.id) == "pending"


def test_a_zombie_that_settles_first_wins_and_recovery_passes_by(queue: Queue, begin: Begin) -> None:
    queue.send()
    claim = queue.claim_one(lease=60)
    zombie = begin()
    zombie.complete(claim, now=61)

    assert queue.recover(now=62) == 0
    zombie.db.commit()

    assert queue.recover(now=62) == 0
    assert queue.status(claim.id) == "completed"


@pytest.mark.parametrize("next_worker", ["w", "another"])
def test_a_zombie_is_fenced_by_the_next_claim_even_its_own(queue: Queue, begin: Begin, next_worker: str) -> None:
    queue.send()
    zombie_claim = queue.claim_one(lease=60)
    queue.recover(now=60)
    claimer, zombie = begin(), begin()
    claim = claimer.claim_one(worker=next_worker, now=70)

    for report in (lambda: zombie.complete(zombie_claim), lambda: zombie.fail(zombie_claim)):
        running = Running(report)
        assert fails_as_stale(running)
        zombie.db.rollback()
    claimer.db.commit()
    assert fails_as_stale(Running(lambda: zombie.complete(zombie_claim)))
    zombie.db.rollback()
    assert not queue.heartbeat(zombie_claim, now=71)

    queue.complete(claim, worker=next_worker, now=72)
    assert queue.status(claim.id) == "completed"


@pytest.mark.parametrize("settle", ["complete", "fail", "release"])
def test_a_report_survives_a_heartbeat_of_its_worker_at_the_same_moment(
    queue: Queue, begin: Begin, settle: str
) -> None:
    """An external worker beats from another connection than the one it reports with."""
    queue.send()
    claim = queue.claim_one(lease=60)
    heart, worker = begin(), begin()
    assert heart.heartbeat(claim, lease=60, now=30)

    report = Running(lambda: getattr(worker, settle)(claim, now=31))
    wait_until_blocked(worker.db, queue.db)
    heart.db.commit()
    report.result()
    worker.db.commit()

    assert queue.status(claim.id) == ("completed" if settle == "complete" else "pending")


def test_a_heartbeat_and_recovery_never_both_win(queue: Queue, begin: Begin) -> None:
    queue.send_many(2)
    kept, lost = queue.claim(2, lease=60)
    heart, recovery = begin(), begin()
    assert heart.heartbeat(kept, lease=60, now=59)

    assert recovery.recover(now=60) == 1
    heart.db.commit()
    beat = Running(lambda: heart.heartbeat(lost, lease=60, now=59))
    wait_until_blocked(heart.db, queue.db)
    recovery.db.commit()

    assert beat.result() is False
    heart.db.commit()
    assert [queue.status(claim.id) for claim in (kept, lost)] == ["processing", "pending"]


# Sweeps and redrives by two at once.


def test_sweeps_at_once_recover_each_message_once(queue: Queue, sessions: Sessions) -> None:
    queue.send_many(2000)
    assert len(queue.claim(2000, lease=60)) == 2000

    recovered = gather([lambda session=session: session.recover(now=60) for session in sessions(6)])  # type: ignore[misc]

    assert sum(recovered) == 2000
    assert queue.rows("select status, retry_count, count(*) from ulak.messages group by 1, 2") == [
        {"status": "pending", "retry_count": 1, "count": 2000}
    ]


def test_a_second_sweep_does_not_wait_for_the_first(queue: Queue, begin: Begin) -> None:
    queue.send_many(3)
    queue.claim(3, lease=60)
    first = begin()
    assert first.recover(now=60) == 3

    assert queue.recover(now=60) == 0
    first.db.commit()
    assert queue.recover(now=60) == 0


def test_two_operators_at_once_redrive_a_letter_once(queue: Queue, begin: Begin) -> None:
    letter = queue.bury(queue.send())
    first, second = begin(), begin()
    new_id = first.call("redrive_message", letter, "anna")

    redrive = Running(lambda: second.call("redrive_message", letter, "bert"))
    wait_until_blocked(second.db, queue.db)
    first.db.commit()

    assert fails_as_stale(redrive)
    assert queue.column("select id from ulak.queue where status = 'pending'") == [new_id]


@pytest.mark.parametrize("ordered", [True, False])
def test_operators_at_once_redrive_everything_once(queue: Queue, sessions: Sessions, ordered: bool) -> None:
    for n in range(60):
        queue.bury(queue.send(ordering_key=f"key {n % 7}" if ordered else None))

    redriven = gather([lambda session=session: session.call("redrive_all") for session in sessions(4)])  # type: ignore[misc]

    assert sum(redriven) == 60
    assert queue.value("select count(*) from ulak.queue where status = 'pending'") == 60
    assert queue.value("select count(distinct message_id) from ulak.queue where status = 'pending'") == 60
    # Each key's first message is due, and only that.
    assert len(queue.claim(100)) == (7 if ordered else 60)


# The inbox.


def test_of_32_sessions_one_handles_a_key(queue: Queue, sessions: Sessions) -> None:
    barrier = Barrier(32, timeout=patience())

    def handle(session: Queue) -> list[bool]:
        answers = []
        for n in range(20):
            barrier.wait()
            answers.append(session.call("mark_handled", "billing", f"message {n}"))
        return answers

    answers = gather([lambda session=session: handle(session) for session in sessions(32)])  # type: ignore[misc]

    assert [sum(column) for column in zip(*answers, strict=True)] == [1] * 20


@pytest.mark.parametrize("first_commits", [True, False])
def test_a_second_session_waits_for_the_first_to_handle_a_key(queue: Queue, begin: Begin, first_commits: bool) -> None:
    first, second = begin(), begin()
    assert first.call("mark_handled", "billing", "message 1")

    answer = Running(lambda: second.call("mark_handled", "billing", "message 1"))
    wait_until_blocked(second.db, queue.db)
    first.db.commit() if first_commits else first.db.rollback()

    assert answer.result() is not first_commits
    second.db.commit()


# Letters while others look.


def test_a_claim_and_taking_a_message_out_by_hand_never_both_win(queue: Queue, begin: Begin) -> None:
    taken_out, claimed = queue.send(), queue.send()
    operator = begin()
    operator.bury(taken_out)

    assert [claim.id for claim in queue.claim(10)] == [claimed]
    refused: Any = None
    try:
        operator.bury(claimed)
    except psycopg.Error as error:
        refused = error.sqlstate
    assert refused == "55000"
    operator.db.rollback()
    assert queue.claim_one().id == taken_out


def test_eight_claimers_take_over_each_expired_message_once(queue: Queue, sessions: Sessions) -> None:
    ids = queue.send_many(500)
    assert len(queue.claim(500, worker="dead", lease=60)) == 500
    taken: list[tuple[int, int]] = []
    barrier = Barrier(8, timeout=patience())

    def work(session: Queue) -> None:
        session.base = queue.base
        barrier.wait()
        worker = f"worker {session.db.info.backend_pid}"
        taken.extend((claim.id, claim.attempt) for claim in session.claim(500, worker=worker, now=61, endpoint="shop"))

    gather([lambda session=session: work(session) for session in sessions(8)])  # type: ignore[misc]
    # Those that were just being taken over when it looked were left to the other session, and are due.
    taken += [(claim.id, claim.attempt) for claim in queue.claim(500, now=61, endpoint="shop")]

    assert sorted(taken) == [(id, 2) for id in sorted(ids)]


def test_a_worker_that_settles_while_its_lease_is_over_wins_or_is_refused(queue: Queue, begin: Begin) -> None:
    """The claim that comes meanwhile skips what is being settled."""
    queue.send()
    claim = queue.claim_one(worker="late", lease=60)
    settling = begin()
    settling.base = queue.base
    settling.complete(claim, worker="late", now=61)

    assert queue.claim(worker="other", now=62, endpoint="shop") == []

    settling.db.commit()
    assert queue.status(claim.id) == "completed"


def test_what_another_session_was_taking_over_is_taken_over_when_that_one_rolls_back(
    queue: Queue, sessions: Sessions, begin: Begin
) -> None:
    """It had passed the lease already when the other one gave it up."""
    sent = queue.send()
    queue.claim_one(worker="dead", lease=60)
    first, (second,) = begin(), sessions(1)
    assert first.claim_one(worker="first", now=61, endpoint="shop").id == sent
    assert second.claim(worker="second", now=61, endpoint="shop") == []

    first.db.rollback()

    assert second.claim(worker="second", now=61.9, endpoint="shop") == []
    assert second.claim_one(worker="second", now=62, endpoint="shop").id == sent
