"""A claim that begins where an earlier one of the same endpoint ended."""

from __future__ import annotations

from typing import Any

from support.queue import Queue


def claim(queue: Queue, limit: int, endpoint_id: int | None = None, behind: Any = None) -> list[dict[str, Any]]:
    return queue.rows(
        """
        select * from ulak._claim('w', %s, p_lease => '1 minute', p_endpoint_ids => %s::bigint[],
            p_resume => case when %s then row(%s::smallint, %s::timestamptz, %s::bigint + 1)::ulak._place end)
        """,
        limit,
        None if endpoint_id is None else [endpoint_id],
        behind is not None,
        *([behind["priority"], behind["due_at"], behind["id"]] if behind else [None] * 3),
    )


def ids(rows: list[dict[str, Any]]) -> list[int]:
    return [row["id"] for row in rows]


def give_back(queue: Queue, id: int) -> None:
    queue.db.execute(
        "update ulak.queue set status = 'pending', locked_by = null, lease_until = null where id = %s", [id]
    )


def test_a_claim_goes_on_behind_the_last_one(queue: Queue) -> None:
    shop = queue.endpoint()
    sent = [queue.send() for _ in range(4)]
    (last,) = claim(queue, 1, shop)

    again = claim(queue, 2, shop, last)

    assert last["id"] == sent[0]
    assert ids(again) == sent[1:3]


def test_what_lies_before_is_not_looked_at(queue: Queue) -> None:
    shop = queue.endpoint()
    first, last = queue.send(), queue.send()
    (_, end) = claim(queue, 2, shop)
    give_back(queue, first)

    assert end["id"] == last
    assert claim(queue, 5, shop, end) == []
    assert ids(claim(queue, 5, shop)) == [first]


def test_lower_priorities_lie_behind_it(queue: Queue) -> None:
    shop = queue.endpoint()
    low = queue.send(priority=1)
    first, second = queue.send(priority=5), queue.send(priority=5)
    (end,) = claim(queue, 1, shop)

    assert end["id"] == first
    assert ids(claim(queue, 5, shop, end)) == [second, low]


def test_other_endpoints_wait_for_a_claim_that_goes_round(queue: Queue) -> None:
    queue.endpoint("a")
    shop = queue.endpoint("b")
    sent = [queue.send("b") for _ in range(3)]
    (end,) = claim(queue, 1, shop)
    other = queue.send("a")

    assert ids(claim(queue, 1, shop, end)) == sent[1:2]
    assert set(ids(claim(queue, 5))) == {other, sent[2]}


def test_an_endpoint_that_was_disabled_gets_nothing_there_either(queue: Queue) -> None:
    shop = queue.endpoint()
    queue.send()
    queue.send()
    (end,) = claim(queue, 1, shop)
    queue.call("disable_endpoint", "shop")

    assert claim(queue, 5, shop, end) == []


def test_a_claim_tells_whether_an_endpoint_may_have_more(queue: Queue) -> None:
    queue.endpoint("a")
    queue.endpoint("b")
    queue.send_many(5, "a")
    queue.send_many(1, "b")

    assert {(row["priority"], row["may_have_more"]) for row in claim(queue, 10)} == {(0, False)}
    queue.send_many(5, "a")
    queue.send_many(1, "b")
    found = {row["endpoint_id"]: row["may_have_more"] for row in claim(queue, 4)}
    assert [found[id] for id in queue.column("select id from ulak.endpoints order by name")] == [True, False]
