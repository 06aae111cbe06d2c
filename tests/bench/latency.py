"""How soon a message arrives, and what waiting for it costs: light traffic, and the first message after a quiet minute."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import fmean

from support.site import Site
from support.timed_receiver import TimedReceiver, timed_receiver

from bench.figures import Figure, Quantity
from bench.measure import percentile, processor_seconds
from bench.stage import Part, Stage
from bench.yardstick import bare_loop

POLL_INTERVAL_MS = 50


# Seconds between two messages of light traffic: 36 of them in a second.
SHORTEST, LONGEST = 0.005, 0.05
PAUSE = (SHORTEST + LONGEST) / 2


class Shop:
    """One worker, one endpoint, and a receiver that notes when each message came."""

    def __init__(self, site: Site, receiver: TimedReceiver) -> None:
        site.http("shop", receiver.url)
        self._worker = site.start(seconds=600)
        self.site = site
        self.receiver = receiver
        # When the commit of a message was confirmed.
        self._sent: dict[int, float] = {}

    def send(self, n: int) -> None:
        self.site.db.execute("select ulak.send('shop', jsonb_build_object('n', %s::int))", [n])
        self._sent[n] = time.monotonic()

    def latencies(self) -> list[float]:
        """Milliseconds from commit to arrival of all that was sent since the last call. It can seem to take less than
        nothing: the worker may be sooner than the client hears of its commit."""
        self.site.wait_until_settled()
        arrived = {int(json.loads(body)["n"]): at for at, body in self.receiver.arrivals()}
        sent, self._sent = self._sent, {}
        assert arrived.keys() == sent.keys(), f"{len(arrived)} of {len(sent)} arrived"
        return [max(0.0, (arrived[n] - sent[n]) * 1000) for n in sent]

    def processor(self) -> float:
        return processor_seconds(self._worker.pid)


@contextmanager
def shop(stage: Stage) -> Iterator[Shop]:
    with timed_receiver() as receiver, stage.site() as site:
        yield Shop(site, receiver)


def light(stage: Stage) -> Iterator[Figure]:
    """The yardstick is a bare request now and then: it too finds the processor cold."""
    chance = random.Random(1)
    with shop(stage) as site:
        for n in range(20):
            site.send(n)
            time.sleep(0.02)
        site.latencies()
        count = stage.scaled(500, 50)
        bares = [bare_loop(site.receiver.url, count // 2, at_once=1, pause=PAUSE)]
        site.receiver.arrivals()
        began, before = time.monotonic(), site.processor()
        for n in range(count):
            site.send(n)
            time.sleep(chance.uniform(SHORTEST, LONGEST))
        used, took = site.processor() - before, time.monotonic() - began
        found = site.latencies()
        bares.append(bare_loop(site.receiver.url, count // 2, at_once=1, pause=PAUSE))
    stage.details["light_ms"] = found
    round_trip = fmean(bare.round_trip for bare in bares) * 1000
    each = fmean(bare.sample.processor for bare in bares)
    yield Figure(
        "a bare request now and then", Quantity(round_trip, "ms", "p50"), Quantity(each, "us", "of processor each")
    )
    yield Figure(
        "light traffic (5 to 50 ms apart), commit to arrival",
        Quantity(percentile(found, 0.5), "ms", "p50"),
        Quantity(percentile(found, 0.95), "ms", "p95"),
        Quantity(percentile(found, 0.99), "ms", "p99"),
        Quantity(max(found), "ms", "max"),
        Quantity(percentile(found, 0.5) / round_trip, "times", "the p50 of a bare request", required=4),
        headline=True,
    )
    yield Figure(
        "light traffic, processor",
        Quantity(used * 1e6 / count, "us", "each"),
        Quantity(used / took, "share", "of a core"),
        Quantity(used * 1e6 / count / each, "times", "a bare request", required=5),
        headline=True,
    )


def idle(stage: Stage) -> Iterator[Figure]:
    """The last third of a quiet minute shows what waiting costs."""
    quiet = 60 * stage.scale
    with shop(stage) as site:
        site.send(0)
        site.latencies()
        time.sleep(quiet * 2 / 3)
        before = site.processor()
        polled = poll(site.site, quiet / 3)
        used = (site.processor() - before) / (quiet / 3)
        found = []
        for n in range(3):
            if n > 0:
                # Until the worker is as slow as it gets.
                time.sleep(8 * min(1, stage.scale))
            site.send(n)
            found += site.latencies()
    stage.details["idle_ms"] = found
    yield Figure(f"a session that asks every {POLL_INTERVAL_MS} ms, share of a core", Quantity(polled, "share"))
    yield Figure(
        f"after {quiet:.0f} s of quiet, share of a core",
        Quantity(used, "share"),
        Quantity(used / polled, "times", "that session's", required=4),
        headline=True,
    )
    yield Figure(
        "the next message, worst of 3",
        Quantity(max(found), "ms"),
        Quantity(max(found) / POLL_INTERVAL_MS, "times", "poll_interval", required=1.2),
        headline=True,
    )


def poll(site: Site, seconds: float) -> float:
    """The yardstick: what share of a core a session takes that does nothing but ask for work as often as a worker does."""
    with site.connect() as db:
        ask = "select from ulak.queue where status = 'pending' and next_retry_at <= now() limit 1"
        db.execute(ask, prepare=True)
        before, until = processor_seconds(db.info.backend_pid), time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            time.sleep(min(left, POLL_INTERVAL_MS / 1000))
            db.execute(ask, prepare=True)
        return (processor_seconds(db.info.backend_pid) - before) / seconds


PART = Part("Latency from commit to arrival, one worker", {"light": light, "idle": idle})
