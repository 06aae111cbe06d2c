-- A turn of the worker in light traffic, where what it costs is what it touches: after a pause nothing is in the processor's
-- caches. So one call stores what was delivered and claims what was sent since, for the plain case.

-- Stores p_ids, delivered at p_attempts, and claims of the p_count ids behind p_after. Not plain, and left to ulak_private.claim(): messages
-- with an ordering key, endpoints with a limit, and whatever else is due. Returns one row for each message that it stored (not is_new)
-- or claimed. p_protocols: those that this worker has a client for, by default all.
create or replace function ulak_private.light_turn(
    p_worker text,
    p_after bigint,
    p_count integer,
    p_lease interval,
    p_ids bigint[],
    p_attempts integer[],
    -- Null, as workers leave it: the time of the call, and no check whether the caller may pass another one.
    p_now timestamptz default null,
    p_protocols text[] default ulak_private.worker_protocols()
)
returns table (
    id bigint,
    is_new boolean,
    message_id uuid,
    attempt integer,
    endpoint_id bigint,
    config_version bigint,
    payload jsonb,
    headers jsonb,
    metadata jsonb,
    correlation_id uuid,
    created_at timestamptz
)
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
#variable_conflict use_column
begin
    p_now := case when p_now is null then clock_timestamp() else ulak_private.clock(p_now) end;
    if p_ids <> '{}' then
        return query
        select s.id, false, null::uuid, null::integer, null::bigint, null::bigint, null::jsonb, null::jsonb, null::jsonb, null::uuid,
            null::timestamptz
        from unnest(ulak_private.settle_many(p_worker, p_ids, p_attempts, p_now => p_now)) s(id);
    end if;
    if p_count > 0 then
        return query
        with claimed as (
            update ulak_private.deliveries q
            set status = 'processing',
                attempts = q.attempts + 1,
                locked_by = p_worker,
                lease_until = p_now + p_lease,
                processing_started_at = p_now,
                updated_at = p_now
            from ulak.endpoints e
            where e.id = q.endpoint_id
                and q.id between p_after + 1 and p_after + p_count
                and q.status is not distinct from 'pending'
                and q.ordering_key is null
                and not ulak_private.has_old_settings()
                and q.next_retry_at <= p_now
                and (q.expires_at is null or q.expires_at > p_now)
                and e.enabled
                and e.protocol = any (p_protocols)
                and not ulak_private.is_limited(e)
                -- Its messages are to travel together: ulak_private.claim() takes all that are due.
                and not e.config ? 'batch_size'
            returning q.*, e.config_version
        )
        select
            c.id,
            true,
            c.message_id,
            c.attempts,
            c.endpoint_id,
            c.config_version,
            coalesce(c.payload, v.payload),
            ulak_private.sent_headers(coalesce(c.headers, v.headers), c.generation),
            coalesce(c.metadata, v.metadata),
            c.correlation_id,
            c.created_at
        from claimed c
        left join lateral (
            select v.payload, v.headers, v.metadata
            from ulak_private.events v
            where v.id = c.event_id and v.created_at = coalesce(c.event_created_at, c.created_at)
            -- As in ulak_private.claim().
            limit 1
        ) v on true;
    end if;
end
$plpgsql$;

-- The texts of one message that a worker has claimed, for those that are too large to be read with others. An error, if it
-- is larger than anything that can be sent, is that message's alone.
create or replace function ulak_private.read_claimed(p_worker text, p_id bigint, p_attempt integer)
returns table (payload text, headers text, metadata text, ordering_key text)
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    -- The largest max_payload_size is 100 MB.
    v_largest integer := 134217728;
    v_message record;
begin
    select q.payload, ulak_private.sent_headers(q.headers, q.generation) as headers, q.metadata, q.ordering_key into strict v_message
    from ulak.queue q
    where q.id = p_id and q.locked_by = p_worker and q.attempts = p_attempt;
    if v_message.payload is null then
        raise exception 'its body is gone: its month of ulak_private.events was dropped or detached' using errcode = 'P0002';
    end if;
    -- As they are stored, before they are made into text.
    if greatest(pg_column_size(v_message.payload), pg_column_size(v_message.headers), pg_column_size(v_message.metadata)) <= v_largest then
        payload := v_message.payload::text;
        headers := v_message.headers::text;
        metadata := v_message.metadata::text;
        ordering_key := v_message.ordering_key;
    end if;
    if payload is null or greatest(octet_length(payload), octet_length(headers), octet_length(metadata)) > v_largest then
        raise exception 'its payload, headers or metadata are larger than 128 MB'
            using errcode = '54000';
    end if;
    return next;
end
$plpgsql$;
