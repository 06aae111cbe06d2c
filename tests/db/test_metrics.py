"""metrics() and metrics_text(): gauges and counters, as rows and as Prometheus reads them."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.cluster import Connect
from support.queue import Queue
from support.statistics import add_worker, worked

HOSTILE = 'a "quoted" \\ back\\nslash {x="y"} é'


def rows(queue: Queue, now: float = 0) -> dict[tuple[str, str], float]:
    """By name and the value of the only label."""
    found = queue.rows("select metric_name, labels, metric_value from ulak.metrics(%s)", queue.at(now))
    return {(row["metric_name"], next(iter(row["labels"].values()), "")): row["metric_value"] for row in found}


def families(queue: Queue, now: float = 0) -> dict[str, Any]:
    text = queue.value("select ulak.metrics_text(%s)", queue.at(now))
    return {family.name: family for family in text_string_to_metric_families(text)}


def test_depths_follow_the_queue_and_the_dead_letters(queue: Queue) -> None:
    queue.endpoint("a")
    queue.endpoint("b")
    queue.send_many(3, "a")
    queue.send_many(2, "b")
    queue.claim_one(endpoint="b")
    queue.bury(queue.send("b"))

    found = rows(queue, now=8)

    assert found["queue_depth", ""] == 5
    assert found["queue_depth_by_endpoint", "a"] == 3
    assert found["queue_depth_by_endpoint", "b"] == 2
    assert found["in_flight_by_endpoint", "b"] == 1
    assert found["dlq_depth", ""] == 1
    assert found["dlq_depth_by_endpoint", "b"] == 1
    assert found["oldest_message_age_seconds", ""] == 8


def test_the_circuit_is_0_closed_1_half_open_2_open(queue: Queue) -> None:
    endpoint = queue.endpoint()
    queue.send()
    assert rows(queue)["endpoint_circuit_state", "shop"] == 0

    for _ in range(10):
        queue.call("update_circuit_breaker", endpoint, False, now=queue.at(0))
    assert rows(queue)["endpoint_circuit_state", "shop"] == 2

    queue.claim_one(now=31)
    assert rows(queue)["endpoint_circuit_state", "shop"] == 1


def test_counters_add_up_over_the_reports_of_workers(queue: Queue) -> None:
    endpoint = queue.endpoint()
    worked(queue, endpoint, delivered=5, failed=1, milliseconds=600, b5=6)
    worked(queue, endpoint, delivered=2, failed=0, milliseconds=400, b5=1, b7=1, now=600)
    add_worker(queue)
    queue.db.execute("update ulak.workers set messages_processed = 8, error_count = 1, in_flight = 3")

    found = rows(queue, now=4)

    assert found["delivered_total", "shop"] == 7
    assert found["failed_attempts_total", "shop"] == 1
    assert found["delivery_duration_seconds_sum", "shop"] == 1.0
    assert found["delivery_duration_seconds_count", "shop"] == 8
    assert found["worker_messages_total", "1"] == 8
    assert found["worker_errors_total", "1"] == 1
    assert found["worker_in_flight", "1"] == 3
    assert found["workers_alive", ""] == 1
    assert found["worker_heartbeat_age_seconds", "1"] == 4


def test_counters_do_not_fall_when_old_minutes_are_deleted(queue: Queue) -> None:
    endpoint = queue.endpoint()
    worked(queue, endpoint, delivered=5)
    queue.db.execute("delete from ulak.endpoint_stats")

    assert rows(queue)["delivered_total", "shop"] == 5


def test_every_metric_is_defined_and_every_definition_is_used(db: psycopg.Connection[Any]) -> None:
    queue = Queue(db)
    worked(queue, queue.endpoint(), delivered=1, b3=1)
    add_worker(queue)
    db.execute("call ulak.run_maintenance()")

    used = set(queue.column("select metric_name from ulak.metrics()"))
    made = queue.column(
        """
        select m.name from ulak_private.queue_metrics('{}', now()) m
        union
        select m.name from ulak_private.labelled_metrics(now()) m
        """
    )

    assert used == set(queue.column("select name from ulak_private.metric_definitions()"))
    assert set(made) <= used


def test_prometheus_reads_the_text(queue: Queue) -> None:
    queue.endpoint("a")
    queue.send_many(3, "a")
    add_worker(queue)

    found = families(queue)

    assert found["ulak_queue_depth"].type == "gauge"
    assert found["ulak_queue_depth"].documentation == "messages that wait or are in flight"
    assert found["ulak_queue_depth"].samples[0].value == 3
    assert found["ulak_worker_messages"].type == "counter"
    assert found["ulak_endpoint_circuit_state"].samples[0].labels == {"endpoint": "a"}


def test_the_text_tells_what_the_rows_tell(queue: Queue) -> None:
    worked(queue, queue.endpoint(), delivered=4, b3=4)
    add_worker(queue)

    found = [sample for family in families(queue).values() for sample in family.samples]
    told = queue.rows("select * from ulak.metrics(%s)", queue.base)

    def key(name: str, labels: dict[str, str]) -> str:
        return f"{name} {sorted(labels.items())}"

    assert {key(sample.name, sample.labels): sample.value for sample in found} == {
        key(f"ulak_{row['metric_name']}", row["labels"]): row["metric_value"] for row in told
    }


def test_any_name_of_an_endpoint_survives_as_a_label(queue: Queue) -> None:
    queue.endpoint(HOSTILE)

    assert families(queue)["ulak_endpoint_enabled"].samples[0].labels == {"endpoint": HOSTILE}


def test_latency_is_a_cumulative_histogram_in_seconds(queue: Queue) -> None:
    endpoint = queue.endpoint()
    # Below 1 ms, from 4 to 8 ms, from 512 to 1024 ms, above half an hour.
    worked(queue, endpoint, delivered=10, milliseconds=2000, b0=1, b3=4, b10=3, b21=2)

    family = families(queue)["ulak_delivery_duration_seconds"]
    buckets = {sample.labels["le"]: sample.value for sample in family.samples if sample.name.endswith("_bucket")}

    assert family.type == "histogram"
    assert (buckets["0.001"], buckets["0.004"], buckets["0.008"]) == (1, 1, 5)
    assert (buckets["0.512"], buckets["1.024"], buckets["1048.576"], buckets["+Inf"]) == (5, 8, 8, 10)
    assert list(buckets.values()) == sorted(buckets.values())


def test_a_monitor_may_scrape(connect: Connect) -> None:
    monitor = connect("ulak_monitor")

    assert monitor.execute("select count(*) > 5 from ulak.metrics()").fetchone() == (True,)
    assert str(monitor.execute("select ulak.metrics_text()").fetchone()).count("# TYPE ulak_queue_depth gauge") == 1


def test_a_histogram_is_its_buckets_then_its_sum_then_its_count(queue: Queue) -> None:
    worked(queue, queue.endpoint("a"), delivered=3, b1=3)

    lines = queue.value("select ulak.metrics_text(%s)", queue.base).splitlines()

    names = [line.partition("{")[0] for line in lines if line.startswith("ulak_delivery_duration_seconds_")]
    assert [name.removeprefix("ulak_delivery_duration_seconds_") for name in names] == ["bucket"] * 22 + [
        "sum",
        "count",
    ]


@pytest.mark.parametrize("call", ["ulak.metrics(p_limit => -1)", "ulak.metrics_text(p_limit => -1)"])
def test_a_negative_limit_is_refused_in_plain_words(queue: Queue, call: str) -> None:
    queue.endpoint("a")

    with pytest.raises(
        psycopg.errors.InvalidParameterValue, match=r"^p_limit must be between 0 and 2147483647, got -1"
    ):
        queue.value(f"select count(*) from {call}")


def test_a_limit_of_0_leaves_the_totals(queue: Queue) -> None:
    queue.endpoint("a")
    queue.send_many(3, "a")

    found = queue.rows("select metric_name, metric_value from ulak.metrics(p_limit => 0)")

    assert ("queue_depth", 3) in [(row["metric_name"], row["metric_value"]) for row in found]
    assert "queue_depth_by_endpoint" not in [row["metric_name"] for row in found]
