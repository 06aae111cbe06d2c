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

-- Each message for its own endpoint. Ids in the order of the messages.
create or replace function ulak._enqueue(p_messages ulak._message[])
returns bigint[]
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    return ulak._enqueue((
        p_messages,
        array(select generate_series(1, cardinality(p_messages))),
        array(select m.endpoint_id from unnest(p_messages) with ordinality m order by m.ordinality)
    )::ulak._mailing);
end
$plpgsql$;

-- Ids in the order of the recipients. What repeats an idempotency key, of this call or of an earlier one, has the id of the first.
create or replace function ulak._enqueue(p_mailing ulak._mailing)
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
        perform ulak._lock_ordering_keys(array_agg(m.endpoint_id), array_agg(m.ordering_key))
        from ulak._new_rows(null, p_mailing) m
        where m.ordering_key is not null;
    end if;
    if v_has_idempotency_keys then
        return ulak._enqueue_once(p_mailing);
    end if;
    return ulak._insert_messages(p_mailing, false);
end
$plpgsql$;

-- Rounds: whoever has the keys already is asked first, for what is queued needs no room. What another session queues between the
-- look and the insert is found in the next round.
create or replace function ulak._enqueue_once(p_mailing ulak._mailing)
returns bigint[]
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_endpoint_ids bigint[] := p_mailing.endpoint_ids;
    v_numbers bigint[] := array(select generate_series(1, cardinality(v_endpoint_ids)));
    v_ids bigint[] := array_fill(null::bigint, array[cardinality(v_endpoint_ids)]);
    v_keys text[];
    v_hashes text[];
    v_places bigint[];
    v_new bigint[];
begin
    select array_agg(m.idempotency_key order by m.id), array_agg(m.payload_hash order by m.id) into v_keys, v_hashes
    from ulak._new_rows(v_numbers, p_mailing) m;
    perform ulak._check_idempotency_keys(v_endpoint_ids, v_keys, v_hashes);
    loop
        v_ids := array(
            select coalesce(
                m.id,
                case
                    when m.idempotency_key is not null then ulak._first_of_idempotency_key(
                        m.endpoint_id,
                        (select e.name from ulak.endpoints e where e.id = m.endpoint_id),
                        m.idempotency_key,
                        m.payload_hash
                    )
                end
            )
            from unnest(v_ids, v_endpoint_ids, v_keys, v_hashes) with ordinality m(
                id, endpoint_id, idempotency_key, payload_hash, place
            )
            order by m.place
        );
        -- Of a key that comes several times, the first.
        v_places := array(
            select min(m.place)
            from unnest(v_ids, v_endpoint_ids, v_keys) with ordinality m(id, endpoint_id, idempotency_key, place)
            where m.id is null
            group by m.endpoint_id, m.idempotency_key, case when m.idempotency_key is null then m.place end
            order by 1
        );
        if v_places = '{}' then
            return v_ids;
        end if;
        v_new := ulak._insert_messages(
            (
                p_mailing.messages,
                array(select p_mailing.places[n.place] from unnest(v_places) with ordinality n(place, number) order by n.number),
                array(select v_endpoint_ids[n.place] from unnest(v_places) with ordinality n(place, number) order by n.number)
            )::ulak._mailing,
            true
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
create or replace function ulak._check_idempotency_keys(p_endpoint_ids bigint[], p_keys text[], p_payload_hashes text[])
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

-- One insert. Ids in the order of the recipients; null where another session holds the idempotency key.
create or replace function ulak._insert_messages(p_mailing ulak._mailing, p_has_idempotency_keys boolean)
returns bigint[]
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_count integer := cardinality(p_mailing.endpoint_ids);
    v_ids bigint[] := array(select nextval('ulak.queue_id_seq') from generate_series(1, v_count));
    v_sent bigint[] := v_ids;
    v_overflow bigint[] := '{}';
begin
    if ulak._has_room(v_ids[v_count]) is not true then
        perform ulak._require_room(v_ids[v_count], v_count);
    end if;
    if exists (select from ulak.endpoints e where e.id = any (p_mailing.endpoint_ids) and e.max_pending is not null) then
        v_overflow := ulak._overflow(v_ids, p_mailing.endpoint_ids);
    end if;
    if p_has_idempotency_keys then
        v_sent := ulak._insert_unless_known(v_ids, p_mailing);
    else
        insert into ulak.queue (
            id, endpoint_id, payload, priority, next_retry_at, scheduled_at, idempotency_key, payload_hash, correlation_id,
            expires_at, ordering_key, headers, metadata
        )
        select * from ulak._new_rows(v_ids, p_mailing);
    end if;
    if v_overflow <> '{}' then
        perform ulak._bury_overflow(v_overflow);
    end if;
    if ulak._wants_wake_up(v_ids[1]) then
        perform ulak._wake_workers();
    end if;
    return v_sent;
end
$plpgsql$;

-- The given ids; null in the place of those whose idempotency key another session holds. A row that may be in conflict is written
-- twice to the log, so what has no key doesn't come here.
create or replace function ulak._insert_unless_known(p_ids bigint[], p_mailing ulak._mailing)
returns bigint[]
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_sent integer;
begin
    insert into ulak.queue (
        id, endpoint_id, payload, priority, next_retry_at, scheduled_at, idempotency_key, payload_hash, correlation_id,
        expires_at, ordering_key, headers, metadata
    )
    select m.*
    from ulak._new_rows(p_ids, p_mailing) m
    -- Sessions that use the same keys wait for each other in the same order.
    order by m.endpoint_id, m.idempotency_key collate "C", m.id
    on conflict (endpoint_id, idempotency_key)
        where idempotency_key is not null and status in ('pending', 'processing', 'completed')
        do nothing;
    get diagnostics v_sent = row_count;
    if v_sent = cardinality(p_ids) then
        return p_ids;
    end if;
    return array(
        select q.id
        from unnest(p_ids) with ordinality n(id, place)
        left join ulak.queue q on q.id = n.id
        order by n.place
    );
end
$plpgsql$;

-- What a mailing puts into the queue; the i-th id is that of the i-th recipient. Without a search_path of its own, so that it
-- becomes part of the query that calls it, and a payload for thousands is never copied before it is stored.
create or replace function ulak._new_rows(p_ids bigint[], p_mailing ulak._mailing)
returns table (
    id bigint,
    endpoint_id bigint,
    payload jsonb,
    priority integer,
    next_retry_at timestamptz,
    scheduled_at timestamptz,
    idempotency_key text,
    payload_hash text,
    correlation_id uuid,
    expires_at timestamptz,
    ordering_key text,
    headers jsonb,
    metadata jsonb
)
language sql
stable
as $sql$
    select
        p_ids[r.number],
        p_mailing.endpoint_ids[r.number],
        m.payload,
        m.priority,
        m.next_retry_at,
        m.scheduled_at,
        m.idempotency_key,
        m.payload_hash,
        m.correlation_id,
        m.expires_at,
        m.ordering_key,
        m.headers,
        m.metadata
    from generate_series(1, cardinality(p_mailing.places)) r(number)
    join (
        select
            m.*,
            greatest(now(), m.scheduled_at) as next_retry_at,
            case when m.idempotency_key is not null then ulak._payload_hash(m.payload) end as payload_hash
        from unnest(p_mailing.messages) with ordinality m
        -- Once for each message, not for each of its recipients.
        offset 0
    ) m on m.ordinality = p_mailing.places[r.number]
$sql$;
