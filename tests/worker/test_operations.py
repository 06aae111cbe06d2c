"""docker/OPERATIONS.md shows real output: the story of its outage is played, and each statement prints what the page shows."""

from __future__ import annotations

import re
import subprocess
from concurrent.futures import Future

from support.cluster import PROJECT, Cluster
from support.receiver import Receiver
from support.runbook import DOCUMENT, Played, shape, shown
from support.site import Site


def test_every_output_of_the_runbook_is_one_that_comes_out(outage: Future[Played]) -> None:
    """But for times, durations, numbers and identifiers."""
    played = outage.result()

    assert played.is_over
    for each, output in zip(shown(DOCUMENT.read_text()), played.outputs, strict=True):
        # pg_cron 1.5 and newer get other jobs.
        if not (played.has_other_jobs and "ulak.start()" in each.statement):
            assert (each.statement, shape(output)) == (each.statement, shape(each.output))


def test_what_readme_shows_of_a_message_comes_out(site: Site, receiver: Receiver) -> None:
    (page,) = shown((PROJECT / "README.md").read_text())
    site.http("orders", receiver.url)
    site.start()
    id = site.send("orders")
    site.wait_for_status(id, "completed")

    rows = site.db.execute("select * from ulak.explain(%s)", [id]).fetchall()

    printed = [f"{'' if at is None else at} | {what}" for at, what in rows]
    assert page.statement == "select * from ulak.explain(1);"
    # The page's sender is its shop.
    assert shape("\n".join(printed)) == shape(page.output.replace("sent by shop", f"sent by {site.db.info.user}"))


def run_script(cluster: Cluster, database: str, heading: str) -> str:
    """What the page shows in SQL below this heading, in one session."""
    section = DOCUMENT.read_text().split(f"\n### {heading}\n")[1].split("\n## ")[0].split("\n### ")[0]
    script = "".join(re.findall(r"^```sql\n(.*?)^```$", section, re.MULTILINE | re.DOTALL))
    done = subprocess.run(
        [cluster.bin / "psql", "-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1", "-d", cluster.dsn(database)],
        input=script,
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_payload_is_seen_as_the_page_says(cluster: Cluster, cron_database: str) -> None:
    site = Site(cluster, cron_database)
    site.http("orders", "http://127.0.0.1:9/hooks")
    site.db.execute("select setval('ulak.queue_id_seq', 16)")
    site.send("orders", {"order": 17})

    printed = run_script(cluster, cron_database, "See a payload")

    site.end()
    assert printed.startswith('{"order": 17}|')
    assert "--data-raw '{\"order\": 17}'" in printed


def test_the_last_hour_is_replayed_as_the_page_says(cluster: Cluster, cron_database: str, receiver: Receiver) -> None:
    site = Site(cluster, cron_database)
    site.http("orders", receiver.url)
    site.start()
    site.wait_for_status(site.send("orders"), "completed")

    printed = run_script(cluster, cron_database, "Replay the last hour")

    site.end()
    assert printed.split() == ["1", "1"]


def test_ulak_is_uninstalled_as_the_page_says(cluster: Cluster, cron_database: str) -> None:
    cluster.execute("select ulak.start()", cron_database)

    run_script(cluster, cron_database, "Uninstall")

    with cluster.connect(cron_database) as db:
        left = "select count(*) from pg_namespace where nspname like 'ulak%'"
        assert db.execute(left).fetchone() == (0,)
        assert db.execute("select count(*) from cron.job").fetchone() == (0,)
        # Roles belong to the server.
        assert db.execute("select count(*) from pg_roles where rolname = 'ulak_admin'").fetchone() == (1,)
    # The roles that are left don't stand in the way of a new installation.
    cluster.install(cron_database)
