"""A site per test: a database, its workers, and a receiver on loopback."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.rehearsal import Rehearsal, Traffic, rehearse


@pytest.fixture(scope="session")
def rehearsal() -> Iterator[Rehearsal]:
    seen = rehearse()
    yield seen
    seen.cluster.remove()


@pytest.fixture(scope="session")
def traffic(rehearsal: Rehearsal) -> Iterator[Traffic]:
    traffic = Traffic(rehearsal.cluster)
    yield traffic
    traffic.receiver.close()


@pytest.fixture(scope="session", autouse=True)
def early_start(request: pytest.FixtureRequest) -> None:
    """pg_cron's minutes pass while other tests run."""
    if any("traffic" in getattr(item, "fixturenames", ()) for item in request.session.items):
        request.getfixturevalue("traffic")
