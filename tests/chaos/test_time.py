"""A month ends, and clocks are wrong."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from support.world import FULL, World

NEXT_MONTH = "select date_trunc('month', now() at time zone 'UTC') at time zone 'UTC' + interval '1 month'"

MISPLACED = """
    select count(*) from ulak_private.archived
    where tableoid::regclass::text <> 'ulak_private.archive_' || to_char(created_at at time zone 'UTC', 'YYYY_MM')
"""


def test_a_month_ends(world: World, close_books: Any) -> None:
    world.endpoint()
    midnight = world.value(NEXT_MONTH)
    producers = world.producers()

    with producers:
        with world.workers():
            world.wait_for_delivered(500 if FULL else 60)
        # As if they had been sent around midnight. Maintenance has the clock to itself, with no lease to take back.
        world.cluster.execute(
            f"""
            update ulak_private.archived set
                event_created_at = coalesce(event_created_at, created_at),
                created_at = '{midnight}'::timestamptz + (id % 3 - 1) * interval '1 microsecond'
            where status = 'completed'
            """,  # type: ignore[arg-type]
            world.database,
        )
        world.let_leases_run_out()
        for seconds in (-1, 0, 1, 3600, 86400, 40 * 86400):
            with world.connect() as db:
                db.execute("call ulak.run_maintenance(%s)", [midnight + timedelta(seconds=seconds)])
            producers.wait_for(10)
    world.deliver_the_rest()
    with world.connect() as db:
        db.execute("call ulak.run_maintenance(%s)", [midnight + timedelta(days=70)])

    close_books(duplicates=True)
    assert world.value(MISPLACED) == 0
    assert world.value("select count(*) from ulak.queue") == 0
    assert world.value("select count(distinct tableoid) from ulak_private.archived") == 2


def test_the_clock_jumps_an_hour_ahead_and_back(world: World, close_books: Any) -> None:
    """To a clock that is ahead every lease has run out. Its owner goes on, and the fence decides."""
    world.endpoint()

    with world.producers(pause=0.005), world.workers():
        for _ in range(30 if FULL else 3):
            world.recorder.wait_for_more(30)
            world.value("select ulak.recover_stale_messages(clock_timestamp() + interval '1 hour')")
            world.let_retries_fall_due()
    world.deliver_the_rest()

    close_books(duplicates=True)
