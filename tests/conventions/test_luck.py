"""No test waits for luck: what made tests fail on a busy machine doesn't come back."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
# They measure, or show something to people.
NOT_TESTS = {"bench", "demo", "docker", "mutants", "unstable.py"}
FILES = [file for file in sorted(TESTS.rglob("*.py")) if file.relative_to(TESTS).parts[0] not in NOT_TESTS]

# A call that waits, and the place of its time-out among the positional arguments.
WAITS = {
    "HTTPConnection": 2,
    "acquire": 1,
    "as_completed": 1,
    "communicate": 1,
    "create_connection": 1,
    "join": 0,
    "notifies": None,
    "result": 0,
    "run": None,
    "settimeout": 0,
    "urlopen": 2,
    "wait": 0,
    "wait_for": 1,
    "wait_until": 2,
    "wait_until_settled": 0,
}
CLOCKS = {"monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "process_time", "thread_time"}

# file: names of functions that may, each for the reason beside it.
MAY_SLEEP: dict[str, set[str]] = {
    # The one wait that all others are made of.
    "support/sessions.py": {"wait_until"},
    # They measure, or show something to people.
    "chaos/soak.py": {"soak"},
    "support/runbook.py": {"_go_down"},
    # A consumer stands still for longer than it waits for messages; how much longer doesn't matter.
    "worker/test_readme.py": {"stand_still"},
}
MAY_READ_THE_CLOCK: dict[str, set[str]] = {
    "support/sessions.py": {"wait_until"},
    # For the table of scenarios, for bounds in the full form, and for the bench.
    "support/traffic.py": {"stopwatch"},
    "support/timed_receiver.py": {"data_received"},
    # It counts how long a call that must not wait has slept, and not the time in which others had the processor; the shortest of several
    # tries counts.
    "unit/test_broker_loop.py": {"__call__"},
}
MAY_TAKE_A_PORT: dict[str, set[str]] = {
    "support/ports.py": {"closed_port", "start_on_free_port"},
    # Of a socket in a folder of its own.
    "support/debians_cluster.py": {"__init__"},
    # Servers that know each other's addresses before one of them is started; only make chaos runs them.
    "support/patroni.py": {"__init__"},
}

# Of these, ids, times and secrets are made: a short text of them comes up by chance.
OF_CHANCE = re.compile(r"[0-9a-f.:-]{1,11}", re.IGNORECASE)


class Reading(ast.NodeVisitor):
    """Each call and each assertion of a file, with the function that it stands in."""

    def __init__(self, file: Path) -> None:
        self.found: list[tuple[str, ast.Call | ast.Assert]] = []
        self._functions = [""]
        self.visit(ast.parse(file.read_text()))

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._functions.append(node.name)
        self.generic_visit(node)
        self._functions.pop()

    def visit_Call(self, node: ast.Call) -> None:
        self.found.append((self._functions[-1], node))
        self.generic_visit(node)

    def visit_Assert(self, node: ast.Assert) -> None:
        self.found.append((self._functions[-1], node))
        self.generic_visit(node)


READ = {file.relative_to(TESTS).as_posix(): Reading(file).found for file in FILES}


def calls(*names: str) -> Iterator[tuple[str, str, ast.Call]]:
    """File, function and call of these names."""
    for file, found in READ.items():
        for function, node in found:
            if isinstance(node, ast.Call) and name_of(node) in names:
                yield file, function, node


def name_of(call: ast.Call) -> str:
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


def refused(found: Iterator[tuple[str, str, ast.AST]], allowed: dict[str, set[str]]) -> list[str]:
    return [
        f"{file}:{node.lineno} in {function}()"  # type: ignore[attr-defined]
        for file, function, node in found
        if function not in allowed.get(file, ())
    ]


def is_number(node: ast.AST) -> bool:
    """Written down, also as a multiple of something."""
    if isinstance(node, ast.BinOp):
        return is_number(node.left) or is_number(node.right)
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float) and node.value != 0


def timeouts(call: ast.Call) -> Iterator[ast.AST]:
    if isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Constant):
        # join() of a text.
        return
    place = WAITS[name_of(call)]
    if place is not None and len(call.args) > place:
        yield call.args[place]
    given = ("timeout", "seconds") if name_of(call).startswith("wait_") else ("timeout",)
    yield from (each.value for each in call.keywords if each.arg in given)


def is_short(node: ast.AST) -> bool:
    if not isinstance(node, ast.Constant) or not isinstance(node.value, str | bytes):
        return False
    return bool(OF_CHANCE.fullmatch(node.value if isinstance(node.value, str) else node.value.decode("latin-1")))


def test_no_wait_has_a_number_of_its_own() -> None:
    """support.sessions has one patience for all."""
    numbers = ((file, function, call) for file, function, call in calls(*WAITS) if any(map(is_number, timeouts(call))))

    assert refused(numbers, {}) == []


def test_nothing_sleeps() -> None:
    sleeps = (found for found in calls("sleep", "pg_sleep") if ast.unparse(found[2]) != "asyncio.sleep(0)")

    assert refused(sleeps, MAY_SLEEP) == []


def test_no_test_measures_time() -> None:
    """Durations are the bench's. Promised times are tested where time is given."""
    assert refused(calls(*CLOCKS), MAY_READ_THE_CLOCK) == []


def test_every_server_is_started_on_a_port_that_can_be_another_one() -> None:
    assert refused(calls("free_port"), MAY_TAKE_A_PORT) == []


def test_no_port_is_picked_elsewhere() -> None:
    def picked() -> Iterator[tuple[str, str, ast.AST]]:
        for file, function, call in calls("bind", "create_server"):
            places = [each for each in ast.walk(call) if isinstance(each, ast.Tuple) and len(each.elts) > 1]
            if any(is_number(each.elts[1]) for each in places):
                yield file, function, call

    assert refused(picked(), {}) == []


def test_no_test_looks_for_a_short_text_in_what_has_random_ids() -> None:
    def looked_for() -> Iterator[tuple[str, str, ast.AST]]:
        for file, found in READ.items():
            for function, node in found:
                for each in ast.walk(node) if isinstance(node, ast.Assert) else ():
                    if isinstance(each, ast.Compare) and isinstance(each.ops[0], ast.NotIn) and is_short(each.left):
                        yield file, function, node

    assert refused(looked_for(), {}) == []


def test_no_test_has_a_time_out_of_its_own() -> None:
    """The one of pyproject.toml ends the process of a test that hangs, and is far from any patience."""
    marks = (found for found in calls("timeout") if ast.unparse(found[2].func) == "pytest.mark.timeout")

    assert refused(marks, {}) == []


@pytest.mark.parametrize("allowed", [MAY_SLEEP, MAY_READ_THE_CLOCK, MAY_TAKE_A_PORT])
def test_the_exceptions_are_still_there(allowed: dict[str, set[str]]) -> None:
    functions = {(file, function) for file, found in READ.items() for function, _ in found}

    assert {(file, each) for file, names in allowed.items() for each in names} <= functions
