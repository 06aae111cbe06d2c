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
    version text
)
language plpgsql
stable
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
#variable_conflict use_column
begin
    p_now := ulak._finite_time(p_now);
    return query
    select
        w.pid,
        case
            when w.state = 'stopped' then 'stopped'
            when not ulak._is_alive(w, p_now) then 'lost'
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
        w.version
    from ulak.workers w
    order by w.slot;
end
$plpgsql$;

comment on function ulak.get_worker_status(timestamptz) is
    'worker slots: running, leaving (stop() was called), stopped (the run is over), or lost (its session is gone, or gave no sign of life for 15 seconds)';

-- A worker gives a sign of life every second as long as its backend is there. Its slot is empty for a moment between two runs.
create or replace function ulak._is_alive(p_worker ulak.workers, p_now timestamptz)
returns boolean
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select p_worker.heartbeat_at > p_now - interval '15 seconds'
        and case
            when p_worker.state = 'running' then ulak._has_backend(p_worker)
            else coalesce(p_worker.stop_requested_at < p_worker.started_at, true)
        end
$sql$;

create or replace function ulak._count_alive(p_now timestamptz)
returns bigint
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select count(*)
    from ulak.workers w
    where ulak._is_alive(w, p_now)
$sql$;

create or replace function ulak.health_check(p_now timestamptz default clock_timestamp())
returns table (component text, status text, details text, checked_at timestamptz)
language plpgsql
stable
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
#variable_conflict use_column
begin
    p_now := ulak._finite_time(p_now);
    return query
    with health as materialized (
        select f.*
        from ulak._endpoint_facts(null, p_now) f
    ),
    queue as (
        select
            coalesce(sum(h.waiting), 0) as waiting,
            coalesce(sum(h.in_flight), 0) as in_flight,
            coalesce(sum(h.dead), 0) as dead,
            min(h.due_since) filter (where h.enabled) as due_since,
            count(*) filter (where h.protocol = any (ulak._worker_protocols())) as delivered,
            count(*) as endpoints,
            string_agg(h.name, ', ' order by h.name) filter (where h.circuit_state <> 'closed') as troubled,
            nullif(ulak.setting('max_queue_size')::bigint, 0) as most
        from health h
    ),
    maintenance as (
        select
            case
                when bool_and(m.state = 'never ran') then 'it never ran'
                else string_agg(format('%s %s', m.step, m.state), ', ') filter (where m.state in ('failed', 'late', 'never ran'))
            end as trouble,
            bool_or(m.state = 'failed') as failed,
            max(m.started_at) as last_run
        from ulak.maintenance_status m
        where m.step <> 'vacuum'
    ),
    checked (place, component, status, details) as (
        select
            1,
            'workers',
            case when ulak._count_alive(p_now) > 0 or q.delivered = 0 then 'ok' else 'critical' end,
            format('%s alive', ulak._count_alive(p_now))
        from queue q
        union all
        select
            2,
            'queue',
            case
                when q.waiting + q.in_flight >= q.most then 'critical'
                when q.due_since < p_now - interval '5 minutes' or q.waiting + q.in_flight > 0.8 * q.most then 'warning'
                else 'ok'
            end,
            concat_ws(
                ', ',
                format('%s waiting', q.waiting),
                format('%s in flight', q.in_flight),
                'oldest due for ' || ulak._short_duration(p_now - q.due_since)
            )
        from queue q
        union all
        select
            3,
            'endpoints',
            case when q.troubled is null then 'ok' else 'warning' end,
            concat_ws(', ', ulak._counted(q.endpoints, 'endpoint'), 'circuit not closed: ' || q.troubled)
        from queue q
        union all
        select 4, 'dlq', case when q.dead = 0 then 'ok' else 'warning' end, ulak._counted(q.dead, 'dead letter')
        from queue q
        union all
        select
            5,
            'maintenance',
            case when m.failed then 'critical' when m.trouble is not null then 'warning' else 'ok' end,
            coalesce(m.trouble, 'last run ' || ulak._short_duration(p_now - m.last_run) || ' ago')
        from maintenance m
        union all
        select 6, 'archive', case when a.problem is null then 'ok' else 'warning' end, coalesce(a.problem, 'partitions are in place')
        from (select string_agg(p.finding, ', ') from ulak._check_partitions(p_now) p) a (problem)
        union all
        select
            7,
            'cluster',
            case when ulak._is_adopted() then 'ok' else 'critical' end,
            case
                when ulak._is_adopted() then 'this cluster delivers'
                else 'messages of another cluster were restored here and are held until ulak.adopt()'
            end
    )
    select c.component, c.status, c.details, p_now
    from checked c
    order by c.place;
end
$plpgsql$;

comment on function ulak.health_check(timestamptz) is
    'one row per component with ok, warning or critical; ulak.doctor() says what to do about it';

create or replace function ulak._counted(p_count numeric, p_what text)
returns text
language sql
immutable
set search_path = pg_catalog, pg_temp
as $sql$
    select p_count || ' ' || p_what || case when p_count = 1 then '' else 's' end
$sql$;

create or replace function ulak._check_partitions(p_now timestamptz)
returns table (finding text)
language sql
stable
set search_path = pg_catalog, pg_temp
set timezone = 'UTC'
as $sql$
    select format('partition %s is missing', to_char(m.month, '"archive_"YYYY_MM'))
    from (
        values (date_trunc('month', p_now)), (date_trunc('month', p_now) + interval '1 month')
    ) m (month)
    where not exists (select from ulak._archive_partitions p where p.month = m.month)
    union all
    select 'archive_default is not empty: it holds months that have no partition'
    where exists (select from ulak.archive_default)
$sql$;
