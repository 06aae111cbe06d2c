-- Whose turn it is: a claim goes round the endpoints and takes up where the last one ended.

-- The endpoints that a claim takes messages of: those that were asked for, or those whose turn it is.
create or replace function ulak_private.pick_endpoints(
    p_limit integer,
    p_endpoint_ids bigint[],
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
    -- A walk that ended before it had gone round: there the next one begins.
    v_walked_to bigint;
    v_ended_at bigint;
begin
    if p_endpoint_ids is not null then
        v_turn.is_last := true;
        select
            array_agg(a.id), array_agg(a.name), array_agg(a.config_version), array_agg(a.next), array_agg(a.quota), array_agg(0),
            array_agg(a.is_probe), array_agg(a.is_metered)
        into
            v_turn.endpoint_ids, v_turn.names, v_turn.config_versions, v_turn.nexts, v_turn.quotas, v_turn.counts,
            v_turn.are_probes, v_turn.are_metered
        from (
            select a.*
            from unnest(p_endpoint_ids) e(id)
            cross join lateral ulak_private.admission(
                e.id, 10::smallint, null, null, p_limit, p_protocols, p_generation, p_now, p_rooms, p_resume_points
            ) a
            where a.quota > 0
                and ulak_private.is_adopted()
                -- Of several, an endpoint that has nothing due must not use up the limit.
                and (cardinality(p_endpoint_ids) = 1 or ulak_private.has_due(e.id, p_now, p_resume_points))
            limit p_limit
        ) a;
        return v_turn;
    end if;
    v_begun_behind := ulak_private.claim_position(p_endpoint_ids, p_protocols);
    select
        array_agg(e.id) filter (where e.quota > 0),
        array_agg(e.name) filter (where e.quota > 0),
        array_agg(e.config_version) filter (where e.quota > 0),
        array_agg(e.next) filter (where e.quota > 0),
        array_agg(e.quota) filter (where e.quota > 0),
        array_agg(0) filter (where e.quota > 0),
        array_agg(e.is_probe) filter (where e.quota > 0),
        array_agg(e.is_metered) filter (where e.quota > 0),
        -- Lower priorities of that endpoint may not have been visited.
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
        -- The last row of a walk that ended with as many visits as it may make.
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

-- The endpoints behind p_after that have waiting messages, and then those before it, each with its first one; if that isn't due, with the first one
-- of the next lower priority, too. What it costs follows what it finds: one probe of the index leads from an endpoint to the next. The walk
-- ends with the query that asks for it, or after p_most_visits: endpoints with an open circuit or with nothing due yet are visited in vain,
-- and there may be thousands of them.
-- p_resume_points: nothing before these places is due, so look from there on. They divide the index: what lies between two of their
-- endpoints is looked through as it is, and each of them from its own places on.
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
        -- Behind this endpoint the walk begins. It is none of those visited, and nor is 0, where the walk goes on from the beginning.
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
            -- Nothing of this priority is due: the next lower one of the same endpoint.
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

-- The first message of an endpoint's highest priority that has something due.
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

-- The priorities of an endpoint up to p_priority, the highest first, and where a claim begins to look in each: in the first one at a place that
-- is given, in the others where it resumes.
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

-- Resuming. What was claimed leaves dead entries in the index of waiting messages until vacuum removes them, and a claim walks over them.
-- Usually they are few. While an old snapshot keeps vacuum from its work they are many: 1.4 us each. So a look from the beginning that
-- has passed more than 200 of them buys the claims of this session 50 us for each, at most 10 s, in which they begin where the last one
-- ended: looking takes 3% of the time at most. What a claim that resumes can't see is found by the next look: messages that another session
-- had locked, or that were committed out of turn by more than a tenth of a second.

-- The session's memory: until when the places hold (in seconds since 1970), for which generation, and the places. A parameter, which a
-- rollback sets back too. Whatever somebody writes there harms the claims of that session alone.
create or replace function ulak_private.resume_points(p_generation bigint)
returns ulak_private.resume_point[]
language plpgsql
as $plpgsql$
declare
    v_memory jsonb := nullif(current_setting('ulak_private.resume_points', true), '');
begin
    if (v_memory ->> 'until')::double precision - extract(epoch from clock_timestamp()) between 0 and 10
        and (v_memory ->> 'generation')::bigint is not distinct from p_generation
    then
        return ulak_private.remembered_places(v_memory);
    end if;
    return '{}';
end
$plpgsql$;

create or replace function ulak_private.remembered_places(p_memory jsonb)
returns ulak_private.resume_point[]
language sql
stable
as $sql$
    select array(select p from jsonb_populate_recordset(null::ulak_private.resume_point, p_memory -> 'places') p)
$sql$;

create or replace function ulak_private.set_resume_points(
    p_until double precision,
    p_generation bigint,
    p_places ulak_private.resume_point[]
)
returns void
language sql
as $sql$
    select set_config(
        'ulak_private.resume_points',
        jsonb_build_object('until', p_until, 'generation', p_generation, 'places', to_jsonb(p_places))::text,
        false
    )
$sql$;

-- After a claim that has passed so many dead entries; p_is_look: it began at the beginning. At most 64 places are kept, those that were
-- reached last.
create or replace function ulak_private.remember_places(
    p_turn ulak_private.turn,
    p_is_look boolean,
    p_passed bigint,
    p_endpoint_ids bigint[],
    p_protocols text[],
    p_generation bigint,
    p_now timestamptz
)
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_memory jsonb := nullif(current_setting('ulak_private.resume_points', true), '');
    v_now timestamptz := clock_timestamp();
    v_until double precision := v_memory ->> 'until';
    v_reached ulak_private.resume_point[] := array(
        select row(p_turn.endpoint_ids[m.place], m.priority, m.due_at, m.id + 1)::ulak_private.resume_point
        from unnest(p_turn.places, p_turn.priorities, p_turn.due_ats, p_turn.ids) m(place, priority, due_at, id)
    );
begin
    if p_is_look then
        v_until := extract(epoch from v_now) + least(p_passed * 0.00005, 10);
        if v_reached = '{}' then
            -- All that it passed belongs to endpoints that have nothing due.
            v_reached := array(
                select row(e.id, 0, p_now, 0)::ulak_private.resume_point
                from ulak.endpoints e
                where (e.id = any (p_endpoint_ids) or p_endpoint_ids is null and (p_protocols is null or e.protocol = any (p_protocols)))
                    and not ulak_private.has_due(e.id, p_now, '{}')
                order by e.id
                limit 32
            );
        end if;
    elsif v_reached = '{}' then
        return;
    end if;
    if (v_memory ->> 'generation')::bigint is distinct from p_generation then
        v_memory := null;
    end if;
    perform ulak_private.set_resume_points(v_until, p_generation, array(
        select row(
            k.endpoint_id,
            k.priority,
            least(k.due_at, v_now - interval '0.1 s'),
            case when k.due_at <= v_now - interval '0.1 s' then k.id else 0 end
        )::ulak_private.resume_point
        from (
            select distinct on (r.endpoint_id, r.priority) r.*
            from unnest(ulak_private.remembered_places(v_memory) || v_reached) with ordinality r(endpoint_id, priority, due_at, id, number)
            order by r.endpoint_id, r.priority, r.number desc
        ) k
        order by k.number desc
        limit 64
    ));
end
$plpgsql$;

-- These messages have become due at times that this session's claims may have passed.
create or replace function ulak_private.step_back(p_places ulak_private.resume_point[])
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_memory jsonb := nullif(current_setting('ulak_private.resume_points', true), '');
begin
    if v_memory is not null and p_places is not null then
        perform ulak_private.set_resume_points(
            (v_memory ->> 'until')::double precision,
            (v_memory ->> 'generation')::bigint,
            array(
                select (
                    select n
                    from unnest(p_places || r) n
                    where n.endpoint_id = r.endpoint_id and n.priority = r.priority
                    order by n.due_at, n.id
                    limit 1
                )
                from unnest(ulak_private.remembered_places(v_memory)) r
            )
        );
    end if;
end
$plpgsql$;

-- Entries of the index of waiting messages that this session's scans have read and found no live message behind.
create or replace function ulak_private.passed_entries()
returns bigint
language sql
as $sql$
    select pg_catalog.pg_stat_get_xact_tuples_returned('ulak_private.deliveries_pending_idx'::pg_catalog.regclass)
        operator(pg_catalog.-) pg_catalog.pg_stat_get_xact_tuples_fetched('ulak_private.deliveries_pending_idx'::pg_catalog.regclass)
$sql$;
