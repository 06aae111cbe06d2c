"""The worker's periodic tasks: it asks whether to go on, renews leases, sweeps, reports, retries deferred outcomes.

If the database is busy, because a lock is taken, the timer tries again the next time it is due.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from ulak.worker.counters import Counters
from ulak.worker.held import Held
from ulak.worker.outcomes import Settling
from ulak.worker.port import Busy, Database, Orders
from ulak.worker.tuning import (
    GRACE_SECONDS,
    RELEASE_SECONDS,
    REPORT_SECONDS,
    STATISTICS_LONGEST,
    STATISTICS_PER_SECOND,
    STOP_SECONDS,
    SWEEP_SECONDS,
)

_NOTHING: Mapping[str, object] = {}


class Ending:
    """When a run ends, and why."""

    def __init__(self, until: float, settings: str) -> None:
        """`settings` is what the worker's options were made from."""
        self.until = until
        self._settings = settings
        # stop, restart (there is another build) or settings (they changed).
        self.leave: str | None = None

    @property
    def is_stop(self) -> bool:
        return self.leave == "stop"

    def obey(self, orders: Orders, now: float) -> None:
        leave = orders.leave or ("settings" if orders.settings != self._settings else None)
        if leave is not None and not self.is_stop:
            self.leave = leave
            self.until = min(self.until, now)

    def last_moment(self, last_end: float) -> float:
        """When the worker gives up the messages it holds; last_end: when all deliveries under way will have ended."""
        return self.until + STOP_SECONDS if self.is_stop else max(self.until + GRACE_SECONDS, last_end)


class Timers:
    def __init__(
        self,
        database: Database,
        lease: float,
        held: Held,
        settling: Settling,
        counters: Counters,
        ending: Ending,
        now: float,
    ) -> None:
        self._database = database
        self._lease = lease
        self._held = held
        self._settling = settling
        self._counters = counters
        self._ending = ending
        self._next_check = now
        self._next_report = now
        self._last_statistics = now
        self._next_sweep = now
        self._next_renewal = now + lease / 3
        # The earliest of these.
        self._next = now
        # One worker of the fleet is notified of new messages, or looks often.
        self.is_poller = False

    @property
    def next(self) -> float:
        return min(self._next, self._settling.next_retry) if self._settling.deferred else self._next

    def check_by(self, time: float) -> None:
        self._next_check = min(self._next_check, time)
        self._next = min(self._next, time)

    def run(self, now: float, check_seconds: float) -> None:
        """Runs the tasks that are due; the next check comes after check_seconds."""
        if now >= self._next_check:
            self._next_check = now + check_seconds
            self._held.note_slow(now)
            self._ending.obey(self._database.check(), now)
            self.release_blocked()
            if now >= self._ending.until:
                # Messages that wait for a slow receiver would delay the end of the run.
                with suppress(Busy):
                    for endpoint_id in self._held.slow_endpoints():
                        self._release(endpoint_id, 0.0)
        if now >= self._next_renewal:
            self._next_renewal = now + self._lease / 3
            if self._held:
                self._renew(now)
        if self._settling.deferred and now >= self._settling.next_retry:
            self._settling.store_deferred(now)
        if now >= self._next_sweep:
            self._next_sweep = now + SWEEP_SECONDS
            with suppress(Busy):
                self._database.sweep()
        if now >= self._next_report:
            self._next_report = now + REPORT_SECONDS
            is_due = now >= self._last_statistics + min(STATISTICS_LONGEST, len(self._counters) / STATISTICS_PER_SECOND)
            self._last_statistics = now if is_due else self._last_statistics
            self.report("running", is_due)
        self._next = min(self._next_check, self._next_renewal, self._next_sweep, self._next_report)

    def report(self, state: str, with_statistics: bool = True, noted: Mapping[str, object] = _NOTHING) -> None:
        counters = self._counters
        progress = {
            "state": state,
            "in_flight": len(self._held),
            "processed": counters.processed,
            "failed": counters.failed,
            "last_error": counters.last_error,
            **noted,
        }
        with suppress(Busy):
            self._database.report(progress, counters.statistics() if with_statistics else [])
            counters.clear_progress()
            if with_statistics:
                counters.clear_statistics()
            if state == "running":
                self.is_poller = self._database.is_poller()

    def release_blocked(self) -> None:
        """Gives back messages that wait for a blocked endpoint, such as one whose circuit opened; no retry is used."""
        if waiting := self._held.endpoints_that_wait():
            with suppress(Busy):
                for endpoint_id, state in self._database.blocked_endpoints(waiting).items():
                    self._release(endpoint_id, RELEASE_SECONDS[state])

    def _release(self, endpoint_id: int, delay: float) -> None:
        if messages := self._held.remove(endpoint_id):
            ids, attempts = [each.id for each in messages], [each.attempt for each in messages]
            self._held.forget(messages)
            self._database.release(ids, attempts, delay)

    def _renew(self, now: float) -> None:
        try:
            renewed = self._database.renew(*self._held.leases(), self._lease)
        except Busy:
            self._next_renewal = now + min(1.0, self._lease / 10)
            return
        # A message whose lease was lost before it was sent is left to its new owner.
        self._held.remove_lost(set(renewed))
