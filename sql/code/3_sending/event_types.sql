-- Event types, and which endpoints subscribe to them.

create or replace function ulak.create_event_type(
    p_name text,
    p_description text default null,
    p_schema jsonb default null
)
returns text
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    perform ulak_private.check_event_type_name(p_name);
    if p_schema is not null then
        perform ulak_private.check_json_schema(p_schema);
    end if;
    insert into ulak.event_types (name, description, schema)
    values (p_name, p_description, p_schema)
    on conflict (name) do nothing;
    if not found then
        raise exception 'event type "%" already exists', p_name
            using
                errcode = '23505',
                hint = format('select * from ulak.event_types where name = %L;', p_name);
    end if;
    return p_name;
end
$plpgsql$;

comment on function ulak.create_event_type(text, text, jsonb) is
    'creates an event type that can be published, and returns its name; payloads must satisfy the JSON Schema, if given';

create or replace function ulak.drop_event_type(p_name text)
returns boolean
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_subscriptions bigint;
begin
    perform ulak_private.refuse_reserved_event_type(p_name);
    perform ulak_private.lock('configs');
    -- Locked before the subscriptions are deleted: a subscribe() in progress holds this row.
    perform from ulak.event_types as t where t.name = p_name for update;
    if not found then
        perform ulak_private.raise_unknown_event_type(p_name);
    end if;
    with gone as (
        delete from ulak.subscriptions as s where s.event_type = p_name returning s.id
    )
    select count(*) into v_subscriptions from gone;
    delete from ulak.event_types where name = p_name;
    if v_subscriptions > 0 then
        raise notice 'dropped with event type "%": %', p_name, ulak_private.counted(v_subscriptions, 'subscription');
    end if;
    return true;
end
$plpgsql$;

comment on function ulak.drop_event_type(text) is
    'removes an event type and the subscriptions to it; publishing it is an error from then on';

create or replace function ulak.subscribe(
    p_event_type text,
    p_endpoint text,
    p_filter jsonb default null,
    p_predicate jsonpath default null,
    p_body jsonb default null
)
returns bigint
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_pattern text := ulak_private.as_pattern(p_event_type);
    v_endpoint_id bigint;
    v_subscription ulak.subscriptions;
begin
    perform ulak_private.require_condition(p_predicate);
    perform ulak_private.lock('configs');
    -- The lock keeps two sessions from both finding that a subscription doesn't exist yet.
    if v_pattern is null then
        perform ulak_private.lock_event_type(p_event_type);
        v_endpoint_id := ulak_private.keep_endpoint(p_endpoint);
    else
        v_endpoint_id := (ulak_private.lock_endpoint(p_endpoint)).id;
        if not exists (select from ulak.event_types as t where v_pattern = any (ulak_private.patterns_of(t.name))) then
            raise notice 'no event type matches "%" yet', v_pattern;
        end if;
    end if;
    insert into ulak.subscriptions (event_type, pattern, endpoint_id, filter, predicate, body)
    values (case when v_pattern is null then p_event_type end, v_pattern, v_endpoint_id, p_filter, p_predicate, nullif(p_body, 'null'))
    returning * into v_subscription;
    perform ulak_private.refuse_twin(v_subscription);
    return v_subscription.id;
end
$plpgsql$;

comment on function ulak.subscribe(text, text, jsonb, jsonpath, jsonb) is
    'sends an endpoint the events of a type, or of all types that order.* or * stands for: all, or those that contain p_filter and make p_predicate true; '
    'p_body is their body, in place of the endpoint''s own; returns an id';

-- An endpoint has a subscription only once. The caller holds the lock that keeps two sessions from creating the same one.
create or replace function ulak_private.refuse_twin(p_subscription ulak.subscriptions)
returns void
language plpgsql
stable
as $plpgsql$
declare
    v_twin bigint;
begin
    select s.id into v_twin
    from ulak.subscriptions as s
    where (s.event_type = p_subscription.event_type or s.pattern = p_subscription.pattern)
        and s.endpoint_id = p_subscription.endpoint_id
        and s.filter is not distinct from p_subscription.filter
        and s.predicate::text is not distinct from p_subscription.predicate::text
        and s.id <> p_subscription.id;
    if found then
        raise exception 'endpoint "%" already has this subscription to "%"',
            (select e.name from ulak.endpoints as e where e.id = p_subscription.endpoint_id),
            coalesce(p_subscription.event_type, p_subscription.pattern)
            using
                errcode = '23505',
                detail = format('It is subscription %s.', v_twin),
                hint = format('To remove it: select ulak.unsubscribe(%s);', v_twin);
    end if;
end
$plpgsql$;

create or replace function ulak.unsubscribe(p_subscription_id bigint)
returns boolean
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    perform ulak_private.lock('configs');
    delete from ulak.subscriptions where id = p_subscription_id;
    return found;
end
$plpgsql$;

comment on function ulak.unsubscribe(bigint) is 'removes a subscription; false if there is none with this id';

-- Subscriptions, watches and grants of one event type change one at a time.
create or replace function ulak_private.lock_event_type(p_name text)
returns void
language plpgsql
as $plpgsql$
begin
    perform from ulak.event_types as t where t.name = p_name for no key update;
    if not found then
        perform ulak_private.raise_unknown_event_type(p_name);
    end if;
end
$plpgsql$;

create or replace function ulak_private.check_event_type_name(p_name text)
returns void
language plpgsql
immutable
as $plpgsql$
begin
    if p_name is null or p_name !~ E'^[^*\\x01-\\x20\\x7f]{1,200}$' then
        raise exception 'invalid name of an event type'
            using
                errcode = '22023',
                detail = 'A name has 1 to 200 characters, no spaces, no control characters, no *.',
                hint = 'Such as: order.created';
    end if;
    perform ulak_private.refuse_reserved_event_type(p_name);
end
$plpgsql$;

-- Applications must not be able to forge ulak's own events.
create or replace function ulak_private.refuse_reserved_event_type(p_name text)
returns void
language plpgsql
immutable
as $plpgsql$
begin
    if starts_with(lower(p_name collate "C"), 'ulak.') then
        raise exception 'event type "%" is reserved', left(p_name, 200)
            using
                errcode = '42939',
                detail = 'Names that start with ulak. are for events that ulak publishes itself.',
                hint = 'An administrator can subscribe endpoints to them: select ulak.subscribe(''ulak.message.dead'', ''my-endpoint'');';
    end if;
end
$plpgsql$;

create or replace function ulak_private.raise_unknown_event_type(p_name text)
returns void
language plpgsql
as $plpgsql$
begin
    raise exception 'unknown event type %', coalesce('"' || left(p_name, 200) || '"', 'null')
        using
            errcode = '42704',
            detail = 'Event types are created by ulak.create_event_type()'
                || case when ulak_private.may_read('ulak.event_types') then '; select name from ulak.event_types; lists them.' else '.' end,
            hint = ulak_private.did_you_mean(p_name, array(select t.name from ulak.event_types as t));
end
$plpgsql$;
