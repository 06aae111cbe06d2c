-- Workers and components: one row each, for people and for probes.

create or replace function ulak.get_worker_status(p_now timestamptz default clock_timestamp())
returns table (
    pid integer,
    state text,
    started_at timestamptz,
    messages_processed bigint,
    last_activity timestamptz,
    error_count bigint,
    last_error text,
    slot integer,
    name text,
    heartbeat_at timestamptz,
    in_flight integer,
    version text,
    host text
)
language sql
stable
security definer
set search_path = pg_catalog, pg_temp
as $sql$
    select
        w.pid,
        case
            when w.state = 'stopped' then 'stopped'
            when not ulak_private.is_alive(w, t.now) then 'lost'
            when w.stop_requested_at >= w.started_at then 'leaving'
            else 'running'
        end,
        w.started_at,
        w.messages_processed,
        w.last_activity,
        w.error_count,
        w.last_error,
        w.slot,
        w.name,
        w.heartbeat_at,
        w.in_flight,
        w.version,
        w.host
    from ulak.workers w
    cross join ulak_private.finite_time(p_now) t (now)
    order by w.slot
$sql$;

comment on function ulak.get_worker_status(timestamptz) is
    'worker slots: running, leaving (stop() was called), stopped (the run is over), or lost (its session is gone, or gave no sign of life for 15 seconds); host is the machine of a node';

-- A worker updates its heartbeat every second while its backend lives. Between two runs its slot is empty for a moment.
create or replace function ulak_private.is_alive(p_worker ulak.workers, p_now timestamptz)
returns boolean
language sql
stable
as $sql$
    select p_worker.heartbeat_at > p_now - interval '15 seconds'
        and p_worker.heartbeat_at < p_now + interval '15 seconds'
        and case
            when p_worker.state = 'running' then ulak_private.has_backend(p_worker) or ulak_private.has_gone_on(p_worker)
            else coalesce(p_worker.stop_requested_at < p_worker.started_at, true)
        end
$sql$;

-- Whether the slot's row has changed since it was read. A worker that ends updates its row, then its session ends, then the next worker
-- takes the row: a look that read the row first and the sessions last would take it for killed. Volatile, so that it reads the row again.
create or replace function ulak_private.has_gone_on(p_worker ulak.workers)
returns boolean
language plpgsql
as $plpgsql$
begin
    return exists (
        select
        from ulak.workers w
        where w.slot = p_worker.slot and (w.state, w.name) <> (p_worker.state, p_worker.name)
    );
end
$plpgsql$;

create or replace function ulak_private.count_alive(p_now timestamptz)
returns bigint
language sql
stable
as $sql$
    select count(*)
    from ulak.workers w
    where ulak_private.is_alive(w, p_now)
$sql$;

create or replace function ulak.health_check(p_now timestamptz default clock_timestamp())
returns table (component text, status text, details text, checked_at timestamptz)
language plpgsql
stable
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $plpgsql$
#variable_conflict use_column
declare
    v_facts ulak_private.endpoint_fact[];
begin
    p_now := ulak_private.finite_time(p_now);
    v_facts := array(select f from ulak_private.endpoint_facts(null, p_now) f);
    return query
    -- The findings of doctor(), so that both agree.
    with trouble as materialized (
        select t.*
        from ulak_private.trouble(v_facts, p_now) t
    ),
    worst as (
        select
            t.component,
            case when bool_or(t.severity = 'critical') then 'critical' when bool_or(t.severity = 'warning') then 'warning' else 'ok' end as status,
            min(t.finding) filter (where t.check_name = 'workers' and t.severity = 'info') as remark
        from trouble t
        group by t.component
    ),
    failing as (
        select array_agg(n.name order by n.name) as names
        from (
            select substring(t.finding from '^endpoint "(.*?)" fails: ') as name
            from trouble t
            where t.check_name = 'failing'
        ) n
    )
    select c.component, coalesce(w.status, 'ok'), concat_ws('; ', c.details, w.remark), p_now
    from ulak_private.component_details(v_facts, (select f.names from failing f), p_now) c
    left join worst w on w.component = c.component
    order by c.place;
end
$plpgsql$;

comment on function ulak.health_check(timestamptz) is
    'one row per component with ok, warning or critical, as doctor() finds them; ulak.doctor() says what to do about it';

-- What health_check() says about each component, whether it is well or not.
create or replace function ulak_private.component_details(p_facts ulak_private.endpoint_fact[], p_failing text[], p_now timestamptz)
returns table (place integer, component text, details text)
language sql
stable
as $sql$
    with queue as (
        select q.*, e.due_since as enabled_due_since, e.broken
        from ulak_private.queue_facts(p_facts) q
        cross join (
            select
                min(f.due_since) filter (where f.enabled) as due_since,
                ulak_private.names(array_agg(f.name order by f.name) filter (where f.circuit_state <> 'closed')) as broken
            from unnest(p_facts) f
        ) e
    ),
    maintenance as (
        select
            case
                when bool_and(m.state = 'never ran') then 'it never ran'
                else string_agg(format('%s %s', m.step, m.state), ', ') filter (where m.state in ('failed', 'late', 'never ran'))
            end as trouble,
            max(m.started_at) as last_run
        from ulak.maintenance_status m
        where m.step <> 'vacuum'
    )
    select 1, 'workers', format('%s alive', n.alive) || case when n.nodes > 0 then format(', %s of them on nodes', n.nodes) else '' end
    from (select ulak_private.count_alive(p_now) as alive, ulak_private.count_nodes(p_now) as nodes) n
    union all
    select
        2,
        'queue',
        concat_ws(
            ', ',
            case when q.is_estimate then ulak_private.known_count(q.waiting, true, q.sampled_at, p_now) else q.waiting::text end || ' waiting',
            format('%s in flight', q.in_flight),
            'oldest due for ' || ulak_private.short_duration(p_now - q.enabled_due_since)
        )
    from queue q
    union all
    select
        3,
        'endpoints',
        concat_ws(', ', ulak_private.counted(q.endpoints, 'endpoint'), 'circuit not closed: ' || q.broken, 'failing: ' || ulak_private.names(p_failing))
    from queue q
    union all
    select
        4,
        'dlq',
        case
            when q.dead_is_estimate then ulak_private.known_count(q.dead, true, q.dead_sampled_at, p_now) || ' dead letters'
            else ulak_private.counted(q.dead, 'dead letter')
        end
    from queue q
    union all
    select 5, 'maintenance', coalesce(m.trouble, 'last run ' || ulak_private.short_duration(p_now - m.last_run) || ' ago')
    from maintenance m
    union all
    select 6, 'archive', coalesce((select string_agg(p.finding, ', ') from ulak_private.check_partitions(p_now) p), 'partitions are in place')
    union all
    select
        7,
        'cluster',
        coalesce(ulak_private.held_because() || ', and are held until ulak.adopt()', 'this cluster delivers')
$sql$;

create or replace function ulak.health(p_now timestamptz default clock_timestamp())
returns text
language sql
stable
security definer
set search_path = pg_catalog, pg_temp
as $sql$
    select case
        when bool_or(h.status = 'critical') then 'critical'
        when bool_or(h.status = 'warning') then 'warning'
        else 'ok'
    end
    from ulak.health_check(p_now) h
$sql$;

comment on function ulak.health(timestamptz) is 'the worst status of health_check() as one word, for probes: ok, warning or critical';

-- The first five of them.
create or replace function ulak_private.names(p_names text[])
returns text
language sql
immutable
as $sql$
    select array_to_string(p_names[:5], ', ')
        || case when cardinality(p_names) > 5 then format(' and %s more', cardinality(p_names) - 5) else '' end
$sql$;

create or replace function ulak_private.counted(p_count numeric, p_what text)
returns text
language sql
immutable
as $sql$
    select p_count || ' ' || p_what || case when p_count = 1 then '' else 's' end
$sql$;

create or replace function ulak_private.check_partitions(p_now timestamptz)
returns table (finding text)
language sql
stable
set timezone = 'UTC'
as $sql$
    select format('partition %s is missing', to_char(m.month, '"archive_"YYYY_MM'))
    from (
        values (date_trunc('month', p_now)), (date_trunc('month', p_now) + interval '1 month')
    ) m (month)
    where (select count(*) from ulak_private.month_partitions p where p.month = m.month) < 2
    union all
    select 'archive_default is not empty: it holds months that have no partition'
    where exists (select from ulak_private.archive_default) or exists (select from ulak_private.events_default)
$sql$;
