"""Publishing: which endpoints get an event, what a schema refuses, and that it is all or nothing."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from support.cluster import Connect
from support.errors import refused

DB = psycopg.Connection[Any]

ORDER = {
    "type": "object",
    "required": ["id"],
    "properties": {
        "id": {"type": "integer"},
        "items": {"type": "array", "items": {"properties": {"price": {"minimum": 0}}}},
    },
}


@pytest.fixture(autouse=True)
def world(db: DB) -> None:
    for name in ("a", "b", "c"):
        db.execute("select ulak.create_endpoint(%s, 'pull', '{}')", [name])
    db.execute("select ulak.create_event_type('free')")
    db.execute("select ulak.create_event_type('order', null, %s)", [json.dumps(ORDER)])


def publish(db: DB, event_type: str, payload: Any) -> Any:
    row = db.execute("select ulak.publish(%s, %s)", [event_type, json.dumps(payload)]).fetchone()
    assert row is not None
    return row[0]


def publish_batch(db: DB, *events: tuple[str, Any]) -> Any:
    batch = [{"event_type": event_type, "payload": payload} for event_type, payload in events]
    row = db.execute("select ulak.publish_batch(%s)", [json.dumps(batch)]).fetchone()
    assert row is not None
    return row[0]


def queued(db: DB) -> list[tuple[str, Any]]:
    query = "select e.name, q.payload from ulak.queue q join ulak.endpoints e on e.id = q.endpoint_id order by q.id"
    return db.execute(query).fetchall()


def test_an_event_reaches_every_endpoint_that_subscribed(db: DB) -> None:
    db.execute("select ulak.subscribe('free', name) from unnest('{a,c}'::text[]) name")

    assert publish(db, "free", {"n": 1}) == 2

    assert queued(db) == [("a", {"n": 1}), ("c", {"n": 1})]


def test_a_message_says_which_event_it_is_of(db: DB) -> None:
    db.execute("select ulak.subscribe('free', 'a'), ulak.subscribe('order', 'a')")

    publish(db, "free", {})
    publish_batch(db, ("order", {"id": 1}), ("free", {}))

    said = db.execute("select headers ->> 'ulak-event-type', metadata ->> 'event_type' from ulak.queue order by id")
    assert said.fetchall() == [("free", "free"), ("order", "order"), ("free", "free")]


def test_an_event_without_subscribers_queues_nothing(db: DB) -> None:
    db.execute("select ulak.subscribe('order', 'a')")

    assert publish(db, "free", {}) == 0
    assert publish_batch(db, ("free", {}), ("free", {})) == 0
    assert publish_batch(db) == 0

    assert queued(db) == []


def test_a_filter_lets_through_what_contains_it(db: DB) -> None:
    db.execute("""select ulak.subscribe('free', 'a', '{"region": "eu", "tags": ["x"]}')""")

    assert publish(db, "free", {"region": "eu", "tags": ["y", "x"], "n": 1}) == 1
    assert publish(db, "free", {"region": "us", "tags": ["x"]}) == 0
    assert publish(db, "free", {"region": "eu"}) == 0
    assert publish(db, "free", [1, 2]) == 0


def test_a_predicate_lets_through_what_makes_it_true(db: DB) -> None:
    db.execute("select ulak.subscribe('free', 'a', null, '$.total > 100 && exists($.items[*] ? (@.price > 10))')")

    assert publish(db, "free", {"total": 101, "items": [{"price": 1}, {"price": 11}]}) == 1
    assert publish(db, "free", {"total": 101, "items": [{"price": 1}]}) == 0
    assert publish(db, "free", {"total": 99, "items": [{"price": 11}]}) == 0


def test_filter_and_predicate_must_both_hold(db: DB) -> None:
    db.execute("""select ulak.subscribe('free', 'a', '{"region": "eu"}', '$.total > 100')""")

    totals = [publish(db, "free", {"region": region, "total": total}) for region in ("eu", "us") for total in (101, 99)]

    assert totals == [1, 0, 0, 0]


PREDICATES = [
    "$.total > 100",
    "strict $.total > 100",
    "strict $.missing.deeper == 1",
    "$.total / $.zero > 1",
    "$.total.double() > 1",
    '$.date.datetime() < "2020-01-01T00:00:00+00".datetime()',
    '$.date.datetime("YYYY") == 1',
    "-$.total > 1",
    "$.items[$.total] == 1",
]


def test_a_predicate_that_fails_never_aborts_the_transaction(db: DB) -> None:
    odd = {"total": "not a number", "zero": 0, "date": "nonsense"}
    even = {"total": 7, "zero": 0, "date": "2024-05-05"}
    payloads: list[Any] = [odd, even, [], 1, None]
    db.execute("select ulak.subscribe('free', 'a', null, p::jsonpath) from unnest(%s::text[]) p", [PREDICATES])
    db.execute("select ulak.subscribe('free', 'b')")

    for payload in payloads:
        assert publish(db, "free", payload) in (1, 2)
        assert publish_batch(db, ("free", payload)) in (1, 2)


def test_a_predicate_that_subscribe_would_refuse_does_not_abort_either(db: DB) -> None:
    db.execute(
        "insert into ulak.subscriptions (event_type, endpoint_id, predicate) values ('free', 1, 'strict $.total')"
    )

    assert publish(db, "free", {"total": 7}) == 0
    assert publish(db, "free", {}) == 0


def test_an_endpoint_gets_an_event_once_however_many_subscriptions_match(db: DB) -> None:
    db.execute("select ulak.subscribe('free', 'a')")
    db.execute("""select ulak.subscribe('free', 'a', '{"x": 1}')""")
    db.execute("select ulak.subscribe('free', 'a', null, '$.x == 1')")

    assert publish(db, "free", {"x": 1}) == 1
    assert publish_batch(db, ("free", {"x": 1}), ("free", {"x": 1})) == 2


def test_a_payload_against_its_schema_is_refused_by_its_path(db: DB) -> None:
    db.execute("select ulak.subscribe('order', 'a')")
    cases: list[tuple[Any, str]] = [
        ({}, "$.id is required"),
        ({"id": "hunter2"}, "$.id must be of type integer"),
        ({"id": 1, "items": [{"price": 1}, {}, {"price": -1}]}, "$.items[2].price must be at least 0"),
        ([], "$ must be of type object"),
    ]

    for payload, expected in cases:
        error = refused(db, "select ulak.publish('order', %s)", json.dumps(payload))

        assert error.sqlstate == "22023"
        assert error.message_primary == f'payload of event type "order" is not valid: {expected}'
        assert "hunter2" not in f"{error.message_detail} {error.message_hint} {error.context}"
    assert queued(db) == []


def test_a_payload_that_satisfies_its_schema_is_queued(db: DB) -> None:
    db.execute("select ulak.subscribe('order', 'a')")

    assert publish(db, "order", {"id": 1, "items": [{"price": 0}], "more": True}) == 1


def test_a_missing_payload_is_refused_and_a_json_null_is_not(db: DB) -> None:
    db.execute("select ulak.subscribe('free', 'a')")

    assert refused(db, "select ulak.publish('free', null)").sqlstate == "22004"
    assert refused(db, "select ulak.publish_batch(null)").sqlstate == "22004"
    assert publish(db, "free", None) == 1
    assert publish_batch(db, ("free", None)) == 1


def test_a_batch_keeps_the_order_of_its_events(db: DB) -> None:
    db.execute("select ulak.subscribe('free', name) from unnest('{b,a}'::text[]) name")
    db.execute("select ulak.subscribe('order', 'c')")

    assert publish_batch(db, ("free", 1), ("order", {"id": 2}), ("free", 3)) == 5

    assert queued(db) == [("a", 1), ("b", 1), ("c", {"id": 2}), ("a", 3), ("b", 3)]


BAD_EVENTS: list[tuple[Any, str]] = [
    ({"event_type": "order", "payload": {}}, 'payload of event type "order" is not valid: $[1].payload.id is required'),
    ({"event_type": "orde", "payload": {}}, 'unknown event type "orde"'),
    ({"event_type": "ulak.message.dead", "payload": {}}, 'event type "ulak.message.dead" is reserved'),
    ({"event_type": "free"}, "invalid events: $[1].payload is required"),
    ({"payload": 1}, "invalid events: $[1].event_type is required"),
    ({"event_type": 1, "payload": 1}, "invalid events: $[1].event_type must be of type string"),
    ({"event_type": "free", "payload": 1, "prority": 2}, "invalid events: $[1].prority is not a known key"),
    ({"event_type": "free", "payload": 1, "priority": 11}, "invalid events: $[1].priority must be at most 10"),
    (
        {"event_type": "free", "payload": 1, "headers": []},
        "invalid events: $[1].headers must be of type object or null",
    ),
    (
        {"event_type": "free", "payload": 1, "event_id": 1},
        "invalid events: $[1].event_id must be of type string or null",
    ),
    ({"event_type": "free", "payload": 1, "ordering_key": ""}, "ordering key must have 1 to 512 bytes"),
    ({"event_type": "free", "payload": 1, "metadata": {"event_type": "ulak.x"}}, 'event type "ulak.x" is reserved'),
    ("free", "invalid events: $[1] must be of type object"),
    (None, "invalid events: $[1] must be of type object"),
]


def test_one_bad_event_refuses_the_whole_batch(db: DB) -> None:
    db.execute("select ulak.subscribe('free', 'a')")
    good = {"event_type": "free", "payload": 1}

    for bad, expected in BAD_EVENTS:
        error = refused(db, "select ulak.publish_batch(%s)", json.dumps([good, bad, good]))
        assert error.message_primary == expected
    assert queued(db) == []


def test_a_batch_must_be_an_array(db: DB) -> None:
    error = refused(db, "select ulak.publish_batch('{}')")

    assert (error.sqlstate, error.message_primary) == ("22023", "invalid events: $ must be of type array")


def test_an_application_cannot_publish_ulaks_own_events(connect: Connect) -> None:
    application = connect("ulak_application")

    assert refused(application, "select ulak.publish('ulak.message.dead', '{}')").sqlstate == "42939"
    assert refused(application, "select ulak_private.fan_out(null, null, null)").sqlstate == "42501"


def test_an_application_publishes_in_its_own_transaction(connect: Connect, db: DB) -> None:
    db.execute("select ulak.subscribe('free', 'a')")
    application = connect("ulak_application", autocommit=False)

    assert publish(application, "free", 1) == 1
    application.rollback()
    assert queued(db) == []

    assert publish_batch(application, ("free", 2)) == 1
    application.commit()
    assert queued(db) == [("a", 2)]


def test_a_fan_out_that_does_not_fit_the_queue_is_refused_before_any_insert(db: DB) -> None:
    db.execute("select ulak.subscribe('free', name) from unnest('{a,b,c}'::text[]) name")
    db.execute("select ulak.configure('max_queue_size', '5')")

    assert publish(db, "free", 1) == 3
    assert refused(db, "select ulak.publish('free', '2')").sqlstate == "53400"
    batch = '[{"event_type": "free", "payload": 3}, {"event_type": "free", "payload": 4}]'
    assert refused(db, "select ulak.publish_batch(%s)", batch).sqlstate == "53400"

    assert len(queued(db)) == 3


def test_a_disabled_endpoint_holds_its_events(db: DB) -> None:
    db.execute("select ulak.subscribe('free', 'a')")
    db.execute("select ulak.disable_endpoint('a')")

    assert publish(db, "free", 1) == 1


def test_a_publish_is_one_insert_however_many_endpoints(db: DB) -> None:
    db.execute("select ulak.subscribe('free', name) from unnest('{a,b,c}'::text[]) name")
    db.execute(
        """
        create function count_statements() returns trigger language plpgsql as
            'begin insert into public.statements default values; return null; end';
        create table statements ();
        create trigger counts after insert on ulak_private.deliveries for each statement execute function count_statements();
        """
    )

    publish(db, "free", 1)
    assert db.execute("select count(*) from statements").fetchone() == (1,)

    publish_batch(db, *[("free", n) for n in range(10)])
    assert db.execute("select count(*) from statements").fetchone() == (2,)
    assert len(queued(db)) == 33


def test_an_event_may_be_larger_for_all_its_subscribers_than_what_the_server_can_hold_at_once(db: DB) -> None:
    """1.1 GB in all, where no value may have more than 1 GB."""
    db.execute("select ulak.configure('max_payload_size', '20000000')")
    db.execute("select ulak.create_endpoint('many ' || n, 'pull', '{}') from generate_series(1, 110) n")
    db.execute("select ulak.subscribe('free', 'many ' || n) from generate_series(1, 110) n")
    # The fastest that this server has: all of it is compressed.
    db.execute(
        "select set_config(name, case when 'lz4' = any (enumvals) then 'lz4' else 'pglz' end, false) from pg_settings where name = 'default_toast_compression'"
    )

    assert db.execute("select ulak.publish('free', to_jsonb(repeat('x', 10000000)))").fetchone() == (110,)

    names = "array(select 'many ' || n from generate_series(1, 110) n)"
    sent = db.execute(f"select cardinality(ulak.send_many({names}, to_jsonb(repeat('x', 10000000))))").fetchone()
    assert sent == (110,)


def test_publishing_opens_no_subtransaction(db: DB) -> None:
    """An exception block would be one; the ids of its rows would differ from the transaction's."""
    db.execute("select ulak.subscribe('order', name, null, '$.id > 0') from unnest('{a,b}'::text[]) name")

    with db.transaction():
        publish(db, "order", {"id": 1})
        publish_batch(db, ("order", {"id": 2}))
        query = "select count(*), count(*) filter (where xmin::text::bigint = txid_current() % (2^32)::bigint) from ulak_private.deliveries"
        assert db.execute(query).fetchone() == (4, 4)


# Options.

SOON = f"{datetime.now(UTC) + timedelta(days=30)}"
EVENT_ID = "0190a5d2-5b9e-7000-8000-000000000007"
OPTIONS: dict[str, Any] = {
    "priority": 7,
    "scheduled_at": SOON,
    "idempotency_key": "i",
    "correlation_id": "c0ffee00-0000-4000-8000-000000000000",
    "expires_at": "2031-01-01 00:00:00+00",
    "ordering_key": "o",
    "headers": {"traceparent": "00-1-2-01"},
    "metadata": {"why": "test"},
    "event_id": EVENT_ID,
}
STORED = f"""
    select distinct priority, scheduled_at = next_retry_at, scheduled_at = '{SOON}', idempotency_key,
        correlation_id::text, expires_at = '2031-01-01 00:00:00+00', ordering_key, headers, metadata
    from ulak.queue
"""


def publish_with_options(db: DB) -> Any:
    named = ", ".join(f"p_{name} => %({name})s" for name in OPTIONS)
    given = {name: json.dumps(value) if isinstance(value, dict) else value for name, value in OPTIONS.items()}
    row = db.execute(f"select ulak.publish('free', '1', {named})", given).fetchone()  # type: ignore[arg-type]
    assert row is not None
    return row[0]


def publish_batch_with_options(db: DB) -> Any:
    event = json.dumps([{"event_type": "free", "payload": 1, **OPTIONS}])
    row = db.execute("select ulak.publish_batch(%s)", [event]).fetchone()
    assert row is not None
    return row[0]


@pytest.mark.parametrize("way", [publish_with_options, publish_batch_with_options])
def test_an_event_has_the_options_of_a_message_at_every_subscriber(db: DB, way: Any) -> None:
    db.execute("select ulak.subscribe('free', name) from unnest('{a,b,c}'::text[]) name")

    assert way(db) == 3

    headers = {"traceparent": "00-1-2-01", "ulak-event-id": EVENT_ID, "ulak-event-type": "free"}
    metadata = {"why": "test", "event_type": "free"}
    expected = (7, True, True, "i", OPTIONS["correlation_id"], True, "o", headers, metadata)
    assert db.execute(STORED).fetchall() == [expected]
    assert way(db) == 3
    assert db.execute("select count(*) from ulak.queue").fetchone() == (3,)


def test_an_event_has_one_id_at_all_its_subscribers_and_another_event_another(db: DB) -> None:
    db.execute("select ulak.subscribe('free', name) from unnest('{a,b,c}'::text[]) name")

    publish(db, "free", 1)
    publish_batch(db, ("free", 2), ("free", 3))

    query = """
        select payload, count(*), count(distinct headers ->> 'ulak-event-id'), count(distinct message_id)
        from ulak.queue group by payload order by payload
    """
    assert db.execute(query).fetchall() == [(1, 3, 1, 3), (2, 3, 1, 3), (3, 3, 1, 3)]
    assert db.execute("select count(distinct headers ->> 'ulak-event-id') from ulak.queue").fetchone() == (3,)


def test_an_idempotency_key_stands_for_one_payload_of_an_event(db: DB) -> None:
    db.execute("select ulak.subscribe('free', name) from unnest('{a,b}'::text[]) name")
    db.execute("select ulak.publish('free', '1', p_idempotency_key => 'k')")

    error = refused(db, "select ulak.publish('free', '2', p_idempotency_key => 'k')")

    assert (error.sqlstate, error.message_primary) == ("23505", 'idempotency key "k" was used for another payload')


def test_a_subscriber_that_authenticates_itself_does_not_fail_the_publisher(db: DB) -> None:
    config = {"url": "https://example.com", "auth": {"type": "bearer", "token": "t"}}
    db.execute("select ulak.create_endpoint('web', 'http', %s)", [json.dumps(config)])
    db.execute("select ulak.subscribe('free', name) from unnest('{a,web}'::text[]) name")

    db.execute("""select ulak.publish('free', '1', p_headers => '{"Authorization": "mine", "x-a": "b"}')""")

    query = "select headers - 'ulak-event-id' - 'ulak-event-type' from ulak.queue order by endpoint_id"
    assert db.execute(query).fetchall() == [({"Authorization": "mine", "x-a": "b"},), ({"x-a": "b"},)]


def test_each_subscriber_gets_the_headers_of_each_event_but_for_those_it_proves_itself_with(db: DB) -> None:
    secret = {"$secret": "token"}
    configs: dict[str, dict[str, Any]] = {
        "plain": {},
        "bearer": {"auth": {"type": "bearer", "token": "t"}},
        "other": {"auth": {"type": "bearer", "token": "t"}},
        "key": {"headers": {"X-Key": secret}},
        "sneaky": {"headers": {"ulak-event-type": secret}},
    }
    db.execute("select ulak.set_secret('token', 't')")
    for name, config in configs.items():
        given = json.dumps({"url": "https://example.com", **config})
        db.execute("select ulak.create_endpoint(%s, 'http', %s)", [name, given])
        db.execute("select ulak.subscribe('free', %s)", [name])
    headers = [None, {"Authorization": "mine", "x-key": "k", "x-a": "b"}, {"x-key": "k"}, {"x-b": "c"}]
    events = [{"event_type": "free", "payload": n, "headers": each} for n, each in enumerate(headers)]

    assert db.execute("select ulak.publish_batch(%s)", [json.dumps(events)]).fetchone() == (20,)

    left_out = {"bearer": {"Authorization"}, "other": {"Authorization"}, "key": {"x-key"}}

    def left(name: str, given: dict[str, str] | None) -> dict[str, str]:
        return {key: value for key, value in (given or {}).items() if key not in left_out.get(name, ())}

    expected = [
        (n, name, {**left(name, given), "ulak-event-type": "free"})
        for n, given in enumerate(headers)
        for name in configs
    ]
    query = """
        select q.payload, e.name, q.headers - 'ulak-event-id'
        from ulak.queue q join ulak.endpoints e on e.id = q.endpoint_id
        order by q.id
    """
    assert db.execute(query).fetchall() == expected
    ids = "select count(distinct headers ->> 'ulak-event-id'), count(distinct (payload, headers ->> 'ulak-event-id')) from ulak.queue"
    assert db.execute(ids).fetchone() == (4, 4)


def test_options_of_an_event_are_checked_even_without_subscribers(db: DB) -> None:
    error = refused(db, "select ulak.publish('free', '1', p_priority => 11)")

    assert (error.sqlstate, error.message_primary) == ("22023", "priority must be between 0 and 10")
