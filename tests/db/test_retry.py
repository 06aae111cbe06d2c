"""How long a failed message waits: the tables of the retry strategies, and what holds for all of them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from psycopg.types.json import Jsonb
from support.errors import refused
from support.queue import Queue

quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def delay(queue: Queue, policy: dict[str, Any] | None, retry: int) -> float:
    return seconds(queue.call("retry_delay", policy, retry))


def seconds(interval: timedelta) -> float:
    return interval.total_seconds()


def delays(queue: Queue, policy: dict[str, Any] | None, retries: int) -> list[float]:
    return [
        seconds(interval)
        for interval in queue.column(
            "select ulak.retry_delay(%s::jsonb, n) from generate_series(0, %s) n order by n",
            None if policy is None else Jsonb(policy),
            retries - 1,
        )
    ]


TABLES: dict[str, tuple[dict[str, Any] | None, list[float]]] = {
    "exponential is the default": (None, [10, 20, 40, 80, 160, 300, 300, 300, 300, 300, 300, 300, 300]),
    "exponential": ({"backoff": "exponential"}, [10, 20, 40, 80, 160, 300, 300]),
    "linear": ({"backoff": "linear"}, [10, 40, 70, 100, 130, 160, 190, 220, 250, 280, 300, 300]),
    "fixed": ({"backoff": "fixed"}, [10, 10, 10, 10]),
    "quadratic": ({"backoff": "quadratic"}, [10, 40, 90, 160, 250, 300, 300]),
    "schedule": ({"backoff": "schedule", "schedule": [5, 60, 3600]}, [5, 60, 3600, 3600, 3600]),
    "a policy's own numbers": (
        {"backoff": "linear", "base_delay_seconds": 5, "max_delay_seconds": 600, "increment_seconds": 15},
        [5, 20, 35, 50, 65],
    ),
}


@pytest.mark.parametrize("table", TABLES)
def test_the_documented_tables_hold_exactly(queue: Queue, table: str) -> None:
    policy, expected = TABLES[table]

    assert delays(queue, policy, len(expected)) == expected


def test_keys_that_a_policy_leaves_out_come_from_the_settings(queue: Queue) -> None:
    queue.call("configure", "retry_base_delay", "7")
    queue.call("configure", "retry_max_delay", "50")
    queue.call("configure", "retry_increment", "3")

    assert delays(queue, None, 5) == [7, 14, 28, 50, 50]
    assert delays(queue, {"backoff": "linear"}, 3) == [7, 10, 13]
    assert delays(queue, {"backoff": "linear", "base_delay_seconds": 1}, 3) == [1, 4, 7]


def test_backoff_and_jitter_that_a_policy_leaves_out_come_from_the_settings(queue: Queue) -> None:
    queue.call("configure", "default_backoff", "fixed")
    delay = "select extract(epoch from ulak.retry_delay(%s, 3))::float"
    assert queue.value(delay, "{}") == 10
    assert queue.value(delay, '{"backoff": "exponential"}') == 80

    queue.call("configure", "default_jitter", "full")
    assert len({queue.value(delay, "{}") for _ in range(20)}) > 1
    assert queue.value(delay, '{"jitter": "none"}') == 10


def test_beyond_ten_retries_exponential_is_at_its_cap(queue: Queue) -> None:
    policy = {"base_delay_seconds": 1, "max_delay_seconds": 86_400}

    assert [delay(queue, policy, n) for n in (9, 10, 11, 1000)] == [512, 1024, 86_400, 86_400]


def test_a_retry_before_the_first_is_the_first(queue: Queue) -> None:
    assert delay(queue, None, -5) == 10


@pytest.mark.parametrize(
    "policy",
    [
        {"backoff": "sometimes"},
        {"backoff": "schedule"},
        {"schedule": [1]},
        {"jitter": "lots"},
        {"base_delay_seconds": 0},
        {"base_delay_seconds": "ten"},
        {"max_delay": 5},
    ],
)
def test_a_policy_that_an_endpoint_could_not_have_is_refused(queue: Queue, policy: dict[str, Any]) -> None:
    assert queue.refuses("retry_delay", policy, 1).sqlstate == "22023"


# Properties of every policy.

base = st.integers(1, 3600)
backoffs = st.sampled_from(["exponential", "linear", "fixed", "quadratic", "schedule"])


@st.composite
def policies(draw: st.DrawFn, jitter: str = "none") -> dict[str, Any]:
    backoff = draw(backoffs)
    policy: dict[str, Any] = {"backoff": backoff, "jitter": jitter}
    if backoff == "schedule":
        steps = draw(st.lists(st.integers(0, 2_592_000), min_size=1, max_size=8))
        return policy | {"schedule": sorted(steps)}
    first = draw(base)
    return policy | {
        "base_delay_seconds": first,
        "max_delay_seconds": draw(st.integers(first, 86_400)),
        "increment_seconds": draw(base),
    }


def cap(policy: dict[str, Any]) -> float:
    if policy["backoff"] == "schedule":
        return float(policy["schedule"][-1])
    return float(policy["base_delay_seconds" if policy["backoff"] == "fixed" else "max_delay_seconds"])


@quick
@given(policies())
def test_every_backoff_rises_to_its_cap_and_stays_there(queue: Queue, policy: dict[str, Any]) -> None:
    curve = delays(queue, policy, 60)

    assert curve == sorted(curve)
    assert curve[0] == policy.get("base_delay_seconds", policy.get("schedule", [0])[0])
    assert max(curve) <= cap(policy)
    assert delay(queue, policy, 100_000) == cap(policy)


@quick
@given(policies(), st.sampled_from([11, 1000, 2_147_483_647]))
def test_no_backoff_overflows(queue: Queue, policy: dict[str, Any], retry: int) -> None:
    assert 0 <= delay(queue, policy, retry) <= cap(policy)


@quick
@given(policies("full"), st.integers(0, 1000))
def test_full_jitter_lies_between_nothing_and_the_delay(queue: Queue, policy: dict[str, Any], retry: int) -> None:
    whole = delay(queue, policy | {"jitter": "none"}, retry)

    assert 0 <= delay(queue, policy, retry) <= whole


@quick
@given(policies("equal"), st.integers(0, 1000))
def test_equal_jitter_lies_between_half_and_all_of_the_delay(queue: Queue, policy: dict[str, Any], retry: int) -> None:
    whole = delay(queue, policy | {"jitter": "none"}, retry)

    # An interval counts microseconds.
    assert whole / 2 - 1e-6 <= delay(queue, policy, retry) <= whole


@pytest.mark.parametrize(("jitter", "lowest"), [("full", 0.0), ("equal", 0.5)])
def test_jitter_spreads_over_its_whole_range(queue: Queue, jitter: str, lowest: float) -> None:
    policy = {"backoff": "fixed", "base_delay_seconds": 100, "jitter": jitter}
    spread = [delay(queue, policy, 0) / 100 for _ in range(300)]

    width = 1 - lowest
    assert min(spread) < lowest + width / 10
    assert max(spread) > 1 - width / 10
    assert len(set(spread)) > 290


def test_a_failed_message_waits_as_its_endpoints_policy_says(queue: Queue) -> None:
    queue.endpoint(policy={"backoff": "schedule", "schedule": [1, 5, 25], "max_retries": 5})
    id = queue.send()

    now, waits = 0.0, []
    for _ in range(5):
        queue.fail(queue.claim_one(now=now), now=now)
        waits.append(queue.due_in(id) - now)
        now = queue.due_in(id)

    assert waits == [1, 5, 25, 25, 25]
    queue.fail(queue.claim_one(now=now), now=now)
    assert queue.status(id) == "failed"


def test_a_change_of_the_policy_holds_for_the_next_failure(queue: Queue) -> None:
    queue.endpoint(policy={"backoff": "fixed", "base_delay_seconds": 60})
    id = queue.send()
    queue.db.execute("""update ulak.endpoints set retry_policy = '{"backoff": "fixed", "base_delay_seconds": 5}'""")

    queue.fail(queue.claim_one())

    assert queue.due_in(id) == 5


def test_a_backoff_that_is_not_implemented_is_an_error(queue: Queue) -> None:
    """One that is allowed in a policy and forgotten in the code must not pass for another one."""
    policy = 'ulak_private.retry_defaults() || \'{"backoff": "fibonacci"}\''

    error = refused(queue.db, f"select ulak_private.backoff({policy}, 3)")

    assert (error.sqlstate, error.message_primary) == ("22023", 'unknown backoff "fibonacci"')
