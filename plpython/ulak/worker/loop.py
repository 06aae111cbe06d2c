"""The worker's loop: wait, collect, turn, start. A steady pipeline, not batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from ulak.messages.delivery import Settled
from ulak.worker import waits
from ulak.worker.counters import Counters
from ulak.worker.dispatcher import Dispatcher
from ulak.worker.held import Held
from ulak.worker.options import Options
from ulak.worker.outcomes import Settling, columns
from ulak.worker.port import Busy, Database, Outcomes, Refused
from ulak.worker.senders import Senders
from ulak.worker.timers import Ending, Timers
from ulak.worker.tuning import CHECK_SECONDS, CHECK_SECONDS_LISTENING
from ulak.worker.turns import Turns
from ulak.worker.waits import Situation, Wait


class Worker:
    def __init__(
        self,
        database: Database,
        options: Options,
        settings: str,
        until: float,
        dispatcher: Dispatcher,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`settings` is what the options were made from; `until` is by the clock."""
        now = clock()
        self._database = database
        self._dispatcher = dispatcher
        self._clock = clock
        self._ending = Ending(until, settings)
        self._counters = Counters()
        self._held = Held(options.slots, options.most_held)
        self._settling = Settling(database, self._held, self._counters, now)
        self._senders = Senders(database, options, now)
        self._timers = Timers(database, options.lease, self._held, self._settling, self._counters, self._ending, now)
        self._turns = Turns(
            database,
            options,
            dispatcher,
            self._held,
            self._settling,
            self._senders,
            self._timers,
            self._ending,
            self._counters,
            clock,
        )

    def run(self) -> str:
        """Why it ended: over (its time), stop, restart (there is another build) or settings (they changed)."""
        # Even if turns take long, answers are collected between two of them.
        has_collected = True
        while True:
            now = self._clock()
            if now >= self._timers.next:
                self._run_timers(now)
            situation = self._situation(now)
            wait = waits.wait(situation, now)
            next_turn = waits.next_turn(situation, now)
            if wait is Wait.NOTHING:
                return self._ending.leave or "over"
            if now >= next_turn and has_collected:
                self._turns.run(now, waits.is_settling(situation, now))
                has_collected = not self._held
            else:
                seconds = max(0.0, min(next_turn, self._timers.next) - now)
                if wait is Wait.ANSWERS:
                    self._collect(self._dispatcher.step(seconds))
                else:
                    self._senders.await_send(now, seconds)
                has_collected = True
            self._start()

    def _situation(self, now: float) -> Situation:
        held, settling, senders, turns = self._held, self._settling, self._senders, self._turns
        can_claim = turns.can_claim(now)
        is_over = now >= self._ending.until
        # A worker that holds nothing waits for senders by looking at the sequence.
        next_look = senders.next_look(turns.last, now) if held or senders.is_listening else senders.look_at
        # By position, which takes half the time.
        return Situation(
            self._ending.until,
            self._ending.last_moment(held.last_end()) if is_over else 0.0,
            bool(held),
            self._dispatcher.in_flight > 0,
            senders.is_listening,
            turns.last,
            turns.interval,
            settling.count,
            settling.since,
            settling.is_awaited,
            settling.has_failed,
            can_claim,
            can_claim and turns.has_more(),
            senders.was_notified,
            next_look,
        )

    def _collect(self, settled: Sequence[Settled]) -> None:
        if self._dispatcher.was_woken:
            self._senders.note_wake_up()
        if not settled:
            self._database.check_interrupts()
        now = self._clock()
        for each in settled:
            to, seconds = self._held.end(each, now)
            self._settling.add(each, to, now)
            self._counters.note(each, seconds)

    def _start(self) -> None:
        """Claims have been committed by now, so their messages can be sent."""
        for to, messages in self._held.start(self._clock()):
            self._dispatcher.start(to, messages)

    def _run_timers(self, now: float) -> None:
        self._timers.run(now, CHECK_SECONDS_LISTENING if self._senders.is_listening else CHECK_SECONDS)
        if now >= self._ending.until:
            self._senders.stop_listening()
        elif (descriptor := self._senders.follow(self._timers.is_poller)) is not None:
            self._dispatcher.wait_also_for(descriptor)

    # The end of a run.

    def close(self, state: str = "stopped") -> None:
        """Stores all outcomes, and gives the other messages back to the queue without using up a retry."""
        self.store()
        self.give_back()
        # After a run that ended well, no message is suspected.
        self._timers.report(state, noted={"suspicion": 0} if state == "stopped" else {})

    def store(self) -> None:
        self._senders.stop_listening()
        while part := self._settling.part():
            try:
                self._database.settle(columns(part))
                self._settling.stored(part)
            except (Busy, Refused):
                self._settling.store_apart(self._clock())

    def held(self) -> list[tuple[int, int]]:
        """Ids and attempts of messages without an outcome, or with one that could not be stored."""
        deferred = self._settling.deferred_ids()
        return [each for each in zip(*self._held.leases(), strict=True) if each[0] not in deferred]

    def give_back(self) -> None:
        if held := self.held():
            self._database.release([id for id, _ in held], [attempt for _, attempt in held], 0.0)
        self._held.clear()

    def bury(self, error: str) -> None:
        """Fails the held messages with this error, because they broke the worker."""
        held = self.held()
        ids, attempts = [id for id, _ in held], [attempt for _, attempt in held]
        self._database.settle(Outcomes(ids, attempts, [error] * len(held), [None] * len(held)))
        self._held.clear()

    def report_end(self, error: str, noted: Mapping[str, object]) -> None:
        """Reports that the run ends with this error; noted is for ulak_private.note_broken_run()."""
        self._counters.last_error = error
        self._timers.report("stopped", noted=noted)
