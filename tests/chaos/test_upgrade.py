"""The extension is upgraded while orders come in and messages go out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.copies import NEXT, make_next_release, use
from support.sessions import wait_until
from support.world import FULL, World

RENEWED = "select count(*) from ulak.workers where state = 'running' and version = %s"


def test_the_extension_is_upgraded_under_load(world: World, close_books: Any, tmp_path: Path) -> None:
    world.endpoint()
    project = make_next_release(tmp_path)

    with world.workers(), world.connect() as db:
        with world.producers() as producers:
            use(db, project)
            world.recorder.wait_for_more(1000 if FULL else 50)
            db.execute("alter extension ulak update")
            wait_until(lambda: world.value(RENEWED, NEXT) == 2, 30, "workers of the new version")
            world.recorder.wait_for_more(1000 if FULL else 50)
        world.drain()

    close_books()
    assert not producers.refused
