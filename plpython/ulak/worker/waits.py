"""When the next turn is due, and when it has to store outcomes: pure functions of the worker's situation.

Until then the worker waits for answers, and for the wake-up of a sender if it listens. Turns are turn_interval apart,
unless there is a backlog or another message waits for an outcome.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from ulak.worker.tuning import SETTLE_COUNT, SETTLE_SECONDS, SETTLE_SECONDS_AWAITED


class Situation(NamedTuple):
    # The next turn comes no earlier than this.
    soonest: float
    # When to claim; infinity: there is no room.
    claim_at: float
    is_sending: bool
    # The last claim found no message.
    has_found_nothing: bool
    is_over: bool
    # Messages whose outcomes wait to be stored, and since when.
    outcomes: int
    since: float
    # Whether another message waits for one of them, and whether one of them is a failure.
    is_awaited: bool
    has_failed: bool


def next_turn(situation: Situation) -> float:
    """Infinity: an answer has to come first."""
    settle_at = outcomes_due_at(situation)
    if situation.is_awaited:
        return settle_at
    return max(situation.soonest, min(situation.claim_at, settle_at))


def outcomes_due_at(situation: Situation) -> float:
    """A turn from then on has to store outcomes; infinity: there are none."""
    if not situation.outcomes:
        return math.inf
    if situation.is_awaited:
        # While nothing is under way, no further outcome can come.
        return situation.since + (SETTLE_SECONDS_AWAITED if situation.is_sending else 0)
    is_last = not situation.is_sending and situation.has_found_nothing
    if is_last or situation.has_failed or situation.is_over or situation.outcomes >= SETTLE_COUNT:
        return situation.since
    return situation.since + SETTLE_SECONDS
