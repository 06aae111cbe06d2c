-- Publish and subscribe: an event type fans out to the endpoints that subscribed to it.

create table ulak.event_types (
    name text primary key,
    description text,
    schema jsonb,
    created_at timestamptz not null default now(),
    is_restricted boolean not null default false
);

comment on table ulak.event_types is 'kinds of events that ulak.publish() accepts';
comment on column ulak.event_types.name is 'unique name, such as order.created. Names that start with ulak. are ulak''s own events';
comment on column ulak.event_types.description is 'free text for people';
comment on column ulak.event_types.schema is 'JSON Schema that each payload must satisfy; null: anything goes';
comment on column ulak.event_types.created_at is 'when the event type was created';
comment on column ulak.event_types.is_restricted is 'true: only roles of ulak.event_type_grants may publish it';

create table ulak.event_type_grants (
    event_type text not null references ulak.event_types (name) on delete cascade,
    role_name text not null,
    granted_at timestamptz not null default now(),
    -- As ulak_private.caller() has it.
    granted_by text not null default case when current_setting('role') = 'none' then session_user else current_setting('role') end,
    primary key (event_type, role_name)
);

comment on table ulak.event_type_grants is 'roles that may publish restricted event types. Change it with ulak.grant_event_type() and ulak.revoke_event_type()';
comment on column ulak.event_type_grants.event_type is 'the event type';
comment on column ulak.event_type_grants.role_name is 'name of the role whose members may; a role that is renamed loses it';
comment on column ulak.event_type_grants.granted_at is 'when it was granted';
comment on column ulak.event_type_grants.granted_by is 'the role that granted it';

-- The foreign keys also tell pg_dump in which order to restore. Either event_type or pattern is null.
create table ulak.subscriptions (
    id bigint generated always as identity primary key,
    event_type text references ulak.event_types (name),
    endpoint_id bigint not null references ulak.endpoints (id) on delete cascade,
    filter jsonb,
    predicate jsonpath,
    created_at timestamptz not null default now(),
    enabled boolean not null default true,
    description text,
    pattern text,
    body jsonb
);

create index subscriptions_event_type on ulak.subscriptions (event_type);
create index subscriptions_endpoint_id on ulak.subscriptions (endpoint_id);
create index subscriptions_pattern on ulak.subscriptions (pattern) where pattern is not null;

comment on table ulak.subscriptions is 'which endpoint receives which events';
comment on column ulak.subscriptions.id is 'number of the subscription; ulak.unsubscribe() takes it';
comment on column ulak.subscriptions.event_type is 'the event type that is subscribed to; null: pattern says which';
comment on column ulak.subscriptions.endpoint_id is 'the endpoint that receives its events';
comment on column ulak.subscriptions.filter is 'only payloads that contain this (payload @> filter); null: all';
comment on column ulak.subscriptions.predicate is 'only payloads for which this jsonpath predicate is true; an error in it counts as false; null: all';
comment on column ulak.subscriptions.created_at is 'when the subscription was made';
comment on column ulak.subscriptions.enabled is 'false: it is skipped, and events published meanwhile are not sent later';
comment on column ulak.subscriptions.description is 'free text for people';
comment on column ulak.subscriptions.pattern is 'order.* for all event types that start with order., or * for all but ulak''s own; null: event_type alone';
comment on column ulak.subscriptions.body is 'template of the body of its events, in place of the endpoint''s own; null: none';
