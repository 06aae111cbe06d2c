"""The worker's loop on a stage: a database and receivers that do as the test says, and time that only the test moves."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from ulak.messages.delivery import DELIVERED, Endpoint, EndpointConfig, Leases, Message, Outcome, Settled
from ulak.sessions.database import Database
from ulak.sessions.session import WakeUp
from ulak.transports.dispatcher import Dispatcher
from ulak.transports.http.client import Client
from ulak.transports.http.transport import HttpTransport
from ulak.worker import options
from ulak.worker.loop import Worker
from ulak.worker.options import Options
from ulak.worker.port import Claimed, Outcomes, Turn, Wish
from ulak.worker.state import State

# As in ulak_private.worker_turn().
WAKE_UPS = 16

SETTINGS = {
    "batch_size": "500",
    "capture_response": "false",
    "cloudevents_source": "/ulak",
    "http_allow_internal_urls": "false",
    "http_allowed_hosts": "",
    "http_allowed_networks": "",
    "http_connect_timeout": "5",
    "http_timeout": "10",
    "lease_seconds": "30",
    "poll_interval": "50",
    "poll_interval_busy": "2",
    "response_body_max_size": "65536",
    "turn_interval": "5",
    "worker_concurrency": "14",
}


class Clock:
    """Stands still until a test sets it forward."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


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
    # Messages a second that an endpoint may get, and its tokens, as in rate_tokens(), with the time of the last claim.
    rates: dict[int, float] = field(default_factory=dict)
    tokens: dict[int, tuple[float, float]] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)
    leave: str | None = None
    settings: str = ""
    hooks: dict[str, Callable[..., None]] = field(default_factory=dict)
    # How long a look at whatever is due takes.
    claim_seconds: float = 0.0
    calls: list[tuple[str, float]] = field(default_factory=list)
    wishes: list[Wish] = field(default_factory=list)
    settled: dict[int, Outcome] = field(default_factory=dict)
    released: dict[int, float] = field(default_factory=dict)
    renewed: Counter[int] = field(default_factory=Counter)
    sent: int = 0
    wake_up: FakeWakeUp | None = None
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
        if name in self.hooks:
            self.hooks[name](*arguments)

    def times(self, name: str) -> list[float]:
        return [at for called, at in self.calls if called == name]

    # database.Database

    def check_interrupts(self) -> None:
        if "check_interrupts" in self.hooks:
            self.hooks["check_interrupts"]()

    def turn(self, outcomes: Outcomes | None, wish: Wish | None, lease: float, wake_ups: bool) -> Turn:
        self._called("turn")
        if wish is not None:
            self._called("claim")
        notified_to = None
        if wake_ups:
            assert self.wake_up is not None and self.wake_up.is_held_back
            notified_to = self.wake_up.notified_to = self.sent + WAKE_UPS
        claimed: list[Claimed] = []
        left_out_others = False
        if outcomes is not None:
            self.settle(outcomes)
        if wish is not None:
            claimed, left_out_others = self.claim(wish)
        is_empty = wish is not None and wish.behind is None and not claimed and not self.pending
        return Turn(claimed, left_out_others, self.sent, notified_to, is_empty)

    def claim_new(self, wish: Wish, last: int | None, last_sent: int, lease: float) -> Turn | None:
        self._called("claim_new")
        if last is None:
            last = last_sent = self.sent
        assert wish.behind is not None
        if last - wish.behind > 64:
            return None
        new = [each for each in self.pending if wish.behind < each.message.id <= last]
        plain = [each for each in new if self._is_plain(each, wish)][:16]
        if not plain:
            return None
        self.wishes.append(wish)
        return Turn(self._take(plain), len(plain) < len(new), max(last_sent, *[each.message.id for each in plain]))

    def claim(self, wish: Wish) -> tuple[list[Claimed], bool]:
        self.wishes.append(wish)
        if wish.behind == self.sent:
            return [], False
        self.clock.now += self.claim_seconds
        turns: Counter[int] = Counter()
        due: list[tuple[int, int, Pending]] = []
        for each in self.pending:
            if wish.endpoint_ids is not None and each.endpoint_id not in wish.endpoint_ids:
                continue
            room = min(wish.rooms.get(each.endpoint_id, wish.room), self._tokens(each.endpoint_id))
            if turns[each.endpoint_id] + 1 <= room:
                due.append((turns[each.endpoint_id], each.message.id, each))
                turns[each.endpoint_id] += 1
        in_turn = set(list(turns)[: wish.most_endpoints if wish.endpoint_ids is None else len(turns)])
        due = [each for each in due if each[2].endpoint_id in in_turn]
        taken = [each for _, _, each in sorted(due, key=lambda item: item[:2])[: wish.most]]
        return self._take(taken), wish.endpoint_ids is None and len(in_turn) >= wish.most_endpoints

    def _is_plain(self, pending: Pending, wish: Wish) -> bool:
        room = wish.rooms.get(pending.endpoint_id, wish.room)
        return pending.message.ordering_key is None and room >= min(wish.most, wish.room, 16)

    def _tokens(self, endpoint_id: int) -> float:
        rate = self.rates.get(endpoint_id, math.inf)
        tokens, at = self.tokens.get(endpoint_id, (math.inf, self.clock.now))
        return min(max(rate / 10, 1 + rate / 20), tokens + (rate * (self.clock.now - at) if self.clock.now > at else 0))

    def _take(self, taken: list[Pending]) -> list[Claimed]:
        for id, count in Counter(each.endpoint_id for each in taken).items():
            self.tokens[id] = self._tokens(id) - count, self.clock.now
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

    def settle(self, outcomes: Outcomes, is_patient: bool = True) -> None:
        self._called("settle", outcomes)
        for place, id in enumerate(outcomes.ids):
            assert id not in self.settled
            self.settled[id] = Outcome(
                outcomes.errors[place] if outcomes.errors else None,
                outcomes.retry_after[place] if outcomes.retry_after else None,
                outcomes.responses[place] if outcomes.responses else None,
            )

    def release(self, held: Leases, delay: float) -> None:
        self._called("release", held)
        self.released |= dict.fromkeys(held, delay)

    def renew(self, held: Leases, lease: float) -> Sequence[int]:
        self._called("renew")
        self.renewed.update(held.keys())
        return [id for id in held if id not in self.lost]

    def blocked_endpoints(self, ids: Iterable[int]) -> Mapping[int, str]:
        self._called("blocked_endpoints")
        return {id: state for id, state in self.blocked.items() if id in set(ids)}

    def check(self, settings: str) -> str | None:
        self._called("check")
        return self.leave or (None if settings == self.settings else "settings")

    def report(self, progress: Mapping[str, object], statistics: Sequence[Mapping[str, object]]) -> None:
        self._called("report", progress)

    def sweep(self) -> None:
        self._called("sweep")

    def is_poller(self) -> bool:
        return self.clock.now < self.poller_until

    def listen(self) -> WakeUp | None:
        return cast(WakeUp, self.wake_up)

    def unlisten(self) -> None:
        self._called("unlisten")


class FakeWakeUp:
    """A sender notifies: the test says when."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._senders: list[tuple[float, Callable[[], object]]] = []
        self._was_notified = False
        self.notified_to = 0
        self.is_held_back = False

    def at(self, time: float, send: Callable[[], list[int]]) -> None:
        def notify() -> None:
            ids = send()
            # While nobody waits for them, PostgreSQL takes notifications itself.
            if self.is_held_back:
                self._was_notified = self._was_notified or not ids or ids[0] <= self.notified_to

        self._senders.append((time, notify))

    def pass_time(self, seconds: float, is_noticed: bool = True) -> bool:
        """Time passes until somebody notifies, or until its end."""
        end = self._clock.now + seconds
        while not (self._was_notified and is_noticed):
            due = [each for each in self._senders if each[0] <= end]
            if not due:
                self._clock.now = max(self._clock.now, end)
                break
            self._clock.now = max(self._clock.now, due[0][0])
            self._senders.remove(due[0])
            due[0][1]()
        return self._was_notified

    # session.WakeUp

    def fileno(self) -> int:
        return -1

    def hold_back(self) -> None:
        self.is_held_back = True

    def let_go(self) -> None:
        self.is_held_back = self._was_notified = False

    def take(self) -> bool:
        assert self.is_held_back
        found, self._was_notified = self._was_notified, False
        return found


class FakeDispatcher:
    """Answers after as many seconds as the test says."""

    def __init__(self, clock: Clock, database: FakeDatabase) -> None:
        self._clock = clock
        self._database = database
        # Only what never sends: parse() and group().
        self._real = Dispatcher({"http": lambda _: HttpTransport(cast(Client, None), clock)})
        self._under_way: list[tuple[float, Endpoint, Settled]] = []
        self.answer: Callable[[Endpoint, Sequence[Message]], tuple[float, Outcome]] = lambda to, messages: (
            0.001,
            DELIVERED,
        )
        self.sent: list[tuple[Endpoint, list[int], float]] = []
        self.was_woken = False
        self.steps = 0
        self.longest_wait = 0.0

    def wait_also_for(self, descriptor: int) -> None:
        pass

    def parse(self, config: EndpointConfig) -> Endpoint:
        return self._real.parse(config)

    def group(self, endpoint: Endpoint, messages: Sequence[Message]) -> Sequence[Sequence[Message]]:
        return self._real.group(endpoint, messages)

    @property
    def in_flight(self) -> int:
        return len(self._under_way)

    def start(self, to: Endpoint, messages: Sequence[Message]) -> None:
        self.sent.append((to, [message.id for message in messages], self._clock.now))
        seconds, outcome = self.answer(to, messages)
        self._under_way.append((self._clock.now + seconds, to, Settled(to.id, messages, outcome, seconds)))

    def last_end(self) -> float:
        return max((at - settled.seconds + to.longest for at, to, settled in self._under_way), default=0.0)

    def under_way_since(self, time: float) -> set[int]:
        return {to.id for at, to, settled in self._under_way if at - settled.seconds < time}

    def step(self, max_wait: float) -> list[Settled]:
        self.steps += 1
        self.longest_wait = max(self.longest_wait, max_wait)
        ends = [at - self._clock.now for at, _, _ in self._under_way]
        seconds = max(0.0, min([*ends, max_wait]))
        wake_up = self._database.wake_up
        self.was_woken = False
        if wake_up is not None:
            self.was_woken = wake_up.pass_time(seconds, wake_up.is_held_back) and wake_up.is_held_back
        else:
            self._clock.now += seconds
        ended = [settled for at, _, settled in self._under_way if at <= self._clock.now]
        self._under_way = [each for each in self._under_way if each[0] > self._clock.now]
        return ended

    def ids(self) -> list[int]:
        return [id for _, ids, _ in self.sent for id in ids]


class Stage:
    def __init__(self) -> None:
        self.clock = Clock()
        self.database = FakeDatabase(self.clock)
        self.dispatcher = FakeDispatcher(self.clock, self.database)
        self.worker: Worker | None = None

    def options(self, **settings: Any) -> Options:
        return options.parse({**SETTINGS, **{name: str(value) for name, value in settings.items()}}, -1)

    def run(self, seconds: float = 1, **settings: Any) -> str:
        until = self.clock.now + seconds
        database, dispatcher = cast(Database, self.database), cast(Dispatcher, self.dispatcher)
        self.worker = Worker(State(database, self.options(**settings), "", until, dispatcher, self.clock))
        ended = self.worker.run()
        self.worker.close()
        return ended
