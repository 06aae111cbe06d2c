-- Sending many messages by one call: to one endpoint, each with its own options, or one message to many endpoints.

create or replace function ulak.send_messages(p_endpoint text, p_messages jsonb)
returns bigint[]
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_endpoint_id bigint := ulak_private.sendable_endpoint(p_endpoint);
    v_messages ulak_private.message[];
begin
    if p_messages is null then
        raise exception 'the messages are null'
            using errcode = '22004', hint = 'Pass a JSON array; an empty one sends nothing.';
    end if;
    if not ulak_private.are_messages(p_messages) then
        perform ulak_private.require_valid('messages', ulak_private.messages_schema(), p_messages);
        perform ulak_private.require_bodies(p_messages);
    end if;
    v_messages := array(
        select (
            v_endpoint_id,
            case when m.raw is null then coalesce(m.payload, 'null') else to_jsonb(m.raw) end,
            coalesce(m.priority, 0),
            m.scheduled_at,
            m.idempotency_key,
            m.correlation_id,
            m.expires_at,
            m.ordering_key,
            m.headers,
            m.metadata
        )::ulak_private.message
        from rows from (
            jsonb_to_recordset(p_messages) as (
                payload jsonb,
                priority numeric,
                scheduled_at timestamptz,
                idempotency_key text,
                correlation_id uuid,
                expires_at timestamptz,
                ordering_key text,
                headers jsonb,
                metadata jsonb,
                raw text
            )
        ) with ordinality m
        order by m.ordinality
    );
    perform ulak_private.check_messages(v_messages);
    if exists (
        select from jsonb_array_elements(p_messages) m where m ?| array['raw', 'content_type', 'path', 'timeout', 'generation', 'max_retries']
    ) then
        v_messages := ulak_private.with_requests(v_messages, p_messages);
    end if;
    return ulak_private.enqueue(v_messages);
end
$plpgsql$;

comment on function ulak.send_messages(text, jsonb) is
    'queues an array of {"payload": ..., and options of send()} for one endpoint, all or none; returns ids in the order of the array';

-- The same messages; element i of p_requests says what is particular to the i-th.
create or replace function ulak_private.with_requests(p_messages ulak_private.message[], p_requests jsonb)
returns ulak_private.message[]
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select array(
        select (
            m.endpoint_id,
            m.payload,
            m.priority,
            m.scheduled_at,
            m.idempotency_key,
            m.correlation_id,
            m.expires_at,
            m.ordering_key,
            ulak_private.with_options(
                ulak_private.request_headers(m.endpoint_id, m.headers, m.raw is not null, m.content_type, m.path, m.timeout),
                m.generation::bigint,
                m.max_retries::integer
            ),
            m.metadata
        )::ulak_private.message
        from rows from (
            unnest(p_messages),
            jsonb_to_recordset(p_requests) as (
                raw text, content_type text, path text, timeout double precision, generation numeric, max_retries numeric
            )
        ) with ordinality m
        order by m.ordinality
    )
$sql$;

create or replace function ulak.send_many(
    p_endpoints text[],
    p_payload jsonb,
    p_priority integer default 0,
    p_scheduled_at timestamptz default null,
    p_idempotency_key text default null,
    p_correlation_id uuid default null,
    p_expires_at timestamptz default null,
    p_ordering_key text default null,
    p_headers jsonb default null,
    p_metadata jsonb default null,
    p_generation bigint default null,
    p_max_retries integer default null
)
returns bigint[]
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_message ulak_private.message := (
        null,
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
    v_endpoint_ids bigint[];
begin
    if p_endpoints is null then
        raise exception 'the endpoints are null'
            using errcode = '22004', hint = 'Pass an array of names; an empty one sends nothing.';
    end if;
    if p_endpoints = '{}' then
        return '{}';
    end if;
    v_endpoint_ids := array(
        select case when e.is_restricted is false then e.id else ulak_private.sendable_endpoint(n.name) end
        from unnest(p_endpoints) with ordinality n(name, place)
        left join ulak.endpoints e on e.name = n.name
        order by n.place
    );
    perform ulak_private.check_messages(array[v_message]);
    if p_headers is not null then
        perform ulak_private.check_credentials(n.id, p_headers) from unnest(v_endpoint_ids) n(id);
    end if;
    v_message.headers := ulak_private.with_options(p_headers, p_generation, p_max_retries);
    return ulak_private.enqueue(
        (array[v_message], array_fill(1, array[cardinality(v_endpoint_ids)]), v_endpoint_ids)::ulak_private.mailing
    );
end
$plpgsql$;

comment on function ulak.send_many(
    text[], jsonb, integer, timestamptz, text, uuid, timestamptz, text, jsonb, jsonb, bigint, integer
) is
    'queues one message for each of these endpoints, with the options of send(); returns ids in the order of the endpoints';

-- Options of a message in an array of messages or of events, by JSON's types. Each caller adds its own keys.
create or replace function ulak_private.message_options_schema()
returns jsonb
language sql
immutable
as $sql$
    select $json${
        "payload": true,
        "priority": {"type": ["integer", "null"], "minimum": 0, "maximum": 10},
        "scheduled_at": {"type": ["string", "null"]},
        "idempotency_key": {"type": ["string", "null"]},
        "correlation_id": {"type": ["string", "null"]},
        "expires_at": {"type": ["string", "null"]},
        "ordering_key": {"type": ["string", "null"]},
        "headers": {"type": ["object", "null"]},
        "metadata": {"type": ["object", "null"]},
        "generation": {"type": ["integer", "null"], "minimum": 1, "maximum": 9223372036854775807},
        "max_retries": {"type": ["integer", "null"], "minimum": 0, "maximum": 1000}
    }$json$::pg_catalog.jsonb
$sql$;

create or replace function ulak_private.request_options_schema()
returns jsonb
language sql
immutable
as $sql$
    select $json${
        "raw": {"type": ["string", "null"]},
        "content_type": {"type": ["string", "null"]},
        "path": {"type": ["string", "null"]},
        "timeout": {"type": ["number", "null"]}
    }$json$::pg_catalog.jsonb
$sql$;

create or replace function ulak_private.messages_schema()
returns jsonb
language sql
immutable
set search_path = pg_catalog, pg_temp
as $sql$
    select jsonb_build_object(
        'type', 'array',
        'items', jsonb_build_object(
            'type', 'object',
            'additionalProperties', false,
            'properties', ulak_private.message_options_schema() || ulak_private.request_options_schema()
        )
    )
$sql$;

-- The same as messages_schema(), in one pass; the schema says where the mistake is.
create or replace function ulak_private.are_messages(p_messages jsonb)
returns boolean
language plpgsql
immutable
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    if jsonb_typeof(p_messages) <> 'array' then
        return false;
    end if;
    return not exists (
        select
        from jsonb_array_elements(p_messages) m
        where not coalesce(
            case jsonb_typeof(m)
                when 'object' then m ? 'payload' and (m - 'payload' = '{}' or ulak_private.are_message_options(m, array['payload']))
            end,
            false
        )
    );
end
$plpgsql$;

-- Whether what an object holds beside the keys of its own are options of a message.
create or replace function ulak_private.are_message_options(p_object jsonb, p_own_keys text[])
returns boolean
language sql
immutable
as $sql$
    select not exists (
        select
        from jsonb_each(p_object) o
        where o.key <> all (p_own_keys)
            and not coalesce(
                case
                    when jsonb_typeof(o.value) = 'null' then true
                    when o.key = 'priority' then o.value::text ~ '^([0-9]|10)$'
                    when o.key = 'generation' then o.value::text ~ '^[1-9][0-9]{0,17}$'
                    when o.key = 'max_retries' then o.value::text ~ '^[0-9]{1,3}$'
                    when o.key in ('headers', 'metadata') then jsonb_typeof(o.value) = 'object'
                    else jsonb_typeof(o.value) = 'string'
                end
                and ulak_private.message_options_schema() ? o.key,
                false
            )
    )
$sql$;

-- A message has a payload, which may be null, or a raw body.
create or replace function ulak_private.require_bodies(p_messages jsonb)
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_place bigint;
begin
    select m.place - 1 into v_place
    from jsonb_array_elements(p_messages) with ordinality m(message, place)
    where m.message ? 'payload' = coalesce(jsonb_typeof(m.message -> 'raw') = 'string', false)
    order by m.place
    limit 1;
    if found then
        perform ulak_private.raise_violation(
            'messages',
            array[format('[%s]', v_place), 'must have a payload or a raw body', 'Such as {"payload": {"id": 1}} or {"raw": "text"}.']
        );
    end if;
end
$plpgsql$;

create or replace function ulak_private.require_valid(p_what text, p_schema jsonb, p_value jsonb)
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_violation text[] := ulak_private.json_violation(p_schema, p_value);
begin
    if v_violation is not null then
        perform ulak_private.raise_violation(p_what, v_violation);
    end if;
end
$plpgsql$;
