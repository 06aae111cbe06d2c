"""The harness keeps its promises to the other tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest
from support.cluster import ROLES, WORK, Cluster, Connect, remove_abandoned
from support.files import write_whole
from support.processes import unit_of
from support.sessions import Running, gather, wait_until_blocked


def test_a_role_is_the_session_user_of_its_connection(connect: Connect) -> None:
    for role in ROLES:
        row = (
            connect(role)
            .execute(
                "select session_user::text, pg_has_role(session_user, %s, 'usage'), rolsuper "
                "from pg_roles where rolname = session_user",
                [role],
            )
            .fetchone()
        )

        assert row == (f"test_{role}", True, False)


def test_a_session_is_seen_to_be_blocked(connect: Connect, db: psycopg.Connection[Any]) -> None:
    holder, waiter = connect(autocommit=False), connect()
    holder.execute("select pg_advisory_xact_lock(1)")

    running = Running(lambda: waiter.execute("select pg_advisory_lock(1)"))

    assert wait_until_blocked(waiter, db) == [holder.info.backend_pid]
    holder.commit()
    running.result()


def test_gather_raises_what_a_session_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        gather([lambda: 1, lambda: 1 // 0])


def test_a_killed_cluster_comes_back() -> None:
    cluster = Cluster.create(in_memory=True)
    cluster.execute("create table t as select 1 as n")
    with cluster.connect() as survivor:
        cluster.kill()

        with pytest.raises(psycopg.OperationalError):
            survivor.execute("select 1")

    cluster.start()
    assert cluster.psql("postgres", "select n from t") == "1"
    cluster.remove()
    assert cluster.processes() == []


def test_only_what_a_killed_process_left_is_removed_by_the_next_one() -> None:
    """Several processes may come at once."""
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    left, ours = (Path(tempfile.mkdtemp(prefix="cluster-", dir=WORK)) for _ in range(2))
    for number in range(1000):
        (left / str(number)).touch()
    (ours / "owner").write_text(str(os.getpid()))
    (left / "owner").write_text(str(ended.pid))

    gather([remove_abandoned] * 4)

    assert (left.exists(), ours.exists()) == (False, True)
    Cluster(ours).remove()


def test_a_file_that_others_read_is_never_seen_half_written(tmp_path: Path) -> None:
    file, text = tmp_path / "told", json.dumps(list(range(10_000)))
    write_whole(file, text)
    with ThreadPoolExecutor() as pool:
        writing = pool.submit(lambda: [write_whole(file, text) for _ in range(200)])
        seen = {text}
        while not writing.done():
            seen.add(file.read_text())

    assert seen == {text}
    assert [path.name for path in tmp_path.iterdir()] == ["told"]


@pytest.mark.parametrize("fixture, unit", [("rabbitmq", "RabbitMQ"), ("rehearsal", "minutes"), ("outage", "minutes")])
def test_one_process_runs_all_tests_that_share_something_expensive(
    request: pytest.FixtureRequest, fixture: str, unit: str
) -> None:
    """Of those that run together with this one."""
    asking = [item.nodeid for item in request.session.items if fixture in getattr(item, "fixturenames", ())]

    assert [nodeid for nodeid in asking if unit_of(nodeid) != unit] == []
