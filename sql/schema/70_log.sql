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
    -- As ulak_private.caller() has it.
    actor text not null default case when current_setting('role') = 'none' then session_user else current_setting('role') end,
    created_at timestamptz not null default now()
);

create index event_log_created_at on ulak.event_log (created_at);
create index event_log_message_id on ulak.event_log (message_id) where message_id is not null;

comment on table ulak.event_log is 'what happened to endpoints, settings and messages. Holds no payload, no config and no secret';
comment on column ulak.event_log.id is 'number of the entry';
comment on column ulak.event_log.event is 'what happened, such as circuit.opened, setting.changed or message.dead';
comment on column ulak.event_log.endpoint_id is 'the endpoint concerned, if any; it may have been dropped since';
comment on column ulak.event_log.endpoint_name is 'its name at that time';
comment on column ulak.event_log.message_id is 'ulak.queue.id of the message concerned, if any';
comment on column ulak.event_log.old_value is 'state before, where something changed';
comment on column ulak.event_log.new_value is 'state after';
comment on column ulak.event_log.detail is 'further facts';
comment on column ulak.event_log.actor is 'the role that caused it: the one that was set, else the one that logged in';
comment on column ulak.event_log.created_at is 'when it happened';
