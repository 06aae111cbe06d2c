"""How soon a message arrives, and what waiting for it costs: light traffic, and the first message after a quiet minute."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager

from support.site import Site
from support.timed_receiver import TimedReceiver, timed_receiver

from bench.figures import Figure, Quantity
from bench.measure import percentile, processor_seconds
from bench.stage import Part, Stage

POLL_INTERVAL_MS = 50


class Shop:
    """One worker, one endpoint, and a receiver that notes when each message came."""

    def __init__(self, site: Site, receiver: TimedReceiver) -> None:
        site.http("shop", receiver.url)
        self._worker = site.start(seconds=600)
        self._site = site
        self._receiver = receiver
        # When the commit of a message was confirmed.
        self._sent: dict[int, float] = {}

    def send(self, n: int) -> None:
        self._site.db.execute("select ulak.send('shop', jsonb_build_object('n', %s::int))", [n])
        self._sent[n] = time.monotonic()

    def latencies(self) -> list[float]:
        """Milliseconds from commit to arrival of all that was sent since the last call. It can seem to take less than
        nothing: the worker may be sooner than the client hears of its commit."""
        self._site.wait_until_settled()
        arrived = {int(json.loads(body)["n"]): at for at, body in self._receiver.arrivals()}
        sent, self._sent = self._sent, {}
        assert arrived.keys() == sent.keys(), f"{len(arrived)} of {len(sent)} arrived"
        return [max(0.0, (arrived[n] - sent[n]) * 1000) for n in sent]

    def processor(self) -> float:
        return processor_seconds(self._worker.pid)


@contextmanager
def shop(stage: Stage) -> Iterator[Shop]:
    with timed_receiver() as receiver, stage.site() as site:
        yield Shop(site, receiver)


def spread(name: str, found: list[float], p50: float | None = None, p99: float | None = None) -> Figure:
    return Figure(
        name,
        Quantity(percentile(found, 0.5), "ms", "p50", required=p50),
        Quantity(percentile(found, 0.95), "ms", "p95"),
        Quantity(percentile(found, 0.99), "ms", "p99", required=p99),
        Quantity(max(found), "ms", "max"),
        headline=True,
    )


def light(stage: Stage) -> Iterator[Figure]:
    chance = random.Random(1)
    with shop(stage) as site:
        for n in range(20):
            site.send(n)
            time.sleep(0.02)
        site.latencies()
        began, before = time.monotonic(), site.processor()
        for n in range(stage.scaled(500, 50)):
            site.send(n)
            time.sleep(chance.uniform(0.005, 0.05))
        used = (site.processor() - before) / (time.monotonic() - began)
        found = site.latencies()
    stage.details["light_ms"] = found
    yield spread("light traffic (5 to 50 ms apart), commit to arrival", found, 3, 10)
    yield Figure("light traffic, share of a core", Quantity(used, "share", required=0.04), headline=True)


def idle(stage: Stage) -> Iterator[Figure]:
    """The last third of a quiet minute shows what waiting costs."""
    quiet = 60 * stage.scale
    with shop(stage) as site:
        site.send(0)
        site.latencies()
        time.sleep(quiet * 2 / 3)
        before = site.processor()
        time.sleep(quiet / 3)
        used = (site.processor() - before) / (quiet / 3)
        found = []
        for n in range(3):
            if n > 0:
                # Until the worker is as slow as it gets.
                time.sleep(8 * min(1, stage.scale))
            site.send(n)
            found += site.latencies()
    stage.details["idle_ms"] = found
    yield Figure(
        f"after {quiet:.0f} s of quiet, share of a core", Quantity(used, "share", required=0.01), headline=True
    )
    limit = POLL_INTERVAL_MS + 10
    yield Figure("the next message, worst of 3", Quantity(max(found), "ms", required=limit), headline=True)


PART = Part("Latency from commit to arrival, one worker", {"light": light, "idle": idle})
