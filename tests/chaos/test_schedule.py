"""pg_cron hands over from run to run, is stopped and started."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from random import Random
from typing import Any

import pytest
from support.gate import gate
from support.sessions import strain, wait_until, wait_until_blocked, wait_until_gone
from support.traffic import stopwatch
from support.world import World

RUN = "select pid from pg_stat_activity where datname = current_database() and query = %s and state = 'active'"
LAUNCHER = "select pid from pg_stat_activity where backend_type = 'pg_cron launcher'"


@pytest.mark.full
def test_workers_hand_over_each_minute_without_a_duplicate(world: World, close_books: Any) -> None:
    world.endpoint()

    with world.by_cron():
        with world.producers():
            before = set(wait_until(world.worker_pids, "workers"))
            wait_until(lambda: (now := set(world.worker_pids())) and not now & before, "their next run")
            world.recorder.wait_for_more(100)
        world.drain()

    close_books()


@contextmanager
def late_run(world: World, slot: int) -> Iterator[None]:
    """pg_cron has started a run of this slot, but it sleeps until the end; then it has to leave."""
    with closing(world.connect()) as db, ExitStack() as sleep:
        with gate(db):
            pid = wait_until(lambda: world.value(RUN, f"call ulak.run_worker({slot}, p_is_scheduled => true)"), "a run")
            wait_until_blocked(pid, db)
            sleep.enter_context(world.stopped(pid))
        yield
        sleep.close()
        wait_until_gone(pid, db)


@pytest.mark.full
def test_pg_cron_is_stopped_and_started(world: World, close_books: Any) -> None:
    """By ulak.stop() and ulak.start(); then its scheduler ends, which only a restart of the server brings back."""
    world.endpoint()

    with world.producers(pause=0.05) as producers:
        world.start_cron()
        with late_run(world, 2):
            world.recorder.wait_for_more(50)
            world.stop_cron()
            before = world.recorder.count()
        producers.wait_for(50)
        assert world.recorder.count() == before
        with world.by_cron():
            world.recorder.wait_for_more(100)
            world.terminate(world.value(LAUNCHER))
            # Sooner than at the end of their minute.
            world.value("update ulak.workers set stop_requested_at = clock_timestamp() returning true")
            wait_until(lambda: not world.worker_pids(), "workers to leave")
            world.cluster.restart()
            world.recorder.wait_for_more(50)
            producers.stop()
            world.drain()

    close_books()


OURS = """
    select pid from pg_stat_activity
    where datname = current_database() and usename = 'ulak_worker' and query ~ '^call (ulak[.]run_worker|ulak_private[.]watch_workers)'
    order by pid
"""
LONGEST_GAP = """
    select max(extract(epoch from a.gap))::float from (
        select a.completed_at - lag(a.completed_at) over (order by a.completed_at) as gap
        from ulak.archive a where a.completed_at >= %s
    ) a
"""


@pytest.mark.full
def test_workers_and_watcher_that_are_terminated_at_random_are_back_within_seconds(
    world: World, close_books: Any
) -> None:
    """One each second, for 40 s; never all at once, which with pg_cron 1.4 waits for the full minute."""
    world.let_leases_be_short()
    world.endpoint()
    random = Random(27)

    with world.by_cron(), closing(world.connect()) as db:
        with world.producers(pause=0.05):
            wait_until(lambda: len(world.worker_pids()) == 2, "workers")
            (began,) = db.execute("select clock_timestamp()").fetchone() or (None,)
            since_first = stopwatch()
            for second in range(40):
                pids = [pid for (pid,) in db.execute(OURS)]
                if len(pids) > 1:
                    world.terminate(random.choice(pids))
                wait_until(lambda second=second: since_first() > second + 1, "the next second")
            (gap,) = db.execute(LONGEST_GAP, [began]).fetchone() or (None,)
        world.drain()

    close_books(duplicates=True)
    assert gap is not None
    assert gap < 5 * strain()
