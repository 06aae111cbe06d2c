"""The worker: claims, delivers, settles and commits until its time is over; a steady pipeline, not batches."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from ulak import batch, endpoint, verdict
from ulak.courier import Courier
from ulak.http import Transport
from ulak.model import ConfigError, Endpoint, Message, Outcome
from ulak.options import Options
from ulak.pace import Pace
from ulak.port import Claimed, Database, Outcomes
from ulak.slots import Slots
from ulak.tally import Tally

# Outcomes are settled in groups: after this time, or when half of the slots wait to be filled again.
SETTLE_SECONDS = 0.002
REPORT_SECONDS = 0.5
SWEEP_SECONDS = 10.0
# A request that takes longer than this is slow: at the end of a run the worker waits for it, but takes no more like it.
SLOW_SECONDS = 0.5
# How long a run may outlast its end because of requests under way; then what is left goes back to the queue.
GRACE_SECONDS = {"stop": 2.0, "restart": 60.0}
# What was claimed when the circuit changed is given back for this long.
RELEASE_SECONDS = {"open": 10.0, "half_open": 5.0, "disabled": 10.0}
LONGEST_STEP = 0.05


class _Done(NamedTuple):
    endpoint_id: int
    message: Message
    outcome: Outcome


class Worker:
    def __init__(
        self,
        database: Database,
        options: Options,
        settings: object,
        stamp: str,
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._database = database
        self._options = options
        self._settings = settings
        self._stamp = stamp
        self._clock = clock
        self._slots = Slots(options.concurrency)
        self._courier = Courier(Transport(options.guard, max(256, options.concurrency * 2)))
        now = clock()
        self._pace = Pace(options.poll_interval_busy, options.poll_interval, now)
        self._pace.is_poller = False
        self._tally = Tally()
        self._endpoints: dict[int, Endpoint] = {}
        # Why an endpoint that was claimed for can't be sent to.
        self._problems: dict[int, str] = {}
        # Claimed and not yet settled: id and attempt.
        self._held: dict[int, int] = {}
        # Requests under way by their first message: endpoint and start.
        self._under_way: dict[int, tuple[int, float]] = {}
        # Requests for which there was no slot; only batches make them.
        self._waiting: deque[tuple[Endpoint, Sequence[Message]]] = deque()
        self._done: list[_Done] = []
        self._done_since = now
        self._until = now + seconds
        self._leave: str | None = None
        self._last_claim = now
        self._next_report = now
        self._next_sweep = now
        self._next_renewal = now + options.lease / 3

    def run(self) -> None:
        while not self._is_over(self._clock()):
            self._gather()
            now = self._clock()
            self._keep_house(now)
            self._turn(now)
        self._report("stopped")

    def give_back(self) -> None:
        """Everything that is held returns to the queue, unspent: what a run that breaks off can still do."""
        if self._held:
            self._database.release(list(self._held), list(self._held.values()), 0.0)
            self._database.commit()

    def _is_over(self, now: float) -> bool:
        if now < self._until:
            return False
        if not self._held:
            return True
        if now > self._until + GRACE_SECONDS[self._leave or "restart"]:
            self._settle()
            self.give_back()
            return True
        return False

    def _is_closing(self, now: float) -> bool:
        """Whether new messages would keep a run from ending that is over but for what is under way."""
        return now >= self._until and (self._leave == "stop" or not self._slow_endpoints(now))

    def _slow_endpoints(self, now: float) -> set[int]:
        return {each for each, start in self._under_way.values() if start < now - SLOW_SECONDS}

    # Waiting for answers, or for time to pass.

    def _gather(self) -> None:
        now = self._clock()
        wait = LONGEST_STEP
        if self._done:
            wait = self._done_since + SETTLE_SECONDS - now
        elif self._slots.free:
            wait = min(wait, self._pace.wait(now))
        wait = max(0.0, min(wait, self._next_report - now))
        if not self._courier.in_flight:
            if wait:
                time.sleep(wait)
            return
        settled = self._courier.step(wait)
        if not settled:
            return
        now = self._clock()
        if not self._done:
            self._done_since = now
        for each in settled:
            endpoint_id, start = self._under_way.pop(each.messages[0].id)
            self._slots.give_back(endpoint_id)
            self._tally.add(endpoint_id, len(each.messages), each.outcome.error, now - start)
            self._done += [_Done(endpoint_id, message, each.outcome) for message in each.messages]

    # One transaction: what has come back, and what to send next. Nothing is sent before it is committed.

    def _turn(self, now: float) -> None:
        settles = bool(self._done) and (
            self._slots.free * 2 >= self._slots.total
            or now >= self._done_since + SETTLE_SECONDS
            or not self._courier.in_flight
        )
        # The next message of an ordering key becomes due when its head is settled.
        ordered = settles and any(done.message.ordering_key is not None for done in self._done)
        if settles:
            self._settle()
        claimed = self._claim(now) if self._may_claim(now, settles, ordered) else []
        if settles or claimed:
            self._prepare(claimed)
        self._database.commit()
        self._send()

    def _may_claim(self, now: float, settles: bool, ordered: bool) -> bool:
        if not self._slots.free or self._waiting or self._is_closing(now):
            return False
        pace = self._pace
        if ordered:
            return True
        if pace.more:
            enough = settles or self._slots.free * 2 >= self._slots.total
            return enough or now >= self._last_claim + self._options.poll_interval_busy
        if pace.wait(now) > 0:
            return False
        wants = pace.wants_claim(now, self._database.last_sent())
        pace.looked(now)
        return wants

    def _claim(self, now: float) -> list[Claimed]:
        options, slots = self._options, self._slots
        rooms, room = slots.rooms(), slots.room()
        if now >= self._until:
            rooms.update(dict.fromkeys(self._slow_endpoints(now), 0))
        limit = min(slots.free, options.batch_size)
        batching = [each for each in self._endpoints.values() if each.batch_size > 1]
        if batching:
            limit = options.batch_size
            for each in batching:
                rooms[each.id] = rooms.get(each.id, room) * each.batch_size
        claimed = self._database.claim(limit, options.lease, rooms, room)
        self._pace.claimed(now, limit, [each.message.id for each in claimed])
        self._last_claim = now
        for each in claimed:
            self._held[each.message.id] = each.message.attempt
        return claimed

    def _prepare(self, claimed: Iterable[Claimed]) -> None:
        """Sorts what was claimed into requests, reading the configs that are new."""
        by_endpoint: dict[int, list[Message]] = {}
        unknown = set()
        for each in claimed:
            by_endpoint.setdefault(each.endpoint_id, []).append(each.message)
            known = self._endpoints.get(each.endpoint_id)
            if known is None or known.config_version != each.config_version:
                unknown.add(each.endpoint_id)
        if unknown:
            self._load(unknown)
        for endpoint_id, messages in by_endpoint.items():
            known = self._endpoints.get(endpoint_id)
            if known is not None:
                self._waiting += [(known, group) for group in batch.group(known, messages)]
            else:
                outcome = Outcome(f"{verdict.RETRYABLE} {self._problems[endpoint_id]}")
                self._done += [_Done(endpoint_id, message, outcome) for message in messages]

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
                )
            except ConfigError as error:
                self._problems[each.id] = f"config: {error}"

    def _send(self) -> None:
        now = self._clock()
        while self._waiting and self._slots.free:
            to, messages = self._waiting.popleft()
            self._slots.take(to.id)
            self._under_way[messages[0].id] = (to.id, now)
            self._courier.send(to, messages)

    def _settle(self) -> None:
        if not self._done:
            return
        done, self._done = self._done, []
        outcomes = [each.outcome for each in done]
        failed = any(each.error is not None for each in outcomes)
        self._database.settle(
            Outcomes(
                [each.message.id for each in done],
                [each.message.attempt for each in done],
                [each.error for each in outcomes] if failed else None,
                [each.retry_after for each in outcomes] if failed else None,
                [each.response for each in outcomes] if any(each.response for each in outcomes) else None,
            )
        )
        for each in done:
            self._held.pop(each.message.id, None)
        if failed and self._waiting:
            self._release_blocked()

    def _release_blocked(self) -> None:
        """A circuit that opened takes no more: what waits for a slot to it goes back, unspent."""
        blocked = self._database.blocked_endpoints({to.id for to, _ in self._waiting})
        kept: deque[tuple[Endpoint, Sequence[Message]]] = deque()
        for to, messages in self._waiting:
            if to.id not in blocked:
                kept.append((to, messages))
                continue
            ids = [message.id for message in messages]
            attempts = [self._held.pop(each) for each in ids]
            self._database.release(ids, attempts, RELEASE_SECONDS[blocked[to.id]])
        self._waiting = kept

    # What happens by the clock.

    def _keep_house(self, now: float) -> None:
        if now >= self._next_renewal:
            self._next_renewal = now + self._options.lease / 3
            if self._held:
                self._database.renew(list(self._held), list(self._held.values()), self._options.lease)
                self._database.commit()
        if now >= self._next_sweep:
            self._next_sweep = now + SWEEP_SECONDS
            self._database.sweep()
            self._database.commit()
        if now >= self._next_report:
            self._next_report = now + REPORT_SECONDS
            self._report("running")

    def _report(self, state: str) -> None:
        tally = self._tally
        progress = {
            "state": state,
            "stamp": self._stamp,
            "in_flight": len(self._held),
            "processed": tally.processed,
            "failed": tally.failed,
            "last_error": tally.last_error,
        }
        tidings = self._database.report(progress, tally.take())
        if not self._pace.is_poller:
            self._pace.is_poller = self._database.become_poller()
        self._database.commit()
        leave = tidings.leave or ("restart" if tidings.settings != self._settings else None)
        if leave is not None and self._leave is None:
            self._leave = leave
            self._until = min(self._until, self._clock())
