-- report(): one page of HTML about the last hours, to work from. SQL gathers, Python draws. It is made for ulak_monitor: errors,
-- counts, names and hosts, but no payload, no config and no secret.

create or replace function ulak.report(p_hours integer default 6, p_now timestamptz default clock_timestamp())
returns text
language plpgsql
stable
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
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
set timezone = 'UTC'
as $sql$
    select jsonb_build_object(
        'database', current_database(),
        'version', ulak_private.version(),
        'server', current_setting('server_version'),
        'now', p_now,
        'hours', p_hours,
        'traffic', ulak_private.report_traffic(p_hours, p_now),
        'endpoints', ulak_private.report_endpoints(e.facts, p_now),
        'totals', (select to_jsonb(q) from ulak_private.queue_facts(e.facts) q),
        'findings', (
            select coalesce(jsonb_agg(to_jsonb(d) order by d.place), '[]')
            from ulak_private.doctor(e.facts, p_now) with ordinality d (severity, check_name, finding, fix, place)
        ),
        'dead', ulak_private.report_dead(),
        'letters', ulak_private.report_letters(),
        'circuits', ulak_private.report_circuits(e.facts),
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
$sql$;

-- The worst 50.
create or replace function ulak_private.report_endpoints(p_facts ulak_private.endpoint_fact[], p_now timestamptz)
returns jsonb
language sql
stable
as $sql$
    select coalesce(jsonb_agg(
        to_jsonb(h) - 'fact' || to_jsonb(h.fact) || jsonb_build_object(
            'glyph', ulak_private.state_glyph((h.fact).state),
            'host', ulak_private.receiver_host(e.config)
        )
        order by h.place
    ), '[]')
    from ulak_private.endpoint_health(p_facts, 50, p_now) h
    join ulak.endpoints e on e.id = (h.fact).id
$sql$;

-- Without the scheme. Null for an endpoint that delivers to no host.
create or replace function ulak_private.receiver_host(p_config jsonb)
returns text
language sql
immutable
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
as $sql$
    with span as materialized (
        select s.starts_at, m.minutes, ceil(m.minutes / 60.0)::integer as step
        from (
            select greatest(
                date_trunc('minute', p_now) - make_interval(hours => p_hours) + interval '1 minute',
                least(
                    (select min(t.minute) from ulak.traffic t),
                    (select min(t.minute) from ulak.endpoint_stats t),
                    date_trunc('minute', p_now) - interval '19 minutes'
                )
            )
        ) s (starts_at)
        cross join lateral (select (extract(epoch from date_trunc('minute', p_now) - s.starts_at) / 60)::integer + 1) m (minutes)
    ),
    counted as materialized (
        select
            floor(extract(epoch from k.minute - s.starts_at) / (60 * s.step))::integer as n,
            sum(k.delivered) as delivered,
            sum(k.failed) as failed,
            max(k.waiting) as waiting,
            ulak_private.percentiles(ulak_private.sum_histograms(k.latency_histogram), array[0.50, 0.95], max(k.latency_max_ms)) as percentiles
        from span s
        cross join lateral ulak_private.traffic_between(s.starts_at, p_now) k
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

-- The newest dead letters that wait for a decision, out of the newest 5,000 of any status.
create or replace function ulak_private.newest_letters()
returns table (
    id bigint,
    message bigint,
    endpoint text,
    -- The endpoint's name of today; null once it was dropped.
    receiver text,
    error text,
    attempts integer,
    failed_at timestamptz,
    archived_at timestamptz
)
language sql
stable
as $sql$
    select d.id, d.original_message_id, d.endpoint_name, e.name, d.last_error, d.attempts, d.failed_at, d.archived_at
    from (
        select d.id, d.original_message_id, d.endpoint_id, d.endpoint_name, d.last_error, d.attempts, d.failed_at, d.archived_at, d.status
        from ulak.dlq d
        order by d.archived_at desc
        limit 5000
    ) d
    left join ulak.endpoints e on e.id = d.endpoint_id
    where d.status = 'failed'
$sql$;

-- By endpoint and cause. The pattern in the command matches all of them: each number of the error became a wildcard.
create or replace function ulak_private.report_dead()
returns jsonb
language sql
stable
as $sql$
    select coalesce(jsonb_agg(
        to_jsonb(g) || jsonb_build_object(
            'command',
            -- Null once the endpoint was dropped.
            'select * from ulak.redrive(p_endpoint => ' || quote_literal(g.receiver)
                || coalesce(', p_error_like => ' || quote_literal(g.pattern), '') || ', p_dry_run => true);'
        )
        order by g.letters desc, g.endpoint, g.cause
    ), '[]')
    from (
        select
            d.endpoint,
            c.cause,
            count(*) as letters,
            min(d.failed_at) as first_at,
            max(d.failed_at) as last_at,
            d.receiver,
            replace(regexp_replace(c.cause, E'([\\\\%_])', E'\\\\\\1', 'g'), '#', '%')
                || case when length(c.cause) = 160 then '%' else '' end as pattern
        from ulak_private.newest_letters() d
        cross join lateral (select ulak_private.cause(d.error)) c (cause)
        group by d.endpoint, c.cause, d.receiver
        order by letters desc, d.endpoint, c.cause
        limit 12
    ) g
$sql$;

create or replace function ulak_private.report_letters()
returns jsonb
language sql
stable
as $sql$
    select coalesce(jsonb_agg(to_jsonb(l) order by l.archived_at desc, l.id desc), '[]')
    from (
        select
            d.id,
            d.message,
            d.endpoint,
            left(d.error, 500) as error,
            d.attempts,
            d.failed_at,
            d.archived_at,
            case when d.receiver is not null then format('select ulak.redrive_message(%s);', d.id) end as command
        from ulak_private.newest_letters() d
        order by d.archived_at desc, d.id desc
        limit 10
    ) l
$sql$;

-- Circuits that aren't closed, the longest open first.
create or replace function ulak_private.report_circuits(p_facts ulak_private.endpoint_fact[])
returns jsonb
language sql
stable
as $sql$
    select coalesce(jsonb_agg(to_jsonb(c) order by c.opened_at, c.endpoint), '[]')
    from (
        select
            f.name as endpoint,
            ulak_private.receiver_host(e.config) as host,
            f.circuit_state as state,
            f.circuit_broken_since as opened_at,
            f.next_probe_at,
            left(f.last_error, 500) as error,
            format('select ulak.reset_circuit_breaker(%L);', f.name) as command
        from unnest(p_facts) f
        join ulak.endpoints e on e.id = f.id
        where f.circuit_state <> 'closed'
        order by f.circuit_broken_since, f.name
        limit 20
    ) c
$sql$;

-- When waiting messages are due: the endpoints with the most, and a column for each span of schedule_of().
create or replace function ulak_private.report_schedule(p_facts ulak_private.endpoint_fact[], p_now timestamptz)
returns jsonb
language sql
stable
as $sql$
    select coalesce(jsonb_agg(to_jsonb(g) order by g.messages desc, g.endpoint), '[]')
    from (
        select
            r.endpoint,
            sum(r.messages) as messages,
            min(r.first_at) filter (where r.first_at > p_now) as next_at,
            -- If only one span wasn't counted to its end, it has the rest of the messages that wait.
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
