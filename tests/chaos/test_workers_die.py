"""Workers are terminated and cancelled under load, or die at the worst moment."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
from support.recorder import Behaviour
from support.sessions import wait_until, wait_until_blocked
from support.world import FULL, PAUSES, World

RUNNERS = ["loops", "cron"] if FULL else ["loops"]


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_worker_is_terminated_again_and_again(world: World, close_books: Any, runner: str) -> None:
    world.endpoint()

    with world.producers(pause=PAUSES[runner]), world.workers_by(runner):
        for _ in range({"loops": 40 if FULL else 6, "cron": 10}[runner]):
            world.recorder.wait_for_more(30)
            world.terminate(world.wait_for_worker())
    world.deliver_the_rest()

    close_books(duplicates=True)


def test_a_worker_is_cancelled_again_and_again(world: World, close_books: Any) -> None:
    world.endpoint()

    with world.producers(), world.workers():
        for _ in range(40 if FULL else 6):
            world.recorder.wait_for_more(30)
            world.cancel(world.wait_for_worker())
    world.deliver_the_rest()

    close_books(duplicates=True)


KILLS: list[Callable[[World, int], None]] = [
    World.terminate,
    *([World.kill, lambda world, pid: world.cluster.restart("immediate")] if FULL else []),
]


@pytest.mark.parametrize("kill", KILLS, ids=["terminate", "kill -9", "immediate stop"][: len(KILLS)])
def test_a_worker_dies_between_the_answer_and_its_settling(
    world: World, close_books: Any, kill: Callable[[World, int], None]
) -> None:
    world.endpoint()
    world.recorder.behave("/shop", Behaviour(hold=True))
    with world.connect() as db:
        db.execute("select shop.place_order('only', 'shop', 'k', null)")

    workers = world.workers(1)
    with workers, closing(world.connect(autocommit=False)) as gate, closing(world.connect()) as observer:
        pid = world.wait_for_worker()
        wait_until(world.recorder.count, "the request")
        gate.execute("select from ulak.queue for update")
        world.recorder.release("/shop")
        wait_until_blocked(pid, observer)
        # A claim that a crash has lost would be sent by the next one, which might end in the middle as well.
        workers.stay_away()
        kill(world, pid)
    world.deliver_the_rest()

    close_books(duplicates=1, repeated_attempts=kill is not World.terminate)
