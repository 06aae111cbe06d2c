"""A turn of the worker: one call stores outcomes and claims as many messages as there is room for.

A claim asks all endpoints in turn. If it reached its limit of visits, the next one asks only those that had more the
last time. If it also found nothing, only those are asked for BESIDE_SECONDS.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ulak.messages.delivery import RETRYABLE, Message, Outcome, Settled, leases
from ulak.worker.outcomes import columns
from ulak.worker.port import Busy, Claimed, Refused, Turn, Wish
from ulak.worker.state import State
from ulak.worker.tuning import BESIDE_SECONDS, ENDPOINTS, SETTLE_RETRY_SECONDS, VISITS, VISITS_BESIDE


class Turns:
    def __init__(self, state: State) -> None:
        self._state = state
        self._last = state.clock() - state.options.turn_interval
        # The last claim got as many messages as it asked for, or messages of as many endpoints.
        self._was_full = False
        self.has_found_nothing = False
        # The last claim that asked all endpoints was full, or ended before it had visited all of them.
        self._goes_on = False
        # How many endpoints the next claim takes messages of, at most.
        self._most_endpoints = ENDPOINTS
        # Endpoints of which a claim got as many messages as it asked for: they may have more. True: as many as there
        # was room for, so no limit of their own held the others back.
        self._have_more: dict[int, bool] = {}
        # Whether the next claim asks only these, and until when every claim does.
        self._are_asked = False
        self._are_asked_until = self._last

    def when(self, now: float) -> tuple[float, float]:
        """The earliest time of the next turn, and when to claim (infinity: there is no room). The next turn comes at
        once if there is a backlog: the last claim was full, or the next one asks the endpoints that have more, or no
        request waits for a quick slot, though no limit holds the next ones back."""
        senders, last, has_more = self._state.senders, self._last, self._has_more(now)
        has_backlog = has_more and (self._was_full or self._are_asked or self._is_drained())
        soonest = last if has_backlog else last + self._state.options.turn_interval
        at = last if has_more or senders.was_notified else senders.next_look(last, now)
        return soonest, at if at > now or self._can_claim(now) else math.inf

    def _is_drained(self) -> bool:
        """Whether no request waits for a quick slot, though there are messages for it that no limit holds back."""
        backlogs = [each for each, has_backlog in self._have_more.items() if has_backlog]
        return self._state.held.is_drained(backlogs)

    def _can_claim(self, now: float) -> bool:
        """A run whose time is over claims nothing more, so that it can end. But if slow receivers or deferred outcomes
        keep it from ending anyway, it goes on with the messages of other endpoints."""
        held = self._state.held
        if now >= self._state.until:
            is_kept = held.slow.in_flight or self._state.settling.deferred
            if self._state.leave == "stop" or not is_kept:
                return False
        return held.room() > 0 and held.room_for_messages() > 0

    def _has_more(self, now: float) -> bool:
        """Whether a claim would find something and have a place for it."""
        held = self._state.held
        if self._goes_on and held.is_low():
            return True
        return bool(self._have_more) and held.is_one_low(self._have_more, self._left_out(now))

    def _left_out(self, now: float) -> list[int]:
        """Endpoints whose messages aren't claimed now: their outcomes can't be stored, or they are slow and would delay
        the end of a run whose time is over."""
        slow = self._state.held.slow_endpoints if now >= self._state.until else ()
        return [*self._state.settling.deferred, *slow]

    def run(self, now: float, are_outcomes_due: bool) -> None:
        state, settling, senders = self._state, self._state.settling, self._state.senders
        wish = self._wish(now) if self._can_claim(now) else None
        if wish is not None and self._claim_new(wish, now):
            if not are_outcomes_due and not senders.has_to_ask():
                return
            # The claim is done.
            wish = None
        elif wish is not None and senders.is_insisting(now):
            wish = wish._replace(behind=None)
        # A look for nothing but new messages doesn't store outcomes that can wait.
        is_look = wish is not None and wish.behind is not None
        part = [] if is_look and not are_outcomes_due else settling.part()
        has_failed = settling.has_failed
        # A turn that doesn't claim may only go on with listening: a sender that has drawn its id by now won't notify.
        may_ask = (wish is not None or senders.is_listening) and now < state.until and not self._goes_on
        wake_ups = may_ask and senders.prepare_wake_ups()
        try:
            turn = state.database.turn(columns(part) if part else None, wish, state.options.lease, wake_ups)
        except (Busy, Refused):
            senders.missed(now)
            # The next try keeps its distance.
            self._was_full = self._are_asked = False
            self._have_more = dict.fromkeys(self._have_more, False)
            if part:
                settling.store_apart()
            return
        finally:
            self._last = state.clock()
        if part:
            settling.stored(part)
        self._receive(turn, wish, now)
        if has_failed:
            # A failure may have opened the circuit.
            state.release_blocked()

    def _claim_new(self, wish: Wish, now: float) -> bool:
        """A turn that only claims new messages: a special case, only for speed (claim_new.sql). False if they need more
        than that."""
        senders = self._state.senders
        if wish.behind is None or not senders.expects_new(now):
            return False
        last, lease = senders.notified_to or None, self._state.options.lease
        turn = self._state.database.claim_new(wish, last, senders.last_sent, lease)
        if turn is None:
            return False
        self._last = self._state.clock()
        self._receive(turn, wish, now)
        return True

    def _wish(self, now: float) -> Wish:
        held, batch_size = self._state.held, self._state.options.batch_size
        rooms, room, most = held.rooms(), held.room_of(None), held.room()
        for endpoint_id, size in self._state.endpoints.batch_sizes.items():
            rooms[endpoint_id] = rooms.get(endpoint_id, room) * size
            most = batch_size
        rooms.update(dict.fromkeys(self._left_out(now), 0))
        most = min(most, batch_size, held.room_for_messages())
        are_asked = self._are_asked or now < self._are_asked_until
        asked = list(self._have_more) if are_asked and self._have_more else None
        # The messages in question may be older than the newest ones.
        wants_old_ones = asked is not None or self._state.settling.is_awaited or self._has_more(now)
        behind = None if wants_old_ones else self._state.senders.behind(now)
        visits = VISITS_BESIDE if self._have_more else VISITS
        return Wish(most, rooms, room, behind, asked, self._most_endpoints, visits)

    def _receive(self, turn: Turn, wish: Wish | None, now: float) -> None:
        messages = [message for each in turn.claimed for message in each.messages]
        ids = [message.id for message in messages]
        if wish is not None:
            self._note_more(turn, wish, len(ids), now)
        can_sleep = now < self._state.until and not self._goes_on
        if self._state.senders.followed(turn, wish, ids, can_sleep, now):
            # No sender has notified, so stop() may have done so.
            self._state.check(now)
        if messages:
            self._state.held.claim(messages)
            self._prepare(turn.claimed, messages)

    def _note_more(self, turn: Turn, wish: Wish, found: int, now: float) -> None:
        asked_all = wish.endpoint_ids is None
        is_spread = asked_all and len(turn.claimed) >= wish.most_endpoints
        self._was_full = found >= wish.most or is_spread
        self.has_found_nothing = not found
        if asked_all:
            # A claim that found nothing begins no further round over the other endpoints unless somebody has sent.
            senders = self._state.senders
            has_sent = senders.was_notified or turn.last_sent != senders.last_sent
            is_worth_it = found > 0 or self._goes_on or has_sent
            self._goes_on = self._was_full or (turn.left_out_others and is_worth_it)
        if is_spread and found < wish.most:
            # Endpoints with few messages each can't fill a claim, so the next one takes messages of more of them.
            self._most_endpoints = 2 * wish.most_endpoints
        elif any(each.may_have_more for each in turn.claimed):
            self._most_endpoints = max(ENDPOINTS, wish.most_endpoints // 2)
        self._are_asked = asked_all and turn.left_out_others and not self._was_full
        if self._are_asked and not found:
            self._are_asked_until = now + BESIDE_SECONDS
        has_seen_all = not turn.left_out_others and not self._was_full
        if has_seen_all and wish.behind is None:
            # Only endpoints without room may have more: they weren't asked.
            left = {id: each for id, each in self._have_more.items() if not wish.rooms.get(id, wish.room)}
            self._have_more = left
        for endpoint_id, _, messages, may_have_more in turn.claimed:
            if may_have_more:
                self._have_more[endpoint_id] = len(messages) >= wish.rooms.get(endpoint_id, wish.room)
            elif wish.behind is None:
                self._have_more.pop(endpoint_id, None)

    def _prepare(self, claimed: Sequence[Claimed], messages: Sequence[Message]) -> None:
        """Sorts claimed messages into requests, after reading new configs."""
        held, endpoints = self._state.held, self._state.endpoints
        try:
            endpoints.load(claimed)
        except Busy:
            held.forget(messages)
            self._state.database.release(leases(messages), SETTLE_RETRY_SECONDS)
            return
        for each in claimed:
            known = endpoints.known.get(each.endpoint_id)
            if known is not None:
                held.wait(known, self._state.dispatcher.group(known, each.messages))
                continue
            outcome = Outcome(f"{RETRYABLE} {endpoints.problems[each.endpoint_id]}")
            for message in each.messages:
                settled = Settled(each.endpoint_id, [message], outcome)
                self._state.settling.add(settled, None, self._state.clock())
                self._state.counters.note(settled)
