"""Keeps track of senders: which ids they have drawn, whether they notify, when to look for more.

In light traffic the next senders notify, and the worker sleeps until then. NOTIFY is expensive for senders, so they
don't notify in dense traffic, or while the worker has more to do: it looks every poll_interval_busy instead. So do
workers that aren't the poller of their fleet, every poll_interval.
"""

from __future__ import annotations

from collections.abc import Sequence

from ulak.sessions.database import Database
from ulak.sessions.session import WakeUp
from ulak.transports.dispatcher import Dispatcher
from ulak.worker.options import Options
from ulak.worker.port import Turn, Wish
from ulak.worker.tuning import (
    BUSY_SECONDS,
    FEW,
    LATE_SECONDS,
    LEAST_WAKE_UPS,
    LOOK_SECONDS,
    LOOK_SECONDS_EMPTY,
    LOOK_SECONDS_OFTEN,
)


class Senders:
    def __init__(self, database: Database, dispatcher: Dispatcher, options: Options, now: float) -> None:
        self._database = database
        self._dispatcher = dispatcher
        self._options = options
        self._wake_up: WakeUp | None = None
        # Only one worker of a fleet looks often or is notified, which is enough.
        self._is_poller = False
        # The next senders notify, and the last turn left nothing to do.
        self.is_listening = False
        # A sender has notified, and no turn has followed yet.
        self.was_notified = False
        # Senders up to this id notify; 0: none.
        self.notified_to = 0
        # The id that was drawn last, and two earlier ones: the first is at least LATE_SECONDS old.
        self.last_sent = -1
        self._marks: tuple[int | None, int | None] = (None, None)
        self._marked_at = now
        # Until then the worker expects a message of a sender that has drawn an id and won't notify.
        self._expected_until = now
        self._busy_until = now
        self._had_few = True
        # When the worker last looked for all due messages, and when it does so again.
        self._looked_at = now
        self.look_at = now
        # Until then looks follow each other soon, because one has found messages that weren't new.
        self._looks_often_until = now

    def follow(self, is_poller: bool) -> None:
        """The worker becomes the one that is notified, or ceases to be. May raise Busy."""
        if is_poller and not self._is_poller:
            self._wake_up = self._database.listen()
            if self._wake_up is not None:
                self._dispatcher.wait_also_for(self._wake_up.fileno())
        elif self._is_poller and not is_poller:
            self.stop_listening()
            self._wake_up = None
            self._database.unlisten()
        self._is_poller = is_poller

    # Looking.

    def next_look(self, last_turn: float, now: float) -> float:
        """When to look for messages that no wake-up announces."""
        if self.is_listening:
            # At once if a sender has drawn an id and won't notify.
            return last_turn if now < self._expected_until else self.look_at
        is_often = self._is_poller and now < self._busy_until
        pace = self._options.poll_interval_busy if is_often else self._options.poll_interval
        return min(self.look_at, last_turn + pace)

    def behind(self, now: float) -> int | None:
        """New messages have larger ids than this. None: look for all due messages."""
        return None if now >= self.look_at and not self.expects_new(now) else self._marks[0]

    def expects_new(self, now: float) -> bool:
        """Whether there are probably new messages. Then a look for all due messages comes later."""
        return now < self.look_at + LOOK_SECONDS and (self.was_notified if self.is_listening else not self._had_few)

    def is_insisting(self, now: float) -> bool:
        """Whether to look for all due messages if a wake-up brings no new one: its sender may have committed late. Not
        often, since other uses of NOTIFY wake the worker, too."""
        return self.was_notified and self.is_listening and now >= self._looked_at + LOOK_SECONDS

    # Turns.

    def has_to_ask(self) -> bool:
        """Whether only a few more senders notify. If these roll back or commit late, nobody tells of the ones after
        them."""
        return self.is_listening and self.notified_to - self.last_sent < LEAST_WAKE_UPS

    def prepare_wake_ups(self) -> bool:
        """Called before a turn: True if the turn shall ask the next senders to notify. Wake-ups are held back from here
        on, so that none is missed before the wait."""
        if self._wake_up is None or not self._had_few:
            return False
        self._wake_up.hold_back()
        return True

    def followed(self, turn: Turn, wish: Wish | None, ids: Sequence[int], can_sleep: bool, now: float) -> bool:
        """Called after a turn that claimed these ids. Returns True if a wake-up led to it and it found nothing."""
        if wish is not None:
            self._had_few = len(ids) < FEW
        is_vain = wish is not None and self.was_notified and self.is_listening and not ids
        if wish is not None and wish.behind is None and wish.endpoint_ids is None:
            self._looked_at = now
            self.look_at = now + self._rest(turn, ids, now)
        elif is_vain:
            # It may have come too soon after a look. Then the next look finds a sender that committed late.
            self.look_at = min(self.look_at, self._looked_at + LOOK_SECONDS)
        self.was_notified = self.was_notified and wish is None
        self._note_ids(turn, ids, now)
        self.notified_to = turn.notified_to or self.notified_to
        if turn.last_sent < self.notified_to and self._had_few and can_sleep:
            self.is_listening = True
        else:
            self.stop_listening()
        return is_vain

    def _rest(self, turn: Turn, ids: Sequence[int], now: float) -> float:
        """How long it is from one look for all due messages to the next."""
        if min(ids, default=turn.last_sent) < self.last_sent:
            self._looks_often_until = now + BUSY_SECONDS
        if turn.is_empty:
            return LOOK_SECONDS_EMPTY if self.is_listening else LOOK_SECONDS
        return LOOK_SECONDS_OFTEN if now < self._looks_often_until else LOOK_SECONDS

    def _note_ids(self, turn: Turn, ids: Sequence[int], now: float) -> None:
        has_sent = turn.last_sent != self.last_sent
        if ids or has_sent:
            self._busy_until = now + BUSY_SECONDS
        # The newest id wasn't claimed: its sender may not have committed yet, and it won't notify.
        if has_sent and turn.last_sent > max(ids, default=0) and turn.last_sent > self.notified_to:
            self._expected_until = now + LATE_SECONDS
        self.last_sent = turn.last_sent
        if now >= self._marked_at + LATE_SECONDS or self._marks[1] is None:
            self._marks, self._marked_at = (self._marks[1], turn.last_sent), now

    def missed(self, now: float) -> None:
        """Called after a turn that failed."""
        self.was_notified = False
        self.look_at = now + LOOK_SECONDS_OFTEN
        self.stop_listening()

    def note_wake_up(self) -> None:
        """Something woke the worker: lets PostgreSQL handle its signals, one of which may be a notification."""
        if self._wake_up is not None and self.is_listening and self._wake_up.take():
            self.was_notified = True

    def stop_listening(self) -> None:
        self.is_listening = False
        self.notified_to = 0
        if self._wake_up is not None:
            self._wake_up.let_go()
