-- Sending: an application's transaction puts messages into the queue.

-- Nearly every message has no option that needs a look and fits below any limit: it takes two inserts and no other query.
-- Everything else, including errors, takes the long path.
create or replace function ulak.send(
    p_endpoint text,
    p_payload jsonb default null,
    p_priority integer default 0,
    p_scheduled_at timestamptz default null,
    p_idempotency_key text default null,
    p_correlation_id uuid default null,
    p_expires_at timestamptz default null,
    p_ordering_key text default null,
    p_headers jsonb default null,
    p_metadata jsonb default null,
    p_raw text default null,
    p_content_type text default null,
    p_path text default null,
    p_timeout double precision default null,
    p_generation bigint default null,
    p_max_retries integer default null,
    p_if_waiting text default null,
    p_latest interval default null
)
returns bigint
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_id bigint;
begin
    -- 1024: the smallest max_payload_size that can be configured.
    if num_nonnulls(
            p_scheduled_at, p_idempotency_key, p_expires_at, p_ordering_key, p_headers, p_metadata, p_raw, p_content_type, p_path,
            p_timeout, p_generation, p_max_retries, p_if_waiting, p_latest
        ) = 0
        and p_priority between 0 and 10
        and octet_length(p_payload::text) <= 1024
    then
        v_id := nextval('ulak.queue_id_seq');
        if ulak_private.has_room(v_id) then
            insert into ulak_private.deliveries (id, event_id, endpoint_id, priority, correlation_id, generation)
            -- As generation() has it: that would be a query of its own.
            select v_id, v_id, e.id, p_priority, p_correlation_id, (
                select nullif(g.value::bigint, 0) from ulak.setting_values g where g.name = 'generation'
            )
            from ulak.endpoints e
            where e.name = p_endpoint and e.max_pending is null and (not e.is_restricted or ulak_private.may_send(e.id));
            if found then
                insert into ulak_private.events (id, payload, headers)
                values (v_id, p_payload, ulak_private.traced(null));
                if ulak_private.wants_wake_up(v_id) then
                    perform ulak_private.wake_workers();
                end if;
                return v_id;
            end if;
        end if;
    end if;
    if num_nonnulls(p_raw, p_content_type, p_path, p_timeout, p_generation, p_max_retries, p_if_waiting, p_latest) > 0 then
        return ulak_private.send_request(
            (
                ulak_private.sendable_endpoint(p_endpoint),
                ulak_private.body(p_payload, p_raw),
                p_priority,
                p_scheduled_at,
                p_idempotency_key,
                p_correlation_id,
                p_expires_at,
                p_ordering_key,
                p_headers,
                p_metadata
            )::ulak_private.message,
            p_raw is not null,
            p_content_type,
            p_path,
            p_timeout,
            p_generation,
            p_max_retries,
            p_endpoint,
            p_if_waiting,
            p_latest
        );
    end if;
    return ulak_private.send(
        p_endpoint,
        p_payload,
        p_priority,
        p_scheduled_at,
        p_idempotency_key,
        p_correlation_id,
        p_expires_at,
        p_ordering_key,
        p_headers,
        p_metadata
    );
end
$plpgsql$;

comment on function ulak.send(
    text, jsonb, integer, timestamptz, text, uuid, timestamptz, text, jsonb, jsonb, text, text, text, double precision, bigint, integer, text,
    interval
) is 'queues one message in the caller''s transaction and returns its id';

create or replace function ulak.send_with_options(
    p_endpoint text,
    p_payload jsonb,
    p_priority integer default 0,
    p_scheduled_at timestamptz default null,
    p_idempotency_key text default null,
    p_correlation_id uuid default null,
    p_expires_at timestamptz default null,
    p_ordering_key text default null
)
returns bigint
language sql
as $sql$
    select ulak.send(
        p_endpoint,
        p_payload,
        coalesce(p_priority, 0),
        p_scheduled_at,
        p_idempotency_key,
        p_correlation_id,
        p_expires_at,
        p_ordering_key
    )
$sql$;

comment on function ulak.send_with_options(text, jsonb, integer, timestamptz, text, uuid, timestamptz, text) is
    'send() with its options by position';

create or replace function ulak.send_batch(p_endpoint text, p_payloads jsonb[])
returns bigint[]
language sql
as $sql$
    select ulak.send_batch_with_priority(p_endpoint, p_payloads, 0)
$sql$;

comment on function ulak.send_batch(text, jsonb[]) is
    'queues many messages for one endpoint and returns their ids in the order of the payloads';

create or replace function ulak.send_batch_with_priority(p_endpoint text, p_payloads jsonb[], p_priority integer)
returns bigint[]
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_endpoint_id bigint := ulak_private.sendable_endpoint(p_endpoint);
begin
    if p_payloads is null then
        raise exception 'the payloads are null'
            using errcode = '22004', hint = 'Pass an array of jsonb; an empty one sends nothing.';
    end if;
    return ulak_private.enqueue_many(array_fill(v_endpoint_id, array[cardinality(p_payloads)]), p_payloads, p_priority);
end
$plpgsql$;

comment on function ulak.send_batch_with_priority(text, jsonb[], integer) is
    'send_batch() with a priority from 0 to 10 for all of them';

-- One insert for many messages: element i of each array is one message. Returns ids in the order of the arrays.
create or replace function ulak_private.enqueue_many(p_endpoint_ids bigint[], p_payloads jsonb[], p_priority integer default 0)
returns bigint[]
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_count integer := cardinality(p_payloads);
    v_sent integer;
    v_ids bigint[];
    v_overflow bigint[] := '{}';
    v_generation bigint := ulak_private.generation();
begin
    perform ulak_private.check_priority(p_priority);
    if v_count = 0 then
        return '{}';
    end if;
    perform ulak_private.check_payloads(p_payloads);
    v_ids := array(select nextval('ulak.queue_id_seq') from generate_series(1, v_count));
    if ulak_private.has_room(v_ids[v_count]) is not true then
        perform ulak_private.check_backpressure(v_ids[v_count], v_count);
    end if;
    if exists (select from ulak.endpoints e where e.id = any (p_endpoint_ids) and e.max_pending is not null) then
        v_overflow := ulak_private.overflow(v_ids, p_endpoint_ids);
    end if;

    insert into ulak_private.deliveries (id, event_id, endpoint_id, priority, generation)
    select m.id, m.id, e.id, p_priority, v_generation
    from unnest(v_ids, p_endpoint_ids) m(id, endpoint_id)
    join ulak.endpoints e on e.id = m.endpoint_id
    -- The join may give them backwards: then each page of the indexes is split in its middle and stays half empty.
    order by m.id;
    get diagnostics v_sent = row_count;
    insert into ulak_private.events (id, payload, headers)
    select m.id, m.payload, ulak_private.traced(null)
    from unnest(v_ids, p_payloads) m(id, payload);
    if v_overflow <> '{}' then
        perform ulak_private.bury_overflow(v_overflow);
    end if;
    if ulak_private.wants_wake_up(v_ids[1]) then
        perform ulak_private.wake_workers();
    end if;
    -- The join has dropped what is for an endpoint that was dropped a moment ago.
    if v_sent < v_count then
        v_ids := array(select q.id from ulak_private.deliveries q where q.id = any (v_ids) order by q.id);
    end if;
    return v_ids;
end
$plpgsql$;

-- One message, with every check and with every option but those of send_request().
create or replace function ulak_private.send(
    p_endpoint text,
    p_payload jsonb,
    p_priority integer,
    p_scheduled_at timestamptz,
    p_idempotency_key text,
    p_correlation_id uuid,
    p_expires_at timestamptz,
    p_ordering_key text,
    p_headers jsonb,
    p_metadata jsonb
)
returns bigint
language plpgsql
as $plpgsql$
declare
    v_endpoint_id bigint;
    v_is_limited boolean;
    v_is_refused boolean;
    v_overflows boolean;
    v_is_valid boolean;
    v_due timestamptz := greatest(now(), p_scheduled_at);
    v_id bigint;
    v_first_id bigint;
    v_payload_hash text;
begin
    select e.id, e.max_pending is not null, e.is_restricted and not ulak_private.may_send(e.id)
    into v_endpoint_id, v_is_limited, v_is_refused
    from ulak.endpoints e
    where e.name = p_endpoint;
    if not found then
        perform ulak_private.raise_unknown_endpoint(p_endpoint);
    elsif v_is_refused then
        perform ulak_private.raise_not_granted(p_endpoint, 'send');
    end if;
    v_is_valid := ulak_private.check_message(
        p_payload, p_priority, p_scheduled_at, p_idempotency_key, p_expires_at, p_ordering_key, p_headers, p_metadata
    ) and (p_headers is null or ulak_private.check_credentials(v_endpoint_id, p_headers));
    if p_ordering_key is not null then
        perform ulak_private.lock_ordering_key(v_endpoint_id, p_ordering_key);
    end if;

    -- After the lock on the ordering key: the order of ids is the order of commits.
    v_id := nextval('ulak.queue_id_seq');
    if p_idempotency_key is not null then
        v_payload_hash := ulak_private.payload_hash(p_payload);
        v_first_id := ulak_private.take_idempotency_key(v_endpoint_id, p_endpoint, p_idempotency_key, v_payload_hash, v_id);
        -- Messages that are queued already need no room.
        if v_first_id <> v_id then
            return v_first_id;
        end if;
    end if;
    if ulak_private.has_room(v_id) is not true or v_is_limited then
        perform ulak_private.check_backpressure(v_id, 1);
        v_overflows := v_is_limited and ulak_private.pending_room(v_endpoint_id, v_id, 1) < 1;
    end if;

    insert into ulak_private.deliveries (
        id,
        event_id,
        endpoint_id,
        priority,
        next_retry_at,
        scheduled_at,
        idempotency_key,
        payload_hash,
        correlation_id,
        expires_at,
        ordering_key,
        generation
    )
    values (
        v_id,
        v_id,
        v_endpoint_id,
        p_priority,
        v_due,
        p_scheduled_at,
        p_idempotency_key,
        v_payload_hash,
        p_correlation_id,
        p_expires_at,
        p_ordering_key,
        ulak_private.generation()
    );
    insert into ulak_private.events (id, payload, headers, metadata)
    values (v_id, p_payload, ulak_private.traced(p_headers), p_metadata);
    if v_overflows then
        perform ulak_private.bury_overflow(array[v_id]);
    elsif v_due <= now() and ulak_private.wants_wake_up(v_id) then
        perform ulak_private.wake_workers();
    end if;
    return v_id;
end
$plpgsql$;

-- Stable and not immutable, as convert_to() is: else it wouldn't be inlined.
create or replace function ulak_private.payload_hash(p_payload jsonb)
returns text
language sql
stable
parallel safe
as $sql$
    select encode(sha256(convert_to(p_payload::text, 'UTF8')), 'hex')
$sql$;

-- The id of the message that has the key: p_id, if the key was free and is taken by this call, or that of an earlier message with the
-- same sender with the same payload. If another transaction has just taken the key, the call waits for its end.
create or replace function ulak_private.take_idempotency_key(
    p_endpoint_id bigint,
    p_endpoint text,
    p_idempotency_key text,
    p_payload_hash text,
    p_id bigint
)
returns bigint
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_first record;
begin
    loop
        insert into ulak_private.idempotency_keys (endpoint_id, idempotency_key, message_id, payload_hash, sent_by)
        values (p_endpoint_id, p_idempotency_key, p_id, p_payload_hash, ulak_private.caller())
        on conflict do nothing;
        if found then
            return p_id;
        end if;
        update ulak_private.idempotency_keys k
        set message_id = p_id, payload_hash = p_payload_hash, sent_by = ulak_private.caller(), free_at = null
        where k.endpoint_id = p_endpoint_id and k.idempotency_key = p_idempotency_key and k.free_at <= clock_timestamp();
        if found then
            return p_id;
        end if;
        select k.message_id, k.payload_hash, k.sent_by into v_first
        from ulak_private.idempotency_keys k
        where k.endpoint_id = p_endpoint_id and k.idempotency_key = p_idempotency_key;
        perform ulak_private.require_key_owner(v_first.sent_by, p_endpoint, p_idempotency_key);
        if v_first.payload_hash <> p_payload_hash then
            raise exception 'idempotency key "%" was used for another payload', p_idempotency_key
                using errcode = '23505',
                    detail = format('Message %s of endpoint "%s" has this key and a different payload.', v_first.message_id, p_endpoint),
                    hint = 'Use a new key for a new message, or send the first payload again to get its id.';
        end if;
        -- Not found: maintenance has just forgotten the key. Then it is free.
        if v_first.message_id is not null then
            return v_first.message_id;
        end if;
    end loop;
end
$plpgsql$;
