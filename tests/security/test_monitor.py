"""A monitor, who may see counts and health, but no config and no secret."""

from __future__ import annotations

import re
from typing import Any

import psycopg
from support.cluster import Connect
from support.errors import refused
from support.site import Site

TOKEN_URL = "http://hooks.example.com/services/hush-path?token=hush-query"
DB = psycopg.Connection[Any]


def test_doctor_and_report_show_no_more_of_a_url_than_its_host(site: Site) -> None:
    site.http("shop", TOKEN_URL)

    with site.connect("ulak_monitor") as monitor:
        findings = monitor.execute('select finding, fix from ulak.doctor() where "check" = $$transport$$').fetchall()
        (report,) = monitor.execute("select ulak.report()").fetchone() or [""]
        (listed,) = monitor.execute("select config ->> 'url' from ulak.endpoint_list").fetchone() or [""]

    assert len(findings) == 1
    assert re.findall(r".{,40}hush.{,10}", f"{findings} {report}") == []
    assert listed == "http://hooks.example.com"


def test_doctors_advice_on_a_url_is_still_one_to_follow(site: Site) -> None:
    site.http("shop", TOKEN_URL)
    fix = site.value('select fix from ulak.doctor() where "check" = $$transport$$')

    with site.connect("ulak_admin") as admin:
        admin.execute(fix)

    assert site.value("select config ->> 'url' from ulak.endpoints") == TOKEN_URL.replace("http:", "https:")


def test_it_grants_claims_and_dates_nothing(db: DB, connect: Connect) -> None:
    db.execute("select ulak.create_endpoint('shop', 'pull', '{}'), ulak.send('shop', '1')")
    monitor = connect("ulak_monitor")

    for statement in (
        "select ulak.grant_endpoint('shop', 'test_ulak_monitor')",
        "insert into ulak.endpoint_grants (endpoint_id, role_name) values (1, 'test_ulak_monitor')",
        "select * from ulak.endpoint_grants",
        "select * from ulak.claim('m')",
        "select ulak.disable_endpoint('shop', '2000-01-01')",
        "insert into ulak.event_log (event) values ('endpoint.disabled')",
    ):
        assert refused(monitor, statement).sqlstate == "42501"

    assert db.execute("select status from ulak.queue").fetchall() == [("pending",)]
