"""The queue is full, the disk is full: callers get a clean error, and everything continues when there is room."""

from __future__ import annotations

import resource
from typing import Any

import psycopg
import pytest
from support.finished import value
from support.messages import insert_messages
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


STATE = "select state from ulak.maintenance_status where step = 'expire'"
ERROR = "select last_error from ulak.maintenance_status where step = 'expire'"
# In the last month, whose part of the archive no worker writes to meanwhile: its file is as large as it was when the limit was set.
LAST_MONTH = "select date_trunc('month', now()) - interval '1 day'"
COMPLETE = "select count(ulak.complete(h.id, 'w', h.attempt)) from unnest(%s::bigint[], %s::integer[]) h (id, attempt)"
STATUSES = "select m.status, count(*) from ulak.messages m join ulak.endpoints e on e.id = m.endpoint_id where e.name <> 'shop' group by 1"

# Fills the month up to more than the size of a WAL segment, so that a limit on the size of files meets no file but this.
BALLAST = """
    insert into ulak_private.archived (id, endpoint_id, event_id, status, created_at)
    select -n, 0, 0, 'cancelled', %s
    from generate_series(1, 180000) n
    returning tableoid::regclass
"""


def test_the_disk_is_full_while_archiving(world: World, close_books: Any) -> None:
    """No mount is needed: the limit on the size of files stops a write within a page, as a full disk does."""
    shop = world.endpoint()
    created_at = world.value(LAST_MONTH)
    world.value("select ulak.maintain_archive_partitions(0, %s)", created_at)
    month = world.value(BALLAST, created_at)
    size = (world.cluster.data / world.value("select pg_relation_filepath(%s)", month)).stat().st_size
    assert size > 17 << 20

    with world.workers():
        with world.producers() as producers, world.connect() as db:
            world.wait_for_delivered(100)
            pulled, late = (
                value(db, "select ulak.create_endpoint(%s, 'pull', '{}')", name) for name in ("pulled", "late")
            )
            # More than a page has room for.
            insert_messages(db, 200, created_at=created_at, endpoint_id=pulled)
            insert_messages(db, 200, created_at=created_at, endpoint_id=late, expires_at=created_at)
            held = db.execute("select id, attempt from ulak.claim('w', 200, 'pulled')").fetchall()
            ids, attempts = map(list, zip(*held, strict=True))

            resource.prlimit(db.info.backend_pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
            with pytest.raises(psycopg.Error, match="could not extend file"):
                db.execute(COMPLETE, [ids, attempts])
            db.execute("call ulak.run_maintenance()")
            assert world.value(STATE) == "failed"
            assert "could not extend file" in world.value(ERROR)
            assert dict(db.execute(STATUSES).fetchall()) == {"processing": 200, "pending": 200}
            producers.wait_for(100)

            resource.prlimit(
                db.info.backend_pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
            )
            assert value(db, COMPLETE, ids, attempts) == 200
            db.execute("call ulak.run_maintenance()")
            assert world.value(STATE) == "ok"
            assert dict(db.execute(STATUSES).fetchall()) == {"completed": 200, "expired": 200}
        world.drain()
    # They are in no producer's books.
    world.cluster.execute(
        f"delete from ulak_private.archived a where not exists (select from ulak.endpoints e where e.id = a.endpoint_id and e.name = '{shop}')",
        world.database,
    )

    close_books()
