-- A turn of the worker in light traffic, where what it costs is what it touches: after a pause nothing is in the processor's
-- caches. So one statement stores what was delivered and claims what was sent since, for the plain case of both.

-- Of p_ids (ascending), delivered at p_attempts, and of the p_count ids behind p_after. Not plain, and left to _settle_many()
-- and _claim(): messages with an ordering key, endpoints with a limit or with something to note, and whatever else is due.
-- Returns one row for each message that it stored (not is_new) or claimed. p_protocols: those that this worker has a client for, by
-- default all.
create or replace function ulak._light_turn(
    p_worker text,
    p_after bigint,
    p_count integer,
    p_lease interval,
    p_ids bigint[],
    p_attempts integer[],
    -- Null, as workers leave it: the time of the call, and no check whether the caller may pass another one.
    p_now timestamptz default null,
    p_protocols text[] default ulak._worker_protocols()
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
declare
    -- What was delivered is hardly older than what is new: one range of ids has both.
    v_first bigint := least(p_after + 1, p_ids[1]);
begin
    p_now := case when p_now is null then clock_timestamp() else ulak._clock(p_now) end;
    return query
    update ulak.queue q
    set status = case when q.status = 'pending' then 'processing' else 'completed' end,
        attempts = q.attempts + (q.status = 'pending')::integer,
        locked_by = case when q.status = 'pending' then p_worker end,
        lease_until = case when q.status = 'pending' then p_now + p_lease end,
        processing_started_at = case when q.status = 'pending' then p_now else q.processing_started_at end,
        completed_at = case when q.status = 'processing' then p_now end,
        response = case when q.status = 'pending' then q.response end,
        updated_at = p_now
    from ulak.endpoints e
    where e.id = q.endpoint_id
        and q.id between v_first and p_after + p_count
        and q.ordering_key is null
        and case q.status
            when 'pending' then
                q.id > p_after
                and q.next_retry_at <= p_now
                and (q.expires_at is null or q.expires_at > p_now)
                and e.enabled
                and e.protocol = any (p_protocols)
                and not ulak._is_limited(e)
                -- Its messages are to travel together: _claim() takes all that are due.
                and not e.config ? 'batch_size'
            when 'processing' then
                q.locked_by = p_worker
                and q.attempts = p_attempts[array_position(p_ids, q.id)]
                and not ulak._notes_deliveries(e, p_now)
        end
    returning
        q.id,
        q.status = 'processing',
        q.message_id,
        q.attempts,
        q.endpoint_id,
        e.config_version,
        case when q.status = 'processing' then q.payload end,
        q.headers,
        q.metadata,
        q.correlation_id,
        q.created_at;
end
$plpgsql$;

-- The texts of one message that a worker has claimed, for those that are too large to be read with others. An error, if it
-- is larger than anything that can be sent, is that message's alone.
create or replace function ulak._read_claimed(p_worker text, p_id bigint, p_attempt integer)
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
    select q.payload, q.headers, q.metadata, q.ordering_key into strict v_message
    from ulak.queue q
    where q.id = p_id and q.locked_by = p_worker and q.attempts = p_attempt;
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
