"""Archiving is killed in the middle: every message is in the queue or in the archive, none in both, none in neither."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from support.cluster import Cluster
from support.finished import finish, hold_up, value
from support.sessions import Running, wait_until_blocked, wait_until_gone

DB = psycopg.Connection[Any]

COUNT = 50_000
LONG_AGO = datetime(2031, 3, 15, 12, tzinfo=UTC)
NOW = LONG_AGO + timedelta(hours=2)

# Committed batches of 100 before the one that is killed, and messages of that one before the kill.
WHOLE_BATCHES = 30_000
KILLED_AT = WHOLE_BATCHES + 34


EVERYWHERE = """
    select array_agg(id order by id) from (select id from ulak.queue union all select id from ulak.archive) message
"""


def terminate(cluster: Cluster, worker: DB, observer: DB) -> None:
    observer.execute("select pg_terminate_backend(%s)", [worker.info.backend_pid])
    wait_until_gone(worker, observer)


def stop_immediately(cluster: Cluster, worker: DB, observer: DB) -> None:
    cluster.restart("immediate")


@pytest.mark.parametrize("kill", [terminate, stop_immediately])
def test_every_message_is_in_one_place_whenever_archiving_is_killed(
    victim: Cluster, kill: Callable[[Cluster, DB, DB], None]
) -> None:
    victim.install(name := victim.create_database(kill.__name__))
    observer, gate, worker = victim.connect(name), victim.connect(name, autocommit=False), victim.connect(name)
    ids = finish(observer, COUNT, at=LONG_AGO)
    hold_up(observer, gate, LONG_AGO, message=KILLED_AT)
    going = Running(lambda: worker.execute("call ulak.run_maintenance(%s)", [NOW]))
    wait_until_blocked(worker, observer)

    kill(victim, worker, observer)

    with pytest.raises(psycopg.OperationalError):
        going.result()
    gate.close()
    with victim.connect(name) as survivor:
        assert value(survivor, EVERYWHERE) == ids
        # A crash may lose the last commits, since maintenance doesn't wait for the disk; it loses them as a whole.
        archived = value(survivor, "select count(*) from ulak.archive")
        assert 0 < archived <= WHOLE_BATCHES
        assert archived % 100 == 0

        survivor.execute("call ulak.run_maintenance(%s)", [NOW])

        assert value(survivor, EVERYWHERE) == ids
        assert value(survivor, "select count(*) from ulak.queue") == 0
