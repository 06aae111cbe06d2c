"""Which endpoint may have how many of the worker's requests in flight."""

from __future__ import annotations

from collections import Counter


class Slots:
    """An endpoint gets at most seven eighths of what the others leave, so a receiver that hangs can't take all."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.taken = 0
        self._by_endpoint: Counter[int] = Counter()

    @property
    def free(self) -> int:
        return max(0, self.total - self.taken)

    def take(self, endpoint_id: int) -> None:
        self.taken += 1
        self._by_endpoint[endpoint_id] += 1

    def give_back(self, endpoint_id: int) -> None:
        self.taken -= 1
        self._by_endpoint[endpoint_id] -= 1
        if not self._by_endpoint[endpoint_id]:
            del self._by_endpoint[endpoint_id]

    def room(self) -> int:
        """For an endpoint that has nothing in flight."""
        return max(1, self.free * 7 // 8)

    def rooms(self) -> dict[int, int]:
        """For each endpoint that has something in flight; 0 when it has had its share."""
        free = self.free
        return {
            endpoint_id: max(0, min(free, (free + held) * 7 // 8 - held)) if free + held > 1 else 0
            for endpoint_id, held in self._by_endpoint.items()
        }
