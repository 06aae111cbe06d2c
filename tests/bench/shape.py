"""What the shape of the stored data costs: WAL and processor from send() to the archive, an event for many, size, and growth while vacuum can't
remove anything.

All of it beside the revision that it is compared with, on a server of its own. Full-page images are off, since they depend on when the
last checkpoint was. Bytes don't depend on what else the machine does; the times do.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple

import psycopg
from support.cluster import Cluster
from support.finished import value

from bench import horizon, storage
from bench.breadth import create_endpoints
from bench.claim import DELIVERED
from bench.delivery import WAL
from bench.figures import Figure, Quantity
from bench.measure import Measured, Sample, interleave, percentile, processor_seconds, sample
from bench.stage import QUIET, Part, Stage, name_of

DB = psycopg.Connection[Any]

# Bytes of a payload, and of WAL that it may cost from send() to the archive.
WAL_REQUIRED = {250: 1700, 1000: 2500, 1800: 3300}
PROCESSOR_REQUIRED = 1.0
# Times the other revision's.
PUBLISH_WAL_REQUIRED = 0.35
PUBLISH_TIME_REQUIRED = 0.8
SIZE_REQUIRED = 1.0
GROWTH_REQUIRED = 0.5
DELIVERED_REQUIRED = 0.98
SEND_P99_REQUIRED = 50

KILOBYTE = 1000
RATE = 1000
SNAPSHOT_SECONDS = 15 * 60
AFTERWARDS = "VACUUM and checkpoint"


def payloads(size: int, count: int = 100) -> list[str]:
    """Of this many bytes each, and incompressible."""
    chance = random.Random(1)
    around = len(json.dumps({"text": ""}))
    return [json.dumps({"text": chance.randbytes(size).hex()[: size - around]}) for _ in range(count)]


def times(new: float, old: float, what: str = "", required: float | None = None) -> Quantity:
    return Quantity(new / old, "times", what, required=required)


# The whole way of a message.


class Way:
    """An endpoint whose messages are sent one by one, claimed and settled by 500, and archived. What VACUUM and a checkpoint have to do after
    that is shown, but it isn't part of the way."""

    def __init__(self, cluster: Cluster, db: DB, size: int, messages: int) -> None:
        self._cluster = cluster
        self._db = db
        self._payloads = payloads(size)
        self._messages = messages
        # Bytes of WAL and microseconds of the processor of each message, by step, for each round.
        self.written: list[dict[str, float]] = []
        self.used: list[dict[str, float]] = []
        db.execute("select ulak.create_endpoint('shop', 'pull', '{}')")
        db.execute("set synchronous_commit = off")
        db.execute("set jit = off")

    def sample(self) -> Sample:
        self.written.append({})
        self.used.append({})
        began = time.perf_counter()
        for name, step in {"send": self._send, "claim and settle": self._deliver, "archive": self._archive}.items():
            self._measure(name, step)
        elapsed = (time.perf_counter() - began) * 1e6 / self._messages
        used = sum(self.used[-1].values())
        self._measure(AFTERWARDS, self._clean)
        return Sample(elapsed, used)

    def _measure(self, name: str, step: Callable[[], None]) -> None:
        used, before = self._processor(), value(self._db, WAL)
        step()
        self.written[-1][name] = (value(self._db, WAL) - before) / self._messages
        self.used[-1][name] = (self._processor() - used) * 1e6 / self._messages

    def _processor(self) -> float:
        """Of the server's processes together: WAL and pages are also written by others than the session that made them. All other sessions
        are idle."""
        total = 0.0
        for pid in self._cluster.processes():
            # It may end meanwhile.
            with suppress(FileNotFoundError, ProcessLookupError):
                total += processor_seconds(pid)
        return total

    def _clean(self) -> None:
        storage.vacuum(self._db, "analyze off")
        self._db.execute("checkpoint")

    def _send(self) -> None:
        for payload in itertools.islice(itertools.cycle(self._payloads), self._messages):
            self._db.execute("select ulak.send('shop', %s)", [payload], prepare=True)

    def _deliver(self) -> None:
        assert sum(DELIVERED.deliver(self._db, self._messages)) == self._messages

    def _archive(self) -> None:
        storage.archive(self._db)

    # The first round, which plans and fills the caches, doesn't count.

    def wal(self) -> float:
        return statistics.median(sum(each.values()) - each[AFTERWARDS] for each in self.written[1:])

    def steps(self) -> Iterator[Quantity]:
        for step in self.written[0]:
            yield Quantity(statistics.median(each[step] for each in self.written[1:]), "bytes", step)
            yield Quantity(statistics.median(each[step] for each in self.used[1:]), "us", "of processor")


def way(stage: Stage) -> Iterator[Figure]:
    messages = stage.scaled(5000, 500)
    with ExitStack() as stack:
        ways = {
            (size, build): Way(
                stage.cluster_of(build),
                stack.enter_context(stage.session(build)),
                size,
                messages,
            )
            for size in WAL_REQUIRED
            for build in stage.builds
        }
        measured = interleave({key: each.sample for key, each in ways.items()}, stage.rounds(7))
    stage.details["way"] = {
        f"{name_of(build)}{size}": {
            "wal": each.written,
            "processor": each.used,
            "samples": measured[size, build].samples,
        }
        for (size, build), each in ways.items()
    }
    for size, required in WAL_REQUIRED.items():
        new = ways[size, None]
        quantities = [Quantity(new.wal(), "bytes", "of WAL each", required=required)]
        if stage.against is not None:
            old = ways[size, stage.against]
            quantities += [Quantity(old.wal(), "bytes", f"with {stage.against}"), times(new.wal(), old.wal())]
        yield Figure(f"a payload of {size:,} bytes, send() to archive", *quantities, headline=True)
        for build in stage.builds:
            yield Figure(f"  {name_of(build)}step by step", *ways[size, build].steps())
    for size in WAL_REQUIRED:
        yield processor(stage, size, {build: measured[size, build] for build in stage.builds})


def processor(stage: Stage, size: int, measured: dict[str | None, Measured]) -> Figure:
    new = measured[None]
    quantities = [Quantity(new.processor, "us", "of the server's processor each")]
    if stage.against is not None:
        old = measured[stage.against]
        quantities += [
            Quantity(old.processor, "us", f"with {stage.against}"),
            Quantity(new.times_processor(old), "times", required=PROCESSOR_REQUIRED),
        ]
    return Figure(f"a payload of {size:,} bytes, send() to archive, processor", *quantities, headline=True)


# An event for many.


class Publisher:
    def __init__(self, db: DB, subscribers: int) -> None:
        self._db = db
        self._payload = payloads(KILOBYTE, 1)[0]
        self._subscribers = subscribers
        # Bytes of WAL of each call.
        self.written: list[int] = []
        create_endpoints(db, subscribers, protocol="pull")
        db.execute("select ulak.create_event_type('order.created')")
        db.execute(
            "select ulak.subscribe('order.created', 'endpoint ' || n) from generate_series(1, %s) n", [subscribers]
        )
        db.execute("analyze ulak.subscriptions")
        db.execute("set synchronous_commit = off")

    def sample(self) -> Sample:
        storage.empty(self._db)
        before = value(self._db, WAL)
        taken = sample(self._db, self._publish)
        self.written.append(value(self._db, WAL) - before)
        return taken

    def _publish(self) -> int:
        self._db.execute("select ulak.publish('order.created', %s)", [self._payload], prepare=True)
        return 1


def publish(stage: Stage) -> Iterator[Figure]:
    count = stage.scaled(1000, 100)
    with ExitStack() as stack:
        publishers = {build: Publisher(stack.enter_context(stage.session(build)), count) for build in stage.builds}
        parts: dict[str | None, Callable[[], Sample]] = {
            build: publisher.sample for build, publisher in publishers.items()
        }
        measured = interleave(parts, stage.rounds(15))
    written = {build: statistics.median(publisher.written) for build, publisher in publishers.items()}
    wal = [Quantity(written[None] / count, "bytes", "of WAL each")]
    took = [Quantity(measured[None].elapsed / 1000, "ms")]
    if stage.against is not None:
        new, old = measured[None], measured[stage.against]
        wal += [
            Quantity(written[stage.against] / count, "bytes", f"with {stage.against}"),
            times(written[None], written[stage.against], required=PUBLISH_WAL_REQUIRED),
        ]
        took += [
            Quantity(old.elapsed / 1000, "ms", f"with {stage.against}"),
            Quantity(new.times(old), "times", "its time"),
            Quantity(new.times_processor(old), "times", "its processor"),
            Quantity(new.least_times(old), "times", "the lesser", required=PUBLISH_TIME_REQUIRED),
        ]
    stage.details["publish"] = {name_of(build): measured[build].samples for build in stage.builds}
    name = f"publish() of {KILOBYTE:,} bytes to {count:,} subscribers"
    yield Figure(f"{name}, WAL", *wal, headline=True)
    yield Figure(f"{name}, time", *took, headline=True)


# What waits.


def waiting(stage: Stage, build: str | None, messages: int, size: int) -> int:
    """Bytes of tables and indexes."""
    batch = 1000
    with stage.session(build) as db:
        db.execute("select ulak.create_endpoint('shop', 'pull', '{}')")
        db.execute("select ulak.configure('max_queue_size', '0')")
        before = storage.bytes_of(db)
        given = payloads(size)
        for first in range(0, messages, batch):
            count = min(batch, messages - first)
            some = list(itertools.islice(itertools.cycle(given), count))
            db.execute("select ulak.send_batch('shop', %s::jsonb[])", [some], prepare=True)
        return storage.bytes_of(db) - before


def size(stage: Stage) -> Iterator[Figure]:
    count = stage.scaled(1_000_000, 1000)
    found = {build: waiting(stage, build, count, KILOBYTE) / count for build in stage.builds}
    quantities = [Quantity(found[None], "bytes", "each")]
    if stage.against is not None:
        old = found[stage.against]
        quantities += [
            Quantity(old, "bytes", f"with {stage.against}"),
            times(found[None], old, required=SIZE_REQUIRED),
        ]
    yield Figure(f"{count:,} messages of {KILOBYTE:,} bytes waiting, with indexes", *quantities, headline=True)


# An old snapshot.


class Grown(NamedTuple):
    # Bytes of tables and indexes, of each message.
    growth: float
    # A second, of what was delivered by the time the last one was sent.
    delivered: float
    messages: int
    send_p99: float


def grown(stage: Stage, build: str | None, seconds: int, size: int) -> Grown:
    """Delivered by one worker, with maintenance and VACUUM each minute."""
    with stage.site(build) as site:
        site.http("shop", stage.receiver)
        with horizon.Schedule(site), horizon.old_snapshot(site):
            before = storage.bytes_of(site.db)
            durations = horizon.send(stage, site, seconds, RATE, payloads(size, 1)[0])
            delivered = site.value(f"select count(*) from {storage.COMPLETED}")
            site.wait_until_settled(seconds=600)
            messages = site.value(f"select count(*) from {storage.COMPLETED}")
            growth = storage.bytes_of(site.db) - before
    return Grown(growth / messages, delivered / seconds, messages, percentile(durations, 0.99))


def snapshot(stage: Stage) -> Iterator[Figure]:
    """Growth is given per message: a busy machine may send fewer than it should."""
    seconds = stage.scaled(SNAPSHOT_SECONDS, 2)
    for bytes in (KILOBYTE,):
        found = {build: grown(stage, build, seconds, bytes) for build in stage.builds}
        stage.details[f"snapshot {bytes}"] = {name_of(build): each._asdict() for build, each in found.items()}
        new = found[None]
        quantities = [
            Quantity(new.growth, "bytes", "each"),
            Quantity(new.delivered, "/s", "delivered", required=DELIVERED_REQUIRED * RATE),
            Quantity(new.send_p99, "ms", "send p99", required=SEND_P99_REQUIRED),
        ]
        if stage.against is not None:
            old = found[stage.against]
            quantities += [
                Quantity(old.growth, "bytes", f"with {stage.against}"),
                Quantity(old.delivered, "/s", f"with {stage.against}"),
                times(new.growth, old.growth, required=GROWTH_REQUIRED),
            ]
        yield Figure(
            f"growth by {RATE:,} messages/s of {bytes:,} bytes under an old snapshot, {seconds} s",
            *quantities,
            headline=True,
        )


PART = Part(
    "What is written and stored for a message, full-page images off, synchronous_commit = off; each beside the other revision",
    {"way": way, "publish": publish, "size": size, "snapshot": snapshot},
    QUIET | {"full_page_writes": False},
    compares=True,
)
