"""Many messages by one call, each with its own options, and one message to many endpoints."""

from __future__ import annotations

import json
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from bench.measure import processor_seconds
from psycopg.types.json import Jsonb
from support.queue import Queue


@pytest.fixture(autouse=True)
def shop(queue: Queue) -> None:
    queue.endpoint("shop")
    queue.endpoint("other")


def send_messages(queue: Queue, *messages: Any, endpoint: str = "shop") -> list[int]:
    ids: list[int] = queue.value("select ulak.send_messages(%s, %s)", endpoint, Jsonb(list(messages)))
    return ids


def refused(queue: Queue, statement: str, *parameters: Any) -> psycopg.errors.Diagnostic:
    with pytest.raises(psycopg.Error) as caught, queue.db.transaction():
        queue.value(statement, *parameters)
    return caught.value.diag


def count(queue: Queue) -> int:
    return int(queue.value("select count(*) from ulak.queue"))


OPTIONS: dict[str, Any] = {
    "priority": 4,
    "idempotency_key": "i",
    "correlation_id": "c0ffee00-0000-4000-8000-000000000000",
    "ordering_key": "o",
    "headers": {"x-a": "b"},
    "metadata": {"c": "d"},
}


@pytest.mark.parametrize("chosen", [(), *([name] for name in OPTIONS), tuple(OPTIONS)])
def test_each_message_is_like_one_that_was_sent_alone(queue: Queue, chosen: tuple[str, ...]) -> None:
    options = {name: OPTIONS[name] for name in chosen}
    alone = queue.message(queue.send("shop", {"n": 1}, **options))
    queue.db.execute("delete from ulak_private.deliveries")
    queue.db.execute("delete from ulak_private.idempotency_keys")

    [id] = send_messages(queue, {"payload": {"n": 1}, **options})

    own = {"id", "message_id"}
    batched = queue.message(id)
    assert {name: alone[name] for name in alone.keys() - own} == {name: batched[name] for name in batched.keys() - own}


def test_times_are_those_of_the_message(queue: Queue) -> None:
    soon, later = queue.at(3600), queue.at(7200)

    [id] = send_messages(queue, {"payload": 1, "scheduled_at": soon.isoformat(), "expires_at": later.isoformat()})

    times = "select scheduled_at, next_retry_at, expires_at from ulak.queue"
    assert queue.rows(f"{times} where id = %s", id) == [
        {"scheduled_at": soon, "next_retry_at": soon, "expires_at": later}
    ]


def test_ids_come_in_the_order_of_the_messages(queue: Queue) -> None:
    ids = send_messages(queue, *({"payload": n, "priority": n % 11} for n in range(500)))

    assert ids == sorted(ids)
    assert queue.column("select payload from ulak.queue order by id") == list(range(500))


def test_no_messages_send_nothing(queue: Queue) -> None:
    assert send_messages(queue) == []
    assert queue.value("select ulak.send_many('{}', '1')") == []
    assert count(queue) == 0


def test_the_json_value_null_is_a_payload_and_an_option_that_is_null_is_left_out(queue: Queue) -> None:
    [id] = send_messages(queue, {"payload": None, "priority": None, "headers": None, "ordering_key": None})

    message = queue.message(id)
    assert (message["priority"], message["headers"], message["ordering_key"]) == (0, None, None)
    assert queue.value("select payload::text from ulak.queue where id = %s", id) == "null"


def test_a_key_that_comes_again_has_the_id_of_the_first(queue: Queue) -> None:
    first = queue.send("shop", 1, idempotency_key="before")

    ids = send_messages(
        queue,
        {"payload": 2, "idempotency_key": "b"},
        {"payload": 1, "idempotency_key": "before"},
        {"payload": 3},
        {"payload": 2, "idempotency_key": "b"},
        {"payload": 3},
        {"payload": 4, "idempotency_key": "a"},
    )

    assert ids[1] == first
    assert ids[0] == ids[3]
    assert first < ids[0] < ids[2] < ids[4] < ids[5]
    assert queue.column("select payload from ulak.queue order by id") == [1, 2, 3, 3, 4]


def test_a_key_of_another_payload_refuses_all(queue: Queue) -> None:
    queue.send("shop", 1, idempotency_key="before")

    within = refused(
        queue,
        "select ulak.send_messages('shop', %s)",
        Jsonb([{"payload": 1, "idempotency_key": "k"}, {"payload": 2, "idempotency_key": "k"}]),
    )
    before = refused(
        queue,
        "select ulak.send_messages('shop', %s)",
        Jsonb([{"payload": 1}, {"payload": 2, "idempotency_key": "before"}]),
    )

    assert (within.sqlstate, within.message_primary) == ("23505", 'idempotency key "k" was used for another payload')
    assert (before.sqlstate, before.message_primary) == (
        "23505",
        'idempotency key "before" was used for another payload',
    )
    assert count(queue) == 1


def test_messages_of_a_key_are_delivered_in_the_order_of_the_array(queue: Queue) -> None:
    ids = send_messages(queue, *({"payload": n, "ordering_key": "k", "priority": n} for n in range(3)))

    delivered = []
    for _ in ids:
        [claim] = queue.rows("select id, attempt from ulak.claim('w', 10, 'shop')")
        delivered.append(claim["id"])
        queue.value("select ulak.complete(%s, 'w', %s)", claim["id"], claim["attempt"])
    assert delivered == ids


def test_what_is_queued_already_needs_no_room(queue: Queue) -> None:
    queue.send("shop", 1, idempotency_key="k")
    queue.call("configure", "max_queue_size", "1")

    repeated = {"payload": 1, "idempotency_key": "k"}
    assert send_messages(queue, repeated, repeated) == 2 * queue.column("select id from ulak.queue")
    error = refused(queue, "select ulak.send_messages('shop', %s)", Jsonb([repeated, {"payload": 2}]))
    assert error.sqlstate == "53400"


def test_what_does_not_fit_becomes_a_dead_letter_where_the_endpoint_says_so(queue: Queue) -> None:
    queue.endpoint("full", {"max_pending": 2, "when_full": "dead_letter"})

    ids = send_messages(queue, *({"payload": n} for n in range(3)), endpoint="full")

    assert queue.column("select original_message_id from ulak.dlq") == ids[2:]
    assert queue.column("select status from ulak.messages order by id") == ["pending", "pending", "failed"]


BAD: list[tuple[Any, str, str]] = [
    ({}, "22023", "invalid messages: $[1] must have a payload or a raw body"),
    ({"payload": 1, "raw": "x"}, "22023", "invalid messages: $[1] must have a payload or a raw body"),
    ({"payload": 1, "prority": 1}, "22023", "invalid messages: $[1].prority is not a known key"),
    ({"payload": 1, "priority": 1.5}, "22023", "invalid messages: $[1].priority must be of type integer or null"),
    ({"payload": 1, "priority": 11}, "22023", "invalid messages: $[1].priority must be at most 10"),
    ({"payload": 1, "ordering_key": 5}, "22023", "invalid messages: $[1].ordering_key must be of type string or null"),
    ({"payload": 1, "idempotency_key": "k" * 513}, "22023", "idempotency key must have 1 to 512 bytes"),
    ({"payload": 1, "headers": {"host": "x"}}, "42939", 'header "host" is reserved'),
    ({"payload": 1, "metadata": {"event_type": "ulak.x"}}, "42939", 'event type "ulak.x" is reserved'),
    (
        {"payload": 1, "scheduled_at": "infinity"},
        "22023",
        "scheduled_at and expires_at must be times between the years 1970 and 9000",
    ),
    ({"payload": "x" * 2000}, "54000", "the payload is larger than max_payload_size"),
    (1, "22023", "invalid messages: $[1] must be of type object"),
]


@pytest.mark.parametrize(("bad", "code", "message"), BAD)
def test_one_bad_message_refuses_all(queue: Queue, bad: Any, code: str, message: str) -> None:
    queue.call("configure", "max_payload_size", "1024")

    error = refused(queue, "select ulak.send_messages('shop', %s)", Jsonb([{"payload": 1}, bad]))

    assert (error.sqlstate, error.message_primary) == (code, message)
    assert count(queue) == 0


def test_a_priority_that_is_written_with_a_fraction_of_zero_is_a_whole_number(queue: Queue) -> None:
    queue.value("""select ulak.send_messages('shop', '[{"payload": 1, "priority": 3.0}]')""")

    assert queue.column("select priority from ulak.queue") == [3]


def test_messages_must_be_an_array(queue: Queue) -> None:
    assert refused(queue, "select ulak.send_messages('shop', '{}')").sqlstate == "22023"
    assert refused(queue, "select ulak.send_messages('shop', null)").sqlstate == "22004"
    assert refused(queue, "select ulak.send_many(null, '1')").sqlstate == "22004"


def test_an_untyped_array_of_payloads_is_still_a_batch(queue: Queue) -> None:
    """Which it wouldn't be if there were a send_batch() that takes jsonb."""
    assert len(queue.value("select ulak.send_batch('shop', '{1,2}')")) == 2


# To many endpoints.


def test_one_message_goes_to_many_endpoints_with_its_options(queue: Queue) -> None:
    options = {**OPTIONS, "headers": json.dumps(OPTIONS["headers"]), "metadata": json.dumps(OPTIONS["metadata"])}

    ids = queue.call("send_many", "{other,shop}", Jsonb({"n": 1}), **options)

    rows = queue.rows(
        """
        select q.id, e.name, q.priority, q.idempotency_key, q.ordering_key, q.headers, q.metadata
        from ulak.queue q join ulak.endpoints e on e.id = q.endpoint_id order by q.id
        """
    )
    common = {name: OPTIONS[name] for name in OPTIONS.keys() - {"correlation_id"}}
    assert rows == [{"id": ids[0], "name": "other", **common}, {"id": ids[1], "name": "shop", **common}]
    assert queue.call("send_many", "{shop,other}", Jsonb({"n": 1}), **options) == ids[::-1]


def test_an_unknown_endpoint_among_many_refuses_all(queue: Queue) -> None:
    error = refused(queue, "select ulak.send_many('{shop,shpo}', '1')")

    assert (error.sqlstate, error.message_primary) == ("42704", 'unknown endpoint "shpo"')
    assert error.message_hint is not None and "shop" in error.message_hint
    assert count(queue) == 0


def test_a_message_to_many_can_not_replace_what_an_endpoint_authenticates_itself_with(queue: Queue) -> None:
    queue.endpoint("web", {"url": "https://example.com", "auth": {"type": "bearer", "token": "t"}}, protocol="http")

    error = refused(queue, """select ulak.send_many('{shop,web}', '1', p_headers => '{"authorization": "mine"}')""")

    assert error.sqlstate == "42501"


def test_a_message_with_keys_costs_no_more_in_a_longer_array(queue: Queue) -> None:
    """An array that a plan holds as a constant is walked over for each of its elements."""

    def cost(messages: int) -> float:
        """Of the processor, for each message."""
        array = [{"payload": 1, "idempotency_key": uuid4().hex, "ordering_key": str(n % 7)} for n in range(messages)]
        before = processor_seconds(queue.db.info.backend_pid)
        send_messages(queue, *array)
        return (processor_seconds(queue.db.info.backend_pid) - before) / messages

    cost(1000)
    assert cost(20_000) < 2 * cost(1000)
