"""Outcomes on their way into the database. One is kept until it is stored: to lose it would mean to deliver the message
again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from ulak.messages.delivery import DELIVERED, Message, Outcome, Settled
from ulak.safety import text
from ulak.worker.counters import Counters
from ulak.worker.leases import Leases
from ulak.worker.port import Busy, Database, Outcomes, Refused
from ulak.worker.tuning import RESPONSES_AT_ONCE, SETTLE_RETRY_LONGEST, SETTLE_RETRY_SECONDS


class Settling:
    def __init__(self, database: Database, leases: Leases, counters: Counters, now: float) -> None:
        self._database = database
        self._leases = leases
        self._counters = counters
        self.done: list[Settled] = []
        self.since = now
        # Among them is one that another message waits for.
        self.unblocks_others = False
        # All of them are deliveries, with nothing else to store.
        self.only_deliveries = True
        # Messages, by endpoint.
        self.counts: Counter[int] = Counter()
        # Outcomes that couldn't be stored, by endpoint: somebody has it locked.
        self.deferred: dict[int, list[Settled]] = {}
        self.next_retry = now
        self._retry_delay = SETTLE_RETRY_SECONDS

    def add(self, settled: Sequence[Settled], now: float) -> None:
        if not self.done:
            self.since = now
        for endpoint_id, messages, outcome in settled:
            self.counts[endpoint_id] += len(messages)
            if outcome is not DELIVERED and (outcome.error or outcome.response or outcome.failures):
                self.only_deliveries = False
            if messages[0].ordering_key is not None or (len(messages) > 1 and _has_key(messages)):
                self.unblocks_others = True
        self.done += settled

    def store(self, now: float) -> bool:
        """All that is done; what the database has no time for is deferred. Whether there was a failure."""
        failed = _has_failed(self.done, self.only_deliveries)
        if self.deferred:
            # Where an endpoint is locked, the others needn't wait to see it.
            for done in self.done:
                if done.endpoint_id in self.deferred:
                    self.deferred[done.endpoint_id].append(done)
            self.done = [done for done in self.done if done.endpoint_id not in self.deferred]
        try:
            self._store_in_parts(self.done, self.only_deliveries)
        except (Busy, Refused):
            self._store_apart(now)
        self.unblocks_others = False
        self.only_deliveries = True
        self.counts.clear()
        return failed

    def store_deferred(self, now: float) -> None:
        for endpoint_id, group in list(self.deferred.items()):
            # In a transaction of its own: who keeps one endpoint locked and waits for another may wait in a circle.
            self._database.commit()
            self._store_endpoint(endpoint_id, group, now)
        self._database.commit()

    def deferred_ids(self) -> set[int]:
        return {message.id for done in self.deferred.values() for each in done for message in each.messages}

    def leave_out(self, stored: Collection[int]) -> None:
        """These messages' outcomes were stored by a light turn, and need not be stored again."""
        left = []
        for done in self.done:
            messages = [each for each in done.messages if each.id in stored]
            self._leases.forget(messages)
            if len(messages) < len(done.messages):
                left.append(done._replace(messages=[each for each in done.messages if each.id not in stored]))
        self.done = left
        # What a light turn did not store it never will: the lease was lost. store() finds that out.
        self.only_deliveries = not left
        if not left:
            self.counts.clear()

    def _store_apart(self, now: float) -> None:
        """By endpoint: one that is locked, or that answered with something that can't be stored, is on its own."""
        apart: dict[int, list[Settled]] = {}
        for done in self.done:
            apart.setdefault(done.endpoint_id, []).append(done)
        for endpoint_id, group in apart.items():
            self._database.commit()
            self._store_endpoint(endpoint_id, group, now)
            self.done = [done for done in self.done if done.endpoint_id != endpoint_id]

    def _store_endpoint(self, endpoint_id: int, group: list[Settled], now: float) -> None:
        try:
            self._store_in_parts(group)
        except Busy:
            self.deferred[endpoint_id] = group
            self.next_retry = now + self._retry_delay
            self._retry_delay = min(self._retry_delay * 2, SETTLE_RETRY_LONGEST)
            return
        except Refused:
            self._store_singly(group)
        if self.deferred.pop(endpoint_id, None) is not None:
            self._retry_delay = SETTLE_RETRY_SECONDS

    def _store_singly(self, group: Iterable[Settled]) -> None:
        """What can't be stored as it is, is stored in plain words. If that fails too, it is left to the lease."""
        for done in group:
            for message in done.messages:
                single = done._replace(messages=[message])
                try:
                    self._store([single])
                except (Busy, Refused):
                    try:
                        self._store([single._replace(outcome=_plain(done.outcome))])
                    except (Busy, Refused) as error:
                        self._counters.last_error = f"message {message.id} can't be settled: {error}"
                        self._leases.forget([message])

    def _store_in_parts(self, group: list[Settled], only_deliveries: bool = False) -> None:
        """Takes out of the group what is stored, so that after an error the rest of it is left."""
        while group:
            part = group[: len(group) if only_deliveries else _fitting(group)]
            self._store(part, only_deliveries)
            del group[: len(part)]
            if group:
                # An error in the next part must not undo this one.
                self._database.commit()

    def _store(self, group: Sequence[Settled], only_deliveries: bool = False) -> None:
        failed = _has_failed(group, only_deliveries)
        answered = not only_deliveries and any(done.outcome.response is not None for done in group)
        messages = [message for done in group for message in done.messages]
        # One request carried them, so the circuit breaker counts them as one.
        batched = len(messages) > len(group)
        self._database.settle(
            Outcomes(
                [message.id for message in messages],
                [message.attempt for message in messages],
                [done.outcome.of(each).error for done in group for each in done.messages] if failed else None,
                [done.outcome.of(each).retry_after for done in group for each in done.messages] if failed else None,
                [done.outcome.response for done in group for _ in done.messages] if answered else None,
                [place for place, done in enumerate(group) for _ in done.messages] if batched else None,
            )
        )
        self._leases.forget(messages)


def _fitting(group: Iterable[Settled]) -> int:
    """How many of them can be stored at once; a request's messages stay together, for the circuit breaker."""
    count = size = 0
    for count, done in enumerate(group):
        size += len(done.outcome.response or "") * len(done.messages)
        if count and size > RESPONSES_AT_ONCE:
            return count
    return count + 1


def _has_failed(group: Iterable[Settled], only_deliveries: bool) -> bool:
    return not only_deliveries and any(done.outcome.error is not None or done.outcome.failures for done in group)


def _has_key(messages: Iterable[Message]) -> bool:
    return any(message.ordering_key is not None for message in messages)


def _plain(outcome: Outcome) -> Outcome:
    """Without what a receiver wrote: only ASCII, which every database can store, and no response."""
    failures = outcome.failures and {id: _plain(each) for id, each in outcome.failures.items()}
    return outcome._replace(error=outcome.error and text.plain(outcome.error), response=None, failures=failures)
