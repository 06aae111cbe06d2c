"""Every public object of the extension is commented. A leading underscore means private."""

from __future__ import annotations

from typing import Any

import psycopg


def test_every_public_object_is_commented(db: psycopg.Connection[Any]) -> None:
    uncommented = db.execute(
        r"""
        select 'schema ulak' where obj_description('ulak'::regnamespace, 'pg_namespace') is null
        union all
        select 'relation ' || oid::regclass
        from pg_class
        where relnamespace = 'ulak'::regnamespace
            and relkind in ('r', 'p', 'v', 'm', 'S')
            and relname not like '\_%'
            -- Monthly partitions and the sequences of identity columns are explained by what they belong to.
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
        where relnamespace = 'ulak'::regnamespace
            and relkind in ('r', 'p', 'v', 'm')
            and relname not like '\_%'
            and not relispartition
            and attnum > 0
            and not attisdropped
            and col_description(attrelid, attnum) is null
        union all
        select 'function ' || oid::regprocedure
        from pg_proc
        where pronamespace = 'ulak'::regnamespace and proname not like '\_%' and obj_description(oid, 'pg_proc') is null
        union all
        select 'type ' || t.oid::regtype
        from pg_type t
        left join pg_class c on c.oid = typrelid
        where typnamespace = 'ulak'::regnamespace
            and typname not like '\_%'
            and typtype in ('c', 'd', 'e', 'r')
            and (c.oid is null or c.relkind = 'c')
            and obj_description(t.oid, 'pg_type') is null
        """
    ).fetchall()

    assert [name for (name,) in uncommented] == []
