"""max_in_flight: over all workers, never more messages of an endpoint are under way."""

from __future__ import annotations

import pytest
from support.queue import Queue


@pytest.fixture(autouse=True)
def shop(queue: Queue) -> int:
    return queue.endpoint(config={"max_in_flight": 3}, policy={"backoff": "fixed", "base_delay_seconds": 10})


def test_no_more_than_the_cap_is_claimed_by_all_workers_together(queue: Queue) -> None:
    queue.send_many(10)

    assert len(queue.claim(2, worker="anna")) == 2
    assert len(queue.claim(10, worker="bert")) == 1
    assert queue.claim(10, worker="carl") == []


def test_every_way_out_of_flight_makes_room(queue: Queue) -> None:
    queue.send_many(10)
    done, failed, given_back = queue.claim(10, lease=60)

    assert queue.claim(10, lease=60) == []
    queue.complete(done)
    assert len(queue.claim(10, lease=60)) == 1
    queue.fail(failed)
    assert len(queue.claim(10, lease=60)) == 1
    queue.release(given_back)
    assert len(queue.claim(10, lease=60)) == 1
    assert queue.claim(10, lease=60) == []
    assert queue.recover(now=60) == 3
    assert len(queue.claim(10, now=60)) == 3


def test_a_lease_that_ran_out_counts_until_it_is_taken_back(queue: Queue) -> None:
    """The request may still be under way."""
    queue.send_many(10)
    queue.claim(10, lease=60)

    # As ulak's own workers claim: those of others look for leases that are over first.
    assert queue.rows("select * from ulak_private.claim('w', 10, p_now => %s)", queue.at(1000)) == []


def test_other_endpoints_are_not_held_up(queue: Queue) -> None:
    queue.endpoint("other")
    queue.send_many(10)
    queue.send_many(10, "other")

    claims = [claim.endpoint for claim in queue.claim(20)]

    assert sorted(claims) == ["other"] * 10 + ["shop"] * 3


def test_a_claim_writes_no_version_of_an_endpoint_with_nothing_but_a_cap(queue: Queue) -> None:
    """What is in flight is counted, and noted nowhere: rows of busy endpoints don't grow old versions."""
    queue.send_many(10)
    before = queue.rows("select xmin::text, ctid::text from ulak.endpoints")

    assert len(queue.claim(10)) == 3

    assert queue.rows("select xmin::text, ctid::text from ulak.endpoints") == before


def test_a_lower_cap_holds_from_the_next_claim_on(queue: Queue) -> None:
    queue.send_many(10)
    first, second, _ = queue.claim(10)
    queue.call("alter_endpoint", "shop", {"max_in_flight": 2})

    queue.complete(first)
    assert queue.claim(10) == []
    queue.complete(second)
    assert len(queue.claim(10)) == 1


def test_without_a_cap_there_is_none(queue: Queue) -> None:
    queue.call("alter_endpoint", "shop", {})
    queue.send_many(50)

    assert len(queue.claim(50)) == 50
