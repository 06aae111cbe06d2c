-- Metrics: gauges and counters as rows, and as text for Prometheus.

create or replace function ulak.metrics(
    p_now timestamptz default clock_timestamp(),
    p_active_within interval default null,
    p_limit integer default null
)
returns table (metric_name text, metric_value double precision, labels jsonb, metric_type text)
language sql
stable
security definer
set search_path = pg_catalog, pg_temp
set jit = off
set work_mem = '64MB'
as $sql$
    -- Bucket limits are the same for all histograms, so they are made once. The metrics come in order, and the nested loop of a lateral
    -- join keeps it: sorting them would take as long as making them.
    with bucket as materialized (
        select n, jsonb_build_object('le', ulak_private.bucket_limit(n)) as le
        from generate_series(1, 22) n
    )
    select
        m.name,
        coalesce(m.value, m.buckets[b.n]),
        case when b.n is null then m.labels else m.labels || b.le end,
        m.type
    from ulak_private.metric_values(ulak_private.finite_time(p_now), p_active_within, p_limit) m
    left join lateral (select b.n, b.le from bucket b where m.buckets is not null offset 0) b on true
$sql$;

comment on function ulak.metrics(timestamptz, interval, integer) is
    'gauges and counters as rows: name, value, labels and type; endpoint_circuit_state is 0 closed, 1 half_open, 2 open. '
    'p_active_within leaves out endpoints that have nothing due or in flight and made no attempt for that long; p_limit keeps'
    ' only those with the most messages. Totals count all endpoints';

create or replace function ulak.metrics_text(
    p_now timestamptz default clock_timestamp(),
    p_active_within interval default null,
    p_limit integer default null
)
returns text
language sql
stable
security definer
set search_path = pg_catalog, pg_temp
set enable_sort = off
set jit = off
set work_mem = '64MB'
as $sql$
    -- All lines of one histogram, to be filled in: the label is the first value, the buckets follow.
    with bucket as materialized (
        select string_agg(
            format(E'ulak_delivery_duration_seconds_bucket{%%1$s,le="%s"} %%%s$s\n', ulak_private.bucket_limit(n), n + 1), '' order by n
        ) as template
        from generate_series(1, 22) n
    )
    select string_agg(
        concat(case when d.family is not null then format(E'# HELP ulak_%1$s %2$s\n# TYPE ulak_%1$s %3$s\n', d.family, d.help, d.type) end, m.lines),
        '' order by d.place
    )
    from ulak_private.metric_definitions() d
    join (
        -- A hash keeps the order in which they come; a sort by place would lose it.
        select v.place, string_agg(
            case
                when v.buckets is not null then format(b.template, variadic v.label_text || v.buckets::text[])
                else concat('ulak_', v.name, '{' || v.label_text || '}', ' ', v.value, E'\n')
            end,
            ''
        ) as lines
        from ulak_private.metric_values(ulak_private.finite_time(p_now), p_active_within, p_limit) v
        cross join bucket b
        group by v.place
    ) m on m.place = d.place
$sql$;

comment on function ulak.metrics_text(timestamptz, interval, integer) is
    'metrics() in the text format that Prometheus scrapes, each name with the prefix ulak_';

-- One row per metric and label, in order. A histogram is one row as well: its buckets, each with those below it.
create or replace function ulak_private.metric_values(p_now timestamptz, p_active_within interval, p_limit integer)
returns table (
    place integer,
    name text,
    type text,
    labels jsonb,
    -- The same as Prometheus wants it; null: none.
    label_text text,
    value double precision,
    buckets bigint[]
)
language sql
stable
set enable_hashjoin = on
set enable_mergejoin = off
set enable_sort = on
as $sql$
    with health as materialized (
        select array(select f from ulak_private.endpoint_facts(null, p_now) f) as facts
        from ulak_private.check_integer('p_limit', coalesce(p_limit, 0), 0)
    ),
    told as materialized (
        select m.name, m.value, '{}'::jsonb as labels, null as label_text
        from ulak_private.queue_metrics((select h.facts from health h), p_now) m
        union all
        select m.name, m.value, jsonb_build_object(m.label, m.labelled), format('%s="%s"', m.label, m.labelled)
        from ulak_private.labelled_metrics(p_now) m
    ),
    endpoint as materialized (
        select m.labels, m.label_text, m.numbers, m.buckets
        from ulak_private.endpoint_metrics((select h.facts from health h), p_active_within, p_limit, p_now) m
    )
    select d.place, d.name, d.type, v.labels, v.label_text, v.value, v.buckets
    from (select d.* from ulak_private.metric_definitions() d order by d.place) d
    cross join lateral (
        select t.labels, t.label_text, t.value, null::bigint[] as buckets
        from told t
        where t.name = d.name
        union all
        -- An endpoint that no worker has sent anything to has no counters yet.
        select e.labels, e.label_text, e.numbers[d.element], case when d.element = 0 then e.buckets end
        from endpoint e
        where d.element is not null and case when d.element = 0 then e.buckets is not null else e.numbers[d.element] is not null end
    ) v
$sql$;

create or replace function ulak_private.queue_metrics(p_facts ulak_private.endpoint_fact[], p_now timestamptz)
returns table (name text, value double precision)
language sql
stable
as $sql$
    select v.name, v.value::double precision
    from ulak_private.queue_facts(p_facts) q
    cross join lateral (
        values
            ('queue_depth', q.waiting + q.in_flight),
            ('oldest_message_age_seconds', coalesce(extract(epoch from p_now - q.oldest_at), 0)),
            ('delivery_delay_seconds', coalesce(extract(epoch from p_now - q.due_since), 0)),
            ('dlq_depth', q.dead),
            ('queue_limit', ulak.setting('max_queue_size')::numeric),
            ('message_ids_total', (select s.last_value from ulak.queue_id_seq s)),
            ('messages_cancelled_total', coalesce(pg_sequence_last_value('ulak_private.messages_cancelled'), 0)),
            ('workers_alive', ulak_private.count_alive(p_now)),
            ('cluster_adopted', ulak_private.is_adopted()::integer),
            ('archive_partitions_missing', (select count(*) from ulak_private.check_partitions(p_now))),
            ('queue_live_rows', pg_stat_get_live_tuples('ulak_private.deliveries'::regclass)),
            ('queue_dead_rows', pg_stat_get_dead_tuples('ulak_private.deliveries'::regclass))
    ) v (name, value)
$sql$;

-- Of each worker, and of each step of maintenance.
create or replace function ulak_private.labelled_metrics(p_now timestamptz)
returns table (name text, value double precision, label text, labelled text)
language sql
stable
as $sql$
    select v.name, v.value::double precision, 'slot', w.slot::text
    from (select w.* from ulak.workers w order by w.slot) w
    cross join lateral (
        values
            ('worker_in_flight', w.in_flight),
            ('worker_messages_total', w.messages_processed),
            ('worker_errors_total', w.error_count),
            ('worker_heartbeat_age_seconds', greatest(extract(epoch from p_now - w.heartbeat_at), 0))
    ) v (name, value)
    union all
    select v.name, v.value::double precision, 'step', r.step
    from (select r.* from ulak_private.maintenance_runs r order by r.step) r
    cross join lateral (
        values
            ('maintenance_age_seconds', greatest(extract(epoch from p_now - r.started_at), 0)),
            ('maintenance_duration_seconds', extract(epoch from r.duration)),
            ('maintenance_errors_total', r.errors),
            ('maintenance_rows_total', r.total_rows)
    ) v (name, value)
$sql$;

-- Each endpoint once, with the numbers of all its metrics: metric_definitions() says which is which.
create or replace function ulak_private.endpoint_metrics(
    p_facts ulak_private.endpoint_fact[],
    p_active_within interval,
    p_limit integer,
    p_now timestamptz
)
returns table (labels jsonb, label_text text, buckets bigint[], numbers double precision[])
language sql
stable
set enable_seqscan = off
as $sql$
    select
        h.labels,
        h.label_text,
        h.buckets,
        array[
            h.waiting + h.in_flight,
            h.in_flight,
            h.dead,
            coalesce(date_part('epoch', p_now - h.due_since), 0),
            case h.circuit_state when 'closed' then 0 when 'half_open' then 1 else 2 end,
            h.circuit_failure_count,
            h.enabled::integer,
            h.delivered,
            h.failed,
            h.latency_total_ms / 1000,
            case when h.buckets is not null then coalesce(h.buckets[cardinality(h.buckets)], 0) end,
            (select count(distinct d.ordering_key) from ulak_private.letters d where d.is_holding and d.endpoint_id = h.id)
        ]::double precision[] as numbers
    from (
        select
            h.*,
            jsonb_build_object('endpoint', h.name) as labels,
            'endpoint="' || replace(replace(replace(h.name, E'\\', E'\\\\'), '"', E'\\"'), E'\n', E'\\n') || '"' as label_text,
            t.delivered,
            t.failed,
            t.latency_total_ms,
            ulak_private.running_sums(t.latency_histogram) as buckets
        from (
            select h.*
            from unnest(p_facts) h
            where p_active_within is null
                or h.in_flight > 0
                or h.due_since is not null
                or greatest(h.last_success_at, h.last_failure_at) >= p_now - p_active_within
            order by h.waiting + h.in_flight + h.dead desc, greatest(h.last_success_at, h.last_failure_at) desc nulls last, h.name
            limit p_limit
        ) h
        left join ulak.endpoint_totals t on t.endpoint_id = h.id
        order by h.name
        offset 0
    ) h
$sql$;

-- A bucket of Prometheus counts everything below its limit, and there are always 22, however many were stored.
create or replace function ulak_private.running_sums(p_histogram bigint[])
returns bigint[]
language plpgsql
immutable
as $plpgsql$
declare
    v_sums bigint[] := '{}';
    v_sum bigint := 0;
begin
    if p_histogram is null then
        return null;
    end if;
    for i in 1..22 loop
        -- Four elements, which end where the bucket does; all the rest is in the last bucket.
        v_sum := v_sum
            + coalesce(p_histogram[4 * i - 6], 0)
            + coalesce(p_histogram[4 * i - 5], 0)
            + coalesce(p_histogram[4 * i - 4], 0)
            + coalesce(p_histogram[4 * i - 3], 0)
            + case when i = 22 then coalesce(p_histogram[86], 0) else 0 end;
        v_sums[i] := v_sum;
    end loop;
    return v_sums;
end
$plpgsql$;

-- In seconds; the last of the 22 has none.
create or replace function ulak_private.bucket_limit(p_bucket integer)
returns text
language sql
immutable
as $sql$
    select case when p_bucket = 22 then '+Inf' else (2 ^ (p_bucket - 1) / 1000)::text end
$sql$;

-- In the order of the output.
create or replace function ulak_private.metric_definitions()
returns table (
    place integer,
    name text,
    type text,
    help text,
    -- Its name in Prometheus. A histogram's three series are one family, and the first of them names it.
    family text,
    -- Of metrics per endpoint: which of the numbers of endpoint_metrics() it is; 0: the buckets.
    element integer
)
language sql
immutable
as $sql$
    select
        d.place,
        d.name,
        d.type,
        d.help,
        case when d.type <> 'histogram' then d.name else substring(d.name from '^(.*)_bucket$') end,
        d.element
    from (values
        (1, 'queue_depth', 'gauge', 'messages that wait or are in flight', null::integer),
        (2, 'queue_limit', 'gauge', 'setting max_queue_size; 0 is no limit', null),
        (3, 'oldest_message_age_seconds', 'gauge', 'age of the oldest message that waits', null),
        (4, 'delivery_delay_seconds', 'gauge', 'how long the oldest message that is due has waited', null),
        (5, 'dlq_depth', 'gauge', 'dead letters that nobody has redriven or discarded', null),
        (6, 'message_ids_total', 'counter', 'ids given to messages, including those of rolled-back transactions', null),
        (7, 'queue_depth_by_endpoint', 'gauge', 'messages that wait or are in flight, per endpoint', 1),
        (8, 'in_flight_by_endpoint', 'gauge', 'messages that a worker holds, per endpoint', 2),
        (9, 'dlq_depth_by_endpoint', 'gauge', 'dead letters that nobody has redriven or discarded, per endpoint', 3),
        (10, 'delivery_delay_by_endpoint_seconds', 'gauge', 'how long the oldest message that is due has waited, per endpoint', 4),
        (11, 'endpoint_circuit_state', 'gauge', '0 closed, 1 half_open, 2 open', 5),
        (12, 'endpoint_circuit_failures', 'gauge', 'consecutive failures that the circuit breaker has counted', 6),
        (13, 'endpoint_enabled', 'gauge', '1 enabled, 0 disabled', 7),
        (14, 'delivered_total', 'counter', 'messages delivered by workers', 8),
        (15, 'failed_attempts_total', 'counter', 'attempts of workers that failed', 9),
        (16, 'delivery_duration_seconds_bucket', 'histogram', 'time of requests', 0),
        (17, 'delivery_duration_seconds_sum', 'histogram', 'time of requests', 10),
        (18, 'delivery_duration_seconds_count', 'histogram', 'time of requests', 11),
        (19, 'workers_alive', 'gauge', 'workers with a sign of life in the last 15 seconds', null),
        (20, 'worker_in_flight', 'gauge', 'messages that a worker holds, per slot', null),
        (21, 'worker_messages_total', 'counter', 'messages settled, per slot', null),
        (22, 'worker_errors_total', 'counter', 'failed deliveries, per slot', null),
        (23, 'worker_heartbeat_age_seconds', 'gauge', 'time since the last sign of life, per slot', null),
        (24, 'maintenance_age_seconds', 'gauge', 'time since the last run, per step', null),
        (25, 'maintenance_duration_seconds', 'gauge', 'duration of the last run, per step', null),
        (26, 'maintenance_errors_total', 'counter', 'errors, per step', null),
        (27, 'maintenance_rows_total', 'counter', 'rows changed, per step', null),
        (28, 'archive_partitions_missing', 'gauge', 'problems with partitions of the archive', null),
        (29, 'queue_live_rows', 'gauge', 'rows of ulak.queue, as the statistics system knows them', null),
        (30, 'queue_dead_rows', 'gauge', 'dead rows of ulak.queue, as the statistics system knows them', null),
        (31, 'cluster_adopted', 'gauge', '1: this cluster delivers; 0: restored messages are held until ulak.adopt()', null),
        (32, 'messages_cancelled_total', 'counter', 'messages cancelled or purged, including those of rolled-back transactions', null),
        (33, 'ordering_keys_held', 'gauge', 'ordering keys that a dead letter holds ("on_dead": "hold"), per endpoint', 12)
    ) d (place, name, type, help, element)
$sql$;
