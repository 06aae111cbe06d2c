"""A worker is killed while what it settles moves to the archive: every message is in the queue or in the archive, none in both, none in neither."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from support.cluster import Cluster
from support.finished import hold_up, value
from support.messages import insert_messages
from support.sessions import Running, wait_until_blocked, wait_until_gone

DB = psycopg.Connection[Any]

COUNT = 10_000
BATCH = 1000
LONG_AGO = datetime(2031, 3, 15, 12, tzinfo=UTC)
NOW = LONG_AGO + timedelta(hours=2)

# Messages of committed batches before the one that is killed, and of that one before the kill.
SETTLED = 6000
KILLED_AT = SETTLED + 340

SETTLE = "select ulak_private.settle_many('w', %s, array_fill(1, array[cardinality(%s)]), p_now => %s)"

EVERYWHERE = """
    select array_agg(id order by id) from (select id from ulak.queue union all select id from ulak.archive) message
"""


def settle(worker: DB, ids: list[int]) -> None:
    for first in range(0, len(ids), BATCH):
        batch = ids[first : first + BATCH]
        worker.execute(SETTLE, [batch, batch, NOW])


def terminate(cluster: Cluster, worker: DB, observer: DB) -> None:
    observer.execute("select pg_terminate_backend(%s)", [worker.info.backend_pid])
    wait_until_gone(worker, observer)


def stop_immediately(cluster: Cluster, worker: DB, observer: DB) -> None:
    cluster.restart("immediate")


@pytest.mark.parametrize("kill", [terminate, stop_immediately])
def test_every_message_is_in_one_place_whenever_settling_is_killed(
    victim: Cluster, kill: Callable[[Cluster, DB, DB], None]
) -> None:
    victim.install(name := victim.create_database(kill.__name__))
    observer, gate, worker = victim.connect(name), victim.connect(name, autocommit=False), victim.connect(name)
    endpoint = value(observer, "select ulak.create_endpoint('shop', 'pull', '{}')")
    ids = insert_messages(
        observer,
        COUNT,
        created_at=LONG_AGO,
        endpoint_id=endpoint,
        status="processing",
        attempts=1,
        locked_by="w",
        lease_until=NOW,
    )
    hold_up(observer, gate, LONG_AGO, ids[KILLED_AT])
    going = Running(lambda: settle(worker, ids))
    wait_until_blocked(worker, observer)

    kill(victim, worker, observer)

    with pytest.raises(psycopg.OperationalError):
        going.result()
    gate.close()
    with victim.connect(name) as survivor:
        assert value(survivor, EVERYWHERE) == ids
        assert value(survivor, "select array_agg(id order by id) from ulak.archive") == ids[:SETTLED]

        settle(survivor, ids)

        assert value(survivor, EVERYWHERE) == ids
        assert value(survivor, "select count(*) from ulak.queue") == 0
