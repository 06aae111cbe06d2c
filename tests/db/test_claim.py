"""A claim leases what is due, in its order, and nothing else."""

from __future__ import annotations

import math
from uuid import uuid4

import psycopg
import pytest
from psycopg.types.json import Jsonb
from support.cluster import Connect
from support.queue import Queue

pytestmark = pytest.mark.usefixtures("shop")


def test_a_claim_is_a_lease(queue: Queue) -> None:
    id = queue.send()

    claim = queue.claim_one(worker="anna", lease=60, now=5)

    message = queue.message(id)
    assert (claim.id, claim.attempt, claim.endpoint) == (id, 1, "shop")
    assert claim.lease_until == message["lease_until"] == queue.at(65)
    assert message["status"] == "processing"
    assert message["attempts"] == 1
    assert message["retry_count"] == 0
    assert message["locked_by"] == "anna"
    assert message["processing_started_at"] == message["updated_at"] == queue.at(5)


def test_a_claim_shows_the_whole_message(queue: Queue) -> None:
    correlation = uuid4()
    id = queue.send(
        payload={"order": 7},
        priority=3,
        correlation_id=correlation,
        idempotency_key="once",
        ordering_key="customer 1",
        expires_at=600,
        headers={"x-shop": "a"},
        metadata={"trace": 9},
    )

    claim = queue.claim_one(lease=30)

    message = queue.message(id)
    assert claim._asdict() == {
        "id": id,
        "message_id": message["message_id"],
        "attempt": 1,
        "endpoint": "shop",
        "payload": {"order": 7},
        "headers": {"x-shop": "a"},
        "metadata": {"trace": 9},
        "correlation_id": correlation,
        "ordering_key": "customer 1",
        "idempotency_key": "once",
        "priority": 3,
        "created_at": queue.at(0),
        "expires_at": queue.at(600),
        "lease_until": queue.at(30),
    }


def test_a_lease_that_is_not_named_is_that_of_the_setting(queue: Queue) -> None:
    queue.call("configure", "stale_recovery_timeout", "77")
    queue.send()

    assert queue.claim_one().lease_until == queue.at(77)


def test_what_is_claimed_is_not_claimed_again(queue: Queue) -> None:
    queue.send()
    queue.claim_one(lease=86_400)

    assert queue.claim(10, now=86_000) == []


def test_messages_come_by_priority_then_due_time_then_id(queue: Queue) -> None:
    low_first = queue.send(priority=0)
    low_second = queue.send(priority=0)
    late = queue.send(priority=5, scheduled_at=20)
    early = queue.send(priority=5, scheduled_at=10)
    high = queue.send(priority=10, scheduled_at=30)

    claimed = [claim.id for claim in queue.claim(10, now=30)]

    assert claimed == [high, early, late, low_first, low_second]


def test_one_by_one_they_come_in_the_same_order(queue: Queue) -> None:
    low, high, higher = (queue.send(priority=priority) for priority in (0, 4, 9))

    assert [queue.claim_one().id for _ in range(3)] == [higher, high, low]


def test_a_scheduled_message_waits_for_its_time(queue: Queue) -> None:
    queue.send(scheduled_at=60)

    assert queue.claim(now=59.999) == []
    assert len(queue.claim(now=60)) == 1


def test_an_expired_message_is_not_claimed(queue: Queue) -> None:
    queue.send(expires_at=60)

    assert queue.claim(now=60) == []
    assert len(queue.claim(now=59.999)) == 1


def test_expired_messages_do_not_hide_the_next_ones(queue: Queue) -> None:
    for _ in range(20):
        queue.send(expires_at=60)
    alive = queue.send()

    assert [claim.id for claim in queue.claim(5, now=61)] == [alive]


def test_the_limit_is_kept(queue: Queue) -> None:
    ids = queue.send_many(10)

    assert [claim.id for claim in queue.claim(4)] == ids[:4]
    assert [claim.id for claim in queue.claim(100)] == ids[4:]


def test_one_endpoint_can_be_asked_for(queue: Queue) -> None:
    queue.endpoint("other")
    queue.send("shop")
    wanted = queue.send("other")

    assert [claim.id for claim in queue.claim(10, endpoint="other")] == [wanted]
    assert queue.claim(10, endpoint="other") == []


def test_http_endpoints_are_left_to_the_worker_unless_they_are_named(queue: Queue) -> None:
    queue.endpoint("web", {"url": "https://example.com"}, protocol="http")
    id = queue.send("web")

    assert queue.claim(10) == []
    assert [claim.id for claim in queue.claim(10, endpoint="web")] == [id]


def test_one_generation_can_be_asked_for(queue: Queue) -> None:
    ids = queue.send_many(3)
    queue.db.execute("update ulak.queue set generation = 2 where id = %s", [ids[1]])

    assert queue.claim(10, generation=3) == []
    assert [claim.id for claim in queue.claim(10, generation=2)] == [ids[1]]
    assert [claim.id for claim in queue.claim(10)] == [ids[0], ids[2]]


def test_only_the_head_of_an_ordering_key_is_claimed(queue: Queue) -> None:
    first = queue.send(ordering_key="k")
    second = queue.send(ordering_key="k", priority=10)
    other = queue.send(ordering_key="l")

    claims = queue.claim(10, lease=2000)

    assert [claim.id for claim in claims] == [first, other]
    assert queue.claim(10, now=1000) == []
    queue.complete(claims[0])
    assert [claim.id for claim in queue.claim(10)] == [second]


def test_a_head_that_waits_for_its_retry_holds_the_others_back(queue: Queue) -> None:
    first = queue.send(ordering_key="k")
    second = queue.send(ordering_key="k")
    queue.fail(queue.claim_one(), retry_after=100)

    assert queue.claim(10, now=99) == []
    claim = queue.claim_one(now=100)
    assert claim.id == first
    queue.complete(claim, now=101)
    assert queue.claim_one(now=101).id == second


def test_a_scheduled_head_holds_the_others_back(queue: Queue) -> None:
    first = queue.send(ordering_key="k", scheduled_at=50)
    queue.send(ordering_key="k")

    assert queue.claim(10, now=49) == []
    assert [claim.id for claim in queue.claim(10, now=50)] == [first]


def test_the_same_key_on_another_endpoint_is_another_key(queue: Queue) -> None:
    queue.endpoint("other")
    ids = {queue.send("shop", ordering_key="k"), queue.send("other", ordering_key="k")}

    assert {claim.id for claim in queue.claim(10)} == ids


def test_a_message_queued_as_due_behind_its_head_is_not_claimed(queue: Queue) -> None:
    """Senders at repeatable read do so: their snapshot may show a head that has gone."""
    queue.send(ordering_key="k", scheduled_at=100)
    second = queue.send(ordering_key="k")
    queue.db.execute("update ulak.queue set next_retry_at = now() where id = %s", [second])

    assert queue.claim(10, now=99) == []


def test_a_disabled_endpoint_is_skipped(queue: Queue) -> None:
    queue.endpoint("other")
    queue.send("shop")
    id = queue.send("other")
    queue.call("disable_endpoint", "shop")

    assert [claim.id for claim in queue.claim(10)] == [id]
    assert queue.claim(10, endpoint="shop") == []


def test_aging_lets_an_old_message_pass_a_younger_one_of_higher_priority(queue: Queue) -> None:
    queue.call("configure", "priority_aging", "60")
    old = queue.send(priority=0)
    young = queue.send(priority=2, scheduled_at=180)

    assert [claim.id for claim in queue.claim(10, now=180)] == [old, young]


def test_without_aging_priority_rules_whatever_the_age(queue: Queue) -> None:
    old = queue.send(priority=0)
    young = queue.send(priority=2, scheduled_at=180)

    assert [claim.id for claim in queue.claim(10, now=180)] == [young, old]


def test_a_claim_at_a_time_a_little_earlier_than_the_last_one_works(queue: Queue) -> None:
    queue.send_many(2)
    queue.claim_one(now=10)

    claim = queue.claim_one(now=9.5, lease=30)

    assert claim.lease_until == queue.at(39.5)
    queue.complete(claim, now=9.4)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"worker": ""}, "name"),
        ({"worker": None}, "name"),
        ({"worker": "w", "limit": 0}, "limit"),
        ({"worker": "w", "limit": 10_001}, "limit"),
        ({"worker": "w", "lease": "0 s"}, "lease"),
        ({"worker": "w", "lease": "1 day 1 s"}, "lease"),
        ({"worker": "w", "generation": 0}, "generation"),
    ],
)
def test_a_claim_that_makes_no_sense_is_refused(queue: Queue, arguments: dict[str, object], words: str) -> None:
    worker = arguments.pop("worker")

    error = queue.refuses("claim", worker, **arguments)

    assert error.sqlstate == "22023"
    assert words in (error.message_primary or "")


def test_an_unknown_endpoint_is_named_with_a_guess(queue: Queue) -> None:
    error = queue.refuses("claim", "w", 1, "shoop")

    assert error.sqlstate == "42704"
    assert "shop" in (error.message_hint or "")


def test_a_message_that_never_becomes_due_costs_nothing(queue: Queue) -> None:
    """What waits behind its key is parked by the first claim that meets it, at infinity, beyond every claim's range."""
    ids = [queue.send(ordering_key="k") for _ in range(3)]

    (head,) = queue.claim(10)
    queue.release(head)

    assert head.id == ids[0]
    assert math.isfinite(queue.due_in(ids[0]))
    assert queue.column("select next_retry_at::text from ulak.queue where id > %s", ids[0]) == ["infinity"] * 2


def test_claim_is_for_workers(connect: Connect) -> None:
    connect("ulak_worker").execute("select * from ulak.claim('w')")

    for role in ("ulak_application", "ulak_monitor", "nobody"):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            connect(role).execute("select * from ulak.claim('w')")


def test_a_claim_at_repeatable_read_takes_nothing_that_another_has_taken(connect: Connect) -> None:
    """Its snapshot is old, so it either finds what is free or fails with 40001; it never takes a message twice."""
    first, second = connect(), connect(autocommit=False)
    first.execute("select ulak.create_endpoint('shop', 'pull', '{}')")
    first.execute("select ulak.send_batch('shop', array_fill(%s::jsonb, array[4]))", [Jsonb({})])
    second.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    second.execute("select 1")
    taken = {row[0] for row in first.execute("select id from ulak.claim('first', 2)")}

    try:
        own = {row[0] for row in second.execute("select id from ulak.claim('second', 4)")}
        second.commit()
    except psycopg.errors.SerializationFailure:
        second.rollback()
        own = {row[0] for row in second.execute("select id from ulak.claim('second', 4)")}
        second.commit()

    assert len(taken) == len(own) == 2
    assert taken.isdisjoint(own)
