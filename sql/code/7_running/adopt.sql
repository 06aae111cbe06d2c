-- Which cluster delivers: a dump that was restored elsewhere stays silent until ulak.adopt(), and so does a cluster that was recovered to
-- a target. After pg_upgrade, which makes a new cluster of the same files, and after the promotion of a standby delivery goes on.

-- Not immutable in the strict sense: pg_resetwal changes it, with the server down. Declared so, it is read once per
-- cached plan and not on every claim.
create or replace function ulak_private.system_identifier()
returns bigint
language sql
immutable
as $sql$
    select c.system_identifier
    from pg_catalog.pg_control_system() c
$sql$;

-- Each promotion and each recovery that ends begins a new one; null on a standby. Not by pg_control, which follows only with the next checkpoint.
create or replace function ulak_private.timeline()
returns integer
language sql
as $sql$
    select case
        when not pg_catalog.pg_is_in_recovery()
            then ('x' || left(pg_catalog.pg_walfile_name(pg_catalog.pg_current_wal_insert_lsn()), 8))::bit(32)::integer
    end
$sql$;

-- The target that recovery was stopped at since that timeline, as PostgreSQL noted it in the current one's history; null for promotions. A
-- recovery without a target, to the end of the log, looks the same as a promotion. So does everything where the owner may not read the file.
create or replace function ulak_private.recovery_target(p_since integer)
returns text
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_file text := format('pg_wal/%s.history', lpad(upper(to_hex(ulak_private.timeline()) collate "C"), 8, '0'));
begin
    if not has_function_privilege('pg_catalog.pg_read_file(text, bigint, bigint, boolean)', 'execute') then
        return null;
    end if;
    -- A line is the timeline that was left, where, and why.
    return (
        select l.parts[2]
        from regexp_split_to_table(pg_read_file(v_file, 0, 1000000, true), E'\n') with ordinality h(line, place)
        cross join regexp_match(h.line, '^[[:space:]]*([0-9]+)[[:space:]]+[0-9A-F]+/[0-9A-F]+[[:space:]]+(.*)$') l(parts)
        where l.parts[1]::integer >= p_since and l.parts[2] <> 'no recovery target specified'
        order by h.place desc
        limit 1
    );
end
$plpgsql$;

create or replace function ulak_private.is_adopted()
returns boolean
language plpgsql
stable
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    -- Usually there is no sign of another cluster.
    perform from ulak_private.cluster_identity i where i.system_identifier <> ulak_private.system_identifier()
    union all
    select from ulak_private.cluster_home h where h.timeline < ulak_private.timeline();
    if not found then
        return true;
    end if;
    return not exists (
        select
        from ulak_private.cluster_identity i
        where i.system_identifier <> ulak_private.system_identifier()
            and not exists (
                select
                from ulak_private.cluster_home h
                where h.system_identifier = i.system_identifier and h.table_oid = 'ulak_private.cluster_home'::regclass
            )
    ) and not exists (
        select
        from ulak_private.cluster_home h
        -- The file is read between a promotion and the next maintenance alone.
        where h.timeline < ulak_private.timeline() and ulak_private.recovery_target(h.timeline) is not null
    );
end
$plpgsql$;

-- Why messages are held; null if they aren't. The beginning of a sentence.
create or replace function ulak_private.held_because()
returns text
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select coalesce(
        (
            select format('these messages come from a recovery that was stopped (%s)', ulak_private.recovery_target(h.timeline))
            from ulak_private.cluster_home h
            where h.timeline < ulak_private.timeline() and ulak_private.recovery_target(h.timeline) is not null
        ),
        'these messages were restored from another cluster'
    )
    where not ulak_private.is_adopted()
$sql$;

-- For start(), as its other checks are.
create or replace function ulak_private.check_adopted()
returns table (item text, status text, detail text, fix text)
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select
        'cluster',
        'warning',
        b.reason || ': they are held',
        'select ulak.adopt(); -- if this cluster is to deliver them'
    from ulak_private.held_because() b(reason)
    where b.reason is not null
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
    -- If two run at once, the second waits and then finds nothing to do.
    lock table ulak_private.cluster_identity in share row exclusive mode;
    if ulak_private.is_adopted() then
        return 0;
    end if;
    select count(*) into v_released
    from ulak_private.deliveries q
    where q.status in ('pending', 'processing');
    perform ulak_private.record_cluster('cluster.adopted', jsonb_build_object('released', v_released));
    perform ulak_private.bring_jobs_here();
    return v_released;
end
$plpgsql$;

comment on function ulak.adopt() is
    'makes this cluster the one that delivers, after a dump was restored here or the cluster was recovered to a target; '
    'returns how many messages were held, 0 if none';

create or replace function ulak_private.record_cluster(p_event text, p_detail jsonb default null)
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_before jsonb;
begin
    with gone as (
        delete from ulak_private.cluster_identity i
        returning i.system_identifier
    )
    select jsonb_agg(g.system_identifier::text) into v_before
    from gone g;
    insert into ulak_private.cluster_identity (system_identifier)
    values (ulak_private.system_identifier());
    delete from ulak_private.cluster_home;
    insert into ulak_private.cluster_home (system_identifier, table_oid, timeline)
    values (ulak_private.system_identifier(), 'ulak_private.cluster_home'::regclass, ulak_private.timeline());
    insert into ulak.event_log (event, old_value, new_value, detail)
    values (p_event, v_before, jsonb_build_array(ulak_private.system_identifier()::text), p_detail);
end
$plpgsql$;

-- For maintenance, where this cluster delivers. After pg_upgrade the next dump has to name the cluster that it is now.
create or replace function ulak_private.follow_cluster()
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    -- Where the installation took itself for a restore, it left this to the first run.
    insert into ulak_private.cluster_identity (system_identifier)
    select ulak_private.system_identifier()
    where not exists (select from ulak_private.cluster_identity);
    if exists (select from ulak_private.cluster_identity i where i.system_identifier <> ulak_private.system_identifier()) then
        lock table ulak_private.cluster_identity in share row exclusive mode;
        if ulak_private.is_adopted() then
            perform ulak_private.record_cluster('cluster.upgraded');
        end if;
    end if;
    -- After a promotion.
    update ulak_private.cluster_home h
    set timeline = ulak_private.timeline()
    where h.timeline is distinct from ulak_private.timeline() and ulak_private.is_adopted();
end
$plpgsql$;
