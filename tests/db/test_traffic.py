"""ulak.traffic: all endpoints together, minute by minute, without adding up every minute of every endpoint."""

from __future__ import annotations

from typing import Any

from support.queue import Queue
from support.statistics import worked

COUNTED = ("delivered", "failed", "p50_ms", "p95_ms")


def sample(queue: Queue, now: float = 0) -> None:
    queue.value("select ulak_private.sample_backlog(%s)", queue.at(now))


def charted(queue: Queue, now: float = 0) -> list[dict[str, Any]]:
    steps: list[dict[str, Any]] = queue.value("select ulak_private.report_traffic(1, %s)", queue.at(now))
    return steps


def work(queue: Queue) -> int:
    """Two endpoints for an hour; returns one of them."""
    shop, bank = queue.endpoint("shop"), queue.endpoint("bank")
    for minutes in range(60):
        worked(queue, shop, delivered=100 + minutes, failed=minutes % 3, b4=90, b7=10, now=-60 * minutes)
        worked(queue, bank, delivered=10, b9=10, now=-60 * minutes)
    return shop


def test_summing_up_changes_no_chart(queue: Queue) -> None:
    work(queue)
    before = charted(queue)

    sample(queue)

    assert [[step[name] for name in COUNTED] for step in charted(queue)] == [
        [step[name] for name in COUNTED] for step in before
    ]
    assert [step["delivered"] for step in before] == [110 + minutes for minutes in reversed(range(60))]


def test_finished_minutes_are_not_added_up_again(queue: Queue) -> None:
    work(queue)
    sample(queue)
    queue.db.execute("delete from ulak.endpoint_stats where minute < %s", [queue.at(-600)])

    assert sum(step["delivered"] for step in charted(queue)) == sum(110 + minutes for minutes in range(60))


def test_what_a_worker_counts_after_the_sum_is_in_the_chart_and_in_the_next_sum(queue: Queue) -> None:
    shop = work(queue)
    sample(queue)
    worked(queue, shop, delivered=1000, now=-60)

    assert charted(queue)[58]["delivered"] == 1111

    sample(queue, 1)

    assert queue.value("select max(delivered) from ulak.traffic") == 1111


def test_what_waits_is_known_for_each_minute_even_if_not_all_were_counted(queue: Queue) -> None:
    queue.endpoint("shop")
    queue.endpoint("bank")
    queue.send_many(3, "shop")
    queue.send_many(2, "bank")
    sample(queue, -60)
    queue.send_many(4, "shop")
    queue.value("select ulak_private.sample_backlog(%s, '0')", queue.at(0))

    assert [step["waiting"] for step in charted(queue)[-2:]] == [5, 5]

    sample(queue, 60)

    assert [step["waiting"] for step in charted(queue, 60)[-3:]] == [5, 5, 9]


def test_old_minutes_are_forgotten(queue: Queue) -> None:
    worked(queue, queue.endpoint("shop"), delivered=1, now=-86400 * 30)
    sample(queue)

    queue.db.execute("select ulak_private.maintenance_work('samples_retention', null, null, %s)", [queue.at(0)])

    assert queue.value("select count(*) from ulak.traffic where minute < %s", queue.at(-86400 * 15)) == 0
