"""Measuring one connection's work on a machine that does other things as well."""

from __future__ import annotations

import os
import re
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import psycopg
from support.cluster import Cluster, run
from support.sessions import wait_until


def processor_seconds(pid: int | str) -> float:
    """What a process has had of the processors so far. The scheduler's own account is precise to the nanosecond; where
    the kernel keeps none, the one in ticks has to do, which misjudges a process that wakes and sleeps with the clock."""
    process = Path("/proc") / str(pid)
    accounts = [thread / "schedstat" for thread in (process / "task").iterdir()]
    if all(account.exists() for account in accounts):
        return sum(int(account.read_text().split()[0]) for account in accounts) / 1e9
    fields = (process / "stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Sample(NamedTuple):
    """Of one transaction, in microseconds: until the next one is through, and of the server's processor."""

    elapsed: float
    processor: float


def sample(db: psycopg.Connection[Any], work: Callable[[], int]) -> Sample:
    """Of each of the messages that `work`, which uses this session, says it has done."""
    used, began = processor_seconds(db.info.backend_pid), time.perf_counter()
    messages = work()
    elapsed = time.perf_counter() - began
    used = processor_seconds(db.info.backend_pid) - used
    return Sample(elapsed * 1e6 / messages, used * 1e6 / messages)


class Measured(NamedTuple):
    """What a round gave, for each round. Two things are compared within a round, when the machine was equally busy."""

    samples: list[Sample]

    @property
    def elapsed(self) -> float:
        return statistics.median(sample.elapsed for sample in self.samples)

    @property
    def rate(self) -> float:
        return 1e6 / self.elapsed

    @property
    def processor(self) -> float:
        return statistics.fmean(sample.processor for sample in self.samples)

    def times(self, other: Measured) -> float:
        """How many times as long as the other one."""
        pairs = zip(self.samples, other.samples, strict=True)
        return statistics.median(mine.elapsed / theirs.elapsed for mine, theirs in pairs)

    def times_processor(self, other: Measured) -> float:
        """Where the other one took less than the clock shows, the time has to do."""
        return self.processor / other.processor if other.processor else self.times(other)

    def least_times(self, other: Measured) -> float:
        """The machine may have been busy with something else, or the clock too coarse: not both."""
        return min(self.times(other), self.times_processor(other))

    def of(self, other: Measured) -> float:
        """Its rate as a part of the other's. Where the rounds differ in number they aren't compared one by one."""
        if len(self.samples) != len(other.samples):
            return self.rate / other.rate
        return 1 / self.times(other)


Name = TypeVar("Name", bound=Hashable)


def interleave(parts: Mapping[Name, Callable[[], Sample]], rounds: int, unmeasured: int = 1) -> dict[Name, Measured]:
    """All parts in turn, as often as there are rounds, after some that don't count."""
    samples: dict[Name, list[Sample]] = {name: [] for name in parts}
    for number in range(unmeasured + rounds):
        for name, part in parts.items():
            sample = part()
            if number >= unmeasured:
                samples[name].append(sample)
    return {name: Measured(taken) for name, taken in samples.items()}


class Pgbench:
    """pgbench with prepared statements: it takes less time of its own than any Python client."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self._cluster = cluster
        self._folder = folder

    def script(self, name: str, statement: str) -> Path:
        path = self._folder / f"{name}.sql"
        path.write_text(statement + ";\n")
        return path

    def run(
        self,
        database: str,
        script: Path,
        transactions: int,
        variables: Mapping[str, str],
        clients: int = 1,
        settings: Mapping[str, str] | None = None,
    ) -> Sample:
        """This many transactions in all, by this many clients at once, with these settings of their sessions."""
        each = max(1, transactions // clients)
        command: list[str | Path] = [self._cluster.bin / "pgbench", "-n", "-M", "prepared", "-t", str(each)]
        command += ["-c", str(clients), "-j", str(min(clients, 2))]
        for name, value in variables.items():
            command += ["-D", f"{name}={value}"]
        options = " ".join(f"-c {name}={value}" for name, value in (settings or {}).items())
        before = self._processor_time(database)
        output = run([*command, "-f", script, self._cluster.dsn(database)], env={**os.environ, "PGOPTIONS": options})
        rate = re.search(r"^tps = ([\d.]+)", output, re.MULTILINE)
        assert rate is not None and "number of failed transactions: 0" in output, output
        return Sample(1e6 / float(rate[1]), (self._processor_time(database) - before) * 1e6 / (each * clients))

    def _processor_time(self, database: str) -> float:
        """Of all backends that have ended, in seconds. Their parent's account of it is precise to 10 ms."""
        wait_until(lambda: not self._is_used(database), message="the end of the last backend")
        fields = (self._postmaster / "stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")

    def _is_used(self, database: str) -> bool:
        """By a backend, or by one that has ended without its parent having noticed, which has no title any more."""
        for child in (self._postmaster / "task" / self._postmaster.name / "children").read_text().split():
            with suppress(FileNotFoundError, ProcessLookupError):
                title = Path(f"/proc/{child}/cmdline").read_bytes()
                if not title or f" {database} ".encode() in title:
                    return True
        return False

    @property
    def _postmaster(self) -> Path:
        return Path("/proc") / str(self._cluster.postmaster_pid)


def percentile(values: Sequence[float], share: float) -> float:
    """The value that this share of them doesn't exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]
