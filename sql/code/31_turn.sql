-- Whose turn it is: a claim goes round the endpoints and takes up where the last one ended.

-- The first endpoints behind p_after that have a message due and may be sent to, each with the first message of its highest
-- priority that is due, in the order of the walk. What it costs follows what it finds: one probe of the index leads from an
-- endpoint to the next, and the walk ends with p_most endpoints found, after all were visited once, or after p_most_visits:
-- endpoints with an open circuit or with nothing due yet are visited in vain, and there may be thousands of them. A walk that
-- ends so has a last row with quota 0: with this endpoint the next one has to begin.
-- p_endpoint_ids: only these are visited. p_resume, with one endpoint: nothing before this place is due, so look from there on.
create or replace function ulak._endpoints_in_turn(
    p_after bigint,
    p_most integer,
    p_most_visits integer,
    p_limit integer,
    p_endpoint_ids bigint[],
    p_protocols text[],
    p_now timestamptz,
    p_rooms ulak._rooms,
    p_resume ulak._place
)
returns table (
    endpoint_id bigint,
    priority smallint,
    due_at timestamptz,
    first_id bigint,
    config_version bigint,
    -- How many of its messages may be claimed.
    quota integer,
    is_probe boolean,
    -- What is claimed must be noted in its row, which is locked.
    is_charged boolean
)
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
#variable_conflict use_column
begin
    return query
    with recursive visit(endpoint_id, priority, due_at, id, has_wrapped, number) as (
        (
            (
                select q.endpoint_id, q.priority, q.next_retry_at, q.id, false, 1
                from ulak._deliveries q
                where q.status = 'pending' and q.endpoint_id > p_after
                order by q.endpoint_id, q.priority desc, q.next_retry_at, q.id
                limit 1
            )
            union all
            (
                select q.endpoint_id, q.priority, q.next_retry_at, q.id, true, 1
                from ulak._deliveries q
                where q.status = 'pending'
                order by q.endpoint_id, q.priority desc, q.next_retry_at, q.id
                limit 1
            )
            limit 1
        )
        union all
        select n.*
        from visit v
        cross join lateral (
            -- Nothing of this priority is due: the next lower one of the same endpoint.
            (
                select q.endpoint_id, q.priority, q.next_retry_at, q.id, v.has_wrapped, v.number + 1
                from ulak._deliveries q
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
                from ulak._deliveries q
                where q.status = 'pending' and q.endpoint_id > v.endpoint_id
                order by q.endpoint_id, q.priority desc, q.next_retry_at, q.id
                limit 1
            )
            union all
            (
                select q.endpoint_id, q.priority, q.next_retry_at, q.id, true, v.number + 1
                from ulak._deliveries q
                where not v.has_wrapped and q.status = 'pending'
                order by q.endpoint_id, q.priority desc, q.next_retry_at, q.id
                limit 1
            )
            limit 1
        ) n
        where v.number < p_most_visits and (not n.has_wrapped or n.endpoint_id <= p_after)
    )
    select v.endpoint_id, v.priority, v.due_at, v.id, e.config_version, coalesce(e.quota, 0), e.is_probe, e.is_charged
    from (
        select v.endpoint_id, v.priority, v.due_at, v.id, v.due_at <= p_now as is_due, v.number
        from visit v
        where p_endpoint_ids is null and (v.due_at <= p_now or v.number = p_most_visits)
        union all
        select n.id, (n.first).priority, (n.first).due_at, (n.first).id, true, null
        from (
            select n.id, coalesce(p_resume, ulak._next_level(n.id, null, p_now)) as first
            from unnest(p_endpoint_ids) n(id)
            where p_endpoint_ids is not null
            offset 0
        ) n
    ) v
    left join lateral (
        select
            e.config_version,
            case when ulak._is_limited(e) then a.quota else r.room end as quota,
            coalesce((a.endpoint).circuit_state, 'closed') <> 'closed' as is_probe,
            coalesce(ulak._is_charged(a.endpoint), false) as is_charged
        from ulak.endpoints e
        cross join lateral (
            select least(p_limit, coalesce((p_rooms).rooms[array_position((p_rooms).endpoint_ids, e.id)], (p_rooms).others))
        ) r(room)
        -- Only an endpoint with a limit or a troubled circuit needs a lock; the others are read. Who finds it locked leaves it
        -- to the other, so claims never wait for each other.
        left join lateral (
            select l.endpoint, ulak._admit(l.endpoint, r.room, p_now) as quota
            from (
                select l as endpoint
                from ulak.endpoints l
                where l.id = e.id and l.enabled
                for no key update skip locked
            ) l
            where ulak._is_limited(e)
            offset 0
        ) a on true
        where e.id = v.endpoint_id
            and v.is_due
            and v.id is not null
            and e.enabled
            and (p_protocols is null or e.protocol = any (p_protocols))
            and r.room > 0
            and not ulak._is_cooling(e, p_now)
            -- Who has no token left need not be locked to be passed over.
            and (not ulak._is_charged(e) or ulak._rate_tokens(e, p_now) >= 1)
        offset 0
    ) e on true
    where e.quota > 0 or v.number = p_most_visits
    limit p_most;
end
$plpgsql$;

-- The first message of an endpoint's highest priority below p_below (null: of all) that has something due; null if none has.
create or replace function ulak._next_level(p_endpoint_id bigint, p_below smallint, p_now timestamptz)
returns ulak._place
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_first ulak._place;
begin
    v_first.priority := coalesce(p_below, 32767);
    loop
        select q.priority, q.next_retry_at, q.id into v_first
        from ulak._deliveries q
        where q.status = 'pending' and q.endpoint_id = p_endpoint_id and q.priority < v_first.priority
        order by q.priority desc, q.next_retry_at, q.id
        limit 1;
        if not found then
            return null;
        elsif v_first.due_at <= p_now then
            return v_first;
        end if;
    end loop;
end
$plpgsql$;
