-- Chooses the endpoints of a claim: the requested ones, or else those whose turn it is.

create or replace function ulak_private.pick_requested_endpoints(
    p_limit integer,
    p_endpoint_ids bigint[],
    p_protocols text[],
    p_generation bigint,
    p_now timestamptz,
    p_rooms ulak_private.rooms,
    p_resume_points ulak_private.resume_point[]
)
returns ulak_private.turn
language plpgsql
as $plpgsql$
declare
    v_turn ulak_private.turn;
begin
    select
        array_agg(a.id), array_agg(a.name), array_agg(a.config_version), array_agg(a.next), array_agg(a.quota), array_agg(0),
        array_agg(a.is_probe), array_agg(a.is_metered), true
    into
        v_turn.endpoint_ids, v_turn.names, v_turn.config_versions, v_turn.nexts, v_turn.quotas, v_turn.counts,
        v_turn.are_probes, v_turn.are_metered, v_turn.is_last
    from (
        select a.*
        from unnest(p_endpoint_ids) e(id)
        cross join lateral ulak_private.admission(
            e.id, 10::smallint, null, null, p_limit, p_protocols, p_generation, p_now, p_rooms, p_resume_points
        ) a
        where a.quota > 0
            and ulak_private.is_adopted()
            -- If several endpoints are requested, one with nothing due must not use up the limit.
            and (cardinality(p_endpoint_ids) = 1 or ulak_private.has_due(e.id, p_now, p_resume_points))
        limit p_limit
    ) a;
    return v_turn;
end
$plpgsql$;

-- Claims go round the endpoints, each one beginning where the last one ended.
create or replace function ulak_private.pick_endpoints(
    p_limit integer,
    p_protocols text[],
    p_generation bigint,
    p_now timestamptz,
    p_rooms ulak_private.rooms,
    p_most_endpoints integer,
    p_most_visits integer,
    p_resume_points ulak_private.resume_point[]
)
returns ulak_private.turn
language plpgsql
as $plpgsql$
declare
    v_turn ulak_private.turn;
    v_most integer := least(p_limit, p_most_endpoints);
    v_begun_behind bigint;
    -- Where the next walk begins if this one ended before it had visited all endpoints.
    v_walked_to bigint;
    v_ended_at bigint;
begin
    v_begun_behind := ulak_private.claim_position(null, p_protocols);
    select
        array_agg(e.id) filter (where e.quota > 0),
        array_agg(e.name) filter (where e.quota > 0),
        array_agg(e.config_version) filter (where e.quota > 0),
        array_agg(e.next) filter (where e.quota > 0),
        array_agg(e.quota) filter (where e.quota > 0),
        array_agg(0) filter (where e.quota > 0),
        array_agg(e.is_probe) filter (where e.quota > 0),
        array_agg(e.is_metered) filter (where e.quota > 0),
        -- One before that endpoint: its lower priorities may not have been visited.
        max(greatest(e.id - 1, 1)) filter (where e.quota is null)
    into
        v_turn.endpoint_ids, v_turn.names, v_turn.config_versions, v_turn.nexts, v_turn.quotas, v_turn.counts,
        v_turn.are_probes, v_turn.are_metered, v_walked_to
    from (
        select v.endpoint_id as id, a.name, a.config_version, a.next, a.quota, a.is_probe, a.is_metered
        from ulak_private.walk(v_begun_behind, p_most_visits, p_now, p_resume_points) v
        left join lateral (
            select a.*
            from ulak_private.admission(
                v.endpoint_id, v.priority, v.due_at, v.id, p_limit, p_protocols, p_generation, p_now, p_rooms, p_resume_points
            ) a
            where v.due_at <= p_now and v.id is not null and a.quota > 0
            offset 0
        ) a on true
        -- The second condition: the walk ended here because it reached its limit of visits.
        where (a.quota > 0 or v.number = p_most_visits) and ulak_private.is_adopted()
        limit v_most
    ) e;
    v_ended_at := coalesce(v_walked_to, v_turn.endpoint_ids[cardinality(v_turn.endpoint_ids)]);
    if v_ended_at is not null then
        -- Not `perform`, which takes ten times as long.
        v_ended_at := ulak_private.set_claim_position(v_ended_at, p_protocols);
    end if;
    v_turn.is_last := v_turn.endpoint_ids is null or v_walked_to is not null;
    v_turn.is_full := cardinality(v_turn.endpoint_ids) >= v_most;
    -- A worker that got nothing keeps claiming until the round over the endpoints is complete.
    v_turn.left_out_others := (v_walked_to is not null or v_turn.is_full) and v_ended_at > v_begun_behind;
    return v_turn;
end
$plpgsql$;

-- The endpoints after p_after that have waiting messages, then those up to it, each with its first message. If that message isn't due, the
-- endpoint comes again with the first message of the next lower priority. One index probe leads from an endpoint to the next, so the cost
-- depends on what is found. The walk ends when the calling query has enough, or after p_most_visits: there may be thousands of endpoints
-- with nothing due yet.
-- p_resume_points divide the index: an endpoint with resume points is searched from there on, because nothing before them is due; endpoints
-- between two of those are searched as usual.
create or replace function ulak_private.walk(
    p_after bigint,
    p_most_visits integer,
    p_now timestamptz,
    p_resume_points ulak_private.resume_point[]
)
returns table (endpoint_id bigint, priority smallint, due_at timestamptz, id bigint, number integer)
language sql
stable
as $sql$
    with recursive visit(endpoint_id, priority, due_at, id, has_wrapped, number) as (
        -- The walk begins after this endpoint. This row is no visit, and neither is 0, where the walk continues after the last endpoint.
        select p_after, 0::smallint, timestamptz 'infinity', 0::bigint, false, 0
        union all
        select n.*
        from visit v
        cross join lateral (
            select min(r.endpoint_id)
            from unnest(p_resume_points) r
            where r.endpoint_id > v.endpoint_id
        ) r(endpoint_id)
        cross join lateral (
            -- Nothing of this priority is due: take the next lower priority of the same endpoint.
            (
                select q.endpoint_id, q.priority, q.next_retry_at, q.id, v.has_wrapped, v.number + 1
                from ulak_private.deliveries q
                where v.due_at > p_now
                    and v.priority > 0
                    and q.status = 'pending'
                    and q.endpoint_id = v.endpoint_id
                    and q.priority < v.priority
                order by q.priority desc, q.next_retry_at, q.id
                limit 1
            )
            union all
            (
                select q.endpoint_id, q.priority, q.next_retry_at, q.id, v.has_wrapped, v.number + 1
                from ulak_private.deliveries q
                where q.status = 'pending'
                    and q.endpoint_id > v.endpoint_id
                    and q.endpoint_id < coalesce(r.endpoint_id, 9223372036854775807)
                order by q.endpoint_id, q.priority desc, q.next_retry_at, q.id
                limit 1
            )
            union all
            (
                select r.endpoint_id, coalesce(f.priority, 0::smallint), coalesce(f.due_at, 'infinity'), f.id, v.has_wrapped, v.number + 1
                from (select) s
                left join lateral ulak_private.first_due(r.endpoint_id, p_now, p_resume_points) f on true
                where r.endpoint_id is not null
            )
            union all
            select 0, 0::smallint, timestamptz 'infinity', 0, true, v.number
            where not v.has_wrapped and p_after > 0
            limit 1
        ) n
        where v.number < p_most_visits and (not n.has_wrapped or n.endpoint_id <= p_after)
    )
    select v.endpoint_id, v.priority, v.due_at, v.id, v.number
    from visit v
$sql$;

-- The first due message in the highest priority of an endpoint that has one.
create or replace function ulak_private.first_due(p_endpoint_id bigint, p_now timestamptz, p_resume_points ulak_private.resume_point[])
returns table (priority smallint, due_at timestamptz, id bigint)
language sql
stable
as $sql$
    select l.priority, q.next_retry_at, q.id
    from ulak_private.levels(p_endpoint_id, 10::smallint, null, null, p_resume_points) l
    cross join lateral (
        select q.next_retry_at, q.id
        from ulak_private.deliveries q
        where q.status = 'pending'
            and q.endpoint_id = p_endpoint_id
            and q.priority = l.priority
            and (q.next_retry_at, q.id) >= (l.due_at, l.id)
            and q.next_retry_at <= p_now
        order by q.next_retry_at, q.id
        limit 1
    ) q
    limit 1
$sql$;

create or replace function ulak_private.has_due(p_endpoint_id bigint, p_now timestamptz, p_resume_points ulak_private.resume_point[])
returns boolean
language plpgsql
stable
as $plpgsql$
begin
    return exists (select from ulak_private.first_due(p_endpoint_id, p_now, p_resume_points));
end
$plpgsql$;

-- The priorities of an endpoint from p_priority down, and where a claim starts looking in each: in p_priority at the given place (if any), in
-- the others at their resume points. A nested loop keeps this order.
create or replace function ulak_private.levels(
    p_endpoint_id bigint,
    p_priority smallint,
    p_due_at timestamptz,
    p_first_id bigint,
    p_resume_points ulak_private.resume_point[]
)
returns table (priority smallint, due_at timestamptz, id bigint)
language sql
stable
as $sql$
    select
        l.priority,
        case when l.priority = p_priority and p_due_at is not null then p_due_at else coalesce(r.due_at, '-infinity') end,
        case when l.priority = p_priority and p_due_at is not null then p_first_id else coalesce(r.id, 0) end
    from unnest('{10,9,8,7,6,5,4,3,2,1,0}'::smallint[]) l(priority)
    left join unnest(p_resume_points) r on r.endpoint_id = p_endpoint_id and r.priority = l.priority
    where l.priority <= p_priority
$sql$;
