"""What became of a run's tests: written to a file, for the second look of .ci/run and for make unstable. A plugin of pytest."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

from support.cluster import WORK
from support.files import write_whole
from support.processes import is_one_of_several

# Where to write it: the name of a file in the folder of the run. Without it nothing is written.
FILE = "ULAK_OUTCOMES"
FOLLOWS = "follows"


@dataclass
class Outcomes:
    """Of a run that came to its end. Tests by their ids."""

    # pytest's: 0 if all is well, 1 if tests failed, anything else if it didn't come that far.
    exit: int = 0
    passed: int = 0
    # With what pytest says of each.
    failed: dict[str, str] = field(default_factory=dict)
    # Tests that weren't run because a fixture that they share had failed in another one, by that one.
    followers: dict[str, list[str]] = field(default_factory=dict)
    # What no second look can mend: tests that ended their process, processes that ended by themselves, files that can't be collected.
    broken: list[str] = field(default_factory=list)


def read(file: Path) -> Outcomes | None:
    """None: the run didn't come to its end."""
    return Outcomes(**json.loads(file.read_text())) if file.exists() else None


class Collecting:
    def __init__(self, file: Path) -> None:
        self._file = file
        self._outcomes = Outcomes()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            text = f"{report.nodeid}, {report.when}\n{report.longreprtext}"
            # What fails at the end of a test that failed is its consequence.
            self._outcomes.failed.setdefault(report.nodeid, text)
        elif report.passed and report.when == "call":
            self._outcomes.passed += 1
        for name, first in report.user_properties:
            if name == FOLLOWS and report.when == "setup":
                self._outcomes.followers.setdefault(str(first), []).append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._outcomes.broken.append(report.nodeid)

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str) -> None:
        self._outcomes.broken.append(crashitem)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        if error:
            self._outcomes.broken.append(f"process {node.gateway.id}")

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self._outcomes.exit = int(exitstatus)
        write_whole(self._file, json.dumps(asdict(self._outcomes)))


class Following:
    """A shared fixture that fails is one error, of the first test that asked for it. The others are skipped, and say because of which."""

    def __init__(self) -> None:
        # By the error, which pytest keeps and raises again.
        self._first: dict[BaseException, str] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[Any]) -> Any:
        report: pytest.TestReport = yield
        if call.when == "setup" and report.failed and call.excinfo is not None:
            first = self._first.setdefault(call.excinfo.value, item.nodeid)
            if first != item.nodeid:
                report.outcome = "skipped"
                report.longrepr = (str(item.path), 0, f"Skipped: a fixture that it shares failed in {first}")
                report.user_properties.append((FOLLOWS, first))
        return report


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Following())
    # Taken out of the environment: what a test starts isn't this run.
    if (file := os.environ.pop(FILE, None)) and not is_one_of_several(config):
        config.pluginmanager.register(Collecting(WORK / file))
