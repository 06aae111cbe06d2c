-- The facts that all looks select from. Each is computed in one place.

-- Each endpoint, or one of them: its circuit, its backlog, its rates, and its state in one word.
-- Late: a due message has waited for more than a minute. Failing: 5% of the attempts of the last five minutes failed, and the latest ones
-- are no better. Sending: requests are in flight, and none of the last minute has succeeded.
create or replace function ulak_private.endpoint_facts(p_endpoint_id bigint, p_now timestamptz)
returns setof ulak_private.endpoint_fact
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
    select
        e.id,
        e.name,
        e.protocol,
        e.enabled,
        e.circuit_state,
        e.circuit_failure_count,
        case when e.circuit_state = 'open' then e.circuit_half_open_at end,
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
        e.max_pending,
        coalesce(r.per_second, 0),
        r.failed_percent,
        r.last_failed_percent,
        coalesce(r.failed, 0),
        case
            when not e.enabled then 'disabled'
            when e.circuit_state <> 'closed' then e.circuit_state
            when b.due_since < p_now - interval '1 minute' then 'late'
            when r.failed_percent >= 5
                and coalesce(r.last_failed_percent, 100) >= 5
                and coalesce(e.last_success_at <= e.last_failure_at + interval '10 seconds', true)
                then 'failing'
            when r.per_second > 0 then 'flowing'
            when b.in_flight > 0 then 'sending'
            else 'idle'
        end
    from ulak.endpoints e
    join ulak_private.backlog(p_endpoint_id, p_now) b on b.endpoint_id = e.id
    left join ulak_private.recent_rates(p_endpoint_id, p_now) r on r.endpoint_id = e.id
    where e.id between coalesce(p_endpoint_id, 0) and coalesce(p_endpoint_id, 9223372036854775807);
end
$plpgsql$;

-- All endpoints together.
create or replace function ulak_private.queue_facts(p_facts ulak_private.endpoint_fact[])
returns table (
    endpoints bigint,
    waiting numeric,
    is_estimate boolean,
    sampled_at timestamptz,
    oldest_at timestamptz,
    due_since timestamptz,
    in_flight numeric,
    dead numeric,
    dead_is_estimate boolean,
    dead_sampled_at timestamptz,
    per_second double precision
)
language sql
immutable
as $sql$
    select
        count(*),
        coalesce(sum(f.waiting), 0),
        coalesce(bool_or(f.is_estimate), false),
        min(f.sampled_at),
        min(f.oldest_at),
        min(f.due_since),
        coalesce(sum(f.in_flight), 0),
        coalesce(sum(f.dead), 0),
        coalesce(bool_or(f.dead_is_estimate), false),
        min(f.dead_sampled_at),
        coalesce(sum(f.per_second), 0)
    from unnest(p_facts) f
$sql$;

-- Deliveries per second, and the share of failed attempts in the last five minutes: one minute says little. Planned anew for each call:
-- one endpoint is found by its key, all of them by the minute.
create or replace function ulak_private.recent_rates(p_endpoint_id bigint, p_now timestamptz)
returns table (
    endpoint_id bigint,
    per_second double precision,
    failed_percent double precision,
    -- The same for the latest minute that has attempts: how it is now.
    last_failed_percent double precision,
    failed bigint
)
language plpgsql
stable
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

-- The rate of the last 60 seconds, from the counts of the last full minute and of the current one, of which p_seconds have passed.
-- Traffic that has just begun isn't averaged with the silence before it.
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

-- A count in words: exact, from the last sample, or a lower bound.
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
