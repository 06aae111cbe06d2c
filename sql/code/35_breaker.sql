-- Protection of receivers: circuit breaker, rate limit, and cap of messages in flight, per endpoint.

-- Endpoints that a claim must lock before it takes messages of theirs.
create or replace function ulak._is_limited(p_endpoint ulak.endpoints)
returns boolean
language sql
immutable
as $sql$
    select p_endpoint.circuit_state <> 'closed'
        or p_endpoint.max_in_flight is not null
        or p_endpoint.release_rate is not null
        or p_endpoint.config ? 'rate_limit'
$sql$;

-- How many messages of an endpoint may be claimed now. Its locks, the breaker's and then the row's as in settling, are kept
-- until the claim commits and make the answer true for all workers. Who finds one taken leaves the endpoint to the
-- other, so claims never wait for each other.
create or replace function ulak._admit(
    p_endpoint_id bigint,
    p_limit integer,
    p_now timestamptz,
    out quota integer,
    out circuit_state text
)
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_endpoint ulak.endpoints;
    v_quota bigint := p_limit;
begin
    quota := 0;
    if not pg_try_advisory_xact_lock(hashtext('ulak_cb'), p_endpoint_id::integer) then
        return;
    end if;
    select e.* into v_endpoint
    from ulak.endpoints e
    where e.id = p_endpoint_id and e.enabled
    for no key update skip locked;
    if not found then
        return;
    end if;
    circuit_state := v_endpoint.circuit_state;
    if circuit_state <> 'closed' then
        if not ulak._may_probe(v_endpoint, p_now) then
            return;
        end if;
        v_quota := 1;
    end if;
    if v_endpoint.max_in_flight is not null then
        v_quota := least(v_quota, v_endpoint.max_in_flight - ulak._count_in_flight(p_endpoint_id, v_endpoint.max_in_flight));
    end if;
    quota := greatest(least(v_quota, floor(ulak._rate_tokens(v_endpoint, p_now))), 0);
end
$plpgsql$;

create or replace function ulak._count_in_flight(p_endpoint_id bigint, p_at_most integer)
returns bigint
language sql
stable
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
as $sql$
    select count(*)
    from (select from ulak.queue q where q.status = 'processing' and q.endpoint_id = p_endpoint_id limit p_at_most) f
$sql$;

-- An open circuit gets a probe once its cooldown is over. A half-open one whose probe is no longer in flight (its worker
-- died, it was deleted, it expired) gets another instead of waiting for ever.
create or replace function ulak._may_probe(p_endpoint ulak.endpoints, p_now timestamptz)
returns boolean
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    if p_endpoint.circuit_state = 'open' then
        return p_endpoint.circuit_half_open_at <= p_now;
    end if;
    return not exists (
        select
        from ulak.queue q
        where q.id = p_endpoint.circuit_probe_id
            and q.attempts = p_endpoint.circuit_probe_attempt
            and q.status is not distinct from 'processing'
            and q.lease_until > p_now
    );
end
$plpgsql$;

-- Whether messages that were due before a time are still waiting: one probe per priority for those that are due, one for
-- those behind another of their ordering key.
create or replace function ulak._has_held(p_endpoint_id bigint, p_before timestamptz)
returns boolean
language plpgsql
stable
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
as $plpgsql$
begin
    return exists (
        select
        from generate_series(0, 10) p(priority)
        cross join lateral (
            (
                select q.next_retry_at as due_at
                from ulak.queue q
                where q.status = 'pending' and q.endpoint_id = p_endpoint_id and q.priority = p.priority
                order by q.next_retry_at
                limit 1
            )
            union all
            (
                select q.created_at
                from ulak.queue q
                where q.status = 'pending'
                    and q.endpoint_id = p_endpoint_id
                    and q.priority = p.priority
                    and q.next_retry_at = 'infinity'
                order by q.id
                limit 1
            )
        ) m
        where m.due_at < p_before
    );
end
$plpgsql$;

-- Tokens in the endpoint's bucket. Without a burst of its own it holds a tenth of a second's worth, at least one: enough
-- that workers which look every few milliseconds lose none.
create or replace function ulak._rate_tokens(p_endpoint ulak.endpoints, p_now timestamptz)
returns double precision
language plpgsql
immutable
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_limit jsonb := p_endpoint.config -> 'rate_limit';
    v_rate double precision;
    v_burst double precision;
begin
    if v_limit is not null then
        v_rate := (v_limit -> 'limit')::double precision
            / case v_limit ->> 'interval' when 'hour' then 3600 when 'minute' then 60 else 1 end;
        v_burst := greatest(coalesce((v_limit -> 'burst')::double precision, v_rate / 10), 1);
    end if;
    if p_endpoint.release_rate < coalesce(v_rate, 'infinity') then
        v_rate := p_endpoint.release_rate;
        v_burst := greatest(v_rate / 10, 1);
    end if;
    if v_rate is null then
        return 'infinity';
    end if;
    return least(
        v_burst,
        coalesce(
            nullif(p_endpoint.rate_tokens, 'infinity')
                + v_rate * greatest(extract(epoch from p_now - p_endpoint.rate_refilled_at), 0),
            v_burst
        )
    );
end
$plpgsql$;

-- The breaker's rules of an endpoint: its own keys over the settings.
create or replace function ulak._circuit_rules(p_config jsonb)
returns jsonb
language sql
stable
as $sql$
    select jsonb_build_object(
        'mode', 'consecutive',
        'threshold', ulak.setting('circuit_breaker_threshold')::integer,
        'cooldown', ulak.setting('circuit_breaker_cooldown')::integer,
        'counts', ulak.setting('circuit_breaker_counts'),
        'window', 60,
        'min_requests', 20,
        'failure_rate', 0.5
    ) || coalesce(p_config -> 'circuit_breaker', '{}')
$sql$;

-- Whether a delivery means something to the breaker.
create or replace function ulak._counts_deliveries(p_endpoint ulak.endpoints)
returns boolean
language sql
immutable
as $sql$
    select p_endpoint.circuit_state <> 'closed'
        or p_endpoint.circuit_failure_count > 0
        or coalesce(p_endpoint.config #>> '{circuit_breaker,mode}', '') = 'rate'
$sql$;

-- An endpoint that is well and stays well isn't written but once a second, so its row is no hot spot.
create or replace function ulak._notes_deliveries(p_endpoint ulak.endpoints, p_now timestamptz)
returns boolean
language sql
stable
as $sql$
    select ulak._counts_deliveries(p_endpoint)
        or coalesce(p_endpoint.last_success_at, '-infinity') <= p_now - interval '1 second'
$sql$;

-- Outcomes in their order of arrival; a null error is a delivery. Endpoints are locked in the order of their ids: two
-- workers that meet the same endpoints can't wait for each other.
create or replace function ulak._record_outcomes(
    p_endpoint_ids bigint[],
    p_ids bigint[],
    p_attempts integer[],
    p_errors text[],
    p_now timestamptz
)
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
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
        where o.failed or ulak._notes_deliveries(e, p_now)
        order by e.id
    loop
        perform ulak._apply_outcomes(
            v_endpoint_id,
            array_agg(o.id order by o.place),
            array_agg(o.attempt order by o.place),
            array_agg(o.error order by o.place),
            p_now
        )
        from unnest(p_endpoint_ids, p_ids, p_attempts, p_errors) with ordinality o(endpoint_id, id, attempt, error, place)
        where o.endpoint_id = v_endpoint_id;
    end loop;
end
$plpgsql$;

-- Only the probe decides in a half-open circuit, and nothing does in an open one: answers to requests that were under way
-- when it opened come too late. A null id stands for the probe.
create or replace function ulak._apply_outcomes(
    p_endpoint_id bigint,
    p_ids bigint[],
    p_attempts integer[],
    p_errors text[],
    p_now timestamptz
)
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_endpoint ulak.endpoints := ulak._lock_endpoint(p_endpoint_id);
    v_rules jsonb := ulak._circuit_rules(v_endpoint.config);
    v_failed boolean;
    v_probe boolean;
begin
    for i in 1..cardinality(p_errors) loop
        if p_errors[i] is null then
            v_endpoint.last_success_at := p_now;
        else
            v_endpoint.last_failure_at := p_now;
            v_endpoint.last_error := p_errors[i];
        end if;
        -- null: a message's own fault. It doesn't count, but shows that the receiver is alive.
        v_failed := case
            when p_errors[i] is null then false
            when starts_with(p_errors[i], '[RETRYABLE]') or v_rules ->> 'counts' = 'all' then true
        end;
        if v_endpoint.circuit_state = 'closed' then
            v_endpoint := ulak._count_outcome(v_endpoint, v_rules, v_failed, p_now);
        elsif v_endpoint.circuit_state = 'half_open' then
            v_probe := p_ids[i] is null
                or (p_ids[i], p_attempts[i]) = (v_endpoint.circuit_probe_id, v_endpoint.circuit_probe_attempt);
            if v_probe and v_failed then
                v_endpoint := ulak._open_circuit(v_endpoint, v_rules, p_now);
            elsif v_probe then
                v_endpoint := ulak._close_circuit(v_endpoint, 'circuit.closed', p_now);
            end if;
        end if;
    end loop;

    perform ulak._store_circuit(v_endpoint);
end
$plpgsql$;

create or replace function ulak._count_outcome(
    p_endpoint ulak.endpoints,
    p_rules jsonb,
    p_failed boolean,
    p_now timestamptz
)
returns ulak.endpoints
language plpgsql
set search_path = pg_catalog, pg_temp
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
        if p_endpoint.circuit_window_started_at is null or p_endpoint.circuit_window_started_at <= p_now - v_window then
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
        return ulak._open_circuit(p_endpoint, p_rules, p_now);
    end if;
    return p_endpoint;
end
$plpgsql$;

create or replace function ulak._open_circuit(p_endpoint ulak.endpoints, p_rules jsonb, p_now timestamptz)
returns ulak.endpoints
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    perform ulak._log_circuit('circuit.opened', p_endpoint, 'open', p_now);
    p_endpoint.circuit_state := 'open';
    p_endpoint.circuit_opened_at := p_now;
    p_endpoint.circuit_half_open_at := p_now + make_interval(secs => (p_rules -> 'cooldown')::double precision);
    p_endpoint.circuit_probe_id := null;
    p_endpoint.circuit_probe_attempt := null;
    p_endpoint.circuit_window_started_at := null;
    return p_endpoint;
end
$plpgsql$;

create or replace function ulak._close_circuit(p_endpoint ulak.endpoints, p_event text, p_now timestamptz)
returns ulak.endpoints
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    perform ulak._log_circuit(p_event, p_endpoint, 'closed', p_now);
    p_endpoint.circuit_state := 'closed';
    p_endpoint.circuit_failure_count := 0;
    p_endpoint.circuit_opened_at := null;
    p_endpoint.circuit_half_open_at := null;
    p_endpoint.circuit_probe_id := null;
    p_endpoint.circuit_probe_attempt := null;
    p_endpoint.circuit_window_started_at := null;
    return p_endpoint;
end
$plpgsql$;

create or replace function ulak._store_circuit(p_endpoint ulak.endpoints)
returns void
language sql
set search_path = pg_catalog, pg_temp
as $sql$
    update ulak.endpoints e
    set circuit_state = p_endpoint.circuit_state,
        circuit_failure_count = p_endpoint.circuit_failure_count,
        circuit_opened_at = p_endpoint.circuit_opened_at,
        circuit_half_open_at = p_endpoint.circuit_half_open_at,
        circuit_probe_id = p_endpoint.circuit_probe_id,
        circuit_probe_attempt = p_endpoint.circuit_probe_attempt,
        circuit_window_started_at = p_endpoint.circuit_window_started_at,
        circuit_window_requests = p_endpoint.circuit_window_requests,
        circuit_window_failures = p_endpoint.circuit_window_failures,
        last_success_at = p_endpoint.last_success_at,
        last_failure_at = p_endpoint.last_failure_at,
        last_error = p_endpoint.last_error
    where e.id = p_endpoint.id
$sql$;

create or replace function ulak._log_circuit(
    p_event text,
    p_endpoint ulak.endpoints,
    p_new_state text,
    p_now timestamptz
)
returns void
language sql
set search_path = pg_catalog, pg_temp
as $sql$
    insert into ulak.event_log (event, endpoint_id, endpoint_name, old_value, new_value, created_at)
    values (
        p_event,
        p_endpoint.id,
        p_endpoint.name,
        ulak._circuit_value(p_endpoint.circuit_state, p_endpoint.circuit_failure_count),
        ulak._circuit_value(p_new_state, case when p_new_state = 'closed' then 0 else p_endpoint.circuit_failure_count end),
        p_now
    );
    select ulak._tell_circuit(p_endpoint, p_new_state, p_now)
$sql$;

create or replace function ulak._circuit_value(p_state text, p_failures integer)
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
    p_now := ulak._clock(p_now);
    if not exists (select from ulak.endpoints e where e.id = p_endpoint_id) then
        raise exception 'endpoint % does not exist', p_endpoint_id
            using errcode = '42704', hint = 'select id, name from ulak.endpoints;';
    end if;
    perform ulak._apply_outcomes(
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
    'reports one outcome of a delivery to an endpoint''s circuit breaker and returns its state; '
    'complete() and fail() do so by themselves';

create or replace function ulak.reset_circuit_breaker(p_name text, p_now timestamptz default clock_timestamp())
returns boolean
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_endpoint ulak.endpoints := ulak._lock_endpoint(p_name);
begin
    p_now := ulak._clock(p_now);
    perform ulak._store_circuit(ulak._close_circuit(v_endpoint, 'circuit.reset', p_now));
    return v_endpoint.circuit_state <> 'closed';
end
$plpgsql$;

comment on function ulak.reset_circuit_breaker(text, timestamptz) is
    'closes an endpoint''s circuit at once and clears its counters; false if it was closed already';

create or replace function ulak.disable_endpoint(p_name text, p_now timestamptz default clock_timestamp())
returns boolean
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_endpoint ulak.endpoints := ulak._lock_endpoint(p_name);
begin
    p_now := ulak._clock(p_now);
    return ulak._switch_endpoint(v_endpoint, false, null, 'disabled by ' || session_user, p_now);
end
$plpgsql$;

comment on function ulak.disable_endpoint(text, timestamptz) is
    'stops deliveries to an endpoint; messages for it are still accepted, and held; false if it was disabled already';

create or replace function ulak.enable_endpoint(
    p_name text,
    p_rate double precision default null,
    p_now timestamptz default clock_timestamp()
)
returns boolean
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_endpoint ulak.endpoints := ulak._lock_endpoint(p_name);
begin
    p_now := ulak._clock(p_now);
    perform ulak._check_rate(p_rate);
    return ulak._switch_endpoint(v_endpoint, true, p_rate, 'enabled by ' || session_user, p_now);
end
$plpgsql$;

comment on function ulak.enable_endpoint(text, double precision, timestamptz) is
    'resumes deliveries to an endpoint, what was held at p_rate messages a second if given; false if it was enabled already';

create or replace function ulak._lock_endpoint(p_name text)
returns ulak.endpoints
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_endpoint ulak.endpoints := ulak._lock_endpoint((select e.id from ulak.endpoints e where e.name = p_name));
begin
    if v_endpoint.id is null then
        perform ulak._raise_unknown_endpoint(p_name);
    end if;
    return v_endpoint;
end
$plpgsql$;

-- The breaker's lock, then the row; null if there is no such endpoint. Who locks several takes them in the order of
-- their ids, and messages before endpoints: so nobody can wait in a circle.
create or replace function ulak._lock_endpoint(p_id bigint)
returns ulak.endpoints
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_endpoint ulak.endpoints;
begin
    perform pg_advisory_xact_lock(hashtext('ulak_cb'), p_id::integer);
    select e.* into v_endpoint
    from ulak.endpoints e
    where e.id = p_id
    for no key update;
    return v_endpoint;
end
$plpgsql$;

create or replace function ulak._switch_endpoint(
    p_endpoint ulak.endpoints,
    p_enabled boolean,
    p_rate double precision,
    p_reason text,
    p_now timestamptz
)
returns boolean
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    update ulak.endpoints e
    set enabled = p_enabled,
        release_rate = p_rate,
        release_before = case when p_rate is not null then p_now end,
        rate_tokens = case when p_rate is null then e.rate_tokens else 0 end,
        rate_refilled_at = case when p_rate is null then e.rate_refilled_at else p_now end,
        updated_at = p_now
    where e.id = p_endpoint.id and (e.enabled <> p_enabled or e.release_rate is distinct from p_rate);
    if p_endpoint.enabled = p_enabled then
        return false;
    end if;
    insert into ulak.event_log (event, endpoint_id, endpoint_name, old_value, new_value, detail, created_at)
    values (
        case when p_enabled then 'endpoint.enabled' else 'endpoint.disabled' end,
        p_endpoint.id,
        p_endpoint.name,
        jsonb_build_object('enabled', p_endpoint.enabled),
        jsonb_build_object('enabled', p_enabled),
        jsonb_strip_nulls(jsonb_build_object('reason', p_reason, 'rate', p_rate)),
        p_now
    );
    if not p_enabled then
        perform ulak._tell_disabled(p_endpoint, p_reason, p_now);
    end if;
    return true;
end
$plpgsql$;
