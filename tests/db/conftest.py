"""A queue that every test finds empty: what a test does is rolled back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.cluster import Cluster
from support.finished import shared_database
from support.queue import DB, Queue


@pytest.fixture(scope="session")
def rolled_back(cluster: Cluster, template: str) -> Iterator[DB]:
    with shared_database(cluster, "rolled_back", template) as connection:
        yield connection


@pytest.fixture
def queue(rolled_back: DB) -> Iterator[Queue]:
    """In a transaction of its own, without an endpoint. Time is what the test says."""
    with rolled_back.transaction(force_rollback=True):
        yield Queue(rolled_back)
