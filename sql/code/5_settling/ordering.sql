-- Ordering keys: messages of one key are delivered in the order of their commits, one at a time.

-- Senders of a key wait for each other (ulak_private.lock_ordering_key), so ids are in the order of commits, and the first live
-- message of a key is its head, even while others are uncommitted. Only heads are claimed. A sender queues its message as due;
-- a claim that finds it behind another message parks it: next_retry_at becomes infinity, and later claims don't read it.
-- Settling the head of a key makes the next message due. If that fails, because the next message is locked, the sweep does it
-- within ten seconds (unpark_orphans), so a parked message never waits forever. A dead message that holds its key
-- (6_afterwards/hold.sql) counts as live here: it is the head, and nothing makes it due.

-- Senders of one key hold this lock until they commit. It is a row and not an advisory lock: any session may take those,
-- and the server has room for only a few thousand.
create or replace function ulak_private.lock_ordering_key(p_endpoint_id bigint, p_ordering_key text)
returns void
language plpgsql
as $plpgsql$
begin
    loop
        perform
        from ulak_private.ordering_keys k
        where k.endpoint_id = p_endpoint_id and k.ordering_key = p_ordering_key
        for no key update;
        exit when found;
        insert into ulak_private.ordering_keys (endpoint_id, ordering_key)
        values (p_endpoint_id, p_ordering_key)
        on conflict do nothing;
        exit when found;
    end loop;
end
$plpgsql$;

-- The same for many keys, always in the same order.
create or replace function ulak_private.lock_ordering_keys(p_endpoint_ids bigint[], p_keys text[])
returns void
language plpgsql
as $plpgsql$
begin
    perform ulak_private.lock_ordering_key(k.endpoint_id, k.ordering_key)
    from (
        select distinct u.endpoint_id, u.ordering_key collate "C" as ordering_key
        from unnest(p_endpoint_ids, p_keys) u(endpoint_id, ordering_key)
        where u.ordering_key is not null
        order by 1, 2
    ) k;
end
$plpgsql$;

-- Parks messages that the caller has locked, each behind the given head. The lock on the head keeps it from being settled
-- before this commits, so the session that settles it sees the parked messages. If another session has locked the head, it
-- is being settled right now: messages behind it stay due, and the next claim looks again. If the head itself is parked, it
-- was missed when it became the head, and is made due.
create or replace function ulak_private.park(p_tids tid[], p_heads bigint[], p_now timestamptz)
returns void
language plpgsql
as $plpgsql$
declare
    v_heads bigint[];
    v_parked bigint[];
begin
    select array_agg(h.id), array_agg(h.id) filter (where h.next_retry_at = 'infinity') into v_heads, v_parked
    from (
        select h.id, h.next_retry_at
        from ulak_private.deliveries h
        where h.id = any (p_heads)
            and (
                h.status is not distinct from 'pending'
                or h.status is not distinct from 'processing'
                or h.status is not distinct from 'held'
            )
        for share skip locked
    ) h;
    update ulak_private.deliveries q
    set next_retry_at = 'infinity', updated_at = p_now
    from unnest(p_tids, p_heads) p(tid, head)
    where q.ctid = p.tid and p.head = any (v_heads);
    if v_parked is not null then
        perform ulak_private.unpark(
            array(select h.id from ulak_private.deliveries h where h.id = any (v_parked) for update skip locked), p_now
        );
    end if;
end
$plpgsql$;

-- The former heads of these keys have left the queue: their new heads are made due, if they are parked. If another session has
-- locked a new head, that message is about to leave, too, and the session may not see that it has become the head. So the
-- message behind it is made due instead. If the locked one stays after all, it is still parked: the claim that meets the
-- message behind it makes it due (park()), or the sweep does, if there is none behind it.
create or replace function ulak_private.unpark_heads(p_endpoint_ids bigint[], p_keys text[], p_now timestamptz)
returns integer
language plpgsql
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set plan_cache_mode = force_generic_plan
as $plpgsql$
begin
    return ulak_private.unpark(
        array(
            select n.id
            from (
                select distinct u.endpoint_id, u.ordering_key
                from unnest(p_endpoint_ids, p_keys) u(endpoint_id, ordering_key)
            ) k
            cross join lateral (
                select q.next_retry_at, q.status
                from ulak_private.deliveries q
                where q.endpoint_id = k.endpoint_id
                    -- Not `=`: then the planner could sort by id alone and might read the whole queue in that order.
                    and q.ordering_key between k.ordering_key and k.ordering_key
                    and q.status in ('pending', 'processing', 'held')
                order by q.ordering_key, q.id
                limit 1
            ) h
            cross join lateral (
                select q.id
                from ulak_private.deliveries q
                where h.status = 'pending'
                    and h.next_retry_at = 'infinity'
                    and q.endpoint_id = k.endpoint_id
                    and q.ordering_key between k.ordering_key and k.ordering_key
                    and q.status in ('pending', 'processing', 'held')
                order by q.ordering_key, q.id
                limit 1
                for update skip locked
            ) n
        ),
        p_now
    );
end
$plpgsql$;

-- Makes the parked ones of these messages due, as of the time when they were sent or scheduled. The caller has locked them.
create or replace function ulak_private.unpark(p_ids bigint[], p_now timestamptz)
returns integer
language plpgsql
as $plpgsql$
declare
    v_count integer;
    v_places ulak_private.resume_point[];
begin
    if p_ids = '{}' then
        return 0;
    end if;
    with unparked as (
        update ulak_private.deliveries q
        set next_retry_at = greatest(q.created_at, q.scheduled_at), updated_at = p_now
        from unnest(p_ids) u(id)
        where q.id between u.id and u.id
            and q.status is not distinct from 'pending'
            and q.next_retry_at = 'infinity'
        returning q.endpoint_id, q.priority, q.next_retry_at, q.id
    )
    select count(*), array_agg(row(u.*)::ulak_private.resume_point) into v_count, v_places
    from unparked u;
    perform ulak_private.step_back(v_places);
    return v_count;
end
$plpgsql$;

-- Up to p_most live keys after (p_endpoint_id, p_ordering_key), in the order of the index, each with its head. One index probe leads from
-- a key to the next, no matter how many messages each key has.
create or replace function ulak_private.live_keys(p_endpoint_id bigint, p_ordering_key text, p_most integer)
returns table (endpoint_id bigint, ordering_key text, head bigint, is_parked boolean, changed_at timestamptz, number integer)
language plpgsql
stable
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
set plan_cache_mode = force_generic_plan
as $plpgsql$
#variable_conflict use_column
begin
    return query
    with recursive key as (
        (
            select q.endpoint_id, q.ordering_key, q.id, q.next_retry_at, q.updated_at, 1 as number
            from ulak_private.deliveries q
            where q.ordering_key is not null
                and q.status in ('pending', 'processing', 'held')
                and (q.endpoint_id, q.ordering_key) > (coalesce(p_endpoint_id, 0), coalesce(p_ordering_key, ''))
            order by q.endpoint_id, q.ordering_key, q.id
            limit 1
        )
        union all
        select n.*
        from key k
        cross join lateral (
            select q.endpoint_id, q.ordering_key, q.id, q.next_retry_at, q.updated_at, k.number + 1
            from ulak_private.deliveries q
            where q.ordering_key is not null
                and q.status in ('pending', 'processing', 'held')
                and (q.endpoint_id, q.ordering_key) > (k.endpoint_id, k.ordering_key)
            order by q.endpoint_id, q.ordering_key, q.id
            limit 1
        ) n
        where k.number < p_most
    )
    select k.endpoint_id, k.ordering_key, k.id, k.next_retry_at = 'infinity', k.updated_at, k.number
    from key k;
end
$plpgsql$;

-- Makes heads due that are still parked. That happens if the session that settled the former head found the new one locked by a transaction
-- that then rolled back, or had an older snapshot, or if rows were deleted by hand. The sweep and maintenance call it. Each call checks
-- 10,000 keys, which took 0.1 s, and the next call continues from there.
create or replace function ulak_private.unpark_orphans(p_now timestamptz default clock_timestamp())
returns integer
language plpgsql
as $plpgsql$
declare
    v_most constant integer := 10000;
    v_state ulak_private.sweep_state;
    v_endpoint_ids bigint[];
    v_keys text[];
    v_last_endpoint_id bigint;
    v_last_key text;
begin
    select s.* into v_state
    from ulak_private.sweep_state s
    for update skip locked;
    if not found then
        return 0;
    end if;
    select
        array_agg(k.endpoint_id) filter (where k.is_parked),
        array_agg(k.ordering_key) filter (where k.is_parked),
        max(k.endpoint_id) filter (where k.number = v_most),
        max(k.ordering_key) filter (where k.number = v_most)
    into v_endpoint_ids, v_keys, v_last_endpoint_id, v_last_key
    from ulak_private.live_keys(v_state.endpoint_id, v_state.ordering_key, v_most) k;
    update ulak_private.sweep_state s
    set endpoint_id = v_last_endpoint_id, ordering_key = v_last_key
    where (s.endpoint_id, s.ordering_key) is distinct from (v_last_endpoint_id, v_last_key);
    if v_keys is null then
        return 0;
    end if;
    return ulak_private.unpark_heads(v_endpoint_ids, v_keys, p_now);
end
$plpgsql$;

-- Deletes keys that have no live message and no open sender transaction. Each call samples about 20,000 keys, so its cost
-- doesn't grow with the table.
create or replace function ulak_private.forget_ordering_keys()
returns integer
language plpgsql
set enable_seqscan = off
as $plpgsql$
declare
    v_part real := least(
        100, 100 * 20000 / greatest((select c.reltuples from pg_class c where c.oid = 'ulak_private.ordering_keys'::regclass), 1)
    );
    v_count integer;
begin
    with unused as (
        select k.ctid as tid
        from ulak_private.ordering_keys k tablesample system (v_part)
        where not exists (
            select
            from ulak_private.deliveries q
            where q.endpoint_id = k.endpoint_id
                -- Without the collation of the queue's index, the index couldn't be used.
                and q.ordering_key = k.ordering_key collate "default"
                and q.status in ('pending', 'processing', 'held')
        )
        for update skip locked
    )
    delete from ulak_private.ordering_keys k
    using unused u
    where k.ctid = u.tid;
    get diagnostics v_count = row_count;
    return v_count;
end
$plpgsql$;
