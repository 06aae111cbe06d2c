"""Which endpoint may have how many of the worker's requests in flight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

# A request that takes longer makes its endpoint a slow one.
SLOW_SECONDS = 0.5
# Receivers that answer at once need no more requests in flight than these. What libcurl and the kernel keep for a
# connection is 15 kB: of so many it stays in the processor's own cache.
LEAST_WAVE = 32


class Slots:
    """Two lanes of the same width: receivers that are slow have their own, and can't hold the others up.

    Within its lane an endpoint gets at most seven eighths of what the others leave, so it can't take all.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        # Endpoints that have a request under way for long.
        self.stuck: frozenset[int] = frozenset()
        # Those, and endpoints whose last answer took long.
        self.slow: set[int] = set()
        self._held: Counter[int] = Counter()
        self._taken = 0
        self._taken_slow = 0
        # How many may be in flight to receivers that aren't slow. Slots beyond are for those who take their time.
        self.wave = min(total, LEAST_WAVE)

    @property
    def free(self) -> int:
        """For receivers that aren't slow. When many turn slow at once, both lanes together are the limit."""
        return max(0, min(self.total - self._taken + self._taken_slow, 2 * self.total - self._taken))

    @property
    def slow_in_flight(self) -> int:
        return self._taken_slow

    @property
    def quick_in_flight(self) -> int:
        return self._taken - self._taken_slow

    @property
    def is_wave_full(self) -> bool:
        return self.quick_in_flight >= self.wave

    def waited(self, before: int) -> None:
        """The worker has waited for answers while others are in line and the wave was full; before: of so many."""
        if 4 * (before - self.quick_in_flight) < before:
            self.wave = min(self.total, 2 * self.wave)
        else:
            self.wave = max(min(self.total, LEAST_WAVE), self.wave - self.wave // 8)

    def take(self, endpoint_id: int) -> None:
        self._held[endpoint_id] += 1
        self._taken += 1
        self._taken_slow += endpoint_id in self.slow

    def give_back(self, endpoint_id: int, seconds: float) -> None:
        """A request ended after so long."""
        self._held[endpoint_id] -= 1
        self._taken -= 1
        self._taken_slow -= endpoint_id in self.slow
        if not self._held[endpoint_id]:
            del self._held[endpoint_id]
        if seconds >= SLOW_SECONDS:
            self._mark(endpoint_id)
        elif endpoint_id in self.slow and endpoint_id not in self.stuck:
            self.slow.remove(endpoint_id)
            self._taken_slow -= self._held[endpoint_id]

    def see_stuck(self, endpoint_ids: Iterable[int]) -> None:
        """These, and no others, have requests under way for longer than SLOW_SECONDS."""
        self.stuck = frozenset(endpoint_ids)
        for endpoint_id in self.stuck:
            self._mark(endpoint_id)

    def room(self) -> int:
        """For an endpoint that has nothing in flight and isn't known as slow."""
        return self._share(self.free, 0)

    def room_of(self, endpoint_id: int) -> int:
        """0 if it has had its share."""
        free = self._free_slow if endpoint_id in self.slow else self.free
        return self._share(free, self._held[endpoint_id])

    def room_of_any(self) -> int:
        """For whichever endpoint; 0 if it isn't the same for each."""
        return 0 if self.slow else max(0, self.free * 7 // 8 - (self._taken + 7) // 8)

    def open_to(self, endpoint_id: int) -> int:
        """How many requests it may begin with what it has claimed: more than room_of(), which leaves others their share
        of what is free, but never all that there is."""
        free = self._free_slow if endpoint_id in self.slow else min(self.free, self.wave - self.quick_in_flight)
        return max(0, min(free, max(1, self.total * 7 // 8) - self._held[endpoint_id]))

    def open_in_line(self, endpoint_id: int) -> int:
        """The same for what has waited. An eighth is left to those who are claimed next: if receivers of those in line
        begin to hang, the others must not wait behind them. Only who has nothing in flight may have the first of it."""
        spare = self.free - self.total // 8
        return max(0, min(self.open_to(endpoint_id), spare if self._held[endpoint_id] else max(1, spare)))

    def rooms(self) -> dict[int, int]:
        """For the endpoints that room() doesn't tell about."""
        return {endpoint_id: self.room_of(endpoint_id) for endpoint_id in self._held.keys() | self.slow}

    @property
    def _free_slow(self) -> int:
        return max(0, min(self.total - self._taken_slow, 2 * self.total - self._taken))

    def _mark(self, endpoint_id: int) -> None:
        if endpoint_id not in self.slow:
            self.slow.add(endpoint_id)
            self._taken_slow += self._held[endpoint_id]

    @staticmethod
    def _share(free: int, held: int) -> int:
        most = (free + held) * 7 // 8 if free + held > 1 else 1
        return max(0, min(free, most - held))
