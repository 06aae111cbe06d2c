"""A cluster that may be killed, and a world in it for each scenario."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from support.books import Allowance, Report
from support.cluster import TEMPLATE, Cluster, remove_abandoned
from support.recorder import Recorder
from support.scenarios import SCENARIO
from support.world import FULL, World

Close = Callable[..., Report]

_numbers = itertools.count(1)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "full: runs in make chaos only")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = [item for item in items if FULL or item.get_closest_marker("full") is None]


@pytest.fixture(scope="session")
def victim() -> Iterator[Cluster]:
    """A cluster of its own: it is going to crash."""
    remove_abandoned()
    cluster = Cluster.create(settings={"max_connections": 200}, in_memory=not FULL)
    cluster.execute("create extension pg_cron")
    cluster.install(cluster.create_database(TEMPLATE))
    yield cluster
    cluster.remove()


@pytest.fixture
def world(request: pytest.FixtureRequest, victim: Cluster, tmp_path: Path) -> Iterator[World]:
    name = f"world_{next(_numbers)}"
    # A test of upgrades may ask for the last release.
    if release := getattr(request, "param", None):
        victim.install(victim.create_database(name), release)
    else:
        victim.create_database(name, TEMPLATE)
    with Recorder(tmp_path / "arrivals") as recorder:
        yield World(victim, name, recorder)
    if not victim.is_running():
        victim.start()
    victim.execute("delete from cron.job")
    victim.drop_database(name)


@pytest.fixture
def row(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The scenario's row of the table."""
    name = request.node.name.removeprefix("test_").replace("_", " ")
    row = {"scenario": name, "verdict": "broke off"}
    request.node.user_properties.append((SCENARIO, row))
    return row


@pytest.fixture
def close_books(world: World, row: dict[str, Any]) -> Close:
    """Closes the books of a scenario: any problem fails it. Keyword arguments are those of Allowance."""

    def close(refused: frozenset[str] = frozenset(), **allowed: Any) -> Report:
        report = world.audit(Allowance(**allowed))
        row.update(asdict(report), verdict=report.verdict)
        assert not report.problems, f"\n{report}"
        assert report.sent > 0
        # The queue was full; or the server is a standby that isn't promoted yet; or what the scenario itself expects.
        assert world.refused() <= {"53400", "25006", *refused}
        return report

    return close
