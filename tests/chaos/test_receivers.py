"""Receivers fail, refuse, flap, hang, restart and are slow."""

from __future__ import annotations

from typing import Any

import pytest
from psycopg.types.json import Jsonb
from support.recorder import Behaviour
from support.sessions import wait_until
from support.site import LONGEST_TIMEOUT
from support.world import FULL, World

ORDERS = 1500 if FULL else 100


def test_receivers_fail_refuse_and_come_too_late(world: World, close_books: Any) -> None:
    world.endpoint("shop")
    world.recorder.behave("/shop", Behaviour(status=503, probability=0.2))
    world.endpoint("refuses")
    world.recorder.behave("/refuses", Behaviour(status=404))
    world.endpoint("gives_up", {"max_retries": 2, "backoff": "schedule", "schedule": [0]})
    world.recorder.behave("/gives_up", Behaviour(status=500, probability=0.7))
    world.value("select ulak.disable_endpoint(%s)", world.endpoint("late"))

    producers = world.producers("shop", "refuses", "gives_up")
    with world.workers():
        with producers, world.producers("late", count=1, pause=0.05, expires_in="1 second") as late:
            producers.wait_for(ORDERS)
            late.wait_for(1)
        world.drain()

    report = close_books()
    assert report.dead > 0
    assert report.expired > 0


@pytest.mark.full
def test_a_receiver_flaps(world: World, close_books: Any) -> None:
    world.endpoint(circuit_breaker={"threshold": 5, "cooldown": 5})

    with world.workers():
        with world.producers():
            for _ in range(3):
                world.recorder.wait_for_more(30)
                world.recorder.behave("/shop", Behaviour(status=503))
                wait_until(lambda: circuit(world) == "open", message="an open circuit")
                world.recorder.behave("/shop", Behaviour())
                wait_until(lambda: circuit(world) == "closed", "a closed circuit")
        world.drain()

    close_books()


def circuit(world: World) -> str:
    return str(world.value("select circuit_state from ulak.endpoints where name = 'shop'"))


@pytest.mark.full
def test_a_receiver_hangs(world: World, close_books: Any) -> None:
    world.endpoint()
    world.endpoint("hangs", timeout=1)
    world.recorder.behave("/hangs", Behaviour(hold=True))
    of_it = "select count(*) from ulak.queue q join ulak.endpoints e on e.id = q.endpoint_id where e.name = 'hangs'"
    timed_out = f"{of_it} and q.last_error like '[RETRYABLE] timeout: %'"
    in_flight = f"{of_it} and q.status = 'processing'"

    with world.workers():
        with world.producers() as producers, world.producers("hangs", count=1, pause=0.05) as late:
            producers.wait_for(ORDERS)
            late.wait_for(20)
            wait_until(lambda: world.value(timed_out) >= 20, "20 messages to time out")
        # It answers from now on, and no answer may come after its request has timed out: that would be a duplicate.
        world.value("select ulak.disable_endpoint('hangs')")
        wait_until(lambda: world.value(in_flight) == 0, "the last request to time out")
        world.value("select ulak.alter_endpoint('hangs', p_merge => %s)", Jsonb({"timeout": LONGEST_TIMEOUT}))
        world.recorder.behave("/hangs", Behaviour())
        world.value("select ulak.enable_endpoint('hangs')")
        world.drain()

    close_books()


@pytest.mark.full
def test_a_receiver_restarts(world: World, close_books: Any) -> None:
    # While it is down, immediate retries would add up to thousands.
    world.endpoint(policy={"max_retries": 1000, "backoff": "fixed", "base_delay_seconds": 1})
    world.recorder.behave("/shop", Behaviour(delay=0.02))

    with world.workers():
        with world.producers():
            for _ in range(20):
                world.recorder.wait_for_more(30)
                world.recorder.restart()
        world.drain()

    # An answer that was written down and lost with its connection is a duplicate; so is the second try of a request.
    close_books(duplicates=True, repeated_attempts=True)


@pytest.mark.full
def test_one_slow_endpoint_among_a_hundred_delays_no_other(world: World, close_books: Any) -> None:
    names = [world.endpoint(f"shop_{n}") for n in range(100)]
    world.endpoint("slow")
    world.recorder.behave("/slow", Behaviour(hold=True))
    fast_live = """
        select count(*) from ulak.messages join ulak.endpoints e on e.id = endpoint_id
        where status in ('pending', 'processing') and e.name <> 'slow'
    """

    with world.workers():
        with world.producers("slow", pause=0.002) as slow, world.producers(*names, pause=0.002) as fast:
            # More than all workers together can have in flight.
            slow.wait_for(400)
            fast.wait_for(ORDERS)
        wait_until(lambda: world.value(fast_live) == 0, "all others")
        assert not [arrival for arrival in world.recorder.arrivals() if arrival.endpoint == "slow" and arrival.accepted]
        assert world.live() >= 400
        world.recorder.release("/slow")
        world.drain()

    close_books()
