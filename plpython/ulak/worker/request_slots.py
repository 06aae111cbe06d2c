"""Request slots: which endpoint may have how many of the worker's deliveries in flight."""

from __future__ import annotations

from collections.abc import Iterable

from ulak.worker.tuning import LEAST_WINDOW, SLOW_REMEMBERED, SLOW_SECONDS


class RequestSlots:
    """Two lanes of the same width: receivers that are slow have their own, and can't hold the others up.

    Within its lane an endpoint gets at most seven eighths of what the others leave, so it can't take all.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self._most = max(1, total * 7 // 8)
        # Endpoints that have a request under way for long.
        self.stuck: frozenset[int] = frozenset()
        # Those, and endpoints whose last answer took long.
        self.slow: set[int] = set()
        # Slow endpoints with nothing under way, the one that has had nothing for longest first. Only so many are
        # remembered, since each claim is told about each of them.
        self._slow_idle: dict[int, None] = {}
        # Requests under way, by endpoint; not a Counter, which takes long to say that there are none.
        self._held: dict[int, int] = {}
        self._taken = 0
        self._taken_slow = 0
        # The in-flight window: how many deliveries may be under way to receivers that aren't slow.
        self.window = min(total, LEAST_WINDOW)

    @property
    def free(self) -> int:
        """For receivers that aren't slow. When many turn slow at once, both lanes together are the limit."""
        return max(0, min(self.total - self._taken + self._taken_slow, 2 * self.total - self._taken))

    @property
    def free_in_window(self) -> int:
        """The same within the window, which is never wider than the lane."""
        return max(0, min(self.window - self.quick_in_flight, 2 * self.total - self._taken))

    @property
    def slow_in_flight(self) -> int:
        return self._taken_slow

    @property
    def quick_in_flight(self) -> int:
        return self._taken - self._taken_slow

    @property
    def is_window_full(self) -> bool:
        return self.quick_in_flight >= self.window

    def adapt_window(self, before: int) -> None:
        """After a wait for answers with prefetched requests and a full window; before: so many were in flight."""
        if 4 * (before - self.quick_in_flight) < before:
            self.window = min(self.total, 2 * self.window)
        else:
            self.window = max(min(self.total, LEAST_WINDOW), self.window - self.window // 8)

    def take(self, endpoint_id: int) -> None:
        self._held[endpoint_id] = self._held.get(endpoint_id, 0) + 1
        self._taken += 1
        self._taken_slow += endpoint_id in self.slow
        self._slow_idle.pop(endpoint_id, None)

    def give_back(self, endpoint_id: int, seconds: float) -> None:
        """A request ended after so long."""
        self._held[endpoint_id] -= 1
        self._taken -= 1
        self._taken_slow -= endpoint_id in self.slow
        if not self._held[endpoint_id]:
            del self._held[endpoint_id]
        if seconds >= SLOW_SECONDS:
            self._add_slow(endpoint_id)
        elif endpoint_id in self.slow and endpoint_id not in self.stuck:
            self.slow.remove(endpoint_id)
            self._taken_slow -= self._held.get(endpoint_id, 0)
        if endpoint_id in self.slow and endpoint_id not in self._held:
            self._slow_idle[endpoint_id] = None
            if len(self._slow_idle) > SLOW_REMEMBERED:
                forgotten = next(iter(self._slow_idle))
                del self._slow_idle[forgotten]
                self.slow.remove(forgotten)

    def see_stuck(self, endpoint_ids: Iterable[int]) -> None:
        """These, and no others, have requests under way for longer than SLOW_SECONDS."""
        self.stuck = frozenset(endpoint_ids)
        for endpoint_id in self.stuck:
            self._add_slow(endpoint_id)

    def room(self) -> int:
        """For an endpoint that has nothing in flight and isn't known as slow."""
        return self._share(self.free, 0)

    def room_of(self, endpoint_id: int) -> int:
        """0 if it has had its share."""
        free = self._free_slow if endpoint_id in self.slow else self.free
        return self._share(free, self._held.get(endpoint_id, 0))

    def room_of_any(self) -> int:
        """For whichever endpoint; 0 if it isn't the same for each."""
        return 0 if self.slow else max(0, self.free * 7 // 8 - (self._taken + 7) // 8)

    def may_start(self, endpoint_id: int) -> int:
        """How many requests it may begin with what it has claimed: more than room_of(), which leaves others their share
        of what is free, but never all that there is."""
        if endpoint_id in self.slow:
            free = self._free_slow
        else:
            # `free_in_window`, written out: this is asked once for each request.
            free = min(self.window - self._taken + self._taken_slow, 2 * self.total - self._taken)
        return max(0, min(free, self._most - self._held.get(endpoint_id, 0)))

    def has_room(self) -> bool:
        """Whether any endpoint may begin a request."""
        return (self.window > self.quick_in_flight and self.free > 0) or (bool(self.slow) and self._free_slow > 0)

    def may_start_prefetched(self, endpoint_id: int) -> int:
        """The same for prefetched requests. An eighth of the slots is left to what is claimed next: if the receivers of
        prefetched requests begin to hang, the others must not wait behind them. Only an endpoint with nothing in flight
        may have the first of that eighth."""
        count = self.may_start(endpoint_id)
        if not count:
            return 0
        spare = self.free - self.total // 8
        if spare < 1 and endpoint_id not in self._held:
            spare = 1
        return count if count <= spare else max(0, spare)

    def rooms(self) -> dict[int, int]:
        """For the endpoints that room() doesn't tell about."""
        return {endpoint_id: self.room_of(endpoint_id) for endpoint_id in self._held.keys() | self.slow}

    @property
    def _free_slow(self) -> int:
        return max(0, min(self.total - self._taken_slow, 2 * self.total - self._taken))

    def _add_slow(self, endpoint_id: int) -> None:
        if endpoint_id not in self.slow:
            self.slow.add(endpoint_id)
            self._taken_slow += self._held.get(endpoint_id, 0)

    @staticmethod
    def _share(free: int, held: int) -> int:
        most = (free + held) * 7 // 8 if free + held > 1 else 1
        return max(0, min(free, most - held))
