"""What a worker does by the clock: asks whether to go on, renews leases, sweeps and reports.

Where the database is busy, because a lock is taken, it is left to the timer's next time.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from ulak.worker.claiming import Claiming
from ulak.worker.counters import Counters
from ulak.worker.ending import Ending
from ulak.worker.leases import Leases
from ulak.worker.port import Busy, Database
from ulak.worker.sending import Sending
from ulak.worker.tuning import REPORT_SECONDS, STATISTICS_LONGEST, STATISTICS_PER_SECOND, SWEEP_SECONDS

_NOTHING: Mapping[str, object] = {}


class Timers:
    def __init__(
        self,
        database: Database,
        lease: float,
        leases: Leases,
        sending: Sending,
        claiming: Claiming,
        counters: Counters,
        ending: Ending,
        now: float,
    ) -> None:
        self._database = database
        self._lease = lease
        self._leases = leases
        self._sending = sending
        self._claiming = claiming
        self._counters = counters
        self._ending = ending
        self.next_check = now
        self._next_report = now
        self._last_statistics = now
        self._next_sweep = now
        self._next_renewal = now + lease / 3
        # The first of them.
        self.next = now
        # One worker of the fleet looks often for new messages, or is notified of them.
        self.is_poller = False

    def check_by(self, time: float) -> None:
        self.next_check = min(self.next_check, time)
        self.next = min(self.next, time)

    def run(self, now: float, check_seconds: float) -> None:
        """Those that are due; the next check is so many seconds away."""
        if now >= self.next_check:
            self.next_check = now + check_seconds
            self._check(now)
        if now >= self._next_renewal:
            self._next_renewal = now + self._lease / 3
            if self._leases:
                self._renew(now)
        if now >= self._next_sweep:
            self._next_sweep = now + SWEEP_SECONDS
            with suppress(Busy):
                self._database.sweep()
            self._database.commit()
        if now >= self._next_report:
            self._next_report = now + REPORT_SECONDS
            is_due = now >= self._last_statistics + min(STATISTICS_LONGEST, len(self._counters) / STATISTICS_PER_SECOND)
            self._last_statistics = now if is_due else self._last_statistics
            self.report("running", is_due)
        self.next = min(self.next_check, self._next_renewal, self._next_sweep, self._next_report)

    def report(self, state: str, with_statistics: bool = True, noted: Mapping[str, object] = _NOTHING) -> None:
        counters = self._counters
        progress = {
            "state": state,
            "in_flight": len(self._leases),
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
        self._database.commit()

    def release_blocked(self) -> None:
        """Gives back what is prefetched for endpoints whose circuit has opened."""
        if self._sending.prefetched:
            with suppress(Busy):
                self._claiming.release_blocked()
            self._database.commit()

    def _check(self, now: float) -> None:
        self._sending.note_slow(now)
        orders = self._database.check()
        self._database.commit()
        self.release_blocked()
        self._ending.obey(orders, now)

    def _renew(self, now: float) -> None:
        try:
            held = set(self._database.renew(self._leases.ids(), self._leases.attempts(), self._lease))
        except Busy:
            self._next_renewal = now + min(1.0, self._lease / 10)
            return
        self._database.commit()
        # What was lost and not yet sent is left to whoever has it now.
        self._leases.forget(self._sending.prefetched.remove_lost(held))
