"""A turn of the worker: one call stores outcomes and claims as many messages as there is room for.

A claim asks all endpoints in turn. If it ended before it had visited them all, the next one asks only those that had
more the last time. If it also found nothing, only those are asked for BESIDE_SECONDS.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ulak.messages.delivery import RETRYABLE, Message, Outcome, Settled
from ulak.worker.counters import Counters
from ulak.worker.dispatcher import Dispatcher
from ulak.worker.endpoints import Endpoints
from ulak.worker.held import Held
from ulak.worker.options import Options
from ulak.worker.outcomes import Settling, columns
from ulak.worker.port import Busy, Claimed, Database, Refused, Turn, Wish
from ulak.worker.senders import Senders
from ulak.worker.timers import Ending, Timers
from ulak.worker.tuning import BESIDE_SECONDS, SETTLE_RETRY_SECONDS, VISITS_BESIDE


class Turns:
    def __init__(
        self,
        database: Database,
        options: Options,
        dispatcher: Dispatcher,
        held: Held,
        settling: Settling,
        senders: Senders,
        timers: Timers,
        ending: Ending,
        counters: Counters,
        clock: Callable[[], float],
    ) -> None:
        self._database = database
        self._options = options
        self._dispatcher = dispatcher
        self._held = held
        self._settling = settling
        self._senders = senders
        self._timers = timers
        self._ending = ending
        self._counters = counters
        self._clock = clock
        self._endpoints = Endpoints(database, dispatcher)
        self.last = clock() - options.turn_interval
        # The last claim got as many messages as it asked for.
        self._was_full = False
        # The last claim that asked all endpoints was full, or ended before it had visited all of them.
        self._goes_on = False
        # Endpoints of which a claim got as many messages as it asked for: they may have more.
        self._have_more: set[int] = set()
        # Whether the next claim asks only these, and until when every claim does.
        self._are_asked = False
        self._are_asked_until = self.last

    @property
    def interval(self) -> float:
        """How long the next turn waits after the last one. 0 if there is a backlog: the last claim was full, or the
        next one asks the endpoints that have more."""
        has_backlog = self._was_full or (self._are_asked and self._have_more)
        return 0.0 if has_backlog else self._options.turn_interval

    def can_claim(self, now: float) -> bool:
        """A run whose time is over claims nothing more, so that it can end. But if slow receivers or deferred outcomes
        keep it from ending anyway, it goes on with the messages of other endpoints."""
        is_kept = self._held.slow_in_flight or self._settling.deferred
        if now >= self._ending.until and (self._ending.is_stop or not is_kept):
            return False
        return self._held.room() > 0 and self._held.room_for_messages() > 0

    def has_more(self) -> bool:
        """Whether a claim would find something and have a place for it."""
        if self._goes_on and self._held.is_low():
            return True
        return any(self._held.is_low(each) for each in self._have_more if each not in self._settling.deferred)

    def run(self, now: float, is_settling: bool) -> None:
        settling, senders = self._settling, self._senders
        part = settling.part() if is_settling else []
        has_failed = settling.has_failed
        wish = self._wish(now) if self.can_claim(now) else None
        wake_ups = now < self._ending.until and not self._goes_on and senders.prepare_wake_ups()
        try:
            turn = self._database.turn(columns(part) if part else None, wish, self._options.lease, wake_ups)
        except (Busy, Refused):
            senders.missed(now)
            if part:
                settling.store_apart(now)
            return
        finally:
            self.last = self._clock()
        if part:
            settling.stored(part)
        self._receive(turn, wish, now)
        if has_failed:
            self._timers.release_blocked()

    def _wish(self, now: float) -> Wish:
        held, endpoints = self._held, self._endpoints
        rooms, room, most = held.rooms(), held.room_of(None), held.room()
        if now >= self._ending.until:
            rooms.update(dict.fromkeys(held.slow_endpoints(), 0))
            self._have_more -= rooms.keys()
        for endpoint_id, batch_size in endpoints.batch_sizes.items():
            rooms[endpoint_id] = rooms.get(endpoint_id, room) * batch_size
            most = self._options.batch_size
        rooms.update(dict.fromkeys(self._settling.deferred, 0))
        most = min(most, self._options.batch_size, held.room_for_messages())
        are_asked = self._are_asked or now < self._are_asked_until
        asked = list(self._have_more) if are_asked and self._have_more else None
        # The messages in question may be older than the newest ones.
        wants_old_ones = asked is not None or self.has_more() or self._settling.is_awaited
        behind = None if wants_old_ones else self._senders.behind(now)
        visits = VISITS_BESIDE if self._have_more else 1000
        return Wish(most, rooms, room, behind, self._senders.is_insisting, asked, visits)

    def _receive(self, turn: Turn, wish: Wish | None, now: float) -> None:
        messages = [message for each in turn.claimed for message in each.messages]
        ids = [message.id for message in messages]
        if wish is not None:
            self._note_more(turn, wish, len(ids), now)
        was_for_all = wish is not None and wish.behind is None and wish.endpoint_ids is None
        if self._senders.followed(turn, ids, was_for_all, self._goes_on, now):
            # No sender has notified, so stop() may have done so.
            self._timers.check_by(now)
        if messages:
            self._held.claim(messages)
            self._prepare(turn.claimed, messages)

    def _note_more(self, turn: Turn, wish: Wish, found: int, now: float) -> None:
        self._was_full = found >= wish.most
        asked_all = wish.endpoint_ids is None
        if asked_all:
            # A claim that found nothing begins no further round over the other endpoints unless somebody has sent.
            has_sent = self._senders.was_notified or turn.last_sent != self._senders.last_sent
            is_worth_it = found > 0 or self._goes_on or has_sent
            self._goes_on = self._was_full or (turn.left_out_others and is_worth_it)
        self._are_asked = asked_all and turn.left_out_others and not self._was_full
        if self._are_asked and not found:
            self._are_asked_until = now + BESIDE_SECONDS
        has_seen_all = not turn.left_out_others and not self._was_full
        if has_seen_all and wish.behind is None:
            # Only endpoints without room may have more: they weren't asked.
            self._have_more = {each for each in self._have_more if not wish.rooms.get(each, wish.room)}
        for each in turn.claimed:
            if each.may_have_more:
                self._have_more.add(each.endpoint_id)
            else:
                self._have_more.discard(each.endpoint_id)

    def _prepare(self, claimed: Sequence[Claimed], messages: Sequence[Message]) -> None:
        """Sorts claimed messages into requests, after reading new configs."""
        try:
            self._endpoints.load(claimed)
        except Busy:
            ids, attempts = [each.id for each in messages], [each.attempt for each in messages]
            self._held.forget(messages)
            self._database.release(ids, attempts, SETTLE_RETRY_SECONDS)
            return
        for each in claimed:
            known = self._endpoints.get(each.endpoint_id)
            if known is not None:
                self._held.wait(known, self._dispatcher.group(known, each.messages))
            else:
                self._fail(each)

    def _fail(self, claimed: Claimed) -> None:
        outcome = Outcome(f"{RETRYABLE} {self._endpoints.problems[claimed.endpoint_id]}")
        for message in claimed.messages:
            self._settling.add(Settled(claimed.endpoint_id, [message], outcome), None, self._clock())
        self._counters.add(claimed.endpoint_id, len(claimed.messages), outcome.error, 0)
