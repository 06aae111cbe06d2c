-- Ordering keys: when the head of a key is done, the next message of the key becomes due.

-- A message behind another of its key has next_retry_at = infinity and costs a claim nothing. Senders of a key are
-- serialised, so the first committed row of a key is its head, whatever is still uncommitted.

-- Makes heads due, but for those that another session holds, and tells which. Nobody waits here: the caller holds
-- messages that it settled or took out, and the other session may be after those. The callers pin the plan.
create or replace function ulak._promote_free_heads(
    p_endpoint_ids bigint[],
    p_keys text[],
    p_now timestamptz,
    out promoted integer,
    out held_endpoint_ids bigint[],
    out held_keys text[],
    out empty_endpoint_ids bigint[],
    out empty_keys text[]
)
language plpgsql
as $plpgsql$
begin
    with head as materialized (
        select k.endpoint_id, k.ordering_key, h.id, h.status = 'pending' and h.next_retry_at = 'infinity' as waits
        from (
            select distinct u.endpoint_id, u.ordering_key
            from unnest(p_endpoint_ids, p_keys) u(endpoint_id, ordering_key)
        ) k
        left join lateral (
            select q.id, q.next_retry_at, q.status
            from ulak.queue q
            where q.endpoint_id = k.endpoint_id
                -- Not `=`: then the order of ids alone would do, and all of the queue might be read in it.
                and q.ordering_key between k.ordering_key and k.ordering_key
                and q.status in ('pending', 'processing')
            order by q.ordering_key, q.id
            limit 1
        ) h on true
    ),
    locked as (
        select q.id
        from ulak.queue q
        where q.id = any (array(select h.id from head h where h.waits))
            and q.status is not distinct from 'pending'
            and q.next_retry_at = 'infinity'
        for update skip locked
    ),
    -- A head keeps the place in the line that it had when it was sent.
    moved as (
        update ulak.queue q
        set next_retry_at = greatest(q.created_at, q.scheduled_at), updated_at = p_now
        from locked l
        where q.id between l.id and l.id
        returning q.id
    ),
    seen as materialized (
        select
            h.endpoint_id,
            h.ordering_key,
            h.id is null as is_empty,
            h.waits and h.id not in (select m.id from moved m) as is_held
        from head h
    )
    select
        (select count(*) from moved m),
        array_agg(s.endpoint_id) filter (where s.is_held),
        array_agg(s.ordering_key) filter (where s.is_held),
        array_agg(s.endpoint_id) filter (where s.is_empty),
        array_agg(s.ordering_key) filter (where s.is_empty)
    into promoted, held_endpoint_ids, held_keys, empty_endpoint_ids, empty_keys
    from seen s;
end
$plpgsql$;

-- What can't be done now gets a note, and claim looks again.
create or replace function ulak._promote_heads(p_endpoint_ids bigint[], p_keys text[], p_now timestamptz)
returns integer
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set plan_cache_mode = force_generic_plan
as $plpgsql$
declare
    v_seen record;
    v_again record;
begin
    v_seen := ulak._promote_free_heads(p_endpoint_ids, p_keys, p_now);
    if v_seen.empty_keys is not null then
        -- No message of the key is left that we can see. One whose sender hasn't committed yet was queued behind the
        -- head that is now done, and nobody else would wake it. If nobody holds the key, look again.
        with key as materialized (
            select
                k.endpoint_id,
                k.ordering_key,
                pg_try_advisory_xact_lock(
                    hashtext('ulak_key'), ulak._ordering_lock(k.endpoint_id, k.ordering_key)
                ) as is_free
            from unnest(v_seen.empty_endpoint_ids, v_seen.empty_keys) k(endpoint_id, ordering_key)
        ),
        noted as (
            insert into ulak.ordering_wakeups (endpoint_id, ordering_key)
            select k.endpoint_id, k.ordering_key
            from key k
            where not k.is_free
        )
        select
            array_agg(k.endpoint_id) filter (where k.is_free) as endpoint_ids,
            array_agg(k.ordering_key) filter (where k.is_free) as keys
        into v_again
        from key k;
        if v_again.keys is not null then
            v_again := ulak._promote_free_heads(v_again.endpoint_ids, v_again.keys, p_now);
            v_seen.promoted := v_seen.promoted + v_again.promoted;
            v_seen.held_endpoint_ids := v_seen.held_endpoint_ids || v_again.held_endpoint_ids;
            v_seen.held_keys := v_seen.held_keys || v_again.held_keys;
        end if;
    end if;

    if v_seen.held_keys is not null then
        insert into ulak.ordering_wakeups (endpoint_id, ordering_key)
        select k.endpoint_id, k.ordering_key
        from unnest(v_seen.held_endpoint_ids, v_seen.held_keys) k(endpoint_id, ordering_key);
    end if;
    return v_seen.promoted;
end
$plpgsql$;

-- Looks again once the sender has gone and nobody else holds the head. Until then a note stays as it is.
create or replace function ulak._wake_ordering_keys(p_now timestamptz)
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set plan_cache_mode = force_generic_plan
as $plpgsql$
declare
    v_free record;
    v_seen record;
begin
    with note as (
        select w.id, w.endpoint_id, w.ordering_key
        from ulak.ordering_wakeups w
        for update skip locked
    )
    select array_agg(n.id) as ids, array_agg(n.endpoint_id) as endpoint_ids, array_agg(n.ordering_key) as keys
    into v_free
    from note n
    where pg_try_advisory_xact_lock(hashtext('ulak_key'), ulak._ordering_lock(n.endpoint_id, n.ordering_key));
    if v_free.ids is null then
        return;
    end if;
    v_seen := ulak._promote_free_heads(v_free.endpoint_ids, v_free.keys, p_now);
    delete from ulak.ordering_wakeups w
    where w.id = any (v_free.ids)
        and (w.endpoint_id, w.ordering_key) not in (
            select k.endpoint_id, k.ordering_key
            from unnest(v_seen.held_endpoint_ids, v_seen.held_keys) k(endpoint_id, ordering_key)
        );
end
$plpgsql$;

-- The safety net: keys whose head waits for a message that is gone, because somebody deleted it by hand. Maintenance calls
-- it; it visits each live key once.
create or replace function ulak._promote_orphans(p_now timestamptz default clock_timestamp())
returns integer
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
as $plpgsql$
declare
    v_endpoint_ids bigint[];
    v_keys text[];
begin
    with recursive key as (
        (
            select q.endpoint_id, q.ordering_key, q.next_retry_at
            from ulak.queue q
            where q.ordering_key is not null and q.status in ('pending', 'processing')
            order by q.endpoint_id, q.ordering_key, q.id
            limit 1
        )
        union all
        select n.endpoint_id, n.ordering_key, n.next_retry_at
        from key k
        cross join lateral (
            select q.endpoint_id, q.ordering_key, q.next_retry_at
            from ulak.queue q
            where q.ordering_key is not null
                and q.status in ('pending', 'processing')
                and (q.endpoint_id, q.ordering_key) > (k.endpoint_id, k.ordering_key)
            order by q.endpoint_id, q.ordering_key, q.id
            limit 1
        ) n
    )
    select array_agg(k.endpoint_id), array_agg(k.ordering_key) into v_endpoint_ids, v_keys
    from key k
    where k.next_retry_at = 'infinity';
    if v_keys is null then
        return 0;
    end if;
    return ulak._promote_heads(v_endpoint_ids, v_keys, p_now);
end
$plpgsql$;
