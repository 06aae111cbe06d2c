-- Which cluster delivers. A dump restored into another cluster delivers nothing until ulak.adopt(), and neither does a cluster recovered to
-- a target. After pg_upgrade, which makes a new cluster from the same files, and after the promotion of a standby, delivery goes on.

-- Strictly speaking not immutable: pg_resetwal changes it while the server is down. Declared immutable, it is read once per cached plan
-- instead of on every claim.
create or replace function ulak_private.system_identifier()
returns bigint
language sql
immutable
as $sql$
    select c.system_identifier
    from pg_catalog.pg_control_system() c
$sql$;

-- Every promotion and every finished recovery starts a new timeline; null on a standby. pg_control can't be used: it lags until a checkpoint.
create or replace function ulak_private.timeline()
returns integer
language sql
as $sql$
    select case
        when not pg_catalog.pg_is_in_recovery()
            then ('x' || left(pg_catalog.pg_walfile_name(pg_catalog.pg_current_wal_insert_lsn()), 8))::bit(32)::integer
    end
$sql$;

-- The target at which a recovery was stopped since that timeline, from PostgreSQL's history file; null for promotions. A recovery to the end
-- of the log looks like a promotion. So does any recovery if the owner may not read the file.
create or replace function ulak_private.recovery_target(p_since integer)
returns text
language plpgsql
as $plpgsql$
declare
    v_file text := format('pg_wal/%s.history', lpad(upper(to_hex(ulak_private.timeline()) collate "C"), 8, '0'));
begin
    if not has_function_privilege('pg_catalog.pg_read_file(text, bigint, bigint, boolean)', 'execute') then
        return null;
    end if;
    -- Each line: the timeline that was left, the position, the reason.
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
        -- The file is only read between a promotion and the next maintenance.
        where h.timeline < ulak_private.timeline() and ulak_private.recovery_target(h.timeline) is not null
    );
end
$plpgsql$;

-- Why messages are held, as the beginning of a sentence; null if they aren't held.
create or replace function ulak_private.held_because()
returns text
language sql
stable
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

-- For maintenance, if this cluster delivers. After pg_upgrade, the next dump has to name the new cluster.
create or replace function ulak_private.follow_cluster()
returns void
language plpgsql
as $plpgsql$
begin
    -- The installation leaves this to the first run if it looks like a restore.
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
