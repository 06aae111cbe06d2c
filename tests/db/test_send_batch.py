"""Many messages by one call: in order, all or none."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from support.queue import Queue

pytestmark = pytest.mark.usefixtures("shop")


def count(queue: Queue) -> int:
    return int(queue.value("select count(*) from ulak.queue"))


def refused(queue: Queue, statement: str, *parameters: Any) -> psycopg.errors.Diagnostic:
    with pytest.raises(psycopg.Error) as caught, queue.db.transaction():
        queue.value(statement, *parameters)
    return caught.value.diag


def test_ids_come_in_the_order_of_the_payloads(queue: Queue) -> None:
    ids = queue.value("select ulak.send_batch('shop', array(select to_jsonb(n) from generate_series(1, 500) n))")

    assert ids == sorted(ids)
    assert queue.rows("select id, payload from ulak.queue order by id") == [
        {"id": id, "payload": n} for n, id in enumerate(ids, 1)
    ]


def test_each_message_of_a_batch_is_like_one_that_was_sent_alone(queue: Queue) -> None:
    alone = queue.message(queue.send(payload={"n": 1}, priority=4))
    batched = queue.message(queue.send_many(2, priority=4)[0])

    own = {"id", "message_id"}
    assert {name: alone[name] for name in alone.keys() - own} == {name: batched[name] for name in batched.keys() - own}
    assert queue.value("select count(distinct message_id) from ulak.queue") == 3


def test_send_batch_has_priority_0(queue: Queue) -> None:
    queue.value("select ulak.send_batch('shop', '{1,2}')")

    assert queue.column("select priority from ulak.queue") == [0, 0]


def test_an_empty_batch_sends_nothing(queue: Queue) -> None:
    assert queue.value("select ulak.send_batch('shop', '{}')") == []
    assert queue.value("select ulak.send_batch_with_priority('shop', '{}', 5)") == []

    assert count(queue) == 0


def test_the_json_value_null_is_a_payload(queue: Queue) -> None:
    queue.value("select ulak.send_batch('shop', array['null'::jsonb, '0'])")

    assert queue.column("select payload::text from ulak.queue order by id") == ["null", "0"]


def test_an_array_of_arrays_is_one_list_of_payloads(queue: Queue) -> None:
    ids = queue.value("select ulak.send_batch('shop', '{{1,2},{3,4}}'::jsonb[])")

    assert len(ids) == 4
    assert queue.column("select payload from ulak.queue order by id") == [1, 2, 3, 4]


def test_a_null_among_the_payloads_refuses_all(queue: Queue) -> None:
    error = refused(queue, "select ulak.send_batch('shop', array['1', null, '2']::jsonb[])")

    assert (error.sqlstate, error.message_primary) == ("22004", "the payload is null")
    assert error.message_hint == "Send the JSON value null as 'null'::jsonb, if that is what you mean."
    assert count(queue) == 0


def test_no_payloads_at_all_are_refused(queue: Queue) -> None:
    error = refused(queue, "select ulak.send_batch('shop', null)")

    assert (error.sqlstate, error.message_primary) == ("22004", "the payloads are null")
    assert error.message_hint == "Pass an array of jsonb; an empty one sends nothing."


def test_a_payload_that_is_too_large_refuses_all(queue: Queue) -> None:
    queue.call("configure", "max_payload_size", "1024")

    error = refused(queue, "select ulak.send_batch('shop', array['1', to_jsonb(repeat('x', 1023)), '2'])")

    assert (error.sqlstate, error.message_detail) == ("54000", "It has 1025 bytes as text, the limit is 1024.")
    assert count(queue) == 0


@pytest.mark.parametrize("payloads", ["{1}", "{}"])
@pytest.mark.parametrize(("priority", "shown"), [(-1, "-1"), (11, "11"), (None, "null")])
def test_a_priority_out_of_range_is_refused(queue: Queue, payloads: str, priority: int | None, shown: str) -> None:
    error = refused(queue, "select ulak.send_batch_with_priority('shop', %s, %s)", payloads, priority)

    assert (error.sqlstate, error.message_primary) == ("22023", "priority must be between 0 and 10")
    assert error.message_detail == f"It is {shown}."


@pytest.mark.parametrize(("endpoint", "shown"), [("shpo", '"shpo"'), (None, "null")])
def test_an_unknown_endpoint_is_refused(queue: Queue, endpoint: str | None, shown: str) -> None:
    error = refused(queue, "select ulak.send_batch(%s, '{1}')", endpoint)

    assert (error.sqlstate, error.message_primary) == ("42704", f"unknown endpoint {shown}")


@pytest.mark.parametrize("way", ["send_batch", "send_messages", "publish"])
def test_many_messages_are_stored_in_the_order_of_their_ids(queue: Queue, way: str) -> None:
    """Backwards, each page of their indexes would be split in its middle and stay half empty."""
    db = queue.db
    # A new file: in the old one, vacuum may have made room anywhere.
    db.execute("truncate ulak_private.deliveries")
    db.execute("select ulak.create_event_type('created')")
    db.execute(
        "select ulak.create_endpoint('e' || n, 'pull', '{}'), ulak.subscribe('created', 'e' || n) from generate_series(1, 100) n"
    )
    call = {
        "send_batch": "select ulak.send_batch('e1', array(select to_jsonb(n) from generate_series(1, 100) n))",
        "send_messages": "select ulak.send_messages('e1', (select jsonb_agg(jsonb_build_object('payload', n)) from generate_series(1, 100) n))",
        "publish": "select ulak.publish('created', '{}')",
    }[way]
    # After five calls PostgreSQL may choose a plan for all of them.
    for _ in range(8):
        db.execute(call)
    stored = [row[0] for row in db.execute("select id from ulak_private.deliveries order by ctid")]
    assert len(stored) == 800
    assert stored == sorted(stored)
