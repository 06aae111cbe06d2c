"""Deliveries under way, and the requests that are to follow them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from ulak.messages.delivery import Endpoint, Message, Settled
from ulak.worker.counters import Counters
from ulak.worker.dispatcher import Dispatcher
from ulak.worker.outcomes import Settling
from ulak.worker.prefetch import Prefetched
from ulak.worker.request_slots import RequestSlots
from ulak.worker.tuning import SLOW_SECONDS


class _UnderWay(NamedTuple):
    to: Endpoint
    start: float


class Sending:
    def __init__(self, dispatcher: Dispatcher, slots: RequestSlots, settling: Settling, counters: Counters) -> None:
        self.slots = slots
        # Requests of the last claim, which start when it is committed; and those that found no slot then.
        self.fresh = Prefetched()
        self.prefetched = Prefetched()
        self._dispatcher = dispatcher
        self._settling = settling
        self._counters = counters
        # By id and attempt of the first message. The id alone won't do: a message whose lease was lost may come again.
        self._under_way: dict[tuple[int, int], _UnderWay] = {}

    def start(self, to: Endpoint, messages: Sequence[Message], now: float) -> None:
        first = messages[0]
        self.slots.take(to.id)
        self._under_way[first.id, first.attempt] = _UnderWay(to, now)
        self._dispatcher.start(to, messages)

    def start_prefetched(self, now: float) -> None:
        self._start_all(self.prefetched, self.slots.may_start_prefetched, now)

    def start_fresh(self, now: float) -> None:
        """What there is no slot for becomes prefetched."""
        self._start_all(self.fresh, self.slots.may_start, now)
        self.prefetched.append(self.fresh)

    def collect(self, settled: Iterable[Settled], now: float) -> None:
        for endpoint_id, messages, outcome in settled:
            first = messages[0]
            to, start = self._under_way.pop((first.id, first.attempt))
            seconds = now - start
            self.slots.give_back(endpoint_id, seconds)
            if outcome.failures is None:
                self._counters.add(endpoint_id, len(messages), outcome.error, seconds)
            else:
                failed = list(outcome.failures.values())
                self._counters.add(endpoint_id, len(messages) - len(failed), None, seconds)
                self._counters.add(endpoint_id, len(failed), failed[-1].error, seconds)
            # A limit that this worker alone can't reach holds nobody up for long.
            if to.max_in_flight is not None and to.max_in_flight <= self.slots.total:
                self._settling.unblocks_others = True

    def note_slow(self, now: float) -> None:
        """Endpoints whose receivers take long get their slots elsewhere."""
        self.slots.see_stuck({each.to.id for each in self._under_way.values() if each.start < now - SLOW_SECONDS})

    def last_end(self) -> float:
        """When all that is under way will have ended."""
        return max((each.start + each.to.longest for each in self._under_way.values()), default=0.0)

    def _start_all(self, requests: Prefetched, room_of: Callable[[int], int], now: float) -> None:
        for to, messages in requests.take(room_of, self.slots.has_room):
            self.start(to, messages, now)
