"""Ordering keys: one message of a key is in flight at a time. How fast a key flows while its senders go on, how wide and how
deep keys may be, and what a claim costs beside them.

The yardstick of one key is libcurl with one request at a time to the same receiver: nobody who keeps the order is faster. While
senders are at work it is measured beside as many clients with plain inserts, for they want the same processors.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import psycopg
from support.cluster import run
from support.sessions import Running, wait_until
from support.site import Site

from bench import storage
from bench.claim import LIMIT, claim
from bench.delivery import drain
from bench.figures import Figure, Quantity
from bench.measure import Measured, Sample, interleave, processor_seconds, sample
from bench.stage import Part, Stage, name_of
from bench.yardstick import PAYLOAD, bare_loop

DB = psycopg.Connection[Any]

SENDERS = 8
MESSAGES = 20_000
DEEP = 100_000
# Of the bare loop's rate with one request at a time, which was 10,400/s on two quiet cores beside eight clients: 500/s while
# they send. On a busy machine the yardstick was twice as high, and the figure says nothing.
HOT_REQUIRED = 0.048
ONE_KEY_REQUIRED = 0.05
# Seconds for one drain: a slow one is stopped, and what it delivered counts.
AT_MOST = 6


WITH_KEYS = """
    select ulak.send(
        %(endpoint)s,
        jsonb_build_object('n', n, 'text', %(text)s::text),
        p_ordering_key => 'key ' || n %% %(keys)s::integer
    )
    from generate_series(%(first)s::integer, %(last)s::integer) n
"""
WITHOUT = """
    select ulak.send_batch(%(endpoint)s, array_agg(jsonb_build_object('n', n, 'text', %(text)s::text)))
    from generate_series(%(first)s::integer, %(last)s::integer) n
"""


def send_keys(db: DB, keys: int, messages: int, endpoint: str = "shop") -> None:
    """In turn, by transactions of a few hundred: each key takes a lock until its end. 0 are messages without a key."""
    query = WITH_KEYS if keys else WITHOUT
    for first in range(1, messages + 1, LIMIT):
        last = min(first + LIMIT - 1, messages)
        given = {"endpoint": endpoint, "text": PAYLOAD, "keys": keys, "first": first, "last": last}
        db.execute(query, given, prepare=True)


# Senders that go on.

HOT = "begin;\nselect ulak.send('shop', jsonb_build_object('n', 1), p_ordering_key => 'hot');\n{}commit;\n"
PLAIN = "insert into plain (endpoint_id, payload, ordering_key) values (1, jsonb_build_object('n', 1), 'hot');\n"


class Flow(NamedTuple):
    """In a second: what was committed, and what was delivered meanwhile."""

    sent: float
    delivered: float


def clients(site: Site, script: str, number: int, seconds: int) -> float:
    """This many clients at once, for this long: how many transactions a second they made."""
    path: Path = site.cluster.folder / "senders.sql"
    path.write_text(script)
    command: list[str | Path] = [site.cluster.bin / "pgbench", "-n", "-M", "prepared", "-j", "2", "-c", str(number)]
    found = re.search(
        r"^tps = ([\d.]+)",
        run([*command, "-T", str(seconds), "-f", path, site.cluster.dsn(site.database)]),
        re.MULTILINE,
    )
    assert found
    return float(found[1])


def flow(stage: Stage, build: str | None, number: int, seconds: int, pause: str = "") -> Flow:
    with stage.site(build) as site:
        site.http("shop", stage.receiver)
        site.start(seconds=600)
        site.send("shop", ordering_key="first")
        site.wait_until_settled()
        done = f"select count(*) from {storage.COMPLETED}"
        before, began = site.value(done), time.monotonic()
        sent = clients(site, HOT.format(pause), number, seconds)
        return Flow(sent, (site.value(done) - before) / (time.monotonic() - began))


def one_at_a_time(stage: Stage, seconds: int) -> float:
    """The rate of round trips while as many clients insert."""
    with stage.site() as site:
        storage.create_plain(site.db, "plain")
        inserting = Running(lambda: clients(site, PLAIN, SENDERS, seconds))
        wait_until(lambda: site.value("select exists (select from plain)"), message="the first insert")
        done, began = 0, time.monotonic()
        while not done or not inserting.is_done():
            done += bare_loop(stage.receiver, stage.scaled(1000, 20), at_once=1).messages
        took = time.monotonic() - began
        inserting.result()
    return done / took


def hot(stage: Stage) -> Iterator[Figure]:
    """One key and eight senders whose transactions end at once."""
    seconds = stage.scaled(6, 1)
    bare: list[float] = []
    found: dict[str | None, list[Flow]] = {build: [] for build in stage.builds}
    for _ in range(stage.rounds(3)):
        bare.append(one_at_a_time(stage, max(1, seconds // 3)))
        for build, flows in found.items():
            flows.append(flow(stage, build, SENDERS, seconds))
    stage.details["hot"] = {"bare": bare, **{name_of(build): flows for build, flows in found.items()}}
    yield Figure(
        f"bare pycurl loop, one request at a time beside {SENDERS} clients", Quantity(statistics.median(bare), "/s")
    )
    for build, flows in found.items():
        part = statistics.median(each.delivered / rate for each, rate in zip(flows, bare, strict=True))
        yield Figure(
            f"{name_of(build)}one ordering key, {SENDERS} senders: delivered while they send",
            Quantity(statistics.median(each.delivered for each in flows), "/s"),
            Quantity(statistics.median(each.sent for each in flows), "/s", "sent"),
            Quantity(part, "of", "the bare loop's", required=HOT_REQUIRED if build is None else None),
            headline=build is None,
        )


def slow_senders(stage: Stage) -> Iterator[Figure]:
    """Whose transactions take 50 ms: what was committed flows."""
    seconds = stage.scaled(5, 1)
    for number in (1, 3):
        for build in stage.builds:
            found = flow(stage, build, number, seconds, "\\sleep 50 ms\n")
            yield Figure(
                f"{name_of(build)}one ordering key, {number} sender{'s' * (number > 1)} in transactions of 50 ms",
                Quantity(found.delivered, "/s"),
                Quantity(
                    found.delivered / found.sent, "of", "what was committed", required=0.8 if build is None else None
                ),
                headline=build is None,
            )


# Wide and deep.


def widths(stage: Stage) -> Iterator[Figure]:
    """The same messages with no key, one, a hundred and ten thousand, by one worker."""
    messages = stage.scaled(MESSAGES, 200)
    counts = [0, 1, stage.scaled(100, 2), stage.scaled(10_000, 20)]

    def drained(build: str | None, keys: int) -> Sample:
        with stage.site(build) as site:
            site.http("shop", stage.receiver)
            send_keys(site.db, keys, messages)
            return drain(site, at_most=max(1, AT_MOST * min(1, stage.scale))).sample

    def bare() -> Sample:
        return bare_loop(stage.receiver, stage.scaled(3000, 50), at_once=1).sample

    parts: dict[tuple[int, str | None], Callable[[], Sample]] = {(-1, None): bare}
    parts |= {(keys, build): partial(drained, build, keys) for keys in counts for build in stage.builds}
    measured = interleave(parts, rounds=stage.rounds(3), unmeasured=0)
    single = measured.pop((-1, None))
    yield Figure("bare pycurl loop, one request at a time", Quantity(single.rate, "/s"))
    for (keys, build), taken in measured.items():
        is_new = build is None
        parts_of = []
        if keys == 1:
            parts_of.append(
                Quantity(taken.of(single), "of", "the bare loop's", required=ONE_KEY_REQUIRED if is_new else None)
            )
        elif keys > 1:
            parts_of.append(Quantity(taken.of(measured[0, build]), "of", "that without keys"))
        if is_new and stage.against:
            parts_of.append(Quantity(taken.of(measured[keys, stage.against]), "of", f"{stage.against}'s", required=0.9))
        which = f"with {keys:,} ordering key{'s' * (keys > 1)}" if keys else "without ordering keys"
        yield Figure(
            f"{name_of(build)}{messages:,} messages {which}",
            Quantity(taken.rate, "/s"),
            Quantity(taken.processor, "us", "of processor each"),
            *parts_of,
            headline=is_new,
        )


class Key:
    """One key with this many messages waiting, or none. In each round its worker delivers some of them, and waits while the others have
    theirs: the endpoint is disabled then."""

    def __init__(self, site: Site, url: str, waiting: int, size: int) -> None:
        site.http("shop", url)
        site.call("disable_endpoint", "shop")
        self._site = site
        self._size = size
        self._waiting = waiting
        send_keys(site.db, 1, waiting)
        storage.vacuum(site.db)
        self._worker = site.start(seconds=600)

    def sample(self) -> Sample:
        """Once a tenth of them is delivered and those behind are parked, which happens only once."""
        if not self._waiting:
            send_keys(self._site.db, 1, self._size)
        first = self._site.value("select min(id) from ulak.queue where status = 'pending'")
        since, last = first + self._size // 10, first + self._size - 1
        self._site.call("enable_endpoint", "shop")
        self._wait_for(since)
        due = "select exists (select from ulak.queue where status = 'pending' and next_retry_at < 'infinity' offset 2)"
        wait_until(lambda: not self._site.value(due), "those behind being parked", interval=0.005)
        # As the job of maintenance does every minute: where they were due, they left dead entries in the index.
        storage.vacuum(self._site.db, "analyze off")
        since = self._site.value(f"select max(id) from {storage.COMPLETED}")
        last = since + self._size // 2
        used, began = processor_seconds(self._worker.pid), time.monotonic()
        self._wait_for(last)
        took, used = time.monotonic() - began, processor_seconds(self._worker.pid) - used
        self._site.call("disable_endpoint", "shop")
        in_flight = "select exists (select from ulak.queue where status = 'processing')"
        wait_until(lambda: not self._site.value(in_flight), message="the last one")
        delivered = self._site.value(
            f"select count(*) from {storage.COMPLETED} where id > %s and completed_at <= "
            f"(select completed_at from {storage.COMPLETED} where id = %s)",
            since,
            last,
        )
        return Sample(took * 1e6 / delivered, used * 1e6 / delivered)

    def _wait_for(self, id: int) -> None:
        """A key's messages are delivered in the order of their ids."""
        query = f"select exists (select from {storage.COMPLETED} where id = %s)"
        wait_until(lambda: self._site.value(query, id), f"delivery of message {id}", interval=0.005)


def deep(stage: Stage) -> Iterator[Figure]:
    """A key with all of them waiting, beside one with just those that are delivered."""
    size, waiting = stage.scaled(1000, 50), stage.scaled(DEEP, 500)
    with ExitStack() as stack:
        parts: dict[tuple[int, str | None], Callable[[], Sample]] = {
            (depth, build): Key(stack.enter_context(stage.site(build)), stage.receiver, depth, size).sample
            for build in stage.builds
            for depth in (0, waiting)
        }
        measured = interleave(parts, stage.rounds(3))
    for (depth, build), taken in measured.items():
        times = taken.least_times(measured[0, build])
        yield Figure(
            f"{name_of(build)}one ordering key with {depth or size:,} messages waiting",
            Quantity(taken.rate, "/s"),
            Quantity(taken.processor, "us", "of processor each"),
            *([Quantity(times, "times", f"with {size:,}", required=1.2 if build is None else None)] if depth else []),
            headline=build is None,
        )


# A claim beside keys.


def beside(stage: Stage) -> Iterator[Figure]:
    """Messages without a key that were sent after all those of keys whose heads are in flight."""
    waiting, keys, rounds = stage.scaled(DEEP, 500), stage.scaled(10_000, 20), stage.rounds(5)
    cases = {
        "nothing": (0, 0, "shop"),
        f"{waiting:,} of one key": (1, waiting, "shop"),
        f"{waiting:,} of one key, of another endpoint": (1, waiting, "other"),
        f"{waiting:,} of {keys:,} keys": (keys, waiting, "shop"),
    }

    def made(db: DB, keys: int, waiting: int, endpoint: str) -> Callable[[], Sample]:
        db.execute("select ulak.create_endpoint(name, 'pull', '{}') from unnest(array['shop', 'other']) name")
        send_keys(db, keys, waiting, endpoint)
        in_flight = 0
        while in_flight < keys:
            row = db.execute("select count(*) from ulak.claim('other', %s)", [LIMIT]).fetchone()
            assert row and row[0], f"{in_flight} of {keys} keys were claimed"
            in_flight += row[0]
        send_keys(db, 0, (rounds + 1) * LIMIT)
        storage.vacuum(db)
        db.execute("set jit = off")
        return partial(sample, db, partial(claim, db))

    with ExitStack() as stack:
        parts = {
            (name, build): made(stack.enter_context(stage.session(build)), *case)
            for build in stage.builds
            for name, case in cases.items()
        }
        measured = interleave(parts, rounds)
    for (name, build), taken in measured.items():
        yield Figure(
            f"{name_of(build)}claim of {LIMIT} beside {name}",
            Quantity(taken.elapsed, "us", "a message"),
            Quantity(taken.processor, "us", "of the server's processor"),
            *ratio(taken, measured["nothing", build], 1.5 if build is None else None, name != "nothing"),
            headline=build is None and name != "nothing",
        )


def ratio(taken: Measured, base: Measured, required: float | None, is_compared: bool) -> list[Quantity]:
    return [Quantity(taken.least_times(base), "times", "beside nothing", required=required)] if is_compared else []


PART = Part(
    "Ordering keys: one worker, nginx as receiver, default settings",
    {"hot": hot, "slow-senders": slow_senders, "widths": widths, "deep": deep, "beside": beside},
    compares=True,
)
