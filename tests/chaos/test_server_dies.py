"""The server goes down without a word, again and again, while orders come in and messages go out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.cluster import Cluster
from support.world import FULL, World


def stop_immediately(cluster: Cluster) -> None:
    cluster.restart("immediate")


def kill_postmaster(cluster: Cluster) -> None:
    cluster.kill()
    cluster.start()


CASES = [
    (stop_immediately, "loops", 40 if FULL else 2),
    *([(stop_immediately, "cron", 3), (kill_postmaster, "loops", 5)] if FULL else []),
]


@pytest.mark.parametrize(
    ("crash", "runner", "times"), CASES, ids=[f"{crash.__name__}, {runner}" for crash, runner, _ in CASES]
)
def test_the_server_crashes_again_and_again(
    world: World, close_books: Any, crash: Callable[[Cluster], None], runner: str, times: int
) -> None:
    world.endpoint()

    with world.producers(), world.workers_by(runner):
        for _ in range(times):
            world.recorder.wait_for_more(30, timeout=90)
            crash(world.cluster)
        world.recorder.wait_for_more(30, timeout=90)
    world.deliver_the_rest()

    close_books(duplicates=True, repeated_attempts=True)
