-- Which cluster delivers: a dump that was restored elsewhere stays silent until ulak.adopt().

-- Not immutable in the strict sense: pg_resetwal changes it, with the server down. Declared so, it is read once per
-- cached plan and not on every claim.
create or replace function ulak._system_identifier()
returns bigint
language sql
immutable
as $sql$
    select c.system_identifier
    from pg_catalog.pg_control_system() c
$sql$;

create or replace function ulak._is_adopted()
returns boolean
language plpgsql
stable
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    return not exists (
        select
        from ulak.cluster_identity i
        where i.system_identifier <> ulak._system_identifier()
    );
end
$plpgsql$;

create or replace function ulak.adopt()
returns bigint
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_before jsonb;
    v_released bigint;
begin
    -- Of two at once, the second waits and then finds nothing to do.
    lock table ulak.cluster_identity in share row exclusive mode;
    if ulak._is_adopted() then
        return 0;
    end if;
    with gone as (
        delete from ulak.cluster_identity i
        returning i.system_identifier
    )
    select jsonb_agg(g.system_identifier::text) into v_before
    from gone g;
    insert into ulak.cluster_identity (system_identifier)
    values (ulak._system_identifier());

    v_released := ulak._count_live(null);
    insert into ulak.event_log (event, old_value, new_value, detail)
    values (
        'cluster.adopted',
        v_before,
        jsonb_build_array(ulak._system_identifier()::text),
        jsonb_build_object('released', v_released)
    );
    return v_released;
end
$plpgsql$;

comment on function ulak.adopt() is
    'makes this cluster the one that delivers, after a dump was restored here or after pg_upgrade; returns how many messages were held, 0 if none had been';
