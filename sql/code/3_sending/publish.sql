-- Publishing: an event becomes a message for each endpoint that has a matching subscription.

create or replace function ulak.publish(
    p_event_type text,
    p_payload jsonb,
    p_priority integer default 0,
    p_scheduled_at timestamptz default null,
    p_idempotency_key text default null,
    p_correlation_id uuid default null,
    p_expires_at timestamptz default null,
    p_ordering_key text default null,
    p_headers jsonb default null,
    p_metadata jsonb default null,
    p_event_id uuid default null,
    p_generation bigint default null,
    p_max_retries integer default null
)
returns integer
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_schema jsonb := ulak_private.publishable(p_event_type);
begin
    if p_payload is null then
        raise exception 'the payload is null'
            using errcode = '22004', hint = 'Publish the JSON value null as ''null''::jsonb, if that is what you mean.';
    end if;
    if v_schema is not null then
        perform ulak_private.check_event(p_event_type, v_schema, p_payload, '$');
    end if;
    perform ulak_private.check_message(
        p_payload, p_priority, p_scheduled_at, p_idempotency_key, p_expires_at, p_ordering_key, p_headers, p_metadata
    );
    return ulak_private.fan_out(array[(
        null,
        p_payload,
        p_priority,
        p_scheduled_at,
        p_idempotency_key,
        p_correlation_id,
        p_expires_at,
        p_ordering_key,
        ulak_private.with_options(p_headers, p_generation, p_max_retries),
        p_metadata
    )::ulak_private.message], array[p_event_type], array[p_event_id]);
end
$plpgsql$;

comment on function ulak.publish(
    text, jsonb, integer, timestamptz, text, uuid, timestamptz, text, jsonb, jsonb, uuid, bigint, integer
) is
    'queues an event for every endpoint with a matching subscription, in the caller''s transaction, with the options of '
    'send(); returns the number of messages queued';

create or replace function ulak.publish_batch(p_events jsonb)
returns integer
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    perform ulak_private.check_events(p_events);
    return ulak_private.fan_out(
        ulak_private.messages_of(p_events),
        array(select e.event ->> 'event_type' from jsonb_array_elements(p_events) with ordinality as e (event, place) order by e.place),
        array(select (e.event ->> 'event_id')::uuid from jsonb_array_elements(p_events) with ordinality as e (event, place) order by e.place)
    );
end
$plpgsql$;

comment on function ulak.publish_batch(jsonb) is
    'publishes an array of {"event_type": ..., "payload": ..., and options of publish()}, all or none; returns the number of messages queued';

-- Sends each event to every endpoint that subscribes to it. Element i of the arrays is one event, as a message without an endpoint. A
-- receiver behind two of the endpoints recognises it by its event id.
create or replace function ulak_private.fan_out(p_events ulak_private.message[], p_event_types text[], p_event_ids uuid[])
returns integer
language plpgsql
set plan_cache_mode = force_generic_plan
as $plpgsql$
declare
    v_mailing ulak_private.mailing;
begin
    if cardinality(p_events) = 1 then
        -- 50 us faster than the general path.
        v_mailing.endpoint_ids := ulak_private.subscribed_endpoints(p_event_types[1], p_events[1].payload);
        v_mailing.places := nullif(array_fill(1, array[cardinality(v_mailing.endpoint_ids)]), '{}');
    else
        select r.places, r.endpoint_ids into v_mailing.places, v_mailing.endpoint_ids
        from ulak_private.recipients(p_event_types, array(select e.payload from unnest(p_events) as e)) as r;
    end if;
    if exists (
        select from ulak.endpoints as e where e.id = any (v_mailing.endpoint_ids) and e.is_restricted and not ulak_private.may_send(e.id)
    ) then
        v_mailing := ulak_private.without_closed_endpoints(v_mailing);
    end if;
    if v_mailing.places is null then
        return 0;
    end if;
    return ulak_private.post_events(p_events, p_event_types, p_event_ids, v_mailing.places, v_mailing.endpoint_ids);
end
$plpgsql$;

-- Queues events for these recipients: the event at p_places[i] goes to p_endpoint_ids[i]. Returns the number of messages.
create or replace function ulak_private.post_events(
    p_events ulak_private.message[],
    p_event_types text[],
    p_event_ids uuid[],
    p_places integer[],
    p_endpoint_ids bigint[]
)
returns integer
language plpgsql
as $plpgsql$
declare
    v_mailing ulak_private.mailing := (null, p_places, p_endpoint_ids);
begin
    v_mailing.messages := array(
        select (
            null,
            e.payload,
            e.priority,
            e.scheduled_at,
            e.idempotency_key,
            e.correlation_id,
            e.expires_at,
            e.ordering_key,
            coalesce(e.headers, '{}')
            || jsonb_build_object('ulak-event-type', e.event_type, 'ulak-event-id', coalesce(e.given_id, gen_random_uuid())),
            coalesce(e.metadata, '{}') || jsonb_build_object('event_type', e.event_type)
        )::ulak_private.message
        from unnest(p_event_types, p_event_ids, p_events) with ordinality as e (
            event_type, given_id, no_endpoint, payload, priority, scheduled_at, idempotency_key, correlation_id, expires_at,
            ordering_key, headers, metadata, place
        )
        order by e.place
    );
    if exists (select from unnest(p_events) as e where e.headers is not null) then
        v_mailing := ulak_private.without_credentials(v_mailing);
    end if;
    return cardinality(ulak_private.enqueue(v_mailing.messages, v_mailing.places, v_mailing.endpoint_ids));
end
$plpgsql$;

-- Which endpoints get which of these events, in the events' order. An endpoint gets an event once, however many of its subscriptions match.
create or replace function ulak_private.recipients(
    p_event_types text[],
    p_payloads jsonb[],
    out places integer[],
    out endpoint_ids bigint[]
)
language plpgsql
stable
-- Comparing thousands of events with thousands of subscriptions pair by pair would take minutes.
set enable_nestloop = off
set plan_cache_mode = force_generic_plan
as $plpgsql$
begin
    select array_agg(r.place), array_agg(r.endpoint_id) into places, endpoint_ids
    from (
        select distinct e.place, s.endpoint_id
        from unnest(p_event_types, p_payloads) with ordinality as e (event_type, payload, place)
        join ulak_private.subscriptions_to_each(p_event_types) as s on s.event_type = e.event_type
        where ulak_private.is_wanted_payload(e.payload, s.filter, s.predicate)
        order by e.place, s.endpoint_id
    ) as r;
end
$plpgsql$;

-- A publisher doesn't know the subscribers. Its event reaches the endpoints that it may send to, and a notice counts the others.
create or replace function ulak_private.without_closed_endpoints(p_mailing ulak_private.mailing)
returns ulak_private.mailing
language plpgsql
as $plpgsql$
declare
    v_mailing ulak_private.mailing;
begin
    select array_agg(r.place order by r.number), array_agg(r.endpoint_id order by r.number)
    into v_mailing.places, v_mailing.endpoint_ids
    from unnest(p_mailing.places, p_mailing.endpoint_ids) with ordinality as r (place, endpoint_id, number)
    where not exists (
        select from ulak.endpoints as e where e.id = r.endpoint_id and e.is_restricted and not ulak_private.may_send(e.id)
    );
    raise notice '% of % messages were not queued: their endpoints are not granted to "%"',
        cardinality(p_mailing.places) - coalesce(cardinality(v_mailing.places), 0), cardinality(p_mailing.places), ulak_private.caller()
        using hint = 'An administrator can: select ulak.grant_endpoint(..., ''send'');';
    return v_mailing;
end
$plpgsql$;

-- If an event has a header that a subscribed endpoint authenticates itself with, that endpoint gets the event without it. It is no error: a
-- publisher doesn't know the subscribers, and an administrator's config must not fail its transaction.
create or replace function ulak_private.without_credentials(p_mailing ulak_private.mailing)
returns ulak_private.mailing
language plpgsql
as $plpgsql$
declare
    v_group record;
    v_message ulak_private.message;
begin
    -- Endpoints that drop the same headers of an event share one message.
    for v_group in
        select r.place, n.names, array_agg(r.number) as numbers
        from unnest(p_mailing.places, p_mailing.endpoint_ids) with ordinality as r (place, endpoint_id, number)
        join unnest(p_mailing.messages) with ordinality as m on m.ordinality = r.place
        cross join lateral ulak_private.credential_headers(
            r.endpoint_id, m.headers - array['ulak-event-type', 'ulak-event-id']
        ) as n (names)
        where n.names <> '{}'
        group by r.place, n.names
    loop
        v_message := p_mailing.messages[v_group.place];
        v_message.headers := v_message.headers - v_group.names;
        p_mailing.messages := p_mailing.messages || v_message;
        p_mailing.places := array(
            select case when r.number = any (v_group.numbers) then cardinality(p_mailing.messages) else r.place end
            from unnest(p_mailing.places) with ordinality as r (place, number)
            order by r.number
        );
    end loop;
    return p_mailing;
end
$plpgsql$;

-- A predicate that fails on this payload counts as false: it must not abort the application's transaction. The _tz form, because the other
-- one raises when dates and times with and without a zone meet, silent or not.
create or replace function ulak_private.is_wanted_payload(p_payload jsonb, p_filter jsonb, p_predicate jsonpath)
returns boolean
language sql
stable
as $sql$
    select (p_filter is null or p_payload @> p_filter)
        and (p_predicate is null or jsonb_path_match_tz(p_payload, p_predicate, '{}', true))
$sql$;

-- An endpoint gets an event once, however many of its subscriptions match.
create or replace function ulak_private.subscribed_endpoints(p_event_type text, p_payload jsonb)
returns bigint[]
language plpgsql
stable
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $plpgsql$
begin
    return array(
        select distinct s.endpoint_id
        from ulak_private.subscriptions_to(p_event_type) as s
        where ulak_private.is_wanted_payload(p_payload, s.filter, s.predicate)
        order by s.endpoint_id
    );
end
$plpgsql$;

create or replace function ulak_private.check_event(p_event_type text, p_schema jsonb, p_payload jsonb, p_path text)
returns void
language plpgsql
as $plpgsql$
declare
    v_violation text[] := ulak_private.json_violation(p_schema, p_payload);
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
                        when ulak_private.may_read('ulak.event_types')
                            then format('select schema from ulak.event_types where name = %L;', p_event_type)
                        else 'An administrator can tell you the schema.'
                    end
                );
    end if;
end
$plpgsql$;

-- The schema of an event type that the caller may publish; null if it has none.
create or replace function ulak_private.publishable(p_event_type text)
returns jsonb
language plpgsql
stable
as $plpgsql$
declare
    v_schema jsonb;
    v_is_refused boolean;
begin
    perform ulak_private.refuse_reserved_event_type(p_event_type);
    select t.schema, t.is_restricted and not ulak_private.may_publish(t.name) into v_schema, v_is_refused
    from ulak.event_types as t
    where t.name = p_event_type;
    if not found then
        perform ulak_private.raise_unknown_event_type(p_event_type);
    elsif v_is_refused then
        perform ulak_private.raise_not_granted(p_event_type, 'publish');
    end if;
    return v_schema;
end
$plpgsql$;

-- All events are checked before any is queued.
create or replace function ulak_private.check_events(p_events jsonb)
returns void
language plpgsql
as $plpgsql$
begin
    perform ulak_private.require_items('events', p_events, ulak_private.events_schema());
    perform ulak_private.publishable(t.event_type)
    from (select distinct e ->> 'event_type' as event_type from jsonb_array_elements(p_events) as e) as t;
    perform ulak_private.check_event(t.name, t.schema, e.event -> 'payload', format('$[%s].payload', e.place - 1))
    from jsonb_array_elements(p_events) with ordinality as e (event, place)
    join ulak.event_types as t on t.name = e.event ->> 'event_type'
    where t.schema is not null
    order by e.place;
end
$plpgsql$;

create or replace function ulak_private.events_schema()
returns jsonb
language sql
immutable
as $sql$
    select jsonb_build_object(
        'type', 'array',
        'items', jsonb_build_object(
            'type', 'object',
            'required', '["event_type", "payload"]'::jsonb,
            'additionalProperties', false,
            'properties', ulak_private.message_options_schema()
                || '{"event_type": {"type": "string"}, "event_id": {"type": ["string", "null"]}}'
        )
    )
$sql$;
