-- Admission: how many messages of an endpoint a claim may take now, given its circuit, its in-flight limits and its rate limit.

-- Whether a claim changes the endpoint's row: tokens of its rate limit, a gradual release, the probe of its circuit.
create or replace function ulak_private.is_metered(p_endpoint ulak.endpoints)
returns boolean
language sql
immutable
as $sql$
    select p_endpoint.circuit_state <> 'closed' or p_endpoint.release_rate is not null or p_endpoint.config ? 'rate_limit'
$sql$;

-- Whether a claim must lock the endpoint's row before it takes messages of the endpoint.
create or replace function ulak_private.is_limited(p_endpoint ulak.endpoints)
returns boolean
language sql
immutable
as $sql$
    select ulak_private.is_metered(p_endpoint) or p_endpoint.max_in_flight is not null or p_endpoint.slow_start_limit is not null
$sql$;

-- Whether a claim may take messages of the endpoint, judged by its row without locking it.
create or replace function ulak_private.is_open(p_endpoint ulak.endpoints, p_protocols text[], p_now timestamptz)
returns boolean
language sql
immutable
as $sql$
    select p_endpoint.enabled
        and (p_protocols is null or p_endpoint.protocol = any (p_protocols))
        and not ulak_private.is_cooling(p_endpoint, p_now)
        -- The tokens of the last claim are enough, or those that were added since. To count them takes 3 us.
        and (not ulak_private.is_metered(p_endpoint) or p_endpoint.rate_tokens >= 1 or ulak_private.rate_tokens(p_endpoint, p_now) >= 1)
$sql$;

-- How many messages of an endpoint the worker has room for, at most p_limit.
create or replace function ulak_private.room_for(p_endpoint_id bigint, p_limit integer, p_rooms ulak_private.rooms)
returns integer
language sql
immutable
as $sql$
    select least(p_limit, coalesce((p_rooms).rooms[array_position((p_rooms).endpoint_ids, p_endpoint_id)], (p_rooms).others))
$sql$;

-- How many messages of an endpoint may be claimed (no row: none), and where the claim begins: at the given place, unless the circuit needs a
-- probe. A null p_due_at means that the caller hasn't looked for a due message yet. Stable, so that it is inlined into the calling query.
create or replace function ulak_private.admission(
    p_endpoint_id bigint,
    p_priority smallint,
    p_due_at timestamptz,
    p_first_id bigint,
    p_limit integer,
    p_protocols text[],
    p_generation bigint,
    p_now timestamptz,
    p_rooms ulak_private.rooms,
    p_resume_points ulak_private.resume_point[]
)
returns table (
    id bigint,
    name text,
    config_version bigint,
    quota integer,
    is_probe boolean,
    -- The endpoint's row is locked, and charge() must record the claimed messages there.
    is_metered boolean,
    next ulak_private.place
)
language sql
stable
as $sql$
    select
        e.id,
        e.name,
        e.config_version,
        case when ulak_private.is_limited(e) then a.quota else r.room end,
        coalesce(a.is_probe, false),
        coalesce(a.is_metered, false),
        coalesce(
            case when a.is_probe and a.quota > 0 then ulak_private.probe_place(e.id, p_generation, p_now) end,
            row(p_priority, p_due_at, p_first_id)::ulak_private.place
        )
    from ulak.endpoints e
    -- `offset 0`: looked up once per endpoint, since a worker may pass hundreds of rooms.
    cross join lateral (select ulak_private.room_for(e.id, p_limit, p_rooms) offset 0) r(room)
    -- An endpoint is locked only if it has a limit or a troubled circuit, and something due. Others are just read.
    left join lateral (
        select a.*
        from ulak_private.admit_limited(e.id, r.room, p_now) a
        where ulak_private.is_limited(e) and (p_due_at is not null or ulak_private.has_due(e.id, p_now, p_resume_points))
        offset 0
    ) a on true
    where e.id = p_endpoint_id and r.room > 0 and ulak_private.is_open(e, p_protocols, p_now)
$sql$;

-- The quota of an endpoint with a limit or a troubled circuit. Its row stays locked until the claim commits, so the limit holds across all workers.
-- A claim that finds the row locked skips the endpoint: claims never wait for each other.
create or replace function ulak_private.admit_limited(
    p_endpoint_id bigint,
    p_limit integer,
    p_now timestamptz,
    out quota integer,
    out is_probe boolean,
    out is_metered boolean
)
language plpgsql
as $plpgsql$
declare
    v_endpoint ulak.endpoints;
begin
    -- As one value: a statement that returns each column took 5 us more.
    v_endpoint := (
        select e
        from ulak.endpoints e
        where e.id = p_endpoint_id and e.enabled
        for no key update skip locked
    );
    if v_endpoint.id is not null then
        quota := ulak_private.admit(v_endpoint, p_limit, p_now);
        is_probe := v_endpoint.circuit_state <> 'closed';
        is_metered := ulak_private.is_metered(v_endpoint);
    end if;
end
$plpgsql$;

-- How many messages of an endpoint may be claimed now. The caller has locked its row.
create or replace function ulak_private.admit(p_endpoint ulak.endpoints, p_limit integer, p_now timestamptz)
returns integer
language plpgsql
as $plpgsql$
declare
    v_is_probe boolean := p_endpoint.circuit_state <> 'closed';
    v_most_in_flight integer := least(p_endpoint.max_in_flight, p_endpoint.slow_start_limit);
    v_quota bigint := least(case when v_is_probe then 1 else p_limit end, floor(ulak_private.rate_tokens(p_endpoint, p_now)));
begin
    if v_is_probe then
        perform ulak_private.try_breaker_lock(p_endpoint.id);
    end if;
    if v_quota > 0 and v_most_in_flight is not null then
        -- A statement of its own, so that its snapshot sees what others claimed before the row was locked.
        v_quota := least(v_quota, v_most_in_flight - ulak_private.count_in_flight(p_endpoint.id, v_most_in_flight));
    end if;
    if v_quota > 0 and (not v_is_probe or ulak_private.take_probe(p_endpoint, p_now)) then
        return v_quota;
    end if;
    return 0;
end
$plpgsql$;

-- In PL/pgSQL, like charge(): an SQL function would be planned again in each claim.
create or replace function ulak_private.count_in_flight(p_endpoint_id bigint, p_at_most integer)
returns bigint
language plpgsql
stable
set enable_seqscan = off
as $plpgsql$
begin
    return (
        select count(*)
        from (select from ulak_private.deliveries q where q.status = 'processing' and q.endpoint_id = p_endpoint_id limit p_at_most) f
    );
end
$plpgsql$;

-- Charges a claim's messages to the limits of its endpoints, which it has locked: p_counts[i] messages of the endpoint p_endpoint_ids[i].
-- Message p_ids[i] belongs to the endpoint p_endpoint_ids[p_places[i]]; the first message of a half-open circuit is its probe.
create or replace function ulak_private.charge(
    p_endpoint_ids bigint[],
    p_are_charged boolean[],
    p_counts integer[],
    p_ids bigint[],
    p_places integer[],
    p_now timestamptz
)
returns void
language plpgsql
as $plpgsql$
begin
    update ulak.endpoints e
    set rate_tokens = ulak_private.rate_tokens(e, p_now) - c.messages,
        -- The times of two sessions may come out of order: never refill for the same period twice.
        rate_refilled_at = case when ulak_private.is_ahead(e.rate_refilled_at, p_now) then p_now else greatest(e.rate_refilled_at, p_now) end,
        release_rate = case
            when e.release_rate is not null and ulak_private.has_held(e.id, least(e.release_before, p_now)) then e.release_rate
        end,
        circuit_probe_id = case when e.circuit_state = 'half_open' then c.first_id end,
        circuit_probe_attempt = case
            when e.circuit_state = 'half_open' then (select q.attempts from ulak_private.deliveries q where q.id = c.first_id)
        end
    from (
        select c.endpoint_id, c.messages, p_ids[array_position(p_places, c.place::integer)] as first_id
        from unnest(p_endpoint_ids, p_are_charged, p_counts) with ordinality c(endpoint_id, is_metered, messages, place)
        where c.is_metered and c.messages > 0
    ) c
    where e.id between c.endpoint_id and c.endpoint_id;
end
$plpgsql$;
