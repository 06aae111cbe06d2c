"""What an administrator must not be able to do: skip validation, stop every worker by a setting, or date the log."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from support.cluster import Cluster, Connect
from support.errors import refused
from support.receiver import Receiver
from support.site import Site

DB = psycopg.Connection[Any]

LONG_AGO = "2000-01-01"


@pytest.fixture
def admin(connect: Connect) -> DB:
    return connect("ulak_admin")


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as receiver:
        yield receiver


def test_it_cannot_skip_the_validation_of_a_config_as_a_restore_does(db: DB, admin: DB) -> None:
    admin.execute("set row_security = off")

    denied = refused(admin, """select ulak.create_endpoint('e', 'pull', '{}', '{"max_retries": "many"}')""")
    assert denied.sqlstate == "22023"
    admin.execute("select ulak.create_endpoint('e', 'pull', '{}')")

    assert db.execute("select event, actor from ulak.event_log").fetchall() == [("endpoint.created", "test_ulak_admin")]


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        ("10.1/16", "10.1.0.0/16"),
        (" 10 , 192.168.5 ", "10.0.0.0/8,192.168.5.0/24"),
        ("127.0.0.1", "127.0.0.1/32"),
        ("FD00::/8", "fd00::/8"),
        ("", ""),
    ],
)
def test_networks_are_stored_as_workers_read_them(db: DB, admin: DB, given: str, stored: str) -> None:
    assert admin.execute("select ulak.configure('http_allowed_networks', %s)", [given]).fetchone() == (stored,)


@pytest.mark.parametrize(
    "given", ["10.1.2.3/16", "10.0.0.0/8,", "garbage", "10.0.0.0/8;11.0.0.0/8", "1 0.0.0.0/8", "fe80::1%eth0"]
)
def test_networks_that_workers_couldnt_read_are_refused(admin: DB, given: str) -> None:
    assert refused(admin, "select ulak.configure('http_allowed_networks', %s)", given).sqlstate == "22023"


@pytest.mark.parametrize("stored", ["127/8", "127.0.0.0/8,10.1/16,garbage"])
def test_networks_of_any_spelling_end_no_run(cluster: Cluster, database: str, receiver: Receiver, stored: str) -> None:
    """Whatever lies in the table: what can be read counts."""
    site = Site(cluster, database)
    if "garbage" in stored:
        site.db.execute("update ulak.setting_values set value = %s where name = 'http_allowed_networks'", [stored])
    else:
        site.configure(http_allowed_networks=stored)
    site.http("shop", receiver.url)
    id = site.send()

    site.start()

    site.wait_for_status(id, "completed")
    site.close()


@pytest.mark.parametrize(
    ("event", "statement"),
    [
        ("endpoint.disabled", "select ulak.disable_endpoint('shop', %s)"),
        ("endpoint.enabled", "select ulak.enable_endpoint('off', null, %s)"),
        ("circuit.reset", "select ulak.reset_circuit_breaker('shop', %s)"),
        ("message.dead", "select ulak.archive_single_to_dlq(1, 'spam', %s)"),
        (
            "message.dead",
            "select ulak.fail(id, 'w', attempt, 'no', p_permanent => true, p_now => %s) from ulak.claim('w')",
        ),
        ("message.redriven", "select ulak.redrive_message(1, 'me', %s)"),
        ("circuit.opened", "select ulak.update_circuit_breaker(1, false, %s) from generate_series(1, 10)"),
    ],
)
def test_it_cannot_date_an_entry_of_the_log(db: DB, admin: DB, event: str, statement: str) -> None:
    db.execute("select ulak.create_endpoint('shop', 'pull', '{}'), ulak.create_endpoint('off', 'pull', '{}')")
    db.execute("select ulak.disable_endpoint('off')")
    if event == "circuit.reset":
        db.execute("select ulak.update_circuit_breaker(1, false) from generate_series(1, 10)")
    db.execute("select ulak.send_batch('shop', array['1', '2']::jsonb[])")
    if event == "message.redriven":
        db.execute("select ulak.archive_single_to_dlq(1)")
    db.execute("delete from ulak.event_log")

    admin.execute(statement, [LONG_AGO])  # type: ignore[call-overload]

    query = "select distinct event, actor, created_at > now() - interval '1 hour' from ulak.event_log"
    assert db.execute(query).fetchall() == [(event, "test_ulak_admin", True)]


def test_the_circuits_probe_is_logged_by_the_clock_as_well(db: DB, admin: DB) -> None:
    db.execute("select ulak.create_endpoint('shop', 'pull', '{}'), ulak.send('shop', '1')")
    db.execute("select ulak.update_circuit_breaker(1, false) from generate_series(1, 10)")

    admin.execute("select ulak.claim('w', p_now => now() + interval '1 year')")

    query = "select created_at < now() + interval '1 hour' from ulak.event_log where event = 'circuit.half_open'"
    assert db.execute(query).fetchall() == [(True,)]


def test_no_notification_is_sent_past_the_guard_against_a_full_queue(db: DB) -> None:
    """A full notification queue makes whoever notifies fail: one function looks first, and the others call it."""
    query = "select proname from pg_proc where pronamespace = 'ulak'::regnamespace and prosrc ~ 'pg_notify|notify ulak'"

    assert db.execute(query).fetchall() == [("_notify",)]


def test_networks_that_an_earlier_version_stored_are_put_right(
    cluster: Cluster, template: str, empty_database: str
) -> None:
    with cluster.connect(empty_database) as db:
        db.execute("create extension ulak version '0.1.0' cascade")
        db.execute("select ulak.configure('http_allowed_networks', '10.1/16, 127.0.0.1')")

        db.execute("alter extension ulak update")

        assert db.execute("select ulak.setting('http_allowed_networks')").fetchone() == ("10.1.0.0/16,127.0.0.1/32",)
