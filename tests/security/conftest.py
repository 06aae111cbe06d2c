"""Attacks, one file per attacker: a database with real workers, and receivers on loopback."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager

import pytest
from support.cluster import Cluster
from support.receiver import Answer, Received, Receiver
from support.site import Site

SiteIn = Callable[[str], Site]


@pytest.fixture
def own_site(cluster: Cluster, database: str) -> Iterator[Site]:
    """In a database of its own, for attackers who leave things behind."""
    site = Site(cluster, database)
    yield site
    site.close()


@pytest.fixture
def site_in(cluster: Cluster) -> Iterator[SiteIn]:
    """A site in a database of another encoding."""
    with ExitStack() as stack:
        yield lambda encoding: stack.enter_context(_site_in(cluster, encoding))


@contextmanager
def _site_in(cluster: Cluster, encoding: str) -> Iterator[Site]:
    with cluster.database(f"attacked_{encoding.lower()}", options=f"encoding {encoding} locale 'C'") as name:
        cluster.install(name)
        with closing(Site(cluster, name)) as site:
            yield site


@pytest.fixture
def echo() -> Iterator[Receiver]:
    """Refuses each request and says what it was, as servers in their developers' mode do."""
    with Receiver(_echo) as receiver:
        yield receiver


def _echo(request: Received) -> Answer:
    told = request.headers.get("authorization", "") + request.headers.get("x-own", "")
    headers = "".join(f"{name}: {value}\n" for name, value in request.headers.items())
    return Answer(422, {"x-echo": told}, f"Cannot {request.method} {request.path}\n{headers}\n".encode() + request.body)
