"""Who rings: the first few who send after a worker has fallen asleep, when they commit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from support.cluster import Cluster, Connect
from support.queue import Queue

Rings = Callable[[], int]


@pytest.fixture
def rings(queue: Queue, connect: Connect) -> Rings:
    """How often the bell has rung since the last time."""
    queue.endpoint()
    queue.db.execute("select setval('ulak.bell', 1, false)")
    listener = connect(role="ulak_worker")
    assert listener.execute("select ulak._listen()").fetchone() == (True,)

    def count() -> int:
        listener.execute("select")
        return sum(1 for _ in listener.notifies(timeout=0.05))

    return count


def set_bell(queue: Queue) -> int:
    return int(queue.value("select last_sent from ulak._set_bell()"))


def test_nobody_rings_while_no_worker_sleeps(queue: Queue, rings: Rings) -> None:
    queue.send()

    assert rings() == 0


def test_the_first_sixteen_ring(queue: Queue, rings: Rings) -> None:
    queue.send()
    set_bell(queue)

    for _ in range(20):
        queue.send()

    assert rings() == 16
    set_bell(queue)
    queue.send()
    assert rings() == 1


def test_the_bell_is_set_from_the_last_id_that_was_drawn(queue: Queue, connect: Connect, rings: Rings) -> None:
    sender = connect(autocommit=False)
    drawn = sender.execute("select ulak.send('shop', '{}')").fetchone()
    assert drawn is not None

    assert set_bell(queue) == drawn[0]


def test_a_sender_rings_when_he_commits(queue: Queue, connect: Connect, rings: Rings) -> None:
    set_bell(queue)
    sender = connect(autocommit=False)
    sender.execute("select ulak.send('shop', '{}'), ulak.send('shop', '{}')")

    assert rings() == 0
    sender.commit()
    assert rings() == 1


def test_who_rolls_back_does_not_ring(queue: Queue, connect: Connect, rings: Rings) -> None:
    set_bell(queue)
    sender = connect(autocommit=False)
    sender.execute("select ulak.send('shop', '{}')")
    sender.rollback()

    assert rings() == 0


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
def test_every_way_to_send_rings_but_not_for_later(queue: Queue, rings: Rings, statement: str, expected: int) -> None:
    set_bell(queue)

    queue.db.execute(statement)  # type: ignore[arg-type]

    assert rings() == expected


def test_what_waits_behind_its_key_rings_too(queue: Queue, rings: Rings) -> None:
    """Whether it has to wait is for the claim to find: the head may be settled before the sender commits."""
    queue.send(ordering_key="k")
    set_bell(queue)

    queue.send(ordering_key="k")

    assert rings() == 1


@contextlib.contextmanager
def of_two_phases() -> Iterator[psycopg.Connection[Any]]:
    cluster = Cluster.create(settings={"max_prepared_transactions": 2}, in_memory=True)
    try:
        cluster.create_database("app")
        cluster.install("app")
        with cluster.connect("app") as db:
            yield db
    finally:
        cluster.remove()


def test_where_transactions_may_be_prepared_nobody_rings_nor_listens() -> None:
    """PostgreSQL refuses to prepare a transaction that has rung."""
    with of_two_phases() as db:
        queue = Queue(db)
        queue.endpoint()

        assert queue.value("select ulak._listen()") is False
        set_bell(queue)
        db.execute("begin")
        queue.send()
        db.execute("prepare transaction 'sent'")
        db.execute("commit prepared 'sent'")

        assert queue.value("select count(*) from ulak.queue") == 1


def test_what_is_held_until_adoption_is_not_listened_for(queue: Queue) -> None:
    queue.db.execute("update ulak.cluster_identity set system_identifier = 1")

    assert queue.value("select ulak._listen()") is False
