"""A node's life: it fetches its code from the database, delivers, and leaves when it should."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from support.copies import NEXT, make_next_release, use
from support.errors import refused
from support.nats import Nats
from support.nkeys import User
from support.node import Held, Node, StartNode, node_dsn, wait_for_nodes
from support.receiver import Answer, Receiver
from support.sessions import wait_until
from support.site import Site

HELD = "select count(*) from ulak.queue where status = 'processing'"
DELIVERED = "select count(*) from ulak.messages where status = 'completed'"
# What a setting or a circuit would add is of no interest here.
ONCE = {"max_retries": 0}


def test_a_node_delivers_and_is_seen_with_its_host(site: Site, receiver: Receiver, start_node: StartNode) -> None:
    site.http("shop", receiver.url)
    site.http("down", "http://127.0.0.1:9/", policy=ONCE)
    start_node("machine-7")
    for n in range(20):
        site.send("shop", {"n": n, "text": 'quotes " and \\ backslashes, ünï'})
    site.send("down")

    receiver.wait_for(20)
    site.wait_until_settled()
    (row,) = wait_until(lambda: (rows := wait_for_nodes(site, 1))[0]["messages_processed"] == 21 and rows)

    assert (row["slot"], row["host"], row["in_flight"], row["error_count"]) == (101, "machine-7", 0, 1)
    assert row["name"] == f"node 1 on machine-7, pid {row['pid']}"
    assert row["last_error"].startswith("[RETRYABLE] connect")
    assert sorted(json.loads(request.body)["n"] for request in receiver.requests) == list(range(20))
    assert {json.loads(request.body)["text"] for request in receiver.requests} == {'quotes " and \\ backslashes, ünï'}
    assert site.value("select application_name from pg_stat_activity where pid = %s", row["pid"]) == (
        "ulak node 1 on machine-7"
    )


def test_every_kind_of_endpoint_gets_its_messages_from_a_node(
    site: Site, receiver: Receiver, start_node: StartNode
) -> None:
    """Batches, ordering keys, headers, metadata, log lines: whatever the statements of the worker return."""
    site.http("batches", receiver.url, batch_size=10)
    site.http("events", receiver.url, cloudevents=True, signing_secret="a secret of this test, long enough")
    site.endpoint("log", {}, None, "log")
    start_node()
    for n in range(30):
        site.send("batches", {"n": n})
        site.send("events", {"n": n}, ordering_key=f"key {n % 3}", headers={"x-n": str(n)}, metadata={"n": n})
        site.send("log", {"line": n})

    site.wait_until_settled()

    assert site.value(DELIVERED) == 90
    events = [request for request in receiver.requests if "x-n" in request.headers]
    assert len(events) == 30
    for key in range(3):
        of_key = [int(request.headers["x-n"]) for request in events if int(request.headers["x-n"]) % 3 == key]
        assert of_key == sorted(of_key)
    assert '"line": 29' in site.cluster.log.read_text(errors="replace")


def test_a_node_leaves_to_others_what_it_has_no_client_for(site: Site, receiver: Receiver, tmp_path: Path) -> None:
    site.http("shop", receiver.url)
    site.endpoint("rabbit", {"host": "127.0.0.1", "exchange": "orders"}, None, "amqp")
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['pika'] = None\n")

    with Node(node_dsn(site.cluster, site.database), environment={"PYTHONPATH": str(tmp_path)}) as node:
        node.wait_until_says("left to others: amqp (needs python3-pika)")
        for n in range(40):
            site.send("rabbit", {"n": n})
            site.send("shop", {"n": n})
        receiver.wait_for(40)

        wait_until(lambda: site.value(DELIVERED) == 40)
        untouched = "select count(*) from ulak.queue where status = 'pending' and attempts = 0"
        assert site.value(untouched) == 40


def test_a_node_signs_in_to_a_nats_server(site: Site, tmp_path: Path, start_node: StartNode) -> None:
    user = User.create()
    with Nats(tmp_path / "nats", f'authorization: {{users: [{{nkey: "{user.public}"}}]}}', jetstream=False) as server:
        config = {"url": server.url, "subject": "orders", "nkey_seed": user.seed, "jetstream": False}
        site.endpoint("subject", config, None, "nats")
        for n in range(40):
            site.send("subject", {"n": n})

        start_node()
        site.wait_until_settled()

        assert site.value(DELIVERED) == 40


def test_a_node_knows_the_bodies_of_subscriptions(site: Site, receiver: Receiver, start_node: StartNode) -> None:
    site.call("create_event_type", "order.paid")
    site.http("chat", receiver.url)
    site.value("""select ulak.subscribe('order.*', 'chat', p_body => '{"text": "Order {payload.id} is paid"}')""")
    start_node("machine-7")

    site.value("""select ulak.publish('order.paid', '{"id": 7}')""")
    (request,) = receiver.wait_for(1)
    site.wait_until_settled()
    site.call("unsubscribe", "order.*", "chat")
    site.call("drop_event_type", "order.paid")

    assert json.loads(request.body) == {"text": "Order 7 is paid"}


def test_large_messages_reach_a_node_one_by_one(site: Site, receiver: Receiver, start_node: StartNode) -> None:
    site.http("shop", receiver.url)
    site.configure(max_payload_size=4_000_000)
    for n in range(3):
        site.send("shop", {"n": n, "text": "".join(chr(97 + (i * i + n) % 26) for i in range(1_500_000))})

    start_node()
    site.wait_until_settled()

    assert sorted(len(request.body) for request in receiver.requests)[0] > 1_500_000


def test_stop_lets_a_node_wait_for_start(site: Site, receiver: Receiver, start_node: StartNode) -> None:
    site.http("shop", receiver.url)
    node = start_node()
    name = wait_for_nodes(site, 1)[0]["name"]

    asked = dict(site.db.execute("select item, detail from ulak.stop()").fetchall())
    node.wait_until_says("waiting for ulak.start()")
    site.send("shop")
    states = site.column("select state from ulak.get_worker_status()")
    before = site.value(DELIVERED)
    site.db.execute("select ulak.start(0)")
    site.wait_until_settled()

    assert asked[name] == "asked to wait for start()"
    assert (states, before) == (["stopped"], 0)
    assert len(receiver.requests) == 1
    assert node.process.poll() is None


def test_a_node_that_comes_after_stop_waits_too(site: Site, receiver: Receiver) -> None:
    site.http("shop", receiver.url)
    site.db.execute("select ulak.stop()")
    site.send("shop")

    with Node(node_dsn(site.cluster, site.database)) as node:
        node.wait_until_says("waiting for ulak.start()")

        assert (site.value(DELIVERED), site.column("select name from ulak.workers")) == (0, [])
        node.tell(signal.SIGTERM)
        assert node.wait() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_a_node_finish_what_is_under_way(
    site: Site, held: Held, start_node: StartNode, number: signal.Signals
) -> None:
    site.http("shop", held.receiver.url)
    node = start_node()
    site.send_many(3, "shop")
    wait_until(lambda: len(held.receiver.requests) == 3)

    node.tell(number)
    # Whatever is sent from now on isn't taken.
    wait_until(lambda: site.value("select in_flight from ulak.workers") == 3)
    assert node.process.poll() is None
    held.release()

    assert node.wait() == 0
    assert (site.value(DELIVERED), len(held.receiver.requests)) == (3, 3)
    assert site.column("select state from ulak.get_worker_status()") == ["stopped"]


def test_an_idle_node_leaves_at_once(site: Site, start_node: StartNode) -> None:
    node = start_node()

    node.tell(signal.SIGTERM)

    assert node.wait() == 0
    assert node.lines()[-1] == "ulak node: ended"


def test_a_node_ends_without_tearing_python_down(site: Site, tmp_path: Path) -> None:
    """A thread of librdkafka that asks whether it may dial would crash then. Here abort() stands for it."""
    (tmp_path / "sitecustomize.py").write_text("import atexit, os\natexit.register(os.abort)\n")

    with Node(node_dsn(site.cluster, site.database), environment={"PYTHONPATH": str(tmp_path)}) as node:
        node.wait_until_says("delivering as")
        node.tell(signal.SIGTERM)

        assert node.wait() == 0


def test_a_second_signal_gives_back_what_is_under_way(site: Site, held: Held, start_node: StartNode) -> None:
    site.http("shop", held.receiver.url)
    node = start_node()
    site.send_many(3, "shop")
    wait_until(lambda: len(held.receiver.requests) == 3)

    node.tell(signal.SIGTERM)
    node.wait_until_says("finishing what is under way")
    node.tell(signal.SIGTERM)

    assert node.wait() == 0
    assert site.column("select status || ' ' || retry_count from ulak.queue") == ["pending 0"] * 3


def test_a_node_obeys_a_changed_setting_in_the_same_session(
    site: Site, receiver: Receiver, start_node: StartNode
) -> None:
    site.http("shop", receiver.url, policy=ONCE)
    start_node()
    site.wait_for_status(site.send("shop"), "completed")
    (before,) = wait_for_nodes(site, 1)

    site.configure(http_allowed_networks="")
    # It is told within a second.
    failed = "select last_error from ulak.messages where status = 'failed'"
    (error, *_) = wait_until(lambda: site.send("shop") and site.column(failed), "a refusal", interval=0.1)

    assert "blocked" in error
    assert wait_for_nodes(site, 1)[0]["pid"] == before["pid"]


def test_a_node_goes_on_with_the_code_of_a_new_version(
    site: Site, receiver: Receiver, start_node: StartNode, tmp_path: Path
) -> None:
    site.http("shop", receiver.url)
    node = start_node()
    site.wait_for_status(site.send("shop"), "completed")
    use(site.db, make_next_release(tmp_path))

    site.db.execute("alter extension ulak update")
    node.wait_until_says(f"version {NEXT}")
    site.wait_for_status(site.send("shop"), "completed")

    assert wait_for_nodes(site, 1)[0]["version"] == NEXT
    assert len(receiver.requests) == 2


def test_code_that_does_not_match_its_hash_is_not_run(site: Site, receiver: Receiver) -> None:
    site.http("shop", receiver.url)
    definition: str = site.value("select pg_get_functiondef('ulak_private.python_stamp()'::regprocedure)")
    stamp: str = site.value("select ulak_private.python_stamp()")
    site.db.execute(definition.replace(stamp, "0" * 64))  # type: ignore[arg-type]
    id = site.send("shop")

    with Node(node_dsn(site.cluster, site.database)) as node:
        node.wait_until_says("doesn't match its hash")
        assert not node.says("delivering as")
        # It tries again, as it does after every trouble.
        site.db.execute(definition)  # type: ignore[arg-type]
        site.wait_for_status(id, "completed")


def test_two_nodes_share_the_work(site: Site, start_node: StartNode) -> None:
    with Receiver(Answer(delay=0.2)) as receiver:
        site.http("shop", receiver.url)
        start_node("one")
        start_node("two")
        wait_for_nodes(site, 2)
        site.send_many(600, "shop")
        site.wait_until_settled()

        done = "select host, messages_processed from ulak.get_worker_status() order by 1"
        told = wait_until(lambda: sum((r := dict(site.db.execute(done).fetchall())).values()) == 600 and r)

        assert set(told) == {"one", "two"}
        assert min(told.values()) > 0
        assert len(receiver.requests) == 600


def test_a_node_and_a_worker_in_the_database_work_side_by_side(site: Site, start_node: StartNode) -> None:
    with Receiver(Answer(delay=0.02)) as receiver:
        site.http("shop", receiver.url)
        start_node()
        site.start(slot=1)
        site.send_many(600, "shop")
        site.wait_until_settled()

        query = "select coalesce(host, 'database') from ulak.workers where messages_processed > 0"
        wait_until(lambda: sorted(site.column(query)) == ["database", "here"], message="both to have delivered")
        assert len(receiver.requests) == 600


@pytest.mark.parametrize("end", ["pg_terminate_backend", "pg_cancel_backend"])
def test_a_node_whose_session_is_ended_comes_back(
    site: Site, receiver: Receiver, start_node: StartNode, end: str
) -> None:
    site.http("shop", receiver.url)
    node = start_node()
    (before,) = wait_for_nodes(site, 1)

    # A cancel reaches it only in the midst of a statement.
    def has_left() -> bool:
        site.value(f"select {end}(%s)", before["pid"])
        rows = site.rows("select * from ulak.get_worker_status() where state = 'running'")
        return bool(rows) and rows[0]["pid"] != before["pid"]

    wait_until(has_left, "another session")
    site.wait_for_status(site.send("shop"), "completed")

    assert node.process.poll() is None


def test_a_node_that_was_killed_is_lost_and_its_messages_go_to_another(
    site: Site, held: Held, start_node: StartNode
) -> None:
    site.http("shop", held.receiver.url, policy={"backoff": "schedule", "schedule": [0]})
    node = start_node("dies")
    site.send_many(3, "shop")
    wait_until(lambda: len(held.receiver.requests) == 3)
    node.kill()
    wait_until(lambda: site.column("select state from ulak.get_worker_status()") == ["lost"])
    held.release()
    start_node("lives")

    site.db.execute("update ulak.queue set lease_until = clock_timestamp() where status = 'processing'")
    site.value("select ulak.recover_stale_messages()")
    site.wait_until_settled()

    assert site.value(DELIVERED) == 3
    # It has the number of the dead one: nothing is left of that.
    assert site.column("select host from ulak.workers") == ["lives"]


def test_a_node_that_was_forgotten_registers_anew(site: Site, receiver: Receiver, start_node: StartNode) -> None:
    site.http("shop", receiver.url)
    start_node()
    (before,) = wait_for_nodes(site, 1)

    site.db.execute("delete from ulak.workers")
    (after,) = wait_for_nodes(site, 1)

    assert after["pid"] != before["pid"]
    site.wait_for_status(site.send("shop"), "completed")


def test_a_node_that_is_gone_for_an_hour_is_forgotten(site: Site) -> None:
    site.db.execute(
        """
        insert into ulak.workers (slot, name, pid, state, started_at, last_activity, heartbeat_at, version, host)
        select 100 + n, 'node ' || n, 0, 'running', h.at, h.at, h.at, '0', 'gone'
        from (values (1, now() - interval '61 min'), (2, now() - interval '59 min')) h (n, at)
        union all
        select 1, 'worker 1', 0, 'stopped', h.at, h.at, h.at, '0', null
        from (values (now() - interval '1 year')) h (at)
        """
    )

    site.value("select ulak_private.sweep()")

    assert site.column("select slot from ulak.workers order by 1") == [1, 102]


def test_a_node_is_a_thousand_at_most(site: Site) -> None:
    session = site.connect("ulak_node")
    site.db.execute(
        """
        insert into ulak.workers (slot, name, pid, state, started_at, last_activity, heartbeat_at, version, host)
        select 100 + n, 'node ' || n, pg_backend_pid(), 'running', now(), now(), now(), '0', 'here'
        from generate_series(1, 999) n
        """
    )

    first = session.execute("select slot, name from ulak_private.take_node_slot(E'a b\n;c')").fetchone()
    refusal = refused(site.connect("ulak_node"), "select ulak_private.take_node_slot('x')")

    assert first == (1100, f"node 1000 on a?b??c, pid {session.info.backend_pid}")
    assert (refusal.sqlstate, refusal.message_primary) == ("53400", "there are 1000 nodes already")
