-- Publish and subscribe: an event type fans out to the endpoints that subscribed to it.

create table ulak.event_types (
    name text primary key,
    description text,
    schema jsonb,
    created_at timestamptz not null default now()
);

comment on table ulak.event_types is 'kinds of events that ulak.publish() accepts';
comment on column ulak.event_types.name is 'unique name, such as order.created. Names that start with ulak. are ulak''s own events';
comment on column ulak.event_types.description is 'free text for people';
comment on column ulak.event_types.schema is 'JSON Schema that each payload must satisfy; null: anything goes';
comment on column ulak.event_types.created_at is 'when the event type was created';

-- The foreign keys also tell pg_dump in which order to restore.
create table ulak.subscriptions (
    id bigint generated always as identity primary key,
    event_type text not null references ulak.event_types (name),
    endpoint_id bigint not null references ulak.endpoints (id) on delete cascade,
    filter jsonb,
    predicate jsonpath,
    created_at timestamptz not null default now(),
    enabled boolean not null default true,
    description text
);

create index subscriptions_event_type on ulak.subscriptions (event_type);
create index subscriptions_endpoint_id on ulak.subscriptions (endpoint_id);

comment on table ulak.subscriptions is 'which endpoint receives which events';
comment on column ulak.subscriptions.id is 'number of the subscription; ulak.unsubscribe() takes it';
comment on column ulak.subscriptions.event_type is 'the event type that is subscribed to';
comment on column ulak.subscriptions.endpoint_id is 'the endpoint that receives its events';
comment on column ulak.subscriptions.filter is 'only payloads that contain this (payload @> filter); null: all';
comment on column ulak.subscriptions.predicate is 'only payloads for which this jsonpath predicate is true; an error in it counts as false; null: all';
comment on column ulak.subscriptions.created_at is 'when the subscription was made';
comment on column ulak.subscriptions.enabled is 'false: it is passed over, and what is published meanwhile is not sent later';
comment on column ulak.subscriptions.description is 'free text for people';
