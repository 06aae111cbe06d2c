"""The queue is full, the disk is full: callers get a clean error, and everything continues when there is room."""

from __future__ import annotations

import resource
from typing import Any

from support.sessions import wait_until
from support.world import FULL, World

LIMIT = 100


def test_the_queue_is_full(world: World, close_books: Any) -> None:
    world.endpoint()
    world.value("select ulak.configure('max_queue_size', %s)", str(LIMIT))

    with world.producers(count=4, pause=0.002) as producers:
        wait_until(lambda: producers.refused["53400"] > 20, "refusals")
        # Those that were sent at the same moment may have gone in together.
        assert LIMIT <= world.live() < LIMIT + 4
        with world.workers():
            producers.wait_for(5000 if FULL else 300)
            producers.stop()
            world.drain()

    close_books()
    assert world.refused() == {"53400"}


STATE = "select state from ulak.maintenance_status where step = 'archive'"
ERROR = "select last_error from ulak.maintenance_status where step = 'archive'"
# In the last month, whose part of the archive no worker writes to meanwhile: its file is as large as it was when the limit was set.
LAST_MONTH = "select date_trunc('month', now()) - interval '1 day'"
# What 0.2.0 has finished and left in the queue: maintenance archives it.
LEFT = """
    insert into ulak_private.deliveries (endpoint_id, status, attempts, created_at, updated_at, completed_at, payload)
    select 0, 'completed', 1, t.at, t.at, t.at, jsonb_build_object('ballast', true, 'n', n)
    from generate_series(1, 200) n, (select %s::timestamptz) t (at)
"""
ARCHIVED = "select count(*) from ulak.archive where payload ? 'n'"

# Fills the month up to more than the size of a WAL segment, so that a limit on the size of files meets no file but this.
# Its rows are smaller than those of messages: no page has room for one more.
BALLAST = """
    insert into ulak_private.archived (id, endpoint_id, status, created_at, payload)
    select -n, 0, 'completed', %s, '{"ballast": true}'
    from generate_series(1, 130000) n
    returning tableoid::regclass
"""


def test_the_disk_is_full_while_archiving(world: World, close_books: Any) -> None:
    """No mount is needed: the limit on the size of files stops a write within a page, as a full disk does."""
    world.endpoint()
    created_at = world.value(LAST_MONTH)
    world.value("select ulak.maintain_archive_partitions(0, %s)", created_at)
    month = world.value(BALLAST, created_at)
    size = (world.cluster.data / world.value("select pg_relation_filepath(%s)", month)).stat().st_size
    assert size > 17 << 20

    with world.workers():
        with world.producers() as producers, world.connect() as db:
            world.wait_for_delivered(100)
            db.execute(LEFT, [created_at])
            resource.prlimit(db.info.backend_pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
            db.execute("call ulak.run_maintenance()")
            assert world.value(STATE) == "failed"
            assert "could not extend file" in world.value(ERROR)
            assert world.value(ARCHIVED) == 0
            producers.wait_for(100)

            resource.prlimit(
                db.info.backend_pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
            )
            db.execute("call ulak.run_maintenance()")
            assert world.value(STATE) == "ok"
            assert world.value(ARCHIVED) == 200
        world.drain()
    world.cluster.execute("delete from ulak_private.archived where payload ? 'ballast'", world.database)

    close_books()
