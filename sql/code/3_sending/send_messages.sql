-- Sending many messages in one call: to one endpoint, each with its own options, or one message to many endpoints.

create or replace function ulak.send_messages(p_endpoint text, p_messages jsonb)
returns bigint[]
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_endpoint_id bigint := ulak_private.sendable_endpoint(p_endpoint);
begin
    perform ulak_private.require_items('messages', p_messages, ulak_private.messages_schema());
    perform ulak_private.require_bodies(p_messages);
    return ulak_private.enqueue(ulak_private.messages_of(p_messages, v_endpoint_id));
end
$plpgsql$;

comment on function ulak.send_messages(text, jsonb) is
    'queues an array of {"payload": ..., and options of send()} for one endpoint, all or none; returns ids in the order of the array';

-- The messages in an array of send_messages() or publish_batch(), checked. An event has no endpoint.
create or replace function ulak_private.messages_of(p_items jsonb, p_endpoint_id bigint default null)
returns ulak_private.message[]
language plpgsql
stable
as $plpgsql$
declare
    v_messages ulak_private.message[] := array(
        select (
            p_endpoint_id,
            case when i.raw is null then coalesce(i.payload, 'null') else to_jsonb(i.raw) end,
            coalesce(i.priority, 0),
            i.scheduled_at,
            i.idempotency_key,
            i.correlation_id,
            i.expires_at,
            i.ordering_key,
            i.headers,
            i.metadata
        )::ulak_private.message
        from rows from (
            jsonb_to_recordset(p_items) as (
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
        ) with ordinality i
        order by i.ordinality
    );
begin
    perform ulak_private.check_messages(v_messages);
    if exists (
        select from jsonb_array_elements(p_items) i where i ?| array['raw', 'content_type', 'path', 'timeout', 'generation', 'max_retries']
    ) then
        return ulak_private.with_requests(v_messages, p_items);
    end if;
    return v_messages;
end
$plpgsql$;

-- The same messages with the options of their requests: element i of p_requests belongs to the i-th.
create or replace function ulak_private.with_requests(p_messages ulak_private.message[], p_requests jsonb)
returns ulak_private.message[]
language sql
stable
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
    return ulak_private.enqueue(array[v_message], array_fill(1, array[cardinality(v_endpoint_ids)]), v_endpoint_ids);
end
$plpgsql$;

comment on function ulak.send_many(
    text[], jsonb, integer, timestamptz, text, uuid, timestamptz, text, jsonb, jsonb, bigint, integer
) is
    'queues one message for each of these endpoints, with the options of send(); returns ids in the order of the endpoints';

-- Options of a message in an array of messages or events, by JSON type. Each caller adds its own keys.
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

create or replace function ulak_private.messages_schema()
returns jsonb
language sql
immutable
as $sql$
    select jsonb_build_object(
        'type', 'array',
        'items', jsonb_build_object(
            'type', 'object',
            'additionalProperties', false,
            'properties', ulak_private.message_options_schema() || $json${
                "raw": {"type": ["string", "null"]},
                "content_type": {"type": ["string", "null"]},
                "path": {"type": ["string", "null"]},
                "timeout": {"type": ["number", "null"]}
            }$json$
        )
    )
$sql$;

-- Raises unless the items satisfy the schema of such an array.
create or replace function ulak_private.require_items(p_what text, p_items jsonb, p_schema jsonb)
returns void
language plpgsql
immutable
as $plpgsql$
declare
    v_violation text[];
begin
    if p_items is null then
        raise exception 'the % are null', p_what
            using errcode = '22004', hint = 'Pass a JSON array; an empty one sends nothing.';
    elsif not ulak_private.are_plain(p_items, p_schema -> 'items') then
        v_violation := ulak_private.json_violation(p_schema, p_items);
        if v_violation is not null then
            perform ulak_private.raise_violation(p_what, v_violation);
        end if;
    end if;
end
$plpgsql$;

-- Whether all items clearly satisfy the schema of an item, in one query. json_violation() takes ten times as long, but says what is wrong where.
create or replace function ulak_private.are_plain(p_items jsonb, p_schema jsonb)
returns boolean
language plpgsql
immutable
as $plpgsql$
declare
    v_properties jsonb := p_schema -> 'properties';
    v_required text[] := array(select jsonb_array_elements_text(p_schema -> 'required'));
begin
    if jsonb_typeof(p_items) <> 'array' or jsonb_path_exists(p_items, 'strict $[*] ? (@.type() != "object")') then
        return false;
    end if;
    return not exists (
        select
        from jsonb_array_elements(p_items) i
        where not i ?& v_required or exists (
            select
            from jsonb_each(i) o
            where not coalesce(
                case
                    when v_properties -> o.key = 'true' then true
                    when jsonb_typeof(o.value) = 'number' and v_properties -> o.key -> 'type' ? 'integer'
                        then scale(o.value::numeric) = 0 and ulak_private.json_number_problem(v_properties -> o.key, o.value::numeric) is null
                    else v_properties -> o.key -> 'type' ? jsonb_typeof(o.value)
                end,
                false
            )
        )
    );
end
$plpgsql$;

-- A message has a payload, which may be null, or a raw body.
create or replace function ulak_private.require_bodies(p_messages jsonb)
returns void
language plpgsql
as $plpgsql$
declare
    v_place bigint;
begin
    select m.place - 1 into v_place
    from jsonb_array_elements(p_messages) with ordinality m(message, place)
    -- Finds messages with both, or with neither.
    where (m.message ? 'payload') = coalesce(jsonb_typeof(m.message -> 'raw') = 'string', false)
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
