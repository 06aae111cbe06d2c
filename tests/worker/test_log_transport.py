"""Endpoints of protocol log: a worker writes their messages to the server's log."""

from __future__ import annotations

import json
from typing import Any

import psycopg
import pytest
from support.receiver import Receiver
from support.site import Site

PREFIX = "ulak message: "


def told(site: Site, message_id: Any) -> list[dict[str, Any]]:
    """The lines of one message in the server's log."""
    lines = site.cluster.log.read_text(errors="replace").splitlines()
    found = [json.loads(each.partition(PREFIX)[2]) for each in lines if PREFIX in each]
    return [each for each in found if each["message_id"] == str(message_id)]


def test_a_message_is_a_line_of_the_servers_log(site: Site) -> None:
    site.endpoint("audit", {}, None, "log")
    worker = site.start(seconds=60)

    id = site.send("audit", {"order": 7, "note": "caf\u00e9"})

    message = site.wait_for_status(id, "completed")
    (found,) = told(site, message["message_id"])
    assert (found["endpoint"], found["attempt"]) == ("audit", 1)
    assert found["payload"] == {"order": 7, "note": "caf\u00e9"}
    # Only readers of the log see it.
    assert worker.notices == []


def test_both_protocols_are_delivered_by_the_same_worker(site: Site, receiver: Receiver) -> None:
    site.endpoint("audit", {}, None, "log")
    site.http("shop", receiver.url)
    ids = [site.send(name, {"n": n}) for n in range(50) for name in ("audit", "shop")]

    site.start(seconds=60)
    site.wait_until_settled()

    assert {site.status(id) for id in ids} == {"completed"}
    assert len(receiver.requests) == 50
    assert all(len(told(site, site.message(id)["message_id"])) == 1 for id in ids[::2])


def test_the_order_of_a_key_is_kept(site: Site) -> None:
    site.endpoint("audit", {}, None, "log")
    ids = [site.value("select ulak.send('audit', %s, p_ordering_key => 'k')", json.dumps({"n": n})) for n in range(10)]

    site.start(seconds=60)
    site.wait_until_settled()

    wanted = [str(site.message(id)["message_id"]) for id in ids]
    lines = site.cluster.log.read_text(errors="replace").splitlines()
    order = [json.loads(each.partition(PREFIX)[2])["message_id"] for each in lines if PREFIX in each]
    assert [each for each in order if each in wanted] == wanted


@pytest.mark.parametrize("config", ['{"max_bytes": -1}', '{"max_bytes": 100001}', '{"url": "http://x/"}'])
def test_a_config_that_means_nothing_is_refused(site: Site, config: str) -> None:
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="invalid config of log endpoint"):
        site.db.execute("select ulak.create_endpoint('audit', 'log', %s)", [config])


def test_limits_hold_for_it_too(site: Site) -> None:
    site.endpoint("audit", {"max_in_flight": 1, "rate_limit": {"limit": 1000}}, None, "log")
    ids = [site.send("audit", {"n": n}) for n in range(20)]

    site.start(seconds=60)
    site.wait_until_settled()

    assert {site.status(id) for id in ids} == {"completed"}


def test_it_can_be_pinged(site: Site) -> None:
    site.endpoint("audit", {}, None, "log")

    row = site.db.execute("select outcome, status, error from ulak.ping('audit')").fetchone()

    assert row == ("delivered", None, None)
