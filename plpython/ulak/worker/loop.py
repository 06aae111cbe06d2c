"""The worker's loop: a steady pipeline, not batches. worker/modes.py says what it waits for and when it claims."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from ulak.delivery import Settled
from ulak.worker import modes
from ulak.worker.claiming import Claiming
from ulak.worker.counters import Counters
from ulak.worker.dispatcher import Dispatcher
from ulak.worker.ending import Ending
from ulak.worker.leases import Leases
from ulak.worker.listening import Listening
from ulak.worker.modes import Claim, Mode, Prospect, Situation
from ulak.worker.options import Options
from ulak.worker.outcomes import Settling
from ulak.worker.polling import Pace
from ulak.worker.port import Busy, Database
from ulak.worker.request_slots import RequestSlots
from ulak.worker.sending import Sending
from ulak.worker.timers import Timers
from ulak.worker.tuning import (
    CHECK_SECONDS,
    CHECK_SECONDS_IDLE,
    CHECK_SECONDS_LISTENING,
    INTERRUPT_SECONDS,
    SETTLE_COUNT_PREFETCHED,
    SETTLE_SECONDS,
    SETTLE_SECONDS_LIGHT,
    SETTLE_SECONDS_PREFETCHED,
    SETTLE_SECONDS_UNDER_LOAD,
    WINDOW_SECONDS,
)


class Worker:
    def __init__(
        self,
        database: Database,
        options: Options,
        settings: str,
        until: float,
        dispatcher: Dispatcher,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`settings` is what the options were made from; `until` is by the clock."""
        now = clock()
        self._database = database
        self._options = options
        self._dispatcher = dispatcher
        self._clock = clock
        self._sleep = sleep
        self._ending = Ending(until, settings)
        self._leases = Leases()
        self._counters = Counters()
        self._pace = Pace(options.poll_interval_busy, options.poll_interval, now)
        self._pace.is_poller = False
        self._listening = Listening(database, self._pace)
        self._slots = RequestSlots(options.slots)
        self._settling = Settling(database, self._leases, self._counters, now)
        self._sending = Sending(dispatcher, self._slots, self._settling, self._counters)
        self._claiming = Claiming(
            database,
            options,
            dispatcher,
            self._sending,
            self._settling,
            self._leases,
            self._counters,
            self._pace,
            clock,
        )
        self._timers = Timers(
            database,
            options.lease,
            self._leases,
            self._sending,
            self._claiming,
            self._counters,
            self._ending,
            now,
        )
        # A look has found that somebody has sent.
        self._saw_new_id = False

    def run(self) -> str:
        """Why it ended: over (its time), stop, restart (there is another build) or settings (they changed)."""
        while True:
            now = self._clock()
            mode = modes.mode(self._situation(now), now)
            if mode is Mode.OVER:
                return self._ending.why
            if mode is Mode.LISTENING:
                if self._wait_for_wake_up(now):
                    continue
            elif mode is Mode.POLLING:
                self._wait_for_senders(now)
            else:
                if mode is Mode.LEAVING:
                    self._listening.stop()
                self._wait_for_answers(now)
            now = self._clock()
            # What is prefetched needs no transaction.
            if self._sending.prefetched:
                self._sending.start_prefetched(now)
                now = self._clock()
            if now >= self._timers.next:
                self._run_timers(now)
            self._transact(now)

    def close(self, state: str = "stopped", error: str | None = None) -> None:
        """Stores the outcomes that there are, gives everything else that is held back to the queue, unspent."""
        self._listening.stop()
        if self._settling.done:
            self._settle(self._clock())
        deferred = self._settling.deferred_ids()
        leases = zip(self._leases.ids(), self._leases.attempts(), strict=True)
        rest = [each for each in leases if each[0] not in deferred]
        if rest:
            self._database.release([id for id, _ in rest], [attempt for _, attempt in rest], 0.0)
        self._leases.clear()
        self._database.commit()
        if error is not None:
            self._counters.last_error = error
        self._timers.report(state)

    def _situation(self, now: float) -> Situation:
        ending, settling = self._ending, self._settling
        return Situation(
            until=ending.until,
            last_moment=ending.last_moment(self._sending.last_end()) if now >= ending.until else 0.0,
            holds_messages=bool(self._leases),
            has_free_slot=self._slots.free > 0,
            has_more=self._claiming.has_more(),
            has_backlog=bool(self._sending.prefetched or settling.deferred),
            has_only_deliveries=settling.only_deliveries and not settling.unblocks_others,
            is_listening=self._listening.is_on,
            was_notified=self._listening.was_notified,
        )

    # One wait for each mode.

    def _wait_for_wake_up(self, now: float) -> bool:
        """For a sender or an answer. Whether that was all: a light turn took what was sent, or nothing was."""
        listening = self._listening
        end = min(self._timers.next, self._claiming.next_look)
        if self._settling.done:
            end = min(end, self._settling.since + SETTLE_SECONDS_LIGHT)
        if now >= end or not listening.is_armed:
            return False
        settled: Sequence[Settled] = ()
        if self._dispatcher.in_flight:
            settled = self._step(end - now)
        else:
            # Not all of it: the wait isn't broken off by a cancel.
            listening.wait(min(end - now, CHECK_SECONDS_IDLE))
        self._collect(settled)
        if listening.was_notified:
            return self._light_turn(self._clock())
        if not settled and self._clock() - now >= INTERRUPT_SECONDS:
            self._database.check_interrupts()
        return not settled or modes.is_quiet(self._situation(now))

    def _wait_for_answers(self, now: float) -> None:
        """For those under way, up to the moment when outcomes are to be stored or a claim is due."""
        if self._listening.is_on:
            self._timers.check_by(now + CHECK_SECONDS)
        wait = self._timers.next_check - now
        if self._settling.done:
            wait = min(wait, self._settle_time(modes.is_quiet(self._situation(now))) - now)
        elif self._can_claim(now):
            due = self._claiming.last_claim + self._options.poll_interval_busy - now
            wait = min(wait, due if self._claiming.has_more() else self._pace.wait(now))
        is_window_full = self._sending.prefetched and self._slots.is_window_full
        before = self._slots.quick_in_flight
        if is_window_full and self._slots.window < self._slots.total:
            wait = min(wait, WINDOW_SECONDS)
        wait = max(0.0, wait)
        if self._dispatcher.in_flight:
            self._collect(self._step(wait))
        elif wait:
            self._sleep(wait)
        if is_window_full:
            self._slots.adapt_window(before)

    def _wait_for_senders(self, now: float) -> None:
        """Until somebody has sent, a claim is due, or it is time for the next check."""
        pace, database = self._pace, self._database
        # A worker that can listen does so in its next turn.
        while now < self._timers.next_check and not self._listening.is_worth_it(now):
            seconds = min(self._timers.next_check - now, pace.patience(now))
            last_sent = database.await_send(pace.last_sent, pace.interval, seconds)
            now = self._clock()
            self._saw_new_id = pace.wants_claim(now, last_sent)
            database.commit()
            pace.looked(now)
            if self._saw_new_id:
                return

    def _step(self, seconds: float) -> Sequence[Settled]:
        settled = self._dispatcher.step(seconds)
        if self._dispatcher.was_woken:
            self._listening.wait()
        return settled

    def _collect(self, settled: Sequence[Settled]) -> None:
        if settled:
            now = self._clock()
            self._sending.collect(settled, now)
            self._settling.add(settled, now)

    # Timers.

    def _run_timers(self, now: float) -> None:
        if self._listening.is_on and self._slots.free:
            check_seconds = CHECK_SECONDS_LISTENING
        else:
            check_seconds = CHECK_SECONDS if self._leases else CHECK_SECONDS_IDLE
        self._timers.run(now, check_seconds)
        if self._timers.is_poller != self._pace.is_poller:
            self._pace.is_poller = self._timers.is_poller
            if not self._pace.is_poller:
                self._listening.give_up()
            else:
                self._listen()
            self._database.commit()

    def _listen(self) -> None:
        with suppress(Busy):
            if (wake_up := self._database.listen()) is not None:
                self._listening.use(wake_up)
                self._dispatcher.wait_also_for(wake_up.fileno())

    # One transaction: what has come back, and what to send next. Nothing is sent before it is committed.

    def _transact(self, now: float) -> None:
        stores = bool(self._settling.done) and self._is_time_to_settle(now)
        unblocks_others = stores and self._settling.unblocks_others
        if stores:
            self._settle(now)
        if self._settling.deferred and now >= self._settling.next_retry:
            self._settling.store_deferred(now)
        if self._is_to_claim(self._next_claim(now, stores, unblocks_others), now):
            self._claim(now)
        self._database.commit()
        if self._sending.fresh:
            self._sending.start_fresh(self._clock())

    def _is_time_to_settle(self, now: float) -> bool:
        is_quiet = modes.is_quiet(self._situation(now))
        is_prefetched = self._sending.prefetched and not self._settling.unblocks_others
        enough = SETTLE_COUNT_PREFETCHED if is_prefetched else self._slots.total * 3 // 4
        if now >= self._settle_time(is_quiet) or len(self._settling.done) >= enough:
            return True
        return not self._dispatcher.in_flight and not is_quiet

    def _settle_time(self, is_quiet: bool) -> float:
        since = self._settling.since
        if is_quiet:
            return since + SETTLE_SECONDS_LIGHT
        if self._sending.prefetched and not self._settling.unblocks_others:
            return since + SETTLE_SECONDS_PREFETCHED
        return since + (SETTLE_SECONDS_UNDER_LOAD if self._claiming.is_under_load else SETTLE_SECONDS)

    def _settle(self, now: float) -> None:
        self._claiming.rates.note(self._settling.counts, now)
        if self._settling.store(now):
            self._timers.release_blocked()

    def _can_claim(self, now: float) -> bool:
        """New messages would keep a run from ending. What is stuck does so anyway; nobody is to wait for it."""
        is_kept = self._slots.slow_in_flight or self._settling.deferred
        if now >= self._ending.until and (self._ending.is_stop or not is_kept):
            return False
        return self._claiming.can_claim(now)

    def _next_claim(self, now: float, stores_outcomes: bool, unblocks_others: bool) -> Claim:
        listening = self._listening
        prospect = Prospect(
            can_claim=self._can_claim(now),
            stores_outcomes=stores_outcomes,
            unblocks_others=unblocks_others,
            has_outcomes=bool(self._settling.done),
            is_due=now >= self._claiming.last_claim + self._options.poll_interval_busy,
            saw_new_id=self._saw_new_id,
            is_listening_worth_it=listening.is_worth_it(now),
            needs_look=not (listening.is_on and listening.is_armed and now < self._claiming.next_look),
        )
        return modes.next_claim(self._situation(now), prospect, now)

    def _is_to_claim(self, claim: Claim, now: float) -> bool:
        """Looks, where it depends on that."""
        if claim is Claim.IF_PENDING:
            return self._look_listening(now)
        if claim is Claim.IF_SENT:
            return self._look_polling(now)
        return claim is Claim.NOW

    def _look_listening(self, now: float) -> bool:
        if not self._listening.is_on:
            # What was said until now didn't wake it.
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
        is_due = self._pace.wants_claim(now, self._database.last_sent())
        self._pace.looked(now)
        return is_due

    def _claim(self, now: float) -> None:
        was_notified = self._listening.was_notified
        self._saw_new_id = False
        self._claiming.claim(now, was_notified, self._ending.until)
        if self._leases and not self._listening.is_on:
            self._timers.check_by(now + CHECK_SECONDS)
        if was_notified:
            self._listening.answered(bool(self._sending.fresh))
            if not self._sending.fresh:
                # Then it wasn't a sender who notified.
                self._timers.check_by(now)

    def _light_turn(self, now: float) -> bool:
        """Somebody has notified: stores, claims and sends at once what needs no more thought. Whether that was all."""
        claimed = self._claiming.light_claim(now)
        if claimed is None:
            return False
        self._listening.answered(True)
        return self._claiming.start(claimed, now)
