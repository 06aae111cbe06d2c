"""Outcomes on their way into the database. Each is kept until it is stored: losing it would mean delivering the message
again.

A turn stores all outcomes. If the database can't do that, they are stored separately by endpoint, so an endpoint that
is locked, or whose answer can't be stored, doesn't hold up the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ulak.messages.delivery import Endpoint, Outcome, Settled
from ulak.safety import text
from ulak.worker.counters import Counters
from ulak.worker.held import Held
from ulak.worker.port import Busy, Database, Outcomes, Refused
from ulak.worker.tuning import RESPONSES_AT_ONCE, SETTLE_RETRY_LONGEST, SETTLE_RETRY_SECONDS


class Settling:
    def __init__(self, database: Database, held: Held, counters: Counters, now: float) -> None:
        self._database = database
        self._held = held
        self._counters = counters
        # How many messages have outcomes to be stored, and since when.
        self.count = 0
        self.since = now
        # Whether another message waits for one of them, and whether one of them is a failure.
        self.is_awaited = False
        self.has_failed = False
        # Outcomes that couldn't be stored, by endpoint: another session has the endpoint locked.
        self.deferred: dict[int, list[Settled]] = {}
        self.next_retry = now
        self._retry_delay = SETTLE_RETRY_SECONDS

    def add(self, settled: Settled, to: Endpoint | None, now: float) -> None:
        endpoint_id, messages, outcome = settled
        if endpoint_id in self.deferred:
            # The endpoint is probably still locked: a turn that waited for it would hold up the other outcomes.
            self.deferred[endpoint_id].append(settled)
            return
        if not self._held.done:
            self.since = now
        self._held.done.append(settled)
        self.count += len(messages)
        if outcome.error is not None or outcome.failures:
            self.has_failed = True
        # Other messages wait while max_in_flight is reached. This worker alone can't reach a limit above its slots.
        is_capped = to is not None and to.max_in_flight is not None and to.max_in_flight <= self._held.slots
        if is_capped or any(each.ordering_key is not None for each in messages):
            self.is_awaited = True

    def part(self) -> list[Settled]:
        return _fitting(self._held.done)

    def stored(self, part: Sequence[Settled]) -> None:
        self._forget(part)
        del self._held.done[: len(part)]
        self.count = sum(len(each.messages) for each in self._held.done)
        self.is_awaited = self.has_failed = False

    def store_apart(self, now: float) -> None:
        """Stores outcomes endpoint by endpoint, after a turn that could not store them."""
        apart: dict[int, list[Settled]] = {}
        for each in self._held.done:
            apart.setdefault(each.endpoint_id, []).append(each)
        self._held.done = []
        self.count = 0
        self.is_awaited = self.has_failed = False
        # First of all, so that an error while storing them loses none.
        self.deferred.update(apart)
        self._store_endpoints(list(apart), now)

    def store_deferred(self, now: float) -> None:
        self._store_endpoints(list(self.deferred), now)

    def deferred_ids(self) -> set[int]:
        return {message.id for done in self.deferred.values() for each in done for message in each.messages}

    def _store_endpoints(self, endpoint_ids: Iterable[int], now: float) -> None:
        """One transaction per endpoint: two workers that lock several endpoints in one transaction could deadlock."""
        for endpoint_id in endpoint_ids:
            try:
                self._store_endpoint(self.deferred[endpoint_id])
            except Busy:
                self.next_retry = now + self._retry_delay
                self._retry_delay = min(self._retry_delay * 2, SETTLE_RETRY_LONGEST)
            else:
                del self.deferred[endpoint_id]
                self._retry_delay = SETTLE_RETRY_SECONDS

    def _store_endpoint(self, group: list[Settled]) -> None:
        """Removes stored outcomes from the group, so that after an error the rest is left."""
        while group:
            part = _fitting(group)
            try:
                self._database.settle(columns(part))
                self._forget(part)
            except Refused:
                self._store_singly(part)
            del group[: len(part)]

    def _store_singly(self, part: Iterable[Settled]) -> None:
        for done in part:
            for message in done.messages:
                self._store_single(done._replace(messages=[message]))
                self._held.forget([message])

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

    def _forget(self, group: Iterable[Settled]) -> None:
        for each in group:
            self._held.forget(each.messages)


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
    for count, (_, messages, outcome) in enumerate(group):
        if outcome.response is not None:
            size += len(outcome.response) * len(messages)
            if count and size > RESPONSES_AT_ONCE:
                return group[:count]
    return group[:]


def _plain(outcome: Outcome) -> Outcome:
    """The outcome without the response, and with its error in ASCII, which every database can store."""
    failures = outcome.failures and {id: _plain(each) for id, each in outcome.failures.items()}
    return outcome._replace(error=outcome.error and text.plain(outcome.error), response=None, failures=failures)
