-- Ordering keys: when the head of a key is done, the next message of the key becomes due.

-- A message behind another of its key has next_retry_at = infinity and costs a claim nothing. Senders of a key are
-- serialised, so the first committed row of a key is its head, whatever is still uncommitted.
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
    v_promoted integer := 0;
    v_noted_keys text[];
    v_empty_keys text[];
    v_empty_endpoint_ids bigint[];
    v_waiting integer;
    v_locked integer;
begin
    loop
        with head as materialized (
            select k.endpoint_id, k.ordering_key, h.id, h.status = 'pending' and h.next_retry_at = 'infinity' as waits
            from (
                select distinct u.endpoint_id, u.ordering_key
                from unnest(p_endpoint_ids, p_keys) u(endpoint_id, ordering_key)
            ) k
            left join lateral (
                select q.id, q.ordering_key, q.next_retry_at, q.status
                from ulak.queue q
                where q.endpoint_id = k.endpoint_id
                    and q.ordering_key >= k.ordering_key
                    and q.status in ('pending', 'processing')
                order by q.ordering_key, q.id
                limit 1
            ) h on h.ordering_key = k.ordering_key
        ),
        -- In the order of ids: two sessions that promote the same keys can't wait for each other.
        locked as (
            select q.id
            from ulak.queue q
            where q.id = any (array(select h.id from head h where h.waits))
                and q.status is not distinct from 'pending'
                and q.next_retry_at = 'infinity'
            order by q.id
            for update
        ),
        -- A head keeps the place in the line that it had when it was sent.
        promoted as (
            update ulak.queue q
            set next_retry_at = greatest(q.created_at, q.scheduled_at), updated_at = p_now
            from locked l
            where q.id between l.id and l.id
            returning q.id
        )
        select
            count(*) filter (where h.waits),
            (select count(*) from promoted p),
            array_agg(h.endpoint_id order by h.endpoint_id, h.ordering_key) filter (where h.id is null),
            array_agg(h.ordering_key order by h.endpoint_id, h.ordering_key) filter (where h.id is null)
        into v_waiting, v_locked, v_empty_endpoint_ids, v_empty_keys
        from head h;
        v_promoted := v_promoted + v_locked;
        -- A head that expired or was taken out while we waited for it has left its place to the next one: look again.
        exit when v_locked = v_waiting and v_empty_keys is not distinct from v_noted_keys;

        -- No message of the key is left that we can see. One whose sender hasn't committed yet was queued behind the head
        -- that is now done, and nobody else would wake it. If nobody holds the key, look again; else leave a note for
        -- claim.
        insert into ulak.ordering_wakeups (endpoint_id, ordering_key)
        select k.endpoint_id, k.ordering_key
        from unnest(v_empty_endpoint_ids, v_empty_keys) k(endpoint_id, ordering_key)
        where not pg_try_advisory_xact_lock(hashtext('ulak_key'), ulak._ordering_lock(k.endpoint_id, k.ordering_key))
        on conflict do nothing;
        v_noted_keys := v_empty_keys;
    end loop;
    return v_promoted;
end
$plpgsql$;

-- Notes that settling left: look again as soon as the sender has gone.
create or replace function ulak._wake_ordering_keys(p_now timestamptz)
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_endpoint_ids bigint[];
    v_keys text[];
begin
    with note as (
        select w.ctid as tid
        from ulak.ordering_wakeups w
        for update skip locked
    ),
    free as (
        delete from ulak.ordering_wakeups w
        using note n
        where w.ctid = n.tid
            and pg_try_advisory_xact_lock(hashtext('ulak_key'), ulak._ordering_lock(w.endpoint_id, w.ordering_key))
        returning w.endpoint_id, w.ordering_key
    )
    select array_agg(f.endpoint_id), array_agg(f.ordering_key) into v_endpoint_ids, v_keys
    from free f;
    if v_keys is not null then
        perform ulak._promote_heads(v_endpoint_ids, v_keys, p_now);
    end if;
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
