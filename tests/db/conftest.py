"""A queue that every test finds empty: what a test does is rolled back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.cluster import Cluster
from support.queue import DB, Queue

# Marks what others have left in the index of waiting messages. A claim that passes more than 200 such entries resumes (resume.sql).
PASS_THE_DEAD = """
    begin;
    set local enable_seqscan = off; set local enable_bitmapscan = off; set local enable_sort = off;
    select from ulak_private.deliveries where status = 'pending' order by endpoint_id, priority desc, next_retry_at, id limit 1;
    commit;
"""


@pytest.fixture(scope="session")
def rolled_back(cluster: Cluster, template: str) -> Iterator[DB]:
    with cluster.database("rolled_back", template) as name, cluster.connect(name) as connection:
        yield connection


@pytest.fixture
def alone(module_session: DB) -> Iterator[DB]:
    """In the module's database, in a transaction of its own."""
    with module_session.transaction(force_rollback=True):
        yield module_session


@pytest.fixture
def queue(rolled_back: DB) -> Iterator[Queue]:
    """In a transaction of its own, without an endpoint. Time is what the test says."""
    rolled_back.execute(PASS_THE_DEAD)
    with rolled_back.transaction(force_rollback=True):
        yield Queue(rolled_back)


@pytest.fixture
def shop(queue: Queue) -> int:
    """An endpoint like any other; its id."""
    return queue.endpoint("shop")
