-- report(): one page of HTML about the last hours. SQL gathers, Python draws.

create or replace function ulak.report(p_hours integer default 6, p_now timestamptz default clock_timestamp())
returns text
language plpgsql
stable
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    p_now := ulak._finite_time(p_now);
    perform ulak._check_integer('p_hours', p_hours, 1, 168);
    return ulak._draw_report(ulak._report_data(p_hours, p_now));
end
$plpgsql$;

comment on function ulak.report(integer, timestamptz) is
    'the last hours as one page of HTML that needs nothing else: psql -Atc ''select ulak.report()'' > report.html';

create or replace function ulak._draw_report(p_data jsonb)
returns text
language plpython3u
set search_path = pg_catalog, pg_temp
as $python$
    plpy.execute("select ulak._load_python()")
    import json
    from ulak.report import page

    return page.render(json.loads(p_data))
$python$;

create or replace function ulak._report_data(p_hours integer, p_now timestamptz)
returns jsonb
language sql
stable
set search_path = pg_catalog, pg_temp
set timezone = 'UTC'
as $sql$
    select jsonb_build_object(
        'database', current_database(),
        'version', (select e.extversion from pg_extension e where e.extname = 'ulak'),
        'server', current_setting('server_version'),
        'now', p_now,
        'hours', p_hours,
        'traffic', ulak._report_traffic(p_hours, p_now),
        'endpoints', h.endpoints,
        'totals', h.totals,
        'findings', (
            select coalesce(jsonb_agg(to_jsonb(d) order by d.place), '[]')
            from ulak._doctor(e.facts, p_now) with ordinality d (severity, check_name, finding, fix, place)
        ),
        'dead', ulak._report_dead(),
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
            where i.inhparent = 'ulak.archive'::regclass
        ),
        'queue_bytes', pg_total_relation_size('ulak.queue')
    )
    from (select array(select f from ulak._endpoint_facts(null, p_now) f) as facts offset 0) e
    cross join lateral (
        -- The worst 50, and what all have together.
        select
            coalesce(jsonb_agg(
                to_jsonb(h) - '{all_waiting,all_estimated,all_due_since,all_dead,all_per_second,endpoints}'::text[] order by h.place
            ), '[]') as endpoints,
            jsonb_build_object(
                'endpoints', coalesce(max(h.endpoints), 0),
                'waiting', coalesce(max(h.all_waiting), 0),
                'is_estimate', coalesce(bool_or(h.all_estimated), false),
                'due_since', max(h.all_due_since),
                'dead', coalesce(max(h.all_dead), 0),
                'per_second', coalesce(max(h.all_per_second), 0)
            ) as totals
        from ulak._endpoint_health(e.facts, null, 50, p_now) h
    ) h
$sql$;

-- All endpoints together, in 60 steps of whole minutes.
create or replace function ulak._report_traffic(p_hours integer, p_now timestamptz)
returns jsonb
language sql
stable
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
as $sql$
    with span as materialized (
        select
            date_trunc('minute', p_now) - make_interval(hours => p_hours) + interval '1 minute' as starts_at,
            make_interval(mins => p_hours) as step,
            ulak._traffic_is_final_before() as final_before
    ),
    counted as materialized (
        select
            floor(extract(epoch from t.minute - s.starts_at) / (60 * p_hours))::integer as n,
            sum(t.delivered) as delivered,
            sum(t.failed) as failed,
            max(t.waiting) as waiting,
            ulak._percentiles(ulak._sum_histograms(t.latency_histogram), array[0.50, 0.95]) as percentiles
        from span s
        cross join lateral (
            select t.minute, t.delivered, t.failed, t.latency_histogram, t.waiting
            from ulak.traffic t
            where t.minute >= s.starts_at and t.minute <= p_now and t.minute < s.final_before
            union all
            select t.minute, t.delivered, t.failed, t.latency_histogram, null
            from ulak._recent_traffic(s.starts_at) t
            where t.minute <= p_now
            union all
            select t.minute, 0, 0, '{}', t.waiting
            from ulak.traffic t
            where t.minute >= s.starts_at and t.minute <= p_now and t.minute >= s.final_before
        ) t
        group by 1
    )
    select jsonb_agg(
        jsonb_build_object(
            'at', s.starts_at + n * s.step,
            'seconds', extract(epoch from least(s.starts_at + (n + 1) * s.step, p_now) - (s.starts_at + n * s.step)),
            'delivered', coalesce(c.delivered, 0),
            'failed', coalesce(c.failed, 0),
            'p50_ms', c.percentiles[1],
            'p95_ms', c.percentiles[2],
            'waiting', c.waiting
        )
        order by n
    )
    from span s
    cross join generate_series(0, 59) n
    left join counted c using (n)
$sql$;

-- The newest dead letters by endpoint and cause; numbers in an error don't make another cause.
create or replace function ulak._report_dead()
returns jsonb
language sql
stable
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $sql$
    select coalesce(jsonb_agg(to_jsonb(g) order by g.letters desc, g.endpoint, g.cause), '[]')
    from (
        select d.endpoint_name as endpoint, c.cause, count(*) as letters, min(d.failed_at) as first_at, max(d.failed_at) as last_at
        from (
            select d.endpoint_name, d.last_error, d.failed_at, d.status
            from ulak.dlq d
            order by d.archived_at desc
            limit 5000
        ) d
        cross join lateral (
            select left(regexp_replace(
                coalesce(d.last_error, 'unknown'), E'[0-9a-f]{8}-[0-9a-f-]{27}|(?<!HTTP )\\m[0-9]+', '#', 'g'
            ), 160)
        ) c (cause)
        where d.status = 'failed'
        group by d.endpoint_name, c.cause
        order by letters desc, d.endpoint_name, c.cause
        limit 12
    ) g
$sql$;
