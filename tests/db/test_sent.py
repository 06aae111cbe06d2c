"""ulak.sent(): what this transaction has sent so far."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from support.cluster import Connect
from support.queue import DB, Queue


@pytest.fixture
def queue(queue: Queue) -> Queue:
    queue.endpoint("shop")
    return queue


def sent(queue: Queue, columns: str = "payload") -> list[dict[str, Any]]:
    return queue.rows(f"select {columns} from ulak.sent()")


def test_a_transaction_sees_what_it_has_sent_with_its_options_in_this_order(queue: Queue) -> None:
    assert sent(queue) == []

    first = queue.send(payload={"n": 1}, ordering_key="a", priority=3, metadata='{"of": "me"}', headers='{"x-a": "b"}')
    second = queue.send(payload={"n": 2}, idempotency_key="k")

    columns = "id, endpoint, payload, priority, ordering_key, idempotency_key, metadata, headers, status"
    assert sent(queue, columns) == [
        {
            "id": first,
            "endpoint": "shop",
            "payload": {"n": 1},
            "priority": 3,
            "ordering_key": "a",
            "idempotency_key": None,
            "metadata": {"of": "me"},
            "headers": {"x-a": "b"},
            "status": "pending",
        },
        {
            "id": second,
            "endpoint": "shop",
            "payload": {"n": 2},
            "priority": 0,
            "ordering_key": None,
            "idempotency_key": "k",
            "metadata": None,
            "headers": None,
            "status": "pending",
        },
    ]


def test_every_way_of_sending_is_seen(queue: Queue) -> None:
    queue.call("create_event_type", "order.placed")
    queue.call("subscribe", "order.placed", "shop")

    queue.send_many(2)
    queue.call("send_messages", "shop", '[{"payload": 3}]')
    queue.value("select ulak.send_many('{shop,shop}', '4')")
    queue.call("publish", "order.placed", "5")
    queue.call("publish_batch", '[{"event_type": "order.placed", "payload": 6}]')

    assert [(m["event_type"], m["payload"]) for m in sent(queue, "event_type, payload")] == [
        (None, {"n": 1}),
        (None, {"n": 2}),
        (None, 3),
        (None, 4),
        (None, 4),
        ("order.placed", 5),
        ("order.placed", 6),
    ]


def test_a_repeated_idempotency_key_sends_nothing(queue: Queue) -> None:
    queue.send(idempotency_key="k")
    queue.send(idempotency_key="k")

    assert len(sent(queue)) == 1


def test_what_is_rolled_back_to_a_savepoint_was_not_sent_and_what_is_released_was(queue: Queue) -> None:
    with queue.db.transaction():
        queue.send(payload={"n": 1})
        with queue.db.transaction(force_rollback=True):
            queue.send(payload={"n": 2})
        with queue.db.transaction():
            queue.send(payload={"n": 3})

    assert [m["payload"] for m in sent(queue)] == [{"n": 1}, {"n": 3}]


def test_a_message_that_was_delivered_or_cancelled_since_was_sent_all_the_same(queue: Queue) -> None:
    delivered, cancelled = queue.send(), queue.send()
    queue.complete(queue.claim_one())
    queue.call("cancel", cancelled)

    assert [(m["id"], m["status"]) for m in sent(queue, "id, status")] == [
        (delivered, "completed"),
        (cancelled, "cancelled"),
    ]


def test_neither_an_earlier_transaction_nor_a_replay_counts(db: DB) -> None:
    queue = Queue(db)
    queue.endpoint("shop")
    queue.send()
    queue.complete(queue.claim_one())
    (message,) = queue.column("select id from ulak.archive")

    with db.transaction():
        queue.send(payload={"n": 2})
        queue.call("replay_message", message)
        assert [m["payload"] for m in sent(queue)] == [{"n": 2}]
    assert sent(queue) == []


def test_another_transaction_that_began_in_the_same_microsecond_does_not_count(connect: Connect) -> None:
    one, other = Queue(connect()), Queue(connect())
    one.endpoint("shop")
    one.db.execute("begin")
    began = one.value("select now() from pg_current_xact_id()")
    with other.db.transaction():
        other.db.execute(
            "insert into ulak_private.events (id, created_at, payload) values (nextval('ulak.queue_id_seq'), %s, '0')",
            [began],
        )
        other.db.execute(
            "insert into ulak_private.deliveries (event_id, endpoint_id, created_at) select e.id, n.id, %s"
            " from ulak_private.events e, ulak.endpoints n",
            [began],
        )
    assert one.value("select payload from ulak.queue where created_at = now()") == 0

    one.send(payload={"n": "of mine"})

    assert [m["payload"] for m in sent(one)] == [{"n": "of mine"}]


def test_a_sender_needs_the_right_to_read_messages(connect: Connect, db: DB) -> None:
    Queue(db).endpoint("shop")
    application = connect("ulak_application")
    role = application.execute("select session_user").fetchone()[0]  # type: ignore[index]

    with pytest.raises(psycopg.errors.InsufficientPrivilege) as refused:
        application.execute("select * from ulak.sent()")
    assert refused.value.diag.message_hint == f"In a database for tests: grant select on ulak.queue to {role};"
    db.execute(f"grant select on ulak.queue to {role}")

    with application.transaction(force_rollback=True):
        application.execute("select ulak.send('shop', '7')")
        assert application.execute("select payload from ulak.sent()").fetchall() == [(7,)]
