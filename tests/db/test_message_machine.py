"""The life of messages against a model in Python: random sends, claims, reports, crashes, sweeps, redrives and time."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import psycopg
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from support.machine import play
from support.queue import DB, INFINITY, Claim, Queue

NEVER = float("inf")
# A fresh message became due when it was really sent, long before the machine's time began.
LONG_AGO = -1e6

BREAKER = {"circuit_breaker": {"threshold": 1000}}
POLICIES: dict[str, dict[str, Any]] = {
    "a": {"max_retries": 2, "backoff": "fixed", "base_delay_seconds": 10},
    "b": {"max_retries": 0},
    "c": {"max_retries": 3, "backoff": "schedule", "schedule": [0, 1, 60]},
}
which = st.integers(0, 5) | st.integers(0, 99)
DELAYS = {"a": [10, 10], "b": [], "c": [0, 1, 60]}


@dataclass
class Message:
    id: int
    endpoint: str
    created: float
    priority: int = 0
    key: str | None = None
    scheduled: float = -NEVER
    expires: float = NEVER
    due: float = 0
    status: str = "pending"
    attempts: int = 0
    retries: int = 0
    worker: str | None = None
    lease: float | None = None
    error: str | None = None
    history: int = 0
    root: int = 0

    @property
    def is_live(self) -> bool:
        return self.status in ("pending", "processing")

    def seen(self, is_behind: bool) -> tuple[Any, ...]:
        """What can be seen of it in the table."""
        due = self.due if self.status == "pending" and self.due > LONG_AGO / 2 and not is_behind else None
        return (
            *(self.id, self.status, self.attempts, self.retries, self.worker, self.lease, due),
            *(self.error, self.history),
        )


@dataclass
class Model:
    """What ulak must do, said as simply as possible."""

    now: float = 0
    messages: dict[int, Message] = field(default_factory=dict)
    letters: dict[int, bool] = field(default_factory=dict)
    delivered: dict[tuple[str, str], list[int]] = field(default_factory=lambda: defaultdict(list))
    # When a claim of these endpoints has last looked for leases that are over.
    looked_at: dict[str, float] = field(default_factory=dict)

    def line(self, endpoint: str, key: str | None) -> list[Message]:
        return [
            each
            for each in self.messages.values()
            if each.is_live and each.endpoint == endpoint and each.key == key and key is not None
        ]

    def add(self, message: Message) -> None:
        message.due = max(message.created, message.scheduled)
        self.messages[message.id] = message

    def is_behind(self, message: Message) -> bool:
        return message.key is not None and self.line(message.endpoint, message.key)[0] is not message

    def claimable(self, endpoint: str) -> list[Message]:
        due = [
            each
            for each in self.messages.values()
            if each.status == "pending" and each.endpoint == endpoint and each.due <= self.now < each.expires
            if not self.is_behind(each)
        ]
        return sorted(due, key=lambda each: (-each.priority, each.due, each.id))

    def is_held(self, claim: Claim, worker: str) -> bool:
        message = self.messages.get(claim.id)
        return message is not None and (message.status, message.worker, message.attempts) == (
            "processing",
            worker,
            claim.attempt,
        )

    def take(self, message: Message, worker: str, lease: float) -> None:
        message.status, message.worker, message.lease = "processing", worker, self.now + lease
        message.attempts += 1

    def let_go(self, message: Message, status: str) -> None:
        message.status, message.worker, message.lease = status, None, None

    def fail(self, message: Message, error: str, retry_after: float | None = None) -> None:
        delays = DELAYS[message.endpoint]
        message.error = error
        if error.startswith("[RETRYABLE]") and message.retries < len(delays):
            self.let_go(message, "pending")
            delay = delays[message.retries] if retry_after is None else retry_after
            message.due = max(self.now + delay, message.scheduled)
            message.retries += 1
        else:
            self.bury(message)

    def recover(self, endpoints: str) -> int:
        lost = [
            each
            for each in self.messages.values()
            if each.endpoint in endpoints and each.lease is not None and each.lease <= self.now
        ]
        for message in lost:
            self.fail(message, f'[RETRYABLE] lease expired: worker "{message.worker}" went silent', retry_after=0)
        return len(lost)

    def take_over(self, endpoints: str) -> None:
        """As a claim does, once a second."""
        if self.now - self.looked_at.get(endpoints, -NEVER) >= 1:
            self.looked_at[endpoints] = self.now
            self.recover(endpoints)

    def bury(self, message: Message) -> None:
        self.let_go(message, "failed")
        self.letters[message.id] = False


class Machine(RuleBasedStateMachine):
    queue: Queue
    steps = 0

    @initialize()
    def start(self) -> None:
        self.queue.empty()
        for name, policy in POLICIES.items():
            self.queue.endpoint(name, BREAKER, policy)
        self.queue.db.execute("set ulak_private.leases_looked_at = ''")
        self.model = Model()
        self.claims: list[tuple[Claim, str]] = []
        self.sent = 0

    def check(self) -> None:
        """The tables say what the model says."""
        Machine.steps += 1
        rows = self.queue.db.execute(
            """
            select
                id, status, attempts, retry_count, locked_by, lease_until, next_retry_at, last_error,
                coalesce(jsonb_array_length(failure_history), 0)
            from ulak.messages where status <> 'cancelled' order by id
            """
        ).fetchall()
        seen = [
            (*row[:5], self.seconds(row[5]), self.seconds(row[6]) if row[1] == "pending" else None, *row[7:])
            for row in rows
        ]
        # What is behind its key may be parked or due, as no claim or one has met it; a head is never parked.
        behind = {each.id for each in self.model.messages.values() if each.is_live and self.model.is_behind(each)}
        seen = [(*row[:6], None, *row[7:]) if row[0] in behind else row for row in seen]
        assert seen == [each.seen(each.id in behind) for each in self.model.messages.values()]
        letters = self.queue.db.execute(
            "select original_message_id, status = 'redriven' from ulak.dlq order by original_message_id"
        ).fetchall()
        assert dict(letters) == self.model.letters

    def seconds(self, at: Any) -> float | None:
        """None for a time before the machine's."""
        if at is None or at == INFINITY:
            return NEVER if at else None
        seconds = (at - self.queue.base).total_seconds()
        return seconds if seconds >= 0 else None

    # Time.

    @rule(step=st.sampled_from([0.5, 5, 10, 30, 61, 300]))
    def wait(self, step: float) -> None:
        self.model.now += step
        self.check()

    # Applications.

    def fresh(self, id: int, endpoint: str, **options: Any) -> None:
        self.sent += 1
        self.model.add(Message(id, endpoint, LONG_AGO + self.sent, root=id, **options))

    @rule(
        endpoint=st.sampled_from("abc"),
        priority=st.sampled_from([0, 0, 5]),
        key=st.sampled_from([None, "k", "k", "l"]),
        delay=st.sampled_from([None, None, 20]),
        ttl=st.sampled_from([None, None, 40]),
    )
    def send(self, endpoint: str, priority: int, key: str | None, delay: float | None, ttl: float | None) -> None:
        options: dict[str, Any] = {"priority": priority}
        if delay is not None:
            options["scheduled"] = self.model.now + delay
        if ttl is not None:
            options["expires"] = self.model.now + ttl
        id = self.queue.send(
            endpoint,
            priority=priority,
            ordering_key=key,
            **{
                f"{name}_at" if name == "expires" else "scheduled_at": at
                for name, at in options.items()
                if name != "priority"
            },
        )
        self.fresh(id, endpoint, key=key, **options)
        self.check()

    @rule(endpoint=st.sampled_from("abc"), count=st.integers(1, 8))
    def send_many(self, endpoint: str, count: int) -> None:
        for id in self.queue.send_many(count, endpoint):
            self.fresh(id, endpoint)
        self.check()

    def any_message(self, which: int) -> Message:
        return list(self.model.messages.values())[-1 - which % len(self.model.messages)]

    @precondition(lambda self: self.model.messages)
    @rule(which=which)
    def cancel(self, which: int) -> None:
        message = self.any_message(which)
        is_waiting = message.status == "pending"
        assert self.queue.call("cancel", message.id, now=self.queue.at(self.model.now)) == is_waiting
        if is_waiting:
            del self.model.messages[message.id]
        self.check()

    @precondition(lambda self: self.model.messages)
    @rule(which=which, delay=st.sampled_from([0, 15, 50]))
    def reschedule(self, which: int, delay: float) -> None:
        message, at = self.any_message(which), self.model.now + delay
        call = ("reschedule", message.id, self.queue.at(at))
        if message.status == "pending" and message.expires <= at:
            assert self.queue.refuses(*call, now=self.queue.at(self.model.now)).sqlstate == "22023"
        else:
            assert self.queue.call(*call, now=self.queue.at(self.model.now)) == (message.status == "pending")
            if message.status == "pending":
                message.scheduled = message.due = at
        self.check()

    @precondition(lambda self: self.model.messages)
    @rule(which=which, priority=st.sampled_from([0, 5, 10]))
    def reprioritise(self, which: int, priority: int) -> None:
        message = self.any_message(which)
        call = ("reprioritise", message.id, priority)
        assert self.queue.call(*call, now=self.queue.at(self.model.now)) == (message.status == "pending")
        if message.status == "pending":
            message.priority = priority
        self.check()

    # Workers.

    @rule(
        worker=st.sampled_from(["v", "w"]),
        endpoint=st.sampled_from("abc"),
        limit=st.integers(1, 6),
        lease=st.sampled_from([20, 100]),
    )
    def claim(self, worker: str, endpoint: str, limit: int, lease: float) -> None:
        self.model.take_over(endpoint)
        expected = self.model.claimable(endpoint)[:limit]
        claims = self.queue.claim(limit, worker=worker, endpoint=endpoint, lease=lease, now=self.model.now)
        assert [claim.id for claim in claims] == [each.id for each in expected]
        self.took(claims, worker, lease)

    @rule(worker=st.sampled_from(["v", "w"]), limit=st.integers(1, 12), lease=st.sampled_from([20, 100]))
    def claim_of_all(self, worker: str, limit: int, lease: float) -> None:
        claims = self.queue.claim(limit, worker=worker, lease=lease, now=self.model.now)
        self.model.take_over("abc")
        lines = {name: [each.id for each in self.model.claimable(name)] for name in POLICIES}
        taken: dict[str, list[int]] = {name: [] for name in POLICIES}
        for claim in claims:
            taken[claim.endpoint].append(claim.id)
        for name, ids in taken.items():
            assert ids == lines[name][: len(ids)], "each endpoint's messages come in their order"
            # A claim visits as many endpoints as it is to take messages: a smaller one may leave some to the next.
            if len(ids) < len(lines[name]) and (ids or limit >= len(POLICIES)):
                assert max(map(len, taken.values())) <= len(ids) + 1, "endpoints take turns"
        if limit >= len(POLICIES):
            assert len(claims) == min(limit, sum(map(len, lines.values())))
        assert bool(claims) == any(lines.values())
        self.took(claims, worker, lease)

    def took(self, claims: list[Claim], worker: str, lease: float) -> None:
        for claim in claims:
            message = self.model.messages[claim.id]
            self.model.take(message, worker, lease)
            assert claim.attempt == message.attempts
            self.claims.append((claim, worker))
        self.check()

    # A report may come from any claim ever made, the last ones more often: a zombie's is refused and changes nothing.

    def report(self, which: int, name: str, **options: Any) -> Message | None:
        claim, worker = self.claims[-1 - which % len(self.claims)]
        if self.model.is_held(claim, worker):
            getattr(self.queue, name)(claim, worker=worker, now=self.model.now, **options)
            return self.model.messages[claim.id]
        with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState):
            getattr(self.queue, name)(claim, worker=worker, now=self.model.now, **options)
        self.check()
        return None

    @precondition(lambda self: self.claims)
    @rule(which=which)
    def complete(self, which: int) -> None:
        if message := self.report(which, "complete"):
            self.model.let_go(message, "completed")
            if message.key is not None:
                self.model.delivered[message.endpoint, message.key].append(message.id)
            self.check()

    @precondition(lambda self: self.claims)
    @rule(
        which=which,
        error=st.sampled_from(["[RETRYABLE] 503"] * 3 + ["[PERMANENT] 400", "[DISABLE] 410"]),
        retry_after=st.sampled_from([None, None, 0, 25]),
    )
    def fail(self, which: int, error: str, retry_after: float | None) -> None:
        if message := self.report(which, "fail", error=error, retry_after=retry_after):
            self.model.fail(message, error, retry_after)
            self.check()

    @precondition(lambda self: self.claims)
    @rule(which=which, delay=st.sampled_from([0, 15]))
    def release(self, which: int, delay: float) -> None:
        if message := self.report(which, "release", delay=delay):
            self.model.let_go(message, "pending")
            message.due = max(self.model.now + delay, message.scheduled)
            self.check()

    @precondition(lambda self: self.claims)
    @rule(which=which)
    def heartbeat(self, which: int) -> None:
        claim, worker = self.claims[-1 - which % len(self.claims)]
        message = self.model.messages.get(claim.id)
        alive = self.model.is_held(claim, worker) and message is not None and self.model.now < (message.lease or 0)
        assert self.queue.heartbeat(claim, worker=worker, lease=50, now=self.model.now) == alive
        if alive and message is not None:
            message.lease = self.model.now + 50
        self.check()

    # Sweeps. A crash needs no rule: a worker simply never reports.

    @rule()
    def recover(self) -> None:
        found = self.queue.recover(self.model.now)
        assert found == self.model.recover("abc")
        self.check()

    @rule()
    def expire(self) -> None:
        late = [
            each for each in self.model.messages.values() if each.status == "pending" and each.expires <= self.model.now
        ]
        assert self.queue.expire(self.model.now) == len(late)
        for message in late:
            self.model.let_go(message, "expired")
        self.check()

    # Operators.

    @rule(which=which)
    def bury(self, which: int) -> None:
        waiting = [each for each in self.model.messages.values() if each.status == "pending"]
        if waiting:
            message = waiting[which % len(waiting)]
            self.queue.bury(message.id, "by hand", self.model.now)
            message.error = "[PERMANENT] by hand"
            self.model.bury(message)
            self.check()

    @rule()
    def redrive(self) -> None:
        dead = [id for id, redriven in self.model.letters.items() if not redriven]
        at = self.queue.at(self.model.now)
        assert self.queue.value("select messages from ulak.redrive(p_now => %s)", at) == len(dead)
        new_ids = self.queue.column(
            "select redriven_message_id from ulak.dlq where original_message_id = any (%s) order by original_message_id",
            dead,
        )
        for old_id, new_id in zip(sorted(dead), new_ids, strict=True):
            old = self.model.messages[old_id]
            self.model.letters[old_id] = True
            self.model.add(
                Message(
                    new_id,
                    old.endpoint,
                    self.model.now,
                    old.priority,
                    old.key,
                    history=old.history + 1,
                    root=old.root,
                )
            )
        self.check()

    def teardown(self) -> None:
        """Nothing is lost: what is left can be brought to an end, and then each message has one."""
        if not hasattr(self, "model"):
            return
        model, steps = self.model, Machine.steps
        for delivered in model.delivered.values():
            assert delivered == sorted(delivered)
        while any(each.is_live for each in model.messages.values()):
            model.now += 1000
            self.expire()
            self.recover()
            self.claim_of_all("w", 500, 100)
            for claim, worker in self.claims:
                if model.is_held(claim, worker):
                    self.queue.complete(claim, worker=worker, now=model.now)
                    model.let_go(model.messages[claim.id], "completed")
        self.check()
        ends: dict[int, list[str]] = defaultdict(list)
        for message in model.messages.values():
            ends[message.root].append(message.status)
        for statuses in ends.values():
            assert set(statuses[:-1]) <= {"failed"}, "only a dead message is redriven"
        same = "select count(*) from (select from ulak.messages where status <> 'cancelled' group by message_id) m"
        assert self.queue.value(same) == len(ends)
        Machine.steps = steps


@pytest.fixture
def queue(db: DB) -> Queue:
    return Queue(db)


def test_messages_live_as_the_model_says(queue: Queue) -> None:
    Machine.queue = queue
    Machine.steps = 0

    play(Machine, steps=80, runs=60, runs_of_chaos=600)

    assert Machine.steps >= 3_000
