"""What is left to the server when nodes deliver, beside a worker inside of it; and whether two nodes share what there is."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import NamedTuple

from support.node import Node, node_dsn
from support.sessions import wait_until
from support.site import SETTLED, Site
from support.timed_receiver import TimedReceiver, timed_receiver

from bench import storage
from bench.delivery import WAL, clients, fill
from bench.figures import Figure, Quantity
from bench.latency import LONGEST, SHORTEST
from bench.measure import percentile, processor_seconds
from bench.stage import QUIET, Part, Stage
from bench.yardstick import PAYLOAD


class Drained(NamedTuple):
    messages: int
    seconds: float
    # Of all processes of the server but the session that asks.
    server: float
    # Of the nodes.
    nodes: float
    wal_bytes: int

    def quantities(self) -> tuple[Quantity, ...]:
        return (
            Quantity(self.messages / self.seconds, "/s"),
            Quantity(self.server * 1e6 / self.messages, "us", "of the server's processor each"),
            Quantity(self.nodes * 1e6 / self.messages, "us", "of the nodes'"),
            Quantity(self.wal_bytes / self.messages, "bytes", "of WAL each"),
        )


def server_seconds(site: Site) -> float:
    """Also of processes that have ended: their parent's account is precise to 10 ms."""
    fields = Path(f"/proc/{site.cluster.postmaster_pid}/stat").read_text().rsplit(")", 1)[1].split()
    total = (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")
    for pid in site.cluster.processes():
        # The session that asks isn't part of it, and others may end meanwhile.
        with suppress(FileNotFoundError, ProcessLookupError):
            total += 0.0 if pid == site.db.info.backend_pid else processor_seconds(pid)
    return total


@contextmanager
def filled(stage: Stage, count: int) -> Iterator[Site]:
    """What is measured begins with a queue that is full, written since the last checkpoint."""
    with stage.site() as site:
        site.db.execute("checkpoint")
        site.http("shop", stage.receiver)
        fill(site, "shop", count)
        storage.vacuum(site.db)
        yield site


def drain(site: Site, nodes: int) -> Drained:
    """By this many nodes; 0: by a worker in the database."""
    with ExitStack() as stack:
        before, written = server_seconds(site), site.value(WAL)
        began = [stack.enter_context(Node(node_dsn(site.cluster, site.database))) for _ in range(nodes)]
        if not nodes:
            site.start(seconds=600)
        # Rarely and cheaply: asking takes processor time from the receiver.
        wait_until(lambda: site.value(SETTLED), "an empty queue", interval=0.1, seconds=600)
        server = server_seconds(site) - before
        of_nodes = sum(processor_seconds(node.pid) for node in began)
        written = site.value(WAL) - written
    count, seconds = site.db.execute(f"""
        select count(*), extract(epoch from max(completed_at) - min(processing_started_at))::float from {storage.COMPLETED}
    """).fetchone() or (0, 1.0)
    return Drained(count, seconds, server, of_nodes, written)


def processor(stage: Stage) -> Iterator[Figure]:
    """In turn: the machine may do other things as well."""
    count = stage.scaled(20_000, 500)
    rounds: list[tuple[Drained, Drained]] = []
    for _ in range(stage.rounds(3)):
        with filled(stage, count) as site:
            inside = drain(site, 0)
        with filled(stage, count) as site:
            rounds.append((inside, drain(site, 1)))
    middle = sorted(rounds, key=lambda each: each[1].server / each[0].server)[len(rounds) // 2]
    for name, drained in zip(("a worker in the database", "a node"), middle, strict=True):
        yield Figure(name, *drained.quantities(), headline=True)
    times = median(node.server / inside.server for inside, node in rounds)
    yield Figure(
        "the server's processor, a node beside a worker", Quantity(times, "times", required=0.6), headline=True
    )
    stage.details["processor"] = [[each._asdict() for each in pair] for pair in rounds]


def fairness(stage: Stage) -> Iterator[Figure]:
    """Both are there before there is anything to do, so that neither has a start."""
    count = stage.scaled(30_000, 500)
    with stage.site() as site, ExitStack() as stack:
        site.http("shop", stage.receiver)
        for _ in range(2):
            stack.enter_context(Node(node_dsn(site.cluster, site.database)))
        alive = "select count(*) from ulak.workers where host is not null and state = 'running'"
        wait_until(lambda: site.value(alive) == 2, "two nodes")
        began = time.monotonic()
        fill(site, "shop", count)
        wait_until(lambda: site.value(SETTLED), "an empty queue", interval=0.1, seconds=600)
        took = time.monotonic() - began
        processed = "select (messages_processed / sum(messages_processed) over ())::float from ulak.workers order by 1"
        told = "select sum(messages_processed) from ulak.workers"
        wait_until(lambda: site.value(told) == count, "the nodes' last report")
        shares = site.column(processed)
    yield Figure(
        "two nodes",
        Quantity(count / took, "/s", "sent and delivered"),
        Quantity(min(shares) * 2, "of", "its half by the one that did less", required=0.6),
        headline=True,
    )


def traffic(stage: Stage) -> Iterator[Figure]:
    """Eight clients send as fast as they can while two nodes deliver: what a message costs its database in all."""
    with stage.site() as site, ExitStack() as stack:
        site.http("shop", stage.receiver)
        began = [stack.enter_context(Node(node_dsn(site.cluster, site.database))) for _ in range(2)]
        alive = "select count(*) from ulak.workers where host is not null and state = 'running'"
        wait_until(lambda: site.value(alive) == 2, "two nodes")
        site.db.execute("checkpoint")
        before, written = server_seconds(site), site.value(WAL)
        send = f"select ulak.send('shop', jsonb_build_object('n', 1, 'text', '{PAYLOAD}'))"
        clients(stage, site.database, send, stage.scaled(10))
        wait_until(lambda: site.value(SETTLED), "an empty queue", interval=0.1)
        server, of_nodes = server_seconds(site) - before, sum(processor_seconds(node.pid) for node in began)
        written = site.value(WAL) - written
        count, seconds = site.db.execute(f"""
            select count(*), extract(epoch from max(completed_at) - min(created_at))::float from {storage.COMPLETED}
        """).fetchone() or (0, 1.0)
    drained = Drained(count, seconds, server, of_nodes, written)
    yield Figure("8 clients and 2 nodes: sent and delivered", *drained.quantities(), headline=True)


def latency(stage: Stage) -> Iterator[Figure]:
    """Light traffic, delivered by a worker in the database and then by a node. On one machine: a network adds its round trips."""
    for name, nodes in {"a worker in the database": 0, "a node": 1}.items():
        with timed_receiver() as receiver, stage.site() as site, ExitStack() as stack:
            site.http("shop", receiver.url)
            if nodes:
                stack.enter_context(Node(node_dsn(site.cluster, site.database)))
                wait_until(lambda: site.value("select count(*) from ulak.workers") == 1, "a node")
            else:
                site.start(seconds=600)
            count = stage.scaled(300, 20)
            light_traffic(site, receiver, 20)
            before = server_seconds(site)
            found = light_traffic(site, receiver, count)
            server = server_seconds(site) - before
        yield Figure(
            f"light traffic by {name}, commit to arrival",
            Quantity(percentile(found, 0.5), "ms", "p50"),
            Quantity(percentile(found, 0.95), "ms", "p95"),
            Quantity(server * 1e6 / count, "us", "of the server's processor each, without sending"),
            headline=True,
        )


def light_traffic(site: Site, receiver: TimedReceiver, count: int) -> list[float]:
    """Milliseconds from commit to arrival."""
    chance = random.Random(1)
    sent: dict[int, float] = {}
    for n in range(count):
        site.db.execute("select ulak.send('shop', jsonb_build_object('n', %s::int))", [n])
        sent[n] = time.monotonic()
        time.sleep(chance.uniform(SHORTEST, LONGEST))
    site.wait_until_settled()
    arrived = {int(json.loads(body)["n"]): at for at, body in receiver.arrivals()}
    return [max(0.0, (arrived[n] - sent[n]) * 1000) for n in sent]


PART = Part(
    "Delivery to nginx by nodes and by a worker in the database, messages of 200 bytes; nodes on the same machine, so what they "
    "save is looked for in the server's processes alone",
    {"processor": processor, "fairness": fairness, "traffic": traffic, "latency": latency},
    QUIET,
)
