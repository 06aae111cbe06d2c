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


def test_claims_of_one_message_take_turns(queue: Queue) -> None:
    queue.send_many(500, "busy", priority=10)
    id = queue.send("small")

    assert id in [queue.claim_one().id for _ in range(2)]


def test_claims_smaller_than_the_number_of_endpoints_go_round(queue: Queue) -> None:
    names = [f"busy {n}" for n in range(10)]
    for name in names:
        queue.endpoint(name)
        queue.send_many(100, name)

    for _ in range(3):
        seen = Counter(claim.endpoint for _ in range(5) for claim in queue.claim(2))
        assert seen == dict.fromkeys(names, 1)


def test_many_endpoints_are_served_32_at_a_time(queue: Queue) -> None:
    names = {f"busy {n}" for n in range(70)}
    for name in names:
        queue.endpoint(name)
        queue.send_many(20, name)

    served = [{claim.endpoint for claim in queue.claim(500)} for _ in range(3)]

    assert [len(each) for each in served] == [32, 32, 32]
    assert set().union(*served) == names


def test_a_claim_that_was_not_filled_is_followed_by_those_behind_it_too(queue: Queue) -> None:
    names = {f"small {n}" for n in range(40)}
    for name in names:
        queue.endpoint(name)
        queue.send(name)
    first = {claim.endpoint for claim in queue.claim(500)}
    for name in first:
        queue.send(name)

    second = {claim.endpoint for claim in queue.claim(500)}

    assert (len(first), len(second)) == (32, 32)
    assert first | second == names


def test_workers_and_external_workers_go_round_by_themselves(queue: Queue) -> None:
    """Else claims over the endpoints of one kind would move the place of the others."""
    for name in ("busy", "small"):
        queue.send_many(10, name)
    http = [queue.endpoint(f"http {n}", {"url": "https://a.b"}, protocol="http") for n in range(2)]
    for n in range(2):
        queue.send_many(10, f"http {n}")
    worker = "select endpoint_id from ulak_private.claim('w', 1, p_protocols => '{http}', p_now => %s)"

    seen = [(queue.claim_one().endpoint, queue.value(worker, queue.at(0))) for _ in range(4)]

    assert {pull for pull, _ in seen[:2]} == {pull for pull, _ in seen[2:]} == {"busy", "small"}
    assert {id for _, id in seen[:2]} == {id for _, id in seen[2:]} == set(http)


def add_endpoints(queue: Queue, name: str, protocol: str, config: str) -> None:
    """More than a claim visits. Their configs aren't checked, which would take a second."""
    queue.db.execute("alter table ulak.endpoints disable trigger user")
    queue.db.execute(
        "insert into ulak.endpoints (name, protocol, config) select %s || n, %s, %s from generate_series(1, 1300) n",
        [f"{name} ", protocol, config],
    )
    queue.db.execute("alter table ulak.endpoints enable trigger user")


@pytest.mark.parametrize("others", ["not due yet", "open circuits", "low priority"])
def test_thousands_of_blocked_endpoints_do_not_starve_others(queue: Queue, others: str) -> None:
    """A worker's claim visits a thousand of them and ends; the next begins there. An external worker's claim goes on."""
    add_endpoints(queue, "other", "pull", "{}")
    queue.db.execute(
        """
        insert into ulak_private.deliveries (endpoint_id, event_id, priority, next_retry_at)
        select e.id, 0, p, case when %s then %s::timestamptz else now() end
        from ulak.endpoints e, generate_series(0, %s) p where e.name like 'other%%'
        """,
        [others != "open circuits", queue.at(3600), 1 if others == "low priority" else 0],
    )
    if others == "open circuits":
        queue.db.execute(
            "update ulak.endpoints set circuit_state = 'open', circuit_half_open_at = %s where name like 'other%%'",
            [queue.at(3600)],
        )
    queue.endpoint("last")
    first, last = queue.send("busy"), queue.send("last")
    claim = "select id, left_out_others from ulak_private.claim('w', 10, p_now => %s)"

    # With two priorities each of the others is visited twice.
    parts = [(first, True), (None, True), (last, False)] if others == "low priority" else [(first, True), (last, False)]
    rows = [row for _ in parts for row in queue.rows(claim, queue.at(0))]
    assert [(row["id"], row["left_out_others"]) for row in rows] == parts

    first, last = queue.send("busy"), queue.send("last")
    assert sorted(claim.id for claim in queue.claim(10)) == [first, last]


def test_an_external_worker_finds_its_messages_beside_a_thousand_endpoints_of_others(queue: Queue) -> None:
    add_endpoints(queue, "http", "http", '{"url": "https://a.b"}')
    queue.db.execute(
        "insert into ulak_private.deliveries (endpoint_id, event_id) select id, 0 from ulak.endpoints where protocol = 'http'"
    )
    queue.endpoint("last")

    for _ in range(3):
        id = queue.send("last")
        assert queue.claim_one().id == id


@pytest.mark.parametrize("why", ["behind their key", "past their time"])
def test_an_endpoint_with_nothing_that_may_go_out_costs_others_no_turn(queue: Queue, why: str) -> None:
    for n in range(5):
        queue.endpoint(f"vain {n}")
        queue.send(f"vain {n}", ordering_key="k")
        queue.claim_one(endpoint=f"vain {n}")
    for n in range(5):
        if why == "past their time":
            queue.send(f"vain {n}", expires_at=10)
        else:
            queue.send(f"vain {n}", ordering_key="k")
    queue.endpoint("last")
    ids = queue.send_many(3, "last")

    assert [queue.claim_one(now=20).id for _ in range(3)] == ids


def test_what_does_not_divide_is_shared_to_within_one(queue: Queue) -> None:
    names = [f"busy {n}" for n in range(32)]
    for name in names:
        queue.endpoint(name)
        queue.send_many(40, name)

    shares = Counter(claim.endpoint for claim in queue.claim(500))

    assert sorted(set(shares.values())) == [15, 16]
    assert sum(shares.values()) == 500


def test_what_is_left_over_is_shared_to_within_one_as_well(queue: Queue) -> None:
    queue.endpoint("third")
    for name, count in (("busy", 50), ("small", 1), ("third", 50)):
        queue.send_many(count, name)

    shares = Counter(claim.endpoint for claim in queue.claim(14))

    assert sorted(shares.values()) == [1, 6, 7]


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
            select endpoint_id from ulak_private.claim(
                'w', %s, p_rooms => row(%s::bigint[], %s::integer[], %s::integer)::ulak_private.rooms, p_now => %s
            )
        """
        return Counter(queue.column(query, limit, room_ids, rooms, room, queue.at(0)))

    assert claimed(20, [busy], [3], None) == {busy: 3, small: 17}
    assert claimed(20, [busy], [0], 5) == {small: 5}
    assert claimed(20, [], [], 2) == {busy: 2, small: 2}
