"""When a turn is due, as worker/waits.py says."""

from __future__ import annotations

import math
from typing import Any

import pytest
from ulak.worker.tuning import SETTLE_COUNT, SETTLE_SECONDS, SETTLE_SECONDS_AWAITED
from ulak.worker.waits import Situation, next_turn, outcomes_due_at

NOW = 100.0
SOONEST = NOW + 0.004
IDLE = Situation(
    soonest=SOONEST,
    claim_at=NOW + 0.2,
    is_sending=False,
    has_found_nothing=False,
    is_over=False,
    outcomes=0,
    since=NOW,
    is_awaited=False,
    has_failed=False,
)
OVER = {"is_over": True}
SENDING = {"is_sending": True}
VAIN = {"has_found_nothing": True}


@pytest.mark.parametrize(
    ("situation", "expected"),
    [
        ({}, NOW + 0.2),
        ({"claim_at": math.inf}, math.inf),
        ({"claim_at": NOW}, SOONEST),
        ({"outcomes": 1, "claim_at": math.inf} | SENDING, NOW + SETTLE_SECONDS),
        ({"outcomes": SETTLE_COUNT} | SENDING, SOONEST),
        ({"outcomes": 1, "claim_at": math.inf}, NOW + SETTLE_SECONDS),
        ({"outcomes": 1, "claim_at": math.inf} | VAIN | SENDING, NOW + SETTLE_SECONDS),
        ({"outcomes": 1, "claim_at": math.inf} | VAIN, SOONEST),
        ({"outcomes": 1, "has_failed": True} | SENDING, SOONEST),
        ({"outcomes": 1, "is_awaited": True} | SENDING, NOW + SETTLE_SECONDS_AWAITED),
        ({"outcomes": 1, "is_awaited": True}, NOW),
        ({"outcomes": 1, "claim_at": math.inf} | OVER, SOONEST),
        ({"claim_at": math.inf} | OVER, math.inf),
    ],
)
def test_when_the_next_turn_is_due(situation: dict[str, Any], expected: float) -> None:
    assert next_turn(IDLE._replace(**situation)) == expected


@pytest.mark.parametrize(
    ("situation", "expected"),
    [
        ({"outcomes": 1}, False),
        ({"outcomes": 1, "since": NOW - SETTLE_SECONDS}, True),
        ({"outcomes": SETTLE_COUNT} | SENDING, True),
        ({"outcomes": 1} | VAIN | SENDING, False),
        ({"outcomes": 1} | VAIN, True),
        ({"outcomes": 1, "has_failed": True}, True),
        ({"outcomes": 1, "is_awaited": True}, True),
        ({"outcomes": 1} | OVER, True),
    ],
)
def test_whether_a_turn_has_to_store_outcomes(situation: dict[str, Any], expected: bool) -> None:
    assert (outcomes_due_at(IDLE._replace(**situation)) <= NOW) is expected
