"""The extension is upgraded while orders come in and messages go out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.copies import NEXT, current_version, make_next_release, use
from support.releases import SECOND, make_releases, released
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


# This version to one that comes two releases later, or the last release to this one.
@pytest.mark.parametrize("world", [None, *released()], indirect=True)
@pytest.mark.parametrize("runner", ["loops", pytest.param("cron", marks=pytest.mark.full)])
def test_tables_are_altered_under_load(world: World, close_books: Any, runner: str, tmp_path: Path) -> None:
    """Once rolled back, once committed. Workers of the old version leave and come back as new ones."""
    world.endpoint()
    start = world.value(VERSION)
    end = SECOND if start == current_version() else current_version()
    deadlocks = world.cluster.log.read_text(errors="replace").count("deadlock detected")

    with world.workers_by(runner), world.connect() as db:
        if end == SECOND:
            use(db, make_releases(tmp_path).second)
        with world.producers(count=4, pause=PAUSES[runner]) as producers:
            world.recorder.wait_for_more(500 if FULL else 50)
            with db.transaction(force_rollback=True):
                db.execute("alter extension ulak update")
            producers.wait_for(100)
            world.recorder.wait_for_more(500 if FULL else 50)
            assert world.value(VERSION) == start

            db.execute("alter extension ulak update")
            producers.wait_for(100)
            wait_until(lambda: world.value(RENEWED, end) == 2, "workers of the new version")
            world.recorder.wait_for_more(500 if FULL else 50)
        world.drain()

    close_books()
    assert not producers.refused
    assert world.cluster.log.read_text(errors="replace").count("deadlock detected") == deadlocks
