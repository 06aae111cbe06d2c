-- Claiming: a worker leases messages that are due.

-- What is claimable decides the cost, not what is stored nor how many endpoints there are. The planner's choices are pinned,
-- because a plan that was made for an empty queue may be used for a full one.
create or replace function ulak._claim(
    p_worker text,
    p_limit integer,
    p_lease interval default null,
    -- Only of these endpoints; null: of all in turn.
    p_endpoint_ids bigint[] default null,
    p_protocols text[] default null,
    p_generation bigint default null,
    p_now timestamptz default clock_timestamp(),
    -- How many messages the worker has room for, by endpoint; null: any number.
    p_rooms ulak._rooms default null,
    -- Where the last claim of the only endpoint in p_endpoint_ids ended: what lies before isn't looked at.
    p_resume ulak._place default null
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
    may_have_more boolean
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
    v_lease_until timestamptz := p_now
        + coalesce(p_lease, make_interval(secs => ulak.setting('stale_recovery_timeout')::integer));
    v_aging integer := nullif(ulak._stored_setting('priority_aging')::integer, 0);
    -- The endpoints whose turn it is, and how far each has been claimed.
    v_endpoint_ids bigint[];
    v_next ulak._place[];
    v_config_versions bigint[];
    v_quotas integer[];
    v_circuit_states text[];
    v_are_limited boolean[];
    v_may_have_more boolean[];
    v_left integer := p_limit;
    -- How many of each endpoint were taken.
    v_counts integer[];
    -- Endpoints that got all that they were asked for and may have more, and how many these have.
    v_open integer;
    v_shared integer := 0;
    v_share integer;
    v_remainder integer;
    v_size integer;
    v_walked_to bigint;
    v_taken record;
    v_tids tid[] := '{}';
    v_ids bigint[] := '{}';
    v_places integer[] := '{}';
begin
    if not ulak._is_adopted() then
        return;
    end if;
    -- Endpoints may turn out to have nothing but messages behind their ordering keys or past their time: then it is the turn
    -- of the next ones. Eight times at most: a claim that gets nothing has to end too.
    for v_walk in 1..8 loop
        select
            array_agg(t.endpoint_id) filter (where t.quota > 0),
            array_agg(t.first) filter (where t.quota > 0),
            array_agg(t.config_version) filter (where t.quota > 0),
            array_agg(t.quota) filter (where t.quota > 0),
            array_agg(t.circuit_state) filter (where t.quota > 0),
            array_agg(t.is_limited) filter (where t.quota > 0),
            array_fill(false, array[count(*)::integer]),
            array_fill(0, array[count(*)::integer]),
            count(*) filter (where t.quota > 0),
            -- Lower priorities of that endpoint may not have been visited.
            case when bool_or(t.quota = 0) then greatest(max(t.endpoint_id) filter (where t.quota = 0) - 1, 1) end
        into
            v_endpoint_ids,
            v_next,
            v_config_versions,
            v_quotas,
            v_circuit_states,
            v_are_limited,
            v_may_have_more,
            v_counts,
            v_open,
            v_walked_to
        from ulak._endpoints_in_turn(
            ulak._claim_position(p_endpoint_ids, p_protocols),
            least(p_limit, coalesce(cardinality(p_endpoint_ids), 32)),
            p_limit,
            p_endpoint_ids,
            p_protocols,
            p_now,
            p_rooms,
            p_resume
        ) t;

        -- Each gets the same part of the limit, some of them one more; what some leave is shared by the others.
        while v_left > 0 and v_open > 0 loop
            v_share := (v_left + v_shared) / v_open;
            v_remainder := (v_left + v_shared) % v_open;
            v_open := 0;
            v_shared := 0;
            for i in 1..cardinality(v_endpoint_ids) loop
                continue when v_quotas[i] <= 0;
                v_size := least(v_quotas[i], v_share + (v_remainder > 0)::integer - v_counts[i], v_left);
                v_remainder := v_remainder - 1;
                if v_size > 0 then
                    v_taken := ulak._lock_due(v_endpoint_ids[i], v_size, p_generation, p_now, v_aging, v_next[i]);
                    v_left := v_left - cardinality(v_taken.tids);
                    v_tids := v_tids || v_taken.tids;
                    v_ids := v_ids || v_taken.ids;
                    v_places := v_places || array_fill(i, array[cardinality(v_taken.tids)]);
                    v_next[i] := v_taken.next;
                    v_counts[i] := v_counts[i] + cardinality(v_taken.tids);
                    v_may_have_more[i] := v_taken.next is not null;
                    -- One that got less has no more, or so many behind their ordering keys that they are left to later claims.
                    v_quotas[i] := case
                        when v_may_have_more[i] and cardinality(v_taken.tids) = v_size then v_quotas[i] - v_size
                        else 0
                    end;
                end if;
                if v_quotas[i] > 0 then
                    v_open := v_open + 1;
                    v_shared := v_shared + v_counts[i];
                end if;
                if v_left <= 0 then
                    perform ulak._set_claim_position(v_endpoint_ids[i], p_endpoint_ids, p_protocols);
                    exit;
                end if;
            end loop;
        end loop;
        if v_left > 0 then
            perform ulak._set_claim_position(
                coalesce(v_walked_to, v_endpoint_ids[cardinality(v_endpoint_ids)]), p_endpoint_ids, p_protocols
            );
        end if;
        exit when v_tids <> '{}' or v_endpoint_ids is null or v_walked_to is not null or p_endpoint_ids is not null;
    end loop;
    if v_tids = '{}' then
        return;
    end if;

    return query
    update ulak.queue q
    set status = 'processing',
        attempts = q.attempts + 1,
        locked_by = p_worker,
        lease_until = v_lease_until,
        processing_started_at = p_now,
        updated_at = p_now
    from unnest(v_tids, v_places) l(tid, place)
    where q.ctid = l.tid
    returning
        q.id,
        q.message_id,
        q.attempts,
        q.endpoint_id,
        v_config_versions[l.place],
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
        case when v_circuit_states[l.place] = 'closed' then 'closed' else 'half_open' end,
        q.next_retry_at,
        v_may_have_more[l.place];

    if true = any (v_are_limited) then
        perform ulak._charge(v_endpoint_ids, v_are_limited, v_ids, v_places, p_now);
    end if;
end
$plpgsql$;

-- Locks up to p_size due messages of an endpoint, the first of them at the place that is given, and returns where the next
-- one would be looked for; a null priority: there is none left that is due. A message behind another of its ordering key is
-- parked.
create or replace function ulak._lock_due(
    p_endpoint_id bigint,
    p_size integer,
    p_generation bigint,
    p_now timestamptz,
    p_aging integer,
    p_first ulak._place,
    out next ulak._place,
    out tids tid[],
    out ids bigint[]
)
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    -- With aging, who has waited long enough comes before others of a higher priority: all of them have to be looked at.
    v_levels smallint[] := array(select generate_series(0, 10) where p_aging is not null);
    v_asked integer;
    v_behind integer := 0;
    v_found record;
begin
    next := p_first;
    tids := '{}';
    ids := '{}';
    loop
        v_asked := p_size - cardinality(tids);
        select
            count(*) as messages,
            array_agg(m.tid) filter (where m.head is null) as tids,
            array_agg(m.id) filter (where m.head is null) as ids,
            array_agg(m.tid) filter (where m.head is not null) as behind,
            array_agg(m.head) filter (where m.head is not null) as heads,
            (array_agg(m.next_retry_at))[count(*)] as due_at,
            (array_agg(m.id))[count(*)] as id
        into v_found
        from (
            select m.*
            from unnest(case when p_aging is null then array[next.priority] else v_levels end) l(priority)
            cross join lateral (
                select
                    q.ctid as tid,
                    q.id,
                    q.priority,
                    q.next_retry_at,
                    case
                        when q.ordering_key is not null then ulak._head_before(q.endpoint_id, q.ordering_key, q.id)
                    end as head
                from ulak.queue q
                where q.status = 'pending'
                    and q.endpoint_id = p_endpoint_id
                    and q.priority = l.priority
                    and (p_aging is not null or (q.next_retry_at, q.id) >= (next.due_at, next.id))
                    and q.next_retry_at <= p_now
                    and (q.expires_at is null or q.expires_at > p_now)
                    and (p_generation is null or q.generation = p_generation)
                order by q.next_retry_at, q.id
                limit v_asked
                for update skip locked
            ) m
            order by
                m.priority + floor(extract(epoch from p_now - m.next_retry_at) / p_aging) desc,
                m.next_retry_at,
                m.id
            limit v_asked
        ) m;
        tids := tids || coalesce(v_found.tids, '{}');
        ids := ids || coalesce(v_found.ids, '{}');
        if v_found.behind is not null then
            perform ulak._park(v_found.behind, v_found.heads, p_now);
            v_behind := v_behind + cardinality(v_found.behind);
        end if;
        if p_aging is not null then
            -- All priorities were looked at together. What is left is for another claim.
            next := null;
        elsif v_found.messages < v_asked then
            next := ulak._next_level(p_endpoint_id, next.priority, p_now);
        else
            next.due_at := v_found.due_at;
            next.id := v_found.id + 1;
        end if;
        -- A long row of messages behind their keys isn't to hold up the claim: the next one finds it shorter.
        exit when next is null or cardinality(tids) >= p_size or v_behind > 1000;
    end loop;
end
$plpgsql$;

-- Where the last claim that went round has ended: a sequence, which is read and set outside transactions. Workers and
-- external workers go round different endpoints, and each kind has its own.
create or replace function ulak._claim_position(p_endpoint_ids bigint[], p_protocols text[])
returns bigint
language sql
as $sql$
    select case
        when p_endpoint_ids is not null then 0
        when p_protocols = '{pull}' then coalesce(pg_sequence_last_value('ulak.pull_position'), 0)
        else coalesce(pg_sequence_last_value('ulak.claim_position'), 0)
    end
$sql$;

create or replace function ulak._set_claim_position(p_endpoint_id bigint, p_endpoint_ids bigint[], p_protocols text[])
returns void
language plpgsql
as $plpgsql$
begin
    if p_endpoint_ids is null and p_endpoint_id is not null then
        perform setval(
            case when p_protocols = '{pull}' then 'ulak.pull_position' else 'ulak.claim_position' end, p_endpoint_id
        );
    end if;
end
$plpgsql$;
