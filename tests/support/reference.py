"""Prints sql/REFERENCE.md: what users can call, read and set, as the catalog and its comments have it."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import psycopg

from support.cluster import PROJECT, ROLES, Cluster

LINE = 120
PATH = PROJECT / "sql" / "REFERENCE.md"

# A function stands under the first of these roles that may call it.
HEADINGS = {
    "ulak_application": "Functions for applications",
    "ulak_consumer": "Functions for external workers",
    "ulak_monitor": "Functions to look with",
    "ulak_worker": "Functions of the worker in the database",
    "ulak_admin": "Functions for administrators",
}

INTRODUCTION = """\
# Reference

Generated from the catalog by `make reference`: edit the `comment on` texts in `sql/`, not this file. In psql,
`select * from ulak.help();` shows the same, and `select * from ulak.help('redrive');` a single entry.

The parameter `p_now` is for tests and can be left out. Infinite times and years beyond 9000 are refused. Members of
`ulak_admin` may call every function; each entry names the other roles that may. Nothing is granted to PUBLIC."""

SETTINGS_INTRODUCTION = """\
`select ulak.configure('max_queue_size', '500000');` changes a setting for everybody, and `null` resets it to its
default. Durations may have a unit: `select ulak.configure('circuit_breaker_cooldown', '5 min');`."""

TABLES_INTRODUCTION = """\
Each entry names the roles that may select from it. Don't write to tables directly; the exceptions are `config`,
`retry_policy` and `description` of `ulak.endpoints`, which an administrator may update."""

FUNCTIONS = r"""
    select
        proname,
        prokind = 'p',
        array(
            select array[
                name, format_type(type, null), regexp_replace(pg_get_function_arg_default(oid, position::integer), '::[a-z ]+$', '')
            ]
            from unnest(proargnames, proargtypes::oid[]) with ordinality as parameter (name, type, position)
            where position <= pronargs
            order by position
        ),
        pg_get_function_result(oid),
        obj_description(oid, 'pg_proc'),
        array(select role from unnest(%s::text[]) role where has_function_privilege(role, oid, 'execute'))
    from pg_proc
    where pronamespace = 'ulak'::regnamespace
    order by proname collate "C", oid::regprocedure::text collate "C"
"""

RELATIONS = r"""
    select
        relname,
        obj_description(oid, 'pg_class'),
        array(select role from unnest(%s::text[]) role where has_table_privilege(role, oid, 'select')),
        array(
            select array[attname::text, format_type(atttypid, atttypmod), col_description(attrelid, attnum)]
            from pg_attribute
            where attrelid = pg_class.oid and attnum > 0 and not attisdropped
            order by attnum
        )
    from pg_class
    where relnamespace = 'ulak'::regnamespace and relkind = any (%s::text[]::"char"[])
    order by relname collate "C"
"""

SETTINGS = """
    select
        name,
        default_value,
        coalesce(minimum || ' to ' || maximum, array_to_string(choices, ', '), ''),
        coalesce(unit, ''),
        description
    from ulak.settings
    order by name collate "C"
"""

DB = psycopg.Connection[Any]


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def code(text: str) -> str:
    return f"`{text}`" if text else ""


def prose(text: str) -> str:
    return textwrap.fill(text, LINE, break_long_words=False, break_on_hyphens=False)


def who(roles: list[str]) -> str:
    return ", ".join(code(role) for role in roles if role != "ulak_admin")


def plain(text: str) -> str:
    """Types by their short names, keywords in lower case."""
    return (
        text.replace("timestamp with time zone", "timestamptz").replace("TABLE(", "table (").replace("SETOF ", "setof ")
    )


def signature(name: str, is_procedure: bool, parameters: list[list[str | None]], result: str | None) -> str:
    """In one line, or with a line for each parameter if that is too long."""
    words = [
        f"{parameter} {kind}" + (f" default {default}" if default else "") for parameter, kind, default in parameters
    ]
    words = [plain(word).replace(" default NULL", " default null") for word in words]
    call = f"{'call ' if is_procedure else ''}ulak.{name}("
    end = ")" if is_procedure or result is None else f") returns {plain(result)}"
    line = f"{call}{', '.join(words)}{end}"
    return line if len(line) <= LINE or not words else f"{call}\n    " + ",\n    ".join(words) + f"\n{end}"


def functions(db: DB) -> Iterator[str]:
    by_role: dict[str, list[str]] = {role: [] for role in HEADINGS}
    for name, is_procedure, parameters, result, comment, roles in db.execute(FUNCTIONS, [list(ROLES)]):
        usage = signature(name, is_procedure, parameters, result)
        first = next(role for role in HEADINGS if role in roles)
        others = who(roles)
        text = f"{comment}. For {others}." if others else f"{comment}."
        by_role[first].append(f"### {name}\n\n```\n{usage}\n```\n\n{prose(text)}")
    for role, entries in by_role.items():
        yield f"## {HEADINGS[role]}"
        yield from entries


def relations(db: DB, kinds: list[str]) -> Iterator[str]:
    for name, comment, roles, columns in db.execute(RELATIONS, [list(ROLES), kinds]):
        yield f"### ulak.{name}"
        yield prose(f"{comment}. For {', '.join(map(code, roles)) or 'nobody'}.")
        yield table(
            ["column", "type", "what it is"], [[code(column), plain(kind), text] for column, kind, text in columns]
        )


def settings(db: DB) -> str:
    rows = [[code(name), code(default), *facts] for name, default, *facts in db.execute(SETTINGS)]
    return table(["setting", "default", "range", "unit", "what it is"], rows)


def reference(db: DB) -> str:
    parts = [
        INTRODUCTION,
        *functions(db),
        "## Settings",
        SETTINGS_INTRODUCTION,
        settings(db),
        "## Views",
        *relations(db, ["v", "m"]),
        "## Tables",
        TABLES_INTRODUCTION,
        *relations(db, ["r", "p"]),
    ]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    cluster = Cluster.create()
    try:
        cluster.install("postgres")
        with cluster.connect() as db:
            sys.stdout.write(reference(db))
    finally:
        cluster.remove()


if __name__ == "__main__":
    main()
