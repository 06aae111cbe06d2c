"""One idempotency key, many sessions: one message and one id, however they meet."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import psycopg
import pytest
from support.cluster import Connect
from support.sessions import Running, gather, patience, wait_until, wait_until_blocked

DB = psycopg.Connection[Any]

SESSIONS = 32
SEND = "select ulak.send('shop', %s, p_idempotency_key => %s)"


@pytest.fixture(autouse=True)
def shop(db: DB) -> None:
    db.execute(
        "truncate ulak_private.deliveries, ulak_private.archived, ulak_private.idempotency_keys, ulak.endpoints cascade"
    )
    db.execute("select ulak.create_endpoint('shop', 'pull', '{}')")


def send(session: DB, payload: str = "1", key: str = "k") -> int:
    row = session.execute(SEND, [payload, key]).fetchone()
    assert row is not None
    return int(row[0])


def ids(db: DB) -> list[int]:
    return [id for (id,) in db.execute("select id from ulak.messages order by id")]


def wait_until_all_wait(sessions: list[DB], observer: DB) -> None:
    query = "select count(*) from unnest(%s::integer[]) pid where pg_blocking_pids(pid) <> '{}'"
    pids = [session.info.backend_pid for session in sessions]
    wait_until(lambda: observer.execute(query, [pids]).fetchone() == (len(pids),), "all sessions waiting")


def test_sessions_that_race_on_one_key_leave_one_row_and_one_id(connect: Connect, db: DB) -> None:
    sessions = [connect() for _ in range(SESSIONS)]
    start = threading.Barrier(SESSIONS, timeout=patience())

    def race(session: DB) -> Callable[[], list[int]]:
        def run() -> list[int]:
            start.wait()
            return [send(session, key=f"key {n}") for n in range(10)]

        return run

    results = gather(race(session) for session in sessions)

    assert results == [ids(db)] * SESSIONS
    assert len(ids(db)) == 10


def test_sessions_that_race_with_two_payloads_leave_one_and_refuse_the_other(connect: Connect, db: DB) -> None:
    sessions = [connect() for _ in range(16)]
    start = threading.Barrier(len(sessions), timeout=patience())

    def race(session: DB, payload: str) -> Callable[[], tuple[str, Any]]:
        def run() -> tuple[str, Any]:
            start.wait()
            try:
                return payload, send(session, payload)
            except psycopg.errors.UniqueViolation as error:
                return payload, error.diag.message_primary

        return run

    results = gather(race(session, str(n % 2)) for n, session in enumerate(sessions))

    ((id, winner),) = db.execute("select id, payload::text from ulak.queue").fetchall()
    refusal = 'idempotency key "k" was used for another payload'
    assert results == [(payload, id if payload == winner else refusal) for payload, _ in results]


def test_a_sender_waits_for_the_first_and_gets_its_id(connect: Connect, db: DB) -> None:
    first, second = connect(autocommit=False), connect()
    id = send(first)

    waiting = Running(lambda: send(second))
    wait_until_blocked(second, db)
    first.commit()

    assert waiting.result() == id
    assert ids(db) == [id]


def test_senders_that_wait_for_a_first_that_rolls_back_agree_on_another(connect: Connect, db: DB) -> None:
    first, others = connect(autocommit=False), [connect() for _ in range(SESSIONS - 1)]
    id = send(first)

    waiting = [Running(partial(send, session)) for session in others]
    wait_until_all_wait(others, db)
    first.rollback()

    results = {running.result() for running in waiting}
    assert list(results) == ids(db)
    assert id not in results


def test_a_sender_that_waits_while_the_key_becomes_free_sends_its_own(connect: Connect, db: DB) -> None:
    first = send(db, "1")
    worker, second = connect(autocommit=False), connect()
    worker.execute("select ulak.fail(c.id, 'w', c.attempt, 'no', p_permanent => true) from ulak.claim('w') c")

    waiting = Running(lambda: send(second, "2"))
    wait_until_blocked(second, db)
    worker.commit()

    second_id = waiting.result()
    assert ids(db) == [first, second_id]


def test_a_sender_that_waits_while_the_first_is_delivered_gets_its_id(connect: Connect, db: DB) -> None:
    first = send(db)
    worker, second = connect(autocommit=False), connect()
    worker.execute("select ulak.complete(c.id, 'w', c.attempt) from ulak.claim('w') c")

    waiting = Running(lambda: send(second))
    wait_until_blocked(second, db)
    worker.commit()

    assert waiting.result() == first
    assert ids(db) == [first]


@pytest.mark.parametrize("isolation", ["repeatable read", "serializable"])
def test_an_older_snapshot_that_can_not_see_the_first_must_try_again(connect: Connect, db: DB, isolation: str) -> None:
    late = connect(autocommit=False)
    late.execute(f"set transaction isolation level {isolation}")  # type: ignore[arg-type]
    late.execute("select count(*) from ulak.queue")
    first = send(db)

    with pytest.raises(psycopg.errors.SerializationFailure):
        send(late)
    late.rollback()

    assert send(late) == first
    late.commit()
    assert ids(db) == [first]


def test_a_key_that_a_sender_is_taking_holds_no_maintenance_up(connect: Connect, db: DB) -> None:
    db.execute("select ulak.send('shop', '1', p_idempotency_key => key) from unnest('{taken,forgotten}'::text[]) key")
    db.execute("select ulak.cancel(id) from ulak.queue")
    sender, maintenance = connect(autocommit=False), connect()
    sender.execute("select ulak.send('shop', '2', p_idempotency_key => 'taken')")

    maintenance.execute("set lock_timeout = '5s'")
    maintenance.execute("select ulak.archive_completed_messages(0)")

    assert db.execute("select idempotency_key from ulak_private.idempotency_keys").fetchall() == [("taken",)]
    sender.rollback()
