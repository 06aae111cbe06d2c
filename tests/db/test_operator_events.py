"""Operator events: ulak tells subscribers about its endpoints and dead letters, never about its own telling."""

from __future__ import annotations

import json
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from support.cluster import Cluster, Connect
from support.queue import Queue
from support.sessions import Running

EVENTS = [
    "ulak.endpoint.closed",
    "ulak.endpoint.dead_letters",
    "ulak.endpoint.disabled",
    "ulak.endpoint.failing",
    "ulak.endpoint.opened",
    "ulak.message.cancelled",
    "ulak.message.dead",
    "ulak.message.delivered",
    "ulak.message.expired",
]


def told(queue: Queue, endpoint: str = "ops") -> list[Any]:
    """Payloads that wait for it, in order."""
    return queue.column(
        "select payload from ulak.queue where endpoint_id = (select id from ulak.endpoints where name = %s) order by id",
        endpoint,
    )


def break_circuit(queue: Queue, endpoint: str, now: float = 0) -> None:
    id = queue.circuit(endpoint)["id"]
    for _ in range(10):
        queue.call("update_circuit_breaker", id, False, now=queue.at(now))


@pytest.fixture
def ops(queue: Queue) -> Queue:
    """`shop` is watched by `ops`."""
    queue.endpoint("shop")
    queue.endpoint("ops")
    for event in EVENTS:
        queue.call("subscribe", event, "ops")
    return queue


def test_every_installation_has_them(queue: Queue) -> None:
    query = "select name from ulak.event_types where starts_with(name, 'ulak.') and description is not null order by 1"

    assert queue.column(query) == EVENTS


def test_they_can_not_be_created_dropped_or_published(queue: Queue) -> None:
    assert queue.refuses("create_event_type", "ulak.endpoint.mine").sqlstate == "42939"
    assert queue.refuses("drop_event_type", "ulak.message.dead").sqlstate == "42939"
    assert queue.refuses("publish", "ulak.message.dead", {}).sqlstate == "42939"


def test_an_opened_circuit_is_announced_once_until_it_closes(ops: Queue) -> None:
    ops.send("shop")
    break_circuit(ops, "shop")
    # A probe that fails opens it again: no news.
    ops.fail(ops.claim_one(endpoint="shop", now=31), now=32)
    assert ops.state("shop") == "open"

    (event,) = told(ops)

    assert (event["type"], event["endpoint"], event["failures"]) == ("ulak.endpoint.opened", "shop", 10)
    assert event["error"] == "[RETRYABLE] reported"


def test_a_closed_circuit_is_announced(ops: Queue) -> None:
    ops.send("shop")
    break_circuit(ops, "shop")
    ops.complete(ops.claim_one(endpoint="shop", now=31), now=32)

    assert [event["type"] for event in told(ops)] == ["ulak.endpoint.opened", "ulak.endpoint.closed"]


def test_a_reset_of_a_closed_circuit_is_no_news(ops: Queue) -> None:
    ops.call("reset_circuit_breaker", "shop")
    assert told(ops) == []

    break_circuit(ops, "shop")
    ops.call("reset_circuit_breaker", "shop")

    assert [event["type"] for event in told(ops)] == ["ulak.endpoint.opened", "ulak.endpoint.closed"]


def test_a_disabled_endpoint_is_announced_with_its_reason(ops: Queue) -> None:
    ops.call("disable_endpoint", "shop")
    ops.call("disable_endpoint", "shop")
    ops.call("enable_endpoint", "shop")

    (event,) = told(ops)

    assert (event["type"], event["endpoint"]) == ("ulak.endpoint.disabled", "shop")
    assert event["reason"].startswith("disabled by ")


def test_an_endpoint_that_is_gone_is_announced_as_disabled_and_its_message_as_dead(ops: Queue) -> None:
    ops.call("create_endpoint", "gone", "http", {"url": "https://example.com/hook", "auto_disable_on_gone": True})
    ops.send("gone")
    ops.fail(ops.claim_one(endpoint="gone"), "[DISABLE] HTTP 410")

    events = told(ops)

    assert [event["type"] for event in events] == ["ulak.message.dead", "ulak.endpoint.disabled"]
    assert events[1]["reason"] == "the receiver answered 410 Gone"


def test_each_dead_letter_is_announced_without_its_payload(ops: Queue) -> None:
    conversation = uuid4()
    options = {"correlation_id": conversation, "metadata": {"event_type": "order.paid"}}
    ids = [ops.send("shop", {"iban": "DE02"}, **options) for _ in range(3)]
    for claim in ops.claim(3, endpoint="shop"):
        ops.fail(claim, "HTTP 404", permanent=True)

    events = told(ops)
    (letter,) = ops.rows("select id, message_id from ulak.dlq where original_message_id = %s", ids[0])

    assert [event["message"] for event in events] == ids
    assert events[0] == {
        "type": "ulak.message.dead",
        "at": events[0]["at"],
        "endpoint": "shop",
        "message": ids[0],
        "message_id": str(letter["message_id"]),
        "dlq_id": letter["id"],
        "event_type": "order.paid",
        "correlation_id": str(conversation),
        "sender": "postgres",
        "attempts": 1,
        "error_class": "permanent",
        "error": "[PERMANENT] HTTP 404",
    }


def test_operators_hear_of_a_message_that_recovery_gives_up(ops: Queue) -> None:
    ops.endpoint("brittle", policy={"max_retries": 0})
    ops.send("brittle")
    ops.claim_one(endpoint="brittle", lease=10)

    ops.recover(now=11)

    assert [event["endpoint"] for event in told(ops)] == ["brittle"]


def test_a_filter_narrows_what_is_announced(queue: Queue) -> None:
    for name in ("shop", "bank", "ops"):
        queue.endpoint(name)
    queue.call("subscribe", "ulak.message.dead", "ops", filter={"endpoint": "bank"})

    for name in ("shop", "bank"):
        queue.bury(queue.send(name))

    assert [event["endpoint"] for event in told(queue)] == ["bank"]


def test_an_endpoint_is_told_nothing_about_itself(ops: Queue) -> None:
    break_circuit(ops, "ops")
    ops.call("disable_endpoint", "ops")
    ops.bury(ops.send("ops"))

    assert told(ops) == []


def test_the_death_of_an_operator_event_is_not_announced(ops: Queue) -> None:
    ops.endpoint("second")
    ops.call("subscribe", "ulak.message.dead", "second")
    ops.bury(ops.send("shop"))
    (letter,) = ops.column("select id from ulak.queue where endpoint_id = %s", ops.circuit("ops")["id"])

    dead = ops.bury(letter)

    assert len(told(ops, "second")) == 1
    assert ops.call("redrive_message", dead) > letter
    assert len(told(ops, "second")) == 1


def test_two_watchers_that_are_down_do_not_talk_in_a_circle(queue: Queue) -> None:
    queue.endpoint("a", {"circuit_breaker": {"threshold": 1}}, {"max_retries": 0})
    queue.endpoint("b", {"circuit_breaker": {"threshold": 1}}, {"max_retries": 0})
    for event in EVENTS:
        queue.call("subscribe", event, "a")
        queue.call("subscribe", event, "b")
    queue.send("a")

    for step in range(50):
        for claim in queue.claim(10, now=step * 60):
            queue.fail(claim, now=step * 60)

    # b heard that a opened and that its message died; a heard that b opened. Nothing more was said.
    assert queue.value("select count(*) from ulak.dlq") == 4
    assert queue.claim(10, now=51 * 60) == []


def test_without_a_subscription_nothing_is_queued(queue: Queue) -> None:
    queue.endpoint("shop")
    queue.bury(queue.send("shop"))
    break_circuit(queue, "shop")
    queue.call("disable_endpoint", "shop")

    assert queue.value("select count(*) from ulak.queue where status = 'pending'") == 0


def test_a_full_queue_never_makes_a_settle_fail(ops: Queue) -> None:
    ops.send("shop")
    claim = ops.claim_one(endpoint="shop")
    ops.send("shop")
    ops.call("configure", "max_queue_size", "1")

    ops.fail(claim, "HTTP 404", permanent=True)

    assert ops.status(claim.id) == "failed"
    assert told(ops) == []
    assert ops.value("select detail ->> 'event_type' from ulak.event_log where event = 'operator_event.skipped'") == (
        "ulak.message.dead"
    )


def test_what_an_endpoint_announces_is_owed_by_a_full_queue_too(ops: Queue) -> None:
    ops.call("alter_endpoint", "shop", {"announce": ["dead"]})
    first = ops.send("shop")
    ops.call("configure", "max_queue_size", "1")

    ops.bury(first)

    assert [event["message"] for event in told(ops)] == [first]


def test_an_endpoint_that_is_being_dropped_delays_no_other(db: psycopg.Connection[Any], connect: Connect) -> None:
    queue = Queue(db)
    queue.endpoint("shop")
    queue.endpoint("ops")
    queue.call("subscribe", "ulak.message.dead", "ops")
    id = queue.send("shop")
    dropping = connect(autocommit=False)
    dropping.execute("select ulak.drop_endpoint('ops')")

    Running(lambda: queue.bury(id)).result()

    dropping.commit()
    assert queue.status(id) == "failed"
    assert queue.column("select status from ulak.queue") == ["pending"]
    db.execute("call ulak.run_maintenance()")
    assert queue.column("select status from ulak.queue") == []
    assert queue.column("select status from ulak.archive") == ["failed", "failed"]


def test_they_carry_their_type_as_cloudevents_do(ops: Queue) -> None:
    ops.bury(ops.send("shop"))

    assert ops.value("select metadata from ulak.queue where status = 'pending'") == {"event_type": "ulak.message.dead"}


# The digest.


@pytest.fixture
def pager(queue: Queue) -> Queue:
    """`shop` and `billing` are watched by `pager`, by digests alone."""
    for name in ("shop", "billing", "pager"):
        queue.endpoint(name)
    queue.call("subscribe", "ulak.endpoint.dead_letters", "pager")
    return queue


def digest(queue: Queue, now: float) -> None:
    queue.db.execute("select ulak_private.maintenance_step('samples', now(), '-infinity', %s)", [queue.at(now)])


def test_many_dead_letters_are_one_digest_for_each_endpoint(pager: Queue) -> None:
    for n in range(3):
        pager.bury(pager.send("shop", metadata={"event_type": "sold"}), f"HTTP 503 after {n} s", now=n)
    pager.bury(pager.send("shop"), "refused", now=3)
    pager.bury(pager.send("billing"), "refused", now=4)
    assert told(pager, "pager") == []

    digest(pager, 60)

    shop, billing = told(pager, "pager")
    assert (shop["type"], shop["endpoint"]) == ("ulak.endpoint.dead_letters", "shop")
    assert (shop["letters"], shop["others"], shop["skipped"]) == (4, 0, 0)
    assert shop["counts"] == [
        {"event_type": "sold", "error": "[PERMANENT] HTTP 503 after # s", "letters": 3},
        {"error": "[PERMANENT] refused", "letters": 1},
    ]
    assert (shop["since"] < shop["at"], billing["endpoint"], billing["letters"]) == (True, "billing", 1)


def test_a_digest_tells_of_each_letter_once_and_is_not_sent_about_nothing(pager: Queue) -> None:
    pager.bury(pager.send("shop"))
    digest(pager, 60)
    digest(pager, 120)
    pager.bury(pager.send("shop"), now=130)
    digest(pager, 180)

    assert [event["letters"] for event in told(pager, "pager")] == [1, 1]


def test_a_digest_names_the_twenty_most_frequent_causes(pager: Queue) -> None:
    for n in range(25):
        for _ in range(2 if n == 24 else 1):
            pager.bury(pager.send("shop"), f"cause {chr(97 + n)}")

    digest(pager, 60)

    (event,) = told(pager, "pager")
    assert event["counts"][0] == {"error": "[PERMANENT] cause y", "letters": 2}
    assert (len(event["counts"]), event["others"], event["letters"]) == (20, 5, 26)


def test_without_a_subscriber_nothing_is_counted(queue: Queue) -> None:
    queue.endpoint("shop")
    queue.bury(queue.send("shop"))

    assert queue.value("select count(*) from ulak_private.dead_counts") == 0


def test_a_digest_that_cannot_be_delivered_is_in_no_digest(pager: Queue) -> None:
    pager.endpoint("boss")
    pager.call("subscribe", "ulak.endpoint.dead_letters", "boss")
    pager.bury(pager.send("shop"))
    digest(pager, 60)
    for id in pager.column("select id from ulak.queue where status = 'pending'"):
        pager.bury(id, now=61)

    digest(pager, 120)

    assert told(pager, "pager") == told(pager, "boss") == []


def test_a_digest_is_owed_by_a_full_queue_and_says_how_many_letters_had_no_event_of_their_own(pager: Queue) -> None:
    """A filter counts: nobody wanted an event about `billing`."""
    pager.endpoint("programs")
    pager.call("subscribe", "ulak.message.dead", "programs", filter={"endpoint": "shop"})
    pager.bury(pager.send("shop"))
    ids = [*pager.send_many(3, "shop"), pager.send("billing")]
    pager.call("configure", "max_queue_size", "1")

    for id in ids:
        pager.bury(id)
    digest(pager, 60)

    assert len(told(pager, "programs")) == 1
    assert [(event["endpoint"], event["letters"], event["skipped"]) for event in told(pager, "pager")] == [
        ("shop", 4, 3),
        ("billing", 1, 0),
    ]


# The server's log.


def logged(cluster: Cluster, since: int) -> list[Any]:
    """What its lines about dead letters say. Context follows on lines of its own, where ulak can't leave it out."""
    with cluster.log.open() as log:
        log.seek(since)
        lines = [line.split("LOG:  ulak: dead letters: ") for line in log if "dead" in line]
    assert all(len(parts) == 2 for parts in lines)
    return [json.loads(facts) for _, facts in lines]


def test_the_servers_log_has_nothing_of_dead_letters_unless_somebody_asks_for_it(
    queue: Queue, cluster: Cluster
) -> None:
    before = cluster.log.stat().st_size
    queue.endpoint("shop")
    queue.endpoint("small", {"max_pending": 1, "when_full": "dead_letter"})

    queue.bury(queue.send("shop"))
    queue.send_many(5, "small")
    digest(queue, 60)

    assert logged(cluster, before) == []


def test_a_digest_is_no_line_of_the_servers_log(pager: Queue, cluster: Cluster) -> None:
    before = cluster.log.stat().st_size

    pager.bury(pager.send("shop"))
    digest(pager, 60)

    assert len(told(pager, "pager")) == 1
    assert logged(cluster, before) == []


def test_each_minute_of_an_endpoint_is_one_line_with_its_name_and_how_many(queue: Queue, cluster: Cluster) -> None:
    queue.call("configure", "log_dlq", "true")
    before = cluster.log.stat().st_size
    queue.endpoint("shop")
    queue.endpoint("small", {"max_pending": 1, "when_full": "dead_letter"})

    for n in range(3):
        queue.bury(queue.send("shop"), f"refused by {chr(97 + n)}")
    queue.send_many(5, "small")
    digest(queue, 60)
    digest(queue, 120)

    assert logged(cluster, before) == [{"endpoint": "shop", "letters": 3}, {"endpoint": "small", "letters": 4}]


def test_the_log_tells_of_a_pager_that_is_down_too(pager: Queue, cluster: Cluster) -> None:
    pager.call("configure", "log_dlq", "true")
    pager.bury(pager.send("shop"))
    digest(pager, 60)
    before = cluster.log.stat().st_size

    for id in pager.column("select id from ulak.queue where status = 'pending'"):
        pager.bury(id, now=61)
    digest(pager, 120)

    assert logged(cluster, before) == [{"endpoint": "pager", "letters": 1}]
    assert told(pager, "pager") == []
