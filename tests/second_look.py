"""What .ci/run does after a red run: the tests that failed are run again, each alone and on fresh clusters.

If only a few failed, and each passes every time now, the run counts as green and names them as unstable. Everything else stays red: a run that
didn't come to its end (lint), a file that can't be collected, a process that died, or more failures than chance explains.

    python -m second_look FILE      what support.outcomes wrote of the run, in the folder of the run
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from support import outcomes
from support.cluster import WORK
from support.outcomes import Outcomes

MOST = 5
# Those that weren't run because a fixture failed that they share with one that did. Behind a cluster that didn't start it is half of the suite.
MOST_FOLLOWERS = 100
TIMES = 2
# A race shows itself rarely.
RACES = re.compile(r"^(concurrency|chaos|security|nodes)/|_machine\.py::")
TIMES_OF_RACES = 10


def verdict(run: Outcomes | None) -> str | None:
    """Why there is no second look at this run; None if there is one."""
    if run is None:
        return "the run did not come to its end"
    if run.broken:
        return f"broken: {', '.join(run.broken)}"
    if run.exit != 1 or not run.failed:
        return f"pytest ended with {run.exit}"
    if len(run.failed) > MOST:
        return f"{len(run.failed)} tests failed, which is no chance any more"
    if (followers := sum(map(len, run.followers.values()))) > MOST_FOLLOWERS:
        return f"{followers} tests were not run, because a fixture that they share failed"
    return None


def times_of(test: str) -> int:
    return TIMES_OF_RACES if RACES.search(test) else TIMES


def passes(tests: Sequence[str], folder: Path, file: Path) -> bool:
    """All of these tests, in a run of their own."""
    file.unlink(missing_ok=True)
    environment = {**os.environ, outcomes.FILE: str(file)}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *(f"{folder}/{test}" for test in tests)],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    seen = outcomes.read(file)
    if done.returncode == 0 and seen is not None and seen.passed == len(tests):
        return True
    print(done.stdout, flush=True)
    return False


def look_again(run: Outcomes, folder: Path, file: Path) -> bool:
    print("\n\n".join(run.failed.values()), flush=True)
    for test in run.failed:
        tests = [test, *run.followers.get(test, ())]
        for number in range(times_of(test)):
            if not passes(tests, folder, file):
                print(f"\n{test} failed again, in run {number + 1} of {times_of(test)} alone")
                return False
    print("\nThese tests failed once, and then passed each time alone on fresh clusters:")
    for test in run.failed:
        print(f"unstable: {test} ({times_of(test)} times)")
    return True


def main(file: Path, folder: Path = Path(__file__).parent) -> int:
    run = outcomes.read(file)
    if (reason := verdict(run)) is not None:
        print(f"no second look: {reason}")
        return 1
    assert run is not None
    return 0 if look_again(run, folder, file.with_suffix(".again")) else 1


if __name__ == "__main__":
    sys.exit(main(WORK / sys.argv[1]))
