"""A circuit that has closed lets the backlog through a little at first, and more with each success."""

from __future__ import annotations

from typing import Any

import pytest
from support.queue import Claim, Queue

RULES = {"threshold": 5, "cooldown": 30}
LIMIT = "slow_start_limit"


def shop(queue: Queue, config: Any = None, **rules: Any) -> int:
    config = {"circuit_breaker": RULES | rules} | (config or {})
    return queue.endpoint(config=config, policy={"max_retries": 100, "backoff": "fixed", "base_delay_seconds": 3600})


def settle(queue: Queue, claims: list[Claim], error: str | None = None, now: float = 31) -> None:
    queue.value(
        "select ulak_private.settle_many('w', %s, %s, %s, p_now => %s)",
        [claim.id for claim in claims],
        [claim.attempt for claim in claims],
        [error] * len(claims),
        queue.at(now),
    )


def opened(queue: Queue, backlog: int = 200) -> None:
    for _ in range(RULES["threshold"]):
        queue.send()
        queue.fail(queue.claim_one())
    assert queue.state() == "open"
    queue.send_many(backlog)


def closed_again(queue: Queue, **options: Any) -> None:
    """By a probe that was delivered."""
    opened(queue, **options)
    (probe,) = queue.claim(100, now=30)
    settle(queue, [probe])
    assert queue.state() == "closed"


def test_what_may_be_in_flight_doubles_with_each_round(queue: Queue) -> None:
    shop(queue)
    opened(queue)

    rounds = []
    for _ in range(6):
        claims = queue.claim(100, now=30)
        rounds.append(len(claims))
        settle(queue, claims)

    assert rounds == [1, 2, 4, 8, 16, 32]


def test_it_is_a_limit_of_all_workers_together(queue: Queue) -> None:
    shop(queue)
    closed_again(queue)
    first = queue.claim(1, worker="w", now=31)

    assert len(queue.claim(100, worker="other", now=31)) == 1
    assert queue.claim(100, worker="third", now=31) == []
    settle(queue, first)
    assert len(queue.claim(100, worker="third", now=31)) == 2


def test_a_failure_that_counts_halves_it(queue: Queue) -> None:
    shop(queue)
    closed_again(queue)
    for _ in range(2):
        settle(queue, queue.claim(100, now=31))
    assert queue.circuit()[LIMIT] == 8

    limits = []
    for _ in range(4):
        (claim, *others) = queue.claim(100, now=31)
        settle(queue, [claim], "[RETRYABLE] 503")
        limits.append(queue.circuit()[LIMIT])
        for other in others:
            queue.release(other, now=31)

    assert limits == [4, 2, 1, 1]
    assert queue.state() == "closed"


def test_a_failure_that_does_not_count_changes_nothing(queue: Queue) -> None:
    shop(queue)
    closed_again(queue)

    settle(queue, queue.claim(1, now=31), "[PERMANENT] 400")

    assert queue.circuit()[LIMIT] == 2


def test_a_failure_that_does_not_count_halves_it_where_all_count(queue: Queue) -> None:
    shop(queue, counts="all")
    closed_again(queue)

    settle(queue, queue.claim(1, now=31), "[PERMANENT] 400")

    assert queue.circuit()[LIMIT] == 1


@pytest.mark.parametrize(("config", "setting", "rounds"), [({"max_in_flight": 6}, 128, 2), (None, 14, 3)])
def test_it_ends_at_what_the_endpoint_may_have_anyway(queue: Queue, config: Any, setting: int, rounds: int) -> None:
    queue.call("configure", "worker_concurrency", str(setting))
    shop(queue, config)
    closed_again(queue)

    for _ in range(rounds):
        assert queue.circuit()[LIMIT] is not None
        settle(queue, queue.claim(100, now=31))

    assert queue.circuit()[LIMIT] is None
    assert len(queue.claim(100, now=31)) == (6 if config else 100)


def test_it_does_not_raise_a_lower_limit(queue: Queue) -> None:
    shop(queue, {"max_in_flight": 1})
    closed_again(queue)

    assert len(queue.claim(100, now=31)) == 1


def test_after_a_reset_one_message_goes_out_first(queue: Queue) -> None:
    shop(queue)
    opened(queue)

    assert queue.call("reset_circuit_breaker", "shop", queue.at(10)) is True

    rounds = []
    for _ in range(3):
        claims = queue.claim(100, now=10)
        rounds.append(len(claims))
        settle(queue, claims)
    assert rounds == [1, 2, 4]


def test_a_reset_of_a_closed_circuit_ends_it(queue: Queue) -> None:
    shop(queue)
    closed_again(queue)

    assert queue.call("reset_circuit_breaker", "shop", queue.at(31)) is False

    assert queue.circuit()[LIMIT] is None
    assert len(queue.claim(100, now=31)) == 100


def test_it_begins_anew_when_the_circuit_has_opened_again(queue: Queue) -> None:
    shop(queue)
    closed_again(queue)
    settle(queue, queue.claim(100, now=31))
    settle(queue, queue.claim(100, now=31))
    settle(queue, queue.claim(5, now=31), "[RETRYABLE] 503")
    assert (queue.state(), queue.circuit()[LIMIT]) == ("open", None)

    settle(queue, queue.claim(100, now=61), now=61)

    assert (queue.state(), queue.circuit()[LIMIT]) == ("closed", 2)


def test_what_hangs_since_does_not_hold_up_the_next_probe(queue: Queue) -> None:
    shop(queue)
    closed_again(queue)
    queue.claim(2, worker="hangs", lease=3600, now=31)
    for _ in range(RULES["threshold"]):
        queue.call("update_circuit_breaker", queue.circuit()["id"], False, queue.at(32))
    assert queue.state() == "open"

    assert len(queue.claim(100, now=62)) == 1


@pytest.mark.parametrize("by", ["config", "setting"])
def test_it_can_be_turned_off(queue: Queue, by: str) -> None:
    if by == "setting":
        queue.call("configure", "circuit_breaker_slow_start", "false")
        shop(queue)
    else:
        shop(queue, slow_start=False)
    closed_again(queue)

    assert queue.circuit()[LIMIT] is None
    assert len(queue.claim(100, now=31)) == 100


def test_an_endpoints_own_word_is_above_the_setting(queue: Queue) -> None:
    queue.call("configure", "circuit_breaker_slow_start", "false")
    shop(queue, slow_start=True)
    closed_again(queue)

    assert queue.circuit()[LIMIT] == 2


def test_a_circuit_that_never_opened_has_none(queue: Queue) -> None:
    shop(queue)
    queue.send_many(200)
    queue.fail(queue.claim_one())
    queue.complete(queue.claim_one())

    assert queue.circuit()[LIMIT] is None
    assert len(queue.claim(100)) == 100


def test_the_limit_holds_for_messages_with_an_ordering_key(queue: Queue) -> None:
    shop(queue)
    opened(queue, backlog=0)
    for n in range(20):
        queue.send(ordering_key=f"k{n % 5}")
    settle(queue, queue.claim(100, now=30))

    assert len(queue.claim(100, now=31)) == 2
