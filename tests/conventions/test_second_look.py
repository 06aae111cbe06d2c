"""A red run is looked at twice, and only what chance explains becomes green (second_look.py, support/outcomes.py)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import outcomes
from support.outcomes import Outcomes

MARK = "@pytest.mark.parametrize('url', ['http://x//y'])\n"
PASSES = "def test_it(): pass\n"
FAILS = "def test_it(): assert False, 'as it always does'\n"
# Once in each folder.
FAILS_ONCE = """
from pathlib import Path

def test_it():
    count = Path(__file__).with_suffix('.count')
    count.write_text(count.read_text() + '.' if count.exists() else '.')
    assert len(count.read_text()) != 1, 'the first time'
"""
SHARED = """
import pytest
from pathlib import Path

@pytest.fixture(scope="module")
def server():
    assert Path(__file__).with_suffix('.again').exists(), 'the server says why'

@pytest.mark.parametrize("number", range(33))
def test_it(server, number):
    pass

def test_another():
    Path(__file__).with_suffix('.again').touch()
"""


def look_at(folder: Path, files: dict[str, str], *options: str) -> tuple[int, str, Outcomes | None]:
    """A run of these tests, and what the second look prints."""
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -p support.outcomes -p no:cacheprovider\n")
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    file = folder / "outcomes.json"
    environment = {**os.environ, outcomes.FILE: str(file), "PYTEST_ADDOPTS": ""}
    subprocess.run([sys.executable, "-m", "pytest", *options, str(folder)], env=environment, capture_output=True)
    looking = (
        f"import sys, second_look, pathlib; sys.exit(second_look.main(*map(pathlib.Path, {[str(file), str(folder)]})))"
    )
    done = subprocess.run([sys.executable, "-c", looking], env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout, outcomes.read(file)


def test_a_test_that_failed_once_is_green_and_named_in_the_last_block(tmp_path: Path) -> None:
    code, said, _ = look_at(tmp_path, {"db/test_a.py": FAILS_ONCE, "db/test_b.py": PASSES})

    assert code == 0
    assert "AssertionError: the first time" in said
    assert said.splitlines()[-1] == "unstable: db/test_a.py::test_it (2 times)"
    assert (tmp_path / "db/test_a.count").read_text() == "." * 3


def test_a_race_is_run_ten_times(tmp_path: Path) -> None:
    races = ("concurrency/test_a.py", "db/test_a_machine.py")

    code, said, _ = look_at(tmp_path, dict.fromkeys(races, FAILS_ONCE))

    assert code == 0
    assert said.splitlines()[-2:] == [f"unstable: {race}::test_it (10 times)" for race in races]


def test_a_test_that_fails_again_is_red(tmp_path: Path) -> None:
    code, said, _ = look_at(tmp_path, {"db/test_a.py": FAILS, "db/test_b.py": FAILS_ONCE})

    assert code == 1
    assert "db/test_a.py::test_it failed again, in run 1 of 2 alone" in said
    assert "unstable: " not in said


def test_six_failures_are_red_at_once(tmp_path: Path) -> None:
    code, said, _ = look_at(tmp_path, {f"db/test_{n}.py": FAILS_ONCE for n in range(6)})

    assert code == 1
    assert said == "no second look: 6 tests failed, which is no chance any more\n"


DIES = "import os\ndef test_it(): os._exit(1)\n"
CANT_BE_READ = "import nothing_of_that_name\n"
ONE, SEVERAL = (), ("-n", "2")


@pytest.mark.parametrize(
    "text, processes, told",
    [
        (CANT_BE_READ, ONE, "broken: db/test_a.py"),
        (CANT_BE_READ, SEVERAL, "broken: db/test_a.py"),
        (DIES, ONE, "the run did not come to its end"),
        (DIES, SEVERAL, "db/test_a.py::test_it"),
    ],
)
def test_a_file_that_cannot_be_collected_and_a_process_that_dies_are_red_beside_a_test_that_failed_once(
    tmp_path: Path, text: str, processes: tuple[str, ...], told: str
) -> None:
    code, said, _ = look_at(tmp_path, {"db/test_a.py": text, "db/test_b.py": FAILS_ONCE}, *processes)

    assert (code, said.startswith("no second look: "), told in said) == (1, True, True), said


def test_a_process_that_dies_at_its_end_is_red(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("""
import os

def pytest_sessionfinish(session):
    if hasattr(session.config, "workerinput"):
        os._exit(1)
""")

    code, said, _ = look_at(tmp_path, {"db/test_a.py": PASSES, "db/test_b.py": FAILS_ONCE}, *SEVERAL)

    assert (code, said.startswith("no second look: broken: process gw")) == (1, True), said


def test_the_id_of_a_test_may_have_slashes(tmp_path: Path) -> None:
    text = f"import pytest\n{FAILS_ONCE.replace('def test_it()', MARK + 'def test_it(url)')}"

    code, said, _ = look_at(tmp_path, {"db/test_a.py": text})

    assert (code, said.splitlines()[-1]) == (0, "unstable: db/test_a.py::test_it[http://x//y] (2 times)")


def test_a_shared_fixture_that_half_of_the_suite_needs_is_red_at_once(tmp_path: Path) -> None:
    text = SHARED.replace("range(33)", "range(200)")

    code, said, _ = look_at(tmp_path, {"db/test_a.py": text})

    assert (code, said) == (1, "no second look: 199 tests were not run, because a fixture that they share failed\n")


def test_a_shared_fixture_that_fails_is_one_error_and_all_its_tests_are_run_again(tmp_path: Path) -> None:
    code, said, run = look_at(tmp_path, {"db/test_a.py": SHARED})

    assert run is not None
    assert list(run.failed) == ["db/test_a.py::test_it[0]"]
    assert "AssertionError: the server says why" in said
    assert len(run.followers["db/test_a.py::test_it[0]"]) == 32
    assert (code, said.splitlines()[-1]) == (0, "unstable: db/test_a.py::test_it[0] (2 times)")
