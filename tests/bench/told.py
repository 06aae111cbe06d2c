"""How long it takes from the moment something goes wrong until doctor() names it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from support.receiver import Answer, Receiver
from support.sessions import Running, wait_until
from support.site import Site

from bench.figures import Figure, Quantity
from bench.stage import Part, Stage

ONCE = {"max_retries": 0}
DOCTOR = 'select count(*) > 0 from ulak.doctor() where "check" = %s and finding like %s'


def told(site: Site, check: str, finding: str, began: float | None = None) -> float:
    """Seconds from now, or from then, until it is found."""
    began = began or time.perf_counter()
    wait_until(lambda: site.value(DOCTOR, check, finding), finding, interval=0.01)
    return time.perf_counter() - began


@contextmanager
def endpoint(stage: Stage, answer: Any = None, **config: Any) -> Iterator[Site]:
    """With a worker that is awake."""
    with stage.site() as site, Receiver(answer or Answer()) as receiver:
        site.http("shop", receiver.url, ONCE, **config)
        site.start()
        yield site


def refused(stage: Stage, status: int) -> float:
    with endpoint(stage, Answer(status)) as site:
        began = time.perf_counter()
        site.send()
        return told(site, "failing", 'endpoint "shop" fails: %', began)


def circuit(stage: Stage) -> float:
    """Ten failures in a row, from the first message on."""
    with endpoint(stage, Answer(503)) as site:
        began = time.perf_counter()
        site.send_many(10)
        return told(site, "circuit", 'the circuit of endpoint "shop" opened %', began)


def blocked(stage: Stage) -> float:
    with stage.site() as site, Receiver() as receiver:
        site.configure(http_allowed_networks="")
        site.http("shop", receiver.url, ONCE)
        site.start()
        began = time.perf_counter()
        site.send()
        return told(site, "failing", "%its address is blocked%", began)


def timed_out(stage: Stage) -> float:
    """Beyond the time-out itself, of three requests at once."""
    release = threading.Event()

    def never(_: object) -> Answer:
        release.wait(30)
        return Answer()

    with endpoint(stage, never, timeout=1) as site:
        began = time.perf_counter() + 1
        site.send_many(3)
        seconds = told(site, "failing", "%does not answer in time%", began)
        release.set()
        return seconds


def full_queue(stage: Stage) -> float:
    with stage.site() as site:
        site.endpoint("shop")
        site.configure(max_queue_size=1000)
        site.send_many(999)
        began = time.perf_counter()
        return told(site, "queue", '%most of them for "shop"%', began)


def killed_worker(stage: Stage) -> float:
    with endpoint(stage) as site:
        (worker,) = site.workers
        began = time.perf_counter()
        site.db.execute("select pg_terminate_backend(%s)", [worker.pid])
        return told(site, "workers", "no worker is alive%", began)


def blocked_sender(stage: Stage) -> float:
    """From the moment the sender waits."""
    with stage.site() as site, site.connect() as first, site.connect() as second:
        site.endpoint("shop")
        first.execute("begin")
        first.execute("select ulak.send('shop', '1', p_ordering_key => 'k')")
        began = time.perf_counter()
        sending = Running(lambda: second.execute("select ulak.send('shop', '2', p_ordering_key => 'k')"))
        seconds = told(site, "ordering key", "%: a sender waits%", began)
        first.execute("commit")
        sending.result()
        return seconds


def idle_in_transaction(stage: Stage) -> float:
    with stage.site() as site, site.connect() as sender:
        site.endpoint("shop")
        sender.execute("begin")
        sender.execute("select ulak.send('shop', '1')")
        return told(site, "session", "%is idle in its transaction%")


def disabled(stage: Stage) -> float:
    with stage.site() as site:
        site.endpoint("shop")
        site.send()
        began = time.perf_counter()
        site.call("disable_endpoint", "shop")
        return told(site, "disabled", 'endpoint "shop" is disabled and holds %', began)


KINDS: dict[str, tuple[Callable[[Stage], float], float]] = {
    "the receiver answers 401, from the send on": (lambda stage: refused(stage, 401), 3),
    "the receiver answers 301, from the send on": (lambda stage: refused(stage, 301), 3),
    "its address is blocked, from the send on": (blocked, 3),
    "three requests time out, from the time-out on": (timed_out, 5),
    "a circuit opens, from the first of ten messages on": (circuit, 5),
    "the queue is full": (full_queue, 3),
    "the only worker is killed": (killed_worker, 3),
    "a sender waits for another's ordering key": (blocked_sender, 3),
    "a session has sent and is idle in its transaction": (idle_in_transaction, 63),
    "an endpoint is disabled and holds messages": (disabled, 3),
}


def kinds(stage: Stage) -> Iterator[Figure]:
    for name, (kind, required) in KINDS.items():
        yield Figure(name, Quantity(kind(stage), "s", required=required))


PART = Part("From the moment something goes wrong until doctor() names it.", {"kinds": kinds})
