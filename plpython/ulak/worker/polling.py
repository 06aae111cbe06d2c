"""How often the worker looks for messages: at once while there are more, fast while traffic flows, else seldom."""

from __future__ import annotations

from ulak.worker.tuning import (
    BUSY_SECONDS,
    CLAIM_WAITS,
    EXPECT_SECONDS,
    IDLE_GROWTH,
    LIGHT_LOOKS,
    LIGHT_WAIT,
    LISTEN_GAP_SECONDS,
)


class Pace:
    """A look is cheap (has anybody sent?); a claim is not. Both are asked for by time, which the caller gives."""

    def __init__(self, busy: float, idle: float, now: float) -> None:
        self.busy = busy
        self.idle = idle
        # Only one worker of a fleet looks at the busy pace: one is enough to notice.
        self.is_poller = True
        # The last claim got all that it asked for: there are more where these came from.
        self.may_have_more = False
        # From one look to the next.
        self.interval = busy
        # What the last look saw.
        self.last_sent = -1
        self._expected = -1
        self._expected_until = now
        self._busy_until = now
        self._sent_at = now
        # Seconds from one new id to the next, of late.
        self._gap = 0.0
        self._next_look = now
        self._next_claim = now

    def wait(self, now: float) -> float:
        """Seconds until the next look."""
        return 0.0 if self.may_have_more else max(0.0, self._next_look - now)

    def patience(self, now: float) -> float:
        """Seconds until a claim is due even if nobody sends: one look if a sender hasn't committed yet."""
        if self.is_expecting(now):
            return self.interval
        return max(self.interval, self._next_claim - now)

    def is_expecting(self, now: float) -> bool:
        """Whether somebody has just sent whose message was not found yet."""
        return self._expected >= 0 and now < self._expected_until

    def is_light(self, now: float) -> bool:
        """Whether messages come one by one, so that it is worth to be woken for each."""
        return max(self._gap, now - self._sent_at) > LISTEN_GAP_SECONDS

    def looked(self, now: float, last_sent: int) -> bool:
        """After a look, which found that this id was drawn last by any sender; whether a claim is to follow."""
        is_sent = self.note_sent(now, last_sent)
        if now < self._busy_until and self.is_poller:
            self.interval = self.busy * (LIGHT_WAIT if self._gap > LIGHT_LOOKS * self.busy else 1)
        else:
            self.interval = min(self.idle, self.interval * IDLE_GROWTH)
        self._next_look = now + self.interval
        # Retries fall due and late transactions commit without a new id: a claim now and then finds them.
        return is_sent or self.may_have_more or now >= self._next_claim

    def note_sent(self, now: float, last_sent: int, will_notify: bool = False) -> bool:
        """Whether somebody has sent whose message was not found yet. will_notify: the commit of whoever drew this id
        wakes the worker, which notes it then."""
        is_new = last_sent != self.last_sent and not will_notify
        if is_new:
            self._saw(now, last_sent)
            self._expected = last_sent
            self._expected_until = now + EXPECT_SECONDS
        return is_new or self.is_expecting(now)

    def claimed(self, now: float, newest: int | None, may_have_more: bool) -> None:
        """After a claim: the highest id that it got, if any, and whether there may be more."""
        self.may_have_more = may_have_more
        if newest is not None:
            if newest > self.last_sent:
                self._saw(now, newest)
            self._busy_until = now + BUSY_SECONDS
            if newest >= self._expected:
                self._expected = -1
        self._next_claim = now + self.idle * CLAIM_WAITS

    def claimed_new(self, now: float, newest: int, may_have_more: bool) -> None:
        """After a claim of what is new and nothing else."""
        self.may_have_more = may_have_more
        # Unless a look has seen it just now.
        if newest > self.last_sent:
            self._saw(now, newest)
        if newest >= self._expected:
            self._expected = -1

    def _saw(self, now: float, last_sent: int) -> None:
        self._gap += (min(BUSY_SECONDS, now - self._sent_at) - self._gap) / 4
        self._sent_at = now
        self._busy_until = now + BUSY_SECONDS
        self.last_sent = last_sent
