"""The three kinds of claim.

A full claim takes messages of all endpoints in turn, for the request slots that are free. Prefetching takes messages of
fast endpoints, for slots that will be free soon. A light claim takes the one or few messages that have just been sent,
and stores what was delivered by the same statement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ulak.messages.delivery import RETRYABLE, Message, Outcome, Settled
from ulak.worker.counters import Counters
from ulak.worker.dispatcher import Dispatcher
from ulak.worker.endpoints import Endpoints
from ulak.worker.leases import Leases
from ulak.worker.options import Options
from ulak.worker.outcomes import Settling
from ulak.worker.polling import Pace
from ulak.worker.port import Busy, Claimed, Database
from ulak.worker.prefetch import Rates
from ulak.worker.sending import Sending
from ulak.worker.tuning import (
    CLAIM_ENDPOINTS,
    CLAIM_ENDPOINTS_MOST,
    FULL_CLAIM_LONGEST,
    FULL_CLAIM_PARTS,
    FULL_CLAIM_SECONDS,
    LIGHT_CLAIM,
    LISTENING_LOOK_SECONDS,
    LISTENING_LOOK_SECONDS_AFTER_ONE,
    RELEASE_SECONDS,
    SETTLE_RETRY_SECONDS,
)


class Claiming:
    def __init__(
        self,
        database: Database,
        options: Options,
        dispatcher: Dispatcher,
        sending: Sending,
        settling: Settling,
        leases: Leases,
        counters: Counters,
        pace: Pace,
        clock: Callable[[], float],
    ) -> None:
        self._database = database
        self._options = options
        self._dispatcher = dispatcher
        self._sending = sending
        self._slots = sending.slots
        self._settling = settling
        self._leases = leases
        self._counters = counters
        self._pace = pace
        self._clock = clock
        self._endpoints = Endpoints(database, dispatcher)
        self.rates = Rates()
        # Endpoints that got as much as they may in their last claim: they may well have more.
        self._may_have_more: set[int] = set()
        # Of how many endpoints a claim takes messages.
        self._most_endpoints = CLAIM_ENDPOINTS
        now = clock()
        self.last_claim = now
        self._last_full = now
        self._full_wait = FULL_CLAIM_SECONDS
        self._look_wait = LISTENING_LOOK_SECONDS

    # What there is to claim.

    @property
    def is_under_load(self) -> bool:
        return self._pace.may_have_more or bool(self._may_have_more)

    @property
    def next_look(self) -> float:
        """When a listening worker looks for what nobody notifies of."""
        return self._last_full + self._look_wait

    def can_claim(self, now: float) -> bool:
        """Whether there is a place for what a claim finds: a request slot, or one to be prefetched for."""
        if self._slots.free > 0 and (not self._sending.prefetched or now >= self._last_full + self._full_wait):
            return True
        return bool(self._to_prefetch(now) or self._to_prefetch_in_turn(now))

    def has_more(self) -> bool:
        """Whether a claim would find something and have a place for it."""
        if self._pace.may_have_more or not self._may_have_more:
            return self._pace.may_have_more
        endpoints = self._may_have_more - self._settling.deferred.keys()
        return any(self._slots.room_of(each) or self._sending.prefetched.count(each) for each in endpoints)

    def looked(self, now: float) -> None:
        """A listening worker has seen that there is nothing to claim."""
        self._last_full = now
        self._look_wait = min(LISTENING_LOOK_SECONDS, 2 * self._look_wait)

    # Claims. What they get is in sending.fresh.

    def claim(self, now: float, was_notified: bool, until: float) -> None:
        """A full claim where it is due, then prefetching."""
        self.last_claim = now
        prefetch = self._to_prefetch(now)
        if not prefetch or was_notified or (self._slots.free and now >= self._last_full + self._full_wait):
            self._full_claim(now, until)
            prefetch = self._to_prefetch(now)
        if prefetch:
            self._claim(now, prefetch, 0, sum(prefetch.values()), list(prefetch))
        if self._sending.fresh:
            self._look_wait = LISTENING_LOOK_SECONDS_AFTER_ONE
        else:
            self._look_wait = min(LISTENING_LOOK_SECONDS, 2 * self._look_wait)

    def light_claim(self, now: float, after: int) -> list[Claimed] | None:
        """One statement stores what was delivered and claims what was sent after this id, where neither needs more
        thought. None if that found nothing, or can't be done."""
        settling = self._settling
        count = min(LIGHT_CLAIM, self._slots.room_of_any(), self._leases.room())
        if count <= 0 or self._sending.prefetched or settling.unblocks_others or not settling.only_deliveries:
            return None
        delivered = [each for done in settling.done for each in done.messages if each.id > after - LIGHT_CLAIM]
        try:
            claimed, settled = self._database.light_turn(after, count, self._options.lease, delivered)
        except Busy:
            return None
        if settled:
            settling.leave_out(settled)
        if not claimed:
            return None
        self.last_claim = now
        found, newest = self._leases.receive(claimed)
        self._pace.claimed_new(now, newest, found >= count)
        return claimed

    def start(self, claimed: Sequence[Claimed], now: float) -> bool:
        """What a light claim got, at once; if a config has to be read first, it is left in sending.fresh."""
        for each in claimed:
            if not self._endpoints.knows(each):
                self._prepare(claimed)
                return False
        self._database.commit()
        for each in claimed:
            to = self._endpoints.get(each.endpoint_id)
            assert to is not None
            for message in each.messages:
                self._sending.start(to, [message], now)
        return True

    # Giving back.

    def release_blocked(self) -> None:
        """A circuit that opened takes no more: what was prefetched for it goes back, unspent."""
        prefetched = self._sending.prefetched
        for endpoint_id, state in self._database.blocked_endpoints(prefetched.endpoint_ids()).items():
            self._give_back(prefetched.remove(endpoint_id), RELEASE_SECONDS[state])

    def _give_back(self, messages: Sequence[Message], delay: float) -> None:
        self._database.release([each.id for each in messages], [each.attempt for each in messages], delay)
        self._leases.forget(messages)

    # How many of which endpoint.

    def _to_prefetch(self, now: float) -> dict[int, int]:
        """How many messages of which endpoint are to be prefetched: of those that seem to have more. None while half of
        what is allowed is still there: a claim has its price, however many it gets."""
        needed: dict[int, int] = {}
        if not self.is_under_load:
            return needed
        for endpoint_id, allowed in self.rates.allowed(now).items():
            prefetched = self._sending.prefetched.count(endpoint_id)
            if 2 * prefetched >= allowed or endpoint_id in self._slots.slow or endpoint_id in self._settling.deferred:
                continue
            if self._pace.may_have_more or endpoint_id in self._may_have_more:
                needed[endpoint_id] = allowed - prefetched
        return needed

    def _full_claim(self, now: float, until: float) -> None:
        self._last_full = now
        began = self._clock()
        is_leaving = now >= until
        if is_leaving:
            self._may_have_more -= self._slots.slow
        self._claim(now, *self._rooms(now, is_leaving))
        lost = 0.0 if self._sending.fresh else self._clock() - began
        self._full_wait = max(FULL_CLAIM_SECONDS, min(FULL_CLAIM_LONGEST, lost * FULL_CLAIM_PARTS))

    def _to_prefetch_in_turn(self, now: float) -> int:
        """How many messages are to be prefetched of whoever's turn it is, where many endpoints answer."""
        if not self.is_under_load:
            return 0
        allowed, prefetched = self.rates.allowed_in_turn(now), self._prefetched_for_quick()
        return 0 if 2 * prefetched >= allowed else allowed - prefetched

    def _prefetched_for_quick(self) -> int:
        """How many messages are prefetched, without those that wait for a slot of slow receivers."""
        prefetched = self._sending.prefetched
        waiting = prefetched.endpoint_ids() & self._slots.slow if self._slots.slow else ()
        return len(prefetched) - sum(map(prefetched.count, waiting))

    def _rooms(self, now: float, is_leaving: bool) -> tuple[dict[int, int], int, int]:
        """How many messages may be claimed for slots: of some endpoints, of any other, and of all together."""
        in_turn = self._to_prefetch_in_turn(now)
        rooms, room = self._slots.rooms(), max(self._slots.room(), -(-in_turn // self._most_endpoints))
        # Where many answer, requests of whoever's turn it is are prefetched, and slots beyond the window don't wait for
        # more. Claims for those would be small, and could come faster than requests are sent.
        is_in_turn = self.rates.allowed_in_turn(now) > 0 and self._prefetched_for_quick() > 0
        limit = in_turn + (self._slots.free_in_window if is_in_turn else self._slots.free)
        for endpoint_id, batch_size in self._endpoints.batch_sizes.items():
            rooms[endpoint_id] = rooms.get(endpoint_id, room) * batch_size
            limit = self._options.batch_size
        rooms.update(dict.fromkeys((*self._settling.deferred, *self._sending.prefetched.endpoint_ids()), 0))
        if is_leaving:
            rooms.update(dict.fromkeys(self._slots.slow, 0))
        return rooms, room, limit

    def _claim(
        self, now: float, rooms: dict[int, int], room: int, limit: int, endpoint_ids: Sequence[int] | None = None
    ) -> None:
        """One claim of at most so many messages: of some endpoints, of any other, and of all together."""
        limit = min(limit, self._options.batch_size, self._leases.room())
        if limit <= 0 and self._leases:
            return
        try:
            claimed, left_out_others = self._database.claim(
                max(1, limit), self._options.lease, rooms, room, endpoint_ids, self._most_endpoints
            )
        except Busy:
            self._pace.claimed(now, None, False)
            return
        count, newest = self._leases.receive(claimed)
        # After a claim in vain the next part of its round follows at once if a sender began it. One that only looks
        # for retries waits, since it may have to visit thousands of endpoints each time.
        is_round = bool(claimed) or self._pace.may_have_more or self._pace.is_expecting(now)
        self._pace.claimed(now, newest or None, count >= limit or (left_out_others and is_round))
        if endpoint_ids is None:
            if left_out_others and count < limit:
                self._most_endpoints = min(2 * self._most_endpoints, CLAIM_ENDPOINTS_MOST)
            else:
                self._most_endpoints = max(self._most_endpoints // 2, CLAIM_ENDPOINTS)
        # An endpoint without room wasn't asked; a claim that reached its limit may have left out any of them. A full
        # claim may have ended among thousands of others that had nothing: who can be asked directly is asked so.
        if not self._pace.may_have_more:
            asked_next = self.rates.allowed(now) if endpoint_ids is None else {}
            self._may_have_more = {
                each for each in self._may_have_more if not rooms.get(each, room) or each in asked_next
            }
        self._may_have_more |= {each.endpoint_id for each in claimed if each.may_have_more}
        self._prepare(claimed)

    def _prepare(self, claimed: Sequence[Claimed]) -> None:
        """Sorts what was claimed into requests, reading the configs that are new."""
        try:
            self._endpoints.load(claimed)
        except Busy:
            self._give_back([message for each in claimed for message in each.messages], SETTLE_RETRY_SECONDS)
            return
        for endpoint_id, _, messages, _ in claimed:
            known = self._endpoints.get(endpoint_id)
            if known is not None:
                self._sending.fresh.add(known, self._dispatcher.group(known, messages))
            else:
                self._fail(endpoint_id, messages)

    def _fail(self, endpoint_id: int, messages: Iterable[Message]) -> None:
        outcome = Outcome(f"{RETRYABLE} {self._endpoints.problems[endpoint_id]}")
        failed = [Settled(endpoint_id, [message], outcome) for message in messages]
        self._settling.add(failed, self._clock())
        self._counters.add(endpoint_id, len(failed), outcome.error, 0)
