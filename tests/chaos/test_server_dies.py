"""The server crashes again and again while orders come in and messages go out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from support.sessions import Running, wait_until
from support.world import FULL, PAUSES, World


def stop_immediately(world: World) -> None:
    world.cluster.restart("immediate")


def kill_a_worker(world: World) -> None:
    """The postmaster ends all other backends and recovers."""
    world.kill(world.wait_for_worker())


def kill_the_postmaster(world: World) -> None:
    world.cluster.kill()
    world.cluster.start()


CASES: dict[str, tuple[str, list[Callable[[World], None]]]] = {
    "immediate stop, kill -9 of a worker, of the postmaster": (
        "loops",
        [stop_immediately, kill_a_worker, kill_the_postmaster],
    ),
}
if FULL:
    CASES = {
        "immediate stop": ("loops", [stop_immediately] * 30),
        "kill -9 of a worker": ("loops", [kill_a_worker] * 15),
        "kill -9 of the postmaster": ("loops", [kill_the_postmaster] * 5),
        "both, under pg_cron": ("cron", [stop_immediately, kill_a_worker] * 5),
    }


@pytest.mark.parametrize(("runner", "crashes"), CASES.values(), ids=CASES)
def test_the_server_crashes_again_and_again(
    world: World, close_books: Any, runner: str, crashes: list[Callable[[World], None]]
) -> None:
    world.endpoint()

    with world.producers(pause=PAUSES[runner]), world.workers_by(runner):
        for crash in crashes:
            world.recorder.wait_for_more(30)
            crash(world)
        world.recorder.wait_for_more(30)
    world.deliver_the_rest()

    close_books(duplicates=True, repeated_attempts=True)


def test_a_worker_that_begins_while_the_postmaster_dies_ends_with_it(world: World) -> None:
    """It waits for the slot of the one before it, in Python, where nothing tells it of the postmaster."""
    sessions = [world.cluster.connect(world.database, "ulak_worker") for _ in range(2)]
    runs = [Running(lambda s=s: s.execute("call ulak.run_worker(1, 3600, true)")) for s in sessions]  # type: ignore[misc]
    busy = "select count(*) from pg_stat_activity where usename = 'test_ulak_worker' and query like 'call%' and state = 'active'"
    wait_until(lambda: world.value(busy) == 2 and world.value("select count(*) from ulak.workers") == 1, message="both")

    world.cluster.kill()

    for run, session in zip(runs, sessions, strict=True):
        with pytest.raises(psycopg.Error):
            run.result()
        session.close()
    world.cluster.start()
