"""The worker's loop: wait, collect, turn, start. A steady pipeline, not batches."""

from __future__ import annotations

from collections.abc import Mapping

from ulak.messages.delivery import Leases
from ulak.worker import waits
from ulak.worker.port import Outcomes
from ulak.worker.state import State
from ulak.worker.timers import Timers
from ulak.worker.tuning import CHECK_SECONDS
from ulak.worker.turns import Turns
from ulak.worker.waits import Situation


class Worker:
    def __init__(self, state: State) -> None:
        self._state = state
        self._timers = Timers(state)
        self._turns = Turns(state)

    def run(self) -> str:
        """Why it ended: over (its time), stop, restart (there is another build) or settings (they changed)."""
        state, timers, turns = self._state, self._timers, self._turns
        now = state.clock()
        timers.run(now)
        due = waits.next_turn(self._situation(now))
        while not state.has_ended(now):
            # Even if turns take long, answers are collected between two of them.
            self._collect(max(0.0, min(due - now, timers.next - now, CHECK_SECONDS)))
            self._start()
            now = state.clock()
            if now >= timers.next:
                timers.run(now)
            situation = self._situation(now)
            due = waits.next_turn(situation)
            if now >= due:
                turns.run(now, now >= waits.outcomes_due_at(situation))
                # The claim has been committed by now, so its messages can be sent.
                self._start()
                now = state.clock()
                due = waits.next_turn(self._situation(now))
        return state.leave or "over"

    def _situation(self, now: float) -> Situation:
        state, turns, settling = self._state, self._turns, self._state.settling
        # By position, which takes half the time.
        return Situation(
            *turns.when(now),
            state.dispatcher.in_flight > 0,
            turns.has_found_nothing,
            now >= state.until,
            settling.count,
            settling.since,
            settling.is_awaited,
            settling.has_failed,
        )

    def _collect(self, seconds: float) -> None:
        """Waits at most this long for answers, or for a sender."""
        state = self._state
        settled = state.dispatcher.step(seconds)
        if state.dispatcher.was_woken:
            state.senders.note_wake_up()
        elif not settled:
            state.database.check_interrupts()
        now = state.clock()
        for each in settled:
            state.held.end(each.endpoint_id, each.seconds)
            state.settling.add(each, state.endpoints.known.get(each.endpoint_id), now)
            state.counters.note(each)

    def _start(self) -> None:
        for to, messages in self._state.held.start():
            self._state.dispatcher.start(to, messages)

    # The end of a run.

    def close(self, state: str = "stopped") -> None:
        """Stores all outcomes, and gives the other messages back to the queue without using up a retry."""
        self.store()
        self.give_back()
        # After a run that ended well, no message is suspected.
        self._timers.report(state, noted={"suspicion": 0} if state == "stopped" else None)

    def store(self) -> None:
        self._state.senders.stop_listening()
        self._state.settling.store_apart(is_patient=True)

    def unsettled(self) -> Leases:
        """Messages that are held and have no outcome. An outcome that couldn't be stored counts as one."""
        deferred = self._state.settling.deferred.values()
        ids = {message.id for done in deferred for each in done for message in each.messages}
        return {id: attempt for id, attempt in self._state.held.leases.items() if id not in ids}

    def give_back(self) -> None:
        if unsettled := self.unsettled():
            self._state.database.release(unsettled, 0.0)
        self._state.held.leases.clear()

    def bury(self, error: str) -> None:
        """Fails these messages with this error, because they broke the worker."""
        unsettled = self.unsettled()
        errors = [error] * len(unsettled)
        self._state.database.settle(Outcomes(list(unsettled), list(unsettled.values()), errors, [None] * len(errors)))
        self._state.held.leases.clear()

    def report_end(self, error: str, noted: Mapping[str, object]) -> None:
        """Reports that the run ends with this error; noted is for ulak_private.note_broken_run()."""
        self._state.counters.last_error = error
        self._timers.report("stopped", noted=noted)
