-- Admission: how many messages of an endpoint may go out now, by its circuit, its limits in flight and its rate.

-- Endpoints that a claim must lock before it takes messages of theirs.
create or replace function ulak._is_limited(p_endpoint ulak.endpoints)
returns boolean
language sql
immutable
as $sql$
    select p_endpoint.circuit_state <> 'closed'
        or p_endpoint.max_in_flight is not null
        or p_endpoint.slow_start_limit is not null
        or p_endpoint.release_rate is not null
        or p_endpoint.config ? 'rate_limit'
$sql$;

-- How many messages of an endpoint may be claimed now. The lock on its row is kept until the claim commits and makes the
-- answer true for all workers. Who finds it locked leaves the endpoint to the other, so claims never wait for each other.
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
    v_most_in_flight integer;
begin
    quota := 0;
    perform ulak._show_breaker_lock(p_endpoint_id);
    select e.* into v_endpoint
    from ulak.endpoints e
    where e.id = p_endpoint_id and e.enabled
    for no key update skip locked;
    if not found then
        return;
    end if;
    circuit_state := v_endpoint.circuit_state;
    if circuit_state <> 'closed' then
        v_quota := 1;
    end if;
    v_most_in_flight := least(v_endpoint.max_in_flight, v_endpoint.slow_start_limit);
    if v_most_in_flight is not null then
        v_quota := least(v_quota, v_most_in_flight - ulak._count_in_flight(p_endpoint_id, v_most_in_flight));
    end if;
    v_quota := greatest(least(v_quota, floor(ulak._rate_tokens(v_endpoint, p_now))), 0);
    if v_quota > 0 and (circuit_state = 'closed' or ulak._take_probe(v_endpoint, p_now)) then
        quota := v_quota;
    end if;
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

-- What a claim took out of the limits of its endpoints, which it has locked: p_ids[i] is a message of the endpoint
-- p_endpoint_ids[p_places[i]]. The first message of a half-open circuit is its probe.
create or replace function ulak._charge(
    p_endpoint_ids bigint[],
    p_are_limited boolean[],
    p_ids bigint[],
    p_places integer[],
    p_now timestamptz
)
returns void
language sql
set search_path = pg_catalog, pg_temp
as $sql$
    update ulak.endpoints e
    set rate_tokens = ulak._rate_tokens(e, p_now) - c.messages,
        -- Clocks of sessions differ: time that has given its tokens must not give them again.
        rate_refilled_at = greatest(e.rate_refilled_at, p_now),
        release_rate = case when e.release_rate is not null and ulak._has_held(e.id, e.release_before) then e.release_rate end,
        circuit_probe_id = case when e.circuit_state = 'half_open' then c.first_id end,
        circuit_probe_attempt = case
            when e.circuit_state = 'half_open' then (select q.attempts from ulak.queue q where q.id = c.first_id)
        end
    from (
        select l.place, count(*) as messages, (array_agg(l.id))[1] as first_id
        from unnest(p_ids, p_places) l(id, place)
        where p_are_limited[l.place]
        group by l.place
    ) c
    where e.id between p_endpoint_ids[c.place] and p_endpoint_ids[c.place]
$sql$;
