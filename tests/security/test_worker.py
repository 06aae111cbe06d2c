"""What the worker's login must not be able to do, although it delivers everything."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from support.cluster import Connect
from support.errors import refused

DB = psycopg.Connection[Any]


@pytest.fixture
def worker(db: DB, connect: Connect) -> DB:
    db.execute("select ulak.create_endpoint('shop', 'pull', '{}')")
    db.execute("select ulak.send('shop', '1', p_expires_at => now() + interval '1 hour')")
    db.execute("select ulak.send('shop', '2', p_scheduled_at => now() + interval '1 hour')")
    db.execute("select ulak.send('shop', '3', p_priority => 9)")
    db.execute("select ulak.claim('theirs', 1)")
    return connect("ulak_worker")


@pytest.mark.parametrize(
    "statement",
    [
        "select * from ulak.claim('w', 10, p_now => now() + interval '1 year')",
        "select * from ulak_private.claim('w', 10, p_now => now() + interval '1 year')",
        "select * from ulak_private.worker_turn('w', p_now => now() + interval '1 year')",
        "select * from ulak_private.claim_new('w', 0, null, 1, '1 s', null, null, now() + interval '1 year')",
        "select ulak.heartbeat(3, 'theirs', 1, p_now => now() - interval '1 year')",
        "select ulak.complete(3, 'theirs', 1, p_now => now() - interval '1 year')",
        "select ulak.fail(3, 'theirs', 1, 'no', p_now => now() + interval '1 year')",
        "select ulak.release(3, 'theirs', 1, p_now => now() + interval '1 year')",
        "select ulak_private.settle_many('theirs', '{3}', '{1}', p_now => now() + interval '1 year')",
        "select ulak_private.release_many('theirs', '{3}', '{1}', '0', now() + interval '1 year')",
        "select ulak_private.heartbeat_many('theirs', '{3}', '{1}', p_now => now() - interval '1 year')",
        "select ulak.recover_stale_messages(now() + interval '1 year')",
        "select ulak.mark_expired_messages(now() + interval '1 year')",
        "select ulak.update_circuit_breaker(1, false, now() + interval '1 year')",
        "select * from ulak_private.maintenance_step('expire', now(), now(), now() + interval '1 year')",
        "call ulak.run_maintenance(now() + interval '100 years')",
    ],
)
def test_it_cannot_bring_a_clock_of_its_own(db: DB, worker: DB, statement: str) -> None:
    before = db.execute("select q::text from ulak.queue q order by id").fetchall()

    denied = refused(worker, statement)

    assert (denied.sqlstate, denied.message_primary) == ("42501", "only an administrator may set p_now")
    assert db.execute("select q::text from ulak.queue q order by id").fetchall() == before


def test_it_cannot_drop_the_archive_by_a_clock_of_its_own(db: DB, worker: DB) -> None:
    months = "select count(*) from ulak_private.month_partitions where parent = 'ulak_private.archived'::regclass"
    before = db.execute(months).fetchone()

    refused(
        worker,
        "select * from ulak_private.maintenance_step('archive_retention', now(), '-infinity', now() + interval '50 years')",
    )

    assert db.execute(months).fetchone() == before


def test_a_time_that_isnt_one_is_refused_to_everybody(db: DB, worker: DB) -> None:
    for session in (worker, db):
        for time in ("infinity", "-infinity"):
            assert refused(session, "select ulak.mark_expired_messages(%s)", time).sqlstate == "22023"


def test_without_a_clock_of_its_own_it_does_its_work(db: DB, worker: DB) -> None:
    worker.execute("call ulak.run_maintenance()")
    worker.execute("select ulak.complete(3, 'theirs', 1)")

    assert db.execute("select status from ulak.messages where id = 3").fetchone() == ("completed",)
    assert db.execute("select count(*) from ulak.maintenance_status where state = 'failed'").fetchone() == (0,)


def test_what_it_sets_for_its_own_sessions_is_named_by_doctor(db: DB) -> None:
    """PostgreSQL lets a role that can log in set these for itself."""
    with db.transaction(force_rollback=True):
        db.execute("set local role ulak_worker")
        db.execute("alter role ulak_worker set search_path = evil, pg_catalog")
        db.execute("reset role")

        found = db.execute("""select finding, fix from ulak.doctor() where "check" = 'roles'""").fetchall()

    assert found == [
        (
            "role ulak_worker begins its sessions with search_path=evil, pg_catalog",
            "alter role ulak_worker reset search_path;",
        )
    ]
