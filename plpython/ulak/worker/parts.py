"""What a worker is made of, and the situation that follows from it."""

from __future__ import annotations

from collections.abc import Callable

from ulak.worker import modes
from ulak.worker.claiming import Claiming
from ulak.worker.counters import Counters
from ulak.worker.dispatcher import Dispatcher
from ulak.worker.ending import Ending
from ulak.worker.leases import Leases
from ulak.worker.listening import Listening
from ulak.worker.modes import Situation
from ulak.worker.options import Options
from ulak.worker.outcomes import Settling
from ulak.worker.polling import Pace
from ulak.worker.port import Database
from ulak.worker.request_slots import RequestSlots
from ulak.worker.sending import Sending
from ulak.worker.timers import Timers


class Parts:
    def __init__(
        self,
        database: Database,
        options: Options,
        dispatcher: Dispatcher,
        ending: Ending,
        clock: Callable[[], float],
    ) -> None:
        now = clock()
        self.database = database
        self.options = options
        self.dispatcher = dispatcher
        self.ending = ending
        self.clock = clock
        self.leases = Leases(options.most_held)
        self.counters = Counters()
        self.pace = Pace(options.poll_interval_busy, options.poll_interval, now)
        self.pace.is_poller = False
        self.listening = Listening(database, self.pace)
        self.slots = RequestSlots(options.slots)
        self.settling = Settling(database, self.leases, self.counters, now)
        self.sending = Sending(dispatcher, self.slots, self.settling, self.counters)
        self.claiming = Claiming(
            database,
            options,
            dispatcher,
            self.sending,
            self.settling,
            self.leases,
            self.counters,
            self.pace,
            clock,
        )
        self.timers = Timers(
            database,
            options.lease,
            self.leases,
            self.sending,
            self.claiming,
            self.counters,
            ending,
            now,
        )

    def situation(self, now: float) -> Situation:
        until, settling, listening = self.ending.until, self.settling, self.listening
        # By position, which takes half the time: a situation is looked at two or three times a turn.
        return Situation(
            until,
            self.ending.last_moment(self.sending.last_end()) if now >= until else 0.0,
            bool(self.leases),
            self.slots.free > 0,
            self.claiming.has_more(),
            bool(self.sending.prefetched or settling.deferred),
            settling.only_deliveries and not settling.unblocks_others,
            listening.is_on,
            listening.was_notified,
        )

    def is_quiet(self, now: float) -> bool:
        """Whether there is nothing to do until a sender notifies or an answer comes."""
        return self.listening.is_on and modes.is_quiet(self.situation(now))

    def can_claim(self, now: float) -> bool:
        """A run whose time is over claims nothing more, so that it can end. But where slow receivers, or outcomes that
        can't be stored, keep it from ending anyway, the messages of other endpoints don't wait for that."""
        is_kept = self.slots.slow_in_flight or self.settling.deferred
        if now >= self.ending.until and (self.ending.is_stop or not is_kept):
            return False
        return self.claiming.can_claim(now)
