"""A login that may send, and create objects in a schema that others have on their search_path."""

from __future__ import annotations

import pytest
from support.cluster import Cluster
from support.receiver import Receiver
from support.site import Site

# Runs as whoever calls it; what it did shows who that was.
EVIL = """
    create table {schema}.seen (who text default current_user);
    grant insert on {schema}.seen to public;
    create function {schema}.evil(p_state uuid[], p_value uuid) returns uuid[] language plpgsql as $$
    begin
        insert into {schema}.seen default values;
        return p_state || p_value;
    end
    $$;
    create aggregate {schema}.array_agg(uuid) (sfunc = {schema}.evil, stype = uuid[]);
"""


@pytest.mark.parametrize("schema", ["public", "postgres"])
def test_an_aggregate_of_its_own_is_not_called_by_a_worker(
    cluster: Cluster, site: Site, receiver: Receiver, schema: str
) -> None:
    """In public, or in a schema named like the role that runs the worker."""
    site.db.execute("grant create on schema public to ulak_application")
    site.db.execute(f"grant create on database {site.database} to ulak_application")
    site.http("shop", receiver.url)
    site.send_many(3)
    with site.connect("ulak_application") as application:
        if schema != "public":
            application.execute(f"create schema {schema}")
            application.execute(f"grant usage on schema {schema} to public")
        application.execute(EVIL.format(schema=schema))  # type: ignore[arg-type]

    site.start(role=cluster.user)
    receiver.wait_for(3)
    site.wait_until_settled()
    with site.connect() as session:
        session.execute("call ulak.run_maintenance()")

    assert site.rows(f"select who from {schema}.seen") == []
