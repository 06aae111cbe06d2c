"""get_endpoint_health(), get_worker_status(), health_check(): what is healthy, for people and for probes."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import psycopg
import pytest
from support.cluster import Connect
from support.queue import DB, Queue
from support.statistics import add_worker

HTTP = {"url": "https://example.com/hook"}


@pytest.fixture(autouse=True)
def vacuumed(rolled_back: DB) -> None:
    """What earlier tests rolled back are dead rows, which a check of the queue warns of."""
    rolled_back.execute("vacuum ulak_private.deliveries")


def check(queue: Queue, component: str, now: float = 0) -> tuple[str, str]:
    (row,) = queue.rows("select * from ulak.health_check(%s) where component = %s", queue.at(now), component)
    return row["status"], row["details"]


def test_the_first_columns_are_those_that_users_know(db: psycopg.Connection[Any]) -> None:
    def columns(call: str) -> list[str]:
        return [column.name for column in db.execute(f"select * from ulak.{call}").description or []]

    assert columns("get_endpoint_health()")[:9] == [
        "endpoint_name",
        "protocol",
        "enabled",
        "circuit_state",
        "circuit_failure_count",
        "last_success_at",
        "last_failure_at",
        "pending_messages",
        "oldest_pending_message",
    ]
    assert columns("get_worker_status()")[:7] == [
        "pid",
        "state",
        "started_at",
        "messages_processed",
        "last_activity",
        "error_count",
        "last_error",
    ]
    assert columns("health_check()") == ["component", "status", "details", "checked_at"]
    assert columns("metrics()") == ["metric_name", "metric_value", "labels", "metric_type"]


def test_one_endpoint_can_be_asked_for(queue: Queue) -> None:
    queue.endpoint("shop")
    queue.endpoint("other")
    queue.send_many(3, "shop")

    (row,) = queue.rows("select * from ulak.get_endpoint_health('shop')")

    assert (row["endpoint_name"], row["pending_messages"], row["oldest_pending_message"]) == ("shop", 3, queue.base)


def test_an_unknown_endpoint_suggests_the_nearest(queue: Queue) -> None:
    queue.endpoint("billing")

    error = queue.refuses("get_endpoint_health", "biling")

    assert (error.sqlstate, error.message_hint) == ("42704", 'Did you mean "billing"?')


def test_dead_letters_of_an_endpoint_are_counted_until_they_are_redriven(queue: Queue) -> None:
    queue.endpoint()
    letters = [queue.bury(id) for id in queue.send_many(3)]
    queue.call("redrive_message", letters[0])

    assert queue.value("select dead_letters from ulak.get_endpoint_health()") == 2


def test_a_worker_without_a_sign_of_life_is_lost(queue: Queue) -> None:
    add_worker(queue, 1)
    add_worker(queue, 2, state="stopped")

    def states(now: float) -> list[str]:
        return queue.column("select state from ulak.get_worker_status(%s)", queue.at(now))

    assert states(14) == ["running", "stopped"]
    assert states(15) == ["lost", "stopped"]


def test_a_worker_that_was_asked_to_stop_is_leaving(queue: Queue) -> None:
    add_worker(queue)
    queue.db.execute("update ulak.workers set stop_requested_at = %s", [queue.at(0)])

    assert queue.column("select state from ulak.get_worker_status(%s)", queue.at(1)) == ["leaving"]


def test_all_is_well_in_a_fresh_installation(queue: Queue) -> None:
    told = dict(queue.db.execute("select component, status from ulak.health_check()").fetchall())

    assert set(told.values()) == {"ok"}
    assert queue.value("select ulak.health()") == "ok"
    assert set(told) == {"workers", "queue", "endpoints", "dlq", "maintenance", "archive", "cluster"}


def test_one_word_is_the_worst_of_all(queue: Queue) -> None:
    queue.endpoint()
    queue.bury(queue.send())
    assert queue.value("select ulak.health()") == "warning"

    queue.db.execute("update ulak_private.cluster_identity set system_identifier = 1")

    assert queue.value("select ulak.health()") == "critical"


def test_the_doctor_and_the_check_agree(queue: Queue) -> None:
    """Whatever the doctor finds about deliveries makes a component that bad."""
    queue.endpoint("late")
    queue.send("late")
    queue.endpoint("dead")
    queue.bury(queue.send("dead"))
    broken = queue.endpoint("broken")
    for _ in range(10):
        queue.call("update_circuit_breaker", broken, False)

    for now in (0, 301, 3601):
        found = dict(
            queue.db.execute(
                """
                select case "check" when 'circuit' then 'endpoints' when 'backlog' then 'queue' else "check" end, min(severity)
                from ulak.doctor(%s) where "check" in ('circuit', 'backlog', 'dlq') group by 1
                """,
                [queue.at(now)],
            ).fetchall()
        )
        told = dict(
            queue.db.execute(
                "select component, status from ulak.health_check(%s) where component in ('endpoints', 'queue', 'dlq')",
                [queue.at(now)],
            ).fetchall()
        )
        assert {component: status for component, status in told.items() if status != "ok"} == found


def test_workers_are_critical_when_none_is_alive(queue: Queue) -> None:
    queue.endpoint("shop", HTTP, protocol="http")
    assert check(queue, "workers") == ("critical", "0 alive")

    add_worker(queue)

    assert check(queue, "workers") == ("ok", "1 alive")
    assert check(queue, "workers", now=20) == ("critical", "0 alive")


def test_a_queue_that_does_not_move_is_a_warning(queue: Queue) -> None:
    queue.endpoint()
    queue.send()

    assert check(queue, "queue", now=299)[0] == "ok"
    assert check(queue, "queue", now=301) == ("warning", "1 waiting, 0 in flight, oldest due for 5m 1s")


def test_a_queue_that_is_full_is_critical(queue: Queue) -> None:
    queue.endpoint()
    queue.send_many(9)
    queue.call("configure", "max_queue_size", "9")

    assert check(queue, "queue")[0] == "critical"
    queue.call("configure", "max_queue_size", "10")
    assert check(queue, "queue")[0] == "warning"


def test_an_open_circuit_is_a_warning_that_names_it(queue: Queue) -> None:
    endpoint = queue.endpoint()
    for _ in range(10):
        queue.call("update_circuit_breaker", endpoint, False)

    assert check(queue, "endpoints") == ("warning", "1 endpoint, circuit not closed: shop")


def test_dead_letters_are_a_warning(queue: Queue) -> None:
    queue.endpoint()
    queue.bury(queue.send())

    assert check(queue, "dlq") == ("warning", "1 dead letter")


def test_a_missing_month_is_a_warning(queue: Queue) -> None:
    # Three months are made ahead.
    status, details = check(queue, "archive", now=timedelta(days=150).total_seconds())

    assert status == "warning"
    assert details.count("is missing") == 2


def test_messages_of_another_cluster_are_critical(queue: Queue) -> None:
    queue.db.execute("update ulak_private.cluster_identity set system_identifier = 1")

    assert check(queue, "cluster")[0] == "critical"


def test_maintenance_that_ran_is_well_and_one_that_failed_is_critical(db: psycopg.Connection[Any]) -> None:
    queue = Queue(db)
    db.execute("call ulak.run_maintenance()")
    told = "select status, details from ulak.health_check() where component = 'maintenance'"
    row = db.execute(told).fetchone()
    assert row is not None
    assert row[0] == "ok"
    assert row[1].startswith("last run ")

    db.execute("alter function ulak_private.unpark_orphans(timestamptz) rename to _unpark_orphans_gone")
    db.execute("call ulak.run_maintenance(date_trunc('hour', now()))")

    row = db.execute(told).fetchone()
    assert row == ("critical", "ordering failed")
    assert queue.value("select state from ulak.maintenance_status where step = 'ordering'") == "failed"


@pytest.mark.parametrize(
    "function", ["get_endpoint_health", "get_worker_status", "health_check", "health", "dlq_summary"]
)
def test_a_monitor_may_ask(connect: Connect, function: str) -> None:
    connect("ulak_monitor").execute(f"select * from ulak.{function}()")

    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        connect("ulak_application").execute(f"select * from ulak.{function}()")
