-- Metrics: gauges and counters as rows, and as text for Prometheus.

create or replace function ulak.metrics(p_now timestamptz default clock_timestamp())
returns table (metric_name text, metric_value double precision, labels jsonb, metric_type text)
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
        select f.*, jsonb_build_object('endpoint', f.name) as labels
        from ulak._endpoint_facts(null, p_now) f
    )
    select m.name, m.value::double precision, m.labels, d.type
    from (
        select v.name, v.value, '{}'::jsonb as labels
        from (
            select
                coalesce(sum(h.waiting), 0) as waiting,
                coalesce(sum(h.in_flight), 0) as in_flight,
                coalesce(sum(h.dead), 0) as dead,
                coalesce(extract(epoch from p_now - min(h.oldest_at)), 0) as age,
                coalesce(extract(epoch from p_now - min(h.due_since)), 0) as delay
            from health h
        ) q
        cross join lateral (
            values
                ('queue_depth', q.waiting + q.in_flight),
                ('oldest_message_age_seconds', q.age),
                ('delivery_delay_seconds', q.delay),
                ('dlq_depth', q.dead),
                ('queue_limit', ulak.setting('max_queue_size')::numeric),
                ('message_ids_total', (select s.last_value from ulak.queue_id_seq s)),
                ('workers_alive', ulak._count_alive(p_now)),
                ('cluster_adopted', ulak._is_adopted()::integer),
                ('archive_partitions_missing', (select count(*) from ulak._check_partitions(p_now))),
                ('queue_live_rows', pg_stat_get_live_tuples('ulak.queue'::regclass)),
                ('queue_dead_rows', pg_stat_get_dead_tuples('ulak.queue'::regclass))
        ) v (name, value)
        union all
        select v.name, v.value, h.labels
        from health h
        cross join lateral (
            values
                ('queue_depth_by_endpoint', h.waiting + h.in_flight),
                ('in_flight_by_endpoint', h.in_flight),
                ('dlq_depth_by_endpoint', h.dead),
                ('delivery_delay_by_endpoint_seconds', coalesce(extract(epoch from p_now - h.due_since), 0)),
                ('endpoint_circuit_state', case h.circuit_state when 'closed' then 0 when 'half_open' then 1 else 2 end),
                ('endpoint_circuit_failures', h.circuit_failure_count),
                ('endpoint_enabled', h.enabled::integer)
        ) v (name, value)
        union all
        select v.name, v.value, jsonb_build_object('slot', w.slot::text)
        from ulak.workers w
        cross join lateral (
            values
                ('worker_in_flight', w.in_flight),
                ('worker_messages_total', w.messages_processed),
                ('worker_errors_total', w.error_count),
                ('worker_heartbeat_age_seconds', greatest(extract(epoch from p_now - w.heartbeat_at), 0))
        ) v (name, value)
        union all
        select v.name, v.value, jsonb_build_object('step', r.step)
        from ulak.maintenance_runs r
        cross join lateral (
            values
                ('maintenance_age_seconds', greatest(extract(epoch from p_now - r.started_at), 0)),
                ('maintenance_duration_seconds', extract(epoch from r.duration)),
                ('maintenance_errors_total', r.errors),
                ('maintenance_rows_total', r.total_rows)
        ) v (name, value)
        union all
        select t.name, t.value::numeric, t.labels
        from ulak._delivery_metrics() t
    ) m
    join ulak._metric_definitions() d on d.name = m.name
    order by d.place, m.labels ->> 'endpoint', m.labels ->> 'slot', m.labels ->> 'step', (m.labels ->> 'le')::double precision;
end
$plpgsql$;

comment on function ulak.metrics(timestamptz) is
    'gauges and counters as rows: name, value, labels and type; endpoint_circuit_state is 0 closed, 1 half_open, 2 open';

-- Counters of deliveries, and their latency as a cumulative histogram in seconds.
create or replace function ulak._delivery_metrics()
returns table (name text, value double precision, labels jsonb)
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    with total as materialized (
        select t.*, jsonb_build_object('endpoint', e.name) as labels
        from ulak.endpoints e
        join ulak.endpoint_totals t on t.endpoint_id = e.id
    )
    select v.name, v.value, t.labels
    from total t
    cross join lateral (
        values
            ('delivered_total', t.delivered::double precision),
            ('failed_attempts_total', t.failed),
            ('delivery_duration_seconds_sum', t.latency_total_ms / 1000),
            ('delivery_duration_seconds_count', (select coalesce(sum(h), 0) from unnest(t.latency_histogram) h))
    ) v (name, value)
    union all
    select
        'delivery_duration_seconds_bucket',
        sum(h.requests) over (partition by t.endpoint_id order by h.bucket),
        t.labels || jsonb_build_object(
            'le', case when h.bucket = cardinality(t.latency_histogram) then '+Inf' else (2 ^ (h.bucket - 1) / 1000)::text end
        )
    from total t
    cross join lateral unnest(t.latency_histogram) with ordinality h (requests, bucket)
$sql$;

-- In the order in which they are told. A histogram's three series share a definition in Prometheus.
create or replace function ulak._metric_definitions()
returns table (place integer, name text, type text, help text)
language sql
immutable
set search_path = pg_catalog, pg_temp
as $sql$
    values
        (1, 'queue_depth', 'gauge', 'messages that wait or are in flight'),
        (2, 'queue_limit', 'gauge', 'setting max_queue_size; 0 is no limit'),
        (3, 'oldest_message_age_seconds', 'gauge', 'age of the oldest message that waits'),
        (4, 'delivery_delay_seconds', 'gauge', 'how long the oldest message that is due has waited'),
        (5, 'dlq_depth', 'gauge', 'dead letters that nobody has redriven'),
        (6, 'message_ids_total', 'counter', 'ids given to messages, those of rolled back transactions included'),
        (7, 'queue_depth_by_endpoint', 'gauge', 'messages that wait or are in flight, per endpoint'),
        (8, 'in_flight_by_endpoint', 'gauge', 'messages that a worker holds, per endpoint'),
        (9, 'dlq_depth_by_endpoint', 'gauge', 'dead letters that nobody has redriven, per endpoint'),
        (10, 'delivery_delay_by_endpoint_seconds', 'gauge', 'how long the oldest message that is due has waited, per endpoint'),
        (11, 'endpoint_circuit_state', 'gauge', '0 closed, 1 half_open, 2 open'),
        (12, 'endpoint_circuit_failures', 'gauge', 'consecutive failures that the circuit breaker has counted'),
        (13, 'endpoint_enabled', 'gauge', '1 enabled, 0 disabled'),
        (14, 'delivered_total', 'counter', 'messages delivered by workers'),
        (15, 'failed_attempts_total', 'counter', 'attempts of workers that failed'),
        (16, 'delivery_duration_seconds_bucket', 'histogram', 'time of requests'),
        (17, 'delivery_duration_seconds_sum', 'histogram', 'time of requests'),
        (18, 'delivery_duration_seconds_count', 'histogram', 'time of requests'),
        (19, 'workers_alive', 'gauge', 'workers with a sign of life in the last 15 seconds'),
        (20, 'worker_in_flight', 'gauge', 'messages that a worker holds, per slot'),
        (21, 'worker_messages_total', 'counter', 'messages settled, per slot'),
        (22, 'worker_errors_total', 'counter', 'failed deliveries, per slot'),
        (23, 'worker_heartbeat_age_seconds', 'gauge', 'time since the last sign of life, per slot'),
        (24, 'maintenance_age_seconds', 'gauge', 'time since the last run, per step'),
        (25, 'maintenance_duration_seconds', 'gauge', 'duration of the last run, per step'),
        (26, 'maintenance_errors_total', 'counter', 'errors, per step'),
        (27, 'maintenance_rows_total', 'counter', 'rows changed, per step'),
        (28, 'archive_partitions_missing', 'gauge', 'problems with partitions of the archive'),
        (29, 'queue_live_rows', 'gauge', 'rows of ulak.queue, as the statistics system knows them'),
        (30, 'queue_dead_rows', 'gauge', 'dead rows of ulak.queue, as the statistics system knows them'),
        (31, 'cluster_adopted', 'gauge', '1: this cluster delivers; 0: restored messages are held until ulak.adopt()')
$sql$;

create or replace function ulak.metrics_text(p_now timestamptz default clock_timestamp())
returns text
language sql
stable
security definer
set search_path = pg_catalog, pg_temp
as $sql$
    select string_agg(f.lines, '' order by f.place)
    from (
        select
            min(d.place) as place,
            format(E'# HELP ulak_%1$s %2$s\n# TYPE ulak_%1$s %3$s\n', s.family, min(d.help), min(d.type))
                || string_agg(
                    format(E'ulak_%s%s %s\n', m.metric_name, l.labels, m.metric_value),
                    ''
                    order by m.place
                ) as lines
        from ulak.metrics(p_now) with ordinality m (metric_name, metric_value, labels, metric_type, place)
        join ulak._metric_definitions() d on d.name = m.metric_name
        cross join lateral (
            select case d.type when 'histogram' then regexp_replace(d.name, '_(bucket|sum|count)$', '') else d.name end
        ) s (family)
        cross join lateral (
            select '{' || string_agg(
                format('%s="%s"', l.key, replace(replace(replace(l.value, E'\\', E'\\\\'), '"', E'\\"'), E'\n', E'\\n')),
                ','
                order by l.key
            ) || '}'
            from jsonb_each_text(m.labels) l
        ) l (labels)
        group by s.family
    ) f
$sql$;

comment on function ulak.metrics_text(timestamptz) is
    'metrics() in the text format that Prometheus scrapes, each name with the prefix ulak_';
