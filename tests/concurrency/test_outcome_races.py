"""The outcome of a message is announced once, and an endpoint that has answered isn't disabled, whichever session comes first."""

from __future__ import annotations

import psycopg
import pytest
from support.queue import Begin, Queue, Sessions
from support.sessions import Running, gather, wait_until_blocked

HOUR = 3600.0


@pytest.fixture
def shop(queue: Queue) -> Queue:
    """`shop` announces everything, and `callbacks` listens."""
    queue.endpoint("shop", {"announce": ["delivered", "dead"]}, {"max_retries": 0})
    queue.endpoint("callbacks")
    for outcome in ("delivered", "dead"):
        queue.call("subscribe", f"ulak.message.{outcome}", "callbacks")
    return queue


def told(queue: Queue) -> list[str]:
    query = "select payload ->> 'status' from ulak.queue q join ulak.endpoints e on e.id = q.endpoint_id where e.name = 'callbacks'"
    return queue.column(query)


def test_a_message_that_recovery_gives_up_is_announced_once_however_late_its_zombie_reports(
    shop: Queue, begin: Begin
) -> None:
    shop.send()
    claim = shop.claim_one(endpoint="shop", lease=60)
    recovery, zombie = begin(), begin()
    assert recovery.recover(now=60) == 1

    report = Running(lambda: zombie.complete(claim, now=61))
    wait_until_blocked(zombie.db, shop.db)
    recovery.db.commit()

    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState):
        report.result()
    zombie.db.rollback()
    assert told(shop) == ["dead"]


def test_a_message_that_its_zombie_settles_first_is_announced_once_and_not_by_recovery(
    shop: Queue, begin: Begin
) -> None:
    shop.send()
    claim = shop.claim_one(endpoint="shop", lease=60)
    zombie = begin()
    zombie.complete(claim, now=61)

    assert shop.recover(now=62) == 0
    zombie.db.commit()
    assert shop.recover(now=62) == 0

    assert told(shop) == ["delivered"]


def test_an_outcome_that_is_rolled_back_is_not_announced(shop: Queue, begin: Begin) -> None:
    shop.send()
    claim = shop.claim_one(endpoint="shop", lease=60)
    worker = begin()
    worker.complete(claim, now=1)
    worker.db.rollback()

    assert told(shop) == []
    shop.complete(claim, now=2)
    assert told(shop) == ["delivered"]


def test_of_zombies_and_sweeps_at_once_each_message_is_announced_once(shop: Queue, sessions: Sessions) -> None:
    shop.send_many(400)
    claims = shop.claim(400, endpoint="shop", lease=60)
    *reporters, first, second = sessions(4)

    def report(session: Queue, mine: int) -> None:
        for claim in claims[mine::2]:
            # A claim that recovery has taken is refused; the sessions are in autocommit mode.
            try:
                session.complete(claim, now=61)
            except psycopg.errors.ObjectNotInPrerequisiteState:
                continue

    gather(
        [
            *(lambda n=n, s=s: report(s, n) for n, s in enumerate(reporters)),  # type: ignore[misc]
            lambda: first.recover(now=61),
            lambda: second.recover(now=61),
        ]
    )
    shop.recover(now=62)

    query = "select payload ->> 'message', count(*) from ulak.queue where payload ? 'message' group by 1"
    counts = dict(shop.db.execute(query).fetchall())
    assert counts == {str(claim.id): 1 for claim in claims}


@pytest.fixture
def broken(queue: Queue) -> Queue:
    """`shop` has failed for ten hours, and maintenance would disable it now."""
    queue.endpoint("shop", {"url": "https://example.com", "disable_after": "10 hours"}, protocol="http")
    queue.db.execute("delete from ulak.endpoint_stats")
    queue.db.execute(
        """
            insert into ulak.endpoint_stats (endpoint_id, minute, failed)
            select id, date_trunc('minute', %s::timestamptz), 30 from ulak.endpoints where name = 'shop'
        """,
        [queue.at(HOUR)],
    )
    return queue


DISABLE = "select ulak_private.disable_broken(%s)"
SUCCEED = "select ulak_private.note_success(array(select id from ulak.endpoints), %s)"


def test_maintenance_waits_for_a_success_and_leaves_the_endpoint_enabled(broken: Queue, begin: Begin) -> None:
    worker, maintenance = begin(), begin()
    worker.value(SUCCEED, worker.at(12 * HOUR))

    look = Running(lambda: maintenance.value(DISABLE, maintenance.at(12 * HOUR)))
    wait_until_blocked(maintenance.db, broken.db)
    worker.db.commit()
    look.result()
    maintenance.db.commit()

    assert broken.circuit("shop")["enabled"]
    assert broken.events("endpoint.disabled") == []


def test_a_success_does_not_wait_for_maintenance_that_disables_the_endpoint(broken: Queue, begin: Begin) -> None:
    maintenance = begin()
    maintenance.value(DISABLE, maintenance.at(12 * HOUR))

    broken.value(SUCCEED, broken.at(12 * HOUR))
    maintenance.db.commit()

    assert not broken.circuit("shop")["enabled"]
    assert broken.events("endpoint.disabled") == ["endpoint.disabled"]


def test_two_runs_of_maintenance_disable_an_endpoint_once(broken: Queue, begin: Begin) -> None:
    first, second = begin(), begin()
    first.value(DISABLE, first.at(12 * HOUR))

    look = Running(lambda: second.value(DISABLE, second.at(12 * HOUR)))
    wait_until_blocked(second.db, broken.db)
    first.db.commit()
    look.result()
    second.db.commit()

    assert broken.events("endpoint.disabled") == ["endpoint.disabled"]
