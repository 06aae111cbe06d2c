"""External workers that wait: woken by the next sender while nothing is sent, and looking by themselves while others send."""

from __future__ import annotations

import pytest
from support.cluster import Connect
from support.queue import Begin, Queue
from support.sessions import patience


@pytest.fixture
def consumer(queue: Queue, connect: Connect) -> Queue:
    queue.endpoint()
    queue.db.execute("select setval('ulak_private.bell', 1, false), setval('ulak_private.last_finder', 1)")
    queue.call("grant_endpoint", "shop", "test_ulak_consumer")
    return Queue(connect("ulak_consumer"))


def listen(consumer: Queue) -> float:
    return float(consumer.value("select ulak.listen()"))


def work(consumer: Queue) -> list[int]:
    return consumer.column("select id from ulak.work('w', 10, 'shop')")


def long_since(consumer: Queue) -> None:
    """As if nothing had been sent for a while."""
    consumer.db.execute("""
        select set_config('ulak_private.waiting', array[m[1], m[2] - 100000]::text, false)
        from (select current_setting('ulak_private.waiting')::bigint[]) m(m)
    """)


def test_a_consumer_sleeps_while_nothing_is_sent_and_is_woken_by_the_next_sender(queue: Queue, consumer: Queue) -> None:
    assert work(consumer) == []
    assert listen(consumer) < 1
    assert work(consumer) == []
    long_since(consumer)

    assert listen(consumer) == 1
    sent = queue.send()

    assert len(list(consumer.db.notifies(timeout=patience(), stop_after=1))) == 1
    assert work(consumer) == [sent]


def test_a_consumer_looks_again_by_itself_while_others_send(queue: Queue, consumer: Queue) -> None:
    queue.endpoint("other")
    for _ in range(6):
        listen(consumer)
        long_since(consumer)
        queue.send("other")

    assert listen(consumer) == 0.1
    assert consumer.column("select pg_listening_channels()") == []


def test_the_consumer_that_found_something_last_looks_again_soon(
    queue: Queue, consumer: Queue, connect: Connect
) -> None:
    other = Queue(connect("ulak_consumer"))
    waits = []
    for finder in (consumer, other):
        sent = queue.send()
        assert work(finder) == [sent]
        waits.append([listen(consumer), listen(other)])

    assert waits == [[0.003, 0.1], [0.1, 0.003]]


def test_a_sender_that_draws_its_id_while_a_consumer_falls_asleep_is_not_waited_for(
    queue: Queue, consumer: Queue, begin: Begin
) -> None:
    """It doesn't notify, because no consumer had asked for it when it sent."""
    listen(consumer)
    long_since(consumer)
    sender = begin()
    sent = sender.send()
    assert listen(consumer) < 1

    sender.db.commit()

    assert work(consumer) == [sent]
