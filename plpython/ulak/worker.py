"""The worker: claims, delivers, settles and commits until its time is over; a steady pipeline, not batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

from ulak import batch, endpoint, verdict
from ulak.courier import Courier, Settled
from ulak.holding import Held
from ulak.line import Line, Rates
from ulak.listener import Listener
from ulak.model import Endpoint, Message, OAuth2, Outcome
from ulak.options import Options
from ulak.pace import Pace
from ulak.port import Busy, Claimed, Database
from ulak.settling import RETRY_SECONDS, Settling
from ulak.slots import SLOW_SECONDS, Slots
from ulak.tally import Tally

# Outcomes are settled in groups: three quarters of the slots, or what has come within this time. While others wait in
# line, a group can be larger without holding anything up.
SETTLE_SECONDS = 0.002
SETTLE_SECONDS_UNDER_LOAD = 0.005
SETTLE_SECONDS_IN_LINE = 0.02
SETTLE_COUNT_IN_LINE = 256
# Of so many endpoints one claim takes messages at most; then it is the turn of the next.
CLAIM_ENDPOINTS = 32
# What is claimed at once in light traffic, and how far ids of what is delivered may lie behind.
FEW = 16
# In light traffic a delivery is stored with the next claim, if that isn't too far off.
SETTLE_SECONDS_LIGHT = 0.05
# Who is in line doesn't wait longer for answers that would make room, while there are slots.
WAVE_SECONDS = 0.001
# How often endpoints that have nobody in line are looked after while others have. If that takes long and finds nothing,
# because vacuum is held back, it comes less often: one part of the time may be lost with it.
ASIDE_SECONDS = 0.02
LONGEST_ASIDE = 1.0
ASIDE_PARTS = 20
# While the worker listens for the bell, retries and whatever else doesn't ring are looked for so often.
WHOLE_SECONDS = 0.2
WHOLE_SECONDS_AFTER_ONE = 0.05
# A stop or a cancel is to be noticed within 200 ms. While nothing is held, cancels are noticed without this. Who
# listens hears of a stop, and only makes sure.
CHECK_SECONDS = 0.1
CHECK_SECONDS_IDLE = 0.15
CHECK_SECONDS_LISTENING = 1.0
# After a wait of this length, who listens looks whether it was cancelled; not sooner, since answers are under way then.
HEED_SECONDS = 0.05
REPORT_SECONDS = 1.0
SWEEP_SECONDS = 10.0
# How long a run may outlast its end because of what it holds. A request under way has its own time.
GRACE_SECONDS = 30.0
STOP_SECONDS = 2.0
# What was claimed when the circuit changed is given back for this long.
RELEASE_SECONDS = {"open": 10.0, "half_open": 5.0, "disabled": 10.0}


class _Sent(NamedTuple):
    """A request under way."""

    to: Endpoint
    start: float

    @property
    def end(self) -> float:
        """When libcurl will have given up at the latest. A token may have to be fetched, refused and fetched again."""
        return self.start + self.to.profile.timeout * (4 if isinstance(self.to.auth, OAuth2) else 1) + 1


class Worker:
    def __init__(
        self,
        database: Database,
        options: Options,
        settings: str,
        until: float,
        courier: Courier,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`settings` is what the options were made from; `until` is by the clock."""
        self._database = database
        self._options = options
        self._settings = settings
        self._clock = clock
        self._sleep = sleep
        self._slots = Slots(options.slots)
        self._courier = courier
        now = clock()
        self._pace = Pace(options.poll_interval_busy, options.poll_interval, now)
        self._pace.is_poller = False
        self._listener = Listener(database, self._pace)
        self._tally = Tally()
        self._endpoints: dict[int, Endpoint] = {}
        # Why an endpoint that was claimed for can't be sent to.
        self._problems: dict[int, str] = {}
        # A look has found that somebody has sent.
        self._is_expecting = False
        self._held = Held()
        # By id and attempt of the first message. The id alone won't do: a message whose lease was lost may come again.
        self._under_way: dict[tuple[int, int], _Sent] = {}
        # Endpoints that got as much as they may in their last claim: they may well have more.
        self._filled: set[int] = set()
        # What the last claim got, and what it got for later.
        self._fresh = Line()
        self._line = Line()
        self._rates = Rates()
        self._settling = Settling(database, self._held, self._tally, now)
        self._until = until
        self._leave: str | None = None
        self._last_claim = now
        # The last claim that saw all endpoints.
        self._last_whole = now
        self._whole_wait = WHOLE_SECONDS
        self._aside_wait = ASIDE_SECONDS
        self._next_check = now
        self._next_report = now
        self._next_sweep = now
        self._next_renewal = now + options.lease / 3
        # The first of them.
        self._next_house = now

    def run(self) -> str:
        """Why it ended: over (its time), stop, restart (there is another build) or settings (they changed)."""
        while not self._is_over(now := self._clock()):
            if now >= self._until:
                self._listener.stop()
            if self._waits_for_ring() and self._slots.free:
                self._attend()
            elif self._held or self._has_more():
                self._gather()
            else:
                self._watch()
            # What waits in line needs no transaction.
            if self._line:
                self._begin(self._line, self._slots.open_in_line)
            now = self._clock()
            if now >= self._next_house:
                self._keep_house(now)
            self._turn(now)
        return self._leave or "over"

    def close(self, state: str = "stopped", error: str | None = None) -> None:
        """Stores the outcomes that there are, gives everything else that is held back to the queue, unspent."""
        self._listener.stop()
        if self._settling.done:
            self._settle(self._clock())
        deferred = self._settling.deferred_ids()
        rest = [each for each in zip(self._held.ids(), self._held.attempts(), strict=True) if each[0] not in deferred]
        if rest:
            self._database.release([id for id, _ in rest], [attempt for _, attempt in rest], 0.0)
        self._held.clear()
        self._database.commit()
        if error is not None:
            self._tally.last_error = error
        self._report(state)

    def _is_over(self, now: float) -> bool:
        if now < self._until:
            return False
        if not self._held:
            return True
        if self._leave == "stop":
            return now >= self._until + STOP_SECONDS
        return now >= max([self._until + GRACE_SECONDS, *(sent.end for sent in self._under_way.values())])

    def _is_closing(self, now: float) -> bool:
        """Whether new messages would keep a run from ending. What is stuck does so anyway; nobody is to wait for it."""
        return now >= self._until and (
            self._leave == "stop" or not (self._slots.slow_in_flight or self._settling.deferred)
        )

    # Waiting for messages, for answers, or for time to pass.

    def _attend(self) -> None:
        """Light traffic: waits for the bell and for answers, and does what is plain, until there is something else."""
        listener, courier = self._listener, self._courier
        while listener.is_set and self._waits_for_ring():
            now = self._clock()
            end = min(self._next_house, self._last_whole + self._whole_wait)
            if self._settling.done:
                end = min(end, self._settling.since + SETTLE_SECONDS_LIGHT)
            if now >= end:
                return
            settled: Sequence[Settled] = ()
            if courier.in_flight:
                settled = courier.step(end - now)
                if courier.was_woken:
                    listener.hear()
            else:
                # Not all of it: the wait isn't broken off by a cancel.
                listener.hear(min(end - now, CHECK_SECONDS_IDLE))
            self._collect(settled)
            if listener.has_rung:
                if not self._light_turn(self._clock()):
                    return
            elif not settled and self._clock() - now >= HEED_SECONDS:
                self._database.heed()

    def _gather(self) -> None:
        now = self._clock()
        if self._listener.is_listening:
            self._check_by(now + CHECK_SECONDS)
        wait = self._next_check - now
        if self._settling.done:
            wait = min(wait, self._settle_time() - now)
        elif self._can_claim(now):
            soon = self._last_claim + self._options.poll_interval_busy - now
            wait = min(wait, soon if self._has_more() else self._pace.wait(now))
        is_wave_full = self._line and self._slots.is_wave_full
        before = self._slots.quick_in_flight
        if is_wave_full and self._slots.wave < self._slots.total:
            wait = min(wait, WAVE_SECONDS)
        wait = max(0.0, wait)
        settled: Sequence[Settled] = ()
        if self._courier.in_flight:
            settled = self._courier.step(wait)
            if self._courier.was_woken:
                self._listener.hear()
        elif wait:
            self._sleep(wait)
        self._collect(settled)
        if is_wave_full:
            self._slots.waited(before)

    def _watch(self) -> None:
        """Nothing is held: waits until somebody has sent, a claim is due, or it is time for the next check."""
        pace, database = self._pace, self._database
        now = self._clock()
        # A worker that can listen for the bell does so in its next turn.
        while now < self._next_check and not self._listener.can_listen(now):
            seconds = min(self._next_check - now, pace.patience(now))
            last_sent = database.await_send(pace.last_sent, pace.interval, seconds)
            now = self._clock()
            self._is_expecting = pace.wants_claim(now, last_sent)
            database.commit()
            pace.looked(now)
            if self._is_expecting:
                return

    def _collect(self, settled: Sequence[Settled]) -> None:
        if not settled:
            return
        now = self._clock()
        for endpoint_id, messages, outcome in settled:
            first = messages[0]
            to, start = self._under_way.pop((first.id, first.attempt))
            seconds = now - start
            self._slots.give_back(endpoint_id, seconds)
            if outcome.failures is None:
                self._tally.add(endpoint_id, len(messages), outcome.error, seconds)
            else:
                failed = list(outcome.failures.values())
                self._tally.add(endpoint_id, len(messages) - len(failed), None, seconds)
                self._tally.add(endpoint_id, len(failed), failed[-1].error, seconds)
            if to.max_in_flight is not None:
                self._settling.opens = True
        self._settling.add(settled, now)

    def _settle_time(self) -> float:
        since = self._settling.since
        if self._waits_for_ring():
            return since + SETTLE_SECONDS_LIGHT
        if self._line and not self._settling.opens:
            return since + SETTLE_SECONDS_IN_LINE
        return since + (SETTLE_SECONDS_UNDER_LOAD if self._pace.more or self._filled else SETTLE_SECONDS)

    def _waits_for_ring(self) -> bool:
        """In light traffic, with nothing else to do."""
        if not self._listener.is_listening or self._listener.has_rung:
            return False
        if self._line or self._settling.deferred or self._has_more():
            return False
        return self._settling.is_plain and not self._settling.opens

    def _settle_count(self) -> int:
        return SETTLE_COUNT_IN_LINE if self._line and not self._settling.opens else self._slots.total * 3 // 4

    # One transaction: what has come back, and what to send next. Nothing is sent before it is committed.

    def _turn(self, now: float) -> None:
        settles = bool(self._settling.done) and self._settles(now)
        opens = settles and self._settling.opens
        if settles:
            self._settle(now)
        if self._settling.deferred and now >= self._settling.next_retry:
            self._settling.store_deferred(now)
        if self._may_claim(now, settles, opens):
            self._claim(now)
        self._database.commit()
        if self._fresh:
            self._begin(self._fresh, self._slots.open_to)
            self._line.append(self._fresh)

    def _settles(self, now: float) -> bool:
        if now >= self._settle_time() or len(self._settling.done) >= self._settle_count():
            return True
        return not self._courier.in_flight and not self._waits_for_ring()

    def _light_turn(self, now: float) -> bool:
        """Somebody has rung: stores, claims and sends at once what is plain. Whether that was all."""
        settling = self._settling
        count = min(FEW, self._slots.room_of_any(), self._held.room())
        if count <= 0 or self._line or settling.opens or not settling.is_plain:
            return False
        after = self._pace.last_sent
        delivered = [each for done in settling.done for each in done.messages if each.id > after - FEW]
        try:
            claimed, settled = self._database.light_turn(after, count, self._options.lease, delivered)
        except Busy:
            return False
        if settled:
            settling.leave_out(settled)
        if not claimed:
            return False
        self._last_claim = now
        found, newest = self._held.receive(claimed)
        self._pace.claimed_new(now, newest, found >= count)
        self._listener.answered(True)
        for each in claimed:
            if not self._knows(each):
                self._prepare(claimed)
                return False
        self._database.commit()
        for endpoint_id, _, messages, _ in claimed:
            for message in messages:
                self._start(self._endpoints[endpoint_id], [message], now)
        return True

    def _can_claim(self, now: float) -> bool:
        if self._is_closing(now):
            return False
        if self._ahead(now):
            return True
        return self._slots.free > 0 and (not self._line or now >= self._last_whole + self._aside_wait)

    def _ahead(self, now: float) -> dict[int, int]:
        """How many messages of which endpoint are to be claimed for the line: of those that seem to have more. Not a
        few: a claim has its price, however many it gets."""
        needed: dict[int, int] = {}
        if not self._pace.more and not self._filled:
            return needed
        for endpoint_id, allowed in self._rates.ahead(now).items():
            in_line = self._line.count(endpoint_id)
            if 2 * in_line >= allowed or endpoint_id in self._slots.slow or endpoint_id in self._settling.deferred:
                continue
            if self._pace.more or endpoint_id in self._filled:
                needed[endpoint_id] = allowed - in_line
        return needed

    def _has_more(self) -> bool:
        """Whether a claim would find something and have a place for it, in a slot or in line behind others."""
        if self._pace.more or not self._filled:
            return self._pace.more
        filled = self._filled - self._settling.deferred.keys()
        return any(self._slots.room_of(each) or self._line.count(each) for each in filled)

    def _may_claim(self, now: float, settles: bool, opens: bool) -> bool:
        if not self._can_claim(now):
            return False
        if opens:
            return True
        if self._has_more():
            # With what is settled; by itself only if nothing is about to be.
            return settles or (not self._settling.done and now >= self._last_claim + self._options.poll_interval_busy)
        if self._is_expecting or self._listener.has_rung:
            self._is_expecting = False
            return True
        if self._listener.can_listen(now) and not self._line and not self._settling.deferred and now < self._until:
            if not self._listener.is_listening:
                # What was said until now wasn't heard.
                self._check_by(now)
            return self._looks(now)
        if self._listener.is_listening:
            self._listener.stop()
            self._check_by(now + CHECK_SECONDS)
        if self._pace.wait(now) > 0:
            return False
        wants = self._pace.wants_claim(now, self._database.last_sent())
        self._pace.looked(now)
        return wants

    def _looks(self, now: float) -> bool:
        """While it listens: whether there is something that nobody rang for."""
        listener = self._listener
        if listener.is_listening and listener.is_set and now < self._last_whole + self._whole_wait:
            return False
        if listener.look(now):
            return True
        self._last_whole = now
        self._whole_wait = min(WHOLE_SECONDS, 2 * self._whole_wait)
        return False

    def _claim(self, now: float) -> None:
        """For the slots that are free, of all endpoints; then for the line, of those that are known to be fast."""
        self._last_claim = now
        has_rung = self._listener.has_rung
        if not self._ahead(now) or has_rung or (self._slots.free and now >= self._last_whole + self._aside_wait):
            self._last_whole = now
            began = self._clock()
            self._take(now, *self._rooms(now))
            lost = 0.0 if self._fresh else self._clock() - began
            self._aside_wait = max(ASIDE_SECONDS, min(LONGEST_ASIDE, lost * ASIDE_PARTS))
        ahead = self._ahead(now)
        if ahead:
            self._take(now, ahead, 0, sum(ahead.values()), list(ahead))
        # What is limited by time has more in a moment.
        self._whole_wait = WHOLE_SECONDS_AFTER_ONE if self._fresh else min(WHOLE_SECONDS, 2 * self._whole_wait)
        if has_rung:
            self._listener.answered(bool(self._fresh))
            if not self._fresh:
                # Then it wasn't a sender who rang.
                self._check_by(now)

    def _take(
        self, now: float, rooms: dict[int, int], room: int, limit: int, endpoint_ids: Sequence[int] | None = None
    ) -> None:
        """One claim of at most so many messages: of some endpoints, of any other, and of all together."""
        limit = min(limit, self._options.batch_size, self._held.room())
        if limit <= 0 and self._held:
            return
        try:
            claimed = self._database.claim(max(1, limit), self._options.lease, rooms, room, endpoint_ids)
        except Busy:
            self._pace.claimed(now, None, False)
            return
        count, newest = self._held.receive(claimed)
        if count and not self._listener.is_listening:
            self._check_by(now + CHECK_SECONDS)
        self._pace.claimed(now, newest or None, count >= limit or len(claimed) >= CLAIM_ENDPOINTS)
        self._note_filled(claimed, rooms, room)
        self._prepare(claimed)

    def _rooms(self, now: float) -> tuple[dict[int, int], int, int]:
        """How many messages may be claimed for slots: of some endpoints, of any other, and of all together."""
        rooms, room = self._slots.rooms(), self._slots.room()
        limit = self._slots.free
        for known in self._endpoints.values():
            if known.batch_size > 1:
                rooms[known.id] = rooms.get(known.id, room) * known.batch_size
                limit = self._options.batch_size
        rooms.update(dict.fromkeys((*self._settling.deferred, *self._line.endpoint_ids()), 0))
        if now >= self._until:
            rooms.update(dict.fromkeys(self._slots.slow, 0))
            self._filled -= self._slots.slow
        return rooms, room, limit

    def _note_filled(self, claimed: Iterable[Claimed], rooms: dict[int, int], room: int) -> None:
        """An endpoint without room wasn't asked; a claim that reached its limit may have left out any of them."""
        if not self._pace.more:
            self._filled = {each for each in self._filled if not rooms.get(each, room)}
        self._filled |= {each.endpoint_id for each in claimed if each.may_have_more}

    def _prepare(self, claimed: Sequence[Claimed]) -> None:
        """Sorts what was claimed into requests, reading the configs that are new."""
        unknown = {each.endpoint_id for each in claimed if not self._knows(each)}
        if unknown:
            try:
                self._load(unknown)
            except Busy:
                self._give_back([message for each in claimed for message in each.messages], RETRY_SECONDS)
                return
        for endpoint_id, _, messages, _ in claimed:
            known = self._endpoints.get(endpoint_id)
            if known is not None:
                self._fresh.add(known, batch.group(known, messages))
            else:
                outcome = Outcome(f"{verdict.RETRYABLE} {self._problems[endpoint_id]}")
                self._settling.add([Settled(endpoint_id, [message], outcome) for message in messages], self._clock())
                self._tally.add(endpoint_id, len(messages), outcome.error, 0)

    def _knows(self, claimed: Claimed) -> bool:
        known = self._endpoints.get(claimed.endpoint_id)
        return known is not None and known.config_version == claimed.config_version

    def _load(self, ids: set[int]) -> None:
        for endpoint_id in ids:
            self._endpoints.pop(endpoint_id, None)
            self._problems[endpoint_id] = "config: the endpoint is gone"
        for each in self._database.endpoint_configs(ids):
            try:
                self._endpoints[each.id] = endpoint.parse(
                    each.id,
                    each.name,
                    each.config_version,
                    each.config,
                    each.signing_secrets,
                    self._options.endpoint,
                    each.secrets,
                )
            # Not only ConfigError: whatever one config does to our code, the other endpoints' messages must go on.
            except Exception as error:
                self._problems[each.id] = endpoint.problem(error, each.secrets)

    def _begin(self, line: Line, room_of: Callable[[int], int]) -> None:
        if not line:
            return
        now = self._clock()
        for to, messages in line.take(room_of, self._slots.has_room):
            self._start(to, messages, now)

    def _start(self, to: Endpoint, messages: Sequence[Message], now: float) -> None:
        first = messages[0]
        self._slots.take(to.id)
        self._under_way[first.id, first.attempt] = _Sent(to, now)
        self._courier.send(to, messages)

    def _settle(self, now: float) -> None:
        self._rates.note(self._settling.counts, now)
        if self._settling.store(now) and self._line:
            self._try(self._release_blocked)

    def _release_blocked(self) -> None:
        """A circuit that opened takes no more: what waits for a slot to it goes back, unspent."""
        for endpoint_id, state in self._database.blocked_endpoints(self._line.endpoint_ids()).items():
            self._give_back(self._line.remove(endpoint_id), RELEASE_SECONDS[state])

    def _give_back(self, messages: Sequence[Message], delay: float) -> None:
        self._database.release([each.id for each in messages], [each.attempt for each in messages], delay)
        self._held.forget(messages)

    # What happens by the clock. What the database has no time for is left to the next time.

    def _keep_house(self, now: float) -> None:
        if now >= self._next_check:
            self._next_check = now + self._check_seconds()
            self._check(now)
        if now >= self._next_renewal:
            self._next_renewal = now + self._options.lease / 3
            if self._held:
                self._renew(now)
        if now >= self._next_sweep:
            self._next_sweep = now + SWEEP_SECONDS
            self._try(self._database.sweep)
        if now >= self._next_report:
            self._next_report = now + REPORT_SECONDS
            self._report("running")
        self._next_house = min(self._next_check, self._next_renewal, self._next_sweep, self._next_report)

    def _check_seconds(self) -> float:
        if self._listener.is_listening and self._slots.free:
            return CHECK_SECONDS_LISTENING
        return CHECK_SECONDS if self._held else CHECK_SECONDS_IDLE

    def _check_by(self, time: float) -> None:
        self._next_check = min(self._next_check, time)
        self._next_house = min(self._next_house, time)

    def _try(self, action: Callable[[], object]) -> None:
        with suppress(Busy):
            action()
        self._database.commit()

    def _check(self, now: float) -> None:
        stuck = {sent.to.id for sent in self._under_way.values() if sent.start < now - SLOW_SECONDS}
        self._slots.see_stuck(stuck)
        tidings = self._database.check()
        self._database.commit()
        if self._line:
            self._try(self._release_blocked)
        leave = tidings.leave or ("settings" if tidings.settings != self._settings else None)
        if leave is not None and self._leave != "stop":
            self._leave = leave
            self._until = min(self._until, now)

    def _renew(self, now: float) -> None:
        try:
            held = set(self._database.renew(self._held.ids(), self._held.attempts(), self._options.lease))
        except Busy:
            self._next_renewal = now + min(1.0, self._options.lease / 10)
            return
        self._database.commit()
        # What was lost and not yet sent is left to whoever has it now.
        self._held.forget(self._line.remove_lost(held))

    def _report(self, state: str) -> None:
        tally = self._tally
        progress = {
            "state": state,
            "in_flight": len(self._held),
            "processed": tally.processed,
            "failed": tally.failed,
            "last_error": tally.last_error,
        }
        with suppress(Busy):
            self._database.report(progress, tally.statistics())
            tally.clear()
            if state == "running":
                self._see_poller(self._database.is_poller())
        self._database.commit()

    def _see_poller(self, is_poller: bool) -> None:
        if is_poller == self._pace.is_poller:
            return
        self._pace.is_poller = is_poller
        if is_poller:
            self._listen()
        else:
            self._listener.do_without()

    def _listen(self) -> None:
        bell = self._database.listen()
        if bell is not None:
            self._listener.take(bell)
            self._courier.wake_on(bell.fileno())
