"""The circuit breaker against a model in Python: successes, failures, time, claims, crashes and resets at random."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from support.machine import play
from support.queue import DB, Claim, Queue

RULES: dict[str, dict[str, Any]] = {
    "consecutive": {"threshold": 3, "cooldown": 30},
    "all": {"threshold": 2, "cooldown": 30, "counts": "all"},
    "rate": {"mode": "rate", "window": 60, "min_requests": 4, "failure_rate": 0.5, "cooldown": 30},
}
# The most in flight by the endpoint's config, which also ends a slow start.
CAPS = {"all": 5}
CONCURRENCY = 128
ERRORS = {"success": None, "failure": "[RETRYABLE] 503", "permanent": "[PERMANENT] 400"}

outcomes = st.sampled_from(["success", "success", "failure", "failure", "failure", "permanent"])
which = st.integers(0, 3) | st.integers(0, 99)


@dataclass
class Circuit:
    """What the breaker must do, said as simply as possible."""

    rules: dict[str, Any]
    cap: int | None
    state: str = "closed"
    slow: int | None = None
    failures: int = 0
    opened_at: float | None = None
    half_open_at: float | None = None
    probe: tuple[int, int] | None = None
    window_from: float | None = None
    window: list[bool] = field(default_factory=list)
    events: list[str] = field(default_factory=list)

    def outcome(self, kind: str, claim: tuple[int, int] | None, now: float) -> None:
        """A null claim stands for the probe."""
        failed = {"success": False, "failure": True, "permanent": True if self.rules.get("counts") == "all" else None}[
            kind
        ]
        if self.state == "closed" and failed is not None:
            self.count(failed, now)
            self.ease(failed)
        elif self.state == "half_open" and claim in (None, self.probe):
            if failed:
                self.open(now)
            else:
                self.close("circuit.closed")
                self.ease(False)

    def ease(self, failed: bool) -> None:
        if self.slow is not None:
            self.slow = max(1, self.slow // 2) if failed else self.slow + 1
            if not failed and self.slow >= (self.cap or CONCURRENCY):
                self.slow = None

    def count(self, failed: bool, now: float) -> None:
        self.failures = self.failures + 1 if failed else 0
        if self.rules.get("mode") != "rate":
            if self.failures >= self.rules["threshold"]:
                self.open(now)
            return
        if self.window_from is None or now >= self.window_from + self.rules["window"]:
            self.window_from, self.window = now, []
        self.window.append(failed)
        enough = len(self.window) >= self.rules["min_requests"]
        if failed and enough and sum(self.window) >= self.rules["failure_rate"] * len(self.window):
            self.open(now)

    def open(self, now: float) -> None:
        self.events.append("circuit.opened")
        self.state, self.opened_at, self.half_open_at = "open", now, now + self.rules["cooldown"]
        self.probe = self.window_from = self.slow = None

    def close(self, event: str) -> None:
        self.events.append(event)
        self.slow = None if self.state == "closed" else 1
        self.state, self.failures = "closed", 0
        self.opened_at = self.half_open_at = self.probe = self.window_from = None

    def probed(self, claim: tuple[int, int]) -> None:
        if self.state == "open":
            self.events.append("circuit.half_open")
        self.state, self.probe = "half_open", claim


class Machine(RuleBasedStateMachine):
    queue: Queue
    breaker: dict[str, Any]
    cap: int | None

    @initialize()
    def start(self) -> None:
        self.queue.empty()
        policy = {"max_retries": 1000, "backoff": "schedule", "schedule": [0]}
        config = {"circuit_breaker": self.breaker} | ({"max_in_flight": self.cap} if self.cap else {})
        self.endpoint_id = self.queue.endpoint(config=config, policy=policy)
        self.queue.db.execute("delete from ulak.event_log")
        self.circuit = Circuit(self.breaker, self.cap)
        self.now = 0.0
        self.pending: dict[int, float] = {}
        self.held: dict[tuple[int, int], tuple[Claim, float]] = {}
        # When a claim has last looked for leases that are over.
        self.queue.db.execute("set ulak_private.leases_looked_at = ''")
        self.looked_at = -1.0
        self.send(8)

    def check(self) -> None:
        circuit, row = self.circuit, self.queue.circuit()
        probe = (row["circuit_probe_id"], row["circuit_probe_attempt"])
        seen = (
            *(row["circuit_state"], row["circuit_failure_count"]),
            *(row["circuit_opened_at"], row["circuit_half_open_at"]),
            None if row["circuit_probe_attempt"] is None else probe,
            row["slow_start_limit"],
        )
        times = (None if at is None else self.queue.at(at) for at in (circuit.opened_at, circuit.half_open_at))
        assert seen == (circuit.state, circuit.failures, *times, circuit.probe, circuit.slow)
        assert self.queue.events("circuit.%") == circuit.events

    def allowed(self) -> int:
        """How many messages the breaker lets through."""
        caps = [cap for cap in (self.cap, self.circuit.slow) if cap is not None]
        room = max(0, min(caps) - len(self.held)) if caps else 1000
        if self.circuit.state == "closed":
            return room
        if self.circuit.state == "open":
            return min(room, 1) if self.now >= (self.circuit.half_open_at or 0) else 0
        assert self.circuit.probe is not None
        _, lease = self.held.get(self.circuit.probe, (None, -1.0))
        return 0 if lease > self.now else min(room, 1)

    @rule(step=st.sampled_from([0.5, 5, 15, 30, 61]))
    def wait(self, step: float) -> None:
        self.now += step

    @rule(count=st.integers(1, 5))
    def send(self, count: int) -> None:
        self.pending.update(dict.fromkeys(self.queue.send_many(count), -1.0))

    def take_back(self) -> int:
        lost = [claim for claim, (_, lease) in self.held.items() if lease <= self.now]
        for claim in lost:
            del self.held[claim]
            self.pending[claim[0]] = self.now
        return len(lost)

    @rule(limit=st.integers(1, 5), lease=st.sampled_from([10, 100]))
    def claim(self, limit: int, lease: float) -> None:
        if self.now - self.looked_at >= 1:
            self.looked_at = self.now
            self.take_back()
        due = [id for id, at in self.pending.items() if at <= self.now]
        claims = self.queue.claim(limit, lease=lease, now=self.now)
        assert len(claims) == min(limit, len(due), self.allowed())
        for claim in claims:
            del self.pending[claim.id]
            self.held[claim.id, claim.attempt] = (claim, self.now + lease)
            if self.circuit.state != "closed":
                self.circuit.probed((claim.id, claim.attempt))
        self.check()

    @precondition(lambda self: self.held)
    @rule(kinds=st.lists(st.tuples(outcomes, which), min_size=1, max_size=4))
    def settle(self, kinds: list[tuple[str, int]]) -> None:
        """Several at once, in this order."""
        chosen: dict[tuple[int, int], str] = {}
        for kind, number in kinds:
            held = list(self.held)
            chosen.setdefault(held[-1 - number % len(held)], kind)
        self.queue.value(
            "select ulak_private.settle_many('w', %s, %s, %s, p_now => %s)",
            [id for id, _ in chosen],
            [attempt for _, attempt in chosen],
            [ERRORS[kind] for kind in chosen.values()],
            self.queue.at(self.now),
        )
        for claim, kind in chosen.items():
            self.circuit.outcome(kind, claim, self.now)
            del self.held[claim]
            if kind == "failure":
                self.pending[claim[0]] = self.now
        self.check()

    @precondition(lambda self: self.held)
    @rule(number=which, delay=st.sampled_from([0, 10]))
    def release(self, number: int, delay: float) -> None:
        claim = list(self.held)[-1 - number % len(self.held)]
        self.queue.release(self.held.pop(claim)[0], delay=delay, now=self.now)
        self.pending[claim[0]] = self.now + delay
        self.check()

    @rule()
    def crash(self) -> None:
        """Leases that ran out are taken back."""
        found = self.queue.recover(self.now)
        assert found == self.take_back()
        self.check()

    @rule()
    def lose_the_probe(self) -> None:
        """Somebody deletes it by hand."""
        if self.circuit.probe in self.held:
            assert self.circuit.probe is not None
            self.queue.db.execute("delete from ulak.queue where id = %s", [self.circuit.probe[0]])
            del self.held[self.circuit.probe]
            self.check()

    @rule()
    def reset(self) -> None:
        was_closed = self.circuit.state == "closed"
        assert self.queue.call("reset_circuit_breaker", "shop", self.queue.at(self.now)) is not was_closed
        self.circuit.close("circuit.reset")
        self.check()

    @rule(success=st.booleans())
    def report(self, success: bool) -> None:
        self.circuit.outcome("success" if success else "failure", None, self.now)
        reported = self.queue.call("update_circuit_breaker", self.endpoint_id, success, self.queue.at(self.now))
        assert reported == self.circuit.state
        self.check()


@pytest.fixture(scope="module")
def queue(module_session: DB) -> Queue:
    return Queue(module_session)


@pytest.mark.parametrize("rules", RULES)
def test_the_breaker_does_what_the_model_says(queue: Queue, rules: str) -> None:
    Machine.queue = queue
    Machine.breaker = RULES[rules]
    Machine.cap = CAPS.get(rules)

    play(Machine, steps=60, runs=25, runs_of_chaos=120)
