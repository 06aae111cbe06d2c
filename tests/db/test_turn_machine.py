"""Whose turn it is, against a model in Python: endpoints with backlogs and limits of all kinds, and claims of any size."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from support.machine import play
from support.queue import DB, Queue

# A claim takes messages of at most this many endpoints.
MOST_ENDPOINTS = 32

CLAIM = """
    select id, endpoint_id, attempt, may_have_more, left_out_others from ulak_private.claim(
        'w', %s, p_lease => '1 hour', p_protocols => '{pull}', p_now => %s,
        p_rooms => row(%s::bigint[], %s::integer[], %s::integer)::ulak_private.rooms
    )
"""

which = st.integers(0, 99)


@dataclass
class Message:
    id: int
    priority: int
    due: float
    key: str | None = None


@dataclass
class Endpoint:
    id: int
    name: str
    cap: int | None
    waiting: list[Message] = field(default_factory=list)
    in_flight: list[tuple[Message, int]] = field(default_factory=list)
    enabled: bool = True
    is_open: bool = False
    # Claims since it last got a message, while it might have.
    passed_over: int = 0

    def heads(self, now: float) -> list[Message]:
        """What may go out, in its order: within an endpoint priority rules, then time."""
        busy = {message.key for message, _ in self.in_flight} - {None}
        found = []
        for message in sorted(self.waiting, key=lambda each: each.id):
            if message.key in busy:
                continue
            if message.key is not None:
                busy.add(message.key)
            if message.due <= now:
                found.append(message)
        return sorted(found, key=lambda each: (-each.priority, each.due, each.id))

    def is_blocked(self, now: float) -> bool:
        return any(each.due <= now for each in self.waiting) and not self.heads(now)

    def quota(self, room: int | None) -> int:
        limits = [
            limit for limit in (room, None if self.cap is None else self.cap - len(self.in_flight)) if limit is not None
        ]
        return max(0, min([1_000_000, *limits])) if self.enabled and not self.is_open else 0


class Machine(RuleBasedStateMachine):
    queue: Queue

    @initialize(
        count=st.integers(2, 6) | st.integers(30, 45),
        caps=st.lists(st.sampled_from([None, None, None, 1, 3]), min_size=5, max_size=5),
        backlog=st.integers(0, 60),
    )
    def start(self, count: int, caps: list[int | None], backlog: int) -> None:
        self.queue.empty()
        self.queue.db.execute("select setval('ulak_private.pull_position', 1, false)")
        self.now = 0.0
        self.endpoints: dict[int, Endpoint] = {}
        for n in range(count):
            cap = caps[n % len(caps)]
            id = self.queue.endpoint(f"e{n}", {"max_in_flight": cap} if cap else {})
            self.endpoints[id] = Endpoint(id, f"e{n}", cap)
        if backlog:
            self.send_to_all(0, backlog)

    def pick(self, number: int) -> Endpoint:
        return list(self.endpoints.values())[number % len(self.endpoints)]

    @rule(
        number=which,
        count=st.integers(1, 12),
        priority=st.sampled_from([0, 0, 3, 10]),
        delay=st.sampled_from([0, 0, 0, 20]),
        key=st.sampled_from([None, None, "k", "l"]),
    )
    def send(self, number: int, count: int, priority: int, delay: float, key: str | None) -> None:
        endpoint = self.pick(number)
        self.add([endpoint], count, priority, delay, key)

    @rule(priority=st.sampled_from([0, 5]), count=st.integers(1, 40))
    def send_to_all(self, priority: int, count: int) -> None:
        self.add(list(self.endpoints.values()), count, priority, 0, None)

    def add(self, endpoints: list[Endpoint], count: int, priority: int, delay: float, key: str | None) -> None:
        due = self.now + delay
        rows = self.queue.db.execute(
            """
            insert into ulak_private.deliveries (endpoint_id, event_id, priority, ordering_key, next_retry_at, created_at)
            select e, 0, %(priority)s, %(key)s, %(due)s, %(due)s
            from unnest(%(endpoints)s::bigint[]) e, generate_series(1, %(count)s) order by e
            returning id, endpoint_id
            """,
            {
                "priority": priority,
                "key": key,
                "due": self.queue.at(due),
                "endpoints": [each.id for each in endpoints],
                "count": count,
            },
        ).fetchall()
        for id, endpoint_id in rows:
            self.endpoints[endpoint_id].waiting.append(Message(id, priority, due, key))

    @rule(step=st.sampled_from([1, 10, 30]))
    def wait(self, step: float) -> None:
        self.now += step

    @rule(number=which, by=st.sampled_from(["operator", "breaker"]))
    def switch(self, number: int, by: str) -> None:
        endpoint = self.pick(number)
        if by == "operator":
            endpoint.enabled = not endpoint.enabled
            self.queue.call("enable_endpoint" if endpoint.enabled else "disable_endpoint", endpoint.name)
        else:
            endpoint.is_open = not endpoint.is_open
            self.queue.db.execute(
                "update ulak.endpoints set circuit_state = %s, circuit_half_open_at = 'infinity' where id = %s",
                ["open" if endpoint.is_open else "closed", endpoint.id],
            )

    @rule(number=which, count=st.integers(1, 20) | st.just(100))
    def settle(self, number: int, count: int) -> None:
        held = [(endpoint, claim) for endpoint in self.endpoints.values() for claim in endpoint.in_flight]
        for endpoint, (message, attempt) in held[number % (len(held) + 1) :][:count]:
            self.queue.call("complete", message.id, "w", attempt)
            endpoint.in_flight.remove((message, attempt))

    @rule(
        limit=st.integers(1, 60),
        rooms=st.dictionaries(st.integers(0, 5), st.integers(0, 4), max_size=3),
        others=st.sampled_from([None, None, 0, 2, 10]),
    )
    def claim(self, limit: int, rooms: dict[int, int], others: int | None) -> None:
        by_id = {self.pick(number).id: room for number, room in rooms.items()}
        self.check_claim(limit, by_id, others)

    @precondition(lambda self: any(each.waiting for each in self.endpoints.values()))
    @rule(limits=st.lists(st.integers(1, 12) | st.integers(20, 200), min_size=1, max_size=4))
    def claim_without_rooms(self, limits: list[int]) -> None:
        for limit in limits:
            self.check_claim(limit, {}, None)

    def check_claim(self, limit: int, rooms: dict[int, int], others: int | None) -> None:
        heads = {id: each.heads(self.now) for id, each in self.endpoints.items()}
        may = {id: min(limit, len(heads[id]), each.quota(rooms.get(id, others))) for id, each in self.endpoints.items()}
        told = self.queue.rows(CLAIM, limit, self.queue.at(self.now), list(rooms), list(rooms.values()), others)
        rows = [row for row in told if row["id"] is not None]
        is_everything = not any(row["left_out_others"] for row in told)
        taken = Counter(row["endpoint_id"] for row in rows)

        served = {id for id in taken if taken[id]}
        assert all(taken[id] <= may[id] for id in served), "limits hold"
        for id in served:
            ids = [row["id"] for row in rows if row["endpoint_id"] == id]
            assert ids == [message.id for message in heads[id][: len(ids)]], "within an endpoint priority rules"
        hungry = [id for id in may if may[id]]
        # An endpoint whose messages are all behind others of their keys may be picked once, in place of another: then they are parked, and the
        # claim says that it isn't over.
        blocked = 0 if is_everything else sum(each.is_blocked(self.now) for each in self.endpoints.values())
        if len(hungry) <= MOST_ENDPOINTS:
            wanted = min(limit, sum(may.values()))
            assert wanted - blocked <= len(rows) <= wanted, "nothing is left that fits"
        else:
            assert len(served) >= min(limit, MOST_ENDPOINTS) - blocked or len(rows) == limit
        wanting = [taken[id] for id in served if taken[id] < may[id]]
        if wanting:
            assert max(taken.values()) <= min(wanting) + 1, "shares are fair"
        self.check_turns(limit, hungry, served)
        for row in rows:
            endpoint = self.endpoints[row["endpoint_id"]]
            (message,) = [each for each in endpoint.waiting if each.id == row["id"]]
            endpoint.waiting.remove(message)
            endpoint.in_flight.append((message, row["attempt"]))
            assert row["may_have_more"] or taken[endpoint.id] >= len(heads[endpoint.id])

    def check_turns(self, limit: int, hungry: list[int], served: set[int]) -> None:
        """An endpoint that could have got a message and didn't waits for at most one whole round of others."""
        for id, endpoint in self.endpoints.items():
            if id in served or id not in hungry:
                endpoint.passed_over = 0
            else:
                # Each claim serves at least this many others.
                endpoint.passed_over += min(limit, MOST_ENDPOINTS)
                assert endpoint.passed_over < len(self.endpoints) + MOST_ENDPOINTS, "nobody starves"


@pytest.fixture(scope="module")
def queue(module_session: DB) -> Queue:
    return Queue(module_session)


def test_claims_go_round_as_the_model_says(queue: Queue) -> None:
    Machine.queue = queue

    play(Machine, steps=40, runs=40, runs_of_chaos=200)
