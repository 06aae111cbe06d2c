"""What the catalogs say about the schemas of ulak, in a form that two databases can be compared by."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection
from typing import Any

import psycopg

Snapshot = dict[str, dict[str, Any]]

# Each query gives (name of the object, facts about it). Nothing here depends on oids or on the order of creation.
QUERIES = {
    "schema": """
        select
            nspname,
            jsonb_build_object(
                'owner', nspowner::regrole,
                'acl', acl('n', nspacl, nspowner),
                'comment', obj_description(oid, 'pg_namespace')
            )
        from pg_namespace where nspname in ('ulak', 'ulak_private')
    """,
    "function": """
        select
            p.oid::regprocedure::text,
            jsonb_build_object(
                'definition', pg_get_functiondef(p.oid),
                'owner', proowner::regrole,
                'acl', acl('f', proacl, proowner),
                'comment', obj_description(p.oid, 'pg_proc')
            )
        from pg_proc p
        where pronamespace::regnamespace::text in ('ulak', 'ulak_private') and prokind in ('f', 'p')
    """,
    "relation": """
        select
            oid::regclass::text,
            jsonb_build_object(
                'kind', relkind,
                'persistence', relpersistence,
                'options', reloptions,
                'owner', relowner::regrole,
                'acl', acl(case relkind when 'S' then 's' else 'r' end, relacl, relowner),
                'row_security', relrowsecurity,
                'replica_identity', relreplident,
                'comment', obj_description(oid, 'pg_class'),
                'view', case when relkind in ('v', 'm') then pg_get_viewdef(oid) end,
                'partition_key', pg_get_partkeydef(oid),
                'partition_bound', pg_get_expr(relpartbound, oid)
            )
        from pg_class
        where relnamespace::regnamespace::text in ('ulak', 'ulak_private') and relkind not in ('i', 'I')
    """,
    "column": """
        select
            c.oid::regclass || '.' || attname,
            jsonb_build_object(
                'position', row_number() over (partition by c.oid order by attnum),
                'type', format_type(atttypid, atttypmod),
                'not_null', attnotnull,
                'default', pg_get_expr(adbin, adrelid),
                'identity', attidentity,
                'generated', attgenerated,
                'storage', attstorage,
                'compression', attcompression,
                'collation', attcollation::regcollation,
                'acl', acl('c', attacl, relowner),
                'comment', col_description(c.oid, attnum)
            )
        from pg_attribute
        join pg_class c on c.oid = attrelid
        left join pg_attrdef on adrelid = attrelid and adnum = attnum
        where relnamespace::regnamespace::text in ('ulak', 'ulak_private') and attnum > 0 and not attisdropped and relkind not in ('i', 'I', 'S')
    """,
    "index": """
        select
            indexrelid::regclass::text,
            jsonb_build_object(
                'definition', pg_get_indexdef(indexrelid),
                'valid', indisvalid,
                'comment', obj_description(indexrelid, 'pg_class')
            )
        from pg_index
        join pg_class on pg_class.oid = indexrelid
        where relnamespace::regnamespace::text in ('ulak', 'ulak_private')
    """,
    "constraint": """
        select
            coalesce(conrelid::regclass::text, contypid::regtype::text) || ' ' || conname,
            jsonb_build_object(
                'definition', pg_get_constraintdef(oid),
                'validated', convalidated,
                'comment', obj_description(oid, 'pg_constraint')
            )
        from pg_constraint
        where connamespace::regnamespace::text in ('ulak', 'ulak_private')
            -- A column says by itself that it is not null. PostgreSQL 18 has constraints for that, whose names a restore may change.
            and contype <> 'n'
    """,
    "trigger": """
        select
            tgrelid::regclass || ' ' || tgname,
            jsonb_build_object('definition', pg_get_triggerdef(t.oid), 'enabled', tgenabled)
        from pg_trigger t
        join pg_class c on c.oid = tgrelid
        where relnamespace::regnamespace::text in ('ulak', 'ulak_private') and not tgisinternal
    """,
    "policy": """
        select polrelid::regclass || ' ' || polname, jsonb_build_object(
            'command', polcmd, 'using', pg_get_expr(polqual, polrelid), 'check', pg_get_expr(polwithcheck, polrelid)
        )
        from pg_policy
        join pg_class c on c.oid = polrelid
        where relnamespace::regnamespace::text in ('ulak', 'ulak_private')
    """,
    "sequence": """
        select
            seqrelid::regclass::text,
            jsonb_build_object(
                'type', seqtypid::regtype, 'start', seqstart, 'increment', seqincrement, 'min', seqmin, 'max', seqmax,
                'cycle', seqcycle, 'cache', seqcache
            )
        from pg_sequence
        join pg_class on oid = seqrelid
        where relnamespace::regnamespace::text in ('ulak', 'ulak_private')
    """,
    "type": """
        select
            oid::regtype::text,
            jsonb_build_object(
                'kind', typtype,
                'base', format_type(nullif(typbasetype, 0), typtypmod),
                'acl', acl('T', typacl, typowner),
                'comment', obj_description(oid, 'pg_type'),
                'labels', (select jsonb_agg(enumlabel order by enumsortorder) from pg_enum where enumtypid = t.oid)
            )
        from pg_type t
        where typnamespace::regnamespace::text in ('ulak', 'ulak_private')
    """,
    "member": """
        select object.type || ' ' || object.identity, 'true'::jsonb
        from pg_depend, pg_identify_object(classid, objid, 0) as object
        where refclassid = 'pg_extension'::regclass
            and refobjid = (select oid from pg_extension where extname = 'ulak')
            and deptype = 'e'
    """,
    "dumped": """
        select config.id::regclass::text, to_jsonb(config.condition)
        from pg_extension, unnest(extconfig, extcondition) as config (id, condition)
        where extname = 'ulak'
    """,
}

# No acl and the default spelled out are the same.
ACL = """
    create or replace function pg_temp.acl(p_kind text, p_acl aclitem[], p_owner oid) returns text[] language sql
    return (
        select array_agg(item::text order by item::text)
        from unnest(coalesce(p_acl, acldefault(p_kind::"char", p_owner))) as item
    )
"""


def snapshot(connection: psycopg.Connection[Any]) -> Snapshot:
    connection.execute(ACL)
    facts: Snapshot = {}
    for kind, query in QUERIES.items():
        rows = connection.execute(query.replace("acl(", "pg_temp.acl(")).fetchall()
        facts[kind] = dict(sorted(rows))
    return facts


def without_view_texts(facts: Snapshot) -> Snapshot:
    """Versions of pg_dump and of the server spell columns that have no name in a view's parts in different ways."""
    for relation in facts["relation"].values():
        del relation["view"]
    return facts


def differences(left: Snapshot, right: Snapshot) -> list[str]:
    """One line per object that only one side has, or that the two sides describe differently."""
    lines = []
    for kind in QUERIES:
        for name in sorted(left[kind].keys() | right[kind].keys()):
            if name not in right[kind]:
                lines.append(f"{kind} {name}: only left")
            elif name not in left[kind]:
                lines.append(f"{kind} {name}: only right")
            elif left[kind][name] != right[kind][name]:
                lines.append(f"{kind} {name}: {difference(left[kind][name], right[kind][name])}")
    return lines


def difference(left: Any, right: Any) -> str:
    if isinstance(left, dict) and isinstance(right, dict):
        return "; ".join(f"{key}: {left[key]!r} <> {right[key]!r}" for key in left if left[key] != right[key])
    return f"{left!r} <> {right!r}"


def tables(connection: psycopg.Connection[Any], by_partition: bool = True) -> list[str]:
    """Qualified names of all tables of ulak: the partitions, or the tables that they are parts of."""
    query = """
        select oid::regclass::text from pg_class
        where relnamespace::regnamespace::text in ('ulak', 'ulak_private')
            and (relkind = 'r' and (%(by_partition)s or not relispartition) or relkind = 'p' and not %(by_partition)s)
        order by 1
    """
    return [name for (name,) in connection.execute(query, {"by_partition": by_partition})]


def contents(connection: psycopg.Connection[Any], by_partition: bool = True) -> dict[str, list[str]]:
    """All rows of every table, and the position of every sequence."""
    query = "select oid::regclass::text from pg_class where relnamespace::regnamespace::text in ('ulak', 'ulak_private') and relkind = 'S'"
    sequences = [name for (name,) in connection.execute(query)]
    rows = {}
    for relation in tables(connection, by_partition):
        query = f"select row_to_json(t)::text from {relation} t order by 1"
        rows[relation] = [row for (row,) in connection.execute(query)]
    for relation in sequences:
        rows[relation] = [str(row) for row in connection.execute(f"select last_value, is_called from {relation}")]
    return rows


def lost(before: dict[str, list[str]], after: dict[str, list[str]]) -> list[str]:
    """One line per table of which not every row is there again, with the number of those that aren't."""
    missing = {name: Counter(rows) - Counter(after.get(name, [])) for name, rows in before.items()}
    return [f"{name}: {rows.total()}" for name, rows in sorted(missing.items()) if rows]


def kept(before: dict[str, list[str]], after: dict[str, list[str]]) -> dict[str, list[str]]:
    """What is there after an upgrade, by the columns that there were before it."""
    found = {}
    for name, rows in before.items():
        columns = json.loads(rows[0]).keys() if rows and rows[0].startswith("{") else None
        found[name] = [narrow(row, columns) if columns else row for row in after.get(name, [])]
    return found


def narrow(row: str, columns: Collection[str]) -> str:
    """As row_to_json() writes it."""
    given = json.loads(row)
    return json.dumps({name: given[name] for name in columns}, separators=(",", ":"), ensure_ascii=False)
