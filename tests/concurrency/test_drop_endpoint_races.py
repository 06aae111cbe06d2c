"""An endpoint is dropped while others send to it: no sender waits, and no message is lost silently."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from support.cluster import Connect
from support.errors import refused
from support.rewritten import rewritten
from support.sessions import Running, gather, wait_until

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
    db.execute(
        "truncate ulak_private.deliveries, ulak_private.archived, ulak_private.idempotency_keys, ulak_private.letters, ulak.endpoints, ulak.event_types cascade"
    )
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

    assert (error.sqlstate, error.message_primary) == ("55006", 'an open transaction may have sent to endpoint "shop"')
    assert f"session {sender.info.backend_pid}, transaction" in (error.message_detail or "")
    assert (error.message_hint or "").startswith("Try again when they have ended: select pid")
    sender.commit()
    assert refused(db, DROP).message_primary == 'endpoint "shop" is in use'


@pytest.mark.parametrize("way", WAYS)
def test_an_endpoint_can_be_dropped_after_the_sender_rolled_back(connect: Connect, db: DB, way: str) -> None:
    sender = connect(autocommit=False)
    run(sender, way)
    sender.rollback()

    db.execute(DROP)

    assert count(db) == 0


@pytest.fixture
def patient(db: DB) -> Iterator[None]:
    """A drop waits for senders as long as they take, instead of a second."""
    with rewritten(db, "ulak_private.require_no_open_sender", "interval '1 second'", "interval '1 day'"):
        yield


def drop_that_waits(db: DB, dropper: DB) -> Running:
    dropping = Running(lambda: dropper.execute(DROP))
    sleeps = "select 1 from pg_stat_activity where pid = %s and wait_event = 'PgSleep'"
    wait_until(lambda: db.execute(sleeps, [dropper.info.backend_pid]).fetchone(), "a drop that waits", interval=0)
    return dropping


@pytest.mark.usefixtures("patient")
def test_a_drop_waits_for_a_sender_that_is_about_to_commit(connect: Connect, db: DB) -> None:
    """A session that rolls back in time has sent nothing."""
    sender = connect(autocommit=False)
    run(sender, "send")

    dropping = drop_that_waits(db, connect())
    sender.rollback()
    dropping.result()

    assert refused(db, WAYS["send"]).message_primary == 'unknown endpoint "shop"'


@pytest.mark.usefixtures("patient")
def test_senders_that_come_and_go_do_not_keep_an_endpoint_from_being_dropped(connect: Connect, db: DB) -> None:
    """At each moment one of them is open; no transaction of theirs stays."""
    first, second = connect(autocommit=False), connect(autocommit=False)
    first.execute("select ulak.send('other', '1')")

    dropping = drop_that_waits(db, connect())
    second.execute("select ulak.send('other', '1')")
    first.commit()
    # The same session, in another transaction.
    first.execute("select ulak.send('other', '1')")
    dropping.result()

    assert count(db, "select count(*) from ulak.endpoints") == 1


# An open transaction drops the endpoint, and no session waits for it. What is sent meanwhile has no endpoint and becomes a dead letter.


def bury_orphans(db: DB) -> list[tuple[str, str]]:
    db.execute("call ulak.run_maintenance()")
    return db.execute("select endpoint_name, last_error from ulak.dlq").fetchall()


BURIED = ("(dropped)", "[PERMANENT] its endpoint was dropped")


@pytest.mark.parametrize("way", WAYS)
def test_what_is_sent_while_its_endpoint_is_dropped_becomes_a_dead_letter(connect: Connect, db: DB, way: str) -> None:
    dropper, sender = connect(autocommit=False), connect()
    dropper.execute(DROP)

    sender.execute("set lock_timeout = '5s'")
    run(sender, way)
    dropper.commit()

    lost = count(db, ORPHANS)
    assert lost == (2 if way == "send_batch" else 1)
    assert db.execute("select id from ulak.claim('w', 10) where endpoint <> 'other'").fetchall() == []
    assert bury_orphans(db) == [BURIED] * lost
    assert count(db, "select count(*) from ulak.messages where status = 'failed'") == lost


@pytest.mark.parametrize("way", WAYS)
def test_what_is_sent_while_a_drop_is_rolled_back_is_a_message_as_any_other(connect: Connect, db: DB, way: str) -> None:
    dropper, sender = connect(autocommit=False), connect()
    dropper.execute(DROP)

    sender.execute("set lock_timeout = '5s'")
    run(sender, way)
    dropper.rollback()

    assert bury_orphans(db) == []
    assert count(db, "select count(*) from ulak.queue join ulak.endpoints e on e.id = endpoint_id where name = 'shop'")


@pytest.mark.parametrize("way", BY_NAME)
def test_a_sender_after_the_drop_gets_an_error(db: DB, way: str) -> None:
    db.execute(DROP)

    with pytest.raises(psycopg.errors.UndefinedObject, match='unknown endpoint "shop"'):
        run(db, way)

    assert count(db) == 0


@pytest.mark.parametrize("way", BY_EVENT)
def test_an_event_after_the_drop_goes_to_the_others(db: DB, way: str) -> None:
    db.execute(DROP)

    assert run(db, way) == 1
    assert (count(db), count(db, ORPHANS)) == (1, 0)


@pytest.mark.parametrize("way", BY_NAME)
def test_a_sender_after_the_drop_finds_the_endpoint_that_took_the_name(connect: Connect, db: DB, way: str) -> None:
    dropper = connect(autocommit=False)
    dropper.execute(DROP)
    dropper.execute(CREATE)
    dropper.commit()

    run(db, way)

    assert count(db, ORPHANS) == 0


# An older snapshot still shows the endpoint.


@pytest.mark.parametrize("isolation", ["repeatable read", "serializable"])
@pytest.mark.parametrize("way", WAYS)
def test_what_an_older_snapshot_sends_to_an_endpoint_that_is_gone_becomes_a_dead_letter(
    connect: Connect, db: DB, way: str, isolation: str
) -> None:
    sender = connect(autocommit=False)
    sender.execute(f"set transaction isolation level {isolation}")  # type: ignore[call-overload]
    sender.execute("select count(*) from ulak.queue")
    db.execute(DROP)

    run(sender, way)
    sender.commit()

    lost = count(db, ORPHANS)
    assert lost == (2 if way == "send_batch" else 1)
    assert bury_orphans(db) == [BURIED] * lost


def test_a_message_in_flight_whose_endpoint_is_gone_is_buried_when_its_worker_is(db: DB) -> None:
    """Dropped by hand: drop_endpoint() would refuse."""
    run(db, "send")
    db.execute("select from ulak.claim('w', 1, p_lease => '1 second')")
    db.execute("delete from ulak.endpoints where name = 'shop'")
    assert bury_orphans(db) == []

    db.execute("select ulak.recover_stale_messages(now() + interval '1 minute')")

    assert bury_orphans(db) == [BURIED]


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


# Of endpoints that are there: else it would take orphans with it.
DELETE = "delete from ulak.queue q using ulak.endpoints e where e.id = q.endpoint_id"


def test_every_message_has_its_endpoint_or_becomes_a_dead_letter(connect: Connect, db: DB) -> None:
    """Two sessions send in every way, until a third has dropped and made the endpoint at least five times."""
    done = threading.Event()
    have_sent: set[int] = set()

    def sender(seed: int) -> Callable[[], None]:
        session, dice = connect(autocommit=False), random.Random(seed)

        def run() -> None:
            while not done.is_set():
                level = dice.choice(["read committed", "repeatable read"])
                way = dice.choice(list(WAYS))
                if attempt(session, f"set transaction isolation level {level}", "select 1", WAYS[way]):
                    have_sent.add(seed)

        return run

    def dropper() -> None:
        session, dropped = connect(autocommit=False), []

        def drop() -> bool:
            # Committed first: with what has piled up in the same transaction, a drop would be refused ever more often.
            attempt(session, DELETE)
            if attempt(session, DELETE, DROP):
                dropped.append(True)
                assert attempt(session, CREATE, "select ulak.subscribe('sold', 'shop')")
            return len(dropped) >= 5 and len(have_sent) == 2

        try:
            wait_until(drop, "five drops beside two senders", interval=0)
        finally:
            done.set()

    gather([sender(1), sender(2), dropper])

    lost = count(db, ORPHANS)
    assert bury_orphans(db) == [BURIED] * lost
    assert count(db, f"{ORPHANS} and q.status = 'pending'") == 0
