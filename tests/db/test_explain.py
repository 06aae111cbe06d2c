"""explain(): the story of a message, and every way in which it can go on or end."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from support.cluster import Connect
from support.queue import Queue
from support.statistics import add_worker, worked

HTTP = {"url": "https://example.com/hook"}


def sender(queue: Queue) -> str:
    return str(queue.value("select session_user"))


def story(queue: Queue, id: int, now: float = 0) -> list[str]:
    return queue.column("select what from ulak.explain(%s, %s)", id, queue.at(now))


def ending(queue: Queue, id: int, now: float = 0) -> tuple[float | None, str]:
    """When, in seconds after base, and what."""
    row = queue.rows("select at, what from ulak.explain(%s, %s)", id, queue.at(now))[-1]
    when = None if row["at"] is None else (row["at"] - queue.base).total_seconds()
    return when, row["what"]


def open_circuit(queue: Queue, endpoint: str = "shop", now: float = 0) -> None:
    id = queue.circuit(endpoint)["id"]
    for _ in range(10):
        queue.call("update_circuit_breaker", id, False, now=queue.at(now))


def test_a_message_that_is_due_is_taken_at_the_workers_next_turn(queue: Queue) -> None:
    queue.endpoint("shop", HTTP, protocol="http")
    add_worker(queue)

    id = queue.send()

    assert story(queue, id) == [
        f'sent by {sender(queue)} to endpoint "shop"',
        "next: a worker takes it at its next turn",
    ]


def test_options_of_the_message_are_shown(queue: Queue) -> None:
    queue.endpoint()

    id = queue.send(priority=7, ordering_key="k", expires_at=3600)

    assert story(queue, id)[0].startswith(
        f'sent by {sender(queue)} to endpoint "shop", priority 7, ordering key "k", not after '
    )


def test_without_a_worker_nothing_happens_and_the_fix_is_named(queue: Queue) -> None:
    queue.endpoint("shop", HTTP, protocol="http")
    add_worker(queue)
    id = queue.send()

    assert ending(queue, id, now=16) == (None, "next: nothing, no worker is alive: select * from ulak.start();")


def test_a_pull_endpoint_waits_for_an_external_worker(queue: Queue) -> None:
    queue.endpoint()

    assert ending(queue, queue.send())[1] == "next: an external worker claims it"


def test_a_long_queue_is_described_with_its_time(queue: Queue) -> None:
    endpoint = queue.endpoint("shop", HTTP, protocol="http")
    add_worker(queue)
    ids = queue.send_many(200)
    worked(queue, endpoint, delivered=600_000, now=-60)

    told = ending(queue, ids[-1])[1]

    assert told.startswith("next: a worker takes it in turn; 200 wait for this endpoint, and at ")


def test_a_scheduled_message_says_when(queue: Queue) -> None:
    queue.endpoint()

    id = queue.send(scheduled_at=600)

    assert ending(queue, id) == (600.0, "next: it is scheduled, and due in 10m 0s")


def test_a_failed_attempt_is_shown_with_its_retry(queue: Queue) -> None:
    queue.endpoint(policy={"base_delay_seconds": 20, "max_retries": 3})
    id = queue.send()
    queue.fail(queue.claim_one(), "[RETRYABLE] HTTP 503", now=2)

    assert story(queue, id, now=5)[1:] == [
        "attempt 1 failed after 2.0s: [RETRYABLE] HTTP 503",
        "next: retry 1 of 3, in 17.0s",
    ]
    assert ending(queue, id, now=5)[0] == 22.0


def test_a_message_that_was_given_back_says_so(queue: Queue) -> None:
    queue.endpoint()
    id = queue.send()
    queue.release(queue.claim_one(), delay=30)

    assert ending(queue, id) == (30.0, "next: a worker returned it unprocessed; it is due again in 30.0s")


def test_a_message_in_flight_names_its_worker_and_its_lease(queue: Queue) -> None:
    queue.endpoint()
    id = queue.send()
    queue.claim_one(worker="alpha", lease=60)

    told = story(queue, id, now=10)

    assert told[1].startswith("attempt 1: leased by alpha until ")
    assert told[2] == (
        "next: its worker settles it or renews the lease; if it goes silent, the message is recovered "
        "when the lease runs out, in 50.0s"
    )
    assert ending(queue, id)[0] == 60.0


def test_an_expired_lease_is_taken_back_by_any_worker(queue: Queue) -> None:
    queue.endpoint()
    id = queue.send()
    queue.claim_one(lease=60)

    assert "no worker is alive: call ulak.run_maintenance();" in ending(queue, id, now=61)[1]

    add_worker(queue, heartbeat=61)

    assert ending(queue, id, now=61)[1] == "next: the lease ran out. A worker or maintenance recovers it and retries it"


def test_a_message_behind_another_of_its_key_names_that_one(queue: Queue) -> None:
    queue.endpoint()
    head, behind = queue.send(ordering_key="k"), queue.send(ordering_key="k")

    assert ending(queue, behind)[1] == (
        f'next: it waits for its ordering key "k" behind message {head}, which is pending: select * from ulak.explain({head});'
    )
    assert ending(queue, head)[1] == "next: an external worker claims it"


def test_a_message_that_stays_parked_after_its_predecessor_is_explained(queue: Queue) -> None:
    queue.endpoint()
    head = queue.send(ordering_key="k")
    id = queue.send(ordering_key="k")
    queue.db.execute("update ulak.queue set next_retry_at = 'infinity' where id = %s", [id])
    queue.db.execute("delete from ulak.queue where id = %s", [head])

    assert ending(queue, id)[1] == (
        'next: it is the first of its ordering key "k" now, but still parked; no worker is alive, '
        "so maintenance makes it due within a minute: call ulak.run_maintenance();"
    )
    queue.db.execute("select ulak_private.maintenance_step('ordering', now(), '-infinity', now())")
    assert ending(queue, id)[1] == "next: an external worker claims it"


def test_an_open_circuit_says_when_it_probes(queue: Queue) -> None:
    queue.endpoint()
    id = queue.send()
    open_circuit(queue)

    assert ending(queue, id, now=10) == (
        30.0,
        'next: the circuit of endpoint "shop" is open; one message is sent as a probe in 20.0s',
    )
    assert (
        ending(queue, id, now=30)[1]
        == 'next: the circuit of endpoint "shop" is due for a probe, with a worker\'s next claim'
    )


def test_while_a_probe_is_under_way_the_others_wait_for_it(queue: Queue) -> None:
    queue.endpoint()
    probe, other = queue.send(), queue.send()
    open_circuit(queue)
    queue.claim_one(now=31)

    assert ending(queue, other, now=32)[1] == (
        f'next: message {probe} probes the circuit of endpoint "shop"; if it gets through, the others follow'
    )


@pytest.mark.parametrize(
    ("interval", "rate", "wait"),
    [
        ("second", "6.00 messages a second", "167ms"),
        ("minute", "6.00 messages a minute", "10.0s"),
        ("hour", "6.00 messages an hour", "10m 0s"),
    ],
)
def test_a_rate_limit_says_when_the_next_may_go(queue: Queue, interval: str, rate: str, wait: str) -> None:
    queue.endpoint(config={"rate_limit": {"limit": 6, "interval": interval, "burst": 1}})
    queue.send()
    id = queue.send()
    assert len(queue.claim(10)) == 1

    when, told = ending(queue, id)

    assert told == f'next: endpoint "shop" is limited to {rate}; the next message may leave in {wait}'
    assert when == pytest.approx({"second": 1, "minute": 60, "hour": 3600}[interval] / 6, abs=1e-5)


def test_a_released_backlog_is_limited_as_well(queue: Queue) -> None:
    queue.endpoint()
    id = queue.send()
    queue.call("disable_endpoint", "shop")
    queue.call("enable_endpoint", "shop", 2, now=queue.at(0))

    assert "limited to 2.00 messages a second; the next message may leave in 500ms" in ending(queue, id)[1]


def test_a_full_endpoint_waits_for_one_in_flight(queue: Queue) -> None:
    queue.endpoint(config={"max_in_flight": 1})
    queue.send()
    id = queue.send()
    queue.claim_one()

    assert (
        ending(queue, id)[1]
        == 'next: endpoint "shop" is at its limit of 1 message in flight; the next message leaves when one of them is done'
    )


def test_a_disabled_endpoint_holds_it(queue: Queue) -> None:
    queue.endpoint()
    id = queue.send()
    queue.call("disable_endpoint", "shop")

    assert ending(queue, id) == (
        None,
        "next: nothing, endpoint \"shop\" is disabled. To release what it holds: select ulak.enable_endpoint('shop');",
    )


def test_a_dropped_endpoint_ends_it(queue: Queue) -> None:
    queue.endpoint()
    id = queue.send()
    queue.db.execute("delete from ulak.endpoints")

    assert "which no longer exists" in story(queue, id)[0]
    assert ending(queue, id) == (
        None,
        f"next: nothing, its endpoint was dropped. To remove it: select ulak.archive_single_to_dlq({id}, 'endpoint dropped');",
    )


def test_messages_of_another_cluster_are_held(queue: Queue) -> None:
    queue.endpoint()
    id = queue.send()
    queue.db.execute("update ulak_private.cluster_identity set system_identifier = 1")

    assert ending(queue, id)[1].endswith("If this cluster is to deliver them: select ulak.adopt();")


def test_a_delivered_message_says_how_long_it_took(queue: Queue) -> None:
    queue.endpoint()
    id = queue.send()
    queue.complete(queue.claim_one(now=2), now=3)

    assert story(queue, id)[1:] == [
        "delivered in attempt 1, which took 1.0s; 3.0s after it was sent",
        f"next: nothing. To send it again: select ulak.replay_message({id});",
    ]


def test_an_expired_message_says_when(queue: Queue) -> None:
    queue.endpoint()
    id = queue.send(expires_at=60)

    assert ending(queue, id, now=61) == (60.0, "next: it has expired; a worker or maintenance marks it within a minute")

    queue.expire(now=62)

    assert story(queue, id, now=63)[1].startswith("expired: it was not delivered by ")
    assert ending(queue, id, now=63)[1] == f"next: nothing. To send it again: select ulak.replay_message({id});"


def test_a_dead_letter_names_the_command_that_redrives_it(queue: Queue) -> None:
    queue.endpoint()
    id = queue.send()
    queue.fail(queue.claim_one(), "HTTP 404", permanent=True, now=1)

    letter = queue.dead(id)["id"]

    assert story(queue, id)[1:] == [
        "attempt 1 failed after 1.0s: [PERMANENT] HTTP 404",
        "given up after 1 attempt: [PERMANENT] HTTP 404",
        f"next: nothing, it is dead letter {letter}. To try again: select ulak.redrive_message({letter});",
    ]


def test_a_redriven_message_goes_on_under_another_id(queue: Queue) -> None:
    queue.endpoint()
    old = queue.send()
    letter = queue.bury(old, "no such order")
    new = queue.call("redrive_message", letter, "berna", now=queue.at(60))

    assert story(queue, old)[-2:] == [
        f"redriven by berna as message {new}",
        f"next: it continues as another message: select * from ulak.explain({new});",
    ]
    assert story(queue, new, now=61) == [
        "an earlier cycle ended after 0 attempts: [PERMANENT] no such order",
        f'redriven by berna from dead letter {letter}, which was message {old}, to endpoint "shop", first sent by {sender(queue)}',
        "next: an external worker claims it",
    ]


def test_an_archived_message_can_be_replayed_and_tells_so_afterwards(queue: Queue) -> None:
    queue.endpoint()
    id = queue.send()
    queue.complete(queue.claim_one())

    assert story(queue, id)[2:] == [f"next: nothing. To send it again: select ulak.replay_message({id});"]

    new = queue.call("replay_message", id)

    assert f"as message {new}" in story(queue, id)[-2]
    assert story(queue, new)[0].endswith(
        f'from archived message {id} to endpoint "shop", first sent by {sender(queue)}'
    )


def test_a_message_of_a_replayed_range_says_so(queue: Queue) -> None:
    endpoint = queue.endpoint()
    queue.send_many(3)
    for claim in queue.claim(3):
        queue.complete(claim)
    queue.db.execute("select ulak.replay_range(%s, '-infinity', 'infinity')", [endpoint])
    new = queue.value("select max(id) from ulak.queue")

    assert story(queue, new)[0].endswith(f'with 2 others to endpoint "shop", first sent by {sender(queue)}')


def test_the_origin_of_a_message_is_shown_even_after_the_event_log_has_forgotten_it(queue: Queue) -> None:
    endpoint = queue.endpoint()
    old = queue.send()
    queue.complete(queue.claim_one())
    queue.db.execute("select ulak.replay_range(%s, '-infinity', 'infinity')", [endpoint])
    new = queue.value("select max(id) from ulak.queue")
    remembered = story(queue, new)[0]
    queue.db.execute("delete from ulak.event_log")

    assert "replayed by" in remembered
    assert " with " not in remembered
    assert f'made from message {old} by a redrive or a replay to endpoint "shop"' in story(queue, new)[0]


def test_an_archived_dead_letter_still_names_the_redrive(queue: Queue) -> None:
    queue.endpoint()
    id = queue.send()
    letter = queue.bury(id)

    assert story(queue, id)[-1:] == [
        f"next: nothing, it is dead letter {letter}. To try again: select ulak.redrive_message({letter});",
    ]


def test_a_dead_letter_outlives_its_archived_message(queue: Queue) -> None:
    queue.endpoint()
    id = queue.send()
    letter = queue.bury(id)
    queue.db.execute("delete from ulak.queue")

    assert ending(queue, id)[1].startswith(f"next: nothing, it is dead letter {letter}.")


def test_a_dead_letter_that_retention_deleted_is_gone_for_good(queue: Queue) -> None:
    queue.endpoint()
    id = queue.send()
    queue.bury(id)
    queue.db.execute("delete from ulak.dlq")

    assert ending(queue, id)[1] == "next: nothing. Its dead letter was deleted after dlq_retention_days"


@pytest.mark.parametrize(
    ("id", "detail"), [(2, "rolled back"), (10**12, "No message has had this id"), (None, "No message has had this id")]
)
def test_an_unknown_message_is_an_error_that_says_why(queue: Queue, id: int | None, detail: str) -> None:
    queue.endpoint()
    queue.send_many(3)
    queue.db.execute("delete from ulak.queue")

    error = queue.refuses("explain", id)

    assert error.sqlstate == "P0002"
    assert detail in str(error.message_detail)


def test_a_monitor_may_ask_and_sees_no_payload(connect: Connect, db: psycopg.Connection[Any]) -> None:
    db.execute("select ulak.create_endpoint('shop', 'pull', '{}')")
    (id,) = db.execute("select ulak.send('shop', '{\"iban\": \"secret-DE02120300000000202051\"}')").fetchone()  # type: ignore[misc]
    monitor = connect("ulak_monitor")

    told = monitor.execute("select what from ulak.explain(%s)", [id]).fetchall()

    assert told[-1] == ("next: an external worker claims it",)
    assert "secret-" not in str(told)
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        monitor.execute("select payload from ulak.queue")


def test_a_message_behind_one_that_is_due_tomorrow_says_so(queue: Queue) -> None:
    queue.endpoint()
    head = queue.send(scheduled_at=86400, ordering_key="k")
    id = queue.send(ordering_key="k")

    assert queue.claim(10) == []

    assert story(queue, id, now=1)[-1] == (
        f'next: it waits for its ordering key "k" behind message {head}, which is due in 23h 59m: '
        f"select * from ulak.explain({head});"
    )
