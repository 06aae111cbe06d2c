"""High availability for real: the leader of a Patroni is killed, frozen, switched over or cut off, under workers and under nodes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from support.books import Allowance
from support.node import Node
from support.patroni import Patroni
from support.recorder import Recorder
from support.sessions import strain, wait_until
from support.traffic import stopwatch
from support.world import World

pytestmark = pytest.mark.full


@pytest.fixture
def patroni() -> Iterator[Patroni]:
    with Patroni() as patroni:
        yield patroni


@pytest.fixture
def world(patroni: Patroni, tmp_path: Path) -> Iterator[World]:
    leader = patroni.leader()
    leader.execute("create extension pg_cron")
    leader.install("postgres")
    with Recorder(tmp_path / "arrivals") as recorder:
        yield World(leader, "postgres", recorder)


@pytest.mark.parametrize("runner", ["workers", "nodes"])
@pytest.mark.parametrize("fault", ["kill", "freeze", "switch_over", "cut_off"])
def test_delivery_goes_on_with_the_next_leader(
    patroni: Patroni, world: World, row: dict[str, Any], fault: str, runner: str
) -> None:
    old = patroni.leader()
    world.let_leases_be_short()
    world.endpoint()
    row["scenario"] = f"patroni: {fault}, {runner}"

    with ExitStack() as stack:
        if runner == "nodes":
            for number in range(2):
                stack.enter_context(Node(patroni.dsn("test_ulak_node"), "--name", f"node-{number}"))
            world.value("select count(*) from ulak.start(0)")
        else:
            world.value("select count(*) from ulak.start()")
        with world.producers() as producers:
            stack.callback(producers.stop)
            # What waits for the old leader is free when that has ended.
            with ExitStack() as until_mended:
                world.recorder.wait_for_more(100)
                since_fault = stopwatch()
                until_mended.callback(getattr(patroni, fault)(old))
                new = patroni.leader(other_than=old)
                until_promotion, since_promotion = since_fault(), stopwatch()
                producers.cluster = world.cluster = new
                before = world.recorder.count()
                with world.producers():
                    wait_until(lambda: world.recorder.count() > before, "a delivery")
                    until_delivery = since_promotion()
                    world.recorder.wait_for_more(100)
            row["scenario"] += f" (promoted after {until_promotion:.1f} s, first delivery {until_delivery:.1f} s later)"
            patroni.wait_until(lambda: new.is_followed_by(old), "the old leader as a standby")
            world.recorder.wait_for_more(100)
        world.drain()

    report = world.audit(Allowance(duplicates=True, repeated_attempts=True))
    row.update(asdict(report), verdict=report.verdict)
    assert not report.problems, f"\n{report}"
    assert until_delivery < 5 * strain()
