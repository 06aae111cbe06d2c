-- Releasing and renewing leases. Only the worker that holds a message, in the attempt that it holds, can change anything.

create or replace function ulak_private.release_many(
    p_worker text,
    p_ids bigint[],
    p_attempts integer[],
    p_delay interval,
    p_now timestamptz default clock_timestamp()
)
returns bigint[]
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_hashjoin = off
set enable_mergejoin = off
as $plpgsql$
declare
    v_released bigint[];
begin
    p_now := ulak_private.clock(p_now);
    with released as (
        update ulak_private.deliveries q
        set status = 'pending',
            next_retry_at = greatest(p_now + p_delay, q.scheduled_at),
            updated_at = p_now,
            locked_by = null,
            lease_until = null
        from unnest(p_ids, p_attempts) r(id, attempt)
        where q.id between r.id and r.id
            and q.attempts = r.attempt
            and q.locked_by = p_worker
            and q.status is not distinct from 'processing'
        returning q.id
    )
    select coalesce(array_agg(r.id), '{}') into v_released
    from released r;
    return v_released;
end
$plpgsql$;

create or replace function ulak_private.heartbeat_many(
    p_worker text,
    p_ids bigint[],
    p_attempts integer[],
    p_lease interval default null,
    p_now timestamptz default clock_timestamp()
)
returns bigint[]
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_hashjoin = off
set enable_mergejoin = off
as $plpgsql$
declare
    v_renewed bigint[];
begin
    p_now := ulak_private.clock(p_now);
    with renewed as (
        update ulak_private.deliveries q
        -- As long as the claim or the last heartbeat asked for. Only bring_back() changes a message in flight, too, and moves both times.
        set lease_until = p_now + coalesce(p_lease, q.lease_until - q.updated_at),
            updated_at = p_now
        from unnest(p_ids, p_attempts) r(id, attempt)
        where q.id between r.id and r.id
            and q.attempts = r.attempt
            and q.locked_by = p_worker
            and q.status is not distinct from 'processing'
            -- An expired lease is lost, even if no sweep has noticed yet.
            and q.lease_until > p_now
        returning q.id
    )
    select coalesce(array_agg(r.id), '{}') into v_renewed
    from renewed r;
    return v_renewed;
end
$plpgsql$;
