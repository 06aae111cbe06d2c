-- Recovery: messages whose worker went silent, and messages that expired.

-- An expired lease, or one whose worker died, counts as a failure and takes the same path as a reported one, but not for the circuit breaker:
-- it says nothing about the receiver. If it was the last retry, the message becomes a dead letter, even if the receiver has got it.
-- `skip locked`: two concurrent sweeps recover each message once, and a worker that is just settling it wins.
create or replace function ulak.recover_stale_messages(
    p_now timestamptz default clock_timestamp(),
    p_limit integer default 10000
)
returns integer
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
    v_ids bigint[];
    v_attempts integer[];
    v_workers text[];
begin
    p_now := ulak_private.clock(p_now);
    -- A message without a lease was changed by hand, and no worker holds it.
    v_ids := array(
        select n.id
        from ulak_private.deliveries n
        where n.status = 'processing' and n.lease_until is null
        for update skip locked
    );
    if v_ids <> '{}' then
        update ulak_private.deliveries q
        set lease_until = p_now
        where q.id = any (v_ids);
    end if;

    select array_agg(s.id), array_agg(s.attempts), array_agg(s.locked_by) into v_ids, v_attempts, v_workers
    from (
        select q.id, q.attempts, q.locked_by
        from ulak_private.deliveries q
        where q.status = 'processing' and q.lease_until <= p_now
        order by q.endpoint_id, q.lease_until
        limit p_limit
        for update skip locked
    ) s;
    return ulak_private.recover(v_ids, v_attempts, v_workers, 'lease expired: worker "%s" went silent', p_now);
end
$plpgsql$;

comment on function ulak.recover_stale_messages(timestamptz, integer) is
    'recovers messages whose lease ran out and retries them like failures; returns how many';

-- claim() itself recovers expired leases of its endpoints, once a second per session, so external workers replace each other even if no sweep
-- runs. For each set of endpoints the session remembers when it looked, and up to which time no lease was left, so that it doesn't read older
-- leases again. It does return to a message that another session had locked, since that session may roll back. Messages that a look can't
-- see, such as those of a claim that commits after its lease has expired, are left to recover_stale_messages().
create or replace function ulak_private.take_over_expired(p_endpoint_ids bigint[], p_now timestamptz)
returns integer
language plpgsql
as $plpgsql$
declare
    -- Three numbers per set of endpoints, the latest set first: its key, when the session looked, and up to when no lease was left (both times
    -- in microseconds).
    v_memory bigint[] := nullif(current_setting('ulak_private.leases_looked_at', true), '');
    -- 0 stands for all pull endpoints.
    v_choice bigint := coalesce(p_endpoint_ids[1], 0);
    -- `1000000.0`, because finding out how to multiply by an integer takes a new session 0.1 ms.
    v_now bigint := extract(epoch from p_now) * 1000000.0;
    v_place integer;
    v_since bigint;
    v_look record;
begin
    if cardinality(p_endpoint_ids) <> 1 then
        -- Each set of several endpoints has its own key: grants change, and a pooler's session serves several roles.
        v_choice := hash_array_extended(array(select e from unnest(p_endpoint_ids) e order by e), 0);
    end if;
    v_place := array_position(v_memory, v_choice);
    if v_now - v_memory[v_place + 1] between 0 and 999999 then
        return 0;
    end if;
    -- Null if the clock was set back: then the look starts from the beginning.
    v_since := case when v_memory[v_place + 1] <= v_now then v_memory[v_place + 2] end;
    v_look := ulak_private.take_over(
        p_endpoint_ids, coalesce(to_timestamp(v_since::double precision / 1000000.0::double precision), '-infinity'), p_now
    );
    if v_look.recovered < 1000 then
        v_since := least(v_now, extract(epoch from v_look.first_left) * 1000000.0 - 1.0);
        perform set_config(
            'ulak_private.leases_looked_at',
            (array[v_choice, v_now, v_since] || v_memory[: v_place - 1] || v_memory[coalesce(v_place + 3, 1) : 63])::text,
            false
        );
    end if;
    return v_look.recovered;
end
$plpgsql$;

-- first_left: the earliest end of an expired lease that is left, because another session has locked its message or the limit was reached.
create or replace function ulak_private.take_over(
    p_endpoint_ids bigint[],
    p_since timestamptz,
    p_now timestamptz,
    out recovered integer,
    out first_left timestamptz
)
language plpgsql
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
set plan_cache_mode = force_generic_plan
as $plpgsql$
declare
    v_ids bigint[];
    v_attempts integer[];
    v_workers text[];
begin
    if p_endpoint_ids is null then
        p_endpoint_ids := array(select e.id from ulak.endpoints e where e.protocol = 'pull');
    end if;
    recovered := 0;
    first_left := ulak_private.first_expired(p_endpoint_ids, p_since, p_now);
    -- Usually none has. Planning the rest takes 1 ms, which many sessions never need.
    if first_left is null then
        return;
    end if;
    select array_agg(s.id), array_agg(s.attempts), array_agg(s.locked_by) into v_ids, v_attempts, v_workers
    from (
        select q.id, q.attempts, q.locked_by
        from unnest(p_endpoint_ids) e(id)
        cross join lateral (
            select q.id, q.attempts, q.locked_by
            from ulak_private.deliveries q
            where q.status = 'processing' and q.endpoint_id = e.id and q.lease_until > p_since and q.lease_until <= p_now
            order by q.lease_until
            limit 1000
            for update skip locked
        ) q
        limit 1000
    ) s;
    recovered := ulak_private.recover(v_ids, v_attempts, v_workers, 'lease expired: worker "%s" went silent', p_now);
    first_left := ulak_private.first_expired(p_endpoint_ids, p_since, p_now);
end
$plpgsql$;

create or replace function ulak_private.first_expired(p_endpoint_ids bigint[], p_since timestamptz, p_now timestamptz)
returns timestamptz
language plpgsql
as $plpgsql$
begin
    return (
        select min(q.lease_until)
        from unnest(p_endpoint_ids) e(id)
        cross join lateral (
            select q.lease_until
            from ulak_private.deliveries q
            where q.status = 'processing' and q.endpoint_id = e.id and q.lease_until > p_since and q.lease_until <= p_now
            order by q.lease_until
            limit 1
        ) q
    );
end
$plpgsql$;

-- Recovers messages of workers whose sessions have ended. No report will come, so there is no point in waiting for their leases.
create or replace function ulak_private.recover_from(p_workers text[], p_now timestamptz)
returns integer
language plpgsql
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
as $plpgsql$
declare
    v_ids bigint[];
    v_attempts integer[];
    v_workers text[];
begin
    select array_agg(s.id), array_agg(s.attempts), array_agg(s.locked_by) into v_ids, v_attempts, v_workers
    from (
        select q.id, q.attempts, q.locked_by
        from ulak_private.deliveries q
        where q.status = 'processing' and q.locked_by = any (p_workers)
        for update skip locked
    ) s;
    return ulak_private.recover(v_ids, v_attempts, v_workers, 'the session of worker "%s" ended', p_now);
end
$plpgsql$;

-- Fails messages that the caller has locked, each in the name of its worker.
create or replace function ulak_private.recover(
    p_ids bigint[],
    p_attempts integer[],
    p_workers text[],
    p_reason text,
    p_now timestamptz
)
returns integer
language plpgsql
as $plpgsql$
declare
    v_recovered integer;
    v_retry_after integer[];
    v_keys text[];
    v_endpoint_ids bigint[];
    v_dead bigint[];
begin
    if p_ids is null then
        return 0;
    end if;
    -- An external worker's lease was wait enough, so its messages are due at once. Backoff is for receivers that ulak itself calls.
    v_retry_after := array(
        select case when e.protocol = 'pull' then 0 end
        from unnest(p_ids) with ordinality r(id, place)
        left join ulak_private.deliveries q on q.id between r.id and r.id
        left join ulak.endpoints e on e.id = q.endpoint_id
        order by r.place
    );
    select
        count(*),
        array_agg(f.ordering_key) filter (where f.is_dead and f.ordering_key is not null),
        array_agg(f.endpoint_id) filter (where f.is_dead and f.ordering_key is not null),
        array_agg(f.id) filter (where f.is_dead)
    into v_recovered, v_keys, v_endpoint_ids, v_dead
    from ulak_private.fail_rows(
        p_workers,
        p_ids,
        p_attempts,
        array(select '[RETRYABLE] ' || format(p_reason, coalesce(w, 'nobody')) from unnest(p_workers) w),
        v_retry_after,
        null,
        p_now
    ) f;
    if v_keys is not null then
        perform ulak_private.unpark_heads(v_endpoint_ids, v_keys, p_now);
    end if;
    if v_dead is not null then
        perform ulak_private.archive_dead(v_dead, p_now);
    end if;
    return v_recovered;
end
$plpgsql$;

create or replace function ulak.mark_expired_messages(
    p_now timestamptz default clock_timestamp(),
    p_limit integer default 10000
)
returns integer
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
as $plpgsql$
declare
    v_ids bigint[];
begin
    p_now := ulak_private.clock(p_now);
    with late as (
        select q.id
        from ulak_private.deliveries q
        where q.status = 'pending' and q.expires_at <= p_now
        order by q.expires_at
        limit p_limit
        for update skip locked
    ),
    expired as (
        update ulak_private.deliveries q
        set status = 'expired', updated_at = p_now
        from late l
        where q.id between l.id and l.id
        returning q.id
    )
    select array_agg(e.id) into v_ids
    from expired e;
    return ulak_private.end_messages(v_ids, p_now);
end
$plpgsql$;

comment on function ulak.mark_expired_messages(timestamptz, integer) is
    'marks waiting messages whose expires_at has passed as expired: they are never delivered; returns how many';

-- Makes dead letters of messages whose endpoint was dropped while they were being sent: they can't be delivered.
create or replace function ulak_private.bury_orphans(p_now timestamptz, p_limit integer)
returns integer
language sql
set enable_seqscan = off
as $sql$
    select ulak_private.give_up(
        array(
            select q.id
            from ulak_private.orphaned_endpoints() o
            join ulak_private.deliveries q on q.endpoint_id = o.endpoint_id and q.status = 'pending'
            limit p_limit
            for update of q skip locked
        ),
        'its endpoint was dropped',
        p_now
    )
$sql$;
