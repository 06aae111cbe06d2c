"""The ids of an ordering key are in the order of commits, whatever its senders do."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from support.cluster import Connect
from support.sessions import Running, gather, wait_until_blocked

DB = psycopg.Connection[Any]


@pytest.fixture(autouse=True)
def shop(db: DB) -> None:
    db.execute(
        "truncate ulak_private.deliveries, ulak_private.idempotency_keys, ulak_private.ordering_keys, ulak.endpoints cascade"
    )
    db.execute("select ulak.create_endpoint(name, 'pull', '{}') from unnest('{shop,other}'::text[]) name")


def send(session: DB, key: str = "o", endpoint: str = "shop") -> int:
    row = session.execute("select ulak.send(%s, '1', p_ordering_key => %s)", [endpoint, key]).fetchone()
    assert row is not None
    return int(row[0])


def claim(session: DB) -> list[int]:
    return [id for (id,) in session.execute("select id from ulak.claim('w', 10, 'shop')")]


def complete(session: DB, id: int) -> None:
    session.execute("select ulak.complete(id, locked_by, attempts) from ulak.queue where id = %s", [id])


def parked(db: DB) -> list[int]:
    return [id for (id,) in db.execute("select id from ulak.queue where next_retry_at = 'infinity' order by id")]


def at_repeatable_read(connect: Connect) -> DB:
    session = connect(autocommit=False)
    session.execute("set transaction isolation level repeatable read")
    session.execute("select count(*) from ulak.queue")
    return session


# Two senders.


def test_a_second_sender_of_a_key_waits_until_the_first_has_committed(connect: Connect, db: DB) -> None:
    first, second = connect(autocommit=False), connect()
    one = send(first)

    waiting = Running(lambda: send(second))
    assert wait_until_blocked(second, db) == [first.info.backend_pid]
    first.commit()

    two = waiting.result()
    assert two > one
    assert claim(db) == [one]
    assert parked(db) == [two]


def test_the_id_is_drawn_after_the_wait(connect: Connect, db: DB) -> None:
    """Otherwise the second sender's id, drawn early, would be below one that the first sender draws while the second waits."""
    first, second = connect(autocommit=False), connect()
    send(first)

    waiting = Running(lambda: send(second))
    wait_until_blocked(second, db)
    last = [send(first) for _ in range(3)][-1]
    first.commit()

    assert waiting.result() > last


def test_a_second_sender_is_first_if_the_first_rolls_back(connect: Connect, db: DB) -> None:
    first, second = connect(autocommit=False), connect()
    send(first)

    waiting = Running(lambda: send(second))
    wait_until_blocked(second, db)
    first.rollback()
    sent = waiting.result()

    assert claim(db) == [sent]


@pytest.mark.parametrize(("key", "endpoint"), [("another", "shop"), ("o", "other")])
def test_senders_of_different_keys_do_not_wait(connect: Connect, db: DB, key: str, endpoint: str) -> None:
    first = connect(autocommit=False)
    send(first)

    db.execute("set lock_timeout = '5s'")
    send(db, key, endpoint)

    first.rollback()


def test_no_reader_ever_sees_a_message_appear_before_one_that_it_has_seen(connect: Connect, db: DB) -> None:
    """Eight senders on two keys; a reader looks all the while: what is visible of a key only grows at its end."""
    done = threading.Event()

    def sender(seed: int) -> Callable[[], None]:
        session, dice = connect(autocommit=False), random.Random(seed)

        def run() -> None:
            for _ in range(15):
                send(session, dice.choice("ab"))
                if dice.random() < 0.5:
                    session.execute("select count(*) from generate_series(1, %s)", [dice.randrange(20000)])
                session.rollback() if dice.random() < 0.2 else session.commit()

        return run

    def reader() -> None:
        session, seen = connect(), {"a": [0], "b": [0]}
        query = "select coalesce(array_agg(id order by id), '{}') from ulak.queue where ordering_key = %s and id > %s"
        while True:
            is_last = done.is_set()
            for key, ids in seen.items():
                row = session.execute(query, [key, 0]).fetchone()
                assert row is not None
                assert row[0][: len(ids) - 1] == ids[1:]
                seen[key] = [0, *row[0]]
            if is_last:
                return

    reading = Running(reader)
    try:
        gather(sender(seed) for seed in range(8))
    finally:
        done.set()
    reading.result()


# A head that is settled while the next message is still uncommitted.


def test_a_message_sent_before_its_head_was_settled_is_due_after_its_commit(connect: Connect, db: DB) -> None:
    one = send(db)
    assert claim(db) == [one]
    sender = connect(autocommit=False)
    two = send(sender)

    complete(db, one)
    assert claim(db) == []
    sender.commit()

    assert parked(db) == []
    assert claim(db) == [two]


def test_a_message_whose_head_died_is_due_after_its_commit(connect: Connect, db: DB) -> None:
    one = send(db)
    assert claim(db) == [one]
    sender = connect(autocommit=False)
    two = send(sender)

    db.execute("select ulak.fail(%s, 'w', 1, 'no', p_permanent => true)", [one])
    sender.commit()

    assert claim(db) == [two]


def test_a_message_whose_head_expired_is_due_after_its_commit(connect: Connect, db: DB) -> None:
    db.execute("select ulak.send('shop', '1', p_ordering_key => 'o', p_expires_at => now() + interval '1 h')")
    sender = connect(autocommit=False)
    two = send(sender)

    db.execute("select ulak.mark_expired_messages(now() + interval '1 h')")
    sender.commit()

    assert claim(db) == [two]


def test_a_sender_that_rolls_back_delays_no_other(connect: Connect, db: DB) -> None:
    one = send(db)
    assert claim(db) == [one]
    sender = connect(autocommit=False)
    send(sender)
    complete(db, one)

    sender.rollback()

    assert claim(db) == []
    two = send(db)
    assert claim(db) == [two]


def test_a_sender_does_not_wait_for_the_settlement_of_the_head(connect: Connect, db: DB) -> None:
    one = send(db)
    assert claim(db) == [one]
    worker = connect(autocommit=False)
    complete(worker, one)

    db.execute("set lock_timeout = '5s'")
    two = send(db)
    assert claim(db) == []
    worker.commit()

    assert parked(db) == []
    assert claim(db) == [two]


def test_a_sender_that_waits_does_not_keep_the_worker_from_settling(connect: Connect, db: DB) -> None:
    """Two open senders of the key, one behind the other, and the head between them and the worker."""
    one = send(db)
    assert claim(db) == [one]
    first, second = connect(autocommit=False), connect()
    two = send(first)
    waiting = Running(lambda: send(second))
    wait_until_blocked(second, db)

    db.execute("set lock_timeout = '5s'")
    complete(db, one)
    assert claim(db) == []
    first.commit()

    three = waiting.result()
    assert claim(db) == [two]
    complete(db, two)
    assert claim(db) == [three]


# Senders at repeatable read.


def test_an_older_snapshot_does_not_hold_a_message_behind_a_head_that_is_gone(connect: Connect, db: DB) -> None:
    one = send(db)
    sender = at_repeatable_read(connect)
    assert claim(db) == [one]
    complete(db, one)

    two = send(sender)
    sender.commit()

    assert parked(db) == []
    assert claim(db) == [two]


def test_an_older_snapshot_does_not_overtake_what_was_sent_since(connect: Connect, db: DB) -> None:
    """The key is older than the snapshot, the message before it isn't."""
    first = send(db)
    sender = at_repeatable_read(connect)
    assert claim(db) == [first]
    complete(db, first)
    one = send(db)

    two = send(sender)
    sender.commit()

    assert claim(db) == [one]
    assert claim(db) == []
    complete(db, one)
    assert claim(db) == [two]


def test_an_older_snapshot_waits_for_the_sender_before_it(connect: Connect, db: DB) -> None:
    before = send(db)
    assert claim(db) == [before]
    complete(db, before)
    sender, first = at_repeatable_read(connect), connect(autocommit=False)
    one = send(first)

    waiting = Running(lambda: send(sender))
    wait_until_blocked(sender, db)
    first.commit()
    two = waiting.result()
    sender.commit()

    assert one < two
    assert claim(db) == [one]
    complete(db, one)
    assert claim(db) == [two]


@pytest.mark.parametrize("isolation", ["repeatable read", "serializable"])
def test_a_key_that_is_newer_than_the_snapshot_is_a_serialization_failure(
    connect: Connect, db: DB, isolation: str
) -> None:
    sender = connect(autocommit=False)
    sender.execute(f"set transaction isolation level {isolation}")  # type: ignore[call-overload]
    sender.execute("select count(*) from ulak.queue")
    one = send(db)

    with pytest.raises(psycopg.errors.SerializationFailure):
        send(sender)
    sender.rollback()

    two = send(sender)
    sender.commit()
    assert claim(db) == [one]
    complete(db, one)
    assert claim(db) == [two]
