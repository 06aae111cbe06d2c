"""What every part of the bench is given: a server, fresh databases in it, a receiver, and how much work to do.

Old beside new: an installed script of a release carries all of it, its Python too, so a database with the released version
stands beside one with the version under test on the same server. The parts `released`, `breadth` and `ordering` do their work
in both in turn, and what they ask for is a ratio of two figures of the same minute; a rate alone says more about the machine.
"""

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

# How a database is called that has this version of the extension and nothing else.
RELEASED = f"{TEMPLATE}_{{}}"

# For parts that compare small costs: a round must not pay for another one's rows.
QUIET: Settings = {"autovacuum": False}

_numbers = itertools.count(1)


def name_of(release: str | None) -> str:
    """What the names of its figures begin with. The version under test has none."""
    return "" if release is None else f"{release}: "


class Stage:
    def __init__(
        self,
        cluster: Cluster,
        scale: float,
        resources: ExitStack,
        against: str | None = None,
        # Medians are taken.
        least_rounds: int = 3,
    ) -> None:
        self.cluster = cluster
        self.scale = scale
        # The release that the version under test is compared with; None: with none.
        self.against = against
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

    @property
    def releases(self) -> list[str | None]:
        """What is measured in turn: the release to compare with, if any, and the version under test, which is None."""
        return [None] if self.against is None else [self.against, None]

    @contextmanager
    def database(self, release: str | None = None) -> Iterator[str]:
        """A fresh one with the extension."""
        with self.cluster.database(f"bench_{next(_numbers)}", self._template(release)) as name:
            yield name

    def _template(self, release: str | None) -> str:
        if release is None:
            return TEMPLATE
        name = RELEASED.format(release)
        with self.cluster.connect() as db:
            is_there = db.execute("select from pg_database where datname = %s", [name]).fetchone() is not None
        if not is_there:
            self.cluster.install(self.cluster.create_database(name), release)
        return name

    @contextmanager
    def site(self, release: str | None = None) -> Iterator[Site]:
        with self.database(release) as name:
            site = Site(self.cluster, name)
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


@contextmanager
def server() -> Iterator[Cluster]:
    cluster = Cluster.create(settings=SERVER)
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
