"""Event types and subscriptions: what can be made, and what is refused at once instead of failing later."""

from __future__ import annotations

from functools import partial
from typing import Any

import psycopg
import pytest
from support.cluster import Connect
from support.errors import refused
from support.sessions import gather

DB = psycopg.Connection[Any]


@pytest.fixture(autouse=True)
def endpoint(db: DB) -> None:
    db.execute("select ulak.create_endpoint('a', 'pull', '{}')")


def test_an_event_type_is_created_with_description_and_schema(db: DB) -> None:
    row = db.execute("select ulak.create_event_type('order.created', 'An order', '{\"type\": \"object\"}')").fetchone()

    assert row == ("order.created",)
    assert db.execute(
        "select name, description, schema from ulak.event_types where not starts_with(name, 'ulak.')"
    ).fetchall() == [("order.created", "An order", {"type": "object"})]


def test_a_second_event_type_of_the_same_name_is_refused(db: DB) -> None:
    db.execute("select ulak.create_event_type('e')")

    assert refused(db, "select ulak.create_event_type('e', 'other')").sqlstate == "23505"


def test_a_name_must_be_printable_and_short(db: DB) -> None:
    for name in ("", "a b", "a\nb", "x" * 201, None):
        assert refused(db, "select ulak.create_event_type(%s)", name).sqlstate == "22023"


def test_names_of_ulaks_own_events_are_reserved(db: DB) -> None:
    assert refused(db, "select ulak.create_event_type('ulak.mine')").sqlstate == "42939"
    assert refused(db, "select ulak.drop_event_type('ulak.mine')").sqlstate == "42939"

    db.execute("select ulak.create_event_type('ulakish')")


def test_a_schema_that_cannot_be_enforced_is_refused(db: DB) -> None:
    error = refused(db, """select ulak.create_event_type('e', null, '{"properties": {"a": {"format": "date"}}}')""")

    assert error.sqlstate == "22023"
    assert error.message_primary == "invalid JSON Schema: $.properties.a.format is not a known key"
    assert db.execute("select count(*) from ulak.event_types where name = 'e'").fetchone() == (0,)


def test_a_dropped_event_type_takes_its_subscriptions_along(db: DB) -> None:
    notices: list[str | None] = []
    db.add_notice_handler(lambda notice: notices.append(notice.message_primary))
    db.execute("select ulak.create_event_type('e')")
    db.execute("select ulak.subscribe('e', 'a')")
    db.execute("""select ulak.subscribe('e', 'a', '{"x": 1}')""")

    assert db.execute("select ulak.drop_event_type('e')").fetchone() == (True,)

    assert notices == ['dropped with event type "e": 2 subscriptions']
    assert db.execute("select count(*) from ulak.subscriptions").fetchone() == (0,)
    assert refused(db, "select ulak.publish('e', '{}')").sqlstate == "42704"


def test_an_unknown_event_type_is_answered_with_the_nearest(db: DB) -> None:
    db.execute("select ulak.create_event_type('order.created')")

    for statement in (
        "select ulak.drop_event_type('order.create')",
        "select ulak.subscribe('order.create', 'a')",
        "select ulak.publish('order.create', '{}')",
        """select ulak.publish_batch('[{"event_type": "order.create", "payload": 1}]')""",
    ):
        error = refused(db, statement)

        assert (error.sqlstate, error.message_hint) == ("42704", 'Did you mean "order.created"?')


def test_a_subscription_is_made_and_removed_by_its_id(db: DB) -> None:
    db.execute("select ulak.create_event_type('e')")

    row = db.execute("""select ulak.subscribe('e', 'a', '{"x": 1}', '$.total > 100')""").fetchone()

    assert row == (1,)
    query = "select event_type, endpoint_id, filter, predicate::text from ulak.subscriptions"
    assert db.execute(query).fetchall() == [("e", 1, {"x": 1}, '($."total" > 100)')]
    assert db.execute("select ulak.unsubscribe(1)").fetchone() == (True,)
    assert db.execute("select ulak.unsubscribe(1)").fetchone() == (False,)
    assert db.execute(query).fetchall() == []


def test_the_same_subscription_is_refused_and_another_filter_is_not(db: DB) -> None:
    db.execute("select ulak.create_event_type('e')")
    statements = [
        "select ulak.subscribe('e', 'a')",
        """select ulak.subscribe('e', 'a', '{"x": 1}')""",
        "select ulak.subscribe('e', 'a', null, '$.x == 1')",
        """select ulak.subscribe('e', 'a', '{"x": 1}', '$.x == 1')""",
    ]

    for number, statement in enumerate(statements, 1):
        assert db.execute(statement.encode()).fetchone() == (number,)
    for number, statement in enumerate(statements, 1):
        error = refused(db, statement)
        assert (error.sqlstate, error.message_detail) == ("23505", f"It is subscription {number}.")


def test_racing_sessions_make_one_subscription(connect: Connect, db: DB) -> None:
    db.execute("select ulak.create_event_type('e')")

    def subscribe(session: DB) -> str | None:
        try:
            session.execute("select ulak.subscribe('e', 'a')")
        except psycopg.errors.UniqueViolation as error:
            return error.diag.sqlstate
        return None

    results = gather([partial(subscribe, connect()) for _ in range(6)])

    assert sorted(results, key=str) == ["23505"] * 5 + [None]


def test_subscribing_an_unknown_endpoint_is_answered_with_the_nearest(db: DB) -> None:
    db.execute("select ulak.create_event_type('e')")
    db.execute("select ulak.create_endpoint('analytics', 'pull', '{}')")

    error = refused(db, "select ulak.subscribe('e', 'analitics')")

    assert (error.sqlstate, error.message_hint) == ("42704", 'Did you mean "analytics"?')


def test_a_predicate_that_is_no_condition_or_needs_a_variable_is_refused(db: DB) -> None:
    db.execute("select ulak.create_event_type('e')")
    paths = ["$.total", "$.items[*] ? (@.price > 10)", "strict $.a"]
    variables = ["$.total > $limit", '$.a == 1 || $."b" == $x', '$.a == "$" && $x == 1']

    for kind, predicates in {"is a path, not a condition": paths, "has a variable": variables}.items():
        for predicate in predicates:
            error = refused(db, "select ulak.subscribe('e', 'a', null, %s::jsonpath)", predicate)
            assert (error.sqlstate, error.message_primary) == ("22023", f"the predicate {kind}"), predicate


def test_a_condition_is_accepted(db: DB) -> None:
    db.execute("select ulak.create_event_type('e')")

    for predicate in (
        "$.total > 100",
        "strict $.total > 100",
        "$.active == true",
        "exists($.items[*] ? (@.price > 10))",
        '$.name starts with "$x" && $.other == "ends in $"',
        '$."$key" == 1',
        '$.name like_regex "^a.*z$" flag "i"',
        "!($.a == 1)",
        "($.a / 0) == 1",
    ):
        db.execute("select ulak.subscribe('e', 'a', null, %s::jsonpath)", [predicate])


def test_only_an_administrator_changes_event_types_and_subscriptions(connect: Connect, db: DB) -> None:
    db.execute("select ulak.create_event_type('e')")
    statements = [
        "select ulak.create_event_type('f')",
        "select ulak.subscribe('e', 'a')",
        "select ulak.unsubscribe(1)",
        "select ulak.drop_event_type('e')",
    ]

    for role in ("ulak_application", "ulak_monitor", "ulak_worker"):
        for statement in statements:
            assert refused(connect(role), statement).sqlstate == "42501"
    admin = connect("ulak_admin")
    for statement in statements:
        admin.execute(statement.encode())
