"""Many endpoints: what is shown is the worst and a count, what is kept is bounded."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from support.cluster import Connect
from support.queue import Queue
from support.statistics import worked

DAY = 86400


def many(queue: Queue, count: int) -> None:
    queue.db.execute("select ulak.create_endpoint('e' || n, 'pull', '{}') from generate_series(1, %s) n", [count])


def hour_of(queue: Queue, days: float) -> float:
    """Seconds to the start of the hour this many days ago."""
    start = queue.value("select date_trunc('hour', %s::timestamptz, 'UTC')", queue.at(-days * DAY))
    return float((start - queue.base).total_seconds())


def roll_up(queue: Queue, step: str, now: float = 0) -> None:
    """As maintenance does it: batch by batch, each from where the one before ended."""
    reached, more = None, True
    while more:
        ((more, reached),) = queue.db.execute(
            "select more, reached from ulak_private.maintenance_work(%s, null, coalesce(%s, '-infinity'::timestamptz), %s)",
            [step, reached, queue.at(now)],
        ).fetchall()
        reached = reached if reached and reached.year > 1 else None


def sample(queue: Queue, now: float) -> int:
    return int(queue.value("select ulak_private.sample_backlog(%s)", queue.at(now)))


def sums(queue: Queue) -> list[tuple[Any, ...]]:
    return queue.db.execute(
        """
        select endpoint_id, date_trunc('hour', minute, 'UTC'), sum(delivered), sum(failed), sum(latency_total_ms),
            ulak_private.percentiles(ulak_private.sum_histograms(latency_histogram), '{0.5,0.95}')
        from ulak.endpoint_stats group by 1, 2 order by 1, 2
        """
    ).fetchall()


def test_top_shows_the_worst_fifty_and_more_if_asked(queue: Queue) -> None:
    many(queue, 60)
    queue.send("e60")

    assert queue.value("select count(*) from ulak.top") == 50
    assert queue.value("select count(*) from ulak.top(55)") == 55
    assert queue.value("select count(*) from ulak.top(100)") == 60
    assert queue.value("select endpoint from ulak.top(1, %s)", queue.at(70)) == "e60"


@pytest.mark.parametrize("limit", [0, -1, None])
def test_top_is_asked_for_one_at_least(queue: Queue, limit: int | None) -> None:
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="p_limit must be between 1 and"):
        queue.value("select ulak.top(%s::integer)", limit)


def test_the_health_of_all_covers_every_endpoint(queue: Queue) -> None:
    many(queue, 1010)
    queue.db.execute("select ulak.disable_endpoint('e7')")
    worked(queue, queue.circuit("e9")["id"], delivered=5, b4=5)

    rows = queue.rows("select * from ulak.get_endpoint_health(null, %s)", queue.base)

    assert len(rows) == 1010
    assert (rows[0]["endpoint_name"], sum(rows[0]["last_hour"])) == ("e9", 5)
    assert sum(row["last_hour"] is not None for row in rows) == 1000


def test_a_report_counts_all_endpoints_and_shows_fifty(queue: Queue) -> None:
    many(queue, 60)
    queue.db.execute("select ulak.send('e' || n, '{}') from generate_series(1, 60) n")

    data = queue.value("select ulak_private.report_data(1, %s)", queue.at(70))

    assert (len(data["endpoints"]), data["totals"]["endpoints"], data["totals"]["waiting"]) == (50, 60, 60)
    assert "and 10 more" in queue.value("select ulak.report(1, %s)", queue.at(70))


def test_the_doctor_tells_twenty_of_a_kind_and_counts_the_rest(queue: Queue) -> None:
    many(queue, 25)
    queue.db.execute("select ulak.send('e' || n, '{}') from generate_series(1, 25) n")

    findings = queue.column('select finding from ulak.doctor(%s) where "check" = %s', queue.at(1000), "backlog")

    assert len(findings) == 21
    assert findings[-1] == "and 5 more like these"


def test_metrics_can_leave_out_endpoints_that_do_nothing(queue: Queue) -> None:
    for name in ("quiet", "lately", "late", "holding"):
        queue.endpoint(name)
    queue.send("late")
    queue.send("holding")
    queue.claim_one(endpoint="holding")
    queue.db.execute("update ulak.endpoints set last_success_at = %s where name = 'lately'", [queue.at(-600)])

    def told(within: str | None) -> set[str]:
        query = "select labels ->> 'endpoint' from ulak.metrics(%s, %s) where metric_name = 'endpoint_enabled'"
        return set(queue.column(query, queue.at(1), within))

    assert told(None) == {"quiet", "lately", "late", "holding"}
    assert told("1 hour") == {"lately", "late", "holding"}
    assert told("1 minute") == {"late", "holding"}
    text = queue.value("select ulak.metrics_text(%s, '1 minute')", queue.at(1))
    assert 'ulak_endpoint_enabled{endpoint="late"} 1' in text
    assert "quiet" not in text


def test_metrics_can_be_of_the_fullest_endpoints_alone(queue: Queue) -> None:
    for name, messages in {"none": 0, "few": 1, "many": 5}.items():
        queue.endpoint(name)
        queue.send_many(messages, name)

    query = "select labels ->> 'endpoint' from ulak.metrics(p_limit => 2) where metric_name = 'queue_depth_by_endpoint'"

    assert queue.column(query) == ["few", "many"]
    assert "none" not in queue.value("select ulak.metrics_text(p_limit => 2)")
    assert queue.value("select metric_value from ulak.metrics(p_limit => 1) where metric_name = 'queue_depth'") == 6


def test_totals_count_endpoints_that_are_left_out(queue: Queue) -> None:
    queue.endpoint()
    queue.send(scheduled_at=3600)

    query = "select metric_value from ulak.metrics(%s, '1 minute') where metric_name = 'queue_depth'"

    assert queue.value(query, queue.base) == 1


def test_a_roll_up_keeps_the_sums(queue: Queue) -> None:
    hour = hour_of(queue, 3)
    for endpoint in (queue.endpoint("shop"), queue.endpoint("bank")):
        for minutes in (0, 1, 30, 59, 60, 61):
            worked(
                queue,
                endpoint,
                delivered=minutes + 1,
                failed=2,
                milliseconds=10,
                b3=minutes + 1,
                b9=2,
                now=hour + 60 * minutes,
            )
    before = sums(queue)

    roll_up(queue, "stats_retention")

    assert sums(queue) == before
    assert queue.value("select count(*) from ulak.endpoint_stats") == 4
    roll_up(queue, "stats_retention")
    assert sums(queue) == before


def test_minutes_of_the_last_two_days_stay(queue: Queue) -> None:
    endpoint = queue.endpoint()
    for minutes in range(5):
        worked(queue, endpoint, delivered=1, now=hour_of(queue, 2) + 60 * minutes)

    roll_up(queue, "stats_retention")

    assert queue.value("select count(*) from ulak.endpoint_stats") == 5


def test_a_roll_up_takes_more_than_one_batch(queue: Queue) -> None:
    many(queue, 450)
    queue.db.execute(
        """
        insert into ulak.endpoint_stats (endpoint_id, minute, delivered)
        select id, %s + n * interval '1 minute', 1 from ulak.endpoints, generate_series(1, 3) n
        """,
        [queue.at(hour_of(queue, 3))],
    )

    rows, _ = queue.db.execute(
        "select * from ulak_private.roll_up('ulak.endpoint_stats', '-infinity', %s)", [queue.base]
    ).fetchone() or (0, 0)

    assert rows == 600
    roll_up(queue, "stats_retention")
    assert queue.db.execute("select count(*), sum(delivered) from ulak.endpoint_stats").fetchone() == (450, 1350)


def test_of_an_old_hour_the_last_sample_stays(queue: Queue) -> None:
    hour = hour_of(queue, 3)
    queue.endpoint()
    for minutes in (1, 20, 40):
        queue.send()
        sample(queue, hour + 60 * minutes)

    roll_up(queue, "samples_retention")

    rows = queue.rows("select sampled_at, waiting from ulak.backlog_samples")
    assert rows == [{"sampled_at": queue.at(hour), "waiting": 3}]


def test_a_sample_is_written_when_something_has_changed_and_once_an_hour_while_something_waits(queue: Queue) -> None:
    hour = hour_of(queue, 0)
    queue.endpoint("idle")
    queue.endpoint("shop")
    message = queue.send("shop")

    assert [sample(queue, hour + 60 * minute) for minute in (1, 2, 59, 60, 61, 62)] == [1, 0, 0, 1, 0, 0]

    queue.db.execute("delete from ulak.queue where id = %s", [message])

    assert [sample(queue, hour + 60 * minute) for minute in (63, 64, 200)] == [1, 0, 0]
    assert queue.column("select waiting from ulak.backlog_samples order by sampled_at") == [1, 1, 0]


def test_the_runs_count_all_endpoints_and_begin_at_different_ones(queue: Queue) -> None:
    """So that a run without time for all leaves none out for good."""
    many(queue, 300)
    ids = queue.column("select id from ulak.endpoints order by id")

    orders = [queue.value("select ulak_private.sample_order(%s)", queue.at(60 * minute)) for minute in range(30)]

    assert all(sorted(order) == ids for order in orders)
    assert {ids.index(order[0]) // 100 for order in orders} == {0, 1, 2}


def test_a_first_message_of_its_key_without_a_time_is_explained(queue: Queue) -> None:
    queue.endpoint()
    queue.send(ordering_key="k")
    second = queue.send(ordering_key="k")
    queue.db.execute("delete from ulak.queue where id < %s", [second])
    queue.db.execute("update ulak.queue set next_retry_at = 'infinity'")

    told = queue.rows("select * from ulak.explain(%s, %s)", second, queue.at(1))

    assert 'the first of its ordering key "k"' in told[-1]["what"]


def test_a_message_that_is_due_but_behind_its_key_is_explained_as_such(queue: Queue) -> None:
    queue.endpoint()
    first = queue.send(ordering_key="k")
    second = queue.send(ordering_key="k")
    queue.db.execute("update ulak.queue set next_retry_at = %s", [queue.base])

    told = queue.rows("select * from ulak.explain(%s, %s)", second, queue.at(1))

    assert f"behind message {first}" in told[-1]["what"]


def test_the_doctor_names_ordering_keys_whose_first_message_is_left_lying(queue: Queue) -> None:
    queue.endpoint()
    first = queue.send(ordering_key="left")
    queue.send(ordering_key="left")

    def told(now: float) -> list[str]:
        return queue.column('select finding from ulak.doctor(%s) where "check" = %s', queue.at(now), "ordering")

    assert told(600) == []
    (finding,) = told(1200)
    assert f'message {first} is the first of ordering key "left"' in finding
    assert "20m 0s ago" in finding


def test_the_doctor_names_a_first_message_that_is_parked(queue: Queue) -> None:
    queue.endpoint()
    first = queue.send(ordering_key="k")
    message = queue.send(ordering_key="k")
    claim = queue.claim_one()
    assert (claim.id, queue.claim()) == (first, [])
    told = 'select finding from ulak.doctor(%s) where "check" = %s'
    assert queue.column(told, queue.at(600), "ordering") == []
    queue.db.execute("delete from ulak.queue where id = %s", [first])

    assert queue.column(told, queue.at(59), "ordering") == []
    (finding,) = queue.column(told, queue.at(61), "ordering")

    assert (
        f'message {message} is parked behind others of ordering key "k" for endpoint "shop", but there are none'
        in finding
    )


def test_the_doctor_names_who_holds_the_lock_of_a_circuit_breaker(
    db: psycopg.Connection[Any], connect: Connect
) -> None:
    queue = Queue(db)
    endpoint = queue.endpoint()
    holder = connect("nobody")
    holder.execute("select pg_advisory_lock(hashtext('ulak_cb'), %s)", [endpoint])

    (finding,) = queue.column('select finding from ulak.doctor(now() + %s) where "check" = %s', "10 s", "locks")

    assert f"session {holder.info.backend_pid} of nobody" in finding
    assert 'endpoint "shop"' in finding


def test_what_was_counted_is_found_by_its_endpoint_though_the_statistics_are_of_an_empty_table(
    db: psycopg.Connection[Any],
) -> None:
    db.execute("analyze ulak.backlog_samples")
    db.execute(
        "insert into ulak.endpoints (name, protocol, config) select 'e' || n, 'pull', '{}' from generate_series(1, 300) n"
    )
    db.execute("insert into ulak_private.deliveries (endpoint_id, event_id) select id, 0 from ulak.endpoints")
    db.execute("select ulak_private.sample_backlog(p_budget => '1 hour')")
    read = "select sum(pg_stat_get_xact_tuples_returned(indexrelid)) from pg_index where indrelid = 'ulak.backlog_samples'::regclass"

    with db.transaction():
        (before,) = db.execute(read).fetchone()  # type: ignore[misc]
        db.execute("select ulak_private.sample_backlog(clock_timestamp() + interval '1 minute', '1 hour')")
        (after,) = db.execute(read).fetchone()  # type: ignore[misc]

    # Once to see whether it has changed, once for the sum of all; all of them for each would be 45,000.
    assert 300 <= after - before <= 1200


def test_what_is_asked_for_each_endpoint_is_planned_with_the_whole_look(queue: Queue) -> None:
    """A function that has become part of its query is never called."""
    many(queue, 3)
    queue.send_many(3, "e1")
    queue.bury(queue.send("e2"))
    queue.db.execute("set local track_functions = 'all'")
    looks = ("top(50, %s)", "get_endpoint_health(null, %s)", "doctor(%s)", "health_check(%s)", "metrics(%s)")
    for look in looks:
        queue.rows(f"select * from ulak.{look}", queue.at(1))
    queue.rows("select * from ulak.retry_schedule")
    queue.value("select ulak_private.sample_backlog(%s)", queue.at(1))

    called = set(queue.column("select funcname from pg_stat_xact_user_functions"))

    assert called >= {"endpoint_facts", "endpoint_health", "schedule_of"}
    assert not called & {
        "last_sample",
        "count_up_to",
        "some_messages",
        "due_within",
        "advice",
        "recent_latency",
        "last_hour",
    }
