"""The plain script: what it installs, which role may run it, and that it can be run again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psycopg
import pytest
from support import catalog
from support.cluster import Cluster, CommandFailed
from support.copies import NEXT, current_version, make_next_release
from support.errors import refused
from support.finished import column, value
from support.plain import OWNER, SUPERUSER, PlainCluster, build_script
from support.releases import FIRST, SECOND, make_releases
from support.rows import fill

DB = psycopg.Connection[Any]

NOT_HERE = "; not here: it needs PL/Python"
# Parameters and result, kind, comment, and who may call it: what help() and the reference are made of.
ROUTINES = """
    select
        p.oid::regprocedure::text,
        pg_get_function_arguments(p.oid),
        pg_get_function_result(p.oid),
        p.prokind,
        p.prosecdef,
        obj_description(p.oid, 'pg_proc'),
        array(
            select g.grantee::regrole::text from aclexplode(p.proacl) g where g.grantee <> p.proowner order by 1
        )
    from pg_proc p
    where p.pronamespace::regnamespace::text in ('ulak', 'ulak_private')
    order by 1
"""


def test_it_is_installed_without_a_superuser_and_without_plpython(shop: DB) -> None:
    owners = (
        "select proowner::regrole::text from pg_proc where pronamespace::regnamespace::text in ('ulak', 'ulak_private')"
    )
    languages = "select distinct lanname from pg_proc p join pg_language l on l.oid = p.prolang where pronamespace::regnamespace::text in ('ulak', 'ulak_private') order by 1"

    assert set(column(shop, owners)) == {OWNER}
    assert value(shop, "select rolsuper from pg_roles where rolname = %s", OWNER) is False
    assert column(shop, languages) == ["internal", "plpgsql", "sql"]
    assert column(shop, "select lanname from pg_language where lanname like 'plpython%%'") == []
    assert column(shop, "select extname from pg_extension") == ["plpgsql"]


def test_the_owner_is_an_administrator(shop: DB) -> None:
    """Not only a member of ulak_admin, as the role that made it is since PostgreSQL 16."""
    assert value(shop, "select pg_has_role(current_user, 'ulak_admin', 'usage')") is True
    shop.execute("select ulak.create_endpoint('till', 'pull', '{}'), ulak.grant_endpoint('till', 'nobody', 'send')")
    shop.execute("select ulak.send('till', '{}', p_expires_at => '2100-01-01')")
    assert column(shop, "select id from ulak.claim('w', 1, 'till', p_now => now() + interval '1 day')") != []


def test_the_text_makes_no_plpython_function(script: Path) -> None:
    text = script.read_text()

    assert "language plpython" not in text
    assert "pg_extension_config_dump" not in text


def test_every_table_is_that_of_the_extension(shop: DB, db: DB) -> None:
    sides = [catalog.snapshot(connection) for connection in (shop, db)]
    for side in sides:
        # Of the extension alone; functions are compared below.
        for kind in ("function", "member", "dumped"):
            side[kind] = {}

    assert catalog.differences(*sides) == []


def test_every_function_is_there_with_its_parameters_its_comment_and_its_grants(shop: DB, db: DB) -> None:
    plain, extension = (side.execute(ROUTINES).fetchall() for side in (shop, db))

    assert [tuple(str(fact).removesuffix(NOT_HERE) for fact in row) for row in plain] == [
        tuple(map(str, row)) for row in extension
    ]


def test_most_functions_are_those_of_the_extension(shop: DB, db: DB) -> None:
    """What differs is what sql/plain says: the rest has the same text."""
    bodies = "select p.oid::regprocedure::text, p.prosrc, p.proconfig from pg_proc p where pronamespace::regnamespace::text in ('ulak', 'ulak_private')"
    plain, extension = ({name: rest for name, *rest in side.execute(bodies)} for side in (shop, db))
    python = set(
        column(
            db,
            "select p.oid::regprocedure::text from pg_proc p join pg_language l on l.oid = p.prolang where lanname = 'plpython3u'",
        )
    )

    differing = {name.split("(")[0] for name in plain if plain[name] != extension[name] and name not in python}

    assert differing == {
        "ulak_private.version",
        "ulak_private.has_python",
        "ulak_private.log",
        "ulak_private.warn",
        "ulak_private.log_time",
        "ulak_private.roles_with_password",
        "ulak_private.has_pg_cron",
        "ulak_private.default_workers",
        "ulak_private.job_role",
        "ulak_private.elsewhere",
        "ulak_private.setup_fix",
        "ulak_private.parameter_fix",
        "ulak_private.package_fix",
        "ulak_private.check_python",
        "ulak_private.check_login",
        "ulak_private.schedule_command",
        "ulak_private.put_job",
        "ulak_private.misplaced_jobs",
        "ulak_private.bring_jobs_here",
        "ulak_private.wake_pg_cron",
    }


def test_the_python_that_nodes_fetch_is_the_extensions(shop: DB, db: DB) -> None:
    query = "select module, source from ulak_private.python_source() union all values ('stamp', ulak_private.python_stamp()) order by 1"

    assert shop.execute(query).fetchall() == db.execute(query).fetchall()
    assert value(shop, "select ulak_private.worker_stamp()") == value(db, "select ulak_private.worker_stamp()")


@pytest.mark.parametrize(
    ("call", "reason", "instead"),
    [
        ("select ulak.report()", "Python draws the report.", "doctor(), top() and explain() tell what it would."),
        (
            "select * from ulak.ping('shop')",
            "A request that the server itself sends is made in Python.",
            "Send a message: a node delivers it, and explain() tells what came of it.",
        ),
        (
            "select ulak.curl(%s)",
            "What it shows is made by the Python of the workers.",
            "A receiver of your own shows what a node sends.",
        ),
        ("call ulak.run_worker()", "The worker in the database is Python.", "Nodes deliver: docker/node/worker.py."),
    ],
)
def test_what_is_left_out_says_why_and_what_does_instead(shop: DB, call: str, reason: str, instead: str) -> None:
    shop.execute("""select ulak.create_endpoint('shop', 'http', '{"url": "https://example.com/"}')""")
    id = value(shop, "select ulak.send('shop', '{}')")

    error = refused(shop, call.replace("%s", str(id)))

    assert (error.sqlstate, error.message_primary) == (
        "0A000",
        "this needs PL/Python, and ulak was installed here without it",
    )
    assert (error.message_detail, error.message_hint) == (reason, instead)


def test_help_says_what_is_left_out(shop: DB) -> None:
    assert column(shop, "select name from ulak.help() where description like %s order by 1", f"%{NOT_HERE}") == [
        "curl",
        "ping",
        "report",
        "run_worker",
    ]


def test_the_config_of_an_http_endpoint_is_checked_as_always(shop: DB) -> None:
    error = refused(
        shop, """select ulak.create_endpoint('shop', 'http', '{"url": "https://example.com/", "metod": "PUT"}')"""
    )

    assert error.sqlstate == "22023"
    assert "method" in (error.message_hint or "")


def test_await_delivery_waits_and_tells_the_status(plain: PlainCluster, shop: DB) -> None:
    shop.execute("select ulak.create_endpoint('shop', 'pull', '{}')")
    id = value(shop, "select ulak.send('shop', '{}')")
    assert value(shop, "call ulak.await_delivery(%s, '0.01 s')", id) == "pending"

    shop.execute("select ulak.complete(c.id, 'w', c.attempt) from ulak.claim('w', 1, 'shop') c")

    assert value(shop, "call ulak.await_delivery(%s)", id) == "completed"
    assert refused(shop, "call ulak.await_delivery(-1)").sqlstate == "P0002"
    assert refused(shop, "call ulak.await_delivery(1, '-1 s')").sqlstate == "22023"
    with shop.transaction(force_rollback=True):
        id = value(shop, "select ulak.send('shop', '{}')")
        assert refused(shop, "call ulak.await_delivery(%s)", id).sqlstate == "2D000"


# Again, and to a later version.


def test_a_second_run_changes_nothing(plain: PlainCluster, shop: DB, script: Path) -> None:
    fill(shop)
    shop.execute("call ulak.run_maintenance()")
    before, rows = catalog.snapshot(shop), catalog.contents(shop)

    plain.run_script(shop.info.dbname, script)

    assert catalog.differences(before, catalog.snapshot(shop)) == []
    after = catalog.contents(shop)
    assert catalog.lost(rows, after) == catalog.lost(after, rows) == []


@pytest.mark.parametrize("by_way_of", [[], [FIRST]], ids=["at once", "one by one"])
def test_the_script_of_a_later_version_upgrades(
    plain: PlainCluster, shop: DB, bare: str, tmp_path: Path, by_way_of: list[str]
) -> None:
    shop.execute("select ulak.create_endpoint('shop', 'pull', '{}'), ulak.send('shop', '{}')")
    before = catalog.contents(shop, by_partition=False)
    projects = make_releases(tmp_path)
    for each in by_way_of:
        plain.run_script(shop.info.dbname, build_script(tmp_path / each, projects.first))
        assert value(shop, "select ulak_private.version()") == each
    script = build_script(tmp_path / "built", projects.second)

    for database in (shop.info.dbname, bare):
        plain.run_script(database, script)

    with plain.connect(bare) as fresh:
        assert value(shop, "select ulak_private.version()") == value(fresh, "select ulak_private.version()") == SECOND
        assert catalog.differences(catalog.snapshot(shop), catalog.snapshot(fresh)) == []
    after = catalog.kept(before, catalog.contents(shop, by_partition=False))
    before = catalog.kept(before, before)
    assert catalog.lost(before, after) == catalog.lost(after, before) == []
    # The next run of the same script has nothing to upgrade.
    plain.run_script(shop.info.dbname, script)


def test_the_script_of_an_earlier_version_is_refused(
    plain: PlainCluster, shop: DB, script: Path, tmp_path: Path
) -> None:
    plain.run_script(shop.info.dbname, build_script(tmp_path / "built", make_next_release(tmp_path)))

    with pytest.raises(
        CommandFailed, match=f"ulak {NEXT} is installed here, and this script can't make {current_version()} of it"
    ):
        plain.run_script(shop.info.dbname, script)

    assert value(shop, "select ulak_private.version()") == NEXT


# Roles.


def test_what_another_role_granted_can_be_taken_back_as_it_is_said(plain: PlainCluster, shop: DB) -> None:
    plain.as_superuser("create role delegate; create role friend; grant ulak_node to delegate with admin option")
    problems = "select problem, remedy from ulak_private.role_problems() where role = 'ulak_node'"
    try:
        plain.as_superuser("set role delegate; grant ulak_node to friend")
        with plain.connect(shop.info.dbname, SUPERUSER) as superuser:
            found = [row for row in superuser.execute(problems).fetchall() if "test_" not in row[0]]
            for _, remedy in found:
                superuser.execute(remedy)

            assert [problem for problem, _ in found] == ["has the member friend", "can be granted by delegate"]
            assert value(superuser, "select pg_has_role('friend', 'ulak_node', 'usage')") is False
    finally:
        plain.as_superuser("drop role if exists friend; drop role delegate")


# Roles that may not.


def assert_nothing_is_left(plain: PlainCluster, database: str) -> None:
    with plain.connect(database) as db:
        assert value(db, "select to_regnamespace('ulak')") is None


def test_an_owner_without_pg_monitor_is_refused(plain: PlainCluster, bare: str, script: Path) -> None:
    plain.as_superuser(f"revoke pg_monitor from {OWNER}")
    try:
        with pytest.raises(CommandFailed, match=f"grant pg_monitor to {OWNER}(;| with inherit true;)"):
            plain.run_script(bare, script)
    finally:
        plain.as_superuser(f"grant pg_monitor to {OWNER}")

    assert_nothing_is_left(plain, bare)


def test_a_schema_with_another_owner_is_refused(plain: PlainCluster, bare: str, script: Path) -> None:
    plain.as_superuser("create schema ulak; create schema ulak_private", bare)
    plain.as_superuser("create function ulak_private.has_python() returns int language sql return 1 / 0", bare)
    plain.as_superuser("create function ulak_private.version() returns text language sql as $$ select 1 / 0 $$", bare)

    with pytest.raises(CommandFailed, match="ulak belongs to another role here"):
        plain.run_script(bare, script)


@pytest.mark.parametrize("schema", ["ulak", "ulak_private"])
def test_a_schema_that_is_not_ulaks_is_refused(plain: PlainCluster, bare: str, script: Path, schema: str) -> None:
    plain.execute(f"create schema {schema}", bare)

    with pytest.raises(CommandFailed, match=f'schema "{schema}" exists already'):
        plain.run_script(bare, script)


def test_where_the_extension_is_installed_it_is_refused(cluster: Cluster, database: str, script: Path) -> None:
    with pytest.raises(CommandFailed, match="ulak is installed here as an extension"):
        PlainCluster.run_script(cluster, database, script)  # type: ignore[arg-type]


def test_an_error_in_the_middle_leaves_nothing(plain: PlainCluster, bare: str, script: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.sql"
    broken.write_text(script.read_text().replace("\ncommit;\n", "\nselect 1 / 0;\ncommit;\n"))

    with pytest.raises(CommandFailed, match="division by zero"):
        plain.run_script(bare, broken)

    assert_nothing_is_left(plain, bare)
