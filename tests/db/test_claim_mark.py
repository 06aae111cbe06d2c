"""A claim that begins where an earlier one ended."""

from __future__ import annotations

from typing import Any

from support.queue import Queue


def claim(queue: Queue, limit: int, mark: Any = None) -> list[dict[str, Any]]:
    return queue.rows(
        """
        select * from ulak._claim('w', %s, p_lease => '1 minute', p_mark_endpoint_id => %s,
            p_mark_priority => %s::smallint, p_mark_due_at => %s, p_mark_id => %s)
        """,
        limit,
        *([mark["endpoint_id"], mark["priority"], mark["due_at"], mark["id"]] if mark else [None] * 4),
    )


def test_a_claim_goes_on_behind_the_mark(queue: Queue) -> None:
    queue.endpoint()
    ids = [queue.send() for _ in range(4)]
    (mark,) = claim(queue, 1)

    again = claim(queue, 2, mark)

    assert mark["id"] == ids[0]
    assert [row["id"] for row in again] == ids[1:3]


def test_what_lies_before_the_mark_is_found_when_nothing_is_behind_it(queue: Queue) -> None:
    queue.endpoint()
    first, last = queue.send(), queue.send()
    mark = {**claim(queue, 2)[1]}
    queue.db.execute(
        "update ulak.queue set status = 'pending', locked_by = null, lease_until = null where id = %s", [first]
    )

    assert mark["id"] == last
    assert [row["id"] for row in claim(queue, 5, mark)] == [first]


def test_another_endpoint_waits_for_a_claim_from_the_beginning(queue: Queue) -> None:
    queue.endpoint("a")
    queue.endpoint("b")
    ids = [queue.send("b") for _ in range(3)]
    (mark,) = claim(queue, 1)
    other = queue.send("a")

    assert [row["id"] for row in claim(queue, 1, mark)] == ids[1:2]
    assert {row["id"] for row in claim(queue, 5)} == {other, ids[2]}


def test_an_endpoint_that_was_disabled_gets_nothing_behind_the_mark_either(queue: Queue) -> None:
    queue.endpoint("shop")
    queue.send("shop")
    queue.send("shop")
    (mark,) = claim(queue, 1)
    queue.call("disable_endpoint", "shop")

    assert claim(queue, 5, mark) == []
