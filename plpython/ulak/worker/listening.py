"""Who hears the bell: in light traffic a worker sleeps until a sender rings, instead of looking again and again."""

from __future__ import annotations

from contextlib import suppress

from ulak.worker.pace import Pace
from ulak.worker.port import RINGS, Busy, Database
from ulak.worker.wake_up import Bell

# A bell that rings so often in vain, because others use NOTIFY too, is worse than none. A true one makes up for a few.
FALSE_RINGS = 200
WORTH = 4


class Listener:
    """Deaf until it has a bell, and while traffic is dense."""

    def __init__(self, database: Database, pace: Pace) -> None:
        self._database = database
        self._pace = pace
        self._bell: Bell | None = None
        # Who has drawn an id up to this one rings when he commits.
        self._rings_to = 0
        self._false_rings = 0
        # Somebody has rung, and nobody has answered yet.
        self.has_rung = False
        self.is_listening = False

    def take(self, bell: Bell) -> None:
        self._bell = bell

    def can_listen(self, now: float) -> bool:
        return self._bell is not None and self._pace.is_light(now)

    @property
    def is_set(self) -> bool:
        """The next senders will ring."""
        return self._pace.last_sent + RINGS // 2 <= self._rings_to

    def look(self, now: float) -> bool:
        """Begins to listen, or sets the bell anew; whether somebody has sent who may not ring, or else there is one."""
        assert self._bell is not None
        if not self.is_listening:
            self._bell.hold()
            self.is_listening = True
        try:
            found = self._database.set_bell()
        except Busy:
            self.do_without()
            return True
        has_sent = self._pace.sees(now, found.last_sent, found.last_sent <= self._rings_to)
        self._rings_to = found.rings_to
        return has_sent or found.has_pending

    def hear(self, seconds: float = 0) -> None:
        """Waits for so long, unless it rings or has rung."""
        if self._bell is not None and self.is_listening and self._bell.rang(seconds):
            self.has_rung = True

    def answered(self, found: bool) -> None:
        """After the claim that a ring led to."""
        self.has_rung = False
        self._false_rings = max(0, self._false_rings + (-WORTH if found else 1))
        if self._false_rings >= FALSE_RINGS:
            self.do_without()

    def do_without(self) -> None:
        self.stop()
        self._bell = None
        with suppress(Busy):
            self._database.unlisten()

    def stop(self) -> None:
        if self._bell is not None:
            self._bell.let_go()
        self.is_listening = False
