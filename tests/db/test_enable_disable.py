"""A disabled endpoint accepts and holds messages; enabled again it gets them, at a rate if one is given."""

from __future__ import annotations

from typing import Any

import pytest
from support.queue import Queue

pytestmark = pytest.mark.usefixtures("shop")


def claimed(queue: Queue, now: float, limit: int = 1000) -> int:
    return len(queue.claim(limit, now=now))


def hold(queue: Queue, count: int, **options: Any) -> None:
    queue.call("disable_endpoint", "shop", queue.at(0))
    for _ in range(count):
        queue.send(**options)


def test_a_disabled_endpoint_holds_what_is_sent(queue: Queue) -> None:
    assert queue.call("disable_endpoint", "shop") is True
    id = queue.send()

    assert claimed(queue, 1000) == 0
    assert queue.status(id) == "pending"

    assert queue.call("enable_endpoint", "shop") is True
    assert claimed(queue, 1000) == 1


def test_doing_it_twice_says_so_and_is_logged_once(queue: Queue) -> None:
    done = [queue.call(f"{verb}_endpoint", "shop") for verb in ("disable", "disable", "enable", "enable")]

    assert done == [True, False, True, False]
    assert queue.events("endpoint.%abled") == ["endpoint.disabled", "endpoint.enabled"]


def test_the_log_has_the_role_and_the_time(queue: Queue) -> None:
    queue.call("disable_endpoint", "shop", queue.at(7))

    (event,) = queue.rows("select * from ulak.event_log where event = 'endpoint.disabled'")
    assert (event["endpoint_name"], event["actor"], event["created_at"]) == ("shop", "postgres", queue.at(7))
    assert (event["old_value"], event["new_value"]) == ({"enabled": True}, {"enabled": False})
    assert event["detail"] == {"reason": "disabled by postgres"}


def test_what_is_in_flight_may_still_be_settled(queue: Queue) -> None:
    queue.send()
    claim = queue.claim_one()
    queue.call("disable_endpoint", "shop")

    queue.complete(claim)

    assert queue.status(claim.id) == "completed"


def test_a_held_backlog_is_released_at_the_rate(queue: Queue) -> None:
    hold(queue, 100)

    queue.call("enable_endpoint", "shop", 20.0, queue.at(100))

    assert claimed(queue, 100) == 0
    assert claimed(queue, 100.05) == 1
    assert [claimed(queue, 100.05 + 0.1 * n) for n in range(1, 11)] == [2] * 10


@pytest.mark.parametrize("rate", [0.5, 1.0, 20.0])
def test_when_the_backlog_is_gone_so_is_the_rate(queue: Queue, rate: float) -> None:
    hold(queue, 4)
    queue.call("enable_endpoint", "shop", rate, queue.at(100))

    now, left = 100.0, 4
    while left:
        assert claimed(queue, now + 0.5 / rate) == 0
        now += 1 / rate
        left -= claimed(queue, now)
    for _ in range(50):
        queue.send(scheduled_at=now)

    # The claim of the last held message has lifted the limit.
    assert queue.circuit()["release_rate"] is None
    assert claimed(queue, now) == 50


def test_the_rate_lasts_while_held_messages_wait_behind_their_ordering_key(queue: Queue) -> None:
    hold(queue, 3, ordering_key="k")
    queue.call("enable_endpoint", "shop", 1.0, queue.at(100))

    for now in (101, 102, 103):
        assert queue.claim(10, now=now - 0.5) == []
        queue.complete(queue.claim_one(now=now), now=now)


def test_the_rate_lasts_while_held_messages_of_low_priority_wait(queue: Queue) -> None:
    hold(queue, 2, priority=0)
    queue.call("enable_endpoint", "shop", 1.0, queue.at(100))
    for _ in range(5):
        queue.send(priority=9)

    assert [claimed(queue, 100.0 + second) for second in range(1, 8)] == [1] * 7


def test_messages_scheduled_for_later_are_no_held_backlog(queue: Queue) -> None:
    hold(queue, 1)
    queue.send(scheduled_at=100_000)
    queue.call("enable_endpoint", "shop", 1.0, queue.at(100))
    assert claimed(queue, 101) == 1
    queue.send(scheduled_at=102)
    assert claimed(queue, 102) == 1

    assert queue.circuit()["release_rate"] is None


def test_the_rate_and_a_rate_limit_hold_both(queue: Queue) -> None:
    queue.call("alter_endpoint", "shop", {"rate_limit": {"limit": 5, "interval": "second"}})
    hold(queue, 50)

    queue.call("enable_endpoint", "shop", 1000.0, queue.at(100))
    assert [claimed(queue, now) for now in (101, 102, 103)] == [1, 1, 1]

    queue.call("disable_endpoint", "shop", queue.at(200))
    queue.call("enable_endpoint", "shop", 0.1, queue.at(200))
    assert [claimed(queue, now) for now in (201, 205, 210, 219, 220)] == [0, 0, 1, 0, 1]


def test_enabling_without_a_rate_lifts_the_last_one(queue: Queue) -> None:
    hold(queue, 20)
    queue.call("enable_endpoint", "shop", 1.0, queue.at(100))

    assert queue.call("enable_endpoint", "shop") is False

    assert claimed(queue, 100) == 20


@pytest.mark.parametrize("rate", ["0", "-1", "infinity", "nan"])
def test_a_rate_that_makes_no_sense_is_refused(queue: Queue, rate: str) -> None:
    assert queue.refuses("enable_endpoint", "shop", rate).sqlstate == "22023"


@pytest.mark.parametrize("verb", ["enable", "disable"])
@pytest.mark.parametrize("name", ["shoop", None])
def test_an_unknown_endpoint_is_refused(queue: Queue, verb: str, name: str | None) -> None:
    assert queue.refuses(f"{verb}_endpoint", name).sqlstate == "42704"
