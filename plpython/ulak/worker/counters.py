"""What the worker has done since its last report: per endpoint for the statistics, in sum for its own row."""

from __future__ import annotations

from collections.abc import Mapping

# Bucket i counts requests below 2^i milliseconds; the last one takes the rest (above half an hour).
BUCKETS = 22


class _Counts:
    __slots__ = ("delivered", "failed", "histogram", "total_ms")

    def __init__(self) -> None:
        self.delivered = 0
        self.failed = 0
        self.total_ms = 0.0
        self.histogram = [0] * BUCKETS


class Counters:
    def __init__(self) -> None:
        self._counts: dict[int, _Counts] = {}
        self.processed = 0
        self.failed = 0
        self.last_error: str | None = None

    def add(self, endpoint_id: int, messages: int, error: str | None, seconds: float) -> None:
        """One request that carried so many messages."""
        counts = self._counts.get(endpoint_id)
        if counts is None:
            counts = self._counts[endpoint_id] = _Counts()
        self.processed += messages
        if error is None:
            counts.delivered += messages
        else:
            counts.failed += messages
            self.failed += messages
            self.last_error = error
        milliseconds = seconds * 1000
        counts.total_ms += milliseconds * messages
        counts.histogram[min(int(milliseconds).bit_length(), BUCKETS - 1)] += messages

    def statistics(self) -> list[Mapping[str, object]]:
        """In the order of endpoint ids: the order in which rows are locked."""
        return [
            {
                "endpoint_id": endpoint_id,
                "delivered": counts.delivered,
                "failed": counts.failed,
                "latency_total_ms": round(counts.total_ms, 3),
                "latency_histogram": _without_last_zeros(counts.histogram),
            }
            for endpoint_id, counts in sorted(self._counts.items())
        ]

    def clear(self) -> None:
        """What was told is told; the last error stays."""
        self._counts = {}
        self.processed = self.failed = 0


def _without_last_zeros(histogram: list[int]) -> list[int]:
    """What is missing at the end is 0: less to send, to add up and to store."""
    size = len(histogram)
    while size and not histogram[size - 1]:
        size -= 1
    return histogram[:size]
