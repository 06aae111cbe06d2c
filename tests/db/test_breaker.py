"""The circuit breaker: when it opens, what it lets through, when it closes."""

from __future__ import annotations

from typing import Any

import pytest
from support.queue import Claim, Queue

RULES = {"threshold": 3, "cooldown": 30}


@pytest.fixture
def shop(queue: Queue) -> int:
    return queue.endpoint(config={"circuit_breaker": RULES}, policy={"max_retries": 100})


def settle(queue: Queue, claims: list[Claim], errors: str, now: float = 0) -> None:
    """All at once, in this order: s for a success, f for a failure, p for a permanent one, u for a message that nothing
    could be built of."""
    words = {"s": None, "f": "[RETRYABLE] 503", "p": "[PERMANENT] 400", "u": "[PERMANENT] message: ValueError"}
    queue.value(
        "select ulak_private.settle_many('w', %s, %s, %s, p_now => %s)",
        [claim.id for claim in claims],
        [claim.attempt for claim in claims],
        [words[letter] for letter in errors],
        queue.at(now),
    )


def deliver(queue: Queue, errors: str, now: float = 0) -> None:
    """One after the other, each claimed before it is settled."""
    for letter in errors:
        queue.send()
        (claim,) = queue.claim(1, now=now)
        settle(queue, [claim], letter, now)


def opened(queue: Queue, now: float = 0) -> None:
    deliver(queue, "fff", now)
    queue.send_many(20)
    assert queue.state() == "open"


def probe(queue: Queue, now: float, **options: Any) -> Claim:
    (claim,) = queue.claim(100, now=now, **options)
    return claim


# Closed.


@pytest.mark.parametrize(
    ("errors", "state", "failures"),
    [
        ("", "closed", 0),
        ("ff", "closed", 2),
        ("fff", "open", 3),
        ("ffsff", "closed", 2),
        ("ffsfff", "open", 3),
        ("ffs", "closed", 0),
        ("ppp", "closed", 0),
        ("ffp", "closed", 2),
        ("ffpf", "open", 3),
    ],
)
@pytest.mark.usefixtures("shop")
def test_consecutive_failures_open_it(queue: Queue, errors: str, state: str, failures: int) -> None:
    deliver(queue, errors)

    assert (queue.state(), queue.circuit()["circuit_failure_count"]) == (state, failures)


@pytest.mark.parametrize("errors", ["fff", "ffsff", "sffpf", "ffsfffss", "sss", "pppp", "fsfsf"])
@pytest.mark.usefixtures("shop")
def test_outcomes_settled_at_once_count_in_their_order_of_arrival(queue: Queue, errors: str) -> None:
    queue.send_many(len(errors))

    settle(queue, queue.claim(len(errors)), errors)

    runs = [len(run) for run in errors.replace("p", "").split("s")]
    assert queue.state() == ("open" if max(runs) >= 3 else "closed")
    if queue.state() == "closed":
        assert queue.circuit()["circuit_failure_count"] == runs[-1]


def test_permanent_failures_count_if_all_are_to_count(queue: Queue) -> None:
    queue.endpoint(config={"circuit_breaker": RULES | {"counts": "all"}})

    deliver(queue, "ppp")

    assert queue.state() == "open"


def test_threshold_cooldown_and_what_counts_come_from_the_settings_where_the_config_is_silent(queue: Queue) -> None:
    queue.call("configure", "circuit_breaker_threshold", "2")
    queue.call("configure", "circuit_breaker_cooldown", "77")
    queue.call("configure", "circuit_breaker_counts", "all")
    queue.endpoint()

    deliver(queue, "fp", now=5)

    circuit = queue.circuit()
    assert circuit["circuit_state"] == "open"
    assert (circuit["circuit_opened_at"], circuit["circuit_half_open_at"]) == (queue.at(5), queue.at(82))


@pytest.mark.usefixtures("shop")
def test_a_healthy_endpoint_is_written_at_most_every_ten_seconds(queue: Queue) -> None:
    queue.send_many(50)
    claims = queue.claim(50)

    versions = set()
    for n, claim in enumerate(claims):
        settle(queue, [claim], "s", now=n / 5)
        versions.add(queue.value("select ctid::text from ulak.endpoints"))

    assert len(versions) == 1
    queue.send()
    settle(queue, queue.claim(1), "s", now=10)
    assert queue.value("select ctid::text from ulak.endpoints") not in versions
    assert queue.circuit()["last_success_at"] == queue.at(10)


@pytest.mark.usefixtures("shop")
def test_the_last_success_and_failure_are_remembered(queue: Queue) -> None:
    deliver(queue, "s", now=3)
    deliver(queue, "f", now=4)

    circuit = queue.circuit()
    assert (circuit["last_success_at"], circuit["last_failure_at"]) == (queue.at(3), queue.at(4))


# Open.


@pytest.mark.usefixtures("shop")
def test_nothing_is_claimed_while_it_is_open(queue: Queue) -> None:
    opened(queue)
    before = queue.rows("select *, xmin::text, ctid::text from ulak_private.deliveries order by id")

    assert queue.claim(100, now=29.9) == []
    assert queue.claim(100, endpoint="shop", now=29.9) == []

    assert queue.rows("select *, xmin::text, ctid::text from ulak_private.deliveries order by id") == before


@pytest.mark.usefixtures("shop")
def test_other_endpoints_are_unaffected(queue: Queue) -> None:
    opened(queue)
    queue.endpoint("other")
    id = queue.send("other")

    assert [claim.id for claim in queue.claim(100)] == [id]


@pytest.mark.parametrize("errors", ["s", "f", "sss", "fff"])
@pytest.mark.usefixtures("shop")
def test_answers_that_come_after_it_opened_change_nothing(queue: Queue, errors: str) -> None:
    queue.send_many(len(errors))
    late = queue.claim(len(errors))
    opened(queue)
    before = queue.circuit()

    settle(queue, late, errors, now=5)

    after = queue.circuit()
    same = ("circuit_state", "circuit_opened_at", "circuit_half_open_at", "circuit_failure_count")
    assert {name: after[name] for name in same} == {name: before[name] for name in same}


# Half-open.


@pytest.mark.usefixtures("shop")
def test_after_the_cooldown_one_message_is_the_probe(queue: Queue) -> None:
    opened(queue)

    claim = probe(queue, now=30)

    circuit = queue.circuit()
    assert circuit["circuit_state"] == "half_open"
    assert (circuit["circuit_probe_id"], circuit["circuit_probe_attempt"]) == (claim.id, claim.attempt)
    assert queue.claim(100, now=31) == []


@pytest.mark.usefixtures("shop")
def test_the_worker_is_told_which_message_is_the_probe(queue: Queue) -> None:
    opened(queue)
    queue.endpoint("other")
    queue.send("other")
    queue.send("other")

    query = "select e.name, c.circuit_state from ulak_private.claim('w', 9, p_now => %s) c join ulak.endpoints e on e.id = c.endpoint_id"
    told = {(row["name"], row["circuit_state"]) for row in queue.rows(query, queue.at(30))}

    assert told == {("shop", "half_open"), ("other", "closed")}


@pytest.mark.usefixtures("shop")
def test_a_probe_that_succeeds_closes_it(queue: Queue) -> None:
    opened(queue)

    settle(queue, [probe(queue, now=30)], "s", now=31)

    circuit = queue.circuit()
    assert circuit["circuit_state"] == "closed"
    assert circuit["circuit_failure_count"] == 0
    cleared = ("circuit_opened_at", "circuit_half_open_at", "circuit_probe_id", "circuit_probe_attempt")
    assert [circuit[name] for name in cleared] == [None] * 4
    assert len(queue.claim(100, now=31)) == circuit["slow_start_limit"] == 2


@pytest.mark.usefixtures("shop")
def test_a_probe_that_fails_opens_it_for_a_fresh_cooldown(queue: Queue) -> None:
    opened(queue)

    settle(queue, [probe(queue, now=40)], "f", now=45)

    circuit = queue.circuit()
    assert circuit["circuit_state"] == "open"
    assert (circuit["circuit_opened_at"], circuit["circuit_half_open_at"]) == (queue.at(45), queue.at(75))
    assert queue.claim(100, now=74.9) == []
    probe(queue, now=75)


@pytest.mark.usefixtures("shop")
def test_a_permanent_answer_to_the_probe_shows_that_the_receiver_is_alive(queue: Queue) -> None:
    opened(queue)

    settle(queue, [probe(queue, now=30)], "p", now=31)

    assert queue.state() == "closed"


@pytest.mark.parametrize("errors", ["s", "f"])
@pytest.mark.usefixtures("shop")
def test_only_the_probe_decides(queue: Queue, errors: str) -> None:
    queue.send()
    late = queue.claim(1)
    opened(queue)
    claim = probe(queue, now=30)

    settle(queue, late, errors, now=31)
    assert queue.state() == "half_open"

    settle(queue, [claim], "s", now=32)
    assert queue.state() == "closed"


@pytest.mark.usefixtures("shop")
def test_the_probe_and_others_settled_at_once(queue: Queue) -> None:
    """After the probe has opened it again, what follows comes too late; after it has closed it, it counts."""
    queue.send_many(4)
    late = queue.claim(4)
    opened(queue)

    settle(queue, [late[0], probe(queue, now=30), *late[1:]], "ssfff", now=31)

    assert queue.state() == "open"
    assert queue.events("circuit.%")[-3:] == ["circuit.half_open", "circuit.closed", "circuit.opened"]


# Which message it is.


@pytest.mark.parametrize("aging", ["0", "1"])
@pytest.mark.usefixtures("shop")
def test_the_probe_is_what_has_been_due_longest_whatever_its_priority(queue: Queue, aging: str) -> None:
    queue.call("configure", "priority_aging", aging)
    deliver(queue, "fff")
    oldest = queue.send(scheduled_at=4)
    for due in (5, 6):
        queue.send(priority=10, scheduled_at=due)
    queue.db.execute("update ulak.queue set next_retry_at = %s where retry_count > 0", [queue.at(3600)])

    assert probe(queue, now=30).id == oldest


@pytest.mark.usefixtures("shop")
def test_a_message_is_not_the_probe_twice_in_turn_while_another_waits(queue: Queue) -> None:
    deliver(queue, "fff")
    queue.db.execute("update ulak.queue set next_retry_at = %s", [queue.at(3600)])
    stubborn = queue.send(priority=10)
    failed = probe(queue, now=30)
    queue.fail(failed, now=31, retry_after=0)
    other = queue.send(scheduled_at=50)

    second = probe(queue, now=62)
    queue.fail(second, now=63, retry_after=3600)

    assert (failed.id, second.id) == (stubborn, other)
    assert probe(queue, now=95).id == stubborn


@pytest.mark.usefixtures("shop")
def test_a_message_that_waits_alone_is_the_probe_as_often_as_it_takes(queue: Queue) -> None:
    deliver(queue, "fff")
    queue.db.execute("update ulak.queue set next_retry_at = %s", [queue.at(3600)])
    alone = queue.send()

    for now in (30, 62, 94):
        claim = probe(queue, now=now)
        assert claim.id == alone
        queue.fail(claim, now=now + 1, retry_after=0)


@pytest.mark.parametrize("prefix", ["[RETRYABLE]", "[PERMANENT]"])
@pytest.mark.usefixtures("shop")
def test_a_probe_that_failed_by_its_own_fault_is_replaced_at_once(queue: Queue, prefix: str) -> None:
    opened(queue)
    first = probe(queue, now=30)

    queue.fail(first, f"{prefix} message: its own time-out ended the request", now=31)

    assert queue.state() == "half_open"
    assert probe(queue, now=31).id != first.id


# Probes that are lost.


@pytest.mark.usefixtures("shop")
def test_a_probe_whose_lease_ran_out_is_replaced(queue: Queue) -> None:
    opened(queue)
    first = probe(queue, now=30, lease=60)

    assert queue.claim(100, now=89.9) == []
    second = probe(queue, now=90)

    assert second.id != first.id
    assert queue.circuit()["circuit_probe_id"] == second.id


@pytest.mark.usefixtures("shop")
def test_a_probe_that_recovery_took_back_is_replaced(queue: Queue) -> None:
    opened(queue)
    first = probe(queue, now=30, lease=60)
    queue.recover(now=90)

    assert queue.state() == "half_open"
    assert probe(queue, now=90).id != first.id


@pytest.mark.usefixtures("shop")
def test_a_probe_that_was_given_back_is_replaced(queue: Queue) -> None:
    opened(queue)
    queue.release(probe(queue, now=30), delay=10, now=31)

    assert queue.state() == "half_open"
    probe(queue, now=31)


@pytest.mark.usefixtures("shop")
def test_a_probe_that_was_deleted_is_replaced(queue: Queue) -> None:
    opened(queue)
    first = probe(queue, now=30)
    queue.db.execute("delete from ulak.queue where id = %s", [first.id])

    probe(queue, now=31)


@pytest.mark.usefixtures("shop")
def test_the_answer_to_a_probe_that_was_replaced_decides_nothing(queue: Queue) -> None:
    opened(queue)
    first = probe(queue, now=30, lease=60)
    second = probe(queue, now=90)

    settle(queue, [first], "s", now=91)
    assert queue.state() == "half_open"

    settle(queue, [second], "f", now=92)
    assert queue.state() == "open"


@pytest.mark.usefixtures("shop")
def test_an_earlier_attempt_of_the_probes_message_decides_nothing(queue: Queue) -> None:
    opened(queue)
    first = probe(queue, now=30, lease=60)
    queue.db.execute("update ulak.queue set next_retry_at = 'infinity' where id <> %s", [first.id])
    queue.recover(now=90)
    second = probe(queue, now=1000)
    assert (second.id, second.attempt) == (first.id, first.attempt + 1)

    assert queue.refuses("complete", first.id, "w", first.attempt).sqlstate == "55000"
    assert queue.state() == "half_open"


@pytest.mark.usefixtures("shop")
def test_a_circuit_without_a_message_to_probe_with_waits_for_one(queue: Queue) -> None:
    deliver(queue, "fff")
    queue.db.execute("update ulak.queue set status = 'expired'")
    expired = queue.send(expires_at=20)

    assert queue.claim(10, now=29) == []
    assert queue.state() == "open"
    assert queue.claim(10, now=30) == []
    assert queue.state() == "half_open"
    assert queue.status(expired) == "pending"

    id = queue.send()
    assert probe(queue, now=31).id == id
    assert queue.claim(10, now=32) == []


@pytest.mark.usefixtures("shop")
def test_the_probe_is_the_head_of_its_ordering_key(queue: Queue) -> None:
    deliver(queue, "fff")
    queue.db.execute("update ulak.queue set status = 'expired'")
    first = queue.send(ordering_key="k")
    queue.send(ordering_key="k")

    assert probe(queue, now=30).id == first


def test_a_probe_obeys_the_rate_limit_and_takes_a_token(queue: Queue) -> None:
    queue.endpoint(config={"circuit_breaker": RULES, "rate_limit": {"limit": 1, "interval": "hour", "burst": 4}})
    opened(queue)

    settle(queue, [probe(queue, now=30)], "f", now=31)

    assert queue.claim(100, now=61) == []
    assert queue.state() == "open"
    probe(queue, now=4000)


# By hand.


@pytest.mark.usefixtures("shop")
def test_a_reset_closes_it_at_once_and_clears_everything(queue: Queue) -> None:
    opened(queue)
    probe(queue, now=30)

    assert queue.call("reset_circuit_breaker", "shop", queue.at(31)) is True

    circuit = queue.circuit()
    assert (circuit["circuit_state"], circuit["circuit_failure_count"]) == ("closed", 0)
    cleared = ("circuit_opened_at", "circuit_half_open_at", "circuit_probe_id", "circuit_window_started_at")
    assert [circuit[name] for name in cleared] == [None] * 4
    assert circuit["slow_start_limit"] == 1
    (event,) = queue.rows("select * from ulak.event_log where event = 'circuit.reset'")
    assert event["old_value"] == {"circuit_state": "half_open", "failures": 3}
    assert event["new_value"] == {"circuit_state": "closed", "failures": 0}
    assert event["created_at"] == queue.at(31)


@pytest.mark.usefixtures("shop")
def test_a_reset_of_a_closed_one_says_so_and_forgets_the_failures(queue: Queue) -> None:
    deliver(queue, "ff")

    assert queue.call("reset_circuit_breaker", "shop") is False
    deliver(queue, "ff")

    assert queue.state() == "closed"


def test_a_reset_of_an_unknown_endpoint_is_refused(queue: Queue) -> None:
    assert queue.refuses("reset_circuit_breaker", "shoop").sqlstate == "42704"


@pytest.mark.usefixtures("shop")
def test_outcomes_can_be_reported_by_hand(queue: Queue, shop: int) -> None:
    def report(success: bool, now: float) -> Any:
        return queue.call("update_circuit_breaker", shop, success, queue.at(now))

    assert [report(False, 0), report(False, 0), report(False, 0)] == ["closed", "closed", "open"]
    assert report(True, 1) == "open"
    queue.send_many(2)
    probe(queue, now=30)
    assert report(False, 31) == "open"
    probe(queue, now=61)
    assert report(True, 62) == "closed"


def test_outcomes_of_an_endpoint_that_does_not_exist_are_refused(queue: Queue) -> None:
    assert queue.refuses("update_circuit_breaker", 999_999, True).sqlstate == "42704"
    assert queue.refuses("update_circuit_breaker", 99_999_999_999, True).sqlstate == "42704"


@pytest.mark.usefixtures("shop")
def test_every_transition_is_logged_with_the_old_and_the_new_value(queue: Queue) -> None:
    opened(queue, now=1)
    settle(queue, [probe(queue, now=31)], "f", now=32)
    settle(queue, [probe(queue, now=62)], "s", now=63)

    def value(state: str, failures: int) -> dict[str, Any]:
        return {"circuit_state": state, "failures": failures}

    query = "select event, old_value, new_value, created_at from ulak.event_log where starts_with(event, 'circuit') order by id"
    assert [tuple(row.values()) for row in queue.rows(query)] == [
        ("circuit.opened", value("closed", 3), value("open", 3), queue.at(1)),
        ("circuit.half_open", value("open", 3), value("half_open", 3), queue.at(31)),
        ("circuit.opened", value("half_open", 3), value("open", 3), queue.at(32)),
        ("circuit.half_open", value("open", 3), value("half_open", 3), queue.at(62)),
        ("circuit.closed", value("half_open", 3), value("closed", 0), queue.at(63)),
    ]


# By the rate of failures.


@pytest.fixture
def rated(queue: Queue) -> int:
    rules = {"mode": "rate", "window": 60, "min_requests": 4, "failure_rate": 0.5, "cooldown": 30}
    return queue.endpoint(config={"circuit_breaker": rules}, policy={"max_retries": 100})


@pytest.mark.parametrize(
    ("errors", "state"),
    [
        ("fff", "closed"),
        ("ffff", "open"),
        ("sfsf", "open"),
        ("ssfs", "closed"),
        ("sssff", "closed"),
        ("sssfff", "open"),
        ("ffss", "closed"),
        ("ffssf", "open"),
        ("ffpf", "closed"),
    ],
)
@pytest.mark.usefixtures("rated")
def test_a_rate_of_failures_opens_it(queue: Queue, errors: str, state: str) -> None:
    deliver(queue, errors)

    assert queue.state() == state


@pytest.mark.usefixtures("rated")
def test_a_new_window_counts_afresh(queue: Queue) -> None:
    deliver(queue, "fff", now=0)
    deliver(queue, "f", now=60)

    assert queue.state() == "closed"
    deliver(queue, "fff", now=119)
    assert queue.state() == "open"


@pytest.mark.usefixtures("rated")
def test_after_it_closed_the_window_starts_afresh(queue: Queue) -> None:
    deliver(queue, "ffff", now=0)
    queue.send_many(5)
    settle(queue, [probe(queue, now=30)], "s", now=31)

    deliver(queue, "fff", now=32)

    assert queue.state() == "closed"


def test_consecutive_failures_do_not_open_one_that_goes_by_rate(queue: Queue) -> None:
    rules = {"mode": "rate", "min_requests": 1000}
    queue.endpoint(config={"circuit_breaker": rules}, policy={"max_retries": 100})

    deliver(queue, "f" * 20)

    assert queue.state() == "closed"
    assert queue.circuit()["circuit_failure_count"] == 20


# Batches: the breaker counts requests.


def settle_batches(queue: Queue, claims: list[Claim], errors: str, requests: str) -> None:
    words = {"s": None, "f": "[RETRYABLE] 503", "p": "[PERMANENT] 400"}
    queue.value(
        "select ulak_private.settle_many('w', %s, %s, %s, p_now => %s, p_requests => %s)",
        [claim.id for claim in claims],
        [claim.attempt for claim in claims],
        [words[letter] for letter in errors] if errors.strip("s") else None,
        queue.at(0),
        [int(request) for request in requests],
    )


@pytest.mark.parametrize(
    ("errors", "requests", "state", "failures"),
    [
        ("ffffffff", "00000000", "closed", 1),
        ("ffffffff", "00001111", "closed", 2),
        ("ffffffff", "00011122", "open", 3),
        # Some messages of the second were delivered: its receiver is well.
        ("fffsffff", "00111122", "closed", 1),
        ("ffffsssp", "00112222", "closed", 0),
        ("ssssssss", "00112222", "closed", 0),
    ],
)
def test_a_request_counts_once_however_many_messages_it_carried(
    queue: Queue, shop: int, errors: str, requests: str, state: str, failures: int
) -> None:
    queue.send_many(8)
    claims = sorted(queue.claim(8), key=lambda claim: claim.id)

    settle_batches(queue, claims, errors, requests)

    assert (queue.state(), queue.circuit()["circuit_failure_count"]) == (state, failures)
    assert len(queue.column("select id from ulak.queue where status = 'processing'")) == 0


def test_a_batch_of_deliveries_closes_a_circuit_by_its_probe(queue: Queue, shop: int) -> None:
    opened(queue)
    claim = probe(queue, 30)

    queue.value(
        "select ulak_private.settle_many('w', %s, %s, p_now => %s, p_requests => '{7}')",
        [claim.id],
        [claim.attempt],
        queue.at(31),
    )

    assert queue.state() == "closed"


@pytest.mark.parametrize("counts", ["retryable", "all"])
def test_a_message_that_was_never_sent_says_nothing_about_the_receiver(queue: Queue, counts: str) -> None:
    queue.endpoint(config={"circuit_breaker": {**RULES, "counts": counts}})

    deliver(queue, "ffuuu")
    closed = queue.state()
    deliver(queue, "f")
    queue.send_many(2)
    settle(queue, [probe(queue, 31)], "u", 31)
    half_open = queue.state()
    settle(queue, [probe(queue, 32)], "s", 32)

    assert (closed, half_open, queue.state()) == ("closed", "half_open", "closed")
