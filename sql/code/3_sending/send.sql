-- Sending: an application's transaction puts messages into the queue.

-- Nearly every message has no option that needs a check and fits below any limit: it takes two inserts and no other query. Everything else,
-- including errors, takes the long path.
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
            -- The same as generation(), which would be a query of its own.
            select v_id, v_id, e.id, p_priority, p_correlation_id, (
                select nullif(g.value::bigint, 0) from ulak.setting_values g where g.name = 'generation'
            )
            from ulak.endpoints e
            where e.name = p_endpoint and e.max_pending is null and (not e.is_restricted or ulak_private.may_send(e.id));
            if found then
                insert into ulak_private.events (id, payload, headers)
                values (v_id, p_payload, ulak_private.stored_headers(null));
                if ulak_private.wants_wake_up(v_id) then
                    perform ulak_private.wake_workers();
                end if;
                return v_id;
            end if;
        end if;
    end if;
    return ulak_private.send(
        p_endpoint,
        ulak_private.body(p_payload, p_raw),
        p_priority,
        p_scheduled_at,
        p_idempotency_key,
        p_correlation_id,
        p_expires_at,
        p_ordering_key,
        p_headers,
        p_metadata,
        p_raw is not null,
        p_content_type,
        p_path,
        p_timeout,
        p_generation,
        p_max_retries,
        p_if_waiting,
        p_latest
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
    perform ulak_private.check_priority(p_priority);
    perform ulak_private.check_payloads(p_payloads);
    return ulak_private.enqueue(array(
        select (v_endpoint_id, p.payload, p_priority, null, null, null, null, null, null, null)::ulak_private.message
        from (select unnest(p_payloads)) p(payload)
    ));
end
$plpgsql$;

comment on function ulak.send_batch_with_priority(text, jsonb[], integer) is
    'send_batch() with a priority from 0 to 10 for all of them';

-- One message with any option, and every check.
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
    p_metadata jsonb,
    p_is_raw boolean,
    p_content_type text,
    p_path text,
    p_timeout double precision,
    p_generation bigint,
    p_max_retries integer,
    p_if_waiting text,
    p_latest interval
)
returns bigint
language plpgsql
as $plpgsql$
declare
    v_endpoint record;
    v_is_valid boolean;
    v_id bigint;
    v_first_id bigint;
    v_payload_hash text;
    v_overflows boolean;
begin
    -- The generation is the same as generation(), which would be a query of its own.
    select
        e.id,
        e.max_pending is not null as is_limited,
        e.is_restricted and not ulak_private.may_send(e.id) as is_refused,
        (select nullif(g.value::bigint, 0) from ulak.setting_values g where g.name = 'generation') as generation
    into v_endpoint
    from ulak.endpoints e
    where e.name = p_endpoint;
    if not found then
        perform ulak_private.raise_unknown_endpoint(p_endpoint);
    elsif v_endpoint.is_refused then
        perform ulak_private.raise_not_granted(p_endpoint, 'send');
    end if;
    v_is_valid := ulak_private.check_message(
        p_payload, p_priority, p_scheduled_at, p_idempotency_key, p_expires_at, p_ordering_key, p_headers, p_metadata
    ) and (p_headers is null or ulak_private.check_credentials(v_endpoint.id, p_headers));
    if p_is_raw or num_nonnulls(p_content_type, p_path, p_timeout, p_generation, p_max_retries) > 0 then
        p_headers := ulak_private.with_options(
            ulak_private.request_headers(v_endpoint.id, p_headers, p_is_raw, p_content_type, p_path, p_timeout), p_generation, p_max_retries
        );
    end if;
    if p_if_waiting <> 'keep' or p_latest is not null then
        perform ulak_private.check_replacement(p_idempotency_key, p_if_waiting, p_latest);
        p_scheduled_at := least(p_scheduled_at, now() + p_latest);
    end if;
    if p_ordering_key is not null then
        perform ulak_private.lock_ordering_key(v_endpoint.id, p_ordering_key);
    end if;
    -- Drawn after the lock on the ordering key, so that within a key the order of ids is the order of commits.
    v_id := nextval('ulak.queue_id_seq');
    if p_idempotency_key is not null then
        v_payload_hash := ulak_private.payload_hash(p_payload);
        if p_if_waiting <> 'keep' then
            v_first_id := ulak_private.take_place(
                (
                    v_endpoint.id, p_payload, p_priority, p_scheduled_at, p_idempotency_key, p_correlation_id, p_expires_at, p_ordering_key,
                    p_headers, p_metadata
                )::ulak_private.message, v_payload_hash, v_id, p_if_waiting, p_latest
            );
        else
            v_first_id := ulak_private.take_idempotency_key(v_endpoint.id, p_idempotency_key, v_payload_hash, v_id);
        end if;
        -- Messages that are queued already need no room.
        if v_first_id <> v_id then
            return v_first_id;
        end if;
    end if;
    if not ulak_private.has_room(v_id) or v_endpoint.is_limited then
        perform ulak_private.check_backpressure(v_id, 1);
        v_overflows := v_endpoint.is_limited and ulak_private.pending_room(v_endpoint.id, v_id, 1) < 1;
    end if;
    insert into ulak_private.deliveries (
        id, event_id, endpoint_id, priority, next_retry_at, scheduled_at, idempotency_key, payload_hash, correlation_id, expires_at,
        ordering_key, generation
    )
    values (
        v_id, v_id, v_endpoint.id, p_priority, greatest(now(), p_scheduled_at), p_scheduled_at, p_idempotency_key, v_payload_hash,
        p_correlation_id, p_expires_at, p_ordering_key, coalesce(p_generation, v_endpoint.generation)
    );
    insert into ulak_private.events (id, payload, headers, metadata, max_retries)
    values (v_id, p_payload, ulak_private.stored_headers(p_headers), p_metadata, p_max_retries);
    if v_overflows then
        perform ulak_private.bury_overflow(array[v_id]);
    elsif greatest(now(), p_scheduled_at) <= now() and ulak_private.wants_wake_up(v_id) then
        perform ulak_private.wake_workers();
    end if;
    return v_id;
end
$plpgsql$;

-- Stable, because convert_to() is: as immutable it wouldn't be inlined.
create or replace function ulak_private.payload_hash(p_payload jsonb)
returns text
language sql
stable
parallel safe
as $sql$
    select encode(sha256(convert_to(p_payload::text, 'UTF8')), 'hex')
$sql$;

-- The id of the message that has the key: p_id if the key was free and this call took it, else that of the message that took it earlier,
-- which must have the same sender and payload. If another transaction has just taken the key, the call waits until that ends.
create or replace function ulak_private.take_idempotency_key(
    p_endpoint_id bigint,
    p_idempotency_key text,
    p_payload_hash text,
    p_id bigint,
    p_any_payload boolean default false
)
returns bigint
language plpgsql
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
        select k.message_id, k.payload_hash, k.sent_by, (select e.name from ulak.endpoints e where e.id = p_endpoint_id) as endpoint
        into v_first
        from ulak_private.idempotency_keys k
        where k.endpoint_id = p_endpoint_id and k.idempotency_key = p_idempotency_key;
        -- Maintenance has just forgotten the key: it is free.
        continue when not found;
        perform ulak_private.require_key_owner(v_first.sent_by, v_first.endpoint, p_idempotency_key);
        if v_first.payload_hash <> p_payload_hash and not p_any_payload then
            raise exception 'idempotency key "%" was used for another payload', p_idempotency_key
                using errcode = '23505',
                    detail = format('Message %s of endpoint "%s" has this key and a different payload.', v_first.message_id, v_first.endpoint),
                    hint = 'Use a new key for a new message, or send the first payload again to get its id.';
        end if;
        return v_first.message_id;
    end loop;
end
$plpgsql$;
