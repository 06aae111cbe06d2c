"""A site per test: a database, its workers, and a receiver on loopback. Nothing is shared: attackers leave things behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.cluster import Cluster
from support.receiver import Receiver
from support.site import Site


@pytest.fixture
def site(cluster: Cluster, database: str) -> Iterator[Site]:
    site = Site(cluster, database)
    yield site
    site.close()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as receiver:
        yield receiver
