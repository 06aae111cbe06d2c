-- Queuing many messages that have been checked, by the same rules as send().

-- Each message goes to its own endpoint. Returns ids in the order of the messages.
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

-- Returns ids in the order of the recipients. A message that repeats an idempotency key, of this or an earlier call, gets the id of the first.
create or replace function ulak_private.enqueue(p_mailing ulak_private.mailing)
returns bigint[]
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_has_ordering_keys boolean;
    v_has_idempotency_keys boolean;
    v_ids bigint[];
    v_first_ids bigint[];
    v_count integer;
    v_overflow bigint[];
begin
    if cardinality(p_mailing.endpoint_ids) = 0 then
        return '{}';
    end if;
    select bool_or(m.ordering_key is not null), bool_or(m.idempotency_key is not null)
    into v_has_ordering_keys, v_has_idempotency_keys
    from unnest(p_mailing.messages) m;
    if v_has_ordering_keys then
        -- Locked before ids are drawn, so that within a key the order of ids is the order of commits.
        perform ulak_private.lock_ordering_keys(array_agg(m.endpoint_id), array_agg(m.ordering_key))
        from ulak_private.new_rows(null, null, p_mailing) m;
    end if;
    v_ids := array(select nextval('ulak.queue_id_seq') from generate_series(1, cardinality(p_mailing.endpoint_ids)));
    v_first_ids := v_ids;
    if v_has_idempotency_keys then
        v_first_ids := ulak_private.take_idempotency_keys(p_mailing, v_ids);
        select array_agg(m.id order by m.id), array_agg(m.place order by m.id), array_agg(m.endpoint_id order by m.id)
        into v_ids, p_mailing.places, p_mailing.endpoint_ids
        from unnest(v_ids, v_first_ids, p_mailing.places, p_mailing.endpoint_ids) m(id, first_id, place, endpoint_id)
        where m.id = m.first_id;
    end if;
    v_count := cardinality(v_ids);
    if v_count > 0 then
        if not ulak_private.has_room(v_ids[v_count]) then
            perform ulak_private.check_backpressure(v_ids[v_count], v_count);
        end if;
        if exists (select from ulak.endpoints e where e.id = any (p_mailing.endpoint_ids) and e.max_pending is not null) then
            v_overflow := nullif(ulak_private.overflow(v_ids, p_mailing.endpoint_ids), '{}');
        end if;
        perform ulak_private.insert_messages(p_mailing, v_ids);
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
create or replace function ulak_private.take_idempotency_keys(p_mailing ulak_private.mailing, p_ids bigint[])
returns bigint[]
language sql
set search_path = pg_catalog, pg_temp
as $sql$
    select array_agg(t.first_id order by t.id)
    from (
        select
            m.id,
            case
                when m.idempotency_key is null then m.id
                else ulak_private.take_idempotency_key(m.endpoint_id, m.idempotency_key, m.payload_hash, m.id)
            end as first_id
        from (
            select m.*
            from ulak_private.new_rows(p_ids, null, p_mailing) m
            -- Sessions that use the same keys wait for each other in the same order.
            order by m.endpoint_id, m.idempotency_key collate "C", m.id
            offset 0
        ) m
        offset 0
    ) t
$sql$;

-- The i-th id belongs to the i-th recipient. One plan for any number of them: planning each call takes longer than inserting a few.
create or replace function ulak_private.insert_messages(p_mailing ulak_private.mailing, p_ids bigint[])
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_nestloop = off
set plan_cache_mode = force_generic_plan
as $plpgsql$
declare
    -- The event of each message has the id of its first delivery. Null for a message without recipients.
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
    v_generation bigint := ulak_private.generation();
begin
    insert into ulak_private.deliveries (
        id, event_id, message_id, endpoint_id, priority, next_retry_at, scheduled_at, idempotency_key, payload_hash, correlation_id, expires_at,
        ordering_key, generation
    )
    select *
    from ulak_private.new_rows(p_ids, v_event_ids, p_mailing, v_random, v_generation) m
    -- A join may return them in descending order, which splits each index page in its middle and leaves it half empty.
    order by m.id;
    insert into ulak_private.events (id, payload, headers, metadata, max_retries)
    select
        v_event_ids[m.ordinality],
        m.payload,
        ulak_private.stored_headers(m.headers),
        m.metadata,
        (m.headers ->> ':max_retries')::smallint
    from unnest(p_mailing.messages) with ordinality m
    where v_event_ids[m.ordinality] is not null;
end
$plpgsql$;

-- The deliveries of a mailing; the i-th id belongs to the i-th recipient. Without a search_path of its own, so that it is inlined into the
-- calling query.
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
        r.id,
        p_event_ids[r.place],
        -- Half of it is p_random, the other half the id: a random number for each one took a fifth of the time of publish().
        (p_random || '8' || lpad(to_hex(r.id), 15, '0'))::uuid,
        r.endpoint_id,
        m.priority,
        m.next_retry_at,
        m.scheduled_at,
        m.idempotency_key,
        m.payload_hash,
        m.correlation_id,
        m.expires_at,
        m.ordering_key,
        coalesce(m.generation, p_generation)
    from unnest(p_ids, p_mailing.places, p_mailing.endpoint_ids) r(id, place, endpoint_id)
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
        -- Computed once per message, not once per recipient.
        offset 0
    ) m on m.ordinality = r.place
$sql$;
