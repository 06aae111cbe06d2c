"""How long a node waits before it tries again to reach its database, and how often it says why. Time passes as the test says."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from support.node import PROGRAM
from support.stage import Clock


def load() -> Any:
    """docker/node/worker.py, which is a program and in no package."""
    spec = importlib.util.spec_from_file_location("node_program", PROGRAM)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


program = load()


class Process(program.Process):  # type: ignore[misc]
    """Its waits pass at once, and are remembered like what it says."""

    def __init__(self, clock: Clock, tries: int) -> None:
        super().__init__()
        self.waits: list[float] = []
        self.said: list[tuple[float, str]] = []
        self._clock = clock
        self._tries = tries

    def wait(self, seconds: float) -> None:
        self.waits.append(seconds)
        self._clock.now += seconds
        if len(self.waits) == self._tries:
            self.leave = "stop"

    def log(self, line: str) -> None:
        self.said.append((self._clock.now, line))


class Node(program.Node):  # type: ignore[misc]
    """Each of its connections is lost after as many seconds as the test says; later ones at once."""

    def __init__(self, process: Process, clock: Clock, lasting: Iterable[float]) -> None:
        super().__init__("", "here", process)
        self._clock = clock
        self._lasting = iter(lasting)

    def _serve(self) -> None:
        self._clock.now += next(self._lasting, 0.0)
        raise ConnectionError("the database is away")


@pytest.fixture
def try_again(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Process]:
    """A node that tries so often. Of the waits that it may choose from it takes the longest, or another one."""

    def run(tries: int, lasting: Iterable[float] = (), choose: Callable[[float, float], float] = max) -> Process:
        clock = Clock()
        monkeypatch.setattr(program, "time", SimpleNamespace(monotonic=clock))
        monkeypatch.setattr(program, "random", SimpleNamespace(uniform=choose))
        process = Process(clock, tries)
        Node(process, clock, lasting).run()
        return process

    return run


@pytest.mark.parametrize(("choose", "part"), [(max, 1.0), (min, 0.5)])
def test_a_node_tries_again_each_second(
    try_again: Callable[..., Process], choose: Callable[[float, float], float], part: float
) -> None:
    """However long its database was away: a wait that grew with the outage would be added to it. Many nodes don't try at the same moment."""
    waits = try_again(100, choose=choose).waits

    assert waits == [part * each for each in [0.25, 0.5, *[1.0] * 98]]


def test_after_a_connection_that_lasted_it_waits_as_short_as_at_first(try_again: Callable[..., Process]) -> None:
    waits = try_again(8, lasting=[0.0, 0.0, 0.0, 0.0, 1.5]).waits

    assert waits == [0.25, 0.5, 1.0, 1.0, 0.25, 0.5, 1.0, 1.0]


def test_it_says_why_once_in_a_while(try_again: Callable[..., Process]) -> None:
    (began, first), *others = try_again(60).said

    assert first == "the database is away"
    # With the first try after 15 seconds: the third wait, and each later one, ends at three quarters of a second.
    assert [(at - began, said) for at, said in others] == [(each, first) for each in (15.75, 30.75, 45.75)]
