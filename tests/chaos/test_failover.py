"""The primary dies, and a standby on another port is promoted: nothing is lost, and workers come back under pg_cron."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.cluster import Cluster
from support.recorder import Recorder
from support.sessions import wait_until
from support.world import World


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """In pg_cron's own database, on a cluster that waits for its standby."""
    settings = {"max_connections": 60, "synchronous_standby_names": "*"}
    with ExitStack() as end:
        primary = Cluster.create(settings={**settings, "synchronous_commit": "local"}, in_memory=True)
        end.callback(primary.remove)
        primary.execute("create extension pg_cron")
        primary.install("postgres")
        with Recorder(tmp_path / "arrivals") as recorder:
            yield World(primary, "postgres", recorder)


@pytest.mark.full
def test_a_standby_on_another_port_takes_over(world: World, row: dict[str, Any], close_books: Any) -> None:
    world.endpoint()
    primary = world.cluster
    with ExitStack() as end:
        standby = primary.make_standby()
        end.callback(standby.remove)
        primary.configure({"synchronous_commit": "on"})
        primary.reload()
        standby.configure({"synchronous_standby_names": ""})
        producers = end.enter_context(world.producers())
        world.value("select count(*) from ulak.start()")
        world.recorder.wait_for_more(100)

        primary.kill()
        producers.cluster = world.cluster = standby
        standby.promote()
        standby.reload()

        # The jobs came over with the address of the server that is gone.
        (finding,) = wait_until(lambda: findings(world), 10, "a finding")
        assert f"jobs run on {primary.host}:{primary.port}, which is not this server" in finding
        before, began = world.recorder.count(), time.monotonic()
        world.value("select count(*) from ulak.start()")
        wait_until(lambda: world.recorder.count() > before, 20, "a delivery")
        row["scenario"] += f" (first delivery {time.monotonic() - began:.1f} s after start())"
        assert findings(world) == []

        # From now on by itself: a restart is what a promotion is to pg_cron.
        world.recorder.wait_for_more(100)
        standby.restart("immediate")
        before, began = world.recorder.count(), time.monotonic()
        wait_until(lambda: world.recorder.count() > before, 20, "a delivery")
        row["scenario"] += f", {time.monotonic() - began:.1f} s after a restart"
        producers.stop()
        world.value("select count(*) from ulak.stop()")
        wait_until(lambda: not world.worker_pids(), 20, "workers to leave")
        world.deliver_the_rest()
        close_books(duplicates=True, repeated_attempts=True)


def findings(world: World) -> list[str]:
    with world.connect() as db:
        rows = db.execute("""select finding from ulak.doctor() where "check" = 'pg_cron'""").fetchall()
    return [finding for (finding,) in rows]
