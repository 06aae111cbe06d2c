"""The worker's loop with a database and receivers that do as the test says, and time that only the test moves."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from ulak.http.model import Endpoint, Message, Outcome
from ulak.http.transport import Courier, Settled
from ulak.worker import options
from ulak.worker.leases import PAYLOAD_BYTES
from ulak.worker.loop import GRACE_SECONDS, REPORT_SECONDS, STOP_SECONDS, Worker
from ulak.worker.options import Options
from ulak.worker.port import RINGS, BellSet, Busy, Claimed, EndpointConfig, Outcomes, Refused, Tidings
from ulak.worker.request_slots import LEAST_WAVE
from ulak.worker.wake_up import Bell

SETTINGS = {
    "batch_size": "500",
    "capture_response": "false",
    "cloudevents_source": "/ulak",
    "http_allow_internal_urls": "false",
    "http_allowed_networks": "",
    "http_connect_timeout": "5",
    "http_timeout": "10",
    "lease_seconds": "30",
    "poll_interval": "50",
    "poll_interval_busy": "2",
    "response_body_max_size": "65536",
    "worker_concurrency": "14",
}
DELIVERED = Outcome(status=200)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@dataclass
class Pending:
    endpoint_id: int
    message: Message


@dataclass
class FakeDatabase:
    """Hands out what was put in, and remembers what it was told. A hook may raise before a call is done."""

    clock: Clock
    pending: list[Pending] = field(default_factory=list)
    configs: dict[int, dict[str, Any]] = field(default_factory=dict)
    versions: dict[int, int] = field(default_factory=dict)
    blocked: dict[int, str] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)
    leave: str | None = None
    settings: str = ""
    hooks: dict[str, Callable[..., None]] = field(default_factory=dict)
    # Claims that saw all endpoints, and how long they take.
    wholes: list[float] = field(default_factory=list)
    whole_seconds: float = 0.0
    calls: list[tuple[str, float]] = field(default_factory=list)
    limits: list[int] = field(default_factory=list)
    settled: dict[int, Outcome] = field(default_factory=dict)
    released: dict[int, float] = field(default_factory=dict)
    renewed: Counter[int] = field(default_factory=Counter)
    open: bool = False
    sent: int = 0
    bell: FakeBell | None = None
    poller_until: float = math.inf

    def put(self, endpoint_id: int = 1, count: int = 1, payload: str = "{}", **fields: Any) -> list[int]:
        self.configs.setdefault(endpoint_id, {"url": "http://127.0.0.1/"})
        self.versions.setdefault(endpoint_id, 1)
        ids = list(range(self.sent + 1, self.sent + count + 1))
        self.sent += count
        self.pending += [Pending(endpoint_id, Message(id, f"m{id}", 1, payload, **fields)) for id in ids]
        return ids

    def _called(self, name: str, *arguments: Any) -> None:
        self.calls.append((name, self.clock.now))
        self.open = True
        if name in self.hooks:
            self.hooks[name](*arguments)

    def times(self, name: str) -> list[float]:
        return [at for called, at in self.calls if called == name]

    # port.Database

    def commit(self) -> None:
        self.open = False

    def heed(self) -> None:
        if "heed" in self.hooks:
            self.hooks["heed"]()

    def last_sent(self) -> int:
        self._called("last_sent")
        return self.sent

    def await_send(self, last_sent: int, interval: float, seconds: float) -> int:
        until = self.clock() + seconds
        while True:
            self.clock.sleep(min(interval, until - self.clock()))
            if (sent := self.last_sent()) != last_sent or self.clock() >= until:
                return sent

    def claim(
        self, limit: int, lease: float, rooms: Mapping[int, int], room: int, endpoint_ids: Sequence[int] | None = None
    ) -> list[Claimed]:
        self._called("claim")
        self.limits.append(limit)
        if endpoint_ids is None:
            self.wholes.append(self.clock.now)
            self.clock.now += self.whole_seconds
        turns: Counter[int] = Counter()
        due: list[tuple[int, int, Pending]] = []
        for each in self.pending:
            if endpoint_ids is not None and each.endpoint_id not in endpoint_ids:
                continue
            if turns[each.endpoint_id] < rooms.get(each.endpoint_id, room):
                due.append((turns[each.endpoint_id], each.message.id, each))
                turns[each.endpoint_id] += 1
        taken = [each for _, _, each in sorted(due, key=lambda item: item[:2])[:limit]]
        ids = {each.message.id for each in taken}
        self.pending = [each for each in self.pending if each.message.id not in ids]
        messages = {
            id: [each.message for each in taken if each.endpoint_id == id]
            for id in dict.fromkeys(each.endpoint_id for each in taken)
        }
        left = {each.endpoint_id for each in self.pending}
        return [Claimed(id, self.versions[id], found, id in left) for id, found in messages.items()]

    def endpoint_configs(self, ids: Iterable[int]) -> list[EndpointConfig]:
        self._called("endpoint_configs")
        known = [id for id in ids if id in self.configs]
        return [EndpointConfig(id, f"e{id}", self.versions[id], self.configs[id], ()) for id in known]

    def settle(self, outcomes: Outcomes) -> None:
        self._called("settle", outcomes)
        for place, id in enumerate(outcomes.ids):
            assert id not in self.settled
            self.settled[id] = Outcome(
                outcomes.errors[place] if outcomes.errors else None,
                outcomes.retry_after[place] if outcomes.retry_after else None,
                outcomes.responses[place] if outcomes.responses else None,
            )

    def release(self, ids: Sequence[int], attempts: Sequence[int], delay: float) -> None:
        self._called("release", ids)
        self.released |= dict.fromkeys(ids, delay)

    def renew(self, ids: Sequence[int], attempts: Sequence[int], lease: float) -> Sequence[int]:
        self._called("renew")
        self.renewed.update(ids)
        return [id for id in ids if id not in self.lost]

    def blocked_endpoints(self, ids: Iterable[int]) -> Mapping[int, str]:
        self._called("blocked_endpoints")
        return {id: state for id, state in self.blocked.items() if id in set(ids)}

    def check(self) -> Tidings:
        self._called("check")
        return Tidings(self.leave, self.settings)

    def report(self, progress: Mapping[str, object], statistics: Sequence[Mapping[str, object]]) -> None:
        self._called("report", progress)

    def sweep(self) -> None:
        self._called("sweep")

    def is_poller(self) -> bool:
        return self.clock.now < self.poller_until

    def listen(self) -> Bell | None:
        return cast(Bell, self.bell)

    def set_bell(self) -> BellSet:
        self._called("set_bell")
        assert self.bell is not None
        self.bell.rings_to = self.sent + RINGS
        return BellSet(self.bell.rings_to, self.sent, bool(self.pending))

    def light_turn(
        self, after: int, count: int, lease: float, delivered: Sequence[Message]
    ) -> tuple[list[Claimed], list[int]]:
        self._called("light_turn")
        ids = [each.id for each in delivered]
        self.settled.update(dict.fromkeys(ids, Outcome()))
        plain = [
            each
            for each in self.pending
            if after < each.message.id <= after + count and each.message.ordering_key is None
        ]
        self.pending = [each for each in self.pending if each not in plain]
        return [
            Claimed(id, self.versions[id], [each.message for each in plain if each.endpoint_id == id])
            for id in dict.fromkeys(each.endpoint_id for each in plain)
        ], ids

    def unlisten(self) -> None:
        self._called("unlisten")


class FakeBell:
    """Rings when somebody sends: the test says when."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._senders: list[tuple[float, Callable[[], object]]] = []
        self._has_rung = False
        self.rings_to = 0
        self.is_held = False

    def at(self, time: float, send: Callable[[], list[int]]) -> None:
        def ring() -> None:
            ids = send()
            self._has_rung = self._has_rung or not ids or ids[0] <= self.rings_to

        self._senders.append((time, ring))

    def pass_time(self, seconds: float, is_heard: bool = True) -> bool:
        """Time passes until somebody rings who is heard, or until its end."""
        end = self._clock.now + seconds
        while not (self._has_rung and is_heard):
            due = [each for each in self._senders if each[0] <= end]
            if not due:
                self._clock.now = max(self._clock.now, end)
                break
            self._clock.now = max(self._clock.now, due[0][0])
            self._senders.remove(due[0])
            due[0][1]()
        return self._has_rung

    # bell.Bell

    def fileno(self) -> int:
        return -1

    def hold(self) -> None:
        self.is_held = True

    def let_go(self) -> None:
        self.is_held = False

    def rang(self, seconds: float = 0) -> bool:
        assert self.is_held
        found = self.pass_time(seconds)
        self._has_rung = False
        return found


class FakeCourier:
    """Answers after as many seconds as the test says."""

    def __init__(self, clock: Clock, database: FakeDatabase) -> None:
        self._clock = clock
        self._database = database
        self._under_way: list[tuple[float, Settled]] = []
        self.answer: Callable[[Endpoint, Sequence[Message]], tuple[float, Outcome]] = lambda to, messages: (
            0.001,
            DELIVERED,
        )
        self.sent: list[tuple[Endpoint, list[int], float]] = []
        self.was_woken = False
        self.steps = 0

    def wake_on(self, descriptor: int) -> None:
        pass

    @property
    def in_flight(self) -> int:
        return len(self._under_way)

    def send(self, to: Endpoint, messages: Sequence[Message]) -> None:
        assert not self._database.open, "sent before it was committed"
        self.sent.append((to, [message.id for message in messages], self._clock.now))
        seconds, outcome = self.answer(to, messages)
        self._under_way.append((self._clock.now + seconds, Settled(to.id, messages, outcome)))

    def step(self, max_wait: float) -> list[Settled]:
        assert not self._database.open, "a transaction stays open during the wait"
        self.steps += 1
        seconds = max(0.0, min(min(at for at, _ in self._under_way) - self._clock.now, max_wait))
        bell = self._database.bell
        self.was_woken = False
        if bell is not None:
            self.was_woken = bell.pass_time(seconds, bell.is_held) and bell.is_held
        else:
            self._clock.now += seconds
        ended = [settled for at, settled in self._under_way if at <= self._clock.now]
        self._under_way = [each for each in self._under_way if each[0] > self._clock.now]
        return ended

    def ids(self) -> list[int]:
        return [id for _, ids, _ in self.sent for id in ids]


class Stage:
    def __init__(self) -> None:
        self.clock = Clock()
        self.database = FakeDatabase(self.clock)
        self.courier = FakeCourier(self.clock, self.database)
        self.worker: Worker | None = None

    def options(self, **settings: Any) -> Options:
        return options.parse({**SETTINGS, **{name: str(value) for name, value in settings.items()}}, "1.0", -1)

    def run(self, seconds: float = 1, **settings: Any) -> str:
        until = self.clock.now + seconds
        courier = cast(Courier, self.courier)
        self.worker = Worker(self.database, self.options(**settings), "", until, courier, self.clock, self.clock.sleep)
        ended = self.worker.run()
        self.worker.close()
        return ended


@pytest.fixture
def stage() -> Stage:
    return Stage()


def test_every_message_is_sent_and_settled_once(stage: Stage) -> None:
    ids = stage.database.put(count=1000)

    assert stage.run() == "over"

    assert sorted(stage.courier.ids()) == ids
    assert stage.database.settled == dict.fromkeys(ids, Outcome())
    assert stage.database.released == {}


def test_outcomes_are_settled_in_groups_and_slots_are_filled_with_them(stage: Stage) -> None:
    stage.database.put(1, count=500)
    stage.database.put(2, count=500)

    stage.run()

    # Sixteen slots, which are filled from the line; so groups are larger than that.
    assert len(stage.database.times("settle")) < 40
    assert len(stage.database.times("claim")) < 40 + 25
    assert stage.database.limits[0] == 16


def test_a_slow_receiver_is_refilled_without_waiting_for_a_full_group(stage: Stage) -> None:
    stage.database.put(count=600)
    delays = iter([0.05 + n % 16 * 0.003 for n in range(600)])
    stage.courier.answer = lambda to, messages: (next(delays), DELIVERED)

    stage.run(seconds=5)

    # Fourteen at once, at 74 ms on average and 5 ms for the group.
    assert len(stage.database.settled) == 600
    assert max(stage.database.times("settle")) - 1000 < 600 / 14 * 0.074 * 1.15


def test_a_receiver_that_answers_at_once_gets_a_few_at_a_time(stage: Stage) -> None:
    stage.database.put(count=2000)
    stage.courier.answer = lambda to, messages: (0.0002, DELIVERED)

    stage.run(worker_concurrency=128)

    assert len(stage.database.settled) == 2000
    times = Counter(at for _, _, at in stage.courier.sent)
    assert max(times.values()) <= LEAST_WAVE


def test_a_receiver_that_takes_its_time_gets_all_slots_within_milliseconds(stage: Stage) -> None:
    stage.database.put(count=300)
    stage.courier.answer = lambda to, messages: (0.05, DELIVERED)

    stage.run(worker_concurrency=128)

    assert len([at for _, _, at in stage.courier.sent if at < 1000.01]) == 128
    assert len(stage.database.settled) == 300


def test_who_waits_in_line_for_a_receiver_that_hangs_costs_nothing(stage: Stage) -> None:
    stage.database.put(count=1000)
    stage.courier.answer = lambda to, messages: (0.0002 if messages[0].id <= 600 else 60, DELIVERED)
    steps: list[int] = []
    stage.database.hooks["report"] = lambda progress: steps.append(stage.courier.steps)

    stage.run(seconds=6, worker_concurrency=128)

    assert 600 + 128 <= len(stage.courier.sent) < 1000
    # A report comes once a second. For three seconds after the last claim new messages are looked for often.
    assert all(later - sooner <= 25 for sooner, later in itertools.pairwise(steps[5:10]))


def test_the_next_of_an_ordering_key_is_claimed_as_soon_as_its_head_is_settled(stage: Stage) -> None:
    ids = stage.database.put(count=50, ordering_key="k")
    hidden = stage.database.pending[1:]
    stage.database.pending = stage.database.pending[:1]

    def promote(outcomes: Outcomes) -> None:
        stage.database.pending.append(hidden.pop(0)) if hidden else None

    stage.database.hooks["settle"] = promote
    stage.run(poll_interval=1000, poll_interval_busy=1000)

    assert stage.courier.ids() == ids
    assert max(stage.database.times("settle")) - 1000 < 50 * 0.002


def test_an_outcome_waits_out_a_lock_and_the_others_pass_it(stage: Stage) -> None:
    locked, free = stage.database.put(1, count=3), stage.database.put(2, count=3)
    unlocked_at = stage.clock.now + 3

    def lock(outcomes: Outcomes) -> None:
        stage.clock.now += 0.25 if set(outcomes.ids) & set(locked) else 0
        if stage.clock.now < unlocked_at and set(outcomes.ids) & set(locked):
            raise Busy

    stage.database.hooks["settle"] = lock
    more = []

    def send_more(progress: object) -> None:
        more.extend(stage.database.put(1) + stage.database.put(2))

    stage.database.hooks["report"] = send_more
    stage.run(seconds=6)

    assert stage.database.settled.keys() >= set(locked + free)
    # Nothing more is taken of an endpoint whose outcomes can't be stored.
    to_locked = [at for to, _, at in stage.courier.sent if to.id == 1]
    assert [at for at in to_locked if 1001 < at < unlocked_at] == []
    assert len([at for to, _, at in stage.courier.sent if to.id == 2 and 1001 < at < unlocked_at]) >= 1
    assert stage.database.released == {}
    # Each try waits for the lock and holds the others up: they become seldom.
    assert len(stage.database.times("settle")) < 30


def test_an_outcome_that_cannot_be_stored_is_stored_in_plain_words(stage: Stage) -> None:
    ids = stage.database.put(count=5)

    def refuse(outcomes: Outcomes) -> None:
        if any(outcomes.responses or []) or any(not (error or "").isascii() for error in outcomes.errors or []):
            raise Refused

    stage.database.hooks["settle"] = refuse
    stage.courier.answer = lambda to, messages: (
        0.001,
        Outcome("[RETRYABLE] HTTP 500: caf\u00e9 \ud83d", 7, "{}") if messages[0].id == ids[2] else DELIVERED,
    )
    stage.run()

    expected = dict.fromkeys(ids, Outcome())
    expected[ids[2]] = Outcome("[RETRYABLE] HTTP 500: caf? ?", 7, None)
    assert stage.database.settled == expected


def test_a_message_that_cannot_be_settled_at_all_is_left_to_its_lease(stage: Stage) -> None:
    ids = stage.database.put(count=5)

    def refuse(outcomes: Outcomes) -> None:
        if ids[2] in outcomes.ids:
            raise Refused("no way")

    stage.database.hooks["settle"] = refuse
    stage.run(seconds=30)

    assert stage.database.settled.keys() == set(ids) - {ids[2]}
    assert stage.database.renewed[ids[2]] == 0
    assert ids[2] not in stage.database.released


@pytest.mark.parametrize("call", ["claim", "report", "sweep", "renew", "endpoint_configs", "settle", "release"])
def test_a_database_that_is_busy_for_a_while_stops_nothing(stage: Stage, call: str) -> None:
    def busy(*_: object) -> None:
        if stage.clock.now < 1002:
            raise Busy

    stage.database.hooks[call] = busy
    ids = stage.database.put(count=20)

    assert stage.run(seconds=5, lease_seconds=5) == "over"

    back = set(stage.database.released)
    assert set(stage.database.settled) | back == set(ids)
    assert bool(back) == (call == "endpoint_configs")


def test_a_config_that_our_code_cannot_read_fails_its_own_messages(stage: Stage) -> None:
    bad, good = stage.database.put(1), stage.database.put(2)
    stage.database.configs[1] = {"url": "http://127.0.0.1/", "headers": None}

    stage.run()

    assert (stage.database.settled[bad[0]].error or "").startswith("[RETRYABLE] config: ")
    assert stage.database.settled[good[0]].error is None


def test_an_endpoint_that_is_gone_fails_its_messages(stage: Stage) -> None:
    (id,) = stage.database.put(1)
    del stage.database.configs[1]

    stage.run()

    assert stage.database.settled[id].error == "[RETRYABLE] config: the endpoint is gone"


def test_a_changed_config_holds_for_the_next_message(stage: Stage) -> None:
    stage.database.put(1)

    def change(progress: object) -> None:
        if len(stage.courier.sent) == 1:
            stage.database.configs[1] = {"url": "http://127.0.0.1/new"}
            stage.database.versions[1] = 2
            stage.database.put(1, count=2)

    stage.database.hooks["report"] = change
    stage.run(seconds=2)

    assert [to.profile.url for to, _, _ in stage.courier.sent] == ["http://127.0.0.1/"] + ["http://127.0.0.1/new"] * 2
    assert len(stage.database.times("endpoint_configs")) == 2


@pytest.mark.parametrize(("state", "seconds"), [("open", 10), ("half_open", 5), ("disabled", 10)])
def test_what_waits_for_a_slot_when_the_circuit_opens_goes_back(stage: Stage, state: str, seconds: float) -> None:
    for endpoint_id in range(1, 5):
        stage.database.configs[endpoint_id] = {"url": "http://127.0.0.1/", "batch_size": 2}
        stage.database.versions[endpoint_id] = 1
        stage.database.put(endpoint_id)
    stage.courier.answer = lambda to, messages: (0.2, DELIVERED if to.id > 1 else Outcome("[RETRYABLE] HTTP 500"))

    def flood(progress: object) -> None:
        if not stage.database.pending and stage.clock.now < 1001.5:
            for endpoint_id in range(1, 5):
                stage.database.put(endpoint_id, count=60)

    def opens(outcomes: Outcomes) -> None:
        if outcomes.errors and len(stage.courier.sent) > 4:
            stage.database.blocked[1] = state

    stage.database.hooks["report"] = flood
    stage.database.hooks["settle"] = opens
    stage.run(seconds=6)

    assert set(stage.database.released.values()) == {seconds}
    of_first = {id for to, ids, _ in stage.courier.sent for id in ids if to.id == 1}
    assert not of_first & set(stage.database.released)
    assert len(stage.database.settled) + len(stage.database.released) == stage.database.sent


def test_leases_are_renewed_every_third_of_their_time(stage: Stage) -> None:
    (id,) = stage.database.put()
    stage.courier.answer = lambda to, messages: (9.5, DELIVERED)

    stage.run(seconds=12, lease_seconds=6)

    assert stage.database.renewed[id] == 4
    assert id in stage.database.settled


def test_a_message_that_was_lost_and_comes_again_while_its_first_request_hangs_is_no_trouble(stage: Stage) -> None:
    (id,) = stage.database.put()
    delays = iter([3.0, 5.0])
    stage.courier.answer = lambda to, messages: (next(delays), DELIVERED)
    stored: list[list[int]] = []

    def settle(outcomes: Outcomes) -> None:
        stored.append(list(outcomes.attempts))
        stage.database.settled.clear()

    def again(progress: object) -> None:
        if stage.clock.now > 1001 and len(stage.courier.sent) == 1:
            stage.database.pending.append(Pending(1, Message(id, "m1", 2, "{}")))

    stage.database.hooks.update(settle=settle, report=again)
    stage.run(seconds=8, lease_seconds=6)

    assert stored == [[1], [2]]
    # The second claim is still held, and renewed, when the first one's answer comes.
    assert max(stage.database.times("renew")) > 1003


def test_what_was_lost_before_it_was_sent_is_not_sent(stage: Stage) -> None:
    for endpoint_id in (1, 2):
        stage.database.configs[endpoint_id] = {"url": "http://127.0.0.1/", "batch_size": 2}
        stage.database.versions[endpoint_id] = 1
        stage.database.put(endpoint_id)
    stage.courier.answer = lambda to, messages: (4.0 if len(stage.courier.sent) > 2 else 0.001, DELIVERED)

    def flood(progress: object) -> None:
        if stage.database.sent == 2:
            for endpoint_id in (1, 2):
                stage.database.put(endpoint_id, count=60)

    stage.database.hooks["report"] = flood
    stage.database.hooks["renew"] = lambda: stage.database.lost.update(set(range(1, 200)) - set(stage.courier.ids()))
    stage.run(seconds=3, lease_seconds=5)

    assert len(stage.courier.sent) < 62
    assert not set(stage.courier.ids()) & stage.database.lost


def test_big_payloads_are_taken_a_few_at_a_time(stage: Stage) -> None:
    megabytes = "x" * (PAYLOAD_BYTES // 5)
    ids = stage.database.put(count=12, payload=megabytes)
    stage.courier.answer = lambda to, messages: (0.3, DELIVERED)
    most = 0

    def count(progress: Mapping[str, Any]) -> None:
        nonlocal most
        most = max(most, progress["in_flight"])

    stage.database.hooks["report"] = cast(Any, count)
    stage.database.hooks["settle"] = lambda outcomes: None
    stage.run(seconds=10)

    # The first claim doesn't know yet; after it there are never more than five.
    assert stage.courier.ids() == ids
    assert stage.database.limits[0] == 16
    assert all(limit <= 5 for limit in stage.database.limits[1:])


def test_a_cancel_is_noticed_ten_times_a_second_even_if_everything_hangs(stage: Stage) -> None:
    stage.database.put(count=100)
    stage.courier.answer = lambda to, messages: (30.0, DELIVERED)

    stage.run(seconds=20, poll_interval=5000)

    checks = stage.database.times("check")
    assert max(later - earlier for earlier, later in itertools.pairwise(checks)) <= 0.101


def test_slow_receivers_leave_all_slots_to_the_others(stage: Stage) -> None:
    for endpoint_id in range(1, 7):
        stage.database.put(endpoint_id, count=100)
    stage.courier.answer = lambda to, messages: (60.0 if to.id < 7 else 0.001, DELIVERED)
    quick: list[int] = []

    def flow(progress: object) -> None:
        quick.extend(stage.database.put(7, count=5))

    stage.database.hooks["report"] = flow
    stage.run(seconds=10)

    sent = {id: at for to, ids, at in stage.courier.sent for id in ids if to.id == 7}
    assert set(quick[:-5]) <= set(sent)
    assert all(id in stage.database.settled for id in quick[:-5])
    assert max(Counter(to.id for to, _, _ in stage.courier.sent if to.id < 7).values()) <= 14


def test_only_fast_endpoints_are_claimed_ahead_of_free_slots(stage: Stage) -> None:
    stage.database.put(1, count=3000)
    for endpoint_id in range(2, 22):
        stage.database.put(endpoint_id, count=20)
    stage.courier.answer = lambda to, messages: (0.001 if to.id == 1 else 60.0, DELIVERED)
    waiting: list[int] = []

    def count(outcomes: Outcomes) -> None:
        unclaimed = sum(each.endpoint_id > 1 for each in stage.database.pending)
        waiting.append(400 - unclaimed - sum(to.id > 1 for to, _, _ in stage.courier.sent))

    stage.database.hooks["settle"] = count
    stage.run(seconds=2, worker_concurrency=28)

    # The fast one is done; of the others nothing was taken that could not be sent.
    assert all(id in stage.database.settled for id in range(1, 3001))
    assert max(stage.database.limits) > 32
    assert max(waiting) == 0


def test_others_are_looked_after_while_one_has_a_backlog_and_less_often_if_that_takes_long(stage: Stage) -> None:
    stage.courier.answer = lambda to, messages: (0.001, DELIVERED)
    counts = []
    for seconds in (0.0, 0.03):
        stage.database.put(1, count=20_000)
        stage.database.whole_seconds = seconds
        stage.database.wholes.clear()
        stage.run(seconds=1)
        # How fast the receiver is has to be learnt first.
        learnt = stage.clock.now - 0.7
        counts.append(len([at for at in stage.database.wholes if at > learnt]))

    quick, slow = counts
    assert quick >= 14
    # Thirty milliseconds twenty times would be all that there is.
    assert slow <= 5


def test_a_run_waits_for_what_is_under_way_and_serves_others_meanwhile(stage: Stage) -> None:
    slow = stage.database.put(1, count=2)
    stage.courier.answer = lambda to, messages: (9.0 if to.id == 1 else 0.001, DELIVERED)

    def flow(progress: object) -> None:
        stage.database.put(1)
        stage.database.put(2)

    stage.database.hooks["report"] = flow
    assert stage.run(seconds=2) == "over"

    assert set(slow) <= set(stage.database.settled)
    assert 9 <= stage.clock.now - 1000 < 14
    # The slow one got nothing more after the run's time was over, the other one did.
    assert max(at for to, _, at in stage.courier.sent if to.id == 1) < 1002
    assert max(at for to, _, at in stage.courier.sent if to.id == 2) > 1007
    assert stage.database.released == {}


def test_a_run_whose_outcomes_cannot_be_stored_ends_all_the_same(stage: Stage) -> None:
    (id,) = stage.database.put()

    def busy(outcomes: Outcomes) -> None:
        raise Busy

    stage.database.hooks["settle"] = busy
    stage.run(seconds=1)

    assert stage.clock.now - 1000 < 1 + GRACE_SECONDS + 1
    # It was delivered: giving it back would deliver it again at once.
    assert id not in stage.database.released


def test_a_worker_that_is_told_to_stop_gives_back_what_hangs(stage: Stage) -> None:
    ids = stage.database.put(count=3)
    stage.courier.answer = lambda to, messages: (0.5 if messages[0].id == ids[0] else 30.0, DELIVERED)
    stage.database.hooks["report"] = lambda progress: setattr(stage.database, "leave", "stop")

    assert stage.run(seconds=60) == "stop"

    assert stage.clock.now - 1000 < STOP_SECONDS + 0.3
    assert set(stage.database.settled) == {ids[0]}
    assert stage.database.released == dict.fromkeys(ids[1:], 0.0)


@pytest.mark.parametrize(("leave", "settings", "reason"), [("restart", "", "restart"), (None, "new", "settings")])
def test_a_worker_that_has_to_begin_anew_leaves_in_good_order(
    stage: Stage, leave: str | None, settings: str, reason: str
) -> None:
    ids = stage.database.put(count=3)
    stage.courier.answer = lambda to, messages: (4.0, DELIVERED)

    def tell(progress: object) -> None:
        stage.database.leave, stage.database.settings = leave, settings

    stage.database.hooks["report"] = tell
    assert stage.run(seconds=60) == reason

    assert set(stage.database.settled) == set(ids)
    assert stage.clock.now - 1000 < 5


def test_a_run_that_breaks_off_stores_what_is_done_and_gives_back_the_rest(stage: Stage) -> None:
    ids = stage.database.put(count=3)
    stage.courier.answer = lambda to, messages: (0.001 if messages[0].id == ids[0] else 30.0, DELIVERED)

    class Cancelled(Exception):
        pass

    def cancel(outcomes: Outcomes) -> None:
        del stage.database.hooks["settle"]
        raise Cancelled

    stage.database.hooks["settle"] = cancel
    with pytest.raises(Cancelled):
        stage.run()
    assert stage.worker is not None
    stage.worker.close("stopped", "cancelled")

    assert set(stage.database.settled) == {ids[0]}
    assert set(stage.database.released) == set(ids[1:])


def test_a_report_that_failed_is_told_with_the_next(stage: Stage) -> None:
    stage.database.put(count=7)
    told: list[int] = []

    def report(progress: Mapping[str, Any]) -> None:
        if 1000.5 < stage.clock.now < 1002.5:
            raise Busy
        told.append(progress["processed"])

    stage.database.hooks["report"] = cast(Any, report)
    stage.run(seconds=4)

    assert sum(told) == 7
    assert json.dumps(told)


# Light traffic: a bell tells of each message.


@pytest.fixture
def light(stage: Stage) -> Stage:
    bell = stage.database.bell = FakeBell(stage.clock)
    stage.clock.sleep = lambda seconds: bell.pass_time(seconds, is_heard=False)  # type: ignore[method-assign,assignment]
    return stage


def send_at(stage: Stage, *times: float, **message: Any) -> None:
    assert stage.database.bell is not None
    for time in times:
        stage.database.bell.at(1000 + time, lambda: stage.database.put(**message))


def sent_at(stage: Stage) -> list[float]:
    return [round(at - 1000, 3) for _, _, at in stage.courier.sent]


def test_a_message_is_sent_when_its_sender_rings(light: Stage) -> None:
    times = [0.5 + 0.03 * n for n in range(50)]
    send_at(light, *times)

    light.run(seconds=3)

    assert sent_at(light) == [round(time, 3) for time in times]
    # Those which nobody rang for are looked for now and then.
    assert len(light.database.times("claim")) < 3 / 0.2 + 5


def test_a_delivery_is_stored_with_the_next_claim(light: Stage) -> None:
    send_at(light, 0.5, 0.54, 0.58)

    light.run(seconds=0.6)

    assert light.database.settled.keys() == {1, 2, 3}
    # The last one when the run ends.
    assert len(light.database.times("light_turn")) == 3
    assert len(light.database.times("settle")) == 1


def test_a_delivery_does_not_wait_long_for_a_next_claim(light: Stage) -> None:
    send_at(light, 0.5)

    light.run(seconds=2)

    assert [round(at - 1000, 3) for at in light.database.times("settle")] == [0.551]


@pytest.mark.parametrize(
    ("message", "outcome"),
    [({}, Outcome("[RETRYABLE] HTTP 500")), ({}, Outcome(response="{}")), ({"ordering_key": "k"}, DELIVERED)],
    ids=["a failure", "a response to keep", "one that another waits for"],
)
def test_what_is_not_plain_is_stored_at_once(light: Stage, message: dict[str, Any], outcome: Outcome) -> None:
    light.courier.answer = lambda to, messages: (0.001, outcome)
    send_at(light, 0.5, **message)

    light.run(seconds=2)

    assert [round(at - 1000, 3) for at in light.database.times("settle")] == [0.501]


def test_a_bell_is_set_anew_before_its_rings_are_used_up(light: Stage) -> None:
    times = [0.5 + 0.02 * n for n in range(100)]
    send_at(light, *times)

    light.run(seconds=3)

    assert sent_at(light) == [round(time, 3) for time in times]
    assert 100 / RINGS <= len(light.database.times("set_bell")) <= 2 * 100 / (RINGS / 2)


def test_a_worker_that_is_no_longer_the_poller_leaves_the_bell_to_another(light: Stage) -> None:
    light.database.poller_until = light.clock.now + 1

    light.run(seconds=3)

    assert len(light.database.times("unlisten")) == 1
    assert max(light.database.times("set_bell")) < light.database.poller_until + REPORT_SECONDS


def test_dense_traffic_is_looked_for_without_a_bell(light: Stage) -> None:
    times = [0.5 + 0.001 * n for n in range(1000)]
    send_at(light, *times)
    light.run(seconds=2)

    assert len(light.database.settled) == 1000
    assert len(light.database.times("light_turn")) < 50


def test_a_ring_that_is_no_message_leads_to_a_check(light: Stage) -> None:
    assert light.database.bell is not None

    def stop() -> list[int]:
        light.database.leave = "stop"
        return []

    light.database.bell.at(1000.5, stop)

    assert light.run(seconds=60) == "stop"

    assert light.clock.now - 1000.5 < 0.01


def test_a_stop_that_nobody_rang_for_is_noticed_too(light: Stage) -> None:
    light.database.hooks["report"] = lambda progress: setattr(light.database, "leave", "stop")

    assert light.run(seconds=60) == "stop"

    assert light.clock.now - 1000 < 1.5


def test_a_bell_that_rings_for_others_is_not_listened_to_for_long(light: Stage) -> None:
    assert light.database.bell is not None
    for n in range(1000):
        light.database.bell.at(1000.1 + n * 0.01, list)

    light.run(seconds=12)

    assert len(light.database.times("unlisten")) == 1
    assert not light.database.bell.is_held
    assert len(light.database.times("claim")) < 200 + 12 / 0.1


def test_a_worker_that_ends_lets_go_of_the_bell(light: Stage) -> None:
    light.run(seconds=1)

    assert light.database.bell is not None
    assert not light.database.bell.is_held


def test_a_worker_whose_slots_are_all_taken_waits_for_one(light: Stage) -> None:
    light.courier.answer = lambda to, messages: (0.5, DELIVERED)
    send_at(light, *[0.1 + 0.02 * n for n in range(10)])

    light.run(seconds=8, worker_concurrency=1)

    assert len(light.database.settled) == 10
    assert len(light.database.calls) < 500


def test_a_run_that_is_over_hears_no_bell(light: Stage) -> None:
    light.courier.answer = lambda to, messages: (2.0, DELIVERED)
    send_at(light, 0.5, 1.5, 1.6)

    light.run(seconds=1)

    assert light.courier.ids() == [1]
    assert light.database.settled.keys() == {1}
    assert len(light.database.calls) < 1000


@pytest.mark.parametrize("outcome", [Outcome("[RETRYABLE] HTTP 500"), Outcome(response="{}")])
def test_what_comes_back_when_somebody_rings_is_stored_as_what_it_is(light: Stage, outcome: Outcome) -> None:
    light.courier.answer = lambda to, messages: (0.01, outcome if messages[0].id == 1 else DELIVERED)
    # The second sender rings at the very moment of the first answer.
    send_at(light, 0.5, 0.51, 0.54)

    light.run(seconds=2)

    assert light.database.settled == {1: outcome, 2: Outcome(), 3: Outcome()}


@pytest.mark.parametrize("call", ["set_bell", "light_turn", "claim", "settle", "report"])
def test_a_database_that_is_busy_in_light_traffic_stops_nothing(light: Stage, call: str) -> None:
    def fail(*arguments: Any) -> None:
        if light.clock.now < 1001:
            raise Busy

    light.database.hooks[call] = fail
    send_at(light, *[0.5 + 0.03 * n for n in range(30)])

    light.run(seconds=4)

    assert len(light.courier.ids()) == len(light.database.settled) == 30
    assert light.database.released == {}


def test_ids_that_nobody_rings_for_do_not_silence_the_bell(light: Stage) -> None:
    def draw() -> list[int]:
        light.database.sent += 5 * RINGS
        return [light.database.sent]

    assert light.database.bell is not None
    light.database.bell.at(1000.5, draw)
    send_at(light, 1.0)

    light.run(seconds=2)

    assert sent_at(light) == [1.0]
