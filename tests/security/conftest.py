"""Attacks, one file per attacker: a database with real workers, and receivers on loopback."""

from __future__ import annotations

import re
from base64 import b64decode
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager

import pytest
from support.cluster import Cluster
from support.receiver import Answer, Received, Receiver
from support.site import LONGEST_TIMEOUT, Site

SiteIn = Callable[[str], Site]


def patient(site: Site) -> Site:
    """Requests have as much time as a busy machine may need."""
    site.configure(http_timeout=LONGEST_TIMEOUT, http_connect_timeout=60)
    return site


@pytest.fixture
def site(site: Site) -> Site:
    return patient(site)


@pytest.fixture
def own_site(cluster: Cluster, database: str) -> Iterator[Site]:
    """In a database of its own, for attackers who leave things behind."""
    site = patient(Site(cluster, database))
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
        with closing(patient(Site(cluster, name))) as site:
            yield site


@pytest.fixture
def echo() -> Iterator[Receiver]:
    """Refuses each request and says what it was, as servers in their developers' mode do."""
    with Receiver(_echo) as receiver:
        yield receiver


def _echo(request: Received) -> Answer:
    authorization = request.headers.get("authorization", "")
    told = authorization + request.headers.get("x-own", "")
    headers = "".join(f"{name}: {value}\n" for name, value in request.headers.items())
    # Also bit by bit, as in "no such access key: ..." and "the signature we expected is not ...".
    bits = "\n".join(
        re.findall(r"[^\s,=]+", authorization.replace("/", " ") if "AWS4" in authorization else authorization)
    )
    if authorization.startswith("Basic "):
        bits += "\n" + b64decode(authorization.removeprefix("Basic ")).decode()
    start = f"Cannot {request.method} {request.path}\n{bits}\n"
    return Answer(422, {"x-echo": told}, f"{start}{headers}\n".encode() + request.body)
