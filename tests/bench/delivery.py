"""How fast workers deliver, beside a bare pycurl loop on the same machine in the same minute.

python -m bench.delivery [throughput] [slow-receiver] [slow-neighbour] [ordering] [traffic]
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pycurl
from bench.measure import table
from support.cluster import WORK, Cluster, Settings, run
from support.nginx import nginx
from support.sessions import wait_until
from support.site import SETTLED, Site
from support.timed_receiver import timed_receiver

MESSAGES = 50_000
PAYLOAD = "x" * 180  # with its key and number about 200 bytes

SERVER: Settings = {"shared_buffers": "512MB", "max_wal_size": "8GB", "checkpoint_timeout": "1h"}


class Figure(NamedTuple):
    name: str
    value: str
    required: str
    holds: bool


class Measured(NamedTuple):
    messages: int
    # From the first claim to the last settled message, by the server's clock.
    seconds: float
    # Of the workers' backends.
    processor: float

    @property
    def rate(self) -> float:
        return self.messages / self.seconds

    @property
    def microseconds(self) -> float:
        return self.processor * 1e6 / self.messages


def processor_seconds(pid: int | str) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def bare_loop(url: str, count: int) -> tuple[float, float]:
    """Seconds and processor seconds of libcurl's multi interface with nothing around it: the same bodies and headers."""
    multi = pycurl.CurlMulti()
    body = b'{"n": 12345, "text": "%b"}' % PAYLOAD.encode()
    headers = ["content-type: application/json", "user-agent: ulak/0.0.0", f"webhook-id: {'0' * 36}"]
    headers += ["webhook-timestamp: 1800000000", "ulak-attempt: 1"]
    free = []
    for _ in range(128):
        curl = pycurl.Curl()
        curl.setopt(pycurl.URL, url)
        curl.setopt(pycurl.POST, 1)
        curl.setopt(pycurl.WRITEFUNCTION, lambda chunk: None)
        free.append(curl)
    sent = done = 0
    began, used = time.monotonic(), time.process_time()
    while done < count:
        while free and sent < count:
            curl = free.pop()
            curl.setopt(pycurl.HTTPHEADER, headers)
            curl.setopt(pycurl.POSTFIELDS, body)
            multi.add_handle(curl)
            sent += 1
        multi.perform()
        left = 1
        while left:
            left, ended, failed = multi.info_read()
            assert not failed, failed
            for curl in ended:
                assert curl.getinfo(pycurl.RESPONSE_CODE) == 200
                multi.remove_handle(curl)
                free.append(curl)
                done += 1
        if not free:
            multi.select(0.1)
    return time.monotonic() - began, time.process_time() - used


class Bench:
    def __init__(self, cluster: Cluster, url: str) -> None:
        self.cluster = cluster
        self.url = url
        self._count = 0

    @contextmanager
    def site(self) -> Iterator[Site]:
        """A fresh database."""
        self._count += 1
        name = self.cluster.create_database(f"bench_{self._count}", "template_ulak")
        site = Site(self.cluster, name)
        yield site
        site.close()
        self.cluster.drop_database(name)

    def drain(self, site: Site, workers: int = 1, watched: str = "true") -> Measured:
        """Starts workers on a full queue and waits until the watched messages are done."""
        site.db.execute("vacuum analyze ulak.queue")
        site.db.execute("checkpoint")
        sessions = [site.start(seconds=600) for _ in range(workers)]
        left = SETTLED + f" and {watched}"
        wait_until(lambda: site.value(left), 600)
        used = sum(processor_seconds(session.pid) for session in sessions)
        count, seconds = site.db.execute(f"""
            select count(*), extract(epoch from max(completed_at) - min(processing_started_at))::float
            from ulak.queue where status = 'completed' and {watched}
        """).fetchone() or (0, 0.0)
        return Measured(count, seconds, used)


def fill(site: Site, endpoint: str, count: int, **options: Any) -> None:
    site.db.execute(
        """
        select ulak.send_batch(%s, array_agg(jsonb_build_object('n', n, 'text', %s::text)))
        from generate_series(1, %s) n group by n / 1000
        """,
        [endpoint, PAYLOAD, count],
    )


def throughput(bench: Bench) -> list[Figure]:
    bare_before = bare_loop(bench.url, MESSAGES)
    with bench.site() as site:
        site.http("shop", bench.url)
        fill(site, "shop", MESSAGES)
        measured = bench.drain(site)
    bare_after = bare_loop(bench.url, MESSAGES)
    bare = (bare_before[0] + bare_after[0]) / 2
    bare_used = (bare_before[1] + bare_after[1]) / 2 * 1e6 / MESSAGES
    times = measured.seconds / bare
    return [
        Figure("bare pycurl loop", f"{MESSAGES / bare:,.0f}/s, {bare_used:.0f} us of processor each", "", True),
        Figure(
            "one worker",
            f"{measured.rate:,.0f}/s, {measured.microseconds:.0f} us of processor each",
            "8,000/s",
            measured.rate >= 8000,
        ),
        Figure(
            "times the bare loop",
            f"{times:.2f} (processor: {measured.microseconds / bare_used:.2f})",
            "2.5",
            times <= 2.5,
        ),
    ]


def slow_receiver(bench: Bench) -> list[Figure]:
    with timed_receiver(0.05) as receiver, bench.site() as site:
        site.http("shop", receiver.url)
        fill(site, "shop", 20_000)
        measured = bench.drain(site)
    text = f"{measured.rate:,.0f}/s, {measured.microseconds:.0f} us of processor each"
    return [Figure("receiver that takes 50 ms", text, "2,000/s", measured.rate >= 2000)]


def slow_neighbour(bench: Bench) -> list[Figure]:
    """Alone and beside, in turn: the machine may do other things as well."""
    rates: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(3):
        for beside in rates:
            with timed_receiver(10) as slow, bench.site() as site:
                for n in range(20):
                    site.http(f"healthy {n}", bench.url)
                    fill(site, f"healthy {n}", 1500)
                slow_id = site.http("slow", slow.url, timeout=30)
                if beside:
                    fill(site, "slow", 2000)
                rates[beside].append(bench.drain(site, watched=f"endpoint_id <> {slow_id}").rate)
    alone, beside_slow = max(rates[False]), max(rates[True])
    text = f"{beside_slow:,.0f}/s instead of {alone:,.0f}/s: {1 - beside_slow / alone:.0%} less"
    return [Figure("20 healthy endpoints beside one of 10 s", text, "10% less", beside_slow >= 0.9 * alone)]


def ordering(bench: Bench) -> list[Figure]:
    with bench.site() as site:
        site.http("shop", bench.url)
        for n in range(1000):
            site.send("shop", {"n": n}, ordering_key="k")
        measured = bench.drain(site)
    return [Figure("one ordering key, 1,000 messages", f"{measured.rate:,.0f}/s", "300/s", measured.rate >= 300)]


def traffic(bench: Bench, seconds: int = 20) -> list[Figure]:
    with bench.site() as site:
        site.http("shop", bench.url)
        workers = [site.start(seconds=600) for _ in range(2)]
        script = WORK / "bench-traffic.sql"
        script.write_text(f"select ulak.send('shop', jsonb_build_object('n', 1, 'text', '{PAYLOAD}'));\n")
        pgbench = [bench.cluster.bin / "pgbench", "-n", "-M", "prepared", "-c", "8", "-j", "2", "-T", str(seconds)]
        output = run([*pgbench, "-f", script, bench.cluster.dsn(site.database)])
        wait_until(lambda: site.value(SETTLED), 120)
        sent = re.search(r"^tps = ([\d.]+)", output, re.MULTILINE)
        assert sent
        # From the first message sent to the last one settled.
        count, took = site.db.execute("""
            select count(*), extract(epoch from max(completed_at) - min(created_at))::float
            from ulak.queue where status = 'completed'
        """).fetchone() or (0, 1.0)
        used = sum(processor_seconds(worker.pid) for worker in workers) * 1e6 / count
    text = (
        f"{float(sent[1]):,.0f}/s sent, {count / took:,.0f}/s delivered, {used:.0f} us of the workers' processor each"
    )
    return [Figure("8 clients and 2 workers", text, "2,500/s", min(float(sent[1]), count / took) >= 2500)]


PARTS: dict[str, Callable[[Bench], list[Figure]]] = {
    "throughput": throughput,
    "slow-receiver": slow_receiver,
    "slow-neighbour": slow_neighbour,
    "ordering": ordering,
    "traffic": traffic,
}


def show(figures: list[Figure]) -> None:
    rows = [
        (each.name, each.value, each.required, "" if not each.required else "yes" if each.holds else "NO")
        for each in figures
    ]
    print(table(("", "measured", "required", "holds"), rows))
    print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", flush=True)


@contextmanager
def bench_cluster() -> Iterator[Cluster]:
    cluster = Cluster.create(settings=SERVER)
    try:
        cluster.create_database("template_ulak")
        cluster.install("template_ulak")
        yield cluster
    finally:
        cluster.remove()


def main() -> None:
    chosen = [argument.lstrip("-") for argument in sys.argv[1:]] or list(PARTS)
    figures: list[Figure] = []
    with nginx(WORK / "bench-nginx") as url, bench_cluster() as cluster:
        for name in chosen:
            figures += PARTS[name](Bench(cluster, url))
            print(f"{name}: done", file=sys.stderr, flush=True)
    show(figures)


if __name__ == "__main__":
    main()
