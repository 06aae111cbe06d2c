"""What a worker waits for, and what it then asks the database for: pure functions of its situation and the time.

    mode       holds when                                        the worker waits for
    LISTENING  traffic is light, nothing else is to be done,     a sender's wake-up, or an answer
               and a request slot is free
    WORKING    it holds messages, or there are more to claim     an answer, or the moment when something falls due
    POLLING    it holds nothing                                  a new id in the queue's sequence
    LEAVING    its time is over, and it still holds messages     an answer; it claims nothing that would keep it
    OVER       its time is over, and it holds nothing, or what   nothing more: what it holds goes back to the queue
               it holds has taken too long

    from       to         because
    POLLING    WORKING    a look saw a new id, or it was time for a claim, and the claim found messages
    POLLING    LISTENING  messages come one by one, so senders were asked to notify
    LISTENING  WORKING    a claim found more than one light turn takes: a backlog, a failure, an ordering key
    LISTENING  POLLING    messages come so close that looking is cheaper, or wake-ups are in vain
    WORKING    LISTENING  nothing is left to be done, and messages come one by one
    WORKING    POLLING    nothing is left to be done, and messages come close, or the worker can't be notified
    any        LEAVING    its time is over, or it was told to leave
    LEAVING    OVER       the last answer is stored, or the grace is over

    it claims  when
    NOW        an outcome is stored that another message waits for; there are more, and outcomes are stored or
               poll_interval_busy is over; a look saw a new id; a sender has notified
    IF_PENDING messages come one by one: it asks the next senders to notify, and claims if something is there already
    IF_SENT    otherwise: it looks, and claims if somebody has sent or the last claim is long ago
    NONE       there is no request slot for what it would find, or its time is over

A turn of the worker is: wait as the mode says, collect the answers, run the timers that are due, then one transaction,
which stores outcomes and does what next_claim() says.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple


class Mode(Enum):
    LISTENING = auto()
    WORKING = auto()
    POLLING = auto()
    LEAVING = auto()
    OVER = auto()


class Situation(NamedTuple):
    until: float
    # When a worker whose time is over gives up what it holds.
    last_moment: float
    holds_messages: bool
    has_free_slot: bool
    # A claim would find something and have a place for it.
    has_more: bool
    # Prefetched requests, or outcomes that could not be stored.
    has_backlog: bool
    # The outcomes that wait to be stored are deliveries, and no message waits for them.
    has_only_deliveries: bool
    is_listening: bool
    was_notified: bool


def is_quiet(situation: Situation) -> bool:
    """Whether there is nothing to do until a sender notifies or an answer comes."""
    return (
        situation.is_listening
        and not situation.was_notified
        and not situation.has_backlog
        and not situation.has_more
        and situation.has_only_deliveries
    )


def mode(situation: Situation, now: float) -> Mode:
    if now >= situation.until:
        is_over = not situation.holds_messages or now >= situation.last_moment
        return Mode.OVER if is_over else Mode.LEAVING
    if is_quiet(situation) and situation.has_free_slot:
        return Mode.LISTENING
    return Mode.WORKING if situation.holds_messages or situation.has_more else Mode.POLLING


class Claim(Enum):
    NONE = auto()
    NOW = auto()
    # Asks the next senders to notify, and claims if something is there already.
    IF_PENDING = auto()
    # Doesn't listen; looks whether it is time to, and claims if somebody has sent.
    IF_SENT = auto()


class Prospect(NamedTuple):
    """What speaks for a claim."""

    can_claim: bool
    # Outcomes are stored in the same transaction; among them one that another message waits for.
    stores_outcomes: bool
    unblocks_others: bool
    # Outcomes wait to be stored, so there will be a transaction soon.
    has_outcomes: bool
    # poll_interval_busy has passed since the last claim.
    is_due: bool
    # While polling, a look found a new id, or that it is time for a claim.
    wants_claim: bool
    is_listening_worth_it: bool
    # Senders have yet to be asked, or what nobody notifies of has to be looked for.
    needs_look: bool


def next_claim(situation: Situation, prospect: Prospect, now: float) -> Claim:
    if not prospect.can_claim:
        return Claim.NONE
    if prospect.unblocks_others:
        return Claim.NOW
    if situation.has_more:
        # In the transaction that stores outcomes; in one of its own only if no outcome is about to be stored.
        is_time = prospect.stores_outcomes or (not prospect.has_outcomes and prospect.is_due)
        return Claim.NOW if is_time else Claim.NONE
    if prospect.wants_claim or situation.was_notified:
        return Claim.NOW
    if prospect.is_listening_worth_it and not situation.has_backlog and now < situation.until:
        return Claim.IF_PENDING if prospect.needs_look else Claim.NONE
    return Claim.IF_SENT
