"""A site per test: a database, its workers, and a receiver on loopback."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.cluster import Cluster
from support.receiver import Certificate, Receiver, make_certificate
from support.rehearsal import Rehearsal, Traffic, rehearse
from support.site import Site


@pytest.fixture(scope="session")
def site_database(cluster: Cluster, template: str) -> Iterator[str]:
    name = cluster.create_database("site", template)
    yield name
    cluster.drop_database(name)


@pytest.fixture
def site(cluster: Cluster, site_database: str) -> Iterator[Site]:
    """In a database that the tests share: each leaves it empty."""
    site = Site(cluster, site_database)
    yield site
    site.close()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as receiver:
        yield receiver


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    """For localhost and 127.0.0.1."""
    return make_certificate(tmp_path_factory.mktemp("tls"))


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
