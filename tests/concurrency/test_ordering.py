"""Messages of one ordering key are delivered in their order, one at a time, whatever goes wrong around them."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from threading import Lock

import psycopg
import pytest
from support.queue import Begin, Queue, Sessions
from support.sessions import Running, gather, wait_until, wait_until_blocked


@pytest.fixture
def queue(queue: Queue) -> Queue:
    queue.endpoint(policy={"max_retries": 3, "backoff": "fixed", "base_delay_seconds": 1})
    return queue


# The next message of a key is woken, by whatever its head is settled.


def test_a_message_whose_sender_commits_after_the_head_was_settled_is_delivered(queue: Queue, begin: Begin) -> None:
    queue.send(ordering_key="k")
    claim = queue.claim_one()
    sender = begin()
    second = sender.send(ordering_key="k")

    queue.complete(claim)
    assert queue.claim() == []
    sender.db.commit()

    assert queue.claim_one().id == second
    assert queue.value("select count(*) from ulak.ordering_wakeups") == 0


def test_a_sender_that_rolls_back_leaves_a_key_that_works(queue: Queue, begin: Begin) -> None:
    queue.send(ordering_key="k")
    claim = queue.claim_one()
    sender = begin()
    sender.send(ordering_key="k")
    queue.complete(claim)
    sender.db.rollback()

    third = queue.send(ordering_key="k")

    assert queue.claim_one().id == third
    assert queue.value("select count(*) from ulak.ordering_wakeups") == 0


def test_the_next_but_one_is_woken_if_the_next_expires_while_the_head_is_settled(queue: Queue, begin: Begin) -> None:
    queue.send(ordering_key="k")
    queue.send(ordering_key="k", expires_at=60)
    third = queue.send(ordering_key="k")
    claim = queue.claim_one()
    sweep, worker = begin(), begin()
    assert sweep.expire(now=60) == 1

    report = Running(lambda: worker.complete(claim, now=60))
    wait_until_blocked(worker.db, queue.db)
    sweep.db.commit()
    report.result()
    worker.db.commit()

    assert queue.claim_one(now=61).id == third


def test_a_sender_that_is_under_way_while_all_this_happens_is_woken_too(queue: Queue, begin: Begin) -> None:
    queue.send(ordering_key="k")
    queue.send(ordering_key="k", expires_at=60)
    claim = queue.claim_one()
    sweep, worker, sender = begin(), begin(), begin()
    assert sweep.expire(now=60) == 1
    third = sender.send(ordering_key="k")

    report = Running(lambda: worker.complete(claim, now=60))
    wait_until_blocked(worker.db, queue.db)
    sweep.db.commit()
    report.result()
    worker.db.commit()
    sender.db.commit()

    assert queue.claim_one(now=61).id == third


def test_the_next_is_woken_if_the_head_is_taken_out_while_a_sender_is_under_way(queue: Queue, begin: Begin) -> None:
    first = queue.send(ordering_key="k")
    sender = begin()
    second = sender.send(ordering_key="k")

    queue.bury(first)
    sender.db.commit()

    assert queue.claim_one().id == second


def test_a_redrive_under_way_while_the_head_is_settled_is_woken(queue: Queue, begin: Begin) -> None:
    letter = queue.bury(queue.send(ordering_key="k"))
    queue.send(ordering_key="k")
    claim = queue.claim_one()
    operator = begin()
    redriven = operator.call("redrive_message", letter)

    queue.complete(claim)
    operator.db.commit()

    assert queue.claim_one().id == redriven


def test_a_key_that_is_busy_holds_nobody_up(queue: Queue, begin: Begin) -> None:
    """A sender that stays in its transaction holds its key; workers and other keys go on."""
    queue.send(ordering_key="k")
    other = queue.send(ordering_key="l")
    sender = begin()
    sender.send(ordering_key="k")

    claims = queue.claim(10)
    assert other in [claim.id for claim in claims]
    for claim in claims:
        queue.complete(claim)

    assert queue.claim(10) == []


def test_a_message_deleted_by_hand_blocks_its_key_only_until_maintenance(queue: Queue) -> None:
    first = queue.send(ordering_key="k")
    second = queue.send(ordering_key="k")
    queue.db.execute("delete from ulak.queue where id = %s", [first])
    assert queue.claim() == []

    assert queue.value("select ulak._promote_orphans()") == 1

    assert queue.claim_one().id == second


# Everything at once.


class Receiver:
    """Sees what workers deliver. The order of its notes is the order of events: a start is noted after its claim has
    committed, an end before its report."""

    def __init__(self) -> None:
        self.notes: dict[str | None, list[tuple[str, int]]] = defaultdict(list)

    def check(self, delivered: dict[str, list[int]]) -> None:
        for key, expected in delivered.items():
            notes = self.notes[key]
            starts, ends = notes[::2], notes[1::2]
            assert {event for event, _ in starts} == {"start"}, f"two messages of {key} at once"
            assert [id for _, id in starts] == [id for _, id in ends], f"two messages of {key} at once"
            assert [id for _, id in starts] == sorted(id for _, id in starts), f"{key} out of order"
            assert [id for event, id in ends if event == "delivered"] == expected


def work(session: Queue, receiver: Receiver, seed: int, is_over: Callable[[], bool]) -> None:
    """Delivers, fails, gives back, refuses for good and dies, at random."""
    rng = random.Random(seed)
    worker = f"worker {seed}"

    def turn() -> bool:
        # The leases of a worker that dies have run out at 0, the time of everything else here.
        dies = rng.random() < 0.2
        now, lease = (-1, 0.5) if dies else (0, 3600)
        for claim in session.claim(rng.choice([1, 2, 10]), worker=worker, lease=lease, now=now):
            notes = receiver.notes[claim.ordering_key]
            notes.append(("start", claim.id))
            fate = "died" if dies else rng.choices(["delivered", "failed", "refused", "back"], [8, 3, 1, 1])[0]
            notes.append((fate, claim.id))
            if fate == "delivered":
                session.complete(claim, worker=worker)
            elif fate == "failed":
                session.fail(claim, worker=worker, retry_after=0)
            elif fate == "refused":
                session.fail(claim, worker=worker, permanent=True)
            elif fate == "back":
                session.release(claim, worker=worker)
        return is_over()

    wait_until(turn, 60, "the end of the messages")


def send_ordered(session: Queue, seed: int, keys: int, count: int) -> None:
    rng = random.Random(seed)
    for _ in range(count):
        if rng.random() < 0.2:
            session.db.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        with session.db.transaction(force_rollback=rng.random() < 0.1):
            for key in sorted(rng.sample(range(keys), rng.choice([1, 1, 3]))):
                session.send(ordering_key=f"key {key}", priority=rng.choice([0, 0, 5]))
        session.db.isolation_level = None


def test_four_workers_that_fail_and_die_never_invert_a_key(queue: Queue, sessions: Sessions) -> None:
    """Recovery, expiry and redrives run beside them. With backoffs of 0 everything is due at once."""
    queue.db.execute(
        """update ulak.endpoints set retry_policy = '{"max_retries": 3, "backoff": "schedule", "schedule": [0]}'"""
    )
    queue.call("alter_endpoint", "shop", {"circuit_breaker": {"threshold": 1000}})
    receiver = Receiver()
    sent: list[bool] = []
    *workers, janitor, first_sender, second_sender = sessions(7)

    looking = Lock()

    def is_over() -> bool:
        if len(sent) < 2:
            return False
        with looking:
            return not queue.value("select exists (select from ulak.queue where status in ('pending', 'processing'))")

    def send(session: Queue, seed: int) -> None:
        send_ordered(session, seed, keys=12, count=120)
        sent.append(True)

    def sweep() -> None:
        def turn() -> bool:
            janitor.recover(now=0)
            return is_over()

        wait_until(turn, 60, "the end of the messages")

    gather(
        [
            *(lambda n=n, session=session: work(session, receiver, n, is_over) for n, session in enumerate(workers)),  # type: ignore[misc]
            sweep,
            lambda: send(first_sender, 100),
            lambda: send(second_sender, 101),
        ]
    )

    delivered: dict[str, list[int]] = defaultdict(list)
    for row in queue.rows("select ordering_key, id, status from ulak.queue order by id"):
        assert row["status"] in ("completed", "failed")
        if row["status"] == "completed":
            delivered[row["ordering_key"]].append(row["id"])
    receiver.check(delivered)
    assert sum(map(len, delivered.values())) > 200
    dead = queue.column("select id from ulak.queue where status = 'failed' order by 1")
    assert queue.column("select original_message_id from ulak.dlq order by 1") == dead
