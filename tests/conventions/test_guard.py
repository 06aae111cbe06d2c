"""Where the extension refuses to be installed."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from support.cluster import ROLES, Cluster, CommandFailed
from support.copies import current_version

DB = psycopg.Connection[Any]


@pytest.mark.parametrize("schema", ["ulak", "ulak_private"])
def test_a_schema_that_exists_already_is_refused(
    cluster: Cluster, template: str, empty_database: str, schema: str
) -> None:
    with cluster.connect(empty_database) as connection:
        connection.execute(f"create schema {schema} authorization nobody")  # type: ignore[arg-type]

        with pytest.raises(psycopg.errors.DuplicateSchema) as refusal:
            connection.execute("create extension ulak cascade")

    assert "belongs to role nobody" in str(refusal.value.diag.message_detail)
    assert f"drop schema {schema};" in str(refusal.value.diag.message_hint)


def test_the_script_is_refused_by_psql(cluster: Cluster, empty_database: str) -> None:
    script = cluster.folder / f"build/ulak--{current_version()}.sql"

    printed = cluster.psql(empty_database, rf"\i {script}")

    assert printed == 'Use "CREATE EXTENSION ulak" to load this file.'
    assert cluster.psql(empty_database, "select to_regnamespace('ulak') is null") == "t"


def test_it_is_refused_to_anybody_but_a_superuser(cluster: Cluster, template: str, empty_database: str) -> None:
    cluster.execute("create extension plpython3u", empty_database)
    cluster.execute(f'grant create on database "{empty_database}" to nobody')

    with (
        cluster.connect(empty_database, "nobody") as session,
        pytest.raises(psycopg.errors.InsufficientPrivilege, match="permission denied to create extension"),
    ):
        session.execute("create extension ulak")


def test_only_the_role_of_the_worker_can_log_in_and_none_has_other_powers(db: DB) -> None:
    """pg_cron connects as ulak_worker."""
    query = """
        select rolname, rolcanlogin, rolpassword is not null,
            rolsuper or rolcreaterole or rolcreatedb or rolreplication or rolbypassrls
        from pg_authid
        where rolname = any (%s)
        order by 1
    """

    assert db.execute(query, [list(ROLES)]).fetchall() == [
        ("ulak_admin", False, False, False),
        ("ulak_application", False, False, False),
        ("ulak_consumer", False, False, False),
        ("ulak_monitor", False, False, False),
        ("ulak_node", False, False, False),
        ("ulak_worker", True, False, False),
    ]


def test_a_failed_command_of_the_harness_is_an_error(cluster: Cluster) -> None:
    with pytest.raises(CommandFailed, match="no_such_function"):
        cluster.psql("postgres", "select no_such_function()")
