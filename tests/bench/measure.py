"""Measuring one connection's work on a machine that does other things as well."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from support.cluster import Cluster, run
from support.sessions import wait_until


class Sample(NamedTuple):
    """Of one transaction, in microseconds: until the client has its answer, and of the server's processor."""

    elapsed: float
    processor: float


class Measured(NamedTuple):
    """What a round gave, for each round. Two things are compared within a round, when the machine was equally busy."""

    samples: list[Sample]

    @property
    def elapsed(self) -> float:
        return statistics.median(sample.elapsed for sample in self.samples)

    @property
    def processor(self) -> float:
        return statistics.fmean(sample.processor for sample in self.samples)

    def times(self, other: Measured) -> float:
        """How many times as long as the other one."""
        pairs = zip(self.samples, other.samples, strict=True)
        return statistics.median(mine.elapsed / theirs.elapsed for mine, theirs in pairs)

    def times_processor(self, other: Measured) -> float:
        return self.processor / other.processor


def interleave(parts: Mapping[str, Callable[[], Sample]], rounds: int) -> dict[str, Measured]:
    """All parts in turn, as often as there are rounds, after one round that doesn't count."""
    samples: dict[str, list[Sample]] = {name: [] for name in parts}
    for number in range(rounds + 1):
        for name, part in parts.items():
            sample = part()
            if number > 0:
                samples[name].append(sample)
    return {name: Measured(taken) for name, taken in samples.items()}


class Pgbench:
    """pgbench with one client and prepared statements: it takes less time of its own than any Python client."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self._cluster = cluster
        self._folder = folder
        self._children_at_rest = len(self._children())

    def script(self, name: str, statement: str) -> Path:
        path = self._folder / f"{name}.sql"
        path.write_text(statement + ";\n")
        return path

    def run(self, database: str, script: Path, transactions: int, variables: Mapping[str, str]) -> Sample:
        command: list[str | Path] = [self._cluster.bin / "pgbench", "-n", "-M", "prepared", "-t", str(transactions)]
        for name, value in variables.items():
            command += ["-D", f"{name}={value}"]
        before = self._processor_time()
        output = run([*command, "-f", script, self._cluster.dsn(database)])
        rate = re.search(r"^tps = ([\d.]+)", output, re.MULTILINE)
        assert rate is not None and "number of failed transactions: 0" in output, output
        return Sample(1e6 / float(rate[1]), (self._processor_time() - before) * 1e6 / transactions)

    def _processor_time(self) -> float:
        """Of all backends that there have been, in seconds. Their parent's account of it is precise to 10 ms."""
        wait_until(lambda: len(self._children()) == self._children_at_rest, message="the end of the last backend")
        fields = (self._postmaster / "stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[13]) + int(fields[14])) / 100

    def _children(self) -> list[str]:
        return (self._postmaster / "task" / self._postmaster.name / "children").read_text().split()

    @property
    def _postmaster(self) -> Path:
        return Path("/proc") / str(self._cluster.postmaster_pid)


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """The first column to the left, the others to the right."""
    lines = [list(head), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if n else cell.ljust(width)
            for n, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )
