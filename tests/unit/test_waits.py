"""When a turn is due, and what the worker waits for, as worker/waits.py says."""

from __future__ import annotations

import math
from typing import Any

import pytest
from ulak.worker.tuning import SETTLE_COUNT, SETTLE_SECONDS, SETTLE_SECONDS_AWAITED
from ulak.worker.waits import Situation, Wait, is_settling, next_turn, wait

NOW = 100.0
IDLE = Situation(
    until=200.0,
    last_moment=0.0,
    holds_messages=False,
    is_sending=False,
    is_listening=False,
    last_turn=NOW - 0.001,
    interval=0.005,
    outcomes=0,
    since=NOW,
    is_awaited=False,
    has_failed=False,
    can_claim=True,
    has_more=False,
    was_notified=False,
    next_look=NOW + 0.2,
)
SOONEST = NOW - 0.001 + 0.005
OVER = {"until": 99.0, "last_moment": 130.0}
SENDING = {"holds_messages": True, "is_sending": True}


@pytest.mark.parametrize(
    ("situation", "expected"),
    [
        ({}, Wait.SENDERS),
        ({"is_listening": True}, Wait.ANSWERS),
        ({"holds_messages": True}, Wait.ANSWERS),
        (OVER, Wait.NOTHING),
        (OVER | SENDING, Wait.ANSWERS),
        (OVER | SENDING | {"last_moment": NOW}, Wait.NOTHING),
    ],
)
def test_what_it_waits_for(situation: dict[str, Any], expected: Wait) -> None:
    assert wait(IDLE._replace(**situation), NOW) is expected


@pytest.mark.parametrize(
    ("situation", "expected"),
    [
        ({}, NOW + 0.2),
        ({"can_claim": False}, math.inf),
        ({"was_notified": True}, SOONEST),
        ({"was_notified": True, "can_claim": False}, math.inf),
        ({"has_more": True}, SOONEST),
        ({"next_look": NOW}, SOONEST),
        ({"outcomes": 1} | SENDING, NOW + 2 * SETTLE_SECONDS),
        ({"outcomes": SETTLE_COUNT} | SENDING, SOONEST),
        ({"outcomes": SETTLE_COUNT // 4} | SENDING, NOW + 2 * SETTLE_SECONDS),
        ({"outcomes": SETTLE_COUNT // 4}, SOONEST),
        ({"outcomes": 1, "has_failed": True} | SENDING, SOONEST),
        ({"outcomes": 1, "is_awaited": True} | SENDING, NOW + SETTLE_SECONDS_AWAITED),
        ({"outcomes": 1, "is_awaited": True}, NOW),
        ({"outcomes": 1, "can_claim": False} | OVER, SOONEST),
    ],
)
def test_when_the_next_turn_is_due(situation: dict[str, Any], expected: float) -> None:
    assert next_turn(IDLE._replace(**situation), NOW) == expected


@pytest.mark.parametrize(
    ("situation", "expected"),
    [
        ({"outcomes": 1}, False),
        ({"outcomes": 1, "since": NOW - SETTLE_SECONDS}, True),
        ({"outcomes": SETTLE_COUNT} | SENDING, True),
        ({"outcomes": SETTLE_COUNT // 4} | SENDING, False),
        ({"outcomes": SETTLE_COUNT // 4}, True),
        ({"outcomes": 1, "has_failed": True}, True),
        ({"outcomes": 1, "is_awaited": True}, True),
        ({"outcomes": 1} | OVER, True),
    ],
)
def test_whether_a_turn_stores_outcomes(situation: dict[str, Any], expected: bool) -> None:
    assert is_settling(IDLE._replace(**situation), NOW) is expected
