"""What the reporting functions say about nodes, and start(0), which leaves delivery to them."""

from __future__ import annotations

from support.node import StartNode, wait_for_nodes
from support.receiver import Receiver
from support.sessions import wait_until
from support.site import Site

FINDINGS = """select severity, finding from ulak.doctor() where "check" = 'workers'"""
HEALTH = "select status || ': ' || details from ulak.health_check() where component = 'workers'"


def test_start_0_schedules_the_maintenance_and_no_worker(site: Site) -> None:
    jobs = site.column("select jobname from ulak_private.wanted_jobs(0) order by 1")
    told = site.rows("select * from ulak.start(0)")

    assert [name.removeprefix("ulak ").split(" in ")[0] for name in jobs] == ["log", "maintenance", "vacuum"]
    assert "pycurl" not in {row["item"] for row in told}
    assert not {row["status"] for row in told} & {"problem", "not done"}
    assert [row["item"] for row in told if row["status"] == "info"] == ["alerts"]
    site.db.execute(told[-1]["fix"])
    assert "alerts" not in site.column("select item from ulak.start(0)")
    assert site.rows("select workers, is_stopped from ulak_private.schedule") == [{"workers": 0, "is_stopped": False}]


def test_without_a_node_start_0_is_a_finding(site: Site, receiver: Receiver) -> None:
    site.http("shop", receiver.url)
    site.db.execute("select ulak.start(0)")

    assert site.rows(FINDINGS) == [
        {"severity": "critical", "finding": "no node is alive, and start(0) left delivery to nodes"}
    ]
    assert site.value(HEALTH) == "critical: 0 alive"


def test_with_a_node_nothing_is_missed(site: Site, receiver: Receiver, start_node: StartNode) -> None:
    site.http("shop", receiver.url)
    site.db.execute("select ulak.start(0)")
    start_node()

    assert site.rows(FINDINGS) == []
    assert site.value(HEALTH) == "ok: 1 alive, 1 of them on nodes"
    assert site.value("select metric_value::integer from ulak.metrics() where metric_name = 'workers_alive'") == 1


def test_a_node_that_died_is_named_with_its_host(site: Site, receiver: Receiver, start_node: StartNode) -> None:
    site.http("shop", receiver.url)
    site.db.execute("select ulak.start(0)")
    start_node("lives")
    dies = start_node("dies")
    wait_for_nodes(site, 2)

    dies.kill()
    wait_for_nodes(site, 1)
    rows = wait_until(lambda: site.rows("""select finding, fix from ulak.doctor() where "check" = 'workers'"""))

    assert [(row["finding"].split(", pid")[0], row["fix"].split(";")[0]) for row in rows] == [
        ("node 2 on dies", "-- look at the node on dies")
    ]
    assert site.value(HEALTH).startswith("warning: 1 alive")


def test_start_with_fewer_workers_leaves_nodes_alone(site: Site, receiver: Receiver, start_node: StartNode) -> None:
    site.http("shop", receiver.url)
    start_node()
    (before,) = wait_for_nodes(site, 1)

    told = site.column("select item from ulak.start(1)")
    site.wait_for_status(site.send("shop"), "completed")

    assert before["name"] not in told
    assert site.value("select stop_requested_at from ulak.workers") is None


def test_the_report_shows_nodes(site: Site, receiver: Receiver, start_node: StartNode) -> None:
    site.http("shop", receiver.url)
    start_node("machine-7")

    assert site.value("""select position('<b>101</b><span class="quiet">machine-7</span>' in ulak.report()) > 0""")
