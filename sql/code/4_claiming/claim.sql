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
    p_most_visits integer default 1000,
    -- Whether messages of several endpoints come in turn; else by endpoint.
    p_in_turn boolean default false
)
returns table (
    id bigint,
    message_id uuid,
    attempt integer,
    endpoint_id bigint,
    endpoint text,
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
    v_resume_points ulak_private.resume_point[];
    v_passed bigint := ulak_private.passed_entries();
    v_turn record;
    v_is_done boolean;
    v_lease_until timestamptz;
begin
    p_now := ulak_private.clock(p_now);
    v_resume_points := ulak_private.resume_points(p_generation);
    if cardinality(p_endpoint_ids) = 1 and p_rooms is null then
        v_turn := ulak_private.take_from(p_endpoint_ids[1], p_limit, p_protocols, p_generation, p_now, v_resume_points);
        v_is_done := v_turn.is_last;
    end if;
    -- Endpoints may turn out to have nothing but messages behind their ordering keys or past their time: then it is the turn
    -- of the next ones. Eight times at most: a claim that gets nothing has to end too.
    for v_walk in 1..case when v_is_done then 0 else 8 end loop
        v_turn := ulak_private.take_turn(
            p_limit, p_endpoint_ids, p_protocols, p_generation, p_now, p_rooms, v_resume_points, p_most_endpoints,
            p_most_visits
        );
        exit when v_turn.tids is not null or v_turn.is_last;
    end loop;
    v_passed := ulak_private.passed_entries() - v_passed;
    if v_passed > 200 then
        perform ulak_private.remember_places(
            v_turn.reached, v_resume_points = '{}', v_passed, p_endpoint_ids, p_protocols, p_generation, p_now
        );
    end if;
    if v_turn.tids is null then
        if v_turn.left_out_others then
            left_out_others := true;
            return next;
        end if;
        return;
    elsif current_setting('ulak_private.settings', true) <> '' and ulak_private.has_old_settings() then
        return;
    end if;
    if p_in_turn and cardinality(v_turn.endpoint_ids) > 1 then
        select array_agg(m.tid order by m.round, m.number), array_agg(m.id order by m.round, m.number), array_agg(m.place order by m.round, m.number)
        into v_turn.tids, v_turn.ids, v_turn.places
        from (
            select m.*, row_number() over (partition by m.place order by m.number) as round
            from unnest(v_turn.tids, v_turn.ids, v_turn.places) with ordinality m(tid, id, place, number)
        ) m;
    end if;
    v_lease_until := p_now + coalesce(p_lease, make_interval(secs => ulak_private.stored_setting('stale_recovery_timeout')::integer));

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
        returning
            q.id, q.message_id, q.attempts, q.endpoint_id, q.payload, q.headers, q.metadata, q.correlation_id, q.ordering_key, q.priority,
            q.idempotency_key, q.created_at, q.expires_at, q.lease_until, q.next_retry_at, q.generation, q.event_id, q.event_created_at, l.place
    )
    select
        c.id,
        c.message_id,
        c.attempts,
        c.endpoint_id,
        v_turn.names[c.place],
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

    if true = any (v_turn.are_metered) then
        perform ulak_private.charge(
            v_turn.endpoint_ids, v_turn.are_metered, v_turn.counts, v_turn.ids, v_turn.places, p_now
        );
    end if;
end
$plpgsql$;

-- Locks messages of one endpoint that was asked for: take_turn() for the usual case, an endpoint without limits and without aging. It
-- takes a quarter of the time, and an external worker does little else. Another endpoint is left to take_turn(): is_last is null.
create or replace function ulak_private.take_from(
    p_endpoint_id bigint,
    p_limit integer,
    p_protocols text[],
    p_generation bigint,
    p_now timestamptz,
    p_resume_points ulak_private.resume_point[],
    out endpoint_ids bigint[],
    out names text[],
    out config_versions bigint[],
    out are_probes boolean[],
    out are_metered boolean[],
    out may_have_more boolean[],
    out counts integer[],
    out tids tid[],
    out ids bigint[],
    out places integer[],
    out first_event_at timestamptz,
    out last_event_at timestamptz,
    out reached ulak_private.resume_point[],
    out is_last boolean,
    out left_out_others boolean
)
language plpgsql
as $plpgsql$
declare
    v_place ulak_private.place := ulak_private.next_level(p_endpoint_id, null, p_now, p_resume_points);
    v_left integer := p_limit;
    v_behind integer := 0;
    v_locked record;
begin
    if v_place is null then
        is_last := true;
        return;
    end if;
    select array[e.name], array[e.config_version], true into names, config_versions, is_last
    from ulak.endpoints e
    where e.id = p_endpoint_id
        and ulak_private.is_open(e, p_protocols, p_now)
        and not ulak_private.is_limited(e)
        and ulak_private.stored_setting('priority_aging') = '0'
        and ulak_private.is_adopted();
    while is_last and v_place is not null and v_left > 0 and v_behind <= 1000 loop
        select
            array_agg(m.tid) as tids,
            array_agg(m.id) as ids,
            array_agg(m.head) as heads,
            count(*)::integer as looked,
            count(m.head)::integer as behind,
            (array_agg(m.next_retry_at))[count(*)] as last_due_at,
            (array_agg(m.id))[count(*)] as last_id,
            least(first_event_at, min(m.event_at)) as first_event_at,
            greatest(last_event_at, max(m.event_at)) as last_event_at
        into v_locked
        from ulak_private.due_messages(
            p_endpoint_id, v_place.priority, v_place.due_at, v_place.id, p_generation, p_now, v_left
        ) m;
        if v_locked.behind > 0 then
            perform ulak_private.park(
                array_agg(m.tid) filter (where m.head is not null), array_agg(m.head) filter (where m.head is not null), p_now
            )
            from unnest(v_locked.tids, v_locked.heads) m(tid, head);
            select array_agg(m.tid), array_agg(m.id) into v_locked.tids, v_locked.ids
            from unnest(v_locked.tids, v_locked.ids, v_locked.heads) m(tid, id, head)
            where m.head is null;
        end if;
        tids := tids || v_locked.tids;
        ids := ids || v_locked.ids;
        first_event_at := v_locked.first_event_at;
        last_event_at := v_locked.last_event_at;
        reached := reached || row(
            p_endpoint_id, v_place.priority, coalesce(v_locked.last_due_at, v_place.due_at), coalesce(v_locked.last_id + 1, v_place.id)
        )::ulak_private.resume_point;
        exit when v_locked.looked < v_left and v_place.priority = 0;
        if v_locked.looked < v_left then
            v_place := ulak_private.next_level(p_endpoint_id, v_place.priority, p_now, p_resume_points);
        else
            v_place.due_at := v_locked.last_due_at;
            v_place.id := v_locked.last_id + 1;
        end if;
        v_left := v_left - v_locked.looked + v_locked.behind;
        v_behind := v_behind + v_locked.behind;
    end loop;
    places := array_fill(1, array[coalesce(cardinality(tids), 0)]);
end
$plpgsql$;

-- Locks due messages of an endpoint, p_size of them at most, of a priority and from a place on. Stable, so that it becomes a part of the query that
-- calls it: by itself it couldn't lock.
create or replace function ulak_private.due_messages(
    p_endpoint_id bigint,
    p_priority smallint,
    p_due_at timestamptz,
    p_first_id bigint,
    p_generation bigint,
    p_now timestamptz,
    p_size integer
)
returns table (tid tid, id bigint, priority smallint, next_retry_at timestamptz, event_at timestamptz, head bigint)
language sql
stable
as $sql$
    select
        q.ctid,
        q.id,
        q.priority,
        q.next_retry_at,
        coalesce(q.event_created_at, q.created_at),
        -- The head of its ordering key, if that is another one: the first live message of the key. Not `=`: then the order of ids
        -- alone would do, and all of the queue might be read in it.
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
        end
    from ulak_private.deliveries q
    where q.status = 'pending'
        and q.endpoint_id = p_endpoint_id
        and q.priority = p_priority
        and (q.next_retry_at, q.id) >= (p_due_at, p_first_id)
        and q.next_retry_at <= p_now
        and (q.expires_at is null or q.expires_at > p_now)
        and (p_generation is null or q.generation = p_generation)
    order by q.next_retry_at, q.id
    limit p_size
    for update skip locked
$sql$;

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
    out names text[],
    out config_versions bigint[],
    out are_probes boolean[],
    out are_metered boolean[],
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
as $plpgsql$
declare
    v_aging integer;
    v_most_endpoints integer := least(p_limit, coalesce(cardinality(p_endpoint_ids), p_most_endpoints));
    -- Of each endpoint: where its next message is to be looked for, and how many it may still get.
    v_priorities smallint[];
    v_due_ats timestamptz[];
    v_first_ids bigint[];
    v_quotas integer[];
    v_sizes integer[];
    -- A walk that ended before it had gone round: there the next one begins.
    v_begun_behind bigint;
    v_walked_to bigint;
    v_ended_at bigint;
    v_is_full boolean;
    v_next ulak_private.place;
    v_admitted record;
    v_locked record;
    v_left integer := p_limit;
    v_behind integer := 0;
begin
    if p_endpoint_ids is null then
        v_begun_behind := ulak_private.claim_position(p_endpoint_ids, p_protocols);
        select
            array_agg(t.endpoint_id) filter (where t.quota > 0),
            array_agg(t.name) filter (where t.quota > 0),
            array_agg(t.priority) filter (where t.quota > 0),
            array_agg(t.due_at) filter (where t.quota > 0),
            array_agg(t.first_id) filter (where t.quota > 0),
            array_agg(t.config_version) filter (where t.quota > 0),
            array_agg(t.quota) filter (where t.quota > 0),
            array_agg(t.is_probe) filter (where t.quota > 0),
            array_agg(t.is_metered) filter (where t.quota > 0),
            -- Lower priorities of that endpoint may not have been visited.
            max(greatest(t.endpoint_id - 1, 1)) filter (where t.quota = 0)
        into
            endpoint_ids,
            names,
            v_priorities,
            v_due_ats,
            v_first_ids,
            config_versions,
            v_quotas,
            are_probes,
            are_metered,
            v_walked_to
        from ulak_private.endpoints_in_turn(
            v_begun_behind,
            v_most_endpoints,
            p_most_visits,
            p_limit,
            p_protocols,
            p_now,
            p_rooms,
            p_resume_points
        ) t;
        v_ended_at := coalesce(v_walked_to, endpoint_ids[cardinality(endpoint_ids)]);
        if v_ended_at is not null then
            perform ulak_private.set_claim_position(v_ended_at, p_protocols);
        end if;
    else
        for i in 1..cardinality(p_endpoint_ids) loop
            v_next := ulak_private.next_level(p_endpoint_ids[i], null, p_now, p_resume_points);
            continue when v_next is null;
            v_admitted := ulak_private.admitted(p_endpoint_ids[i], p_limit, p_protocols, p_rooms, p_now);
            continue when v_admitted.quota is null;
            endpoint_ids := endpoint_ids || p_endpoint_ids[i];
            names := names || v_admitted.name;
            v_priorities := v_priorities || v_next.priority;
            v_due_ats := v_due_ats || v_next.due_at;
            v_first_ids := v_first_ids || v_next.id;
            config_versions := config_versions || v_admitted.config_version;
            v_quotas := v_quotas || v_admitted.quota;
            are_probes := are_probes || v_admitted.is_probe;
            are_metered := are_metered || v_admitted.is_metered;
            exit when cardinality(endpoint_ids) = v_most_endpoints;
        end loop;
    end if;
    is_last := endpoint_ids is null or v_walked_to is not null or p_endpoint_ids is not null;
    if endpoint_ids is not null then
        v_aging := nullif(ulak_private.stored_setting('priority_aging')::integer, 0);
        counts := array_fill(0, array[cardinality(endpoint_ids)]);
    end if;

    for i in 1..case when true = any (are_probes) then cardinality(are_probes) else 0 end loop
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
        v_left := v_left - coalesce(cardinality(v_locked.tids), 0);
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
        and ((v_walked_to is not null or v_is_full) and v_ended_at > v_begun_behind or v_is_full and tids is not null) is true;
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
    if cardinality(p_quotas) = 1 then
        return nullif(array[least(p_left, p_quotas[1])], '{0}');
    end if;
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
as $plpgsql$
declare
    -- With aging, who has waited long enough comes before others of a higher priority: all of them have to be looked at.
    v_levels smallint[] := case when p_aging is not null then '{0,1,2,3,4,5,6,7,8,9,10}'::smallint[] end;
    v_due_ats timestamptz[];
    v_heads bigint[];
    v_behind integer;
    v_endpoint record;
begin
    select
        array_agg(m.place), array_agg(m.tid), array_agg(m.id), array_agg(m.next_retry_at), array_agg(m.head), count(m.head), min(m.event_at), max(m.event_at)
    into places, tids, ids, v_due_ats, v_heads, v_behind, first_event_at, last_event_at
    from (
        select e.place::integer, m.tid, m.id, m.next_retry_at, m.head, m.event_at
        from unnest(p_endpoint_ids, p_priorities, p_due_ats, p_first_ids, p_sizes)
            with ordinality e(id, priority, due_at, first_id, size, place)
        cross join lateral (
            select m.*
            from unnest(case when p_aging is null then array[e.priority] else v_levels end) l(priority)
            cross join lateral ulak_private.due_messages(
                e.id,
                l.priority,
                case when p_aging is null then e.due_at else '-infinity' end,
                case when p_aging is null then e.first_id else 0 end,
                p_generation,
                p_now,
                e.size
            ) m
            order by
                m.priority + floor(extract(epoch from p_now - m.next_retry_at) / p_aging) desc,
                m.next_retry_at,
                m.id
            limit e.size
        ) m
        where e.size > 0
    ) m;

    if cardinality(p_endpoint_ids) = 1 then
        looked := array[coalesce(cardinality(ids), 0)];
        taken := array[looked[1] - v_behind];
        last_due_at := coalesce(v_due_ats[looked[1] : ], p_due_ats);
        last_id := coalesce(ids[looked[1] : ], p_first_ids);
    else
        looked := array_fill(0, array[cardinality(p_endpoint_ids)]);
        taken := looked;
        last_due_at := p_due_ats;
        last_id := p_first_ids;
        for v_endpoint in
            select m.place, count(*) as looked, count(*) - count(m.head) as taken, max(m.number) as last
            from unnest(places, v_heads) with ordinality m(place, head, number)
            group by m.place
        loop
            looked[v_endpoint.place] := v_endpoint.looked;
            taken[v_endpoint.place] := v_endpoint.taken;
            last_due_at[v_endpoint.place] := v_due_ats[v_endpoint.last];
            last_id[v_endpoint.place] := ids[v_endpoint.last];
        end loop;
    end if;
    if v_behind > 0 then
        perform ulak_private.park(
            array_agg(m.tid) filter (where m.head is not null), array_agg(m.head) filter (where m.head is not null), p_now
        )
        from unnest(tids, v_heads) m(tid, head);
        select array_agg(m.tid), array_agg(m.id), array_agg(m.place) into tids, ids, places
        from unnest(tids, ids, places, v_heads) m(tid, id, place, head)
        where m.head is null;
    end if;
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
