"""Absurd times and durations are refused; a day has 24 hours."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from support.queue import Queue

ABSURD = ["infinity", "-infinity", "294276-12-31", "10000-01-01", "4713-01-01 BC"]


@pytest.fixture(autouse=True)
def shop(queue: Queue) -> int:
    return queue.endpoint("shop", {"url": "https://example.com/hook"}, protocol="http")


@pytest.mark.parametrize("time", ABSURD)
@pytest.mark.parametrize("parameter", ["scheduled_at", "expires_at"])
def test_a_message_has_times_that_every_client_can_read(queue: Queue, parameter: str, time: str) -> None:
    refusal = queue.refuses("send", "shop", {"n": 1}, **{parameter: time})

    assert refusal.sqlstate == "22023"
    assert refusal.message_primary == "scheduled_at and expires_at must be times between the years 1970 and 9000"


@pytest.mark.parametrize("lease", ["0", "-1 s", "1 day 1 s", "1 month", "178000000 years"])
def test_a_lease_that_makes_no_sense_is_refused(queue: Queue, lease: str) -> None:
    queue.send()

    assert queue.refuses("claim", "w", endpoint="shop", lease=lease).sqlstate == "22023"
    assert queue.refuses("heartbeat", 1, "w", 1, lease=lease).sqlstate == "22023"


@pytest.mark.parametrize("delay", ["-1 s", "1 day 1 s", "1 month", "178000000 years"])
def test_a_delay_that_makes_no_sense_is_refused(queue: Queue, delay: str) -> None:
    queue.send()
    claim = queue.claim_one(endpoint="shop")

    assert queue.refuses("release", claim.id, "w", 1, delay=delay).sqlstate == "22023"
    assert queue.refuses("fail", claim.id, "w", 1, "broken", retry_after=delay).sqlstate == "22023"
    assert queue.status(claim.id) == "processing"


@pytest.mark.parametrize("grace", ["-1 s", "3651 days", "178000000 years"])
def test_a_grace_that_makes_no_sense_is_refused(queue: Queue, grace: str) -> None:
    assert queue.refuses("rotate_secret", "shop", grace).sqlstate == "22023"


@pytest.mark.parametrize("rate", ["0", "-1", "1e-300", "1e300", "infinity", "nan"])
@pytest.mark.parametrize("function", ["enable_endpoint", "redrive"])
def test_a_rate_that_makes_no_sense_is_refused(queue: Queue, function: str, rate: str) -> None:
    queue.bury(queue.send())
    queue.bury(queue.send())

    assert queue.refuses(function, "shop", rate=rate).sqlstate == "22023"


@pytest.mark.parametrize("name", ["cleanup_dlq", "cleanup_event_log", "cleanup_endpoint_stats", "cleanup_inbox"])
@pytest.mark.parametrize("days", [0, -1, 36501, 2147483647, -2147483648])
def test_a_retention_that_makes_no_sense_is_refused(queue: Queue, name: str, days: int) -> None:
    assert queue.refuses(name, days).sqlstate == "22023"


@pytest.mark.parametrize("months", [0, 1201, 2147483647])
def test_a_retention_of_the_archive_that_makes_no_sense_is_refused(queue: Queue, months: int) -> None:
    assert queue.refuses("cleanup_old_archive_partitions", months).sqlstate == "22023"


@pytest.mark.parametrize("budget", ["-1 s", "2 days", "178000000 years"])
def test_a_budget_that_makes_no_sense_is_refused(queue: Queue, budget: str) -> None:
    with pytest.raises(Exception, match="p_budget must be between 0 and 1 day"), queue.db.transaction():
        queue.db.execute("call ulak.run_maintenance(p_budget => %s)", [budget])


@pytest.mark.parametrize("seconds", ["-1", "infinity", "nan"])
def test_a_run_of_a_worker_has_an_end(queue: Queue, seconds: str) -> None:
    with pytest.raises(Exception, match="the run of a worker must last between 0 seconds and a year"):
        queue.db.execute("call ulak.run_worker(1, %s)", [seconds])


# In Berlin, the clock jumps from 2 to 3 on this night.
SATURDAY = datetime(2026, 3, 28, 12, tzinfo=UTC)


def test_a_day_is_24_hours_when_summer_time_begins(queue: Queue) -> None:
    queue.db.execute("set local timezone = 'Europe/Berlin'")
    queue.db.execute('update ulak.endpoints set config = config || \'{"signing_secret": "the old one"}\'')
    queue.send()
    queue.db.execute("update ulak.queue set created_at = %(t)s, next_retry_at = %(t)s", {"t": SATURDAY})
    tomorrow = SATURDAY + timedelta(hours=24)

    lease = "select id, lease_until from ulak.claim('w', 1, 'shop', '1 day', null, %s)"
    (claimed,) = queue.db.execute(lease, [SATURDAY]).fetchall()
    assert claimed[1] == tomorrow

    queue.call("heartbeat", claimed[0], "w", 1, lease="1 day", now=SATURDAY)
    assert queue.message(claimed[0])["lease_until"] == tomorrow

    queue.call("release", claimed[0], "w", 1, "1 day", SATURDAY)
    assert queue.message(claimed[0])["next_retry_at"] == tomorrow

    queue.call("rotate_secret", "shop", "1 day", now=SATURDAY)
    assert queue.value("select previous_until from ulak_private.secrets where previous_until is not null") == tomorrow


def test_a_retention_in_days_is_one_in_hours_when_summer_time_begins(queue: Queue) -> None:
    queue.db.execute("set local timezone = 'Europe/Berlin'")
    queue.db.execute("insert into ulak.handled values ('consumer', 'key', %s)", [SATURDAY])

    assert queue.call("cleanup_inbox", 1, SATURDAY + timedelta(hours=24)) == 0
    assert queue.call("cleanup_inbox", 1, SATURDAY + timedelta(hours=24, seconds=1)) == 1
