-- Publishing: an event becomes a message for each endpoint that has a matching subscription.

create or replace function ulak.publish(p_event_type text, p_payload jsonb)
returns integer
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    perform ulak._refuse_reserved_event_type(p_event_type);
    return ulak._publish(p_event_type, p_payload);
end
$plpgsql$;

comment on function ulak.publish(text, jsonb) is
    'queues an event for every endpoint with a matching subscription, in the caller''s transaction; returns how many';

create or replace function ulak.publish_batch(p_events jsonb)
returns integer
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_endpoint_ids bigint[];
    v_payloads jsonb[];
    v_event_types text[];
begin
    perform ulak._check_events(p_events);
    select
        array_agg(m.endpoint_id order by e.number, m.endpoint_id),
        array_agg(e.payload order by e.number, m.endpoint_id),
        array_agg(e.event_type order by e.number, m.endpoint_id)
    into v_endpoint_ids, v_payloads, v_event_types
    from ulak._events(p_events) as e
    cross join lateral unnest(ulak._subscribed_endpoints(e.event_type, e.payload)) as m (endpoint_id);
    if v_payloads is null then
        return 0;
    end if;
    return cardinality(ulak._enqueue_many(v_endpoint_ids, v_payloads, 0, v_event_types));
end
$plpgsql$;

comment on function ulak.publish_batch(jsonb) is
    'publishes an array of {"event_type": ..., "payload": ...}, all or none; returns the number of messages queued';

-- publish(), once the name is known not to be reserved.
create or replace function ulak._publish(p_event_type text, p_payload jsonb)
returns integer
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_schema jsonb;
    v_endpoint_ids bigint[];
begin
    select t.schema into v_schema from ulak.event_types as t where t.name = p_event_type;
    if not found then
        perform ulak._raise_unknown_event_type(p_event_type);
    end if;
    if p_payload is null then
        raise exception 'the payload is null'
            using errcode = '22004', hint = 'Publish the JSON value null as ''null''::jsonb, if that is what you mean.';
    end if;
    if v_schema is not null then
        perform ulak._check_event(p_event_type, v_schema, p_payload, '$');
    end if;
    v_endpoint_ids := ulak._subscribed_endpoints(p_event_type, p_payload);
    if v_endpoint_ids = '{}' then
        return 0;
    end if;
    return cardinality(
        ulak._enqueue_many(
            v_endpoint_ids,
            array_fill(p_payload, array[cardinality(v_endpoint_ids)]),
            0,
            array_fill(p_event_type, array[cardinality(v_endpoint_ids)])
        )
    );
end
$plpgsql$;

-- An endpoint gets an event once, however many of its subscriptions match. A predicate that fails on this payload counts
-- as false: it must not abort the application's transaction. The _tz form because the other one raises when dates and
-- times with and without a zone meet, silent or not.
create or replace function ulak._subscribed_endpoints(p_event_type text, p_payload jsonb)
returns bigint[]
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    return array(
        select distinct s.endpoint_id
        from ulak.subscriptions as s
        where s.event_type = p_event_type
            and (s.filter is null or p_payload @> s.filter)
            and (s.predicate is null or jsonb_path_match_tz(p_payload, s.predicate, '{}', true))
        order by s.endpoint_id
    );
end
$plpgsql$;

create or replace function ulak._check_event(p_event_type text, p_schema jsonb, p_payload jsonb, p_path text)
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_violation text[] := ulak._json_violation(p_schema, p_payload);
begin
    if v_violation is not null then
        raise exception 'payload of event type "%" is not valid: % %', p_event_type, p_path || v_violation[1], v_violation[2]
            using
                errcode = '22023',
                detail = 'The event type has a JSON Schema that each payload must satisfy.',
                hint = concat_ws(
                    ' ',
                    v_violation[3],
                    case
                        when ulak._may_read('ulak.event_types')
                            then format('select schema from ulak.event_types where name = %L;', p_event_type)
                        else 'An administrator can tell you the schema.'
                    end
                );
    end if;
end
$plpgsql$;

create or replace function ulak._events(p_events jsonb)
returns table (number bigint, event_type text, payload jsonb)
language sql
immutable
set search_path = pg_catalog, pg_temp
as $sql$
    select e.number - 1, e.value ->> 'event_type', e.value -> 'payload'
    from jsonb_array_elements(p_events) with ordinality as e (value, number)
$sql$;

-- Everything is looked at before anything is queued.
create or replace function ulak._check_events(p_events jsonb)
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_event record;
begin
    if p_events is null then
        raise exception 'the events are null'
            using errcode = '22004', hint = 'Pass a JSON array; an empty one publishes nothing.';
    end if;
    if not ulak._are_events(p_events) then
        perform ulak._raise_violation('events', ulak._json_violation(ulak._events_schema(), p_events));
    end if;
    for v_event in
        select distinct on (e.event_type) e.event_type, t.name is not null as is_known
        from ulak._events(p_events) as e
        left join ulak.event_types as t on t.name = e.event_type
    loop
        perform ulak._refuse_reserved_event_type(v_event.event_type);
        if not v_event.is_known then
            perform ulak._raise_unknown_event_type(v_event.event_type);
        end if;
    end loop;
    perform ulak._check_event(e.event_type, t.schema, e.payload, format('$[%s].payload', e.number))
    from ulak._events(p_events) as e
    join ulak.event_types as t on t.name = e.event_type
    where t.schema is not null
    order by e.number;
end
$plpgsql$;

-- The same as _events_schema(), in one pass; the schema says where the mistake is.
create or replace function ulak._are_events(p_events jsonb)
returns boolean
language plpgsql
immutable
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    if jsonb_typeof(p_events) <> 'array' then
        return false;
    end if;
    return not exists (
        select
        from jsonb_array_elements(p_events) as e
        where not coalesce(
            case jsonb_typeof(e)
                when 'object' then jsonb_typeof(e -> 'event_type') = 'string'
                    and e ? 'payload'
                    and e - array['event_type', 'payload'] = '{}'
            end,
            false
        )
    );
end
$plpgsql$;

create or replace function ulak._events_schema()
returns jsonb
language sql
immutable
as $sql$
    select $json${
        "type": "array",
        "items": {
            "type": "object",
            "required": ["event_type", "payload"],
            "additionalProperties": false,
            "properties": {"event_type": {"type": "string"}, "payload": true}
        }
    }$json$::pg_catalog.jsonb
$sql$;
