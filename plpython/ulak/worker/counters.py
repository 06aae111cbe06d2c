"""Counts the worker's deliveries since its last report: per endpoint for the statistics, in total for its own row."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

from ulak.messages.delivery import Settled

# Bucket i counts messages whose requests took less than its limit, 2^(i/4) milliseconds, so no figure derived from them
# is off by more than a fifth. The last bucket takes the rest (above half an hour).
LIMITS = tuple(2 ** (i / 4) for i in range(85))


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

    def note(self, settled: Settled) -> None:
        endpoint_id, messages, outcome, seconds = settled
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

    def statistics(self, most: int | None = None) -> list[Mapping[str, object]]:
        """Of the endpoints that have waited longest, at most this many. Sorted by endpoint id, which is the order in
        which rows are locked."""
        return [
            {
                "endpoint_id": endpoint_id,
                "delivered": counts.delivered,
                "failed": counts.failed,
                "latency_total_ms": round(counts.total_ms, 3),
                "latency_max_ms": round(counts.max_ms, 3),
                "latency_histogram": _stored(counts.histogram),
            }
            for endpoint_id, counts in sorted(islice(self._counts.items(), most))
        ]

    def clear(self, statistics: Iterable[Mapping[str, Any]]) -> None:
        """After a report with these statistics. The last error stays."""
        self.processed = self.failed = 0
        for each in statistics:
            del self._counts[each["endpoint_id"]]


def _stored(histogram: Mapping[int, int]) -> str:
    """An array literal from the first bucket that isn't empty to the last, with its lower bound, since it doesn't begin
    with element 1. That is less to send, to add up and to store."""
    first, last = min(histogram), max(histogram)
    counts = ",".join([str(histogram.get(bucket, 0)) for bucket in range(first, last + 1)])
    return f"[{1 + first}:{1 + last}]={{{counts}}}"
