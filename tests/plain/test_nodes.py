"""Nodes deliver everything of a plain installation, with the Python that they fetch from it."""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from nacl.signing import VerifyKey
from support.copies import NEXT, make_next_release
from support.finished import value
from support.node import Node, node_dsn
from support.plain import PlainCluster, build_script
from support.receiver import Answer, Receiver
from support.sessions import wait_until
from support.site import Site


@pytest.fixture
def site(plain: PlainCluster, plain_template: str) -> Iterator[Site]:
    with plain.database("delivered", plain_template) as name:
        site = Site(plain, name)
        yield site
        site.end()


@pytest.fixture
def start_node(site: Site) -> Iterator[Callable[[], Node]]:
    with ExitStack() as stack:

        def start() -> Node:
            node = stack.enter_context(Node(node_dsn(site.cluster, site.database), "--name", "elsewhere"))
            node.wait_until_says("delivering as")
            return node

        yield start


def test_a_node_delivers_retries_and_gives_up(site: Site, receiver: Receiver, start_node: Callable[[], Node]) -> None:
    refuses = {"backoff": "schedule", "schedule": [0], "max_retries": 1}
    with Receiver(lambda request: Answer(status=503)) as moody:
        site.http("shop", receiver.url)
        secret = site.call("rotate_secret", "shop")
        site.http("moody", moody.url, policy=refuses)
        start_node()

        sent = [site.send("shop", {"n": n}) for n in range(20)]
        dead = site.send("moody", {})
        arrived = receiver.wait_for(20)
        site.wait_for_status(dead, "failed")

    for id in sent:
        site.wait_for_status(id, "completed")
    assert sorted(json.loads(request.body)["n"] for request in arrived) == list(range(20))
    assert secret and all("webhook-signature" in request.headers for request in arrived)
    assert site.value("select count(*) from ulak.dlq where original_message_id = %s and attempts = 2", dead) == 1
    assert site.rows("select host, state from ulak.get_worker_status()") == [{"host": "elsewhere", "state": "running"}]
    assert site.value("""select count(*) from ulak.doctor() where "check" = 'workers'""") == 0
    assert value(site.db, "call ulak.await_delivery(%s)", site.send("shop")) == "completed"


def test_a_node_sends_the_body_of_a_subscription_and_signs_with_a_key_that_was_made_here(
    site: Site, receiver: Receiver, start_node: Callable[[], Node]
) -> None:
    site.http("chat", receiver.url, body={"text": "own"}, signature={"scheme": "ed25519"})
    site.db.execute("select ulak.create_event_type('order.placed')")
    site.db.execute("select ulak.subscribe('order.*', 'chat', p_body => %s)", ['{"text": "order {payload.id}"}'])
    public = site.call("rotate_secret", "chat")
    start_node()

    site.send("chat")
    site.db.execute("select ulak.publish('order.placed', '{\"id\": 7}')")

    arrived = receiver.wait_for(2)
    assert sorted(json.loads(request.body)["text"] for request in arrived) == ["order 7", "own"]
    for request in arrived:
        said = f"{request.headers['webhook-id']}.{request.headers['webhook-timestamp']}.".encode() + request.body
        version, _, signature = request.headers["webhook-signature"].partition(",")
        assert version == "v1a"
        VerifyKey(b64decode(public.removeprefix("whpk_"))).verify(said, b64decode(signature))


def test_without_a_node_doctor_and_explain_ask_for_one(site: Site, receiver: Receiver) -> None:
    site.http("shop", receiver.url)
    id = site.send("shop")
    found = """select severity, finding, fix from ulak.doctor() where "check" = 'workers'"""

    (finding,) = site.rows(found)

    fix = f'-- start a node: python3 worker.py --dsn "... dbname={site.database}"'
    assert finding == {"severity": "critical", "finding": "no node is alive", "fix": fix}
    explained = site.column("select what from ulak.explain(%s)", id)
    assert explained[-1] == "next: nothing, no node is alive: select * from ulak.doctor();"
    site.db.execute("select * from ulak.stop()")
    (finding,) = site.rows(found)
    assert finding["fix"] == "select * from ulak.start(0); -- stop() was called, and nodes wait"


def test_a_running_node_takes_up_the_version_that_a_script_brings(
    plain: PlainCluster, site: Site, receiver: Receiver, start_node: Callable[[], Node], tmp_path: Path
) -> None:
    site.http("shop", receiver.url)
    node = start_node()
    script = build_script(tmp_path / "built", make_next_release(tmp_path))

    plain.run_script(site.database, script)

    node.wait_until_says(f"version {NEXT} from")
    site.wait_for_status(site.send("shop"), "completed")
    row = "select version from ulak.workers where state = 'running'"
    wait_until(lambda: site.column(row) == [NEXT], message="the node's new version")
