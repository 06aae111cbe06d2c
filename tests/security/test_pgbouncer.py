"""Two applications and two consumers behind a PgBouncer: they share one login and one session of the server, and keep apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from support.cluster import Cluster
from support.errors import refused
from support.pgbouncer import pgbouncer

DB = psycopg.Connection[Any]
# A client's transaction, or its session, with the role that it sets.
As = Callable[[str | None], Any]

APPLICATIONS = {"test_bank": "bank", "test_shop": "shop"}
CONSUMERS = {"test_bank_worker": "bank", "test_shop_worker": "shop"}


@pytest.fixture(autouse=True)
def roles(cluster: Cluster, db: DB) -> None:
    """Each endpoint has one application that may send to it, and one consumer that may work it off."""
    cluster.ensure_login(db, "test_pool")
    db.execute("alter role test_pool noinherit")
    for endpoint in APPLICATIONS.values():
        db.execute("select ulak.create_endpoint(%s, 'pull', '{}')", [endpoint])
    for names, member_of, right in ((APPLICATIONS, "ulak_application", "send"), (CONSUMERS, "ulak_consumer", "work")):
        for name, endpoint in names.items():
            cluster.ensure_login(db, name, member_of=member_of)
            db.execute(f"grant {name} to test_pool")
            db.execute("select ulak.grant_endpoint(%s, %s, %s)", [endpoint, name, right])


@pytest.fixture(params=["transaction", "session"])
def client(request: pytest.FixtureRequest, cluster: Cluster, db: DB, tmp_path: Path) -> Iterator[As]:
    """In transaction mode clients stay, and each transaction sets its role. In session mode one comes after the other, and sets its role
    once. PgBouncer 1.18 doesn't support prepared statements in transaction mode."""
    with pgbouncer(cluster, db.info.dbname, "test_pool", request.param, tmp_path) as dsn, ExitStack() as stack:
        clients: dict[str | None, DB] = {}

        @contextmanager
        def as_role(role: str | None) -> Iterator[DB]:
            if request.param == "session":
                with psycopg.connect(dsn, autocommit=True) as session:
                    if role is not None:
                        session.execute(f"set role {role}")
                    yield session
                return
            if role not in clients:
                clients[role] = stack.enter_context(psycopg.connect(dsn, autocommit=True, prepare_threshold=None))
            with clients[role].transaction():
                if role is not None:
                    clients[role].execute(f"set local role {role}")
                yield clients[role]

        yield as_role


def value(db: DB, query: str, *parameters: Any) -> Any:
    row = db.execute(query, parameters or None).fetchone()  # type: ignore[arg-type]
    return None if row is None else row[0]


def test_they_share_one_session_of_the_server(client: As) -> None:
    pids = set()
    for role in (*APPLICATIONS, *CONSUMERS, None):
        with client(role) as session:
            pids.add(value(session, "select pg_backend_pid()"))

    assert len(pids) == 1


def test_each_application_sends_to_its_own_endpoint_only(db: DB, client: As) -> None:
    for _ in range(2):
        for role, own in APPLICATIONS.items():
            (other,) = set(APPLICATIONS.values()) - {own}
            with client(role) as session:
                session.execute("select ulak.send(%s, '1')", [own])
            with client(role) as session:
                error = refused(session, f"select ulak.send('{other}', '1')")
            assert (error.sqlstate, error.message_primary) == (
                "42501",
                f'endpoint "{other}" is not granted to "{role}"',
            )

    sent = (
        "select distinct e.name, q.sent_by from ulak.queue q join ulak.endpoints e on e.id = q.endpoint_id order by 1"
    )
    assert db.execute(sent).fetchall() == [("bank", "test_bank"), ("shop", "test_shop")]
    assert value(db, "select count(*) from ulak.queue") == 4


def test_each_application_finds_and_cancels_its_own_messages_only(client: As) -> None:
    ids = {}
    for role, own in APPLICATIONS.items():
        with client(role) as session:
            ids[role] = value(session, "select ulak.send(%s, '1', p_idempotency_key => 'k')", own)

    for role in APPLICATIONS:
        (other,) = set(APPLICATIONS) - {role}
        with client(role) as session:
            assert value(session, "select array_agg(id) from ulak.find_messages(p_idempotency_key => 'k')") == [
                ids[role]
            ]
        with client(role) as session:
            assert refused(session, f"select ulak.cancel({ids[other]})").sqlstate == "42501"
    for role, own in APPLICATIONS.items():
        with client(role) as session:
            assert value(session, "select ulak.cancel_by_key(%s, 'k')", own)


def test_each_consumer_works_off_its_own_endpoint_only(db: DB, client: As) -> None:
    for own in APPLICATIONS.values():
        db.execute("select ulak.send_batch(%s, '{1,2,3}')", [own])

    found = []
    for _ in range(2):
        for role, own in CONSUMERS.items():
            (other,) = set(CONSUMERS.values()) - {own}
            with client(role) as session:
                assert refused(session, f"select * from ulak.claim('w', 1, '{other}')").sqlstate == "42501"
            with client(role) as session:
                claims = session.execute("select id, attempt, endpoint from ulak.claim('w', 1)").fetchall()
                found.append([endpoint for _, _, endpoint in claims])
                for id, attempt, _ in claims:
                    session.execute("select ulak.complete(%s, 'w', %s)", [id, attempt])

    assert found == [["bank"], ["shop"]] * 2
    assert value(db, "select count(*) from ulak.archive where status = 'completed'") == 4


def test_a_consumer_cannot_settle_what_another_has_claimed_in_the_same_session(db: DB, client: As) -> None:
    db.execute("select ulak.send('bank', '1')")
    with client("test_bank_worker") as session:
        id, attempt = session.execute("select id, attempt from ulak.claim('w', 1)").fetchone() or (0, 0)

    with client("test_shop_worker") as session:
        error = refused(session, f"select ulak.complete({id}, 'w', {attempt})")

    assert error.sqlstate == "42501"
    assert value(db, "select status from ulak.queue") == "processing"


def test_a_client_that_sets_no_role_may_nothing(client: As) -> None:
    for role in ("test_bank", None):
        with client(role) as session:
            if role is None:
                assert refused(session, "select ulak.send('bank', '1')").sqlstate == "42501"
            else:
                session.execute("select ulak.send('bank', '1')")
