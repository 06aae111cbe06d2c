"""What a failure does: the error's class decides, the retries run out, and everybody who must know is notified."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from support.cluster import Cluster, Connect
from support.queue import Queue
from support.sessions import patience

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


def written(cluster: Cluster, since: int) -> list[str]:
    """What the server has logged since then, but for its prefix."""
    with cluster.log.open() as log:
        log.seek(since)
        return [line.rstrip("\n").split("LOG:  ")[-1] for line in log]


def test_every_death_is_one_structured_line_of_the_servers_log(queue: Queue, cluster: Cluster) -> None:
    before = cluster.log.stat().st_size
    ids = [queue.send(payload={"secret": "swordfish"}) for _ in range(2)]

    for claim in queue.claim(2):
        queue.fail(claim, 'said "no"', permanent=True)

    # Nothing else: neither the calls that led there nor the statement.
    lines = written(cluster, before)
    letters = queue.rows("select id, message_id, original_message_id from ulak.dlq order by id")
    assert [letter["original_message_id"] for letter in letters] == ids
    assert [json.loads(line.removeprefix("ulak: dead letter: ")) for line in lines] == [
        {
            "message": letter["original_message_id"],
            "message_id": str(letter["message_id"]),
            "dlq_id": letter["id"],
            "endpoint": "shop",
            "sender": "postgres",
            "attempts": 1,
            "error_class": "permanent",
            "error": '[PERMANENT] said "no"',
        }
        for letter in letters
    ]


def test_a_minute_of_an_endpoint_has_ten_lines_and_the_next_one_says_how_many_were_left_out(
    queue: Queue, cluster: Cluster
) -> None:
    queue.endpoint("other")
    queue.send_many(30)
    queue.send("other")
    before = cluster.log.stat().st_size

    for place, claim in enumerate(queue.claim(29, endpoint="shop")):
        queue.fail(claim, permanent=True, now=place)
    queue.fail(queue.claim_one(endpoint="other"), permanent=True, now=30)
    lines = written(cluster, before)
    queue.fail(queue.claim_one(endpoint="shop"), permanent=True, now=61)
    later = written(cluster, before)[len(lines) :]

    assert [line.count('"shop"') for line in lines] == [1] * 10 + [0]
    assert '"letters": 19' in later[0]
    assert '"endpoint": "shop"' in later[0]
    assert later[1].startswith("ulak: dead letter: ")
    assert len(later) == 2


def test_maintenance_says_what_was_left_out_when_no_other_death_follows(queue: Queue, cluster: Cluster) -> None:
    for id in queue.send_many(15):
        queue.bury(id)
    before = cluster.log.stat().st_size

    queue.db.execute("select ulak_private.close_dead_logs(%s)", [queue.at(59)])
    assert written(cluster, before) == []
    queue.db.execute("select ulak_private.close_dead_logs(%s)", [queue.at(60)])
    queue.db.execute("select ulak_private.close_dead_logs(%s)", [queue.at(120)])

    (line,) = written(cluster, before)
    assert '"letters": 5' in line


def test_messages_that_do_not_fit_are_one_line_a_minute(queue: Queue, cluster: Cluster) -> None:
    queue.endpoint("small", {"max_pending": 1, "when_full": "dead_letter"})
    before = cluster.log.stat().st_size

    queue.send_many(5, "small")
    queue.send("small")

    (line,) = written(cluster, before)
    said, facts = line.split(": {")
    assert said == "ulak: endpoint is full, messages for it become dead letters"
    told = json.loads("{" + facts)
    assert (told["endpoint"], told["max_pending"], told["error_class"]) == ("small", 1, "permanent")


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


# NOTIFY: needs commits.


@pytest.fixture
def committed(db: psycopg.Connection[Any]) -> Queue:
    queue = Queue(db)
    queue.endpoint("a")
    queue.endpoint("b")
    return queue


def heard(listener: psycopg.Connection[Any]) -> list[Any]:
    """What was notified until now: a notification of our own is the last."""
    listener.execute("notify ulak_events, '\"end\"'")
    told: list[Any] = []
    for notification in listener.notifies(timeout=patience()):
        if notification.payload == '"end"':
            break
        told.append(json.loads(notification.payload))
    return told


def briefly(queue: Queue, told: list[Any]) -> list[Any]:
    """Without the facts about the last letter, which are in every announcement."""
    for each in told:
        logged = queue.value(
            "select detail from ulak.event_log where event = 'message.dead' and message_id = %s", each["last"]
        )
        assert {name: each.pop(name) for name in logged} == logged
        assert logged.keys() >= {"dlq_id", "message_id", "sender", "attempts", "error_class", "error"}
    return told


def test_deaths_are_notified_at_most_once_a_second_and_endpoint(committed: Queue, connect: Connect) -> None:
    listener = connect()
    listener.execute("listen ulak_events")
    first, *_ = committed.send_many(4, "a")
    (other,) = committed.send_many(1, "b")

    for now in (1, 1.5, 1.999, 2):
        committed.fail(committed.claim_one(endpoint="a", now=now), permanent=True, now=now)
    committed.fail(committed.claim_one(endpoint="b", now=2), permanent=True, now=2)

    assert briefly(committed, heard(listener)) == [
        {"event": "message.dead", "endpoint": "a", "messages": 1, "last": first},
        {"event": "message.dead", "endpoint": "a", "messages": 1, "last": first + 3},
        {"event": "message.dead", "endpoint": "b", "messages": 1, "last": other},
    ]


def test_many_deaths_at_once_are_one_notification_each_endpoint(committed: Queue, connect: Connect) -> None:
    listener = connect()
    listener.execute("listen ulak_events")
    ids = committed.send_many(3, "a")
    others = committed.send_many(2, "b")
    claims = committed.claim(10)

    committed.value(
        "select ulak_private.settle_many('w', %s, %s, %s)",
        [claim.id for claim in claims],
        [1] * 5,
        ["[PERMANENT] no"] * 5,
    )

    assert briefly(committed, heard(listener)) == [
        {"event": "message.dead", "endpoint": "a", "messages": 3, "last": ids[-1]},
        {"event": "message.dead", "endpoint": "b", "messages": 2, "last": others[-1]},
    ]


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
def test_every_way_to_a_dead_letter_is_announced(
    committed: Queue, connect: Connect, cluster: Cluster, way: Callable[[Queue], None]
) -> None:
    listener = connect()
    listener.execute("listen ulak_events")
    before = cluster.log.stat().st_size

    way(committed)

    (letter,) = committed.rows("select id, original_message_id, endpoint_name from ulak.dlq")
    (told,) = briefly(committed, heard(listener))
    assert told == {
        "event": "message.dead",
        "endpoint": letter["endpoint_name"],
        "messages": 1,
        "last": letter["original_message_id"],
    }
    (line,) = [line for line in written(cluster, before) if line.startswith("ulak: ") and "dead letter" in line]
    assert json.loads(line[line.index("{") :])["dlq_id"] == letter["id"]
    assert committed.status(letter["original_message_id"]) == "failed"
    assert committed.value("select count(*) from ulak_private.deliveries where status = 'failed'") == 0
