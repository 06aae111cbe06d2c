"""Rows of 0.2.0 that come through the views, as a restore of its data alone brings them."""

from __future__ import annotations

from typing import Any

import psycopg

DB = psycopg.Connection[Any]


def test_a_message_that_is_inserted_with_a_key_keeps_its_key(db: DB) -> None:
    db.execute("select ulak.create_endpoint('shop', 'pull', '{}')")
    db.execute(
        """
        insert into ulak.queue (endpoint_id, payload, idempotency_key, payload_hash)
        select id, '1', 'k', ulak_private.payload_hash('1') from ulak.endpoints
        """
    )

    again = db.execute("select ulak.send('shop', '1', p_idempotency_key => 'k')").fetchone()

    assert db.execute("select id from ulak.queue").fetchall() == [again]
