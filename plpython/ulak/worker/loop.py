"""The worker's loop: a steady pipeline, not batches. worker/modes.py says what it waits for and when it claims."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from ulak.messages.delivery import Settled
from ulak.worker import modes
from ulak.worker.dispatcher import Dispatcher
from ulak.worker.ending import Ending
from ulak.worker.modes import Mode
from ulak.worker.options import Options
from ulak.worker.parts import Parts
from ulak.worker.port import Busy, Database, Outcomes
from ulak.worker.transaction import Transaction
from ulak.worker.tuning import (
    CHECK_SECONDS,
    CHECK_SECONDS_IDLE,
    CHECK_SECONDS_LISTENING,
    INTERRUPT_SECONDS,
    SETTLE_SECONDS_LIGHT,
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
        self._ending = Ending(until, settings)
        self._parts = parts = Parts(database, options, dispatcher, self._ending, clock)
        self._transaction = Transaction(parts)
        self._database = database
        self._options = options
        self._dispatcher = dispatcher
        self._clock = clock
        self._sleep = sleep
        self._leases = parts.leases
        self._counters = parts.counters
        self._pace = parts.pace
        self._listening = parts.listening
        self._slots = parts.slots
        self._settling = parts.settling
        self._sending = parts.sending
        self._claiming = parts.claiming
        self._timers = parts.timers

    def run(self) -> str:
        """Why it ended: over (its time), stop, restart (there is another build) or settings (they changed)."""
        while True:
            now = self._clock()
            mode = modes.mode(self._parts.situation(now), now)
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
            # Prefetched requests were committed with their claim, so they can start before the next transaction.
            if self._sending.prefetched:
                self._sending.start_prefetched(now)
                now = self._clock()
            if now >= self._timers.next:
                self._run_timers(now)
            self._transaction.run(now)

    def close(self, state: str = "stopped") -> None:
        """Stores the outcomes that there are, gives everything else that is held back to the queue, unspent."""
        self.store()
        self.give_back()
        # A run that ended well has nobody to suspect.
        self._timers.report(state, noted={"suspicion": 0} if state == "stopped" else {})

    def store(self) -> None:
        self._listening.stop()
        if self._settling.done:
            self._transaction.settle(self._clock())
        self._database.commit()

    def held(self) -> list[tuple[int, int]]:
        """Ids and attempts of messages without an outcome, or with one that could not be stored."""
        deferred = self._settling.deferred_ids()
        leases = zip(self._leases.ids(), self._leases.attempts(), strict=True)
        return [each for each in leases if each[0] not in deferred]

    def give_back(self) -> None:
        if held := self.held():
            self._database.release([id for id, _ in held], [attempt for _, attempt in held], 0.0)
        self._leases.clear()
        self._database.commit()

    def bury(self, error: str) -> None:
        """What is held is at fault."""
        held = self.held()
        ids, attempts = [id for id, _ in held], [attempt for _, attempt in held]
        self._database.settle(Outcomes(ids, attempts, [error] * len(held), [None] * len(held), None))
        self._leases.clear()
        self._database.commit()

    def report_end(self, error: str, noted: Mapping[str, object]) -> None:
        """The run ends with this error; noted is for ulak_private.note_broken_run()."""
        self._counters.last_error = error
        self._timers.report("stopped", noted=noted)

    # One wait for each mode.

    def _wait_for_wake_up(self, now: float) -> bool:
        """For a sender's wake-up or an answer. True: this turn needs no more, because nothing happened or a light turn
        did it all. False: timers and the transaction follow."""
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
            # In short waits, since a cancel doesn't end one: the next check_interrupts() sees it.
            listening.wait(min(end - now, CHECK_SECONDS_IDLE))
        self._collect(settled)
        if listening.was_notified:
            return self._transaction.light_turn(self._clock())
        if not settled and self._clock() - now >= INTERRUPT_SECONDS:
            self._database.check_interrupts()
        return not settled or self._parts.is_quiet(now)

    def _wait_for_answers(self, now: float) -> None:
        """For those under way, up to the moment when outcomes are to be stored or a claim is due."""
        if self._listening.is_on:
            self._timers.check_by(now + CHECK_SECONDS)
        wait = self._timers.next_check - now
        if self._settling.done:
            wait = min(wait, self._transaction.settle_time(self._parts.is_quiet(now)) - now)
        elif self._parts.can_claim(now):
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
            self._transaction.wants_claim = pace.looked(now, last_sent)
            database.commit()
            if self._transaction.wants_claim:
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
        if not self._dispatcher.in_flight:
            self._dispatcher.tend()
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
