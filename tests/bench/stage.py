"""What every part of the bench is given: a server, fresh databases in it, a receiver, and how much work to do.

Old beside new: with `--against REVISION` the extension of that revision is built, too, and has a server of its own. The parts `against`,
`breadth`, `ordering`, `pull` and `shape` do their work on both in turn, and what they ask for is a ratio of two figures of the same
minute; a rate alone says more about the machine.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import psycopg
from support.cluster import PROJECT, TEMPLATE, Cluster, Settings
from support.nginx import nginx
from support.site import Site

from bench.figures import Figure

# As PostgreSQL comes, with memory for what is measured; checkpoints come when the bench says so.
SERVER: Settings = {
    "checkpoint_timeout": "1h",
    "fsync": True,
    "full_page_writes": True,
    "max_wal_size": "16GB",
    "shared_buffers": "1GB",
}

# Servers by what they have: the revision to compare with comes first, if any, and None is the version under test.
Clusters = Mapping[str | None, Cluster]

# For parts that compare small costs: a round must not pay for another one's rows.
QUIET: Settings = {"autovacuum": False}

_numbers = itertools.count(1)


def name_of(build: str | None) -> str:
    """What the names of its figures begin with. The version under test has none."""
    return "" if build is None else f"{build}: "


class Stage:
    def __init__(
        self,
        clusters: Clusters,
        scale: float,
        resources: ExitStack,
        # Medians are taken.
        least_rounds: int = 3,
    ) -> None:
        self.cluster = clusters[None]
        self.scale = scale
        # What is measured in turn.
        self.builds = list(clusters)
        # The revision that the version under test is compared with; None: with none.
        self.against = next((build for build in clusters if build is not None), None)
        self._clusters = clusters
        self._least_rounds = least_rounds
        # What doesn't fit into a table, for the file.
        self.details: dict[str, Any] = {}
        self._resources = resources

    def scaled(self, count: int, least: int = 1) -> int:
        return max(least, round(count * self.scale))

    def rounds(self, count: int) -> int:
        """How often something is repeated."""
        return min(count, max(self._least_rounds, round(count * self.scale * 2)))

    @cached_property
    def receiver(self) -> str:
        """The URL of an nginx that answers at once."""
        return self._resources.enter_context(nginx(self.cluster.folder / "nginx"))

    def cluster_of(self, build: str | None) -> Cluster:
        return self._clusters[build]

    @contextmanager
    def database(self, build: str | None = None) -> Iterator[str]:
        """A fresh one with the extension."""
        with self.cluster_of(build).database(f"bench_{next(_numbers)}", TEMPLATE) as name:
            yield name

    @contextmanager
    def session(self, build: str | None = None) -> Iterator[psycopg.Connection[Any]]:
        """In a fresh database."""
        with self.database(build) as name, self.cluster_of(build).connect(name) as db:
            yield db

    @contextmanager
    def site(self, build: str | None = None) -> Iterator[Site]:
        with self.database(build) as name:
            site = Site(self.cluster_of(build), name)
            try:
                yield site
            finally:
                site.end()


Section = Callable[[Stage], Iterable[Figure]]


@dataclass(frozen=True)
class Part:
    """Sections can be run alone; settings are those that a reload changes."""

    about: str
    sections: Mapping[str, Section]
    settings: Settings = field(default_factory=dict)
    # With another revision, if one is named.
    compares: bool = False


@contextmanager
def server(project: Path = PROJECT) -> Iterator[Cluster]:
    """With the extension of that project, which has its path: so each build needs a server of its own."""
    cluster = Cluster.create(settings=SERVER, project=project)
    try:
        cluster.install(cluster.create_database(TEMPLATE))
        yield cluster
    finally:
        cluster.remove()


@contextmanager
def settings_of(cluster: Cluster, part: Part) -> Iterator[None]:
    """Its own settings for the part, and nothing left of it for the next one."""
    with cluster.connect() as db:
        for name, value in part.settings.items():
            db.execute(f"alter system set {name} = {str(value).lower()}")  # type: ignore[arg-type]
    cluster.reload()
    yield
    with cluster.connect() as db:
        db.execute("alter system reset all")
        left = db.execute(
            "select datname from pg_database where not datistemplate and datname <> 'postgres'"
        ).fetchall()
    for (name,) in left:
        if not name.startswith(TEMPLATE):
            cluster.drop_database(name)
    cluster.reload()
    cluster.execute("checkpoint")
