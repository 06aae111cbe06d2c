"""A message that ends runs of workers by a defect that no wall contains: it is found, becomes a dead letter, and is reported."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from support.cluster import Cluster
from support.defects import install_defect
from support.node import Node, node_dsn
from support.receiver import Receiver
from support.sessions import wait_until
from support.site import Site

START = "            self._state.dispatcher.start(to, messages)\n"
DEFECT = '            if "poison" in messages[0].payload:\n                raise ZeroDivisionError("a defect")\n'
FOUND = "[PERMANENT] message: 3 runs of a worker in a row ended with it: ZeroDivisionError"
FINDING = "select finding from ulak.doctor() where \"check\" = 'workers' and finding ~ 'ended with an error'"


@pytest.fixture
def site(cluster: Cluster, database: str, tmp_path: Path) -> Iterator[Site]:
    """Its workers stumble over any message with the word poison."""
    site = Site(cluster, database)
    install_defect(site.db, tmp_path, "worker/loop.py", START, DEFECT + START)
    yield site
    site.end()


def test_a_message_that_ends_the_runs_of_a_worker_is_found_and_buried(site: Site, receiver: Receiver) -> None:
    site.http("shop", receiver.url)
    good = [site.send("shop", {"n": n}) for n in range(5)]
    poison = site.send("shop", {"text": "poison"})
    good += [site.send("shop", {"n": n}) for n in range(5, 10)]

    for _ in range(3):
        with pytest.raises(psycopg.errors.ExternalRoutineException, match="a defect"):
            site.begin(1, 60).result()
    suspicion = site.value("select suspicion from ulak.workers")
    site.start(1)

    assert site.status(poison) == "failed"
    assert site.message(poison)["last_error"] == FOUND
    for id in good:
        site.wait_for_status(id, "completed")
    assert site.value(FINDING).startswith("3 runs of worker 1 ended with an error, the last one ")
    assert site.value(FINDING).endswith(" ago: ZeroDivisionError: a defect")
    assert site.value(
        "select detail -> 'messages' from ulak.event_log where event = 'worker.broke_off' order by id desc limit 1"
    ) == [poison]
    assert suspicion == 1
    assert site.value("select circuit_state from ulak.endpoints") == "closed"


def test_a_run_that_ends_well_lifts_the_suspicion(site: Site, receiver: Receiver) -> None:
    site.http("shop", receiver.url)
    poison = site.send("shop", {"text": "poison"})
    for _ in range(2):
        with pytest.raises(psycopg.errors.ExternalRoutineException, match="a defect"):
            site.begin(1, 60).result()
    site.call("cancel", poison)
    id = site.send("shop")

    site.begin(1, 1).result()

    assert site.status(id) == "completed"
    assert site.value("select suspicion from ulak.workers") == 0


def test_a_node_finds_it_too(site: Site, receiver: Receiver) -> None:
    site.http("shop", receiver.url)
    poison = site.send("shop", {"text": "poison"})
    good = [site.send("shop", {"n": n}) for n in range(5)]

    with Node(node_dsn(site.cluster, site.database)):
        wait_until(lambda: site.status(poison) == "failed", "the message that ends runs to be buried")
        for id in good:
            site.wait_for_status(id, "completed")

    assert site.message(poison)["last_error"] == FOUND
    assert "node 1 on " in site.value(FINDING)
