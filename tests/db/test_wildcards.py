"""Subscriptions to order.* and to *: which events they get, once each, and what publishing costs beside many of them."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from support.cluster import Connect
from support.queue import DB, Queue
from support.sessions import Running, wait_until_blocked


@pytest.fixture
def queue(queue: Queue) -> Queue:
    for name in ("a", "b"):
        queue.endpoint(name)
    for name in ("order", "order.placed", "order.item.added", "orders.placed", "invoice.sent"):
        queue.call("create_event_type", name)
    return queue


def reached(queue: Queue, event_type: str, payload: str = "{}") -> list[str]:
    """The endpoints that got an event of this type."""
    last = queue.value("select coalesce(max(id), 0) from ulak.queue")
    queue.call("publish", event_type, payload)
    return queue.column(
        "select e.name from ulak.queue q join ulak.endpoints e on e.id = q.endpoint_id where q.id > %s order by q.id",
        last,
    )


@pytest.mark.parametrize(
    ("pattern", "matched"),
    [
        ("order.*", ["order.placed", "order.item.added"]),
        ("order.item.*", ["order.item.added"]),
        ("*", ["order", "order.placed", "order.item.added", "orders.placed", "invoice.sent"]),
        ("invoice.*", ["invoice.sent"]),
        ("shop.*", []),
    ],
)
def test_a_pattern_gets_the_events_whose_type_starts_with_it(queue: Queue, pattern: str, matched: list[str]) -> None:
    queue.call("subscribe", pattern, "a")

    types = ["order", "order.placed", "order.item.added", "orders.placed", "invoice.sent"]
    assert [name for name in types if reached(queue, name) == ["a"]] == matched
    assert queue.value("select event_type from ulak.subscription_list") == pattern


def test_an_event_reaches_an_endpoint_once_however_many_subscriptions_match(queue: Queue) -> None:
    for pattern in ("order.item.added", "order.item.*", "order.*", "*"):
        queue.call("subscribe", pattern, "a")
    queue.call("subscribe", "order.*", "b")

    assert reached(queue, "order.item.added") == ["a", "b"]
    assert reached(queue, "invoice.sent") == ["a"]


def test_filter_predicate_and_switch_hold_for_a_pattern(queue: Queue) -> None:
    id = queue.call("subscribe", "order.*", "a", filter='{"country": "TR"}', predicate="$.total > 5")

    assert reached(queue, "order.placed", '{"country": "TR", "total": 6}') == ["a"]
    assert reached(queue, "order.placed", '{"country": "TR", "total": 5}') == []
    assert reached(queue, "order.placed", '{"country": "DE", "total": 6}') == []
    queue.call("alter_subscription", id, enabled=False)
    assert reached(queue, "order.placed", '{"country": "TR", "total": 6}') == []


def test_a_type_that_is_created_later_is_matched(queue: Queue) -> None:
    queue.call("subscribe", "shipment.*", "a")
    queue.call("create_event_type", "shipment.left")

    assert reached(queue, "shipment.left") == ["a"]


def test_a_pattern_outlives_the_event_types_that_it_matches(queue: Queue) -> None:
    queue.call("subscribe", "invoice.*", "a")
    queue.call("drop_event_type", "invoice.sent")
    queue.call("create_event_type", "invoice.sent")

    assert reached(queue, "invoice.sent") == ["a"]


def test_a_subscription_to_a_pattern_is_removed_by_its_pattern(queue: Queue) -> None:
    queue.call("subscribe", "order.*", "a")
    queue.call("subscribe", "order.*", "a", filter='{"x": 1}')
    queue.call("subscribe", "*", "a")

    assert queue.call("unsubscribe", "order.*", "a") == 2
    assert queue.call("unsubscribe", "order.*", "a") == 0
    assert queue.column("select event_type from ulak.subscription_list") == ["*"]


def test_the_same_pattern_twice_is_refused(queue: Queue) -> None:
    first = queue.call("subscribe", "order.*", "a")
    other = queue.call("subscribe", "order.*", "a", filter='{"x": 1}')

    for refusal in (
        queue.refuses("subscribe", "order.*", "a"),
        queue.refuses("alter_subscription", other, filter="{}"),
    ):
        assert refusal.sqlstate == "23505"
        assert refusal.message_detail == f"It is subscription {first}."
    assert queue.call("subscribe", "order.*", "b") > 0


def test_a_pattern_that_matches_nothing_yet_is_accepted_with_a_notice(queue: Queue) -> None:
    notices: list[str | None] = []
    handler = lambda notice: notices.append(notice.message_primary)  # noqa: E731
    queue.db.add_notice_handler(handler)
    try:
        queue.call("subscribe", "ordre.*", "a")
        queue.call("subscribe", "order.*", "a")
    finally:
        queue.db.remove_notice_handler(handler)

    assert notices == ['no event type matches "ordre.*" yet']


@pytest.mark.parametrize("pattern", ["order*", "*.placed", "order.*.added", "**", ".*.*", "or*er"])
def test_a_star_elsewhere_is_refused(queue: Queue, pattern: str) -> None:
    refusal = queue.refuses("subscribe", pattern, "a")

    assert (refusal.sqlstate, refusal.message_primary) == ("22023", f'invalid pattern "{pattern}"')
    assert str(refusal.message_hint).startswith("Such as: order.*")


def test_an_event_type_has_no_star(queue: Queue) -> None:
    assert queue.refuses("create_event_type", "order.*").sqlstate == "22023"


def test_events_of_ulak_itself_need_a_pattern_that_names_them(queue: Queue) -> None:
    queue.endpoint("failing")
    queue.call("subscribe", "*", "a")
    queue.call("subscribe", "ulak.message.*", "b")
    queue.send("failing", max_retries=0)

    queue.fail(queue.claim_one(endpoint="failing"), "no")

    told = queue.rows("select endpoint, event_type from ulak.sent() where endpoint <> 'failing'")
    assert told == [{"endpoint": "b", "event_type": "ulak.message.dead"}]


@pytest.mark.parametrize("statistics", ["empty", "stale", "fresh"])
def test_publishing_reads_no_subscription_but_those_that_match(alone: DB, statistics: str) -> None:
    queue = Queue(alone)
    queue.endpoint("a")
    queue.call("create_event_type", "order.placed")
    for pattern in ("order.*", "*"):
        queue.call("subscribe", pattern, "a")
    if statistics == "stale":
        alone.execute("analyze ulak.subscriptions")
    for _ in range(6):
        reached(queue, "order.placed")
    alone.execute(
        "insert into ulak.subscriptions (pattern, endpoint_id) "
        "select 'tenant' || n || '.*', e.id from generate_series(1, 20000) n, ulak.endpoints e"
    )
    if statistics == "fresh":
        alone.execute("analyze ulak.subscriptions")

    query = (
        "select seq_tup_read + idx_tup_fetch from pg_stat_xact_user_tables where relid = 'ulak.subscriptions'::regclass"
    )
    before = queue.value(query)
    assert reached(queue, "order.placed") == ["a"]
    batch = '[{"event_type": "order.placed", "payload": 1}, {"event_type": "order.placed", "payload": 2}]'
    assert queue.call("publish_batch", batch) == 2

    assert queue.value(query) - before == 4


def test_of_two_sessions_that_subscribe_to_the_same_pattern_one_is_refused(connect: Connect, db: DB) -> None:
    one, other = connect(), connect()
    Queue(one).endpoint("a")
    subscribe = "select ulak.subscribe('*', 'a')"
    with one.transaction():
        one.execute(subscribe)
        second = Running(lambda: other.execute(subscribe))
        wait_until_blocked(other, db)

    with pytest.raises(psycopg.errors.UniqueViolation):
        second.result()


def test_only_administrators_subscribe_to_patterns(connect: Connect) -> None:
    application: psycopg.Connection[Any] = connect("ulak_application")

    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        application.execute("select ulak.subscribe('*', 'a')")
