"""Reports of external workers about many messages, and a worker's whole turn by one call."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from support.queue import Claim, Queue


@pytest.fixture(autouse=True)
def shop(queue: Queue) -> int:
    return queue.endpoint(policy={"max_retries": 2, "backoff": "fixed", "base_delay_seconds": 10})


def held(claims: list[Claim]) -> tuple[list[int], list[int]]:
    return [claim.id for claim in claims], [claim.attempt for claim in claims]


def report(queue: Queue, function: str, claims: list[Claim], *more: Any, now: float = 0) -> list[tuple[Any, ...]]:
    places = "".join(", %s" for _ in more)
    query = f"select * from ulak.{function}('w', %s, %s{places}, p_now => %s)"
    return queue.db.execute(query, [*held(claims), *more, queue.at(now)]).fetchall()  # type: ignore[arg-type]


def work(queue: Queue, limit: int, claims: list[Claim] | None = None, **options: Any) -> list[tuple[str, int, int]]:
    ids, attempts = held(claims or [])
    given = {"ids": ids, "attempts": attempts, "now": queue.at(0), **options}
    named = ", ".join(f"p_{name} => %s" for name in given)
    query = f"select outcome, id, attempt from ulak.work('w', %s, {named})"
    return queue.db.execute(query, [limit, *given.values()]).fetchall()  # type: ignore[arg-type]


def lose(queue: Queue, claim: Claim) -> None:
    """Another worker has it by now."""
    queue.db.execute(
        "update ulak_private.deliveries set locked_by = 'other', attempts = attempts + 1 where id = %s", [claim.id]
    )


def test_many_are_completed_and_each_says_whether_it_was_still_held(queue: Queue) -> None:
    queue.send_many(3)
    claims = queue.claim(3)
    lose(queue, claims[1])

    answers = report(queue, "complete_many", claims)

    assert answers == [(claims[0].id, True), (claims[1].id, False), (claims[2].id, True)]
    assert [queue.status(claim.id) for claim in claims] == ["completed", "processing", "completed"]


def test_responses_are_kept_each_with_its_message(queue: Queue) -> None:
    queue.send_many(2)
    claims = queue.claim(2)

    report(queue, "complete_many", claims, ["1", None])

    assert [queue.message(claim.id)["response"] for claim in claims] == [1, None]


def test_many_fail_each_with_its_own_error_and_delay(queue: Queue) -> None:
    queue.send_many(4)
    claims = queue.claim(4)
    lose(queue, claims[3])

    answers = report(queue, "fail_many", claims, ["slow", "[PERMANENT] bad", None, "late"], ["30 s", None, None, None])

    assert [is_settled for _, is_settled in answers] == [True, True, True, False]
    assert queue.due_in(claims[0].id) == 30
    assert queue.message(claims[0].id)["last_error"] == "[RETRYABLE] slow"
    assert queue.dead(claims[1].id)["last_error"] == "[PERMANENT] bad"
    assert queue.due_in(claims[2].id) == 10
    assert queue.message(claims[2].id)["last_error"] == "[RETRYABLE] no reason given"


@pytest.mark.parametrize("reason", ["bad", "refused: a payload of some length", "refused: permanent"])
def test_a_permanent_error_stays_one_whatever_it_repeats_of_the_message(queue: Queue, reason: str) -> None:
    queue.send(payload={"status": "permanent", "text": "a payload of some length"})
    claims = queue.claim(1)

    report(queue, "fail_many", claims, [f"[PERMANENT] {reason}"])

    assert queue.dead(claims[0].id)["last_error"].startswith("[PERMANENT]")


def test_many_are_given_back_without_spending_their_retries(queue: Queue) -> None:
    queue.send_many(2)
    claims = queue.claim(2)
    lose(queue, claims[0])

    assert report(queue, "release_many", claims, "5 s") == [(claims[0].id, False), (claims[1].id, True)]

    assert (queue.message(claims[1].id)["retry_count"], queue.due_in(claims[1].id)) == (0, 5)


def test_many_leases_are_renewed(queue: Queue) -> None:
    queue.send_many(2)
    claims = queue.claim(2, lease=60)
    lose(queue, claims[1])

    assert report(queue, "heartbeat_many", claims, "60 s", now=30) == [(claims[0].id, True), (claims[1].id, False)]

    assert queue.message(claims[0].id)["lease_until"] == queue.at(90)


def test_a_turn_settles_what_was_done_and_claims_the_next(queue: Queue) -> None:
    ids = queue.send_many(5)
    claims = queue.claim(3)

    turn = work(queue, 10, claims, errors=[None, "no luck", None], endpoint="shop")

    assert turn == [("claimed", ids[3], 1), ("claimed", ids[4], 1)]
    assert [queue.status(id) for id in ids[:3]] == ["completed", "pending", "completed"]
    assert queue.message(ids[1])["last_error"] == "[RETRYABLE] no luck"


def test_a_turn_names_the_reports_that_do_not_count(queue: Queue) -> None:
    ids = queue.send_many(3)
    claims = queue.claim(2)
    lose(queue, claims[0])

    assert work(queue, 1, claims) == [("lost", ids[0], 1), ("claimed", ids[2], 1)]
    assert queue.status(ids[1]) == "completed"


def test_a_last_turn_claims_nothing(queue: Queue) -> None:
    ids = queue.send_many(2)
    claims = queue.claim(1)

    assert work(queue, 0, claims) == []

    assert [queue.status(id) for id in ids] == ["completed", "pending"]


def test_the_next_of_an_ordering_key_is_claimed_by_the_turn_that_settles_the_one_before(queue: Queue) -> None:
    ids = [queue.send(ordering_key="k") for _ in range(3)]

    assert work(queue, 10) == [("claimed", ids[0], 1)]
    (claim,) = (Claim(id, *[None] * 13)._replace(attempt=1) for id in ids[:1])  # type: ignore[arg-type]
    assert work(queue, 10, [claim]) == [("claimed", ids[1], 1)]


@pytest.mark.parametrize("function", ["complete_many", "fail_many", "release_many", "heartbeat_many", "work"])
@pytest.mark.parametrize("attempts", ["{}", "{1,1}"])
def test_each_message_needs_its_attempt(queue: Queue, function: str, attempts: str) -> None:
    more: dict[str, Any] = {"errors": "{no}"} if function == "fail_many" else {}
    more |= {"limit": 1} if function == "work" else {}
    given = {"worker": "w", "ids": f"{{{queue.send()}}}", "attempts": attempts, **more}

    diagnosis = queue.refuses(function, **given)

    assert (diagnosis.sqlstate, diagnosis.message_primary) == ("22023", "each message needs its attempt")


def test_more_than_10000_reports_by_one_call_are_refused(queue: Queue) -> None:
    diagnosis = queue.refuses("complete_many", "w", many := f"{{{','.join('1' * 10_001)}}}", many)

    assert (diagnosis.sqlstate, diagnosis.message_primary) == ("22023", "more than 10000 messages in one call")


def test_reporting_nothing_is_no_error(queue: Queue) -> None:
    assert report(queue, "complete_many", []) == []
    assert work(queue, 5) == []


@pytest.mark.parametrize(
    "function, more",
    [
        ("fail_many", (["slow"],)),
        ("fail_many", (["slow", "slow", "slow"],)),
        ("fail_many", (["slow", "slow"], ["1 s"])),
        ("complete_many", (["1"],)),
    ],
)
def test_what_is_reported_is_as_many_as_the_messages(queue: Queue, function: str, more: tuple[list[str], ...]) -> None:
    queue.send_many(2)
    claims = queue.claim(2)

    with (
        pytest.raises(psycopg.errors.InvalidParameterValue, match="as many errors, delays and responses as messages"),
        queue.db.transaction(),
    ):
        report(queue, function, claims, *more)

    assert [queue.status(claim.id) for claim in claims] == ["processing", "processing"]


def test_a_turn_with_fewer_errors_than_messages_completes_none(queue: Queue) -> None:
    """The second message may be the one that failed."""
    queue.send_many(2)
    claims = queue.claim(2)

    with (
        pytest.raises(psycopg.errors.InvalidParameterValue, match="as many errors, delays and responses as messages"),
        queue.db.transaction(),
    ):
        work(queue, 0, claims, errors=["slow"])

    assert [queue.status(claim.id) for claim in claims] == ["processing", "processing"]


@pytest.mark.parametrize("function", ["complete_many", "release_many", "heartbeat_many"])
def test_a_worker_that_took_over_its_own_message_is_told_that_its_first_attempt_is_lost(
    queue: Queue, function: str
) -> None:
    queue.send()
    first = queue.claim_one(lease=60)
    second = queue.claim_one(now=61)

    assert report(queue, function, [first, second], now=62) == [(first.id, False), (first.id, True)]


def test_a_turn_says_that_the_first_attempt_of_a_message_is_lost_that_the_worker_took_over_from_itself(
    queue: Queue,
) -> None:
    queue.send()
    first = queue.claim_one(lease=60)
    second = queue.claim_one(now=61)

    assert work(queue, 0, [first, second], now=queue.at(62)) == [("lost", first.id, first.attempt)]
    assert queue.status(second.id) == "completed"


def test_a_report_without_an_id_is_not_settled(queue: Queue) -> None:
    queue.send()
    claim = queue.claim_one()

    answers = queue.db.execute(
        "select * from ulak.complete_many('w', array[null, %s]::bigint[], array[1, 1])", [claim.id]
    )

    assert answers.fetchall() == [(None, False), (claim.id, True)]


def test_reports_are_matched_by_their_order_however_their_arrays_are_numbered(queue: Queue) -> None:
    queue.send_many(4)
    queue.db.execute("update ulak_private.deliveries set attempts = id")
    ids, attempts = held(queue.claim(4))

    turn = queue.db.execute(
        "select outcome, id from ulak.work('w', 0, 'shop', %s, %s::text::integer[], %s::text::text[], p_now => %s)",
        [
            ids,
            "[0:3]={" + ",".join(map(str, attempts)) + "}",
            "[0:1][0:1]={{late,null},{null,null}}",
            queue.at(0),
        ],
    ).fetchall()

    assert turn == []
    assert [queue.status(id) for id in ids] == ["pending", "completed", "completed", "completed"]


@pytest.mark.parametrize("count", [1, 2, 3, 12])
def test_a_claim_of_all_endpoints_that_meets_only_expired_messages_returns_nothing(queue: Queue, count: int) -> None:
    for number in range(count):
        queue.endpoint(f"late {number}")
        queue.send(f"late {number}", expires_at=1)

    for _ in range(3):
        assert queue.db.execute("select * from ulak.claim('w', p_now => %s)", [queue.at(2)]).fetchall() == []
        assert work(queue, 1, now=queue.at(2)) == []
