"""A site per test: a database, its workers, and a receiver on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from support.processes import is_one_of_several, waits_for_the_clock
from support.rehearsal import Rehearsal, Traffic, rehearse
from support.runbook import Played, play


@pytest.fixture(scope="session")
def rehearsal() -> Iterator[Rehearsal]:
    seen = rehearse()
    yield seen
    seen.cluster.remove()


@pytest.fixture(scope="session")
def traffic(rehearsal: Rehearsal) -> Iterator[Traffic]:
    traffic = Traffic(rehearsal.cluster)
    yield traffic
    traffic.end()
    traffic.receiver.close()


@pytest.fixture(scope="session")
def outage() -> Iterator[Future[Played]]:
    """The runbook's, on a server of its own."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(play)


@pytest.fixture(autouse=True)
def early_start(request: pytest.FixtureRequest) -> None:
    """pg_cron's minutes, and those of an outage, pass while other tests run: later ones, or those of other processes."""
    if is_one_of_several(request.config) and not waits_for_the_clock(request.node):
        return
    for name in ("traffic", "outage"):
        if any(name in getattr(item, "fixturenames", ()) for item in request.session.items):
            request.getfixturevalue(name)
