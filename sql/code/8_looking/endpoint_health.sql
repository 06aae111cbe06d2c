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
    v_endpoint_id bigint;
begin
    p_now := ulak_private.finite_time(p_now);
    if p_name is not null then
        select e.id into v_endpoint_id
        from ulak.endpoints e
        where e.name = p_name;
        if not found then
            perform ulak_private.raise_unknown_endpoint(p_name);
        end if;
    end if;
    return query
    select
        h.name,
        h.protocol,
        h.enabled,
        h.circuit_state,
        h.circuit_failure_count,
        h.last_success_at,
        h.last_failure_at,
        h.waiting,
        h.oldest_at,
        h.is_estimate,
        h.due_since,
        h.in_flight,
        h.dead,
        h.per_second,
        h.failed_percent,
        h.p50_ms,
        h.p95_ms,
        h.next_probe_at,
        h.last_error,
        h.state,
        h.last_hour
    from ulak_private.endpoint_health(array(select f from ulak_private.endpoint_facts(v_endpoint_id, p_now) f), v_endpoint_id, null, p_now) h
    order by h.place;
end
$plpgsql$;

comment on function ulak.get_endpoint_health(text, timestamptz) is
    'the health of one endpoint, or of all, the worst first: how many messages wait and since when, rates and latency of the '
    'last minutes, circuit, last error. With more than 1,000 endpoints only the worst 1,000 have last_hour';

-- The worst p_limit of those endpoints (null: all of them) with their latency, and the last hour of the first 1,000, since it is 60 rows each.
-- If p_facts are those of one endpoint, p_endpoint_id says so.
create or replace function ulak_private.endpoint_health(
    p_facts ulak_private.endpoint_fact[],
    p_endpoint_id bigint,
    p_limit integer,
    p_now timestamptz
)
returns table (
    place bigint,
    name text,
    protocol text,
    enabled boolean,
    circuit_state text,
    circuit_failure_count integer,
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
    next_probe_at timestamptz,
    state text,
    last_hour bigint[],
    -- Attempts that failed, in the same steps as last_hour, which counts deliveries.
    last_hour_failed bigint[],
    max_ms double precision,
    dead_is_estimate boolean,
    waiting_since timestamptz,
    sampled_at timestamptz,
    -- All endpoints together, the same in each row.
    all_waiting numeric,
    all_estimated boolean,
    all_due_since timestamptz,
    all_dead numeric,
    all_per_second double precision,
    endpoints bigint
)
language plpgsql
stable
set search_path = pg_catalog, pg_temp
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
            row_number() over (
                order by
                    ulak_private.pain(f.state, (f.fact).waiting) desc,
                    (f.fact).due_since nulls last,
                    (f.fact).waiting + (f.fact).in_flight desc,
                    (f.fact).name
            ) as place,
            f.per_second,
            f.failed_percent,
            f.state,
            (f.fact).*,
            sum((f.fact).waiting) over w as all_waiting,
            bool_or((f.fact).is_estimate) over w as all_estimated,
            min((f.fact).due_since) over w as all_due_since,
            sum((f.fact).dead) over w as all_dead,
            sum(f.per_second) over w as all_per_second,
            count(*) over w as endpoints
        from ulak_private.endpoint_states(p_facts, p_endpoint_id, p_now) f
        window w as ()
        order by place
        limit p_limit
    )
    select
        f.place,
        f.name,
        f.protocol,
        f.enabled,
        f.circuit_state,
        f.circuit_failure_count,
        f.last_success_at,
        f.last_failure_at,
        f.last_error,
        f.waiting,
        f.is_estimate,
        f.oldest_at,
        f.due_since,
        f.in_flight,
        f.dead,
        f.per_second,
        f.failed_percent,
        l.percentiles[1],
        l.percentiles[2],
        case when f.circuit_state = 'open' then f.circuit_half_open_at end,
        f.state,
        h.last_hour,
        h.last_hour_failed,
        l.max_ms,
        f.dead_is_estimate,
        f.waiting_since,
        f.sampled_at,
        f.all_waiting,
        f.all_estimated,
        f.all_due_since,
        f.all_dead,
        f.all_per_second,
        f.endpoints
    from shown f
    cross join lateral ulak_private.recent_latency(f.id, date_trunc('minute', p_now)) l
    left join lateral ulak_private.last_hour(case when f.place <= 1000 then f.id end, date_trunc('minute', p_now)) h on f.place <= 1000;
end
$plpgsql$;

-- Each of those endpoints in one word, with the rates that it follows from. This and the next two functions have no SET clause, so that
-- they become part of the query that asks them for each endpoint.
create or replace function ulak_private.endpoint_states(p_facts ulak_private.endpoint_fact[], p_endpoint_id bigint, p_now timestamptz)
returns table (fact ulak_private.endpoint_fact, per_second double precision, failed_percent double precision, state text)
language sql
stable
as $sql$
    select
        f,
        coalesce(r.per_second, 0),
        r.failed_percent,
        ulak_private.endpoint_state(
            f.enabled,
            f.circuit_state,
            f.due_since,
            r.failed_percent,
            coalesce(f.last_success_at > f.last_failure_at + interval '10 seconds' or r.last_failed_percent < 5, false),
            r.per_second,
            f.in_flight,
            p_now
        )
    from unnest(p_facts) f
    left join ulak_private.recent_rates(p_endpoint_id, p_now) r on r.endpoint_id = f.id
    -- So that a state is found once for all that follows from it; the same of percentiles.
    offset 0
$sql$;

-- Of five minutes: one minute of it says little.
create or replace function ulak_private.recent_latency(p_endpoint_id bigint, p_minute timestamptz)
returns table (percentiles double precision[], max_ms double precision)
language sql
stable
as $sql$
    select ulak_private.percentiles(t.histogram, array[0.50, 0.95], t.max_ms), t.max_ms
    from (
        select
            ulak_private.sum_histograms(t.latency_histogram) as histogram,
            -- Minutes that were counted by 0.1.0 don't know their longest.
            case when bool_and(t.latency_max_ms is not null) then max(t.latency_max_ms) end as max_ms
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

-- The facts that all other looks are built on.
create or replace function ulak_private.endpoint_facts(p_endpoint_id bigint, p_now timestamptz)
returns setof ulak_private.endpoint_fact
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
        b.dead_is_estimate,
        b.waiting_since,
        b.sampled_at,
        b.dead_sampled_at,
        case when e.circuit_state <> 'closed' then coalesce(e.circuit_broken_since, e.circuit_opened_at) end,
        e.max_pending
    from ulak_private.backlog(p_endpoint_id, p_now) b
    join ulak.endpoints e on e.id = b.endpoint_id;
end
$plpgsql$;

-- Deliveries per second, and the failed among the attempts of five minutes: one minute of them says little. Planned anew each time:
-- one endpoint is found by its key, all of them by the minute.
create or replace function ulak_private.recent_rates(p_endpoint_id bigint, p_now timestamptz)
returns table (
    endpoint_id bigint,
    per_second double precision,
    failed_percent double precision,
    -- The same of the last minute that has any attempts: how it is now, and not how it was.
    last_failed_percent double precision,
    failed bigint
)
language plpgsql
stable
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
set plan_cache_mode = force_custom_plan
as $plpgsql$
#variable_conflict use_column
declare
    v_minute timestamptz := date_trunc('minute', p_now);
    v_seconds double precision := extract(second from p_now);
begin
    return query
    select
        t.endpoint_id,
        ulak_private.per_second(
            sum(t.delivered::double precision) filter (where t.minute = v_minute - interval '1 minute'),
            sum(t.delivered::double precision) filter (where t.minute = v_minute),
            v_seconds
        ),
        100 * sum(t.failed::double precision) / nullif(sum((t.failed + t.delivered)::double precision), 0),
        (array_agg(100 * t.failed::double precision / (t.failed + t.delivered) order by t.minute desc)
            filter (where t.failed + t.delivered > 0))[1],
        sum(t.failed)::bigint
    from ulak.endpoint_stats t
    where t.minute > v_minute - interval '5 minutes'
        and t.minute <= v_minute
        and (p_endpoint_id is null or t.endpoint_id = p_endpoint_id)
    group by t.endpoint_id;
end
$plpgsql$;

-- A sliding minute out of two counted ones: the last whole one, and the one of which p_seconds have passed. Traffic that has just
-- begun isn't averaged with the silence before it.
create or replace function ulak_private.per_second(
    p_before double precision,
    p_current double precision,
    p_seconds double precision
)
returns double precision
language sql
immutable
as $sql$
    select case
        when coalesce(p_before, 0) = 0 then coalesce(p_current, 0) / greatest(p_seconds, 10)
        else (p_before * (60 - p_seconds) / 60 + coalesce(p_current, 0)) / 60
    end
$sql$;

-- p_size elements, of which element p_places[i] has got p_values[i]; several for the same place add up.
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

-- One word for an endpoint. Late: a message that is due has waited for more than a minute. Failing: of the attempts of the last
-- minutes, and not before its last successes. Sending: requests are under way, and none of the last minute has ended well.
-- Not immutable, since a time minus an interval isn't: it would not become part of the query that asks it for each endpoint.
create or replace function ulak_private.endpoint_state(
    p_enabled boolean,
    p_circuit_state text,
    p_due_since timestamptz,
    p_failed_percent double precision,
    p_has_recovered boolean,
    p_per_second double precision,
    p_in_flight bigint,
    p_now timestamptz
)
returns text
language sql
stable
as $sql$
    select case
        when not p_enabled then 'disabled'
        when p_circuit_state <> 'closed' then p_circuit_state
        when p_due_since < p_now - interval '1 minute' then 'late'
        when p_failed_percent >= 5 and not p_has_recovered then 'failing'
        when p_per_second > 0 then 'flowing'
        when p_in_flight > 0 then 'sending'
        else 'idle'
    end
$sql$;

-- Without a SET clause, so that it becomes part of the query: it is asked for each endpoint.
create or replace function ulak_private.pain(p_state text, p_waiting bigint)
returns integer
language sql
immutable
as $sql$
    select case
        when p_state = 'open' then 8
        when p_state = 'half_open' then 7
        when p_state = 'late' then 6
        when p_state = 'failing' then 5
        when p_state = 'disabled' then case when p_waiting > 0 then 4 else 0 end
        when p_state = 'sending' then 3
        when p_state = 'flowing' then 2
        else 1
    end
$sql$;

-- A count as it is known: all of them, about this many when they were last counted, or more than were counted.
create or replace function ulak_private.known_count(p_count numeric, p_is_estimate boolean, p_sampled_at timestamptz, p_now timestamptz)
returns text
language sql
immutable
as $sql$
    select case
        when not p_is_estimate then ulak_private.thousands(p_count)
        when p_sampled_at is null then 'more than ' || ulak_private.thousands(p_count - 1)
        else format('about %s (counted %s ago)', ulak_private.thousands(p_count), ulak_private.short_duration(p_now - p_sampled_at))
    end
$sql$;
