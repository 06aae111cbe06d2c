"""A database for the races of a module, and sessions that meet in it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.cluster import Cluster, Connect
from support.queue import Begin, Queue, Sessions


@pytest.fixture(scope="module")
def database(request: pytest.FixtureRequest, cluster: Cluster, template: str) -> Iterator[str]:
    """A session that waits where it must not gives up before the test does."""
    name = cluster.create_database(request.path.stem, template)
    cluster.execute(f"alter database {name} set statement_timeout = '20s'")
    yield name
    cluster.drop_database(name)


@pytest.fixture
def queue(connect: Connect) -> Queue:
    queue = Queue(connect())
    queue.empty()
    return queue


@pytest.fixture
def begin(connect: Connect, queue: Queue) -> Begin:
    """A session that stays in its transaction until it commits."""
    return lambda: Queue(connect(autocommit=False), queue.base)


@pytest.fixture
def sessions(connect: Connect, queue: Queue) -> Sessions:
    return lambda count: [Queue(connect(), queue.base) for _ in range(count)]
