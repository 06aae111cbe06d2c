-- The dead-letter queue: messages that ulak gave up on, until retention removes them.

create table ulak_private.letters (
    id bigint generated always as identity (sequence name ulak_private.dlq_id_seq) constraint dlq_pkey primary key,
    original_message_id bigint not null,
    endpoint_id bigint not null,
    event_id bigint not null,
    event_created_at timestamptz,
    made_from bigint,
    message_id uuid not null,
    original_created_at timestamptz not null,
    failed_at timestamptz not null,
    archived_at timestamptz not null default now(),
    first_failed_at timestamptz,
    scheduled_at timestamptz,
    expires_at timestamptz,
    redriven_at timestamptz,
    redriven_message_id bigint,
    correlation_id uuid,
    generation bigint,
    attempts integer not null,
    retry_count integer not null,
    priority smallint not null,
    status text not null default 'failed',
    endpoint_name text not null,
    protocol text not null,
    last_error text,
    idempotency_key text,
    payload_hash text,
    ordering_key text,
    response jsonb,
    failure_history jsonb,
    redriven_by text,
    discarded_at timestamptz,
    discarded_by text,
    is_holding boolean not null default false,
    constraint dlq_status_is_known check (
        status in (
            'failed',  -- fail, recovery -> here; waits for an operator
            'redriven', -- redrive -> here; a new message is in ulak.queue, this row is the audit trail
            'discarded' -- discard -> here; given up, this row is the audit trail
        )
    )
);

create index dlq_failed_idx on ulak_private.letters (endpoint_id, original_message_id) where status = 'failed';
create index dlq_holding_idx on ulak_private.letters (endpoint_id) where is_holding;
create index dlq_retention_idx on ulak_private.letters (archived_at);
create index dlq_original_message_idx on ulak_private.letters (original_message_id);

-- A row for each cause of each burial; maintenance sums them up and deletes them. Rows that are only added: a counter would be waited for.
create table ulak_private.dead_counts (
    endpoint_id bigint not null,
    endpoint_name text not null,
    event_type text,
    cause text,
    letters integer not null,
    skipped integer not null,
    counted_at timestamptz not null
);

-- Where a publication is for all tables, rows that can't be told apart could not be deleted.
alter table ulak_private.dead_counts replica identity full;

comment on table ulak_private.letters is 'dead letters; private to ulak: read ulak.dlq';
comment on column ulak_private.letters.id is 'what redrive_message() takes';
comment on column ulak_private.letters.original_message_id is 'its id in ulak.queue';
comment on column ulak_private.letters.endpoint_id is 'the endpoint it was for';
comment on column ulak_private.letters.event_id is 'as in ulak.queue';
comment on column ulak_private.letters.event_created_at is 'as in ulak.queue';
comment on column ulak_private.letters.made_from is 'as in ulak.queue';
comment on column ulak_private.letters.message_id is 'sent as webhook-id; kept by a redrive';
comment on column ulak_private.letters.original_created_at is 'when it was sent';
comment on column ulak_private.letters.failed_at is 'when ulak gave up';
comment on column ulak_private.letters.archived_at is 'when it entered this table; dlq_retention_days counts from here';
comment on column ulak_private.letters.first_failed_at is 'first failure of the last cycle';
comment on column ulak_private.letters.scheduled_at is 'as sent';
comment on column ulak_private.letters.expires_at is 'as sent; a redrive clears it';
comment on column ulak_private.letters.redriven_at is 'when it was put back into the queue';
comment on column ulak_private.letters.redriven_message_id is 'its new id in ulak.queue';
comment on column ulak_private.letters.correlation_id is 'as sent';
comment on column ulak_private.letters.generation is 'as it was when it failed';
comment on column ulak_private.letters.attempts is 'claims started in the last cycle';
comment on column ulak_private.letters.retry_count is 'budget used in the last cycle';
comment on column ulak_private.letters.priority is 'as sent';
comment on column ulak_private.letters.status is 'failed, redriven or discarded';
comment on column ulak_private.letters.endpoint_name is 'the endpoint''s name when it failed';
comment on column ulak_private.letters.protocol is 'the endpoint''s protocol when it failed';
comment on column ulak_private.letters.last_error is 'why ulak gave up';
comment on column ulak_private.letters.idempotency_key is 'as sent; a redrive clears it';
comment on column ulak_private.letters.payload_hash is 'as in ulak.queue';
comment on column ulak_private.letters.ordering_key is 'as sent';
comment on column ulak_private.letters.response is 'the last answer, if capture_response is on';
comment on column ulak_private.letters.failure_history is 'earlier failed cycles, newest last, at most 20';
comment on column ulak_private.letters.redriven_by is 'who put it back';
comment on column ulak_private.letters.discarded_at is 'when it was given up';
comment on column ulak_private.letters.discarded_by is 'who gave it up';
comment on column ulak_private.letters.is_holding is 'true: what follows in its ordering key waits until it is redriven or discarded';
comment on table ulak_private.dead_counts is 'dead letters that the next digest for operators tells of; private to ulak';
comment on column ulak_private.dead_counts.endpoint_id is 'the endpoint they were for';
comment on column ulak_private.dead_counts.endpoint_name is 'its name';
comment on column ulak_private.dead_counts.event_type is 'their event type, if they have one';
comment on column ulak_private.dead_counts.cause is 'their error; numbers are left out';
comment on column ulak_private.dead_counts.letters is 'how many';
comment on column ulak_private.dead_counts.skipped is 'how many of them had no ulak.message.dead, because the queue was full';
comment on column ulak_private.dead_counts.counted_at is 'when';
