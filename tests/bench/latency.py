"""How soon a message arrives, and what waiting for it costs: light traffic, and the first message after a quiet minute.

python -m bench.latency [light] [idle]
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time

from bench.delivery import Bench, Figure, bench_cluster, processor_seconds, show
from support.site import Site, WorkerSession
from support.timed_receiver import TimedReceiver, timed_receiver

COUNT = 500
POLL_INTERVAL = 0.05


def send(site: Site, n: int) -> float:
    """When the commit was confirmed."""
    site.db.execute("select ulak.send('shop', jsonb_build_object('n', %s::int))", [n])
    return time.monotonic()


def latencies(receiver: TimedReceiver, sent: dict[int, float]) -> list[float]:
    """Milliseconds from commit to arrival."""
    arrived = {int(json.loads(body)["n"]): at for at, body in receiver.arrivals()}
    assert arrived.keys() == sent.keys(), f"{len(arrived)} of {len(sent)} arrived"
    return [max(0.0, (arrived[n] - sent[n]) * 1000) for n in sent]


def pause(seconds: float) -> None:
    time.sleep(seconds)


def share(workers: list[WorkerSession], seconds: float) -> float:
    """Of one core, over the next so many seconds."""
    before = sum(processor_seconds(worker.pid) for worker in workers)
    pause(seconds)
    return (sum(processor_seconds(worker.pid) for worker in workers) - before) / seconds


def light(site: Site, receiver: TimedReceiver, workers: list[WorkerSession]) -> list[Figure]:
    chance = random.Random(1)
    for n in range(20):
        send(site, -n)
        pause(0.02)
    site.wait_until_settled()
    receiver.arrivals()
    sent = {}
    began = time.monotonic()
    before = sum(processor_seconds(worker.pid) for worker in workers)
    for n in range(COUNT):
        sent[n] = send(site, n)
        pause(chance.uniform(0.005, 0.05))
    took = time.monotonic() - began
    used = (sum(processor_seconds(worker.pid) for worker in workers) - before) / took
    site.wait_until_settled()
    found = sorted(latencies(receiver, sent))
    p50, p99 = statistics.median(found), found[int(0.99 * len(found))]
    return [
        Figure("light traffic, commit to arrival, median", f"{p50:.1f} ms", "3 ms", p50 < 3),
        Figure("light traffic, commit to arrival, 99th of 100", f"{p99:.1f} ms", "10 ms", p99 < 10),
        Figure("light traffic, share of a core", f"{used:.1%}", "4%", used <= 0.04),
    ]


def idle(site: Site, receiver: TimedReceiver, workers: list[WorkerSession]) -> list[Figure]:
    site.wait_until_settled()
    receiver.arrivals()
    pause(60)
    used = share(workers, 20)
    first = []
    for n in range(5):
        sent = {n: send(site, n)}
        site.wait_until_settled()
        first += latencies(receiver, sent)
        # Until the worker is as slow as it gets.
        pause(8)
    worst = max(first)
    return [
        Figure("after a quiet minute, share of a core", f"{used:.2%}", "1%", used <= 0.01),
        Figure(
            "the next message, worst of 5",
            f"{worst:.1f} ms",
            f"{POLL_INTERVAL * 1000 + 10:.0f} ms",
            worst <= POLL_INTERVAL * 1000 + 10,
        ),
    ]


PARTS = {"light": light, "idle": idle}


def main() -> None:
    chosen = [argument.lstrip("-") for argument in sys.argv[1:]] or list(PARTS)
    figures: list[Figure] = []
    with bench_cluster() as cluster, timed_receiver() as receiver, Bench(cluster, "").site() as site:
        site.http("shop", receiver.url)
        workers = [site.start(seconds=600)]
        for name in chosen:
            figures += PARTS[name](site, receiver, workers)
    show(figures)


if __name__ == "__main__":
    main()
