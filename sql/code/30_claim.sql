-- Claiming: a worker leases messages that are due.

-- What is claimable decides the cost, not what is stored: a loose scan finds the (endpoint, priority) pairs that have
-- pending rows, one probe each, and only the due rows of each pair are read, in order.
-- The planner's choices are pinned, because a plan that was made for an empty queue may be used for a full one: besides
-- the settings, `offset 0` keeps a subquery from becoming a join, and earlier messages of an ordering key are looked for
-- by key and id together, which only the right index has.
create or replace function ulak._claim(
    p_worker text,
    p_limit integer,
    p_protocol text default null,
    p_endpoint_id bigint default null,
    p_lease interval default null,
    p_generation bigint default null,
    p_now timestamptz default clock_timestamp(),
    -- The worker's own room per endpoint: p_rooms for p_room_ids, p_room for all others; null is no bound.
    p_room_ids bigint[] default '{}',
    p_rooms integer[] default '{}',
    p_room integer default null
)
returns table (
    id bigint,
    message_id uuid,
    attempt integer,
    endpoint_id bigint,
    config_version bigint,
    payload jsonb,
    headers jsonb,
    metadata jsonb,
    correlation_id uuid,
    ordering_key text,
    priority smallint,
    idempotency_key text,
    created_at timestamptz,
    expires_at timestamptz,
    lease_until timestamptz,
    circuit_state text
)
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
set plan_cache_mode = force_generic_plan
as $plpgsql$
#variable_conflict use_column
declare
    v_lease interval := coalesce(p_lease, make_interval(secs => ulak.setting('stale_recovery_timeout')::integer));
    v_aging integer;
    v_endpoint_ids bigint[];
    v_priorities smallint[];
    v_sinces timestamptz[];
    v_first_ids bigint[];
    v_sizes integer[];
    v_config_versions bigint[];
    v_circuit_states text[];
    v_are_limited boolean[];
begin
    if not ulak._is_adopted() then
        return;
    end if;
    if exists (select from ulak.ordering_wakeups) then
        perform ulak._wake_ordering_keys(p_now);
    end if;
    select
        array_agg(a.endpoint_id),
        array_agg(a.priority),
        array_agg(a.since),
        array_agg(a.first_id),
        array_agg(a.size),
        array_agg(a.config_version),
        array_agg(a.circuit_state),
        array_agg(a.is_limited)
    into v_endpoint_ids, v_priorities, v_sinces, v_first_ids, v_sizes, v_config_versions, v_circuit_states, v_are_limited
    from ulak._allot(p_limit, p_protocol, p_endpoint_id, p_generation, p_now, p_room_ids, p_rooms, p_room) a;
    if v_endpoint_ids is null then
        return;
    elsif cardinality(v_endpoint_ids) > 1 then
        v_aging := nullif(ulak.setting('priority_aging')::integer, 0);
    end if;

    return query
    -- The rows that were counted, unless another worker has them: then the next ones.
    with leased as (
        select q.tid, a.config_version, a.circuit_state, a.is_limited
        from unnest(
            v_endpoint_ids, v_priorities, v_sinces, v_first_ids, v_sizes, v_config_versions, v_circuit_states, v_are_limited
        ) a(endpoint_id, priority, since, first_id, size, config_version, circuit_state, is_limited)
        cross join lateral (
            select q.ctid as tid
            from ulak.queue q
            where q.status = 'pending'
                and q.endpoint_id = a.endpoint_id
                and q.priority = a.priority
                and (q.next_retry_at, q.id) >= (a.since, a.first_id)
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
            limit a.size
            for update skip locked
        ) q
    ),
    claimed as (
        update ulak.queue q
        set status = 'processing',
            attempts = q.attempts + 1,
            locked_by = p_worker,
            lease_until = p_now + v_lease,
            processing_started_at = p_now,
            updated_at = p_now
        from leased l
        where q.ctid = l.tid
        -- Not q.*: wide rows are copied and sorted below.
        returning
            q.id,
            q.message_id,
            q.attempts,
            q.endpoint_id,
            q.payload,
            q.headers,
            q.metadata,
            q.correlation_id,
            q.ordering_key,
            q.priority,
            q.idempotency_key,
            q.created_at,
            q.expires_at,
            q.lease_until,
            q.next_retry_at,
            l.config_version,
            l.circuit_state,
            l.is_limited
    ),
    -- What it took out of a limit. The first message of an open circuit is its probe, and makes it half-open: the row has
    -- been locked since it was admitted, so of all sessions one gets here.
    spent as (
        update ulak.endpoints e
        set rate_tokens = ulak._rate_tokens(e, p_now) - c.messages,
            -- Clocks of sessions differ: time that has given its tokens must not give them again.
            rate_refilled_at = greatest(e.rate_refilled_at, p_now),
            release_rate = case when e.release_rate is not null and ulak._has_held(e.id, e.release_before) then e.release_rate end,
            circuit_state = case when e.circuit_state = 'closed' then 'closed' else 'half_open' end,
            circuit_probe_id = case when e.circuit_state <> 'closed' then c.id end,
            circuit_probe_attempt = case when e.circuit_state <> 'closed' then c.attempts end
        from (
            select c.endpoint_id, count(*) as messages, min(c.id) as id, min(c.attempts) as attempts
            from claimed c
            where c.is_limited
            group by c.endpoint_id
        ) c
        where e.id = c.endpoint_id
        returning e.id, e.name, e.circuit_failure_count
    ),
    logged as (
        insert into ulak.event_log (event, endpoint_id, endpoint_name, old_value, new_value, created_at)
        select
            'circuit.half_open',
            s.id,
            s.name,
            ulak._circuit_value('open', s.circuit_failure_count),
            ulak._circuit_value('half_open', s.circuit_failure_count),
            p_now
        from spent s
        where exists (select from claimed c where c.endpoint_id = s.id and c.circuit_state = 'open')
    )
    select
        c.id,
        c.message_id,
        c.attempts,
        c.endpoint_id,
        c.config_version,
        c.payload,
        c.headers,
        c.metadata,
        c.correlation_id,
        c.ordering_key,
        c.priority,
        c.idempotency_key,
        c.created_at,
        c.expires_at,
        c.lease_until,
        case when c.circuit_state = 'closed' then 'closed' else 'half_open' end
    from claimed c
    -- In the order in which they were allotted.
    order by
        row_number() over (
            partition by c.endpoint_id
            order by
                case
                    when v_aging is null then c.priority
                    else c.priority + floor(date_part('epoch', p_now - c.next_retry_at) / v_aging)
                end desc,
                c.next_retry_at,
                c.id
        ),
        c.endpoint_id;
end
$plpgsql$;

-- How many messages of which endpoint and priority, where they begin in the index, and under which config. One pair that is
-- due, of an endpoint that is well and has no limit, is the usual case of light traffic, and needs no more than a few
-- probes; nothing that is due is the usual case of an idle worker, which asks twenty times a second.
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
    v_aging integer;
    v_first record;
    v_pair record;
    v_due record;
    v_due_pairs integer := 0;
    v_room integer;
begin
    select q.endpoint_id, q.priority, q.next_retry_at, q.id into v_first
    from ulak.queue q
    where q.status = 'pending' and q.endpoint_id >= coalesce(p_endpoint_id, 0)
    order by q.endpoint_id, q.priority desc, q.next_retry_at, q.id
    limit 1;
    v_pair := v_first;
    for v_step in 1..4 loop
        if v_pair.next_retry_at <= p_now and (p_endpoint_id is null or v_pair.endpoint_id = p_endpoint_id) then
            v_due_pairs := v_due_pairs + 1;
            v_due := v_pair;
        end if;
        exit when v_due_pairs > 1 or v_pair.endpoint_id is null;
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
    if v_pair.endpoint_id is null and v_due_pairs = 0 then
        return;
    end if;
    if v_pair.endpoint_id is null and v_due_pairs = 1 then
        v_room := least(p_limit, coalesce(p_rooms[array_position(p_room_ids, v_due.endpoint_id)], p_room));
        return query
        select e.id, v_due.priority, v_due.next_retry_at, v_due.id, v_room, e.config_version, 'closed', false
        from ulak.endpoints e
        where e.id = v_due.endpoint_id
            and e.enabled
            and (p_protocol is null or e.protocol = p_protocol)
            and v_room > 0
            and not ulak._is_limited(e);
        if found then
            return;
        end if;
    end if;

    v_aging := nullif(ulak.setting('priority_aging')::integer, 0);
    return query
    with recursive level(endpoint_id, priority, next_retry_at, id) as (
        select v_first.endpoint_id, v_first.priority, v_first.next_retry_at, v_first.id
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
