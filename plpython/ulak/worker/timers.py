"""The worker's periodic tasks. Each returns after how many seconds it is due again.

If the database is busy, because a lock is taken, the task is tried again the next time it is due.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress

from ulak.worker.port import Busy
from ulak.worker.state import State
from ulak.worker.tuning import (
    CHECK_SECONDS,
    CHECK_SECONDS_LISTENING,
    REPORT_SECONDS,
    SETTLE_RETRY_SECONDS,
    SLOW_SECONDS,
    STATISTICS_AT_ONCE,
    SWEEP_SECONDS,
)


class Timers:
    def __init__(self, state: State) -> None:
        now = state.clock()
        self._state = state
        self._due: dict[Callable[[float], float], float] = {
            self._check: now,
            self._renew: now + state.options.lease / 3,
            self._store_deferred: now,
            self._sweep: now,
            self._report: now,
        }
        # The earliest of these.
        self.next = now

    def run(self, now: float) -> None:
        for task, due in self._due.items():
            if now >= due:
                self._due[task] = now + task(now)
        self.next = min(self._due.values())

    def _check(self, now: float) -> float:
        """Whether to go on, and which endpoints may go on."""
        state = self._state
        state.held.note_stuck(state.dispatcher.under_way_since(now - SLOW_SECONDS))
        state.check(now)
        state.release_blocked()
        if now >= state.until:
            state.senders.stop_listening()
            # Messages that wait for a slow receiver would delay the end of the run.
            with suppress(Busy):
                for endpoint_id in state.held.slow_endpoints.keys() & state.held.endpoints_that_wait():
                    state.release(endpoint_id, 0.0)
        return CHECK_SECONDS_LISTENING if state.senders.is_listening else CHECK_SECONDS

    def _renew(self, now: float) -> float:
        held, lease = self._state.held, self._state.options.lease
        if not held.leases:
            return lease / 3
        try:
            renewed = set(self._state.database.renew(held.leases, lease))
        except Busy:
            return min(1.0, lease / 10)
        # A message whose lease was lost before it was sent is left to its new owner.
        for endpoint_id in held.endpoints_that_wait():
            held.remove(endpoint_id, kept=renewed)
        return lease / 3

    def _store_deferred(self, now: float) -> float:
        self._state.settling.store_deferred()
        # With many locked endpoints it takes a fifth of the time at most.
        return max(SETTLE_RETRY_SECONDS, 5 * (self._state.clock() - now))

    def _sweep(self, now: float) -> float:
        with suppress(Busy):
            self._state.database.sweep()
        return SWEEP_SECONDS

    def _report(self, now: float) -> float:
        state = self._state
        self.report("running", STATISTICS_AT_ONCE)
        if now < state.until:
            with suppress(Busy):
                state.senders.follow(state.database.is_poller())
        return REPORT_SECONDS

    def report(self, state: str, most: int | None = None, noted: Mapping[str, object] | None = None) -> None:
        """With the statistics of at most this many endpoints; None: of all."""
        counters = self._state.counters
        progress = {
            "state": state,
            "in_flight": len(self._state.held.leases),
            "processed": counters.processed,
            "failed": counters.failed,
            "last_error": counters.last_error,
            **(noted or {}),
        }
        statistics = counters.statistics(most)
        with suppress(Busy):
            self._state.database.report(progress, statistics)
            counters.clear(statistics)
