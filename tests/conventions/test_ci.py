"""What .ci/run makes of the tests here, on newer servers and in a fresh Debian 13, and of the second look at each."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from support.cluster import PROJECT

HERE, LOOK_HERE = "make test", "sandbox.sh python -m second_look"
DEBIAN = "debian.sh trixie --"
MADE, THERE, LOOK_THERE = f"{DEBIAN} tests/sandbox.sh true", f"{DEBIAN} make test", f"{DEBIAN} tests/{LOOK_HERE}"
NOT_RUN = "not run: make test in Debian 13, because that can't be made here (the reason is above)"
HAVE = "sandbox.sh true"
PLAIN = [each for major in (16, 17, 18) for each in (HAVE, f"make test-plain PLAIN_MAJORS={major}")]

# In place of what it calls. The name of the file is the same in a run and in the second look at it.
PROGRAM = """#!/bin/bash
call="$(basename "$0") $*"
cd {folder}
echo "$call ${{ULAK_OUTCOMES:-}}" >> calls
if [[ $call == *second_look* ]]; then echo "unstable: as $call says"; fi
while read -r red; do
    if [[ "$call " == "$red "* ]]; then exit 1; fi
done < red
"""


class Ci:
    """Everything that it calls ends well, except what is red."""

    def __init__(self, folder: Path, *red: str) -> None:
        self.folder = folder
        (folder / "red").write_text("".join(f"{call}\n" for call in red))
        for name in (".ci", "tests"):
            (folder / name).mkdir()
        shutil.copy(PROJECT / ".ci/run", folder / ".ci/run")
        for name in ("make", "tests/sandbox.sh", "tests/debian.sh"):
            (folder / name).write_text(PROGRAM.format(folder=folder))
            (folder / name).chmod(0o755)

    def run(self) -> None:
        environment = {**os.environ, "PATH": f"{self.folder}:{os.environ['PATH']}"}
        command = [str(self.folder / ".ci/run")]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.code = done.returncode
        self.lines = done.stdout.splitlines()
        calls = [call.partition(" outcomes-") for call in (self.folder / "calls").read_text().splitlines()]
        self.calls = [call.strip() for call, _, _ in calls]
        self.files = [file.strip() for _, _, file in calls]


def test_it_runs_the_tests_here_and_in_debian_13(tmp_path: Path) -> None:
    ci = Ci(tmp_path)

    ci.run()

    assert ci.calls == [HERE, *PLAIN, MADE, THERE]
    assert (ci.code, ci.lines) == (0, [])
    assert len({*ci.files}) == 6, "a file for each run, and none for what makes a server or the Debian"


def test_what_fails_here_is_looked_at_here_and_named_at_the_end(tmp_path: Path) -> None:
    ci = Ci(tmp_path, HERE)

    ci.run()

    assert ci.calls == [HERE, LOOK_HERE, *PLAIN, MADE, THERE]
    assert ci.files[0] == ci.files[1]
    assert ci.code == 0
    assert ci.lines[-1].startswith(f"unstable: as {LOOK_HERE}")


def test_what_fails_in_debian_13_is_looked_at_there_and_named_at_the_end(tmp_path: Path) -> None:
    ci = Ci(tmp_path, THERE)

    ci.run()

    assert ci.calls == [HERE, *PLAIN, MADE, THERE, LOOK_THERE]
    assert ci.files[-2] == ci.files[-1]
    assert ci.code == 0
    assert ci.lines[-1].startswith(f"unstable: as {LOOK_THERE}")


def test_what_fails_here_again_is_red(tmp_path: Path) -> None:
    ci = Ci(tmp_path, HERE, LOOK_HERE)

    ci.run()

    assert ci.code != 0


def test_what_fails_in_debian_13_again_is_red(tmp_path: Path) -> None:
    ci = Ci(tmp_path, THERE, LOOK_THERE)

    ci.run()

    assert ci.code != 0


def test_what_fails_on_a_newer_server_is_looked_at_there_and_is_red_if_it_fails_again(tmp_path: Path) -> None:
    once, again = tmp_path / "once", tmp_path / "again"
    for folder, red in ((once, [PLAIN[3]]), (again, [PLAIN[3], LOOK_HERE])):
        folder.mkdir()
        ci = Ci(folder, *red)
        ci.run()

        assert ci.calls[:6] == [HERE, *PLAIN[:4], LOOK_HERE]
        assert ci.files[4] == ci.files[5]
        assert (ci.code == 0) == (folder == once)


def test_a_newer_server_that_cannot_be_had_is_green_and_named_at_the_end(tmp_path: Path) -> None:
    ci = Ci(tmp_path, HAVE)

    ci.run()

    assert ci.calls == [HERE, HAVE, HAVE, HAVE, MADE, THERE]
    assert ci.code == 0
    assert [line.partition(",")[0] for line in ci.lines[-3:]] == [
        f"not run: make test-plain on PostgreSQL {major}" for major in (16, 17, 18)
    ]


def test_a_debian_13_that_cannot_be_made_is_green_and_named_at_the_end(tmp_path: Path) -> None:
    ci = Ci(tmp_path, HERE, MADE)

    ci.run()

    assert ci.calls == [HERE, LOOK_HERE, *PLAIN, MADE]
    assert ci.code == 0
    assert ci.lines[-2].startswith("unstable: ")
    assert ci.lines[-1] == NOT_RUN


def test_without_root_there_is_no_debian_13(tmp_path: Path) -> None:
    """And no other program than its own says so."""
    ci = Ci(tmp_path)
    shutil.copy(PROJECT / "tests/debian.sh", tmp_path / "tests/debian.sh")

    ci.run()

    assert ci.calls == [HERE, *PLAIN]
    assert ci.code == 0
    assert "only root can make a Debian" in ci.lines
    assert ci.lines[-1] == NOT_RUN
