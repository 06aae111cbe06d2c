-- report(): one page of HTML about the last hours, to work from. SQL gathers, Python draws. It is made for ulak_monitor: errors,
-- counts, names and hosts, but no payload, no config and no secret.

create or replace function ulak.report(p_hours integer default 6, p_now timestamptz default clock_timestamp())
returns text
language plpgsql
stable
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    p_now := ulak_private.finite_time(p_now);
    perform ulak_private.check_integer('p_hours', p_hours, 1, 168);
    return ulak_private.draw_report(ulak_private.report_data(p_hours, p_now));
end
$plpgsql$;

comment on function ulak.report(integer, timestamptz) is
    'the last hours as one self-contained HTML page: psql -Atc ''select ulak.report()'' > report.html';

create or replace function ulak_private.draw_report(p_data jsonb)
returns text
language plpython3u
set search_path = pg_catalog, pg_temp
as $python$
    plpy.execute("select ulak_private.load_python()")
    import json
    from ulak.report import page

    return page.render(json.loads(p_data))
$python$;

create or replace function ulak_private.report_data(p_hours integer, p_now timestamptz)
returns jsonb
language sql
stable
set search_path = pg_catalog, pg_temp
set timezone = 'UTC'
as $sql$
    select jsonb_build_object(
        'database', current_database(),
        'version', ulak_private.version(),
        'server', current_setting('server_version'),
        'now', p_now,
        'hours', p_hours,
        'traffic', ulak_private.report_traffic(p_hours, p_now),
        'endpoints', h.endpoints,
        'totals', h.totals,
        'findings', (
            select coalesce(jsonb_agg(to_jsonb(d) order by d.place), '[]')
            from ulak_private.doctor(e.facts, p_now) with ordinality d (severity, check_name, finding, fix, place)
        ),
        'dead', ulak_private.report_dead(),
        'letters', ulak_private.report_letters(),
        'circuits', ulak_private.report_circuits(),
        'schedule', ulak_private.report_schedule(e.facts, p_now),
        'events', ulak_private.report_events(),
        'workers', (
            select coalesce(jsonb_agg(to_jsonb(w) order by w.slot), '[]')
            from ulak.get_worker_status(p_now) w
        ),
        'maintenance', (
            select coalesce(jsonb_agg(to_jsonb(m)), '[]')
            from ulak.maintenance_status m
        ),
        'partitions', (
            select coalesce(jsonb_agg(jsonb_build_object(
                'name', c.relname,
                'rows', greatest(c.reltuples, 0),
                'bytes', pg_total_relation_size(c.oid)
            ) order by c.relname), '[]')
            from pg_inherits i
            join pg_class c on c.oid = i.inhrelid
            where i.inhparent in ('ulak_private.archived'::regclass, 'ulak_private.events'::regclass)
        ),
        'queue_bytes', pg_total_relation_size('ulak_private.deliveries')
    )
    from (select array(select f from ulak_private.endpoint_facts(null, p_now) f) as facts offset 0) e
    cross join lateral (
        -- The worst 50, and what all have together.
        select
            coalesce(jsonb_agg(
                to_jsonb(h) - '{all_waiting,all_estimated,all_due_since,all_dead,all_per_second,endpoints}'::text[]
                    || jsonb_build_object('host', ulak_private.receiver_host(r.config))
                order by h.place
            ), '[]') as endpoints,
            jsonb_build_object(
                'endpoints', coalesce(max(h.endpoints), 0),
                'waiting', coalesce(max(h.all_waiting), 0),
                'is_estimate', coalesce(bool_or(h.all_estimated), false),
                'due_since', max(h.all_due_since),
                'dead', coalesce(max(h.all_dead), 0),
                'per_second', coalesce(max(h.all_per_second), 0)
            ) as totals
        from ulak_private.endpoint_health(e.facts, null, 50, p_now) h
        join ulak.endpoints r on r.name = h.name
    ) h
$sql$;

-- Without the scheme. Null for an endpoint that delivers to no host.
create or replace function ulak_private.receiver_host(p_config jsonb)
returns text
language sql
immutable
set search_path = pg_catalog, pg_temp
as $sql$
    select regexp_replace(ulak_private.hosts(p_config -> p.host_key), '[A-Za-z]+://', '', 'g')
    from ulak_private.protocol_facts() p
    where p_config ? p.host_key
    limit 1
$sql$;

-- All endpoints together, in at most 60 steps of whole minutes. It begins with the first minute that anything is known of, but
-- shows 20 at least.
create or replace function ulak_private.report_traffic(p_hours integer, p_now timestamptz)
returns jsonb
language sql
stable
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
as $sql$
    with known as materialized (
        select
            ulak_private.traffic_is_final_before() as final_before,
            greatest(
                date_trunc('minute', p_now) - make_interval(hours => p_hours) + interval '1 minute',
                least(
                    (select min(t.minute) from ulak.traffic t),
                    (select min(t.minute) from ulak_private.recent_traffic() t),
                    date_trunc('minute', p_now) - interval '19 minutes'
                )
            ) as starts_at
    ),
    span as materialized (
        select k.final_before, k.starts_at, g.minutes, ceil(g.minutes / 60.0)::integer as step
        from known k
        cross join lateral (
            select (extract(epoch from date_trunc('minute', p_now) - k.starts_at) / 60)::integer + 1
        ) g (minutes)
    ),
    counted as materialized (
        select
            floor(extract(epoch from t.minute - s.starts_at) / (60 * s.step))::integer as n,
            sum(t.delivered) as delivered,
            sum(t.failed) as failed,
            max(t.waiting) as waiting,
            ulak_private.percentiles(
                ulak_private.sum_histograms(t.latency_histogram),
                array[0.50, 0.95],
                -- Minutes that were counted by 0.1.0 don't know their longest.
                case when bool_and(t.latency_max_ms is not null) filter (where t.delivered + t.failed > 0) then max(t.latency_max_ms) end
            ) as percentiles
        from span s
        cross join lateral (
            select t.minute, t.delivered, t.failed, t.latency_histogram, t.latency_max_ms, t.waiting
            from ulak.traffic t
            where t.minute >= s.starts_at and t.minute <= p_now and t.minute < s.final_before
            union all
            select t.minute, t.delivered, t.failed, t.latency_histogram, t.latency_max_ms, null
            from ulak_private.recent_traffic(s.starts_at) t
            where t.minute <= p_now
            union all
            select t.minute, 0, 0, '{}', null, t.waiting
            from ulak.traffic t
            where t.minute >= s.starts_at and t.minute <= p_now and t.minute >= s.final_before
        ) t
        group by 1
    )
    select jsonb_agg(
        jsonb_build_object(
            'at', f.starts_at,
            'seconds', greatest(extract(epoch from least(f.starts_at + make_interval(mins => s.step), p_now) - f.starts_at), 1),
            'delivered', coalesce(c.delivered, 0),
            'failed', coalesce(c.failed, 0),
            'p50_ms', c.percentiles[1],
            'p95_ms', c.percentiles[2],
            'waiting', c.waiting
        )
        order by n
    )
    from span s
    cross join lateral generate_series(0, ceil(s.minutes::numeric / s.step)::integer - 1) n
    cross join lateral (select s.starts_at + make_interval(mins => n * s.step)) f (starts_at)
    left join counted c using (n)
$sql$;

-- The newest dead letters by endpoint and cause. The command finds them all again:
-- whatever stands for a number matches any text.
create or replace function ulak_private.report_dead()
returns jsonb
language sql
stable
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $sql$
    select coalesce(jsonb_agg(
        to_jsonb(g) || jsonb_build_object(
            'command',
            case
                when g.receiver is null then null
                when g.cause is null then format('select * from ulak.redrive(p_endpoint => %L, p_dry_run => true);', g.receiver)
                else format(
                    'select * from ulak.redrive(p_endpoint => %L, p_error_like => %L, p_dry_run => true);', g.receiver, g.pattern
                )
            end
        )
        order by g.letters desc, g.endpoint, g.cause
    ), '[]')
    from (
        select
            d.endpoint_name as endpoint,
            c.cause,
            count(*) as letters,
            min(d.failed_at) as first_at,
            max(d.failed_at) as last_at,
            -- Its name of today; null once it was dropped.
            e.name as receiver,
            replace(regexp_replace(c.cause, E'([\\\\%_])', E'\\\\\\1', 'g'), '#', '%')
                || case when length(c.cause) = 160 then '%' else '' end as pattern
        from (
            select d.endpoint_id, d.endpoint_name, d.last_error, d.failed_at, d.status
            from ulak.dlq d
            order by d.archived_at desc
            limit 5000
        ) d
        left join ulak.endpoints e on e.id = d.endpoint_id
        cross join lateral (select ulak_private.cause(d.last_error)) c (cause)
        where d.status = 'failed'
        group by d.endpoint_name, c.cause, e.name
        order by letters desc, d.endpoint_name, c.cause
        limit 12
    ) g
$sql$;

-- The newest of them one by one. Those that were redriven since lie between them: no more than 5,000 are looked at.
create or replace function ulak_private.report_letters()
returns jsonb
language sql
stable
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $sql$
    select coalesce(jsonb_agg(to_jsonb(l) - 'archived_at' order by l.archived_at desc, l.id desc), '[]')
    from (
        select
            d.id,
            d.original_message_id as message,
            d.endpoint_name as endpoint,
            left(d.last_error, 500) as error,
            d.attempts,
            d.failed_at,
            d.archived_at,
            case
                when exists (select from ulak.endpoints e where e.id = d.endpoint_id)
                    then format('select ulak.redrive_message(%s);', d.id)
            end as command
        from (
            select d.id, d.original_message_id, d.endpoint_id, d.endpoint_name, d.last_error, d.attempts, d.failed_at, d.archived_at, d.status
            from ulak.dlq d
            order by d.archived_at desc
            limit 5000
        ) d
        where d.status = 'failed'
        order by d.archived_at desc, d.id desc
        limit 10
    ) l
$sql$;

-- Circuits that aren't closed, the longest open first.
create or replace function ulak_private.report_circuits()
returns jsonb
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select coalesce(jsonb_agg(to_jsonb(c) order by c.opened_at, c.endpoint), '[]')
    from (
        select
            e.name as endpoint,
            ulak_private.receiver_host(e.config) as host,
            e.circuit_state as state,
            e.circuit_failure_count as failures,
            coalesce(e.circuit_broken_since, e.circuit_opened_at) as opened_at,
            case when e.circuit_state = 'open' then e.circuit_half_open_at end as next_probe_at,
            left(e.last_error, 500) as error,
            format('select ulak.reset_circuit_breaker(%L);', e.name) as command
        from ulak.endpoints e
        where e.circuit_state <> 'closed'
        order by opened_at, e.name
        limit 20
    ) c
$sql$;

-- When waiting messages are due: the endpoints with the most, and a column for each span of schedule_of().
create or replace function ulak_private.report_schedule(p_facts ulak_private.endpoint_fact[], p_now timestamptz)
returns jsonb
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select coalesce(jsonb_agg(to_jsonb(g) order by g.messages desc, g.endpoint), '[]')
    from (
        select
            r.endpoint,
            sum(r.messages) as messages,
            min(r.first_at) filter (where r.first_at > p_now) as next_at,
            -- Where one span alone wasn't counted to its end, it is the rest of what is known to wait.
            jsonb_object_agg(r.due, jsonb_build_object(
                'messages', case when r.is_estimate and r.cut = 1 then greatest(r.messages, r.rest) else r.messages end,
                'is_estimate', r.is_estimate,
                'is_rest', r.is_estimate and r.cut = 1 and r.rest >= r.messages
            )) as spans
        from (
            select
                r.*,
                count(*) filter (where r.is_estimate) over w as cut,
                f.waiting - coalesce(sum(r.messages) filter (where not r.is_estimate) over w, 0) as rest
            from ulak_private.schedule_of(
                array(select f.id from unnest(p_facts) f where f.waiting > 0 order by f.waiting desc, f.name limit 12), p_now
            ) r
            left join unnest(p_facts) f on f.name = r.endpoint
            window w as (partition by r.endpoint)
        ) r
        group by r.endpoint
    ) g
$sql$;

-- The newest entries of the log, which holds no payload, no config and no secret. Equal ones in a row become one line.
create or replace function ulak_private.report_events()
returns jsonb
language sql
stable
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
as $sql$
    select coalesce(jsonb_agg(to_jsonb(g) order by g.newest desc), '[]')
    from (
        select
            r.event,
            r.endpoint,
            max(r.id) as newest,
            count(*) as entries,
            max(r.created_at) as at,
            (array_agg(r.actor order by r.id desc))[1] as actor,
            (array_agg(r.message order by r.id desc))[1] as message,
            (array_agg(r.told order by r.id desc))[1] as told
        from (
            select
                l.id,
                l.event,
                l.endpoint_name as endpoint,
                l.message_id as message,
                l.actor,
                l.created_at,
                jsonb_strip_nulls(jsonb_build_object('old', l.old_value, 'new', l.new_value, 'detail', l.detail)) as told,
                row_number() over (order by l.id desc)
                    - row_number() over (partition by l.event, l.endpoint_name order by l.id desc) as run
            from (
                select l.*
                from ulak.event_log l
                order by l.id desc
                limit 500
            ) l
        ) r
        group by r.event, r.endpoint, r.run
        order by newest desc
        limit 20
    ) g
$sql$;
