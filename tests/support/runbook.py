"""The story that docker/OPERATIONS.md tells, played for real: python -m support.runbook writes what it prints into the document.

An outage: nobody has started a worker; then `billing` is down, while `crm` refuses some messages and `orders` is well; then it is back. Later a
report holds vacuum back, messages are archived, replayed, and restored elsewhere."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import NamedTuple

from support.cluster import PROJECT, Cluster
from support.receiver import Answer, Received, Receiver
from support.sessions import wait_until
from support.site import Site

DOCUMENT = PROJECT / "docker" / "OPERATIONS.md"
# In pg_cron's database, so that start() does everything by itself.
DATABASE = "postgres"
BROKEN = {"circuit_breaker": {"threshold": 10, "cooldown": 5}}
# Everything is tried, however often it fails.
UNPROTECTED = {"circuit_breaker": {"threshold": 1000, "cooldown": 5}}
TWICE = {"max_retries": 1, "backoff": "fixed", "base_delay_seconds": 1, "jitter": "none"}


class Shown(NamedTuple):
    """A statement of the document and what it printed there: lines start and end."""

    statement: str
    output: str
    start: int
    end: int


def shown(text: str) -> Iterator[Shown]:
    """Indented, from "=> " up to the next empty line."""
    lines = text.split("\n")
    for number, line in enumerate(lines):
        if line.startswith("    => "):
            end = next(n for n in range(number, len(lines)) if not lines[n].strip())
            output = [each.removeprefix("    ") for each in lines[number + 1 : end]]
            yield Shown(line.removeprefix("    => "), "\n".join(output), number + 1, end)


class Played(NamedTuple):
    """What each statement of the document printed, and whether the whole story was played."""

    outputs: list[str]
    is_over: bool
    # pg_cron 1.5 and newer get other jobs.
    has_other_jobs: bool


def play() -> Played:
    with Runbook(is_hurried=True) as runbook:
        outputs = [runbook.run(each.statement) for each in shown(DOCUMENT.read_text())]
        return Played(outputs, runbook.is_over(), not runbook.cluster.cron_waits_for_the_longest_job())


class Runbook:
    """Plays the statements in the order of the document; before some of them, something happens. In a hurry, time is passed in instead of
    waited for."""

    def __init__(self, is_hurried: bool) -> None:
        self.is_hurried = is_hurried
        self.is_down = False
        self._steps: list[tuple[str, Callable[[], object]]] = [
            ("select * from ulak.doctor();", self._install),
            ("select pid, state", self._wait_for_workers),
            ("select * from ulak.explain(201);", self._wait_until_delivered),
            ("select component", self._wait_for_maintenance),
            ("select * from ulak.top;", self._go_down),
            ("select created_at, event", self._wait_for_probes),
            ("select * from ulak.dlq_summary();", self._wear_out),
            ("select * from ulak.ping('billing');", self._come_back),
            ("select * from ulak.dlq_summary();", self._wait_until_delivered),
            ("select finding, fix", self._hold_vacuum_back),
            ("select step", self._archive),
            ("select event, endpoint_name", self._replay),
            ("call ulak.run_maintenance();", self._move),
        ]
        self._stack = ExitStack()

    def __enter__(self) -> Runbook:
        # As servers are, and not as those of tests.
        self.cluster = Cluster.create(settings={"fsync": True, "synchronous_commit": False}, in_memory=True)
        self._stack.callback(self.cluster.remove)
        self.receiver = self._stack.enter_context(Receiver(self._answer))
        return self

    def __exit__(self, *unused: object) -> None:
        self._stack.close()

    def run(self, statement: str) -> str:
        """What psql prints."""
        if self._steps and statement.startswith(self._steps[0][0]):
            self._steps.pop(0)[1]()
        if self.is_hurried:
            statement = statement.replace("ulak.doctor() where", "ulak.doctor(now() + interval '65 seconds') where")
        done = subprocess.run(
            [self.cluster.bin / "psql", "-X", "-q", "-P", "footer=off", "-d", self.cluster.dsn(DATABASE)],
            input=statement,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=True,
        )
        lines = [line.rstrip() for line in done.stdout.splitlines()]
        if statement.startswith("select ulak.curl"):
            lines = [line.lstrip() for line in lines[2:]]
        return "\n".join(line for line in lines if line)

    def is_over(self) -> bool:
        return not self._steps

    def _answer(self, request: Received) -> Answer:
        if request.path == "/billing" and self.is_down:
            return Answer(503, body=b"upstream connect error", delay=0.005)
        if request.path == "/crm" and json.loads(request.body).get("customer") == 8:
            return Answer(404, body=b'{"error": "no such customer"}', delay=0.004)
        return Answer(delay=0.01)

    def _send(self, endpoint: str, count: int, name: str = "n") -> None:
        query = (
            "select ulak.send_batch(%s, array(select jsonb_build_object(%s::text, n) from generate_series(1, %s) n))"
        )
        self.site.db.execute(query, [endpoint, name, count])

    def _install(self) -> None:
        self.cluster.install(DATABASE)
        self.cluster.execute("create extension pg_cron", DATABASE)
        self.site = Site(self.cluster, DATABASE)
        self.site.http("orders", self.receiver.origin + "/orders")
        self.site.http("crm", self.receiver.origin + "/crm")
        # In a hurry no probe comes before it is looked for.
        broken = {"circuit_breaker": {**BROKEN["circuit_breaker"], "cooldown": 300}} if self.is_hurried else BROKEN
        self.site.http("billing", self.receiver.origin + "/billing", TWICE, **broken)
        self._send("orders", 201)

    def _wait_for_workers(self) -> None:
        query = "select count(*) = 2 from ulak.get_worker_status() where state = 'running'"
        wait_until(lambda: self.site.value(query), "two workers")

    def _wait_until_delivered(self) -> None:
        self.site.wait_until_settled()

    def _maintain(self) -> None:
        """One run from its start to its end. pg_cron's own may be under way, and then there is no second one."""
        since = self.site.value("select clock_timestamp()")

        def is_done() -> bool:
            with self.site.connect("ulak_worker") as session:
                session.execute("call ulak.run_maintenance()")
            query = "select bool_and(started_at >= %s) from ulak.maintenance_status where step <> 'vacuum'"
            return bool(self.site.value(query, since))

        wait_until(is_done, "a run of maintenance")

    def _wait_for_maintenance(self) -> None:
        self._maintain()
        # A worker tells what it did once a second, and its counts go into the looks.
        self._wait_for_counts("orders", 201)

    def _wait_for_counts(self, endpoint: str, attempts: int) -> None:
        query = "select sum(s.delivered + s.failed) >= %s from ulak.endpoint_stats s join ulak.endpoints e on e.id = s.endpoint_id where e.name = %s"
        wait_until(lambda: self.site.value(query, attempts, endpoint), f"the counts of {endpoint}")

    def _go_down(self) -> None:
        """Messages 202 to 221 for crm, and 222 to 231 for billing while it is well; then 232 to 531."""
        self._send("crm", 20, "customer")
        self._send("billing", 10, "invoice")
        self.site.wait_until_settled()
        self.is_down = True
        self._send("billing", 300, "invoice")
        wait_until(lambda: self.site.state("billing") == "open", message="an open circuit")
        self._send("orders", 60)
        for endpoint, attempts in (("orders", 261), ("crm", 20), ("billing", 20)):
            self._wait_for_counts(endpoint, attempts)
        if not self.is_hurried:
            time.sleep(15)
        # Between two probes: all that waits is due, and there is time for a look.
        query = """
            select not exists (
                select from ulak.queue q where q.status = 'processing' or q.status = 'pending' and q.next_retry_at > clock_timestamp()
            )
            and (select next_probe_at from ulak.get_endpoint_health('billing')) > clock_timestamp() + interval '2 seconds'
        """
        wait_until(lambda: self.site.value(query), "messages that are due")

    def _wait_for_probes(self) -> None:
        if self.is_hurried:
            self.site.call("alter_endpoint", "billing", {"url": self.receiver.origin + "/billing", **BROKEN})
            self.site.db.execute(
                "update ulak.endpoints set circuit_half_open_at = clock_timestamp() where name = 'billing'"
            )
        query = "select count(*) >= 5 from ulak.event_log where event like 'circuit%%'"
        wait_until(lambda: self.site.value(query) and self.site.state("billing") == "open", "two probes")

    def _wear_out(self) -> None:
        self.site.call("alter_endpoint", "billing", {"url": self.receiver.origin + "/billing", **UNPROTECTED})
        self.site.call("reset_circuit_breaker", "billing")
        self.site.wait_until_settled()

    def _come_back(self) -> None:
        self.is_down = False
        self.site.call("alter_endpoint", "billing", {"url": self.receiver.origin + "/billing", **BROKEN})

    def _hold_vacuum_back(self) -> None:
        """For more than a minute."""
        report = self.site.connect("ulak_application", application_name="nightly report")
        self._stack.callback(report.close)
        report.execute("begin isolation level repeatable read")
        report.execute("select 1")
        self._send("orders", 12000)
        self.site.wait_until_settled()
        # A worker's statistics are sent when its run is over.
        self.site.db.execute("select * from ulak.stop()")
        wait_until(
            lambda: self.site.value(
                "select not exists (select from ulak_private.watchers()) and ulak_private.count_alive(now()) = 0"
            ),
        )
        dead = "select pg_stat_get_dead_tuples('ulak_private.deliveries'::regclass) >= 10000"
        wait_until(lambda: self.site.value(dead), "statistics of the dead rows")
        if not self.is_hurried:
            query = "select count(*) > 0 from ulak.doctor() where \"check\" = 'vacuum'"
            wait_until(lambda: self.site.value(query), "the finding")
        self._report = report

    def _archive(self) -> None:
        self._report.close()
        self.site.configure(archive_after=0)
        self._maintain()
        self.site.db.execute("vacuum (analyze) ulak_private.archived")
        self.site.db.execute("vacuum (analyze) ulak_private.deliveries")

    def _replay(self) -> None:
        day = "date_trunc('day', now())"
        query = f"select ulak.replay_range(1, {day}, {day} + interval '1 day', p_limit => 500)"
        assert self.site.value(query) == 500

    def _move(self) -> None:
        self.site.db.execute("insert into ulak_private.cluster_identity (system_identifier) values (0)")


def written(text: str, run: Callable[[str], str]) -> str:
    """The document with what comes out."""
    lines = text.split("\n")
    results = [(each, run(each.statement)) for each in shown(text)]
    for each, output in reversed(results):
        lines[each.start : each.end] = [f"    {line}".rstrip() for line in output.split("\n")]
    return "\n".join(lines)


# What differs from run to run: times, durations, numbers, identifiers, and how wide a column is.
VARYING = [
    (r"\d{4}-\d\d-\d\d[ T][\d:.]+\+00(:00)?", "<time>"),
    (r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "<id>"),
    (r"(\d+[dhm] )*[\d.]+(ms|s|m|h|d)\b", "<duration>"),
    (r"[·▁▂▃▄▅▆▇█]{5,}", "<sparkline>"),
    (r"archive_\d{4}_\d\d", "archive_<month>"),
    (r"[~>]?[\d][\d,.]*", "<number>"),
    (r"-{2,}", "-"),
    (r" *\+$", ""),
    (r"\s+", " "),
]


def shape(output: str) -> list[str]:
    lines = []
    for line in output.split("\n"):
        for pattern, stands_for in VARYING:
            line = re.sub(pattern, stands_for, line)
        lines.append(line.strip())
    return [line for line in lines if line]


def main() -> None:
    text = DOCUMENT.read_text()
    with Runbook(is_hurried=False) as runbook:
        text = written(text, runbook.run)
        assert runbook.is_over()
    print(text, end="")


if __name__ == "__main__":
    main()
