"""What a fix says to do on the server: a line that root pastes into a shell."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from support.cluster import Cluster
from support.fixes import IN_A_SHELL, setup_command, try_in_shell

DB = psycopg.Connection[Any]
PRINTS = """printf '%s\\0' "$@\""""


def setup_fix(cluster: Cluster, database: str, arguments: str = "") -> str:
    with psycopg.connect(cluster.dsn(), dbname=database) as db:
        (fix,) = db.execute(f"select ulak_private.setup_fix({arguments})").fetchone() or ("",)  # type: ignore[arg-type]
    return str(fix)


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("it's", "it's"),
        ("a $(touch made) `touch made`", "a $(touch made) `touch made`"),
        ('x"; touch made; #\\', 'x"; touch made; #\\'),
        ("~ * ! &", "~ * ! &"),
        # The second line would be pasted into psql. ulak-setup refuses such a name.
        ("x\ndrop table orders; --", "x?drop table orders; --"),
    ],
)
def test_a_database_of_any_name_is_one_word_of_the_command(
    cluster: Cluster, template: str, name: str, read: str
) -> None:
    with cluster.database(name, template):
        fix = setup_fix(cluster, name, "3")

    said = try_in_shell(fix, f"{PRINTS}; ls")

    assert said.stdout.split("\0") == ["--data", str(cluster.data), read, "--workers", "3", "ulak-setup\n"]
    assert "\n" not in fix and fix.startswith("-- ")


def test_a_number_of_workers_is_named_if_it_is_not_the_usual_one(cluster: Cluster, database: str) -> None:
    command = setup_command(cluster, database)

    assert [setup_fix(cluster, database, number) for number in ("", "2", "0")] == [
        command,
        command,
        f"{command} --workers 0",
    ]


@pytest.fixture
def pretending(db: DB) -> DB:
    """In this schema stands what is to be found in the place of the server's own."""
    db.execute("create schema pretended; set search_path = pretended, pg_catalog")
    return db


def test_a_cluster_of_debians_is_named_as_its_tools_name_it(pretending: DB) -> None:
    pretending.execute(
        "create function current_setting(text) returns text return '/etc/postgresql/15/main/postgresql.conf'"
    )

    fix = pretending.execute("select ulak_private.setup_fix()").fetchone()

    assert fix == (f"{IN_A_SHELL}ulak-setup 15 main {pretending.info.dbname}",)


def test_pg_cron_that_is_not_installed_is_a_package_to_install(pretending: DB) -> None:
    pretending.execute("create view pg_available_extensions as select ''::name as name, ''::text as default_version")

    rows = pretending.execute("select * from ulak_private.check_pg_cron(2)").fetchall()

    package = f"postgresql-{pretending.info.server_version // 10000}-cron"
    assert rows == [("pg_cron", "problem", "it is not installed", f"{IN_A_SHELL}apt-get install {package}")]
