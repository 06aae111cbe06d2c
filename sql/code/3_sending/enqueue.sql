-- Queuing many messages that have been checked, by the same rules as send().

-- The message at p_places[i] goes to p_endpoint_ids[i]; without these two, each message goes to its own endpoint. Returns ids in the order of
-- the recipients. A message that repeats an idempotency key, of this or an earlier call, gets the id of the first.
-- Any element of an array is found at once here, because the array is a parameter of its own and the plans are generic: in a field of a
-- composite value, or as a constant of a custom plan, PostgreSQL walks over all elements before it. This applies to what is called from
-- here, too. Nor does planning each call take longer than inserting a few rows.
create or replace function ulak_private.enqueue(
    p_messages ulak_private.message[],
    p_places integer[] default null,
    p_endpoint_ids bigint[] default null
)
returns bigint[]
language plpgsql
set plan_cache_mode = force_generic_plan
as $plpgsql$
declare
    v_has_ordering_keys boolean;
    v_has_idempotency_keys boolean;
    v_payload_hashes text[];
    v_ids bigint[];
    v_first_ids bigint[];
    v_count integer;
    v_overflow bigint[];
begin
    if p_places is null then
        p_places := array(select generate_series(1, cardinality(p_messages)));
        p_endpoint_ids := array(select (unnest(p_messages)).endpoint_id);
    end if;
    if p_places = '{}' then
        return '{}';
    end if;
    select bool_or((m.message).ordering_key is not null), bool_or((m.message).idempotency_key is not null)
    into v_has_ordering_keys, v_has_idempotency_keys
    from (select unnest(p_messages)) m(message);
    if v_has_ordering_keys then
        -- Locked before ids are drawn, so that within a key the order of ids is the order of commits.
        perform ulak_private.lock_ordering_keys(array_agg(r.endpoint_id), array_agg((p_messages[r.place]).ordering_key))
        from unnest(p_places, p_endpoint_ids) r(place, endpoint_id);
    end if;
    v_ids := array(select nextval('ulak.queue_id_seq') from generate_series(1, cardinality(p_endpoint_ids)));
    v_first_ids := v_ids;
    if v_has_idempotency_keys then
        -- Once for each message, not for each recipient.
        v_payload_hashes := array(
            select case when m.idempotency_key is not null then ulak_private.payload_hash(m.payload) end
            from unnest(p_messages) with ordinality m
            order by m.ordinality
        );
        v_first_ids := ulak_private.take_idempotency_keys(p_messages, p_places, p_endpoint_ids, v_ids, v_payload_hashes);
        select array_agg(m.id order by m.id), array_agg(m.place order by m.id), array_agg(m.endpoint_id order by m.id)
        into v_ids, p_places, p_endpoint_ids
        from unnest(v_ids, v_first_ids, p_places, p_endpoint_ids) m(id, first_id, place, endpoint_id)
        where m.id = m.first_id;
    end if;
    v_count := cardinality(v_ids);
    if v_count > 0 then
        if not ulak_private.has_room(v_ids[v_count]) then
            perform ulak_private.check_backpressure(v_ids[v_count], v_count);
        end if;
        if exists (select from ulak.endpoints e where e.id = any (p_endpoint_ids) and e.max_pending is not null) then
            v_overflow := nullif(ulak_private.overflow(v_ids, p_endpoint_ids), '{}');
        end if;
        perform ulak_private.insert_messages(p_messages, p_places, p_endpoint_ids, v_ids, v_payload_hashes);
        if v_overflow is not null then
            perform ulak_private.bury_overflow(v_overflow);
        end if;
        if ulak_private.wants_wake_up(v_ids[1]) then
            perform ulak_private.wake_workers();
        end if;
    end if;
    return v_first_ids;
end
$plpgsql$;

-- For each recipient: its own id, if it has no key or its key was free, else the id of the message that has the key.
create or replace function ulak_private.take_idempotency_keys(
    p_messages ulak_private.message[],
    p_places integer[],
    p_endpoint_ids bigint[],
    p_ids bigint[],
    p_payload_hashes text[]
)
returns bigint[]
language plpgsql
as $plpgsql$
begin
    return array(
        select t.first_id
        from (
            select
                m.id,
                case
                    when m.key is null then m.id
                    else ulak_private.take_idempotency_key(m.endpoint_id, m.key, p_payload_hashes[m.place], m.id)
                end as first_id
            from (
                select r.*, (p_messages[r.place]).idempotency_key collate "C" as key
                from unnest(p_ids, p_places, p_endpoint_ids) r(id, place, endpoint_id)
                -- Sessions that use the same keys wait for each other in the same order.
                order by r.endpoint_id, key, r.id
                offset 0
            ) m
            offset 0
        ) t
        order by t.id
    );
end
$plpgsql$;

-- The i-th id belongs to the i-th recipient.
create or replace function ulak_private.insert_messages(
    p_messages ulak_private.message[],
    p_places integer[],
    p_endpoint_ids bigint[],
    p_ids bigint[],
    p_payload_hashes text[]
)
returns void
language plpgsql
as $plpgsql$
declare
    -- Null for a message without recipients.
    v_event_ids bigint[] := array_fill(null::bigint, array[cardinality(p_messages)]);
    -- Half of a message_id is random, the other half the id: a random number for each one took a fifth of the time of publish().
    v_random bytea := substr(uuid_send(gen_random_uuid()), 1, 8);
    v_generation bigint := ulak_private.generation();
    -- The column's default would be evaluated for each event.
    v_sent_by text := ulak_private.caller();
begin
    -- The event of each message has the id of its first delivery.
    for i in reverse cardinality(p_ids)..1 loop
        v_event_ids[p_places[i]] := p_ids[i];
    end loop;
    insert into ulak_private.deliveries (
        id, event_id, message_id, endpoint_id, priority, next_retry_at, scheduled_at, idempotency_key, payload_hash, correlation_id, expires_at,
        ordering_key, generation
    )
    select
        r.id,
        v_event_ids[r.place],
        -- The highest bit says which kind of UUID it is.
        encode(v_random || int8send(r.id | (1::bigint << 63)), 'hex')::uuid,
        r.endpoint_id,
        (r.message).priority,
        greatest(now(), (r.message).scheduled_at),
        (r.message).scheduled_at,
        (r.message).idempotency_key,
        p_payload_hashes[r.place],
        (r.message).correlation_id,
        (r.message).expires_at,
        (r.message).ordering_key,
        coalesce(((r.message).headers ->> ':generation')::bigint, v_generation)
    from (
        select r.*, p_messages[r.place] as message
        from (select unnest(p_ids), unnest(p_places), unnest(p_endpoint_ids)) r(id, place, endpoint_id)
        offset 0
    ) r;
    insert into ulak_private.events (id, payload, headers, metadata, sent_by, max_retries)
    select
        m.event_id,
        (m.message).payload,
        ulak_private.stored_headers((m.message).headers),
        (m.message).metadata,
        v_sent_by,
        ((m.message).headers ->> ':max_retries')::smallint
    from (select unnest(v_event_ids), unnest(p_messages)) m(event_id, message)
    where m.event_id is not null;
end
$plpgsql$;
