"""Being woken by senders: in light traffic a worker sleeps until one notifies it, instead of looking again and again.

NOTIFY has its price for the sender, so only the first few after the worker has asked for it pay it
(ulak_private.request_wake_ups()), and in a busy queue nobody does.
"""

from __future__ import annotations

from contextlib import suppress

from ulak.worker.polling import Pace
from ulak.worker.port import Busy, Database
from ulak.worker.tuning import TRUE_WAKE_UP_WORTH, VAIN_WAKE_UPS, WAKE_UPS
from ulak.worker.wake_up import WakeUp


class Listening:
    """Off until there is a wake-up to wait for, and while traffic is dense."""

    def __init__(self, database: Database, pace: Pace) -> None:
        self._database = database
        self._pace = pace
        self._wake_up: WakeUp | None = None
        # A sender with an id up to this one notifies when it commits.
        self._notified_to = 0
        # The last id, as of the last time that wake-ups were asked for.
        self.last_sent = 0
        self._vain = 0
        # A sender has notified, and no claim has followed yet.
        self.was_notified = False
        self.is_on = False

    def use(self, wake_up: WakeUp) -> None:
        self._wake_up = wake_up

    def is_worth_it(self, now: float) -> bool:
        return self._wake_up is not None and self._pace.is_light(now)

    @property
    def is_armed(self) -> bool:
        """The next senders will notify."""
        return self._pace.last_sent + WAKE_UPS // 2 <= self._notified_to

    def renew(self, now: float) -> bool:
        """Begins to listen, or asks for the next wake-ups; whether somebody has sent who may not notify, or else
        something is pending."""
        assert self._wake_up is not None
        if not self.is_on:
            self._wake_up.hold_back()
            self.is_on = True
        try:
            found = self._database.request_wake_ups()
        except Busy:
            self.give_up()
            return True
        self.last_sent = found.last_sent
        has_sent = self._pace.note_sent(now, found.last_sent, found.last_sent <= self._notified_to)
        self._notified_to = found.notified_to
        return has_sent or found.has_pending

    def wait(self, seconds: float = 0) -> None:
        """For so long, unless a sender notifies or has done so."""
        if self._wake_up is not None and self.is_on and self._wake_up.wait(seconds):
            self.was_notified = True

    def answered(self, found: bool) -> None:
        """After the claim that a wake-up led to."""
        self.was_notified = False
        self._vain = max(0, self._vain + (-TRUE_WAKE_UP_WORTH if found else 1))
        if self._vain >= VAIN_WAKE_UPS:
            self.give_up()

    def give_up(self) -> None:
        self.stop()
        self._wake_up = None
        with suppress(Busy):
            self._database.unlisten()

    def stop(self) -> None:
        if self._wake_up is not None:
            self._wake_up.let_go()
        self.is_on = False
