"""Dead letters go back into the queue as new messages, each once."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb
from support.queue import Queue


@pytest.fixture(autouse=True)
def shop(queue: Queue) -> int:
    return queue.endpoint(policy={"max_retries": 0})


def redrive(queue: Queue, **options: Any) -> dict[str, Any]:
    places = ", ".join(f"p_{name} => %s" for name in options)
    (row,) = queue.rows(f"select * from ulak.redrive({places})", *options.values())
    return row


def waiting(queue: Queue) -> list[int]:
    return queue.column("select (payload -> 'n')::integer from ulak.queue where status = 'pending' order by id")


def buried(queue: Queue, count: int, endpoint: str = "shop", **options: Any) -> list[int]:
    """Letters whose payloads are numbered from 1; their ids."""
    return [queue.bury(queue.send(endpoint, {"n": n}, **options), now=n) for n in range(1, count + 1)]


def test_a_redriven_message_is_a_new_one_with_the_old_content(queue: Queue) -> None:
    old_id = queue.send(
        payload={"order": 7},
        priority=4,
        correlation_id="6d8de26b-3e3e-4a1c-8f5f-0a3c5e0c5f3a",
        idempotency_key="once",
        ordering_key="k",
        expires_at=600,
        headers={"x-shop": "a"},
        metadata={"trace": 9},
    )
    queue.fail(queue.claim_one(now=1), now=2)
    letter = queue.dead(old_id)

    new_id = queue.call("redrive_message", letter["id"], now=queue.at(1000))

    old, new = queue.message(old_id), queue.message(new_id)
    kept = ["endpoint_id", "message_id", "payload", "priority", "correlation_id", "ordering_key", "headers", "metadata"]
    assert {name: new[name] for name in kept} == {name: old[name] for name in kept}
    fresh = [
        "expires_at",
        "idempotency_key",
        "payload_hash",
        "last_error",
        "first_failed_at",
        "failed_at",
        "scheduled_at",
        "locked_by",
    ]
    assert [new[name] for name in fresh] == [None] * len(fresh)
    assert (new["status"], new["attempts"], new["retry_count"]) == ("pending", 0, 0)
    assert new["created_at"] == queue.at(1000)
    assert queue.claim_one(now=1000).id == new_id
    assert old["status"] == "failed"


def test_the_letter_stays_as_the_audit_trail(queue: Queue) -> None:
    (letter_id,) = buried(queue, 1)

    new_id = queue.call("redrive_message", letter_id, "anna", queue.at(50))

    (letter,) = queue.rows("select * from ulak.dlq")
    assert letter["status"] == "redriven"
    assert (letter["redriven_by"], letter["redriven_at"]) == ("anna", queue.at(50))
    assert letter["redriven_message_id"] == new_id
    (event,) = queue.rows("select * from ulak.event_log where event = 'message.redriven'")
    assert (event["message_id"], event["endpoint_name"], event["created_at"]) == (new_id, "shop", queue.at(50))
    assert event["detail"] == {"dlq_id": letter_id, "original_message_id": letter["original_message_id"], "by": "anna"}


def test_a_redrive_is_recorded_for_the_session_user_unless_another_is_named(queue: Queue) -> None:
    (letter_id,) = buried(queue, 1)

    queue.call("redrive_message", letter_id)

    assert queue.value("select redriven_by from ulak.dlq") == "postgres"


def test_a_letter_is_redriven_once(queue: Queue) -> None:
    (letter_id,) = buried(queue, 1)
    new_id = queue.call("redrive_message", letter_id, "anna")

    error = queue.refuses("redrive_message", letter_id)

    assert error.sqlstate == "55000"
    assert "anna" in (error.message_detail or "")
    assert str(new_id) in (error.message_detail or "")
    assert waiting(queue) == [1]


def test_a_letter_that_does_not_exist_is_refused(queue: Queue) -> None:
    assert queue.refuses("redrive_message", 999_999_999).sqlstate == "P0002"


def test_a_letter_whose_endpoint_was_dropped_is_refused(queue: Queue) -> None:
    (letter_id,) = buried(queue, 1)
    queue.db.execute("delete from ulak.endpoints")

    error = queue.refuses("redrive_message", letter_id)

    assert error.sqlstate == "42704"
    assert "shop" in (error.message_detail or "")
    assert redrive(queue)["messages"] == 0


def test_a_redriven_message_has_its_whole_budget_again(queue: Queue) -> None:
    queue.db.execute("update ulak.endpoints set retry_policy = '{\"max_retries\": 1}'")
    id = queue.send()
    for now in (0, 100):
        queue.fail(queue.claim_one(now=now), now=now)
    new_id = queue.call("redrive_message", queue.dead(id)["id"], now=queue.at(200))

    queue.fail(queue.claim_one(now=200), now=200)

    assert queue.status(new_id) == "pending"


def test_an_endpoint_is_redriven_in_the_order_of_creation(queue: Queue) -> None:
    queue.endpoint("other")
    first, second, third = (queue.send(payload={"n": n}) for n in (1, 2, 3))
    for id in (third, first, second):
        queue.bury(id)
    queue.bury(queue.send("other", {"n": 9}))

    assert queue.call("redrive_endpoint", "shop") == 3

    assert waiting(queue) == [1, 2, 3]
    assert [claim.payload["n"] for claim in queue.claim(10, now=1)] == [1, 2, 3]
    assert queue.call("redrive_endpoint", "shop") == 0


@pytest.mark.parametrize("name", ["shoop", None])
def test_an_unknown_endpoint_is_refused(queue: Queue, name: str | None) -> None:
    assert queue.refuses("redrive_endpoint", name).sqlstate == "42704"
    assert queue.refuses("redrive", "shoop").sqlstate == "42704"


def test_all_are_redriven(queue: Queue) -> None:
    queue.endpoint("other")
    buried(queue, 2)
    buried(queue, 3, "other")

    assert queue.call("redrive_all") == 5
    assert queue.call("redrive_all") == 0


# Filters.


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({}, [1, 2, 3, 4]),
        ({"endpoint": "shop"}, [1, 2, 3]),
        ({"endpoint": "other"}, [4]),
        ({"error_like": "%503%"}, [1, 3]),
        ({"filter": "$.n ? (@ > 2)"}, [3, 4]),
        ({"filter": "$.nothing"}, []),
        ({"limit": 2}, [1, 2]),
        ({"endpoint": "shop", "error_like": "%503%", "filter": "$.n ? (@ > 1)"}, [3]),
    ],
)
def test_filters_pick_letters(queue: Queue, filters: dict[str, Any], expected: list[int]) -> None:
    queue.endpoint("other")
    for n, endpoint, error in [(1, "shop", "503"), (2, "shop", "400"), (3, "shop", "503"), (4, "other", "404")]:
        queue.bury(queue.send(endpoint, {"n": n}), error)

    assert redrive(queue, **filters)["messages"] == len(expected)
    assert waiting(queue) == expected


def test_a_time_range_picks_letters_from_its_start_up_to_its_end(queue: Queue) -> None:
    buried(queue, 4)

    assert redrive(queue, since=queue.at(2), until=queue.at(4))["messages"] == 2
    assert waiting(queue) == [2, 3]


@pytest.mark.parametrize("options", [{"limit": 0}, {"limit": -1}, {"rate": 0}, {"rate": -2.5}])
def test_a_limit_or_rate_that_makes_no_sense_is_refused(queue: Queue, options: dict[str, Any]) -> None:
    assert queue.refuses("redrive", **options).sqlstate == "22023"


def test_a_dry_run_counts_shows_a_sample_and_names_the_command(queue: Queue) -> None:
    letters = buried(queue, 7)
    filters = {"endpoint": "shop", "since": queue.at(2), "error_like": "%fus%", "filter": "$.n ? (@ != 4)", "limit": 5}

    plan = redrive(queue, **filters, rate=2.0, by="it's me", new_generation=3, dry_run=True)

    assert plan["messages"] == 5
    assert [each["dlq_id"] for each in plan["sample"]] == [letters[n - 1] for n in (2, 3, 5, 6, 7)]
    assert plan["sample"][0]["last_error"] == "[PERMANENT] refused"
    assert waiting(queue) == []

    (done,) = queue.rows(plan["command"])
    assert done["messages"] == 5
    assert waiting(queue) == [2, 3, 5, 6, 7]
    assert set(queue.column("select redriven_by from ulak.dlq where status = 'redriven'")) == {"it's me"}
    assert set(queue.column("select generation from ulak.queue where status = 'pending'")) == {3}


def test_a_sample_has_at_most_five_letters(queue: Queue) -> None:
    buried(queue, 7)

    plan = redrive(queue, dry_run=True)

    assert (plan["messages"], len(plan["sample"])) == (7, 5)


def test_a_rate_spreads_the_messages_over_time(queue: Queue) -> None:
    buried(queue, 5)

    redrive(queue, rate=2, now=queue.at(100))

    due = queue.column(
        "select extract(epoch from scheduled_at - %s)::float from ulak.queue where status = 'pending' order by id",
        queue.at(0),
    )
    assert due == [100, 100.5, 101, 101.5, 102]
    assert len(queue.claim(10, now=101)) == 3


def test_a_rate_spreads_the_messages_of_an_ordering_key_too(queue: Queue) -> None:
    buried(queue, 3, ordering_key="k")

    redrive(queue, rate=0.1, now=queue.at(100))

    for now, n in ((100, 1), (110, 2), (120, 3)):
        assert queue.claim(10, now=now - 1) == []
        claim = queue.claim_one(now=now)
        assert claim.payload["n"] == n
        queue.complete(claim, now=now)


def test_a_rate_that_would_take_longer_than_messages_may_be_scheduled_ahead_is_refused(queue: Queue) -> None:
    buried(queue, 3)
    queue.db.execute("select ulak.configure('max_schedule_days', '1')")

    with pytest.raises(psycopg.errors.InvalidParameterValue, match="max_schedule_days"), queue.db.transaction():
        redrive(queue, rate=1 / 86400)

    assert redrive(queue, rate=1 / 43200)["messages"] == 3


def test_without_a_new_generation_the_old_one_is_kept(queue: Queue) -> None:
    id = queue.send()
    queue.db.execute("update ulak.queue set generation = 7")
    queue.bury(id)

    redrive(queue)

    assert queue.value("select generation from ulak.queue where status = 'pending'") == 7


def test_a_new_generation_is_claimed_by_its_workers_only(queue: Queue) -> None:
    buried(queue, 2)
    redrive(queue, new_generation=8)

    assert queue.claim(10, generation=7, now=1) == []
    assert len(queue.claim(10, generation=8, now=1)) == 2


# Order.


def test_a_redriven_message_goes_behind_what_its_key_has(queue: Queue) -> None:
    (letter_id,) = buried(queue, 1, ordering_key="k")
    waits = queue.send(ordering_key="k")
    new_id = queue.call("redrive_message", letter_id, now=queue.at(5))

    claim = queue.claim_one(now=5)
    assert claim.id == waits
    assert queue.claim(10, now=5) == []
    queue.complete(claim, now=6)
    assert queue.claim_one(now=6).id == new_id


def test_redriven_messages_of_one_key_keep_their_order(queue: Queue) -> None:
    buried(queue, 3, ordering_key="k")

    redrive(queue)

    for n in (1, 2, 3):
        (claim,) = queue.claim(10, now=10)
        assert claim.payload["n"] == n
        queue.complete(claim, now=10)


# History.


def test_each_failed_cycle_is_added_to_the_history(queue: Queue) -> None:
    id = queue.send()
    for cycle in (1, 2, 3):
        queue.fail(queue.claim_one(now=cycle * 100), f"failure {cycle}", now=cycle * 100 + 1)
        id = queue.call("redrive_message", queue.dead(id)["id"], f"operator {cycle}", queue.at(cycle * 100 + 50))

    history = queue.message(id)["failure_history"]

    assert [cycle["last_error"] for cycle in history] == [f"[RETRYABLE] failure {n}" for n in (1, 2, 3)]
    assert [cycle["redriven_by"] for cycle in history] == [f"operator {n}" for n in (1, 2, 3)]
    assert {(cycle["attempts"], cycle["retry_count"]) for cycle in history} == {(1, 0)}
    (first_failed, failed, redriven) = (
        queue.value("select %s::timestamptz", history[1][name])
        for name in ("first_failed_at", "failed_at", "redriven_at")
    )
    assert (first_failed, failed, redriven) == (queue.at(201), queue.at(201), queue.at(250))


def test_the_history_keeps_the_newest_twenty_cycles(queue: Queue) -> None:
    id = queue.send()
    older = [{"attempts": n} for n in range(1, 21)]
    queue.db.execute("update ulak_private.deliveries set failure_history = %s", [Jsonb(older)])
    queue.fail(queue.claim_one(), "the newest")

    id = queue.call("redrive_message", queue.dead(id)["id"])

    history = queue.message(id)["failure_history"]
    assert history[:-1] == older[1:]
    assert history[-1]["last_error"] == "[RETRYABLE] the newest"


# Limits of the queue.


def test_a_redrive_that_would_overfill_the_queue_is_refused_as_a_whole(queue: Queue) -> None:
    buried(queue, 5)
    queue.call("configure", "max_queue_size", "3")

    error = queue.refuses("redrive_all")

    assert error.sqlstate == "53400"
    assert queue.value("select count(*) from ulak.dlq where status = 'failed'") == 5


def test_one_letter_is_redriven_into_a_new_generation(queue: Queue) -> None:
    letters = buried(queue, 2)

    new_id = queue.value("select ulak.redrive_message(%s, p_new_generation => 8, p_by => 'anna')", letters[0])
    queue.value("select ulak.redrive_message(p_dlq_id => %s, p_new_generation => 9)", letters[1])

    assert [claim.id for claim in queue.claim(10, generation=8, now=1)] == [new_id]
    assert len(queue.claim(10, generation=9, now=1)) == 1
    assert queue.column("select redriven_by from ulak.dlq order by id") == ["anna", "postgres"]


def test_letters_are_found_by_the_present_name_of_their_endpoint_or_by_the_last_one_of_a_dropped_endpoint(
    queue: Queue,
) -> None:
    for name in ("renamed", "dropped"):
        queue.endpoint(name)
        queue.call("archive_single_to_dlq", queue.send(name))
    queue.db.execute("update ulak.endpoints set name = 'present' where name = 'renamed'")
    queue.db.execute("delete from ulak.endpoints where name = 'dropped'")

    found = {
        name: queue.value("select messages from ulak.discard(%s, p_dry_run => true)", name)
        for name in ("renamed", "present", "dropped")
    }

    assert found == {"renamed": 0, "present": 1, "dropped": 1}
