"""The messages that a worker holds, and the requests of them that wait for a slot. What is under way is known to
dispatcher.py, what is done and not yet stored to outcomes.py.

Three rules. A worker sends at most as many requests at once as it has slots, and holds up to LOOK_AHEAD times as many.
One endpoint gets at most seven eighths of each. Until one of its requests was answered, the worker holds no more for it
than it may have under way; an endpoint without requests begins anew. Slow receivers have a lane of their own with as
many slots, so they can't hold up the others; in that lane the worker holds no more requests than there are slots.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence

from ulak.messages.delivery import Endpoint, Message, leases
from ulak.worker.tuning import LOOK_AHEAD, PAYLOAD_BYTES, SLOW_REMEMBERED, SLOW_SECONDS, UNKNOWN_BYTES

Request = tuple[Endpoint, Sequence[Message]]


class _Lane:
    __slots__ = ("in_flight", "most", "turns", "waiting")

    def __init__(self, most: int) -> None:
        """The worker holds at most so many requests of this lane."""
        self.most = most
        self.waiting = 0
        self.in_flight = 0
        # Lines with waiting requests, in the order of their turns.
        self.turns: deque[_Line] = deque()

    @property
    def free(self) -> int:
        """Below 0 after an endpoint has changed lanes with all of its requests."""
        return self.most - self.waiting - self.in_flight

    def is_low(self, slots: int) -> bool:
        return 2 * self.waiting <= self.most - slots

    def is_short(self, slots: int) -> bool:
        """Whether its requests can't fill the slots: there are too few, or one endpoint has them all."""
        return self.waiting + self.in_flight < slots or len(self.turns) == 1


class _Line:
    """The requests of one endpoint."""

    __slots__ = ("has_answered", "in_flight", "lane", "requests")

    def __init__(self, lane: _Lane) -> None:
        self.lane = lane
        self.requests: deque[Request] = deque()
        self.in_flight = 0
        self.has_answered = False


class Held:
    def __init__(self, slots: int, most_messages: int | None = None) -> None:
        self.slots = slots
        self._share = max(1, slots * 7 // 8)
        self._most_messages = most_messages
        self.leases: dict[int, int] = {}
        self._bytes = 0
        self._average_bytes = UNKNOWN_BYTES
        self.quick = _Lane(LOOK_AHEAD * slots)
        self.slow = _Lane(slots)
        # Stands for endpoints that the worker knows nothing of.
        self._unknown = _Line(self.quick)
        # Of endpoints with requests.
        self._lines: dict[int, _Line] = {}
        # Endpoints whose next line takes the slow lane; those with a request under way for longer than SLOW_SECONDS.
        self.slow_endpoints: dict[int, None] = {}
        self._stuck: Collection[int] = ()

    def endpoints_that_wait(self) -> list[int]:
        return [endpoint_id for endpoint_id, line in self._lines.items() if line.requests]

    # Room.

    def room(self) -> int:
        """For requests of any endpoint."""
        return max(0, self.quick.free) + (max(0, self.slow.free) if self.slow_endpoints else 0)

    def room_for_messages(self) -> int:
        """How many more messages fit into memory and below most_messages."""
        room = (PAYLOAD_BYTES - self._bytes) // self._average_bytes
        # A single message may be larger than the whole budget.
        room = max(room, 0 if self.leases else 1)
        return room if self._most_messages is None else min(room, self._most_messages - len(self.leases))

    def room_of(self, endpoint_id: int | None) -> int:
        """For requests of this endpoint; None: of an endpoint that the worker knows nothing of."""
        line = self._line(endpoint_id)
        is_ahead = line.has_answered and line.lane is self.quick
        share = LOOK_AHEAD * self.slots * 7 // 8 if is_ahead else self._share
        return max(0, min(line.lane.free, share - line.in_flight - len(line.requests)))

    def rooms(self) -> dict[int, int]:
        """By endpoint, of slow ones and of those with many requests. The others, of which there may be hundreds, count
        as endpoints that the worker knows nothing of, so one may get an eighth of a share too many."""
        few = self._share // 8
        busy = [each for each, line in self._lines.items() if line.in_flight + len(line.requests) > few]
        return {endpoint_id: self.room_of(endpoint_id) for endpoint_id in [*busy, *self.slow_endpoints]}

    def is_low(self) -> bool:
        """Whether there is room for more requests of any endpoint, and at most half as many wait as are allowed to."""
        return self.quick.is_low(self.slots) and self.quick.free > 0

    def is_one_low(self, endpoint_ids: Collection[int], except_for: Collection[int] = ()) -> bool:
        """Whether there is room for more requests of one of these endpoints, and at most half as many wait in its lane
        as are allowed to, or none of its own while those of others can't fill the slots."""
        lanes = [self.quick, self.slow] if self.slow_endpoints else [self.quick]
        # There may be thousands of endpoints.
        if not any(lane.is_low(self.slots) or lane.is_short(self.slots) for lane in lanes):
            return False
        asked = (each for each in endpoint_ids if each not in except_for)
        return any(self._is_low(self._line(each)) and self.room_of(each) > 0 for each in asked)

    def is_drained(self, endpoint_ids: Iterable[int]) -> bool:
        """Whether no request waits for a quick slot, though one of these endpoints could use it."""
        return not self.quick.waiting and any(each not in self.slow_endpoints for each in endpoint_ids)

    def _is_low(self, line: _Line) -> bool:
        return line.lane.is_low(self.slots) or (not line.requests and line.lane.is_short(self.slots))

    def _line(self, endpoint_id: int | None) -> _Line:
        """The line of this endpoint, or the one that it would get."""
        if endpoint_id is None:
            return self._unknown
        return self._lines.get(endpoint_id) or _Line(self.slow if endpoint_id in self.slow_endpoints else self.quick)

    # A message is claimed, waits, is under way, is done, and is forgotten when its outcome is stored.

    def claim(self, messages: Sequence[Message]) -> None:
        self.leases.update(leases(messages))
        size = sum([len(message.payload) for message in messages])
        self._bytes += size
        self._average_bytes = max(1, size // len(messages), self._average_bytes // 2)

    def wait(self, to: Endpoint, groups: Sequence[Sequence[Message]]) -> None:
        """Queues one request per group."""
        line = self._lines[to.id] = self._line(to.id)
        if not line.requests:
            line.lane.turns.append(line)
        line.requests.extend([(to, messages) for messages in groups])
        line.lane.waiting += len(groups)

    def start(self) -> Iterator[Request]:
        """Yields the requests that get a slot; endpoints take turns."""
        for lane in (self.quick, self.slow):
            vain = 0
            while vain < len(lane.turns) and self._has_slot(lane):
                line = lane.turns.popleft()
                if line.in_flight < self._share:
                    vain = 0
                    request = line.requests.popleft()
                    lane.waiting -= 1
                    lane.in_flight += 1
                    line.in_flight += 1
                    yield request
                else:
                    vain += 1
                if line.requests:
                    lane.turns.append(line)

    def _has_slot(self, lane: _Lane) -> bool:
        # The sum is limited, too: an endpoint that changes lanes takes its requests under way with it.
        return lane.in_flight < self.slots and self.quick.in_flight + self.slow.in_flight < 2 * self.slots

    def end(self, endpoint_id: int, seconds: float) -> None:
        """A request has ended that was under way for this long."""
        line = self._lines[endpoint_id]
        line.in_flight -= 1
        line.lane.in_flight -= 1
        if seconds >= SLOW_SECONDS:
            self._move(endpoint_id, self.slow)
        else:
            line.has_answered = True
            if endpoint_id not in self._stuck:
                self._move(endpoint_id, self.quick)
        self._leave(endpoint_id, line)

    def forget(self, messages: Iterable[Message]) -> None:
        """Called when messages are stored, given back or lost."""
        for message in messages:
            self._bytes -= len(message.payload)
            # Unless it was lost and claimed again since.
            if self.leases.get(message.id) == message.attempt:
                del self.leases[message.id]

    def remove(self, endpoint_id: int, kept: Collection[int] = ()) -> list[Message]:
        """Forgets and returns the messages that wait for an endpoint, except requests with nothing but kept ids."""
        line = self._lines[endpoint_id]
        gone = [each for _, messages in line.requests if not _are_among(messages, kept) for each in messages]
        requests = deque([request for request in line.requests if _are_among(request[1], kept)])
        line.lane.waiting -= len(line.requests) - len(requests)
        line.requests = requests
        if not requests:
            line.lane.turns.remove(line)
        self._leave(endpoint_id, line)
        self.forget(gone)
        return gone

    def _leave(self, endpoint_id: int, line: _Line) -> None:
        """An endpoint without requests needs no line."""
        if line.in_flight or line.requests:
            return
        del self._lines[endpoint_id]
        if line.lane is self.slow and len(self.slow_endpoints) > SLOW_REMEMBERED:
            idle = [each for each in self.slow_endpoints if each not in self._lines]
            for each in idle[:-SLOW_REMEMBERED]:
                del self.slow_endpoints[each]

    def note_stuck(self, endpoint_ids: Collection[int]) -> None:
        """These have a request under way for longer than SLOW_SECONDS."""
        self._stuck = endpoint_ids
        for endpoint_id in endpoint_ids:
            self._move(endpoint_id, self.slow)

    def _move(self, endpoint_id: int, lane: _Lane) -> None:
        line = self._lines[endpoint_id]
        if line.lane is lane:
            return
        for each, sign in ((line.lane, -1), (lane, 1)):
            each.waiting += sign * len(line.requests)
            each.in_flight += sign * line.in_flight
        if line.requests:
            line.lane.turns.remove(line)
            lane.turns.append(line)
        line.lane = lane
        self.slow_endpoints.pop(endpoint_id, None)
        if lane is self.slow:
            self.slow_endpoints[endpoint_id] = None


def _are_among(messages: Iterable[Message], ids: Collection[int]) -> bool:
    return all(message.id in ids for message in messages)
