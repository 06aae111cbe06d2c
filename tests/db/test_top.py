"""ulak.top and ulak.retry_schedule: all endpoints at a glance, at a cost that doesn't follow the backlog."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from support.cluster import Connect
from support.queue import Queue
from support.statistics import worked
from ulak.worker.counters import Counters

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


def test_an_endpoint_that_fails_often_is_distinguished_from_one_that_fails_at_times(queue: Queue) -> None:
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
        "insert into ulak_private.deliveries (endpoint_id, event_id) select id, 0 from ulak.endpoints, generate_series(1, 10050)"
    )
    assert row(queue)["waiting"].strip() == ">10,000"

    queue.value("select ulak_private.sample_backlog(%s)", queue.base)

    assert row(queue, now=42)["waiting"].strip() == "~10,050, 42.0s ago"


def test_ten_thousand_messages_and_dead_letters_are_counted_exactly_however_they_are_spread(queue: Queue) -> None:
    for n in range(40):
        queue.endpoint(f"e{n}")
    queue.db.execute(
        """
        insert into ulak_private.deliveries (endpoint_id, event_id)
        select id, 0 from ulak.endpoints, generate_series(1, case when name = 'e7' then 2103 else 1 end)
        """
    )
    queue.value("select ulak_private.sample_backlog(%s)", queue.base)
    # One more than the sample knows of.
    queue.send("e7")
    queue.db.execute(
        """
        insert into ulak_private.letters (original_message_id, endpoint_id, endpoint_name, protocol, message_id, original_created_at,
            failed_at, attempts, retry_count, priority, event_id)
        select n, id, name, 'pull', gen_random_uuid(), now(), now(), 1, 0, 0, 0
        from ulak.endpoints, generate_series(1, 1891) n where name = 'e7'
        """
    )

    (told,) = queue.rows("select * from ulak.get_endpoint_health('e7', %s)", queue.base)
    (among_all,) = queue.rows("select * from ulak.get_endpoint_health(null, %s) where endpoint_name = 'e7'", queue.base)

    assert (told["pending_messages"], told["pending_is_estimate"], told["dead_letters"]) == (2104, False, 1891)
    assert (among_all["pending_messages"], among_all["pending_is_estimate"]) == (2104, False)
    assert among_all["dead_letters"] == 1891


def test_what_small_backlogs_leave_over_counts_the_larger_ones(queue: Queue) -> None:
    for n in range(10):
        queue.endpoint(f"e{n}")
    queue.db.execute(
        """
        insert into ulak_private.deliveries (endpoint_id, event_id)
        select id, 0 from ulak.endpoints,
            generate_series(1, case name when 'e7' then 2103 when 'e8' then 12000 else 1 end)
        """
    )

    assert row(queue, "e7")["waiting"].strip() == "2,103"
    assert row(queue, "e8")["waiting"].strip() == ">5,000"


def test_the_oldest_of_a_long_backlog_is_known_though_it_was_retried(queue: Queue) -> None:
    """The sample names its id; in the order of the index it may be the last one."""
    queue.endpoint(policy={"backoff": "fixed", "base_delay_seconds": 3600})
    queue.send()
    queue.fail(queue.claim_one(), now=0)
    queue.db.execute(
        "insert into ulak_private.deliveries (endpoint_id, event_id, next_retry_at) select id, 0, %s from ulak.endpoints, generate_series(1, 10001)",
        [queue.at(600)],
    )
    queue.value("select ulak_private.sample_backlog(%s)", queue.at(600))

    assert row(queue, now=1200)["oldest_wait"].strip() == "20m 0s"


def test_a_message_that_waits_for_its_schedule_is_not_late(queue: Queue) -> None:
    queue.endpoint()
    queue.send(scheduled_at=3600)

    assert (row(queue, now=600)["state"], row(queue, now=600)["oldest_wait"].strip()) == ("· idle", "")
    assert (row(queue, now=3700)["state"], row(queue, now=3700)["oldest_wait"].strip()) == ("▲ late", "1m 40s")


def test_a_message_in_backoff_has_waited_for_hours_and_is_not_late(queue: Queue) -> None:
    queue.endpoint(policy={"backoff": "fixed", "base_delay_seconds": 300})
    queue.send()
    queue.fail(queue.claim_one(now=7000), now=7000)

    told = row(queue, now=7200)

    assert (told["oldest_wait"].strip(), told["state"]) == ("2h 0m", "· idle")
    assert queue.column("select due from ulak_private.retry_schedule(%s)", queue.at(7200)) == ["within 5 minutes"]
    assert "backlog" not in queue.column('select "check" from ulak.doctor(%s)', queue.at(7200))
    details = queue.value("select details from ulak.health_check(%s) where component = 'queue'", queue.at(7200))
    assert details == "1 waiting, 0 in flight"
    assert row(queue, now=7361)["state"] == "▲ late"


def test_an_endpoint_with_requests_under_way_and_none_finished_is_not_idle(queue: Queue) -> None:
    for name in ("calm", "busy", "stuck"):
        queue.endpoint(name)
    worked(queue, queue.circuit("busy")["id"], delivered=10)
    queue.send_many(28, "stuck")
    queue.claim(28, endpoint="stuck")

    assert [(each["endpoint"], each["state"]) for each in top(queue)] == [
        ("stuck", "▶ sending"),
        ("busy", "● flowing"),
        ("calm", "· idle"),
    ]


def test_an_endpoint_that_has_recovered_is_not_failing(queue: Queue) -> None:
    endpoint = queue.endpoint()
    start = 60 - queue.base.second - queue.base.microsecond / 1e6
    worked(queue, endpoint, failed=1000, now=start)
    assert row(queue, now=start)["state"] == "▲ failing"

    worked(queue, endpoint, delivered=10, now=start + 60)

    assert row(queue, now=start + 60)["state"] == "● flowing"


def test_an_endpoint_that_recovers_within_its_minute_is_recognised_by_its_last_success(queue: Queue) -> None:
    endpoint = queue.endpoint()
    worked(queue, endpoint, failed=1000, delivered=10)
    queue.send_many(2)
    first, second = queue.claim(2)
    queue.fail(first, permanent=True)
    assert row(queue)["state"] == "▲ failing"

    queue.complete(second, now=11)

    assert row(queue, now=11)["state"] == "● flowing"


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
    # 90 requests from 26.9 to 32 ms, 10 from 215 to 256 ms.
    worked(queue, endpoint, delivered=100, b5=90, b8=10)

    told = row(queue)

    assert (told["p50"].strip(), told["p95"].strip()) == ("30ms", "236ms")


def test_no_percentile_is_above_what_was_measured(queue: Queue) -> None:
    endpoint = queue.endpoint()
    counters = Counters()
    for _ in range(30):
        counters.add(endpoint, 1, "[RETRYABLE] timeout", 10.002)
    queue.db.execute(
        "select ulak_private.add_endpoint_stats(%s, date_trunc('minute', %s::timestamptz))",
        [json.dumps(counters.statistics()), queue.base],
    )

    told = row(queue)

    assert [told[name].strip() for name in ("p50", "p95", "slowest")] == ["10.0s", "10.0s", "10.0s"]
    health = queue.rows("select p50_ms, p95_ms from ulak.get_endpoint_health('shop', %s)", queue.base)
    assert 9742 < health[0]["p50_ms"] <= health[0]["p95_ms"] <= 10002


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


def test_the_sparkline_shows_attempts_that_failed(queue: Queue) -> None:
    endpoint = queue.endpoint()
    worked(queue, endpoint, failed=100)

    assert row(queue)["last_hour"] == "·" * 19 + "█"


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
    assert row(queue, now=192)["last_failed"].strip() == "3m 12s ago"


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

    told = queue.db.execute(
        "select endpoint, due, messages, is_estimate from ulak_private.retry_schedule(%s)", [queue.base]
    )

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


def test_a_message_behind_its_ordering_key_is_not_due_now_though_no_claim_has_met_it(queue: Queue) -> None:
    queue.endpoint()
    for _ in range(3):
        queue.send(ordering_key="k")
    queue.send(ordering_key="other")

    told = queue.db.execute(
        "select due, messages, first_at from ulak_private.retry_schedule(%s)", [queue.base]
    ).fetchall()

    assert told == [("now", 2, queue.base), ("behind another of its ordering key", 2, None)]


def test_a_schedule_is_counted_up_to_a_bound(queue: Queue) -> None:
    queue.endpoint()
    queue.db.execute(
        "insert into ulak_private.deliveries (endpoint_id, event_id, next_retry_at) select id, 0, %s + n * interval '1 ms' from ulak.endpoints, generate_series(1, 5100) n",
        [queue.at(-60)],
    )

    (told,) = queue.rows("select * from ulak_private.retry_schedule(%s)", queue.base)

    assert (told["messages"], told["is_estimate"], told["last_at"]) == (5000, True, None)
    assert told["first_at"] == queue.at(-60) + timedelta(milliseconds=1)


def test_no_look_scans_the_queue_or_the_dead_letters(db: psycopg.Connection[Any], connect: Connect) -> None:
    """With empty statistics, and with statistics from when the tables were empty."""
    queue = Queue(db)
    queue.endpoint("shop", HTTP, protocol="http")
    db.execute("analyze ulak_private.deliveries, ulak_private.letters, ulak.attempts, ulak.event_log")
    queue.send_many(3000)
    for id in queue.column("select id from ulak.queue limit 300"):
        queue.call("archive_single_to_dlq", id)
    session = connect("ulak_monitor")
    scans = """
        select relname, seq_scan from pg_stat_xact_user_tables
        where relname in ('deliveries', 'letters', 'attempts', 'event_log') order by 1
    """

    # In one transaction, so that only its own scans are counted.
    with session.transaction():
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

        assert session.execute(scans).fetchall() == before


def test_a_monitor_may_watch(connect: Connect, db: psycopg.Connection[Any]) -> None:
    db.execute("select ulak.create_endpoint('shop', 'pull', '{}')")
    monitor = connect("ulak_monitor")

    assert [each[0] for each in monitor.execute("select * from ulak.top")] == ["shop"]
    assert monitor.execute("select * from ulak.retry_schedule").fetchall() == []


def test_an_application_may_not(connect: Connect) -> None:
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        connect("ulak_application").execute("select * from ulak.top")
