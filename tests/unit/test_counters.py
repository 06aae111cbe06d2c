"""What a worker reports about its work."""

from __future__ import annotations

from ulak.worker.counters import LIMITS, Counters


def test_each_endpoint_has_its_counts_in_the_order_of_ids() -> None:
    counters = Counters()
    counters.add(7, 1, None, 0.010)
    counters.add(3, 2, "[RETRYABLE] HTTP 500", 0.5)
    counters.add(7, 1, None, 0.020)

    first, second = counters.statistics()

    assert (first["endpoint_id"], first["delivered"], first["failed"]) == (3, 0, 2)
    assert (second["endpoint_id"], second["delivered"], second["failed"]) == (7, 2, 0)
    assert (first["latency_total_ms"], second["latency_total_ms"]) == (1000, 30)
    assert (counters.processed, counters.failed, counters.last_error) == (4, 2, "[RETRYABLE] HTTP 500")


def test_bucket_n_counts_requests_below_two_to_a_quarter_of_n_milliseconds() -> None:
    expected = {0.0005: 0, 0.001: 1, 0.00118: 1, 0.002: 5, 0.010: 14, 1.0: 40, 10.0: 54, 1e9: len(LIMITS)}

    for seconds, bucket in expected.items():
        counters = Counters()
        counters.add(1, 3, None, seconds)
        (counts,) = counters.statistics()
        # Only what counts something.
        assert counts["latency_histogram"] == f"[{1 + bucket}:{1 + bucket}]={{3}}"


def test_the_longest_time_is_kept() -> None:
    counters = Counters()
    for seconds in (0.002, 10.0023, 0.004):
        counters.add(1, 1, None, seconds)

    (counts,) = counters.statistics()

    assert counts["latency_max_ms"] == 10002.3
    assert str(counts["latency_histogram"]).startswith("[6:55]={1,0,0,0,1,")


def test_those_that_have_waited_longest_are_reported_first_and_the_others_are_kept() -> None:
    counters = Counters()
    for endpoint_id in (9, 7, 8):
        counters.add(endpoint_id, 1, None, 0.1)

    first = counters.statistics(2)
    counters.clear(first)

    assert [each["endpoint_id"] for each in first] == [7, 9]
    assert [each["endpoint_id"] for each in counters.statistics(2)] == [8]


def test_clearing_keeps_only_the_last_error() -> None:
    counters = Counters()
    counters.add(1, 1, "[PERMANENT] HTTP 404", 0.1)

    counters.clear(counters.statistics())

    assert (counters.statistics(), counters.processed, counters.failed) == ([], 0, 0)
    assert counters.last_error == "[PERMANENT] HTTP 404"
