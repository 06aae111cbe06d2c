"""A database with nodes instead of workers, and a receiver on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from support.cluster import Cluster
from support.node import Held, Node, StartNode, node_dsn
from support.site import Site


@pytest.fixture(scope="session", autouse=True)
def pg_cron(cluster: Cluster) -> None:
    """For start(), in its own database."""
    cluster.execute("create extension if not exists pg_cron", cluster.setting("cron.database_name"))


@pytest.fixture
def site(cluster: Cluster, database: str) -> Iterator[Site]:
    site = Site(cluster, database)
    yield site
    site.end()


@pytest.fixture
def start_node(site: Site) -> Iterator[StartNode]:
    """A node that delivers; by keyword what is added to its DSN."""
    with ExitStack() as stack:

        def start(name: str = "here", **options: Any) -> Node:
            node = stack.enter_context(Node(node_dsn(site.cluster, site.database, **options), "--name", name))
            node.wait_until_says("delivering as")
            return node

        yield start


@pytest.fixture
def held() -> Iterator[Held]:
    with Held() as held:
        yield held
