-- The event log: what happened to endpoints, settings and messages, and who did it.

create table ulak.event_log (
    id bigint generated always as identity primary key,
    event text not null,
    endpoint_id bigint,
    endpoint_name text,
    message_id bigint,
    old_value jsonb,
    new_value jsonb,
    detail jsonb,
    actor text not null default session_user,
    created_at timestamptz not null default now()
);

create index event_log_created_at on ulak.event_log (created_at);
create index event_log_message_id on ulak.event_log (message_id) where message_id is not null;

comment on table ulak.event_log is 'What happened to endpoints, settings and messages. Holds no payload, no config and no secret.';
comment on column ulak.event_log.id is 'Number of the entry.';
comment on column ulak.event_log.event is 'What happened, such as circuit.opened, setting.changed or message.dead.';
comment on column ulak.event_log.endpoint_id is 'The endpoint concerned, if any; it may have been dropped since.';
comment on column ulak.event_log.endpoint_name is 'Its name at that time.';
comment on column ulak.event_log.message_id is 'ulak.queue.id of the message concerned, if any.';
comment on column ulak.event_log.old_value is 'State before, where something changed.';
comment on column ulak.event_log.new_value is 'State after.';
comment on column ulak.event_log.detail is 'Further facts.';
comment on column ulak.event_log.actor is 'Session user who caused it.';
comment on column ulak.event_log.created_at is 'When it happened.';
