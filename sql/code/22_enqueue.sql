-- Many messages at once, each with its own options, by the same rules as single sends. The caller has checked them.

-- One message whose request has particulars.
create or replace function ulak._send_request(
    p_message ulak._message,
    p_is_raw boolean,
    p_content_type text,
    p_path text,
    p_timeout double precision
)
returns bigint
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    perform ulak._check_messages(array[p_message]);
    p_message.headers := ulak._request_headers(
        p_message.endpoint_id, p_message.headers, p_is_raw, p_content_type, p_path, p_timeout
    );
    return (ulak._enqueue(array[p_message]))[1];
end
$plpgsql$;

-- Ids in the order of the messages. What repeats an idempotency key, of this call or of an earlier one, has the id of the first.
create or replace function ulak._enqueue(p_messages ulak._message[])
returns bigint[]
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_endpoint_ids bigint[];
    v_keys text[];
    v_has_idempotency_keys boolean;
begin
    if cardinality(p_messages) = 0 then
        return '{}';
    end if;
    select
        array_agg(m.endpoint_id) filter (where m.ordering_key is not null),
        array_agg(m.ordering_key) filter (where m.ordering_key is not null),
        bool_or(m.idempotency_key is not null)
    into v_endpoint_ids, v_keys, v_has_idempotency_keys
    from unnest(p_messages) m;
    if v_keys is not null then
        -- Before ids are drawn: the order of ids is the order of commits.
        perform ulak._lock_ordering_keys(v_endpoint_ids, v_keys);
    end if;
    if v_has_idempotency_keys then
        return ulak._enqueue_once(p_messages);
    end if;
    return ulak._insert_messages(p_messages);
end
$plpgsql$;

-- Rounds: whoever has the keys already is asked first, for what is queued needs no room. What another session queues between the
-- look and the insert is found in the next round.
create or replace function ulak._enqueue_once(p_messages ulak._message[])
returns bigint[]
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_ids bigint[] := array_fill(null::bigint, array[cardinality(p_messages)]);
    v_places bigint[];
    v_new bigint[];
begin
    perform ulak._check_idempotency_keys(p_messages);
    loop
        v_ids := array(
            select coalesce(
                m.id,
                case
                    when m.idempotency_key is not null then ulak._first_of_idempotency_key(
                        m.endpoint_id,
                        (select e.name from ulak.endpoints e where e.id = m.endpoint_id),
                        m.idempotency_key,
                        ulak._payload_hash(m.payload)
                    )
                end
            )
            from unnest(v_ids, p_messages) with ordinality m(
                id, endpoint_id, payload, priority, scheduled_at, idempotency_key, correlation_id, expires_at, ordering_key,
                headers, metadata, place
            )
            order by m.place
        );
        -- Of a key that comes several times, the first.
        v_places := array(
            select min(m.place)
            from unnest(v_ids, p_messages) with ordinality m(
                id, endpoint_id, payload, priority, scheduled_at, idempotency_key, correlation_id, expires_at, ordering_key,
                headers, metadata, place
            )
            where m.id is null
            group by m.endpoint_id, m.idempotency_key, case when m.idempotency_key is null then m.place end
            order by 1
        );
        if v_places = '{}' then
            return v_ids;
        end if;
        v_new := ulak._insert_messages(
            array(
                select m
                from unnest(p_messages) with ordinality u(
                    endpoint_id, payload, priority, scheduled_at, idempotency_key, correlation_id, expires_at, ordering_key,
                    headers, metadata, place
                )
                cross join lateral (
                    select (
                        u.endpoint_id, u.payload, u.priority, u.scheduled_at, u.idempotency_key, u.correlation_id, u.expires_at,
                        u.ordering_key, u.headers, u.metadata
                    )::ulak._message
                ) r(m)
                where u.place = any (v_places)
                order by u.place
            )
        );
        v_ids := array(
            select coalesce(n.id, o.id)
            from unnest(v_ids) with ordinality o(id, place)
            left join unnest(v_places, v_new) n(place, id) on n.place = o.place
            order by o.place
        );
    end loop;
end
$plpgsql$;

-- Within a call, too, a key stands for one payload.
create or replace function ulak._check_idempotency_keys(p_messages ulak._message[])
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_key text;
    v_endpoint_id bigint;
begin
    select m.idempotency_key, m.endpoint_id into v_key, v_endpoint_id
    from unnest(p_messages) m
    where m.idempotency_key is not null
    group by m.endpoint_id, m.idempotency_key
    having count(*) > 1 and count(distinct ulak._payload_hash(m.payload)) > 1
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

-- One insert. Ids in the order of the messages; null where another session holds the idempotency key.
create or replace function ulak._insert_messages(p_messages ulak._message[])
returns bigint[]
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_count integer := cardinality(p_messages);
    v_ids bigint[] := array(select nextval('ulak.queue_id_seq') from generate_series(1, v_count));
    v_endpoint_ids bigint[];
    v_overflow bigint[] := '{}';
    v_sent integer;
begin
    if ulak._has_room(v_ids[v_count]) is not true then
        perform ulak._require_room(v_ids[v_count], v_count);
    end if;
    v_endpoint_ids := array(select m.endpoint_id from unnest(p_messages) with ordinality m order by m.ordinality);
    if exists (select from ulak.endpoints e where e.id = any (v_endpoint_ids) and e.max_pending is not null) then
        v_overflow := ulak._overflow(v_ids, v_endpoint_ids);
    end if;
    insert into ulak.queue (
        id,
        endpoint_id,
        payload,
        priority,
        next_retry_at,
        scheduled_at,
        idempotency_key,
        payload_hash,
        correlation_id,
        expires_at,
        ordering_key,
        headers,
        metadata
    )
    select
        m.id,
        m.endpoint_id,
        m.payload,
        m.priority,
        greatest(now(), m.scheduled_at),
        m.scheduled_at,
        m.idempotency_key,
        case when m.idempotency_key is not null then ulak._payload_hash(m.payload) end,
        m.correlation_id,
        m.expires_at,
        m.ordering_key,
        m.headers,
        m.metadata
    from unnest(v_ids, p_messages) m(
        id, endpoint_id, payload, priority, scheduled_at, idempotency_key, correlation_id, expires_at, ordering_key, headers,
        metadata
    )
    -- Sessions that use the same keys wait for each other in the same order.
    order by m.endpoint_id, m.idempotency_key collate "C", m.id
    on conflict (endpoint_id, idempotency_key)
        where idempotency_key is not null and status in ('pending', 'processing', 'completed')
        do nothing;
    get diagnostics v_sent = row_count;
    if v_overflow <> '{}' then
        perform ulak._bury_overflow(v_overflow);
    end if;
    if ulak._is_awaited(v_ids[1]) then
        perform ulak._ring();
    end if;
    if v_sent < v_count then
        v_ids := array(
            select q.id
            from unnest(v_ids) with ordinality n(id, place)
            left join ulak.queue q on q.id = n.id
            order by n.place
        );
    end if;
    return v_ids;
end
$plpgsql$;
