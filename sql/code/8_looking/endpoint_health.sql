-- How endpoints are doing: backlog, rates, latency and state of each, the worst first.

create or replace function ulak.get_endpoint_health(
    p_name text default null,
    p_now timestamptz default clock_timestamp()
)
returns table (
    endpoint_name text,
    protocol text,
    enabled boolean,
    circuit_state text,
    circuit_failure_count integer,
    last_success_at timestamptz,
    last_failure_at timestamptz,
    pending_messages bigint,
    oldest_pending_message timestamptz,
    pending_is_estimate boolean,
    due_since timestamptz,
    in_flight bigint,
    dead_letters bigint,
    delivered_per_second double precision,
    failed_percent double precision,
    p50_ms double precision,
    p95_ms double precision,
    next_probe_at timestamptz,
    last_error text,
    state text,
    last_hour bigint[]
)
language plpgsql
stable
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
#variable_conflict use_column
declare
    v_endpoint_id bigint := case when p_name is not null then ulak_private.endpoint_id(p_name) end;
begin
    p_now := ulak_private.finite_time(p_now);
    return query
    select
        f.name,
        f.protocol,
        f.enabled,
        f.circuit_state,
        f.circuit_failure_count,
        f.last_success_at,
        f.last_failure_at,
        f.waiting,
        f.oldest_at,
        f.is_estimate,
        f.due_since,
        f.in_flight,
        f.dead,
        f.per_second,
        f.failed_percent,
        h.p50_ms,
        h.p95_ms,
        f.next_probe_at,
        f.last_error,
        f.state,
        h.last_hour
    from ulak_private.endpoint_health(array(select f from ulak_private.endpoint_facts(v_endpoint_id, p_now) f), null, p_now) h
    cross join lateral (select (h.fact).*) f
    order by h.place;
end
$plpgsql$;

comment on function ulak.get_endpoint_health(text, timestamptz) is
    'the health of one endpoint, or of all, the worst first: how many messages wait and since when, rates and latency of the '
    'last minutes, circuit, last error. With more than 1,000 endpoints only the worst 1,000 have last_hour';

-- The worst p_limit of those endpoints (null: all of them) with their latency, and the last hour of the first 1,000: that is 60 rows each.
create or replace function ulak_private.endpoint_health(p_facts ulak_private.endpoint_fact[], p_limit integer, p_now timestamptz)
returns table (
    place bigint,
    fact ulak_private.endpoint_fact,
    p50_ms double precision,
    p95_ms double precision,
    max_ms double precision,
    -- Deliveries in steps of three minutes, and attempts that failed.
    last_hour bigint[],
    last_hour_failed bigint[]
)
language plpgsql
stable
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = on
set enable_nestloop = off
set enable_mergejoin = off
set jit = off
set plan_cache_mode = force_generic_plan
as $plpgsql$
#variable_conflict use_column
begin
    return query
    with shown as materialized (
        select
            f as fact,
            row_number() over (
                order by
                    array_position(
                        array['open', 'half_open', 'late', 'failing', 'disabled', 'sending', 'flowing', 'idle'],
                        case when f.state <> 'disabled' or f.waiting > 0 then f.state end
                    ),
                    f.due_since,
                    f.waiting + f.in_flight desc,
                    f.name
            ) as place
        from unnest(p_facts) f
        order by place
        limit p_limit
    )
    select s.place, s.fact, l.percentiles[1], l.percentiles[2], l.max_ms, h.last_hour, h.last_hour_failed
    from shown s
    cross join lateral ulak_private.recent_latency((s.fact).id, date_trunc('minute', p_now)) l
    left join lateral ulak_private.last_hour(case when s.place <= 1000 then (s.fact).id end, date_trunc('minute', p_now)) h on s.place <= 1000;
end
$plpgsql$;

-- In the last five minutes: one minute says little.
create or replace function ulak_private.recent_latency(p_endpoint_id bigint, p_minute timestamptz)
returns table (percentiles double precision[], max_ms double precision)
language sql
stable
as $sql$
    select ulak_private.percentiles(t.histogram, array[0.50, 0.95], t.max_ms), t.max_ms
    from (
        select ulak_private.sum_histograms(t.latency_histogram) as histogram, max(t.latency_max_ms) as max_ms
        from ulak.endpoint_stats t
        where t.endpoint_id = p_endpoint_id and t.minute > p_minute - interval '5 minutes' and t.minute <= p_minute
    ) t
    offset 0
$sql$;

-- In 20 steps of three minutes: as wide as a sparkline may be.
create or replace function ulak_private.last_hour(p_endpoint_id bigint, p_minute timestamptz)
returns table (last_hour bigint[], last_hour_failed bigint[])
language sql
stable
as $sql$
    select ulak_private.spread(array_agg(t.step), array_agg(t.delivered), 20), ulak_private.spread(array_agg(t.step), array_agg(t.failed), 20)
    from (
        select 20 - date_part('epoch', p_minute - t.minute)::integer / 180 as step, t.delivered, t.failed
        from ulak.endpoint_stats t
        where t.endpoint_id = p_endpoint_id and t.minute > p_minute - interval '1 hour' and t.minute <= p_minute
    ) t
$sql$;

-- An array of p_size sums: p_values[i] is added to element p_places[i].
create or replace function ulak_private.spread(p_places integer[], p_values bigint[], p_size integer)
returns bigint[]
language plpgsql
immutable
as $plpgsql$
declare
    v_spread bigint[] := array_fill(0::bigint, array[p_size]);
begin
    for i in 1..coalesce(cardinality(p_places), 0) loop
        v_spread[p_places[i]] := v_spread[p_places[i]] + p_values[i];
    end loop;
    return v_spread;
end
$plpgsql$;
