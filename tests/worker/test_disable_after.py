"""disable_after with a receiver that is really broken, and the failures that a real worker reports of it."""

from __future__ import annotations

import json
from typing import Any

from support.receiver import Answer, Receiver
from support.sessions import wait_until
from support.site import UNBROKEN, Site

FAILED = "select coalesce(sum(failed), 0) from ulak.endpoint_stats"


def maintain(site: Site, hours: float) -> None:
    """A run of maintenance this many hours from now."""
    site.db.execute("call ulak.run_maintenance(now() + %s * interval '1 hour')", [hours])


def told(site: Site) -> list[tuple[str, Any]]:
    """What waits for `ops`."""
    query = "select payload from ulak.queue q join ulak.endpoints e on e.id = q.endpoint_id where e.name = 'ops' order by q.id"
    return [(event["type"], event.get("failures")) for event in site.column(query)]


def test_a_broken_receiver_is_disabled_by_its_own_failures_and_comes_back_when_it_is_enabled(
    site: Site, receiver: Receiver
) -> None:
    receiver.answer = Answer(500)
    site.http(
        "shop", receiver.url, {"max_retries": 0}, disable_after="10 hours", circuit_breaker=UNBROKEN, max_in_flight=30
    )
    site.endpoint("ops")
    for event in ("ulak.endpoint.failing", "ulak.endpoint.disabled"):
        site.call("subscribe", event, "ops")
    # Failures count from the minute after its last change.
    site.db.execute("update ulak.endpoints set updated_at = now() - interval '1 hour'")
    site.start()

    site.send_many(25)
    wait_until(lambda: site.value(FAILED) == 25, "25 failures in the statistics")
    for hours in (1, 6, 9.5):
        maintain(site, hours)
    assert told(site) == [("ulak.endpoint.failing", 25)] * 2
    assert site.circuit("shop")["enabled"]
    maintain(site, 10.1)

    assert not site.circuit("shop")["enabled"]
    assert [type for type, _ in told(site)[2:]] == ["ulak.endpoint.disabled"]
    held = site.send("shop", {"n": "held"})
    receiver.answer = Answer()
    site.call("enable_endpoint", "shop")
    site.wait_for_status(held, "completed")
    assert json.loads(receiver.requests[-1].body) == {"n": "held"}


def test_a_receiver_that_answers_between_its_failures_is_never_disabled(site: Site, receiver: Receiver) -> None:
    receiver.answer = Answer(500)
    site.http(
        "shop", receiver.url, {"max_retries": 0}, disable_after="10 hours", circuit_breaker=UNBROKEN, max_in_flight=30
    )
    site.db.execute("update ulak.endpoints set updated_at = now() - interval '1 hour'")
    site.start()
    site.send_many(25)
    wait_until(lambda: site.value(FAILED) == 25, "25 failures in the statistics")
    maintain(site, 1)
    assert site.value("select disable_at from ulak.endpoint_list") is not None

    receiver.answer = Answer()
    site.wait_for_status(site.send("shop"), "completed")
    maintain(site, 11)

    assert site.circuit("shop")["enabled"]
