"""How fast workers deliver, beside a bare pycurl loop on the same machine in the same minute."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

from support.cluster import run
from support.sessions import wait_until
from support.site import SETTLED, Site
from support.timed_receiver import timed_receiver

from bench import storage
from bench.figures import Figure, Quantity
from bench.measure import Sample, processor_seconds
from bench.stage import Part, Stage
from bench.yardstick import PAYLOAD, Bare, bare_loop

WAL = "select pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::bigint"


class Delivered(NamedTuple):
    messages: int
    # From the first claim to the last settled message, by the server's clock.
    seconds: float
    # Of the workers' backends, from their start.
    processor: float
    wal_bytes: int

    @property
    def rate(self) -> float:
        return self.messages / self.seconds

    @property
    def sample(self) -> Sample:
        """Of each message. Where none was delivered in time it is one that took all of it."""
        messages = max(1, self.messages)
        return Sample(self.seconds * 1e6 / messages, self.processor * 1e6 / messages)

    def quantities(self) -> tuple[Quantity, ...]:
        return (
            Quantity(self.rate, "/s"),
            Quantity(self.processor * 1e6 / self.messages, "us", "of processor each"),
            Quantity(self.wal_bytes / self.messages, "bytes", "of WAL each"),
        )


def fill(site: Site, endpoint: str, count: int) -> None:
    """In one transaction."""
    site.db.execute(
        """
        select ulak.send_batch(%s, array_agg(jsonb_build_object('n', n, 'text', %s::text)))
        from generate_series(1, %s) n group by n / 1000
        """,
        [endpoint, PAYLOAD, count],
    )


def drain(site: Site, workers: int = 1, watched: str = "true", at_most: float = 600) -> Delivered:
    """Starts workers on a full queue and waits until the watched messages are done, or for this many seconds: then it counts what was
    delivered by then."""
    storage.vacuum(site.db)
    before = site.value(WAL)
    sessions = [site.start(seconds=600) for _ in range(workers)]
    # Rarely and cheaply: asking takes processor time from the receiver.
    left = f"""
        select not exists (select from ulak.queue where status = 'pending' and {watched})
            and not exists (select from ulak.queue where status = 'processing' and {watched})
    """
    began = time.monotonic()
    while not (is_done := bool(site.value(left))) and time.monotonic() - began < at_most:
        time.sleep(min(0.1, at_most))
    took = time.monotonic() - began
    used = sum(processor_seconds(session.pid) for session in sessions)
    written = site.value(WAL) - before
    count, seconds = site.db.execute(f"""
        select count(*), extract(epoch from max(completed_at) - min(processing_started_at))::float
        from {storage.COMPLETED} where {watched}
    """).fetchone() or (0, 0.0)
    for session in sessions:
        session.end()
    return Delivered(count, seconds if is_done else took, used, written)


def deliver(
    stage: Stage,
    url: str,
    count: int,
    workers: int = 1,
    claims: int | None = None,
    build: str | None = None,
    **config: Any,
) -> Delivered:
    """This many messages to one endpoint, in a fresh database."""
    with stage.site(build) as site:
        # Before and not after they are sent: a message's pages have been written since the last checkpoint, as they have
        # where messages are delivered at once, so that the WAL holds its changes and not whole pages.
        site.db.execute("checkpoint")
        site.configure(batch_size=claims)
        site.http("shop", url, **config)
        fill(site, "shop", count)
        return drain(site, workers)


def throughput(stage: Stage) -> Iterator[Figure]:
    """In turn, since the machine may do other things as well: by the second its speed changes by a third."""
    count = stage.scaled(50_000, 1000)
    bares = [bare_loop(stage.receiver, count)]
    rounds = []
    for _ in range(stage.rounds(3)):
        one = deliver(stage, stage.receiver, count)
        bares.append(bare_loop(stage.receiver, count))
        rounds.append((between(*bares[-2:]), one))
    yield Figure(
        f"bare pycurl loop, {count:,} messages",
        Quantity(count / median(bare.seconds for bare in bares), "/s"),
        Quantity(median(bare.processor for bare in bares) * 1e6 / count, "us", "of processor each"),
        headline=True,
    )
    one = sorted((one for _, one in rounds), key=lambda one: one.rate)[len(rounds) // 2]
    yield Figure("one worker", *one.quantities(), headline=True)
    yield Figure(
        "one worker, times the bare loop",
        Quantity(median(one.seconds / bare.seconds for bare, one in rounds), "times", required=2.5, aim=1.75),
        Quantity(median(one.processor / bare.processor for bare, one in rounds), "times", "its processor", aim=2),
        headline=True,
    )
    stage.details["one worker"] = [{"bare": bare._asdict(), "one": one._asdict()} for bare, one in rounds]
    for workers in (2, 4):
        several = deliver(stage, stage.receiver, count, workers)
        yield Figure(f"{workers} workers", *several.quantities(), headline=True)


def between(before: Bare, after: Bare) -> Bare:
    """What the yardstick was in the time between two."""
    seconds, processor, round_trip = map(mean, zip(before[1:], after[1:], strict=True))
    return Bare(before.messages, seconds, processor, round_trip)


def batches(stage: Stage) -> Iterator[Figure]:
    """The receiver gets a JSON array. A worker claims up to batch_size messages of the queue at once, 500 by default. The bare
    loop sends one message in a request."""
    count = stage.scaled(50_000, 2000)
    for claims in (500, 5000):
        bare = bare_loop(stage.receiver, count)
        done = deliver(stage, stage.receiver, count, claims=claims, batch_size=100)
        part = Quantity(done.rate / bare.rate, "of", "the bare loop's", required=0.8, aim=2.4)
        name = f"one worker, 100 messages in a request, claims of {claims}"
        yield Figure(name, *done.quantities(), part, headline=True)


def slow_receiver(stage: Stage) -> Iterator[Figure]:
    count = stage.scaled(20_000, 500)
    with timed_receiver(0.05) as receiver:
        bare = bare_loop(receiver.url, count)
        done = deliver(stage, receiver.url, count)
    part = Quantity(done.rate / bare.rate, "of", "the bare loop's", required=0.8)
    yield Figure("receiver that takes 50 ms", *done.quantities(), part, headline=True)


def slow_neighbour(stage: Stage) -> Iterator[Figure]:
    """Alone and beside, in turn: the machine may do other things as well."""
    rates: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(stage.rounds(3)):
        for beside in rates:
            with timed_receiver(10) as slow, stage.site() as site:
                for n in range(20):
                    site.http(f"healthy {n}", stage.receiver)
                    fill(site, f"healthy {n}", stage.scaled(1500, 50))
                slow_id = site.http("slow", slow.url, timeout=30)
                if beside:
                    fill(site, "slow", 2000)
                rates[beside].append(drain(site, watched=f"endpoint_id <> {slow_id}").rate)
    alone, beside_slow = median(rates[False]), median(rates[True])
    yield Figure("20 healthy endpoints", Quantity(alone, "/s"))
    yield Figure(
        "20 healthy endpoints beside one that takes 10 s",
        Quantity(beside_slow, "/s"),
        Quantity(1 - beside_slow / alone, "share", "loss", required=0.1),
        headline=True,
    )


class Traffic(NamedTuple):
    # By the clients' own account.
    sent: float
    delivered: Delivered


def traffic(stage: Stage) -> Iterator[Figure]:
    """Three times, since the machine may do other things as well. The yardstick is what the machine makes of the same messages
    when as many clients insert them into a plain table, and then the bare loop sends them."""
    rounds = []
    for _ in range(stage.rounds(3)):
        plain, bare = insert_plainly(stage), bare_loop(stage.receiver, stage.scaled(20_000, 500)).rate
        rounds.append((1 / (1 / plain + 1 / bare), send_and_deliver(stage)))
    yardstick = median(each for each, _ in rounds)
    yield Figure("8 clients insert plainly, then the bare loop", Quantity(yardstick, "/s"))
    parts = {
        "sent": median(seen.sent / rate for rate, seen in rounds),
        "delivered": median(seen.delivered.rate / rate for rate, seen in rounds),
    }
    seen = sorted(seen for _, seen in rounds)[len(rounds) // 2]
    for name, shown in {"sent": (Quantity(seen.sent, "/s"),), "delivered": seen.delivered.quantities()}.items():
        part = Quantity(parts[name], "of", "the yardstick's", required=0.35)
        yield Figure(f"8 clients and 2 workers: {name}", *shown, part, headline=True)


def insert_plainly(stage: Stage) -> float:
    with stage.database() as database:
        with stage.cluster.connect(database) as db:
            storage.create_plain(db, "plain")
        insert = f"insert into plain (endpoint_id, payload) values (1, jsonb_build_object('n', 1, 'text', '{PAYLOAD}'))"
        return clients(stage, database, insert, max(1, stage.scaled(3)))


def clients(stage: Stage, database: str, statement: str, seconds: int) -> float:
    """Eight of them: how many transactions they made in a second."""
    script = stage.cluster.folder / "traffic.sql"
    script.write_text(statement + ";\n")
    pgbench: list[str | Path] = [stage.cluster.bin / "pgbench", "-n", "-M", "prepared", "-c", "8", "-j", "2"]
    output = run([*pgbench, "-T", str(seconds), "-f", script, stage.cluster.dsn(database)])
    found = re.search(r"^tps = ([\d.]+)", output, re.MULTILINE)
    assert found
    return float(found[1])


def send_and_deliver(stage: Stage) -> Traffic:
    """From the first message sent to the last one settled."""
    with stage.site() as site:
        site.http("shop", stage.receiver)
        workers = [site.start(seconds=600) for _ in range(2)]
        send = f"select ulak.send('shop', jsonb_build_object('n', 1, 'text', '{PAYLOAD}'))"
        before = site.value(WAL)
        sent = clients(stage, site.database, send, stage.scaled(10))
        wait_until(lambda: site.value(SETTLED), interval=0.1)
        written = site.value(WAL) - before
        count, took = site.db.execute(f"""
            select count(*), extract(epoch from max(completed_at) - min(created_at))::float from {storage.COMPLETED}
        """).fetchone() or (0, 1.0)
        used = sum(processor_seconds(worker.pid) for worker in workers)
    return Traffic(sent, Delivered(count, took, used, written))


PART = Part(
    "Delivery over HTTP to nginx (one process) on the same machine, messages of 200 bytes, default settings of ulak; "
    "processor: of the workers, with their start",
    {
        "throughput": throughput,
        "batches": batches,
        "slow-receiver": slow_receiver,
        "slow-neighbour": slow_neighbour,
        "traffic": traffic,
    },
)
