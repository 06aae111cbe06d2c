-- This month's partitions and those of the next three, at installation and at each upgrade.

-- They are removed from the extension at once, so that pg_dump treats them as ordinary tables. A dump that is being restored (it turns
-- row_security off) brings its own.
do $plpgsql$
declare
    v_name text;
begin
    if ulak_private.is_restore() then
        return;
    end if;
    perform ulak.maintain_archive_partitions();
    for v_name in
        select p.name
        from ulak_private.month_partitions p
        where exists (
            select
            from pg_catalog.pg_depend d
            where d.classid = 'pg_catalog.pg_class'::pg_catalog.regclass and d.objid = p.relation and d.deptype = 'e'
        )
    loop
        execute pg_catalog.format('alter extension ulak drop table ulak_private.%I', v_name);
    end loop;
end
$plpgsql$;
