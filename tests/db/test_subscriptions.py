"""Event types and subscriptions are changed in place, switched off, removed by name and looked at."""

from __future__ import annotations

import json
from typing import Any

import psycopg
import pytest
from support.cluster import Connect
from support.errors import refused
from support.sessions import Running, wait_until

DB = psycopg.Connection[Any]


@pytest.fixture(autouse=True)
def world(db: DB) -> None:
    db.execute("select ulak.create_endpoint(name, 'pull', '{}') from unnest('{a,b}'::text[]) name")
    db.execute("""select ulak.create_event_type('order', 'orders', '{"required": ["id"]}')""")
    db.execute("select ulak.subscribe('order', name) from unnest('{a,b}'::text[]) name")


def value(db: DB, query: str, *parameters: Any) -> Any:
    row = db.execute(query, parameters or None).fetchone()  # type: ignore[arg-type]
    assert row is not None
    return row[0]


def publish(db: DB, payload: Any) -> int:
    return int(value(db, "select ulak.publish('order', %s)", json.dumps(payload)))


def subscription(db: DB, endpoint: str = "a") -> int:
    return int(value(db, "select id from ulak.subscription_list where endpoint = %s", endpoint))


def test_a_schema_is_replaced_and_every_subscriber_stays(db: DB) -> None:
    db.execute("""select ulak.alter_event_type('order', p_schema => '{"required": ["number"]}')""")

    assert publish(db, {"number": 1}) == 2
    assert refused(db, """select ulak.publish('order', '{"id": 1}')""").sqlstate == "22023"
    assert value(db, "select description from ulak.event_types where name = 'order'") == "orders"


def test_a_schema_and_a_description_are_cleared(db: DB) -> None:
    db.execute("select ulak.alter_event_type('order', p_schema => '{}', p_description => '')")

    assert publish(db, 1) == 2
    query = "select description, schema from ulak.event_types where name = 'order'"
    assert db.execute(query).fetchall() == [(None, None)]


@pytest.mark.parametrize(
    ("statement", "code", "message"),
    [
        ("select ulak.alter_event_type('ordre', 'x')", "42704", 'unknown event type "ordre"'),
        (
            "select ulak.alter_event_type('ulak.message.dead', 'x')",
            "42939",
            'event type "ulak.message.dead" is reserved',
        ),
        ("select ulak.alter_subscription(0, p_enabled => false)", "42704", "subscription 0 does not exist"),
        ("select ulak.alter_subscription(null)", "42704", "subscription null does not exist"),
        (
            "select ulak.alter_subscription(1, p_predicate => '$.a')",
            "22023",
            "the predicate is a path, not a condition",
        ),
        ("select ulak.unsubscribe('order', 'c')", "42704", 'unknown endpoint "c"'),
        ("select ulak.unsubscribe('ordre', 'a')", "42704", 'unknown event type "ordre"'),
    ],
)
def test_what_is_not_there_or_not_valid_is_refused(db: DB, statement: str, code: str, message: str) -> None:
    error = refused(db, statement)

    assert (error.sqlstate, error.message_primary) == (code, message)


def test_an_invalid_schema_is_refused(db: DB) -> None:
    assert (
        refused(db, """select ulak.alter_event_type('order', p_schema => '{"type": "no such type"}')""").sqlstate
        == "22023"
    )


def test_a_subscription_is_changed_in_place(db: DB) -> None:
    id = subscription(db)

    db.execute("""select ulak.alter_subscription(%s, '{"id": 1}', '$.total > 10', p_description => 'big ones')""", [id])

    assert (publish(db, {"id": 1, "total": 11}), publish(db, {"id": 1, "total": 9}), publish(db, {"id": 2})) == (
        2,
        1,
        1,
    )
    db.execute("select ulak.alter_subscription(%s, '{}')", [id])
    assert (publish(db, {"id": 2, "total": 11}), publish(db, {"id": 2})) == (2, 1)
    db.execute("select ulak.alter_subscription(%s, p_predicate => 'true', p_description => '')", [id])
    assert publish(db, {"id": 2}) == 2
    row = db.execute("select filter, predicate, description from ulak.subscriptions where id = %s", [id]).fetchone()
    assert row == (None, None, None)


def test_a_subscription_that_is_switched_off_gets_nothing_until_it_is_on_again(db: DB) -> None:
    id = subscription(db)

    db.execute("select ulak.alter_subscription(%s, p_enabled => false)", [id])
    assert publish(db, {"id": 1}) == 1
    db.execute("select ulak.alter_subscription(%s, p_enabled => true)", [id])
    assert publish(db, {"id": 2}) == 2

    query = "select q.payload from ulak.queue q join ulak.endpoints e on e.id = q.endpoint_id where e.name = 'a'"
    assert db.execute(query).fetchall() == [({"id": 2},)]


def test_operators_who_switched_their_subscription_off_are_told_nothing(db: DB) -> None:
    id = value(db, "select ulak.subscribe('ulak.endpoint.disabled', 'b')")
    db.execute("select ulak.alter_subscription(%s, p_enabled => false)", [id])

    db.execute("select ulak.disable_endpoint('a')")

    assert value(db, "select count(*) from ulak.queue") == 0


def test_a_change_that_would_make_two_of_a_kind_is_refused(db: DB) -> None:
    other = value(db, """select ulak.subscribe('order', 'a', '{"id": 1}')""")

    error = refused(db, "select ulak.alter_subscription(%s, '{}')", other)

    assert (error.sqlstate, error.message_detail) == ("23505", f"It is subscription {subscription(db, 'a')}.")


def test_two_sessions_can_not_make_two_of_a_kind(connect: Connect, db: DB) -> None:
    other = value(db, """select ulak.subscribe('order', 'b', '{"id": 1}')""")
    first, second = connect(autocommit=False), connect()
    first.execute("""select ulak.subscribe('order', 'b', '{"id": 2}')""")

    running = Running(lambda: second.execute("""select ulak.alter_subscription(%s, '{"id": 2}')""", [other]))
    blocked = "select cardinality(pg_blocking_pids(%s)) > 0"
    wait_until(lambda: bool(value(db, blocked, second.info.backend_pid)), "the second to wait")
    first.commit()

    with pytest.raises(psycopg.errors.UniqueViolation):
        running.result()


def test_subscriptions_are_removed_by_names(db: DB) -> None:
    db.execute("""select ulak.subscribe('order', 'a', '{"id": 1}')""")

    assert value(db, "select ulak.unsubscribe('order', 'a')") == 2
    assert value(db, "select ulak.unsubscribe('order', 'a')") == 0

    assert db.execute("select endpoint from ulak.subscription_list").fetchall() == [("b",)]


def test_subscriptions_are_listed_by_name(connect: Connect, db: DB) -> None:
    id = subscription(db)
    db.execute("""select ulak.alter_subscription(%s, '{"id": 1}', '$.a == 1', false, 'why')""", [id])

    admin = connect("ulak_admin")
    query = "select event_type, endpoint, enabled, filter, predicate::text, description from ulak.subscription_list order by 2"
    assert admin.execute(query).fetchall() == [
        ("order", "a", False, {"id": 1}, '($."a" == 1)', "why"),
        ("order", "b", True, None, None, None),
    ]
    assert refused(connect("ulak_application"), "select from ulak.subscription_list").sqlstate == "42501"
