"""A node's session: values as in PL/Python, and what fails is undone alone."""

from __future__ import annotations

import select
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st
from psycopg import pq, sql
from support.cluster import Cluster
from support.sessions import wait_until_gone
from ulak.node import values
from ulak.node.session import Connection, Lost
from ulak.sessions.session import WakeUp, cancellable

DB = psycopg.Connection[Any]
Open = Callable[..., Connection]

TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))


class Quiet:
    """A process without any configuration."""

    leave: str | None = None
    wake: Callable[[], None] | None = None

    def log(self, line: str) -> None:
        raise AssertionError(line)


@pytest.fixture
def open_session(cluster: Cluster, database: str) -> Iterator[Open]:
    with ExitStack() as stack:

        def open_session(name: str = database) -> Connection:
            connection = pq.PGconn.connect(f"{cluster.dsn(name)} client_encoding=UTF8".encode())
            stack.callback(connection.finish)
            return Connection(connection, Quiet())

        yield open_session


@pytest.fixture
def session(open_session: Open, db: DB) -> Connection:
    db.execute("create table numbers (n integer primary key)")
    return open_session()


def numbers(db: DB) -> list[int]:
    return [n for (n,) in db.execute("select n from numbers order by 1")]


INSERT = "insert into numbers values ($1)"


@given(st.lists(st.none() | TEXT))
def test_texts_are_read_as_they_were_written(texts: list[str | None]) -> None:
    """By our own hand; the next test has PostgreSQL in between."""
    written = values.write(texts)

    assert written is not None
    assert values.reader(1009)(written) == texts


def test_values_pass_through_the_server_unchanged(session: Connection) -> None:
    texts = ["", "NULL", "null", None, 'a "b" \\ \\" {c,d}', "ünï\n\t", "\\", "{}", " a "]
    query = """
        select $1 as texts, $2 as ids, $3 as counts, $4 as text, $5 as number, $6 as yes, $7 as at, $8 as none,
            array['00000000-0000-0000-0000-000000000001'::uuid, null] as uuids, '{"a": 1}'::jsonb as json,
            array['2026-01-01 00:00:00+00'::timestamptz] as times, '{}'::bigint[] as empty, array[1::bigint, null] as gaps
    """
    types = ("text[]", "bigint[]", "int[]", "text", "float8", "bool", "timestamptz", "int")
    session.call("set timezone = 'UTC'")

    (row,) = session.call(
        query, types, (texts, (1, 2**40), [3, None], "$1 'x'", 0.25, True, "2026-01-01 00:00+00", None)
    )

    assert row == {
        "texts": texts,
        "ids": [1, 2**40],
        "counts": [3, None],
        "text": "$1 'x'",
        "number": 0.25,
        "yes": True,
        "at": "2026-01-01 00:00:00+00",
        "none": None,
        "uuids": ["00000000-0000-0000-0000-000000000001", None],
        "json": '{"a": 1}',
        "times": ["2026-01-01 00:00:00+00"],
        "empty": [],
        "gaps": [1, None],
    }


def test_a_text_with_a_zero_byte_is_refused_and_not_cut_off(session: Connection) -> None:
    for value in ("a\0b", ["a\0b"]):
        with pytest.raises(ValueError, match="zero byte"):
            values.write(value)


def test_what_fails_is_undone_alone(session: Connection, db: DB) -> None:
    session.call(INSERT, ("int",), (1,))
    with pytest.raises(psycopg.errors.UniqueViolation):
        session.call(INSERT, ("int",), (1,))
    session.call(INSERT, ("int",), (2,))

    assert numbers(db) == [1, 2]


def test_each_call_is_committed_at_once(session: Connection, db: DB) -> None:
    session.call(INSERT, ("int",), (1,))

    assert numbers(db) == [1]


def test_a_statement_that_could_not_be_prepared_is_prepared_the_next_time(session: Connection, db: DB) -> None:
    for _ in range(2):
        with pytest.raises(psycopg.errors.UndefinedTable):
            session.call("select n from later")
    db.execute("create table later as select 7 as n")

    assert session.call("select n from later") == [{"n": 7}]


def test_what_cannot_be_read_is_undone(cluster: Cluster, open_session: Open) -> None:
    name = "ascii"
    statement = sql.SQL("create database {} encoding 'SQL_ASCII' locale 'C' template template0")
    cluster.execute(statement.format(sql.Identifier(name)))
    try:
        with cluster.connect(name) as db:
            db.execute("create table numbers (n integer)")
            session = open_session(name)
            with pytest.raises(psycopg.errors.CharacterNotInRepertoire):
                session.call(r"insert into numbers values (1) returning convert_from('\xff', 'SQL_ASCII')")
            session.call("insert into numbers values (2)")

            assert numbers(db) == [2]
            session.close()
    finally:
        cluster.drop_database(name)


def test_a_session_that_was_ended_is_lost_and_stays_so(session: Connection, db: DB) -> None:
    """Whatever is asked of it then: a run that breaks off tries to give back what it holds."""
    ((pid, *_),) = [tuple(row.values()) for row in session.call("select pg_backend_pid()")]
    db.execute("select pg_terminate_backend(%s)", [pid])
    wait_until_gone(pid, db)

    for _ in range(2):
        with pytest.raises(Lost):
            session.call("select 1")
        with pytest.raises(Lost):
            session.call(INSERT, ("int",), (2,))
    assert numbers(db) == []


def test_an_error_that_is_not_the_end_is_not_a_loss(session: Connection) -> None:
    with pytest.raises(psycopg.errors.DivisionByZero):
        session.call("select 1 / 0")

    assert session.call("select 1 as one") == [{"one": 1}]


def test_a_cancel_passes_what_contains_errors_and_leaves_as_the_error_that_it_is(session: Connection) -> None:
    with pytest.raises(psycopg.errors.QueryCanceled), cancellable():
        try:
            session.call("do $$ begin perform pg_cancel_backend(pg_backend_pid()); perform pg_sleep(10); end $$")
        except Exception as contained:
            pytest.fail(f"contained: {contained}")

    assert session.call("select 1 as one") == [{"one": 1}]


# Being woken.


def waking(session: Connection) -> WakeUp:
    wake_up = session.wake_up()
    assert wake_up is not None
    return wake_up


def arrives(wake_up: WakeUp, seconds: float = 0) -> bool:
    return bool(select.select([wake_up], [], [], seconds)[0]) and wake_up.take()


def test_a_notification_ends_the_wait(session: Connection, db: DB) -> None:
    session.call("listen bell")
    wake_up = waking(session)
    wake_up.hold_back()
    assert not arrives(wake_up)

    db.execute("notify bell")

    assert arrives(wake_up, 10)
    assert not arrives(wake_up)
    wake_up.close()


def test_a_notification_that_comes_with_an_answer_is_not_missed(session: Connection) -> None:
    session.call("listen bell")
    wake_up = waking(session)
    wake_up.hold_back()

    # To itself: it is there when the statement ends.
    session.call("notify bell")

    assert arrives(wake_up)
    assert not arrives(wake_up)
    wake_up.close()


def test_a_session_that_does_not_wait_is_not_woken(session: Connection, db: DB) -> None:
    session.call("listen bell")
    wake_up = waking(session)
    wake_up.hold_back()
    db.execute("notify bell")
    wake_up.let_go()
    session.call("select 1")

    assert not arrives(wake_up)
    wake_up.hold_back()
    assert not arrives(wake_up)
    wake_up.close()


def test_the_loss_of_the_server_ends_the_wait(session: Connection, db: DB) -> None:
    ((pid, *_),) = [tuple(row.values()) for row in session.call("select pg_backend_pid()")]
    wake_up = waking(session)
    wake_up.hold_back()
    db.execute("select pg_terminate_backend(%s)", [pid])

    with pytest.raises(Lost):
        while not arrives(wake_up, 10):
            pass
    # libpq has closed the socket.
    wake_up.let_go()
    wake_up.close()
