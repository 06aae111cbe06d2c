-- doctor(): problems, how bad they are, and the SQL that fixes them.

create or replace function ulak.doctor(p_now timestamptz default clock_timestamp())
returns table (severity text, "check" text, finding text, fix text)
language sql
stable
security definer
set search_path = pg_catalog, pg_temp
as $sql$
    select f.severity, f.check_name, f.finding, f.fix
    from ulak_private.finite_time(p_now) t (now)
    cross join lateral ulak_private.doctor(array(select f from ulak_private.endpoint_facts(null, t.now) f), t.now) f
$sql$;

comment on function ulak.doctor(timestamptz) is
    'lists problems, the worst first, at most 20 per check; fix is the SQL that solves it, with a comment for what SQL cannot'
    ' do';

create or replace function ulak_private.doctor(p_facts ulak_private.endpoint_fact[], p_now timestamptz)
returns table (severity text, check_name text, finding text, fix text)
language plpgsql
stable
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $plpgsql$
#variable_conflict use_column
begin
    return query
    with problem as materialized (
        select f.severity, f.check_name, f.finding, f.fix from ulak_private.trouble(p_facts, p_now) f
        union all
        select f.* from ulak_private.doctor_alerts(p_facts) f
        union all
        select f.* from ulak_private.doctor_settings() f
        union all
        select f.* from ulak_private.doctor_signatures() f
        union all
        select f.* from ulak_private.doctor_watches() f
        union all
        select f.* from ulak_private.doctor_setup() f
    ),
    counted as (
        select
            p.*,
            row_number() over (partition by p.severity, p.check_name order by p.finding) as place,
            count(*) over (partition by p.severity, p.check_name) as alike
        from problem p
    ),
    -- Thousands of findings of one kind would hide the others.
    shown as (
        select c.severity, c.check_name, c.finding, c.fix, c.place
        from counted c
        where c.place <= 20
        union all
        select c.severity, c.check_name, format('and %s more like these', ulak_private.thousands(c.alike - 20)), null, 21
        from counted c
        where c.place = 21
    )
    select f.severity, f.check_name, f.finding, f.fix
    from shown f
    -- Causes come before their effects.
    order by
        array_position(array['critical', 'warning', 'info'], f.severity),
        array_position(array['missing roles', 'cluster', 'clock', 'pg_cron', 'workers', 'settings', 'hosts', 'maintenance', 'circuit', 'failing', 'ordering key', 'session', 'queue', 'backlog'], f.check_name),
        f.check_name,
        f.place;
    if not found then
        return query values ('ok', 'all', 'nothing is wrong', null::text);
    end if;
end
$plpgsql$;

-- Problems that stop deliveries, or will: the findings of doctor() that health_check() uses, too, with the component that
-- each belongs to.
create or replace function ulak_private.trouble(p_facts ulak_private.endpoint_fact[], p_now timestamptz)
returns table (component text, severity text, check_name text, finding text, fix text)
language sql
stable
as $sql$
    select 'cluster', f.* from ulak_private.doctor_cluster() f
    union all
    select 'maintenance', f.* from ulak_private.doctor_clock(p_now) f
    union all
    select 'workers', f.* from ulak_private.doctor_workers(p_now) f
    union all
    select 'archive', 'warning', 'partitions', p.finding, 'select ulak.maintain_archive_partitions();'
    from ulak_private.check_partitions(p_now) p
    union all
    select 'maintenance', f.* from ulak_private.doctor_maintenance(p_now) f
    union all
    select 'endpoints', f.* from ulak_private.doctor_endpoints(p_facts, p_now) f
    union all
    select 'endpoints', f.* from ulak_private.doctor_disabled(p_facts, p_now) f
    union all
    select 'endpoints', f.* from ulak_private.doctor_hosts() f
    union all
    select 'dlq', f.* from ulak_private.doctor_dlq(p_facts, p_now) f
    union all
    select 'queue', f.* from ulak_private.doctor_queue(p_facts, p_now) f
    union all
    select 'queue', f.* from ulak_private.doctor_stuck_keys(p_facts, p_now) f
    union all
    select 'queue', f.* from ulak_private.doctor_heads(p_facts, p_now) f
    union all
    select 'queue', f.* from ulak_private.doctor_vacuum(p_now) f
    union all
    select 'queue', f.* from ulak_private.doctor_locks(p_now) f
    union all
    select 'queue', f.* from ulak_private.doctor_sessions(p_now) f
$sql$;
