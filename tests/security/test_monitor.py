"""What a login that may look must not be able to change."""

from __future__ import annotations

from typing import Any

import psycopg
from support.cluster import Connect
from support.errors import refused

DB = psycopg.Connection[Any]


def test_it_grants_claims_and_dates_nothing(db: DB, connect: Connect) -> None:
    db.execute("select ulak.create_endpoint('shop', 'pull', '{}'), ulak.send('shop', '1')")
    monitor = connect("ulak_monitor")

    for statement in (
        "select ulak.grant_endpoint('shop', 'test_ulak_monitor')",
        "insert into ulak.endpoint_grants (endpoint_id, role_name) values (1, 'test_ulak_monitor')",
        "select * from ulak.endpoint_grants",
        "select * from ulak.claim('m')",
        "select ulak.disable_endpoint('shop', '2000-01-01')",
        "insert into ulak.event_log (event) values ('endpoint.disabled')",
    ):
        assert refused(monitor, statement).sqlstate == "42501"

    assert db.execute("select status from ulak.queue").fetchall() == [("pending",)]
