"""`make soak ARGS="--minutes 60"`: steady traffic under pg_cron for a long time. What should stay flat is looked at."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median

from support.books import Allowance
from support.cluster import WORK, Cluster, remove_abandoned
from support.recorder import Recorder
from support.traffic import Producers
from support.world import World

# How much more the last third of the run may show than the second third, which has no warm-up any more.
TOLERANCE = 1.25


@dataclass(frozen=True)
class Sample:
    minute: float
    sent: int
    live: int
    worker_kb: int
    queue_kb: int
    index_kb: int
    send_p99_ms: float


# What may not grow, and below which value growth is noise.
FLAT = {"live": 1000, "worker_kb": 8192, "queue_kb": 8192, "index_kb": 8192, "send_p99_ms": 20.0}

SIZES = "select array[pg_table_size('ulak_private.deliveries'), pg_indexes_size('ulak_private.deliveries')]"


def private_memory(pid: int) -> int:
    """What a process has for itself, in kB: shared buffers, which every backend maps bit by bit, don't count."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except FileNotFoundError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("RssAnon:")), 0)


def take_sample(world: World, producers: Producers, since: float) -> Sample:
    table, indexes = world.value(SIZES)
    durations = sorted(duration for at, duration in list(producers.durations) if at >= since)
    return Sample(
        minute=round(producers.elapsed() / 60, 1),
        sent=len(producers.confirmed),
        live=world.live(),
        worker_kb=max(map(private_memory, world.worker_pids()), default=0),
        queue_kb=table // 1024,
        index_kb=indexes // 1024,
        send_p99_ms=round(durations[int(len(durations) * 0.99)] * 1000, 1) if durations else 0.0,
    )


def growth(samples: list[Sample]) -> list[str]:
    """What grew from the second third of a run to its last."""
    third = len(samples) // 3
    grown = []
    for name, noise in FLAT.items():
        before = median(getattr(sample, name) for sample in samples[third : 2 * third])
        after = median(getattr(sample, name) for sample in samples[2 * third :])
        if after > max(before * TOLERANCE, noise):
            grown.append(f"{name} grew from {before} to {after}")
    return grown


def soak(world: World, minutes: float, rate: int, every: float) -> list[Sample]:
    world.endpoint()
    world.value("select ulak.configure('archive_after', '60')")
    names = [field.name for field in fields(Sample)]
    print(("{:>13}" * len(names)).format(*names), flush=True)
    samples: list[Sample] = []
    producers = world.producers(count=4, pause=4 / rate)
    since = 0.0
    with world.by_cron(), producers:
        while since < minutes * 60:
            time.sleep(every)
            samples.append(take_sample(world, producers, since))
            since = producers.elapsed()
            print(("{:>13}" * len(names)).format(*asdict(samples[-1]).values()), flush=True)
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(prog="make soak")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--rate", type=int, default=200, help="orders a second")
    parser.add_argument("--every", type=float, default=30, help="seconds between two looks")
    chosen = parser.parse_args()

    remove_abandoned()
    cluster = Cluster.create()
    try:
        cluster.execute("create extension pg_cron")
        cluster.install(cluster.create_database("soak"))
        with tempfile.TemporaryDirectory() as folder, Recorder(Path(folder) / "arrivals") as recorder:
            world = World(cluster, "soak", recorder)
            samples = soak(world, chosen.minutes, chosen.rate, chosen.every)
            world.deliver_the_rest()
            report = world.audit(Allowance(duplicates=True))
    finally:
        cluster.remove()

    grown = growth(samples)
    file = WORK / "soak.json"
    file.write_text(json.dumps({"samples": [*map(asdict, samples)], "books": asdict(report), "grown": grown}, indent=1))
    print(f"\nbooks: {report}\n{'flat' if not grown else '; '.join(grown)}\nwritten to {file}")
    if grown or report.problems:
        sys.exit(1)


if __name__ == "__main__":
    main()
