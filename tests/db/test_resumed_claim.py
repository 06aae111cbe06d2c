"""A claim of a session begins where the last one ended, while an old snapshot keeps vacuum from removing what was claimed.

Counted are the entries of the index that it reads, never its time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from support.cluster import Cluster, Connect
from support.queue import DB, Claim, Queue
from support.rewritten import rewritten
from support.sessions import wait_until

DONE = 2_000


class Walk:
    """A queue in which DONE messages were delivered that no vacuum can remove, by a session that has looked at them."""

    def __init__(self, cluster: Cluster, database: str, queue: Queue) -> None:
        self.cluster = cluster
        self.database = database
        self.queue = queue

    def passed(self, action: Callable[[], object], queue: Queue | None = None) -> int:
        """Dead entries of the index of waiting messages that it read. In one transaction: at the end of each, the count may begin anew."""
        queue = queue or self.queue
        with queue.db.transaction():
            before = int(queue.value("select ulak_private.passed_entries()"))
            action()
            return int(queue.value("select ulak_private.passed_entries()")) - before

    def look(self) -> None:
        """The next claim looks from the beginning."""
        self._resume_until("1")

    def stay(self) -> None:
        """The next claims resume, however long the test takes."""
        self._resume_until("extract(epoch from clock_timestamp()) + 86400")

    def _resume_until(self, time: str) -> None:
        self.queue.db.execute(f"""
            select set_config('ulak_private.resume_points', jsonb_set(m, '{{until}}', to_jsonb({time}))::text, false)
            from (select nullif(current_setting('ulak_private.resume_points', true), '')::jsonb) m(m)
            where m is not null
        """)  # type: ignore[arg-type]
        self.queue.db.execute(f"""
            select set_config('ulak_private.plain_place', array[m[1], ({time}) * 1000000, m[3], m[4]]::bigint[]::text, false)
            from (select nullif(current_setting('ulak_private.plain_place', true), '')::bigint[]) m(m)
            where m is not null
        """)  # type: ignore[arg-type]


@contextmanager
def lasting_places(db: DB) -> Iterator[None]:
    """Resume points hold for as long as the test says, and not for 10 s at most."""
    with (
        rewritten(db, "ulak_private.resume_points", "between 0 and 10\n", "between 0 and 1000000\n"),
        rewritten(db, "ulak_private.lock_plain", "between 0 and 10000000,", "between 0 and 1000000000000,"),
    ):
        yield


def grow_older(queue: Queue) -> None:
    """Until resume points can be behind all that was sent: they keep 0.1 s behind the clock, because senders may commit out of order."""
    sent_at = queue.value("select clock_timestamp()")
    wait_until(lambda: queue.value("select clock_timestamp() > %s + interval '0.1 s'", sent_at), "a later time")


@pytest.fixture(scope="module")
def held(cluster: Cluster, module_database: str) -> Iterator[str]:
    """A database with a snapshot older than anything that is done in it, and thousands of messages done since."""
    with cluster.connect(module_database) as setup, cluster.connect(module_database) as reader, lasting_places(setup):
        setup.execute("alter table ulak_private.deliveries set (autovacuum_enabled = off)")
        queue = Queue(setup)
        for name in ("a", "shop", "z"):
            queue.endpoint(name)
        reader.execute("begin isolation level repeatable read")
        reader.execute("select count(*) from ulak.queue")
        finish(queue, DONE)
        grow_older(queue)
        yield module_database
        reader.execute("rollback")


@pytest.fixture
def walk(cluster: Cluster, held: str) -> Iterator[Walk]:
    with cluster.connect(held) as connection:
        queue = Queue(connection)
        queue.send()
        finish_one(queue)
        yield Walk(cluster, held, queue)
        finish(queue, 0)


def finish(queue: Queue, count: int) -> None:
    for first in range(0, count, 500):
        queue.send_many(min(500, count - first))
    while claims := queue.claim(500, lease=60):
        queue.value(
            "select ulak_private.settle_many('w', %s, %s, p_now => %s)",
            [claim.id for claim in claims],
            [claim.attempt for claim in claims],
            queue.at(0),
        )


def finish_one(queue: Queue, endpoint: str | None = None) -> Claim:
    claim = queue.claim_one(lease=60, endpoint=endpoint)
    queue.complete(claim)
    return claim


def sent_long_ago(queue: Queue, count: int, **options: Any) -> list[int]:
    ids = [queue.send(**options) for _ in range(count)]
    queue.db.execute(
        """
        update ulak_private.deliveries
        set created_at = created_at - interval '1 minute',
            next_retry_at = case when next_retry_at < 'infinity' then now() - interval '1 minute' else 'infinity' end
        where id = any (%s)
        """,
        [ids],
    )
    return ids


@pytest.mark.parametrize("endpoint", ["shop", None])
def test_a_claim_after_another_passes_nothing_that_was_done_before(walk: Walk, endpoint: str | None) -> None:
    sent = walk.queue.send_many(3)
    taken: list[int] = []
    walk.look()

    first = walk.passed(lambda: taken.append(finish_one(walk.queue, endpoint).id))
    walk.stay()
    second = walk.passed(lambda: taken.append(finish_one(walk.queue, endpoint).id))
    third = walk.passed(lambda: taken.append(finish_one(walk.queue, endpoint).id))

    assert taken == sent
    assert first >= DONE
    assert max(second, third) <= 20


def test_a_claim_that_gets_nothing_passes_it_once(walk: Walk) -> None:
    walk.look()

    assert walk.passed(lambda: walk.queue.claim()) >= DONE
    walk.stay()
    assert walk.passed(lambda: walk.queue.claim()) <= 20
    assert walk.passed(lambda: walk.queue.claim(endpoint="shop")) <= 20


def test_other_endpoints_and_priorities_are_seen_at_once(walk: Walk) -> None:
    walk.stay()
    low, high = walk.queue.send(), walk.queue.send(priority=5)
    others = [walk.queue.send("a"), walk.queue.send("z")]

    found = [walk.queue.claim_one(endpoint="shop").id, walk.queue.claim_one(endpoint="shop").id]
    rest = walk.queue.claim(10)

    assert found == [high, low]
    assert sorted(claim.id for claim in rest) == others


def test_what_is_given_back_is_due_again_at_once(walk: Walk) -> None:
    walk.queue.send()
    claim = walk.queue.claim_one()
    walk.stay()
    walk.queue.db.execute("select ulak.release(%s, 'w', %s, p_now => clock_timestamp())", [claim.id, claim.attempt])

    assert walk.queue.claim_one().id == claim.id


def test_what_another_session_had_locked_is_found_by_the_next_look(walk: Walk) -> None:
    with walk.cluster.connect(walk.database) as connection:
        other = Queue(connection, walk.queue.base)
        first, second = sent_long_ago(walk.queue, 2)
        walk.look()
        connection.execute("begin")
        assert other.claim_one(endpoint="shop").id == first
        assert finish_one(walk.queue, "shop").id == second
        connection.execute("rollback")
    walk.stay()
    assert walk.queue.claim(endpoint="shop") == []

    walk.look()

    assert finish_one(walk.queue, "shop").id == first


def test_the_next_message_of_an_ordering_key_is_found_although_it_was_sent_before(walk: Walk) -> None:
    first, second = sent_long_ago(walk.queue, 2, ordering_key="k")
    others = sent_long_ago(walk.queue, 3)
    walk.look()
    head = walk.queue.claim_one(endpoint="shop")
    taken = walk.queue.claim_one(endpoint="shop")
    walk.stay()
    walk.queue.complete(head)

    assert (head.id, taken.id) == (first, others[0])
    assert [claim.id for claim in walk.queue.claim(5, endpoint="shop")] == [second, *others[1:]]


def test_the_next_message_of_an_ordering_key_is_found_behind_the_place_of_a_named_endpoint(queue: Queue) -> None:
    shop = queue.endpoint("shop")
    first, second = sent_long_ago(queue, 2, ordering_key="k")
    head = queue.claim_one(endpoint="shop")
    assert queue.claim(endpoint="shop") == []
    queue.db.execute(
        """
        select set_config('ulak_private.plain_place', array[%s, n + 9000000, n, 0]::bigint[]::text, false)
        from (select extract(epoch from clock_timestamp()) * 1000000) n(n)
        """,
        [shop],
    )

    queue.complete(head)

    assert (head.id, queue.claim_one(endpoint="shop").id) == (first, second)


def test_a_rolled_back_claim_is_forgotten_with_its_place(walk: Walk) -> None:
    sent = sent_long_ago(walk.queue, 2)
    walk.look()
    with walk.queue.db.transaction(force_rollback=True):
        assert [claim.id for claim in walk.queue.claim(2, endpoint="shop")] == sent

    assert [claim.id for claim in walk.queue.claim(2, endpoint="shop")] == sent


def test_claims_of_a_generation_go_by_their_own_places(walk: Walk) -> None:
    first, second = sent_long_ago(walk.queue, 2)
    walk.look()
    walk.queue.db.execute("update ulak_private.deliveries set generation = 7 where id = %s", [second])

    assert walk.queue.claim_one(endpoint="shop", generation=7).id == second
    assert walk.queue.claim_one(endpoint="shop").id == first


def test_a_healthy_queue_is_always_looked_through_from_the_beginning(queue: Queue) -> None:
    queue.endpoint()
    first, second = queue.send(), queue.send()
    claims = queue.claim(2)
    queue.db.execute(
        "update ulak.queue set status = 'pending', locked_by = null, lease_until = null where id = %s", [first]
    )

    assert [claim.id for claim in claims] == [first, second]
    assert queue.claim_one().id == first


def test_a_forged_resume_point_harms_only_the_claims_of_its_own_session(walk: Walk) -> None:
    walk.queue.db.execute("""set ulak_private.resume_points = '{"until": 1, "places": [{"endpoint_id": 2}]}'""")
    sent = walk.queue.send()

    assert finish_one(walk.queue, "shop").id == sent


def test_claims_of_many_endpoints_that_pass_only_what_was_claimed_before_remember_nothing(connect: Connect) -> None:
    """In a database of its own: these claims pass what any other test has left, too."""
    queue = Queue(connect(autocommit=False))
    for n in range(30):
        queue.endpoint(f"busy {n}")
        queue.send_many(60, f"busy {n}")

    assert [len(queue.claim(480)) for _ in range(3)] == [480, 480, 480]

    assert queue.value("select coalesce(current_setting('ulak_private.resume_points', true), '')") == ""


@pytest.fixture
def kept(cluster: Cluster, queue: Queue) -> Iterator[Walk]:
    """A queue from which vacuum can't remove anything, because all is done by one transaction, and is due since its beginning."""
    for name in ("shop", "store"):
        queue.endpoint(name)
    grow_older(queue)
    with lasting_places(queue.db):
        yield Walk(cluster, "", queue)


def finish_of(queue: Queue, endpoint: str, limit: int) -> None:
    claims = queue.claim(limit, endpoint=endpoint)
    assert len(claims) == limit
    for claim in claims:
        queue.complete(claim)


def test_a_worker_of_urgent_messages_passes_nothing_that_it_has_done_before(kept: Walk) -> None:
    kept.queue.send_many(510, priority=5)
    finish_of(kept.queue, "shop", 500)
    finish_of(kept.queue, "shop", 1)
    kept.stay()

    assert kept.passed(lambda: finish_of(kept.queue, "shop", 1)) <= 20


def test_a_worker_of_usual_messages_passes_the_urgent_ones_that_it_has_done_once(kept: Walk) -> None:
    kept.queue.send_many(501, priority=5)
    kept.queue.send_many(10)
    finish_of(kept.queue, "shop", 500)
    finish_of(kept.queue, "shop", 1)
    kept.look()
    finish_of(kept.queue, "shop", 1)
    kept.stay()

    assert kept.passed(lambda: finish_of(kept.queue, "shop", 1)) <= 20


def test_a_session_that_works_for_two_endpoints_by_name_resumes_in_both(kept: Walk) -> None:
    for endpoint in ("shop", "store"):
        kept.queue.send_many(510, endpoint)
        finish_of(kept.queue, endpoint, 500)
    for endpoint in ("shop", "store", "shop", "store"):
        kept.stay()
        finish_of(kept.queue, endpoint, 1)
    kept.stay()

    assert kept.passed(lambda: finish_of(kept.queue, "shop", 1)) <= 20
    assert kept.passed(lambda: finish_of(kept.queue, "store", 1)) <= 20
