"""The whole suite again and again, in random order, with and without two busy loops beside it: which tests don't pass every time?

make unstable ARGS="--runs 10"
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support import outcomes
from support.cluster import WORK
from support.traffic import stopwatch

BUSY = "while True: pass"
LOOPS = 2


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    loops = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def run_once(number: int, tests: list[str]) -> Counter[str]:
    """Every second run has company. What failed, and what pytest prints is kept in a file."""
    seed = random.SystemRandom().randrange(1 << 32)
    loops = LOOPS if number % 2 == 0 else 0
    file, log = WORK / f"unstable-{number}.json", WORK / f"unstable-{number}.log"
    file.unlink(missing_ok=True)
    environment = {**os.environ, outcomes.FILE: str(file), "ULAK_SEED": str(seed)}
    elapsed = stopwatch()
    with busy_loops(loops), log.open("w") as output:
        subprocess.run([sys.executable, "-m", "pytest", *tests], env=environment, stdout=output, stderr=output)
    seen = outcomes.read(file)
    failed = Counter(["a run that did not come to its end"] if seen is None else {*seen.failed, *seen.broken})
    if seen is not None and seen.exit != 0 and not failed:
        failed[f"pytest's exit {seen.exit}"] += 1
    passed = 0 if seen is None else seen.passed
    print(
        f"run {number}: {passed} passed, {sum(failed.values())} failed in {elapsed():.0f} s, "
        f"order {seed}, {loops} busy loops: {log}",
        flush=True,
    )
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(prog="make unstable")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("tests", nargs="*", default=["-n", "3", str(Path(__file__).parent)])
    asked, rest = parser.parse_known_args()
    tests = [*rest, *asked.tests]
    failed: Counter[str] = Counter()
    for number in range(1, asked.runs + 1):
        failed += run_once(number, tests)
    for test, times in failed.most_common():
        print(f"unstable: {test} ({times} of {asked.runs} runs)")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
