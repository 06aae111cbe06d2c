"""One transaction of a worker: what has come back is stored, and what to send next is claimed.

Nothing is sent before it is committed.
"""

from __future__ import annotations

from ulak.worker import modes
from ulak.worker.modes import Claim, Prospect
from ulak.worker.parts import Parts
from ulak.worker.tuning import (
    CHECK_SECONDS,
    LIGHT_CLAIM,
    SETTLE_COUNT_PREFETCHED,
    SETTLE_SECONDS,
    SETTLE_SECONDS_LIGHT,
    SETTLE_SECONDS_PREFETCHED,
    SETTLE_SECONDS_UNDER_LOAD,
)


class Transaction:
    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._database = parts.database
        self._options = parts.options
        self._dispatcher = parts.dispatcher
        self._clock = parts.clock
        self._leases = parts.leases
        self._pace = parts.pace
        self._listening = parts.listening
        self._slots = parts.slots
        self._settling = parts.settling
        self._sending = parts.sending
        self._claiming = parts.claiming
        self._timers = parts.timers
        self._ending = parts.ending
        # While polling, a look found a new id, or that it is time for a claim.
        self.wants_claim = False

    def run(self, now: float) -> None:
        stores = bool(self._settling.done) and self._is_time_to_settle(now)
        unblocks_others = stores and self._settling.unblocks_others
        if stores:
            self.settle(now)
        if self._settling.deferred and now >= self._settling.next_retry:
            self._settling.store_deferred(now)
        claim, seen = self._next_claim(now, stores, unblocks_others), self._pace.last_sent
        if self._look(claim, now) and not (claim is Claim.IF_PENDING and self._light_claim(now, seen)):
            self._claim(now)
        self._database.commit()
        if self._sending.fresh:
            self._sending.start_fresh(self._clock())

    def light_turn(self, now: float) -> bool:
        """After a wake-up: stores and claims by one statement, and sends, if this is the plain case that
        ulak_private.light_turn() is for. Whether it was; otherwise run() has to do it."""
        claimed = self._claiming.light_claim(now, self._pace.last_sent)
        if claimed is None:
            return False
        self._listening.answered(True)
        return self._claiming.start(claimed, now)

    def _light_claim(self, now: float, seen: int) -> bool:
        """A look has found ids behind the last one that was seen: a few new messages need no full claim."""
        if not 0 < self._listening.last_sent - seen <= LIGHT_CLAIM:
            return False
        claimed = self._claiming.light_claim(now, seen)
        if claimed is None:
            return False
        self._claiming.start(claimed, now)
        return True

    def settle(self, now: float) -> None:
        self._claiming.rates.note(self._settling.counts, now)
        if self._settling.store(now):
            self._timers.release_blocked()

    def settle_time(self, is_quiet: bool) -> float:
        since = self._settling.since
        if is_quiet:
            return since + SETTLE_SECONDS_LIGHT
        if self._sending.prefetched and not self._settling.unblocks_others:
            return since + SETTLE_SECONDS_PREFETCHED
        return since + (SETTLE_SECONDS_UNDER_LOAD if self._claiming.is_under_load else SETTLE_SECONDS)

    def _is_time_to_settle(self, now: float) -> bool:
        is_quiet = self._parts.is_quiet(now)
        is_prefetched = self._sending.prefetched and not self._settling.unblocks_others
        enough = SETTLE_COUNT_PREFETCHED if is_prefetched else self._slots.total * 3 // 4
        if now >= self.settle_time(is_quiet) or len(self._settling.done) >= enough:
            return True
        return not self._dispatcher.in_flight and not is_quiet

    def _next_claim(self, now: float, stores_outcomes: bool, unblocks_others: bool) -> Claim:
        listening = self._listening
        prospect = Prospect(
            can_claim=self._parts.can_claim(now),
            stores_outcomes=stores_outcomes,
            unblocks_others=unblocks_others,
            has_outcomes=bool(self._settling.done),
            is_due=now >= self._claiming.last_claim + self._options.poll_interval_busy,
            wants_claim=self.wants_claim,
            is_listening_worth_it=listening.is_worth_it(now),
            needs_look=not (listening.is_on and listening.is_armed and now < self._claiming.next_look),
        )
        return modes.next_claim(self._parts.situation(now), prospect, now)

    def _look(self, claim: Claim, now: float) -> bool:
        """Whether to claim. Where that depends on what there is to claim, the database is asked, and the worker begins
        to listen or goes back to polling."""
        if claim is Claim.IF_PENDING:
            return self._look_listening(now)
        if claim is Claim.IF_SENT:
            return self._look_polling(now)
        return claim is Claim.NOW

    def _look_listening(self, now: float) -> bool:
        if not self._listening.is_on:
            # A stop that was notified of before it began to listen has not woken it: it asks for its orders now.
            self._timers.check_by(now)
        if self._listening.renew(now):
            return True
        self._claiming.looked(now)
        return False

    def _look_polling(self, now: float) -> bool:
        if self._listening.is_on:
            self._listening.stop()
            self._timers.check_by(now + CHECK_SECONDS)
        if self._pace.wait(now) > 0:
            return False
        return self._pace.looked(now, self._database.last_sent())

    def _claim(self, now: float) -> None:
        was_notified = self._listening.was_notified
        self.wants_claim = False
        self._claiming.claim(now, was_notified, self._ending.until)
        if self._leases and not self._listening.is_on:
            self._timers.check_by(now + CHECK_SECONDS)
        if was_notified:
            self._listening.answered(bool(self._sending.fresh))
            if not self._sending.fresh:
                # It wasn't a sender who notified: it may have been stop().
                self._timers.check_by(now)
