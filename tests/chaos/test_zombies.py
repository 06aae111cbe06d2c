"""A worker that is stopped past its lease and then goes on changes nothing; without the fence it would, and is caught."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.books import Allowance
from support.copies import copy_project, use
from support.recorder import Behaviour
from support.sessions import wait_until
from support.world import FULL, World

MESSAGES = 10
# A retry at once for the lease that ran out, and then none that would hide what the zombie does.
POLICY = {"max_retries": 1000, "backoff": "schedule", "schedule": [0, 3600]}

REFUSED_TWICE = "select count(*) from ulak.queue where status = 'pending' and retry_count = 2"
HAS_REPORTED = "select heartbeat_at > %s and in_flight = 0 from ulak.workers where slot = 1"


def wake_a_zombie(world: World, round: int = 1) -> None:
    """Its requests are answered with 200 while it is stopped. Its messages are taken back, and another worker's attempt is
    refused. Then it goes on and reports success. Those of earlier rounds wait, refused."""
    before = world.recorder.count()
    world.recorder.behave("/shop", Behaviour(hold=True))
    with world.connect() as db:
        for n in range(MESSAGES):
            db.execute("select shop.place_order(%s, 'shop', null, null)", [f"{round}-{n}"])
    with world.workers(1):
        wait_until(lambda: world.recorder.count() == before + MESSAGES, "its requests")
        with world.stopped(world.wait_for_worker()):
            world.recorder.release("/shop")
            assert world.let_leases_run_out() == MESSAGES
            world.recorder.behave("/shop", Behaviour(status=503, attempts=[2]))
            with world.workers(2):
                wait_until(lambda: world.value(REFUSED_TWICE) == round * MESSAGES, "the second attempts")
            resumed = world.value("select clock_timestamp()")
        wait_until(lambda: world.value(HAS_REPORTED, resumed), "the zombie's report")


def test_a_zombie_changes_nothing(world: World, close_books: Any) -> None:
    world.endpoint(policy=POLICY)
    rounds = 50 if FULL else 1

    for round in range(1, rounds + 1):
        wake_a_zombie(world, round)

        assert world.value(REFUSED_TWICE) == round * MESSAGES
    with world.workers():
        world.let_retries_fall_due()
        world.drain()

    close_books(duplicates=rounds * MESSAGES)


HELD = "select count(*) from ulak.queue where locked_by like '%%, pid ' || %s"
BUSIEST = """
    select substring(locked_by from ', pid (\\d+)$')::integer
    from ulak.queue
    where status = 'processing'
    group by locked_by
    order by count(*) desc
    limit 1
"""


def has_lost_everything(world: World, pid: int) -> bool:
    world.value("select ulak.recover_stale_messages()")
    return not world.value(HELD, pid)


@pytest.mark.full
def test_a_worker_sleeps_past_its_lease_while_others_work(world: World, close_books: Any) -> None:
    world.let_leases_be_short()
    world.endpoint()
    world.recorder.behave("/shop", Behaviour(delay=0.1, probability=0.5))

    rounds = 0
    with world.producers(), world.workers(1, 2, 3):
        while rounds < 6:
            world.recorder.wait_for_more(30)
            pid = wait_until(lambda: world.value(BUSIEST), "a worker that holds something")
            with world.stopped(pid):
                # Its requests may have been answered in the meantime.
                if world.value(HELD, pid):
                    wait_until(partial(has_lost_everything, world, pid), "recovery")
                    rounds += 1
    world.deliver_the_rest()

    # What had been sent when its worker fell asleep was sent again.
    assert close_books(duplicates=True).duplicates > 0


def strip_fence(project: Path) -> None:
    for name in ("5_settling/leases.sql", "6_afterwards/archive.sql"):
        file = project / "sql/code" / name
        stripped = re.sub(
            r"\n +and q\.attempts = \S+\n +and q\.locked_by = \S+\n +and q\.status is not distinct from 'processing'",
            "",
            file.read_text(),
        )
        assert stripped != file.read_text()
        file.write_text(stripped)


def test_the_books_catch_a_build_without_the_fence(world: World, row: dict[str, Any], tmp_path: Path) -> None:
    strip_fence(project := copy_project(tmp_path))
    with world.connect() as db:
        use(db, project)
        db.execute("drop extension ulak cascade")
        db.execute("create extension ulak")
        db.execute("select ulak.configure('http_allow_internal_urls', 'true')")
    world.endpoint(policy=POLICY)

    wake_a_zombie(world)
    with world.workers():
        world.let_retries_fall_due()
        world.drain()

    report = world.audit(Allowance(duplicates=True))
    assert Counter(problem.partition(":")[0] for problem in report.problems) == {
        "settled by an attempt that was never accepted": MESSAGES,
        "more retries than attempts": MESSAGES,
    }
    row.update(asdict(report), verdict=f"caught: {report.verdict}")
