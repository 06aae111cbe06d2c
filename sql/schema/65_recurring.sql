-- Recurring messages: what pg_cron has sent at times of their own.

create table ulak.recurring (
    name text primary key,
    cron text not null,
    endpoint_id bigint not null references ulak.endpoints (id) on delete cascade,
    payload jsonb not null,
    priority integer not null,
    ordering_key text,
    headers jsonb,
    metadata jsonb,
    expires_after interval,
    last_sent_at timestamptz,
    created_at timestamptz not null default now()
);

comment on table ulak.recurring is 'recurring messages. Change it with ulak.schedule() and ulak.unschedule()';
comment on column ulak.recurring.name is 'unique name; a part of the job''s name in pg_cron';
comment on column ulak.recurring.cron is 'when, as pg_cron reads it';
comment on column ulak.recurring.endpoint_id is 'the endpoint that it goes to; dropping the endpoint removes it';
comment on column ulak.recurring.payload is 'the body';
comment on column ulak.recurring.priority is 'as for send()';
comment on column ulak.recurring.ordering_key is 'as for send()';
comment on column ulak.recurring.headers is 'as for send()';
comment on column ulak.recurring.metadata is 'as for send()';
comment on column ulak.recurring.expires_after is 'how long each message may be delivered; null: forever';
comment on column ulak.recurring.last_sent_at is 'when pg_cron last called';
comment on column ulak.recurring.created_at is 'when it was first scheduled';
