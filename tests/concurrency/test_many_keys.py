"""Thousands of ordering keys in one transaction take nothing away from others, however small the server's lock table is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from support.cluster import Cluster

DB = psycopg.Connection[Any]

KEYS = 12_000

SEND = """
    select count(ulak.send('shop', '{}', p_ordering_key => 'key ' || n, p_expires_at => now() + interval '1 hour'))
    from generate_series(%s::integer, %s::integer) n
"""
UNRELATED = "select count(ulak.send('other', '{}', p_ordering_key => 'other ' || n)) from generate_series(1, 50) n"
BY_STATUS = "select status, count(*) from ulak.messages q join ulak.endpoints e on e.id = endpoint_id where name = 'shop' group by 1"


@pytest.fixture(scope="module")
def small() -> Iterator[Cluster]:
    """A server with room for a few thousand locks."""
    cluster = Cluster.create(settings={"max_connections": 20, "max_locks_per_transaction": 64}, in_memory=True)
    yield cluster
    cluster.remove()


@pytest.fixture
def sessions(small: Cluster) -> Iterator[tuple[DB, DB]]:
    with small.database("many_keys") as name:
        small.install(name)
        with small.connect(name, autocommit=False) as session, small.connect(name) as other:
            other.execute("select ulak.create_endpoint(name, 'pull', '{}') from unnest('{shop,other}'::text[]) name")
            yield session, other


def test_messages_of_many_keys_expire_beside_a_sender(sessions: tuple[DB, DB]) -> None:
    session, other = sessions
    for first in range(1, KEYS, 100):
        session.execute(SEND, [first, first + 99])
        session.commit()

    expired = []
    while not expired or expired[-1]:
        expired += session.execute("select ulak.mark_expired_messages(now() + interval '2 hours')").fetchone() or (0,)
        other.execute(UNRELATED)
        session.commit()

    assert sum(expired) == KEYS
    assert session.execute(BY_STATUS).fetchall() == [("expired", KEYS)]


def test_maintenance_expires_the_messages_of_many_keys(sessions: tuple[DB, DB]) -> None:
    session, other = sessions
    for first in range(1, KEYS, 100):
        session.execute(SEND, [first, first + 99])
        session.commit()

    other.execute("call ulak.run_maintenance(now() + interval '90 minutes')")

    assert session.execute(BY_STATUS).fetchall() == [("expired", KEYS)]


def test_a_sender_of_many_keys_takes_nothing_from_another(sessions: tuple[DB, DB]) -> None:
    session, other = sessions

    session.execute(SEND, [1, 10_000])
    other.execute(UNRELATED)
    session.commit()

    claimed = other.execute("select id from ulak.claim('w', 10000, 'shop')").fetchall()
    assert len(claimed) == 10_000


def test_a_worker_settles_the_messages_of_many_keys_beside_a_sender(sessions: tuple[DB, DB]) -> None:
    session, other = sessions
    for first in range(1, 10_000, 100):
        session.execute(SEND, [first, first + 99])
        session.commit()

    settled = "select count(ulak.complete(c.id, 'w', c.attempt)) from ulak.claim('w', 10000, 'shop') c"
    session.execute(settled)
    other.execute(UNRELATED)
    session.commit()

    assert session.execute(BY_STATUS).fetchall() == [("completed", 10_000)]
