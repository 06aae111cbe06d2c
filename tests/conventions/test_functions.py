"""Every function of the extension compiles, says where it looks names up, and is named like the others."""

from __future__ import annotations

import re
import subprocess
from typing import Any

import psycopg
from support.cluster import PROJECT, Cluster

DB = psycopg.Connection[Any]


def functions(db: DB, condition: str = "true") -> list[tuple[str, str, str]]:
    """(signature, definition, body) of the extension's functions and procedures."""
    return db.execute(
        f"""
        select p.oid::regprocedure::text, pg_get_functiondef(p.oid), prosrc
        from pg_proc p
        join pg_language l on l.oid = prolang
        where pronamespace::regnamespace::text in ('ulak', 'ulak_private') and {condition}
        order by 1
        """
    ).fetchall()


def test_every_sql_and_plpgsql_body_compiles(module_session: DB) -> None:
    errors = []
    with module_session.transaction(force_rollback=True):
        module_session.execute("set local check_function_bodies = on")
        for signature, definition, _ in functions(module_session, "lanname in ('sql', 'plpgsql')"):
            try:
                with module_session.transaction():
                    module_session.execute(definition)
            except psycopg.Error as error:
                errors.append(f"{signature}: {error}")

    assert errors == []


def test_every_python_body_compiles(module_session: DB) -> None:
    bodies = functions(module_session, "lanname = 'plpython3u'")

    for signature, _, body in bodies:
        indented = "def body():\n\t" + body.replace("\n", "\n\t")
        compile(indented, signature, "exec")

    assert "ulak_private.load_python()" in [signature for signature, _, _ in bodies]


def test_plpgsql_check_finds_nothing_wrong(cluster: Cluster, cron_database: str) -> None:
    """Names, types and columns inside the bodies, which CREATE FUNCTION doesn't look at. Some need pg_cron's tables."""
    db = cluster.connect(cron_database)
    db.execute("create extension if not exists plpgsql_check")
    problems = db.execute(
        """
        select concat_ws(' ', p.oid::regprocedure, 'line', c.lineno, c.level, c.message, c.detail, c.query)
        from pg_proc p
        join pg_language l on l.oid = prolang
        left join pg_trigger t on t.tgfoid = p.oid and not tgisinternal and tgparentid = 0
        cross join lateral plpgsql_check_function_tb(
            p.oid, coalesce(t.tgrelid, 0), other_warnings => false, extra_warnings => false
        ) c
        where pronamespace::regnamespace::text in ('ulak', 'ulak_private')
            and lanname = 'plpgsql'
            and (prorettype <> 'trigger'::regtype or t.oid is not null)
            and prorettype <> 'event_trigger'::regtype
        """
    ).fetchall()

    db.close()
    assert [problem for (problem,) in problems] == []


def test_every_security_definer_function_pins_its_search_path(module_session: DB) -> None:
    unpinned = functions(
        module_session,
        "prosecdef and 'search_path=pg_catalog, pg_temp' <> all (coalesce(proconfig, '{}'))",
    )

    assert [signature for signature, _, _ in unpinned] == []


def test_a_granted_function_pins_its_search_path_or_qualifies_every_name(module_session: DB) -> None:
    """One that is granted to nobody runs under the path of a caller that is."""
    unpinned = """
        prokind = 'f'
        and 'search_path=pg_catalog, pg_temp' <> all (coalesce(proconfig, '{}'))
        and exists (select from aclexplode(proacl) where grantee <> proowner)
    """
    definitions = "".join(f"{definition};\n" for _, definition, _ in functions(module_session, unpinned))
    script = f"set search_path to pg_catalog, pg_temp;\ncreate schema ulak;\ncreate schema ulak_private;\n{definitions}"

    pgspot = subprocess.run(["pgspot", "--ignore", "PS005"], input=script, text=True, capture_output=True, check=False)

    assert pgspot.stdout.strip() == "Errors: 0 Warnings: 0 Unknown: 0"


def test_a_function_that_runs_under_anybodys_path_pins_its_own(module_session: DB) -> None:
    """Triggers, views, constraints, policies ... run under the path of the session. So does what superusers are told to call."""
    documents = "".join((PROJECT / name).read_text() for name in ("docker/OPERATIONS.md", "sql/GUIDE.md", "README.md"))
    by_hand = {*re.findall(r"ulak_private\.(\w+)\(", documents), "commands_elsewhere", "launch_watcher"}
    unpinned = f"""
        prokind = 'f'
        and 'search_path=pg_catalog, pg_temp' <> all (coalesce(proconfig, '{{}}'))
        and (
            proname = any ('{{{",".join(sorted(by_hand))}}}')
            or p.oid in (
                select refobjid
                from pg_depend
                where refclassid = 'pg_proc'::regclass
                    and classid <> 'pg_proc'::regclass
            )
        )
    """

    assert [signature for signature, _, _ in functions(module_session, unpinned)] == []


def test_whose_rights_a_call_has_is_asked_in_one_place(module_session: DB) -> None:
    """ulak_private.caller(). A restore is a superuser's, whatever role its tables are made as."""
    found = [
        signature
        for signature, definition, _ in functions(module_session, "prokind in ('f', 'p')")
        if re.search(r"\b(session|current)_user\b", re.sub(r"--[^\n]*|'(?:[^']|'')*'", "", definition))
    ]

    assert found == ["ulak_private.caller()", "ulak_private.is_restore()"]


def test_no_procedure_has_a_clause_that_forbids_commit(module_session: DB) -> None:
    unable = functions(module_session, "prokind = 'p' and (prosecdef or proconfig is not null)")

    assert [signature for signature, _, _ in unable] == []


def test_every_parameter_starts_with_p(module_session: DB) -> None:
    query = """
        select p.oid::regprocedure::text, coalesce(name, '(unnamed)')
        from pg_proc p
        cross join lateral unnest(proargtypes::oid[]) with ordinality as type (id, position)
        left join lateral unnest(
            case when proargmodes is null then proargnames
            else (
                select array_agg(n order by i) from unnest(proargnames, proargmodes) with ordinality as a (n, m, i)
                where m in ('i', 'b', 'v')
            ) end
        ) with ordinality as parameter (name, position) using (position)
        where pronamespace::regnamespace::text in ('ulak', 'ulak_private')
            and coalesce(name, '') not like 'p\\_%'
    """

    assert module_session.execute(query).fetchall() == []


def test_no_body_swallows_every_error(module_session: DB) -> None:
    """`when others` hides cancels of statements and disk-full alike; it must at least raise or log."""
    offenders = [
        signature
        for signature, _, body in functions(module_session, "lanname = 'plpgsql'")
        if re.search(r"when\s+others\s+then\s+(null|return)\b", body, re.IGNORECASE)
    ]

    assert offenders == []
