"""Counts the worker's deliveries since its last report: per endpoint for the statistics, in total for its own row."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping

from ulak.messages.delivery import Settled

# Bucket i counts requests below its limit, 2^(i/4) milliseconds, so no figure derived from them is off by more than a
# fifth. The last bucket takes the rest (above half an hour).
LIMITS = tuple(2 ** (i / 4) for i in range(85))
BUCKETS = len(LIMITS) + 1
# The array element that stores bucket 0: the elements below it belong to version 0.1.0.
FIRST_ELEMENT = 100


class _Counts:
    __slots__ = ("delivered", "failed", "histogram", "max_ms", "total_ms")

    def __init__(self) -> None:
        self.delivered = 0
        self.failed = 0
        self.total_ms = 0.0
        self.max_ms = 0.0
        # Counts by bucket, without empty buckets: most endpoints fill one or two of them in a second.
        self.histogram: dict[int, int] = {}


class Counters:
    def __init__(self) -> None:
        self._counts: dict[int, _Counts] = {}
        self.processed = 0
        self.failed = 0
        self.last_error: str | None = None

    def __len__(self) -> int:
        """Endpoints that were sent to since their statistics were stored."""
        return len(self._counts)

    def note(self, settled: Settled, seconds: float) -> None:
        """Counts a delivery that took this long."""
        endpoint_id, messages, outcome = settled
        if outcome.failures is None:
            self.add(endpoint_id, len(messages), outcome.error, seconds)
        else:
            failed = list(outcome.failures.values())
            self.add(endpoint_id, len(messages) - len(failed), None, seconds)
            self.add(endpoint_id, len(failed), failed[-1].error, seconds)

    def add(self, endpoint_id: int, messages: int, error: str | None, seconds: float) -> None:
        """Counts one request that carried this many messages."""
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
        counts.max_ms = max(counts.max_ms, milliseconds)
        bucket = bisect_right(LIMITS, milliseconds)
        counts.histogram[bucket] = counts.histogram.get(bucket, 0) + messages

    def statistics(self) -> list[Mapping[str, object]]:
        """Sorted by endpoint id, which is the order in which rows are locked."""
        return [
            {
                "endpoint_id": endpoint_id,
                "delivered": counts.delivered,
                "failed": counts.failed,
                "latency_total_ms": round(counts.total_ms, 3),
                "latency_max_ms": round(counts.max_ms, 3),
                "latency_histogram": _stored(counts.histogram),
            }
            for endpoint_id, counts in sorted(self._counts.items())
        ]

    def clear_progress(self) -> None:
        """After a report. The last error stays."""
        self.processed = self.failed = 0

    def clear_statistics(self) -> None:
        self._counts = {}


def _stored(histogram: Mapping[int, int]) -> str:
    """An array literal from the first bucket that isn't empty to the last, with its lower bound, since it doesn't begin
    with element 1. That is less to send, to add up and to store."""
    first, last = min(histogram), max(histogram)
    counts = ",".join([str(histogram.get(bucket, 0)) for bucket in range(first, last + 1)])
    return f"[{FIRST_ELEMENT + first}:{FIRST_ELEMENT + last}]={{{counts}}}"
