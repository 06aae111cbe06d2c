"""What a failure does: the error's class decides, the retries run out, and everybody who must know is notified."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.queue import Queue

GONE = {"url": "https://example.com", "auto_disable_on_gone": True}


@pytest.fixture(autouse=True)
def shop(queue: Queue) -> int:
    return queue.endpoint(policy={"max_retries": 2, "backoff": "fixed", "base_delay_seconds": 10})


# Classes.


@pytest.mark.parametrize(
    ("reported", "permanent", "stored", "status"),
    [
        ("no luck", False, "[RETRYABLE] no luck", "pending"),
        ("[RETRYABLE] 503", False, "[RETRYABLE] 503", "pending"),
        ("[PERMANENT] 400", False, "[PERMANENT] 400", "failed"),
        ("[DISABLE] 410", False, "[DISABLE] 410", "failed"),
        ("bad order", True, "[PERMANENT] bad order", "failed"),
        ("[RETRYABLE] 503", True, "[PERMANENT] 503", "failed"),
        ("[PERMANENT] 400", True, "[PERMANENT] 400", "failed"),
        ("[DISABLE] 410", True, "[DISABLE] 410", "failed"),
        (None, False, "[RETRYABLE] no reason given", "pending"),
        (None, True, "[PERMANENT] no reason given", "failed"),
        ("says [PERMANENT] in the middle", False, "[RETRYABLE] says [PERMANENT] in the middle", "pending"),
    ],
)
def test_the_class_of_an_error_decides(
    queue: Queue, reported: str | None, permanent: bool, stored: str, status: str
) -> None:
    id = queue.send()

    queue.fail(queue.claim_one(), reported, permanent=permanent)

    message = queue.message(id)
    assert (message["last_error"], message["status"]) == (stored, status)


def test_a_permanent_failure_leaves_the_rest_of_the_budget(queue: Queue) -> None:
    id = queue.send()

    queue.fail(queue.claim_one(), permanent=True, now=5)

    message, letter = queue.message(id), queue.dead(id)
    assert (message["attempts"], message["retry_count"]) == (letter["attempts"], letter["retry_count"]) == (1, 0)
    assert message["failed_at"] == letter["failed_at"] == queue.at(5)


def test_the_budget_is_exact(queue: Queue) -> None:
    """Two retries are three attempts."""
    id = queue.send()

    for now in (0, 10, 20):
        assert queue.status(id) == "pending"
        queue.fail(queue.claim_one(now=now), f"failure at {now}", now=now)

    letter = queue.dead(id)
    assert queue.status(id) == "failed"
    assert (letter["attempts"], letter["retry_count"]) == (3, 2)
    assert letter["last_error"] == "[RETRYABLE] failure at 20"
    assert (letter["first_failed_at"], letter["failed_at"]) == (queue.at(0), queue.at(20))
    assert queue.claim(10, now=100_000) == []


def test_without_retries_the_first_failure_is_the_last(queue: Queue) -> None:
    queue.endpoint("once", policy={"max_retries": 0})
    id = queue.send("once")

    queue.fail(queue.claim_one())

    assert queue.status(id) == "failed"


def test_the_budget_comes_from_the_setting_where_the_policy_is_silent(queue: Queue) -> None:
    queue.call("configure", "default_max_retries", "1")
    queue.endpoint("silent", policy={"backoff": "fixed"})
    id = queue.send("silent")

    queue.fail(queue.claim_one())
    assert queue.status(id) == "pending"
    queue.fail(queue.claim_one(now=10), now=10)

    assert queue.status(id) == "failed"


def test_a_response_that_came_with_the_failure_is_kept(queue: Queue) -> None:
    id = queue.send()
    queue.claim_one()

    queue.value(
        "select ulak_private.settle_many('w', %s, '{1}', '{[PERMANENT] 400}', null, array[%s::jsonb])",
        [id],
        '{"status": 400}',
    )

    assert queue.dead(id)["response"] == {"status": 400}


# The dead-letter queue.


def test_a_dead_letter_is_the_whole_message(queue: Queue) -> None:
    id = queue.send(
        payload={"order": 7},
        priority=4,
        correlation_id="6d8de26b-3e3e-4a1c-8f5f-0a3c5e0c5f3a",
        idempotency_key="once",
        ordering_key="k",
        scheduled_at=1,
        expires_at=600,
        headers={"x-shop": "a"},
        metadata={"trace": 9},
    )
    queue.db.execute("update ulak_private.deliveries set generation = 3, failure_history = '[{\"attempts\": 9}]'")

    queue.fail(queue.claim_one(now=2), permanent=True, now=3)

    message, letter = queue.message(id), queue.dead(id)
    same = [
        "endpoint_id",
        "message_id",
        "payload",
        "priority",
        "correlation_id",
        "idempotency_key",
        "payload_hash",
        "ordering_key",
        "scheduled_at",
        "expires_at",
        "headers",
        "metadata",
        "generation",
        "failure_history",
        "attempts",
        "retry_count",
        "last_error",
        "first_failed_at",
        "failed_at",
    ]
    assert {name: letter[name] for name in same} == {name: message[name] for name in same}
    assert None not in {
        letter[name] for name in same if name not in ("headers", "metadata", "payload", "failure_history")
    }
    assert letter["original_message_id"] == id
    assert letter["original_created_at"] == message["created_at"]
    assert letter["archived_at"] == queue.at(3)
    assert (letter["endpoint_name"], letter["protocol"], letter["status"]) == ("shop", "pull", "failed")
    assert (letter["redriven_at"], letter["redriven_by"], letter["redriven_message_id"]) == (None, None, None)


def test_every_death_is_in_the_event_log_without_the_payload(queue: Queue) -> None:
    id = queue.send(payload={"secret": "swordfish"})

    queue.fail(queue.claim_one(), "no such customer", permanent=True, now=9)

    (event,) = queue.rows("select * from ulak.event_log where event = 'message.dead'")
    assert (event["message_id"], event["endpoint_name"], event["created_at"]) == (id, "shop", queue.at(9))
    (letter,) = queue.rows("select id, message_id from ulak.dlq")
    assert event["detail"] == {
        "message_id": str(letter["message_id"]),
        "dlq_id": letter["id"],
        "sender": "postgres",
        "attempts": 1,
        "error_class": "permanent",
        "error": "[PERMANENT] no such customer",
    }
    assert "swordfish" not in str(event)


def test_a_retry_is_not_worth_an_event(queue: Queue) -> None:
    queue.send()
    before = queue.events()

    queue.fail(queue.claim_one())

    assert queue.events() == before


def test_a_death_lets_the_next_message_of_the_key_go(queue: Queue) -> None:
    queue.send(ordering_key="k")
    second = queue.send(ordering_key="k")

    queue.fail(queue.claim_one(), permanent=True)

    assert queue.claim_one().id == second


# 410 Gone.


def test_a_receiver_that_is_gone_disables_its_endpoint_if_the_config_says_so(queue: Queue) -> None:
    queue.endpoint("gone", GONE, protocol="http")
    queue.send_many(2, "gone")

    queue.fail(queue.claim_one(endpoint="gone"), "[DISABLE] HTTP 410", now=4)

    assert not queue.circuit("gone")["enabled"]
    assert queue.claim(10, endpoint="gone") == []
    (event,) = queue.rows("select * from ulak.event_log where event = 'endpoint.disabled'")
    assert event["endpoint_name"] == "gone"
    assert event["created_at"] == queue.at(4)
    assert (event["old_value"], event["new_value"]) == ({"enabled": True}, {"enabled": False})
    assert "410" in event["detail"]["reason"]


def test_a_receiver_that_is_gone_is_only_buried_if_the_config_is_silent(queue: Queue) -> None:
    queue.endpoint("gone", {"url": "https://example.com"}, protocol="http")
    id = queue.send("gone")

    queue.fail(queue.claim_one(endpoint="gone"), "[DISABLE] HTTP 410")

    assert queue.status(id) == "failed"
    assert queue.circuit("gone")["enabled"]


def test_another_permanent_failure_does_not_disable(queue: Queue) -> None:
    queue.endpoint("gone", GONE, protocol="http")
    queue.send("gone")

    queue.fail(queue.claim_one(endpoint="gone"), permanent=True)

    assert queue.circuit("gone")["enabled"]


def test_an_endpoint_that_is_disabled_already_is_not_disabled_again(queue: Queue) -> None:
    queue.endpoint("gone", GONE, protocol="http")
    queue.send_many(2, "gone")

    for claim in queue.claim(2, endpoint="gone"):
        queue.fail(claim, "[DISABLE] HTTP 410")

    assert queue.events("endpoint.disabled") == ["endpoint.disabled"]


# Every way to a dead letter.


def fail_it(queue: Queue) -> None:
    queue.send("a")
    queue.fail(queue.claim_one(), permanent=True)


def let_its_lease_run_out(queue: Queue) -> None:
    queue.db.execute("update ulak.endpoints set retry_policy = '{\"max_retries\": 0}' where name = 'a'")
    queue.send("a")
    queue.claim_one(lease=1)
    queue.recover(now=2)


def take_it_out(queue: Queue) -> None:
    queue.bury(queue.send("a"))


def drop_its_endpoint(queue: Queue) -> None:
    queue.send("a")
    queue.db.execute("delete from ulak.endpoints where name = 'a'")
    queue.db.execute("select ulak_private.bury_orphans(now(), 10)")


def send_it_to_a_full_endpoint(queue: Queue) -> None:
    queue.db.execute(
        'update ulak.endpoints set config = config || \'{"max_pending": 1, "when_full": "dead_letter"}\' where name = \'a\''
    )
    queue.send("a")
    queue.send("a")


@pytest.mark.parametrize(
    "way", [fail_it, let_its_lease_run_out, take_it_out, drop_its_endpoint, send_it_to_a_full_endpoint]
)
def test_every_way_to_a_dead_letter_is_logged_told_and_counted(queue: Queue, way: Callable[[Queue], None]) -> None:
    queue.endpoint("a")
    queue.endpoint("ops")
    queue.call("subscribe", "ulak.message.dead", "ops")
    queue.call("subscribe", "ulak.endpoint.dead_letters", "ops")

    way(queue)
    queue.db.execute("select ulak_private.tell_digests(now())")

    (letter,) = queue.rows("select id, original_message_id, endpoint_name from ulak.dlq")
    logged = queue.column("select detail from ulak.event_log where event = 'message.dead'")
    event, digest = queue.column(
        "select payload from ulak.queue where metadata ->> 'event_type' like 'ulak.%%' order by id"
    )
    assert [facts["dlq_id"] for facts in logged] == [event["dlq_id"]] == [letter["id"]]
    assert (event["endpoint"], event["message"]) == (letter["endpoint_name"], letter["original_message_id"])
    assert event.keys() >= {"message_id", "sender", "attempts", "error_class", "error"}
    assert (digest["endpoint"], digest["letters"], digest["skipped"]) == (letter["endpoint_name"], 1, 0)
    assert queue.status(letter["original_message_id"]) == "failed"
    assert queue.value("select count(*) from ulak_private.deliveries where status = 'failed'") == 0
