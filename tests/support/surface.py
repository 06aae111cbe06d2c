"""What other roles than the owner may call, and calls of it."""

from __future__ import annotations

from typing import Any

import psycopg

# Of each type, one that most functions go on with.
VALUES = {
    "text": "shop",
    "jsonb": "{}",
    "int4": "1",
    "int8": "1",
    "float8": "0.1",
    "interval": "1 second",
    "_text": "{shop}",
    "_int4": "{1}",
    "_int8": "{1}",
    "_jsonb": '{"{}"}',
    "bool": "true",
    "regclass": "public.orders",
}
GRANTED = """
    select
        format('%%I.%%I', p.pronamespace::regnamespace, p.proname),
        array(
            select format('%%I.%%I', t.typnamespace::regnamespace, t.typname)
            from unnest(p.proargtypes::oid[]) with ordinality as a (type, place)
            join pg_type as t on t.oid = a.type
            where a.place <= p.pronargs - p.pronargdefaults
            order by a.place
        )
    from pg_proc as p
    where p.pronamespace::regnamespace::text in ('ulak', 'ulak_private')
        and p.prokind = %s
        and p.prorettype <> 'trigger'::regtype
        and exists (select from aclexplode(p.proacl) as a where a.grantee <> p.proowner)
    order by 1, 2
"""


def granted(db: psycopg.Connection[Any], kind: str = "f") -> list[tuple[str, list[str]]]:
    """Functions, or procedures (p): their names, and the types of the parameters that must be given."""
    return db.execute(GRANTED, [kind]).fetchall()


def arguments(types: list[str], values: dict[str, str]) -> str:
    literals = {type: values.get(type.removeprefix("pg_catalog.")) for type in types}
    return ", ".join(f"'{literals[type]}'::{type}" if literals[type] else f"null::{type}" for type in types)
