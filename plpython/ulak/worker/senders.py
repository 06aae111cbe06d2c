"""Keeps track of senders: which ids they have drawn, whether they notify, when to look for more.

In light traffic the next senders notify, and the worker sleeps until then. NOTIFY is expensive for senders, so they
don't notify in dense traffic, or while the worker has more to do: it looks every poll_interval_busy instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from ulak.worker.options import Options
from ulak.worker.port import Busy, Database, Turn
from ulak.worker.tuning import (
    BUSY_SECONDS,
    FEW,
    LATE_SECONDS,
    LOOK_SECONDS,
    LOOK_SECONDS_AFTER_ONE,
    LOOK_SECONDS_EMPTY,
    VAIN_WAKE_UPS,
)
from ulak.worker.wake_up import WakeUp


class Senders:
    def __init__(self, database: Database, options: Options, now: float) -> None:
        self._database = database
        self._options = options
        self._wake_up: WakeUp | None = None
        # Only one worker of a fleet looks often or is notified, which is enough.
        self._is_poller = False
        # The next senders notify, and the last turn left nothing to do.
        self.is_listening = False
        # A sender has notified, or drawn an id, and no turn has followed yet.
        self.was_notified = False
        self._vain_wake_ups = 0
        self._notified_to = 0
        # The id that was drawn last, and what it was between one and two times LATE_SECONDS ago.
        self.last_sent = -1
        self._marks: tuple[int | None, int | None] = (None, None)
        self._marked_at = now
        # Until then the worker expects a message of a sender that has drawn an id and won't notify.
        self._expected_until = now
        self._busy_until = now
        self._had_few = True
        # When to look for all due messages.
        self.look_at = now

    def follow(self, is_poller: bool) -> int | None:
        """The worker becomes the one that is notified, or ceases to be. Returns the descriptor of a new wake-up."""
        if is_poller == self._is_poller:
            return None
        self._is_poller = is_poller
        with suppress(Busy):
            if is_poller:
                self._wake_up = self._database.listen()
                return None if self._wake_up is None else self._wake_up.fileno()
            self.stop_listening()
            if self._wake_up is not None:
                self._wake_up = None
                self._database.unlisten()
        return None

    # Looking.

    def _pace(self, now: float) -> float:
        """The time from one look at the sequence to the next."""
        is_often = self._is_poller and now < self._busy_until
        return self._options.poll_interval_busy if is_often else self._options.poll_interval

    def next_look(self, last_turn: float, now: float) -> float:
        """When to look for messages that no wake-up announces."""
        if not self.is_listening:
            return min(self.look_at, last_turn + self._pace(now))
        if now < self._expected_until:
            # At once: a sender has drawn an id and won't notify.
            return last_turn
        return self.look_at

    def behind(self, now: float) -> int | None:
        """New messages have larger ids than this. None: look for all due messages."""
        return None if now >= self.look_at else self._marks[0]

    @property
    def is_insisting(self) -> bool:
        """Whether to look for all due messages if a wake-up brings no new one: its sender may have committed late."""
        return self.was_notified and self.is_listening and self._vain_wake_ups < VAIN_WAKE_UPS

    # Turns.

    def prepare_wake_ups(self) -> bool:
        """Called before a turn: True if the turn shall ask the next senders to notify. Wake-ups are held back from here
        on, so that none is missed before the wait."""
        if self._wake_up is None or not self._had_few:
            return False
        self._wake_up.hold_back()
        return True

    def followed(self, turn: Turn, ids: Sequence[int], was_for_all: bool, has_more: bool, now: float) -> bool:
        """Called after a turn that claimed these ids. Returns True if a wake-up led to it and it found nothing."""
        found, newest, oldest = len(ids), max(ids, default=0), min(ids, default=turn.last_sent)
        is_vain = self.was_notified and self.is_listening and not found
        if found:
            self._vain_wake_ups = 0
        elif is_vain:
            self._vain_wake_ups += 1
        self.was_notified = False
        has_sent = turn.last_sent != self.last_sent
        if found or has_sent:
            self._busy_until = now + BUSY_SECONDS
        # The newest id wasn't claimed: its sender may not have committed yet, and it won't notify.
        if has_sent and newest < turn.last_sent and self._notified_to < turn.last_sent:
            self._expected_until = now + LATE_SECONDS
        if was_for_all:
            if oldest < self.last_sent:
                self.look_at = now + LOOK_SECONDS_AFTER_ONE
            elif turn.is_empty and self.is_listening:
                self.look_at = now + LOOK_SECONDS_EMPTY
            else:
                self.look_at = now + LOOK_SECONDS
        self.last_sent = turn.last_sent
        if now >= self._marked_at + LATE_SECONDS or self._marks[1] is None:
            self._marks, self._marked_at = (self._marks[1], turn.last_sent), now
        self._had_few = found < FEW
        if turn.notified_to is not None and self._had_few and not has_more:
            self._notified_to = turn.notified_to
            self.is_listening = True
        else:
            self.stop_listening()
        return is_vain

    def missed(self, now: float) -> None:
        """Called after a turn that failed."""
        self.was_notified = False
        self.look_at = now + LOOK_SECONDS_AFTER_ONE

    def note_wake_up(self) -> None:
        """Something woke the worker: lets PostgreSQL handle its signals, one of which may be a notification."""
        if self._wake_up is not None and self.is_listening and self._wake_up.wait():
            self.was_notified = True

    def await_send(self, now: float, seconds: float) -> None:
        """Waits until a sender has drawn an id, for at most this long."""
        if self._database.await_send(self.last_sent, min(self._pace(now), seconds), seconds) != self.last_sent:
            self.was_notified = True

    def stop_listening(self) -> None:
        self.is_listening = False
        self._notified_to = 0
        if self._wake_up is not None:
            self._wake_up.let_go()
