"""A server where only the provider is a superuser, with ulak and without PL/Python."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.plain import PlainCluster, build_script
from support.queue import DB


@pytest.fixture(scope="session")
def plain() -> Iterator[PlainCluster]:
    cluster = PlainCluster.create(in_memory=True)
    yield cluster
    cluster.remove()


@pytest.fixture(scope="session")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_script(tmp_path_factory.mktemp("script"))


@pytest.fixture
def bare(plain: PlainCluster) -> Iterator[str]:
    """A database of the owner's, without ulak."""
    with plain.database("bare") as name:
        yield name


@pytest.fixture(scope="session")
def plain_template(plain: PlainCluster) -> str:
    plain.install(plain.create_database("plain_template"))
    return "plain_template"


@pytest.fixture
def shop(plain: PlainCluster, plain_template: str) -> Iterator[DB]:
    """The owner's session in a database with ulak."""
    with plain.database("shop", plain_template) as name, plain.connect(name) as connection:
        yield connection
