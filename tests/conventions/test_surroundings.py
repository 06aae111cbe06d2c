"""Databases of an unusual kind: each works, or is refused at installation with a reason."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import psycopg
import pytest
from support.cluster import Cluster
from support.errors import refused
from support.receiver import Receiver
from support.sessions import wait_until
from support.site import LONG, Site, WorkerSession

Make = Callable[..., str]

GRANTS = """
    select p.oid::regprocedure::text, a.grantee::regrole::text
    from pg_proc p, aclexplode(p.proacl) a
    where p.pronamespace::regnamespace::text in ('ulak', 'ulak_private') and a.grantee <> p.proowner
    order by 1, 2
"""


@pytest.fixture
def make(cluster: Cluster, template: str) -> Iterator[Make]:
    """make("encoding 'EUC_JP'", ...): a database of that kind, without the extension."""
    numbers = itertools.count()
    with ExitStack() as stack:
        yield lambda *options: stack.enter_context(cluster.database(f"odd_{next(numbers)}", options=" ".join(options)))


def deliver(cluster: Cluster, database: str, receiver: Receiver, payload: Any) -> None:
    """From send() to the receiver, then maintenance and all reporting functions once."""
    site = Site(cluster, database)
    site.http("shop", receiver.url)
    worker = site.start()

    message = site.send("shop", payload)
    site.wait_for_status(message, "completed")

    assert json.loads(receiver.requests[-1].body) == payload
    worker.end()
    with site.connect("ulak_worker") as session:
        session.execute("call ulak.run_maintenance()")
    assert site.value("select count(*) from ulak.maintenance_status where state not in ('ok', 'never ran')") == 0
    assert site.value("select count(*) from ulak.top where endpoint = 'shop'") == 1
    assert "shop" in site.value("select ulak.report()")
    site.close()


def test_a_japanese_database_delivers(cluster: Cluster, make: Make, receiver: Receiver) -> None:
    database = make("encoding 'EUC_JP' locale 'C'")
    cluster.install(database)

    deliver(cluster, database, receiver, {"name": "注文"})


def test_a_database_that_reads_backslashes_as_escapes_gets_every_grant_and_delivers(
    cluster: Cluster, template: str, make: Make, receiver: Receiver
) -> None:
    database = make()
    cluster.execute(f"alter database {database} set standard_conforming_strings = off")
    cluster.install(database)

    with cluster.connect(database) as odd, cluster.connect(template) as usual:
        assert odd.execute(GRANTS).fetchall() == usual.execute(GRANTS).fetchall()
    deliver(cluster, database, receiver, {"path": "a\\b"})


def test_a_read_only_database_is_refused_with_a_reason_and_delivers_once_installed(
    cluster: Cluster, make: Make, receiver: Receiver
) -> None:
    database = make()
    cluster.execute(f"alter database {database} set default_transaction_read_only = on")
    with cluster.connect(database) as connection:
        assert "read-only transaction" in str(refused(connection, "create extension ulak cascade").message_primary)

        connection.execute("set default_transaction_read_only = off")
        connection.execute("create extension ulak cascade")
    # The application sends in transactions that may write; ulak's own sessions must make sure of that themselves.
    with cluster.connect(database) as connection:
        connection.execute("set default_transaction_read_only = off")
        connection.execute("select ulak.configure('http_allowed_networks', '127.0.0.0/8')")
        connection.execute("select ulak.create_endpoint('shop', 'http', %s)", [json.dumps({"url": receiver.url})])
        connection.execute("""select ulak.send('shop', '{"n": 1}')""")

    worker = WorkerSession(cluster.connect(database, "ulak_worker"), None, LONG)
    delivered = "select count(*) from ulak.messages where status = 'completed'"
    with cluster.connect(database) as observer:
        wait_until(lambda: worker.call.is_done() or observer.execute(delivered).fetchone() == (1,), "a delivery")
    if worker.call.is_done():
        worker.call.result()
    worker.end()
    with cluster.connect(database, "ulak_worker") as maintenance:
        maintenance.execute("call ulak.run_maintenance()")

    assert [json.loads(request.body) for request in receiver.requests] == [{"n": 1}]
    assert cluster.psql(database, "select count(*) > 0 from ulak_private.maintenance_runs") == "t"


def test_a_turkish_database_knows_the_small_letters_of_names(cluster: Cluster, make: Make, receiver: Receiver) -> None:
    """There, the lower case of I isn't i."""
    database = make("locale_provider icu icu_locale 'tr-TR' locale 'C.UTF-8'")
    cluster.install(database)
    with cluster.connect(database) as connection:
        connection.execute("select ulak.create_endpoint('pull', 'pull', '{}')")
        assert connection.execute("select lower('I') <> 'i'").fetchone() == (True,)

        assert connection.execute("select name from ulak.help('CLAIM') limit 1").fetchone() == ("claim",)
        assert (
            refused(connection, """select ulak.send('pull', '1', p_headers => '{"WEBHOOK-ID": "x"}')""").sqlstate
            == "42939"
        )
        config = json.dumps({"url": receiver.url, "headers": {"CONNECTION": "close"}})
        denied = refused(connection, "select ulak.create_endpoint('http', 'http', %s)", config)
        assert "ulak sets itself" in str(denied.message_primary)
    deliver(cluster, database, receiver, {"name": "Işık"})


def test_a_session_cannot_bend_what_is_refused_by_reading_backslashes_otherwise(db: psycopg.Connection[Any]) -> None:
    db.execute("set standard_conforming_strings = off")

    denied = refused(
        db, "select ulak.create_endpoint('http', 'http', %s)", json.dumps({"url": "http://example.com/a\\b"})
    )

    assert "backslash" in str(denied.message_primary)
