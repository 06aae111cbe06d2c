"""rate_limit: a token bucket per endpoint, shared by all workers, taken in the claim."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.queue import Queue
from ulak.worker.tuning import LOOK_SECONDS_OFTEN


def limited(queue: Queue, messages: int = 100, **limit: Any) -> None:
    queue.endpoint(config={"rate_limit": limit})
    queue.send_many(messages)


def claimed(queue: Queue, now: float, limit: int = 1000) -> int:
    return len(queue.claim(limit, now=now))


def test_a_full_bucket_lets_its_burst_through_and_then_the_rate(queue: Queue) -> None:
    limited(queue, limit=10, interval="second", burst=20)

    assert claimed(queue, 0) == 20
    assert claimed(queue, 0) == 0
    assert claimed(queue, 0.5) == 5
    assert claimed(queue, 0.55) == 0
    assert claimed(queue, 0.6) == 1


def test_an_idle_bucket_holds_no_more_than_its_burst(queue: Queue) -> None:
    limited(queue, limit=10, interval="second", burst=20)
    claimed(queue, 0)

    assert claimed(queue, 10_000) == 20


def test_without_a_burst_of_its_own_a_bucket_holds_a_tenth_of_a_second(queue: Queue) -> None:
    limited(queue, limit=100, interval="second")

    assert [claimed(queue, now) for now in (0, 0.01, 0.11, 5)] == [10, 1, 10, 10]


@pytest.mark.parametrize(("interval", "seconds"), [("second", 1), ("minute", 60), ("hour", 3600)])
def test_the_interval_is_a_second_a_minute_or_an_hour(queue: Queue, interval: str, seconds: float) -> None:
    limited(queue, limit=2, interval=interval)

    assert claimed(queue, 0) == 1
    # A full bucket saves what comes in until a worker looks again.
    assert claimed(queue, seconds / 2 - LOOK_SECONDS_OFTEN - 0.001) == 0
    assert claimed(queue, seconds / 2) == 1


def test_what_waits_for_a_token_stays_untouched(queue: Queue) -> None:
    limited(queue, 5, limit=1, interval="minute")
    claimed(queue, 0)
    before = queue.rows("select *, xmin::text, ctid::text from ulak_private.deliveries order by id")

    assert claimed(queue, 1) == 0

    assert queue.rows("select *, xmin::text, ctid::text from ulak_private.deliveries order by id") == before


def test_unused_turns_cost_no_token(queue: Queue) -> None:
    limited(queue, 1, limit=10, interval="second", burst=10)
    assert claimed(queue, 0) == 1

    queue.send_many(50)

    assert claimed(queue, 0) == 9


def test_a_retry_takes_a_token_too(queue: Queue) -> None:
    limited(queue, 1, limit=1, interval="minute")
    (claim,) = queue.claim(10)
    queue.fail(claim, retry_after=0)

    assert claimed(queue, 30) == 0
    assert claimed(queue, 60) == 1


def test_a_clock_that_steps_back_gives_no_tokens_twice(queue: Queue) -> None:
    """Sessions read the clock before they wait for the endpoint's lock: the later one may bring an earlier time."""
    limited(queue, limit=10, interval="second", burst=10)

    assert claimed(queue, 100, limit=5) == 5
    assert claimed(queue, 99, limit=1) == 1
    assert claimed(queue, 100) == 4
    assert claimed(queue, 100.5) == 5


def test_a_new_limit_holds_from_the_next_claim_on(queue: Queue) -> None:
    limited(queue, limit=10, interval="second", burst=10)
    claimed(queue, 0)

    queue.call("alter_endpoint", "shop", {"rate_limit": {"limit": 1, "interval": "minute"}})
    assert claimed(queue, 1) == 0
    assert claimed(queue, 61) == 1
    queue.call("alter_endpoint", "shop", {})
    assert claimed(queue, 61) > 50


def test_other_endpoints_are_not_held_up(queue: Queue) -> None:
    limited(queue, limit=1, interval="minute")
    queue.endpoint("other")
    queue.send_many(5, "other")

    assert sorted(claim.endpoint for claim in queue.claim(100)) == ["other"] * 5 + ["shop"]


def test_the_cap_in_flight_and_the_rate_hold_both(queue: Queue) -> None:
    queue.endpoint(config={"max_in_flight": 3, "rate_limit": {"limit": 2, "interval": "second", "burst": 2}})
    queue.send_many(20)

    assert [claimed(queue, now) for now in (0, 1, 2)] == [2, 1, 0]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rate=st.integers(1, 200),
    burst=st.none() | st.integers(1, 100),
    steps=st.lists(st.tuples(st.floats(-0.2, 3), st.integers(1, 40)), min_size=1, max_size=12),
)
def test_never_more_passes_than_the_burst_and_what_time_has_given(
    queue: Queue, rate: int, burst: int | None, steps: list[tuple[float, int]]
) -> None:
    limit = {"limit": rate, "interval": "second"} | ({} if burst is None else {"burst": burst})
    with queue.db.transaction(force_rollback=True):
        queue.endpoint(config={"rate_limit": limit})
        queue.send_many(sum(wanted for _, wanted in steps))

        now = latest = 0.0
        passed = 0
        for step, wanted in steps:
            now += step
            latest = max(latest, now)
            passed += claimed(queue, now, wanted)
            assert passed <= rate * latest + (burst or max(rate / 10, 1)) + 1e-6
