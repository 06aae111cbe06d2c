"""What is claimed decides how many rows are read, not what is stored, whatever the planner knows."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from support.cluster import Cluster
from support.queue import DB, Claim, Queue

OTHERS = 20_000

# Beside 200 messages that are due: many that are not, many that may not be claimed, many in flight.
LOAD = f"""
    insert into ulak_private.deliveries (endpoint_id, event_id, status, priority, next_retry_at, expires_at, locked_by, lease_until, ordering_key)
    select e.id, 0, k.status, n %% 3, k.due, k.expires, k.worker, k.lease, k.key
    from generate_series(1, {OTHERS}) n
    cross join (
        values
            ('shop', 'pending', now() + interval '7 days', now() + interval '9 days', null, null::timestamptz, null),
            ('disabled', 'pending', now(), null, null, null, null),
            ('open', 'pending', now(), null, null, null, null),
            ('other', 'processing', now(), null, 'somebody', now() + interval '1 day', null),
            ('other', 'pending', 'infinity', null, null, null, 'k')
    ) k(endpoint, status, due, expires, worker, lease, key)
    join ulak.endpoints e on e.name = k.endpoint
"""

# What the planner knows when a session's plans are made.
STATISTICS = {
    # The queue is empty, and so it was when the session began.
    "of old": "",
    # The queue is full, the statistics were gathered when it was empty.
    "stale": "",
    "none": """
        set allow_system_table_mods = on;
        delete from pg_statistic where starelid in ('ulak_private.deliveries'::regclass, 'ulak.endpoints'::regclass);
        update pg_class set reltuples = -1, relpages = 0
        where oid in (select indexrelid from pg_index where indrelid = 'ulak_private.deliveries'::regclass)
            or oid in ('ulak_private.deliveries'::regclass, 'ulak.endpoints'::regclass);
    """,
    "fresh": "analyze",
}


@pytest.fixture(scope="module")
def old(module_session: DB) -> Queue:
    """A session as old as the queue, which it has seen filling up."""
    queue = Queue(module_session)
    module_session.execute("alter table ulak_private.deliveries set (autovacuum_enabled = off)")
    for name in ("shop", "disabled", "open", "other"):
        queue.endpoint(name, {"circuit_breaker": {"threshold": 1000}}, {"max_retries": 1000})
    module_session.execute(
        "update ulak.endpoints set circuit_state = 'open', circuit_half_open_at = 'infinity' where name = 'open'"
    )
    queue.call("disable_endpoint", "disabled")
    # A few events, not none: of an empty table the planner expects some pages, of a small one that it is read in no time.
    queue.send_many(3)
    module_session.execute("analyze")
    use_everything_once(queue)
    module_session.execute(LOAD.replace("%%", "%"))  # type: ignore[arg-type]
    queue.send_many(300)
    return queue


def use_everything_once(queue: Queue) -> None:
    """So that all plans are made and kept."""
    for way in WAYS:
        queue.send_many(1)
        queue.send(ordering_key="l")
        queue.send(expires_at=1)
        settle(queue, *held(queue, 1), way)
        settle(queue, *held(queue, 1), way)
        queue.expire(now=2)
    queue.recover(now=600)
    queue.db.execute("delete from ulak.queue")
    queue.db.execute("delete from ulak.dlq")


@pytest.fixture(scope="module", params=STATISTICS)
def queue(request: pytest.FixtureRequest, cluster: Cluster, module_database: str, old: Queue) -> Iterator[Queue]:
    """A session whose plans are made with these statistics. They follow each other in this order."""
    if request.param == "of old":
        yield old
    else:
        if STATISTICS[request.param]:
            cluster.execute(STATISTICS[request.param], module_database)
        with cluster.connect(module_database) as connection:
            yield Queue(connection)
    old.recover(now=6000)


READ = """
    select sum(seq_tup_read + coalesce(idx_tup_fetch, 0))
    from pg_stat_xact_user_tables
    where relid = 'ulak_private.deliveries'::regclass
        or relid in (select inhrelid from pg_inherits where inhparent = 'ulak_private.events'::regclass)
"""


def rows_read(queue: Queue, action: Callable[[], object]) -> int:
    """Rows that were fetched of messages and of what was sent, by whatever path. In one transaction, which counts what it reads itself:
    other sessions may tell later what they have read before."""
    with queue.db.transaction():
        before = int(queue.value(READ))
        action()
        return int(queue.value(READ)) - before


def held(queue: Queue, count: int) -> tuple[list[int], list[int]]:
    claims = queue.claim(count, endpoint="shop", lease=60)
    assert len(claims) == count
    return [claim.id for claim in claims], [claim.attempt for claim in claims]


def test_a_claim_reads_a_few_rows_for_each_that_it_takes(queue: Queue) -> None:
    claims: list[object] = []

    read = rows_read(queue, lambda: claims.extend(queue.claim(10, lease=60)))

    assert len(claims) == 10
    assert 10 <= read <= 100


SETTLE = "select ulak_private.settle_many('w', %s, %s, array_fill(%s::text, array[cardinality(%s)]), p_now => %s)"
WAYS: dict[str, str | None] = {
    "complete": None,
    "fail": "[RETRYABLE] 503",
    "bury": "[PERMANENT] 400",
    "release": None,
    "heartbeat": None,
}


def settle(queue: Queue, ids: list[int], attempts: list[int], way: str) -> list[int]:
    if way in ("release", "heartbeat"):
        statement = f"select ulak_private.{way}_many('w', %s, %s, '60 s', %s)"
        return list(queue.value(statement, ids, attempts, queue.at(0)))
    return list(queue.value(SETTLE, ids, attempts, WAYS[way], ids, queue.at(0)))


@pytest.mark.parametrize("way", WAYS)
def test_settling_reads_what_it_settles(queue: Queue, way: str) -> None:
    ids, attempts = held(queue, 10)
    done: list[int] = []

    read = rows_read(queue, lambda: done.extend(settle(queue, ids, attempts, way)))

    assert sorted(done) == sorted(ids)
    assert 10 <= read <= 150


def test_recovery_reads_what_it_recovers(queue: Queue) -> None:
    held(queue, 10)
    recovered: list[int] = []

    read = rows_read(queue, lambda: recovered.append(queue.recover(now=600)))

    assert recovered[0] >= 10
    assert read <= recovered[0] * 15


def test_expiry_reads_what_it_expires(queue: Queue) -> None:
    queue.send(expires_at=10)

    read = rows_read(queue, lambda: queue.expire(now=20))

    assert 1 <= read <= 20


def test_claiming_and_settling_the_head_of_a_key_reads_a_few_rows(queue: Queue) -> None:
    """Beside many messages of another key."""
    for _ in range(3):
        queue.send("shop", ordering_key="l", priority=10)
    claims: list[Claim] = []
    read = rows_read(queue, lambda: claims.extend(queue.claim(1, endpoint="shop", lease=60)))
    (claim,) = claims
    assert claim.ordering_key == "l"
    assert 1 <= read <= 30

    read = rows_read(queue, lambda: queue.complete(claim))

    assert 1 <= read <= 30
    queue.db.execute("delete from ulak.queue where ordering_key = 'l'")


def test_recovery_that_was_planned_for_an_empty_queue_reads_nothing_of_a_full_one(
    database: str, cluster: Cluster
) -> None:
    with cluster.connect(database) as connection:
        queue = Queue(connection)
        queue.endpoint("shop")
        connection.execute("alter table ulak_private.deliveries set (autovacuum_enabled = off)")
        connection.execute("vacuum analyze ulak_private.deliveries")
        for _ in range(6):
            queue.recover(now=0)
        queue.send_many(5000)
        recovered: list[int] = []

        read = rows_read(queue, lambda: recovered.append(queue.recover(now=0)))

    assert recovered == [0]
    assert read <= 20
