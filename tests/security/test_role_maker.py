"""A role with CREATEROLE that was there before ulak: what it prepared is refused by name, or reported."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from support.cluster import ROLES, Cluster
from support.copies import make_next_release, use
from support.errors import refused

DB = psycopg.Connection[Any]

INSTALL = "create extension ulak cascade"


@pytest.fixture(scope="module")
def untouched() -> Iterator[Cluster]:
    """Roles belong to the cluster, so it has to be one of its own."""
    cluster = Cluster.create(in_memory=True)
    cluster.execute("create role maker login createrole")
    yield cluster
    cluster.remove()


@pytest.fixture
def fresh(untouched: Cluster) -> Iterator[Cluster]:
    """No role of ulak's, and an empty database `app`."""
    untouched.create_database("app")
    yield untouched
    for name in ("app", "second"):
        untouched.drop_database(name)
    for role in (*ROLES, "friend"):
        untouched.execute(f"drop role if exists {role}")


@pytest.mark.parametrize(
    ("prepared", "problem", "remedy"),
    [
        ("create role ulak_admin login", "ulak_admin can log in", "alter role ulak_admin nologin;"),
        ("create role ulak_admin password 'x'", "ulak_admin has a password", "alter role ulak_admin password null;"),
        (
            "create role ulak_worker login password 'x'",
            "ulak_worker has a password",
            "alter role ulak_worker password null;",
        ),
        (
            "create role ulak_monitor createrole",
            "ulak_monitor may make or change roles",
            "alter role ulak_monitor nocreaterole;",
        ),
        (
            "create role ulak_consumer createdb",
            "ulak_consumer may make databases",
            "alter role ulak_consumer nocreatedb;",
        ),
        (
            "create role ulak_application superuser",
            "ulak_application is a superuser",
            "alter role ulak_application nosuperuser;",
        ),
        (
            "create role ulak_admin bypassrls",
            "ulak_admin may pass by row security",
            "alter role ulak_admin nobypassrls;",
        ),
        ("create role ulak_admin replication", "ulak_admin may replicate", "alter role ulak_admin noreplication;"),
        ("create role ulak_admin role maker", "ulak_admin has the member maker", "revoke ulak_admin from maker;"),
        (
            "create role ulak_worker login role maker",
            "ulak_worker has the member maker",
            "revoke ulak_worker from maker;",
        ),
        ("create role ulak_node role maker", "ulak_node has the member maker", "revoke ulak_node from maker;"),
        ("create role ulak_node login", "ulak_node can log in", "alter role ulak_node nologin;"),
        (
            "create role ulak_application admin maker",
            "ulak_application can be granted by maker",
            "revoke admin option for ulak_application from maker;",
        ),
        (
            "create role ulak_admin; create role ulak_application in role ulak_admin",
            "ulak_application is a member of ulak_admin",
            "revoke ulak_admin from ulak_application;",
        ),
    ],
)
def test_a_role_that_was_prepared_is_refused_until_it_is_put_right(
    fresh: Cluster, prepared: str, problem: str, remedy: str
) -> None:
    fresh.execute(prepared)

    with fresh.connect("app") as db:
        denied = refused(db, INSTALL)
        assert denied.sqlstate == "55000"
        assert problem in str(denied.message_detail)
        assert remedy in str(denied.message_hint)

        # What the hint says, without its last sentence.
        db.execute(str(denied.message_hint).split(" Or, if")[0])
        db.execute(INSTALL)

        assert db.execute("""select finding from ulak.doctor() where "check" = 'roles'""").fetchall() == []


def test_the_installer_may_accept_a_role_as_it_is_and_doctor_still_reports_it(fresh: Cluster) -> None:
    fresh.execute("create role ulak_admin login")
    with fresh.connect("app") as db:
        db.execute("set ulak.accept_roles = on")
        db.execute(INSTALL)

        found = db.execute("""select severity, finding, fix from ulak.doctor() where "check" = 'roles'""").fetchall()

    assert found == [("warning", "role ulak_admin can log in", "alter role ulak_admin nologin;")]


def test_a_second_database_installs_beside_members_and_a_password_and_tells_of_them(fresh: Cluster) -> None:
    fresh.install("app")
    fresh.execute("alter role ulak_worker password 'for pg_cron'; create role friend in role ulak_admin")
    fresh.create_database("second")
    told: list[str] = []

    with fresh.connect("second") as db:
        db.add_notice_handler(lambda notice: told.append(f"{notice.severity}: {notice.message_primary}"))
        db.execute(INSTALL)

    assert "WARNING: role ulak_worker has a password" in told
    assert "WARNING: role ulak_admin has the member friend" in told


def test_a_second_database_is_no_excuse_for_what_no_role_of_ulaks_needs(fresh: Cluster) -> None:
    fresh.install("app")
    fresh.execute("alter role ulak_monitor createrole")
    fresh.create_database("second")

    with fresh.connect("second") as db:
        assert refused(db, INSTALL).sqlstate == "55000"


def test_a_restore_installs_and_warns(fresh: Cluster, tmp_path: Any) -> None:
    """Roles come from the other cluster, with their members, before the dump does."""
    fresh.install("app")
    dump = fresh.dump("app", tmp_path / "dump")
    fresh.drop_database("app")
    fresh.execute("alter role ulak_worker password 'for pg_cron'; alter role ulak_monitor createrole")
    fresh.create_database("app")

    fresh.restore("app", dump)

    assert fresh.psql("app", "select count(*) from ulak.endpoints") == "0"
    assert "may make or change roles" in fresh.psql(
        "app", """select finding from ulak.doctor() where "check" = 'roles'"""
    )


def test_an_upgrade_refuses_a_prepared_new_role_and_only_warns_about_old_ones(fresh: Cluster, tmp_path: Path) -> None:
    fresh.install("app")
    with fresh.connect("app") as db:
        db.execute("alter role ulak_monitor createrole; drop owned by ulak_node; drop role ulak_node")
        db.execute("create role ulak_node login")
        use(db, make_next_release(tmp_path))
        denied = refused(db, "alter extension ulak update")
        assert denied.message_detail == "ulak_node can log in."

        db.execute("alter role ulak_node nologin")
        told: list[str] = []
        db.add_notice_handler(lambda notice: told.append(f"{notice.severity}: {notice.message_primary}"))
        db.execute("alter extension ulak update")

    assert "WARNING: role ulak_monitor may make or change roles" in told
