-- Who gets how much of a claim.

-- One pair of endpoint and priority that is due, of an endpoint that is well and has no limit, is the usual case of light
-- traffic, and of one busy endpoint; nothing that is due is the usual case of an idle worker, which asks twenty times a
-- second. A few probes find out, or one behind the mark: size is then above 0, or 0. A null size is for _allot().
create or replace function ulak._only_pair(
    p_limit integer,
    p_protocol text,
    p_endpoint_id bigint,
    p_now timestamptz,
    p_room_ids bigint[],
    p_rooms integer[],
    p_room integer,
    p_mark_endpoint_id bigint,
    p_mark_priority smallint,
    p_mark_due_at timestamptz,
    p_mark_id bigint,
    out endpoint_id bigint,
    out priority smallint,
    out since timestamptz,
    out first_id bigint,
    out size integer,
    out config_version bigint
)
language plpgsql
as $plpgsql$
declare
    v_pair record;
    v_room integer;
begin
    if p_mark_endpoint_id is not null then
        select q.endpoint_id, q.priority, q.next_retry_at, q.id into endpoint_id, priority, since, first_id
        from ulak.queue q
        where q.status = 'pending'
            and q.endpoint_id = p_mark_endpoint_id
            and q.priority = p_mark_priority
            and (q.next_retry_at, q.id) > (p_mark_due_at, p_mark_id)
            and q.next_retry_at <= p_now
        order by q.next_retry_at, q.id
        limit 1;
    end if;
    if endpoint_id is null then
        select q.endpoint_id, q.priority, q.next_retry_at, q.id into v_pair
        from ulak.queue q
        where q.status = 'pending' and q.endpoint_id >= coalesce(p_endpoint_id, 0)
        order by q.endpoint_id, q.priority desc, q.next_retry_at, q.id
        limit 1;
        for v_step in 1..4 loop
            if v_pair.next_retry_at <= p_now and (p_endpoint_id is null or v_pair.endpoint_id = p_endpoint_id) then
                if endpoint_id is not null then
                    return;
                end if;
                endpoint_id := v_pair.endpoint_id;
                priority := v_pair.priority;
                since := v_pair.next_retry_at;
                first_id := v_pair.id;
            end if;
            exit when v_pair.endpoint_id is null;
            select n.endpoint_id, n.priority, n.next_retry_at, n.id into v_pair
            from (
                (
                    select q.endpoint_id, q.priority, q.next_retry_at, q.id
                    from ulak.queue q
                    where q.status = 'pending' and q.endpoint_id = v_pair.endpoint_id and q.priority < v_pair.priority
                    order by q.priority desc, q.next_retry_at, q.id
                    limit 1
                )
                union all
                (
                    select q.endpoint_id, q.priority, q.next_retry_at, q.id
                    from ulak.queue q
                    where q.status = 'pending' and q.endpoint_id > v_pair.endpoint_id and p_endpoint_id is null
                    order by q.endpoint_id, q.priority desc, q.next_retry_at, q.id
                    limit 1
                )
                limit 1
            ) n;
        end loop;
        if v_pair.endpoint_id is not null then
            return;
        elsif endpoint_id is null then
            size := 0;
            return;
        end if;
    end if;

    v_room := least(p_limit, coalesce(p_rooms[array_position(p_room_ids, endpoint_id)], p_room));
    if v_room <= 0 then
        size := 0;
        return;
    end if;
    select e.config_version, v_room into config_version, size
    from ulak.endpoints e
    where e.id = _only_pair.endpoint_id
        and e.enabled
        and (p_protocol is null or e.protocol = p_protocol)
        and not ulak._is_limited(e);
end
$plpgsql$;

-- How many messages of which endpoint and priority, where they begin in the index, and under which config. A loose scan
-- visits all pairs.
create or replace function ulak._allot(
    p_limit integer,
    p_protocol text,
    p_endpoint_id bigint,
    p_generation bigint,
    p_now timestamptz,
    p_room_ids bigint[],
    p_rooms integer[],
    p_room integer
)
returns table (
    endpoint_id bigint,
    priority smallint,
    since timestamptz,
    first_id bigint,
    size integer,
    config_version bigint,
    circuit_state text,
    -- Its row is locked, and what is claimed must be taken out of its limit.
    is_limited boolean
)
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
#variable_conflict use_column
declare
    v_aging integer := nullif(ulak.setting('priority_aging')::integer, 0);
begin
    return query
    with recursive level(endpoint_id, priority, next_retry_at, id) as (
        (
            select q.endpoint_id, q.priority, q.next_retry_at, q.id
            from ulak.queue q
            where q.status = 'pending' and q.endpoint_id >= coalesce(p_endpoint_id, 0)
            order by q.endpoint_id, q.priority desc, q.next_retry_at, q.id
            limit 1
        )
        union all
        select n.endpoint_id, n.priority, n.next_retry_at, n.id
        from level l
        cross join lateral (
            (
                select q.endpoint_id, q.priority, q.next_retry_at, q.id
                from ulak.queue q
                where q.status = 'pending' and q.endpoint_id = l.endpoint_id and q.priority < l.priority
                order by q.priority desc, q.next_retry_at, q.id
                limit 1
            )
            union all
            (
                select q.endpoint_id, q.priority, q.next_retry_at, q.id
                from ulak.queue q
                where q.status = 'pending' and q.endpoint_id > l.endpoint_id and p_endpoint_id is null
                order by q.endpoint_id, q.priority desc, q.next_retry_at, q.id
                limit 1
            )
            limit 1
        ) n
    ),
    -- More than a handful of due rows make a pair busy. What was claimed since the last VACUUM lies before its first row
    -- in the index: a scan that starts at that row, by both columns, needn't walk over it again.
    due as materialized (
        select
            l.endpoint_id,
            l.priority,
            l.next_retry_at as since,
            l.id as first_id,
            exists (
                select
                from ulak.queue q
                where q.status = 'pending'
                    and q.endpoint_id = l.endpoint_id
                    and q.priority = l.priority
                    and (q.next_retry_at, q.id) >= (l.next_retry_at, l.id)
                    and q.next_retry_at <= p_now
                offset 4
            ) as is_busy
        from level l
        where (p_endpoint_id is null or l.endpoint_id = p_endpoint_id) and l.next_retry_at <= p_now
    ),
    -- Only an endpoint with a limit or a troubled circuit needs a lock; the others are read.
    ready as materialized (
        select
            e.id,
            e.config_version,
            coalesce(a.circuit_state, 'closed') as circuit_state,
            coalesce(a.quota, r.room) as quota,
            a.quota is not null as is_limited,
            exists (select from due d where d.endpoint_id = e.id and d.is_busy) as is_busy
        from ulak.endpoints e
        cross join lateral (
            select least(p_limit, coalesce(p_rooms[array_position(p_room_ids, e.id)], p_room))
        ) r(room)
        left join lateral (
            select a.quota, a.circuit_state
            from ulak._admit(e.id, r.room, p_now) a
            where ulak._is_limited(e)
            offset 0
        ) a on true
        where e.id = any (array(select distinct d.endpoint_id from due d))
            and e.enabled
            and (p_protocol is null or e.protocol = p_protocol)
            and r.room > 0
            and (e.circuit_state <> 'open' or e.circuit_half_open_at <= p_now)
    ),
    -- How many rows of an endpoint are looked at: all of a small one, twice its share of a busy one. So the cost
    -- follows the limit, however many endpoints there are, and small ones leave their room to the busy. Lots are drawn
    -- for the case that not each endpoint gets a turn.
    share as materialized (
        select
            r.id,
            random() as lot,
            least(
                r.quota,
                case when r.is_busy then ceil(2.0 * p_limit / count(*) filter (where r.is_busy) over ())::integer end
            ) as size
        from ready r
        where r.quota > 0
    ),
    candidate as (
        select
            d.endpoint_id,
            d.priority,
            d.since,
            d.first_id,
            s.size,
            s.lot,
            row_number() over (
                partition by d.endpoint_id
                order by
                    case
                        when v_aging is null then d.priority
                        else d.priority + floor(date_part('epoch', p_now - c.next_retry_at) / v_aging)
                    end desc,
                    c.next_retry_at,
                    c.id
            ) as turn
        from share s
        join due d on d.endpoint_id = s.id
        cross join lateral (
            select q.id, q.next_retry_at
            from ulak.queue q
            where q.status = 'pending'
                and q.endpoint_id = d.endpoint_id
                and q.priority = d.priority
                and (q.next_retry_at, q.id) >= (d.since, d.first_id)
                and q.next_retry_at <= p_now
                and (q.expires_at is null or q.expires_at > p_now)
                and (p_generation is null or q.generation = p_generation)
                and (
                    q.ordering_key is null
                    or not exists (
                        select
                        from ulak.queue h
                        where h.endpoint_id = q.endpoint_id
                            and h.ordering_key = q.ordering_key
                            and h.status in ('pending', 'processing')
                            and (h.ordering_key, h.id) < (q.ordering_key, q.id)
                    )
                )
            order by q.next_retry_at, q.id
            limit s.size
        ) c
    ),
    -- Endpoints take turns until the limit is reached.
    allotment as (
        select t.endpoint_id, t.priority, t.since, t.first_id, count(*) as size
        from (
            select c.endpoint_id, c.priority, c.since, c.first_id
            from candidate c
            where c.turn <= c.size
            order by c.turn, c.lot
            limit p_limit
        ) t
        group by t.endpoint_id, t.priority, t.since, t.first_id
    )
    select a.endpoint_id, a.priority, a.since, a.first_id, a.size::integer, r.config_version, r.circuit_state, r.is_limited
    from allotment a
    join ready r on r.id = a.endpoint_id;
end
$plpgsql$;
