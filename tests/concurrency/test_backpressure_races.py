"""The limit of the queue under many writers, and while it is being changed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from support.cluster import Connect
from support.sessions import Running, gather, patience, wait_until_blocked

DB = psycopg.Connection[Any]

WRITERS = 8
LIVE = "select count(*) from ulak.queue where status in ('pending', 'processing')"


@pytest.fixture(autouse=True)
def shop(db: DB) -> None:
    db.execute("truncate ulak_private.deliveries, ulak_private.idempotency_keys, ulak.endpoints cascade")
    db.execute("select ulak.configure('max_queue_size', null), ulak.create_endpoint('shop', 'pull', '{}')")


def limit(session: DB, size: int) -> None:
    session.execute("select ulak.configure('max_queue_size', %s)", [str(size)])


def send(session: DB, messages: int = 1) -> bool:
    """False if the queue is full."""
    try:
        if messages == 1:
            session.execute("select ulak.send('shop', '1')")
        else:
            session.execute("select ulak.send_batch('shop', array_fill('1'::jsonb, array[%s]))", [messages])
    except psycopg.errors.ConfigurationLimitExceeded:
        return False
    return True


def live(db: DB) -> int:
    row = db.execute(LIVE).fetchone()
    assert row is not None
    return int(row[0])


def deliver(db: DB, messages: int) -> None:
    db.execute("select ulak.complete(c.id, 'w', c.attempt) from ulak.claim('w', %s) c", [messages])
    db.execute(
        "select setval('ulak_private.queue_headroom', last_value + 1000) from ulak_private.queue_headroom where last_value < 0"
    )


# Many writers.


@pytest.mark.parametrize("messages", [1, 3])
def test_writers_overshoot_the_limit_by_no_more_than_what_is_in_flight(connect: Connect, db: DB, messages: int) -> None:
    limit(db, 60)
    sessions = [connect() for _ in range(WRITERS)]
    start = threading.Barrier(WRITERS, timeout=patience())

    def fill(session: DB) -> Callable[[], None]:
        def run() -> None:
            start.wait()
            while send(session, messages):
                pass

        return run

    for _ in range(4):
        gather(fill(session) for session in sessions)

        assert 60 - messages < live(db) <= 60 + (WRITERS - 1) * messages
        deliver(db, 50)


def test_open_transactions_overshoot_the_limit_by_no_more_than_they_hold(connect: Connect, db: DB) -> None:
    """A probe doesn't see them, nor does the promise that is made of it. All else stays inside the limit."""
    limit(db, 20)
    sessions = [connect(autocommit=False) for _ in range(WRITERS)]
    for session in sessions:
        assert all(send(session) for _ in range(5))
    for session in sessions:
        session.commit()

    while send(db):
        pass

    assert 20 <= live(db) <= 20 + WRITERS * 5


# While the limit is changed.


def test_a_limit_applies_from_its_commit_even_if_others_sent_meanwhile(connect: Connect, db: DB) -> None:
    """A probe by the old limit, made while the new one is uncommitted, must not become a promise."""
    limit(db, 100)
    administrator = connect(autocommit=False)
    limit(administrator, 3)

    assert all(send(db) for _ in range(3))
    administrator.commit()

    assert not send(db)
    assert live(db) == 3


def test_a_limit_applies_from_its_commit_even_if_others_were_probing(connect: Connect, db: DB) -> None:
    limit(db, 100)
    gate, sender = connect(autocommit=False), connect()
    gate.execute("lock table ulak_private.deliveries in access exclusive mode")

    probing = Running(lambda: send(sender, 3))
    wait_until_blocked(sender, db)
    limit(db, 3)
    gate.rollback()

    assert probing.result()
    assert not send(db)
    assert live(db) == 3


def test_a_full_queue_is_not_remembered_across_a_new_limit(connect: Connect, db: DB) -> None:
    limit(db, 3)
    assert send(db, 3)
    gate, sender = connect(autocommit=False), connect()
    gate.execute("lock table ulak_private.deliveries in access exclusive mode")

    probing = Running(lambda: send(sender, 2))
    wait_until_blocked(sender, db)
    limit(db, 10)
    gate.rollback()

    assert not probing.result()
    assert send(db)


def test_a_limit_that_is_rolled_back_never_held(connect: Connect, db: DB) -> None:
    limit(db, 3)
    administrator = connect(autocommit=False)
    limit(administrator, 100)

    assert all(send(administrator) for _ in range(5))
    assert send(db)
    administrator.rollback()

    assert send(db, 2)
    assert not send(db)


def test_a_change_of_the_limit_waits_for_no_sender(connect: Connect, db: DB) -> None:
    sender = connect(autocommit=False)
    assert send(sender)

    db.execute("set lock_timeout = '5s'")
    limit(db, 5)

    sender.commit()
    assert send(db, 4)
    assert not send(db)
