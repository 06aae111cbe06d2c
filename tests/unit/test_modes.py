"""What a worker waits for and when it claims, as the tables in worker/modes.py say."""

from __future__ import annotations

from typing import Any

import pytest
from ulak.worker.modes import Claim, Mode, Prospect, Situation, mode, next_claim

NOW = 100.0
IDLE = Situation(
    until=200.0,
    last_moment=0.0,
    holds_messages=False,
    has_free_slot=True,
    has_more=False,
    has_backlog=False,
    has_only_deliveries=True,
    is_listening=False,
    was_notified=False,
)
LISTENING = IDLE._replace(is_listening=True)
OVER = IDLE._replace(until=99.0, last_moment=130.0)
NO_REASON = Prospect(
    can_claim=True,
    stores_outcomes=False,
    unblocks_others=False,
    has_outcomes=False,
    is_due=True,
    wants_claim=False,
    is_listening_worth_it=False,
    needs_look=True,
)


@pytest.mark.parametrize(
    ("situation", "expected"),
    [
        (IDLE, Mode.POLLING),
        (IDLE._replace(holds_messages=True), Mode.WORKING),
        (IDLE._replace(has_more=True), Mode.WORKING),
        (LISTENING, Mode.LISTENING),
        # Answers and wake-ups are waited for together.
        (LISTENING._replace(holds_messages=True), Mode.LISTENING),
        (LISTENING._replace(holds_messages=True, has_free_slot=False), Mode.WORKING),
        (LISTENING._replace(holds_messages=True, has_backlog=True), Mode.WORKING),
        (LISTENING._replace(holds_messages=True, has_only_deliveries=False), Mode.WORKING),
        (LISTENING._replace(holds_messages=True, was_notified=True), Mode.WORKING),
        (OVER, Mode.OVER),
        (OVER._replace(holds_messages=True), Mode.LEAVING),
        (OVER._replace(holds_messages=True, is_listening=True), Mode.LEAVING),
        (OVER._replace(holds_messages=True, last_moment=NOW), Mode.OVER),
    ],
)
def test_the_mode_follows_from_the_situation(situation: Situation, expected: Mode) -> None:
    assert mode(situation, NOW) is expected


@pytest.mark.parametrize(
    ("situation", "prospect", "expected"),
    [
        (IDLE, {"can_claim": False, "wants_claim": True, "unblocks_others": True}, Claim.NONE),
        (IDLE, {"unblocks_others": True}, Claim.NOW),
        (IDLE, {"wants_claim": True}, Claim.NOW),
        (IDLE, {}, Claim.IF_SENT),
        (LISTENING._replace(was_notified=True), {}, Claim.NOW),
        (IDLE._replace(has_more=True), {"stores_outcomes": True}, Claim.NOW),
        (IDLE._replace(has_more=True), {}, Claim.NOW),
        (IDLE._replace(has_more=True), {"is_due": False}, Claim.NONE),
        (IDLE._replace(has_more=True), {"has_outcomes": True}, Claim.NONE),
        (IDLE, {"is_listening_worth_it": True}, Claim.IF_PENDING),
        (LISTENING, {"is_listening_worth_it": True, "needs_look": False}, Claim.NONE),
        (LISTENING, {}, Claim.IF_SENT),
        (IDLE._replace(has_backlog=True), {"is_listening_worth_it": True}, Claim.IF_SENT),
        (OVER, {"is_listening_worth_it": True}, Claim.IF_SENT),
    ],
)
def test_a_claim_follows_from_the_situation(situation: Situation, prospect: dict[str, Any], expected: Claim) -> None:
    assert next_claim(situation, NO_REASON._replace(**prospect), NOW) is expected
