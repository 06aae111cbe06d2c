"""When the next turn is due, and what the worker waits for until then: pure functions of its situation.

It waits for answers, and for the wake-up of a sender if it listens; a worker that holds nothing and doesn't listen
waits for a new id in the queue's sequence. A turn then stores outcomes and claims. Turns are turn_interval apart,
unless there is a backlog or another message waits for an outcome.
"""

from __future__ import annotations

import math
from enum import Enum, auto
from typing import NamedTuple

from ulak.worker.tuning import SETTLE_COUNT, SETTLE_SECONDS, SETTLE_SECONDS_AWAITED


class Wait(Enum):
    # For answers, and for the wake-up of a sender.
    ANSWERS = auto()
    # For a new id in the queue's sequence.
    SENDERS = auto()
    # The run is over.
    NOTHING = auto()


class Situation(NamedTuple):
    until: float
    # When a worker whose time is over gives up the messages it holds.
    last_moment: float
    holds_messages: bool
    is_sending: bool
    is_listening: bool
    # The next turn comes no earlier than last_turn + interval.
    last_turn: float
    interval: float
    # Messages whose outcomes wait to be stored, and since when.
    outcomes: int
    since: float
    # Whether another message waits for one of them, and whether one of them is a failure.
    is_awaited: bool
    has_failed: bool
    # can_claim: there is room for more messages. has_more: and a claim would find some.
    can_claim: bool
    has_more: bool
    was_notified: bool
    # When to look for messages that no wake-up announces.
    next_look: float


def wait(situation: Situation, now: float) -> Wait:
    if now >= situation.until and (not situation.holds_messages or now >= situation.last_moment):
        return Wait.NOTHING
    if situation.holds_messages or situation.is_listening:
        return Wait.ANSWERS
    return Wait.SENDERS


def is_settling(situation: Situation, now: float) -> bool:
    """Whether the turn that is due now stores outcomes."""
    is_old = now >= situation.since + SETTLE_SECONDS
    return situation.is_awaited or _is_urgent(situation) or is_old or now >= situation.until


def _is_urgent(situation: Situation) -> bool:
    """Whether outcomes are stored without waiting for more of them."""
    enough = SETTLE_COUNT if situation.is_sending else SETTLE_COUNT // 4
    return situation.has_failed or situation.outcomes >= enough


def next_turn(situation: Situation, now: float) -> float:
    """When the next turn is due; infinity: an answer has to come first."""
    soonest = situation.last_turn + situation.interval
    if situation.is_awaited:
        # While nothing is under way, no further outcome can come.
        return situation.since + SETTLE_SECONDS_AWAITED if situation.is_sending else situation.since
    if _is_urgent(situation):
        return soonest
    if situation.can_claim and (situation.has_more or situation.was_notified):
        return soonest
    if situation.outcomes and now >= situation.until:
        return soonest
    latest = situation.next_look if situation.can_claim else math.inf
    if situation.outcomes:
        latest = min(latest, situation.since + 2 * SETTLE_SECONDS)
    return max(soonest, latest)
