"""What a node's login must not be able to do, although it delivers everything."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from support.cluster import Connect
from support.errors import refused

DB = psycopg.Connection[Any]


@pytest.fixture
def node(db: DB, connect: Connect) -> DB:
    db.execute("select ulak.create_endpoint('shop', 'http', '{\"url\": \"http://127.0.0.1:9/\"}')")
    db.execute("select ulak.send('shop', '1', p_expires_at => now() + interval '1 hour')")
    db.execute("select ulak.send('shop', '2', p_scheduled_at => now() + interval '1 hour')")
    db.execute("select ulak_private.claim('n', 1, p_protocols => ulak_private.worker_protocols())")
    return connect("ulak_node")


@pytest.mark.parametrize(
    "statement",
    [
        "select * from ulak_private.claim('n', 10, p_now => now() + interval '1 year')",
        "select * from ulak_private.worker_turn('n', p_now => now() + interval '1 year')",
        "select * from ulak_private.claim_new('n', 0, null, 1, '1 s', null, null, now() + interval '1 year')",
        "select ulak_private.settle_many('n', '{1}', '{1}', p_now => now() + interval '1 year')",
        "select ulak_private.release_many('n', '{1}', '{1}', '0', now() + interval '1 year')",
        "select ulak_private.heartbeat_many('n', '{1}', '{1}', p_now => now() - interval '1 year')",
    ],
)
def test_it_cannot_bring_a_clock_of_its_own(db: DB, node: DB, statement: str) -> None:
    before = db.execute("select q::text from ulak.queue q order by id").fetchall()

    denied = refused(node, statement)

    assert (denied.sqlstate, denied.message_primary) == ("42501", "only an administrator may set p_now")
    assert db.execute("select q::text from ulak.queue q order by id").fetchall() == before


@pytest.mark.parametrize(
    "statement",
    [
        "select ulak.send('shop', '1')",
        "select ulak.create_endpoint('mine', 'http', '{\"url\": \"http://127.0.0.1:9/\"}')",
        "select ulak.configure('http_allow_internal_urls', 'true')",
        "select ulak.set_secret('a', 'b')",
        "select * from ulak_private.secrets",
        "select * from ulak.queue",
        "select * from ulak.workers",
        "update ulak.workers set state = 'stopped'",
        "select ulak.start(0)",
        "select ulak.stop()",
        "call ulak.run_worker()",
        "call ulak.run_maintenance()",
        "select ulak_private.load_python()",
        "select ulak_private.launch_watcher()",
        "select ulak_private.log_in('postgres')",
        "select ulak_private.register_worker(1, 'worker 1', false)",
        "select ulak.redrive_all()",
        "set role ulak_worker",
        "do language plpython3u 'pass'",
    ],
)
def test_it_may_deliver_and_nothing_else(node: DB, statement: str) -> None:
    assert refused(node, statement).sqlstate == "42501"


def test_one_session_takes_one_number_of_the_thousand(db: DB, node: DB) -> None:
    (first, _) = node.execute("select * from ulak_private.take_node_slot('mine')").fetchone() or (0, "")

    denied = refused(node, "select * from ulak_private.take_node_slot('mine too')")

    assert denied.sqlstate == "55000"
    assert db.execute("select slot from ulak.workers where slot > 100").fetchall() == [(first,)]
    node.execute("select ulak_private.leave_node_slot(%s)", [first])
    assert node.execute("select slot from ulak_private.take_node_slot('mine')").fetchone() == (first,)


def test_it_cannot_end_the_run_of_another(db: DB, node: DB, connect: Connect) -> None:
    (slot, _) = connect("ulak_node").execute("select * from ulak_private.take_node_slot('other')").fetchone() or (0, "")

    node.execute("select ulak_private.unregister_worker(%s), ulak_private.note_limit(%s, 'nonsense')", [slot, slot])
    node.execute("select ulak_private.leave_node_slot(%s)", [slot])

    row = db.execute("select state, limited_by from ulak.workers where slot = %s", [slot]).fetchone()
    assert row == ("running", None)
