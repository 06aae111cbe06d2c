"""The dashboard and the alert rules of docker/, with a real Prometheus and what the exporter tells of a real database."""

from __future__ import annotations

import json
import re
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import psycopg
import pytest
from support.cluster import PROJECT, Cluster
from support.exporter import Exporter, variables
from support.ports import start_on_free_port
from support.programs import start_program
from support.queue import Queue
from support.receiver import Answer, Receiver
from support.sessions import patience, wait_until
from support.statistics import add_worker, worked

DASHBOARD = json.loads((PROJECT / "docker/monitoring/grafana/ulak.json").read_text())
RULES = PROJECT / "docker/monitoring/prometheus/ulak.rules.yml"


# Seconds before the last moment that Prometheus knows of. The dashboard's rates look back a minute.
AGES = (40, 20, 0)


class Prometheus:
    """It has scraped what the exporter answered at several moments, and tells how it looked at the last of them."""

    def __init__(self, folder: Path, answers: list[str]) -> None:
        self.log = folder / "log"
        self._folder = folder
        self._at = time.time()
        body = "".join(at(self._at - age, answer) for age, answer in zip(AGES, answers, strict=True))
        self._told = Receiver(Answer(200, {"content-type": "text/plain; version=0.0.4"}, body.encode()))

    def __enter__(self) -> Self:
        (self._folder / "prometheus.yml").write_text(
            f"""
            global: {{scrape_interval: 1s, evaluation_interval: 1s}}
            rule_files: [{RULES}]
            scrape_configs: [{{job_name: ulak, static_configs: [{{targets: ["127.0.0.1:{self._told.port}"]}}]}}]
            """
        )
        start_on_free_port(self._start_at)
        return self

    def _start_at(self, port: int) -> None:
        self._port = port
        command = ["prometheus", f"--web.listen-address=127.0.0.1:{port}", "--log.level=debug"]
        command += [f"--config.file={self._folder}/prometheus.yml", f"--storage.tsdb.path={self._folder}/data"]
        self._process = start_program(command, self.log, self._has_all)

    def __exit__(self, *unused: object) -> None:
        self._process.terminate()
        self._process.wait()
        self._told.close()

    def _has_all(self) -> bool:
        try:
            return bool(self.query("ulak_queue_depth")) and all(
                rule["health"] != "unknown" for rule in self.rules().values()
            )
        except OSError:
            return False

    def wait_until(self, predicate: Callable[[], bool], message: str) -> None:
        try:
            wait_until(predicate, message)
        except TimeoutError as error:
            raise TimeoutError(f"{error}\n{self.log.read_text()}") from None

    def get(self, path: str, **parameters: object) -> Any:
        url = f"http://127.0.0.1:{self._port}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=patience()) as answer:
            found = json.load(answer)
        assert found["status"] == "success", found
        return found["data"]

    def query(self, expression: str) -> list[Any]:
        return list(self.get("query", query=expression, time=self._at)["result"])

    def rules(self) -> dict[str, Any]:
        (group,) = self.get("rules")["groups"]
        return {rule["name"]: rule for rule in group["rules"]}


def at(time: float, answer: str) -> str:
    """The exporter's answer, each line of it with its time."""
    return re.sub(r"(?m)^([^#\n].*)$", rf"\1 {time * 1000:.0f}", answer)


@pytest.fixture(scope="module")
def trouble(cluster: Cluster, module_database: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Traffic and trouble of every kind that an alert is about: how docker's exporter told of it, before and after."""
    folder = tmp_path_factory.mktemp("prometheus")
    with (
        cluster.connect(module_database) as db,
        Exporter(folder / "exporter.log", **variables(cluster, module_database)) as exporter,
    ):
        queue = Queue(db)
        fine, broken = queue.endpoint("fine"), queue.endpoint("broken")
        queue.endpoint("off")
        queue.call("disable_endpoint", "off")
        add_worker(queue, heartbeat=-3700)
        worked(queue, fine, delivered=1, milliseconds=9000, b13=1)
        worked(queue, broken, delivered=1, failed=1, b3=2)
        db.execute("call ulak.run_maintenance()")
        before = exporter.metrics()

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
        after = exporter.metrics()
    with Prometheus(folder, [before, after, after]) as prometheus:
        yield prometheus


def expressions() -> dict[str, str]:
    """The dashboard's queries by panel, with its variables put in."""
    found = {}
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            found[f"{panel['title']} {target['refId']}"] = target["expr"].replace("$endpoint", ".*")
    return found


@pytest.mark.parametrize("name", expressions())
def test_every_query_of_the_dashboard_finds_something(trouble: Prometheus, name: str) -> None:
    assert trouble.query(expressions()[name]) != []


def test_the_dashboards_variable_lists_the_endpoints(trouble: Prometheus) -> None:
    variable = next(each for each in DASHBOARD["templating"]["list"] if each["name"] == "endpoint")
    metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["definition"]).groups()  # type: ignore[union-attr]

    assert sorted(each["metric"][label] for each in trouble.query(metric)) == ["broken", "fine", "off"]


def test_queries_and_rules_name_metrics_that_exist(cluster: Cluster, module_database: str) -> None:
    with cluster.connect(module_database) as db:
        known = {f"ulak_{name}" for (name,) in db.execute("select name from ulak_private.metric_definitions()")}

    used = set(re.findall(r"\bulak_\w+", RULES.read_text() + json.dumps(DASHBOARD)))

    assert used - known == set()


# Needs another server: one that the exporter can't reach, or a vacuum that is held back.
NOT_PRODUCED = {"UlakNotScraped", "UlakNotVacuumed"}


@pytest.mark.parametrize("alert", sorted(set(re.findall(r"alert: (\w+)", RULES.read_text())) - NOT_PRODUCED))
def test_every_alert_notices_its_trouble(trouble: Prometheus, alert: str) -> None:
    rule = trouble.rules()[alert]

    assert trouble.query(rule["query"]) != []
    assert rule["health"] == "ok"


def filled_in(template: str, labels: dict[str, str]) -> str:
    return re.sub(r"{{ \$labels\.(\w+) }}", lambda found: labels[found[1]], template)


def test_every_alert_says_what_to_run_next(trouble: Prometheus, cluster: Cluster, module_database: str) -> None:
    with cluster.connect(module_database) as db, db.transaction(force_rollback=True):
        for rule in trouble.rules().values():
            for found in trouble.query(rule["query"]):
                next_step = filled_in(rule["annotations"]["next"], found["metric"])
                assert "{{" not in next_step
                if "ping" not in next_step:
                    with db.transaction(force_rollback=True):
                        db.execute(next_step)


def test_prometheus_learns_of_a_database_that_does_not_answer(
    cluster: Cluster, module_database: str, tmp_path: Path
) -> None:
    with Exporter(tmp_path / "log", **{**variables(cluster, module_database), "PGPORT": "1"}) as exporter:
        assert exporter.scrape()[0] == 503


def test_an_application_can_not_scrape(cluster: Cluster, module_database: str) -> None:
    with (
        cluster.connect(module_database, "ulak_application") as session,
        pytest.raises(psycopg.errors.InsufficientPrivilege),
    ):
        session.execute("select ulak.metrics_text()")
