"""The values that the worker and the database exchange (sessions/database.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ulak.messages.delivery import Message


class Busy(Exception):
    """The database can't do it now: a lock is taken, a deadlock was broken, a disk is full. Nothing was changed."""


class Refused(Exception):
    """The database won't do it, now or later, because of what it was given. Nothing was changed."""


class Claimed(NamedTuple):
    """The messages that a claim got of one endpoint, and the version of its config."""

    endpoint_id: int
    config_version: int
    messages: list[Message]
    # The claim got as many as it asked for.
    may_have_more: bool = False


class Outcomes(NamedTuple):
    """Settled messages in their order of arrival, column by column; a column of nothing but None is None."""

    ids: Sequence[int]
    attempts: Sequence[int]
    errors: Sequence[str | None] | None = None
    retry_after: Sequence[int | None] | None = None
    responses: Sequence[str | None] | None = None
    # Outcomes with the same number came from one request, for the circuit breaker; None: each from its own.
    requests: Sequence[int] | None = None


class Wish(NamedTuple):
    """Limits of a claim: how many messages in all, of some endpoints (rooms), and of each other one (room)."""

    most: int
    rooms: Mapping[int, int]
    room: int
    # Claim nothing if no id above this one has been drawn; claim_new() claims only those above it. None: claim anyway.
    behind: int | None
    # Only of these endpoints; None: of all in turn, with at most most_visits.
    endpoint_ids: Sequence[int] | None
    # Of at most this many endpoints.
    most_endpoints: int
    most_visits: int


class Turn(NamedTuple):
    """The result of a turn."""

    claimed: Sequence[Claimed]
    # There may be due messages that the claim didn't get to.
    left_out_others: bool
    # The id that a sender drew last, as of before the claim.
    last_sent: int
    # Senders up to this id notify, if that was asked for.
    notified_to: int | None = None
    # No message was waiting, not even for a later time.
    is_empty: bool = False
