"""Nodes are killed, cut off from their database, and see it fail over: nothing is lost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from support.books import Allowance
from support.cluster import Cluster
from support.copies import NEXT, make_next_release, use
from support.network import Machine, can_be_made
from support.node import Node, node_dsn
from support.recorder import Recorder
from support.sessions import strain, wait_until
from support.traffic import stopwatch
from support.world import FULL, World

NODES = "select count(*) from ulak.get_worker_status() where host is not null and state = 'running'"
# What a node said when it was ready.
READY = "delivering as"


def two_nodes(stack: ExitStack, dsn: str, *arguments: str, prefix: list[str] | None = None) -> list[Node]:
    """Both are ready: one of them alone could deliver what a scenario waits for."""
    nodes = [stack.enter_context(Node(dsn, *arguments, prefix=prefix)) for _ in range(2)]
    for node in nodes:
        node.wait_until_says(READY)
    return nodes


def test_nodes_are_killed_again_and_again(world: World, close_books: Any) -> None:
    """kill -9. What they had claimed comes back when its leases run out, with a new attempt number: their commits wait for the disk, so no
    number comes twice."""
    world.let_leases_be_short()
    world.endpoint()
    dsn = node_dsn(world.cluster, world.database)

    with ExitStack() as stack:
        nodes = two_nodes(stack, dsn)
        with world.producers():
            for n in range(20 if FULL else 4):
                world.recorder.wait_for_more(30)
                nodes[n % 2].kill()
                nodes[n % 2] = stack.enter_context(Node(dsn))
            world.recorder.wait_for_more(30)
        world.drain()

    close_books(duplicates=True)


def test_a_server_crashes_under_its_nodes(world: World, close_books: Any) -> None:
    """The nodes live on: what they hold from before the crash is worth nothing after it, and they know."""
    world.let_leases_be_short()
    world.endpoint()

    with ExitStack() as stack:
        nodes = two_nodes(stack, node_dsn(world.cluster, world.database))
        with world.producers():
            for _ in range(5 if FULL else 2):
                world.recorder.wait_for_more(50)
                world.cluster.restart("immediate")
                wait_until(lambda: world.value(NODES) == 2, "the nodes")
            world.recorder.wait_for_more(50)
        world.drain()
        assert all(node.process.poll() is None for node in nodes)

    close_books(duplicates=True)


def test_the_extension_is_upgraded_under_its_nodes(world: World, close_books: Any, tmp_path: Path) -> None:
    world.endpoint()
    renewed = "select count(*) from ulak.workers where state = 'running' and version = %s"

    with ExitStack() as stack, world.connect() as db:
        use(db, make_next_release(tmp_path))
        two_nodes(stack, node_dsn(world.cluster, world.database))
        with world.producers() as producers:
            world.recorder.wait_for_more(1000 if FULL else 50)
            db.execute("alter extension ulak update")
            wait_until(lambda: world.value(renewed, NEXT) == 2, "nodes of the new version")
            world.recorder.wait_for_more(1000 if FULL else 50)
        world.drain()

    close_books()
    assert not producers.refused


@pytest.fixture
def machine(victim: Cluster) -> Iterator[Machine]:
    if not can_be_made():
        pytest.skip("this kernel lets nobody but root make namespaces")
    with Machine(Path(victim.host) / f".s.PGSQL.{victim.port}") as machine:
        yield machine


@pytest.fixture
def remote_recorder(world: World, machine: Machine, tmp_path: Path) -> Iterator[Recorder]:
    """The receivers are on the machine of the nodes."""
    with Recorder(tmp_path / "remote-arrivals", machine.prefix) as recorder:
        world.recorder = recorder
        yield recorder


def test_nodes_are_cut_off_from_their_database(
    world: World, machine: Machine, remote_recorder: Recorder, close_books: Any
) -> None:
    world.let_leases_be_short()
    world.endpoint()
    dsn = machine.dsn(world.database, "test_ulak_node")

    with ExitStack() as stack:
        nodes = two_nodes(stack, dsn, "--insecure", prefix=machine.prefix)
        with world.producers():
            for _ in range(6 if FULL else 2):
                remote_recorder.wait_for_more(50)
                before = [node.log.read_text().count(READY) for node in nodes]
                machine.cut()
                for node in nodes:
                    wait_until(lambda node=node: has_noticed(node), "a node that knows")
                machine.mend()
                for node, count in zip(nodes, before, strict=True):
                    wait_until(lambda n=node, c=count: n.log.read_text().count(READY) > c, "a node that is back")
            remote_recorder.wait_for_more(50)
        world.drain()
        assert all(node.process.poll() is None for node in nodes)

    close_books(duplicates=True)


def test_nodes_behind_a_black_hole_are_back_soon_after_it(
    world: World, machine: Machine, remote_recorder: Recorder, row: dict[str, Any], close_books: Any
) -> None:
    """By the limits that they have of their own, however long it lasted."""
    world.let_leases_be_short()
    world.endpoint()
    dsn = machine.dsn(world.database, "test_ulak_node", "")

    with ExitStack() as stack:
        nodes = two_nodes(stack, dsn, "--insecure", prefix=machine.prefix)
        with world.producers():
            remote_recorder.wait_for_more(50)
            since_drop = stopwatch()
            machine.drop()
            for node in nodes:
                wait_until(lambda node=node: has_noticed(node), "a node that knows")
            wait_until(lambda: not FULL or since_drop() > 45)

            before = [node.log.read_text().count(READY) for node in nodes]
            machine.stop_dropping()
            since_end = stopwatch()
            for node, count in zip(nodes, before, strict=True):
                wait_until(lambda n=node, c=count: n.log.read_text().count(READY) > c, "a node that is back")
            seconds = since_end()

            row["scenario"] += f" (both {seconds:.1f} s after it)"
            assert not FULL or seconds < 5 * strain()
            remote_recorder.wait_for_more(50)
        world.drain()

    close_books(duplicates=True)


def has_noticed(node: Node) -> bool:
    return READY not in node.lines()[-1]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[World, Cluster]]:
    """A primary whose commits wait for its standby."""
    settings = {"max_connections": 60, "synchronous_standby_names": "*"}
    with ExitStack() as end:
        primary = Cluster.create(settings={**settings, "synchronous_commit": "local"}, in_memory=True)
        end.callback(primary.remove)
        primary.create_database("shop")
        primary.install("shop")
        recorder = end.enter_context(Recorder(tmp_path / "arrivals"))
        world = World(primary, "shop", recorder)
        standby = primary.make_standby()
        end.callback(standby.remove)
        standby.configure({"synchronous_standby_names": ""})
        primary.configure({"synchronous_commit": "on"})
        primary.reload()
        world.let_leases_be_short()
        yield world, standby


def dsn_of_both(primary: Cluster, standby: Cluster) -> str:
    hosts = f"host={primary.host},{standby.host} port={primary.port},{standby.port}"
    return f"{hosts} dbname=shop user=test_ulak_node"


@contextmanager
def killed_at_last(cluster: Cluster) -> Iterator[None]:
    """Producers that wait for it are free again."""
    try:
        yield
    finally:
        cluster.kill()


def audit(world: World, row: dict[str, Any]) -> None:
    report = world.audit(Allowance(duplicates=True))
    row.update(asdict(report), verdict=report.verdict)
    assert not report.problems, f"\n{report}"
    assert world.refused() <= {"25006"}


def test_a_frozen_primary_is_left_for_the_one_that_was_promoted(
    pair: tuple[World, Cluster], row: dict[str, Any]
) -> None:
    """Its kernel still answers. Requests that it didn't answer may be carried out when it thaws, and nothing relies on them."""
    world, standby = pair
    primary = world.cluster
    world.endpoint()

    with ExitStack() as stack:
        nodes = two_nodes(stack, dsn_of_both(primary, standby))
        with world.producers() as producers, killed_at_last(primary):
            world.recorder.wait_for_more(100)
            primary.freeze()
            for node in nodes:
                node.wait_until_says("the server has been silent for 10 seconds")
            producers.cluster = world.cluster = standby
            standby.promote()

            since_promotion = stopwatch()
            with world.producers():
                world.recorder.wait_for_more(1)
                seconds = since_promotion()

            row["scenario"] += f" (first delivery {seconds:.1f} s after the promotion)"
            assert not FULL or seconds < 5 * strain()
            primary.thaw()
            # Senders that were frozen with it keep sending to it; nodes stay where they are.
            with world.producers():
                world.recorder.wait_for_more(100)
        world.drain()

    audit(world, row)


def test_a_standby_takes_over_and_its_nodes_follow(pair: tuple[World, Cluster], row: dict[str, Any]) -> None:
    """By themselves: they know both hosts."""
    world, standby = pair
    primary = world.cluster
    world.endpoint()
    dsn = f"{dsn_of_both(primary, standby)} target_session_attrs=read-write"

    with ExitStack() as stack:
        two_nodes(stack, dsn)
        with world.producers() as producers:
            world.recorder.wait_for_more(100)
            primary.kill()
            producers.cluster = world.cluster = standby
            standby.promote()
            wait_until(lambda: world.value(NODES) == 2, "the nodes")
            world.recorder.wait_for_more(100)
        world.drain()

    audit(world, row)
