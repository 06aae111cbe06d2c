"""Messages of one ordering key are delivered in their order, one at a time, whatever goes wrong around them."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from threading import Lock

import psycopg
import pytest
from support.queue import Begin, Queue, Sessions
from support.sessions import Running, gather, wait_until

WAKEUPS = "select count(*) from ulak.ordering_wakeups"


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
    assert queue.value(WAKEUPS) == 0


def test_a_sender_that_rolls_back_leaves_a_key_that_works(queue: Queue, begin: Begin) -> None:
    queue.send(ordering_key="k")
    claim = queue.claim_one()
    sender = begin()
    sender.send(ordering_key="k")
    queue.complete(claim)
    sender.db.rollback()

    third = queue.send(ordering_key="k")

    assert queue.claim_one().id == third
    assert queue.value(WAKEUPS) == 0


@pytest.mark.parametrize("ending", ["commit", "rollback"])
def test_what_follows_is_woken_if_the_next_is_about_to_expire_while_the_head_is_settled(
    queue: Queue, begin: Begin, ending: str
) -> None:
    queue.send(ordering_key="k")
    second = queue.send(ordering_key="k", expires_at=60)
    third = queue.send(ordering_key="k")
    claim = queue.claim_one()
    sweep = begin()
    assert sweep.expire(now=60) == 1

    queue.complete(claim, now=60)
    assert queue.claim(now=59) == []
    getattr(sweep.db, ending)()

    assert queue.claim_one(now=59).id == (third if ending == "commit" else second)
    assert queue.value(WAKEUPS) == 0


def test_a_sender_that_is_under_way_while_all_this_happens_is_woken_too(queue: Queue, begin: Begin) -> None:
    queue.send(ordering_key="k")
    queue.send(ordering_key="k", expires_at=60)
    claim = queue.claim_one()
    sweep, sender = begin(), begin()
    assert sweep.expire(now=60) == 1
    third = sender.send(ordering_key="k")

    queue.complete(claim, now=60)
    sweep.db.commit()
    assert queue.claim(now=61) == []
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


# Nobody who holds a message waits for another one.


def send_two_keys(queue: Queue) -> dict[str, int]:
    """Three messages of each key; those that expire do so in the order k2, l2, l1, k1."""
    expiry: dict[str, dict[str, float]] = {
        "k2": {"expires_at": 10},
        "l2": {"expires_at": 20},
        "l1": {"expires_at": 30},
        "k1": {"expires_at": 40},
    }
    names = [f"{key}{place}" for key in "kl" for place in (1, 2, 3)]
    return {name: queue.send(ordering_key=name[0], **expiry.get(name, {})) for name in names}


def test_two_sweeps_that_expire_messages_of_the_same_keys_never_deadlock(queue: Queue, begin: Begin) -> None:
    """Each has the second message of one key and then takes the first of the other. They get there by themselves: each
    skips what the other has."""
    sent = send_two_keys(queue)
    one, other = begin(), begin()

    def expire(sweep: Queue, name: str) -> None:
        assert sweep.call("mark_expired_messages", sweep.at(60), 1) == 1
        assert sweep.status(sent[name]) == "expired"

    expire(one, "k2")
    expire(other, "l2")
    first = Running(lambda: expire(one, "l1"))
    wait = "select cardinality(pg_blocking_pids(%s))"
    wait_until(lambda: first.is_done() or queue.value(wait, one.db.info.backend_pid))
    expire(other, "k1")
    first.result()
    one.db.commit()
    other.db.commit()

    assert {claim.id for claim in queue.claim(10, now=60)} == {sent["k3"], sent["l3"]}
    assert queue.value(WAKEUPS) == 0


def test_a_key_whose_head_is_held_costs_a_claim_no_new_note(queue: Queue, begin: Begin) -> None:
    sent = send_two_keys(queue)
    claims = queue.claim(10)
    assert begin().expire(now=10) == 1
    for claim in claims:
        queue.complete(claim)
    notes = "select ctid, w.* from ulak.ordering_wakeups w"
    before = queue.rows(notes)

    assert [claim.id for _ in range(3) for claim in queue.claim(10)] == [sent["l2"]]

    assert [row["ordering_key"] for row in before] == ["k"]
    assert queue.rows(notes) == before


def test_a_sweep_does_not_wait_for_a_worker_that_wakes_the_same_key(queue: Queue, begin: Begin) -> None:
    """The worker takes a note away while the sweep leaves one: neither may be lost."""
    queue.send(ordering_key="k")
    claim = queue.claim_one()
    sender = begin()
    second = sender.send(ordering_key="k")
    queue.complete(claim)
    sender.db.commit()
    queue.send(ordering_key="k", expires_at=60)
    assert queue.value(WAKEUPS) == 1
    worker, sweep = begin(), begin()

    assert worker.claim_one().id == second
    assert sweep.expire(now=60) == 1
    sweep.db.commit()
    worker.db.rollback()

    assert queue.claim_one().id == second
    assert queue.value(WAKEUPS) == 0


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
