"""How costs grow: the same at ten times the work, and the exponent. 1 is in proportion to the work, 0 is not at all."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

from bench import horizon, storage
from bench.archive import seconds as seconds_of
from bench.claim import BUSY, DELIVERED, KINDS, LIMIT, add_due, add_others, claim, prepare
from bench.delivery import deliver
from bench.figures import Figure, Quantity
from bench.measure import interleave, sample
from bench.send import PAYLOAD, Shop
from bench.stage import QUIET, Part, Stage

TEN = 10


class Growth(NamedTuple):
    """Seconds, or whatever both are in."""

    small: float
    large: float

    def figure(self, name: str, expected: int) -> Figure:
        """A tenth more than expected is noise or the next level of a tree."""
        times = self.large / self.small
        return Figure(
            name,
            Quantity(math.log10(times), "exponent", aim=expected + 0.1),
            Quantity(times, "times", f"where {TEN**expected}x is ideal"),
            headline=True,
        )


def repeated(stage: Stage, small: int, seconds: Callable[[int], float]) -> Growth:
    """Medians of both sizes in turn."""
    taken: dict[int, list[float]] = {small: [], small * TEN: []}
    for _ in range(stage.rounds(3)):
        for size, found in taken.items():
            found.append(seconds(size))
    return Growth(*map(statistics.median, taken.values()))


def send(stage: Stage) -> Iterator[Figure]:
    """One send, at ten times the backlog."""
    small = stage.scaled(20_000, 1000)
    with ExitStack() as stack:
        shops = [Shop(stage.cluster, stack.enter_context(stage.database()), size) for size in (small, small * TEN)]
        parts = {
            str(number): partial(shop.sample, "send()", stage.scaled(2000, 50)) for number, shop in enumerate(shops)
        }
        measured = interleave(parts, stage.rounds(5))
    # The second is compared with the first of the same round.
    growth = Growth(1, measured["1"].times(measured["0"]))
    yield growth.figure(f"send() with {small:,} and {small * TEN:,} waiting", 0)


def batch(stage: Stage) -> Iterator[Figure]:
    small = stage.scaled(2000, 100)
    with stage.database() as database, stage.cluster.connect(database) as db:
        db.execute("select ulak.create_endpoint('shop', 'pull', '{}')")

        def seconds(count: int) -> float:
            storage.empty(db)
            query = "select ulak.send_batch('shop', array_fill(%s::jsonb, array[%s]))"
            return seconds_of(lambda: db.execute(query, [PAYLOAD, count]))

        seconds(small)
        growth = repeated(stage, small, seconds)
    yield growth.figure(f"send_batch() of {small:,} and {small * TEN:,}", 1)


def settle(stage: Stage) -> Iterator[Figure]:
    small = stage.scaled(5000, LIMIT) // BUSY * BUSY
    growth = repeated(stage, small, lambda count: DELIVERED.run(stage, count).elapsed * count)
    yield growth.figure(f"claim and settle {small:,} and {small * TEN:,}", 1)


def beside(stage: Stage) -> Iterator[Figure]:
    """One claim, beside ten times the messages that it must not take."""
    small, rounds = stage.scaled(30_000, 1000), stage.rounds(5)
    with ExitStack() as stack:
        parts = {}
        for number, others in enumerate((small, small * TEN)):
            db = stack.enter_context(stage.cluster.connect(stack.enter_context(stage.database())))
            prepare(db)
            for kind in KINDS:
                add_others(db, kind, others)
            add_due(db, (rounds + 1) * LIMIT // BUSY)
            storage.vacuum(db)
            db.execute("set jit = off")
            parts[str(number)] = partial(sample, db, partial(claim, db))
        measured = interleave(parts, rounds)
    growth = Growth(1, measured["1"].times(measured["0"]))
    kinds = len(KINDS)
    yield growth.figure(f"claim beside {small * kinds:,} and {small * kinds * TEN:,} rows that it must not take", 0)


def delivery(stage: Stage) -> Iterator[Figure]:
    small = stage.scaled(5000, 500)
    growth = repeated(stage, small, lambda count: deliver(stage, stage.receiver, count).seconds)
    yield growth.figure(f"delivery of {small:,} and {small * TEN:,}, one worker", 1)


def held(stage: Stage) -> Iterator[Figure]:
    """The same backlog, after this many and after ten times as many messages were settled under one old snapshot: none of their old row
    versions can be removed."""
    small, backlog = stage.scaled(4000, 500), stage.scaled(3000, 500)
    with stage.site() as site:
        site.http("shop", stage.receiver)
        with horizon.Schedule(site), horizon.old_snapshot(site):
            horizon.drain(site, small)
            first = horizon.drain(site, backlog)
            horizon.drain(site, small * TEN - small - backlog)
            growth = Growth(first, horizon.drain(site, backlog))
    name = f"delivery of {backlog:,} after {small:,} and {small * TEN:,} settled since the oldest snapshot"
    yield growth.figure(name, 0)


PART = Part(
    "Growth from one amount of work to ten times as much, as an exponent: 1 is in proportion, 0 is not at all",
    {
        "send": send,
        "batch": batch,
        "settle": settle,
        "beside": beside,
        "delivery": delivery,
        "horizon": held,
    },
    QUIET,
)
