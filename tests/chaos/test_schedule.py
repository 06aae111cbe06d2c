"""pg_cron is stopped and started, from within and from without."""

from __future__ import annotations

from typing import Any

import pytest
from support.sessions import wait_until
from support.world import World

LAUNCHER = "select pid from pg_stat_activity where backend_type = 'pg_cron launcher'"


@pytest.mark.full
def test_pg_cron_is_stopped_and_started(world: World, close_books: Any) -> None:
    world.endpoint()

    with world.producers(pause=0.05) as producers:
        with world.by_cron():
            world.recorder.wait_for_more(50, timeout=90)
        before = world.recorder.count()
        producers.wait_for(50)
        assert world.recorder.count() == before
        with world.by_cron():
            world.recorder.wait_for_more(100, timeout=90)
            launcher = world.value(LAUNCHER)
            world.terminate(launcher)
            wait_until(lambda: world.value(LAUNCHER) not in (None, launcher), 30, "a new launcher")
            ran = world.worker_pids()
            # Its next run of the workers, or of what replaced them.
            wait_until(lambda: not set(ran) & set(pids := world.worker_pids()) and pids, 130, "new workers")
            world.recorder.wait_for_more(50, timeout=90)
    world.deliver_the_rest()

    close_books(duplicates=True)
