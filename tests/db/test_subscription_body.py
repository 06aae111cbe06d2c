"""The body of a subscription: which are accepted, which of several is used, and that workers learn of a change."""

from __future__ import annotations

import json
import shlex
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from psycopg.types.json import Jsonb
from support.cluster import Connect
from support.queue import DB, Queue
from support.sessions import Running, wait_until_blocked
from ulak.messages import event

URL = {"url": "https://example.com"}


@pytest.fixture
def queue(queue: Queue) -> Queue:
    queue.endpoint("chat", URL | {"body": {"text": "own"}}, protocol="http")
    for name in ("order.placed", "order.item.added", "invoice.sent"):
        queue.call("create_event_type", name)
    return queue


def subscribe(queue: Queue, event_type: str, text: str | None, **options: Any) -> int:
    body = None if text is None else Jsonb({"text": text})
    id: int = queue.call("subscribe", event_type, "chat", body=body, **options)
    return id


def version(queue: Queue) -> int:
    found: int = queue.value("select config_version from ulak.endpoints where name = 'chat'")
    return found


def shown(queue: Queue, event_type: str, payload: str = "{}") -> str:
    """The text that the receiver of an event gets."""
    queue.call("publish", event_type, payload)
    words = shlex.split(queue.call("curl", queue.value("select max(id) from ulak.queue")))
    return str(json.loads(words[words.index("--data-raw") + 1])["text"])


def test_the_most_specific_subscription_with_a_body_decides_and_otherwise_the_endpoint(queue: Queue) -> None:
    subscribe(queue, "*", None)
    assert shown(queue, "order.item.added") == "own"
    subscribe(queue, "order.*", "any order")
    assert (shown(queue, "order.item.added"), shown(queue, "invoice.sent")) == ("any order", "own")
    subscribe(queue, "order.item.*", "any item")
    assert (shown(queue, "order.item.added"), shown(queue, "order.placed")) == ("any item", "any order")
    subscribe(queue, "order.item.added", "added {payload.id|nothing}")
    assert shown(queue, "order.item.added", '{"id": 7}') == "added 7"


def test_a_message_that_was_not_published_has_the_body_of_the_endpoint(queue: Queue) -> None:
    subscribe(queue, "*", "any")

    words = shlex.split(queue.call("curl", queue.send("chat", metadata={"event_type": "order.placed"})))

    assert json.loads(words[words.index("--data-raw") + 1]) == {"text": "own"}


names = st.lists(st.sampled_from(["order", "ulak", "a", ""]), min_size=1, max_size=4).map(".".join).filter(bool)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=names)
def test_workers_know_the_patterns_of_an_event_type_as_the_database_does(alone: DB, name: str) -> None:
    (found,) = alone.execute("select ulak_private.patterns_of(%s)", [name]).fetchone() or ([],)

    assert sorted(event.patterns(name)) == sorted([name, *found])


def test_each_change_reaches_workers_as_a_change_of_the_config_does(queue: Queue) -> None:
    versions = [version(queue)]

    def changed() -> bool:
        versions.append(version(queue))
        return versions[-1] > versions[-2]

    plain = subscribe(queue, "invoice.sent", None)
    queue.call("alter_subscription", plain, enabled=False)
    assert not changed()
    id = subscribe(queue, "order.placed", "a", filter='{"id": 7}')
    assert changed()
    queue.call("alter_subscription", id, body=Jsonb({"text": "b"}))
    assert changed()
    assert shown(queue, "order.placed", '{"id": 7}') == "b"
    queue.call("alter_subscription", id, enabled=False)
    assert changed()
    queue.call("alter_subscription", id, enabled=True, body=Jsonb(None))
    assert changed()
    assert shown(queue, "order.placed", '{"id": 7}') == "own"
    queue.call("alter_subscription", id, body=Jsonb({"text": "c"}))
    assert changed()
    queue.call("unsubscribe", id)
    assert changed()
    subscribe(queue, "order.placed", "d")
    assert changed()
    queue.call("drop_event_type", "order.placed")
    assert changed()


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"text": "{order.id}"}, "$.body.text has a place that is not known"),
        ("text", '$.body is a text, so "headers" must have its "content-type"'),
        (1, "$.body must be an object, an array or a text"),
        ({"key": {"$secret": "pagerduty"}}, "$.body must not name a secret"),
        ({"text": "x" * 70000}, "$.body must have at most 65536 bytes"),
    ],
)
def test_a_body_that_can_not_be_used_is_refused(queue: Queue, body: Any, problem: str) -> None:
    queue.call("set_secret", "pagerduty", "0123456789abcdef")
    before = version(queue)

    error = queue.refuses("subscribe", "order.placed", "chat", body=Jsonb(body))

    assert error.sqlstate == "22023"
    assert str(error.message_primary) == f'invalid subscription of endpoint "chat" to "order.placed": {problem}'
    assert (queue.value("select count(*) from ulak.subscriptions"), version(queue)) == (0, before)


def test_another_protocol_has_no_bodies(queue: Queue) -> None:
    queue.endpoint("mine")

    error = queue.refuses("subscribe", "order.placed", "mine", body=Jsonb({"a": 1}))

    assert "$.body is for http endpoints" in str(error.message_primary)


def test_an_endpoint_has_one_body_for_an_event_type(queue: Queue) -> None:
    subscribe(queue, "order.*", "a", filter='{"vip": true}')
    subscribe(queue, "order.*", "a", filter='{"big": true}')

    error = queue.refuses("subscribe", "order.*", "chat", filter='{"odd": true}', body=Jsonb({"text": "b"}))

    assert "another than that of the endpoint's other subscription" in str(error.message_primary)
    assert shown(queue, "order.placed", '{"big": true}') == "a"


def test_the_bodies_of_an_endpoint_have_a_limit_together(queue: Queue) -> None:
    for number in range(4):
        subscribe(queue, f"shop{number}.*", "x" * 60000)

    assert queue.refuses("subscribe", "*", "chat", body=Jsonb({"text": "x" * 60000})).sqlstate == "54000"


def test_a_config_must_fit_the_bodies_of_the_subscriptions(queue: Queue) -> None:
    subscribe(queue, "order.*", "a")

    error = queue.refuses("alter_endpoint", "chat", Jsonb(URL | {"batch_size": 10}))

    assert str(error.message_primary) == (
        'invalid subscription of endpoint "chat" to "order.*": $.body cannot be combined with batches'
    )


def test_an_endpoint_is_dropped_with_its_bodies(queue: Queue) -> None:
    subscribe(queue, "order.*", "a")

    assert queue.call("drop_endpoint", "chat") is True
    assert queue.value("select count(*) from ulak.subscriptions") == 0


def test_the_list_and_the_document_have_it_and_the_document_brings_it_back(queue: Queue) -> None:
    body = {"text": "{payload.id}", "note": {"$path": "$.note", "missing": None}, "none": None}
    entry = {"event_type": "order.*", "endpoint": "chat", "filter": {"vip": True}, "body": body}
    queue.call("subscribe", "order.*", "chat", Jsonb({"vip": True}), body=Jsonb(body))
    assert queue.value("select body from ulak.subscription_list") == body

    document = queue.value("select ulak.config()")
    assert document["subscriptions"] == [entry]
    queue.call("unsubscribe", "order.*", "chat")
    queue.db.execute("select * from ulak.apply(%s)", [Jsonb(document)])
    assert queue.value("select ulak.config()") == document
    assert queue.rows("select * from ulak.apply(%s)", Jsonb(document)) == []

    (change,) = queue.rows("select * from ulak.apply(%s)", Jsonb({"subscriptions": [entry | {"body": {"text": "b"}}]}))
    assert change["changed"][0].startswith("body")
    queue.db.execute("select * from ulak.apply(%s)", [Jsonb({"subscriptions": [entry | {"body": None}]})])
    assert queue.value("select body from ulak.subscription_list") is None


def test_a_body_and_batches_that_come_at_once_do_not_pass_each_other(connect: Connect, db: DB) -> None:
    one, other = connect(), connect()
    Queue(one).endpoint("chat", URL, protocol="http")
    batches = json.dumps(URL | {"batch_size": 10})
    with one.transaction():
        one.execute("""select ulak.subscribe('*', 'chat', p_body => '{"text": "a"}')""")
        second = Running(lambda: other.execute("select ulak.alter_endpoint('chat', %s)", [batches]))
        wait_until_blocked(other, db)

    with pytest.raises(psycopg.errors.InvalidParameterValue, match="cannot be combined with batches"):
        second.result()
