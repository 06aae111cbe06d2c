"""The primary dies, and a standby on another port is promoted: nothing is lost, and workers come back under pg_cron."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.cluster import Cluster
from support.recorder import Recorder
from support.sessions import wait_until
from support.traffic import Producers, stopwatch
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


@pytest.fixture
def standby(world: World) -> Iterator[Cluster]:
    primary = world.cluster
    standby = primary.make_standby()
    standby.configure({"synchronous_standby_names": ""})
    primary.configure({"synchronous_commit": "on"})
    primary.reload()
    yield standby
    standby.remove()


def take_over(world: World, standby: Cluster, producers: Producers) -> None:
    world.cluster.kill()
    producers.cluster = world.cluster = standby
    standby.promote()


def end(world: World, producers: Producers) -> None:
    producers.stop()
    world.value("select count(*) from ulak.stop()")
    wait_until(lambda: not world.worker_pids(), "workers to leave")
    world.deliver_the_rest()


@pytest.mark.full
def test_a_standby_on_another_port_takes_over(
    world: World, standby: Cluster, row: dict[str, Any], close_books: Any
) -> None:
    primary = world.cluster
    world.endpoint()
    with world.producers() as producers:
        world.value("select count(*) from ulak.start()")
        world.recorder.wait_for_more(100)

        take_over(world, standby, producers)

        # The jobs came over with the address of the server that is gone.
        (finding,) = wait_until(lambda: findings(world), "a finding")
        assert f"jobs run on {primary.host}:{primary.port}, which is not this server" in finding
        since_start = stopwatch()
        world.value("select count(*) from ulak.start()")
        world.recorder.wait_for_more(1)
        row["scenario"] += f" (first delivery {since_start():.1f} s after start())"
        assert findings(world) == []
        world.recorder.wait_for_more(100)
        end(world, producers)

    close_books(duplicates=True, repeated_attempts=True)


@pytest.mark.full
def test_a_standby_with_the_same_address_takes_over_by_itself(
    world: World, standby: Cluster, row: dict[str, Any], close_books: Any
) -> None:
    """The same port, and a socket as cron.host: what an address is made of on two machines that are set up alike."""
    primary = world.cluster
    world.endpoint()
    with world.producers() as producers:
        world.value("select count(*) from ulak.start()")
        world.recorder.wait_for_more(100)
        primary.kill()
        sockets = standby.host
        standby.configure({"cron.host": primary.host, "port": primary.port, "unix_socket_directories": primary.host})
        standby.restart()
        shutil.rmtree(sockets)
        producers.cluster = world.cluster = standby

        since_promotion = stopwatch()
        standby.promote()
        world.recorder.wait_for_more(1)
        row["scenario"] += f" (first delivery {since_promotion():.1f} s after the promotion)"
        standby.reload()
        world.recorder.wait_for_more(100)
        assert findings(world) == []
        end(world, producers)

    close_books(duplicates=True, repeated_attempts=True)


def findings(world: World) -> list[str]:
    with world.connect() as db:
        rows = db.execute("""select finding from ulak.doctor() where "check" = 'pg_cron'""").fetchall()
    return [finding for (finding,) in rows]
