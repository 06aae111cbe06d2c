"""Thousands of endpoints: what is left of the speed that one has, and what neighbours cost those that are well.

Everything is a ratio of two figures of one run. The revision that it is compared with is bounded by time: where it would take
minutes, what it delivered within AT_MOST seconds counts.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import psycopg
from support.site import Site
from support.timed_receiver import TimedReceiver, timed_receiver

from bench import storage
from bench.delivery import Delivered, drain
from bench.figures import Figure, Quantity
from bench.measure import Measured, Sample, interleave, percentile, processor_seconds, sample
from bench.stage import Part, Stage, name_of
from bench.yardstick import PAYLOAD

DB = psycopg.Connection[Any]

MESSAGES = 20_000
MANY = 10_000
SOME = 1_000
# Of the rate of one endpoint.
REQUIRED = {100: 0.9, SOME: 0.8, MANY: 0.6}
NEIGHBOURS_REQUIRED = 0.8
# Seconds for one drain.
AT_MOST = 15
OLD_AT_MOST = 8
LIMIT = 500
# A claim visits this many endpoints.
CLAIM_ENDPOINTS = 32

# Messages.
WARM_UP = 20

ONE = "one endpoint alone"

GENEROUS: dict[str, dict[str, Any]] = {
    "rate limits": {"rate_limit": {"limit": 1_000_000, "interval": "second"}},
    "max_in_flight": {"max_in_flight": 1000},
}


def create_endpoints(db: DB, count: int, url: str = "", protocol: str = "http", **config: Any) -> None:
    """endpoint 1, endpoint 2 and so on, each with a path of its own at the same host."""
    given = "'{}'::jsonb" if protocol == "pull" else "jsonb_build_object('url', %(url)s::text || n)"
    db.execute(
        f"""
        select ulak.create_endpoint('endpoint ' || n, %(protocol)s, {given} || %(config)s::jsonb)
        from generate_series(1, %(count)s) n
        """,  # type: ignore[arg-type]
        {"url": url, "protocol": protocol, "config": json.dumps(config), "count": count},
    )
    db.execute("vacuum analyze ulak.endpoints")


def send_to(db: DB, endpoints: int, messages: int, first: int = 1) -> int:
    """The same number to each of this many endpoints, in turn, in batches of at most a hundred; returns how many, which may be a few more.
    A transaction is for a thousand endpoints at most: senders take a lock for each."""
    each = max(1, messages // endpoints)
    rounds = -(-each // 100)
    batch = -(-each // rounds)
    last = first + endpoints - 1
    for _ in range(rounds):
        for since in range(first, last + 1, SOME):
            db.execute(
                """
                select ulak.send_batch(
                    'endpoint ' || n, array_fill(jsonb_build_object('n', n, 'text', %s::text), array[%s::integer])
                )
                from generate_series(%s::integer, %s::integer) n
                """,
                [PAYLOAD, batch, since, min(since + SOME - 1, last)],
            )
    return rounds * batch * endpoints


def empty(db: DB) -> None:
    storage.empty(db)
    db.execute("checkpoint")


class Field:
    """A database with this many endpoints, filled and drained again and again."""

    def __init__(self, stage: Stage, build: str | None, site: Site, endpoints: int, **config: Any) -> None:
        self.site = site
        self.endpoints = endpoints
        self.messages = stage.scaled(MESSAGES, 200)
        self.at_most = AT_MOST if build is None else max(1.0, OLD_AT_MOST * min(1, stage.scale))
        # The messages of this many endpoints, the first ones, are drained.
        self.watched = endpoints
        create_endpoints(site.db, endpoints, stage.receiver, **config)

    def fill(self) -> None:
        send_to(self.site.db, self.watched, self.messages)

    def drain(self) -> Sample:
        empty(self.site.db)
        self.fill()
        return self.delivered().sample

    def delivered(self) -> Delivered:
        watched = "true" if self.watched == self.endpoints else f"endpoint_id <= {self.watched}"
        return drain(self.site, watched=watched, at_most=self.at_most)


class OpenCircuits(Field):
    """The first one is well. All others have an open circuit, and two messages each that are due."""

    def __init__(self, stage: Stage, build: str | None, site: Site, endpoints: int) -> None:
        super().__init__(stage, build, site, endpoints)
        self.watched = 1
        site.db.execute(
            "update ulak.endpoints set circuit_state = 'open', circuit_opened_at = now(), circuit_half_open_at = 'infinity' "
            "where id > 1"
        )
        site.db.execute("vacuum analyze ulak.endpoints")

    def fill(self) -> None:
        super().fill()
        send_to(self.site.db, self.endpoints - 1, 2 * (self.endpoints - 1), first=2)


class DueTomorrow(Field):
    """The first one is well. All others have something due tomorrow."""

    def __init__(self, stage: Stage, build: str | None, site: Site, endpoints: int) -> None:
        super().__init__(stage, build, site, endpoints)
        self.watched = 1

    def fill(self) -> None:
        super().fill()
        for first in range(2, self.endpoints + 1, SOME):
            self.site.db.execute(
                """
                select ulak.send('endpoint ' || n, '{}', p_scheduled_at => now() + interval '1 day')
                from generate_series(%s::integer, %s::integer) n
                """,
                [first, min(first + SOME - 1, self.endpoints)],
            )


class Subscribers(Field):
    """Every endpoint has subscribed to the same event."""

    def __init__(self, stage: Stage, build: str | None, site: Site, endpoints: int) -> None:
        super().__init__(stage, build, site, endpoints)
        site.db.execute("select ulak.create_event_type('order.created')")
        site.db.execute(
            "select ulak.subscribe('order.created', 'endpoint ' || n) from generate_series(1, %s) n", [endpoints]
        )
        site.db.execute("analyze ulak.subscriptions")

    def fill(self) -> None:
        for _ in range(max(1, self.messages // self.endpoints)):
            self.publish()

    def publish(self) -> int:
        payload = json.dumps({"n": 1, "text": PAYLOAD})
        self.site.db.execute("select ulak.publish('order.created', %s)", [payload])
        return self.endpoints

    def send_batch(self) -> int:
        payload = json.dumps({"n": 1, "text": PAYLOAD})
        query = "select ulak.send_batch('endpoint 1', array_fill(%s::jsonb, array[%s::integer]))"
        self.site.db.execute(query, [payload, self.endpoints])
        return self.endpoints

    def sample(self, work: Callable[[], int]) -> Sample:
        empty(self.site.db)
        return sample(self.site.db, work)


Made = Callable[[Stage, str | None, Site], Field]
Key = tuple[str, str | None]


def drains(stage: Stage, made: dict[str, Made]) -> tuple[dict[Key, Measured], dict[Key, Field]]:
    """All of them in turn, old and new."""
    with ExitStack() as stack:
        fields = {
            (name, build): make(stage, build, stack.enter_context(stage.site(build)))
            for name, make in made.items()
            for build in stage.builds
        }
        measured = interleave({key: field.drain for key, field in fields.items()}, rounds=stage.rounds(3), unmeasured=0)
        stage.details.setdefault("drains", {}).update(
            {
                f"{name_of(build)}{name}": [each._asdict() for each in taken.samples]
                for (name, build), taken in measured.items()
            }
        )
        return measured, fields


def plainly(endpoints: int, **config: Any) -> Made:
    return lambda stage, build, site: Field(stage, build, site, endpoints, **config)


def quantities(measured: Measured) -> tuple[Quantity, Quantity]:
    return Quantity(measured.rate, "/s"), Quantity(measured.processor, "us", "of processor each")


def parts_of(taken: Measured, base: Measured, what: str, required: float | None) -> tuple[Quantity, Quantity]:
    """A machine with other work to do changes the first of them, but hardly the second."""
    return (
        Quantity(taken.of(base), "of", what, required=required),
        Quantity(taken.times_processor(base), "times", "the processor"),
    )


def widths(stage: Stage) -> Iterator[Figure]:
    counts = {1: 1, **{full: stage.scaled(full, 2) for full in REQUIRED}}
    made = {f"{full}": plainly(count) for full, count in counts.items()}
    measured, fields = drains(stage, made)
    for full, count in counts.items():
        for build in stage.builds:
            key = (f"{full}", build)
            one, this = measured["1", build], measured[key]
            required = REQUIRED.get(full) if build is None else None
            part = [] if full == 1 else parts_of(this, one, "one endpoint's", required)
            yield Figure(
                f"{name_of(build)}{fields[key].messages:,} messages, {count:,} endpoint{'s' * (count > 1)}",
                *quantities(this),
                *part,
                headline=build is None,
            )


def limits(stage: Stage) -> Iterator[Figure]:
    """Endpoints with limits that are never reached, beside one endpoint, and beside as many without limits."""
    count = stage.scaled(SOME, 2)
    made = {
        ONE: plainly(1),
        f"{count:,} endpoints without limits": plainly(count),
        **{f"{count:,} endpoints with {name}": plainly(count, **config) for name, config in GENEROUS.items()},
    }
    measured, _ = drains(stage, made)
    yield from beside(measured, f"{count:,} endpoints without limits", "as many without")


def neighbours(stage: Stage) -> Iterator[Figure]:
    """One endpoint that is well, alone and beside many that nothing can be taken from."""
    count = stage.scaled(MANY, 10)
    others = f"{count - 1:,}"
    made: dict[str, Made] = {
        ONE: plainly(1),
        f"one endpoint beside {others} open circuits with a backlog": partial(OpenCircuits, endpoints=count),
        f"one endpoint beside {others} with something due tomorrow": partial(DueTomorrow, endpoints=count),
    }
    measured, _ = drains(stage, made)
    yield from beside(measured)


def beside(measured: dict[Key, Measured], others: str | None = None, what: str | None = None) -> Iterator[Figure]:
    """As parts of what one endpoint alone has, and of what `others` have."""
    for (name, build), taken in measured.items():
        part: list[Quantity] = []
        if name not in (ONE, others):
            required = NEIGHBOURS_REQUIRED if build is None else None
            part += parts_of(taken, measured[ONE, build], "one endpoint's", required)
            if others is not None:
                part.append(Quantity(taken.of(measured[others, build]), "of", what or others))
        yield Figure(f"{name_of(build)}{name}", *quantities(taken), *part, headline=build is None and bool(part))


def subscribers(stage: Stage) -> Iterator[Figure]:
    """One event for all of them: what it costs to publish beside one send_batch() of as many, and how it is delivered beside
    messages that were sent to as many endpoints one by one."""
    count = stage.scaled(MANY, 10)
    with ExitStack() as stack:
        made = {
            build: Subscribers(stage, build, stack.enter_context(stage.site(build)), count) for build in stage.builds
        }
        parts: dict[Key, Callable[[], Sample]] = {}
        for build, field in made.items():
            parts["publish()", build] = partial(field.sample, field.publish)
            parts["send_batch()", build] = partial(field.sample, field.send_batch)
        published = interleave(parts, stage.rounds(5))
        parts = {("published", build): field.drain for build, field in made.items()}
        for build in made:
            parts["sent", build] = Field(stage, build, stack.enter_context(stage.site(build)), count).drain
            parts[ONE, build] = Field(stage, build, stack.enter_context(stage.site(build)), 1).drain
        drained = interleave(parts, rounds=stage.rounds(3), unmeasured=0)
    for build in made:
        publish, batch = published["publish()", build], published["send_batch()", build]
        yield Figure(
            f"{name_of(build)}publish() to {count:,} subscribers beside send_batch() of as many",
            Quantity(publish.rate, "/s"),
            Quantity(batch.rate, "/s", "in a batch"),
            Quantity(publish.least_times(batch), "times", "its time", required=1.5 if build is None else None),
            headline=build is None,
        )
    for build in made:
        taken, plain = drained["published", build], drained["sent", build]
        yield Figure(
            f"{name_of(build)}delivered to {count:,} subscribers",
            *quantities(taken),
            Quantity(
                taken.of(drained[ONE, build]),
                "of",
                "one endpoint's",
                required=REQUIRED[MANY] if build is None else None,
            ),
            Quantity(taken.of(plain), "of", "as many sent", required=NEIGHBOURS_REQUIRED if build is None else None),
            Quantity(taken.times_processor(plain), "times", "their processor"),
            headline=build is None,
        )


# Light traffic.


class Light:
    """One worker, and a message now and then: for any of many endpoints, which the worker hardly ever knows, or for a few that it does
    know."""

    def __init__(self, site: Site, receiver: TimedReceiver, endpoints: int) -> None:
        create_endpoints(site.db, endpoints, receiver.url)
        self._site = site
        self._receiver = receiver
        self._worker = site.start(seconds=600)
        self._chance = random.Random(1)
        # Microseconds of the worker's processor for each message of the last call.
        self.used = 0.0

    def latencies(self, count: int, among: int, rate: float | None = None) -> list[float]:
        """Milliseconds from the call of send() to the arrival, at this many a second or in light traffic. Measured from the commit, it
        could be negative, since the worker may deliver before the client hears of its commit. The first messages wake what slept while
        others were measured."""
        if count > WARM_UP:
            self.latencies(WARM_UP, among, rate)
        self.used = processor_seconds(self._worker.pid)
        called = {}
        due = time.monotonic()
        for n in range(count):
            endpoint = f"endpoint {self._chance.randint(1, among)}"
            called[n] = time.monotonic()
            self._site.db.execute("select ulak.send(%s, jsonb_build_object('n', %s::int))", [endpoint, n])
            if rate is None:
                time.sleep(self._chance.uniform(0.005, 0.05))
            else:
                due += 1 / rate
                time.sleep(max(0.0, due - time.monotonic()))
        self._site.wait_until_settled()
        self.used = (processor_seconds(self._worker.pid) - self.used) * 1e6 / count
        arrived = {int(json.loads(body)["n"]): at for at, body in self._receiver.arrivals()}
        return [(arrived[n] - called[n]) * 1000 for n in called]


def light(stage: Stage) -> Iterator[Figure]:
    """In turn, by a hundred messages: the workers of the others sleep meanwhile."""
    many = stage.scaled(MANY, 10)
    cases = {"1 endpoint": (1, 1), f"{many:,} endpoints, 10 of them": (many, 10), f"{many:,} endpoints": (many, many)}
    block, rounds = stage.scaled(100, 10), stage.rounds(4)
    found: dict[Key, list[list[float]]] = {}
    used: dict[Key, list[float]] = {}
    with ExitStack() as stack:
        shops = {
            (count, build): Light(stack.enter_context(stage.site(build)), stack.enter_context(timed_receiver()), count)
            for build in stage.builds
            for count in (1, many)
        }
        for _ in range(rounds):
            for name, (count, among) in cases.items():
                for build in stage.builds:
                    shop = shops[count, build]
                    found.setdefault((name, build), []).append(shop.latencies(block, among))
                    used.setdefault((name, build), []).append(shop.used)
    stage.details["light_ms"] = {f"{name_of(build)}{name}": each for (name, build), each in found.items()}
    base, *_ = cases
    for (name, build), blocks in found.items():
        pairs = zip(blocks, found[base, build], strict=True)
        times = statistics.median(percentile(mine, 0.5) / percentile(one, 0.5) for mine, one in pairs)
        required = 1.5 if build is None else None
        every = [each for block in blocks for each in block]
        yield Figure(
            f"{name_of(build)}light traffic (5 to 50 ms apart), {name}",
            Quantity(percentile(every, 0.5), "ms", "p50"),
            Quantity(percentile(every, 0.99), "ms", "p99"),
            Quantity(statistics.median(used[name, build]), "us", "of processor each"),
            *([] if name == base else [Quantity(times, "times", "the p50 of one", required=required)]),
            headline=build is None,
        )


# A claim.


def claim(stage: Stage) -> Iterator[Figure]:
    """Each takes 500 of the messages that are due for this many endpoints; those whose turn it is have enough. The exponent is that of a
    line through all widths."""
    widths = sorted({stage.scaled(count, least) for least, count in enumerate((1, 10, 100, SOME, MANY), 1)})
    rounds = stage.rounds(5)
    found: dict[str | None, dict[int, Measured]] = {}
    with ExitStack() as stack:
        parts: dict[tuple[int, str | None], Callable[[], Sample]] = {}
        for build in stage.builds:
            for width in widths:
                db = stack.enter_context(stage.session(build))
                create_endpoints(db, width, protocol="pull")
                send_to(db, width, enough(width, rounds + 1) * width)
                storage.vacuum(db)
                db.execute("set jit = off")
                parts[width, build] = partial(sample, db, partial(claim_some, db))
        measured = interleave(parts, rounds)
    for (width, build), taken in measured.items():
        found.setdefault(build, {})[width] = taken
    for build, taken_by in found.items():
        for width, taken in taken_by.items():
            yield Figure(
                f"{name_of(build)}claim of {LIMIT} from {width:,} endpoint{'s' * (width > 1)}",
                Quantity(taken.elapsed, "us", "a message"),
                Quantity(taken.processor, "us", "of the server's processor"),
            )
        required = 0.1 if build is None else None
        slopes = (
            exponent({width: taken.elapsed for width, taken in taken_by.items()}),
            exponent({width: taken.processor for width, taken in taken_by.items()}),
        )
        yield Figure(
            f"{name_of(build)}growth of a claim, {min(taken_by):,} to {max(taken_by):,} endpoints",
            # The machine may have been busy with something else, or the clock too coarse: not both.
            Quantity(min(slopes), "exponent", required=required),
            headline=build is None,
        )


def enough(width: int, claims: int) -> int:
    """Enough messages for each endpoint to fill all claims."""
    visited = min(width, CLAIM_ENDPOINTS)
    return -(-LIMIT // visited) * (1 + visited * claims // width)


def claim_some(db: DB) -> int:
    row = db.execute("select count(*) from ulak.claim('bench', %s)", [LIMIT], prepare=True).fetchone()
    assert row is not None and row[0] == LIMIT, f"{row} messages were claimed"
    return LIMIT


def exponent(costs: dict[int, float]) -> float:
    """0 is not at all, 1 is in proportion."""
    if len(costs) < 2:
        return 0.0
    widths, values = [math.log(each) for each in costs], [math.log(each) for each in costs.values()]
    return statistics.linear_regression(widths, values).slope


# The first request to an endpoint.


def first(stage: Stage) -> Iterator[Figure]:
    """Groups of endpoints get one message each, twice, from the same worker: it has never seen them, then it has. What is
    compared is the worker's processor for all of it, claim and settling included."""
    size, groups = stage.scaled(SOME, 10), 1 + stage.rounds(3)
    used: dict[Key, list[float]] = {}
    with ExitStack() as stack:
        workers = {}
        for build in stage.builds:
            site = stack.enter_context(stage.site(build))
            create_endpoints(site.db, size * groups, stage.receiver)
            workers[build] = site, site.start(seconds=600)
        for group in range(groups):
            for build, (site, worker) in workers.items():
                for which in ("never seen", "known"):
                    before = processor_seconds(worker.pid)
                    send_to(site.db, size, size, first=1 + group * size)
                    site.wait_until_settled()
                    # The first group warms up what is no endpoint's.
                    if group > 0:
                        used.setdefault((which, build), []).append(
                            (processor_seconds(worker.pid) - before) * 1e6 / size
                        )
    for build in stage.builds:
        new, known = used["never seen", build], used["known", build]
        yield Figure(
            f"{name_of(build)}one message each to {size:,} endpoints never seen before",
            Quantity(statistics.median(new), "us", "of processor each"),
            Quantity(statistics.median(known), "us", "the second time"),
            Quantity(
                statistics.median(a / b for a, b in zip(new, known, strict=True)),
                "times",
                required=2 if build is None else None,
            ),
            headline=build is None,
        )


PART = Part(
    f"Many endpoints: draining {MESSAGES:,} messages by one worker to nginx, each endpoint with a path of its own; medians of "
    f"interleaved rounds; a revision that it is compared with is stopped after {OLD_AT_MOST} s",
    {
        "widths": widths,
        "limits": limits,
        "neighbours": neighbours,
        "subscribers": subscribers,
        "light": light,
        "claim": claim,
        "first": first,
    },
    compares=True,
)
