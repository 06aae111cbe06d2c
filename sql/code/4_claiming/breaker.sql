-- The circuit breaker: it stops deliveries to a receiver that is down, and finds out when the receiver is back.

-- The rules of an endpoint's breaker: keys of its config override the settings.
create or replace function ulak_private.circuit_rules(p_config jsonb)
returns jsonb
language sql
stable
as $sql$
    select jsonb_build_object(
        'mode', 'consecutive',
        'threshold', ulak.setting('circuit_breaker_threshold')::integer,
        'cooldown', ulak.setting('circuit_breaker_cooldown')::integer,
        'counts', ulak.setting('circuit_breaker_counts'),
        'slow_start', ulak.setting('circuit_breaker_slow_start')::boolean,
        'window', 60,
        'min_requests', 20,
        'failure_rate', 0.5
    ) || coalesce(p_config -> 'circuit_breaker', '{}')
$sql$;

-- Whether an open circuit is still cooling down. If the clock was set back since it opened, its cooldown counts as over.
create or replace function ulak_private.is_cooling(p_endpoint ulak.endpoints, p_now timestamptz)
returns boolean
language sql
immutable
as $sql$
    select p_endpoint.circuit_state = 'open'
        and p_endpoint.circuit_half_open_at > p_now
        and not coalesce(ulak_private.is_ahead(p_endpoint.circuit_opened_at, p_now), false)
$sql$;

-- Whether a successful delivery changes the state of the circuit breaker.
create or replace function ulak_private.success_changes_breaker(p_endpoint ulak.endpoints)
returns boolean
language sql
immutable
as $sql$
    select p_endpoint.circuit_state <> 'closed'
        or p_endpoint.circuit_failure_count > 0
        or p_endpoint.slow_start_limit is not null
        or coalesce(p_endpoint.config #>> '{circuit_breaker,mode}', '') = 'rate'
$sql$;

-- Whether a successful delivery changes the endpoint's row: its breaker, or last_success_at, which is written every ten seconds.
create or replace function ulak_private.success_changes_endpoint(p_endpoint ulak.endpoints, p_now timestamptz)
returns boolean
language sql
stable
as $sql$
    select ulak_private.success_changes_breaker(p_endpoint) or ulak_private.is_success_old(p_endpoint, p_now)
$sql$;

-- Takes outcomes in their order of arrival; a null error means delivered. Endpoints are locked in the order of their ids, so that two workers
-- with the same endpoints can't deadlock.
create or replace function ulak_private.record_outcomes(
    p_endpoint_ids bigint[],
    p_ids bigint[],
    p_attempts integer[],
    p_errors text[],
    p_now timestamptz
)
returns void
language plpgsql
as $plpgsql$
declare
    v_endpoint_id bigint;
begin
    for v_endpoint_id in
        select e.id
        from ulak.endpoints e
        join (
            select o.endpoint_id, bool_or(o.error is not null) as failed
            from unnest(p_endpoint_ids, p_errors) o(endpoint_id, error)
            group by o.endpoint_id
        ) o on o.endpoint_id = e.id
        where o.failed or ulak_private.success_changes_breaker(e)
        order by e.id
    loop
        perform ulak_private.apply_outcomes(
            v_endpoint_id,
            array_agg(o.id order by o.place),
            array_agg(o.attempt order by o.place),
            array_agg(o.error order by o.place),
            p_now
        )
        from unnest(p_endpoint_ids, p_ids, p_attempts, p_errors) with ordinality o(endpoint_id, id, attempt, error, place)
        where o.endpoint_id = v_endpoint_id;
    end loop;
    perform ulak_private.note_success(
        array(
            select distinct o.endpoint_id
            from unnest(p_endpoint_ids, p_errors) o(endpoint_id, error)
            where o.error is null
        ),
        p_now
    );
end
$plpgsql$;

-- Records the last success of healthy endpoints, once in ten seconds, so that their rows don't become a hot spot. Locked rows are skipped.
-- In PL/pgSQL, which keeps the plan: with many endpoints this runs each time outcomes are settled.
create or replace function ulak_private.note_success(p_endpoint_ids bigint[], p_now timestamptz)
returns void
language plpgsql
as $plpgsql$
begin
    with well as (
        select e.ctid as tid
        from ulak.endpoints e
        where e.id = any (p_endpoint_ids) and ulak_private.is_success_old(e, p_now)
        for no key update skip locked
    )
    update ulak.endpoints e
    set last_success_at = p_now
    from well w
    where e.ctid = w.tid;
end
$plpgsql$;

-- Stable, because date arithmetic is: declared immutable it wouldn't be inlined.
create or replace function ulak_private.is_success_old(p_endpoint ulak.endpoints, p_now timestamptz)
returns boolean
language sql
stable
as $sql$
    select coalesce(
        p_endpoint.last_success_at <= p_now - interval '10 seconds' or ulak_private.is_ahead(p_endpoint.last_success_at, p_now), true
    )
$sql$;

-- Whether only the message is at fault: it could not be built, or its own time-out was too short. That says nothing about the receiver, so a
-- probe that ends this way is replaced by the next claim.
create or replace function ulak_private.is_messages_fault(p_error text)
returns boolean
language sql
immutable
as $sql$
    select p_error ~ E'^\\[[A-Z]+\\] message: '
$sql$;

-- In a half-open circuit only the probe counts. In an open one nothing counts: these are answers to requests that were in flight when it
-- opened. A null id stands for the probe.
create or replace function ulak_private.apply_outcomes(
    p_endpoint_id bigint,
    p_ids bigint[],
    p_attempts integer[],
    p_errors text[],
    p_now timestamptz
)
returns void
language plpgsql
as $plpgsql$
declare
    v_endpoint ulak.endpoints := ulak_private.lock_endpoint(p_endpoint_id);
    v_rules jsonb := ulak_private.circuit_rules(v_endpoint.config);
    v_failed boolean;
    v_probe boolean;
begin
    for i in 1..cardinality(p_errors) loop
        continue when ulak_private.is_messages_fault(p_errors[i]);
        if p_errors[i] is null then
            v_endpoint.last_success_at := p_now;
        else
            v_endpoint.last_failure_at := p_now;
            v_endpoint.last_error := p_errors[i];
        end if;
        -- null: the receiver refused the message. That doesn't count, but shows that the receiver is alive.
        v_failed := case
            when p_errors[i] is null then false
            when starts_with(p_errors[i], '[RETRYABLE]') or v_rules ->> 'counts' = 'all' then true
        end;
        if v_endpoint.circuit_state = 'closed' then
            v_endpoint := ulak_private.count_outcome(v_endpoint, v_rules, v_failed, p_now);
            v_endpoint.slow_start_limit := ulak_private.next_slow_start_limit(v_endpoint, v_failed);
        elsif v_endpoint.circuit_state = 'half_open' then
            v_probe := p_ids[i] is null
                or (p_ids[i], p_attempts[i]) = (v_endpoint.circuit_probe_id, v_endpoint.circuit_probe_attempt);
            if v_probe and v_failed then
                v_endpoint := ulak_private.open_circuit(v_endpoint, v_rules, p_now);
            elsif v_probe then
                v_endpoint := ulak_private.close_circuit(v_endpoint, 'circuit.closed', v_rules, p_now);
                v_endpoint.slow_start_limit := ulak_private.next_slow_start_limit(v_endpoint, false);
            end if;
        end if;
    end loop;

    perform ulak_private.store_circuit(v_endpoint);
end
$plpgsql$;

create or replace function ulak_private.count_outcome(
    p_endpoint ulak.endpoints,
    p_rules jsonb,
    p_failed boolean,
    p_now timestamptz
)
returns ulak.endpoints
language plpgsql
as $plpgsql$
declare
    v_window interval := make_interval(secs => (p_rules -> 'window')::double precision);
    v_trips boolean;
begin
    if p_failed is null then
        return p_endpoint;
    end if;
    p_endpoint.circuit_failure_count := case when p_failed then p_endpoint.circuit_failure_count + 1 else 0 end;
    if p_rules ->> 'mode' = 'rate' then
        if p_endpoint.circuit_window_started_at is null
            or p_endpoint.circuit_window_started_at <= p_now - v_window
            or ulak_private.is_ahead(p_endpoint.circuit_window_started_at, p_now)
        then
            p_endpoint.circuit_window_started_at := p_now;
            p_endpoint.circuit_window_requests := 0;
            p_endpoint.circuit_window_failures := 0;
        end if;
        p_endpoint.circuit_window_requests := p_endpoint.circuit_window_requests + 1;
        p_endpoint.circuit_window_failures := p_endpoint.circuit_window_failures + p_failed::integer;
        v_trips := p_failed
            and p_endpoint.circuit_window_requests >= (p_rules -> 'min_requests')::integer
            and p_endpoint.circuit_window_failures
                >= (p_rules -> 'failure_rate')::double precision * p_endpoint.circuit_window_requests;
    else
        v_trips := p_endpoint.circuit_failure_count >= (p_rules -> 'threshold')::integer;
    end if;
    if v_trips then
        return ulak_private.open_circuit(p_endpoint, p_rules, p_now);
    end if;
    return p_endpoint;
end
$plpgsql$;

-- Whether the caller may send the probe of a circuit that isn't closed; false if another message is the probe. An open circuit becomes
-- half-open here. If the probe of a half-open one is no longer in flight (its worker died, it was deleted, it expired), the caller may
-- send another. charge() records which message it is.
create or replace function ulak_private.take_probe(p_endpoint ulak.endpoints, p_now timestamptz)
returns boolean
language plpgsql
as $plpgsql$
begin
    if p_endpoint.circuit_state = 'open' then
        return ulak_private.half_open_circuit(p_endpoint, p_now);
    end if;
    return not exists (
        select
        from ulak_private.deliveries q
        where q.id = p_endpoint.circuit_probe_id
            and q.attempts = p_endpoint.circuit_probe_attempt
            and q.status is not distinct from 'processing'
            and q.lease_until > p_now
    );
end
$plpgsql$;

-- Where to find the next probe: the message that has been due longest, regardless of priority, but never the last probe again, so that one
-- sender's messages aren't the probe every time. Null: only the last probe is due.
create or replace function ulak_private.probe_place(p_endpoint_id bigint, p_generation bigint, p_now timestamptz)
returns ulak_private.place
language plpgsql
stable
as $plpgsql$
declare
    v_place ulak_private.place;
begin
    select l.priority, m.next_retry_at, m.id into v_place
    from ulak.endpoints e
    cross join generate_series(0, 10) l(priority)
    cross join lateral (
        select q.next_retry_at, q.id
        from ulak_private.deliveries q
        where q.status = 'pending'
            and q.endpoint_id = e.id
            and q.priority = l.priority::smallint
            and q.next_retry_at <= p_now
            and q.id is distinct from e.circuit_probe_id
            and (q.expires_at is null or q.expires_at > p_now)
            and (p_generation is null or q.generation = p_generation)
        order by q.next_retry_at, q.id
        limit 1
    ) m
    where e.id = p_endpoint_id
    order by m.next_retry_at, m.id
    limit 1;
    -- Null, and not a row of nulls.
    return case when found then v_place end;
end
$plpgsql$;

-- Open to half-open, by compare and swap: of all sessions that see that the cooldown is over, only the one that changes the state may claim
-- the probe. If it finds no message for it, the next claim may.
create or replace function ulak_private.half_open_circuit(p_endpoint ulak.endpoints, p_now timestamptz)
returns boolean
language plpgsql
as $plpgsql$
declare
    v_won integer;
begin
    update ulak.endpoints e
    set circuit_state = 'half_open', circuit_probe_attempt = null
    where e.id = p_endpoint.id and e.circuit_state = 'open' and not ulak_private.is_cooling(e, p_now);
    get diagnostics v_won = row_count;
    if v_won = 1 then
        perform ulak_private.log_circuit('circuit.half_open', p_endpoint, 'half_open', p_now);
    end if;
    return v_won = 1;
end
$plpgsql$;

create or replace function ulak_private.open_circuit(p_endpoint ulak.endpoints, p_rules jsonb, p_now timestamptz)
returns ulak.endpoints
language plpgsql
as $plpgsql$
begin
    perform ulak_private.log_circuit('circuit.opened', p_endpoint, 'open', p_now);
    p_endpoint.circuit_state := 'open';
    p_endpoint.circuit_opened_at := p_now;
    p_endpoint.circuit_broken_since := coalesce(p_endpoint.circuit_broken_since, p_now);
    p_endpoint.circuit_half_open_at := p_now + make_interval(secs => (p_rules -> 'cooldown')::double precision);
    -- circuit_probe_id stays: the same message isn't the next probe.
    p_endpoint.circuit_probe_attempt := null;
    p_endpoint.circuit_window_started_at := null;
    -- Requests still hanging from the last slow start must not hold up the probe.
    p_endpoint.slow_start_limit := null;
    return p_endpoint;
end
$plpgsql$;

-- Slow start: the whole backlog at once could bring the receiver down again. So one message may be in flight at first, and each success allows
-- one more, which doubles the limit with each round.
create or replace function ulak_private.close_circuit(
    p_endpoint ulak.endpoints,
    p_event text,
    p_rules jsonb,
    p_now timestamptz
)
returns ulak.endpoints
language plpgsql
as $plpgsql$
begin
    perform ulak_private.log_circuit(p_event, p_endpoint, 'closed', p_now);
    p_endpoint.slow_start_limit := case
        when p_endpoint.circuit_state <> 'closed' and (p_rules -> 'slow_start')::boolean then 1
    end;
    p_endpoint.circuit_state := 'closed';
    p_endpoint.circuit_failure_count := 0;
    p_endpoint.circuit_opened_at := null;
    p_endpoint.circuit_broken_since := null;
    p_endpoint.circuit_half_open_at := null;
    p_endpoint.circuit_probe_id := null;
    p_endpoint.circuit_probe_attempt := null;
    p_endpoint.circuit_window_started_at := null;
    return p_endpoint;
end
$plpgsql$;

-- The slow-start limit after an outcome; null once the endpoint's usual limit applies. A failure that doesn't count changes nothing.
create or replace function ulak_private.next_slow_start_limit(p_endpoint ulak.endpoints, p_failed boolean)
returns integer
language plpgsql
stable
as $plpgsql$
declare
    v_limit integer := p_endpoint.slow_start_limit;
begin
    if v_limit is null or p_failed is null then
        return v_limit;
    elsif p_failed then
        return greatest(1, v_limit / 2);
    elsif v_limit + 1 >= coalesce(p_endpoint.max_in_flight, ulak.setting('worker_concurrency')::integer) then
        return null;
    end if;
    return v_limit + 1;
end
$plpgsql$;

create or replace function ulak_private.store_circuit(p_endpoint ulak.endpoints)
returns void
language sql
as $sql$
    update ulak.endpoints e
    set circuit_state = p_endpoint.circuit_state,
        circuit_failure_count = p_endpoint.circuit_failure_count,
        circuit_opened_at = p_endpoint.circuit_opened_at,
        circuit_broken_since = p_endpoint.circuit_broken_since,
        circuit_half_open_at = p_endpoint.circuit_half_open_at,
        circuit_probe_id = p_endpoint.circuit_probe_id,
        circuit_probe_attempt = p_endpoint.circuit_probe_attempt,
        circuit_window_started_at = p_endpoint.circuit_window_started_at,
        circuit_window_requests = p_endpoint.circuit_window_requests,
        circuit_window_failures = p_endpoint.circuit_window_failures,
        slow_start_limit = p_endpoint.slow_start_limit,
        last_success_at = p_endpoint.last_success_at,
        last_failure_at = p_endpoint.last_failure_at,
        last_error = p_endpoint.last_error
    where e.id = p_endpoint.id
$sql$;

create or replace function ulak_private.log_circuit(
    p_event text,
    p_endpoint ulak.endpoints,
    p_new_state text,
    p_now timestamptz
)
returns void
language sql
as $sql$
    insert into ulak.event_log (event, endpoint_id, endpoint_name, old_value, new_value, created_at)
    values (
        p_event,
        p_endpoint.id,
        p_endpoint.name,
        ulak_private.circuit_value(p_endpoint.circuit_state, p_endpoint.circuit_failure_count),
        ulak_private.circuit_value(p_new_state, case when p_new_state = 'closed' then 0 else p_endpoint.circuit_failure_count end),
        ulak_private.log_time(p_now)
    );
    select ulak_private.tell_circuit(p_endpoint, p_new_state, p_now)
$sql$;

create or replace function ulak_private.circuit_value(p_state text, p_failures integer)
returns jsonb
language sql
immutable
as $sql$
    select jsonb_build_object('circuit_state', p_state, 'failures', p_failures)
$sql$;

create or replace function ulak.update_circuit_breaker(
    p_endpoint_id bigint,
    p_success boolean,
    p_now timestamptz default clock_timestamp()
)
returns text
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    p_now := ulak_private.clock(p_now);
    if not exists (select from ulak.endpoints e where e.id = p_endpoint_id) then
        raise exception 'endpoint % does not exist', p_endpoint_id
            using errcode = '42704', hint = 'select id, name from ulak.endpoints;';
    end if;
    perform ulak_private.apply_outcomes(
        p_endpoint_id,
        array[null::bigint],
        array[null::integer],
        array[case when p_success then null else '[RETRYABLE] reported' end],
        p_now
    );
    return (select e.circuit_state from ulak.endpoints e where e.id = p_endpoint_id);
end
$plpgsql$;

comment on function ulak.update_circuit_breaker(bigint, boolean, timestamptz) is
    'reports the outcome of one delivery to an endpoint''s circuit breaker and returns the breaker''s state; complete() and '
    'fail() do so by themselves';

create or replace function ulak.reset_circuit_breaker(p_name text, p_now timestamptz default clock_timestamp())
returns boolean
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_endpoint ulak.endpoints := ulak_private.lock_endpoint(p_name);
begin
    p_now := ulak_private.clock(p_now);
    perform ulak_private.store_circuit(
        ulak_private.close_circuit(v_endpoint, 'circuit.reset', ulak_private.circuit_rules(v_endpoint.config), p_now)
    );
    return v_endpoint.circuit_state <> 'closed';
end
$plpgsql$;

comment on function ulak.reset_circuit_breaker(text, timestamptz) is
    'closes an endpoint''s circuit at once and clears its counters; false if it was closed already';

-- The advisory lock that serialises changes of a breaker, including those by other tools. Any session could hold it forever, so a transaction
-- waits at most 0.1 s for it. After that only the row lock, which is taken next, protects the breaker, and doctor() names the holder.
create or replace function ulak_private.take_breaker_lock(p_id bigint)
returns void
language plpgsql
as $plpgsql$
begin
    if not ulak_private.try_breaker_lock(p_id) and current_setting('ulak_private.breaker_lock_is_held', true) is distinct from 'yes' then
        begin
            perform ulak_private.wait_for_breaker_lock(p_id);
        exception
            when lock_not_available then
                perform set_config('ulak_private.breaker_lock_is_held', 'yes', true);
        end;
    end if;
end
$plpgsql$;

create or replace function ulak_private.wait_for_breaker_lock(p_id bigint)
returns void
language sql
set lock_timeout = '100ms'
as $sql$
    select pg_advisory_xact_lock(hashtext('ulak_cb'), p_id::integer)
$sql$;

-- Takes the lock if it is free, and returns whether it did. Claims use only this, because they never wait.
create or replace function ulak_private.try_breaker_lock(p_id bigint)
returns boolean
language sql
as $sql$
    select pg_try_advisory_xact_lock(hashtext('ulak_cb'), p_id::integer)
$sql$;
