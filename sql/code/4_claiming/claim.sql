-- Claiming: a worker leases messages that are due.

-- What is claimable decides the cost, not what is stored nor how many endpoints there are. The planner's choices are pinned,
-- because a plan that was made for an empty queue may be used for a full one.
create or replace function ulak_private.claim(
    p_worker text,
    p_limit integer,
    p_lease interval default null,
    -- Only of these endpoints; null: of all in turn.
    p_endpoint_ids bigint[] default null,
    p_protocols text[] default null,
    p_generation bigint default null,
    p_now timestamptz default clock_timestamp(),
    -- How many messages the worker has room for, by endpoint; null: any number.
    p_rooms ulak_private.rooms default null,
    -- Of so many endpoints at most. Few: each has messages enough. Many: each has one or two.
    p_most_endpoints integer default 32,
    -- So many are visited at most, 8 us each if in vain. A claim that ends so says that it has left out others.
    p_most_visits integer default 1000
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
    due_at timestamptz,
    -- The endpoint got all that it was asked for: it may have more.
    may_have_more boolean,
    -- The claim ended before it had visited everybody. If it got nothing, this is told by a row without a message.
    left_out_others boolean
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
    v_lease_until timestamptz;
    v_resume_points ulak_private.resume_point[];
    v_passed bigint := ulak_private.passed_entries();
    v_turn record;
begin
    p_now := ulak_private.clock(p_now);
    v_resume_points := ulak_private.resume_points(p_generation);
    v_lease_until := p_now + coalesce(p_lease, make_interval(secs => ulak.setting('stale_recovery_timeout')::integer));
    if not ulak_private.is_adopted() then
        return;
    end if;
    -- Endpoints may turn out to have nothing but messages behind their ordering keys or past their time: then it is the turn
    -- of the next ones. Eight times at most: a claim that gets nothing has to end too.
    for v_walk in 1..8 loop
        v_turn := ulak_private.take_turn(
            p_limit, p_endpoint_ids, p_protocols, p_generation, p_now, p_rooms, v_resume_points, p_most_endpoints,
            p_most_visits
        );
        exit when v_turn.tids <> '{}' or v_turn.is_last;
    end loop;
    v_passed := ulak_private.passed_entries() - v_passed;
    if v_passed > 200 or v_resume_points <> '{}' then
        perform ulak_private.remember_places(
            v_turn.reached, v_resume_points = '{}', v_passed, p_endpoint_ids, p_protocols, p_generation, p_now
        );
    end if;
    if v_turn.tids <> '{}' and ulak_private.has_old_settings() then
        return;
    end if;
    if v_turn.tids = '{}' then
        if v_turn.left_out_others then
            left_out_others := true;
            return next;
        end if;
        return;
    end if;

    return query
    with claimed as (
        update ulak_private.deliveries q
        set status = 'processing',
            attempts = q.attempts + 1,
            locked_by = p_worker,
            lease_until = v_lease_until,
            processing_started_at = p_now,
            updated_at = p_now
        from unnest(v_turn.tids, v_turn.places) l(tid, place)
        where q.ctid = l.tid
        returning q.*, l.place
    )
    select
        c.id,
        c.message_id,
        c.attempts,
        c.endpoint_id,
        v_turn.config_versions[c.place],
        coalesce(c.payload, e.payload),
        -- A probe waits as long as the endpoint allows: a message's own time-out would tell nothing about the receiver.
        case
            when v_turn.are_probes[c.place] then ulak_private.sent_headers(
                coalesce(c.headers, e.headers) - ':timeout', c.generation, c.id, c.attempts
            )
            else ulak_private.sent_headers(coalesce(c.headers, e.headers), c.generation, c.id, c.attempts)
        end,
        coalesce(c.metadata, e.metadata),
        c.correlation_id,
        c.ordering_key,
        c.priority,
        c.idempotency_key,
        c.created_at,
        c.expires_at,
        c.lease_until,
        case when v_turn.are_probes[c.place] then 'half_open' else 'closed' end,
        c.next_retry_at,
        v_turn.may_have_more[c.place],
        v_turn.left_out_others
    from claimed c
    left join lateral (
        select e.payload, e.headers, e.metadata
        from ulak_private.events e
        where e.id = c.event_id
            and e.created_at = coalesce(c.event_created_at, c.created_at)
            -- Parameters of the statement, so that only the months in question are opened.
            and e.created_at between v_turn.first_event_at and v_turn.last_event_at
        -- So that it is looked up for each message: a plan that was made for few events would join with all of them.
        limit 1
    ) e on true;

    if true = any (v_turn.are_charged) then
        perform ulak_private.charge(
            v_turn.endpoint_ids, v_turn.are_charged, v_turn.counts, v_turn.ids, v_turn.places, p_now
        );
    end if;
end
$plpgsql$;

-- Locks messages of the endpoints whose turn it is: places[i] says of which endpoint of endpoint_ids message i is.
create or replace function ulak_private.take_turn(
    p_limit integer,
    p_endpoint_ids bigint[],
    p_protocols text[],
    p_generation bigint,
    p_now timestamptz,
    p_rooms ulak_private.rooms,
    p_resume_points ulak_private.resume_point[],
    p_most_endpoints integer,
    p_most_visits integer,
    out endpoint_ids bigint[],
    out config_versions bigint[],
    out are_probes boolean[],
    out are_charged boolean[],
    out may_have_more boolean[],
    -- How many messages each has got.
    out counts integer[],
    out tids tid[],
    out ids bigint[],
    out places integer[],
    -- When the first and the last of their events were sent.
    out first_event_at timestamptz,
    out last_event_at timestamptz,
    -- Where the next claim of this session can go on.
    out reached ulak_private.resume_point[],
    -- Another walk would find nobody else: all were visited, or as many as a claim may visit, or only some were asked for.
    out is_last boolean,
    -- The walk ended with as many visits as it may make, or as many endpoints as it may find: others may have something due.
    out left_out_others boolean
)
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_aging integer := nullif(ulak_private.stored_setting('priority_aging')::integer, 0);
    v_begun_behind bigint := ulak_private.claim_position(p_endpoint_ids, p_protocols);
    v_most_endpoints integer := least(p_limit, coalesce(cardinality(p_endpoint_ids), p_most_endpoints));
    -- Of each endpoint: where its next message is to be looked for, and how many it may still get.
    v_priorities smallint[];
    v_due_ats timestamptz[];
    v_first_ids bigint[];
    v_quotas integer[];
    v_sizes integer[];
    -- A walk that ended before it had gone round: there the next one begins.
    v_walked_to bigint;
    v_ended_at bigint;
    v_is_full boolean;
    v_next ulak_private.place;
    v_locked record;
    v_left integer := p_limit;
    v_behind integer := 0;
begin
    tids := '{}';
    ids := '{}';
    places := '{}';
    reached := '{}';
    select
        array_agg(t.endpoint_id) filter (where t.quota > 0),
        array_agg(t.priority) filter (where t.quota > 0),
        array_agg(t.due_at) filter (where t.quota > 0),
        array_agg(t.first_id) filter (where t.quota > 0),
        array_agg(t.config_version) filter (where t.quota > 0),
        array_agg(t.quota) filter (where t.quota > 0),
        array_agg(t.is_probe) filter (where t.quota > 0),
        array_agg(t.is_charged) filter (where t.quota > 0),
        array_agg(false) filter (where t.quota > 0),
        array_agg(0) filter (where t.quota > 0),
        -- Lower priorities of that endpoint may not have been visited.
        max(greatest(t.endpoint_id - 1, 1)) filter (where t.quota = 0)
    into
        endpoint_ids,
        v_priorities,
        v_due_ats,
        v_first_ids,
        config_versions,
        v_quotas,
        are_probes,
        are_charged,
        may_have_more,
        counts,
        v_walked_to
    from ulak_private.endpoints_in_turn(
        v_begun_behind,
        v_most_endpoints,
        p_most_visits,
        p_limit,
        p_endpoint_ids,
        p_protocols,
        p_now,
        p_rooms,
        p_resume_points
    ) t;
    is_last := endpoint_ids is null or v_walked_to is not null or p_endpoint_ids is not null;
    v_ended_at := coalesce(v_walked_to, endpoint_ids[cardinality(endpoint_ids)]);
    if p_endpoint_ids is null and v_ended_at is not null then
        perform ulak_private.set_claim_position(v_ended_at, p_protocols);
    end if;

    for i in 1..coalesce(cardinality(endpoint_ids), 0) loop
        continue when not are_probes[i];
        -- A probe isn't chosen by its priority, however long it has waited.
        v_aging := null;
        v_next := ulak_private.probe_place(endpoint_ids[i], p_generation, p_now);
        if v_next.id is not null then
            v_priorities[i] := v_next.priority;
            v_due_ats[i] := v_next.due_at;
            v_first_ids[i] := v_next.id;
        end if;
    end loop;

    -- In rounds: what some endpoints leave of their share goes to the others. Messages behind the head of their ordering key are
    -- parked and don't count. After 1,000 of them the claim ends with what it has; the next one doesn't meet them again.
    while endpoint_ids is not null and v_left > 0 and v_behind <= 1000 loop
        v_sizes := ulak_private.share(v_left, v_quotas, counts);
        exit when v_sizes is null;
        v_locked := ulak_private.lock_due(
            endpoint_ids, v_priorities, v_due_ats, v_first_ids, v_sizes, p_generation, p_now, v_aging
        );
        tids := tids || v_locked.tids;
        ids := ids || v_locked.ids;
        places := places || v_locked.places;
        first_event_at := least(first_event_at, v_locked.first_event_at);
        last_event_at := greatest(last_event_at, v_locked.last_event_at);
        v_left := v_left - cardinality(v_locked.tids);
        for i in 1..cardinality(endpoint_ids) loop
            continue when v_sizes[i] = 0;
            counts[i] := counts[i] + v_locked.taken[i];
            v_quotas[i] := v_quotas[i] - v_locked.taken[i];
            v_behind := v_behind + v_locked.looked[i] - v_locked.taken[i];
            may_have_more[i] := v_locked.looked[i] = v_sizes[i];
            if not are_probes[i] and v_aging is null then
                reached := reached || row(
                    endpoint_ids[i], v_priorities[i], v_locked.last_due_at[i], v_locked.last_id[i] + (v_locked.looked[i] > 0)::integer
                )::ulak_private.resume_point;
            end if;
            if v_aging is not null then
                -- All priorities were looked at together, and a second round would find the same ones again.
                v_quotas[i] := 0;
            elsif may_have_more[i] then
                v_due_ats[i] := v_locked.last_due_at[i];
                v_first_ids[i] := v_locked.last_id[i] + 1;
            elsif v_priorities[i] = 0 then
                v_quotas[i] := 0;
            elsif v_left > 0 then
                v_next := ulak_private.next_level(endpoint_ids[i], v_priorities[i], p_now, p_resume_points);
                v_priorities[i] := v_next.priority;
                v_due_ats[i] := v_next.due_at;
                v_first_ids[i] := v_next.id;
                if v_next is null then
                    v_quotas[i] := 0;
                end if;
            end if;
        end loop;
    end loop;

    -- A worker that got nothing keeps claiming until the round over the endpoints is complete.
    v_is_full := cardinality(endpoint_ids) >= v_most_endpoints;
    left_out_others := p_endpoint_ids is null
        and ((v_walked_to is not null or v_is_full) and v_ended_at > v_begun_behind or v_is_full and tids <> '{}') is true;
end
$plpgsql$;

-- How many more each endpoint gets so that all have the same, some of them one more; null if none may have more. p_quotas is
-- what each may still get, p_counts what it has got in this claim.
create or replace function ulak_private.share(p_left integer, p_quotas integer[], p_counts integer[])
returns integer[]
language plpgsql
immutable
as $plpgsql$
declare
    v_open integer := 0;
    v_sum integer := p_left;
    v_share integer;
    v_remainder integer;
    v_sizes integer[] := array_fill(0, array[cardinality(p_quotas)]);
begin
    for i in 1..cardinality(p_quotas) loop
        if p_quotas[i] > 0 then
            v_open := v_open + 1;
            v_sum := v_sum + p_counts[i];
        end if;
    end loop;
    if v_open = 0 then
        return null;
    end if;
    v_share := v_sum / v_open;
    v_remainder := v_sum % v_open;
    for i in 1..cardinality(p_quotas) loop
        if p_quotas[i] > 0 then
            v_sizes[i] := greatest(least(p_quotas[i], v_share + (v_remainder > 0)::integer - p_counts[i]), 0);
            v_remainder := v_remainder - 1;
        end if;
    end loop;
    return v_sizes;
end
$plpgsql$;

-- Locks due messages of some endpoints: p_sizes[i] of endpoint i at most, of the priority and from the message on that
-- p_priorities[i], p_due_ats[i] and p_first_ids[i] tell. places says of which endpoint each is. A message behind another of its
-- ordering key is parked. Of each endpoint: how many messages were looked at and taken, and the last of them.
create or replace function ulak_private.lock_due(
    p_endpoint_ids bigint[],
    p_priorities smallint[],
    p_due_ats timestamptz[],
    p_first_ids bigint[],
    p_sizes integer[],
    p_generation bigint,
    p_now timestamptz,
    p_aging integer,
    out tids tid[],
    out ids bigint[],
    out places integer[],
    out looked integer[],
    out taken integer[],
    out last_due_at timestamptz[],
    out last_id bigint[],
    out first_event_at timestamptz,
    out last_event_at timestamptz
)
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    -- With aging, who has waited long enough comes before others of a higher priority: all of them have to be looked at.
    v_levels smallint[] := array(select generate_series(0, 10) where p_aging is not null);
    v_due_ats timestamptz[];
    v_heads bigint[];
    v_endpoint record;
begin
    select
        array_agg(m.place), array_agg(m.tid), array_agg(m.id), array_agg(m.next_retry_at), array_agg(m.head), min(m.event_at), max(m.event_at)
    into places, tids, ids, v_due_ats, v_heads, first_event_at, last_event_at
    from (
        select e.place::integer, m.tid, m.id, m.next_retry_at, m.head, m.event_at
        from unnest(p_endpoint_ids, p_priorities, p_due_ats, p_first_ids, p_sizes)
            with ordinality e(id, priority, due_at, first_id, size, place)
        cross join lateral (
            select m.*
            from unnest(case when p_aging is null then array[e.priority] else v_levels end) l(priority)
            cross join lateral (
                select
                    q.ctid as tid,
                    q.id,
                    q.priority,
                    q.next_retry_at,
                    coalesce(q.event_created_at, q.created_at) as event_at,
                    -- The head of its ordering key, if that is another one: the first live message of the key. Not `=`: then
                    -- the order of ids alone would do, and all of the queue might be read in it.
                    case
                        when q.ordering_key is not null then nullif(
                            (
                                select h.id
                                from ulak_private.deliveries h
                                where h.endpoint_id = q.endpoint_id
                                    and h.ordering_key between q.ordering_key and q.ordering_key
                                    and h.status in ('pending', 'processing', 'held')
                                order by h.ordering_key, h.id
                                limit 1
                            ),
                            q.id
                        )
                    end as head
                from ulak_private.deliveries q
                where q.status = 'pending'
                    and q.endpoint_id = e.id
                    and q.priority = l.priority
                    and (q.next_retry_at, q.id) >= (
                        case when p_aging is null then e.due_at else '-infinity' end,
                        case when p_aging is null then e.first_id else 0 end
                    )
                    and q.next_retry_at <= p_now
                    and (q.expires_at is null or q.expires_at > p_now)
                    and (p_generation is null or q.generation = p_generation)
                order by q.next_retry_at, q.id
                limit e.size
                for update skip locked
            ) m
            order by
                m.priority + floor(extract(epoch from p_now - m.next_retry_at) / p_aging) desc,
                m.next_retry_at,
                m.id
            limit e.size
        ) m
        where e.size > 0
    ) m;

    looked := array_fill(0, array[cardinality(p_endpoint_ids)]);
    taken := looked;
    last_due_at := p_due_ats;
    last_id := p_first_ids;
    for v_endpoint in
        select
            m.place,
            count(*) as looked,
            count(*) filter (where m.head is null) as taken,
            (array_agg(m.due_at))[count(*)] as last_due_at,
            (array_agg(m.id))[count(*)] as last_id
        from unnest(places, ids, v_due_ats, v_heads) m(place, id, due_at, head)
        group by m.place
    loop
        looked[v_endpoint.place] := v_endpoint.looked;
        taken[v_endpoint.place] := v_endpoint.taken;
        last_due_at[v_endpoint.place] := v_endpoint.last_due_at;
        last_id[v_endpoint.place] := v_endpoint.last_id;
    end loop;

    if num_nonnulls(variadic v_heads) > 0 then
        perform ulak_private.park(
            array_agg(m.tid) filter (where m.head is not null), array_agg(m.head) filter (where m.head is not null), p_now
        )
        from unnest(tids, v_heads) m(tid, head);
        select array_agg(m.tid), array_agg(m.id), array_agg(m.place) into tids, ids, places
        from unnest(tids, ids, places, v_heads) m(tid, id, place, head)
        where m.head is null;
    end if;
    tids := coalesce(tids, '{}');
    ids := coalesce(ids, '{}');
    places := coalesce(places, '{}');
end
$plpgsql$;

-- Where the last claim that went round has ended: a sequence, which is read and set outside transactions. Workers and
-- external workers go round different endpoints, and each kind has its own.
create or replace function ulak_private.claim_position(p_endpoint_ids bigint[], p_protocols text[])
returns bigint
language sql
as $sql$
    select case
        when p_endpoint_ids is not null then 0
        when p_protocols = '{pull}' then coalesce(pg_sequence_last_value('ulak_private.pull_position'), 0)
        else coalesce(pg_sequence_last_value('ulak_private.claim_position'), 0)
    end
$sql$;

create or replace function ulak_private.set_claim_position(p_endpoint_id bigint, p_protocols text[])
returns bigint
language sql
as $sql$
    select setval(case when p_protocols = '{pull}' then 'ulak_private.pull_position' else 'ulak_private.claim_position' end, p_endpoint_id)
$sql$;
