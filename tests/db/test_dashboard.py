"""The dashboard and the alert rules of docker/, with a real Prometheus that scrapes a real database."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from support.cluster import PROJECT, Cluster
from support.ports import free_port
from support.queue import Queue
from support.sessions import wait_until
from support.statistics import add_worker, worked

DASHBOARD = json.loads((PROJECT / "docker/monitoring/grafana/ulak.json").read_text())
RULES = PROJECT / "docker/monitoring/prometheus/ulak.rules.yml"


class Prometheus:
    def __init__(self, port: int) -> None:
        self.port = port

    def get(self, path: str, **parameters: str) -> Any:
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            found = json.load(answer)
        assert found["status"] == "success", found
        return found["data"]

    def query(self, expression: str) -> list[Any]:
        return list(self.get("query", query=expression)["result"])

    def rules(self) -> dict[str, Any]:
        (group,) = self.get("rules")["groups"]
        return {rule["name"]: rule for rule in group["rules"]}


def start(command: list[str | Path], **options: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT, **options)


@pytest.fixture(scope="module")
def prometheus(
    cluster: Cluster, module_database: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    """It scrapes docker's exporter, which logs in as a monitor, four times a second."""
    folder = tmp_path_factory.mktemp("prometheus")
    exporter_port, port = free_port(), free_port()
    (folder / "prometheus.yml").write_text(
        f"""
        global: {{scrape_interval: 250ms, evaluation_interval: 250ms}}
        rule_files: [{RULES}]
        scrape_configs: [{{job_name: ulak, static_configs: [{{targets: ["127.0.0.1:{exporter_port}"]}}]}}]
        """
    )
    environment = {
        **os.environ,
        "PGHOST": cluster.host,
        "PGPORT": str(cluster.port),
        "PGUSER": "test_ulak_monitor",
        "PGDATABASE": module_database,
    }
    exporter = start(
        [sys.executable, PROJECT / "docker/monitoring/prometheus/exporter.py", str(exporter_port)], env=environment
    )
    server = start(
        [
            "prometheus",
            f"--config.file={folder}/prometheus.yml",
            f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address=127.0.0.1:{port}",
        ]
    )
    yield Prometheus(port)
    for process in (server, exporter):
        process.terminate()
        process.wait(20)


@pytest.fixture(scope="module")
def trouble(cluster: Cluster, module_database: str, prometheus: Prometheus) -> Iterator[Prometheus]:
    """Traffic and trouble of every kind that an alert is about, scraped before and after."""
    with cluster.connect(module_database) as db:
        queue = Queue(db)
        fine, broken = queue.endpoint("fine"), queue.endpoint("broken")
        queue.endpoint("off")
        queue.call("disable_endpoint", "off")
        add_worker(queue, heartbeat=-3700)
        worked(queue, fine, delivered=1, milliseconds=9000, b13=1)
        worked(queue, broken, delivered=1, failed=1, b3=2)
        db.execute("call ulak.run_maintenance()")
        wait_until(lambda: scraped(prometheus, 2), message="the first scrapes")

        queue.send_many(9, "off")
        queue.bury(queue.send("broken"))
        for _ in range(10):
            queue.call("update_circuit_breaker", broken, False)
        worked(queue, fine, delivered=9, milliseconds=90000, b13=9)
        worked(queue, broken, failed=90, b3=90)
        db.execute(
            "update ulak_private.maintenance_runs set errors = errors + 1, started_at = started_at - interval '1 hour'"
        )
        queue.send("fine", scheduled_at=-3600 * 2)
        db.execute(
            "update ulak.queue set created_at = created_at - interval '1 hour', next_retry_at = created_at - interval '1 hour' where endpoint_id = 1"
        )
        db.execute("select ulak.configure('max_queue_size', '11')")
        db.execute("update ulak_private.cluster_identity set system_identifier = 1")
        db.execute(
            "drop table ulak_private.archive_" + queue.value("select to_char(now() + interval '1 month', 'YYYY_MM')")
        )
        seen = scrapes(prometheus)
        wait_until(lambda: scraped(prometheus, seen + 3), message="further scrapes")
    yield prometheus


def scrapes(prometheus: Prometheus) -> int:
    try:
        found = prometheus.query('count_over_time(up{job="ulak"}[5m])')
    except OSError:
        return 0
    return int(found[0]["value"][1]) if found else 0


def scraped(prometheus: Prometheus, times: int) -> bool:
    return scrapes(prometheus) >= times and bool(prometheus.query("ulak_queue_depth"))


def expressions() -> dict[str, str]:
    """The dashboard's queries by panel, with its variables put in."""
    found = {}
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            found[f"{panel['title']} {target['refId']}"] = target["expr"].replace("$endpoint", ".*")
    return found


@pytest.mark.parametrize("name", expressions())
def test_every_query_of_the_dashboard_finds_something(trouble: Prometheus, name: str) -> None:
    # Rates need a window in which this young server has several samples.
    expression = re.sub(r"\[\d+m\]", "[5m]", expressions()[name])

    wait_until(lambda: trouble.query(expression), message=expression)


def test_the_dashboards_variable_lists_the_endpoints(trouble: Prometheus) -> None:
    variable = next(each for each in DASHBOARD["templating"]["list"] if each["name"] == "endpoint")
    metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["definition"]).groups()  # type: ignore[union-attr]

    def endpoints() -> list[str]:
        return sorted(each["metric"][label] for each in trouble.query(metric))

    wait_until(lambda: endpoints() == ["broken", "fine", "off"])


def test_queries_and_rules_name_metrics_that_exist(cluster: Cluster, module_database: str) -> None:
    with cluster.connect(module_database) as db:
        known = {f"ulak_{name}" for (name,) in db.execute("select name from ulak_private.metric_definitions()")}

    used = set(re.findall(r"\bulak_\w+", RULES.read_text() + json.dumps(DASHBOARD)))

    assert used - known == set()


# Needs another server: one that the exporter can't reach, or a vacuum that is held back.
NOT_PRODUCED = {"UlakNotScraped", "UlakNotVacuumed"}


@pytest.mark.parametrize("alert", sorted(set(re.findall(r"alert: (\w+)", RULES.read_text())) - NOT_PRODUCED))
def test_every_alert_notices_its_trouble(trouble: Prometheus, alert: str) -> None:
    wait_until(lambda: trouble.rules()[alert]["state"] != "inactive", message=alert)

    assert trouble.rules()[alert]["health"] == "ok"


def test_every_alert_says_what_to_run_next(trouble: Prometheus, cluster: Cluster, module_database: str) -> None:
    with cluster.connect(module_database) as db, db.transaction(force_rollback=True):
        for rule in trouble.rules().values():
            for alert in rule["alerts"]:
                next_step = alert["annotations"]["next"]
                if "ping" not in next_step:
                    with db.transaction(force_rollback=True):
                        db.execute(next_step)


def test_prometheus_learns_of_a_database_that_does_not_answer(cluster: Cluster, module_database: str) -> None:
    port = free_port()
    environment = {**os.environ, "PGHOST": cluster.host, "PGPORT": "1", "PGDATABASE": module_database}
    exporter = start([sys.executable, PROJECT / "docker/monitoring/prometheus/exporter.py", str(port)], env=environment)

    def status() -> int:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0
        return 200

    try:
        assert wait_until(status) == 503
    finally:
        exporter.terminate()
        exporter.wait(10)


def test_an_application_can_not_scrape(cluster: Cluster, module_database: str) -> None:
    with (
        cluster.connect(module_database, "ulak_application") as session,
        pytest.raises(psycopg.errors.InsufficientPrivilege),
    ):
        session.execute("select ulak.metrics_text()")
