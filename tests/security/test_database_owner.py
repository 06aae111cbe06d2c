"""What the owner of the database must not be able to do by what it sets for everybody who connects."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.cluster import Cluster
from support.errors import refused


@pytest.fixture
def owned(cluster: Cluster, template: str) -> Iterator[str]:
    """A database of `nobody`, with the extension."""
    name = cluster.create_database("owned", template)
    cluster.execute(f"alter database {name} owner to nobody")
    yield name
    cluster.drop_database(name)


def as_owner(cluster: Cluster, database: str, statement: str) -> None:
    with cluster.connect(database, "nobody") as session:
        session.execute(statement)  # type: ignore[call-overload]


def test_it_cannot_have_configs_go_unchecked(cluster: Cluster, owned: str) -> None:
    as_owner(cluster, owned, f"alter database {owned} set row_security = off")

    with cluster.connect(owned) as superuser:
        assert superuser.execute("show row_security").fetchone() == ("off",)
        denied = refused(superuser, """select ulak.create_endpoint('e', 'pull', '{}', '{"max_retries": "many"}')""")

    assert denied.sqlstate == "22023"
