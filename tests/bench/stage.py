"""What every part of the bench is given: a server, fresh databases in it, a receiver, and how much work to do."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from support.cluster import TEMPLATE, Cluster, Settings
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

# For parts that compare small costs: a round must not pay for another one's rows.
QUIET: Settings = {"autovacuum": False}

_numbers = itertools.count(1)


class Stage:
    def __init__(self, cluster: Cluster, scale: float, resources: ExitStack) -> None:
        self.cluster = cluster
        self.scale = scale
        # What doesn't fit into a table, for the file.
        self.details: dict[str, Any] = {}
        self._resources = resources

    def scaled(self, count: int, least: int = 1) -> int:
        return max(least, round(count * self.scale))

    def rounds(self, count: int) -> int:
        """How often something is repeated: three times at least, since medians are taken."""
        return min(count, max(3, round(count * self.scale * 2)))

    @cached_property
    def receiver(self) -> str:
        """The URL of an nginx that answers at once."""
        return self._resources.enter_context(nginx(self.cluster.folder / "nginx"))

    @contextmanager
    def database(self) -> Iterator[str]:
        """A fresh one with the extension."""
        name = self.cluster.create_database(f"bench_{next(_numbers)}", TEMPLATE)
        try:
            yield name
        finally:
            self.cluster.drop_database(name)

    @contextmanager
    def site(self) -> Iterator[Site]:
        with self.database() as name:
            site = Site(self.cluster, name)
            try:
                yield site
            finally:
                site.close()


Section = Callable[[Stage], Iterable[Figure]]


@dataclass(frozen=True)
class Part:
    """Sections can be run alone; settings are those that a reload changes."""

    about: str
    sections: Mapping[str, Section]
    settings: Settings = field(default_factory=dict)


@contextmanager
def server() -> Iterator[Cluster]:
    cluster = Cluster.create(settings=SERVER)
    try:
        cluster.create_database(TEMPLATE)
        cluster.install(TEMPLATE)
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
        if name != TEMPLATE:
            cluster.drop_database(name)
    cluster.reload()
    cluster.execute("checkpoint")
