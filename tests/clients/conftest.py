"""The guide's programs with the drivers of each language, which `make test-clients` installs."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from support.cluster import Cluster, remove_abandoned

IS_ASKED_FOR = os.environ.get("ULAK_CLIENTS") == "full"

collect_ignore_glob = [] if IS_ASKED_FOR else ["test_*.py"]


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Java's driver doesn't support Unix sockets."""
    remove_abandoned()
    cluster = Cluster.create(in_memory=True, settings={"listen_addresses": "127.0.0.1"})
    yield cluster
    cluster.remove()
