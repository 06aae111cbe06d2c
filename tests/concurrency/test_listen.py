"""External workers that wait: woken by the next sender while nothing is sent, and looking by themselves while others send."""

from __future__ import annotations

from itertools import pairwise

import pytest
from support.cluster import Connect
from support.queue import Begin, Queue


@pytest.fixture
def consumer(queue: Queue, connect: Connect) -> Queue:
    queue.endpoint()
    queue.db.execute("select setval('ulak_private.bell', 1, false)")
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

    assert len(list(consumer.db.notifies(timeout=20, stop_after=1))) == 1
    assert work(consumer) == [sent]


def test_a_consumer_looks_again_by_itself_while_others_send(queue: Queue, consumer: Queue) -> None:
    queue.endpoint("other")
    for _ in range(6):
        listen(consumer)
        long_since(consumer)
        queue.send("other")

    assert 0 < listen(consumer) <= 0.1
    assert list(consumer.db.notifies(timeout=0)) == []


def test_consumers_that_wait_look_in_turn(queue: Queue, consumer: Queue, connect: Connect) -> None:
    looks = []
    for waiting in (consumer, Queue(connect("ulak_consumer"))) * 2:
        listen(waiting)
        looks.append(int(queue.value("select last_value from ulak_private.looks")))

    assert all(later - earlier >= 3_000 for earlier, later in pairwise(looks))


@pytest.mark.parametrize("ahead", ["1 second", "1 day"])
def test_no_consumer_waits_for_long_however_many_there_are_and_whatever_the_clock_was(
    queue: Queue, consumer: Queue, ahead: str
) -> None:
    queue.db.execute(
        "select setval('ulak_private.looks', (extract(epoch from now() + %s::interval) * 1000000)::bigint)", [ahead]
    )

    assert listen(consumer) == 0.1


def test_a_sender_that_draws_its_id_while_a_consumer_falls_asleep_is_not_waited_for(
    queue: Queue, consumer: Queue, begin: Begin
) -> None:
    """It doesn't notify, because nobody had asked for it when it sent."""
    listen(consumer)
    long_since(consumer)
    sender = begin()
    sent = sender.send()
    assert listen(consumer) < 1

    sender.db.commit()

    assert work(consumer) == [sent]
