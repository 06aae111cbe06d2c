"""How often the worker looks for messages: at once while there are more, fast while traffic flows, else seldom."""

from __future__ import annotations

# How long traffic counts as flowing.
BUSY_SECONDS = 3.0
# How long a message that was sent but not yet seen is looked for: its sender may not have committed.
EXPECT_SECONDS = 0.1
# What the wait grows by from one idle look to the next.
GROWTH = 1.25


class Pace:
    """A look is cheap (has anybody sent?); a claim is not. Both are asked for by time, which the caller gives."""

    def __init__(self, busy: float, idle: float, now: float) -> None:
        self.busy = busy
        self.idle = idle
        # Only one worker of a fleet looks at the busy pace: one is enough to notice.
        self.is_poller = True
        # The last claim got all that it asked for: there are more where these came from.
        self.more = False
        # From one look to the next.
        self.interval = busy
        # What the last look saw.
        self.last_sent = -1
        self._expected = -1
        self._expected_until = now
        self._busy_until = now
        self._next_look = now
        self._next_claim = now

    def wait(self, now: float) -> float:
        """Seconds until the next look."""
        return 0.0 if self.more else max(0.0, self._next_look - now)

    def until_claim(self, now: float) -> float:
        """Seconds until a claim is due even if nobody sends."""
        return max(0.0, self._next_claim - now)

    def wants_claim(self, now: float, last_sent: int) -> bool:
        """Called at each look, with the id that was drawn last by any sender."""
        if last_sent != self.last_sent:
            self.last_sent = self._expected = last_sent
            self._expected_until = now + EXPECT_SECONDS
            self._busy_until = now + BUSY_SECONDS
        # Retries fall due and late transactions commit without a new id: a claim now and then finds them.
        expecting = self._expected >= 0 and now < self._expected_until
        return self.more or expecting or now >= self._next_claim

    def looked(self, now: float) -> None:
        """After a look, whether or not it led to a claim."""
        if now < self._busy_until and self.is_poller:
            self.interval = self.busy
        else:
            self.interval = min(self.idle, self.interval * GROWTH)
        self._next_look = now + self.interval

    def claimed(self, now: float, newest: int | None, more: bool) -> None:
        """After a claim: the highest id that it got, if any, and whether there may be more."""
        self.more = more
        if newest is not None:
            self._busy_until = now + BUSY_SECONDS
            if newest >= self._expected:
                self._expected = -1
        self._next_claim = now + self.idle
