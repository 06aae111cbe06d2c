"""An endpoint is dropped while others send to it: no message is left without its endpoint."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from support.cluster import Connect
from support.errors import refused
from support.sessions import Running, gather, wait_until_blocked

DB = psycopg.Connection[Any]

DROP = "select ulak.drop_endpoint('shop')"
CREATE = "select ulak.create_endpoint('shop', 'pull', '{}')"
ORPHANS = "select count(*) from ulak.queue q where not exists (select from ulak.endpoints e where e.id = q.endpoint_id)"

WAYS = {
    "send": "select ulak.send('shop', '1')",
    "send with a key": "select ulak.send('shop', '1', p_idempotency_key => 'k')",
    "send_batch": "select ulak.send_batch('shop', '{1,2}')",
    "publish": "select ulak.publish('sold', '1')",
    "publish_batch": """select ulak.publish_batch('[{"event_type": "sold", "payload": 1}]')""",
}
BY_NAME = ["send", "send with a key", "send_batch"]
BY_EVENT = ["publish", "publish_batch"]


@pytest.fixture(autouse=True)
def shop(db: DB) -> None:
    db.execute("truncate ulak.queue, ulak.endpoints, ulak.event_types cascade")
    db.execute("select ulak.create_event_type('sold')")
    for name in ("shop", "other"):
        db.execute("select ulak.create_endpoint(%s, 'pull', '{}')", [name])
        db.execute("select ulak.subscribe('sold', %s)", [name])


def count(db: DB, query: str = "select count(*) from ulak.queue") -> int:
    row = db.execute(query).fetchone()  # type: ignore[call-overload]
    assert row is not None
    return int(row[0])


def run(session: DB, way: str) -> Any:
    row = session.execute(WAYS[way]).fetchone()  # type: ignore[call-overload]
    assert row is not None
    return row[0]


# An open transaction has sent.


@pytest.mark.parametrize("way", WAYS)
def test_an_endpoint_is_not_dropped_while_an_open_transaction_has_sent_to_it(
    connect: Connect, db: DB, way: str
) -> None:
    sender = connect(autocommit=False)
    run(sender, way)

    error = refused(db, DROP)

    assert (error.sqlstate, error.message_primary) == ("55006", 'an open transaction has sent to endpoint "shop"')
    assert error.message_hint == "Try again when that transaction has ended."
    sender.commit()
    assert refused(db, DROP).message_primary == 'endpoint "shop" is in use'


@pytest.mark.parametrize("way", WAYS)
def test_an_endpoint_can_be_dropped_after_the_sender_rolled_back(connect: Connect, db: DB, way: str) -> None:
    sender = connect(autocommit=False)
    run(sender, way)
    sender.rollback()

    db.execute(DROP)

    assert count(db) == 0


# An open transaction drops.


@pytest.mark.parametrize("way", BY_NAME)
def test_a_sender_waits_for_the_drop_and_is_told(connect: Connect, db: DB, way: str) -> None:
    dropper, sender = connect(autocommit=False), connect()
    dropper.execute(DROP)

    waiting = Running(lambda: run(sender, way))
    assert wait_until_blocked(sender, db) == [dropper.info.backend_pid]
    dropper.commit()

    with pytest.raises(psycopg.errors.UndefinedObject, match='unknown endpoint "shop"'):
        waiting.result()
    assert count(db) == 0


@pytest.mark.parametrize("way", WAYS)
def test_a_sender_waits_for_a_drop_that_is_rolled_back_and_sends(connect: Connect, db: DB, way: str) -> None:
    dropper, sender = connect(autocommit=False), connect()
    dropper.execute(DROP)

    waiting = Running(lambda: run(sender, way))
    wait_until_blocked(sender, db)
    dropper.rollback()

    assert waiting.result()
    assert count(db, "select count(*) from ulak.queue join ulak.endpoints e on e.id = endpoint_id where name = 'shop'")


@pytest.mark.parametrize("way", BY_EVENT)
def test_an_event_that_waited_for_a_drop_goes_to_the_others(connect: Connect, db: DB, way: str) -> None:
    dropper, sender = connect(autocommit=False), connect()
    dropper.execute(DROP)

    waiting = Running(lambda: run(sender, way))
    wait_until_blocked(sender, db)
    dropper.commit()

    assert waiting.result() == 1
    assert (count(db), count(db, ORPHANS)) == (1, 0)


@pytest.mark.parametrize("way", BY_NAME)
def test_a_sender_that_waited_finds_the_endpoint_that_took_the_name(connect: Connect, db: DB, way: str) -> None:
    dropper, sender = connect(autocommit=False), connect()
    dropper.execute(DROP)
    dropper.execute(CREATE)

    waiting = Running(lambda: run(sender, way))
    wait_until_blocked(sender, db)
    dropper.commit()

    waiting.result()
    assert count(db, ORPHANS) == 0


# An older snapshot still shows the endpoint.


@pytest.mark.parametrize("isolation", ["repeatable read", "serializable"])
@pytest.mark.parametrize("way", WAYS)
def test_an_older_snapshot_can_not_send_to_an_endpoint_that_is_gone(
    connect: Connect, db: DB, way: str, isolation: str
) -> None:
    sender = connect(autocommit=False)
    sender.execute(f"set transaction isolation level {isolation}")  # type: ignore[arg-type]
    sender.execute("select count(*) from ulak.queue")
    db.execute(DROP)

    with pytest.raises(psycopg.errors.SerializationFailure):
        run(sender, way)

    sender.rollback()
    assert count(db) == 0


def test_a_sender_at_repeatable_read_is_in_the_way_of_a_drop_only(connect: Connect, db: DB) -> None:
    sender = connect(autocommit=False)
    sender.execute("set transaction isolation level repeatable read")
    run(sender, "send")
    run(sender, "publish")

    db.execute("set lock_timeout = '2s'")
    db.execute("select from ulak.endpoints where name = 'shop' for no key update")
    db.execute("select ulak.disable_endpoint('shop'), ulak.enable_endpoint('shop')")
    assert refused(db, DROP).sqlstate == "55006"


def test_an_older_snapshot_can_send_to_an_endpoint_that_has_changed(connect: Connect, db: DB) -> None:
    sender = connect(autocommit=False)
    sender.execute("set transaction isolation level repeatable read")
    sender.execute("select count(*) from ulak.queue")
    db.execute("update ulak.endpoints set last_success_at = now(), description = 'changed'")

    for way in WAYS:
        run(sender, way)
    sender.commit()

    assert count(db, ORPHANS) == 0
    assert count(db) == 8


# All at once.


EXPECTED = (
    psycopg.errors.UndefinedObject,
    psycopg.errors.ObjectInUse,
    psycopg.errors.SerializationFailure,
    psycopg.errors.DeadlockDetected,
)


def attempt(session: DB, *statements: str) -> bool:
    try:
        for statement in statements:
            session.execute(statement)  # type: ignore[call-overload]
        session.commit()
    except EXPECTED:
        session.rollback()
        return False
    return True


def test_no_message_ever_loses_its_endpoint(connect: Connect, db: DB) -> None:
    """Two sessions send in every way, until a third has dropped and made the endpoint ten times."""
    done = threading.Event()

    def sender(seed: int) -> Callable[[], int]:
        session, dice = connect(autocommit=False), random.Random(seed)

        def run() -> int:
            sent = 0
            while not done.is_set():
                level = dice.choice(["read committed", "repeatable read"])
                way = dice.choice(list(WAYS))
                sent += attempt(session, f"set transaction isolation level {level}", "select 1", WAYS[way])
            return sent

        return run

    def dropper() -> int:
        session, dropped, deadline = connect(autocommit=False), 0, time.monotonic() + 30
        try:
            while dropped < 10 and time.monotonic() < deadline:
                if attempt(session, "delete from ulak.queue", DROP):
                    dropped += 1
                    assert count(session, ORPHANS) == 0
                    assert attempt(session, CREATE, "select ulak.subscribe('sold', 'shop')")
        finally:
            done.set()
        return dropped

    *sent, dropped = gather([sender(1), sender(2), dropper])

    assert count(db, ORPHANS) == 0
    assert dropped == 10
    assert all(sent)
