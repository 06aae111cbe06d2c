-- Claiming: a worker leases messages that are due.

-- The cost depends on how much can be claimed, not on how many messages or endpoints there are. The planner's choices are pinned, because a
-- plan that was made for an empty queue may be used for a full one.
create or replace function ulak_private.claim(
    p_worker text,
    p_limit integer,
    p_lease interval default null,
    -- Null: all endpoints, in turn.
    p_endpoint_ids bigint[] default null,
    p_protocols text[] default null,
    p_now timestamptz default clock_timestamp(),
    -- How many messages the worker has room for, by endpoint; null: no limit.
    p_rooms ulak_private.rooms default null,
    -- A few endpoints are enough if each has many messages.
    p_most_endpoints integer default 32,
    -- A visit that finds nothing takes 8 us. A claim that reaches this limit returns left_out_others.
    p_most_visits integer default 1000
)
returns setof ulak_private.leased
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
declare
    v_turn ulak_private.turn;
    v_none ulak_private.leased;
begin
    p_now := ulak_private.clock(p_now);
    v_turn := ulak_private.take_turn(
        p_limit, p_endpoint_ids, p_protocols, null, p_now, p_rooms, p_most_endpoints, p_most_visits
    );
    if v_turn.tids is not null then
        return query select m.* from ulak_private.lease_messages(v_turn, p_worker, p_lease, p_now) m;
    elsif v_turn.left_out_others then
        v_none.left_out_others := true;
        return next v_none;
    end if;
end
$plpgsql$;

-- Picks the endpoints whose turn it is, and locks messages of them. All due messages of these endpoints may turn out to be parked or expired.
-- Then the next endpoints are tried, in at most eight walks, so that a claim ends even if it gets nothing.
create or replace function ulak_private.take_turn(
    p_limit integer,
    p_endpoint_ids bigint[],
    p_protocols text[],
    p_generation bigint,
    p_now timestamptz,
    p_rooms ulak_private.rooms,
    p_most_endpoints integer,
    p_most_visits integer
)
returns ulak_private.turn
language plpgsql
as $plpgsql$
declare
    v_passed bigint := ulak_private.passed_entries();
    v_resume_points ulak_private.resume_point[] := ulak_private.resume_points(p_generation);
    v_turn ulak_private.turn;
    v_usual integer := 200;
begin
    for v_walk in 1..8 loop
        if p_endpoint_ids is null then
            v_turn := ulak_private.pick_endpoints(
                p_limit, p_protocols, p_generation, p_now, p_rooms, p_most_endpoints, p_most_visits, v_resume_points
            );
        else
            v_turn := ulak_private.pick_requested_endpoints(
                p_limit, p_endpoint_ids, p_protocols, p_generation, p_now, p_rooms, v_resume_points
            );
        end if;
        if v_turn.endpoint_ids is not null then
            v_turn := ulak_private.lock_messages(v_turn, p_limit, p_generation, p_now, v_resume_points);
        end if;
        exit when v_turn.tids is not null or v_turn.is_last;
    end loop;
    if v_turn.is_full and v_turn.tids is not null then
        -- The claim reached its limit of endpoints, so there may be others.
        v_turn.left_out_others := true;
    end if;
    -- Of a session of ulak's own worker, which asks for the new settings first.
    if v_turn.tids is not null and current_setting('ulak_private.settings', true) <> '' and ulak_private.has_old_settings() then
        v_turn.tids := null;
        v_turn.left_out_others := false;
        return v_turn;
    end if;
    v_passed := ulak_private.passed_entries() - v_passed;
    if v_resume_points = '{}' then
        -- What was claimed of these endpoints since their last turn, perhaps by two workers, is passed only once.
        v_usual := 200 + 2 * coalesce(cardinality(v_turn.tids), 0);
    end if;
    if v_passed > v_usual then
        perform ulak_private.remember_places(
            v_turn, v_resume_points = '{}', v_passed, p_endpoint_ids, p_protocols, p_generation, p_now
        );
    end if;
    return v_turn;
end
$plpgsql$;

-- Locks up to p_size due messages of one priority of an endpoint, starting at the given place. Stable, so that it is inlined into the calling
-- query: a stable function that isn't inlined can't lock rows.
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
        -- The head of its ordering key, that is the key's first live message, if that is another one. Not `=`: then the planner could sort by
        -- id alone and might read the whole queue in that order.
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

-- Locks messages of the picked endpoints, in rounds: shares that some endpoints don't use up go to the others. A message behind the head of
-- its ordering key is parked and doesn't count. After 1,000 parked messages the claim ends with what it has; the next claim won't meet them
-- again.
create or replace function ulak_private.lock_messages(
    p_turn ulak_private.turn,
    p_limit integer,
    p_generation bigint,
    p_now timestamptz,
    p_resume_points ulak_private.resume_point[]
)
returns ulak_private.turn
language plpgsql
as $plpgsql$
declare
    -- Aging doesn't apply to a probe, which isn't chosen by priority.
    v_aging integer := case
        when not true = any (p_turn.are_probes) then nullif(ulak_private.stored_setting('priority_aging')::integer, 0)
    end;
    v_sizes integer[];
    v_left integer := p_limit;
    v_behind integer := 0;
    v_locked record;
begin
    while v_left > 0 and v_behind <= 1000 loop
        v_sizes := ulak_private.share(v_left, p_turn.quotas, p_turn.counts);
        exit when v_sizes is null;
        for v_locked in
            select
                e.place::integer,
                e.size,
                l.*,
                l.looked as taken,
                row(l.priorities[l.looked], l.due_ats[l.looked], l.ids[l.looked] + 1)::ulak_private.place as next
            from unnest(p_turn.endpoint_ids, p_turn.nexts, v_sizes) with ordinality e(id, priority, due_at, first_id, size, place)
            cross join lateral ulak_private.lock_due(
                e.id, e.priority, e.due_at, e.first_id, e.size, p_generation, p_now, v_aging is not null, p_resume_points
            ) l
            where e.size > 0
        loop
            if v_locked.behind > 0 then
                v_behind := v_behind + v_locked.behind;
                perform ulak_private.park(
                    array_agg(m.tid) filter (where m.head is not null), array_agg(m.head) filter (where m.head is not null), p_now
                )
                from unnest(v_locked.tids, v_locked.heads) m(tid, head);
            end if;
            if v_locked.behind > 0 or v_aging is not null then
                select array_agg(m.tid), array_agg(m.id), array_agg(m.priority), array_agg(m.due_at), count(*)
                into v_locked.tids, v_locked.ids, v_locked.priorities, v_locked.due_ats, v_locked.taken
                from (
                    select m.*
                    from unnest(v_locked.tids, v_locked.ids, v_locked.priorities, v_locked.due_ats, v_locked.heads)
                        with ordinality m(tid, id, priority, due_at, head, number)
                    where m.head is null
                    order by
                        m.priority + floor(extract(epoch from p_now - m.due_at) / v_aging) desc,
                        case when v_aging is not null then m.due_at end,
                        m.number
                    limit v_locked.size
                ) m;
            end if;
            p_turn.tids := p_turn.tids || v_locked.tids;
            p_turn.ids := p_turn.ids || v_locked.ids;
            p_turn.priorities := p_turn.priorities || v_locked.priorities;
            p_turn.due_ats := p_turn.due_ats || v_locked.due_ats;
            p_turn.places := p_turn.places || array_fill(v_locked.place, array[v_locked.taken]);
            p_turn.first_event_at := least(p_turn.first_event_at, v_locked.first_event_at);
            p_turn.last_event_at := greatest(p_turn.last_event_at, v_locked.last_event_at);
            p_turn.counts[v_locked.place] := p_turn.counts[v_locked.place] + v_locked.taken;
            p_turn.may_have_more[v_locked.place] := v_locked.looked >= v_locked.size;
            v_left := v_left - v_locked.taken;
            -- With aging, a second round would find the same messages again.
            if v_locked.looked = v_locked.size and v_aging is null then
                p_turn.quotas[v_locked.place] := p_turn.quotas[v_locked.place] - v_locked.taken;
                p_turn.nexts[v_locked.place] := v_locked.next;
            else
                p_turn.quotas[v_locked.place] := 0;
            end if;
        end loop;
    end loop;
    return p_turn;
end
$plpgsql$;

-- Locks due messages of an endpoint, starting at a place (see levels()), highest priority first: up to p_size, or with aging up to p_size of
-- each priority. heads[i] is the message that message i waits behind in its ordering key, if any. Stable, like due_messages().
create or replace function ulak_private.lock_due(
    p_endpoint_id bigint,
    p_priority smallint,
    p_due_at timestamptz,
    p_first_id bigint,
    p_size integer,
    p_generation bigint,
    p_now timestamptz,
    p_is_aging boolean,
    p_resume_points ulak_private.resume_point[]
)
returns table (
    looked integer,
    behind integer,
    tids tid[],
    ids bigint[],
    priorities smallint[],
    due_ats timestamptz[],
    heads bigint[],
    first_event_at timestamptz,
    last_event_at timestamptz
)
language sql
stable
as $sql$
    select
        count(*)::integer,
        count(m.head)::integer,
        array_agg(m.tid),
        array_agg(m.id),
        array_agg(m.priority),
        array_agg(m.next_retry_at),
        array_agg(m.head),
        min(m.event_at),
        max(m.event_at)
    from (
        select m.*
        from ulak_private.levels(p_endpoint_id, p_priority, p_due_at, p_first_id, p_resume_points) l
        cross join lateral ulak_private.due_messages(p_endpoint_id, l.priority, l.due_at, l.id, p_generation, p_now, p_size) m
        limit case when not p_is_aging then p_size end
    ) m
$sql$;

-- How many more messages each endpoint gets, so that their totals differ by at most one; null if none may have more. p_quotas is how many each
-- may still get, p_counts how many it has got in this claim.
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

-- The endpoint at which the last walk ended. It is a sequence, because it is read and set outside transactions. Workers and external workers
-- walk over different endpoints, so each kind has its own.
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
