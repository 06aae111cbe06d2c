"""Finding messages by what their sender knows of them, wherever they are."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import psycopg
import pytest
from support.cluster import Connect
from support.queue import DB, Queue


@pytest.fixture
def queue(queue: Queue) -> Queue:
    queue.endpoint("shop")
    queue.endpoint("other")
    return queue


def find(queue: Queue, **criteria: Any) -> list[dict[str, Any]]:
    places = ", ".join(f"p_{name} => %s" for name in criteria)
    return queue.rows(f"select * from ulak.find_messages({places})", *criteria.values())


def ids(rows: list[dict[str, Any]]) -> list[int]:
    return [row["id"] for row in rows]


def test_the_newest_come_first_up_to_the_limit(queue: Queue) -> None:
    sent = queue.send_many(5)

    assert ids(find(queue)) == sent[::-1]
    assert ids(find(queue, limit=2)) == [sent[4], sent[3]]


def test_each_criterion_alone_and_all_together(queue: Queue) -> None:
    correlation = uuid4()
    queue.send_many(3)
    queue.send("other", idempotency_key="k", correlation_id=uuid4())
    id = queue.send(idempotency_key="k", correlation_id=correlation)
    message_id = queue.message(id)["message_id"]

    everything = {
        "endpoint": "shop", "idempotency_key": "k", "correlation_id": correlation, "message_id": message_id,
        "status": "pending", "since": queue.at(-1),
    }  # fmt: skip
    assert ids(find(queue, correlation_id=correlation)) == [id]
    assert ids(find(queue, message_id=message_id)) == [id]
    assert ids(find(queue, endpoint="shop", idempotency_key="k")) == [id]
    assert len(find(queue, idempotency_key="k")) == 2
    assert len(find(queue, endpoint="shop")) == 4
    assert ids(find(queue, **everything)) == [id]
    assert find(queue, **{**everything, "status": "completed"}) == []
    assert find(queue, **{**everything, "since": queue.at(1)}) == []


def test_in_the_archive_and_among_the_dead_letters_too(queue: Queue) -> None:
    correlation = uuid4()
    sent = [queue.send(payload={"n": n}, correlation_id=correlation) for n in range(4)]
    queue.complete(queue.claim_one())
    letter = queue.bury(sent[1])
    queue.call("cancel", sent[2])

    rows = find(queue, correlation_id=correlation)

    assert [(row["id"], row["status"]) for row in rows] == [
        (sent[3], "pending"), (sent[2], "cancelled"), (sent[1], "failed"), (sent[0], "completed"),
    ]  # fmt: skip
    assert (rows[2]["dlq_id"], rows[2]["dlq_status"], rows[2]["last_error"]) == (
        letter,
        "failed",
        "[PERMANENT] refused",
    )


def test_a_message_that_only_its_dead_letter_knows(queue: Queue) -> None:
    id = queue.send(idempotency_key="k")
    letter = queue.bury(id)
    queue.db.execute("delete from ulak.queue")

    (row,) = find(queue, endpoint="shop", idempotency_key="k")

    assert (row["id"], row["status"], row["dlq_id"]) == (id, "failed", letter)


def test_a_redriven_message_leads_on_to_its_next_cycle(queue: Queue) -> None:
    id = queue.send()
    again = queue.call("redrive_message", queue.bury(id))
    message_id = queue.message(id)["message_id"]

    rows = find(queue, message_id=message_id)

    assert [(row["id"], row["redriven_message_id"]) for row in rows] == [(again, None), (id, again)]


def test_the_archive_is_searched_a_day_back_unless_told_otherwise(queue: Queue) -> None:
    queue.send()
    queue.complete(queue.claim_one())
    queue.db.execute("update ulak.archive set created_at = created_at - interval '25 hours'")
    waiting = queue.send()
    queue.db.execute("update ulak.queue set created_at = created_at - interval '25 hours' where id = %s", [waiting])

    assert ids(find(queue)) == [waiting]
    assert len(find(queue, since=queue.at(-26 * 3600))) == 2


def test_what_makes_no_sense_is_refused(queue: Queue) -> None:
    assert queue.refuses("find_messages", "shpo").message_hint == 'Did you mean "shop"?'
    assert queue.refuses("find_messages", status="lost").sqlstate == "22023"
    assert queue.refuses("find_messages", limit=0).sqlstate == "22023"
    assert queue.refuses("find_messages", limit=10001).sqlstate == "22023"


@pytest.mark.parametrize(
    ("criterion", "index"),
    [("correlation_id = 'c0ffee00-0000-4000-8000-000000000001'", "deliveries_correlation_idx")],
)
def test_the_queue_has_an_index_for_it(queue: Queue, criterion: str, index: str) -> None:
    with queue.db.transaction(force_rollback=True):
        queue.db.execute("set local enable_seqscan = off")
        plan = queue.column(f"explain select from ulak.queue where {criterion}")

    assert any(index in line for line in plan)


def test_an_application_finds_and_explains_without_seeing_what_was_sent(connect: Connect, db: DB) -> None:
    admin = Queue(db)
    admin.endpoint("shop", {"url": "https://example.com/hush-path", "headers": {"x-key": "hush-key"}}, protocol="http")
    id = admin.send(
        payload={"card": "hush-4111222233334444"}, headers={"x-token": "hush-header"}, metadata={"note": "hush-note"}
    )
    admin.fail(admin.claim_one(endpoint="shop"), "no answer")
    application = connect("ulak_application")

    found = application.execute("select f::text from ulak.find_messages('shop') f").fetchall()
    told = application.execute("select e::text from ulak.explain(%s) e", [id]).fetchall()

    assert len(found) == 1 and len(told) > 2
    assert "hush" not in f"{found} {told}"
    for table in ("queue", "archive", "dlq"):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            application.execute(f"select from ulak.{table}")  # type: ignore[arg-type]


def test_dead_letters_are_found_by_endpoint_error_time_and_status(queue: Queue) -> None:
    letters = [
        queue.bury(queue.send(endpoint, {"n": n}), error, now=n)
        for n, (endpoint, error) in enumerate([("shop", "HTTP 503"), ("shop", "HTTP 422"), ("other", "HTTP 503")])
    ]
    queue.call("redrive_message", letters[0])

    def found(**filters: Any) -> list[int]:
        named = ", ".join(f"p_{name} => %s" for name in filters)
        return queue.column(f"select id from ulak.find_letters({named})", *filters.values())

    assert found() == [letters[2], letters[1]]
    assert found(endpoint="shop") == [letters[1]]
    assert found(error_like="%503", status=None) == [letters[2], letters[0]]
    assert found(since=queue.at(1), until=queue.at(2)) == [letters[1]]
    assert found(status="redriven") == [letters[0]]
    assert found(limit=1) == [letters[2]]
    assert "payload" not in queue.rows("select * from ulak.find_letters()")[0]
    assert queue.refuses("find_letters", status="lost").sqlstate == "22023"
