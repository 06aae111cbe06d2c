"""Outcomes: an endpoint that announces has ulak publish what became of its messages."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import pytest
from support.queue import Queue

OUTCOMES = ["delivered", "dead", "expired", "cancelled"]


def told(queue: Queue, endpoint: str = "callbacks") -> list[Any]:
    """Payloads that wait for it, in order."""
    return queue.column(
        "select payload from ulak.queue where endpoint_id = (select id from ulak.endpoints where name = %s) order by id",
        endpoint,
    )


def types(queue: Queue, endpoint: str = "callbacks") -> list[tuple[str, int]]:
    return [(event["type"], event["message"]) for event in told(queue, endpoint)]


@pytest.fixture
def shop(queue: Queue) -> Queue:
    """`shop` announces everything, and `callbacks` listens."""
    queue.endpoint("shop", {"announce": OUTCOMES}, {"max_retries": 0})
    queue.endpoint("callbacks")
    for outcome in OUTCOMES:
        queue.call("subscribe", f"ulak.message.{outcome}", "callbacks")
    return queue


def test_a_delivery_is_announced_with_what_the_sender_needs(shop: Queue) -> None:
    conversation = uuid4()
    metadata = {"order": {"id": 4, "note": None}, "event_type": "order.placed"}
    id = shop.send(correlation_id=conversation, metadata=metadata)
    answer = {"status": 200, "body": None}
    shop.complete(shop.claim_one(endpoint="shop"), response=answer, now=5)

    (event,) = told(shop)

    assert event == {
        "type": "ulak.message.delivered",
        "at": event["at"],
        "status": "delivered",
        "endpoint": "shop",
        "message": id,
        "message_id": str(shop.message(id)["message_id"]),
        "event_type": "order.placed",
        "correlation_id": str(conversation),
        "sender": "postgres",
        "attempts": 1,
        "metadata": metadata,
        "response": answer,
    }


def test_an_announcement_carries_the_correlation_id_of_its_message_and_a_header_that_nobody_can_forge(
    shop: Queue,
) -> None:
    conversation = uuid4()
    shop.send(correlation_id=conversation)
    shop.complete(shop.claim_one(endpoint="shop"))

    claim = shop.claim_one(endpoint="callbacks")

    assert claim.correlation_id == conversation
    assert claim.headers["ulak-event-type"] == "ulak.message.delivered"


def test_a_dead_letter_is_announced_once_with_metadata_and_response(shop: Queue) -> None:
    id = shop.send(metadata={"order": 4})
    shop.fail(shop.claim_one(endpoint="shop"), "HTTP 404", permanent=True)

    (event,) = told(shop)

    assert (event["type"], event["status"], event["message"]) == ("ulak.message.dead", "dead", id)
    assert event["dlq_id"] == shop.dead(id)["id"]
    assert (event["error"], event["metadata"]) == ("[PERMANENT] HTTP 404", {"order": 4})


def test_operators_learn_of_dead_letters_of_endpoints_that_announce_nothing_and_not_of_their_metadata(
    shop: Queue,
) -> None:
    shop.endpoint("quiet")
    shop.send("quiet", metadata={"order": 4})
    shop.bury(shop.send("quiet", metadata={"order": 4}))

    (event,) = told(shop)

    assert (event["type"], event["endpoint"]) == ("ulak.message.dead", "quiet")
    assert "metadata" not in event


def test_a_message_that_recovery_gives_up_is_announced(shop: Queue) -> None:
    id = shop.send()
    shop.claim_one(endpoint="shop", lease=10)
    shop.recover(now=11)

    assert types(shop) == [("ulak.message.dead", id)]


def test_a_message_that_does_not_fit_is_announced_as_dead(shop: Queue) -> None:
    shop.endpoint("small", {"announce": ["dead"], "max_pending": 1, "when_full": "dead_letter"})
    shop.send("small")
    id = shop.send("small")

    assert types(shop) == [("ulak.message.dead", id)]


def test_messages_that_expire_or_are_taken_back_are_announced(shop: Queue) -> None:
    late = shop.send(expires_at=5)
    shop.expire(now=6)
    cancelled, purged = shop.send(), shop.send()
    shop.call("cancel", cancelled)
    shop.call("purge", "shop")

    assert types(shop) == [
        ("ulak.message.expired", late),
        ("ulak.message.cancelled", cancelled),
        ("ulak.message.cancelled", purged),
    ]


def test_a_batch_announces_each_of_its_outcomes_once(shop: Queue) -> None:
    ids = shop.send_many(20)
    claims = shop.claim(20, endpoint="shop")
    errors = [None if claim.id % 2 else "[PERMANENT] no" for claim in claims]
    shop.value(
        "select ulak_private.settle_many('w', %s, %s, %s, p_now => %s)",
        [claim.id for claim in claims],
        [claim.attempt for claim in claims],
        errors,
        shop.at(1),
    )

    assert sorted(types(shop), key=lambda event: event[1]) == [
        ("ulak.message.delivered" if id % 2 else "ulak.message.dead", id) for id in ids
    ]


def test_only_the_outcomes_that_the_config_names_are_announced(shop: Queue) -> None:
    shop.endpoint("strict", {"announce": ["expired"]})
    shop.endpoint("quiet")
    for endpoint in ("strict", "quiet"):
        shop.send(endpoint)
        shop.complete(shop.claim_one(endpoint=endpoint))
        shop.call("cancel", shop.send(endpoint))

    assert told(shop) == []


def test_a_zombie_announces_nothing(shop: Queue) -> None:
    id = shop.send()
    claim = shop.claim_one(endpoint="shop")
    shop.value("select ulak_private.settle_many('other', %s, %s)", [claim.id], [claim.attempt])

    assert shop.status(id) == "processing"
    assert told(shop) == []


def test_announcements_are_never_announced(queue: Queue) -> None:
    for name in ("ping", "pong"):
        queue.endpoint(name, {"announce": OUTCOMES})
        for outcome in OUTCOMES:
            queue.call("subscribe", f"ulak.message.{outcome}", name)
    queue.send("ping")
    queue.complete(queue.claim_one(endpoint="ping"))
    assert types(queue, "ping") == []

    queue.complete(queue.claim_one(endpoint="pong"))
    queue.send("ping")
    queue.complete(queue.claim_one(endpoint="ping"))
    queue.call("cancel", queue.value("select max(id) from ulak.queue"))

    assert queue.value("select count(*) from ulak.queue") == 0


def test_a_full_queue_still_announces(shop: Queue) -> None:
    id = shop.send()
    claim = shop.claim_one(endpoint="shop")
    shop.call("configure", "max_queue_size", "10")
    shop.endpoint("other")
    for _ in range(9):
        shop.send("other")
    assert shop.refuses("send", "other", {}).sqlstate == "53400"

    shop.complete(claim)

    assert types(shop) == [("ulak.message.delivered", id)]


def test_a_subscription_chooses_by_endpoint(queue: Queue) -> None:
    queue.endpoint("callbacks")
    for name in ("shop", "billing"):
        queue.endpoint(name, {"announce": ["delivered"]})
    queue.call("subscribe", "ulak.message.delivered", "callbacks", {"endpoint": "billing"})
    for name in ("shop", "billing"):
        queue.send(name)
        queue.complete(queue.claim_one(endpoint=name))

    assert [event["endpoint"] for event in told(queue)] == ["billing"]


def test_a_config_with_an_unknown_outcome_is_refused(queue: Queue) -> None:
    error = queue.refuses("create_endpoint", "shop", "pull", {"announce": ["lost"]})

    assert error.sqlstate == "22023"
    assert "$.announce[0]" in str(error.message_primary)


def test_endpoints_that_announce_nothing_cost_one_look_at_an_empty_index(queue: Queue) -> None:
    queue.value("select set_config('enable_seqscan', 'off', true)")
    # Without ids, for which statistics may favour the primary key.
    plan = queue.column("explain select from ulak.endpoints e where e.config ? 'announce'")

    assert "endpoints_announcing_idx" in "\n".join(plan)
