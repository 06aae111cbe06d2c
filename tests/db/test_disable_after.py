"""A receiver that stays broken: its endpoint is disabled after disable_after without a success, and announced before."""

from __future__ import annotations

from typing import Any

import pytest
from support.queue import Queue

HOUR = 3600.0
CONFIG = {"url": "https://example.com", "disable_after": "10 hours"}


@pytest.fixture
def shop(queue: Queue) -> Queue:
    """`shop` has ten hours, and `ops` is told."""
    queue.endpoint("shop", CONFIG, protocol="http")
    queue.endpoint("ops")
    for event in ("ulak.endpoint.failing", "ulak.endpoint.disabled"):
        queue.call("subscribe", event, "ops")
    return queue


def report(queue: Queue, hour: float, failed: int) -> None:
    """As workers report it."""
    queue.db.execute(
        """
            insert into ulak.endpoint_stats (endpoint_id, minute, failed)
            select id, date_trunc('minute', %s::timestamptz), %s from ulak.endpoints where name = 'shop'
        """,
        [queue.at(hour * HOUR), failed],
    )


def succeed(queue: Queue, hour: float) -> None:
    queue.db.execute("update ulak.endpoints set last_success_at = %s where name = 'shop'", [queue.at(hour * HOUR)])


def look(queue: Queue, hour: float) -> None:
    """A run of maintenance."""
    queue.value("select ulak_private.disable_broken(%s)", queue.at(hour * HOUR))
    queue.value("select ulak_private.bury_abandoned(%s, 100)", queue.at(hour * HOUR))


def told(queue: Queue) -> list[tuple[str, Any]]:
    payloads = queue.column(
        "select payload from ulak.queue where endpoint_id = (select id from ulak.endpoints where name = 'ops') order by id"
    )
    return [(payload["type"].removeprefix("ulak.endpoint."), payload.get("percent")) for payload in payloads]


def is_enabled(queue: Queue) -> bool:
    return bool(queue.circuit("shop")["enabled"])


def test_it_is_announced_twice_and_then_disabled_with_the_reason(shop: Queue) -> None:
    report(shop, 1, 30)
    for hour in (1.5, 5.9, 6.1, 6.2, 9.9, 10.1, 10.9):
        look(shop, hour)
    assert told(shop) == [("failing", 51), ("failing", 91)]
    assert is_enabled(shop)

    look(shop, 11.1)
    look(shop, 11.2)

    assert not is_enabled(shop)
    assert told(shop) == [("failing", 51), ("failing", 91), ("disabled", None)]
    (reason,) = shop.column("select detail ->> 'reason' from ulak.event_log where event = 'endpoint.disabled'")
    assert reason.startswith("no success since ")
    assert reason.endswith(": 30 failures")
    assert shop.events("endpoint.failing") == ["endpoint.failing"] * 2


def test_a_few_failures_are_not_enough(shop: Queue) -> None:
    report(shop, 1, 19)
    look(shop, 50)
    assert (is_enabled(shop), told(shop)) == (True, [])

    report(shop, 51, 1)
    look(shop, 51.1)

    assert not is_enabled(shop)


def test_a_success_ends_the_countdown(shop: Queue) -> None:
    report(shop, 1, 30)
    look(shop, 9)
    succeed(shop, 9.5)
    look(shop, 20)
    assert is_enabled(shop)

    report(shop, 21, 30)
    look(shop, 30.9)
    assert is_enabled(shop)
    look(shop, 31.1)

    assert not is_enabled(shop)


def test_idle_time_before_the_first_failure_does_not_count(shop: Queue) -> None:
    succeed(shop, 1)
    report(shop, 100, 30)

    look(shop, 101)

    assert (is_enabled(shop), told(shop)) == (True, [])


def test_the_countdown_outlives_the_statistics(shop: Queue) -> None:
    report(shop, 1, 30)
    look(shop, 2)
    shop.db.execute("delete from ulak.endpoint_stats")
    report(shop, 10, 20)

    look(shop, 11.1)

    assert not is_enabled(shop)


def test_enabling_starts_anew(shop: Queue) -> None:
    report(shop, 1, 30)
    look(shop, 12)
    assert not is_enabled(shop)

    shop.call("enable_endpoint", "shop", now=shop.at(13 * HOUR))
    look(shop, 14)
    assert is_enabled(shop)
    report(shop, 15, 20)
    look(shop, 24.9)
    assert is_enabled(shop)
    look(shop, 25.1)

    assert not is_enabled(shop)


def test_messages_are_held_unless_the_config_says_otherwise(shop: Queue) -> None:
    id = shop.send("shop")
    report(shop, 1, 30)
    look(shop, 12)

    assert shop.status(id) == "pending"


def test_messages_become_dead_letters_if_the_config_says_so(shop: Queue) -> None:
    shop.call("alter_endpoint", "shop", CONFIG | {"when_disabled": "dead_letter"})
    ids = [shop.send("shop"), shop.send("shop", ordering_key="k"), shop.send("shop", ordering_key="k")]
    look(shop, 1)
    report(shop, 1, 30)
    look(shop, 12)
    ids.append(shop.send("shop"))
    look(shop, 13)

    assert [shop.status(id) for id in ids] == ["failed"] * 4
    assert shop.dead(ids[0])["last_error"] == (
        "[PERMANENT] its endpoint was disabled because the receiver stayed broken"
    )


def test_what_an_administrator_disables_is_held_whatever_the_config_says(shop: Queue) -> None:
    shop.call("alter_endpoint", "shop", CONFIG | {"when_disabled": "dead_letter"})
    id = shop.send("shop")
    shop.call("disable_endpoint", "shop", now=shop.at(0))
    look(shop, 12)

    assert shop.status(id) == "pending"


def test_the_doctor_and_the_list_of_endpoints_count_down(shop: Queue) -> None:
    query = "select finding from ulak.doctor(%s) where \"check\" = 'disable_after'"
    assert shop.column(query, shop.at(2 * HOUR)) == []
    report(shop, 1, 30)
    look(shop, 2)

    (finding,) = shop.column(query, shop.at(3 * HOUR))
    disable_at = shop.value("select disable_at from ulak.endpoint_list where name = 'shop'")

    assert finding.startswith('endpoint "shop" has had no success for 2h ')
    assert "(30 failures) and will be disabled in 7h " in finding
    assert 0 <= (shop.at(11 * HOUR) - disable_at).total_seconds() < 60


def test_the_doctor_names_what_was_disabled(shop: Queue) -> None:
    report(shop, 1, 30)
    look(shop, 12)

    (finding,) = shop.rows(
        "select finding, fix from ulak.doctor(%s) where \"check\" = 'disable_after'", shop.at(13 * HOUR)
    )

    assert finding["finding"].startswith('endpoint "shop" was disabled because its receiver stayed broken')
    assert "select ulak.enable_endpoint('shop');" in finding["fix"]


def test_maintenance_looks_each_minute(shop: Queue) -> None:
    report(shop, 1, 30)

    shop.value(
        "select outcome from ulak_private.maintenance_step('samples', now(), '-infinity', %s)", shop.at(12 * HOUR)
    )

    assert not is_enabled(shop)


@pytest.mark.parametrize(
    ("protocol", "config", "path"),
    [
        ("http", {"disable_after": "soon"}, "$.disable_after"),
        ("http", {"disable_after": "0 days"}, "$.disable_after"),
        ("http", {"disable_after": "91 days"}, "$.disable_after"),
        ("http", {"when_disabled": "hold"}, "$.when_disabled"),
        ("pull", {"disable_after": "5 days"}, "$.disable_after"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(queue: Queue, protocol: str, config: Any, path: str) -> None:
    address = {"url": "https://example.com"} if protocol == "http" else {}
    error = queue.refuses("create_endpoint", "x", protocol, address | config)

    assert error.sqlstate == "22023"
    assert path + " " in str(error.message_primary)
