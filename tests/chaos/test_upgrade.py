"""The extension is upgraded while orders come in and messages go out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.copies import NEXT, current_version, make_next_release, use
from support.sessions import wait_until
from support.world import FULL, PAUSES, World

VERSION = "select extversion from pg_extension where extname = 'ulak'"
RENEWED = "select count(*) from ulak.workers where state = 'running' and version = %s"


def test_the_extension_is_upgraded_under_load(world: World, close_books: Any, tmp_path: Path) -> None:
    world.endpoint()
    project = make_next_release(tmp_path)

    with world.workers(), world.connect() as db:
        with world.producers() as producers:
            use(db, project)
            world.recorder.wait_for_more(1000 if FULL else 50)
            db.execute("alter extension ulak update")
            wait_until(lambda: world.value(RENEWED, NEXT) == 2, "workers of the new version")
            world.recorder.wait_for_more(1000 if FULL else 50)
        world.drain()

    close_books()
    assert not producers.refused


@pytest.mark.release("0.2.0")
@pytest.mark.parametrize("runner", ["loops", pytest.param("cron", marks=pytest.mark.full)])
def test_the_last_release_is_upgraded_under_load(world: World, close_books: Any, runner: str) -> None:
    """Once rolled back, once committed. Workers of the old version leave and come back as new ones."""
    world.let_leases_be_short()
    world.endpoint()
    deadlocks = world.cluster.log.read_text(errors="replace").count("deadlock detected")

    with world.workers_by(runner), world.connect() as db:
        with world.producers(count=4, pause=PAUSES[runner]) as producers:
            world.recorder.wait_for_more(500 if FULL else 50)
            with db.transaction(force_rollback=True):
                db.execute("alter extension ulak update")
            producers.wait_for(100)
            world.recorder.wait_for_more(500 if FULL else 50)
            assert world.value(VERSION) == "0.2.0"

            db.execute("alter extension ulak update")
            producers.wait_for(100)
            wait_until(lambda: world.value(RENEWED, current_version()) == 2, "workers of the new version")
            world.recorder.wait_for_more(500 if FULL else 50)
        world.drain()

    # A worker of 0.2.0 that waits for the upgrade's lock inside a claim or a settle ends with an error: what it has under way is sent again.
    close_books(refused=frozenset({"42P10"}), duplicates=True)
    # A send() of 0.2.0 with options that waits for the upgrade's lock finds a view where its table was: it is refused, and can be repeated.
    assert set(producers.refused) <= {"42P10"}
    assert world.cluster.log.read_text(errors="replace").count("deadlock detected") == deadlocks
