-- Which cluster delivers: a dump that was restored elsewhere stays silent until ulak.adopt(); after pg_upgrade, which makes a
-- new cluster of the same files, delivery goes on.

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
            and not exists (
                select
                from ulak.cluster_home h
                where h.system_identifier = i.system_identifier and h.table_oid = 'ulak.cluster_home'::regclass
            )
    );
end
$plpgsql$;

-- For start(), as its other checks are.
create or replace function ulak._check_adopted()
returns table (item text, status text, detail text, fix text)
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select
        'cluster',
        'warning',
        'these messages were restored from another cluster: they are held',
        'select ulak.adopt(); -- if this cluster is to deliver them'
    where not ulak._is_adopted()
$sql$;

create or replace function ulak.adopt()
returns bigint
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_released bigint;
begin
    -- Of two at once, the second waits and then finds nothing to do.
    lock table ulak.cluster_identity in share row exclusive mode;
    if ulak._is_adopted() then
        return 0;
    end if;
    select count(*) into v_released
    from ulak.queue q
    where q.status in ('pending', 'processing');
    perform ulak._record_cluster('cluster.adopted', jsonb_build_object('released', v_released));
    perform ulak._bring_jobs_here();
    return v_released;
end
$plpgsql$;

comment on function ulak.adopt() is
    'makes this cluster the one that delivers, after a dump was restored here; returns how many messages were held, 0 if none had been';

create or replace function ulak._record_cluster(p_event text, p_detail jsonb default null)
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_before jsonb;
begin
    with gone as (
        delete from ulak.cluster_identity i
        returning i.system_identifier
    )
    select jsonb_agg(g.system_identifier::text) into v_before
    from gone g;
    insert into ulak.cluster_identity (system_identifier)
    values (ulak._system_identifier());
    delete from ulak.cluster_home;
    insert into ulak.cluster_home (system_identifier, table_oid)
    values (ulak._system_identifier(), 'ulak.cluster_home'::regclass);
    insert into ulak.event_log (event, old_value, new_value, detail)
    values (p_event, v_before, jsonb_build_array(ulak._system_identifier()::text), p_detail);
end
$plpgsql$;

-- For maintenance, where this cluster delivers. After pg_upgrade the next dump has to name the cluster that it is now.
create or replace function ulak._follow_cluster()
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    -- Where the installation took itself for a restore, it left this to the first run.
    insert into ulak.cluster_identity (system_identifier)
    select ulak._system_identifier()
    where not exists (select from ulak.cluster_identity);
    if exists (select from ulak.cluster_identity i where i.system_identifier <> ulak._system_identifier()) then
        lock table ulak.cluster_identity in share row exclusive mode;
        if ulak._is_adopted() then
            perform ulak._record_cluster('cluster.upgraded');
        end if;
    end if;
end
$plpgsql$;
