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
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
set plan_cache_mode = force_generic_plan
as $plpgsql$
#variable_conflict use_column
declare
    v_endpoint_id bigint;
    v_from timestamptz;
begin
    p_now := ulak._finite_time(p_now);
    v_from := date_trunc('minute', p_now) - interval '59 minutes';
    if p_name is not null then
        select e.id into v_endpoint_id
        from ulak.endpoints e
        where e.name = p_name;
        if not found then
            perform ulak._raise_unknown_endpoint(p_name);
        end if;
    end if;
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
        f.p50_ms,
        f.p95_ms,
        case when f.circuit_state = 'open' then f.circuit_half_open_at end,
        f.last_error,
        f.state,
        h.delivered
    from ulak._endpoint_facts(v_endpoint_id, p_now) f
    -- Three minutes each: as wide as a sparkline may be.
    cross join lateral (
        select array_agg(coalesce(d.delivered, 0) order by n) as delivered
        from generate_series(0, 19) n
        left join (
            select floor(extract(epoch from t.minute - v_from) / 180)::integer as n, sum(t.delivered)::bigint as delivered
            from ulak.endpoint_stats t
            where t.endpoint_id = f.id and t.minute >= v_from and t.minute <= p_now
            group by 1
        ) d using (n)
    ) h
    order by ulak._pain(f.state, f.waiting) desc, f.due_since nulls last, f.waiting desc, f.name;
end
$plpgsql$;

comment on function ulak.get_endpoint_health(text, timestamptz) is
    'how one endpoint, or each, is doing: what waits and since when, rates and latency of the last minutes, circuit, last error; '
    'the worst first';

-- What all the others look at.
create or replace function ulak._endpoint_facts(p_endpoint_id bigint, p_now timestamptz)
returns table (
    id bigint,
    name text,
    protocol text,
    enabled boolean,
    circuit_state text,
    circuit_failure_count integer,
    circuit_half_open_at timestamptz,
    created_at timestamptz,
    last_success_at timestamptz,
    last_failure_at timestamptz,
    last_error text,
    waiting bigint,
    is_estimate boolean,
    oldest_at timestamptz,
    due_since timestamptz,
    in_flight bigint,
    dead bigint,
    per_second double precision,
    failed_percent double precision,
    p50_ms double precision,
    p95_ms double precision,
    state text
)
language plpgsql
stable
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
set plan_cache_mode = force_generic_plan
as $plpgsql$
#variable_conflict use_column
begin
    return query
    select
        e.id,
        e.name,
        e.protocol,
        e.enabled,
        e.circuit_state,
        e.circuit_failure_count,
        e.circuit_half_open_at,
        e.created_at,
        e.last_success_at,
        e.last_failure_at,
        e.last_error,
        b.waiting,
        b.is_estimate,
        b.oldest_at,
        b.due_since,
        b.in_flight,
        b.dead,
        r.per_second,
        r.failed_percent,
        ulak._percentile(r.histogram, 0.50),
        ulak._percentile(r.histogram, 0.95),
        ulak._endpoint_state(e.enabled, e.circuit_state, b.due_since, r.failed_percent, r.per_second, p_now)
    from ulak._backlog(p_endpoint_id, p_now) b
    join ulak.endpoints e on e.id = b.endpoint_id
    cross join lateral ulak._recent_rates(e.id, p_now) r;
end
$plpgsql$;

-- A sliding minute out of two counted ones. Failures and latency over five minutes: one minute of them says little.
create or replace function ulak._recent_rates(
    p_endpoint_id bigint,
    p_now timestamptz,
    out per_second double precision,
    out failed_percent double precision,
    out histogram bigint[]
)
language sql
stable
as $sql$
    select
        case
            when coalesce(sum(t.delivered) filter (where t.minute < c.minute and t.minute >= c.minute - interval '1 minute'), 0) = 0
                then coalesce(sum(t.delivered) filter (where t.minute = c.minute), 0) / greatest(c.seconds, 10)
            else (
                sum(t.delivered) filter (where t.minute < c.minute and t.minute >= c.minute - interval '1 minute')
                    * (60 - c.seconds) / 60
                + coalesce(sum(t.delivered) filter (where t.minute = c.minute), 0)
            ) / 60
        end,
        100.0 * sum(t.failed) / nullif(sum(t.failed) + sum(t.delivered), 0),
        array[
            sum(t.latency_histogram[1]), sum(t.latency_histogram[2]), sum(t.latency_histogram[3]),
            sum(t.latency_histogram[4]), sum(t.latency_histogram[5]), sum(t.latency_histogram[6]),
            sum(t.latency_histogram[7]), sum(t.latency_histogram[8]), sum(t.latency_histogram[9]),
            sum(t.latency_histogram[10]), sum(t.latency_histogram[11]), sum(t.latency_histogram[12]),
            sum(t.latency_histogram[13]), sum(t.latency_histogram[14]), sum(t.latency_histogram[15]),
            sum(t.latency_histogram[16]), sum(t.latency_histogram[17]), sum(t.latency_histogram[18]),
            sum(t.latency_histogram[19]), sum(t.latency_histogram[20]), sum(t.latency_histogram[21]),
            sum(t.latency_histogram[22])
        ]::bigint[]
    from (
        select date_trunc('minute', p_now) as minute, extract(second from p_now)::double precision as seconds
    ) c
    left join ulak.endpoint_stats t
        on t.endpoint_id = p_endpoint_id and t.minute > c.minute - interval '5 minutes' and t.minute <= c.minute
    group by c.minute, c.seconds
$sql$;

-- Element 1 counts what took less than 1 ms, element i what took from 2^(i-2) to 2^(i-1) ms. Within an element the times
-- are taken to be spread evenly.
create or replace function ulak._percentile(p_histogram bigint[], p_fraction double precision)
returns double precision
language plpgsql
immutable
as $plpgsql$
declare
    v_count bigint;
    v_all bigint := 0;
    v_wanted double precision;
    v_below bigint := 0;
    v_from double precision;
begin
    foreach v_count in array coalesce(p_histogram, '{}') loop
        v_all := v_all + coalesce(v_count, 0);
    end loop;
    if v_all = 0 then
        return null;
    end if;
    v_wanted := p_fraction * v_all;
    for i in 1..cardinality(p_histogram) loop
        if p_histogram[i] > 0 and v_below + p_histogram[i] >= v_wanted then
            v_from := case when i = 1 then 0 else 2.0 ^ (i - 2) end;
            return v_from + (2.0 ^ (i - 1) - v_from) * (v_wanted - v_below) / p_histogram[i];
        end if;
        v_below := v_below + coalesce(p_histogram[i], 0);
    end loop;
end
$plpgsql$;

-- One word for an endpoint. Late: a message that is due has waited for more than a minute.
create or replace function ulak._endpoint_state(
    p_enabled boolean,
    p_circuit_state text,
    p_due_since timestamptz,
    p_failed_percent double precision,
    p_per_second double precision,
    p_now timestamptz
)
returns text
language sql
immutable
as $sql$
    select case
        when not p_enabled then 'disabled'
        when p_circuit_state <> 'closed' then p_circuit_state
        when p_due_since < p_now - interval '1 minute' then 'late'
        when p_failed_percent >= 5 then 'failing'
        when p_per_second > 0 then 'flowing'
        else 'idle'
    end
$sql$;

create or replace function ulak._pain(p_state text, p_waiting bigint)
returns integer
language sql
immutable
set search_path = pg_catalog, pg_temp
as $sql$
    select case p_state
        when 'open' then 7
        when 'half_open' then 6
        when 'late' then 5
        when 'failing' then 4
        when 'disabled' then case when p_waiting > 0 then 3 else 0 end
        when 'flowing' then 2
        else 1
    end
$sql$;
