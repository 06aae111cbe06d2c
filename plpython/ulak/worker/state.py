"""A run of a worker: what its loop, its turns and its timers share, and when it ends."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

from ulak.messages.delivery import leases
from ulak.sessions.database import Database
from ulak.transports.dispatcher import Dispatcher
from ulak.worker.counters import Counters
from ulak.worker.endpoints import Endpoints
from ulak.worker.held import Held
from ulak.worker.options import Options
from ulak.worker.outcomes import Settling
from ulak.worker.port import Busy
from ulak.worker.senders import Senders
from ulak.worker.tuning import GRACE_SECONDS, RELEASE_SECONDS, STOP_SECONDS


class State:
    def __init__(
        self,
        database: Database,
        options: Options,
        settings: str,
        until: float,
        dispatcher: Dispatcher,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`settings` is what the options were made from; `until` is by the clock."""
        self.database = database
        self.options = options
        self.dispatcher = dispatcher
        self.clock = clock
        self.counters = Counters()
        self.held = Held(options.slots, options.most_held)
        self.settling = Settling(database, self.held, self.counters)
        self.endpoints = Endpoints(database, dispatcher)
        self.senders = Senders(database, dispatcher, options, clock())
        self.until = until
        self._settings = settings
        # Why it ends: stop, restart (there is another build) or settings (they changed). None: its time is over.
        self.leave: str | None = None

    def check(self, now: float) -> None:
        """Asks whether to go on."""
        leave = None
        with suppress(Busy):
            leave = self.database.check(self._settings)
        if leave is not None and self.leave != "stop":
            self.leave = leave
            self.until = min(self.until, now)

    def has_ended(self, now: float) -> bool:
        """A run whose time is over goes on until it holds nothing more, but not for long."""
        return now >= self.until and (not self.held.leases or now >= self._last_moment())

    def _last_moment(self) -> float:
        """When messages that are still held are given up."""
        if self.leave == "stop":
            return self.until + STOP_SECONDS
        return max(self.until + GRACE_SECONDS, self.dispatcher.last_end())

    def release_blocked(self) -> None:
        """Gives back messages that wait for a blocked endpoint, such as one whose circuit opened."""
        if waiting := self.held.endpoints_that_wait():
            with suppress(Busy):
                for endpoint_id, reason in self.database.blocked_endpoints(waiting).items():
                    self.release(endpoint_id, RELEASE_SECONDS[reason])

    def release(self, endpoint_id: int, delay: float) -> None:
        """Gives back messages that wait for an endpoint, without using up a retry."""
        if messages := self.held.remove(endpoint_id):
            self.database.release(leases(messages), delay)
