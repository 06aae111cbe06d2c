"""Whatever sessions do with messages of a few keys, and however they end, no message stays parked without a predecessor."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import psycopg
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from support.cluster import Connect
from support.machine import play
from support.queue import Claim, Queue
from support.sessions import wait_until_gone

ORPHANS = """
    select q.id from ulak.queue q
    where q.status = 'pending' and q.next_retry_at = 'infinity' and not exists (
        select from ulak.queue h
        where h.endpoint_id = q.endpoint_id and h.ordering_key = q.ordering_key and h.id < q.id
            and h.status in ('pending', 'processing', 'held')
    )
"""
# In flight, although a dead letter before it holds the key.
OVERTAKERS = """
    select q.id from ulak.queue q
    where q.status = 'processing' and exists (
        select from ulak.queue h
        where h.endpoint_id = q.endpoint_id and h.ordering_key = q.ordering_key and h.id < q.id and h.status = 'held'
    )
"""

SESSIONS = 3
# After every retry and every lease.
LATER = 100_000

who = st.integers(0, SESSIONS - 1)
which = st.integers(0, 3) | st.integers(0, 99)
key = st.sampled_from("kkl")
settlings = st.sampled_from(["complete", "fail", "bury", "release"])
changes = st.sampled_from(["cancel", "reprioritise", "reschedule", "lock", "bury"])
# Whether a session commits after a statement or goes on in its transaction.
ends = st.sampled_from([True, True, False])


class Machine(RuleBasedStateMachine):
    """Each session is in a transaction from its first statement until it commits, rolls back or is terminated."""

    connect: Connect
    queue: Queue
    sessions: list[Queue]

    @initialize(on_dead=st.sampled_from(["continue", "hold"]))
    def start(self, on_dead: str) -> None:
        self.queue.empty()
        policy = {"max_retries": 1, "backoff": "fixed", "base_delay_seconds": 10}
        self.queue.endpoint(config={"on_dead": on_dead}, policy=policy)
        # What is claimed is only known to exist once its session has committed.
        self.claims: list[Claim] = []
        self.claimed: dict[int, list[Claim]] = {}
        self.now = 0.0

    def act(self, number: int, ends: bool, statement: Any) -> None:
        """A session that would have to wait for another gives up, which rolls back all that it did."""
        try:
            statement(self.sessions[number])
        except psycopg.Error:
            self.rollback(number)
        if ends:
            self.commit(number)

    def some_id(self, index: int) -> int:
        ids = self.queue.column("select id from ulak.queue where status in ('pending', 'processing') order by id")
        return ids[index % len(ids)] if ids else 0

    @rule(number=who, ends=ends, key=key, count=st.integers(1, 3))
    def send(self, number: int, ends: bool, key: str, count: int) -> None:
        self.act(number, ends, lambda session: [session.send(ordering_key=key) for _ in range(count)])

    @rule(key=key)
    def park(self, key: str) -> None:
        """At least two of a key, the first of them in flight, unless another session holds what it takes."""
        with suppress(psycopg.Error):
            for _ in range(2):
                self.queue.send(ordering_key=key)
            self.claims += self.queue.claim(10, now=self.now)

    @rule(number=who)
    def see_the_queue_as_it_is_now(self, number: int) -> None:
        """From here on until the end of its transaction."""
        self.rollback(number)
        self.sessions[number].db.execute("set transaction isolation level repeatable read")
        self.sessions[number].value("select count(*) from ulak.queue")

    @rule(number=who, ends=ends)
    def claim(self, number: int, ends: bool) -> None:
        claimed = self.claimed.setdefault(number, [])
        self.act(number, ends, lambda session: claimed.extend(session.claim(10, now=self.now)))

    @rule(number=who, ends=ends, index=which, how=settlings)
    def settle(self, number: int, ends: bool, index: int, how: str) -> None:
        known = [*self.claims, *self.claimed.get(number, [])]
        if known:
            claim = known[-1 - index % len(known)]
            options = {"permanent": True} if how == "bury" else {}
            name = "fail" if how == "bury" else how
            self.act(number, ends, lambda session: getattr(session, name)(claim, now=self.now, **options))

    @rule(number=who, ends=ends, index=which, change=changes)
    def change(self, number: int, ends: bool, index: int, change: str) -> None:
        id = self.some_id(index)
        match change:
            case "cancel":
                self.act(number, ends, lambda session: session.call("cancel", id))
            case "reprioritise":
                self.act(number, ends, lambda session: session.call("reprioritise", id, index % 11))
            case "reschedule":
                self.act(number, ends, lambda session: session.call("reschedule", id, session.at(self.now)))
            case "lock":
                lock = "select from ulak.queue where id = %s for update"
                self.act(number, ends, lambda session: session.db.execute(lock, [id]))
            case "bury":
                self.act(number, ends, lambda session: session.bury(id, now=self.now))

    @rule(index=which, change=changes, how=settlings, last=st.sampled_from(["commit", "rollback", "terminate"]))
    def change_while_another_settles(self, index: int, change: str, how: str, last: str) -> None:
        """Steps that rarely follow each other by chance."""
        self.park("k")
        self.change(0, False, index, change)
        self.settle(1, True, index, how)
        getattr(self, last)(0)

    @rule(number=who, ends=ends)
    def redrive(self, number: int, ends: bool) -> None:
        self.act(number, ends, lambda session: session.value("select count(*) from ulak.redrive(p_endpoint => 'shop')"))

    @rule(number=who, ends=ends)
    def discard(self, number: int, ends: bool) -> None:
        self.act(number, ends, lambda session: session.value("select count(*) from ulak.discard('shop', p_limit => 1)"))

    @rule(number=who, ends=ends, later=st.sampled_from([0, 15, 600]))
    def recover(self, number: int, ends: bool, later: float) -> None:
        self.now += later
        self.act(number, ends, lambda session: session.recover(now=self.now))

    @rule(number=who, ends=ends)
    def sweep(self, number: int, ends: bool) -> None:
        self.act(number, ends, lambda session: session.db.execute("select ulak_private.sweep()"))

    @rule(number=who)
    def commit(self, number: int) -> None:
        with suppress(psycopg.Error):
            self.sessions[number].db.commit()
            self.claims += self.claimed.pop(number, [])

    @rule(number=who)
    def rollback(self, number: int) -> None:
        self.sessions[number].db.rollback()
        self.claimed.pop(number, None)

    @rule(number=who)
    def terminate(self, number: int) -> None:
        gone = self.sessions[number].db
        self.queue.db.execute("select pg_terminate_backend(%s)", [gone.info.backend_pid])
        wait_until_gone(gone, self.queue.db)
        self.claimed.pop(number, None)
        self.sessions[number] = self.new_session()

    @classmethod
    def new_session(cls) -> Queue:
        session = Queue(cls.connect(autocommit=False, options="-c lock_timeout=20ms"), cls.queue.base)
        session.db.rollback()
        return session

    @rule()
    def look(self) -> None:
        """What every session did is undone, and ten seconds pass."""
        for number in range(SESSIONS):
            self.rollback(number)
        self.queue.db.execute("select ulak_private.sweep()")
        assert self.queue.column(ORPHANS) == []
        assert self.queue.column(OVERTAKERS) == []

    def teardown(self) -> None:
        if not hasattr(self, "claims"):
            return
        self.look()
        self.queue.recover(now=self.now + LATER)
        self.queue.value("select count(*) from ulak.discard('shop')")
        while claims := self.queue.claim(10, now=self.now + 2 * LATER):
            for claim in claims:
                self.queue.complete(claim, now=self.now + 2 * LATER)
        assert self.queue.column("select id from ulak.queue") == []


def test_no_message_stays_parked_without_a_predecessor(connect: Connect, queue: Queue) -> None:
    queue.db.execute("set lock_timeout = '20ms'")
    Machine.connect, Machine.queue = staticmethod(connect), queue  # type: ignore[assignment]
    Machine.sessions = [Machine.new_session() for _ in range(SESSIONS)]

    play(Machine, steps=15, runs=100, runs_of_chaos=2000)
