-- Queuing messages, each with its own options, by the same rules as send().

-- One message with options for its request or its retries. All other functions here are given messages that have been checked.
create or replace function ulak_private.send_request(
    p_message ulak_private.message,
    p_is_raw boolean,
    p_content_type text,
    p_path text,
    p_timeout double precision,
    p_generation bigint default null,
    p_max_retries integer default null,
    p_endpoint text default null,
    p_if_waiting text default null,
    p_latest interval default null
)
returns bigint
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    perform ulak_private.check_messages(array[p_message]);
    p_message.headers := ulak_private.with_options(
        ulak_private.request_headers(p_message.endpoint_id, p_message.headers, p_is_raw, p_content_type, p_path, p_timeout),
        p_generation,
        p_max_retries
    );
    if nullif(p_if_waiting, 'keep') is not null or p_latest is not null then
        return ulak_private.send_in_place(p_message, p_endpoint, p_if_waiting, p_latest);
    end if;
    return (ulak_private.enqueue(array[p_message]))[1];
end
$plpgsql$;

-- Each message for its own endpoint. Ids in the order of the messages.
create or replace function ulak_private.enqueue(p_messages ulak_private.message[])
returns bigint[]
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    return ulak_private.enqueue((
        p_messages,
        array(select generate_series(1, cardinality(p_messages))),
        array(select m.endpoint_id from unnest(p_messages) with ordinality m order by m.ordinality)
    )::ulak_private.mailing);
end
$plpgsql$;

-- Ids in the order of the recipients. What repeats an idempotency key, of this call or of an earlier one, has the id of the first.
create or replace function ulak_private.enqueue(p_mailing ulak_private.mailing)
returns bigint[]
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_has_ordering_keys boolean;
    v_has_idempotency_keys boolean;
begin
    if cardinality(p_mailing.endpoint_ids) = 0 then
        return '{}';
    end if;
    select bool_or(m.ordering_key is not null), bool_or(m.idempotency_key is not null)
    into v_has_ordering_keys, v_has_idempotency_keys
    from unnest(p_mailing.messages) m;
    if v_has_ordering_keys then
        -- Before ids are drawn: the order of ids is the order of commits.
        perform ulak_private.lock_ordering_keys(array_agg(m.endpoint_id), array_agg(m.ordering_key))
        from ulak_private.new_rows(null, null, p_mailing) m
        where m.ordering_key is not null;
    end if;
    if v_has_idempotency_keys then
        return ulak_private.enqueue_once(p_mailing);
    end if;
    return ulak_private.insert_messages(
        p_mailing, array(select nextval('ulak.queue_id_seq') from generate_series(1, cardinality(p_mailing.endpoint_ids)))
    );
end
$plpgsql$;

-- Those whose key is free are queued; the others have the id of the message that has it.
create or replace function ulak_private.enqueue_once(p_mailing ulak_private.mailing)
returns bigint[]
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_endpoint_ids bigint[] := p_mailing.endpoint_ids;
    v_ids bigint[] := array(select nextval('ulak.queue_id_seq') from generate_series(1, cardinality(v_endpoint_ids)));
    v_first_ids bigint[];
    v_keys text[];
    v_hashes text[];
    v_new integer[];
begin
    select array_agg(m.idempotency_key order by m.id), array_agg(m.payload_hash order by m.id) into v_keys, v_hashes
    from ulak_private.new_rows(v_ids, null, p_mailing) m;
    perform ulak_private.check_idempotency_keys(v_endpoint_ids, v_keys, v_hashes);
    v_first_ids := array(
        select t.first_id
        from (
            select
                m.place,
                case
                    when m.idempotency_key is null then m.id
                    else ulak_private.take_idempotency_key(
                        m.endpoint_id,
                        (select e.name from ulak.endpoints e where e.id = m.endpoint_id),
                        m.idempotency_key,
                        m.payload_hash,
                        m.id
                    )
                end as first_id
            from (
                select m.*
                from unnest(v_ids, v_endpoint_ids, v_keys, v_hashes) with ordinality m(
                    id, endpoint_id, idempotency_key, payload_hash, place
                )
                -- Sessions that use the same keys wait for each other in the same order.
                order by m.endpoint_id, m.idempotency_key collate "C", m.id
                offset 0
            ) m
            offset 0
        ) t
        order by t.place
    );
    v_new := array(
        select m.place
        from unnest(v_ids, v_first_ids) with ordinality m(id, first_id, place)
        where m.id = m.first_id
        order by m.place
    );
    if v_new <> '{}' then
        perform ulak_private.insert_messages(
            (
                p_mailing.messages,
                array(select p_mailing.places[n.place] from unnest(v_new) with ordinality n(place, number) order by n.number),
                array(select v_endpoint_ids[n.place] from unnest(v_new) with ordinality n(place, number) order by n.number)
            )::ulak_private.mailing,
            array(select v_ids[n.place] from unnest(v_new) with ordinality n(place, number) order by n.number)
        );
    end if;
    return v_first_ids;
end
$plpgsql$;

-- Within a call, too, a key stands for one payload.
create or replace function ulak_private.check_idempotency_keys(p_endpoint_ids bigint[], p_keys text[], p_payload_hashes text[])
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_key text;
    v_endpoint_id bigint;
begin
    select m.idempotency_key, m.endpoint_id into v_key, v_endpoint_id
    from unnest(p_endpoint_ids, p_keys, p_payload_hashes) m(endpoint_id, idempotency_key, payload_hash)
    where m.idempotency_key is not null
    group by m.endpoint_id, m.idempotency_key
    having min(m.payload_hash) <> max(m.payload_hash)
    limit 1;
    if found then
        raise exception 'idempotency key "%" was used for another payload', v_key
            using errcode = '23505',
                detail = format(
                    'Two messages of this call, for endpoint "%s", have this key and different payloads.',
                    (select e.name from ulak.endpoints e where e.id = v_endpoint_id)
                ),
                hint = 'Use a new key for a new message.';
    end if;
end
$plpgsql$;

-- The i-th id is that of the i-th recipient. Returns the ids.
create or replace function ulak_private.insert_messages(p_mailing ulak_private.mailing, p_ids bigint[])
returns bigint[]
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_count integer := cardinality(p_ids);
    -- The event of each message: it has the id of its first delivery. Null for a message without recipients.
    v_event_ids bigint[] := array(
        select f.id
        from generate_series(1, cardinality(p_mailing.messages)) m(place)
        left join (
            select r.place, min(r.id) as id
            from unnest(p_mailing.places, p_ids) r(place, id)
            group by r.place
        ) f on f.place = m.place
        order by m.place
    );
    v_random text := left(replace(gen_random_uuid()::text, '-', ''), 16);
    v_overflow bigint[] := '{}';
    v_generation bigint := ulak_private.generation();
begin
    if ulak_private.has_room(p_ids[v_count]) is not true then
        perform ulak_private.check_backpressure(p_ids[v_count], v_count);
    end if;
    if exists (select from ulak.endpoints e where e.id = any (p_mailing.endpoint_ids) and e.max_pending is not null) then
        v_overflow := ulak_private.overflow(p_ids, p_mailing.endpoint_ids);
    end if;
    insert into ulak_private.deliveries (
        id, event_id, message_id, endpoint_id, priority, next_retry_at, scheduled_at, idempotency_key, payload_hash, correlation_id, expires_at,
        ordering_key, generation
    )
    select * from ulak_private.new_rows(p_ids, v_event_ids, p_mailing, v_random, v_generation);
    insert into ulak_private.events (id, payload, headers, metadata, max_retries)
    select
        v_event_ids[m.ordinality],
        m.payload,
        ulak_private.traced(nullif(m.headers - array[':generation', ':max_retries'], '{}')),
        m.metadata,
        (m.headers ->> ':max_retries')::smallint
    from unnest(p_mailing.messages) with ordinality m
    where v_event_ids[m.ordinality] is not null;
    if v_overflow <> '{}' then
        perform ulak_private.bury_overflow(v_overflow);
    end if;
    if ulak_private.wants_wake_up(p_ids[1]) then
        perform ulak_private.wake_workers();
    end if;
    return p_ids;
end
$plpgsql$;

-- The deliveries of a mailing; the i-th id is that of the i-th recipient. Without a search_path of its own, so that it becomes part of
-- the query that calls it.
create or replace function ulak_private.new_rows(
    p_ids bigint[],
    p_event_ids bigint[],
    p_mailing ulak_private.mailing,
    p_random text default null,
    -- For messages without a generation of their own.
    p_generation bigint default null
)
returns table (
    id bigint,
    event_id bigint,
    message_id uuid,
    endpoint_id bigint,
    priority integer,
    next_retry_at timestamptz,
    scheduled_at timestamptz,
    idempotency_key text,
    payload_hash text,
    correlation_id uuid,
    expires_at timestamptz,
    ordering_key text,
    generation bigint
)
language sql
stable
as $sql$
    select
        p_ids[r.number],
        p_event_ids[p_mailing.places[r.number]],
        -- Half of it is p_random, the other half the id: a random number for each took a fifth of the time of a publish().
        (p_random || '8' || lpad(to_hex(p_ids[r.number]), 15, '0'))::uuid,
        p_mailing.endpoint_ids[r.number],
        m.priority,
        m.next_retry_at,
        m.scheduled_at,
        m.idempotency_key,
        m.payload_hash,
        m.correlation_id,
        m.expires_at,
        m.ordering_key,
        coalesce(m.generation, p_generation)
    from generate_series(1, cardinality(p_mailing.places)) r(number)
    join (
        select
            m.ordinality,
            m.priority,
            greatest(now(), m.scheduled_at) as next_retry_at,
            m.scheduled_at,
            m.idempotency_key,
            case when m.idempotency_key is not null then ulak_private.payload_hash(m.payload) end as payload_hash,
            m.correlation_id,
            m.expires_at,
            m.ordering_key,
            (m.headers ->> ':generation')::bigint as generation
        from unnest(p_mailing.messages) with ordinality m
        -- Once for each message, not for each of its recipients.
        offset 0
    ) m on m.ordinality = p_mailing.places[r.number]
$sql$;
