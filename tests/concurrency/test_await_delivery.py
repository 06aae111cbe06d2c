"""Waiting for a delivery: until the message is settled, or the time is over, without holding a snapshot."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from support.cluster import Connect
from support.queue import Queue
from support.rewritten import rewritten
from support.sessions import Running, is_waiting, wait_until

DB = psycopg.Connection[Any]
CALL = "call ulak.await_delivery(%s, %s, null)"


@pytest.fixture
def queue(queue: Queue) -> Queue:
    queue.endpoint()
    return queue


@pytest.fixture
def application(connect: Connect) -> DB:
    return connect("ulak_application")


def awaiting(application: DB, id: int) -> Running:
    return Running(lambda: application.execute(CALL, [id, "1 day"]).fetchone())


def wait_until_waiting(queue: Queue, session: DB) -> None:
    """It has looked and committed: its call is under way, and nothing in it runs."""
    query = (
        "select query like 'call%%' and state = 'active' and backend_xmin is null from pg_stat_activity where pid = %s"
    )
    pid = session.info.backend_pid
    # It has no snapshot before its first look, either, but then it runs.
    wait_until(lambda: queue.value(query, pid) and is_waiting(pid), message="a session that waits without a snapshot")


@pytest.mark.parametrize(
    ("settle", "status"),
    [
        (lambda queue, id: queue.complete(queue.claim_one()), "completed"),
        (lambda queue, id: queue.fail(queue.claim_one(), permanent=True), "failed"),
        (lambda queue, id: queue.call("cancel", id), "cancelled"),
    ],
)
def test_it_waits_until_the_message_is_settled_and_says_how(
    queue: Queue, application: DB, settle: Any, status: str
) -> None:
    id = queue.send()
    call = awaiting(application, id)
    wait_until_waiting(queue, application)
    assert not call.is_done()

    settle(queue, id)

    assert call.result() == (status,)


def test_it_holds_neither_snapshot_nor_transaction_while_it_waits(
    queue: Queue, application: DB, connect: Connect
) -> None:
    """Neither what waits for all older snapshots is held up nor what needs the queue for itself."""
    holds_nothing = """
        select a.backend_xmin is null and not exists (
            select from pg_locks l where l.pid = a.pid and l.locktype = 'relation'
        )
        from pg_stat_activity a
        where a.pid = %s and a.state = 'active'
    """
    id = queue.send()
    other = connect()
    other.execute("create table held_up (n integer)")

    # A wait takes far longer than a look, its own or 50 of the test's.
    with rewritten(queue.db, "ulak_private.await_delivery", "0.002, 0.1", "2.0, 2.0"):
        call = awaiting(application, id)
        wait_until_waiting(queue, application)

        assert [queue.column(holds_nothing, application.info.backend_pid) for _ in range(50)].count([True]) > 25
        Running(lambda: other.execute("create index concurrently on held_up (n)")).result()
        with other.transaction():
            Running(lambda: other.execute("lock table ulak_private.deliveries in access exclusive mode")).result()
        assert not call.is_done()

        queue.complete(queue.claim_one())
        assert call.result() == ("completed",)


def test_when_the_time_is_over_it_tells_where_the_message_stands(queue: Queue, application: DB) -> None:
    id = queue.send()

    assert application.execute(CALL, [id, "0 s"]).fetchone() == ("pending",)
    assert application.execute(CALL, [id, "20 ms"]).fetchone() == ("pending",)
    queue.claim_one()
    assert application.execute(CALL, [id, "20 ms"]).fetchone() == ("processing",)


def test_what_was_delivered_needs_no_wait_even_in_a_transaction(queue: Queue, application: DB) -> None:
    id = queue.send()
    queue.complete(queue.claim_one())

    with application.transaction():
        assert application.execute(CALL, [id, "10 s"]).fetchone() == ("completed",)


def test_in_a_transaction_it_says_that_it_cannot_wait(queue: Queue, application: DB) -> None:
    id = queue.send()

    with (
        pytest.raises(psycopg.errors.ActiveSqlTransaction, match="can't wait inside a transaction") as error,
        application.transaction(),
    ):
        application.execute(CALL, [id, "10 s"])

    assert str(error.value.diag.message_hint).startswith("Commit first")
    assert "Traceback" not in str(error.value.diag.context)


def test_an_unknown_message_and_a_senseless_time_are_errors(queue: Queue, application: DB) -> None:
    id = queue.send()

    with pytest.raises(psycopg.errors.NoDataFound) as error:
        application.execute(CALL, [-1, "1 s"])
    assert "Traceback" not in str(error.value.diag.context)
    for timeout in ("-1 s", "25 hours", None):
        with pytest.raises(psycopg.errors.InvalidParameterValue):
            application.execute(CALL, [id, timeout])


def test_it_can_be_cancelled(queue: Queue, application: DB) -> None:
    call = awaiting(application, queue.send())
    wait_until_waiting(queue, application)

    application.cancel()

    with pytest.raises(psycopg.errors.QueryCanceled, match="user request"):
        call.result()


def test_no_search_path_can_make_it_run_something_else(queue: Queue, connect: Connect) -> None:
    id = queue.send()
    session = connect()
    session.execute("create schema evil")
    session.execute("create function evil.date_part(text, interval) returns float8 language sql as 'select 1 / 0.0'")
    session.execute("create domain evil.interval as text check (false)")
    session.execute("create domain evil.int8 as text check (false)")
    session.execute("set search_path = evil, pg_catalog")

    assert session.execute(CALL, [id, "1 ms"]).fetchone() == ("pending",)
    session.execute("drop schema evil cascade")
