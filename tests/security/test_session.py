"""What a session must not be able to do by what it puts into its own temporary schema: stand in for a name that a function of ours looks up.

Relations and types of pg_temp are found by any bare name that pg_catalog lacks, wherever pg_temp stands in the path. So no function that runs
with another role's rights has such a name.
"""

from __future__ import annotations

import re
from typing import Any

import psycopg
import pytest
from support.cluster import Cluster
from support.site import Site
from support.surface import VALUES, arguments, granted

DB = psycopg.Connection[Any]

# Names that dynamic SQL has and pg_catalog lacks, where publish_changes() has seen that they are transition tables.
TRANSITION_TABLES = {"ulak_old_rows", "ulak_new_rows"}
BODIES = """
    select p.oid::regprocedure::text, l.lanname, p.prosrc, p.prosecdef
    from pg_proc p
    join pg_language l on l.oid = p.prolang and l.lanname in ('sql', 'plpgsql')
    where p.proname <> 'python_source' and p.pronamespace::regnamespace::text in ('ulak', 'ulak_private')
    order by 1
"""
# Relations and types of pg_catalog can't be shadowed: it is searched first.
OF_CATALOG = """
    select relname::text from pg_class where relnamespace = 'pg_catalog'::regnamespace
    union
    select typname from pg_type where typnamespace = 'pg_catalog'::regnamespace
"""
WORD = re.compile(r"(?<![\w.%$'])[a-z_][a-z0-9_]*(?![\w(.])")


def words(bodies: list[str], known: set[str]) -> set[str]:
    """All that could be the name of a relation or a type: of the code, its strings and its comments."""
    return {word for body in bodies for word in WORD.findall(body)} - known


@pytest.fixture
def shadowed(own_site: Site) -> DB:
    """A session with a temporary relation, and so a type, of each word that any function of ours has. Reading one raises."""
    own_site.db.execute("create table public.orders (id bigint primary key)")
    own_site.db.execute("select ulak.create_endpoint('shop', 'pull', '{}'), ulak.create_event_type('shop')")
    own_site.db.execute("select ulak.send('shop', '{}')")
    known = {name for (name,) in own_site.db.execute(OF_CATALOG)}
    own_site.db.execute(
        """
        create function public.shadow(p_name text) returns integer language plpgsql as
            $$ begin raise exception 'shadow of %', p_name using errcode = 'XX999'; end $$
        """
    )
    session = own_site.connect()
    for word in sorted(words([body for _, _, body, _ in own_site.db.execute(BODIES)], known)):
        session.execute(f"create temporary view \"{word}\" as select public.shadow('{word}') as id")  # type: ignore[arg-type]
    return session


def test_nothing_that_a_role_may_call_finds_a_temporary_relation_of_its_session(own_site: Site, shadowed: DB) -> None:
    assert "shadow of" in str(refusal(shadowed, "select * from ulak_old_rows"))
    found = []
    for name, types in granted(own_site.db):
        for values in ({}, VALUES):
            call = f"select * from {name}({arguments(types, values)})"
            if "shadow of" in str(refusal(shadowed, call)):
                found.append(call)

    assert found == []


def refusal(session: DB, statement: str) -> psycopg.Error | None:
    try:
        with session.transaction(force_rollback=True):
            session.execute(statement)  # type: ignore[call-overload]
    except psycopg.Error as error:
        return error
    return None


def test_no_statement_of_ours_resolves_a_name_to_a_temporary_relation(cluster: Cluster, shadowed: DB) -> None:
    """Also those that no call above has come to."""
    cluster.execute("create extension if not exists plpgsql_check", shadowed.info.dbname)
    shadowed.execute("set search_path = pg_catalog, pg_temp")
    dependent = shadowed.execute(
        """
        select p.oid::regprocedure::text, d.type, d.schema, d.name
        from pg_proc p
        join pg_language l on l.oid = p.prolang and l.lanname = 'plpgsql'
        left join pg_trigger t on t.tgfoid = p.oid and not t.tgisinternal and t.tgparentid = 0
        cross join lateral public.plpgsql_show_dependency_tb(p.oid, coalesce(t.tgrelid, 0)) d
        where p.pronamespace::regnamespace::text in ('ulak', 'ulak_private')
            and (p.prorettype <> 'trigger'::regtype or t.oid is not null)
            and p.prorettype <> 'event_trigger'::regtype
            and d.schema like 'pg_temp%'
        """
    ).fetchall()

    assert dependent == []


# What follows these words in a statement is the name of a relation.
NAMED = re.compile(
    r"(?<!distinct )\b(?:from|join|into|update|table)\s+(?:only\s+)?([a-z_]\w*)(?![\w.(%])", re.IGNORECASE
)
STRING = re.compile(r"\$(\w*)\$(.*?)\$\1\$|E?'((?:[^']|'')*)'", re.DOTALL)
COMMENT = re.compile(r"^\s*--.*$", re.MULTILINE)
# What a statement calls its own.
OWN = re.compile(r"\b(\w+)(?:\s*\([^()]*\))? as (?:not )?(?:materialized )?\(", re.IGNORECASE)
# Of SQL: for update of, skip locked, update set, rows from, extract(epoch from p_now). And of the sentences of errors and hints.
NO_NAMES = """
    lateral of only set skip rows p_now exclusive as
    a another are has it its the this whose
"""
# Of sentences, too, and where.
WORDS = {
    ("explain_origin", "archived"),
    ("explain_origin", "dead"),
    ("explain_origin", "message"),
    ("parameter_help", "counts"),
    ("pending_room", "dead"),
    ("python_loader", "types"),
    ("python_loader", "ulak"),
    ("raise_not_granted", "endpoints"),
}


def named(text: str) -> set[str]:
    return set(NAMED.findall(text)) - set(OWN.findall(text)) - set(NO_NAMES.split()) - TRANSITION_TABLES


def test_no_statement_that_is_put_together_names_a_relation_without_its_schema(own_site: Site) -> None:
    """Its parts are strings of a body."""
    known = {name for (name,) in own_site.db.execute(OF_CATALOG)}
    found = [
        (signature, name)
        for signature, _, body, _ in own_site.db.execute(BODIES)
        for string in STRING.finditer(COMMENT.sub("", body))
        for name in named(string[2] or string[3] or "") - known
        if (re.split(r"[.(]", signature)[1], name) not in WORDS
    ]

    assert found == []


def test_no_body_in_sql_names_a_relation_without_its_schema(own_site: Site) -> None:
    known = {name for (name,) in own_site.db.execute(OF_CATALOG)}
    found = [
        (signature, name)
        for signature, language, body, _ in own_site.db.execute(BODIES)
        if language == "sql"
        for name in named(STRING.sub("''", COMMENT.sub("", body))) - known
    ]

    assert found == []
