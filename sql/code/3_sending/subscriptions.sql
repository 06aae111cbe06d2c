-- Changing event types and subscriptions in place, and showing them.

create or replace function ulak.alter_event_type(
    p_name text,
    p_description text default null,
    p_schema jsonb default null
)
returns boolean
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    perform ulak_private.refuse_reserved_event_type(p_name);
    if p_schema is not null then
        perform ulak_private.check_json_schema(p_schema);
    end if;
    update ulak.event_types as t
    set description = nullif(coalesce(p_description, t.description), ''),
        -- An empty schema accepts everything, so it is stored as null.
        schema = nullif(coalesce(p_schema, t.schema), '{}')
    where t.name = p_name;
    if not found then
        perform ulak_private.raise_unknown_event_type(p_name);
    end if;
    return true;
end
$plpgsql$;

comment on function ulak.alter_event_type(text, text, jsonb) is
    'replaces an event type''s description or JSON Schema and keeps its subscribers; null leaves one as it is, '''' and ''{}'' clear them';

create or replace function ulak.alter_subscription(
    p_subscription_id bigint,
    p_filter jsonb default null,
    p_predicate jsonpath default null,
    p_enabled boolean default null,
    p_description text default null,
    p_body jsonb default null
)
returns boolean
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_subscription ulak.subscriptions;
begin
    perform ulak_private.require_condition(p_predicate);
    perform ulak_private.lock('configs');
    -- One at a time per event type, or per endpoint for a pattern, as in subscribe().
    perform
    from ulak.event_types as t
    where t.name = (select s.event_type from ulak.subscriptions as s where s.id = p_subscription_id)
    for no key update;
    perform ulak_private.lock_endpoint(s.endpoint_id) from ulak.subscriptions as s where s.id = p_subscription_id and s.pattern is not null;
    update ulak.subscriptions as s
    set filter = nullif(coalesce(p_filter, s.filter), '{}'),
        predicate = nullif(coalesce(p_predicate, s.predicate)::text, 'true')::jsonpath,
        enabled = coalesce(p_enabled, s.enabled),
        description = nullif(coalesce(p_description, s.description), ''),
        body = nullif(coalesce(p_body, s.body), 'null')
    where s.id = p_subscription_id
    returning * into v_subscription;
    if not found then
        raise exception 'subscription % does not exist', coalesce(p_subscription_id::text, 'null')
            using errcode = '42704', hint = 'select id, event_type, endpoint from ulak.subscription_list;';
    end if;
    perform ulak_private.refuse_twin(v_subscription);
    return true;
end
$plpgsql$;

comment on function ulak.alter_subscription(bigint, jsonb, jsonpath, boolean, text, jsonb) is
    'changes a subscription in place; null leaves a part as it is, ''{}'' clears the filter, ''true'' the predicate, '''' the description, ''null'' the body';

create or replace function ulak.unsubscribe(p_event_type text, p_endpoint text)
returns integer
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_pattern text := ulak_private.as_pattern(p_event_type);
    v_count integer;
begin
    perform from ulak.event_types as t where t.name = p_event_type;
    if not found and v_pattern is null then
        perform ulak_private.raise_unknown_event_type(p_event_type);
    end if;
    perform ulak_private.lock('configs');
    delete from ulak.subscriptions as s
    where (s.event_type = p_event_type or s.pattern = v_pattern) and s.endpoint_id = ulak_private.endpoint_id(p_endpoint);
    get diagnostics v_count = row_count;
    return v_count;
end
$plpgsql$;

comment on function ulak.unsubscribe(text, text) is
    'removes every subscription of an endpoint to an event type or a pattern; returns how many there were';

create or replace view ulak.subscription_list as
select
    s.id,
    coalesce(s.event_type, s.pattern) as event_type,
    e.name as endpoint,
    s.enabled,
    s.filter,
    s.predicate,
    s.description,
    s.created_at,
    s.body
from ulak.subscriptions as s
join ulak.endpoints as e on e.id = s.endpoint_id;

comment on view ulak.subscription_list is 'which endpoint receives which events, by name';
call ulak_private.describe('ulak.subscription_list', 'ulak.subscriptions');
comment on column ulak.subscription_list.id is 'number of the subscription; alter_subscription() and unsubscribe() take it';
comment on column ulak.subscription_list.event_type is 'the event type, or a pattern such as order.*';
comment on column ulak.subscription_list.endpoint is 'name of the endpoint that receives its events';
