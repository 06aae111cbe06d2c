"""Sessions that send many messages with the same keys: each key once, in the order of commits, and no deadlock."""

from __future__ import annotations

import json
import random
from typing import Any

import psycopg
import pytest
from support.cluster import Connect
from support.sessions import Running, gather, wait_until

DB = psycopg.Connection[Any]

BLOCKED = "select cardinality(pg_blocking_pids(%s)) > 0"


@pytest.fixture(autouse=True)
def shop(db: DB) -> None:
    db.execute(
        "truncate ulak_private.deliveries, ulak_private.idempotency_keys, ulak_private.letters, ulak.endpoints cascade"
    )
    db.execute("select ulak.create_endpoint('shop', 'pull', '{}'), ulak.create_endpoint('other', 'pull', '{}')")


def send(session: DB, messages: list[dict[str, Any]]) -> list[int]:
    row = session.execute("select ulak.send_messages('shop', %s)", [json.dumps(messages)]).fetchone()
    assert row is not None
    ids: list[int] = row[0]
    return ids


def is_blocked(db: DB, session: DB) -> bool:
    row = db.execute(BLOCKED, [session.info.backend_pid]).fetchone()
    return bool(row and row[0])


@pytest.mark.parametrize("ends", ["commit", "rollback"])
def test_a_session_waits_for_the_one_that_holds_an_idempotency_key(connect: Connect, db: DB, ends: str) -> None:
    first, second = connect(autocommit=False), connect()
    [held] = send(first, [{"payload": 1, "idempotency_key": "k"}])

    running = Running(lambda: send(second, [{"payload": 0}, {"payload": 1, "idempotency_key": "k"}]))
    wait_until(lambda: is_blocked(db, second), "the second to wait")
    getattr(first, ends)()

    ids = running.result()
    assert (ids[1] == held) == (ends == "commit")
    assert db.execute("select count(*) from ulak.queue where idempotency_key = 'k'").fetchone() == (1,)
    assert db.execute("select count(*) from ulak.queue where id = any (%s)", [ids]).fetchone() == (2,)


@pytest.mark.parametrize("key", ["idempotency_key", "ordering_key"])
def test_sessions_that_use_the_same_keys_in_any_order_do_not_deadlock(connect: Connect, db: DB, key: str) -> None:
    keys = [str(n) for n in range(40)]

    def sender(seed: int) -> Any:
        chance = random.Random(seed)
        session = connect()

        def run() -> list[list[int]]:
            found = []
            for _ in range(15):
                order = chance.sample(keys, len(keys))
                ids = send(session, [{"payload": name, key: name} for name in order])
                found.append([id for _, id in sorted(zip(order, ids, strict=True))])
            return found

        return run

    found = gather([sender(seed) for seed in range(4)])

    if key == "idempotency_key":
        assert len({tuple(ids) for each in found for ids in each}) == 1
        assert db.execute("select count(*) from ulak.queue").fetchone() == (len(keys),)
    else:
        assert db.execute("select count(*) from ulak.queue").fetchone() == (4 * 15 * len(keys),)


def test_the_ids_of_an_ordering_key_are_in_the_order_of_commits(connect: Connect, db: DB) -> None:
    first, second = connect(autocommit=False), connect()
    earlier = send(first, [{"payload": 1, "ordering_key": "k"}])

    running = Running(lambda: send(second, [{"payload": 2, "ordering_key": "k"}]))
    wait_until(lambda: is_blocked(db, second), "the second to wait")
    earlier += send(first, [{"payload": 3, "ordering_key": "k"}])
    first.commit()

    assert max(earlier) < min(running.result())


def test_an_event_of_a_key_waits_for_a_message_of_that_key(connect: Connect, db: DB) -> None:
    db.execute("select ulak.create_event_type('sold')")
    db.execute("select ulak.subscribe('sold', 'shop'), ulak.subscribe('sold', 'other')")
    first, second = connect(autocommit=False), connect()
    send(first, [{"payload": 1, "ordering_key": "k"}])

    running = Running(lambda: second.execute("select ulak.publish('sold', '2', p_ordering_key => 'k')").fetchone())
    wait_until(lambda: is_blocked(db, second), "the publisher to wait")
    first.commit()

    assert running.result() == (2,)
    query = "select payload from ulak.queue where endpoint_id = (select id from ulak.endpoints where name = 'shop') order by id"
    assert db.execute(query).fetchall() == [(1,), (2,)]
    db.execute("select ulak.drop_event_type('sold')")
