"""Every object of the extension is commented, but for private functions."""

from __future__ import annotations

from typing import Any

import psycopg


def test_every_public_object_is_commented(db: psycopg.Connection[Any]) -> None:
    uncommented = db.execute(
        r"""
        select 'schema ' || nspname from pg_namespace where nspname in ('ulak', 'ulak_private') and obj_description(oid, 'pg_namespace') is null
        union all
        select 'relation ' || oid::regclass
        from pg_class
        where relnamespace::regnamespace::text in ('ulak', 'ulak_private')
            and relkind in ('r', 'p', 'v', 'm', 'S')
            -- Partitions and the sequences of identity columns are explained by what they belong to.
            and not relispartition
            and not exists (
                select from pg_depend
                where objid = pg_class.oid and classid = 'pg_class'::regclass and deptype = 'i'
            )
            and obj_description(oid, 'pg_class') is null
        union all
        select 'column ' || attrelid::regclass || '.' || attname
        from pg_attribute
        join pg_class on pg_class.oid = attrelid
        where relnamespace::regnamespace::text in ('ulak', 'ulak_private')
            and relkind in ('r', 'p', 'v', 'm')
            and not relispartition
            and attnum > 0
            and not attisdropped
            and col_description(attrelid, attnum) is null
        union all
        select 'function ' || oid::regprocedure
        from pg_proc
        where pronamespace = 'ulak'::regnamespace and obj_description(oid, 'pg_proc') is null
        union all
        select 'type ' || t.oid::regtype
        from pg_type t
        left join pg_class c on c.oid = typrelid
        where typnamespace::regnamespace::text in ('ulak', 'ulak_private')
            and typtype in ('c', 'd', 'e', 'r')
            and (c.oid is null or c.relkind = 'c')
            and obj_description(t.oid, 'pg_type') is null
        """
    ).fetchall()

    assert [name for (name,) in uncommented] == []
