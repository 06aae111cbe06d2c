-- Registers every table and sequence of the extension with pg_dump. Without this list it would silently lose the queue.

do $plpgsql$
declare
    v_relation regclass;
begin
    for v_relation in
        select c.oid
        from pg_catalog.pg_class c
        where c.relnamespace in ('ulak'::regnamespace, 'ulak_private'::regnamespace) and c.relkind in ('r', 'S')
        order by c.relname
    loop
        perform pg_catalog.pg_extension_config_dump(
            v_relation,
            case
                -- The workers and the last maintenance of one cluster mean nothing in another.
                when v_relation in (
                    'ulak.workers'::regclass, 'ulak_private.schedule'::regclass, 'ulak_private.maintenance_runs'::regclass, 'ulak_private.sweep_state'::regclass
                ) then 'where false'
                -- A restore mustn't look like pg_upgrade: see sql/schema/55_maintenance.sql.
                when v_relation = 'ulak_private.cluster_home'::regclass then 'where false'
                -- Rows that are locked, and say nothing: the restored extension has its own.
                when v_relation in ('ulak_private.locks'::regclass, 'ulak_private.ordering_keys'::regclass) then 'where false'
                -- ulak's own events are code: the restored extension has them already.
                when v_relation = 'ulak.event_types'::regclass then $$where not starts_with(name, 'ulak.')$$
                else ''
            end
        );
    end loop;
end
$plpgsql$;
