"""One busy endpoint doesn't delay another; within an endpoint priority rules."""

from __future__ import annotations

from collections import Counter

import pytest
from support.queue import Queue


@pytest.fixture(autouse=True)
def endpoints(queue: Queue) -> None:
    for name in ("busy", "small"):
        queue.endpoint(name)


def test_the_single_message_of_another_endpoint_is_in_the_next_claim(queue: Queue) -> None:
    queue.send_many(2000, "busy", priority=10)
    id = queue.send("small", priority=0)

    assert id in [claim.id for claim in queue.claim(10)]


def test_a_claim_of_one_message_leaves_no_endpoint_out(queue: Queue) -> None:
    """Lots are drawn: the chance of missing 200 times is 2 to the minus 200."""
    queue.send_many(500, "busy")
    id = queue.send("small")

    claimed = [queue.claim_one().id for _ in range(200)]

    assert id in claimed


def test_a_claim_smaller_than_the_number_of_endpoints_leaves_none_out(queue: Queue) -> None:
    names = [f"busy {n}" for n in range(10)]
    for name in names:
        queue.endpoint(name)
        queue.send_many(100, name)

    seen = Counter(claim.endpoint for _ in range(100) for claim in queue.claim(2))

    assert seen.keys() == set(names)


def test_busy_endpoints_share_a_claim_evenly(queue: Queue) -> None:
    queue.endpoint("third")
    for name in ("busy", "small", "third"):
        queue.send_many(500, name)

    shares = Counter(claim.endpoint for claim in queue.claim(300))

    assert set(shares.values()) == {100}


def test_what_a_small_endpoint_leaves_goes_to_the_busy_one(queue: Queue) -> None:
    queue.send_many(500, "busy")
    queue.send_many(3, "small")

    assert Counter(claim.endpoint for claim in queue.claim(100)) == {"busy": 97, "small": 3}


def test_endpoints_take_turns_within_a_claim(queue: Queue) -> None:
    queue.send_many(50, "busy")
    queue.send_many(50, "small")

    order = [claim.endpoint for claim in queue.claim(20)]

    assert [set(order[n : n + 2]) for n in range(0, 20, 2)] == [{"busy", "small"}] * 10


def test_within_an_endpoint_priority_rules(queue: Queue) -> None:
    low = queue.send_many(50, "busy", priority=1)
    high = queue.send_many(50, "busy", priority=7)
    queue.send_many(50, "small", priority=10)

    claimed = [claim.id for claim in queue.claim(60) if claim.endpoint == "busy"]

    assert claimed == high[:30]
    assert [claim.id for claim in queue.claim(40, endpoint="busy")] == [*high[30:], *low[:20]]


def test_a_claim_takes_all_of_a_few_messages_of_many_priorities(queue: Queue) -> None:
    for priority in range(11):
        queue.send_many(2, "small", priority=priority)

    assert len(queue.claim(100)) == 22


def test_an_endpoint_that_may_not_be_claimed_takes_no_share(queue: Queue) -> None:
    queue.send_many(200, "busy")
    queue.send_many(200, "small")
    queue.call("disable_endpoint", "small")

    assert Counter(claim.endpoint for claim in queue.claim(100)) == {"busy": 100}


def test_the_workers_own_room_bounds_each_endpoint(queue: Queue) -> None:
    queue.send_many(50, "busy")
    queue.send_many(50, "small")
    (busy, small) = queue.column("select id from ulak.endpoints order by name")

    def claimed(limit: int, room_ids: list[int], rooms: list[int], room: int | None) -> dict[int, int]:
        query = """
            select endpoint_id from ulak._claim(
                'w', %s, p_room_ids => %s::bigint[], p_rooms => %s::integer[], p_room => %s, p_now => %s
            )
        """
        return Counter(queue.column(query, limit, room_ids, rooms, room, queue.at(0)))

    assert claimed(20, [busy], [3], None) == {busy: 3, small: 17}
    assert claimed(20, [busy], [0], 5) == {small: 5}
    assert claimed(20, [], [], 2) == {busy: 2, small: 2}
