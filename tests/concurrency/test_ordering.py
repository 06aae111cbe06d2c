"""Messages of one ordering key are delivered in their order, one at a time, whatever goes wrong around them."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain
from threading import Event, Lock

import psycopg
import pytest
from support.cluster import Cluster
from support.queue import Begin, Queue, Sessions
from support.sessions import Running, gather, wait_until, wait_until_blocked

PARKED = "select id from ulak.queue where next_retry_at = 'infinity' order by id"


@pytest.fixture
def queue(queue: Queue) -> Queue:
    queue.endpoint(policy={"max_retries": 3, "backoff": "fixed", "base_delay_seconds": 1})
    return queue


# The next message of a key becomes due, however its head is settled.


def test_a_message_whose_sender_commits_after_the_head_was_settled_is_delivered(queue: Queue, begin: Begin) -> None:
    queue.send(ordering_key="k")
    claim = queue.claim_one()
    sender = begin()
    second = sender.send(ordering_key="k")

    queue.complete(claim)
    assert queue.claim() == []
    sender.db.commit()

    assert queue.claim_one().id == second


def test_a_sender_that_rolls_back_leaves_a_key_that_works(queue: Queue, begin: Begin) -> None:
    queue.send(ordering_key="k")
    claim = queue.claim_one()
    sender = begin()
    sender.send(ordering_key="k")
    queue.complete(claim)
    sender.db.rollback()

    third = queue.send(ordering_key="k")

    assert queue.claim_one().id == third


@pytest.mark.parametrize("ending", ["commit", "rollback"])
def test_what_follows_is_woken_if_the_next_is_about_to_expire_while_the_head_is_settled(
    queue: Queue, begin: Begin, ending: str
) -> None:
    queue.send(ordering_key="k")
    second = queue.send(ordering_key="k", expires_at=60)
    third = queue.send(ordering_key="k")
    (claim,) = queue.claim(10)
    assert queue.column(PARKED) == [second, third]
    sweep = begin()
    assert sweep.expire(now=60) == 1

    queue.complete(claim, now=60)
    assert queue.claim(now=59) == []
    getattr(sweep.db, ending)()

    # The first claim may find the second message parked without a predecessor, and makes it due.
    (woken,) = queue.claim(now=59) or queue.claim(now=59)
    assert woken.id == (third if ending == "commit" else second)


def test_a_sender_that_is_under_way_while_all_this_happens_is_woken_too(queue: Queue, begin: Begin) -> None:
    queue.send(ordering_key="k")
    second = queue.send(ordering_key="k", expires_at=60)
    (claim,) = queue.claim(10)
    assert queue.column(PARKED) == [second]
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


def test_a_busy_key_delays_no_other(queue: Queue, begin: Begin) -> None:
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


# The sweep finds messages that were left parked.

CHANGES = {
    "cancel": "select ulak.cancel(%s)",
    "reprioritise": "select ulak.reprioritise(%s, 5)",
    "reschedule": "select ulak.reschedule(%s, now())",
    "lock": "select from ulak.queue where id = %s for update",
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_message_whose_change_is_rolled_back_while_its_head_is_delivered_goes_out_after_the_next_sweep(
    queue: Queue, begin: Begin, change: str
) -> None:
    queue.send(ordering_key="k")
    second = queue.send(ordering_key="k")
    (claim,) = queue.claim(10)
    application = begin()
    application.db.execute(change, [second])

    queue.complete(claim)
    application.db.rollback()
    queue.db.execute("select ulak_private.sweep()")

    assert queue.claim_one().id == second


def test_a_head_that_is_cancelled_under_an_older_snapshot_delays_no_message_after_the_next_sweep(
    queue: Queue, begin: Begin
) -> None:
    """By its snapshot, nothing is parked behind it."""
    first = queue.send(ordering_key="k")
    queue.release(queue.claim_one(), delay=60)
    second = queue.send(ordering_key="k")
    application = begin()
    application.db.execute("set transaction isolation level repeatable read")
    application.value("select count(*) from ulak.queue")
    assert queue.claim(10) == []
    assert queue.column(PARKED) == [second]

    assert application.call("cancel", first)
    application.db.commit()
    queue.db.execute("select ulak_private.sweep()")

    assert queue.claim_one().id == second


def test_a_message_deleted_by_hand_blocks_its_key_only_until_the_next_sweep(queue: Queue) -> None:
    first = queue.send(ordering_key="k")
    second = queue.send(ordering_key="k")
    assert [claim.id for claim in queue.claim(10)] == [first]
    queue.db.execute("delete from ulak.queue where id = %s", [first])
    assert queue.claim() == []

    queue.db.execute("select ulak_private.sweep()")

    assert queue.claim_one().id == second


def test_a_sweep_goes_on_where_the_last_one_ended(queue: Queue) -> None:
    """One more key than a sweep looks at, and the last of them is stuck."""
    queue.db.execute(
        """
        insert into ulak_private.deliveries (endpoint_id, event_id, ordering_key, next_retry_at)
        select e.id, 0, to_char(n, 'FM00000'), case when n = 10001 then 'infinity' else now() end
        from ulak.endpoints e, generate_series(1, 10001) n
        """
    )

    woken = [queue.value("select ulak_private.unpark_orphans()") for _ in range(4)]

    assert woken == [0, 1, 0, 0]
    assert queue.column(PARKED) == []


def test_a_message_deleted_by_hand_blocks_its_key_only_until_the_next_is_sent(queue: Queue) -> None:
    first = queue.send(ordering_key="k")
    second = queue.send(ordering_key="k")
    assert [claim.id for claim in queue.claim(10)] == [first]
    queue.db.execute("delete from ulak.queue where id = %s", [first])

    queue.send(ordering_key="k")

    assert [claim.id for _ in range(2) for claim in queue.claim(10)] == [second]


def test_keys_without_a_message_are_forgotten_unless_a_sender_is_under_way(queue: Queue, begin: Begin) -> None:
    sender = begin()
    for key in ("gone", "live", "kept"):
        queue.bury(queue.send(ordering_key=key))
    queue.send(ordering_key="live")
    sender.send(ordering_key="kept")

    assert queue.value("select ulak_private.forget_ordering_keys()") == 1

    assert queue.column("select ordering_key from ulak_private.ordering_keys order by 1") == ["kept", "live"]
    sender.db.commit()


def test_a_sender_that_waited_for_a_key_that_is_forgotten_makes_it_anew(queue: Queue, begin: Begin) -> None:
    queue.bury(queue.send(ordering_key="k"))
    janitor, first, second = begin(), begin(), begin()
    assert janitor.value("select ulak_private.forget_ordering_keys()") == 1

    sends = Running(lambda: first.send(ordering_key="k"))
    wait_until_blocked(first.db, queue.db)
    janitor.db.commit()
    one = sends.result()
    sends = Running(lambda: second.send(ordering_key="k"))
    assert wait_until_blocked(second.db, queue.db) == [first.db.info.backend_pid]
    first.db.commit()

    assert sends.result() > one
    second.db.commit()


# A session that holds a message never waits for another one.


def send_two_keys(queue: Queue) -> dict[str, int]:
    """Three messages of each key, all but the first of them parked; those that expire do so in the order k2, l2, l1, k1."""
    expiry: dict[str, dict[str, float]] = {
        "k2": {"expires_at": 10},
        "l2": {"expires_at": 20},
        "l1": {"expires_at": 30},
        "k1": {"expires_at": 40},
    }
    names = [f"{key}{place}" for key in "kl" for place in (1, 2, 3)]
    sent = {name: queue.send(ordering_key=name[0], **expiry.get(name, {})) for name in names}
    for claim in queue.claim(10):
        queue.release(claim)
    assert queue.column(PARKED) == [sent[name] for name in names if not name.endswith("1")]
    return sent


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


def test_a_key_whose_head_is_held_costs_a_claim_no_write(queue: Queue, begin: Begin) -> None:
    sent = send_two_keys(queue)
    claims = queue.claim(10)
    assert begin().expire(now=10) == 1
    for claim in claims:
        queue.complete(claim)
    assert [claim.id for claim in queue.claim(10)] == [sent["l2"]]
    versions = "select ctid::text from ulak_private.deliveries order by id"
    before = queue.column(versions)

    assert [claim.id for _ in range(3) for claim in queue.claim(10)] == []

    assert queue.column(versions) == before


def test_a_sweep_does_not_wait_for_a_worker_that_settles_the_same_key(queue: Queue, begin: Begin) -> None:
    queue.send(ordering_key="k")
    second = queue.send(ordering_key="k")
    queue.send(ordering_key="k", expires_at=60)
    (claim,) = queue.claim(10)
    worker, sweep = begin(), begin()

    worker.complete(claim)
    assert sweep.expire(now=60) == 1
    sweep.db.commit()
    worker.db.rollback()

    queue.complete(claim)
    assert queue.claim_one().id == second


# A message is parked while its head is settled.


def test_settling_a_head_waits_for_the_claim_that_parks_behind_it(queue: Queue, begin: Begin) -> None:
    queue.send(ordering_key="k")
    head = queue.claim_one()
    second = queue.send(ordering_key="k")
    claimer, settler = begin(), begin()
    assert claimer.claim(10) == []

    settling = Running(lambda: settler.complete(head))
    assert wait_until_blocked(settler.db, queue.db) == [claimer.db.info.backend_pid]
    claimer.db.commit()
    settling.result()
    settler.db.commit()

    assert queue.claim_one().id == second


def test_a_claim_neither_waits_for_the_settling_of_the_head_nor_parks_behind_it(queue: Queue, begin: Begin) -> None:
    queue.send(ordering_key="k")
    head = queue.claim_one()
    second = queue.send(ordering_key="k")
    settler = begin()
    settler.complete(head)

    assert queue.claim(10) == []
    assert queue.column(PARKED) == []
    settler.db.commit()

    assert queue.claim_one().id == second


@pytest.mark.parametrize("end", ["complete", "bury", "expire", "recover"])
def test_a_head_that_leaves_between_the_look_and_the_parking_leaves_nothing_parked(
    queue: Queue, begin: Begin, end: str
) -> None:
    """The claim has seen the head alive, by its snapshot, and is stopped just before it parks what is behind."""
    queue.db.execute("update ulak.endpoints set retry_policy = '{\"max_retries\": 0}'")
    first = queue.send(ordering_key="k", expires_at=60)
    head = queue.claim_one(lease=10)
    second = queue.send(ordering_key="k")
    if end in ("bury", "expire"):
        queue.release(head, delay=30)
    claimer = begin()

    with gate_before_parking(queue):
        claiming = Running(lambda: claimer.claim(10))
        wait_until_blocked(claimer.db, queue.db)
        match end:
            case "complete":
                queue.complete(head)
            case "bury":
                queue.bury(first)
            case "expire":
                assert queue.expire(now=60) == 1
            case "recover":
                assert queue.recover(now=60) == 1
    claimed = claiming.result()
    claimer.db.commit()

    assert [claim.id for claim in claimed or queue.claim(10)] == [second]


@contextmanager
def gate_before_parking(queue: Queue) -> Iterator[None]:
    """A session that is about to park waits here."""
    definition = queue.value(
        "select pg_get_functiondef('ulak_private.park(tid[], bigint[], timestamptz)'::regprocedure)"
    )
    wait = "perform pg_advisory_xact_lock_shared(hashtext('gate'), 0);"
    queue.db.execute("select pg_advisory_lock(hashtext('gate'), 0)")
    queue.db.execute(definition.replace("\nbegin\n", f"\nbegin\n{wait}\n"))
    try:
        yield
    finally:
        queue.db.execute("select pg_advisory_unlock(hashtext('gate'), 0)")
        queue.db.execute(definition)


# Keys that are used all the time, and keys with many messages.


def test_a_hot_key_flows_while_its_senders_go_on(queue: Queue, sessions: Sessions) -> None:
    """There is no moment without an open transaction that has sent with the key."""
    is_over = Event()
    *senders, worker = sessions(5)
    have_sent: set[Queue] = set()

    def send(session: Queue) -> None:
        while not is_over.is_set():
            with session.db.transaction():
                session.send(ordering_key="k")
                session.value("select count(*) from generate_series(1, 5000)")
            have_sent.add(session)

    delivered: list[int] = []

    def deliver() -> bool:
        for claim in worker.claim(10):
            delivered.append(claim.id)
            worker.complete(claim)
        return len(delivered) >= 100 and len(have_sent) == len(senders)

    def work() -> None:
        try:
            wait_until(deliver, "a hundred deliveries beside four senders", interval=0)
        finally:
            is_over.set()

    gather([*(lambda s=s: send(s) for s in senders), work])  # type: ignore[misc]

    assert delivered == queue.column("select id from ulak.messages order by id limit %s", len(delivered))


def test_a_key_that_is_locked_without_a_pause_flows(queue: Queue, begin: Begin) -> None:
    """Each sender waits for the one before it, and gets the key at the moment of its commit."""
    here, there = begin(), begin()
    sent = [here.send(ordering_key="k")]
    delivered = []
    for _ in range(10):
        sends = Running(partial(there.send, ordering_key="k"))
        wait_until_blocked(there.db, queue.db)
        here.db.commit()
        sent.append(sends.result())
        here, there = there, here
        for claim in queue.claim(10):
            delivered.append(claim.id)
            queue.complete(claim)

    assert delivered == sent[:-1]


def test_an_open_sender_does_not_hold_back_what_was_committed_before_it(queue: Queue, begin: Begin) -> None:
    sent = [queue.send(ordering_key="k") for _ in range(5)]
    sender = begin()
    last = sender.send(ordering_key="k")

    for id in sent:
        claim = queue.claim_one()
        assert claim.id == id
        queue.complete(claim)
    assert queue.claim(10) == []
    sender.db.commit()

    assert queue.claim_one().id == last


def test_a_prepared_transaction_does_not_hold_back_what_was_committed_before_it() -> None:
    cluster = Cluster.create(settings={"max_prepared_transactions": 2}, in_memory=True)
    try:
        cluster.install(cluster.create_database("app"))
        with cluster.connect("app") as db:
            queue = Queue(db)
            queue.endpoint()
            sent = [queue.send(ordering_key="k") for _ in range(3)]
            db.execute("begin")
            last = queue.send(ordering_key="k")
            db.execute("prepare transaction 'sent'")

            for id in sent:
                claim = queue.claim_one()
                assert claim.id == id
                queue.complete(claim)
            assert queue.claim(10) == []
            db.execute("commit prepared 'sent'")

            assert queue.claim_one().id == last
    finally:
        cluster.remove()


def test_a_key_with_thousands_of_messages_does_not_hold_up_the_others_of_its_endpoint(queue: Queue) -> None:
    queue.db.execute("select ulak.send('shop', '1', p_ordering_key => 'k') from generate_series(1, 5000)")
    others = queue.send_many(20)

    claimed = [[claim.id for claim in queue.claim(10)] for _ in range(10)]

    assert set(others) < set(chain.from_iterable(claimed))
    assert len(queue.column(PARKED)) == 4999


def test_a_claim_parks_only_a_limited_number_of_messages(queue: Queue) -> None:
    """A million messages behind one head would make it last for minutes."""
    queue.db.execute("select ulak.send('shop', '1', p_ordering_key => 'k') from generate_series(1, 5000)")

    assert len(queue.claim(10)) == 1

    assert 1000 <= len(queue.column(PARKED)) < 1100


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

    wait_until(turn, "the end of the messages")


def send_ordered(session: Queue, seed: int, keys: int, count: int) -> None:
    rng = random.Random(seed)
    for _ in range(count):
        if rng.random() < 0.2:
            session.db.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        # A key that is newer than the snapshot of a sender at repeatable read.
        with suppress(psycopg.errors.SerializationFailure), session.db.transaction(force_rollback=rng.random() < 0.1):
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

        wait_until(turn, "the end of the messages")

    gather(
        [
            *(lambda n=n, session=session: work(session, receiver, n, is_over) for n, session in enumerate(workers)),  # type: ignore[misc]
            sweep,
            lambda: send(first_sender, 100),
            lambda: send(second_sender, 101),
        ]
    )

    delivered: dict[str, list[int]] = defaultdict(list)
    for row in queue.rows("select ordering_key, id, status from ulak.messages order by id"):
        assert row["status"] in ("completed", "failed")
        if row["status"] == "completed":
            delivered[row["ordering_key"]].append(row["id"])
    receiver.check(delivered)
    assert sum(map(len, delivered.values())) > 200
    dead = queue.column("select id from ulak.messages where status = 'failed' order by 1")
    assert queue.column("select original_message_id from ulak.dlq order by 1") == dead
