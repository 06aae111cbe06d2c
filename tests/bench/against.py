"""The version under test beside another revision: sending, claiming, delivery to one endpoint (in batches and to a broker, too),
light traffic.

Nothing may become slower. Each figure is the median of interleaved rounds on two servers; `--against HEAD` shows how much of it is
noise.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

from support.redis import Redis
from support.timed_receiver import timed_receiver

from bench import storage
from bench.breadth import Light
from bench.claim import BUSY, DELIVERED, LIMIT, add_due, claim, prepare
from bench.delivery import drain, fill
from bench.figures import Figure, Quantity
from bench.measure import Measured, Sample, interleave, percentile, sample
from bench.send import BATCH, Shop
from bench.stage import QUIET, Part, Stage

# What the figures of the same code differ by from run to run.
NOISE = 1.1

SENDS = {
    "send()": (1500, 1),
    "send() by 8 clients": (6000, 8),
    "send_batch()": (10, 1),
    "send() with an idempotency key": (1500, 1),
    "send() with an ordering key": (1500, 1),
    "send() with the same ordering key": (1500, 1),
    "send() with the same ordering key by 8 clients": (4000, 8),
}


def compared(
    stage: Stage, title: str, measured: dict[tuple[str, str | None], Measured], names: list[str], messages: int = 1
) -> Iterator[Figure]:
    for name in names:
        new = measured[name, None]
        stage.details[name] = [each._asdict() for each in new.samples]
        quantities = [Quantity(new.rate * messages, "/s")]
        if stage.against is not None:
            old = measured[name, stage.against]
            quantities += [
                Quantity(old.rate * messages, "/s", f"with {stage.against}"),
                Quantity(new.times(old), "times", "its time"),
                Quantity(new.times_processor(old), "times", "its processor"),
                Quantity(new.least_times(old), "times", "the lesser", required=NOISE),
            ]
        yield Figure(f"{title}{name}", *quantities, headline=True)


def send(stage: Stage) -> Iterator[Figure]:
    parts: dict[tuple[str, str | None], Callable[[], Sample]] = {}
    with ExitStack() as stack:
        for build in stage.builds:
            shop = Shop(stage.cluster_of(build), stack.enter_context(stage.database(build)))
            for name, (transactions, clients) in SENDS.items():
                statement = name.removesuffix(" by 8 clients")
                parts[name, build] = partial(shop.sample, statement, stage.scaled(transactions, 10 * clients), clients)
        # By statement and not by build: what is compared is done one after the other.
        order = [(name, build) for name in SENDS for build in stage.builds]
        measured = interleave({key: parts[key] for key in order}, stage.rounds(7))
    for name in SENDS:
        yield from compared(stage, "", measured, [name], BATCH if "batch" in name else 1)


def claims(stage: Stage) -> Iterator[Figure]:
    """A claim alone, and claim and settle."""
    rounds = stage.rounds(9)
    parts: dict[tuple[str, str | None], Callable[[], Sample]] = {}
    with ExitStack() as stack:
        for build in stage.builds:
            db = stack.enter_context(stage.session(build))
            prepare(db)
            add_due(db, (rounds + 1) * LIMIT // BUSY)
            storage.vacuum(db)
            db.execute("set jit = off")
            parts[f"a claim of {LIMIT}", build] = partial(sample, db, partial(claim, db))
        measured = interleave(parts, rounds)
    yield from compared(stage, "", measured, [f"a claim of {LIMIT}"])
    name = f"claimed by {LIMIT} and settled"
    count = stage.scaled(DELIVERED.messages // 2, LIMIT) // BUSY * BUSY
    parts = {(name, build): partial(DELIVERED.run, stage, count, build) for build in stage.builds}
    yield from compared(stage, "", interleave(parts, stage.rounds(4), unmeasured=0), [name])


def delivery(stage: Stage) -> Iterator[Figure]:
    count = stage.scaled(30_000, 500)

    def delivered(build: str | None, workers: int, protocol: str, config: dict[str, Any]) -> Sample:
        with stage.site(build) as site:
            site.db.execute("checkpoint")
            site.endpoint("shop", config, None, protocol)
            fill(site, "shop", count)
            return drain(site, workers).sample

    with Redis(stage.cluster.folder / "redis", "--appendonly", "no") as server:
        url = {"url": stage.receiver}
        stream = {"host": "127.0.0.1", "port": server.port, "stream_key": "orders"}
        cases: dict[str, tuple[int, str, dict[str, Any]]] = {
            f"{count:,} messages, one worker": (1, "http", url),
            f"{count:,} messages, 2 workers": (2, "http", url),
            f"{count:,} messages, 100 in a request": (1, "http", {**url, "batch_size": 100}),
            f"{count:,} messages to Redis": (1, "redis", stream),
        }
        parts = {
            (name, build): partial(delivered, build, *case) for name, case in cases.items() for build in stage.builds
        }
        yield from compared(stage, "", interleave(parts, stage.rounds(5), unmeasured=0), list(cases))


class Paced(NamedTuple):
    """Messages that come one by one, and what is asked of them beside the other revision."""

    name: str
    messages: int
    # In a second; None: 5 to 50 ms apart.
    rate: float | None
    times: float | None
    processor: float
    milliseconds: float | None = None


LIGHT = Paced("light traffic (5 to 50 ms apart)", 150, None, 1.2, 1.0)
STEADY = Paced("400 messages a second, one in a transaction", 1000, 400, None, 0.4, 6)


def paced(case: Paced, stage: Stage) -> Iterator[Figure]:
    """By blocks in turn: the other one's worker sleeps meanwhile."""
    block, rounds = stage.scaled(case.messages, 10), stage.rounds(5)
    found: dict[str | None, list[list[float]]] = {}
    used: dict[str | None, list[float]] = {}
    with ExitStack() as stack:
        shops = {
            build: Light(stack.enter_context(stage.site(build)), stack.enter_context(timed_receiver()), 1)
            for build in stage.builds
        }
        for _ in range(rounds):
            for build, shop in shops.items():
                found.setdefault(build, []).append(shop.latencies(block, 1, case.rate))
                used.setdefault(build, []).append(shop.used)
    medians = {build: [percentile(each, 0.5) for each in blocks] for build, blocks in found.items()}
    quantities = [
        Quantity(statistics.median(medians[None]), "ms", "p50", required=case.milliseconds),
        Quantity(percentile([each for one in found[None] for each in one], 0.99), "ms", "p99"),
        Quantity(statistics.median(used[None]), "us", "of processor each"),
    ]
    if stage.against is not None:
        times = statistics.median(new / old for new, old in zip(medians[None], medians[stage.against], strict=True))
        cost = statistics.median(new / old for new, old in zip(used[None], used[stage.against], strict=True))
        quantities += [
            Quantity(times, "times", f"the p50 of {stage.against}", required=case.times),
            Quantity(cost, "times", "its processor", required=case.processor),
        ]
    yield Figure(f"{case.name}, call to arrival", *quantities, headline=True)


PART = Part(
    "The version under test beside another revision in the same run; of time and processor the lesser is asked for, since the machine "
    "may have been busy with something else, or the clock too coarse",
    {
        "send": send,
        "claim": claims,
        "delivery": delivery,
        "light": partial(paced, LIGHT),
        "steady": partial(paced, STEADY),
    },
    QUIET,
    compares=True,
)
