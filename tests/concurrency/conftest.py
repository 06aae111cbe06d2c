"""A database for the races of a module, and sessions that meet in it."""

from __future__ import annotations

import pytest
from support.cluster import Cluster, Connect
from support.queue import Begin, Queue, Sessions


@pytest.fixture(scope="module")
def database(cluster: Cluster, module_database: str) -> str:
    """A session that waits where it must not gives up before pytest does."""
    cluster.execute(f"alter database {module_database} set statement_timeout = '10min'")
    return module_database


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
