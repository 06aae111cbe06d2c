"""Prints README's reference of functions and settings, as the catalogs and their comments have it."""

from __future__ import annotations

from typing import Any

import psycopg

from support.cluster import Cluster

FUNCTIONS = r"""
    select
        proname || '(' || coalesce((
            select string_agg(name, ', ' order by position)
            from unnest(proargnames) with ordinality as parameter (name, position)
            where name like 'p\_%' and position <= pronargs
        ), '') || ')',
        obj_description(oid, 'pg_proc')
    from pg_proc
    where pronamespace = 'ulak'::regnamespace and proname not like '\_%'
    order by 1
"""

SETTINGS = """
    select
        name,
        default_value,
        coalesce(minimum || ' to ' || maximum, array_to_string(choices, ', '), ''),
        coalesce(unit, ''),
        description
    from ulak.settings
    order by name
"""


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def functions(db: psycopg.Connection[Any]) -> str:
    rows = [[f"`{signature}`", comment] for signature, comment in db.execute(FUNCTIONS)]
    return table(["function", "what it does"], rows)


def settings(db: psycopg.Connection[Any]) -> str:
    rows = [[f"`{name}`", *facts] for name, *facts in db.execute(SETTINGS)]
    return table(["setting", "default", "range", "unit", "what it is"], rows)


def main() -> None:
    cluster = Cluster.create()
    try:
        cluster.install("postgres")
        with cluster.connect() as db:
            print(functions(db), settings(db), sep="\n\n")
    finally:
        cluster.remove()


if __name__ == "__main__":
    main()
