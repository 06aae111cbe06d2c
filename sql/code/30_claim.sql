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
    p_room integer default null,
    -- Where an earlier claim ended, of one endpoint and priority: if there is something due behind it, nothing else is seen.
    p_mark_endpoint_id bigint default null,
    p_mark_priority smallint default null,
    p_mark_due_at timestamptz default null,
    p_mark_id bigint default null
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
    circuit_state text,
    due_at timestamptz
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
    v_is_adopted boolean;
    v_has_wakeups boolean;
    v_pair record;
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
    p_now := ulak._clock(p_now);
    select
        not exists (select from ulak.cluster_identity i where i.system_identifier <> ulak._system_identifier()),
        exists (select from ulak.ordering_wakeups)
    into v_is_adopted, v_has_wakeups;
    if not v_is_adopted then
        return;
    elsif v_has_wakeups then
        perform ulak._wake_ordering_keys(p_now);
    end if;

    v_pair := ulak._only_pair(
        p_limit,
        p_protocol,
        p_endpoint_id,
        p_now,
        p_room_ids,
        p_rooms,
        p_room,
        p_mark_endpoint_id,
        p_mark_priority,
        p_mark_due_at,
        p_mark_id
    );
    if v_pair.size = 0 then
        return;
    elsif v_pair.size > 0 then
        return query
        update ulak.queue q
        set status = 'processing',
            attempts = q.attempts + 1,
            locked_by = p_worker,
            lease_until = p_now + v_lease,
            processing_started_at = p_now,
            updated_at = p_now
        from (
            select q.ctid as tid
            from ulak.queue q
            where q.status = 'pending'
                and q.endpoint_id = v_pair.endpoint_id
                and q.priority = v_pair.priority
                and (q.next_retry_at, q.id) >= (v_pair.since, v_pair.first_id)
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
            limit v_pair.size
            for update skip locked
        ) l
        where q.ctid = l.tid
        returning
            q.id,
            q.message_id,
            q.attempts,
            q.endpoint_id,
            v_pair.config_version,
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
            'closed',
            q.next_retry_at;
        return;
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
            ulak._log_time(p_now)
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
        case when c.circuit_state = 'closed' then 'closed' else 'half_open' end,
        c.next_retry_at
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
