-- Whose turn it is: a claim goes round the endpoints and takes up where the last one ended.

-- The first endpoints behind p_after that have a message due and may be sent to, each with the first message of its highest
-- priority that is due, in the order of the walk. What it costs follows what it finds: one probe of the index leads from an
-- endpoint to the next, and the walk ends with p_most endpoints found, after all were visited once, or after p_most_visits:
-- endpoints with an open circuit or with nothing due yet are visited in vain, and there may be thousands of them. A walk that
-- ends so has a last row with quota 0: with this endpoint the next one has to begin.
-- p_resume_points: nothing before these places is due, so look from there on. They divide the
-- index: what lies between two of their endpoints is looked through as it is, and each of them from its own places on.
create or replace function ulak_private.endpoints_in_turn(
    p_after bigint,
    p_most integer,
    p_most_visits integer,
    p_limit integer,
    p_protocols text[],
    p_now timestamptz,
    p_rooms ulak_private.rooms,
    p_resume_points ulak_private.resume_point[]
)
returns table (
    endpoint_id bigint,
    name text,
    priority smallint,
    due_at timestamptz,
    first_id bigint,
    config_version bigint,
    -- How many of its messages may be claimed.
    quota integer,
    is_probe boolean,
    -- What is claimed must be noted in its row, which is locked.
    is_metered boolean
)
language plpgsql
as $plpgsql$
#variable_conflict use_column
begin
    return query
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
                select r.endpoint_id, coalesce((n.first).priority, 0::smallint), coalesce((n.first).due_at, 'infinity'), (n.first).id, v.has_wrapped, v.number + 1
                from (select ulak_private.next_level(r.endpoint_id, null, p_now, p_resume_points) as first offset 0) n
                where r.endpoint_id is not null
            )
            union all
            select 0, 0::smallint, timestamptz 'infinity', 0, true, v.number
            where not v.has_wrapped and p_after > 0
            limit 1
        ) n
        where v.number < p_most_visits and (not n.has_wrapped or n.endpoint_id <= p_after)
    )
    select v.endpoint_id, e.name, v.priority, v.due_at, v.id, e.config_version, coalesce(e.quota, 0), e.is_probe, e.is_metered
    from visit v
    left join lateral (
        select
            e.name,
            e.config_version,
            case when ulak_private.is_limited(e) then a.quota else r.room end as quota,
            coalesce(a.is_probe, false) as is_probe,
            coalesce(a.is_metered, false) as is_metered
        from ulak.endpoints e
        cross join lateral (select ulak_private.room_for(e.id, p_limit, p_rooms)) r(room)
        -- Only an endpoint with a limit or a troubled circuit is locked. The others are read.
        left join lateral (
            select a.*
            from ulak_private.admit_limited(e.id, r.room, p_now) a
            where ulak_private.is_limited(e)
            offset 0
        ) a on true
        where e.id = v.endpoint_id
            and v.due_at <= p_now
            and v.id is not null
            and r.room > 0
            and ulak_private.is_open(e, p_protocols, p_now)
        offset 0
    ) e on true
    where (v.due_at <= p_now or v.number = p_most_visits)
        and (e.quota > 0 or v.number = p_most_visits)
        and ulak_private.is_adopted()
    limit p_most;
end
$plpgsql$;

-- The first message of an endpoint's highest priority below p_below (null: of all) that has something due; null if none has.
create or replace function ulak_private.next_level(
    p_endpoint_id bigint,
    p_below smallint,
    p_now timestamptz,
    p_resume_points ulak_private.resume_point[]
)
returns ulak_private.place
language plpgsql
as $plpgsql$
declare
    v_below smallint := coalesce(p_below, 32767);
    v_point ulak_private.resume_point;
    v_first ulak_private.place;
begin
    loop
        v_point := null;
        if p_resume_points <> '{}' then
            select r.* into v_point
            from unnest(p_resume_points) r
            where r.endpoint_id = p_endpoint_id and r.priority < v_below
            order by r.priority desc
            limit 1;
        end if;
        select q.priority, q.next_retry_at, q.id into v_first
        from ulak_private.deliveries q
        where q.status = 'pending'
            and q.endpoint_id = p_endpoint_id
            and q.priority < v_below
            and q.priority > coalesce(v_point.priority, -1)
        order by q.priority desc, q.next_retry_at, q.id
        limit 1;
        if not found and v_point.priority is not null then
            select q.priority, q.next_retry_at, q.id into v_first
            from ulak_private.deliveries q
            where q.status = 'pending'
                and q.endpoint_id = p_endpoint_id
                and q.priority = v_point.priority
                and (q.next_retry_at, q.id) >= (v_point.due_at, v_point.id)
            order by q.next_retry_at, q.id
            limit 1;
        end if;
        if v_first.due_at <= p_now then
            return v_first;
        end if;
        v_below := coalesce(v_first.priority, v_point.priority);
        if v_below is null then
            return null;
        end if;
    end loop;
end
$plpgsql$;

-- Resuming. What was claimed leaves dead entries in the index of waiting messages until vacuum removes them, and a claim walks over them.
-- Usually they are few. While an old snapshot keeps vacuum from its work they are many: 1.4 us each. So a look from the beginning that
-- has passed more than 200 of them buys the claims of this session 50 us for each, at most 10 s, in which they begin where the last one
-- ended: looking takes 3% of the time at most. What a claim that resumes can't see is found by the next look: messages that another session
-- had locked, or that were committed out of turn by more than a tenth of a second.

-- The session's memory: until when (in microseconds), for which generation, and then endpoint, priority, time and id of each place.
-- A parameter, which a rollback sets back too. Whatever somebody writes there harms the claims of that session alone.
create or replace function ulak_private.resume_points(p_generation bigint)
returns ulak_private.resume_point[]
language plpgsql
as $plpgsql$
declare
    v_memory bigint[] := nullif(current_setting('ulak_private.resume_points', true), '');
    v_now bigint;
begin
    if v_memory is null then
        return '{}';
    end if;
    v_now := extract(epoch from clock_timestamp()) * 1000000;
    if v_memory[1] between v_now and v_now + 10000000 and v_memory[2] is not distinct from p_generation then
        return ulak_private.remembered_places(v_memory);
    end if;
    return '{}';
end
$plpgsql$;

create or replace function ulak_private.remembered_places(p_memory bigint[])
returns ulak_private.resume_point[]
language plpgsql
stable
as $plpgsql$
declare
    v_places ulak_private.resume_point[] := '{}';
begin
    for i in 3..coalesce(cardinality(p_memory), 0) - 3 by 4 loop
        v_places := v_places || row(
            p_memory[i], p_memory[i + 1], timestamptz 'epoch' + p_memory[i + 2] * interval '1 us', p_memory[i + 3]
        )::ulak_private.resume_point;
    end loop;
    return v_places;
end
$plpgsql$;

-- After a claim that has reached these places and passed so many dead entries; p_is_look: it began at the beginning. At most 64 places
-- are kept, those that were reached last.
create or replace function ulak_private.remember_places(
    p_reached ulak_private.resume_point[],
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
    v_memory bigint[] := nullif(current_setting('ulak_private.resume_points', true), '');
    v_now timestamptz := clock_timestamp();
    v_until bigint := v_memory[1];
begin
    if p_is_look then
        v_until := extract(epoch from v_now) * 1000000 + least(p_passed * 50, 10000000);
        if p_reached is null then
            -- All that it passed belongs to endpoints that have nothing due.
            p_reached := array(
                select row(e.id, 0, p_now, 0)::ulak_private.resume_point
                from ulak.endpoints e
                where (e.id = any (p_endpoint_ids) or p_endpoint_ids is null and (p_protocols is null or e.protocol = any (p_protocols)))
                    and ulak_private.next_level(e.id, null, p_now, '{}') is null
                order by e.id
                limit 32
            );
        end if;
    end if;
    if p_reached is null and not p_is_look then
        return;
    elsif v_memory[2] is distinct from p_generation then
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
            from unnest(ulak_private.remembered_places(v_memory) || p_reached) with ordinality r(endpoint_id, priority, due_at, id, number)
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
    v_memory bigint[] := nullif(current_setting('ulak_private.resume_points', true), '');
begin
    if v_memory is not null and p_places is not null then
        perform ulak_private.set_resume_points(v_memory[1], v_memory[2], array(
            select (
                select n
                from unnest(p_places || r) n
                where n.endpoint_id = r.endpoint_id and n.priority = r.priority
                order by n.due_at, n.id
                limit 1
            )
            from unnest(ulak_private.remembered_places(v_memory)) r
        ));
    end if;
end
$plpgsql$;

create or replace function ulak_private.set_resume_points(p_until bigint, p_generation bigint, p_places ulak_private.resume_point[])
returns void
language plpgsql
as $plpgsql$
declare
    v_memory bigint[] := array[p_until, p_generation];
    v_place ulak_private.resume_point;
begin
    foreach v_place in array p_places loop
        v_memory := v_memory
            || array[v_place.endpoint_id, v_place.priority, extract(epoch from v_place.due_at) * 1000000, v_place.id]::bigint[];
    end loop;
    perform set_config('ulak_private.resume_points', v_memory::text, false);
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
