"""ulak.top and ulak.retry_schedule: all endpoints at a glance, at a cost that doesn't follow the backlog."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import psycopg
import pytest
from support.cluster import Connect
from support.queue import Queue
from support.statistics import worked

HTTP = {"url": "https://example.com/hook"}


def top(queue: Queue, now: float = 0) -> list[dict[str, Any]]:
    return queue.rows("select * from ulak.top(p_now => %s)", queue.at(now))


def row(queue: Queue, endpoint: str = "shop", now: float = 0) -> dict[str, Any]:
    return next(each for each in top(queue, now) if each["endpoint"] == endpoint)


def test_the_worst_comes_first(queue: Queue) -> None:
    for name in ("calm", "busy", "closed", "broken", "slow"):
        queue.endpoint(name)
    worked(queue, queue.circuit("busy")["id"], delivered=10, now=70)
    queue.send("slow")
    queue.call("disable_endpoint", "closed")
    for _ in range(10):
        queue.call("update_circuit_breaker", queue.circuit("broken")["id"], False, now=queue.at(70))

    assert [(each["endpoint"], each["state"]) for each in top(queue, now=70)] == [
        ("broken", "○ open"),
        ("slow", "▲ late"),
        ("busy", "● flowing"),
        ("calm", "· idle"),
        ("closed", "■ disabled"),
    ]


def test_an_endpoint_that_fails_often_is_told_from_one_that_fails_at_times(queue: Queue) -> None:
    often, seldom = queue.endpoint("often"), queue.endpoint("seldom")
    worked(queue, often, delivered=95, failed=5)
    worked(queue, seldom, delivered=96, failed=4)

    assert [(each["endpoint"], each["state"], float(each["failed_percent"])) for each in top(queue)] == [
        ("often", "▲ failing", 5.0),
        ("seldom", "● flowing", 4.0),
    ]


def test_what_waits_and_what_is_in_flight_are_counted(queue: Queue) -> None:
    queue.endpoint()
    queue.send_many(5)
    queue.claim(2)

    told = row(queue, now=12)

    assert (told["waiting"].strip(), told["in_flight"], told["oldest_wait"].strip()) == ("3", 2, "12.0s")


def test_a_long_backlog_is_an_estimate_of_the_last_minute(queue: Queue) -> None:
    queue.endpoint()
    queue.db.execute(
        "insert into ulak.queue (endpoint_id, payload) select id, '{}' from ulak.endpoints, generate_series(1, 10050)"
    )
    assert row(queue)["waiting"].strip() == "~10,001"

    queue.value("select ulak._sample_backlog(%s)", queue.base)

    assert row(queue)["waiting"].strip() == "~10,050"


def test_the_oldest_of_a_long_backlog_is_known_though_it_was_retried(queue: Queue) -> None:
    """The sample names its id; in the order of the index it may be the last one."""
    queue.endpoint(policy={"backoff": "fixed", "base_delay_seconds": 3600})
    queue.send()
    queue.fail(queue.claim_one(), now=0)
    queue.db.execute(
        "insert into ulak.queue (endpoint_id, payload, next_retry_at) select id, '{}', %s from ulak.endpoints, generate_series(1, 10001)",
        [queue.at(600)],
    )
    queue.value("select ulak._sample_backlog(%s)", queue.at(600))

    assert row(queue, now=1200)["oldest_wait"].strip() == "20m 0s"


def test_a_message_that_waits_for_its_schedule_is_not_late(queue: Queue) -> None:
    queue.endpoint()
    queue.send(scheduled_at=3600)

    assert (row(queue, now=600)["state"], row(queue, now=600)["oldest_wait"].strip()) == ("· idle", "")
    assert (row(queue, now=3700)["state"], row(queue, now=3700)["oldest_wait"].strip()) == ("▲ late", "1m 40s")


def test_a_message_that_fails_for_hours_is_late_though_it_is_not_due(queue: Queue) -> None:
    queue.endpoint(policy={"backoff": "fixed", "base_delay_seconds": 300})
    queue.send()
    queue.fail(queue.claim_one(now=7000), now=7000)

    assert row(queue, now=7200)["oldest_wait"].strip() == "2h 0m"


def test_rates_slide_over_the_last_minute(queue: Queue) -> None:
    endpoint = queue.endpoint()
    start = 60 - queue.base.second - queue.base.microsecond / 1e6
    worked(queue, endpoint, delivered=600, now=start)
    worked(queue, endpoint, delivered=120, now=start + 60)

    # A quarter of the minute before the last has slid out.
    assert float(row(queue, now=start + 75)["per_second"]) == pytest.approx((600 * 0.75 + 120) / 60, abs=0.06)


def test_traffic_that_has_just_begun_is_not_averaged_with_silence(queue: Queue) -> None:
    endpoint = queue.endpoint()
    start = 60 - queue.base.second - queue.base.microsecond / 1e6
    worked(queue, endpoint, delivered=200, now=start)

    assert float(row(queue, now=start + 20)["per_second"]) == pytest.approx(10, abs=0.06)


def test_percentiles_are_interpolated_within_their_bucket(queue: Queue) -> None:
    endpoint = queue.endpoint()
    # 90 requests from 16 to 32 ms, 10 from 128 to 256 ms.
    worked(queue, endpoint, delivered=100, b5=90, b8=10)

    told = row(queue)

    assert (told["p50"].strip(), told["p95"].strip()) == ("25ms", "192ms")


def test_minutes_older_than_five_no_longer_count(queue: Queue) -> None:
    endpoint = queue.endpoint()
    worked(queue, endpoint, delivered=1, failed=1, b5=1)

    assert float(row(queue, now=200)["failed_percent"]) == 50.0
    assert row(queue, now=400)["failed_percent"] is None
    assert row(queue, now=400)["p50"].strip() == ""


def test_the_sparkline_shows_the_last_hour(queue: Queue) -> None:
    endpoint = queue.endpoint()
    for minutes, delivered in ((57, 100), (30, 50), (0, 1)):
        worked(queue, endpoint, delivered=delivered, now=-60 * minutes)
    worked(queue, endpoint, delivered=999, now=-60 * 61)

    spark = row(queue)["last_hour"]

    assert len(spark) == 20
    assert spark.strip("·").count("█") == 1
    assert spark.endswith("▁")
    assert sum(sign != "·" for sign in spark) == 3


def test_the_breaker_says_when_it_probes(queue: Queue) -> None:
    endpoint = queue.endpoint()
    queue.call("update_circuit_breaker", endpoint, False, now=queue.at(0))
    assert row(queue)["breaker"] == "closed, 1 failed"

    for _ in range(9):
        queue.call("update_circuit_breaker", endpoint, False, now=queue.at(0))
    queue.send()

    assert row(queue, now=10)["breaker"] == "open, probe in 20.0s"
    assert row(queue, now=30)["breaker"] == "open, probe due"
    queue.claim_one(now=31)
    assert row(queue, now=32)["breaker"] == "probing"


def test_the_last_error_is_cut_at_forty_characters(queue: Queue) -> None:
    queue.endpoint()
    queue.send()
    queue.fail(queue.claim_one(), "[RETRYABLE] HTTP 503: the upstream is not there at all")

    assert row(queue)["last_error"] == "[RETRYABLE] HTTP 503: the upstream is n…"
    assert len(row(queue)["last_error"]) == 40


def test_a_schedule_tells_what_waits_until_when(queue: Queue) -> None:
    queue.endpoint("a")
    queue.endpoint("b")
    queue.send_many(3, "a")
    for seconds in (30, 200, 2000, 7200, 200_000):
        queue.send("a", scheduled_at=seconds)
    queue.send("b", ordering_key="k")
    queue.send("b", ordering_key="k")
    # A claim parks what is behind.
    queue.release(queue.claim(2, endpoint="b")[0])

    told = queue.db.execute("select endpoint, due, messages, is_estimate from ulak._retry_schedule(%s)", [queue.base])

    assert told.fetchall() == [
        ("a", "now", 3, False),
        ("a", "within a minute", 1, False),
        ("a", "within 5 minutes", 1, False),
        ("a", "within an hour", 1, False),
        ("a", "within a day", 1, False),
        ("a", "later", 1, False),
        ("b", "now", 1, False),
        ("b", "behind another of its ordering key", 1, False),
    ]


def test_a_schedule_is_counted_up_to_a_bound(queue: Queue) -> None:
    queue.endpoint()
    queue.db.execute(
        "insert into ulak.queue (endpoint_id, payload, next_retry_at) select id, '{}', %s + n * interval '1 ms' from ulak.endpoints, generate_series(1, 5100) n",
        [queue.at(-60)],
    )

    (told,) = queue.rows("select * from ulak._retry_schedule(%s)", queue.base)

    assert (told["messages"], told["is_estimate"], told["last_at"]) == (5000, True, None)
    assert told["first_at"] == queue.at(-60) + timedelta(milliseconds=1)


def test_no_look_scans_the_queue_or_the_dead_letters(db: psycopg.Connection[Any], connect: Connect) -> None:
    """With empty statistics, and with statistics from when the tables were empty."""
    queue = Queue(db)
    queue.endpoint("shop", HTTP, protocol="http")
    db.execute("analyze ulak.queue, ulak.dlq, ulak.attempts, ulak.event_log")
    queue.send_many(3000)
    for id in queue.column("select id from ulak.queue limit 300"):
        queue.call("archive_single_to_dlq", id)
    session = connect("ulak_monitor")
    scans = """
        select relname, seq_scan, pg_stat_force_next_flush()::text from pg_stat_user_tables
        where relname in ('queue', 'dlq', 'attempts', 'event_log') order by 1
    """
    before = session.execute(scans).fetchall()

    for look in (
        "select * from ulak.top",
        "select * from ulak.retry_schedule",
        "select * from ulak.get_endpoint_health()",
        "select * from ulak.health_check()",
        "select * from ulak.metrics()",
        "select * from ulak.doctor()",
        f"select * from ulak.explain({id})",
        f"select * from ulak.history({id})",
        "select ulak.report()",
    ):
        session.execute(look)

    session.execute("select pg_stat_force_next_flush()")
    assert session.execute(scans).fetchall() == before


def test_a_monitor_may_watch(connect: Connect, db: psycopg.Connection[Any]) -> None:
    db.execute("select ulak.create_endpoint('shop', 'pull', '{}')")
    monitor = connect("ulak_monitor")

    assert [each[0] for each in monitor.execute("select * from ulak.top")] == ["shop"]
    assert monitor.execute("select * from ulak.retry_schedule").fetchall() == []


def test_an_application_may_not(connect: Connect) -> None:
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        connect("ulak_application").execute("select * from ulak.top")
