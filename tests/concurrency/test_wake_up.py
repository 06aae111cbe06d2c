"""Which senders notify: the first few after a worker has fallen asleep, when they commit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from itertools import takewhile
from typing import Any

import psycopg
import pytest
from support.cluster import Cluster, Connect
from support.queue import Queue
from support.sessions import patience

Notifications = Callable[[], int]


@pytest.fixture
def notifications(queue: Queue, connect: Connect) -> Notifications:
    """How often the worker was notified since the last time."""
    queue.endpoint()
    queue.db.execute("select setval('ulak_private.bell', 1, false)")
    listener = connect(role="ulak_worker")
    assert listener.execute("select ulak_private.listen()").fetchone() == (True,)

    def count() -> int:
        # A notification of our own comes behind them.
        listener.execute("notify ulak_bell, 'end'")
        return len(list(takewhile(lambda each: each.payload != "end", listener.notifies(timeout=patience()))))

    return count


def request_wake_ups(queue: Queue) -> int:
    return int(queue.value("select ulak_private.request_wake_ups()"))


def test_senders_do_not_notify_while_no_worker_sleeps(queue: Queue, notifications: Notifications) -> None:
    queue.send()

    assert notifications() == 0


def test_the_first_sixteen_notify(queue: Queue, notifications: Notifications) -> None:
    queue.send()
    request_wake_ups(queue)

    for _ in range(20):
        queue.send()

    assert notifications() == 16
    request_wake_ups(queue)
    queue.send()
    assert notifications() == 1


def test_wake_ups_are_counted_from_the_last_id_that_was_drawn(
    queue: Queue, connect: Connect, notifications: Notifications
) -> None:
    sender = connect(autocommit=False)
    drawn = sender.execute("select ulak.send('shop', '{}')").fetchone()
    assert drawn is not None

    assert request_wake_ups(queue) == drawn[0]


def test_a_sender_notifies_by_its_commit(queue: Queue, connect: Connect, notifications: Notifications) -> None:
    request_wake_ups(queue)
    sender = connect(autocommit=False)
    sender.execute("select ulak.send('shop', '{}'), ulak.send('shop', '{}')")

    assert notifications() == 0
    sender.commit()
    assert notifications() == 1


def test_a_sender_that_rolls_back_does_not_notify(queue: Queue, connect: Connect, notifications: Notifications) -> None:
    request_wake_ups(queue)
    sender = connect(autocommit=False)
    sender.execute("select ulak.send('shop', '{}')")
    sender.rollback()

    assert notifications() == 0


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("select ulak.send('shop', '{}', p_headers => '{\"a\": \"b\"}')", 1),
        ("select ulak.send('shop', '{}', p_ordering_key => 'k')", 1),
        ("select ulak.send('shop', '{}', p_idempotency_key => 'i')", 1),
        ("select ulak.send_batch('shop', array['{}', '{}']::jsonb[])", 1),
        ("select ulak.send('shop', '{}', p_scheduled_at => now() + interval '1 hour')", 0),
        ("select ulak.configure('batch_size', '100')", 1),
    ],
)
def test_every_way_to_send_notifies_but_not_for_later(
    queue: Queue, notifications: Notifications, statement: str, expected: int
) -> None:
    request_wake_ups(queue)

    queue.db.execute(statement)  # type: ignore[arg-type]

    assert notifications() == expected


def test_what_waits_behind_its_key_notifies_too(queue: Queue, notifications: Notifications) -> None:
    """Whether it has to wait is for the claim to find: the head may be settled before the sender commits."""
    queue.send(ordering_key="k")
    request_wake_ups(queue)

    queue.send(ordering_key="k")

    assert notifications() == 1


@contextlib.contextmanager
def of_two_phases() -> Iterator[psycopg.Connection[Any]]:
    cluster = Cluster.create(settings={"max_prepared_transactions": 2}, in_memory=True)
    try:
        cluster.install(cluster.create_database("app"))
        with cluster.connect("app") as db:
            yield db
    finally:
        cluster.remove()


def test_where_transactions_may_be_prepared_no_session_notifies_or_listens() -> None:
    """PostgreSQL refuses to prepare a transaction that has notified."""
    with of_two_phases() as db:
        queue = Queue(db)
        queue.endpoint()

        assert queue.value("select ulak_private.listen()") is False
        request_wake_ups(queue)
        db.execute("begin")
        queue.send()
        db.execute("prepare transaction 'sent'")
        db.execute("commit prepared 'sent'")

        assert queue.value("select count(*) from ulak.queue") == 1


def test_what_is_held_until_adoption_is_not_listened_for(queue: Queue) -> None:
    with queue.db.transaction(force_rollback=True):
        queue.db.execute("update ulak_private.cluster_identity set system_identifier = 1")

        assert queue.value("select ulak_private.listen()") is False
