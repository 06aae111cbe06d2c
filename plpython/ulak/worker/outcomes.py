"""Outcomes on their way into the database. Each is kept until it is stored: losing it would mean delivering the message
again.

A turn stores them together. If the database can't do that, they are stored separately by endpoint, so an endpoint that
is locked, or whose answer can't be stored, doesn't hold up the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from ulak.messages.delivery import Endpoint, Outcome, Settled
from ulak.safety import text
from ulak.sessions.database import Database
from ulak.worker.counters import Counters
from ulak.worker.held import Held
from ulak.worker.port import Busy, Outcomes, Refused
from ulak.worker.tuning import RESPONSES_AT_ONCE


class Settling:
    def __init__(self, database: Database, held: Held, counters: Counters) -> None:
        self._database = database
        self._held = held
        self._counters = counters
        self._done: list[Settled] = []
        # How many messages these are, and since when they wait to be stored.
        self.count = 0
        self.since = 0.0
        # Whether another message waits for one of them, and whether one of them is a failure.
        self.is_awaited = False
        self.has_failed = False
        # Outcomes that couldn't be stored, by endpoint: another session has the endpoint locked.
        self.deferred: dict[int, list[Settled]] = {}

    def add(self, settled: Settled, to: Endpoint | None, now: float) -> None:
        if settled.endpoint_id in self.deferred:
            # The endpoint is probably still locked: a turn that waited for it would hold up the other outcomes.
            self.deferred[settled.endpoint_id].append(settled)
            return
        if not self._done:
            self.since = now
        self._done.append(settled)
        self.count += len(settled.messages)
        if settled.outcome.error is not None or settled.outcome.failures:
            self.has_failed = True
        # Other messages wait while max_in_flight is reached. This worker alone can't reach a limit above its slots.
        is_capped = to is not None and to.max_in_flight is not None and to.max_in_flight <= self._held.slots
        if is_capped or any(each.ordering_key is not None for each in settled.messages):
            self.is_awaited = True

    def part(self) -> list[Settled]:
        return _fitting(self._done)

    def stored(self, part: Sequence[Settled]) -> None:
        self._held.forget(message for each in part for message in each.messages)
        self._take(len(part))

    def _take(self, count: int) -> list[Settled]:
        taken, self._done = self._done[:count], self._done[count:]
        self.count = sum(len(each.messages) for each in self._done)
        if not self._done:
            self.is_awaited = self.has_failed = False
        return taken

    def store_apart(self, is_patient: bool = False) -> None:
        """Stores outcomes endpoint by endpoint, after a turn that could not store them, or when a run ends. Patient: it
        waits for each lock as long as a turn does. There may be many, and the worker does nothing else meanwhile."""
        # They are deferred first, so that an error while storing them loses none.
        for each in self._take(len(self._done)):
            self.deferred.setdefault(each.endpoint_id, []).append(each)
        self.store_deferred(is_patient)

    def store_deferred(self, is_patient: bool = False) -> None:
        # One transaction per endpoint: two workers that lock several endpoints in one transaction could deadlock.
        for endpoint_id, group in list(self.deferred.items()):
            with suppress(Busy):
                self._store_endpoint(group, is_patient)
                del self.deferred[endpoint_id]

    def _store_endpoint(self, group: list[Settled], is_patient: bool) -> None:
        """Removes stored outcomes from the group, so that after an error the rest is left."""
        while group:
            part = _fitting(group)
            try:
                self._database.settle(columns(part), is_patient)
            except Refused:
                for each in part:
                    for message in each.messages:
                        self._store_single(each._replace(messages=[message]))
            self._held.forget(message for each in part for message in each.messages)
            del group[: len(part)]

    def _store_single(self, single: Settled) -> None:
        """Stores it as it is, or else in plain ASCII. If that fails, too, the message is sent again when its lease has
        expired."""
        for outcome in (single.outcome, _plain(single.outcome)):
            try:
                self._database.settle(columns([single._replace(outcome=outcome)]))
                return
            except (Busy, Refused) as error:
                problem = f"message {single.messages[0].id} can't be settled: {error}"
        self._counters.last_error = problem


def columns(group: Sequence[Settled]) -> Outcomes:
    failed = any(done.outcome.error is not None or done.outcome.failures is not None for done in group)
    answered = any(done.outcome.response is not None for done in group)
    messages = [message for done in group for message in done.messages]
    # One request carried them, so the circuit breaker counts them as one.
    batched = len(messages) > len(group)
    return Outcomes(
        [message.id for message in messages],
        [message.attempt for message in messages],
        [done.outcome.of(each).error for done in group for each in done.messages] if failed else None,
        [done.outcome.of(each).retry_after for done in group for each in done.messages] if failed else None,
        [done.outcome.response for done in group for _ in done.messages] if answered else None,
        [place for place, done in enumerate(group) for _ in done.messages] if batched else None,
    )


def _fitting(group: list[Settled]) -> list[Settled]:
    """As many of the first ones as can be stored at once. The messages of a request stay together, for the breaker."""
    size = 0
    for count, done in enumerate(group):
        size += len(done.outcome.response or "") * len(done.messages)
        if count and size > RESPONSES_AT_ONCE:
            return group[:count]
    return group[:]


def _plain(outcome: Outcome) -> Outcome:
    """The outcome without the response, and with its error in ASCII, which every database can store."""
    failures = outcome.failures and {id: _plain(each) for id, each in outcome.failures.items()}
    return outcome._replace(error=outcome.error and text.plain(outcome.error), response=None, failures=failures)
