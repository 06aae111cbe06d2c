"""The messages that a worker holds: each one waits for a request slot, is under way, or is done and not yet stored.

Three rules. A worker sends at most as many requests at once as it has slots, and holds up to LOOK_AHEAD times as many.
One endpoint gets at most seven eighths of each. Until it has answered for the first time, the worker holds no more for
it than it may have under way. Slow receivers have a lane of their own with as many slots, so they can't hold up the
others; in that lane the worker holds no more requests than there are slots.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from ulak.messages.delivery import Endpoint, Message, Settled
from ulak.worker.tuning import LOOK_AHEAD, PAYLOAD_BYTES, SLOW_REMEMBERED, SLOW_SECONDS, UNKNOWN_BYTES

QUICK, SLOW = 0, 1
Request = tuple[Endpoint, Sequence[Message]]


class _Line:
    """The requests of one endpoint."""

    __slots__ = ("has_answered", "in_flight", "is_stuck", "lane", "requests")

    def __init__(self) -> None:
        self.requests: deque[Request] = deque()
        self.in_flight = 0
        self.lane = QUICK
        self.has_answered = False
        # One of its requests has been under way longer than SLOW_SECONDS.
        self.is_stuck = False


class _UnderWay(NamedTuple):
    to: Endpoint
    line: _Line
    start: float


class Held:
    def __init__(self, slots: int, most_messages: int | None = None) -> None:
        self.slots = slots
        self._share = max(1, slots * 7 // 8)
        # How many requests may be held, by lane.
        self._most = (LOOK_AHEAD * slots, slots)
        self._most_messages = most_messages
        # Attempts of leased messages, by message id.
        self._attempts: dict[int, int] = {}
        self._bytes = 0
        self._average_bytes = UNKNOWN_BYTES
        self._lines: dict[int, _Line] = {}
        # Lines with waiting requests, in the order of their turns.
        self._turns: deque[_Line] = deque()
        # Numbers of requests, by lane.
        self._waiting = [0, 0]
        self._in_flight = [0, 0]
        # Slow endpoints that ran out of requests, the earliest first. Some of them may have requests again.
        self._slow_idle: dict[int, None] = {}
        # By id and attempt of the first message. The id alone won't do: a message whose lease was lost may come again.
        self._under_way: dict[tuple[int, int], _UnderWay] = {}
        # Outcomes that aren't stored yet.
        self.done: list[Settled] = []

    def __len__(self) -> int:
        """Messages that are leased."""
        return len(self._attempts)

    def leases(self) -> tuple[list[int], list[int]]:
        """Ids and attempts."""
        return list(self._attempts), list(self._attempts.values())

    @property
    def slow_in_flight(self) -> int:
        return self._in_flight[SLOW]

    def endpoints_that_wait(self) -> list[int]:
        return [endpoint_id for endpoint_id, line in self._lines.items() if line.requests] if self._turns else []

    def slow_endpoints(self) -> list[int]:
        return [endpoint_id for endpoint_id, line in self._lines.items() if line.lane == SLOW]

    def last_end(self) -> float:
        """When all requests under way will have ended."""
        return max((each.start + each.to.longest for each in self._under_way.values()), default=0.0)

    # Room.

    def room(self) -> int:
        """For requests of any endpoint."""
        slow = self._free(SLOW) if self._slow_idle or self._in_flight[SLOW] else 0
        return max(0, self._free(QUICK)) + max(0, slow)

    def room_for_messages(self) -> int:
        """How many more messages fit into memory and below most_messages."""
        room = (PAYLOAD_BYTES - self._bytes) // self._average_bytes
        # A single message may be larger than the whole budget.
        room = max(room, 0 if self._attempts else 1)
        return room if self._most_messages is None else min(room, self._most_messages - len(self._attempts))

    def room_of(self, endpoint_id: int | None) -> int:
        """For requests of this endpoint; None: of an endpoint that the worker holds nothing for."""
        line = self._lines.get(endpoint_id) if endpoint_id is not None else None
        if line is None:
            return max(0, min(self._share, self._free(QUICK)))
        is_ahead = line.has_answered and line.lane == QUICK
        share = LOOK_AHEAD * self.slots * 7 // 8 if is_ahead else self._share
        return max(0, min(self._free(line.lane), share - line.in_flight - len(line.requests)))

    def rooms(self) -> dict[int, int]:
        """By endpoint, of those that have a line."""
        return {endpoint_id: self.room_of(endpoint_id) for endpoint_id in self._lines}

    def is_low(self, endpoint_id: int | None = None) -> bool:
        """Whether there is room for more requests, and at most half as many wait for a slot as are allowed to: of this
        endpoint, or of all."""
        line = self._lines.get(endpoint_id) if endpoint_id is not None else None
        lane = QUICK if line is None else line.lane
        waiting = self._waiting[QUICK] if line is None else len(line.requests)
        return 2 * waiting <= (self._most[lane] - self.slots) and self.room_of(endpoint_id) > 0

    def _free(self, lane: int) -> int:
        """Requests that the lane has room for. Below 0 after an endpoint has changed lanes with all of its requests."""
        return self._most[lane] - self._waiting[lane] - self._in_flight[lane]

    # A message is claimed, waits, is under way, is done (outcomes.py), and is forgotten when its outcome is stored.

    def claim(self, messages: Sequence[Message]) -> None:
        self._attempts.update({message.id: message.attempt for message in messages})
        size = sum([len(message.payload) for message in messages])
        self._bytes += size
        self._average_bytes = max(1, size // len(messages), self._average_bytes // 2)

    def wait(self, to: Endpoint, groups: Iterable[Sequence[Message]]) -> None:
        """Queues one request per group."""
        line = self._lines.get(to.id)
        if line is None:
            line = self._lines[to.id] = _Line()
        if not line.requests:
            self._turns.append(line)
        before = len(line.requests)
        line.requests.extend([(to, messages) for messages in groups])
        self._waiting[line.lane] += len(line.requests) - before

    def start(self, now: float) -> Iterator[Request]:
        """Yields the requests that get a slot; endpoints take turns."""
        vain = 0
        while vain < len(self._turns) and self._has_slot():
            line = self._turns.popleft()
            if line.in_flight < self._share and self._in_flight[line.lane] < self.slots:
                vain = 0
                to, messages = line.requests.popleft()
                self._waiting[line.lane] -= 1
                self._in_flight[line.lane] += 1
                line.in_flight += 1
                self._under_way[messages[0].id, messages[0].attempt] = _UnderWay(to, line, now)
                yield to, messages
            else:
                vain += 1
            if line.requests:
                self._turns.append(line)

    def _has_slot(self) -> bool:
        """Whether a waiting request may start. The sum of both lanes is limited, too: an endpoint that changes lanes
        takes its requests under way with it."""
        in_flight, waiting = self._in_flight, self._waiting
        if in_flight[QUICK] + in_flight[SLOW] >= 2 * self.slots:
            return False
        return any(waiting[lane] and in_flight[lane] < self.slots for lane in (QUICK, SLOW))

    def end(self, settled: Settled, now: float) -> tuple[Endpoint, float]:
        """Returns the delivery's endpoint, and how long it took."""
        first = settled.messages[0]
        to, line, start = self._under_way.pop((first.id, first.attempt))
        line.in_flight -= 1
        self._in_flight[line.lane] -= 1
        seconds = now - start
        if seconds >= SLOW_SECONDS:
            self._move(line, SLOW)
        else:
            line.has_answered = True
            if not line.is_stuck:
                self._move(line, QUICK)
        self._leave(to.id, line)
        return to, seconds

    def forget(self, messages: Iterable[Message]) -> None:
        """Called when messages are stored, given back or lost."""
        for message in messages:
            self._bytes -= len(message.payload)
            # Unless it was lost and claimed again since.
            if self._attempts.get(message.id) == message.attempt:
                del self._attempts[message.id]

    def clear(self) -> None:
        self._attempts.clear()

    # Removing waiting requests.

    def remove(self, endpoint_id: int) -> list[Message]:
        """Removes and returns all messages that wait for an endpoint."""
        return self._keep(endpoint_id, lambda messages: False)

    def remove_lost(self, held: Collection[int]) -> None:
        """Removes waiting requests if the lease of one of their messages was lost."""
        for endpoint_id in self.endpoints_that_wait():
            self.forget(self._keep(endpoint_id, lambda messages: all(each.id in held for each in messages)))

    def _keep(self, endpoint_id: int, is_kept: Callable[[Sequence[Message]], bool]) -> list[Message]:
        line = self._lines[endpoint_id]
        gone = [request for request in line.requests if not is_kept(request[1])]
        if gone:
            line.requests = deque([request for request in line.requests if is_kept(request[1])])
            self._waiting[line.lane] -= len(gone)
            if not line.requests:
                self._turns.remove(line)
            self._leave(endpoint_id, line)
        return [message for _, messages in gone for message in messages]

    # Lanes.

    def note_slow(self, now: float) -> None:
        """Moves endpoints whose receivers take long into the slow lane."""
        for line in self._lines.values():
            line.is_stuck = False
        for each in self._under_way.values():
            if each.start < now - SLOW_SECONDS:
                each.line.is_stuck = True
                self._move(each.line, SLOW)

    def _move(self, line: _Line, lane: int) -> None:
        if line.lane != lane:
            for count, number in ((self._waiting, len(line.requests)), (self._in_flight, line.in_flight)):
                count[line.lane] -= number
                count[lane] += number
            line.lane = lane

    def _leave(self, endpoint_id: int, line: _Line) -> None:
        """An endpoint without requests is forgotten, unless it is slow."""
        if line.in_flight or line.requests:
            return
        self._slow_idle.pop(endpoint_id, None)
        if line.lane == QUICK:
            del self._lines[endpoint_id]
            return
        self._slow_idle[endpoint_id] = None
        if len(self._slow_idle) > SLOW_REMEMBERED:
            forgotten = next(iter(self._slow_idle))
            del self._slow_idle[forgotten]
            if not (self._lines[forgotten].in_flight or self._lines[forgotten].requests):
                del self._lines[forgotten]
