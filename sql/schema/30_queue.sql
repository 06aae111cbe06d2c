-- Messages: content and state. An event is the content: it is written once and never changed nor copied. A delivery is a narrow
-- row of state, one for each endpoint that the event goes to: it is claimed, settled, and moved to the archive when it is finished.

create sequence ulak.queue_id_seq;

-- An event has the id of its first delivery. Months are made and dropped together with those of the archive
-- (sql/code/6_afterwards/partitions.sql), but none is dropped as long as something needs an event of it.
create table ulak_private.events (
    id bigint not null,
    created_at timestamptz not null default now(),
    payload jsonb not null,
    headers jsonb,
    metadata jsonb,
    -- As ulak_private.caller() has it. Once for all deliveries, also for those of a redrive or a replay.
    sent_by text not null default case when current_setting('role') = 'none' then session_user else current_setting('role') end,
    max_retries smallint
) partition by range (created_at);

create table ulak_private.events_default partition of ulak_private.events default;
create index events_default_id_idx on ulak_private.events_default (id);
-- Maintenance moves its rows. Where a publication is for all tables, a table whose rows can't be told apart lets nobody do that.
alter table ulak_private.events_default replica identity full;

create table ulak_private.deliveries (
    id bigint primary key default nextval('ulak.queue_id_seq'),
    endpoint_id bigint not null,
    event_id bigint not null,
    event_created_at timestamptz,
    made_from bigint,
    message_id uuid not null default gen_random_uuid(),
    next_retry_at timestamptz not null default now(),
    created_at timestamptz not null default now(),
    updated_at timestamptz not null default now(),
    lease_until timestamptz,
    processing_started_at timestamptz,
    completed_at timestamptz,
    failed_at timestamptz,
    first_failed_at timestamptz,
    scheduled_at timestamptz,
    expires_at timestamptz,
    correlation_id uuid,
    generation bigint,
    attempts integer not null default 0,
    retry_count integer not null default 0,
    priority smallint not null default 0,
    -- pending: send, retry, release, redrive, replay -> here; waits for next_retry_at
    -- processing: claim -> here; leased by locked_by until lease_until
    -- Finished ones are in the archive: completed (delivered), failed (given up; a dead letter tells more), expired, cancelled.
    status text not null default 'pending',
    locked_by text,
    last_error text,
    idempotency_key text,
    payload_hash text,
    ordering_key text,
    response jsonb,
    failure_history jsonb
    -- No check constraints: PostgreSQL reads them anew for each statement, and one was a third of what a send costs.
);

-- All but the primary key are partial, so a message is in few of them at any time: in two while it waits, and in two in flight. A limit in
-- time, an ordering key and a correlation id add one each.

-- The claim's index: a loose scan over (endpoint, priority), then the due rows of each in order.
create index deliveries_pending_idx on ulak_private.deliveries (endpoint_id, priority desc, next_retry_at, id)
    where status = 'pending';

-- For recovery, max_in_flight and the circuit breaker's probe.
create index deliveries_processing_idx on ulak_private.deliveries (endpoint_id, lease_until)
    where status = 'processing';

create index deliveries_expiry_idx on ulak_private.deliveries (expires_at)
    where status = 'pending' and expires_at is not null;

-- The head of an ordering key is its first row here.
create index deliveries_ordering_idx on ulak_private.deliveries (endpoint_id, ordering_key, id)
    where ordering_key is not null and status in ('pending', 'processing', 'held');

-- For find_messages() by correlation id; messages without one cost nothing here.
create index deliveries_correlation_idx on ulak_private.deliveries (correlation_id) where correlation_id is not null;

-- Idempotency keys in use. A row of its own and not an index on deliveries: a delivered message leaves them, but keeps its key for
-- archive_after seconds, because a client that repeats its request a moment after the delivery must get the same answer as one
-- that repeats it a moment before.
create table ulak_private.idempotency_keys (
    endpoint_id bigint not null,
    idempotency_key text collate "C" not null,
    message_id bigint not null,
    payload_hash text not null,
    free_at timestamptz,
    sent_by text not null,
    primary key (endpoint_id, idempotency_key)
);

create index idempotency_keys_free_at_idx on ulak_private.idempotency_keys (free_at) where free_at is not null;

-- Rows die fast here. Thresholds that follow the table's size would let a burst leave its dead rows for hours.
alter table ulak_private.deliveries set (
    autovacuum_vacuum_scale_factor = 0.0,
    autovacuum_vacuum_threshold = 5000,
    autovacuum_vacuum_insert_scale_factor = 0.1,
    autovacuum_analyze_scale_factor = 0.1,
    autovacuum_vacuum_cost_delay = 0
);

-- Up to which id a send needs no probe of the queue (positive), or until when the queue counts as full
-- (negative, milliseconds since 1970). A sequence, because it is read and set outside transactions: an application that
-- stays in its transaction neither hides the value from others nor blocks them.
create sequence ulak_private.queue_headroom minvalue -9223372036854775807 start 1;
-- As many as the default of max_queue_size: nothing waits yet. So the first send needs no probe, and its message has the first id.
do $plpgsql$ begin perform setval('ulak_private.queue_headroom', 1000000); end $plpgsql$;

-- Sends with an id up to this one notify: a worker waits for it. Unlogged, so that it costs neither WAL nor a wait for
-- the disk; after a crash no worker waits, and it has no value.
create unlogged sequence ulak_private.bell;

-- Where the last claim that went round the endpoints has ended, for workers and for external workers. Sequences, because
-- they are read and set outside transactions; unlogged, because any place will do to begin at.
create unlogged sequence ulak_private.claim_position;
create unlogged sequence ulak_private.pull_position;

-- Process id of the external worker that found something last: it looks again soon.
create unlogged sequence ulak_private.last_finder;

-- The input of a claim, and what it passes on.
create type ulak_private.place as (priority smallint, due_at timestamptz, id bigint);
create type ulak_private.resume_point as (endpoint_id bigint, priority smallint, due_at timestamptz, id bigint);
create type ulak_private.rooms as (endpoint_ids bigint[], rooms integer[], others integer);
create type ulak_private.turn as (
    -- Of each endpoint.
    endpoint_ids bigint[],
    names text[],
    config_versions bigint[],
    are_probes boolean[],
    are_metered boolean[],
    nexts ulak_private.place[],
    quotas integer[],
    counts integer[],
    may_have_more boolean[],
    -- Of each message.
    tids tid[],
    ids bigint[],
    priorities smallint[],
    due_ats timestamptz[],
    places integer[],
    first_event_at timestamptz,
    last_event_at timestamptz,
    is_full boolean,
    is_last boolean,
    left_out_others boolean
);
create type ulak_private.leased as (
    id bigint,
    message_id uuid,
    attempt integer,
    endpoint_id bigint,
    endpoint text,
    config_version bigint,
    payload jsonb,
    headers jsonb,
    metadata jsonb,
    correlation_id uuid,
    ordering_key text,
    priority smallint,
    idempotency_key text,
    created_at timestamptz,
    expires_at timestamptz,
    lease_until timestamptz,
    circuit_state text,
    due_at timestamptz,
    -- The claim got as many messages of the endpoint as it asked for, so the endpoint may have more.
    may_have_more boolean,
    -- The claim ended before it had visited all endpoints. If it got nothing, a row without a message carries this flag.
    left_out_others boolean
);
-- What a worker asks for in its turn, and what it gets.
create type ulak_private.wish as (
    most integer,
    rooms ulak_private.rooms,
    lease interval,
    protocols text[],
    behind bigint,
    endpoint_ids bigint[],
    most_endpoints integer,
    most_visits integer,
    longest integer
);
create type ulak_private.claimed as (
    count integer,
    left_out_others boolean,
    ids bigint[],
    message_ids uuid[],
    attempts integer[],
    endpoint_ids bigint[],
    config_versions bigint[],
    payloads text[],
    headers text[],
    metadata text[],
    correlation_ids uuid[],
    ordering_keys text[],
    created_at timestamptz[],
    have_more bigint[]
);

-- Counts what was cancelled. A sequence, because a counter that applications lock until they commit would be waited for.
create sequence ulak_private.messages_cancelled;

-- One of many messages that are sent together, as send() takes it.
create type ulak_private.message as (
    endpoint_id bigint,
    payload jsonb,
    priority integer,
    scheduled_at timestamptz,
    idempotency_key text,
    correlation_id uuid,
    expires_at timestamptz,
    ordering_key text,
    headers jsonb,
    metadata jsonb
);

-- Messages and their recipients: the message at places[i] goes to endpoint_ids[i]. So an event for thousands is there once.
create type ulak_private.mailing as (messages ulak_private.message[], places integer[], endpoint_ids bigint[]);

-- A sender locks the row of its key until it commits, so that ids of a key are in the order of commits.
create table ulak_private.ordering_keys (
    endpoint_id bigint not null,
    ordering_key text collate "C" not null,
    primary key (endpoint_id, ordering_key)
);

comment on sequence ulak.queue_id_seq is 'ids of messages, in ulak.queue, ulak.dlq.original_message_id and ulak.archive alike';
comment on sequence ulak_private.queue_headroom is 'how far send() may go without probing the queue; private to ulak';
comment on sequence ulak_private.messages_cancelled is 'messages cancelled so far, also by transactions that rolled back; private to ulak';
comment on sequence ulak_private.bell is 'up to which id a send wakes the worker; private to ulak';
comment on sequence ulak_private.claim_position is 'endpoint at which the last claim of a worker ended; private to ulak';
comment on sequence ulak_private.pull_position is 'endpoint at which the last claim() over pull endpoints ended; private to ulak';
comment on sequence ulak_private.last_finder is 'process id of the external worker that found something last; private to ulak';
comment on type ulak_private.place is 'a place in the index of waiting messages';
comment on type ulak_private.resume_point is 'where a session''s claims of an endpoint and a priority go on; private to ulak';
comment on type ulak_private.turn is 'a claim under way: the endpoints whose turn it is, with where the next message of each is, how many it may still get and how many it has got; the messages, each with the place of its endpoint; when the first and the last of their events were sent; whether as many endpoints were found as a claim may have, whether another walk would find nobody else, and whether others may have something due; private to ulak';
comment on type ulak_private.leased is 'a message that a claim has leased, or a row without one that only says left_out_others; private to ulak';
comment on type ulak_private.rooms is 'how many messages a worker has room for: of some endpoints, and of each of the others';
comment on type ulak_private.wish is 'what a worker may claim: nothing if no id behind this one has been drawn (null: whatever is due); texts of more bytes than longest are left out; private to ulak';
comment on type ulak_private.claimed is 'what it got, as columns with an element for each message; a column of nothing but nulls is null; have_more: endpoints that got all that they may have; private to ulak';
comment on type ulak_private.message is 'one of many messages that are sent together; private to ulak';
comment on type ulak_private.mailing is 'messages and their recipients: the message at places[i] goes to endpoint_ids[i]; private to ulak';
comment on table ulak_private.ordering_keys is 'ordering keys in use, for their locks; private to ulak';
comment on column ulak_private.ordering_keys.endpoint_id is 'the endpoint of the key';
comment on column ulak_private.ordering_keys.ordering_key is 'the key';
comment on table ulak_private.events is 'what was sent: payload, headers and metadata, once for all endpoints that it goes to; private to ulak';
comment on column ulak_private.events.id is 'the id of its first message';
comment on column ulak_private.events.created_at is 'start of the transaction that sent it';
comment on column ulak_private.events.payload is 'the body; it can''t be changed once sent';
comment on column ulak_private.events.headers is 'extra request headers';
comment on column ulak_private.events.metadata is 'the sender''s own notes, not sent, but for event_type: it is the type of a CloudEvent';
comment on column ulak_private.events.sent_by is 'the role that sent it: the one that was set, else the one that logged in';
comment on column ulak_private.events.max_retries is 'its own number of retries, as asked for by the sender; null: as the endpoint''s retry policy says';
comment on table ulak_private.events_default is 'events whose month has no partition yet; maintenance moves them; private to ulak';
comment on table ulak_private.idempotency_keys is 'idempotency keys in use; private to ulak';
comment on column ulak_private.idempotency_keys.endpoint_id is 'the endpoint of the key';
comment on column ulak_private.idempotency_keys.idempotency_key is 'the key';
comment on column ulak_private.idempotency_keys.message_id is 'the message that was sent with it';
comment on column ulak_private.idempotency_keys.payload_hash is 'sha256 of that message''s payload';
comment on column ulak_private.idempotency_keys.free_at is 'when the key of a delivered message is free again; null while the message is live';
comment on column ulak_private.idempotency_keys.sent_by is 'the role that uses the key';
comment on table ulak_private.deliveries is 'the state of every unfinished message; private to ulak: read ulak.queue';
comment on column ulak_private.deliveries.id is 'returned by send()';
comment on column ulak_private.deliveries.endpoint_id is 'the endpoint it goes to (ulak.endpoints.id)';
comment on column ulak_private.deliveries.event_id is 'the event that it is a delivery of';
comment on column ulak_private.deliveries.event_created_at is 'when that event was sent, if not with this message: it was redriven or replayed';
comment on column ulak_private.deliveries.made_from is 'the message that a redrive or a replay made this one from';
comment on column ulak_private.deliveries.message_id is 'sent as webhook-id; the same in every retry and redrive, so a receiver can drop duplicates';
comment on column ulak_private.deliveries.next_retry_at is 'when it may next be tried; infinity while it waits behind an earlier message of its ordering key';
comment on column ulak_private.deliveries.created_at is 'start of the transaction that sent it';
comment on column ulak_private.deliveries.updated_at is 'last change of its state';
comment on column ulak_private.deliveries.lease_until is 'in flight: until when locked_by owns it; then recovery takes it back';
comment on column ulak_private.deliveries.processing_started_at is 'when it was last claimed';
comment on column ulak_private.deliveries.completed_at is 'when its delivery was settled';
comment on column ulak_private.deliveries.failed_at is 'when it went to the dead-letter queue';
comment on column ulak_private.deliveries.first_failed_at is 'first failure of this cycle; a redrive starts a new cycle';
comment on column ulak_private.deliveries.scheduled_at is 'not before this time, as asked for by the sender';
comment on column ulak_private.deliveries.expires_at is 'not after this time, as asked for by the sender';
comment on column ulak_private.deliveries.correlation_id is 'the sender''s own id for a conversation; sent along';
comment on column ulak_private.deliveries.generation is 'sent as ulak-generation; claim() can be limited to one generation, so that old and new consumers each get their own';
comment on column ulak_private.deliveries.attempts is 'claims started, also by workers that died: the fencing token, it only rises';
comment on column ulak_private.deliveries.retry_count is 'budget used: reported failures and expired leases';
comment on column ulak_private.deliveries.priority is '0 to 10, higher first';
comment on column ulak_private.deliveries.status is 'pending, processing or held (a dead letter that holds its ordering key); in the archive completed, failed, expired or cancelled';
comment on column ulak_private.deliveries.locked_by is 'in flight: the worker that claimed it';
comment on column ulak_private.deliveries.last_error is 'last failure; starts with [RETRYABLE], [PERMANENT] or [DISABLE]';
comment on column ulak_private.deliveries.idempotency_key is 'one message per endpoint and key, until archive_after seconds after its delivery';
comment on column ulak_private.deliveries.payload_hash is 'sha256 of the payload''s text, where an idempotency key was given';
comment on column ulak_private.deliveries.ordering_key is 'messages of one endpoint and key are delivered in commit order, one at a time';
comment on column ulak_private.deliveries.response is 'what the receiver answered, if capture_response is on';
comment on column ulak_private.deliveries.failure_history is 'earlier failed cycles, newest last, at most 20';
