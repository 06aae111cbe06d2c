-- Who may install this, where, and the roles that everything else is granted to.

\echo Use "CREATE EXTENSION ulak" to load this file. \quit

do $plpgsql$
declare
    v_role text;
begin
    if current_setting('server_version_num')::integer < 150000 then
        raise exception 'ulak needs PostgreSQL 15 or newer'
            using
                errcode = 'feature_not_supported',
                detail = format('This server is PostgreSQL %s.', current_setting('server_version'));
    end if;

    -- Whoever owns the schema could replace what is in it, and our Python runs as the server's user.
    if exists (select from pg_catalog.pg_namespace where nspname = 'ulak') then
        raise exception 'schema "ulak" exists already'
            using
                errcode = 'duplicate_schema',
                detail = (
                    select format('It belongs to role %I. The extension only installs into a schema of its own making.', pg_get_userbyid(nspowner))
                    from pg_catalog.pg_namespace
                    where nspname = 'ulak'
                ),
                hint = 'Look at what is in it, then: drop schema ulak; or: alter schema ulak rename to ulak_old;';
    end if;

    -- Roles belong to the whole cluster: another database may have made them, and DROP EXTENSION leaves them.
    foreach v_role in array array['ulak_admin', 'ulak_application', 'ulak_monitor', 'ulak_worker'] loop
        begin
            if to_regrole(v_role) is null then
                -- pg_cron logs in as the role that a job runs as. Without a password it gets in only where pg_hba.conf says so.
                execute format('create role %I %s', v_role, case when v_role = 'ulak_worker' then 'login' else 'nologin' end);
            end if;
        exception
            when duplicate_object or unique_violation then
                null;
        end;
    end loop;
end
$plpgsql$;

create schema ulak;
comment on schema ulak is 'Transactional outbox: ulak.send() in your transaction, delivery by ulak.run_worker(). Start with ulak.help().';
-- Settings that somebody changed. Names, defaults and ranges are code (sql/code/10_settings.sql), not rows:
-- an upgrade can change them, and a restored dump never collides with them.

create table ulak.setting_values (
    name text primary key,
    value text not null,
    updated_at timestamptz not null default now(),
    updated_by text not null default session_user
);

comment on table ulak.setting_values is 'settings that differ from their default. Change them with ulak.configure(); read them in ulak.settings';
comment on column ulak.setting_values.name is 'the setting''s name, as in ulak.settings';
comment on column ulak.setting_values.value is 'its value as text, in the setting''s unit';
comment on column ulak.setting_values.updated_at is 'when it was last changed';
comment on column ulak.setting_values.updated_by is 'the session user who changed it';
-- Endpoints: where messages go, how to reach it, and how it has been doing lately. Secrets live apart from configs.

-- The breaker and the rate limit rewrite a row often; half-empty pages and no index on a column that they touch keep
-- those updates HOT. Ids stay within integer because the advisory locks per endpoint take a 4-byte key.
create table ulak.endpoints (
    id bigint generated always as identity (maxvalue 2147483647) primary key,
    name text not null unique,
    protocol text not null,
    config jsonb not null,
    retry_policy jsonb,
    enabled boolean not null default true,
    description text,
    circuit_state text not null default 'closed' check (circuit_state in ('closed', 'open', 'half_open')),
    circuit_failure_count integer not null default 0,
    circuit_opened_at timestamptz,
    circuit_half_open_at timestamptz,
    last_success_at timestamptz,
    last_failure_at timestamptz,
    created_at timestamptz not null default now(),
    updated_at timestamptz not null default now(),
    config_version bigint not null default 1,
    max_in_flight integer generated always as ((config -> 'max_in_flight')::integer) stored,
    rate_tokens double precision,
    rate_refilled_at timestamptz,
    release_rate double precision,
    release_before timestamptz,
    circuit_probe_id bigint,
    circuit_probe_attempt integer,
    circuit_window_started_at timestamptz,
    circuit_window_requests integer,
    circuit_window_failures integer,
    dead_notified_at timestamptz,
    last_error text
)
with (fillfactor = 50);

comment on table ulak.endpoints is 'where messages are delivered to: one row per receiver, with its configuration and the state of its circuit breaker';
comment on column ulak.endpoints.id is 'number of the endpoint; ulak.queue.endpoint_id refers to it';
comment on column ulak.endpoints.name is 'unique name, the one that ulak.send() is given';
comment on column ulak.endpoints.protocol is 'http (the worker delivers) or pull (external workers call ulak.claim())';
comment on column ulak.endpoints.config is 'how to reach the receiver. Validated key by key; {"$secret": "name"} stands for a value in ulak.secrets';
comment on column ulak.endpoints.retry_policy is 'overrides of the retry settings for this endpoint; null or a missing key means the setting';
comment on column ulak.endpoints.enabled is 'false: messages are accepted and held, none is claimed';
comment on column ulak.endpoints.description is 'free text for people';
comment on column ulak.endpoints.circuit_state is 'closed: traffic flows. open: nothing is claimed until circuit_half_open_at. half_open: one probe is under way';
comment on column ulak.endpoints.circuit_failure_count is 'consecutive failures that counted; any success sets it to 0';
comment on column ulak.endpoints.circuit_opened_at is 'when the breaker last opened; null while it is closed';
comment on column ulak.endpoints.circuit_half_open_at is 'when an open breaker may send its next probe';
comment on column ulak.endpoints.last_success_at is 'last delivery that succeeded, exact to about ten seconds';
comment on column ulak.endpoints.last_failure_at is 'last delivery that failed';
comment on column ulak.endpoints.created_at is 'when the endpoint was created';
comment on column ulak.endpoints.updated_at is 'when name, protocol, config, retry_policy or description last changed';
comment on column ulak.endpoints.config_version is 'rises with each change of config, retry_policy or a secret that the config names; workers cache by it';
comment on column ulak.endpoints.max_in_flight is 'the config''s max_in_flight, unpacked for the claim';
comment on column ulak.endpoints.rate_tokens is 'tokens left in the rate limit''s bucket at rate_refilled_at';
comment on column ulak.endpoints.rate_refilled_at is 'when rate_tokens was last computed';
comment on column ulak.endpoints.release_rate is 'messages a second while a held backlog is released by enable_endpoint(); null: no such limit';
comment on column ulak.endpoints.release_before is 'messages that were due before this are that backlog';
comment on column ulak.endpoints.circuit_probe_id is 'message that probes a half-open breaker';
comment on column ulak.endpoints.circuit_probe_attempt is 'attempt number of that probe, so that an older attempt of the same message doesn''t count';
comment on column ulak.endpoints.circuit_window_started_at is 'start of the breaker''s current window (failure-rate mode)';
comment on column ulak.endpoints.circuit_window_requests is 'outcomes counted in that window';
comment on column ulak.endpoints.dead_notified_at is 'last NOTIFY about dead letters: at most one a second';
comment on column ulak.endpoints.circuit_window_failures is 'failures among them';
comment on column ulak.endpoints.last_error is 'the error of last_failure_at';

-- Granted to nobody: only SECURITY DEFINER functions of the extension read it.
create table ulak.secrets (
    name text primary key,
    value text not null,
    previous_value text,
    previous_until timestamptz,
    created_at timestamptz not null default now(),
    updated_at timestamptz not null default now(),
    check ((previous_value is null) = (previous_until is null))
);

comment on table ulak.secrets is 'values that configs refer to as {"$secret": "name"}. No role may read it; write with ulak.set_secret() and ulak.rotate_secret()';
comment on column ulak.secrets.name is 'the name that a config uses';
comment on column ulak.secrets.value is 'the secret itself';
comment on column ulak.secrets.previous_value is 'the secret before the last rotation; it goes on signing until previous_until';
comment on column ulak.secrets.previous_until is 'end of the rotation''s grace';
comment on column ulak.secrets.created_at is 'when the secret was first set';
comment on column ulak.secrets.updated_at is 'when it was last set or rotated';
-- The queue: one row per message from send() until maintenance archives it.

create sequence ulak.queue_id_seq;

create table ulak.queue (
    id bigint primary key default nextval('ulak.queue_id_seq'),
    endpoint_id bigint not null,
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
    -- completed: complete -> here; delivered
    -- failed: fail, recovery -> here; a copy lies in ulak.dlq
    -- expired: mark_expired_messages -> here; expires_at passed before delivery
    status text not null default 'pending',
    payload jsonb not null,
    locked_by text,
    last_error text,
    idempotency_key text,
    payload_hash text,
    ordering_key text,
    headers jsonb,
    metadata jsonb,
    response jsonb,
    failure_history jsonb
    -- No check constraints: PostgreSQL reads them anew for each statement, and one was a third of what a send costs.
);

-- Each index is partial, so a message is in few of them at any time: two while it waits, two in flight, two when done.

-- What claim walks: a loose scan over (endpoint, priority), then the due rows of each in order.
create index queue_pending_idx on ulak.queue (endpoint_id, priority desc, next_retry_at, id)
    where status = 'pending';

-- What recovery, max_in_flight and the circuit breaker's probe look at.
create index queue_processing_idx on ulak.queue (endpoint_id, lease_until)
    where status = 'processing';

-- What maintenance archives, oldest first.
create index queue_finished_idx on ulak.queue (updated_at)
    where status in ('completed', 'failed', 'expired');

create index queue_expiry_idx on ulak.queue (expires_at)
    where status = 'pending' and expires_at is not null;

-- The head of an ordering key is its first row here.
create index queue_ordering_idx on ulak.queue (endpoint_id, ordering_key, id)
    where ordering_key is not null and status in ('pending', 'processing');

-- A delivered message keeps its key until it is archived: a client that repeats its request a moment after the delivery
-- must get the same answer as one that repeats it a moment before.
create unique index queue_idempotency_idx on ulak.queue (endpoint_id, idempotency_key)
    where idempotency_key is not null and status in ('pending', 'processing', 'completed');

-- Rows die fast here. Thresholds that follow the table's size would let a burst leave its corpses for hours.
alter table ulak.queue set (
    autovacuum_vacuum_scale_factor = 0.0,
    autovacuum_vacuum_threshold = 5000,
    autovacuum_vacuum_insert_scale_factor = 0.1,
    autovacuum_analyze_scale_factor = 0.1,
    autovacuum_vacuum_cost_delay = 0
);

-- Up to which id a send needs no look at the queue's size (positive), or until when the queue counts as full
-- (negative, milliseconds since 1970). A sequence, because it is read and set outside transactions: an application that
-- stays in its transaction neither hides the value from others nor blocks them.
create sequence ulak.queue_headroom minvalue -9223372036854775807 start 1;
select setval('ulak.queue_headroom', 0);

-- Up to this id a send rings: a worker sleeps. Unlogged, so that it costs neither WAL nor a wait for the disk; after a crash
-- nobody is asleep, and it has no value.
create unlogged sequence ulak.bell;

-- Keys whose next message was still uncommitted when their head was settled; claim looks again.
-- The same if another session held that message. A key may be here twice: were it unique, sessions that note it would
-- wait for each other.
create table ulak.ordering_wakeups (
    id bigint generated always as identity primary key,
    endpoint_id bigint not null,
    ordering_key text not null
);

comment on sequence ulak.queue_id_seq is 'ids of messages, in ulak.queue, ulak.dlq.original_message_id and ulak.archive alike';
comment on sequence ulak.queue_headroom is 'how far send() may go without counting the queue; private to ulak';
comment on sequence ulak.bell is 'up to which id a send wakes the worker; private to ulak';
comment on table ulak.ordering_wakeups is 'ordering keys to look at again; private to ulak';
comment on column ulak.ordering_wakeups.id is 'number of the note';
comment on column ulak.ordering_wakeups.endpoint_id is 'the endpoint of the key';
comment on column ulak.ordering_wakeups.ordering_key is 'the key whose head was settled';
comment on table ulak.queue is 'every message from send() until it is archived';
comment on column ulak.queue.id is 'returned by send()';
comment on column ulak.queue.endpoint_id is 'the endpoint it goes to (ulak.endpoints.id)';
comment on column ulak.queue.message_id is 'sent as webhook-id; the same in every retry and redrive, so a receiver can drop duplicates';
comment on column ulak.queue.next_retry_at is 'when it may next be tried; infinity while it waits behind an earlier message of its ordering key';
comment on column ulak.queue.created_at is 'start of the transaction that sent it';
comment on column ulak.queue.updated_at is 'last change of its state';
comment on column ulak.queue.lease_until is 'in flight: until when locked_by owns it; then recovery takes it back';
comment on column ulak.queue.processing_started_at is 'when it was last claimed';
comment on column ulak.queue.completed_at is 'when its delivery was settled';
comment on column ulak.queue.failed_at is 'when it went to the dead-letter queue';
comment on column ulak.queue.first_failed_at is 'first failure of this cycle; a redrive starts a new cycle';
comment on column ulak.queue.scheduled_at is 'not before this time, as asked for by the sender';
comment on column ulak.queue.expires_at is 'not after this time, as asked for by the sender';
comment on column ulak.queue.correlation_id is 'the sender''s own id for a conversation; sent along';
comment on column ulak.queue.generation is 'claim can be limited to one generation of workers; set by redrive';
comment on column ulak.queue.attempts is 'claims started, also by workers that died: the fencing token, it only rises';
comment on column ulak.queue.retry_count is 'budget used: reported failures and expired leases';
comment on column ulak.queue.priority is '0 to 10, higher first';
comment on column ulak.queue.status is 'pending, processing, completed, failed or expired';
comment on column ulak.queue.payload is 'the body; it can''t be changed once sent';
comment on column ulak.queue.locked_by is 'in flight: the worker that claimed it';
comment on column ulak.queue.last_error is 'last failure; starts with [RETRYABLE], [PERMANENT] or [DISABLE]';
comment on column ulak.queue.idempotency_key is 'one message per endpoint and key until it is archived';
comment on column ulak.queue.payload_hash is 'sha256 of the payload''s text, where an idempotency key was given';
comment on column ulak.queue.ordering_key is 'messages of one endpoint and key are delivered in commit order, one at a time';
comment on column ulak.queue.headers is 'extra request headers';
comment on column ulak.queue.metadata is 'the sender''s own notes; never sent';
comment on column ulak.queue.response is 'what the receiver answered, if capture_response is on';
comment on column ulak.queue.failure_history is 'earlier failed cycles, newest last, at most 20';
-- The dead-letter queue: messages that ulak gave up on, until retention removes them.

create table ulak.dlq (
    id bigint primary key generated always as identity,
    original_message_id bigint not null,
    endpoint_id bigint not null,
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
    payload jsonb not null,
    last_error text,
    idempotency_key text,
    payload_hash text,
    ordering_key text,
    headers jsonb,
    metadata jsonb,
    response jsonb,
    failure_history jsonb,
    redriven_by text,
    constraint dlq_status_is_known check (
        status in (
            'failed',  -- fail, recovery -> here; waits for an operator
            'redriven' -- redrive -> here; a new message is in ulak.queue, this row is the audit trail
        )
    )
);

create index dlq_failed_idx on ulak.dlq (endpoint_id, original_message_id) where status = 'failed';
create index dlq_retention_idx on ulak.dlq (archived_at);
create index dlq_original_message_idx on ulak.dlq (original_message_id);

comment on table ulak.dlq is 'messages that could not be delivered, with all that is needed to send them again';
comment on column ulak.dlq.id is 'what redrive_message() takes';
comment on column ulak.dlq.original_message_id is 'its id in ulak.queue';
comment on column ulak.dlq.endpoint_id is 'the endpoint it was for';
comment on column ulak.dlq.message_id is 'sent as webhook-id; kept by a redrive';
comment on column ulak.dlq.original_created_at is 'when it was sent';
comment on column ulak.dlq.failed_at is 'when ulak gave up';
comment on column ulak.dlq.archived_at is 'when it entered this table; dlq_retention_days counts from here';
comment on column ulak.dlq.first_failed_at is 'first failure of the last cycle';
comment on column ulak.dlq.scheduled_at is 'as sent';
comment on column ulak.dlq.expires_at is 'as sent; a redrive clears it';
comment on column ulak.dlq.redriven_at is 'when it was put back into the queue';
comment on column ulak.dlq.redriven_message_id is 'its new id in ulak.queue';
comment on column ulak.dlq.correlation_id is 'as sent';
comment on column ulak.dlq.generation is 'as it was when it failed';
comment on column ulak.dlq.attempts is 'claims started in the last cycle';
comment on column ulak.dlq.retry_count is 'budget used in the last cycle';
comment on column ulak.dlq.priority is 'as sent';
comment on column ulak.dlq.status is 'failed, or redriven';
comment on column ulak.dlq.endpoint_name is 'the endpoint''s name when it failed';
comment on column ulak.dlq.protocol is 'the endpoint''s protocol when it failed';
comment on column ulak.dlq.payload is 'as sent';
comment on column ulak.dlq.last_error is 'why ulak gave up';
comment on column ulak.dlq.idempotency_key is 'as sent; a redrive clears it';
comment on column ulak.dlq.payload_hash is 'as in ulak.queue';
comment on column ulak.dlq.ordering_key is 'as sent';
comment on column ulak.dlq.headers is 'as sent';
comment on column ulak.dlq.metadata is 'as sent';
comment on column ulak.dlq.response is 'the last answer, if capture_response is on';
comment on column ulak.dlq.failure_history is 'earlier failed cycles, newest last, at most 20';
comment on column ulak.dlq.redriven_by is 'who put it back';
-- The archive: finished messages by month of creation, until retention drops the month.

create table ulak.archive (
    like ulak.queue including comments including defaults,
    archived_at timestamptz not null default now()
) partition by range (created_at);

alter table ulak.archive alter column id drop default;

create table ulak.archive_default partition of ulak.archive default;

-- Each partition has these two indexes of its own (ulak._create_archive_table() makes those of the months), and the
-- parent has none: pg_dump writes the months' indexes out, and a parent that has them already, because CREATE EXTENSION
-- made it, would have given them to the months by then. The restore would stop at "already exists".

-- Months are written once and read by time: a block range index is a fraction of a B-tree and as good for that.
create index archive_default_created_at_idx on ulak.archive_default using brin (created_at)
    with (pages_per_range = 64, autosummarize = on);

-- replay_message() and explain() look a message up by id.
create index archive_default_id_idx on ulak.archive_default (id);

comment on table ulak.archive is 'finished messages in monthly partitions archive_YYYY_MM (UTC)';
comment on column ulak.archive.archived_at is 'when it left ulak.queue';
comment on table ulak.archive_default is 'messages whose month has no partition yet; maintenance moves them';
-- What maintenance did last, step by step, and which cluster these messages belong to.

create table ulak.maintenance_runs (
    step text primary key,
    started_at timestamptz not null,
    duration interval not null,
    rows bigint not null,
    finished boolean not null,
    last_error text,
    last_error_at timestamptz,
    runs bigint not null,
    errors bigint not null,
    total_rows bigint not null
) with (fillfactor = 50);

-- A dump carries this table. Restored into another cluster, it names a cluster that isn't this one: messages are held
-- until ulak.adopt(). There is no unique constraint, because a restore adds to what the installation wrote.
create table ulak.cluster_identity (
    system_identifier bigint not null,
    recorded_at timestamptz not null default now()
);

-- A dump that is being restored (it turns row_security off) brings the row of its own cluster.
insert into ulak.cluster_identity (system_identifier)
select c.system_identifier
from pg_catalog.pg_control_system() c
where current_setting('row_security')::boolean;

comment on table ulak.maintenance_runs is 'last run of each step of run_maintenance()';
comment on column ulak.maintenance_runs.step is 'name of the step';
comment on column ulak.maintenance_runs.started_at is 'when its last run began';
comment on column ulak.maintenance_runs.duration is 'how long that took, all batches together';
comment on column ulak.maintenance_runs.rows is 'messages, rows or partitions that it changed';
comment on column ulak.maintenance_runs.finished is 'false: it ran out of time and goes on in the next run';
comment on column ulak.maintenance_runs.last_error is 'last error of this step, also after later runs that went well';
comment on column ulak.maintenance_runs.last_error_at is 'when that was';
comment on column ulak.maintenance_runs.runs is 'how often it ran';
comment on column ulak.maintenance_runs.errors is 'how many of its runs ended in an error';
comment on column ulak.maintenance_runs.total_rows is 'what it changed in all its runs';
comment on table ulak.cluster_identity is 'cluster that delivers these messages; another cluster''s identifier in it means that they are held until adopt()';
comment on column ulak.cluster_identity.system_identifier is 'as in pg_control_system()';
comment on column ulak.cluster_identity.recorded_at is 'when it was written';
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
    created_at timestamptz not null default now()
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

comment on table ulak.event_log is 'what happened to endpoints, settings and messages. Holds no payload, no config and no secret';
comment on column ulak.event_log.id is 'number of the entry';
comment on column ulak.event_log.event is 'what happened, such as circuit.opened, setting.changed or message.dead';
comment on column ulak.event_log.endpoint_id is 'the endpoint concerned, if any; it may have been dropped since';
comment on column ulak.event_log.endpoint_name is 'its name at that time';
comment on column ulak.event_log.message_id is 'ulak.queue.id of the message concerned, if any';
comment on column ulak.event_log.old_value is 'state before, where something changed';
comment on column ulak.event_log.new_value is 'state after';
comment on column ulak.event_log.detail is 'further facts';
comment on column ulak.event_log.actor is 'session user who caused it';
comment on column ulak.event_log.created_at is 'when it happened';
-- What administrators look back at: failed attempts, and the size of the backlog minute by minute.

-- One row per attempt that failed, written with the failure itself; the last, successful one is in the message's own row.
create table ulak.attempts (
    message_id bigint not null,
    attempt integer not null,
    started_at timestamptz not null,
    ended_at timestamptz not null,
    error text not null,
    primary key (message_id, attempt)
);

create index attempts_ended_at_idx on ulak.attempts (ended_at);

-- Counting a long backlog takes time in proportion to it, so maintenance counts once a minute and others read the result.
create table ulak.backlog_samples (
    endpoint_id bigint not null,
    sampled_at timestamptz not null,
    waiting bigint not null,
    dead bigint not null,
    oldest_id bigint,
    primary key (endpoint_id, sampled_at)
);

create index backlog_samples_sampled_at_idx on ulak.backlog_samples (sampled_at);

-- All endpoints together, so that a chart of the last hours doesn't add up every minute of every endpoint.
create table ulak.traffic (
    minute timestamptz primary key,
    delivered bigint not null default 0,
    failed bigint not null default 0,
    latency_histogram bigint[] not null default '{}',
    waiting bigint
) with (fillfactor = 50);

-- Counters that only rise, as Prometheus wants them: ulak.endpoint_stats forgets.
create table ulak.endpoint_totals (
    endpoint_id bigint primary key,
    delivered bigint not null default 0,
    failed bigint not null default 0,
    latency_total_ms double precision not null default 0,
    latency_histogram bigint[] not null default '{}'
) with (fillfactor = 50);

-- Replays of a range are logged once, not once per message: this leads to the entry.
create index event_log_replays_idx on ulak.event_log (created_at)
    where event in ('message.replayed', 'messages.replayed');

comment on table ulak.attempts is 'attempts that failed, for event_log_retention_days; ulak.history() shows them with the successful ones';
comment on column ulak.attempts.message_id is 'ulak.queue.id of the message';
comment on column ulak.attempts.attempt is 'number of the attempt, as in ulak.queue.attempts';
comment on column ulak.attempts.started_at is 'when it was claimed';
comment on column ulak.attempts.ended_at is 'when the failure was settled, or found by recovery';
comment on column ulak.attempts.error is 'what ulak.queue.last_error was after it';
comment on table ulak.backlog_samples is 'messages that wait and dead letters per endpoint, counted by maintenance every minute, for stats_retention_days';
comment on column ulak.backlog_samples.endpoint_id is 'the endpoint';
comment on column ulak.backlog_samples.sampled_at is 'when they were counted';
comment on column ulak.backlog_samples.waiting is 'messages that were pending';
comment on column ulak.backlog_samples.dead is 'dead letters that nobody has redriven';
comment on column ulak.backlog_samples.oldest_id is 'lowest id of those that were pending';
comment on table ulak.traffic is 'all endpoints together, summed up by maintenance every minute, for stats_retention_days; the last five minutes may still change';
comment on column ulak.traffic.minute is 'start of the minute';
comment on column ulak.traffic.delivered is 'messages delivered';
comment on column ulak.traffic.failed is 'attempts that failed';
comment on column ulak.traffic.latency_histogram is 'requests by time: element i counts those from 2^(i-2) to 2^(i-1) ms';
comment on column ulak.traffic.waiting is 'messages that were pending when maintenance last counted';
comment on table ulak.endpoint_totals is 'deliveries per endpoint since it was created; only rises';
comment on column ulak.endpoint_totals.endpoint_id is 'the endpoint';
comment on column ulak.endpoint_totals.delivered is 'messages delivered';
comment on column ulak.endpoint_totals.failed is 'attempts that failed';
comment on column ulak.endpoint_totals.latency_total_ms is 'sum of the requests'' times';
comment on column ulak.endpoint_totals.latency_histogram is 'requests by time: element i counts those from 2^(i-2) to 2^(i-1) ms';
-- What workers tell about themselves and their deliveries.

-- One row per worker slot, taken over by the next run of the slot.
create table ulak.workers (
    slot integer primary key,
    name text not null,
    pid integer not null,
    state text not null,
    started_at timestamptz not null,
    last_activity timestamptz not null,
    heartbeat_at timestamptz not null,
    in_flight integer not null default 0,
    messages_processed bigint not null default 0,
    error_count bigint not null default 0,
    last_error text,
    stop_requested_at timestamptz,
    is_scheduled boolean not null default false,
    version text not null,
    constraint workers_state_is_known check (
        state in (
            'running', -- run_worker -> here
            'stopped'  -- left in good order; a row that says running and whose heartbeat is old died
        )
    )
);

-- What start() and stop() last asked for: one row, or none before the first start().
create table ulak.schedule (
    is_only boolean primary key default true check (is_only),
    workers integer not null,
    changed_at timestamptz not null default clock_timestamp()
);

-- Per endpoint and minute; workers add to it about once a second, so it never slows a settle.
create table ulak.endpoint_stats (
    endpoint_id bigint not null,
    minute timestamptz not null,
    delivered bigint not null default 0,
    failed bigint not null default 0,
    latency_total_ms double precision not null default 0,
    latency_histogram bigint[] not null default '{}',
    primary key (endpoint_id, minute)
) with (fillfactor = 50);

create index endpoint_stats_minute_idx on ulak.endpoint_stats (minute);

-- A consumer's inbox: keys that it has handled.
create table ulak.handled (
    consumer text not null,
    key text not null,
    handled_at timestamptz not null default now(),
    primary key (consumer, key)
);

create index handled_at_idx on ulak.handled (handled_at);

comment on table ulak.workers is 'worker slots and who runs them';
comment on column ulak.workers.slot is 'number of the slot, from 1';
comment on column ulak.workers.name is 'what it writes into ulak.queue.locked_by';
comment on column ulak.workers.pid is 'backend that runs it';
comment on column ulak.workers.state is 'running or stopped';
comment on column ulak.workers.started_at is 'when this run began';
comment on column ulak.workers.last_activity is 'last claim or settle that moved a message';
comment on column ulak.workers.heartbeat_at is 'last sign of life';
comment on column ulak.workers.in_flight is 'requests under way at the last sign of life';
comment on column ulak.workers.messages_processed is 'messages settled by this slot, all runs together';
comment on column ulak.workers.error_count is 'failed deliveries of this slot, all runs together';
comment on column ulak.workers.last_error is 'last failed delivery or error of the worker';
comment on column ulak.workers.stop_requested_at is 'set by stop(): the worker leaves when it sees it';
comment on column ulak.workers.is_scheduled is 'pg_cron runs it for start(), and not somebody else';
comment on column ulak.workers.version is 'version of the extension that it runs';
comment on table ulak.schedule is 'what start() and stop() last asked for; private to ulak';
comment on column ulak.schedule.is_only is 'true: there is one row';
comment on column ulak.schedule.changed_at is 'when that was';
comment on column ulak.schedule.workers is 'how many workers pg_cron is to run; 0 after stop()';
comment on table ulak.endpoint_stats is 'deliveries per endpoint and minute';
comment on column ulak.endpoint_stats.endpoint_id is 'the endpoint';
comment on column ulak.endpoint_stats.minute is 'start of the minute';
comment on column ulak.endpoint_stats.delivered is 'messages delivered';
comment on column ulak.endpoint_stats.failed is 'attempts that failed';
comment on column ulak.endpoint_stats.latency_total_ms is 'sum of the requests'' times';
comment on column ulak.endpoint_stats.latency_histogram is 'requests by time: bucket i counts those below 2^i ms';
comment on table ulak.handled is 'keys that mark_handled() has seen';
comment on column ulak.handled.consumer is 'who handled it';
comment on column ulak.handled.key is 'what was handled';
comment on column ulak.handled.handled_at is 'when';
-- What pg_dump carries: every table and sequence of the extension. Without this list it would silently lose the queue.

do $plpgsql$
declare
    v_relation regclass;
begin
    for v_relation in
        select c.oid
        from pg_catalog.pg_class c
        where c.relnamespace = 'ulak'::regnamespace and c.relkind in ('r', 'S')
        order by c.relname
    loop
        perform pg_catalog.pg_extension_config_dump(
            v_relation,
            case
                -- Who worked in one cluster, and what maintenance last did there, says nothing in another.
                when v_relation in ('ulak.workers'::regclass, 'ulak.schedule'::regclass, 'ulak.maintenance_runs'::regclass)
                    then 'where false'
                -- ulak's own events are code: the restored extension has them already.
                when v_relation = 'ulak.event_types'::regclass then $$where not starts_with(name, 'ulak.')$$
                else ''
            end
        );
    end loop;
end
$plpgsql$;
-- The Python of the extension, generated by plpython/embed.py.

create or replace function ulak._python_source()
returns table (module text, source text)
language sql
immutable
set search_path = pg_catalog, pg_temp
as $source$
values
('ulak', $module$"""The Python of the extension: it runs inside a PostgreSQL backend, imported by ulak._load_python()."""
$module$),
('ulak.address', $module$"""Which addresses may be dialled: an explicit list, since Python's is_global lets several of these through."""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

# The first match names the rule, so single addresses stand before the ranges around them.
_RULES: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "cloud metadata",
        ("169.254.169.254/32", "169.254.170.2/32", "100.100.100.200/32", "168.63.129.16/32", "fd00:ec2::/32"),
    ),
    ("this host", ("0.0.0.0/8", "::/128")),
    ("loopback", ("127.0.0.0/8", "::1/128")),
    ("private network", ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16")),
    ("carrier-grade NAT", ("100.64.0.0/10",)),
    ("link-local", ("169.254.0.0/16", "fe80::/10")),
    ("documentation", ("192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24", "2001:db8::/32", "3fff::/20")),
    ("benchmarking", ("198.18.0.0/15", "2001:2::/48")),
    ("6to4", ("192.88.99.0/24", "2002::/16")),
    ("special purpose", ("192.0.0.0/24", "100::/64", "5f00::/16")),
    ("multicast", ("224.0.0.0/4", "ff00::/8")),
    ("reserved", ("240.0.0.0/4",)),
    ("IPv4-mapped", ("::ffff:0:0/96",)),
    ("IPv4-compatible", ("::/96",)),
    ("IPv4-translated", ("::ffff:0:0:0/96",)),
    ("NAT64", ("64:ff9b::/96", "64:ff9b:1::/48")),
    ("Teredo", ("2001::/32",)),
    ("special purpose", ("2001::/23",)),
    ("unique local", ("fc00::/7",)),
    ("site-local", ("fec0::/10",)),
)
_BLOCKED: tuple[tuple[str, Network], ...] = tuple(
    (rule, ip_network(network)) for rule, networks in _RULES for network in networks
)
# Everything that IANA hasn't given out as global unicast.
_GLOBAL_UNICAST_6 = IPv6Network("2000::/3")


def networks(values: Iterable[str]) -> tuple[Network, ...]:
    """The allow list, parsed; a network with host bits set is taken as its network."""
    return tuple(ip_network(value.strip(), strict=False) for value in values if value.strip())


def _rule(address: Address) -> str | None:
    for rule, network in _BLOCKED:
        if address.version == network.version and address in network:
            return f"{rule}, {network}"
    if isinstance(address, IPv6Address) and address not in _GLOBAL_UNICAST_6:
        return "reserved, outside 2000::/3"
    return None


class Guard:
    """Judges the address that is about to be dialled, never the text of a URL."""

    def __init__(self, allow_internal: bool = False, allowed: Iterable[str] = ()) -> None:
        self._allow_internal = allow_internal
        self._allowed = networks(allowed)

    def blocked_by(self, text: str) -> str | None:
        """The name of the rule that forbids this address, or None."""
        if self._allow_internal:
            return None
        try:
            address = ip_address(text)
        except ValueError:
            return "not an IP address"
        if isinstance(address, IPv6Address) and address.scope_id is not None:
            address = IPv6Address(int(address))
        if any(address.version == network.version and address in network for network in self._allowed):
            return None
        return _rule(address)
$module$),
('ulak.authorization', $module$"""The Authorization header of basic and bearer authentication."""

from __future__ import annotations

from base64 import b64encode

from ulak.model import Basic, Bearer


def value(auth: Basic | Bearer) -> str:
    if isinstance(auth, Bearer):
        return f"Bearer {auth.token}"
    return "Basic " + b64encode(f"{auth.username}:{auth.password}".encode()).decode()
$module$),
('ulak.batch', $module$"""Several messages of one endpoint in one request: a JSON array, or a CloudEvents batch."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence

from ulak import cloudevents
from ulak.model import Endpoint, Message

# A fixed namespace makes a batch's id a function of its messages' ids.
_NAMESPACE = uuid.UUID("6f1a8c1e-6a3d-5c0b-9c3f-0b7a5b8f2d11")
# Receivers commonly refuse bodies above a few megabytes.
MAX_BODY = 4 * 1024 * 1024


def group(endpoint: Endpoint, messages: Iterable[Message], max_body: int = MAX_BODY) -> list[list[Message]]:
    """Requests to make of these messages, in order; messages with different headers don't share one."""
    if endpoint.batch_size <= 1:
        return [[message] for message in messages]
    groups: list[list[Message]] = []
    size = 0
    for message in messages:
        length = len(message.payload)
        last = groups[-1] if groups else None
        if (
            last is not None
            and len(last) < endpoint.batch_size
            and last[0].headers == message.headers
            and size + length <= max_body
        ):
            last.append(message)
            size += length
        else:
            groups.append([message])
            size = length
    return groups


def request_id(messages: Sequence[Message]) -> str:
    """webhook-id of the request: the message's own, or one that the same messages give again."""
    if len(messages) == 1:
        return messages[0].message_id
    return str(uuid.uuid5(_NAMESPACE, ",".join(message.message_id for message in messages)))


def body(endpoint: Endpoint, messages: Sequence[Message]) -> tuple[str, str | None]:
    """Body and content type; None leaves the endpoint's own."""
    if endpoint.batch_format == "cloudevents" and endpoint.cloudevents is not None:
        events = [cloudevents.structured(endpoint.cloudevents, message) for message in messages]
        return "[" + ",".join(events) + "]", cloudevents.BATCH
    return "[" + ",".join(message.payload for message in messages) + "]", None
$module$),
('ulak.bell', $module$"""The bell: waiting until a sender has committed, together with everything else that the kernel can tell of.

A sender's NOTIFY reaches this process as SIGUSR1, like all messages between backends. While the worker listens the
signal is held back, and a descriptor tells that there is one. So none is missed between a claim and the wait that
follows. What the notification says is never read: that there was one is enough.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal

_SIGSET_BYTES = 128
_BLOCK = int(signal.SIG_BLOCK)
_UNBLOCK = int(signal.SIG_UNBLOCK)


class Bell:
    def __init__(self) -> None:
        library = ctypes.CDLL(None, use_errno=True)
        self._signals = ctypes.create_string_buffer(_SIGSET_BYTES)
        library.sigaddset(self._signals, int(signal.SIGUSR1))
        # Not that of Python's signal module, which makes objects of all signals of the mask before.
        self._set_mask = library.pthread_sigmask
        self._descriptor: int = library.signalfd(-1, self._signals, os.O_CLOEXEC | os.O_NONBLOCK)
        if self._descriptor < 0:
            raise OSError(ctypes.get_errno(), "no signalfd")
        self._poll = select.poll()
        self._poll.register(self._descriptor, select.POLLIN)
        self.is_held = False

    def fileno(self) -> int:
        """Readable when it has rung while it was held."""
        return self._descriptor

    def hold(self) -> None:
        """Rings are kept from now on, until rang() asks."""
        self._set_mask(_BLOCK, self._signals, None)
        self.is_held = True

    def rang(self, seconds: float = 0) -> bool:
        """Whether it has rung since the last time, or does within so many seconds. PostgreSQL gets its signals then.
        Other sessions may wait for that, so it is to be asked often."""
        if not self._poll.poll(seconds * 1000):
            return False
        self._set_mask(_UNBLOCK, self._signals, None)
        if self.is_held:
            self._set_mask(_BLOCK, self._signals, None)
        return True

    def let_go(self) -> None:
        self._set_mask(_UNBLOCK, self._signals, None)
        self.is_held = False

    def close(self) -> None:
        self.let_go()
        os.close(self._descriptor)
$module$),
('ulak.chart', $module$"""Charts as inline SVG: bars, lines and sparklines, coloured by the page's style."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from ulak import wording
from ulak.markup import Markup, tag

Values = Sequence[float | None]


class Series(NamedTuple):
    name: str
    # The class that gives it its colour.
    style: str
    values: Values


class Frame(NamedTuple):
    """Where the data goes: the plot's edges, and the value at its top."""

    width: float
    height: float
    most: float
    left: float = 52
    right: float = 6
    top: float = 10
    bottom: float = 24

    def x(self, place: float) -> float:
        """place from 0 to 1"""
        return self.left + (self.width - self.left - self.right) * place

    def y(self, value: float) -> float:
        share = value / self.most if self.most else 0
        return self.height - self.bottom - (self.height - self.top - self.bottom) * share


def bars(
    label: str,
    times: Sequence[datetime.datetime],
    series: Sequence[Series],
    tell: Callable[[float], str],
    width: float = 1120,
    height: float = 220,
) -> Markup:
    """Stacked, the first at the bottom. Each place says its values when pointed at."""
    sums = [sum(each.values[i] or 0 for each in series) for i in range(len(times))]
    frame = _frame(width, height, max(sums, default=0))
    step = frame.x(1 / len(times)) - frame.x(0)
    columns = []
    for i, moment in enumerate(times):
        below = 0.0
        parts = []
        for each in series:
            value = each.values[i] or 0
            if value:
                # What is there at all is at least a hair high.
                top, foot = frame.y(below + value), frame.y(below)
                parts.append(
                    _bar(frame.x(i / len(times)) + step * 0.12, min(top, foot - 1), step * 0.76, foot, each.style)
                )
                below += value
        columns.append(_column(frame, i, len(times), _said(moment, series, i, tell), *parts))
    return _chart(label, frame, times, tell, *columns)


def lines(
    label: str,
    times: Sequence[datetime.datetime],
    series: Sequence[Series],
    tell: Callable[[float], str],
    least: float = 0,
    width: float = 552,
    height: float = 200,
) -> Markup:
    """The last series is filled down to the axis. Where a value is missing the line has a gap. The scale ends no lower
    than at `least`."""
    known = (value for each in series for value in each.values if value is not None)
    frame = _frame(width, height, max(least, max(known, default=0)))
    drawn = []
    for number, each in enumerate(reversed(series)):
        for run in _runs(each.values):
            points = [(frame.x((i + 0.5) / len(times)), frame.y(value)) for i, value in run]
            path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
            if number == 0:
                foot = frame.y(0)
                drawn.append(
                    tag(
                        "path",
                        class_=f"area {each.style}",
                        d=f"{path}L{points[-1][0]:.1f} {foot:.1f}L{points[0][0]:.1f} {foot:.1f}Z",
                    )
                )
            if len(points) == 1:
                drawn.append(tag("circle", class_=f"dot {each.style}", cx=points[0][0], cy=points[0][1], r=2.5))
            else:
                drawn.append(tag("path", class_=f"line {each.style}", d=path))
    columns = [_column(frame, i, len(times), _said(moment, series, i, tell)) for i, moment in enumerate(times)]
    return _chart(label, frame, times, tell, *drawn, *columns)


def sparkline(label: str, values: Sequence[float], width: float = 120, height: float = 26) -> Markup:
    """One path for all bars: a page has a thousand of them."""
    most = max(values, default=0)
    step = width / max(len(values), 1)
    bars, gaps = "", ""
    for i, value in enumerate(values):
        high = max(1.5, (height - 2) * value / most) if value else 1.0
        bar = f"M{i * step + step * 0.15:.1f} {height:g}v-{high:.1f}h{step * 0.7:.1f}v{high:.1f}z"
        if value:
            bars += bar
        else:
            gaps += bar
    return tag(
        "svg",
        bars and tag("path", class_="spark", d=bars),
        gaps and tag("path", class_="spark none", d=gaps),
        class_="sparkline",
        viewBox=f"0 0 {width:g} {height:g}",
        role="img",
        aria_label=label,
    )


def meter(share: float, style: str) -> Markup:
    """A bar in a row of a table; at least visible if it isn't nothing."""
    wide = 0 if share <= 0 else max(1.5, min(share, 1) * 100)
    return tag("span", tag("span", class_=style, style=f"width:{wide:.1f}%"), class_="meter")


def _frame(width: float, height: float, most: float) -> Frame:
    return Frame(width, height, ticks(most)[-1])


def ticks(most: float) -> list[float]:
    """From 0 to the first round number that isn't below `most`, in three to six steps."""
    if most <= 0:
        return [0, 1]
    raw = most / 4
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * size for factor in (1, 2, 2.5, 5, 10) if factor * size >= raw * 0.999)
    return [step * i for i in range(math.ceil(most / step - 1e-9) + 1)]


def _chart(
    label: str, frame: Frame, times: Sequence[datetime.datetime], tell: Callable[[float], str], *drawn: Markup
) -> Markup:
    grid = []
    for value in ticks(frame.most):
        y = frame.y(value)
        grid.append(
            tag("line", class_="grid" if value else "axis", x1=frame.left, x2=frame.width - frame.right, y1=y, y2=y)
        )
        grid.append(tag("text", tell(value), class_="tick", x=frame.left - 8, y=y + 3.5, text_anchor="end"))
    for place, moment in _hours(times):
        grid.append(
            tag(
                "text", wording.clock(moment), class_="tick", x=frame.x(place), y=frame.height - 6, text_anchor="middle"
            )
        )
    return tag(
        "svg",
        *grid,
        *drawn,
        class_="chart wide" if frame.width > 800 else "chart",
        viewBox=f"0 0 {frame.width:g} {frame.height:g}",
        role="img",
        aria_label=label,
    )


def _hours(times: Sequence[datetime.datetime]) -> Iterator[tuple[float, datetime.datetime]]:
    """Full hours, or every second, third and so on, that leave room for their labels: at most eight."""
    if len(times) < 2:
        return
    step = (times[1] - times[0]).total_seconds()
    span = step * len(times)
    every = next(hours for hours in (0.25, 0.5, 1, 2, 3, 4, 6, 12, 24, 48) if span / 3600 / hours <= 8) * 3600
    moment = math.ceil(times[0].timestamp() / every) * every
    while moment < times[0].timestamp() + span:
        place = (moment - times[0].timestamp()) / span
        if 0.015 < place < 0.985:
            yield place, datetime.datetime.fromtimestamp(moment, datetime.UTC)
        moment += every


def _column(frame: Frame, place: int, count: int, said: str, *bars: Markup) -> Markup:
    """What is drawn at one time, and the area that answers when pointed at."""
    area = _bar(frame.x(place / count), frame.top, frame.x(1 / count) - frame.x(0), frame.y(0), "touch", round=False)
    return Markup(f'<g class="column">{tag("title", said)}{area}{"".join(bars)}</g>')


def _bar(x: float, top: float, width: float, foot: float, style: str, round: bool = True) -> Markup:
    """Numbers and a name of ours need no escaping: a page has hundreds of these."""
    corner = f' rx="{min(1.5, width / 3):.1f}"' if round else ""
    return Markup(
        f'<rect class="{style}" x="{x:.1f}" y="{top:.1f}" width="{width:.1f}" height="{foot - top:.1f}"{corner}/>'
    )


def _said(moment: datetime.datetime, series: Sequence[Series], place: int, tell: Callable[[float], str]) -> str:
    found = [(each.name, each.values[place]) for each in series]
    return f"{wording.clock(moment)} UTC: " + ", ".join(
        f"{name} {'none' if value is None else tell(value)}" for name, value in found
    )


def _runs(values: Values) -> Iterator[list[tuple[int, float]]]:
    run: list[tuple[int, float]] = []
    for i, value in enumerate(values):
        if value is not None:
            run.append((i, value))
        elif run:
            yield run
            run = []
    if run:
        yield run
$module$),
('ulak.cloudevents', $module$"""CloudEvents 1.0: a message as a structured event, or its attributes as ce- headers."""

from __future__ import annotations

import json
import re
from urllib.parse import quote

from ulak.model import CloudEvents, Message

DEFAULT_TYPE = "ulak.message"
STRUCTURED = "application/cloudevents+json"
BATCH = "application/cloudevents-batch+json"

# What the HTTP binding leaves as it is in a header: printable ASCII but space, double quote and percent.
_PLAIN = "".join(chr(code) for code in range(0x21, 0x7F) if chr(code) not in '"%')
_OFFSET = re.compile(r"([+-]\d\d)(:?)(\d\d)?$")


def attributes(config: CloudEvents, message: Message, traceparent: str | None = None) -> dict[str, str]:
    """Context attributes; partitionkey and traceparent are extensions that the specification documents."""
    found = {
        "specversion": "1.0",
        "id": message.message_id,
        "source": config.source,
        "type": config.type or _event_type(message) or DEFAULT_TYPE,
        "datacontenttype": "application/json",
    }
    if message.created_at:
        found["time"] = rfc3339(message.created_at)
    if message.ordering_key:
        found["partitionkey"] = message.ordering_key
    if message.correlation_id:
        found["correlationid"] = message.correlation_id
    if traceparent:
        found["traceparent"] = traceparent
    return found


def structured(config: CloudEvents, message: Message, traceparent: str | None = None) -> str:
    """The event as JSON text; the payload is JSON text already and goes in as it is."""
    head = json.dumps(attributes(config, message, traceparent), ensure_ascii=False, separators=(",", ":"))
    return f'{head[:-1]},"data":{message.payload}}}'


def binary_headers(config: CloudEvents, message: Message, traceparent: str | None = None) -> dict[str, str]:
    """ce- headers; datacontenttype travels as content-type, the payload as the body."""
    found = attributes(config, message, traceparent)
    del found["datacontenttype"]
    return {f"ce-{name}": quote(value, safe=_PLAIN) for name, value in found.items()}


def rfc3339(timestamp: str) -> str:
    """PostgreSQL's text of a timestamptz in the form that CloudEvents asks for."""
    text = timestamp.replace(" ", "T", 1)
    offset = _OFFSET.search(text, 11)
    if offset is None:
        return text if text.endswith("Z") else text + "Z"
    return f"{text[: offset.start()]}{offset[1]}:{offset[3] or '00'}"


def _event_type(message: Message) -> str | None:
    if not message.metadata:
        return None
    metadata = json.loads(message.metadata)
    found = metadata.get("event_type") if isinstance(metadata, dict) else None
    return found if isinstance(found, str) and found else None
$module$),
('ulak.courier', $module$"""From message to outcome: builds the request, fetches a token if one is needed, sends, and judges the answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ulak import oauth, request, verdict
from ulak.http import Transport
from ulak.model import Endpoint, Finished, Message, MessageError, OAuth2, Outcome


class Delivery(NamedTuple):
    """Messages that travel in one request, and how far they are."""

    endpoint: Endpoint
    messages: Sequence[Message]
    token: str | None = None
    # Set once the token was refused and asked for again: it happens once per delivery.
    renewed: bool = False


class Settled(NamedTuple):
    endpoint_id: int
    messages: Sequence[Message]
    outcome: Outcome


class _TokenRequest(NamedTuple):
    auth: OAuth2


class Courier:
    """send() messages, step() until each delivery has come back as exactly one Settled."""

    def __init__(self, transport: Transport, clock: Callable[[], float] = time.time) -> None:
        self._transport = transport
        self._clock = clock
        self._tokens = oauth.TokenCache()
        self._waiting: dict[OAuth2, list[Delivery]] = {}
        self._settled: list[Settled] = []
        # Deliveries, not requests: those that wait for a token count too.
        self.in_flight = 0

    def wake_on(self, descriptor: int) -> None:
        """step() also ends when this can be read; was_woken tells."""
        self._transport.wake_on(descriptor)

    @property
    def was_woken(self) -> bool:
        return self._transport.was_woken

    def send(self, endpoint: Endpoint, messages: Sequence[Message]) -> None:
        """Starts one delivery: one message, or one group of batch.group()."""
        self.in_flight += 1
        delivery = Delivery(endpoint, messages)
        if isinstance(endpoint.auth, OAuth2):
            self._send_with_token(endpoint.auth, delivery)
        else:
            self._start(delivery, self._clock())

    def step(self, max_wait: float) -> list[Settled]:
        """Deliveries that ended, after at most max_wait seconds (and 0.1)."""
        finished = self._transport.step(0 if self._settled else max_wait)
        if finished:
            now = self._clock()
            for each in finished:
                self._arrive(each, now)
        settled = self._settled
        if settled:
            self._settled = []
            self.in_flight -= len(settled)
        return settled

    def _arrive(self, finished: Finished, now: float) -> None:
        tag = finished.request.tag
        if isinstance(tag, Delivery):
            endpoint = tag.endpoint
            if finished.status == 401 and tag.token is not None and not tag.renewed:
                assert isinstance(endpoint.auth, OAuth2)
                self._tokens.discard(endpoint.auth, tag.token)
                self._send_with_token(endpoint.auth, tag._replace(renewed=True))
            elif finished.status == 200 and finished.kind is None and not endpoint.profile.capture_response:
                # The hot path: nothing to judge.
                self._settled.append(Settled(endpoint.id, tag.messages, verdict.DELIVERED))
            else:
                self._settled.append(Settled(endpoint.id, tag.messages, _judge(endpoint, finished, now)))
        elif isinstance(tag, _TokenRequest):
            self._take_token(tag.auth, finished, now)

    def _send_with_token(self, auth: OAuth2, delivery: Delivery) -> None:
        now = self._clock()
        token = self._tokens.get(auth, now)
        if token is None:
            self._await_token(auth, delivery)
        else:
            self._start(delivery._replace(token=token), now)

    def _start(self, delivery: Delivery, now: float) -> None:
        try:
            built = request.build(delivery.endpoint, delivery.messages, now, delivery.token, delivery)
        except MessageError as error:
            self._fail(delivery, f"{verdict.PERMANENT} {error}")
            return
        # Whatever a message does to our code, the others' deliveries must go on.
        except Exception as error:
            self._fail(delivery, f"{verdict.RETRYABLE} config: the request can't be built: {error!r}")
            return
        self._transport.start(built)

    def _await_token(self, auth: OAuth2, delivery: Delivery) -> None:
        """One request for all that wait; the first one's endpoint lends its proxy and timeout."""
        waiting = self._waiting.setdefault(auth, [])
        waiting.append(delivery)
        if len(waiting) == 1:
            self._transport.start(oauth.token_request(delivery.endpoint, _TokenRequest(auth)))

    def _take_token(self, auth: OAuth2, finished: Finished, now: float) -> None:
        waiting = self._waiting.pop(auth, [])
        try:
            token = oauth.parse(finished, now)
        except oauth.TokenError as error:
            # Whatever is wrong with the credentials, nothing is wrong with the message.
            prefix = verdict.PERMANENT if finished.kind == "blocked" else verdict.RETRYABLE
            for delivery in waiting:
                self._fail(delivery, f"{prefix} OAuth2 token request: {error}")
            return
        self._tokens.put(auth, token, now)
        for delivery in waiting:
            # Not by way of the cache: a token that is stale on arrival would be asked for without end.
            self._start(delivery._replace(token=token.value), now)

    def _fail(self, delivery: Delivery, error: str) -> None:
        self._settled.append(Settled(delivery.endpoint.id, delivery.messages, Outcome(error)))


def _judge(endpoint: Endpoint, finished: Finished, now: float) -> Outcome:
    """Whatever an answer does to our code, the others' deliveries must go on."""
    try:
        return verdict.judge(endpoint, finished, now)
    except Exception as error:
        return Outcome(f"{verdict.RETRYABLE} network: the answer can't be read: {error!r}", status=finished.status)
$module$),
('ulak.curl_command', $module$"""A request as a curl command to paste into a shell, with its secrets masked."""

from __future__ import annotations

import shlex

from ulak import header
from ulak.model import Request

MASK = "****"
_SECRET = frozenset(("authorization", "cookie", "proxy-authorization", "webhook-signature", "x-amz-security-token"))
_SECRET_PARTS = ("api-key", "apikey", "password", "secret", "signature", "token")


def render(request: Request) -> str:
    profile = request.profile
    words = ["curl", "--include", "--request", profile.method]
    words += ["--max-time", f"{profile.timeout:g}", "--connect-timeout", f"{profile.connect_timeout:g}"]
    if not profile.ssl_verify:
        words.append("--insecure")
    for option, value in (
        ("--cacert", profile.tls_ca_bundle),
        ("--cert", profile.tls_client_cert),
        ("--key", profile.tls_client_key),
        ("--pinnedpubkey", profile.tls_pinned_public_key),
    ):
        if value is not None:
            words += [option, value]
    if profile.proxy is not None:
        words += ["--proxy", profile.proxy.url]
        if profile.proxy.username is not None:
            words += ["--proxy-user", f"{profile.proxy.username}:{MASK}"]
    else:
        words += ["--noproxy", "*"]
    for line in request.headers:
        name, value = header.split(line)
        words += ["--header", f"{name}: {_masked(name, value)}" if value else f"{name};"]
    words += ["--data-binary", request.body.decode("utf-8", "replace"), profile.url]
    return shlex.join(words)


def _masked(name: str, value: str) -> str:
    if name not in _SECRET and not any(part in name for part in _SECRET_PARTS):
        return value
    scheme, space, _ = value.partition(" ")
    # The scheme helps to see what is wrong and gives nothing away.
    return f"{scheme} {MASK}" if space and name == "authorization" else MASK
$module$),
('ulak.database', $module$"""The worker's database: each method is one call of one ulak function."""

from __future__ import annotations

import ctypes
import gc
import itertools
import json
import os
import resource
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import plpy

from ulak import endpoint, options, verdict
from ulak import ping as pinging
from ulak.bell import Bell
from ulak.courier import Courier
from ulak.http import Transport
from ulak.mark import Mark, Place
from ulak.model import ConfigError, Message, Outcome
from ulak.port import BellSet, Busy, Claimed, EndpointConfig, Outcomes, Refused, Tidings
from ulak.worker import Worker

_CANCELLED = "57014"
# Python looks for cycles after so many new objects. A claim makes a thousand and more, and none of them is in a cycle.
CYCLE_SEARCH = 20_000
LONGEST_LISTENING = 3600


def _state(error: plpy.SPIError) -> str:
    return str(getattr(error, "sqlstate", None) or "")


def _is_passing(state: str) -> bool:
    """Deadlocks, a lack of memory or of disk, trouble with files, a lock: another try may succeed."""
    return state[:2] in ("40", "53", "58") or state == "55P03"


class Database:
    """Implements port.Database, with plans that are prepared once per run."""

    def __init__(self, slot: int, worker: str, stamp: str, may_listen: bool = False) -> None:
        self.slot = slot
        self._worker = worker
        self._stamp = stamp
        self._plans: dict[str, plpy.PLyPlan] = {}
        self._mark = Mark()
        self._began = False
        self._bell: Bell | None = None
        self._may_listen = may_listen
        self._listens = False
        self._postmaster = os.getppid()
        # PostgreSQL's own note that a cancel, a terminate or the like waits for its next chance.
        self._interrupts = ctypes.c_int.in_dll(ctypes.CDLL(None), "InterruptPending")

    def _call(self, query: str, types: Sequence[str] = (), arguments: Sequence[Any] = ()) -> plpy.PLyResult:
        plan = self._plans.get(query)
        if plan is None:
            plan = self._plans[query] = plpy.prepare(query, types)
        self._began = True
        try:
            # A subtransaction of its own: after an error the transaction goes on without what this call did.
            return plpy.execute(plan, arguments)
        except plpy.SPIError as error:
            if _is_passing(_state(error)):
                raise Busy(str(error)) from error
            raise

    def commit(self) -> None:
        if self._began:
            plpy.commit()
            self._began = False

    def options(self) -> tuple[str, options.Options]:
        row = self._call("select settings, version, fingerprint from ulak._worker_options()")[0]
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        chosen = options.parse(json.loads(row["settings"]), row["version"], files)
        self.commit()
        return row["fingerprint"], chosen

    def heed(self) -> None:
        # Backends notice the postmaster's death where they wait, and a worker waits in Python. As long as one of them
        # lives, no new server can start.
        if os.getppid() != self._postmaster:
            plpy.fatal("the postmaster is gone")
        if self._interrupts.value:
            self._call("select")

    def last_sent(self) -> int:
        rows = self._call("select coalesce(pg_sequence_last_value('ulak.queue_id_seq'::regclass), 0) as sent")
        return int(rows[0]["sent"])

    def await_send(self, last_sent: int, interval: float, seconds: float) -> int:
        rows = self._call(
            "select ulak._await_send($1, $2, $3) as sent",
            ("bigint", "float8", "float8"),
            (last_sent, interval, seconds),
        )
        return int(rows[0]["sent"])

    def claim(self, limit: int, lease: float, rooms: Mapping[int, int], room: int) -> list[Claimed]:
        arguments = (self._worker, limit, lease, list(rooms), list(rooms.values()), room)
        began = time.monotonic()
        # Who has no room for the mark's endpoint asks for the others, and that tells nothing about the mark.
        marked = self._mark.endpoint_id
        is_aside = marked is not None and not rooms.get(marked, room)
        place = None if is_aside else self._mark.place(began)
        rows = self._claim(arguments, place)
        if place is not None and not len(rows):
            place = None
            rows = self._claim(arguments, None)
        claimed = [_claimed(row) for row in rows]
        if not is_aside:
            count = sum(len(each.messages) for each in claimed)
            self._mark.claimed(time.monotonic(), began, count, place is None, _last_place(rows))
        return claimed

    def _claim(self, arguments: tuple[Any, ...], place: Place | None) -> plpy.PLyResult:
        # Column by column, and nothing for a column of nulls: a row becomes a dict, which costs more than what is
        # in it.
        return self._call(
            "select endpoint_id, config_version, array_agg(id) as ids, array_agg(message_id) as message_ids,"
            " array_agg(attempt) as attempts, array_agg(payload::text) as payloads,"
            " case when count(headers) > 0 then array_agg(headers::text) end as headers,"
            " case when count(metadata) > 0 then array_agg(metadata::text) end as metadata,"
            " case when count(correlation_id) > 0 then array_agg(correlation_id) end as correlation_ids,"
            " case when count(ordering_key) > 0 then array_agg(ordering_key) end as ordering_keys,"
            " array_agg(created_at) as created_at,"
            " min(priority) as lowest, max(priority) as highest, max(due_at) as due_at, max(id) as id"
            " from ulak._claim(p_worker => $1, p_limit => $2, p_protocol => 'http',"
            " p_lease => make_interval(secs => $3), p_room_ids => $4, p_rooms => $5, p_room => $6,"
            " p_mark_endpoint_id => $7, p_mark_priority => $8, p_mark_due_at => $9, p_mark_id => $10)"
            " group by endpoint_id, config_version",
            ("text", "int", "float8", "bigint[]", "int[]", "int", "bigint", "int2", "timestamptz", "bigint"),
            (*arguments, *(place or (None, None, None, None))),
        )

    def light_turn(
        self, after: int, count: int, lease: float, delivered: Sequence[Message]
    ) -> tuple[list[Claimed], list[int]]:
        if len(delivered) > 1:
            delivered = sorted(delivered)
        rows = self._call(
            "select id, is_new, message_id, attempt, endpoint_id, config_version, payload::text, headers::text,"
            " metadata::text, correlation_id, created_at"
            " from ulak._light_turn($1, $2, $3, make_interval(secs => $4), $5, $6)",
            ("text", "bigint", "int", "float8", "bigint[]", "int[]"),
            (self._worker, after, count, lease, [each.id for each in delivered], [each.attempt for each in delivered]),
        )
        claimed: dict[int, Claimed] = {}
        settled = []
        for row in rows:
            if not row["is_new"]:
                settled.append(row["id"])
                continue
            endpoint_id = row["endpoint_id"]
            if endpoint_id not in claimed:
                claimed[endpoint_id] = Claimed(endpoint_id, row["config_version"], [])
            claimed[endpoint_id].messages.append(
                Message(
                    row["id"],
                    row["message_id"],
                    row["attempt"],
                    row["payload"],
                    row["headers"],
                    row["metadata"],
                    row["correlation_id"],
                    None,
                    row["created_at"],
                )
            )
        return list(claimed.values()), settled

    def endpoint_configs(self, ids: Iterable[int]) -> list[EndpointConfig]:
        rows = self._call(
            "select id, name, config_version, config, signing_secrets from ulak._endpoint_configs($1)",
            ("bigint[]",),
            (list(ids),),
        )
        return [
            EndpointConfig(
                row["id"],
                row["name"],
                row["config_version"],
                json.loads(row["config"]),
                row["signing_secrets"] or (),
            )
            for row in rows
        ]

    def settle(self, outcomes: Outcomes) -> None:
        try:
            self._call(
                "select ulak._settle_many($1, $2, $3, $4, $5, $6)",
                ("text", "bigint[]", "int[]", "text[]", "int[]", "jsonb[]"),
                (self._worker, *outcomes),
            )
        except plpy.SPIError as error:
            if _state(error) == _CANCELLED:
                raise
            raise Refused(str(error)) from error

    def release(self, ids: Sequence[int], attempts: Sequence[int], delay: float) -> None:
        self._call(
            "select ulak._release_many($1, $2, $3, make_interval(secs => $4))",
            ("text", "bigint[]", "int[]", "float8"),
            (self._worker, ids, attempts, delay),
        )

    def renew(self, ids: Sequence[int], attempts: Sequence[int], lease: float) -> Sequence[int]:
        rows = self._call(
            "select ulak._heartbeat_many($1, $2, $3, make_interval(secs => $4)) as held",
            ("text", "bigint[]", "int[]", "float8"),
            (self._worker, ids, attempts, lease),
        )
        return list(rows[0]["held"])

    def blocked_endpoints(self, ids: Iterable[int]) -> Mapping[int, str]:
        rows = self._call("select id, state from ulak._blocked_endpoints($1)", ("bigint[]",), (list(ids),))
        return {row["id"]: row["state"] for row in rows}

    def check(self) -> Tidings:
        self.heed()
        row = self._call(
            "select leave, settings from ulak._worker_check($1, $2)", ("int", "text"), (self.slot, self._stamp)
        )[0]
        return Tidings(row["leave"], row["settings"])

    def report(self, progress: Mapping[str, object], statistics: Sequence[Mapping[str, object]]) -> None:
        self._call(
            "select ulak._worker_report($1, $2, $3, $4)",
            ("int", "text", "jsonb", "jsonb"),
            (self.slot, self._worker, json.dumps(progress), json.dumps(statistics)),
        )

    def sweep(self) -> None:
        self._call("select ulak._sweep()")

    def become_poller(self) -> bool:
        return bool(self._call("select ulak._become_poller() as won")[0]["won"])

    def listen(self) -> Bell | None:
        if not self._listens and self._may_listen:
            self._listens = bool(self._call("select ulak._listen() as listens")[0]["listens"])
        if self._listens and self._bell is None:
            try:
                self._bell = Bell()
            except OSError:
                # No descriptor left: messages can be looked for, too.
                self.unlisten()
        return self._bell if self._listens else None

    def set_bell(self) -> BellSet:
        row = self._call("select rings_to, last_sent, has_pending from ulak._set_bell()")[0]
        return BellSet(row["rings_to"], row["last_sent"], row["has_pending"])

    def unlisten(self) -> None:
        self._listens = False
        self._call("unlisten ulak_bell")

    def close(self) -> None:
        if self._bell is not None:
            self._bell.close()


def _last_place(rows: plpy.PLyResult) -> Place | None:
    if len(rows) != 1 or rows[0]["lowest"] != rows[0]["highest"]:
        return None
    row = rows[0]
    return Place(row["endpoint_id"], row["lowest"], row["due_at"], row["id"])


def _claimed(row: Mapping[str, Any]) -> Claimed:
    nothing = itertools.repeat(None)
    messages = map(
        Message,
        row["ids"],
        row["message_ids"],
        row["attempts"],
        row["payloads"],
        row["headers"] or nothing,
        row["metadata"] or nothing,
        row["correlation_ids"] or nothing,
        row["ordering_keys"] or nothing,
        row["created_at"],
    )
    return Claimed(row["endpoint_id"], row["config_version"], list(messages))


def run(slot: int | None, seconds: float | None, stamp: str) -> None:
    """The body of ulak.run_worker(): takes a slot and works in it until the time is over."""
    taken = plpy.execute(
        plpy.prepare("select slot, name, seconds from ulak._take_worker_slot($1, $2)", ("int", "float8")),
        (slot, seconds),
    )
    plpy.commit()
    if not len(taken):
        plpy.notice("another session runs this worker slot")
        return
    row = taken[0]
    # Notifications are kept for a session until it is idle, which this one isn't before its end.
    database = Database(row["slot"], row["name"], stamp, may_listen=row["seconds"] <= LONGEST_LISTENING)
    until = time.monotonic() + row["seconds"]
    thresholds = gc.get_threshold()
    gc.set_threshold(CYCLE_SEARCH)
    try:
        # A worker lives as long as its settings do.
        while _work(database, until) == "settings":
            pass
    finally:
        gc.set_threshold(*thresholds)
        database.close()
    plpy.execute(plpy.prepare("select ulak._leave_worker_slot($1)", ("int",)), (row["slot"],))
    plpy.commit()


def _work(database: Database, until: float) -> str:
    settings, chosen = database.options()
    transport = Transport(chosen.guard, chosen.slots * 2)
    worker = Worker(database, chosen, settings, until, Courier(transport))
    try:
        ended = worker.run()
    except Exception as error:
        # A cancel, or a bug of ours. The transaction is sound: only the call that failed was undone.
        _break_off(database, worker, error)
        raise
    worker.close("running" if ended == "settings" else "stopped")
    transport.close()
    return ended


def _break_off(database: Database, worker: Worker, error: Exception) -> None:
    """What can still be done; if it can't, the leases run out."""
    try:
        database.commit()
        worker.close("stopped", f"{type(error).__name__}: {error}")
        plpy.execute(plpy.prepare("select ulak._leave_worker_slot($1)", ("int",)), (database.slot,))
        plpy.commit()
    except (plpy.SPIError, Busy, Refused) as another:
        plpy.warning(f"the worker could not give back what it held: {another}")


def ping(endpoint_id: int) -> str:
    """The body of ulak._ping(): the outcome of one test request as JSON."""
    database = Database(0, "ping", "")
    row = plpy.execute("select settings, version from ulak._worker_options()")[0]
    chosen = options.parse(json.loads(row["settings"]), row["version"])
    config = database.endpoint_configs([endpoint_id])[0]
    start = time.monotonic()
    try:
        parsed = endpoint.parse(
            config.id, config.name, config.config_version, config.config, config.signing_secrets, chosen.endpoint
        )
        outcome = pinging.ping(parsed, Transport(chosen.guard), lambda: plpy.execute("select 1"))
    except ConfigError as error:
        outcome = Outcome(f"{verdict.PERMANENT} config: {error}")
    return json.dumps(
        {
            "outcome": "delivered" if outcome.error is None else "failed",
            "status": outcome.status or None,
            "milliseconds": round((time.monotonic() - start) * 1000, 3),
            "error": outcome.error,
            "response": json.loads(outcome.response) if outcome.response else None,
        }
    )
$module$),
('ulak.endpoint', $module$"""An endpoint's config, as the database gives it, made into what the delivery side works with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

from ulak import authorization, header, signature
from ulak.model import (
    Basic,
    Bearer,
    CloudEvents,
    ConfigError,
    Endpoint,
    Line,
    OAuth2,
    Profile,
    Proxy,
    Settings,
    SigV4,
)

METHODS = ("POST", "PUT", "PATCH", "DELETE")
# What an error message quotes of an answer that isn't captured.
EXCERPT = 512
# More than any sane token answer.
_TOKEN_ANSWER = 65536


def parse(
    id: int,
    name: str,
    config_version: int,
    config: Mapping[str, Any],
    signing_secrets: Iterable[str] = (),
    settings: Settings | None = None,
) -> Endpoint:
    """Raises ConfigError; the database has checked the config already, but not with this code."""
    settings = settings or Settings()
    profile = _profile(config, settings)
    auth = _auth(config.get("auth"))
    headers = _headers(config, settings, auth)
    secrets = tuple(signing_secrets) or tuple(filter(None, (config.get("signing_secret"),)))
    return Endpoint(
        id=id,
        name=name,
        config_version=config_version,
        profile=profile,
        headers=MappingProxyType(headers),
        lines=tuple(headers.values()),
        signing_keys=tuple(signature.key(secret) for secret in secrets),
        auth=auth,
        token_profile=_token_profile(profile, auth),
        cloudevents=_cloudevents(config, settings),
        batch_size=int(config.get("batch_size", 1)),
        batch_format=config.get("batch_format", "cloudevents" if config.get("cloudevents") else "json"),
        max_in_flight=config.get("max_in_flight"),
        retry_on=frozenset(str(status) for status in config.get("retry_on", ())),
        permanent_on=frozenset(str(status) for status in config.get("permanent_on", ())),
    )


def _profile(config: Mapping[str, Any], settings: Settings) -> Profile:
    method = config.get("method", "POST")
    if method not in METHODS:
        raise ConfigError(f"method {method} isn't one of {', '.join(METHODS)}")
    timeout = float(config.get("timeout", settings.http_timeout))
    return Profile(
        url=_url(config.get("url"), "url"),
        method=method,
        timeout=timeout,
        connect_timeout=min(timeout, float(config.get("connect_timeout", settings.http_connect_timeout))),
        ssl_verify=bool(config.get("ssl_verify", True)),
        tls_ca_bundle=config.get("tls_ca_bundle"),
        tls_client_cert=config.get("tls_client_cert"),
        tls_client_key=config.get("tls_client_key"),
        tls_pinned_public_key=config.get("tls_pinned_public_key"),
        proxy=_proxy(config.get("proxy")),
        capture_response=settings.capture_response,
        keep_body=settings.response_body_max_size if settings.capture_response else EXCERPT,
    )


def _url(url: Any, key: str) -> str:
    try:
        parts = urlsplit(url)
        host, user = parts.hostname, parts.username
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"{key} isn't a URL") from error
    if parts.scheme not in ("http", "https") or not host:
        raise ConfigError(f"{key} must start with http:// or https:// and have a host")
    if user is not None:
        raise ConfigError(f"{key} must not have a user or a password")
    return str(url)


def _proxy(config: Mapping[str, Any] | None) -> Proxy | None:
    if not config:
        return None
    return Proxy(
        url=_url(config.get("url"), "proxy.url"),
        username=config.get("username"),
        password=config.get("password"),
        no_proxy=config.get("no_proxy"),
        ca_bundle=config.get("ca_bundle"),
        ssl_verify=bool(config.get("ssl_verify", True)),
    )


def _auth(config: Mapping[str, Any] | None) -> Basic | Bearer | OAuth2 | SigV4 | None:
    if not config:
        return None
    fields = {key: value for key, value in config.items() if key != "type"}
    kinds: dict[Any, type[Basic | Bearer | OAuth2 | SigV4]] = {
        "basic": Basic,
        "bearer": Bearer,
        "oauth2": OAuth2,
        "aws_sigv4": SigV4,
    }
    kind = kinds.get(config.get("type"))
    if kind is None:
        raise ConfigError(f"auth.type {config.get('type')} isn't one of {', '.join(kinds)}")
    try:
        auth = kind(**fields)
    except TypeError as error:
        raise ConfigError(f"auth: {error}") from error
    if isinstance(auth, OAuth2):
        _url(auth.token_url, "auth.token_url")
    return auth


def _token_profile(profile: Profile, auth: object) -> Profile | None:
    """The same proxy and authorities as the endpoint, but not its client certificate nor its pinned key."""
    if not isinstance(auth, OAuth2):
        return None
    return replace(
        profile,
        url=auth.token_url,
        method="POST",
        tls_client_cert=None,
        tls_client_key=None,
        tls_pinned_public_key=None,
        capture_response=False,
        keep_body=_TOKEN_ANSWER,
    )


def _headers(config: Mapping[str, Any], settings: Settings, auth: object) -> dict[str, Line]:
    headers: dict[str, Line] = {
        "user-agent": header.line("user-agent", settings.user_agent),
        "content-type": "content-type: application/json",
    }
    for name, value in config.get("headers", {}).items():
        problem = header.problem(name, value)
        if name.lower() in header.RESERVED:
            problem = "is a header that ulak sets itself"
        if problem:
            raise ConfigError(f"header {name!r} {problem}")
        headers[name.lower()] = header.line(name, value)
    if isinstance(auth, Basic | Bearer):
        headers["authorization"] = header.line("authorization", authorization.value(auth))
    return headers


def _cloudevents(config: Mapping[str, Any], settings: Settings) -> CloudEvents | None:
    batched = int(config.get("batch_size", 1)) > 1 and config.get("batch_format") == "cloudevents"
    if not (config.get("cloudevents") or batched):
        return None
    return CloudEvents(
        mode=config.get("cloudevents_mode", "structured"),
        source=settings.cloudevents_source,
        type=config.get("cloudevents_type"),
    )
$module$),
('ulak.header', $module$"""Header lines as libcurl takes them, and which names a config or a message can't set."""

from __future__ import annotations

import re

from ulak.model import Line

# ulak or libcurl sets these. accept-encoding: an answer is never asked for, nor read, compressed.
RESERVED = frozenset(
    [
        "host",
        "content-length",
        "transfer-encoding",
        "connection",
        "keep-alive",
        "proxy-connection",
        "te",
        "trailer",
        "upgrade",
        "expect",
        "accept-encoding",
        "webhook-id",
        "webhook-timestamp",
        "webhook-signature",
        "ulak-attempt",
    ]
)
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")


def problem(name: str, value: object) -> str | None:
    """Why this header can't be sent, or None. A line break would smuggle in a header of the sender's choice."""
    if not _NAME.fullmatch(name):
        return "isn't a valid header name"
    if not isinstance(value, str):
        return "isn't text"
    if _CONTROL.search(value):
        return "has a control character"
    return None


def line(name: str, value: str) -> Line:
    # libcurl drops "name:" and sends "name;" as an empty header.
    text = f"{name}: {value}" if value.strip() else f"{name};"
    return text if text.isascii() else text.encode()


def split(text: Line) -> tuple[str, str]:
    """Name in lower case and value of a line that line() made."""
    if isinstance(text, bytes):
        text = text.decode()
    name, colon, value = text.partition(":")
    return (name.lower(), value.strip()) if colon else (name.rstrip(";").lower(), "")
$module$),
('ulak.holding', $module$"""What the worker holds: claimed, and neither settled nor given back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ulak.model import Message
from ulak.port import Claimed

# Payloads in memory; a claim takes fewer messages when they are big. What is unknown counts as a megabyte.
PAYLOAD_BYTES = 64 * 1024 * 1024
UNKNOWN_BYTES = 1024 * 1024


class Held:
    def __init__(self) -> None:
        self._attempts: dict[int, int] = {}
        self._bytes = 0
        self._average_bytes = UNKNOWN_BYTES

    def __len__(self) -> int:
        return len(self._attempts)

    def ids(self) -> list[int]:
        return list(self._attempts)

    def attempts(self) -> list[int]:
        """In the order of ids()."""
        return list(self._attempts.values())

    def room(self) -> int:
        """How many more messages may be claimed."""
        return (PAYLOAD_BYTES - self._bytes) // self._average_bytes

    def receive(self, claimed: Sequence[Claimed]) -> tuple[int, int]:
        """How many there are, and the highest id."""
        count = size = newest = 0
        for each in claimed:
            ids = {message.id: message.attempt for message in each.messages}
            self._attempts.update(ids)
            newest = max(newest, *ids)
            count += len(ids)
            size += sum([len(message.payload) for message in each.messages])
        self._bytes += size
        if count:
            self._average_bytes = max(1, size // count, self._average_bytes // 2)
        return count, newest

    def clear(self) -> None:
        self._attempts.clear()
        self._bytes = 0

    def forget(self, messages: Iterable[Message]) -> None:
        attempts = self._attempts
        size = 0
        for message in messages:
            size += len(message.payload)
            # Unless it was lost and claimed again since.
            if attempts.get(message.id) == message.attempt:
                del attempts[message.id]
        self._bytes -= size
$module$),
('ulak.http', $module$"""The transport: many HTTP exchanges at once over libcurl's multi interface, within one thread."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
from collections.abc import Callable
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

import pycurl

from ulak.address import Guard
from ulak.model import Finished, Profile, Request

# The longest time without a return to the caller, which must look for interrupts.
MAX_WAIT = 0.1
# An answer is read to its end, which keeps the connection usable, but never beyond this or what is to be kept.
_READ_AT_LEAST = 65536

# From here on libcurl would ask "may I?" and wait a second for "100 Continue", which few receivers send.
_EXPECT_FROM = 1024 * 1024

# pycurl has no name for it. QUICK_EXIT: a request that times out during name resolution doesn't wait for the
# resolver's thread, which can't be stopped and may take half a minute.
_QUICK_EXIT = 322

_TO_EPOLL = {
    pycurl.POLL_IN: select.EPOLLIN,
    pycurl.POLL_OUT: select.EPOLLOUT,
    pycurl.POLL_INOUT: select.EPOLLIN | select.EPOLLOUT,
}
_FROM_EPOLL = tuple(
    (pycurl.CSELECT_IN if events & (select.EPOLLIN | select.EPOLLHUP) else 0)
    | (pycurl.CSELECT_OUT if events & select.EPOLLOUT else 0)
    | (pycurl.CSELECT_ERR if events & select.EPOLLERR else 0)
    for events in range(32)
)

# PostgreSQL's handlers must run in the backend's own thread: a thread that libcurl starts for name resolution
# inherits this mask. Restored as it was, since PostgreSQL keeps some signals blocked on purpose.
_BACKEND_SIGNALS = frozenset(
    (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGURG)
)

# Where distributions keep the authorities in one file: Debian, Fedora, SUSE, Alpine.
_SYSTEM_AUTHORITIES = next(
    filter(
        os.path.exists,
        (
            "/etc/ssl/certs/ca-certificates.crt",
            "/etc/pki/tls/certs/ca-bundle.crt",
            "/etc/ssl/ca-bundle.pem",
            "/etc/ssl/cert.pem",
        ),
    ),
    None,
)

_STATUS = pycurl.RESPONSE_CODE

# How a connection that the receiver has closed shows itself.
_CLOSED = frozenset((pycurl.E_SEND_ERROR, pycurl.E_RECV_ERROR, pycurl.E_GOT_NOTHING))

_KINDS = {
    pycurl.E_OPERATION_TIMEDOUT: "timeout",
    pycurl.E_COULDNT_RESOLVE_HOST: "resolve",
    pycurl.E_COULDNT_RESOLVE_PROXY: "resolve",
    pycurl.E_COULDNT_CONNECT: "connect",
    pycurl.E_SSL_CONNECT_ERROR: "tls",
    pycurl.E_PEER_FAILED_VERIFICATION: "tls",
    pycurl.E_SSL_ISSUER_ERROR: "tls",
    pycurl.E_SSL_PINNEDPUBKEYNOTMATCH: "tls",
    pycurl.E_SSL_CACERT_BADFILE: "config",
    pycurl.E_SSL_CERTPROBLEM: "config",
}


class _Handle:
    """An easy handle, what it is prepared for, and what has arrived so far."""

    __slots__ = (
        "blocked",
        "body",
        "curl",
        "dialled",
        "guard",
        "headers",
        "named",
        "no_socket",
        "on_new_socket",
        "profile",
        "read_limit",
        "request",
        "sent_again",
        "size",
    )

    profile: Profile
    request: Request

    def __init__(self, guard: Guard, on_new_socket: Callable[[], None]) -> None:
        self.curl = pycurl.Curl()
        self.guard = guard
        self.on_new_socket = on_new_socket
        self.headers: list[bytes] = []
        self.body = bytearray()
        self.size = 0
        self.read_limit = 0
        self.dialled = False
        self.blocked: str | None = None
        self.no_socket: str | None = None
        self.named = False
        self.sent_again = False

    def open_socket(self, purpose: int, address: Any) -> Any:
        """Judges the address that libcurl is about to dial; SOCKET_BAD makes it try the name's next one."""
        family, kind, protocol, where = address
        rule = self.guard.blocked_by(where[0]) if family in (socket.AF_INET, socket.AF_INET6) else "not an IP address"
        if rule is not None:
            self.blocked = f"address {where[0]} is blocked ({rule})"
            return pycurl.SOCKET_BAD
        try:
            opened = socket.socket(family, kind, protocol)
        except OSError as error:
            # No matter of policy: the next try may get one.
            self.no_socket = f"no socket for {where[0]}: {error.strerror}"
            return pycurl.SOCKET_BAD
        self.dialled = True
        self.on_new_socket()
        return opened

    def write(self, chunk: bytes) -> int | None:
        room = self.profile.keep_body - len(self.body)
        if room > 0:
            self.body += chunk[:room]
        self.size += len(chunk)
        # Fewer bytes than given: libcurl stops reading and closes the connection.
        return 0 if self.size > self.read_limit else None

    def prepare(self, profile: Profile) -> None:
        """Sets everything that stays the same from message to message."""
        self.curl.reset()
        setopt = self.curl.setopt
        self.profile = profile
        self.read_limit = max(_READ_AT_LEAST, profile.keep_body)
        self.named = _needs_resolver(profile)
        setopt(pycurl.URL, profile.url)
        setopt(pycurl.POST, 1)
        if profile.method != "POST":
            setopt(pycurl.CUSTOMREQUEST, profile.method)
        setopt(pycurl.NOSIGNAL, 1)
        setopt(_QUICK_EXIT, 1)
        setopt(pycurl.PROTOCOLS, pycurl.PROTO_HTTP | pycurl.PROTO_HTTPS)
        setopt(pycurl.FOLLOWLOCATION, 0)
        setopt(pycurl.PATH_AS_IS, 1)
        setopt(pycurl.HTTP_CONTENT_DECODING, 0)
        # pycurl would name every library it was built with.
        setopt(pycurl.USERAGENT, "")
        setopt(pycurl.TIMEOUT_MS, int(profile.timeout * 1000))
        setopt(pycurl.CONNECTTIMEOUT_MS, int(profile.connect_timeout * 1000))
        setopt(pycurl.OPENSOCKETFUNCTION, self.open_socket)
        setopt(pycurl.WRITEFUNCTION, self.write)
        # A built-in method: no Python code runs per header. libcurl bounds how much it accepts.
        setopt(pycurl.HEADERFUNCTION, self.headers.append)
        self._prepare_tls(profile)
        self._prepare_proxy(profile)

    def _prepare_tls(self, profile: Profile) -> None:
        if not profile.url.lower().startswith("https:"):
            return
        setopt = self.curl.setopt
        setopt(pycurl.HTTP_VERSION, pycurl.CURL_HTTP_VERSION_2TLS)
        # Waits to see whether a connection under way speaks HTTP/2, instead of opening one per request.
        setopt(pycurl.PIPEWAIT, 1)
        setopt(pycurl.SSL_VERIFYPEER, int(profile.ssl_verify))
        setopt(pycurl.SSL_VERIFYHOST, 2 if profile.ssl_verify else 0)
        self._trust(profile.ssl_verify, profile.tls_ca_bundle, pycurl.CAINFO, pycurl.CAPATH)
        for option, value in (
            (pycurl.SSLCERT, profile.tls_client_cert),
            (pycurl.SSLKEY, profile.tls_client_key),
            (pycurl.PINNEDPUBLICKEY, profile.tls_pinned_public_key),
        ):
            if value is not None:
                setopt(option, value)

    def _trust(self, verify: bool, bundle: str | None, file_option: int, folder_option: int) -> None:
        """One file of authorities, and not the system's folder too: GnuTLS would read that anew for each connection
        (30 ms, 1 ms with a file of one's own), and trust it beside the file that a config names."""
        file = bundle or _SYSTEM_AUTHORITIES
        if file is None and verify:
            return
        self.curl.unsetopt(folder_option)
        if file is not None and verify:
            self.curl.setopt(file_option, file)
        else:
            self.curl.unsetopt(file_option)

    def _prepare_proxy(self, profile: Profile) -> None:
        setopt = self.curl.setopt
        proxy = profile.proxy
        # Empty, not unset: unset would read the environment.
        setopt(pycurl.PROXY, proxy.url if proxy else "")
        setopt(pycurl.NOPROXY, (proxy and proxy.no_proxy) or "")
        if proxy is None:
            return
        if proxy.username is not None:
            setopt(pycurl.PROXYUSERNAME, proxy.username)
            setopt(pycurl.PROXYPASSWORD, proxy.password or "")
        setopt(pycurl.PROXY_SSL_VERIFYPEER, int(proxy.ssl_verify))
        setopt(pycurl.PROXY_SSL_VERIFYHOST, 2 if proxy.ssl_verify else 0)
        self._trust(proxy.ssl_verify, proxy.ca_bundle, pycurl.PROXY_CAINFO, pycurl.PROXY_CAPATH)

    def send_again(self, code: int) -> bool:
        """Whether a reused connection was found closed before a byte of the answer came: then once more, on a new one.

        libcurl does so too, but counts over the whole life of a handle: every sixth time it gives up.
        """
        if code not in _CLOSED or self.sent_again or self.dialled or self.headers or self.size:
            return False
        left = self.profile.timeout - self.curl.getinfo(pycurl.TOTAL_TIME)
        if left <= 0:
            return False
        self.sent_again = True
        self.curl.setopt(pycurl.FRESH_CONNECT, 1)
        self.curl.setopt(pycurl.TIMEOUT_MS, max(1, int(left * 1000)))
        return True

    def finish(self, status: int) -> Finished:
        """What came back, and the handle made ready for the next request."""
        request = self.request
        profile = request.profile
        if status in (429, 503) or profile.capture_response:
            result = Finished(
                request,
                status,
                headers=tuple(self.headers),
                body=bytes(self.body),
                truncated=self.size > profile.keep_body,
                seconds=self.curl.getinfo(pycurl.TOTAL_TIME),
                first_byte_seconds=self.curl.getinfo(pycurl.STARTTRANSFER_TIME),
            )
        else:
            result = Finished(request, status, body=bytes(self.body)) if self.size else Finished(request, status)
        self.headers.clear()
        self.dialled = False
        self.blocked = None
        self.no_socket = None
        if self.size:
            self.body = bytearray()
            self.size = 0
        if self.sent_again:
            self.sent_again = False
            self.curl.setopt(pycurl.FRESH_CONNECT, 0)
            self.curl.setopt(pycurl.TIMEOUT_MS, int(profile.timeout * 1000))
        return result

    def fail(self, code: int, text: str) -> Finished:
        too_long = code == pycurl.E_WRITE_ERROR and self.size > self.read_limit
        kind = None if too_long else _KINDS.get(code, "network")
        if kind == "connect" and not self.dialled:
            if self.no_socket:
                text = self.no_socket
            elif self.blocked:
                kind, text = "blocked", self.blocked
        result = self.finish(self.curl.getinfo(pycurl.RESPONSE_CODE))
        return result._replace(kind=kind, error=None if too_long else text or self.curl.errstr())


def _needs_resolver(profile: Profile) -> bool:
    for url in (profile.url, profile.proxy.url if profile.proxy else None):
        try:
            ip_address((urlsplit(url).hostname or "") if url else "::")
        except ValueError:
            return True
    return False


class Transport:
    """start() any number of requests, then step() until each has come back as exactly one Finished.

    The caller bounds what is in flight: libcurl's timeout also runs while a request waits for a connection.
    """

    def __init__(self, guard: Guard, max_connections: int = 256) -> None:
        self.in_flight = 0
        self._guard = guard
        self._max_handles = max_connections
        self._multi = pycurl.CurlMulti()
        self._multi.setopt(pycurl.M_SOCKETFUNCTION, self._watch)
        # The default, four per request in flight, would close the connections of light traffic.
        self._multi.setopt(pycurl.M_MAXCONNECTS, max_connections)
        self._epoll = select.epoll()
        # What the kernel watches. A socket stays there between two exchanges: taking it out and putting it back
        # would be two system calls per message.
        self._watched: dict[int, int] = {}
        self._wanted: set[int] = set()
        self._handles: dict[Any, _Handle] = {}
        self._idle: dict[Profile, list[_Handle]] = {}
        self._never_started: list[Finished] = []
        self._named_in_flight = 0
        self._wake: int | None = None
        self.was_woken = False

    def wake_on(self, descriptor: int) -> None:
        """step() also ends when this can be read; was_woken tells."""
        self._wake = descriptor
        self._epoll.register(descriptor, select.EPOLLIN)

    def start(self, request: Request) -> None:
        """Never raises for what the request holds: that comes back from step() as a failure of kind config."""
        try:
            handles = self._idle.get(request.profile)
            handle = handles.pop() if handles else self._prepared(request.profile)
            handle.request = request
            curl = handle.curl
            headers = request.headers
            if len(request.body) >= _EXPECT_FROM:
                headers = [*headers, "expect:"]
            curl.setopt(pycurl.HTTPHEADER, headers)
            curl.setopt(pycurl.POSTFIELDS, request.body)
            self._multi.add_handle(curl)
        except (pycurl.error, ValueError, TypeError) as error:
            self._never_started.append(Finished(request, 0, "config", f"the request can't be made: {error}"))
            return
        self.in_flight += 1
        self._named_in_flight += handle.named

    def step(self, max_wait: float) -> list[Finished]:
        """What has ended, after at most max_wait seconds (and 0.1); at once if nothing is in flight."""
        finished, self._never_started = self._never_started, []
        if self.in_flight == 0:
            return finished
        if self._named_in_flight == 0:
            self._advance(max_wait, finished)
            return finished
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _BACKEND_SIGNALS)
        try:
            self._advance(max_wait, finished)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return finished

    def close(self) -> None:
        """Drops what is in flight and closes every connection."""
        for handle in self._handles.values():
            handle.curl.close()
        self._handles.clear()
        self._idle.clear()
        self._multi.close()
        self._epoll.close()

    def _advance(self, max_wait: float, finished: list[Finished]) -> None:
        # Asked once a step. To be told would mean to be told of each request that is added, and of each that ends.
        left = self._multi.timeout()
        if left == 0:
            self._multi.socket_action(pycurl.SOCKET_TIMEOUT, 0)
            self._collect(finished)
            left = self._multi.timeout()
        wait = 0.0 if finished else min(max_wait, MAX_WAIT)
        if left >= 0:
            wait = min(wait, left / 1000)
        self._act(self._epoll.poll(wait))
        self._collect(finished)

    def _act(self, ready: list[tuple[int, int]]) -> None:
        self.was_woken = False
        act = self._multi.socket_action
        for fd, events in ready:
            if fd in self._wanted:
                act(fd, _FROM_EPOLL[events & 31])
            elif fd == self._wake:
                self.was_woken = True
            else:
                # An idle connection that the receiver closed: it would be reported again and again.
                self._forget(fd)

    def _collect(self, finished: list[Finished]) -> None:
        more = 1
        while more:
            more, done, failed = self._multi.info_read(256)
            for curl in done:
                finished.append(self._release(curl).finish(curl.getinfo(_STATUS)))
            for curl, code, text in failed:
                if self._handles[curl].send_again(code):
                    self._multi.remove_handle(curl)
                    self._multi.add_handle(curl)
                    continue
                finished.append(self._release(curl).fail(code, text))

    def _release(self, curl: Any) -> _Handle:
        self._multi.remove_handle(curl)
        handle = self._handles[curl]
        self.in_flight -= 1
        self._named_in_flight -= handle.named
        self._idle.setdefault(handle.profile, []).append(handle)
        return handle

    def _prepared(self, profile: Profile) -> _Handle:
        """A handle for a profile that has none idle: a new one, or the idle one that waited longest."""
        handle = self._reusable() if len(self._handles) >= self._max_handles else None
        if handle is None:
            # A new socket may bear the number of one closed unseen: nothing known about numbers holds any more.
            handle = _Handle(self._guard, on_new_socket=self._watched.clear)
            self._handles[handle.curl] = handle
        handle.prepare(profile)
        return handle

    def _reusable(self) -> _Handle | None:
        for profile, handles in list(self._idle.items()):
            if handles:
                return handles.pop()
            del self._idle[profile]
        return None

    def _watch(self, event: int, fd: int, multi: object, data: object) -> None:
        """libcurl tells which sockets matter to it now."""
        if event == pycurl.POLL_REMOVE:
            self._wanted.discard(fd)
            return
        self._wanted.add(fd)
        events = _TO_EPOLL[event]
        if self._watched.get(fd) == events:
            return
        try:
            self._epoll.modify(fd, events)
        except FileNotFoundError:
            self._epoll.register(fd, events)
        self._watched[fd] = events

    def _forget(self, fd: int) -> None:
        self._watched.pop(fd, None)
        # Closed since: the kernel has forgotten it already.
        with contextlib.suppress(OSError):
            self._epoll.unregister(fd)
$module$),
('ulak.line', $module$"""Requests that wait for a slot: claimed already, so that one is under way as soon as another ends."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from ulak.model import Endpoint, Message

# A worker claims what it will have sent within this time, beyond what it has slots for. The rate is the endpoint's own:
# for one that answers once in ten seconds this is nothing.
AHEAD_SECONDS = 0.05
# An endpoint that had no answer for so long has no rate.
MEMORY_SECONDS = 0.25

Waiting = tuple[Endpoint, Sequence[Message]]


class Line:
    """Endpoints take turns."""

    def __init__(self) -> None:
        self._requests: dict[int, deque[Waiting]] = {}
        # Messages, not requests: in sum and by endpoint.
        self._messages = 0
        self._counts: Counter[int] = Counter()

    def __len__(self) -> int:
        """Messages, not requests."""
        return self._messages

    def endpoint_ids(self) -> Collection[int]:
        return self._requests.keys()

    def count(self, endpoint_id: int) -> int:
        return self._counts[endpoint_id]

    def add(self, to: Endpoint, groups: Iterable[Sequence[Message]]) -> None:
        """One request each."""
        requests = self._requests.setdefault(to.id, deque())
        for messages in groups:
            requests.append((to, messages))
            self._count(to.id, len(messages))

    def append(self, other: Line) -> None:
        """All that is in another line, which is empty then."""
        for endpoint_id, requests in other._requests.items():
            self._requests.setdefault(endpoint_id, deque()).extend(requests)
            self._count(endpoint_id, other.count(endpoint_id))
        other._requests = {}
        other._messages = 0
        other._counts.clear()

    def take(self, room_of: Callable[[int], int]) -> Iterator[Waiting]:
        """As many as there is room for, which the caller takes before it asks for the next."""
        while self._requests:
            alone = len(self._requests) == 1
            before = self._messages
            for endpoint_id in list(self._requests):
                requests = self._requests[endpoint_id]
                count = min(room_of(endpoint_id), len(requests) if alone else 1)
                taken = [requests.popleft() for _ in range(count)]
                self._count(endpoint_id, -sum([len(messages) for _, messages in taken]))
                yield from taken
                if count > 0:
                    # Behind the others, also the next time.
                    del self._requests[endpoint_id]
                if requests:
                    self._requests[endpoint_id] = requests
            if self._messages == before:
                return

    def remove(self, endpoint_id: int) -> list[Message]:
        """All of an endpoint."""
        removed = [message for _, messages in self._requests.pop(endpoint_id, ()) for message in messages]
        self._count(endpoint_id, -len(removed))
        return removed

    def remove_lost(self, held: Collection[int]) -> list[Message]:
        """Requests of which a message is no longer held."""
        lost: list[Message] = []
        for endpoint_id, requests in list(self._requests.items()):
            kept: deque[Waiting] = deque()
            for each in requests:
                if all(message.id in held for message in each[1]):
                    kept.append(each)
                else:
                    lost += each[1]
                    self._count(endpoint_id, -len(each[1]))
            self._requests[endpoint_id] = kept
            if not kept:
                del self._requests[endpoint_id]
        return lost

    def _count(self, endpoint_id: int, messages: int) -> None:
        self._messages += messages
        self._counts[endpoint_id] += messages


class Rates:
    """How many messages of an endpoint are answered per second, of late."""

    def __init__(self) -> None:
        self._rates: dict[int, tuple[float, float]] = {}

    def note(self, counts: Mapping[int, int], now: float) -> None:
        for endpoint_id, count in counts.items():
            rate, at = self._rates.get(endpoint_id, (0.0, now - MEMORY_SECONDS))
            seconds = max(0.001, now - at)
            # The older what is known, the less it counts.
            weight = min(1.0, seconds / AHEAD_SECONDS)
            self._rates[endpoint_id] = (rate + (count / seconds - rate) * weight, now)

    def ahead(self, now: float) -> dict[int, int]:
        """How many messages of which endpoint may wait in line."""
        self._rates = {id: known for id, known in self._rates.items() if known[1] > now - MEMORY_SECONDS}
        found = {endpoint_id: int(rate * AHEAD_SECONDS) for endpoint_id, (rate, _) in self._rates.items()}
        return {endpoint_id: count for endpoint_id, count in found.items() if count}
$module$),
('ulak.listener', $module$"""Who hears the bell: in light traffic a worker sleeps until a sender rings, instead of looking again and again."""

from __future__ import annotations

from contextlib import suppress

from ulak.bell import Bell
from ulak.pace import Pace
from ulak.port import RINGS, Busy, Database

# A bell that rings so often in vain, because others use NOTIFY too, is worse than none. A true one makes up for a few.
FALSE_RINGS = 200
WORTH = 4


class Listener:
    """Deaf until it has a bell, and while traffic is dense."""

    def __init__(self, database: Database, pace: Pace) -> None:
        self._database = database
        self._pace = pace
        self._bell: Bell | None = None
        # Who has drawn an id up to this one rings when he commits.
        self._rings_to = 0
        self._false_rings = 0
        # Somebody has rung, and nobody has answered yet.
        self.has_rung = False
        self.is_listening = False

    def take(self, bell: Bell) -> None:
        self._bell = bell

    def can_listen(self, now: float) -> bool:
        return self._bell is not None and self._pace.is_light(now)

    @property
    def is_set(self) -> bool:
        """The next senders will ring."""
        return self._pace.last_sent + RINGS // 2 <= self._rings_to

    def look(self, now: float) -> bool:
        """Begins to listen, or sets the bell anew; whether somebody has sent who may not ring, or else there is one."""
        assert self._bell is not None
        if not self.is_listening:
            self._bell.hold()
            self.is_listening = True
        try:
            found = self._database.set_bell()
        except Busy:
            self._do_without()
            return True
        has_sent = self._pace.sees(now, found.last_sent, found.last_sent <= self._rings_to)
        self._rings_to = found.rings_to
        return has_sent or found.has_pending

    def hear(self, seconds: float = 0) -> None:
        """Waits for so long, unless it rings or has rung."""
        if self._bell is not None and self.is_listening and self._bell.rang(seconds):
            self.has_rung = True

    def answered(self, found: bool) -> None:
        """After the claim that a ring led to."""
        self.has_rung = False
        self._false_rings = max(0, self._false_rings + (-WORTH if found else 1))
        if self._false_rings >= FALSE_RINGS:
            self._do_without()

    def _do_without(self) -> None:
        self.stop()
        self._bell = None
        with suppress(Busy):
            self._database.unlisten()

    def stop(self) -> None:
        if self._bell is not None:
            self._bell.let_go()
        self.is_listening = False
$module$),
('ulak.login', $module$"""Whether a role can log in: asks libpq, as pg_cron will, instead of guessing from pg_hba.conf."""

from __future__ import annotations

import ctypes
import ctypes.util
from collections.abc import Mapping

_CONNECTION_OK = 0
_TUPLES_OK = 2


class LoginError(Exception):
    """Why there is no connection, in the server's words."""


def ask(parameters: Mapping[str, str], query: str) -> str:
    """Logs in with these parameters and returns the one value of a query."""
    libpq = _libpq()
    strings = ctypes.c_char_p * (len(parameters) + 1)
    connection = ctypes.c_void_p(
        libpq.PQconnectdbParams(
            strings(*(key.encode() for key in parameters), None),
            strings(*(value.encode() for value in parameters.values()), None),
            0,
        )
    )
    try:
        if libpq.PQstatus(connection) != _CONNECTION_OK:
            raise LoginError(_text(libpq.PQerrorMessage(connection)))
        result = ctypes.c_void_p(libpq.PQexec(connection, query.encode()))
        try:
            if libpq.PQresultStatus(result) != _TUPLES_OK:
                raise LoginError(_text(libpq.PQerrorMessage(connection)))
            return _text(libpq.PQgetvalue(result, 0, 0))
        finally:
            libpq.PQclear(result)
    finally:
        libpq.PQfinish(connection)


def _libpq() -> ctypes.CDLL:
    name = ctypes.util.find_library("pq") or "libpq.so.5"
    try:
        libpq = ctypes.CDLL(name)
    except OSError as error:
        raise LoginError(f"{name} can't be loaded: {error}") from error
    for function in (libpq.PQconnectdbParams, libpq.PQexec):
        function.restype = ctypes.c_void_p
    for function in (libpq.PQerrorMessage, libpq.PQgetvalue):
        function.restype = ctypes.c_char_p
    return libpq


def _text(value: bytes) -> str:
    return value.decode("utf-8", "replace").strip()
$module$),
('ulak.mark', $module$"""Where the last claim ended, so that the next one can begin there.

What was claimed stays in the index until vacuum removes it, and a claim walks over it. Usually that is little. When
another session keeps vacuum from its work it is much, and then a claim that knows where to begin needn't. It sees no
other endpoint and no message that fell due before that place, so it must not be the rule: the more time was lost, the
longer the next claims begin at the mark, and never longer than to make the loss a small one.
"""

from __future__ import annotations

from typing import NamedTuple

# What a claim may take, and each message of it, as long as nothing else is known.
CLAIM_SECONDS = 0.001
MESSAGE_SECONDS = 0.0001
# Claims of so many tell what a message costs when nothing is walked over. One in a few begins at the mark to learn it.
TELLING = 32
ONE_IN = 8
# One part of the time may be lost.
PARTS = 20
LONGEST = 1.0


class Place(NamedTuple):
    """An entry of the index of pending messages."""

    endpoint_id: int
    priority: int
    due_at: str
    id: int


class Mark:
    def __init__(self) -> None:
        self._place: Place | None = None
        self._until = 0.0
        # Of a message in a claim that began at the mark.
        self._seconds = MESSAGE_SECONDS
        self._telling = 0

    @property
    def endpoint_id(self) -> int | None:
        return None if self._place is None else self._place.endpoint_id

    def place(self, now: float) -> Place | None:
        """Where to begin; None: at the beginning."""
        return self._place if now < self._until or self._telling >= ONE_IN else None

    def claimed(self, now: float, began: float, count: int, whole: bool, place: Place | None) -> None:
        """After a claim that got so many, all of one endpoint and priority if there is a place; whole: it began at the
        beginning."""
        self._place = place
        self._telling = self._telling + 1 if whole and place is not None and count >= TELLING else 0
        if whole:
            lost = now - began - CLAIM_SECONDS - count * self._seconds
            self._until = now + min(LONGEST, max(0.0, lost) * PARTS)
        elif count >= TELLING:
            self._seconds += ((now - began) / count - self._seconds) / 4
$module$),
('ulak.markup', $module$"""HTML and SVG as values: whatever isn't markup already is escaped, and every element is closed."""

from __future__ import annotations

import html
from collections.abc import Iterable

VOID = frozenset(("meta", "br", "hr", "img", "rect", "line", "path", "circle", "polyline", "polygon"))


class Markup(str):
    """Text that was built here and needs no escaping."""

    __slots__ = ()


Child = str | int | float | None | Iterable["Child"]


def tag(name: str, /, *children: Child, **attributes: object) -> Markup:
    """An element. None and False leave an attribute or a child out; class_ is class, and _ stands for - in a name."""
    head = name
    for key, value in attributes.items():
        if value is not None and value is not False:
            head += f' {key.rstrip("_").replace("_", "-")}="{_text(value)}"'
    body = join(children)
    if not body and name in VOID:
        return Markup(f"<{head}/>")
    return Markup(f"<{head}>{body}</{name}>")


def join(children: Child) -> Markup:
    if isinstance(children, Markup):
        return children
    if children is None or children is False:
        return Markup()
    if isinstance(children, (str, int, float)):
        return Markup(_text(children))
    return Markup("".join([join(child) for child in children]))


def _text(value: object) -> str:
    """Escaped. Coordinates with one decimal are fine enough, and a page of them is half as long."""
    if isinstance(value, float):
        return f"{value:.1f}".removesuffix(".0")
    return str(value) if isinstance(value, int) else html.escape(str(value))
$module$),
('ulak.model', $module$"""The values that cross borders: settings, endpoint, message, request, what came back, and the outcome."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

# A header as libcurl takes it: "name: value"; bytes when it isn't ASCII.
Line = str | bytes


class ConfigError(ValueError):
    """An endpoint's config can't be used; nothing is wrong with the message."""


class MessageError(ValueError):
    """A message can't be sent as it is, however often it is tried."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Defaults for what an endpoint's config leaves open."""

    http_timeout: float = 10
    http_connect_timeout: float = 5
    capture_response: bool = False
    response_body_max_size: int = 65536
    cloudevents_source: str = "/ulak"
    user_agent: str = "ulak"


@dataclass(frozen=True, slots=True)
class Proxy:
    url: str
    username: str | None = None
    password: str | None = None
    no_proxy: str | None = None
    ca_bundle: str | None = None
    ssl_verify: bool = True


# Compared by identity: a handle prepared for one profile serves exactly that profile.
@dataclass(frozen=True, slots=True, eq=False)
class Profile:
    """What libcurl must know about a receiver; set once per handle, not once per message."""

    url: str
    method: str = "POST"
    timeout: float = 10
    connect_timeout: float = 5
    ssl_verify: bool = True
    tls_ca_bundle: str | None = None
    tls_client_cert: str | None = None
    tls_client_key: str | None = None
    tls_pinned_public_key: str | None = None
    proxy: Proxy | None = None
    capture_response: bool = False
    keep_body: int = 512


@dataclass(frozen=True, slots=True)
class Basic:
    username: str
    password: str


@dataclass(frozen=True, slots=True)
class Bearer:
    token: str


@dataclass(frozen=True, slots=True)
class OAuth2:
    token_url: str
    client_id: str
    client_secret: str
    scope: str | None = None


@dataclass(frozen=True, slots=True)
class SigV4:
    access_key: str
    secret_key: str
    region: str
    service: str
    session_token: str | None = None


@dataclass(frozen=True, slots=True)
class CloudEvents:
    mode: str
    source: str
    type: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Endpoint:
    """An endpoint's config, parsed once per config_version."""

    id: int
    name: str
    config_version: int
    profile: Profile
    # By lower-case name; a message's own headers may replace some of them.
    headers: Mapping[str, Line]
    # The same, ready to send when the message brings no header of its own.
    lines: tuple[Line, ...]
    signing_keys: tuple[bytes, ...] = ()
    auth: Basic | Bearer | OAuth2 | SigV4 | None = None
    # The token request's own profile: the same proxy, another receiver.
    token_profile: Profile | None = None
    cloudevents: CloudEvents | None = None
    batch_size: int = 1
    batch_format: str = "json"
    max_in_flight: int | None = None
    retry_on: frozenset[str] = frozenset()
    permanent_on: frozenset[str] = frozenset()


# The types made for every message are named tuples: a frozen dataclass costs four times as much to make.
class Message(NamedTuple):
    """One claimed message; payload, headers and metadata are JSON text as the database gives them."""

    id: int
    message_id: str
    attempt: int
    payload: str
    headers: str | None = None
    metadata: str | None = None
    correlation_id: str | None = None
    ordering_key: str | None = None
    created_at: str | None = None


class Request(NamedTuple):
    profile: Profile
    headers: list[Line]
    body: bytes
    # Handed back with the answer; the transport doesn't look at it.
    tag: object = None


class Finished(NamedTuple):
    """How one exchange ended: a status, or an error and its kind, or both when the answer broke off."""

    request: Request
    status: int
    # None | timeout | resolve | connect | blocked | tls | network | config
    kind: str | None = None
    error: str | None = None
    headers: tuple[bytes, ...] = ()
    body: bytes = b""
    truncated: bool = False
    # Total, and until the first byte of the answer; only measured for a captured response.
    seconds: float | None = None
    first_byte_seconds: float | None = None


class Outcome(NamedTuple):
    """What the database is told: error is None for delivered, else it starts with [RETRYABLE] or its siblings."""

    error: str | None = None
    retry_after: int | None = None
    # JSON text, only with capture_response.
    response: str | None = None
    status: int = 0
$module$),
('ulak.oauth', $module$"""OAuth2 client credentials: the token request, its answer, and a cache of tokens until they expire."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from typing import NamedTuple
from urllib.parse import quote_plus, urlencode

from ulak.model import Endpoint, Finished, OAuth2, Request

# A token without expires_in is asked for again after this; the specification leaves it to us.
_UNKNOWN_LIFE = 300
# Not used in its last seconds: the request must arrive while it is valid.
_MARGIN = 30
_TOKEN = re.compile(r"[\x21-\x7e]+")


class Token(NamedTuple):
    value: str
    good_until: float


class TokenError(ValueError):
    """The token server's answer holds no usable token."""


class TokenCache:
    """Tokens by what they were asked with; a changed secret therefore asks again."""

    def __init__(self) -> None:
        self._tokens: dict[OAuth2, Token] = {}

    def get(self, auth: OAuth2, now: float) -> str | None:
        token = self._tokens.get(auth)
        return token.value if token is not None and now < token.good_until else None

    def put(self, auth: OAuth2, token: Token, now: float) -> None:
        # Whoever rotates secrets for years mustn't fill the memory of a worker.
        self._tokens = {key: value for key, value in self._tokens.items() if now < value.good_until}
        self._tokens[auth] = token

    def discard(self, auth: OAuth2, value: str) -> None:
        """Drops a refused token, unless another request has replaced it already."""
        token = self._tokens.get(auth)
        if token is not None and token.value == value:
            del self._tokens[auth]


def token_request(endpoint: Endpoint, tag: object = None) -> Request:
    """Client id and secret by HTTP Basic, which every server of the specification must take."""
    auth = endpoint.auth
    assert isinstance(auth, OAuth2) and endpoint.token_profile is not None
    form = {"grant_type": "client_credentials"}
    if auth.scope:
        form["scope"] = auth.scope
    pair = f"{quote_plus(auth.client_id)}:{quote_plus(auth.client_secret)}"
    return Request(
        endpoint.token_profile,
        [
            "accept: application/json",
            endpoint.headers["user-agent"],
            "content-type: application/x-www-form-urlencoded",
            "authorization: Basic " + b64encode(pair.encode()).decode(),
        ],
        urlencode(form).encode(),
        tag,
    )


def parse(finished: Finished, now: float) -> Token:
    """The token of an answer. Errors quote the status and the server's error code, never the token."""
    if finished.kind is not None:
        raise TokenError(f"{finished.kind}: {finished.error}")
    try:
        answer = json.loads(finished.body)
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict):
        answer = {}
    if not 200 <= finished.status < 300:
        code = answer.get("error")
        raise TokenError(f"HTTP {finished.status}" + (f": {code[:100]}" if isinstance(code, str) else ""))
    value = answer.get("access_token")
    if not isinstance(value, str) or not _TOKEN.fullmatch(value):
        raise TokenError("the answer holds no access_token")
    try:
        life = float(answer.get("expires_in", _UNKNOWN_LIFE))
    except (TypeError, ValueError):
        life = _UNKNOWN_LIFE
    life = min(max(life, 0), 86400) if life == life else _UNKNOWN_LIFE
    return Token(value, now + life - min(_MARGIN, life / 10))
$module$),
('ulak.options', $module$"""The settings that the worker lives by, parsed from what the database tells."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ulak.address import Guard
from ulak.model import Settings


@dataclass(frozen=True, slots=True)
class Options:
    # Requests in flight, of which one endpoint may have seven eighths: worker_concurrency.
    slots: int
    batch_size: int
    poll_interval: float
    poll_interval_busy: float
    lease: float
    guard: Guard
    endpoint: Settings


# Files that PostgreSQL itself needs in a backend.
_OTHER_FILES = 200


def parse(settings: Mapping[str, str], version: str, max_files: int = 1024) -> Options:
    """max_files is what the operating system lets a process have open (-1: any number); each request needs a socket."""
    slots = -(-int(settings["worker_concurrency"]) * 8 // 7)
    if max_files >= 0:
        # Twice: slow receivers have slots of their own.
        slots = min(slots, max(2, (max_files - _OTHER_FILES) // 2))
    return Options(
        slots=slots,
        batch_size=int(settings["batch_size"]),
        poll_interval=int(settings["poll_interval"]) / 1000,
        poll_interval_busy=int(settings["poll_interval_busy"]) / 1000,
        lease=float(settings["lease_seconds"]),
        guard=Guard(
            allow_internal=settings["http_allow_internal_urls"] == "true",
            allowed=settings["http_allowed_networks"].split(","),
        ),
        endpoint=Settings(
            http_timeout=float(settings["http_timeout"]),
            http_connect_timeout=float(settings["http_connect_timeout"]),
            capture_response=settings["capture_response"] == "true",
            response_body_max_size=int(settings["response_body_max_size"]),
            cloudevents_source=settings["cloudevents_source"],
            user_agent=f"ulak/{version}",
        ),
    )
$module$),
('ulak.pace', $module$"""How often the worker looks for messages: at once while there are more, fast while traffic flows, else seldom."""

from __future__ import annotations

# How long traffic counts as flowing.
BUSY_SECONDS = 3.0
# How long a message that was sent but not yet seen is looked for: its sender may not have committed.
EXPECT_SECONDS = 0.1
# What the wait grows by from one idle look to the next.
GROWTH = 1.25
# Traffic is light when messages are further apart than so many looks: most are in vain then, and come less often.
LIGHT_LOOKS = 6
LIGHT_WAIT = 1.5
# Messages that come closer than this are better looked for. Beyond, a sender's bell is cheaper.
BELL_SECONDS = 0.004
# Without a new id a claim is made after so many of the longest waits, for retries and for senders who committed late.
CLAIM_WAITS = 3


class Pace:
    """A look is cheap (has anybody sent?); a claim is not. Both are asked for by time, which the caller gives."""

    def __init__(self, busy: float, idle: float, now: float) -> None:
        self.busy = busy
        self.idle = idle
        # Only one worker of a fleet looks at the busy pace: one is enough to notice.
        self.is_poller = True
        # The last claim got all that it asked for: there are more where these came from.
        self.more = False
        # From one look to the next.
        self.interval = busy
        # What the last look saw.
        self.last_sent = -1
        self._expected = -1
        self._expected_until = now
        self._busy_until = now
        self._sent_at = now
        # Seconds from one new id to the next, of late.
        self._gap = 0.0
        self._next_look = now
        self._next_claim = now

    def wait(self, now: float) -> float:
        """Seconds until the next look."""
        return 0.0 if self.more else max(0.0, self._next_look - now)

    def patience(self, now: float) -> float:
        """Seconds until a claim is due even if nobody sends: one look if a sender hasn't committed yet."""
        if self._is_expecting(now):
            return self.interval
        return max(self.interval, self._next_claim - now)

    def is_light(self, now: float) -> bool:
        """Whether messages come one by one, so that it is worth to be woken for each."""
        return max(self._gap, now - self._sent_at) > BELL_SECONDS

    def wants_claim(self, now: float, last_sent: int) -> bool:
        """Called at each look, with the id that was drawn last by any sender."""
        # Retries fall due and late transactions commit without a new id: a claim now and then finds them.
        return self.sees(now, last_sent) or self.more or now >= self._next_claim

    def sees(self, now: float, last_sent: int, rings: bool = False) -> bool:
        """Whether somebody has sent whose message wasn't found yet; rings: who commits later will be heard."""
        is_new = last_sent != self.last_sent
        if is_new:
            self._saw(now, last_sent)
            if not rings:
                self._expected = last_sent
                self._expected_until = now + EXPECT_SECONDS
        return is_new or self._is_expecting(now)

    def looked(self, now: float) -> None:
        """After a look, whether or not it led to a claim."""
        if now < self._busy_until and self.is_poller:
            self.interval = self.busy * (LIGHT_WAIT if self._gap > LIGHT_LOOKS * self.busy else 1)
        else:
            self.interval = min(self.idle, self.interval * GROWTH)
        self._next_look = now + self.interval

    def claimed(self, now: float, newest: int | None, more: bool) -> None:
        """After a claim: the highest id that it got, if any, and whether there may be more."""
        self.more = more
        if newest is not None:
            if newest > self.last_sent:
                self._saw(now, newest)
            self._busy_until = now + BUSY_SECONDS
            if newest >= self._expected:
                self._expected = -1
        self._next_claim = now + self.idle * CLAIM_WAITS

    def claimed_new(self, now: float, newest: int, more: bool) -> None:
        """After a claim of what is new and nothing else."""
        self.more = more
        self._saw(now, max(newest, self.last_sent))

    def _saw(self, now: float, last_sent: int) -> None:
        self._gap += (min(BUSY_SECONDS, now - self._sent_at) - self._gap) / 4
        self._sent_at = now
        self._busy_until = now + BUSY_SECONDS
        self.last_sent = last_sent

    def _is_expecting(self, now: float) -> bool:
        return self._expected >= 0 and now < self._expected_until
$module$),
('ulak.ping', $module$"""One test request to an endpoint now, signed and authorised like any other, outside of the queue."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import replace

from ulak.courier import Courier
from ulak.http import Transport
from ulak.model import Endpoint, Message, Outcome

PAYLOAD = '{"type": "ulak.ping"}'


def ping(
    endpoint: Endpoint,
    transport: Transport,
    between_steps: Callable[[], object],
    clock: Callable[[], float] = time.time,
) -> Outcome:
    """The outcome with its response captured; between_steps() is called at least every 100 ms."""
    capturing = replace(endpoint, profile=replace(endpoint.profile, capture_response=True))
    courier = Courier(transport, clock)
    courier.send(capturing, [Message(id=0, message_id=str(uuid.uuid4()), attempt=1, payload=PAYLOAD)])
    while True:
        for settled in courier.step(0.1):
            return settled.outcome
        between_steps()
$module$),
('ulak.port', $module$"""What the worker needs of a database, so that its loop runs in tests without one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from ulak.bell import Bell
from ulak.model import Message

# How many ids ring after the bell was set.
RINGS = 16


class Busy(Exception):
    """The database can't do it now: a lock is taken, a deadlock was broken, a disk is full. Nothing was changed."""


class Refused(Exception):
    """The database won't do it, now or later, because of what it was given. Nothing was changed."""


class Claimed(NamedTuple):
    """What a claim got of one endpoint, and the config that holds for it."""

    endpoint_id: int
    config_version: int
    messages: list[Message]


class EndpointConfig(NamedTuple):
    id: int
    name: str
    config_version: int
    config: Mapping[str, Any]
    signing_secrets: Sequence[str]


class Tidings(NamedTuple):
    """What a worker is told when it asks."""

    # "stop": leave at once; "restart": leave in good order, another run will follow; None: go on.
    leave: str | None
    # All settings that were changed, as one text: the worker begins anew when it isn't what it was.
    settings: str


class Outcomes(NamedTuple):
    """Settled messages in their order of arrival, column by column; a column of nothing but None is None."""

    ids: Sequence[int]
    attempts: Sequence[int]
    errors: Sequence[str | None] | None
    retry_after: Sequence[int | None] | None
    responses: Sequence[str | None] | None


class BellSet(NamedTuple):
    # Who draws an id up to this one rings.
    rings_to: int
    # The id that a sender drew last, read after the bell was set.
    last_sent: int
    # Whether there is anything that a claim could find, now or later.
    has_pending: bool


class Database(Protocol):
    """No method but commit() ends a transaction. Each may raise Busy or Refused, and the transaction goes on."""

    def commit(self) -> None: ...

    def heed(self) -> None:
        """Ends the run if it was cancelled, or if the server is gone. Costs next to nothing."""

    def last_sent(self) -> int:
        """The id that a sender drew last. Cheap: it tells whether a claim may find something new."""

    def await_send(self, last_sent: int, interval: float, seconds: float) -> int:
        """Looks every interval until last_sent() isn't what it was, for at most so many seconds; returns what it is."""

    def claim(self, limit: int, lease: float, rooms: Mapping[int, int], room: int) -> list[Claimed]:
        """At most `room` messages of an endpoint; rooms has a number of their own for some."""

    def light_turn(
        self, after: int, count: int, lease: float, delivered: Sequence[Message]
    ) -> tuple[list[Claimed], list[int]]:
        """Claims of so many ids after this one, and settles what was delivered. Both only if claim() and settle()
        wouldn't have to think; returns what it claimed and which it settled."""

    def endpoint_configs(self, ids: Iterable[int]) -> list[EndpointConfig]: ...

    def settle(self, outcomes: Outcomes) -> None: ...

    def release(self, ids: Sequence[int], attempts: Sequence[int], delay: float) -> None: ...

    def renew(self, ids: Sequence[int], attempts: Sequence[int], lease: float) -> Sequence[int]:
        """The ids that are still held."""

    def blocked_endpoints(self, ids: Iterable[int]) -> Mapping[int, str]:
        """Of these endpoints, those that must not be sent to now, and why: open, half_open or disabled."""

    def check(self) -> Tidings:
        """Whether to go on. Also the moment at which a cancel is noticed, so it is called ten times a second."""

    def report(self, progress: Mapping[str, object], statistics: Sequence[Mapping[str, object]]) -> None:
        """A sign of life with the counters since the last one."""

    def sweep(self) -> None:
        """Takes back what dead workers held and marks what expired, unless another worker is at it."""

    def become_poller(self) -> bool:
        """One worker of the fleet looks often for new messages; the others come when there is much to do."""

    def listen(self) -> Bell | None:
        """A bell that senders ring, if the database can have one."""

    def set_bell(self) -> BellSet:
        """The next RINGS senders will ring."""

    def unlisten(self) -> None: ...
$module$),
('ulak.preview', $module$"""The request of one message as it would be sent now, without sending it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ulak import curl_command, endpoint, options, request
from ulak.model import Message, OAuth2


def curl(given: Mapping[str, Any], now: float) -> str:
    """As a curl command. `given` holds endpoint, settings, version and message, as ulak.curl() gathers them."""
    config = given["endpoint"]
    parsed = endpoint.parse(
        config["id"],
        config["name"],
        config["config_version"],
        config["config"],
        config["signing_secrets"],
        options.parse(given["settings"], given["version"]).endpoint,
    )
    # A real token is none of the reader's business, and fetching one would be a request.
    token = curl_command.MASK if isinstance(parsed.auth, OAuth2) else None
    return curl_command.render(request.build(parsed, [Message(**given["message"])], now, token))
$module$),
('ulak.report', $module$"""ulak.report(): one page about the last hours, that needs nothing but a browser."""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ulak import chart, wording
from ulak.chart import Series
from ulak.markup import Child, Markup, tag
from ulak.report_style import STYLE

Row = Mapping[str, Any]

GLYPHS = {"flowing": "●", "idle": "·", "late": "▲", "failing": "▲", "half_open": "◐", "open": "○", "disabled": "■"}
MOODS = {"flowing": "good", "late": "warn", "failing": "warn", "half_open": "bad", "open": "bad"}
SEVERITIES = {"critical": "bad", "warning": "warn", "info": "calm", "ok": "good"}
WORKER_MOODS = {"running": "good", "lost": "bad", "leaving": "warn"}
# Findings of one kind that are shown at once.
ALIKE = 3
STEP_MOODS = {"ok": "good", "failed": "bad", "late": "warn", "behind": "warn"}


def render(data: Row) -> str:
    """The page. `data` is what ulak._report_data() gathers."""
    now = wording.time(data["now"])
    body = tag(
        "main",
        _head(data, now),
        _verdict(data),
        _tiles(data, now),
        _traffic(data),
        _endpoints(data, now),
        tag(
            "div",
            tag("div", _dead(data, now), _partitions(data), class_="stack"),
            tag("div", _workers(data, now), _maintenance(data, now), class_="stack"),
            class_="pair",
        ),
        tag("footer", f"ulak {data['version']} on PostgreSQL {data['server']}. All times are UTC."),
    )
    page = tag(
        "html",
        tag(
            "head",
            tag("meta", charset="utf-8"),
            tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
            tag("meta", name="color-scheme", content="light dark"),
            tag("title", f"ulak: {data['database']}, {wording.day_and_clock(now)}"),
            tag("style", Markup(STYLE)),
        ),
        tag("body", body),
        lang="en",
    )
    return f"<!DOCTYPE html>\n{page}\n"


def _head(data: Row, now: datetime.datetime) -> Markup:
    hours = data["hours"]
    return tag(
        "header",
        tag(
            "h1",
            tag(
                "svg",
                tag("path", d="M2 12.5 22 3 15.5 21l-4-7z"),
                tag("path", class_="fold", d="M22 3 11.5 14"),
                class_="mark",
                viewBox="0 0 24 24",
                aria_hidden="true",
            ),
            "ulak",
            tag("span", data["database"], class_="database"),
        ),
        tag(
            "p",
            f"The last {'hour' if hours == 1 else f'{hours} hours'} until ",
            tag("time", wording.day_and_clock(now), datetime=now.isoformat()),
            class_="quiet",
        ),
    )


def _verdict(data: Row) -> Markup:
    findings = [each for each in data["findings"] if each["severity"] != "ok"]
    if not findings:
        return tag(
            "section", tag("h2", "All is well"), tag("p", "The doctor found nothing wrong."), class_="verdict good"
        )
    worst = SEVERITIES[findings[0]["severity"]]
    counted = [
        f"{count} {many if count > 1 else one}"
        for severity, one, many in (
            ("critical", "critical", "critical"),
            ("warning", "warning", "warnings"),
            ("info", "note", "notes"),
        )
        if (count := sum(each["severity"] == severity for each in findings))
    ]
    return tag(
        "section",
        tag(
            "h2",
            "Nothing urgent" if worst == "calm" else "Needs attention",
            tag("span", ", ".join(counted), class_="quiet"),
        ),
        tag("ul", _findings(findings), class_="findings"),
        class_=f"verdict {worst}",
    )


def _findings(findings: Sequence[Row]) -> Iterator[Markup]:
    """Of one kind only some, and the rest behind them: whatever else is wrong must be seen."""
    for _, group in itertools.groupby(findings, lambda each: (each["severity"], each["check_name"])):
        alike = list(group)
        shown = len(alike) if len(alike) <= ALIKE + 1 else ALIKE
        yield from (_finding(each, is_open=each["severity"] == "critical") for each in alike[:shown])
        if rest := alike[shown:]:
            yield tag(
                "li",
                tag(
                    "details",
                    tag("summary", tag("span", f"and {len(rest)} more like these", class_="more")),
                    tag("ul", (_finding(each, is_open=False) for each in rest), class_="findings"),
                ),
            )


def _finding(finding: Row, is_open: bool) -> Markup:
    said = [
        tag("span", finding["check_name"], class_=f"pill {SEVERITIES[finding['severity']]}"),
        tag("span", finding["finding"]),
    ]
    if not finding["fix"]:
        return tag("li", tag("p", *said))
    return tag(
        "li",
        tag(
            "details",
            tag("summary", *said),
            tag("pre", tag("code", finding["fix"])),
            open=is_open and "open",
        ),
    )


def _tiles(data: Row, now: datetime.datetime) -> Markup:
    steps, endpoints = data["traffic"], data["endpoints"]
    delivered = sum(each["delivered"] for each in steps)
    failed = sum(each["failed"] for each in steps)
    waiting = sum(each["waiting"] for each in endpoints)
    due = min((each["due_since"] for each in endpoints if each["due_since"]), default=None)
    late = (now - wording.time(due)).total_seconds() if due else None
    p95 = [each["p95_ms"] for each in steps if each["p95_ms"] is not None]
    alive = sum(each["state"] in ("running", "leaving") for each in data["workers"])
    dead = sum(each["dead"] for each in endpoints)
    share = 100 * failed / (delivered + failed) if delivered + failed else None
    rate = sum(each["per_second"] or 0 for each in endpoints)
    return tag(
        "section",
        _tile(
            "Delivered",
            wording.number(delivered),
            f"{wording.number(rate)} a second now" if rate else "none right now",
            None,
        ),
        _tile(
            "Failed attempts",
            "none" if not failed else f"{share:.1f}%",
            f"{wording.number(failed)} of {wording.number(delivered + failed)}",
            "bad" if share and share >= 20 else "warn" if share and share >= 5 else None,
        ),
        _tile(
            "Latency, p95",
            wording.milliseconds(p95[-1] if p95 else None) or "no data",
            "of the last requests",
            None,
        ),
        _tile(
            "Waiting",
            ("~" if any(each["is_estimate"] for each in endpoints) else "") + wording.number(waiting),
            f"oldest due for {wording.duration(late)}" if late else "nothing is due",
            "bad" if late and late > 3600 else "warn" if late and late > 60 else None,
        ),
        _tile("Dead letters", wording.number(dead), "not redriven", "warn" if dead else None),
        _tile("Workers", str(alive), "alive", None if alive else "bad"),
        class_="tiles",
    )


def _tile(name: str, value: str, note: str, mood: str | None) -> Markup:
    return tag(
        "div",
        tag("h3", name),
        tag("p", value, class_="value"),
        tag("p", note, class_="quiet"),
        class_=f"tile {mood or ''}".strip(),
    )


def _traffic(data: Row) -> Child:
    steps: Sequence[Row] = data["traffic"]
    times = [wording.time(each["at"]) for each in steps]
    per_second = [[each[name] / each["seconds"] for each in steps] for name in ("delivered", "failed")]
    throughput = chart.bars(
        "Deliveries and failed attempts per second",
        times,
        [Series("delivered", "delivered", per_second[0]), Series("failed", "failed", per_second[1])],
        wording.number,
    )
    latency = chart.lines(
        "Latency of requests in milliseconds",
        times,
        [
            Series("p95", "p95", [each["p95_ms"] for each in steps]),
            Series("p50", "p50", [each["p50_ms"] for each in steps]),
        ],
        wording.milliseconds,
    )
    backlog = chart.lines(
        "Messages that wait",
        times,
        [Series("waiting", "waiting", [each["waiting"] for each in steps])],
        wording.number,
        # There are no halves of messages.
        least=4,
    )
    return [
        _panel(
            "Throughput",
            tag("div", throughput, class_="scroll"),
            _legend(("delivered", "delivered"), ("failed", "failed attempts")),
            "messages a second",
        ),
        tag(
            "div",
            _panel("Latency", latency, _legend(("p50", "p50"), ("p95", "p95")), "from request to answer"),
            _panel("Backlog", backlog, _legend(("waiting", "waiting")), "messages, all endpoints"),
            class_="pair",
        ),
    ]


def _panel(title: str, content: Child, aside: Child = None, note: str | None = None) -> Markup:
    return tag(
        "section",
        tag("div", tag("h2", title, note and tag("span", note, class_="quiet")), aside, class_="title"),
        content,
        class_="panel",
    )


def _legend(*names: tuple[str, str]) -> Markup:
    return tag("p", (tag("span", tag("i", class_=f"key {style}"), text) for style, text in names), class_="legend")


Column = tuple[str, str, Callable[[Row], Child]]


def _table(rows: Sequence[Row], columns: Sequence[Column]) -> Markup:
    """Columns are title, class and what stands in a row."""
    head = tag("tr", (tag("th", title, class_=style or None) for title, style, _ in columns))
    body = (tag("tr", (tag("td", cell(row), class_=style or None) for _, style, cell in columns)) for row in rows)
    return tag("div", tag("table", tag("thead", head), tag("tbody", body)), class_="scroll")


def _endpoints(data: Row, now: datetime.datetime) -> Markup:
    rows: Sequence[Row] = data["endpoints"]
    if not rows:
        return _panel("Endpoints", _empty("There are no endpoints yet."))
    hidden = data["endpoint_count"] - len(rows)
    columns: list[Column] = [
        ("", "", lambda row: _state(row["state"])),
        (
            "endpoint",
            "name",
            lambda row: [
                tag("b", row["name"]),
                row["protocol"] != "http" and tag("span", row["protocol"], class_="quiet"),
            ],
        ),
        ("waiting", "n", lambda row: ("~" if row["is_estimate"] else "") + wording.exact(row["waiting"])),
        (
            "due for",
            "n",
            lambda row: row["due_since"] and wording.duration((now - wording.time(row["due_since"])).total_seconds()),
        ),
        ("in flight", "n", lambda row: row["in_flight"] or ""),
        ("/s", "n", lambda row: wording.number(row["per_second"]) if row["per_second"] else ""),
        ("failed", "n", _failed),
        ("p50", "n quiet", lambda row: wording.milliseconds(row["p50_ms"])),
        ("p95", "n", lambda row: wording.milliseconds(row["p95_ms"])),
        ("dead", "n", lambda row: tag("b", wording.exact(row["dead"]), class_="warn") if row["dead"] else ""),
        (
            "last hour",
            "spaced",
            lambda row: chart.sparkline(f"deliveries of {row['name']} in the last hour", row["last_hour"] or []),
        ),
        ("last error", "error", lambda row: _error(row, now)),
    ]
    return _panel(
        "Endpoints",
        [_table(rows, columns), hidden > 0 and tag("p", f"and {hidden} more", class_="quiet")],
        note="the worst first",
    )


def _state(state: str) -> Markup:
    return tag("span", f"{GLYPHS.get(state, '')} {state.replace('_', ' ')}", class_=f"pill {MOODS.get(state, 'calm')}")


def _failed(row: Row) -> Child:
    share = row["failed_percent"]
    if share is None:
        return ""
    return [f"{share:.1f}%", chart.meter(share / 100, "failed")]


def _error(row: Row, now: datetime.datetime) -> Child:
    if not row["last_error"]:
        return None
    return [
        tag("span", row["last_error"], title=row["last_error"]),
        tag("small", wording.ago(row["last_failure_at"], now), class_="quiet"),
    ]


def _dead(data: Row, now: datetime.datetime) -> Markup:
    rows: Sequence[Row] = data["dead"]
    if not rows:
        return _panel("Dead letters by cause", _empty("No dead letter waits for a decision."))
    most = max(row["letters"] for row in rows)
    return _panel(
        "Dead letters by cause",
        tag(
            "ul",
            (
                tag(
                    "li",
                    tag("p", tag("b", row["endpoint"]), tag("span", row["cause"], class_="error", title=row["cause"])),
                    tag(
                        "p",
                        chart.meter(row["letters"] / most, "failed"),
                        tag("b", wording.exact(row["letters"]), class_="n"),
                        tag("small", "last " + wording.ago(row["last_at"], now), class_="quiet"),
                        class_="amount",
                    ),
                )
                for row in rows
            ),
            class_="causes",
        ),
    )


def _workers(data: Row, now: datetime.datetime) -> Markup:
    rows: Sequence[Row] = data["workers"]
    if not rows:
        return _panel("Workers", _empty("No worker has ever reported. To start some: select * from ulak.start();"))
    columns: list[Column] = [
        ("", "", lambda row: tag("span", row["state"], class_=f"pill {WORKER_MOODS.get(row['state'], 'calm')}")),
        ("worker", "name", lambda row: tag("b", row["slot"])),
        ("in flight", "n", lambda row: row["in_flight"] or ""),
        ("settled", "n", lambda row: wording.number(row["messages_processed"])),
        ("failed", "n", lambda row: wording.number(row["error_count"])),
        ("last seen", "n", lambda row: wording.ago(row["heartbeat_at"], now)),
    ]
    return _panel("Workers", _table(rows, columns))


def _partitions(data: Row) -> Markup:
    rows: Sequence[Row] = data["partitions"]
    # Empty partitions are a few pages each: nothing to compare.
    most = max(8 << 20, *(row["bytes"] for row in rows))
    columns: list[Column] = [
        ("partition", "name", lambda row: tag("b", row["name"])),
        ("messages", "n", lambda row: "~" + wording.number(row["rows"]) if row["rows"] else ""),
        ("size", "n", lambda row: wording.size(row["bytes"])),
        ("", "wide", lambda row: chart.meter(row["bytes"] / most, "delivered")),
    ]
    return _panel("Archive", _table(rows, columns), note=f"the queue itself takes {wording.size(data['queue_bytes'])}")


def _maintenance(data: Row, now: datetime.datetime) -> Markup:
    rows: Sequence[Row] = data["maintenance"]
    chips = (
        tag(
            "span",
            tag("i", class_=f"light {STEP_MOODS.get(row['state'], 'calm')}"),
            row["step"].replace("_", " "),
            row["state"] != "ok" and tag("b", row["state"]),
            class_="chip",
            title=f"{row['what']}; last run {wording.ago(row['started_at'], now)}",
        )
        for row in rows
    )
    errors = (
        tag("li", tag("b", row["step"]), tag("span", row["last_error"], class_="error", title=row["last_error"]))
        for row in rows
        if row["state"] == "failed"
    )
    last = max((row["started_at"] for row in rows if row["started_at"] and row["step"] != "vacuum"), default=None)
    return _panel(
        "Maintenance",
        [tag("p", chips, class_="chips"), tag("ul", errors, class_="causes")],
        note=f"ran {wording.ago(last, now)}" if last else "never ran",
    )


def _empty(text: str) -> Markup:
    return tag("p", text, class_="empty")
$module$),
('ulak.report_style', $module$"""How ulak.report() looks, in light and in dark."""

STYLE = """
:root {
  --ground: #f4f3ef; --panel: #ffffff; --ink: #1d2129; --quiet: #6a6f78; --line: #e4e2db; --grid: #ecebe5;
  --delivered: #2f6fde; --failed: #d9483b; --p95: #b06a10; --p50: #2f6fde; --waiting: #6d5bd0;
  --good: #1c8a57; --warn: #a96a00; --bad: #c8372b; --calm: #6a6f78;
  --good-soft: #e2f3ea; --warn-soft: #fbf0d9; --bad-soft: #fce6e3; --calm-soft: #eeede8; --code: #f6f5f1;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ground: #0f1115; --panel: #171a20; --ink: #e7e8ea; --quiet: #949aa5; --line: #262b34; --grid: #20242c;
    --delivered: #6ea0ff; --failed: #ff7a6b; --p95: #f0b35c; --p50: #6ea0ff; --waiting: #a99bff;
    --good: #56cf95; --warn: #f0b648; --bad: #ff8577; --calm: #949aa5;
    --good-soft: #14291f; --warn-soft: #2d2413; --bad-soft: #331a18; --calm-soft: #22262e; --code: #11141a;
  }
}
* { box-sizing: border-box; margin: 0; }
body {
  background: var(--ground); color: var(--ink); -webkit-font-smoothing: antialiased;
  font: 14px/1.45 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "DejaVu Sans", sans-serif;
}
main { max-width: 1200px; margin: 0 auto; padding: 32px 24px 48px; display: grid; gap: 16px; }
main, .pair, .stack { grid-template-columns: minmax(0, 1fr); }
header {
  display: flex; flex-wrap: wrap; align-items: baseline; justify-content: space-between; gap: 4px 24px; padding:
  0 4px;
}
h1 { font-size: 24px; letter-spacing: -0.02em; display: flex; align-items: baseline; gap: 10px; }
h1 .mark { width: 20px; height: 20px; align-self: center; fill: var(--delivered); }
h1 .fold { stroke: var(--ground); stroke-width: 1.4; fill: none; }
h1 .database { font-weight: 400; color: var(--quiet); letter-spacing: 0; }
h2 { font-size: 15px; letter-spacing: -0.005em; }
h2 .quiet { font-weight: 400; margin-left: 10px; font-size: 13px; }
h3 { font-size: 12px; font-weight: 500; color: var(--quiet); }
.quiet { color: var(--quiet); }
small { font-size: 12px; }
.pair, .stack { display: grid; gap: 16px; align-items: start; }
@media (min-width: 900px) { .pair { grid-template-columns: repeat(2, minmax(0, 1fr)); } }
.panel, .tile, .verdict { background: var(--panel); border: 1px solid var(--line); border-radius: 12px; }
.panel { padding: 16px 18px 14px; }
.title {
  display: flex; flex-wrap: wrap; align-items: baseline; justify-content: space-between; gap: 4px 16px;
  margin-bottom: 10px;
}
.verdict { padding: 16px 18px; border-left: 5px solid var(--calm); }
.verdict.good { border-left-color: var(--good); } .verdict.warn { border-left-color: var(--warn); }
.verdict.bad { border-left-color: var(--bad); }
.findings { list-style: none; padding: 0; display: grid; gap: 7px; margin-top: 12px; }
.findings summary, .findings li p {
  display: grid; grid-template-columns: 110px minmax(0, 1fr) 14px; gap: 12px; align-items: baseline;
}
.findings summary { cursor: pointer; list-style: none; }
.findings summary::-webkit-details-marker { display: none; }
.findings summary::after { content: "+"; color: var(--quiet); text-align: right; }
.findings details[open] summary::after { content: "\\2212"; }
.findings .pill { justify-self: start; }
.findings .more { grid-column: 2; color: var(--quiet); }
pre {
  margin: 5px 26px 5px 122px; background: var(--code); border: 1px solid var(--line); border-radius: 8px; padding:
  6px 10px;
  white-space: pre-wrap; overflow-wrap: anywhere;
}
@media (max-width: 600px) {
  .findings summary, .findings li p { grid-template-columns: minmax(0, 1fr) 14px; gap: 3px 8px; }
  .findings .pill { grid-column: 1 / -1; }
  .findings .more { grid-column: 1; }
  pre { margin-left: 0; }
}
code { font: 12.5px/1.4 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
.pill {
  display: inline-block; padding: 1px 9px; border-radius: 99px; font-size: 12px; font-weight: 500; white-space:
  nowrap;
  background: var(--calm-soft); color: var(--calm);
}
.pill.good { background: var(--good-soft); color: var(--good); }
.pill.warn { background: var(--warn-soft); color: var(--warn); }
.pill.bad { background: var(--bad-soft); color: var(--bad); }
.tiles { display: grid; gap: 12px; grid-template-columns: repeat(auto-fit, minmax(165px, 1fr)); }
.tile { padding: 13px 16px 12px; }
.tile .value {
  font-size: 26px; line-height: 1.25; font-weight: 600; letter-spacing: -0.02em; font-variant-numeric:
  tabular-nums;
}
.tile .quiet { font-size: 12.5px; }
.tile.warn .value, b.warn { color: var(--warn); } .tile.bad .value { color: var(--bad); }
svg { display: block; }
.chart { width: 100%; height: auto; }
.chart.wide { min-width: 720px; }
.grid { stroke: var(--grid); } .axis { stroke: var(--line); }
.tick { fill: var(--quiet); font-size: 11px; font-variant-numeric: tabular-nums; }
.touch { fill: transparent; }
.column:hover .touch { fill: var(--ink); fill-opacity: 0.06; }
rect.delivered { fill: var(--delivered); } rect.failed { fill: var(--failed); }
.line { fill: none; stroke-width: 1.8; stroke-linejoin: round; stroke-linecap: round; }
.line.p95 { stroke: var(--p95); } .line.p50 { stroke: var(--p50); } .line.waiting { stroke: var(--waiting); }
.dot.p95 { fill: var(--p95); } .dot.p50 { fill: var(--p50); } .dot.waiting { fill: var(--waiting); }
.area { fill-opacity: 0.13; }
.area.p95 { fill: var(--p95); } .area.p50 { fill: var(--p50); } .area.waiting { fill: var(--waiting); }
.sparkline { width: 120px; height: 26px; }
.spark { fill: var(--delivered); } .spark.none { fill: var(--line); }
.legend { display: flex; gap: 14px; font-size: 12.5px; color: var(--quiet); }
.key { display: inline-block; width: 9px; height: 9px; border-radius: 3px; margin-right: 6px; }
.key.delivered, .meter .delivered { background: var(--delivered); }
.key.failed, .meter .failed { background: var(--failed); }
.key.p50 { background: var(--p50); } .key.p95 { background: var(--p95); } .key.waiting { background: var(--waiting); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th {
  text-align: left; font-size: 12px; font-weight: 500; color: var(--quiet); padding: 0 12px 7px 0; white-space:
  nowrap;
}
td { padding: 8px 12px 8px 0; border-top: 1px solid var(--line); vertical-align: middle; white-space: nowrap; }
th:last-child, td:last-child { padding-right: 0; }
th.n, td.n { text-align: right; }
td.n .meter { margin: 3px 0 0 auto; width: 44px; }
td.name .quiet { margin-left: 8px; font-size: 12px; }
td.name b { font-weight: 600; }
th.spaced, td.spaced { padding-left: 10px; }
td.wide { width: 40%; }
.error { color: var(--quiet); font-size: 12.5px; }
td.error { max-width: 0; width: 34%; min-width: 180px; }
td.error span, .causes .error { display: block; overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.meter { display: block; height: 5px; border-radius: 99px; background: var(--calm-soft); overflow: hidden; }
.meter span { display: block; height: 100%; border-radius: 99px; }
.causes { list-style: none; padding: 0; display: grid; gap: 13px; grid-template-columns: minmax(0, 1fr); }
.causes b { font-weight: 600; }
.amount { display: grid; grid-template-columns: minmax(0, 1fr) auto auto; gap: 12px; align-items: center; }
.chips { display: flex; flex-wrap: wrap; gap: 7px; padding-bottom: 4px; }
.chip {
  border: 1px solid var(--line); border-radius: 99px; padding: 2px 11px 2px 9px; font-size: 12.5px; white-space:
  nowrap;
}
.chip b { font-weight: 500; margin-left: 6px; color: var(--warn); }
.light {
  display: inline-block; width: 7px; height: 7px; border-radius: 99px; margin-right: 7px; background:
  var(--calm);
}
.light.good { background: var(--good); }
.light.warn { background: var(--warn); }
.light.bad { background: var(--bad); }
.empty { color: var(--quiet); padding: 14px 0 10px; }
footer { color: var(--quiet); font-size: 12.5px; padding: 4px; }
"""
$module$),
('ulak.request', $module$"""The request of one message, or of a batch: body, headers in their order of rank, and signature."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ulak import batch, cloudevents, header, signature, sigv4
from ulak.model import Endpoint, Line, Message, MessageError, Request, SigV4

CORRELATION = "x-correlation-id"


def build(
    endpoint: Endpoint, messages: Sequence[Message], now: float, token: str | None = None, tag: object = None
) -> Request:
    """The request for these messages (more than one only in batch mode); token is OAuth2's."""
    message = messages[0]
    timestamp = int(now)
    if (
        message.headers is None
        and message.correlation_id is None
        and endpoint.cloudevents is None
        and endpoint.batch_size == 1
        and token is None
        and not isinstance(endpoint.auth, SigV4)
    ):
        # The hot path: the endpoint's lines as they are, and nothing that needs a lookup.
        body = message.payload.encode()
        request_id = message.message_id
        lines = [
            *endpoint.lines,
            "webhook-id: " + request_id,
            f"webhook-timestamp: {timestamp}",
            f"ulak-attempt: {message.attempt}",
        ]
        if endpoint.signing_keys:
            lines.append("webhook-signature: " + signature.sign(endpoint.signing_keys, request_id, timestamp, body))
        return Request(endpoint.profile, lines, body, tag)
    return _build(endpoint, messages, now, token, tag)


def _build(endpoint: Endpoint, messages: Sequence[Message], now: float, token: str | None, tag: object) -> Request:
    message = messages[0]
    timestamp = int(now)
    headers = dict(endpoint.headers)
    own = _message_headers(endpoint, message)
    headers.update({name.lower(): header.line(name, value) for name, value in own.items()})
    traceparent = next((value for name, value in own.items() if name.lower() == "traceparent"), None)

    text, fixed = _body(endpoint, messages, traceparent)
    body = text.encode()
    request_id = batch.request_id(messages)
    fixed["webhook-id"] = request_id
    fixed["webhook-timestamp"] = str(timestamp)
    fixed["ulak-attempt"] = str(max(each.attempt for each in messages))
    correlations = {each.correlation_id for each in messages}
    if len(correlations) == 1 and message.correlation_id:
        fixed[CORRELATION] = message.correlation_id
    if endpoint.signing_keys:
        fixed["webhook-signature"] = signature.sign(endpoint.signing_keys, request_id, timestamp, body)
    if token is not None:
        fixed["authorization"] = "Bearer " + token
    headers.update({name: header.line(name, value) for name, value in fixed.items()})
    if isinstance(endpoint.auth, SigV4):
        headers.update(_sigv4(endpoint, endpoint.auth, headers, body, now))
    return Request(endpoint.profile, list(headers.values()), body, tag)


def _body(endpoint: Endpoint, messages: Sequence[Message], traceparent: str | None) -> tuple[str, dict[str, str]]:
    """The body's text, and the headers that its format decides."""
    if endpoint.batch_size > 1:
        text, content_type = batch.body(endpoint, messages)
        return text, {"content-type": content_type} if content_type else {}
    config, message = endpoint.cloudevents, messages[0]
    if config is None:
        return message.payload, {}
    if config.mode == "binary":
        return message.payload, {
            "content-type": "application/json",
            **cloudevents.binary_headers(config, message, traceparent),
        }
    return cloudevents.structured(config, message, traceparent), {"content-type": cloudevents.STRUCTURED}


def _message_headers(endpoint: Endpoint, message: Message) -> dict[str, str]:
    """The message's own headers. A reserved name is left out: what ulak sets stands."""
    if message.headers is None:
        return {}
    given: Any = json.loads(message.headers)
    if not isinstance(given, dict):
        raise MessageError("the message's headers aren't a JSON object")
    own = {}
    for name, value in given.items():
        problem = header.problem(name, value)
        if problem:
            raise MessageError(f"the message's header {name!r} {problem}")
        lower = name.lower()
        if lower in header.RESERVED or (lower == "authorization" and endpoint.auth is not None):
            continue
        own[name] = value
    return own


def _sigv4(endpoint: Endpoint, auth: SigV4, headers: dict[str, Line], body: bytes, now: float) -> dict[str, Line]:
    profile = endpoint.profile
    present = dict(header.split(line) for line in headers.values())
    added = sigv4.sign(auth, profile.method, profile.url, present, body, now)
    return {name: header.line(name, value) for name, value in added.items()}
$module$),
('ulak.response', $module$"""What is kept of an answer: status, headers but for the secret ones, the body up to its limit, and timing."""

from __future__ import annotations

import json
from typing import Any

from ulak.model import Finished

# Credentials and signatures, also those that a receiver echoes.
_SECRET = frozenset(
    (
        "authorization",
        "authentication-info",
        "cookie",
        "proxy-authenticate",
        "proxy-authorization",
        "set-cookie",
        "set-cookie2",
        "signature",
        "signature-input",
        "webhook-signature",
        "www-authenticate",
        "x-amz-security-token",
        "x-api-key",
    )
)
_MAX_HEADERS = 100
_MAX_HEADER_VALUE = 1024


def headers(finished: Finished) -> list[tuple[str, str]]:
    """Names (lower case) and values of the final answer, after those of a proxy or a 100 Continue."""
    found: list[tuple[str, str]] = []
    for raw in finished.headers:
        # jsonb can't hold NUL.
        text = raw.decode("latin-1").rstrip("\r\n").replace("\0", "\ufffd")
        if text.startswith("HTTP/"):
            found = []
            continue
        name, colon, value = text.partition(":")
        if colon:
            found.append((name.strip().lower(), value.strip()))
    return found


def capture(finished: Finished) -> str:
    """JSON text for the column response."""
    kept: dict[str, Any] = {"status": finished.status, "headers": _kept_headers(finished)}
    kept["body"] = finished.body.decode("utf-8", "replace").replace("\0", "\ufffd")
    if finished.truncated:
        kept["truncated"] = True
    if finished.error:
        kept["error"] = finished.error
    if finished.seconds is not None:
        kept["total_ms"] = round(finished.seconds * 1000, 3)
    if finished.first_byte_seconds is not None:
        kept["first_byte_ms"] = round(finished.first_byte_seconds * 1000, 3)
    return json.dumps(kept, ensure_ascii=False, separators=(",", ":"))


def _kept_headers(finished: Finished) -> dict[str, str]:
    kept: dict[str, str] = {}
    for name, value in headers(finished)[:_MAX_HEADERS]:
        if name in _SECRET or name.endswith(("-signature", "-token", "-secret")):
            continue
        value = value[:_MAX_HEADER_VALUE]
        kept[name] = f"{kept[name]}, {value}" if name in kept else value
    return kept
$module$),
('ulak.retry_after', $module$"""The value of a Retry-After header in seconds from now."""

from __future__ import annotations

import re
from datetime import UTC
from email.utils import parsedate_to_datetime

MAX = 86400
_DIGITS = re.compile(r"[0-9]+")


def seconds(value: str, now: float) -> int | None:
    """Seconds or an HTTP date, from 0 to a day; None for anything else, so that the usual backoff holds."""
    value = value.strip()
    if _DIGITS.fullmatch(value):
        # Long before int() of so many digits gets slow, the cap is reached.
        return min(int(value[-19:]) if len(value.lstrip("0")) <= 19 else MAX, MAX)
    # Python's parser takes much that no server means as a date.
    if len(value) > 64 or not value[:1].isalpha():
        return None
    try:
        moment = parsedate_to_datetime(value)
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        delay = moment.timestamp() - now
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
    # Rounded up: not a moment before the date.
    return int(min(max(-(-delay // 1), 0), MAX))
$module$),
('ulak.settling', $module$"""Outcomes on their way into the database. One is kept until it is stored: to lose it would mean to deliver the message
again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from ulak.courier import Settled
from ulak.holding import Held
from ulak.model import Message, Outcome
from ulak.port import Busy, Database, Outcomes, Refused
from ulak.tally import Tally
from ulak.verdict import DELIVERED

# An outcome that the database has no time for is tried again after this, twice as long each time.
RETRY_SECONDS = 0.1
LONGEST_RETRY = 2.0


class Settling:
    def __init__(self, database: Database, held: Held, tally: Tally, now: float) -> None:
        self._database = database
        self._held = held
        self._tally = tally
        self.done: list[Settled] = []
        self.since = now
        # Among them is one that another message waits for.
        self.opens = False
        # All of them are deliveries, with nothing else to store.
        self.is_plain = True
        # Messages, by endpoint.
        self.counts: Counter[int] = Counter()
        # Outcomes that couldn't be stored, by endpoint: somebody has it locked.
        self.deferred: dict[int, list[Settled]] = {}
        self.next_retry = now
        self._retry_delay = RETRY_SECONDS

    def add(self, settled: Sequence[Settled], now: float) -> None:
        if not self.done:
            self.since = now
        for endpoint_id, messages, outcome in settled:
            self.counts[endpoint_id] += len(messages)
            if outcome is not DELIVERED and (outcome.error is not None or outcome.response is not None):
                self.is_plain = False
            if messages[0].ordering_key is not None or (len(messages) > 1 and _has_key(messages)):
                self.opens = True
        self.done += settled

    def store(self, now: float) -> bool:
        """All that is done; what the database has no time for is deferred. Whether there was a failure."""
        failed = _has_failed(self.done, self.is_plain)
        if self.deferred:
            # Where an endpoint is locked, the others needn't wait to see it.
            for done in self.done:
                if done.endpoint_id in self.deferred:
                    self.deferred[done.endpoint_id].append(done)
            self.done = [done for done in self.done if done.endpoint_id not in self.deferred]
        try:
            self._store(self.done, self.is_plain)
            self.done = []
        except (Busy, Refused):
            self._store_apart(now)
        self.opens = False
        self.is_plain = True
        self.counts.clear()
        return failed

    def store_deferred(self, now: float) -> None:
        for endpoint_id, group in list(self.deferred.items()):
            self._store_endpoint(endpoint_id, group, now)

    def deferred_ids(self) -> set[int]:
        return {message.id for done in self.deferred.values() for each in done for message in each.messages}

    def leave_out(self, stored: Collection[int]) -> None:
        """These have been stored by somebody else."""
        left = []
        for done in self.done:
            messages = [each for each in done.messages if each.id in stored]
            self._held.forget(messages)
            if len(messages) < len(done.messages):
                left.append(done._replace(messages=[each for each in done.messages if each.id not in stored]))
        self.done = left
        # What somebody took away from the worker isn't for a light turn.
        self.is_plain = not left
        if not left:
            self.counts.clear()

    def _store_apart(self, now: float) -> None:
        """By endpoint: one that is locked, or that answered with something that can't be stored, is on its own."""
        apart: dict[int, list[Settled]] = {}
        for done in self.done:
            apart.setdefault(done.endpoint_id, []).append(done)
        for endpoint_id, group in apart.items():
            self._store_endpoint(endpoint_id, group, now)
            self.done = [done for done in self.done if done.endpoint_id != endpoint_id]

    def _store_endpoint(self, endpoint_id: int, group: list[Settled], now: float) -> None:
        try:
            self._store(group)
        except Busy:
            self.deferred[endpoint_id] = group
            self.next_retry = now + self._retry_delay
            self._retry_delay = min(self._retry_delay * 2, LONGEST_RETRY)
            return
        except Refused:
            self._store_singly(group)
        if self.deferred.pop(endpoint_id, None) is not None:
            self._retry_delay = RETRY_SECONDS

    def _store_singly(self, group: Iterable[Settled]) -> None:
        """What can't be stored as it is, is stored in plain words. If that fails too, it is left to the lease."""
        for done in group:
            for message in done.messages:
                single = done._replace(messages=[message])
                try:
                    self._store([single])
                except (Busy, Refused):
                    try:
                        self._store([single._replace(outcome=_plain(done.outcome))])
                    except (Busy, Refused) as error:
                        self._tally.last_error = f"message {message.id} can't be settled: {error}"
                        self._held.forget([message])

    def _store(self, group: Sequence[Settled], is_plain: bool = False) -> None:
        if not group:
            return
        failed = _has_failed(group, is_plain)
        answered = not is_plain and any(done.outcome.response is not None for done in group)
        messages = [message for done in group for message in done.messages]
        self._database.settle(
            Outcomes(
                [message.id for message in messages],
                [message.attempt for message in messages],
                [done.outcome.error for done in group for _ in done.messages] if failed else None,
                [done.outcome.retry_after for done in group for _ in done.messages] if failed else None,
                [done.outcome.response for done in group for _ in done.messages] if answered else None,
            )
        )
        self._held.forget(messages)


def _has_failed(group: Iterable[Settled], is_plain: bool) -> bool:
    return not is_plain and any(done.outcome.error is not None for done in group)


def _has_key(messages: Iterable[Message]) -> bool:
    return any(message.ordering_key is not None for message in messages)


def _plain(outcome: Outcome) -> Outcome:
    """Without what a receiver wrote: only ASCII, which every database can store, and no response."""
    error = outcome.error and outcome.error.encode("ascii", "replace").decode().replace("\0", "?")
    return outcome._replace(error=error, response=None)
$module$),
('ulak.signature', $module$"""Standard Webhooks signatures: HMAC-SHA256 over id, timestamp and body, one per secret."""

from __future__ import annotations

import binascii
import hmac
from base64 import b64decode, b64encode
from collections.abc import Sequence

from ulak.model import ConfigError

_PREFIX = "whsec_"


def key(secret: str) -> bytes:
    """The bytes to sign with: whsec_ secrets are base64, any other text is used as it is."""
    if not secret.startswith(_PREFIX):
        return secret.encode()
    text = secret.removeprefix(_PREFIX).rstrip("=")
    try:
        # Padding is often lost on the way.
        return b64decode(text + "=" * (-len(text) % 4), validate=True)
    except binascii.Error as error:
        raise ConfigError("signing secret starts with whsec_ but isn't base64") from error


def sign(keys: Sequence[bytes], message_id: str, timestamp: int, body: bytes) -> str:
    """The value of webhook-signature; several signatures while a secret is being rotated, newest first."""
    content = b"%b.%d.%b" % (message_id.encode(), timestamp, body)
    digests = [b64encode(hmac.digest(key, content, "sha256")).decode() for key in keys]
    return " ".join(["v1," + digest for digest in digests])
$module$),
('ulak.sigv4', $module$"""AWS Signature Version 4 of one request."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from datetime import UTC, datetime
from urllib.parse import quote, unquote, urlsplit

from ulak.model import SigV4

_ALGORITHM = "AWS4-HMAC-SHA256"
_UNRESERVED = "-_.~"


def sign(auth: SigV4, method: str, url: str, headers: Mapping[str, str], body: bytes, now: float) -> dict[str, str]:
    """The headers to add. Of the given ones (lower-case names) host, content-type and x-amz-* are signed."""
    moment = datetime.fromtimestamp(now, UTC)
    stamp = moment.strftime("%Y%m%dT%H%M%SZ")
    digest = hashlib.sha256(body).hexdigest()
    added = {"x-amz-date": stamp}
    if auth.session_token:
        added["x-amz-security-token"] = auth.session_token
    if auth.service == "s3":
        added["x-amz-content-sha256"] = digest

    signed = {name: value for name, value in headers.items() if name == "content-type" or name.startswith("x-amz-")}
    signed |= added | {"host": host(url)}
    names = ";".join(sorted(signed))
    request = "\n".join(
        (
            method,
            _path(url, auth.service),
            _query(url),
            *(f"{name}:{' '.join(signed[name].split())}" for name in sorted(signed)),
            "",
            names,
            digest,
        )
    )
    scope = f"{stamp[:8]}/{auth.region}/{auth.service}/aws4_request"
    text = "\n".join((_ALGORITHM, stamp, scope, hashlib.sha256(request.encode()).hexdigest()))
    signature = hmac.new(_key(auth, stamp[:8]), text.encode(), "sha256").hexdigest()
    added["authorization"] = (
        f"{_ALGORITHM} Credential={auth.access_key}/{scope}, SignedHeaders={names}, Signature={signature}"
    )
    return added


def host(url: str) -> str:
    """The Host header that libcurl sends: without the scheme's own port."""
    parts = urlsplit(url)
    name = (parts.hostname or "").lower()
    if ":" in name:
        name = f"[{name}]"
    default = 443 if parts.scheme == "https" else 80
    return name if parts.port in (None, default) else f"{name}:{parts.port}"


def _key(auth: SigV4, day: str) -> bytes:
    key = ("AWS4" + auth.secret_key).encode()
    for part in (day, auth.region, auth.service, "aws4_request"):
        key = hmac.digest(key, part.encode(), "sha256")
    return key


def _path(url: str, service: str) -> str:
    path = urlsplit(url).path or "/"
    # S3 signs the path as it is sent; the other services encode it once more.
    if service == "s3":
        return quote(unquote(path), safe="/" + _UNRESERVED)
    return quote(path, safe="/" + _UNRESERVED)


def _query(url: str) -> str:
    pairs = [pair.partition("=") for pair in urlsplit(url).query.split("&") if pair]
    encoded = sorted(
        (quote(unquote(name), safe=_UNRESERVED), quote(unquote(value), safe=_UNRESERVED)) for name, _, value in pairs
    )
    return "&".join(f"{name}={value}" for name, value in encoded)
$module$),
('ulak.slots', $module$"""Which endpoint may have how many of the worker's requests in flight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

# A request that takes longer makes its endpoint a slow one.
SLOW_SECONDS = 0.5
# Receivers that answer at once need no more requests in flight than these. What libcurl and the kernel keep for a
# connection is 15 kB: of so many it stays in the processor's own cache.
LEAST_WAVE = 32


class Slots:
    """Two lanes of the same width: receivers that are slow have their own, and can't hold the others up.

    Within its lane an endpoint gets at most seven eighths of what the others leave, so it can't take all.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        # Endpoints that have a request under way for long.
        self.stuck: frozenset[int] = frozenset()
        # Those, and endpoints whose last answer took long.
        self.slow: set[int] = set()
        self._held: Counter[int] = Counter()
        self._taken = 0
        self._taken_slow = 0
        # How many may be in flight to receivers that aren't slow. Slots beyond are for those who take their time.
        self.wave = min(total, LEAST_WAVE)

    @property
    def free(self) -> int:
        """For receivers that aren't slow. When many turn slow at once, both lanes together are the limit."""
        return max(0, min(self.total - self._taken + self._taken_slow, 2 * self.total - self._taken))

    @property
    def slow_in_flight(self) -> int:
        return self._taken_slow

    @property
    def quick_in_flight(self) -> int:
        return self._taken - self._taken_slow

    @property
    def is_wave_full(self) -> bool:
        return self.quick_in_flight >= self.wave

    def waited(self, before: int) -> None:
        """The worker has waited for answers while others are in line and the wave was full; before: of so many."""
        if 4 * (before - self.quick_in_flight) < before:
            self.wave = min(self.total, 2 * self.wave)
        else:
            self.wave = max(min(self.total, LEAST_WAVE), self.wave - self.wave // 8)

    def take(self, endpoint_id: int) -> None:
        self._held[endpoint_id] += 1
        self._taken += 1
        self._taken_slow += endpoint_id in self.slow

    def give_back(self, endpoint_id: int, seconds: float) -> None:
        """A request ended after so long."""
        self._held[endpoint_id] -= 1
        self._taken -= 1
        self._taken_slow -= endpoint_id in self.slow
        if not self._held[endpoint_id]:
            del self._held[endpoint_id]
        if seconds >= SLOW_SECONDS:
            self._mark(endpoint_id)
        elif endpoint_id in self.slow and endpoint_id not in self.stuck:
            self.slow.remove(endpoint_id)
            self._taken_slow -= self._held[endpoint_id]

    def see_stuck(self, endpoint_ids: Iterable[int]) -> None:
        """These, and no others, have requests under way for longer than SLOW_SECONDS."""
        self.stuck = frozenset(endpoint_ids)
        for endpoint_id in self.stuck:
            self._mark(endpoint_id)

    def room(self) -> int:
        """For an endpoint that has nothing in flight and isn't known as slow."""
        return self._share(self.free, 0)

    def room_of(self, endpoint_id: int) -> int:
        """0 if it has had its share."""
        free = self._free_slow if endpoint_id in self.slow else self.free
        return self._share(free, self._held[endpoint_id])

    def room_of_any(self) -> int:
        """For whichever endpoint; 0 if it isn't the same for each."""
        return 0 if self.slow else max(0, self.free * 7 // 8 - (self._taken + 7) // 8)

    def open_to(self, endpoint_id: int) -> int:
        """How many requests it may begin with what it has claimed: more than room_of(), which leaves others their share
        of what is free, but never all that there is."""
        free = self._free_slow if endpoint_id in self.slow else min(self.free, self.wave - self.quick_in_flight)
        return max(0, min(free, max(1, self.total * 7 // 8) - self._held[endpoint_id]))

    def open_in_line(self, endpoint_id: int) -> int:
        """The same for what has waited. An eighth is left to those who are claimed next: if receivers of those in line
        begin to hang, the others must not wait behind them. Only who has nothing in flight may have the first of it."""
        spare = self.free - self.total // 8
        return max(0, min(self.open_to(endpoint_id), spare if self._held[endpoint_id] else max(1, spare)))

    def rooms(self) -> dict[int, int]:
        """For the endpoints that room() doesn't tell about."""
        return {endpoint_id: self.room_of(endpoint_id) for endpoint_id in self._held.keys() | self.slow}

    @property
    def _free_slow(self) -> int:
        return max(0, min(self.total - self._taken_slow, 2 * self.total - self._taken))

    def _mark(self, endpoint_id: int) -> None:
        if endpoint_id not in self.slow:
            self.slow.add(endpoint_id)
            self._taken_slow += self._held[endpoint_id]

    @staticmethod
    def _share(free: int, held: int) -> int:
        most = (free + held) * 7 // 8 if free + held > 1 else 1
        return max(0, min(free, most - held))
$module$),
('ulak.tally', $module$"""What the worker has done since it last told: per endpoint for the statistics, in sum for its own row."""

from __future__ import annotations

from collections.abc import Mapping

# Bucket i counts requests below 2^i milliseconds; the last one takes the rest (above half an hour).
BUCKETS = 22


class _Counts:
    __slots__ = ("delivered", "failed", "histogram", "total_ms")

    def __init__(self) -> None:
        self.delivered = 0
        self.failed = 0
        self.total_ms = 0.0
        self.histogram = [0] * BUCKETS


class Tally:
    def __init__(self) -> None:
        self._counts: dict[int, _Counts] = {}
        self.processed = 0
        self.failed = 0
        self.last_error: str | None = None

    def add(self, endpoint_id: int, messages: int, error: str | None, seconds: float) -> None:
        """One request that carried so many messages."""
        counts = self._counts.get(endpoint_id)
        if counts is None:
            counts = self._counts[endpoint_id] = _Counts()
        self.processed += messages
        if error is None:
            counts.delivered += messages
        else:
            counts.failed += messages
            self.failed += messages
            self.last_error = error
        milliseconds = seconds * 1000
        counts.total_ms += milliseconds * messages
        counts.histogram[min(int(milliseconds).bit_length(), BUCKETS - 1)] += messages

    def statistics(self) -> list[Mapping[str, object]]:
        """In the order of endpoint ids: the order in which rows are locked."""
        return [
            {
                "endpoint_id": endpoint_id,
                "delivered": counts.delivered,
                "failed": counts.failed,
                "latency_total_ms": round(counts.total_ms, 3),
                "latency_histogram": counts.histogram,
            }
            for endpoint_id, counts in sorted(self._counts.items())
        ]

    def clear(self) -> None:
        """What was told is told; the last error stays."""
        self._counts = {}
        self.processed = self.failed = 0
$module$),
('ulak.verdict', $module$"""Is an exchange a delivery, worth another try, or hopeless: the prefix that the database decides by."""

from __future__ import annotations

import re

from ulak import response, retry_after
from ulak.model import Endpoint, Finished, Outcome

RETRYABLE = "[RETRYABLE]"
PERMANENT = "[PERMANENT]"
DISABLE = "[DISABLE]"

# Of 4xx these ask for another try: request timeout, too early, too many requests.
_RETRYABLE_4XX = frozenset((408, 425, 429))
DELIVERED = Outcome(status=200)
_EXCERPT = 200
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\s]+")


def judge(endpoint: Endpoint, finished: Finished, now: float) -> Outcome:
    status = finished.status
    if finished.kind is None and 200 <= status < 300:
        if not endpoint.profile.capture_response:
            return DELIVERED if status == 200 else Outcome(status=status)
        return Outcome(status=status, response=response.capture(finished))
    captured = response.capture(finished) if endpoint.profile.capture_response and status else None
    # A refusal is a refusal, even if the rest of the answer never came. A success isn't one until it is complete.
    if status >= 300:
        error = f"{_prefix(endpoint, status)} HTTP {status}{_excerpt(finished)}"
        return Outcome(error, _delay(finished, now), captured, status)
    # An address that policy forbids stays forbidden, however often it is tried.
    prefix = PERMANENT if finished.kind == "blocked" else RETRYABLE
    text = finished.error or "no answer"
    return Outcome(f"{prefix} {finished.kind or 'network'}: {_clean(text)}", None, captured, status)


def _prefix(endpoint: Endpoint, status: int) -> str:
    exact, group = str(status), f"{status // 100}xx"
    # A status that is named wins over its class.
    for name in (exact, group):
        if name in endpoint.retry_on:
            return RETRYABLE
        if name in endpoint.permanent_on:
            return PERMANENT
    if status == 410:
        return DISABLE
    # A redirect isn't followed, and the receiver will send it again.
    if 300 <= status < 500 and status not in _RETRYABLE_4XX:
        return PERMANENT
    return RETRYABLE


def _delay(finished: Finished, now: float) -> int | None:
    if finished.status not in (429, 503):
        return None
    values = [value for name, value in response.headers(finished) if name == "retry-after"]
    return retry_after.seconds(values[-1], now) if values else None


def _excerpt(finished: Finished) -> str:
    text = _clean(finished.body[: 4 * _EXCERPT].decode("utf-8", "replace"))
    if not text:
        return ""
    return ": " + (text if len(text) <= _EXCERPT else text[:_EXCERPT] + "...")


def _clean(text: str) -> str:
    return _UNPRINTABLE.sub(" ", text).strip()
$module$),
('ulak.wording', $module$"""Numbers, sizes, durations and times as people read them."""

from __future__ import annotations

import datetime


def number(value: float | None) -> str:
    """Three digits or so: 7, 0.4, 12,345, 1.24M."""
    if value is None:
        return ""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e5, "k")):
        if abs(value) >= size:
            unit = 1e3 if letter == "k" else size
            return f"{value / unit:.3g}{letter}" if value / unit < 1000 else f"{value / unit:,.0f}{letter}"
    if value == int(value) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) >= 1 else f"{value:.2g}"


def exact(value: float) -> str:
    return f"{value:,.0f}"


def size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if count >= 10 or unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TB"


def milliseconds(value: float | None) -> str:
    if value is None:
        return ""
    if value == 0:
        return "0"
    if value < 1000:
        return f"{value:.2g} ms" if value < 10 else f"{value:.3g} ms"
    return duration(value / 1000)


def duration(seconds: float | None) -> str:
    """The two largest units."""
    if seconds is None:
        return ""
    seconds = max(seconds, 0)
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes} m {rest} s" if rest and minutes < 10 else f"{minutes} m"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours} h {minutes} m" if minutes else f"{hours} h"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h" if hours else f"{days} d"


def time(text: str) -> datetime.datetime:
    """A timestamptz as JSON has it."""
    return datetime.datetime.fromisoformat(text).astimezone(datetime.UTC)


def ago(text: str | None, now: datetime.datetime) -> str:
    return "never" if text is None else duration((now - time(text)).total_seconds()) + " ago"


def clock(moment: datetime.datetime) -> str:
    return f"{moment.hour:02}:{moment.minute:02}"


def day_and_clock(moment: datetime.datetime) -> str:
    return f"{moment.day} {moment:%B %Y, %H:%M} UTC"
$module$),
('ulak.worker', $module$"""The worker: claims, delivers, settles and commits until its time is over; a steady pipeline, not batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

from ulak import batch, endpoint, verdict
from ulak.courier import Courier, Settled
from ulak.holding import Held
from ulak.line import Line, Rates
from ulak.listener import Listener
from ulak.model import Endpoint, Message, OAuth2, Outcome
from ulak.options import Options
from ulak.pace import Pace
from ulak.port import Busy, Claimed, Database
from ulak.settling import RETRY_SECONDS, Settling
from ulak.slots import SLOW_SECONDS, Slots
from ulak.tally import Tally

# Outcomes are settled in groups: three quarters of the slots, or what has come within this time. While others wait in
# line, a group can be larger without holding anything up.
SETTLE_SECONDS = 0.002
SETTLE_SECONDS_UNDER_LOAD = 0.005
SETTLE_SECONDS_IN_LINE = 0.02
SETTLE_COUNT_IN_LINE = 256
# What is claimed at once in light traffic, and how far ids of what is delivered may lie behind.
FEW = 16
# In light traffic a delivery is stored with the next claim, if that isn't too far off.
SETTLE_SECONDS_LIGHT = 0.05
# Who is in line doesn't wait longer for answers that would make room, while there are slots.
WAVE_SECONDS = 0.001
# How often endpoints that have nobody in line are looked after while others have. If that takes long and finds nothing,
# because vacuum is held back, it comes less often: one part of the time may be lost with it.
ASIDE_SECONDS = 0.02
LONGEST_ASIDE = 1.0
ASIDE_PARTS = 20
# While the worker listens for the bell, retries and whatever else doesn't ring are looked for so often.
WHOLE_SECONDS = 0.2
WHOLE_SECONDS_AFTER_ONE = 0.05
# A stop or a cancel is to be noticed within 200 ms. While nothing is held, cancels are noticed without this. Who
# listens hears of a stop, and only makes sure.
CHECK_SECONDS = 0.1
CHECK_SECONDS_IDLE = 0.15
CHECK_SECONDS_LISTENING = 1.0
# After a wait of this length, who listens looks whether it was cancelled; not sooner, since answers are under way then.
HEED_SECONDS = 0.05
REPORT_SECONDS = 1.0
SWEEP_SECONDS = 10.0
# How long a run may outlast its end because of what it holds. A request under way has its own time.
GRACE_SECONDS = 30.0
STOP_SECONDS = 2.0
# What was claimed when the circuit changed is given back for this long.
RELEASE_SECONDS = {"open": 10.0, "half_open": 5.0, "disabled": 10.0}


class _Sent(NamedTuple):
    """A request under way."""

    to: Endpoint
    start: float

    @property
    def end(self) -> float:
        """When libcurl will have given up at the latest. A token may have to be fetched, refused and fetched again."""
        return self.start + self.to.profile.timeout * (4 if isinstance(self.to.auth, OAuth2) else 1) + 1


class Worker:
    def __init__(
        self,
        database: Database,
        options: Options,
        settings: str,
        until: float,
        courier: Courier,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`settings` is what the options were made from; `until` is by the clock."""
        self._database = database
        self._options = options
        self._settings = settings
        self._clock = clock
        self._sleep = sleep
        self._slots = Slots(options.slots)
        self._courier = courier
        now = clock()
        self._pace = Pace(options.poll_interval_busy, options.poll_interval, now)
        self._pace.is_poller = False
        self._listener = Listener(database, self._pace)
        self._tally = Tally()
        self._endpoints: dict[int, Endpoint] = {}
        # Why an endpoint that was claimed for can't be sent to.
        self._problems: dict[int, str] = {}
        # A look has found that somebody has sent.
        self._is_expecting = False
        self._held = Held()
        # By id and attempt of the first message. The id alone won't do: a message whose lease was lost may come again.
        self._under_way: dict[tuple[int, int], _Sent] = {}
        # Endpoints that got as much as they may in their last claim: they may well have more.
        self._filled: set[int] = set()
        # What the last claim got, and what it got for later.
        self._fresh = Line()
        self._line = Line()
        self._rates = Rates()
        self._settling = Settling(database, self._held, self._tally, now)
        self._until = until
        self._leave: str | None = None
        self._last_claim = now
        # The last claim that saw all endpoints.
        self._last_whole = now
        self._whole_wait = WHOLE_SECONDS
        self._aside_wait = ASIDE_SECONDS
        self._next_check = now
        self._next_report = now
        self._next_sweep = now
        self._next_renewal = now + options.lease / 3
        # The first of them.
        self._next_house = now

    def run(self) -> str:
        """Why it ended: over (its time), stop, restart (there is another build) or settings (they changed)."""
        while not self._is_over(now := self._clock()):
            if now >= self._until:
                self._listener.stop()
            if self._waits_for_ring() and self._slots.free:
                self._attend()
            elif self._held or self._has_more():
                self._gather()
            else:
                self._watch()
            # What waits in line needs no transaction.
            if self._line:
                self._begin(self._line, self._slots.open_in_line)
            now = self._clock()
            if now >= self._next_house:
                self._keep_house(now)
            self._turn(now)
        return self._leave or "over"

    def close(self, state: str = "stopped", error: str | None = None) -> None:
        """Stores the outcomes that there are, gives everything else that is held back to the queue, unspent."""
        self._listener.stop()
        if self._settling.done:
            self._settle(self._clock())
        deferred = self._settling.deferred_ids()
        rest = [each for each in zip(self._held.ids(), self._held.attempts(), strict=True) if each[0] not in deferred]
        if rest:
            self._database.release([id for id, _ in rest], [attempt for _, attempt in rest], 0.0)
        self._held.clear()
        self._database.commit()
        if error is not None:
            self._tally.last_error = error
        self._report(state)

    def _is_over(self, now: float) -> bool:
        if now < self._until:
            return False
        if not self._held:
            return True
        if self._leave == "stop":
            return now >= self._until + STOP_SECONDS
        return now >= max([self._until + GRACE_SECONDS, *(sent.end for sent in self._under_way.values())])

    def _is_closing(self, now: float) -> bool:
        """Whether new messages would keep a run from ending. What is stuck does so anyway; nobody is to wait for it."""
        return now >= self._until and (
            self._leave == "stop" or not (self._slots.slow_in_flight or self._settling.deferred)
        )

    # Waiting for messages, for answers, or for time to pass.

    def _attend(self) -> None:
        """Light traffic: waits for the bell and for answers, and does what is plain, until there is something else."""
        listener, courier = self._listener, self._courier
        while listener.is_set and self._waits_for_ring():
            now = self._clock()
            end = min(self._next_house, self._last_whole + self._whole_wait)
            if self._settling.done:
                end = min(end, self._settling.since + SETTLE_SECONDS_LIGHT)
            if now >= end:
                return
            settled: Sequence[Settled] = ()
            if courier.in_flight:
                settled = courier.step(end - now)
                if courier.was_woken:
                    listener.hear()
            else:
                # Not all of it: the wait isn't broken off by a cancel.
                listener.hear(min(end - now, CHECK_SECONDS_IDLE))
            self._collect(settled)
            if listener.has_rung:
                if not self._light_turn(self._clock()):
                    return
            elif not settled and self._clock() - now >= HEED_SECONDS:
                self._database.heed()

    def _gather(self) -> None:
        now = self._clock()
        if self._listener.is_listening:
            self._check_by(now + CHECK_SECONDS)
        wait = self._next_check - now
        if self._settling.done:
            wait = min(wait, self._settle_time() - now)
        elif self._can_claim(now):
            soon = self._last_claim + self._options.poll_interval_busy - now
            wait = min(wait, soon if self._has_more() else self._pace.wait(now))
        is_wave_full = self._line and self._slots.is_wave_full
        before = self._slots.quick_in_flight
        if is_wave_full and self._slots.wave < self._slots.total:
            wait = min(wait, WAVE_SECONDS)
        wait = max(0.0, wait)
        settled: Sequence[Settled] = ()
        if self._courier.in_flight:
            settled = self._courier.step(wait)
            if self._courier.was_woken:
                self._listener.hear()
        elif wait:
            self._sleep(wait)
        self._collect(settled)
        if is_wave_full:
            self._slots.waited(before)

    def _watch(self) -> None:
        """Nothing is held: waits until somebody has sent, a claim is due, or it is time for the next check."""
        pace, database = self._pace, self._database
        now = self._clock()
        # A worker that can listen for the bell does so in its next turn.
        while now < self._next_check and not self._listener.can_listen(now):
            seconds = min(self._next_check - now, pace.patience(now))
            last_sent = database.await_send(pace.last_sent, pace.interval, seconds)
            now = self._clock()
            self._is_expecting = pace.wants_claim(now, last_sent)
            database.commit()
            pace.looked(now)
            if self._is_expecting:
                return

    def _collect(self, settled: Sequence[Settled]) -> None:
        if not settled:
            return
        now = self._clock()
        for endpoint_id, messages, outcome in settled:
            first = messages[0]
            to, start = self._under_way.pop((first.id, first.attempt))
            seconds = now - start
            self._slots.give_back(endpoint_id, seconds)
            self._tally.add(endpoint_id, len(messages), outcome.error, seconds)
            if to.max_in_flight is not None:
                self._settling.opens = True
        self._settling.add(settled, now)

    def _settle_time(self) -> float:
        since = self._settling.since
        if self._waits_for_ring():
            return since + SETTLE_SECONDS_LIGHT
        if self._line and not self._settling.opens:
            return since + SETTLE_SECONDS_IN_LINE
        return since + (SETTLE_SECONDS_UNDER_LOAD if self._pace.more or self._filled else SETTLE_SECONDS)

    def _waits_for_ring(self) -> bool:
        """In light traffic, with nothing else to do."""
        if not self._listener.is_listening or self._listener.has_rung:
            return False
        if self._line or self._settling.deferred or self._has_more():
            return False
        return self._settling.is_plain and not self._settling.opens

    def _settle_count(self) -> int:
        return SETTLE_COUNT_IN_LINE if self._line and not self._settling.opens else self._slots.total * 3 // 4

    # One transaction: what has come back, and what to send next. Nothing is sent before it is committed.

    def _turn(self, now: float) -> None:
        settles = bool(self._settling.done) and self._settles(now)
        opens = settles and self._settling.opens
        if settles:
            self._settle(now)
        if self._settling.deferred and now >= self._settling.next_retry:
            self._settling.store_deferred(now)
        if self._may_claim(now, settles, opens):
            self._claim(now)
        self._database.commit()
        if self._fresh:
            self._begin(self._fresh, self._slots.open_to)
            self._line.append(self._fresh)

    def _settles(self, now: float) -> bool:
        if now >= self._settle_time() or len(self._settling.done) >= self._settle_count():
            return True
        return not self._courier.in_flight and not self._waits_for_ring()

    def _light_turn(self, now: float) -> bool:
        """Somebody has rung: stores, claims and sends at once what is plain. Whether that was all."""
        settling = self._settling
        count = min(FEW, self._slots.room_of_any(), self._held.room())
        if count <= 0 or self._line or settling.opens or not settling.is_plain:
            return False
        after = self._pace.last_sent
        delivered = [each for done in settling.done for each in done.messages if each.id > after - FEW]
        try:
            claimed, settled = self._database.light_turn(after, count, self._options.lease, delivered)
        except Busy:
            return False
        if settled:
            settling.leave_out(settled)
        if not claimed:
            return False
        self._last_claim = now
        found, newest = self._held.receive(claimed)
        self._pace.claimed_new(now, newest, found >= count)
        self._listener.answered(True)
        for each in claimed:
            if not self._knows(each):
                self._prepare(claimed)
                return False
        self._database.commit()
        for endpoint_id, _, messages in claimed:
            for message in messages:
                self._start(self._endpoints[endpoint_id], [message], now)
        return True

    def _can_claim(self, now: float) -> bool:
        if self._is_closing(now):
            return False
        if self._ahead(now):
            return True
        return self._slots.free > 0 and (not self._line or now >= self._last_whole + self._aside_wait)

    def _ahead(self, now: float) -> dict[int, int]:
        """How many messages of which endpoint are to be claimed for the line: of those that seem to have more. Not a
        few: a claim has its price, however many it gets."""
        needed: dict[int, int] = {}
        if not self._pace.more and not self._filled:
            return needed
        for endpoint_id, allowed in self._rates.ahead(now).items():
            in_line = self._line.count(endpoint_id)
            if 2 * in_line >= allowed or endpoint_id in self._slots.slow or endpoint_id in self._settling.deferred:
                continue
            if self._pace.more or endpoint_id in self._filled:
                needed[endpoint_id] = allowed - in_line
        return needed

    def _has_more(self) -> bool:
        """Whether a claim would find something and have a place for it, in a slot or in line behind others."""
        if self._pace.more or not self._filled:
            return self._pace.more
        filled = self._filled - self._settling.deferred.keys()
        return any(self._slots.room_of(each) or self._line.count(each) for each in filled)

    def _may_claim(self, now: float, settles: bool, opens: bool) -> bool:
        if not self._can_claim(now):
            return False
        if opens:
            return True
        if self._has_more():
            # With what is settled; by itself only if nothing is about to be.
            return settles or (not self._settling.done and now >= self._last_claim + self._options.poll_interval_busy)
        if self._is_expecting or self._listener.has_rung:
            self._is_expecting = False
            return True
        if self._listener.can_listen(now) and not self._line and not self._settling.deferred and now < self._until:
            if not self._listener.is_listening:
                # What was said until now wasn't heard.
                self._check_by(now)
            return self._looks(now)
        if self._listener.is_listening:
            self._listener.stop()
            self._check_by(now + CHECK_SECONDS)
        if self._pace.wait(now) > 0:
            return False
        wants = self._pace.wants_claim(now, self._database.last_sent())
        self._pace.looked(now)
        return wants

    def _looks(self, now: float) -> bool:
        """While it listens: whether there is something that nobody rang for."""
        listener = self._listener
        if listener.is_listening and listener.is_set and now < self._last_whole + self._whole_wait:
            return False
        if listener.look(now):
            return True
        self._last_whole = now
        self._whole_wait = min(WHOLE_SECONDS, 2 * self._whole_wait)
        return False

    def _claim(self, now: float) -> None:
        """For the slots that are free, of all endpoints; then for the line, of those that are known to be fast."""
        self._last_claim = now
        has_rung = self._listener.has_rung
        if not self._ahead(now) or has_rung or (self._slots.free and now >= self._last_whole + self._aside_wait):
            self._last_whole = now
            began = self._clock()
            self._take(now, *self._rooms(now))
            lost = 0.0 if self._fresh else self._clock() - began
            self._aside_wait = max(ASIDE_SECONDS, min(LONGEST_ASIDE, lost * ASIDE_PARTS))
        ahead = self._ahead(now)
        if ahead:
            self._take(now, ahead, 0, sum(ahead.values()))
        # What is limited by time has more in a moment.
        self._whole_wait = WHOLE_SECONDS_AFTER_ONE if self._fresh else min(WHOLE_SECONDS, 2 * self._whole_wait)
        if has_rung:
            self._listener.answered(bool(self._fresh))
            if not self._fresh:
                # Then it wasn't a sender who rang.
                self._check_by(now)

    def _take(self, now: float, rooms: dict[int, int], room: int, limit: int) -> None:
        """One claim of at most so many messages: of some endpoints, of any other, and of all together."""
        limit = min(limit, self._options.batch_size, self._held.room())
        if limit <= 0 and self._held:
            return
        try:
            claimed = self._database.claim(max(1, limit), self._options.lease, rooms, room)
        except Busy:
            self._pace.claimed(now, None, False)
            return
        count, newest = self._held.receive(claimed)
        if count and not self._listener.is_listening:
            self._check_by(now + CHECK_SECONDS)
        self._pace.claimed(now, newest or None, count >= limit)
        self._note_filled(claimed, rooms, room)
        self._prepare(claimed)

    def _rooms(self, now: float) -> tuple[dict[int, int], int, int]:
        """How many messages may be claimed for slots: of some endpoints, of any other, and of all together."""
        rooms, room = self._slots.rooms(), self._slots.room()
        limit = self._slots.free
        for known in self._endpoints.values():
            if known.batch_size > 1:
                rooms[known.id] = rooms.get(known.id, room) * known.batch_size
                limit = self._options.batch_size
        rooms.update(dict.fromkeys((*self._settling.deferred, *self._line.endpoint_ids()), 0))
        if now >= self._until:
            rooms.update(dict.fromkeys(self._slots.slow, 0))
            self._filled -= self._slots.slow
        return rooms, room, limit

    def _note_filled(self, claimed: Iterable[Claimed], rooms: dict[int, int], room: int) -> None:
        """An endpoint without room wasn't asked; a claim that reached its limit may have left out any of them."""
        if not self._pace.more:
            self._filled = {each for each in self._filled if not rooms.get(each, room)}
        self._filled |= {id for id, _, messages in claimed if len(messages) >= rooms.get(id, room)}

    def _prepare(self, claimed: Sequence[Claimed]) -> None:
        """Sorts what was claimed into requests, reading the configs that are new."""
        unknown = {each.endpoint_id for each in claimed if not self._knows(each)}
        if unknown:
            try:
                self._load(unknown)
            except Busy:
                self._give_back([message for each in claimed for message in each.messages], RETRY_SECONDS)
                return
        for endpoint_id, _, messages in claimed:
            known = self._endpoints.get(endpoint_id)
            if known is not None:
                self._fresh.add(known, batch.group(known, messages))
            else:
                outcome = Outcome(f"{verdict.RETRYABLE} {self._problems[endpoint_id]}")
                self._settling.add([Settled(endpoint_id, [message], outcome) for message in messages], self._clock())
                self._tally.add(endpoint_id, len(messages), outcome.error, 0)

    def _knows(self, claimed: Claimed) -> bool:
        known = self._endpoints.get(claimed.endpoint_id)
        return known is not None and known.config_version == claimed.config_version

    def _load(self, ids: set[int]) -> None:
        for endpoint_id in ids:
            self._endpoints.pop(endpoint_id, None)
            self._problems[endpoint_id] = "config: the endpoint is gone"
        for each in self._database.endpoint_configs(ids):
            try:
                self._endpoints[each.id] = endpoint.parse(
                    each.id,
                    each.name,
                    each.config_version,
                    each.config,
                    each.signing_secrets,
                    self._options.endpoint,
                )
            # Not only ConfigError: whatever one config does to our code, the other endpoints' messages must go on.
            except Exception as error:
                self._problems[each.id] = f"config: {error}"

    def _begin(self, line: Line, room_of: Callable[[int], int]) -> None:
        if not line:
            return
        now = self._clock()
        for to, messages in line.take(room_of):
            self._start(to, messages, now)

    def _start(self, to: Endpoint, messages: Sequence[Message], now: float) -> None:
        first = messages[0]
        self._slots.take(to.id)
        self._under_way[first.id, first.attempt] = _Sent(to, now)
        self._courier.send(to, messages)

    def _settle(self, now: float) -> None:
        self._rates.note(self._settling.counts, now)
        if self._settling.store(now) and self._line:
            self._try(self._release_blocked)

    def _release_blocked(self) -> None:
        """A circuit that opened takes no more: what waits for a slot to it goes back, unspent."""
        for endpoint_id, state in self._database.blocked_endpoints(self._line.endpoint_ids()).items():
            self._give_back(self._line.remove(endpoint_id), RELEASE_SECONDS[state])

    def _give_back(self, messages: Sequence[Message], delay: float) -> None:
        self._database.release([each.id for each in messages], [each.attempt for each in messages], delay)
        self._held.forget(messages)

    # What happens by the clock. What the database has no time for is left to the next time.

    def _keep_house(self, now: float) -> None:
        if now >= self._next_check:
            self._next_check = now + self._check_seconds()
            self._check(now)
        if now >= self._next_renewal:
            self._next_renewal = now + self._options.lease / 3
            if self._held:
                self._renew(now)
        if now >= self._next_sweep:
            self._next_sweep = now + SWEEP_SECONDS
            self._try(self._database.sweep)
        if now >= self._next_report:
            self._next_report = now + REPORT_SECONDS
            self._report("running")
        self._next_house = min(self._next_check, self._next_renewal, self._next_sweep, self._next_report)

    def _check_seconds(self) -> float:
        if self._listener.is_listening and self._slots.free:
            return CHECK_SECONDS_LISTENING
        return CHECK_SECONDS if self._held else CHECK_SECONDS_IDLE

    def _check_by(self, time: float) -> None:
        self._next_check = min(self._next_check, time)
        self._next_house = min(self._next_house, time)

    def _try(self, action: Callable[[], object]) -> None:
        with suppress(Busy):
            action()
        self._database.commit()

    def _check(self, now: float) -> None:
        stuck = {sent.to.id for sent in self._under_way.values() if sent.start < now - SLOW_SECONDS}
        self._slots.see_stuck(stuck)
        tidings = self._database.check()
        self._database.commit()
        if self._line:
            self._try(self._release_blocked)
        leave = tidings.leave or ("settings" if tidings.settings != self._settings else None)
        if leave is not None and self._leave != "stop":
            self._leave = leave
            self._until = min(self._until, now)

    def _renew(self, now: float) -> None:
        try:
            held = set(self._database.renew(self._held.ids(), self._held.attempts(), self._options.lease))
        except Busy:
            self._next_renewal = now + min(1.0, self._options.lease / 10)
            return
        self._database.commit()
        # What was lost and not yet sent is left to whoever has it now.
        self._held.forget(self._line.remove_lost(held))

    def _report(self, state: str) -> None:
        tally = self._tally
        progress = {
            "state": state,
            "in_flight": len(self._held),
            "processed": tally.processed,
            "failed": tally.failed,
            "last_error": tally.last_error,
        }
        with suppress(Busy):
            self._database.report(progress, tally.statistics())
            tally.clear()
            if not self._pace.is_poller:
                self._pace.is_poller = self._database.become_poller()
                if self._pace.is_poller:
                    self._listen()
        self._database.commit()

    def _listen(self) -> None:
        bell = self._database.listen()
        if bell is not None:
            self._listener.take(bell)
            self._courier.wake_on(bell.fileno())
$module$)
$source$;

create or replace function ulak._python_stamp()
returns text
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$ select 'ce130f26451832e9dd1537132b620e789bba3664e8864022be85db0b2e7e74dc' $sql$;

create or replace function ulak._load_python()
returns void
language plpython3u
set search_path = pg_catalog, pg_temp
as $python$
if GD.get("ulak_stamp") == "ce130f26451832e9dd1537132b620e789bba3664e8864022be85db0b2e7e74dc":
    return

"""Makes `from ulak import ...` find the modules that the extension carries, whatever lies on the server's path.

The build makes this file the body of ulak._load_python(), which runs it once per session and build. Every session that
needs Python pays for what is imported here: importlib.abc alone would take longer than drawing a report.
"""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


class ExtensionModules:
    """Finder and loader in one, by their shape."""

    def __init__(self, sources: dict[str, str]) -> None:
        self.sources = sources

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self.sources:
            return None
        # A package without a path of its own: what the extension doesn't carry is found nowhere.
        is_package = name == "ulak" or any(other.startswith(name + ".") for other in self.sources)
        origin = "plpython/" + name.replace(".", "/") + ("/__init__.py" if is_package else ".py")
        return ModuleSpec(name, self, origin=origin, is_package=is_package)  # type: ignore[arg-type]

    def get_source(self, name: str) -> str:
        return self.sources[name]

    def create_module(self, spec: ModuleSpec) -> None:
        """An ordinary module."""

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        assert spec and spec.origin
        source = self.sources[spec.name]
        # Tracebacks ask get_source() for the text, and would go on quoting an earlier build.
        if linecache := sys.modules.get("linecache"):
            linecache.cache.pop(spec.origin, None)
        module.__file__ = spec.origin
        exec(compile(source, spec.origin, "exec", dont_inherit=True), module.__dict__)


def install(sources: dict[str, str]) -> None:
    sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != "ExtensionModules"]
    sys.meta_path.insert(0, ExtensionModules(sources))
    for name in [name for name in sys.modules if name.split(".")[0] == "ulak"]:
        del sys.modules[name]


install({row["module"]: row["source"] for row in plpy.execute("select module, source from ulak._python_source()")})
GD["ulak_stamp"] = "ce130f26451832e9dd1537132b620e789bba3664e8864022be85db0b2e7e74dc"
$python$;

revoke all on function ulak._python_source(), ulak._python_stamp(), ulak._load_python() from public;
grant execute on function ulak._python_source(), ulak._python_stamp(), ulak._load_python() to ulak_worker;

-- "Did you mean": the known name that is nearest to one that isn't known.

-- Edits (insert, delete, replace, swap of two neighbours) from one text to the other.
create or replace function ulak._edit_distance(p_from text, p_to text)
returns integer
language plpgsql
immutable strict
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_from text[] := string_to_array(p_from, null);
    v_to text[] := string_to_array(p_to, null);
    v_before_previous integer[];
    v_previous integer[];
    v_current integer[];
    v_best integer;
begin
    -- Each row holds the distances from one prefix of p_from to every prefix of p_to; subscript 1 is the empty prefix.
    v_previous := array(select n from generate_series(0, cardinality(v_to)) as n);
    for i in 1 .. cardinality(v_from) loop
        v_current := array[i];
        for j in 1 .. cardinality(v_to) loop
            v_best := least(
                v_previous[j + 1] + 1,
                v_current[j] + 1,
                v_previous[j] + (v_from[i] <> v_to[j])::integer
            );
            if i > 1 and j > 1 and v_from[i] = v_to[j - 1] and v_from[i - 1] = v_to[j] then
                v_best := least(v_best, v_before_previous[j - 1] + 1);
            end if;
            v_current[j + 1] := v_best;
        end loop;
        v_before_previous := v_previous;
        v_previous := v_current;
    end loop;
    return v_previous[cardinality(v_to) + 1];
end
$plpgsql$;

-- Null if nothing is near. A name that contains the other ("secret" in "signing_secret") is near as well.
create or replace function ulak._nearest(p_name text, p_known text[])
returns text
language sql
immutable
set search_path = pg_catalog, pg_temp
as $sql$
    with candidate as (
        -- Only the likeliest are measured: the cost stays small however many names are known.
        select
            known,
            lower(left(p_name, 64)) as wanted,
            lower(left(known, 64)) as offered
        from unnest(p_known) as known
        order by
            lower(left(known, 1)) = lower(left(p_name, 1)) desc,
            abs(length(known) - length(p_name)),
            known
        limit 100
    ),
    measured as (
        select
            known,
            greatest(length(wanted), length(offered)) as length,
            ulak._edit_distance(wanted, offered) as distance,
            least(length(wanted), length(offered)) >= 3
                and (strpos(wanted, offered) > 0 or strpos(offered, wanted) > 0) as is_part
        from candidate
    )
    select known
    from measured
    where is_part or (distance <= greatest(2, ceil(length / 3.0)) and distance < length)
    order by case when is_part then least(distance, 2) else distance end, distance, known
    limit 1
$sql$;

-- The hint of an "unknown name" error.
create or replace function ulak._did_you_mean(p_name text, p_known text[])
returns text
language sql
immutable
set search_path = pg_catalog, pg_temp
as $sql$
    select coalesce(
        'Did you mean "' || ulak._nearest(p_name, p_known) || '"?',
        case
            when cardinality(p_known) between 1 and 40
                then 'Known: ' || (select string_agg(known, ', ' order by known) from unnest(p_known) as known) || '.'
        end,
        'No known name is similar.'
    )
$sql$;

-- JSON Schema, the part of it that ulak understands: for payloads of events, configs of endpoints and retry policies.

-- The first thing in p_value that p_schema forbids, or nulls. Says what was expected where, and never the value itself:
-- it may be a secret.
create or replace function ulak._json_schema_violation(
    p_schema jsonb,
    p_value jsonb,
    out path text,
    out problem text,
    out hint text
)
language plpgsql
immutable
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_violation text[] := ulak._json_violation(p_schema, p_value);
begin
    path := '$' || v_violation[1];
    problem := v_violation[2];
    hint := v_violation[3];
end
$plpgsql$;

-- Null, or {path, problem, hint}. This runs for every value of every published payload: plain expressions only, which
-- PL/pgSQL evaluates without the executor, and a path that is put together on the way back from a violation.
-- A keyword says nothing about a value of another type, as the standard has it.
create or replace function ulak._json_violation(p_schema jsonb, p_value jsonb)
returns text[]
language plpgsql
immutable
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_type text := jsonb_typeof(p_value);
    v_problem text;
begin
    if p_schema = 'false' then
        return array['', 'is not allowed', null];
    elsif p_schema ? 'type' and not p_schema -> 'type' ? v_type
        and not (p_schema -> 'type' ? 'integer' and v_type = 'number' and p_value::numeric = trunc(p_value::numeric))
    then
        return array['', 'must be of type ' || ulak._json_list(p_schema -> 'type', ' or '), null];
    elsif p_schema ? 'const' and p_value <> p_schema -> 'const' then
        return array['', 'must be ' || (p_schema -> 'const')::text, null];
    elsif p_schema ? 'enum' and not ulak._json_has_element(p_schema -> 'enum', p_value) then
        return array['', 'must be one of ' || ulak._json_list(p_schema -> 'enum', ', '), null];
    elsif v_type = 'object' then
        return ulak._json_object_violation(p_schema, p_value);
    elsif v_type = 'array' then
        return ulak._json_array_violation(p_schema, p_value);
    elsif v_type = 'string' and p_schema ?| '{minLength,maxLength,pattern}' then
        v_problem := ulak._json_string_problem(p_schema, p_value #>> '{}');
    elsif v_type = 'number' and p_schema ?| '{minimum,maximum,exclusiveMinimum,exclusiveMaximum}' then
        v_problem := ulak._json_number_problem(p_schema, p_value::numeric);
    end if;
    if v_problem is not null then
        return array['', v_problem, null];
    end if;
    return null;
end
$plpgsql$;

create or replace function ulak._json_object_violation(p_schema jsonb, p_object jsonb)
returns text[]
language plpgsql
immutable
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_properties jsonb := coalesce(p_schema -> 'properties', '{}');
    v_others jsonb := p_schema -> 'additionalProperties';
    v_key text;
    v_value jsonb;
    v_violation text[];
begin
    for v_key, v_value in select o.key, o.value from jsonb_each(p_object) as o loop
        if v_properties ? v_key then
            v_violation := ulak._json_violation(v_properties -> v_key, v_value);
        elsif v_others = 'false' then
            return array[
                ulak._json_path_step(v_key),
                'is not a known key',
                ulak._did_you_mean(v_key, array(select jsonb_object_keys(v_properties)))
            ];
        elsif v_others is not null then
            v_violation := ulak._json_violation(v_others, v_value);
        end if;
        if v_violation is not null then
            v_violation[1] := ulak._json_path_step(v_key) || v_violation[1];
            return v_violation;
        end if;
    end loop;
    -- After the keys that are there: "ulr is not a known key" says more than "url is required".
    if p_schema ? 'required' then
        for v_key in select jsonb_array_elements_text(p_schema -> 'required') loop
            if not p_object ? v_key then
                return array[ulak._json_path_step(v_key), 'is required', null];
            end if;
        end loop;
    end if;
    return null;
end
$plpgsql$;

create or replace function ulak._json_array_violation(p_schema jsonb, p_array jsonb)
returns text[]
language plpgsql
immutable
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_length integer := jsonb_array_length(p_array);
    v_number integer := 0;
    v_value jsonb;
    v_violation text[];
begin
    if v_length < (p_schema ->> 'minItems')::numeric then
        return array['', format('must have at least %s items', p_schema ->> 'minItems'), null];
    elsif v_length > (p_schema ->> 'maxItems')::numeric then
        return array['', format('must have at most %s items', p_schema ->> 'maxItems'), null];
    elsif p_schema ? 'items' then
        for v_value in select jsonb_array_elements(p_array) loop
            v_violation := ulak._json_violation(p_schema -> 'items', v_value);
            if v_violation is not null then
                v_violation[1] := '[' || v_number || ']' || v_violation[1];
                return v_violation;
            end if;
            v_number := v_number + 1;
        end loop;
    end if;
    return null;
end
$plpgsql$;

create or replace function ulak._json_string_problem(p_schema jsonb, p_text text)
returns text
language plpgsql
immutable
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    return case
        when char_length(p_text) < (p_schema ->> 'minLength')::numeric
            then format('must have at least %s characters', p_schema ->> 'minLength')
        when char_length(p_text) > (p_schema ->> 'maxLength')::numeric
            then format('must have at most %s characters', p_schema ->> 'maxLength')
        when p_text !~ (p_schema ->> 'pattern')
            then format('must match the pattern %s', p_schema ->> 'pattern')
    end;
end
$plpgsql$;

create or replace function ulak._json_number_problem(p_schema jsonb, p_number numeric)
returns text
language plpgsql
immutable
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    return case
        when p_number < (p_schema ->> 'minimum')::numeric
            then format('must be at least %s', p_schema ->> 'minimum')
        when p_number > (p_schema ->> 'maximum')::numeric
            then format('must be at most %s', p_schema ->> 'maximum')
        when p_number <= (p_schema ->> 'exclusiveMinimum')::numeric
            then format('must be greater than %s', p_schema ->> 'exclusiveMinimum')
        when p_number >= (p_schema ->> 'exclusiveMaximum')::numeric
            then format('must be less than %s', p_schema ->> 'exclusiveMaximum')
    end;
end
$plpgsql$;

-- Containment would do for scalars, but takes {"a": 1} for an element of [{"a": 1, "b": 2}].
create or replace function ulak._json_has_element(p_array jsonb, p_value jsonb)
returns boolean
language plpgsql
immutable
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    if jsonb_typeof(p_value) in ('object', 'array') then
        return exists (select from jsonb_array_elements(p_array) as e where e = p_value);
    end if;
    return p_array @> p_value;
end
$plpgsql$;

-- .name, or ["a name with other characters"].
create or replace function ulak._json_path_step(p_key text)
returns text
language sql
immutable
set search_path = pg_catalog, pg_temp
as $sql$
    select case
        when p_key ~ '^[A-Za-z_$][A-Za-z0-9_$-]{0,63}$' then '.' || p_key
        else '[' || to_jsonb(left(p_key, 64))::text || ']'
    end
$sql$;

create or replace function ulak._json_list(p_values jsonb, p_separator text)
returns text
language sql
immutable
set search_path = pg_catalog, pg_temp
as $sql$
    select case jsonb_typeof(p_values)
        when 'array' then (select string_agg(coalesce(v #>> '{}', 'null'), p_separator) from jsonb_array_elements(p_values) as v)
        else p_values #>> '{}'
    end
$sql$;

-- What one level of a schema may hold. Annotations are accepted and ignored. Everything else is refused, "format" too:
-- whoever writes it expects a check.
create or replace function ulak._json_schema_keywords()
returns jsonb
language sql
immutable
as $sql$
    select $json${
        "type": ["object", "boolean"],
        "additionalProperties": false,
        "properties": {
            "type": {
                "type": ["string", "array"],
                "pattern": "^(object|array|string|number|integer|boolean|null)$",
                "minItems": 1,
                "items": {"enum": ["object", "array", "string", "number", "integer", "boolean", "null"]}
            },
            "const": true,
            "enum": {"type": "array", "minItems": 1},
            "required": {"type": "array", "items": {"type": "string"}},
            "properties": {"type": "object", "additionalProperties": {"type": ["object", "boolean"]}},
            "additionalProperties": {"type": ["object", "boolean"]},
            "items": {"type": ["object", "boolean"]},
            "minItems": {"type": "integer", "minimum": 0},
            "maxItems": {"type": "integer", "minimum": 0},
            "minLength": {"type": "integer", "minimum": 0},
            "maxLength": {"type": "integer", "minimum": 0},
            "pattern": {"type": "string"},
            "minimum": {"type": "number"},
            "maximum": {"type": "number"},
            "exclusiveMinimum": {"type": "number"},
            "exclusiveMaximum": {"type": "number"},
            "$schema": {"type": "string"},
            "$id": {"type": "string"},
            "$comment": {"type": "string"},
            "title": {"type": "string"},
            "description": {"type": "string"},
            "default": true,
            "examples": {"type": "array"}
        }
    }$json$::pg_catalog.jsonb
$sql$;

-- Raises if ulak could not enforce the schema to the letter; true otherwise.
create or replace function ulak._check_json_schema(p_schema jsonb, p_path text default '$')
returns boolean
language plpgsql
immutable
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_violation text[] := ulak._json_violation(ulak._json_schema_keywords(), p_schema);
    v_key text;
    v_child jsonb;
begin
    if v_violation is null and not ulak._is_pattern(p_schema ->> 'pattern') then
        v_violation := array['.pattern', 'is not a valid regular expression of PostgreSQL', null];
    end if;
    if v_violation is not null then
        raise exception 'invalid JSON Schema: % %', p_path || v_violation[1], v_violation[2]
            using
                errcode = '22023',
                detail = 'ulak enforces these keywords and refuses others: type, const, enum, required, properties, '
                    'additionalProperties, items, minItems, maxItems, minLength, maxLength, pattern, minimum, maximum, '
                    'exclusiveMinimum, exclusiveMaximum.',
                hint = coalesce(v_violation[3], 'Correct the schema at this path.');
    end if;
    if jsonb_typeof(p_schema) = 'object' then
        for v_key, v_child in
            select '.properties' || ulak._json_path_step(p.key), p.value from jsonb_each(p_schema -> 'properties') as p
            union all
            select '.' || k, p_schema -> k from unnest(array['additionalProperties', 'items']) as k where p_schema ? k
        loop
            perform ulak._check_json_schema(v_child, p_path || v_key);
        end loop;
    end if;
    return true;
end
$plpgsql$;

create or replace function ulak._is_pattern(p_pattern text)
returns boolean
language plpgsql
immutable
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    perform '' ~ p_pattern;
    return true;
exception
    when invalid_regular_expression then
        return false;
end
$plpgsql$;
-- Settings: what exists, what holds, and how to change it.

-- The names, defaults and ranges. kind: integer, boolean, choice (of choices), text, networks (a list of CIDRs).
create or replace view ulak.settings as
select
    d.name,
    coalesce(v.value, d.default_value) as value,
    d.default_value,
    d.minimum,
    d.maximum,
    d.choices,
    d.unit,
    d.kind,
    d.description
from (
    values
        ('archive_after', 'integer', '3600', 0, 31536000, null::text[], 'seconds', 'how long a finished message stays in ulak.queue before maintenance moves it to ulak.archive'),
        ('archive_retention_months', 'integer', '6', 1, 120, null, 'months', 'how long archived messages are kept'),
        ('batch_size', 'integer', '500', 1, 10000, null, 'messages', 'most messages that a worker claims at once'),
        ('capture_response', 'boolean', 'false', null, null, null, null, 'whether the receiver''s answer is kept with the message'),
        ('circuit_breaker_cooldown', 'integer', '30', 5, 3600, null, 'seconds', 'how long an open circuit breaker waits before it sends a probe'),
        ('circuit_breaker_counts', 'choice', 'retryable', null, null, '{retryable,all}', null, 'which failures count: retryable ones only, or all, permanent ones too'),
        ('circuit_breaker_threshold', 'integer', '10', 1, 1000, null, 'failures', 'consecutive failures that open an endpoint''s circuit breaker'),
        ('cloudevents_source', 'text', '/ulak', null, null, null, null, 'source attribute of CloudEvents'),
        ('default_max_retries', 'integer', '10', 0, 1000, null, 'retries', 'retries before a message goes to the dead-letter queue'),
        ('dlq_retention_days', 'integer', '30', 1, 3650, null, 'days', 'how long dead letters are kept'),
        ('event_log_retention_days', 'integer', '30', 1, 3650, null, 'days', 'how long entries of ulak.event_log are kept'),
        ('http_allow_internal_urls', 'boolean', 'false', null, null, null, null, 'whether requests may go to private, loopback and other internal addresses'),
        ('http_allowed_networks', 'networks', '', null, null, null, null, 'internal networks that requests may go to all the same: CIDRs, separated by commas'),
        ('http_connect_timeout', 'integer', '5', 1, 60, null, 'seconds', 'longest wait for a connection'),
        ('http_timeout', 'integer', '10', 1, 300, null, 'seconds', 'longest duration of a request'),
        ('inbox_retention_days', 'integer', '30', 1, 3650, null, 'days', 'how long ulak.mark_handled() remembers a key'),
        ('lease_seconds', 'integer', '30', 5, 3600, null, 'seconds', 'how long the worker''s claim holds; it is renewed every third of this'),
        ('max_payload_size', 'integer', '1048576', 1024, 104857600, null, 'bytes', 'largest payload that send() accepts'),
        ('max_queue_size', 'integer', '1000000', 0, 2147483647, null, 'messages', 'most messages that may wait or be in flight; 0: no limit'),
        ('poll_interval', 'integer', '50', 5, 60000, null, 'milliseconds', 'longest wait of an idle worker before it looks again'),
        ('poll_interval_busy', 'integer', '2', 1, 1000, null, 'milliseconds', 'wait of a worker while traffic flows'),
        ('priority_aging', 'integer', '0', 0, 86400, null, 'seconds', 'a waiting message gains one step of priority each time this passes; 0: never'),
        ('response_body_max_size', 'integer', '65536', 0, 10485760, null, 'bytes', 'where a captured response body is cut'),
        ('retry_base_delay', 'integer', '10', 1, 3600, null, 'seconds', 'delay before the first retry'),
        ('retry_increment', 'integer', '30', 1, 3600, null, 'seconds', 'what linear backoff adds with each retry'),
        ('retry_max_delay', 'integer', '300', 1, 86400, null, 'seconds', 'longest delay between retries'),
        ('stale_recovery_timeout', 'integer', '300', 60, 3600, null, 'seconds', 'lease of an external worker that does not name one'),
        ('stats_retention_days', 'integer', '30', 1, 3650, null, 'days', 'how long the counters per minute in ulak.endpoint_stats are kept'),
        ('worker_concurrency', 'integer', '128', 1, 1000, null, 'requests', 'most requests that one worker has in flight to one endpoint'),
        ('workers', 'integer', '2', 1, 32, null, 'workers', 'workers that ulak.start() schedules unless it is told otherwise')
    ) as d (name, kind, default_value, minimum, maximum, choices, unit, description)
left join ulak.setting_values as v on v.name = d.name
order by d.name;

comment on view ulak.settings is 'every setting with its value, default, range and meaning; change one with ulak.configure()';
comment on column ulak.settings.name is 'what ulak.configure() and ulak.setting() take';
comment on column ulak.settings.value is 'the value that holds; a session of ulak_admin can override it with SET ulak.<name>';
comment on column ulak.settings.default_value is 'the value after ulak.configure(name, null)';
comment on column ulak.settings.minimum is 'smallest value of an integer';
comment on column ulak.settings.maximum is 'largest value of an integer';
comment on column ulak.settings.choices is 'the values that a choice can have';
comment on column ulak.settings.unit is 'what the number counts';
comment on column ulak.settings.kind is 'integer, boolean, choice, text or networks';
comment on column ulak.settings.description is 'what it does';

-- The defaults again, as one constant: looking one up in the view takes five times as long.
do $plpgsql$
begin
    execute format(
        $function$
        create or replace function ulak._setting_default(p_name text)
        returns text
        language sql
        immutable
        parallel safe
        as $sql$ select %L::jsonb ->> p_name $sql$
        $function$,
        (select jsonb_object_agg(s.name, s.default_value) from ulak.settings as s)
    );
end
$plpgsql$;

-- What holds for everybody, whatever this session has SET. Spelled out instead of pinned, which would cost half as much
-- again; the claim asks for several settings each time.
create or replace function ulak._stored_setting(p_name text)
returns text
language plpgsql
stable
as $plpgsql$
declare
    v_value text;
begin
    select v.value into v_value from ulak.setting_values as v where v.name operator(pg_catalog.=) p_name;
    if not found then
        v_value := ulak._setting_default(p_name);
        if v_value is null then
            perform ulak._raise_unknown_setting(p_name);
        end if;
    end if;
    return v_value;
end
$plpgsql$;

-- Anybody can SET a custom parameter. So it counts for administrators only: it must not loosen a limit for others.
create or replace function ulak.setting(p_name text)
returns text
language plpgsql
stable
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_override text := current_setting('ulak.' || p_name, true);
begin
    -- A parameter whose SET LOCAL has ended is left behind as an empty text.
    if v_override <> '' and pg_has_role(session_user, 'ulak_admin', 'member') then
        return ulak._checked_setting(p_name, v_override, format('reset ulak.%I;', p_name));
    end if;
    return ulak._stored_setting(p_name);
end
$plpgsql$;

comment on function ulak.setting(text) is 'the value of a setting that holds in this session';

create or replace function ulak._setting_integer(p_name text)
returns integer
language sql
stable
as $sql$
    select ulak.setting(p_name)::integer
$sql$;

create or replace function ulak.configure(p_name text, p_value text)
returns text
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_old text := ulak._stored_setting(p_name);
    v_new text;
begin
    if p_value is null then
        delete from ulak.setting_values where name = p_name;
        v_new := ulak._setting_default(p_name);
    else
        v_new := ulak._checked_setting(
            p_name,
            p_value,
            format('select ulak.configure(%L, %L);', p_name, ulak._setting_default(p_name))
        );
        insert into ulak.setting_values as v (name, value)
        values (p_name, v_new)
        on conflict (name) do update set value = v_new, updated_at = now(), updated_by = session_user;
    end if;
    if v_new <> v_old then
        insert into ulak.event_log (event, old_value, new_value, detail)
        values ('setting.changed', to_jsonb(v_old), to_jsonb(v_new), jsonb_build_object('setting', p_name));
    end if;
    if p_name = 'max_queue_size' then
        perform ulak._forget_headroom();
    end if;
    perform ulak._ring();
    return v_new;
end
$plpgsql$;

comment on function ulak.configure(text, text) is
    'changes a setting for everybody and returns its new value; null sets it back to its default';

-- The value in its canonical form, or an error whose hint is p_remedy.
create or replace function ulak._checked_setting(p_name text, p_value text, p_remedy text)
returns text
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_setting ulak.settings;
    v_value text := btrim(p_value);
    v_valid boolean;
begin
    select * into v_setting from ulak.settings as s where s.name = p_name;
    if not found then
        perform ulak._raise_unknown_setting(p_name);
    end if;
    case v_setting.kind
        when 'integer' then
            v_valid := v_value ~ '^[+-]?[0-9]{1,18}$' and v_value::bigint between v_setting.minimum and v_setting.maximum;
            v_value := case when v_valid then v_value::bigint::text end;
        when 'boolean' then
            v_valid := lower(v_value) in ('true', 'on', 'yes', '1', 'false', 'off', 'no', '0');
            v_value := case when v_valid then v_value::boolean::text end;
        when 'choice' then
            v_value := lower(v_value);
            v_valid := v_value = any(v_setting.choices);
        when 'networks' then
            v_value := regexp_replace(v_value, '\s+', '', 'g');
            v_valid := ulak._are_networks(v_value);
        else
            v_valid := v_value ~ '^[\x21-\x7e]+$' and length(v_value) <= 2048;
    end case;
    if not v_valid then
        raise exception 'invalid value for setting %', p_name
            using
                errcode = '22023',
                detail = format(
                    '%s takes %s (default %s).',
                    p_name,
                    ulak._setting_range(v_setting),
                    coalesce(nullif(v_setting.default_value, ''), 'empty')
                ),
                hint = p_remedy;
    end if;
    return v_value;
end
$plpgsql$;

-- In words: "an integer from 5 to 3600, in seconds".
create or replace function ulak._setting_range(p_setting ulak.settings)
returns text
language sql
immutable
set search_path = pg_catalog, pg_temp
as $sql$
    select case p_setting.kind
        when 'integer' then format('an integer from %s to %s, in %s', p_setting.minimum, p_setting.maximum, p_setting.unit)
        when 'boolean' then 'true or false'
        when 'choice' then 'one of ' || array_to_string(p_setting.choices, ', ')
        when 'networks' then 'CIDRs such as 10.1.0.0/16, separated by commas'
        else '1 to 2048 printable ASCII characters without spaces'
    end
$sql$;

create or replace function ulak._are_networks(p_list text)
returns boolean
language plpgsql
immutable
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    perform network::cidr from unnest(string_to_array(p_list, ',')) as network;
    return true;
exception
    when invalid_text_representation then
        return false;
end
$plpgsql$;

create or replace function ulak._raise_unknown_setting(p_name text)
returns void
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    raise exception 'unknown setting %', coalesce(quote_ident(p_name), 'null')
        using
            errcode = '42704',
            detail = 'select * from ulak.settings; lists them all.',
            hint = ulak._did_you_mean(p_name, array(select s.name from ulak.settings as s));
end
$plpgsql$;
-- What an endpoint's config and retry policy may hold. Checks are made on the config with its secrets put in.

create or replace function ulak._protocols()
returns text[]
language sql
immutable
as $sql$
    select array['http', 'pull']
$sql$;

-- The shape of a config. null: not a protocol.
create or replace function ulak._config_schema(p_protocol text)
returns jsonb
language sql
immutable
set search_path = pg_catalog, pg_temp
as $sql$
    select case p_protocol
        when 'http' then ulak._http_config_schema() || jsonb_build_object(
            'properties', ulak._http_config_schema() -> 'properties' || ulak._delivery_config_schema()
        )
        when 'pull' then jsonb_build_object(
            'type', 'object', 'additionalProperties', false, 'properties', ulak._delivery_config_schema()
        )
    end
$sql$;

-- Keys that govern claiming, whatever the protocol.
create or replace function ulak._delivery_config_schema()
returns jsonb
language sql
immutable
as $sql$
    select $json${
        "max_in_flight": {"type": "integer", "minimum": 1, "maximum": 10000},
        "rate_limit": {
            "type": "object",
            "required": ["limit"],
            "additionalProperties": false,
            "properties": {
                "limit": {"type": "integer", "minimum": 1, "maximum": 1000000},
                "interval": {"enum": ["second", "minute", "hour"]},
                "burst": {"type": "integer", "minimum": 1, "maximum": 1000000}
            }
        },
        "circuit_breaker": {
            "type": "object",
            "additionalProperties": false,
            "properties": {
                "threshold": {"type": "integer", "minimum": 1, "maximum": 1000},
                "cooldown": {"type": "integer", "minimum": 5, "maximum": 3600},
                "counts": {"enum": ["retryable", "all"]},
                "mode": {"enum": ["consecutive", "rate"]},
                "window": {"type": "integer", "minimum": 1, "maximum": 3600},
                "min_requests": {"type": "integer", "minimum": 1, "maximum": 1000000},
                "failure_rate": {"type": "number", "exclusiveMinimum": 0, "maximum": 1}
            }
        }
    }$json$::pg_catalog.jsonb
$sql$;

create or replace function ulak._http_config_schema()
returns jsonb
language sql
immutable
as $sql$
    select $json${
        "type": "object",
        "required": ["url"],
        "additionalProperties": false,
        "properties": {
            "url": {"type": "string"},
            "method": {"enum": ["POST", "PUT", "PATCH", "DELETE"]},
            "headers": {"type": "object", "additionalProperties": {"type": "string"}},
            "timeout": {"type": "integer", "minimum": 1, "maximum": 300},
            "connect_timeout": {"type": "integer", "minimum": 1, "maximum": 60},
            "signing_secret": {"type": "string"},
            "cloudevents": {"type": "boolean"},
            "cloudevents_mode": {"enum": ["structured", "binary"]},
            "cloudevents_type": {"type": "string", "minLength": 1, "maxLength": 2048},
            "auth": {
                "type": "object",
                "required": ["type"],
                "properties": {"type": {"enum": ["basic", "bearer", "oauth2", "aws_sigv4"]}}
            },
            "tls_client_cert": {"type": "string", "minLength": 1},
            "tls_client_key": {"type": "string", "minLength": 1},
            "tls_ca_bundle": {"type": "string", "minLength": 1},
            "tls_pinned_public_key": {"type": "string", "minLength": 1},
            "ssl_verify": {"type": "boolean"},
            "proxy": {
                "type": "object",
                "required": ["url"],
                "additionalProperties": false,
                "properties": {
                    "url": {"type": "string"},
                    "type": {"enum": ["http", "https"]},
                    "username": {"type": "string"},
                    "password": {"type": "string"},
                    "no_proxy": {"type": "string"},
                    "ca_bundle": {"type": "string", "minLength": 1},
                    "ssl_verify": {"type": "boolean"}
                }
            },
            "auto_disable_on_gone": {"type": "boolean"},
            "batch_size": {"type": "integer", "minimum": 1, "maximum": 10000},
            "batch_format": {"enum": ["cloudevents", "json"]},
            "retry_on": {
                "type": "array",
                "items": {"type": ["integer", "string"], "minimum": 100, "maximum": 599, "pattern": "^[345]xx$"}
            },
            "permanent_on": {
                "type": "array",
                "items": {"type": ["integer", "string"], "minimum": 100, "maximum": 599, "pattern": "^[345]xx$"}
            }
        }
    }$json$::pg_catalog.jsonb
$sql$;

create or replace function ulak._auth_schema(p_type text)
returns jsonb
language sql
immutable
set search_path = pg_catalog, pg_temp
as $sql$
    select $json${
        "basic": {
            "required": ["username", "password"],
            "additionalProperties": false,
            "properties": {
                "type": true,
                "username": {"type": "string", "minLength": 1},
                "password": {"type": "string"}
            }
        },
        "bearer": {
            "required": ["token"],
            "additionalProperties": false,
            "properties": {"type": true, "token": {"type": "string", "minLength": 1}}
        },
        "oauth2": {
            "required": ["token_url", "client_id", "client_secret"],
            "additionalProperties": false,
            "properties": {
                "type": true,
                "token_url": {"type": "string"},
                "client_id": {"type": "string", "minLength": 1},
                "client_secret": {"type": "string", "minLength": 1},
                "scope": {"type": "string"}
            }
        },
        "aws_sigv4": {
            "required": ["access_key", "secret_key", "region", "service"],
            "additionalProperties": false,
            "properties": {
                "type": true,
                "access_key": {"type": "string", "minLength": 1},
                "secret_key": {"type": "string", "minLength": 1},
                "region": {"type": "string", "pattern": "^[a-z0-9-]+$"},
                "service": {"type": "string", "pattern": "^[a-z0-9-]+$"},
                "session_token": {"type": "string", "minLength": 1}
            }
        }
    }$json$::pg_catalog.jsonb -> p_type
$sql$;

create or replace function ulak._retry_policy_schema()
returns jsonb
language sql
immutable
as $sql$
    select $json${
        "type": "object",
        "additionalProperties": false,
        "properties": {
            "max_retries": {"type": "integer", "minimum": 0, "maximum": 1000},
            "backoff": {"enum": ["exponential", "linear", "fixed", "quadratic", "schedule"]},
            "base_delay_seconds": {"type": "integer", "minimum": 1, "maximum": 3600},
            "max_delay_seconds": {"type": "integer", "minimum": 1, "maximum": 86400},
            "increment_seconds": {"type": "integer", "minimum": 1, "maximum": 3600},
            "schedule": {
                "type": "array",
                "minItems": 1,
                "maxItems": 1000,
                "items": {"type": "integer", "minimum": 0, "maximum": 2592000}
            },
            "jitter": {"enum": ["none", "full", "equal"]}
        }
    }$json$::pg_catalog.jsonb
$sql$;

-- Headers that ulak or libcurl sets: a config or a message must not.
create or replace function ulak._reserved_headers()
returns text[]
language sql
immutable
as $sql$
    select array[
        'host', 'content-length', 'transfer-encoding', 'connection', 'keep-alive', 'proxy-connection', 'te', 'trailer',
        'upgrade', 'expect', 'accept-encoding', 'webhook-id', 'webhook-timestamp', 'webhook-signature', 'ulak-attempt'
    ]
$sql$;

-- {path, problem, hint} of the first thing wrong with a config, or null. The config has its secrets put in.
create or replace function ulak._config_violation(p_protocol text, p_config jsonb)
returns text[]
language plpgsql
immutable
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_violation text[] := ulak._json_violation(ulak._config_schema(p_protocol), p_config);
begin
    v_violation := coalesce(v_violation, ulak._circuit_breaker_violation(p_config -> 'circuit_breaker'));
    if p_protocol = 'http' and v_violation is null then
        v_violation := coalesce(
            ulak._url_violation('.url', p_config ->> 'url'),
            ulak._headers_violation(p_config -> 'headers', p_config ? 'auth'),
            ulak._auth_violation(p_config -> 'auth'),
            ulak._signing_secret_violation(p_config ->> 'signing_secret'),
            ulak._proxy_violation(p_config -> 'proxy'),
            ulak._http_keys_violation(p_config)
        );
    end if;
    return v_violation;
end
$plpgsql$;

-- No userinfo (it would end in logs), nothing that two parsers could read in two ways.
create or replace function ulak._url_violation(p_path text, p_url text)
returns text[]
language plpgsql
immutable
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_authority text := substring(p_url from '^[Hh][Tt][Tt][Pp][Ss]?://([^/?#]*)');
    v_port text := substring(v_authority from ':([0-9]{1,5})$');
    v_problem text;
begin
    if p_url is null then
        return null;
    end if;
    v_problem := case
        when length(p_url) > 8192 then 'must have at most 8192 characters'
        when p_url ~ '[^\x21-\x7e]' then 'must not have spaces, control characters or characters beyond ASCII'
        when p_url ~ '[\\#]' then 'must not have a fragment or a backslash'
        when v_authority is null then 'must start with http:// or https://'
        when v_authority ~ '@' then 'must not have a user or a password'
        when v_authority !~ '^([A-Za-z0-9._~-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?$'
            then 'must have a valid host, and digits as port'
        when v_port::integer not between 1 and 65535 then 'must have a port from 1 to 65535'
    end;
    if v_problem is not null then
        return array[
            p_path,
            v_problem,
            'Such as https://example.com/hooks; percent-encode the path, put credentials in "auth".'
        ];
    end if;
    return null;
end
$plpgsql$;

create or replace function ulak._headers_violation(p_headers jsonb, p_has_auth boolean)
returns text[]
language plpgsql
immutable
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_name text;
    v_value text;
    v_seen text[] := array[]::text[];
    v_problem text;
begin
    for v_name, v_value in select h.key, h.value from jsonb_each_text(p_headers) as h loop
        v_problem := case
            when v_name !~ '^[!#$%&''*+.^_`|~0-9A-Za-z-]+$' then 'is not a valid header name'
            when v_value ~ '[\x01-\x08\x0a-\x1f\x7f]' then 'must not have line breaks or other control characters'
            when lower(v_name) = any(ulak._reserved_headers()) then 'is a header that ulak sets itself'
            when lower(v_name) = 'authorization' and p_has_auth then 'is set by "auth" already'
            when lower(v_name) = any(v_seen) then 'is given twice'
        end;
        if v_problem is not null then
            return array['.headers' || ulak._json_path_step(v_name), v_problem, null];
        end if;
        v_seen := v_seen || lower(v_name);
    end loop;
    return null;
end
$plpgsql$;

create or replace function ulak._auth_violation(p_auth jsonb)
returns text[]
language plpgsql
immutable
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_violation text[] := ulak._json_violation(ulak._auth_schema(p_auth ->> 'type'), p_auth);
begin
    if v_violation is not null then
        v_violation[1] := '.auth' || v_violation[1];
        return v_violation;
    elsif p_auth ->> 'username' ~ ':' then
        return array['.auth.username', 'must not have a colon', null];
    end if;
    return coalesce(
        (
            select array['.auth.' || a.key, 'must not have line breaks or other control characters', null]
            from jsonb_each_text(p_auth) as a
            where a.value ~ '[\x01-\x1f\x7f]'
            limit 1
        ),
        ulak._url_violation('.auth.token_url', p_auth ->> 'token_url')
    );
end
$plpgsql$;

create or replace function ulak._proxy_violation(p_proxy jsonb)
returns text[]
language plpgsql
immutable
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    if p_proxy ? 'username' <> p_proxy ? 'password' then
        return array['.proxy', 'must have both username and password, or neither', null];
    elsif lower(split_part(p_proxy ->> 'url', ':', 1)) <> p_proxy ->> 'type' then
        return array['.proxy.type', 'must be the scheme of the proxy''s url', 'It can be left out.'];
    end if;
    return ulak._url_violation('.proxy.url', p_proxy ->> 'url');
end
$plpgsql$;

-- As Standard Webhooks writes secrets (whsec_ and base64), or any text that isn't trivially short.
create or replace function ulak._signing_secret_violation(p_secret text)
returns text[]
language plpgsql
immutable
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    if starts_with(p_secret, 'whsec_') then
        -- 16 bytes are 22 characters; padding is often lost on the way.
        if p_secret !~ '^whsec_[A-Za-z0-9+/]{22,}={0,2}$' or length(rtrim(p_secret, '=')) % 4 = 3 then
            return array[
                '.signing_secret',
                'must be whsec_ and at least 16 bytes in base64',
                'Let ulak make one: leave it out, then select ulak.rotate_secret(''endpoint'');'
            ];
        end if;
    elsif length(p_secret) < 8 or p_secret ~ '[\x01-\x1f\x7f]' then
        return array['.signing_secret', 'must have at least 8 characters and no control characters', null];
    end if;
    return null;
end
$plpgsql$;

-- A key that has no effect beside the others is a mistake that nobody would notice.
create or replace function ulak._circuit_breaker_violation(p_breaker jsonb)
returns text[]
language plpgsql
immutable
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_key text;
begin
    if p_breaker ->> 'mode' is distinct from 'rate' then
        foreach v_key in array array['window', 'min_requests', 'failure_rate'] loop
            if p_breaker ? v_key then
                return array['.circuit_breaker.' || v_key, 'has no effect without "mode": "rate"', null];
            end if;
        end loop;
    elsif p_breaker ? 'threshold' then
        return array['.circuit_breaker.threshold', 'has no effect with "mode": "rate"', null];
    end if;
    return null;
end
$plpgsql$;

create or replace function ulak._http_keys_violation(p_config jsonb)
returns text[]
language plpgsql
immutable
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    if exists (select from jsonb_array_elements(p_config -> 'retry_on') as r where p_config -> 'permanent_on' @> r) then
        return array['.permanent_on', 'has a status that retry_on has too', null];
    elsif p_config ? 'tls_client_key' and not p_config ? 'tls_client_cert' then
        return array['.tls_client_cert', 'is required beside tls_client_key', null];
    elsif p_config ->> 'cloudevents_type' ~ '[\x01-\x1f\x7f]' then
        return array['.cloudevents_type', 'must not have control characters', null];
    end if;
    return null;
end
$plpgsql$;

create or replace function ulak._retry_policy_violation(p_policy jsonb)
returns text[]
language plpgsql
immutable
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_violation text[] := ulak._json_violation(ulak._retry_policy_schema(), p_policy);
begin
    if v_violation is not null then
        return v_violation;
    elsif p_policy ->> 'backoff' = 'schedule' and not p_policy ? 'schedule' then
        return array['.schedule', 'is required with "backoff": "schedule"', null];
    elsif p_policy ? 'schedule' and p_policy ->> 'backoff' is distinct from 'schedule' then
        return array['.schedule', 'has no effect without "backoff": "schedule"', null];
    elsif (p_policy ->> 'base_delay_seconds')::numeric > (p_policy ->> 'max_delay_seconds')::numeric then
        return array['.base_delay_seconds', 'must not exceed max_delay_seconds', null];
    end if;
    return null;
end
$plpgsql$;

create or replace function ulak._raise_violation(p_what text, p_violation text[])
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    raise exception 'invalid %: $% %', p_what, p_violation[1], p_violation[2]
        using
            errcode = '22023',
            hint = coalesce(p_violation[3], 'Correct the value at this path.');
end
$plpgsql$;

-- True, or an error that says what is wrong where.
create or replace function ulak.validate_endpoint_config(p_protocol text, p_config jsonb)
returns boolean
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_violation text[];
begin
    if p_protocol is null or p_protocol <> all(ulak._protocols()) then
        raise exception 'unknown protocol %', coalesce(quote_literal(p_protocol), 'null')
            using
                errcode = '22023',
                detail = 'http: the worker delivers. pull: external workers fetch.',
                hint = ulak._did_you_mean(p_protocol, ulak._protocols());
    end if;
    v_violation := ulak._config_violation(p_protocol, ulak._with_secrets(coalesce(p_config, 'null')));
    if v_violation is not null then
        perform ulak._raise_violation(format('config of %s endpoint', p_protocol), v_violation);
    end if;
    return true;
end
$plpgsql$;

comment on function ulak.validate_endpoint_config(text, jsonb) is
    'true if create_endpoint() would accept this config; otherwise the error that it would raise';
-- Endpoints: create, alter, drop. A trigger validates, so that a plain UPDATE by an administrator is checked as well.

create or replace function ulak.create_endpoint(
    p_name text,
    p_protocol text,
    p_config jsonb,
    p_retry_policy jsonb default null,
    p_description text default null
)
returns bigint
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_id bigint;
begin
    perform ulak._lock_configs();
    insert into ulak.endpoints (name, protocol, config, retry_policy, description)
    values (p_name, p_protocol, coalesce(p_config, '{}'), p_retry_policy, p_description)
    on conflict (name) do nothing
    returning id into v_id;
    if v_id is null then
        raise exception 'endpoint "%" exists already', p_name
            using
                errcode = '42710',
                detail = (
                    select format('It is endpoint %s, protocol %s.', e.id, e.protocol)
                    from ulak.endpoints as e
                    where e.name = p_name
                ),
                hint = format('select ulak.alter_endpoint(%L, ...);', p_name);
    end if;
    return v_id;
end
$plpgsql$;

comment on function ulak.create_endpoint(text, text, jsonb, jsonb, text) is
    'creates an endpoint (protocol http or pull) and returns its id; refuses a config or retry policy that is not valid';

create or replace function ulak.alter_endpoint(
    p_name text,
    p_config jsonb default null,
    p_retry_policy jsonb default null,
    p_description text default null
)
returns boolean
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    perform ulak._lock_configs();
    update ulak.endpoints
    set config = coalesce(p_config, config),
        retry_policy = coalesce(p_retry_policy, retry_policy),
        description = coalesce(p_description, description)
    where name = p_name;
    if not found then
        perform ulak._raise_unknown_endpoint(p_name);
    end if;
    return true;
end
$plpgsql$;

comment on function ulak.alter_endpoint(text, jsonb, jsonb, text) is
    'replaces an endpoint''s config, retry policy or description; null leaves one as it is, ''{}'' clears the retry policy';

create or replace function ulak.drop_endpoint(p_name text)
returns boolean
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_id bigint;
    v_subscriptions bigint;
begin
    perform ulak._lock_configs();
    select e.id into v_id from ulak.endpoints as e where e.name = p_name for no key update;
    if not found then
        perform ulak._raise_unknown_endpoint(p_name);
    end if;
    perform ulak._require_unused(v_id, p_name);
    with gone as (
        delete from ulak.subscriptions as s where s.endpoint_id = v_id returning s.id
    )
    select count(*) into v_subscriptions from gone;
    delete from ulak.endpoints where id = v_id;
    delete from ulak.secrets where name = ulak._signing_secret_name(v_id);
    insert into ulak.event_log (event, endpoint_id, endpoint_name, detail)
    values ('endpoint.dropped', v_id, p_name, jsonb_build_object('subscriptions', v_subscriptions));
    if v_subscriptions > 0 then
        raise notice '% subscription(s) of endpoint "%" were removed with it', v_subscriptions, p_name;
    end if;
    return true;
end
$plpgsql$;

comment on function ulak.drop_endpoint(text) is
    'removes an endpoint and its subscriptions; refuses while messages wait for it or its dead letters are unresolved';

-- Changes of configs and of secrets wait for each other: a config is valid for the secrets that it names.
create or replace function ulak._lock_configs()
returns void
language sql
set search_path = pg_catalog, pg_temp
as $sql$
    select pg_advisory_xact_lock(hashtext('ulak_config'), 0)
$sql$;

-- Raises while the endpoint has messages that nobody could deliver or redrive without it.
create or replace function ulak._require_unused(p_id bigint, p_name text)
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_waiting bigint;
    v_in_flight bigint;
    v_dead bigint;
begin
    if current_setting('transaction_isolation') <> 'read committed' then
        raise exception 'drop_endpoint() needs a transaction at read committed'
            using errcode = '25001', hint = 'Call it in a transaction of its own: its counts must see the latest messages.';
    end if;
    -- The other side of the shared locks that every send takes, by the endpoint's name or by its id.
    if not pg_try_advisory_xact_lock(hashtext('ulak_endpoint'), hashtext(p_name))
        or not pg_try_advisory_xact_lock(hashtext('ulak_endpoint_id'), p_id::integer)
    then
        raise exception 'an open transaction has sent to endpoint "%"', p_name
            using errcode = '55006', hint = 'Try again when that transaction has ended.';
    end if;
    select c.waiting, c.in_flight, c.dead into v_waiting, v_in_flight, v_dead from ulak._count_unresolved(p_id) as c;
    if v_waiting + v_in_flight + v_dead > 0 then
        raise exception 'endpoint "%" is in use', p_name
            using
                errcode = '55006',
                detail = format(
                    '%s message(s) wait for it, %s are in flight, %s dead letter(s) are unresolved.',
                    v_waiting,
                    v_in_flight,
                    v_dead
                ),
                hint = ulak._how_to_free(p_id, p_name, v_waiting + v_in_flight > 0);
    end if;
end
$plpgsql$;

create or replace function ulak._how_to_free(p_id bigint, p_name text, p_is_live boolean)
returns text
language sql
immutable
set search_path = pg_catalog, pg_temp
as $sql$
    select case
        when p_is_live then format(
            'Let the worker deliver them. To see them: select * from ulak.queue where endpoint_id = %s '
            'and status in (''pending'', ''processing'');',
            p_id
        )
        else format(
            'select ulak.redrive_endpoint(%L); or, to give them up, as a superuser: '
            'delete from ulak.dlq where endpoint_id = %s and status = ''failed'';',
            p_name,
            p_id
        )
    end
$sql$;

-- By the partial indexes: finished messages don't cost.
create or replace function ulak._count_unresolved(
    p_endpoint_id bigint,
    out waiting bigint,
    out in_flight bigint,
    out dead bigint
)
language sql
stable
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
as $sql$
    select
        (select count(*) from ulak.queue as q where q.status = 'pending' and q.endpoint_id = p_endpoint_id),
        (select count(*) from ulak.queue as q where q.status = 'processing' and q.endpoint_id = p_endpoint_id),
        (select count(*) from ulak.dlq as d where d.status = 'failed' and d.endpoint_id = p_endpoint_id)
$sql$;

create or replace function ulak._raise_unknown_endpoint(p_name text)
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    raise exception 'unknown endpoint %', coalesce('"' || left(p_name, 200) || '"', 'null')
        using
            errcode = '42704',
            detail = 'Endpoints are made by ulak.create_endpoint(); select name from ulak.endpoint_list; lists them.',
            hint = ulak._did_you_mean(p_name, array(select e.name from ulak.endpoints as e));
end
$plpgsql$;

create or replace function ulak._check_endpoint()
returns trigger
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_violation text[];
begin
    -- A restore brings rows that were valid when they were stored, and the secrets after them.
    if tg_op = 'INSERT' and current_setting('row_security') = 'off' then
        return new;
    end if;
    if new.name is null or new.name !~ '^[^\x01-\x1f\x7f]{1,200}$' or new.name <> btrim(new.name) then
        raise exception 'invalid endpoint name'
            using
                errcode = '22023',
                detail = 'A name has 1 to 200 characters, no control characters, no spaces around it.',
                hint = 'Such as: billing-webhook';
    end if;
    if ulak._secret_names(new.config) <> '{}' then
        perform ulak._lock_configs();
    end if;
    perform ulak.validate_endpoint_config(new.protocol, new.config);
    v_violation := ulak._retry_policy_violation(new.retry_policy);
    if v_violation is not null then
        perform ulak._raise_violation('retry policy', v_violation);
    end if;
    if tg_op = 'UPDATE' then
        new.updated_at := now();
        -- Workers cache by this number: it must never stand for two configs.
        new.config_version := greatest(
            new.config_version,
            old.config_version + ((new.protocol, new.config, new.retry_policy)
                is distinct from (old.protocol, old.config, old.retry_policy))::integer
        );
    end if;
    return new;
end
$plpgsql$;

-- Not for the columns of the breaker and the rate limit, which change all the time.
create or replace trigger endpoints_are_valid
    before insert or update of name, protocol, config, retry_policy, description, config_version on ulak.endpoints
    for each row
    execute function ulak._check_endpoint();

-- Which keys changed, not what they hold.
create or replace function ulak._log_endpoint()
returns trigger
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    if tg_op = 'INSERT' and current_setting('row_security') <> 'off' then
        insert into ulak.event_log (event, endpoint_id, endpoint_name, detail)
        values ('endpoint.created', new.id, new.name, jsonb_build_object('protocol', new.protocol));
    elsif tg_op = 'UPDATE' and (new.name, new.protocol, new.config, new.retry_policy, new.description)
        is distinct from (old.name, old.protocol, old.config, old.retry_policy, old.description)
    then
        insert into ulak.event_log (event, endpoint_id, endpoint_name, detail)
        values (
            'endpoint.altered',
            new.id,
            new.name,
            jsonb_build_object(
                'config', ulak._changed_keys(old.config, new.config),
                'retry_policy', ulak._changed_keys(old.retry_policy, new.retry_policy),
                'config_version', new.config_version
            )
        );
    end if;
    return null;
end
$plpgsql$;

create or replace trigger endpoints_are_logged
    after insert or update of name, protocol, config, retry_policy, description, config_version on ulak.endpoints
    for each row
    execute function ulak._log_endpoint();

create or replace function ulak._changed_keys(p_old jsonb, p_new jsonb)
returns jsonb
language sql
immutable
set search_path = pg_catalog, pg_temp
as $sql$
    select coalesce(jsonb_agg(coalesce(o.key, n.key) order by coalesce(o.key, n.key)), '[]')
    from jsonb_each(p_old) as o
    full join jsonb_each(p_new) as n on n.key = o.key
    where o.value is distinct from n.value
$sql$;

-- What may be seen of a config by those who may not see it: numbers, switches, status codes, and the host of a url.
create or replace view ulak.endpoint_list as
select
    e.id,
    e.name,
    e.protocol,
    e.enabled,
    e.description,
    e.circuit_state,
    e.circuit_failure_count,
    e.circuit_opened_at,
    e.circuit_half_open_at,
    e.last_success_at,
    e.last_failure_at,
    e.created_at,
    e.updated_at,
    (
        select coalesce(jsonb_object_agg(c.key, coalesce(inner_object.shown, c.shown)), '{}')
        from (
            select
                t.key,
                t.value,
                case
                    when jsonb_typeof(t.value) in ('number', 'boolean') then t.value
                    when t.key in ('retry_on', 'permanent_on') then t.value
                    when t.key = 'url'
                        then coalesce(to_jsonb(substring(t.value #>> '{}' from '^[A-Za-z]+://[^/?#]+')), '"***"')
                    else '"***"'
                end as shown
            from jsonb_each(e.config) as t
        ) as c
        left join lateral (
            select jsonb_object_agg(
                i.key,
                case when jsonb_typeof(i.value) in ('number', 'boolean') then i.value else '"***"' end
            ) as shown
            from jsonb_each(case when jsonb_typeof(c.value) = 'object' then c.value end) as i
        ) as inner_object on true
    ) as config
from ulak.endpoints as e;

comment on view ulak.endpoint_list is 'endpoints without anything secret: texts in the config are masked, a url is cut after its host';
comment on column ulak.endpoint_list.id is 'as in ulak.endpoints';
comment on column ulak.endpoint_list.name is 'as in ulak.endpoints';
comment on column ulak.endpoint_list.protocol is 'as in ulak.endpoints';
comment on column ulak.endpoint_list.enabled is 'as in ulak.endpoints';
comment on column ulak.endpoint_list.description is 'as in ulak.endpoints';
comment on column ulak.endpoint_list.circuit_state is 'as in ulak.endpoints';
comment on column ulak.endpoint_list.circuit_failure_count is 'as in ulak.endpoints';
comment on column ulak.endpoint_list.circuit_opened_at is 'as in ulak.endpoints';
comment on column ulak.endpoint_list.circuit_half_open_at is 'as in ulak.endpoints';
comment on column ulak.endpoint_list.last_success_at is 'as in ulak.endpoints';
comment on column ulak.endpoint_list.last_failure_at is 'as in ulak.endpoints';
comment on column ulak.endpoint_list.created_at is 'as in ulak.endpoints';
comment on column ulak.endpoint_list.updated_at is 'as in ulak.endpoints';
comment on column ulak.endpoint_list.config is 'the config with *** for every text';
-- Secrets: values that configs name as {"$secret": "name"}, and signing secrets that can be rotated.

create or replace function ulak.set_secret(p_name text, p_value text)
returns boolean
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    perform ulak._lock_configs();
    perform ulak._check_secret_name(p_name);
    if coalesce(p_value, '') = '' then
        raise exception 'the value of secret "%" is empty', p_name
            using errcode = '22023', hint = format('To remove it: select ulak.drop_secret(%L);', p_name);
    end if;
    insert into ulak.secrets (name, value)
    values (p_name, p_value)
    on conflict (name) do update
    set value = excluded.value, previous_value = null, previous_until = null, updated_at = now();
    perform ulak._renew_configs(p_name);
    insert into ulak.event_log (event, detail) values ('secret.set', jsonb_build_object('secret', p_name));
    return true;
end
$plpgsql$;

comment on function ulak.set_secret(text, text) is
    'stores a value that configs can name as {"$secret": "name"}; replaces an earlier value at once';

create or replace function ulak.drop_secret(p_name text)
returns boolean
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_endpoints text;
begin
    perform ulak._lock_configs();
    select string_agg(e.name, ', ' order by e.name) into v_endpoints
    from ulak.endpoints as e
    where ulak._names_secret(e.config, p_name);
    if v_endpoints is not null then
        raise exception 'secret "%" is in use', p_name
            using
                errcode = '55006',
                detail = format('It is named by the config of: %s.', v_endpoints),
                hint = 'Give those endpoints a config without it first: select ulak.alter_endpoint(...);';
    end if;
    delete from ulak.secrets where name = p_name;
    if not found then
        perform ulak._raise_unknown_secret(p_name);
    end if;
    insert into ulak.event_log (event, detail) values ('secret.dropped', jsonb_build_object('secret', p_name));
    return true;
end
$plpgsql$;

comment on function ulak.drop_secret(text) is 'removes a secret that no config names any more';

create or replace function ulak.rotate_secret(
    p_endpoint text,
    p_grace interval default '24 hours',
    p_new_secret text default null,
    p_now timestamptz default now()
)
returns text
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_endpoint ulak.endpoints;
    v_new text := coalesce(p_new_secret, ulak._new_signing_secret());
    v_old text;
    v_secret text;
begin
    perform ulak._lock_configs();
    select * into v_endpoint from ulak.endpoints as e where e.name = p_endpoint for no key update;
    if not found then
        perform ulak._raise_unknown_endpoint(p_endpoint);
    elsif v_endpoint.protocol <> 'http' then
        raise exception 'endpoint "%" signs nothing', p_endpoint
            using errcode = '22023', detail = format('Its protocol is %s.', v_endpoint.protocol);
    elsif p_grace is null or p_grace < '0' then
        raise exception 'the grace must not be negative'
            using errcode = '22023', hint = format('select ulak.rotate_secret(%L, ''24 hours'');', p_endpoint);
    end if;
    -- A secret that the config holds itself moves to the table, where there is room for two.
    v_secret := coalesce(v_endpoint.config -> 'signing_secret' ->> '$secret', ulak._signing_secret_name(v_endpoint.id));
    v_old := ulak._with_secrets(v_endpoint.config) ->> 'signing_secret';
    insert into ulak.secrets (name, value, previous_value, previous_until)
    values (v_secret, v_new, v_old, case when v_old is not null then p_now + p_grace end)
    on conflict (name) do update
    set value = excluded.value,
        previous_value = excluded.previous_value,
        previous_until = excluded.previous_until,
        updated_at = now();
    if v_endpoint.config -> 'signing_secret' ? '$secret' then
        perform ulak._renew_configs(v_secret);
    else
        update ulak.endpoints
        set config = config || jsonb_build_object('signing_secret', jsonb_build_object('$secret', v_secret))
        where id = v_endpoint.id;
    end if;
    insert into ulak.event_log (event, endpoint_id, endpoint_name, detail)
    values ('secret.rotated', v_endpoint.id, p_endpoint, jsonb_build_object('secret', v_secret, 'grace', p_grace));
    return v_new;
end
$plpgsql$;

comment on function ulak.rotate_secret(text, interval, text, timestamptz) is
    'gives an endpoint a new signing secret and returns it; requests carry both signatures until the grace is over';

-- Maintenance calls this: a secret that signs no longer needn't be kept.
create or replace function ulak._forget_old_secrets(p_now timestamptz default now())
returns integer
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_names text[];
begin
    if not exists (select from ulak.secrets as s where s.previous_until <= p_now) then
        return 0;
    end if;
    perform ulak._lock_configs();
    with forgotten as (
        update ulak.secrets as s
        set previous_value = null, previous_until = null
        where s.previous_until <= p_now
        returning s.name
    )
    select array_agg(f.name) into v_names from forgotten as f;
    perform ulak._renew_configs(n) from unnest(v_names) as n;
    return coalesce(cardinality(v_names), 0);
end
$plpgsql$;

-- What a worker needs to deliver: configs with the secrets put in, and the secrets that sign, newest first.
create or replace function ulak._endpoint_configs(
    p_ids bigint[],
    p_now timestamptz default clock_timestamp()
)
returns table (id bigint, name text, config_version bigint, config jsonb, signing_secrets text[])
language sql
stable
security definer
set search_path = pg_catalog, pg_temp
as $sql$
    select
        e.id,
        e.name,
        e.config_version,
        r.config,
        array_remove(
            array[
                r.config ->> 'signing_secret',
                (
                    select s.previous_value
                    from ulak.secrets as s
                    where s.name = e.config -> 'signing_secret' ->> '$secret' and s.previous_until > p_now
                )
            ],
            null
        )
    from ulak.endpoints as e
    cross join lateral ulak._put_secrets(e.config, ulak._secret_values(ulak._secret_names(e.config))) as r (config)
    where e.id = any(p_ids)
$sql$;

-- 256 bits out of 366 random ones; gen_random_uuid() is PostgreSQL's own strong source.
create or replace function ulak._new_signing_secret()
returns text
language sql
volatile
set search_path = pg_catalog, pg_temp
as $sql$
    select 'whsec_' || encode(
        sha256(uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid())),
        'base64'
    )
$sql$;

create or replace function ulak._signing_secret_name(p_endpoint_id bigint)
returns text
language sql
immutable
set search_path = pg_catalog, pg_temp
as $sql$
    select 'ulak/endpoint/' || p_endpoint_id || '/signing_secret'
$sql$;

-- Workers read the configs anew. The trigger checks that each is still valid with the secret's new value.
-- In the order of ids, as everybody who locks several endpoints does.
create or replace function ulak._renew_configs(p_secret text)
returns void
language sql
set search_path = pg_catalog, pg_temp
as $sql$
    with named as (
        select e.id
        from ulak.endpoints as e
        where ulak._names_secret(e.config, p_secret)
        order by e.id
        for no key update
    )
    update ulak.endpoints as e
    set config_version = e.config_version + 1
    from named as n
    where e.id = n.id
$sql$;

create or replace function ulak._names_secret(p_config jsonb, p_secret text)
returns boolean
language sql
immutable
set search_path = pg_catalog, pg_temp
as $sql$
    select jsonb_path_exists(p_config, '$.**."$secret" ? (@ == $name)', jsonb_build_object('name', p_secret))
$sql$;

create or replace function ulak._secret_names(p_config jsonb)
returns text[]
language sql
immutable
set search_path = pg_catalog, pg_temp
as $sql$
    select array(select distinct n #>> '{}' from jsonb_path_query(p_config, '$.**."$secret"') as n)
$sql$;

create or replace function ulak._secret_values(p_names text[])
returns jsonb
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select coalesce(jsonb_object_agg(s.name, s.value), '{}') from ulak.secrets as s where s.name = any(p_names)
$sql$;

-- The config with its secrets put in, for validation. A name that isn't known is an error. The claim reads rate_limit and
-- circuit_breaker as they are stored, so a secret there stays as it is and is found to be no text.
create or replace function ulak._with_secrets(p_config jsonb)
returns jsonb
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_names text[] := ulak._secret_names(p_config);
    v_values jsonb;
    v_name text;
begin
    if v_names = '{}' or jsonb_typeof(p_config) <> 'object' then
        return p_config;
    end if;
    v_values := ulak._secret_values(v_names);
    foreach v_name in array v_names loop
        if not v_values ? v_name then
            perform ulak._raise_unknown_secret(v_name);
        end if;
    end loop;
    return (
        select jsonb_object_agg(
            c.key,
            case
                when c.key in ('rate_limit', 'circuit_breaker') then c.value
                else ulak._put_secrets(c.value, v_values)
            end
        )
        from jsonb_each(p_config) as c
    );
end
$plpgsql$;

create or replace function ulak._put_secrets(p_value jsonb, p_secrets jsonb)
returns jsonb
language plpgsql
immutable
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    if jsonb_typeof(p_value) = 'array' then
        return coalesce(
            (
                select jsonb_agg(ulak._put_secrets(a.value, p_secrets) order by a.number)
                from jsonb_array_elements(p_value) with ordinality as a (value, number)
            ),
            p_value
        );
    elsif jsonb_typeof(p_value) <> 'object' then
        return p_value;
    elsif not p_value ? '$secret' then
        return coalesce(
            (select jsonb_object_agg(o.key, ulak._put_secrets(o.value, p_secrets)) from jsonb_each(p_value) as o),
            p_value
        );
    elsif jsonb_typeof(p_value -> '$secret') <> 'string' or p_value - '$secret' <> '{}' then
        raise exception 'a secret is named by an object with the one key "$secret" and a text'
            using errcode = '22023', hint = 'Such as {"$secret": "api-key"}.';
    end if;
    return coalesce(p_secrets -> (p_value ->> '$secret'), 'null');
end
$plpgsql$;

create or replace function ulak._check_secret_name(p_name text)
returns void
language plpgsql
immutable
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    if p_name is null or p_name !~ '^[A-Za-z0-9._/-]{1,200}$' then
        raise exception 'invalid name of a secret'
            using
                errcode = '22023',
                detail = 'It has 1 to 200 letters, digits and . _ / - only.',
                hint = 'Such as: billing-api-key';
    end if;
end
$plpgsql$;

create or replace function ulak._raise_unknown_secret(p_name text)
returns void
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    raise exception 'unknown secret %', coalesce('"' || left(p_name, 200) || '"', 'null')
        using
            errcode = '42704',
            detail = 'Secrets are made by ulak.set_secret().',
            hint = ulak._did_you_mean(p_name, array(select s.name from ulak.secrets as s));
end
$plpgsql$;
-- What a message must look like before it is queued. Each check raises, or returns true: an expression calls it at a
-- fraction of what `perform` costs.

create or replace function ulak._check_message(
    p_payload jsonb,
    p_priority integer,
    p_scheduled_at timestamptz,
    p_idempotency_key text,
    p_expires_at timestamptz,
    p_ordering_key text,
    p_headers jsonb,
    p_metadata jsonb
)
returns boolean
language plpgsql
as $plpgsql$
declare
    v_is_valid boolean := ulak._check_priority(p_priority)
        and (octet_length(p_payload::text) <= 1024 or ulak._check_payloads(array[p_payload]))
        and ulak._check_key('idempotency key', p_idempotency_key)
        and ulak._check_key('ordering key', p_ordering_key)
        and ulak._check_headers(p_headers);
begin
    if not isfinite(p_scheduled_at) or not isfinite(p_expires_at) then
        raise exception 'scheduled_at and expires_at must be finite'
            using errcode = '22023', hint = 'Leave expires_at out for a message that never expires.';
    end if;
    if p_expires_at <= greatest(p_scheduled_at, now()) then
        raise exception 'the message would expire before it is due'
            using errcode = '22023',
                detail = format('expires_at is %s, it is due at %s.', p_expires_at, greatest(p_scheduled_at, now())),
                hint = 'Give an expires_at later than now and than scheduled_at.';
    end if;
    if jsonb_typeof(p_metadata) <> 'object' then
        raise exception 'metadata must be a JSON object'
            using errcode = '22023', detail = format('It is of type %s.', jsonb_typeof(p_metadata));
    end if;
    return v_is_valid;
end
$plpgsql$;

create or replace function ulak._check_priority(p_priority integer)
returns boolean
language plpgsql
immutable
as $plpgsql$
begin
    if p_priority is null or p_priority not between 0 and 10 then
        raise exception 'priority must be between 0 and 10'
            using errcode = '22023', detail = format('It is %s.', coalesce(p_priority::text, 'null'));
    end if;
    return true;
end
$plpgsql$;

create or replace function ulak._check_payloads(p_payloads jsonb[])
returns boolean
language plpgsql
stable
as $plpgsql$
declare
    v_size integer;
    v_has_null boolean;
    v_limit integer;
begin
    select max(octet_length(p::text)), bool_or(p is null) into v_size, v_has_null
    from unnest(p_payloads) p;
    if v_has_null then
        raise exception 'the payload is null'
            using errcode = '22004', hint = 'Send the JSON value null as ''null''::jsonb, if that is what you mean.';
    end if;
    -- The smallest limit that can be configured.
    if v_size > 1024 then
        v_limit := ulak.setting('max_payload_size')::integer;
        if v_size > v_limit then
            raise exception 'the payload is larger than max_payload_size'
                using errcode = '54000',
                    detail = format('It has %s bytes as text, the limit is %s.', v_size, v_limit),
                    hint = 'Send a reference to the data, or have an administrator raise it: '
                        || 'select ulak.configure(''max_payload_size'', ''...'');';
        end if;
    end if;
    return true;
end
$plpgsql$;

-- Keys are in an index, which takes no more than a third of a page.
create or replace function ulak._check_key(p_what text, p_key text)
returns boolean
language plpgsql
immutable
as $plpgsql$
begin
    if p_key = '' or octet_length(p_key) > 512 then
        raise exception '% must have 1 to 512 bytes', p_what
            using errcode = '22023', detail = format('It has %s.', octet_length(p_key));
    end if;
    return true;
end
$plpgsql$;

-- Headers are text by name; a line break would let a sender smuggle headers of its own into the request.
create or replace function ulak._check_headers(p_headers jsonb)
returns boolean
language plpgsql
immutable
as $plpgsql$
declare
    v_name text;
begin
    if p_headers is null then
        return true;
    end if;
    if jsonb_typeof(p_headers) <> 'object' then
        raise exception 'headers must be a JSON object of names and texts'
            using errcode = '22023', detail = format('It is of type %s.', jsonb_typeof(p_headers));
    end if;
    select h.key into v_name
    from jsonb_each(p_headers) h
    where h.key !~ '^[!#$%&''*+.^_`|~0-9A-Za-z-]+$'
        or jsonb_typeof(h.value) <> 'string'
        or (h.value #>> '{}') ~ '[\x01-\x08\x0a-\x1f\x7f]'
    limit 1;
    if found then
        raise exception 'header "%" is not a valid header', left(v_name, 64)
            using errcode = '22023',
                hint = 'A name has letters, digits and !#$%&''*+-.^_`|~ only; a value is a text without control characters.';
    end if;
    return true;
end
$plpgsql$;
-- Backpressure: a queue that is full refuses messages, and a queue that isn't costs a send one comparison.

-- Counting the queue takes time in proportion to its size. So a count is turned into a promise: with c live messages and
-- a limit of L, the next L - c ids can't overflow the queue whatever happens meanwhile. Sends compare their id with the
-- end of that promise (ulak.queue_headroom), and only past it is the queue counted.
create or replace function ulak._has_room(p_last_id bigint)
returns boolean
language sql
as $sql$
    select p_last_id <= pg_sequence_last_value('ulak.queue_headroom')
        -- An administrator's own SET holds for that session: it needs a look.
        and coalesce(current_setting('ulak.max_queue_size', true), '') = ''
$sql$;

-- Raises unless p_count messages, with ids up to p_last_id, fit into the queue.
create or replace function ulak._require_room(p_last_id bigint, p_count integer)
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_limit bigint := ulak.setting('max_queue_size')::bigint;
    -- Verdicts by a session's own limit aren't for others.
    v_is_shared boolean := v_limit = ulak._stored_setting('max_queue_size')::bigint;
    v_headroom bigint := pg_sequence_last_value('ulak.queue_headroom');
    v_clock bigint := extract(epoch from clock_timestamp()) * 1000;
    v_live bigint;
begin
    if v_is_shared and p_last_id <= v_headroom then
        return;
    end if;
    if v_limit = 0 then
        if v_is_shared then
            perform ulak._remember_headroom(9223372036854775807, v_limit);
        end if;
        return;
    end if;
    if v_is_shared and v_clock < -v_headroom then
        perform ulak._raise_queue_full(v_limit, p_count);
    end if;

    v_live := ulak._count_live(v_limit);
    if v_is_shared then
        perform ulak._remember_headroom(
            case
                when v_live + p_count <= v_limit then p_last_id + v_limit - v_live - p_count
                -- So that many senders at a full queue don't all count it.
                when v_live >= v_limit then -(v_clock + 1000)
            end,
            v_limit
        );
    end if;
    if v_live + p_count > v_limit then
        perform ulak._raise_queue_full(v_limit, p_count);
    end if;
end
$plpgsql$;

-- A sequence keeps what it is given even if this transaction fails, and whatever others commit. So what follows from an
-- older snapshot isn't remembered, nor what follows from a limit that is no longer, or not yet, that of everybody: the
-- lock is looked at before the limit, and a transaction that changes the limit keeps the lock until others see it.
create or replace function ulak._remember_headroom(p_headroom bigint, p_limit bigint)
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    if p_headroom is null or current_setting('transaction_isolation') <> 'read committed' then
        return;
    end if;
    perform setval('ulak.queue_headroom', p_headroom);
    if ulak._limit_is_changing() or ulak._stored_setting('max_queue_size')::bigint <> p_limit then
        perform setval('ulak.queue_headroom', 0);
    end if;
end
$plpgsql$;

-- After a change of the limit, the next send counts again.
create or replace function ulak._forget_headroom()
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    perform pg_advisory_xact_lock(hashtext('ulak_limit'), 0);
    perform setval('ulak.queue_headroom', 0);
end
$plpgsql$;

-- Whether an open transaction, our own included, has changed the limit.
create or replace function ulak._limit_is_changing()
returns boolean
language sql
set search_path = pg_catalog, pg_temp
as $sql$
    select exists (
        select
        from pg_locks l
        where l.locktype = 'advisory'
            and l.database = (select d.oid from pg_database d where d.datname = current_database())
            and l.classid = hashtext('ulak_limit')::oid
            and l.objid = 0
            and l.objsubid = 2
            and l.granted
    )
$sql$;

-- Live messages, counted up to a limit, in index order of what is live: completed rows don't cost.
create or replace function ulak._count_live(p_at_most bigint)
returns bigint
language sql
stable
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
as $sql$
    select
        (select count(*) from (select from ulak.queue q where q.status = 'pending' limit p_at_most) p)
        + (select count(*) from (select from ulak.queue q where q.status = 'processing' limit p_at_most) p)
$sql$;

create or replace function ulak._raise_queue_full(p_limit bigint, p_count integer)
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    raise exception 'the queue is full'
        using errcode = '53400',
            detail = format('%s more would exceed max_queue_size, which is %s.', p_count, p_limit),
            hint = 'Try again later. An administrator can see what waits: select * from ulak.get_endpoint_health();';
end
$plpgsql$;
-- The bell: who sends while the worker sleeps wakes it. NOTIFY has its price, one commit at a time through a lock of the whole
-- database: so only the first few after the worker has fallen asleep pay it, and in a busy queue nobody does.

-- Whether a worker sleeps that hasn't heard of this id.
create or replace function ulak._is_awaited(p_id bigint)
returns boolean
language sql
as $sql$
    select p_id <= pg_sequence_last_value('ulak.bell')
$sql$;

-- Heard when the transaction commits. Not where transactions may be prepared: one that has rung couldn't. And a notification
-- queue that fills up is somebody else's problem, which isn't to become the sender's.
create or replace function ulak._ring()
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    if current_setting('max_prepared_transactions')::integer = 0 and pg_notification_queue_usage() < 0.5 then
        perform pg_notify('ulak_bell', '');
    end if;
end
$plpgsql$;

-- From now on the next 16 ids ring. last_sent is read after the bell was set: a sender either has drawn its id by now, or will
-- see the bell. Whatever else is pending, also for a later time, is worth a claim, which costs three times as much.
create or replace function ulak._set_bell(out rings_to bigint, out last_sent bigint, out has_pending boolean)
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_sequence oid := 'ulak.queue_id_seq'::regclass;
begin
    rings_to := setval('ulak.bell', coalesce(pg_sequence_last_value(v_sequence), 0) + 16);
    last_sent := coalesce(pg_sequence_last_value(v_sequence), 0);
    has_pending := exists (select from ulak.queue q where q.status = 'pending');
end
$plpgsql$;

-- Makes this session one that hears the bell, from its next commit on; false where nobody rings, where what is sent is held
-- until adopt(), and in background workers, which can't LISTEN.
create or replace function ulak._listen()
returns boolean
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    if current_setting('max_prepared_transactions')::integer > 0
        or not ulak._is_adopted()
        or exists (select from pg_stat_activity a where a.pid = pg_backend_pid() and a.backend_type <> 'client backend')
    then
        return false;
    end if;
    listen ulak_bell;
    return true;
end
$plpgsql$;
-- Sending: an application's transaction puts messages into the queue.

-- Nearly every message has no option that needs a look and fits below any limit: it takes one insert and no other query.
-- What is left, errors included, goes the long way.
create or replace function ulak.send(
    p_endpoint text,
    p_payload jsonb,
    p_priority integer default 0,
    p_scheduled_at timestamptz default null,
    p_idempotency_key text default null,
    p_correlation_id uuid default null,
    p_expires_at timestamptz default null,
    p_ordering_key text default null,
    p_headers jsonb default null,
    p_metadata jsonb default null
)
returns bigint
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_id bigint;
begin
    -- 1024: the smallest max_payload_size that can be configured.
    if num_nonnulls(p_scheduled_at, p_idempotency_key, p_expires_at, p_ordering_key, p_headers, p_metadata) = 0
        and p_priority between 0 and 10
        and octet_length(p_payload::text) <= 1024
        and current_setting('transaction_isolation') = 'read committed'
        -- Against drop_endpoint(), and before the look-up, so that the look-up sees what a drop has left.
        and pg_try_advisory_xact_lock_shared(hashtext('ulak_endpoint'), hashtext(p_endpoint))
    then
        v_id := nextval('ulak.queue_id_seq');
        if ulak._has_room(v_id) then
            insert into ulak.queue (id, endpoint_id, payload, priority, correlation_id)
            select v_id, e.id, p_payload, p_priority, p_correlation_id
            from ulak.endpoints e
            where e.name = p_endpoint;
            if found then
                if ulak._is_awaited(v_id) then
                    perform ulak._ring();
                end if;
                return v_id;
            end if;
        end if;
    end if;
    return ulak._send(
        p_endpoint,
        p_payload,
        p_priority,
        p_scheduled_at,
        p_idempotency_key,
        p_correlation_id,
        p_expires_at,
        p_ordering_key,
        p_headers,
        p_metadata
    );
end
$plpgsql$;

comment on function ulak.send(text, jsonb, integer, timestamptz, text, uuid, timestamptz, text, jsonb, jsonb) is
    'queues one message in the caller''s transaction and returns its id';

create or replace function ulak.send_with_options(
    p_endpoint text,
    p_payload jsonb,
    p_priority integer default 0,
    p_scheduled_at timestamptz default null,
    p_idempotency_key text default null,
    p_correlation_id uuid default null,
    p_expires_at timestamptz default null,
    p_ordering_key text default null
)
returns bigint
language sql
as $sql$
    select ulak.send(
        p_endpoint,
        p_payload,
        coalesce(p_priority, 0),
        p_scheduled_at,
        p_idempotency_key,
        p_correlation_id,
        p_expires_at,
        p_ordering_key
    )
$sql$;

comment on function ulak.send_with_options(text, jsonb, integer, timestamptz, text, uuid, timestamptz, text) is
    'send() with its options by position';

create or replace function ulak.send_batch(p_endpoint text, p_payloads jsonb[])
returns bigint[]
language sql
as $sql$
    select ulak.send_batch_with_priority(p_endpoint, p_payloads, 0)
$sql$;

comment on function ulak.send_batch(text, jsonb[]) is
    'queues many messages for one endpoint and returns their ids in the order of the payloads';

create or replace function ulak.send_batch_with_priority(p_endpoint text, p_payloads jsonb[], p_priority integer)
returns bigint[]
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_endpoint_id bigint := ulak._wait_for_endpoint(p_endpoint);
begin
    if p_payloads is null then
        raise exception 'the payloads are null'
            using errcode = '22004', hint = 'Pass an array of jsonb; an empty one sends nothing.';
    end if;
    return ulak._enqueue_many(array_fill(v_endpoint_id, array[cardinality(p_payloads)]), p_payloads, p_priority);
end
$plpgsql$;

comment on function ulak.send_batch_with_priority(text, jsonb[], integer) is
    'send_batch() with a priority from 0 to 10 for all of them';

-- One insert for many messages: element i of each array is one message. Returns ids in the order of the arrays.
-- A message of an event says which one in a header, and to CloudEvents by its metadata.
create or replace function ulak._enqueue_many(
    p_endpoint_ids bigint[],
    p_payloads jsonb[],
    p_priority integer default 0,
    p_event_types text[] default null
)
returns bigint[]
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_count integer := cardinality(p_payloads);
    v_sent integer;
    v_ids bigint[];
begin
    perform ulak._check_priority(p_priority);
    if v_count = 0 then
        return '{}';
    end if;
    perform ulak._check_payloads(p_payloads);
    perform pg_advisory_xact_lock_shared(hashtext('ulak_endpoint_id'), t.endpoint_id::integer)
    from (select distinct u.endpoint_id from unnest(p_endpoint_ids) u(endpoint_id) order by 1) t;
    if current_setting('transaction_isolation') <> 'read committed' then
        perform ulak._require_endpoints(p_endpoint_ids);
    end if;
    v_ids := array(select nextval('ulak.queue_id_seq') from generate_series(1, v_count));
    if ulak._has_room(v_ids[v_count]) is not true then
        perform ulak._require_room(v_ids[v_count], v_count);
    end if;

    insert into ulak.queue (id, endpoint_id, payload, priority, headers, metadata)
    select
        m.id,
        e.id,
        m.payload,
        p_priority,
        case when m.event_type is not null then jsonb_build_object('ulak-event-type', m.event_type) end,
        case when m.event_type is not null then jsonb_build_object('event_type', m.event_type) end
    from unnest(v_ids, p_endpoint_ids, p_payloads, p_event_types) m(id, endpoint_id, payload, event_type)
    join ulak.endpoints e on e.id = m.endpoint_id;
    get diagnostics v_sent = row_count;
    if ulak._is_awaited(v_ids[1]) then
        perform ulak._ring();
    end if;
    -- The join has dropped what an endpoint lost while we waited for its lock.
    if v_sent < v_count then
        v_ids := array(select q.id from ulak.queue q where q.id = any (v_ids) order by q.id);
    end if;
    return v_ids;
end
$plpgsql$;

-- send() with every check and every option.
create or replace function ulak._send(
    p_endpoint text,
    p_payload jsonb,
    p_priority integer,
    p_scheduled_at timestamptz,
    p_idempotency_key text,
    p_correlation_id uuid,
    p_expires_at timestamptz,
    p_ordering_key text,
    p_headers jsonb,
    p_metadata jsonb
)
returns bigint
language plpgsql
as $plpgsql$
declare
    v_endpoint_id bigint := ulak._wait_for_endpoint(p_endpoint);
    v_due timestamptz := greatest(now(), p_scheduled_at);
    v_hash text;
    v_id bigint;
    v_first_id bigint;
    v_is_valid boolean := ulak._check_message(
        p_payload, p_priority, p_scheduled_at, p_idempotency_key, p_expires_at, p_ordering_key, p_headers, p_metadata
    );
begin
    if p_idempotency_key is not null then
        v_hash := ulak._payload_hash(p_payload);
    end if;
    if p_ordering_key is not null and ulak._is_behind(v_endpoint_id, p_ordering_key) then
        v_due := 'infinity';
    end if;

    -- After the lock on the ordering key: the order of ids is the order of commits.
    v_id := nextval('ulak.queue_id_seq');
    if ulak._has_room(v_id) is not true then
        -- What is queued already needs no room.
        v_first_id := ulak._first_of_idempotency_key(v_endpoint_id, p_endpoint, p_idempotency_key, v_hash);
        if v_first_id is not null then
            return v_first_id;
        end if;
        perform ulak._require_room(v_id, 1);
    end if;

    loop
        insert into ulak.queue (
            id,
            endpoint_id,
            payload,
            priority,
            next_retry_at,
            scheduled_at,
            idempotency_key,
            payload_hash,
            correlation_id,
            expires_at,
            ordering_key,
            headers,
            metadata
        )
        values (
            v_id,
            v_endpoint_id,
            p_payload,
            p_priority,
            v_due,
            p_scheduled_at,
            p_idempotency_key,
            v_hash,
            p_correlation_id,
            p_expires_at,
            p_ordering_key,
            p_headers,
            p_metadata
        )
        on conflict (endpoint_id, idempotency_key)
            where idempotency_key is not null and status in ('pending', 'processing', 'completed')
            do nothing;
        if found then
            if v_due <= now() and ulak._is_awaited(v_id) then
                perform ulak._ring();
            end if;
            return v_id;
        end if;
        -- Null when the first message of the key has just left the queue: then this one is the first.
        v_first_id := ulak._first_of_idempotency_key(v_endpoint_id, p_endpoint, p_idempotency_key, v_hash);
        if v_first_id is not null then
            return v_first_id;
        end if;
    end loop;
end
$plpgsql$;

-- The endpoint's id, once no drop_endpoint() is at work on it.
create or replace function ulak._wait_for_endpoint(p_endpoint text)
returns bigint
language plpgsql
as $plpgsql$
declare
    v_endpoint_id bigint;
begin
    if not pg_try_advisory_xact_lock_shared(hashtext('ulak_endpoint'), hashtext(p_endpoint)) then
        perform pg_advisory_xact_lock_shared(hashtext('ulak_endpoint'), hashtext(p_endpoint));
    end if;
    select e.id into v_endpoint_id
    from ulak.endpoints e
    where e.name = p_endpoint;
    if not found then
        perform ulak._raise_unknown_endpoint(p_endpoint);
    end if;
    if current_setting('transaction_isolation') <> 'read committed' then
        perform ulak._require_endpoints(array[v_endpoint_id]);
    end if;
    return v_endpoint_id;
end
$plpgsql$;

-- An older snapshot may show an endpoint that has been dropped since. A row lock looks at the latest state and fails with
-- 40001 then. Nobody but a drop minds it.
create or replace function ulak._require_endpoints(p_endpoint_ids bigint[])
returns void
language plpgsql
as $plpgsql$
begin
    perform
    from ulak.endpoints e
    where e.id = any (p_endpoint_ids)
    order by e.id
    for key share;
end
$plpgsql$;

-- Stable and not immutable, as convert_to() is: else it wouldn't be inlined.
create or replace function ulak._payload_hash(p_payload jsonb)
returns text
language sql
stable
parallel safe
as $sql$
    select encode(sha256(convert_to(p_payload::text, 'UTF8')), 'hex')
$sql$;

-- Whether a new message of this key must wait for an earlier one. Takes the key's lock, so that of two senders the
-- second waits until the first has committed.
create or replace function ulak._is_behind(p_endpoint_id bigint, p_ordering_key text)
returns boolean
language plpgsql
set enable_seqscan = off
as $plpgsql$
declare
    v_key integer := ulak._ordering_lock(p_endpoint_id, p_ordering_key);
begin
    if not pg_try_advisory_xact_lock(hashtext('ulak_key'), v_key) then
        perform pg_advisory_xact_lock(hashtext('ulak_key'), v_key);
    end if;
    -- An older snapshot may show a head that has been settled since, and nobody would wake the message. It is
    -- queued as due then, and claim still sees that it isn't the head.
    return current_setting('transaction_isolation') = 'read committed'
        and exists (
            select
            from ulak.queue q
            where q.endpoint_id = p_endpoint_id
                and q.ordering_key = p_ordering_key
                and q.status in ('pending', 'processing')
        );
end
$plpgsql$;

create or replace function ulak._ordering_lock(p_endpoint_id bigint, p_ordering_key text)
returns integer
language sql
immutable
parallel safe
as $sql$
    select hashtext(p_endpoint_id::text || ':' || p_ordering_key)
$sql$;

create or replace function ulak._first_of_idempotency_key(
    p_endpoint_id bigint,
    p_endpoint text,
    p_idempotency_key text,
    p_payload_hash text
)
returns bigint
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_first record;
begin
    select q.id, q.payload_hash into v_first
    from ulak.queue q
    where q.endpoint_id = p_endpoint_id
        and q.idempotency_key = p_idempotency_key
        and q.status in ('pending', 'processing', 'completed');
    if v_first.payload_hash <> p_payload_hash then
        raise exception 'idempotency key "%" was used for another payload', p_idempotency_key
            using errcode = '23505',
                detail = format('Message %s of endpoint "%s" has this key and a different payload.', v_first.id, p_endpoint),
                hint = 'Use a new key for a new message, or send the first payload again to get its id.';
    end if;
    return v_first.id;
end
$plpgsql$;
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
    perform ulak._check_event_type_name(p_name);
    if p_schema is not null then
        perform ulak._check_json_schema(p_schema);
    end if;
    insert into ulak.event_types (name, description, schema)
    values (p_name, p_description, p_schema)
    on conflict (name) do nothing;
    if not found then
        raise exception 'event type "%" exists already', p_name
            using
                errcode = '42710',
                hint = format('select * from ulak.event_types where name = %L;', p_name);
    end if;
    return p_name;
end
$plpgsql$;

comment on function ulak.create_event_type(text, text, jsonb) is
    'makes a kind of event that can be published, and returns its name; payloads must satisfy the JSON Schema, if given';

create or replace function ulak.drop_event_type(p_name text)
returns boolean
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_subscriptions bigint;
begin
    perform ulak._refuse_reserved_event_type(p_name);
    -- Before the subscriptions are deleted: a subscribe() that is under way holds this row.
    perform from ulak.event_types as t where t.name = p_name for update;
    if not found then
        perform ulak._raise_unknown_event_type(p_name);
    end if;
    with gone as (
        delete from ulak.subscriptions as s where s.event_type = p_name returning s.id
    )
    select count(*) into v_subscriptions from gone;
    delete from ulak.event_types where name = p_name;
    if v_subscriptions > 0 then
        raise notice '% subscription(s) to event type "%" were removed with it', v_subscriptions, p_name;
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
    p_predicate jsonpath default null
)
returns bigint
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_endpoint_id bigint;
    v_id bigint;
begin
    perform ulak._check_predicate(p_predicate);
    -- One at a time per event type: two sessions can't both find that a subscription isn't there yet.
    perform from ulak.event_types as t where t.name = p_event_type for no key update;
    if not found then
        perform ulak._raise_unknown_event_type(p_event_type);
    end if;
    select e.id into v_endpoint_id from ulak.endpoints as e where e.name = p_endpoint for key share;
    if not found then
        perform ulak._raise_unknown_endpoint(p_endpoint);
    end if;
    select s.id into v_id
    from ulak.subscriptions as s
    where s.event_type = p_event_type
        and s.endpoint_id = v_endpoint_id
        and s.filter is not distinct from p_filter
        and s.predicate::text is not distinct from p_predicate::text;
    if found then
        raise exception 'endpoint "%" has this subscription to "%" already', p_endpoint, p_event_type
            using
                errcode = '42710',
                detail = format('It is subscription %s.', v_id),
                hint = format('To remove it: select ulak.unsubscribe(%s);', v_id);
    end if;
    insert into ulak.subscriptions (event_type, endpoint_id, filter, predicate)
    values (p_event_type, v_endpoint_id, p_filter, p_predicate)
    returning id into v_id;
    return v_id;
end
$plpgsql$;

comment on function ulak.subscribe(text, text, jsonb, jsonpath) is
    'sends an endpoint the events of a type: all, or those that contain p_filter and make p_predicate true; returns an id';

create or replace function ulak.unsubscribe(p_subscription_id bigint)
returns boolean
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    delete from ulak.subscriptions where id = p_subscription_id;
    return found;
end
$plpgsql$;

comment on function ulak.unsubscribe(bigint) is 'removes a subscription; false if there is none with this id';

create or replace function ulak._check_event_type_name(p_name text)
returns void
language plpgsql
immutable
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    if p_name is null or p_name !~ '^[^\x01-\x20\x7f]{1,200}$' then
        raise exception 'invalid name of an event type'
            using
                errcode = '22023',
                detail = 'It has 1 to 200 characters, no spaces, no control characters.',
                hint = 'Such as: order.created';
    end if;
    perform ulak._refuse_reserved_event_type(p_name);
end
$plpgsql$;

-- An application must not be able to forge ulak's own events.
create or replace function ulak._refuse_reserved_event_type(p_name text)
returns void
language plpgsql
immutable
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    if starts_with(p_name, 'ulak.') then
        raise exception 'event type "%" is reserved', left(p_name, 200)
            using
                errcode = '42939',
                detail = 'Names that start with ulak. are for events that ulak publishes itself.',
                hint = 'Endpoints can subscribe to them: select ulak.subscribe(''ulak.message.dead'', ''my-endpoint'');';
    end if;
end
$plpgsql$;

-- A predicate that can't be evaluated counts as false when an event is published. What would always fail is refused here.
create or replace function ulak._check_predicate(p_predicate jsonpath)
returns void
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    -- With texts and keys emptied, a variable is what is left of $"name".
    if regexp_replace(p_predicate::text, '"([^"\\]|\\.)*"', '""', 'g') ~ '\$""' then
        raise exception 'the predicate has a variable'
            using errcode = '22023', hint = 'Write the value itself, such as $.total > 100.';
    end if;
    -- A condition is true, false or unknown, whatever it is applied to. A path fails where there is nothing.
    begin
        perform jsonb_path_match_tz('{}', p_predicate);
    exception
        when data_exception then
            raise exception 'the predicate is a path, not a condition'
                using
                    errcode = '22023',
                    hint = 'Such as $.total > 100, $.active == true or exists($.items[*] ? (@.price > 10)).';
    end;
end
$plpgsql$;

create or replace function ulak._raise_unknown_event_type(p_name text)
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    raise exception 'unknown event type %', coalesce('"' || left(p_name, 200) || '"', 'null')
        using
            errcode = '42704',
            detail = 'Event types are made by ulak.create_event_type(); select name from ulak.event_types; lists them.',
            hint = ulak._did_you_mean(p_name, array(select t.name from ulak.event_types as t));
end
$plpgsql$;
-- Publishing: an event becomes a message for each endpoint that has a matching subscription.

create or replace function ulak.publish(p_event_type text, p_payload jsonb)
returns integer
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    perform ulak._refuse_reserved_event_type(p_event_type);
    return ulak._publish(p_event_type, p_payload);
end
$plpgsql$;

comment on function ulak.publish(text, jsonb) is
    'queues an event for every endpoint with a matching subscription, in the caller''s transaction; returns how many';

create or replace function ulak.publish_batch(p_events jsonb)
returns integer
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_endpoint_ids bigint[];
    v_payloads jsonb[];
    v_event_types text[];
begin
    perform ulak._check_events(p_events);
    select
        array_agg(m.endpoint_id order by e.number, m.endpoint_id),
        array_agg(e.payload order by e.number, m.endpoint_id),
        array_agg(e.event_type order by e.number, m.endpoint_id)
    into v_endpoint_ids, v_payloads, v_event_types
    from ulak._events(p_events) as e
    cross join lateral unnest(ulak._subscribed_endpoints(e.event_type, e.payload)) as m (endpoint_id);
    if v_payloads is null then
        return 0;
    end if;
    return cardinality(ulak._enqueue_many(v_endpoint_ids, v_payloads, 0, v_event_types));
end
$plpgsql$;

comment on function ulak.publish_batch(jsonb) is
    'publishes an array of {"event_type": ..., "payload": ...}, all or none; returns the number of messages queued';

-- publish() without the guard of reserved names, for ulak's own events.
create or replace function ulak._publish(p_event_type text, p_payload jsonb)
returns integer
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_schema jsonb;
    v_endpoint_ids bigint[];
begin
    select t.schema into v_schema from ulak.event_types as t where t.name = p_event_type;
    if not found then
        perform ulak._raise_unknown_event_type(p_event_type);
    end if;
    if p_payload is null then
        raise exception 'the payload is null'
            using errcode = '22004', hint = 'Publish the JSON value null as ''null''::jsonb, if that is what you mean.';
    end if;
    if v_schema is not null then
        perform ulak._check_event(p_event_type, v_schema, p_payload, '$');
    end if;
    v_endpoint_ids := ulak._subscribed_endpoints(p_event_type, p_payload);
    if v_endpoint_ids = '{}' then
        return 0;
    end if;
    return cardinality(
        ulak._enqueue_many(
            v_endpoint_ids,
            array_fill(p_payload, array[cardinality(v_endpoint_ids)]),
            0,
            array_fill(p_event_type, array[cardinality(v_endpoint_ids)])
        )
    );
end
$plpgsql$;

-- An endpoint gets an event once, however many of its subscriptions match. A predicate that fails on this payload counts
-- as false: it must not abort the application's transaction. The _tz form because the other one raises when dates and
-- times with and without a zone meet, silent or not.
create or replace function ulak._subscribed_endpoints(p_event_type text, p_payload jsonb)
returns bigint[]
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    return array(
        select distinct s.endpoint_id
        from ulak.subscriptions as s
        where s.event_type = p_event_type
            and (s.filter is null or p_payload @> s.filter)
            and (s.predicate is null or jsonb_path_match_tz(p_payload, s.predicate, '{}', true))
        order by s.endpoint_id
    );
end
$plpgsql$;

create or replace function ulak._check_event(p_event_type text, p_schema jsonb, p_payload jsonb, p_path text)
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_violation text[] := ulak._json_violation(p_schema, p_payload);
begin
    if v_violation is not null then
        raise exception 'payload of event type "%" is not valid: % %', p_event_type, p_path || v_violation[1], v_violation[2]
            using
                errcode = '22023',
                detail = 'The event type has a JSON Schema that each payload must satisfy.',
                hint = concat_ws(
                    ' ',
                    v_violation[3],
                    format('select schema from ulak.event_types where name = %L;', p_event_type)
                );
    end if;
end
$plpgsql$;

create or replace function ulak._events(p_events jsonb)
returns table (number bigint, event_type text, payload jsonb)
language sql
immutable
set search_path = pg_catalog, pg_temp
as $sql$
    select e.number - 1, e.value ->> 'event_type', e.value -> 'payload'
    from jsonb_array_elements(p_events) with ordinality as e (value, number)
$sql$;

-- Everything is looked at before anything is queued.
create or replace function ulak._check_events(p_events jsonb)
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_event record;
begin
    if p_events is null then
        raise exception 'the events are null'
            using errcode = '22004', hint = 'Pass a JSON array; an empty one publishes nothing.';
    end if;
    if not ulak._are_events(p_events) then
        perform ulak._raise_violation('events', ulak._json_violation(ulak._events_schema(), p_events));
    end if;
    for v_event in
        select distinct on (e.event_type) e.event_type, t.name is not null as is_known
        from ulak._events(p_events) as e
        left join ulak.event_types as t on t.name = e.event_type
    loop
        perform ulak._refuse_reserved_event_type(v_event.event_type);
        if not v_event.is_known then
            perform ulak._raise_unknown_event_type(v_event.event_type);
        end if;
    end loop;
    perform ulak._check_event(e.event_type, t.schema, e.payload, format('$[%s].payload', e.number))
    from ulak._events(p_events) as e
    join ulak.event_types as t on t.name = e.event_type
    where t.schema is not null
    order by e.number;
end
$plpgsql$;

-- The same as _events_schema(), in one pass; the schema says where the mistake is.
create or replace function ulak._are_events(p_events jsonb)
returns boolean
language plpgsql
immutable
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    if jsonb_typeof(p_events) <> 'array' then
        return false;
    end if;
    return not exists (
        select
        from jsonb_array_elements(p_events) as e
        where not coalesce(
            case jsonb_typeof(e)
                when 'object' then jsonb_typeof(e -> 'event_type') = 'string'
                    and e ? 'payload'
                    and e - array['event_type', 'payload'] = '{}'
            end,
            false
        )
    );
end
$plpgsql$;

create or replace function ulak._events_schema()
returns jsonb
language sql
immutable
as $sql$
    select $json${
        "type": "array",
        "items": {
            "type": "object",
            "required": ["event_type", "payload"],
            "additionalProperties": false,
            "properties": {"event_type": {"type": "string"}, "payload": true}
        }
    }$json$::pg_catalog.jsonb
$sql$;
-- What was sent can't be changed: a retry, a redrive and a replay deliver what the application committed.

create or replace function ulak._refuse_payload_change()
returns trigger
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    raise exception 'payload and message_id of a message can''t be changed once sent'
        using errcode = '55000', hint = 'Send a new message.';
end
$plpgsql$;

-- For each statement: a trigger for each row would have every claim and every settlement lock its rows once more, though
-- they name other columns.
create or replace trigger queue_payload_is_immutable
    before update of payload, message_id on ulak.queue
    for each statement
    execute function ulak._refuse_payload_change();
-- What became of a message: for the application that sent it, without a right to anybody's payload.

create or replace function ulak.message_status(p_id bigint)
returns table (
    id bigint,
    endpoint text,
    status text,
    attempts integer,
    retry_count integer,
    next_retry_at timestamptz,
    last_error text,
    created_at timestamptz,
    completed_at timestamptz,
    failed_at timestamptz
)
language sql
stable
security definer
set search_path = pg_catalog, pg_temp
as $sql$
    select
        m.id,
        e.name,
        m.status,
        m.attempts,
        m.retry_count,
        case when m.status = 'pending' then m.next_retry_at end,
        m.last_error,
        m.created_at,
        m.completed_at,
        m.failed_at
    from (
        select q.id, q.endpoint_id, q.status, q.attempts, q.retry_count, q.next_retry_at, q.last_error, q.created_at,
            q.completed_at, q.failed_at
        from ulak.queue q
        where q.id = p_id
        union all
        select a.id, a.endpoint_id, a.status, a.attempts, a.retry_count, a.next_retry_at, a.last_error, a.created_at,
            a.completed_at, a.failed_at
        from ulak.archive a
        where a.id = p_id
    ) m
    left join ulak.endpoints e on e.id = m.endpoint_id
$sql$;

comment on function ulak.message_status(bigint) is
    'where a message stands, by the id that send() returned; no row if its month has been dropped from the archive';
-- Claiming: a worker leases messages that are due.

-- What is claimable decides the cost, not what is stored: a loose scan finds the (endpoint, priority) pairs that have
-- pending rows, one probe each, and only the due rows of each pair are read, in order.
-- The planner's choices are pinned, because a plan that was made for an empty queue may be used for a full one: besides
-- the settings, `offset 0` keeps a subquery from becoming a join, and earlier messages of an ordering key are looked for
-- by key and id together, which only the right index has.
create or replace function ulak._claim(
    p_worker text,
    p_limit integer,
    p_protocol text default null,
    p_endpoint_id bigint default null,
    p_lease interval default null,
    p_generation bigint default null,
    p_now timestamptz default clock_timestamp(),
    -- The worker's own room per endpoint: p_rooms for p_room_ids, p_room for all others; null is no bound.
    p_room_ids bigint[] default '{}',
    p_rooms integer[] default '{}',
    p_room integer default null,
    -- Where an earlier claim ended, of one endpoint and priority: if there is something due behind it, nothing else is seen.
    p_mark_endpoint_id bigint default null,
    p_mark_priority smallint default null,
    p_mark_due_at timestamptz default null,
    p_mark_id bigint default null
)
returns table (
    id bigint,
    message_id uuid,
    attempt integer,
    endpoint_id bigint,
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
    due_at timestamptz
)
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
set plan_cache_mode = force_generic_plan
as $plpgsql$
#variable_conflict use_column
declare
    v_lease interval := coalesce(p_lease, make_interval(secs => ulak.setting('stale_recovery_timeout')::integer));
    v_is_adopted boolean;
    v_has_wakeups boolean;
    v_pair record;
    v_aging integer;
    v_endpoint_ids bigint[];
    v_priorities smallint[];
    v_sinces timestamptz[];
    v_first_ids bigint[];
    v_sizes integer[];
    v_config_versions bigint[];
    v_circuit_states text[];
    v_are_limited boolean[];
begin
    select
        not exists (select from ulak.cluster_identity i where i.system_identifier <> ulak._system_identifier()),
        exists (select from ulak.ordering_wakeups)
    into v_is_adopted, v_has_wakeups;
    if not v_is_adopted then
        return;
    elsif v_has_wakeups then
        perform ulak._wake_ordering_keys(p_now);
    end if;

    v_pair := ulak._only_pair(
        p_limit,
        p_protocol,
        p_endpoint_id,
        p_now,
        p_room_ids,
        p_rooms,
        p_room,
        p_mark_endpoint_id,
        p_mark_priority,
        p_mark_due_at,
        p_mark_id
    );
    if v_pair.size = 0 then
        return;
    elsif v_pair.size > 0 then
        return query
        update ulak.queue q
        set status = 'processing',
            attempts = q.attempts + 1,
            locked_by = p_worker,
            lease_until = p_now + v_lease,
            processing_started_at = p_now,
            updated_at = p_now
        from (
            select q.ctid as tid
            from ulak.queue q
            where q.status = 'pending'
                and q.endpoint_id = v_pair.endpoint_id
                and q.priority = v_pair.priority
                and (q.next_retry_at, q.id) >= (v_pair.since, v_pair.first_id)
                and q.next_retry_at <= p_now
                and (q.expires_at is null or q.expires_at > p_now)
                and (p_generation is null or q.generation = p_generation)
                and (
                    q.ordering_key is null
                    or not exists (
                        select
                        from ulak.queue h
                        where h.endpoint_id = q.endpoint_id
                            and h.ordering_key = q.ordering_key
                            and h.status in ('pending', 'processing')
                            and (h.ordering_key, h.id) < (q.ordering_key, q.id)
                    )
                )
            order by q.next_retry_at, q.id
            limit v_pair.size
            for update skip locked
        ) l
        where q.ctid = l.tid
        returning
            q.id,
            q.message_id,
            q.attempts,
            q.endpoint_id,
            v_pair.config_version,
            q.payload,
            q.headers,
            q.metadata,
            q.correlation_id,
            q.ordering_key,
            q.priority,
            q.idempotency_key,
            q.created_at,
            q.expires_at,
            q.lease_until,
            'closed',
            q.next_retry_at;
        return;
    end if;

    select
        array_agg(a.endpoint_id),
        array_agg(a.priority),
        array_agg(a.since),
        array_agg(a.first_id),
        array_agg(a.size),
        array_agg(a.config_version),
        array_agg(a.circuit_state),
        array_agg(a.is_limited)
    into v_endpoint_ids, v_priorities, v_sinces, v_first_ids, v_sizes, v_config_versions, v_circuit_states, v_are_limited
    from ulak._allot(p_limit, p_protocol, p_endpoint_id, p_generation, p_now, p_room_ids, p_rooms, p_room) a;
    if v_endpoint_ids is null then
        return;
    elsif cardinality(v_endpoint_ids) > 1 then
        v_aging := nullif(ulak.setting('priority_aging')::integer, 0);
    end if;

    return query
    -- The rows that were counted, unless another worker has them: then the next ones.
    with leased as (
        select q.tid, a.config_version, a.circuit_state, a.is_limited
        from unnest(
            v_endpoint_ids, v_priorities, v_sinces, v_first_ids, v_sizes, v_config_versions, v_circuit_states, v_are_limited
        ) a(endpoint_id, priority, since, first_id, size, config_version, circuit_state, is_limited)
        cross join lateral (
            select q.ctid as tid
            from ulak.queue q
            where q.status = 'pending'
                and q.endpoint_id = a.endpoint_id
                and q.priority = a.priority
                and (q.next_retry_at, q.id) >= (a.since, a.first_id)
                and q.next_retry_at <= p_now
                and (q.expires_at is null or q.expires_at > p_now)
                and (p_generation is null or q.generation = p_generation)
                and (
                    q.ordering_key is null
                    or not exists (
                        select
                        from ulak.queue h
                        where h.endpoint_id = q.endpoint_id
                            and h.ordering_key = q.ordering_key
                            and h.status in ('pending', 'processing')
                            and (h.ordering_key, h.id) < (q.ordering_key, q.id)
                    )
                )
            order by q.next_retry_at, q.id
            limit a.size
            for update skip locked
        ) q
    ),
    claimed as (
        update ulak.queue q
        set status = 'processing',
            attempts = q.attempts + 1,
            locked_by = p_worker,
            lease_until = p_now + v_lease,
            processing_started_at = p_now,
            updated_at = p_now
        from leased l
        where q.ctid = l.tid
        -- Not q.*: wide rows are copied and sorted below.
        returning
            q.id,
            q.message_id,
            q.attempts,
            q.endpoint_id,
            q.payload,
            q.headers,
            q.metadata,
            q.correlation_id,
            q.ordering_key,
            q.priority,
            q.idempotency_key,
            q.created_at,
            q.expires_at,
            q.lease_until,
            q.next_retry_at,
            l.config_version,
            l.circuit_state,
            l.is_limited
    ),
    -- What it took out of a limit. The first message of an open circuit is its probe, and makes it half-open: the row has
    -- been locked since it was admitted, so of all sessions one gets here.
    spent as (
        update ulak.endpoints e
        set rate_tokens = ulak._rate_tokens(e, p_now) - c.messages,
            -- Clocks of sessions differ: time that has given its tokens must not give them again.
            rate_refilled_at = greatest(e.rate_refilled_at, p_now),
            release_rate = case when e.release_rate is not null and ulak._has_held(e.id, e.release_before) then e.release_rate end,
            circuit_state = case when e.circuit_state = 'closed' then 'closed' else 'half_open' end,
            circuit_probe_id = case when e.circuit_state <> 'closed' then c.id end,
            circuit_probe_attempt = case when e.circuit_state <> 'closed' then c.attempts end
        from (
            select c.endpoint_id, count(*) as messages, min(c.id) as id, min(c.attempts) as attempts
            from claimed c
            where c.is_limited
            group by c.endpoint_id
        ) c
        where e.id = c.endpoint_id
        returning e.id, e.name, e.circuit_failure_count
    ),
    logged as (
        insert into ulak.event_log (event, endpoint_id, endpoint_name, old_value, new_value, created_at)
        select
            'circuit.half_open',
            s.id,
            s.name,
            ulak._circuit_value('open', s.circuit_failure_count),
            ulak._circuit_value('half_open', s.circuit_failure_count),
            p_now
        from spent s
        where exists (select from claimed c where c.endpoint_id = s.id and c.circuit_state = 'open')
    )
    select
        c.id,
        c.message_id,
        c.attempts,
        c.endpoint_id,
        c.config_version,
        c.payload,
        c.headers,
        c.metadata,
        c.correlation_id,
        c.ordering_key,
        c.priority,
        c.idempotency_key,
        c.created_at,
        c.expires_at,
        c.lease_until,
        case when c.circuit_state = 'closed' then 'closed' else 'half_open' end,
        c.next_retry_at
    from claimed c
    -- In the order in which they were allotted.
    order by
        row_number() over (
            partition by c.endpoint_id
            order by
                case
                    when v_aging is null then c.priority
                    else c.priority + floor(date_part('epoch', p_now - c.next_retry_at) / v_aging)
                end desc,
                c.next_retry_at,
                c.id
        ),
        c.endpoint_id;
end
$plpgsql$;
-- Who gets how much of a claim.

-- One pair of endpoint and priority that is due, of an endpoint that is well and has no limit, is the usual case of light
-- traffic, and of one busy endpoint; nothing that is due is the usual case of an idle worker, which asks twenty times a
-- second. A few probes find out, or one behind the mark: size is then above 0, or 0. A null size is for _allot().
create or replace function ulak._only_pair(
    p_limit integer,
    p_protocol text,
    p_endpoint_id bigint,
    p_now timestamptz,
    p_room_ids bigint[],
    p_rooms integer[],
    p_room integer,
    p_mark_endpoint_id bigint,
    p_mark_priority smallint,
    p_mark_due_at timestamptz,
    p_mark_id bigint,
    out endpoint_id bigint,
    out priority smallint,
    out since timestamptz,
    out first_id bigint,
    out size integer,
    out config_version bigint
)
language plpgsql
as $plpgsql$
declare
    v_pair record;
    v_room integer;
begin
    if p_mark_endpoint_id is not null then
        select q.endpoint_id, q.priority, q.next_retry_at, q.id into endpoint_id, priority, since, first_id
        from ulak.queue q
        where q.status = 'pending'
            and q.endpoint_id = p_mark_endpoint_id
            and q.priority = p_mark_priority
            and (q.next_retry_at, q.id) > (p_mark_due_at, p_mark_id)
            and q.next_retry_at <= p_now
        order by q.next_retry_at, q.id
        limit 1;
    end if;
    if endpoint_id is null then
        select q.endpoint_id, q.priority, q.next_retry_at, q.id into v_pair
        from ulak.queue q
        where q.status = 'pending' and q.endpoint_id >= coalesce(p_endpoint_id, 0)
        order by q.endpoint_id, q.priority desc, q.next_retry_at, q.id
        limit 1;
        for v_step in 1..4 loop
            if v_pair.next_retry_at <= p_now and (p_endpoint_id is null or v_pair.endpoint_id = p_endpoint_id) then
                if endpoint_id is not null then
                    return;
                end if;
                endpoint_id := v_pair.endpoint_id;
                priority := v_pair.priority;
                since := v_pair.next_retry_at;
                first_id := v_pair.id;
            end if;
            exit when v_pair.endpoint_id is null;
            select n.endpoint_id, n.priority, n.next_retry_at, n.id into v_pair
            from (
                (
                    select q.endpoint_id, q.priority, q.next_retry_at, q.id
                    from ulak.queue q
                    where q.status = 'pending' and q.endpoint_id = v_pair.endpoint_id and q.priority < v_pair.priority
                    order by q.priority desc, q.next_retry_at, q.id
                    limit 1
                )
                union all
                (
                    select q.endpoint_id, q.priority, q.next_retry_at, q.id
                    from ulak.queue q
                    where q.status = 'pending' and q.endpoint_id > v_pair.endpoint_id and p_endpoint_id is null
                    order by q.endpoint_id, q.priority desc, q.next_retry_at, q.id
                    limit 1
                )
                limit 1
            ) n;
        end loop;
        if v_pair.endpoint_id is not null then
            return;
        elsif endpoint_id is null then
            size := 0;
            return;
        end if;
    end if;

    v_room := least(p_limit, coalesce(p_rooms[array_position(p_room_ids, endpoint_id)], p_room));
    if v_room <= 0 then
        size := 0;
        return;
    end if;
    select e.config_version, v_room into config_version, size
    from ulak.endpoints e
    where e.id = _only_pair.endpoint_id
        and e.enabled
        and (p_protocol is null or e.protocol = p_protocol)
        and not ulak._is_limited(e);
end
$plpgsql$;

-- How many messages of which endpoint and priority, where they begin in the index, and under which config. A loose scan
-- visits all pairs.
create or replace function ulak._allot(
    p_limit integer,
    p_protocol text,
    p_endpoint_id bigint,
    p_generation bigint,
    p_now timestamptz,
    p_room_ids bigint[],
    p_rooms integer[],
    p_room integer
)
returns table (
    endpoint_id bigint,
    priority smallint,
    since timestamptz,
    first_id bigint,
    size integer,
    config_version bigint,
    circuit_state text,
    -- Its row is locked, and what is claimed must be taken out of its limit.
    is_limited boolean
)
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
#variable_conflict use_column
declare
    v_aging integer := nullif(ulak.setting('priority_aging')::integer, 0);
begin
    return query
    with recursive level(endpoint_id, priority, next_retry_at, id) as (
        (
            select q.endpoint_id, q.priority, q.next_retry_at, q.id
            from ulak.queue q
            where q.status = 'pending' and q.endpoint_id >= coalesce(p_endpoint_id, 0)
            order by q.endpoint_id, q.priority desc, q.next_retry_at, q.id
            limit 1
        )
        union all
        select n.endpoint_id, n.priority, n.next_retry_at, n.id
        from level l
        cross join lateral (
            (
                select q.endpoint_id, q.priority, q.next_retry_at, q.id
                from ulak.queue q
                where q.status = 'pending' and q.endpoint_id = l.endpoint_id and q.priority < l.priority
                order by q.priority desc, q.next_retry_at, q.id
                limit 1
            )
            union all
            (
                select q.endpoint_id, q.priority, q.next_retry_at, q.id
                from ulak.queue q
                where q.status = 'pending' and q.endpoint_id > l.endpoint_id and p_endpoint_id is null
                order by q.endpoint_id, q.priority desc, q.next_retry_at, q.id
                limit 1
            )
            limit 1
        ) n
    ),
    -- More than a handful of due rows make a pair busy. What was claimed since the last VACUUM lies before its first row
    -- in the index: a scan that starts at that row, by both columns, needn't walk over it again.
    due as materialized (
        select
            l.endpoint_id,
            l.priority,
            l.next_retry_at as since,
            l.id as first_id,
            exists (
                select
                from ulak.queue q
                where q.status = 'pending'
                    and q.endpoint_id = l.endpoint_id
                    and q.priority = l.priority
                    and (q.next_retry_at, q.id) >= (l.next_retry_at, l.id)
                    and q.next_retry_at <= p_now
                offset 4
            ) as is_busy
        from level l
        where (p_endpoint_id is null or l.endpoint_id = p_endpoint_id) and l.next_retry_at <= p_now
    ),
    -- Only an endpoint with a limit or a troubled circuit needs a lock; the others are read.
    ready as materialized (
        select
            e.id,
            e.config_version,
            coalesce(a.circuit_state, 'closed') as circuit_state,
            coalesce(a.quota, r.room) as quota,
            a.quota is not null as is_limited,
            exists (select from due d where d.endpoint_id = e.id and d.is_busy) as is_busy
        from ulak.endpoints e
        cross join lateral (
            select least(p_limit, coalesce(p_rooms[array_position(p_room_ids, e.id)], p_room))
        ) r(room)
        left join lateral (
            select a.quota, a.circuit_state
            from ulak._admit(e.id, r.room, p_now) a
            where ulak._is_limited(e)
            offset 0
        ) a on true
        where e.id = any (array(select distinct d.endpoint_id from due d))
            and e.enabled
            and (p_protocol is null or e.protocol = p_protocol)
            and r.room > 0
            and (e.circuit_state <> 'open' or e.circuit_half_open_at <= p_now)
    ),
    -- How many rows of an endpoint are looked at: all of a small one, twice its share of a busy one. So the cost
    -- follows the limit, however many endpoints there are, and small ones leave their room to the busy. Lots are drawn
    -- for the case that not each endpoint gets a turn.
    share as materialized (
        select
            r.id,
            random() as lot,
            least(
                r.quota,
                case when r.is_busy then ceil(2.0 * p_limit / count(*) filter (where r.is_busy) over ())::integer end
            ) as size
        from ready r
        where r.quota > 0
    ),
    candidate as (
        select
            d.endpoint_id,
            d.priority,
            d.since,
            d.first_id,
            s.size,
            s.lot,
            row_number() over (
                partition by d.endpoint_id
                order by
                    case
                        when v_aging is null then d.priority
                        else d.priority + floor(date_part('epoch', p_now - c.next_retry_at) / v_aging)
                    end desc,
                    c.next_retry_at,
                    c.id
            ) as turn
        from share s
        join due d on d.endpoint_id = s.id
        cross join lateral (
            select q.id, q.next_retry_at
            from ulak.queue q
            where q.status = 'pending'
                and q.endpoint_id = d.endpoint_id
                and q.priority = d.priority
                and (q.next_retry_at, q.id) >= (d.since, d.first_id)
                and q.next_retry_at <= p_now
                and (q.expires_at is null or q.expires_at > p_now)
                and (p_generation is null or q.generation = p_generation)
                and (
                    q.ordering_key is null
                    or not exists (
                        select
                        from ulak.queue h
                        where h.endpoint_id = q.endpoint_id
                            and h.ordering_key = q.ordering_key
                            and h.status in ('pending', 'processing')
                            and (h.ordering_key, h.id) < (q.ordering_key, q.id)
                    )
                )
            order by q.next_retry_at, q.id
            limit s.size
        ) c
    ),
    -- Endpoints take turns until the limit is reached.
    allotment as (
        select t.endpoint_id, t.priority, t.since, t.first_id, count(*) as size
        from (
            select c.endpoint_id, c.priority, c.since, c.first_id
            from candidate c
            where c.turn <= c.size
            order by c.turn, c.lot
            limit p_limit
        ) t
        group by t.endpoint_id, t.priority, t.since, t.first_id
    )
    select a.endpoint_id, a.priority, a.since, a.first_id, a.size::integer, r.config_version, r.circuit_state, r.is_limited
    from allotment a
    join ready r on r.id = a.endpoint_id;
end
$plpgsql$;
-- Leases as external workers use them: claim, heartbeat, complete, fail, release.

create or replace function ulak.claim(
    p_worker text,
    p_limit integer default 1,
    p_endpoint text default null,
    p_lease interval default null,
    p_generation bigint default null,
    p_now timestamptz default clock_timestamp()
)
returns table (
    id bigint,
    message_id uuid,
    attempt integer,
    endpoint text,
    payload jsonb,
    headers jsonb,
    metadata jsonb,
    correlation_id uuid,
    ordering_key text,
    idempotency_key text,
    priority smallint,
    created_at timestamptz,
    expires_at timestamptz,
    lease_until timestamptz
)
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
#variable_conflict use_column
declare
    v_endpoint_id bigint;
begin
    perform ulak._check_claim(p_worker, p_limit, p_lease);
    if p_endpoint is not null then
        select e.id into v_endpoint_id
        from ulak.endpoints e
        where e.name = p_endpoint;
        if not found then
            perform ulak._raise_unknown_endpoint(p_endpoint);
        end if;
    end if;
    return query
    select
        c.id,
        c.message_id,
        c.attempt,
        e.name,
        c.payload,
        c.headers,
        c.metadata,
        c.correlation_id,
        c.ordering_key,
        c.idempotency_key,
        c.priority,
        c.created_at,
        c.expires_at,
        c.lease_until
    from ulak._claim(
        p_worker,
        p_limit,
        -- http endpoints belong to the workers in the database, unless one is asked for by name.
        case when p_endpoint is null then 'pull' end,
        v_endpoint_id,
        p_lease,
        p_generation,
        p_now
    ) with ordinality c
    join ulak.endpoints e on e.id = c.endpoint_id
    order by c.ordinality;
end
$plpgsql$;

comment on function ulak.claim(text, integer, text, interval, bigint, timestamptz) is
    'leases up to p_limit due messages to p_worker, of all pull endpoints or of the one that is named';

create or replace function ulak._check_claim(p_worker text, p_limit integer, p_lease interval)
returns void
language plpgsql
immutable
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    if coalesce(p_worker, '') = '' then
        raise exception 'a worker needs a name'
            using errcode = '22023', hint = 'Use one name per process, such as host and pid: it fences the lease.';
    end if;
    if p_limit is null or p_limit not between 1 and 10000 then
        raise exception 'the limit of a claim must be between 1 and 10000'
            using errcode = '22023', detail = format('It is %s.', coalesce(p_limit::text, 'null'));
    end if;
    if p_lease <= interval '0' or p_lease > interval '1 day' then
        raise exception 'a lease must be above 0 and at most a day'
            using errcode = '22023', detail = format('It is %s.', p_lease), hint = 'Use heartbeat() for longer work.';
    end if;
end
$plpgsql$;

create or replace function ulak.heartbeat(
    p_id bigint,
    p_worker text,
    p_attempt integer,
    p_lease interval default null,
    p_now timestamptz default clock_timestamp()
)
returns boolean
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    perform ulak._check_claim(p_worker, 1, p_lease);
    return cardinality(ulak._heartbeat_many(p_worker, array[p_id], array[p_attempt], p_lease, p_now)) = 1;
end
$plpgsql$;

comment on function ulak.heartbeat(bigint, text, integer, interval, timestamptz) is
    'extends a lease from now on; false if it is lost, then stop working on the message';

create or replace function ulak.complete(
    p_id bigint,
    p_worker text,
    p_attempt integer,
    p_response jsonb default null,
    p_now timestamptz default clock_timestamp()
)
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    if ulak._settle_many(p_worker, array[p_id], array[p_attempt], null, null, array[p_response], p_now) = '{}' then
        perform ulak._raise_stale_report(p_id, p_worker, p_attempt);
    end if;
end
$plpgsql$;

comment on function ulak.complete(bigint, text, integer, jsonb, timestamptz) is
    'reports a message as done; an error (55000) if the lease is lost';

create or replace function ulak.fail(
    p_id bigint,
    p_worker text,
    p_attempt integer,
    p_error text,
    p_retry_after interval default null,
    p_permanent boolean default false,
    p_now timestamptz default clock_timestamp()
)
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_reason text := coalesce(p_error, 'no reason given');
    -- A worker may name the class itself.
    v_error text := case
        when p_permanent and not starts_with(v_reason, '[DISABLE]') then '[PERMANENT] ' || ulak._without_class(v_reason)
        when v_reason ~ '^\[(RETRYABLE|PERMANENT|DISABLE)\]' then v_reason
        else '[RETRYABLE] ' || v_reason
    end;
begin
    if p_retry_after not between interval '0' and interval '1 day' then
        raise exception 'p_retry_after must be between 0 and a day'
            using errcode = '22023', detail = format('It is %s.', p_retry_after);
    end if;
    if ulak._settle_many(
        p_worker,
        array[p_id],
        array[p_attempt],
        array[v_error],
        array[ceil(extract(epoch from p_retry_after))::integer],
        null,
        p_now
    ) = '{}' then
        perform ulak._raise_stale_report(p_id, p_worker, p_attempt);
    end if;
end
$plpgsql$;

comment on function ulak.fail(bigint, text, integer, text, interval, boolean, timestamptz) is
    'reports a failure: the message is retried by its endpoint''s policy, or goes to the dead-letter queue if p_permanent '
    'or out of retries; an error (55000) if the lease is lost';

create or replace function ulak._without_class(p_error text)
returns text
language sql
immutable
as $sql$
    select regexp_replace(p_error, '^\[(RETRYABLE|PERMANENT)\]\s*', '')
$sql$;

create or replace function ulak.release(
    p_id bigint,
    p_worker text,
    p_attempt integer,
    p_delay interval default '0',
    p_now timestamptz default clock_timestamp()
)
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    if p_delay is null or p_delay < interval '0' or p_delay > interval '1 day' then
        raise exception 'the delay must be between 0 and a day'
            using errcode = '22023', detail = format('It is %s.', coalesce(p_delay::text, 'null'));
    end if;
    if ulak._release_many(p_worker, array[p_id], array[p_attempt], p_delay, p_now) = '{}' then
        perform ulak._raise_stale_report(p_id, p_worker, p_attempt);
    end if;
end
$plpgsql$;

comment on function ulak.release(bigint, text, integer, interval, timestamptz) is
    'gives a message back unworked, without spending its retries; an error (55000) if the lease is lost';

create or replace function ulak._raise_stale_report(p_id bigint, p_worker text, p_attempt integer)
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_message ulak.queue;
begin
    select q.* into v_message
    from ulak.queue q
    where q.id = p_id;
    raise exception 'worker "%" does not hold message % in attempt %', p_worker, p_id, p_attempt
        using errcode = '55000',
            detail = case
                when v_message.id is null then 'It is not in the queue.'
                when v_message.status <> 'processing'
                    then format('It is %s after %s attempts.', v_message.status, v_message.attempts)
                else format('It is held by "%s" in attempt %s.', v_message.locked_by, v_message.attempts)
            end,
            hint = 'The lease ran out or the message was settled before. Drop the result: nothing was changed.';
end
$plpgsql$;
-- A turn of the worker in light traffic, where what it costs is what it touches: after a pause nothing is in the processor's
-- caches. So one statement stores what was delivered and claims what was sent since, for the plain case of both.

-- Of p_ids (ascending), delivered at p_attempts, and of the p_count ids behind p_after. Not plain, and left to _settle_many()
-- and _claim(): messages with an ordering key, endpoints with a limit or with something to note, and whatever else is due.
-- Returns one row for each message that it stored (not is_new) or claimed.
create or replace function ulak._light_turn(
    p_worker text,
    p_after bigint,
    p_count integer,
    p_lease interval,
    p_ids bigint[],
    p_attempts integer[],
    p_now timestamptz default clock_timestamp()
)
returns table (
    id bigint,
    is_new boolean,
    message_id uuid,
    attempt integer,
    endpoint_id bigint,
    config_version bigint,
    payload jsonb,
    headers jsonb,
    metadata jsonb,
    correlation_id uuid,
    created_at timestamptz
)
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
#variable_conflict use_column
declare
    -- What was delivered is hardly older than what is new: one range of ids has both.
    v_first bigint := least(p_after + 1, p_ids[1]);
begin
    return query
    update ulak.queue q
    set status = case when q.status = 'pending' then 'processing' else 'completed' end,
        attempts = q.attempts + (q.status = 'pending')::integer,
        locked_by = case when q.status = 'pending' then p_worker end,
        lease_until = case when q.status = 'pending' then p_now + p_lease end,
        processing_started_at = case when q.status = 'pending' then p_now else q.processing_started_at end,
        completed_at = case when q.status = 'processing' then p_now end,
        response = case when q.status = 'pending' then q.response end,
        updated_at = p_now
    from ulak.endpoints e
    where e.id = q.endpoint_id
        and q.id between v_first and p_after + p_count
        and q.ordering_key is null
        and case q.status
            when 'pending' then
                q.id > p_after
                and q.next_retry_at <= p_now
                and (q.expires_at is null or q.expires_at > p_now)
                and e.enabled
                and e.protocol = 'http'
                and not ulak._is_limited(e)
                -- Which is to get what is there in one request.
                and not e.config ? 'batch_size'
            when 'processing' then
                q.locked_by = p_worker
                and q.attempts = p_attempts[array_position(p_ids, q.id)]
                and not ulak._counts_deliveries(e)
                and e.last_success_at > p_now - interval '10 seconds'
        end
    returning
        q.id,
        q.status = 'processing',
        q.message_id,
        q.attempts,
        q.endpoint_id,
        e.config_version,
        case when q.status = 'processing' then q.payload end,
        q.headers,
        q.metadata,
        q.correlation_id,
        q.created_at;
end
$plpgsql$;
-- Protection of receivers: circuit breaker, rate limit, and cap of messages in flight, per endpoint.

-- Endpoints that a claim must lock before it takes messages of theirs.
create or replace function ulak._is_limited(p_endpoint ulak.endpoints)
returns boolean
language sql
immutable
as $sql$
    select p_endpoint.circuit_state <> 'closed'
        or p_endpoint.max_in_flight is not null
        or p_endpoint.release_rate is not null
        or p_endpoint.config ? 'rate_limit'
$sql$;

-- How many messages of an endpoint may be claimed now. Its locks, the breaker's and then the row's as in settling, are kept
-- until the claim commits and make the answer true for all workers. Who finds one taken leaves the endpoint to the
-- other, so claims never wait for each other.
create or replace function ulak._admit(
    p_endpoint_id bigint,
    p_limit integer,
    p_now timestamptz,
    out quota integer,
    out circuit_state text
)
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_endpoint ulak.endpoints;
    v_quota bigint := p_limit;
begin
    quota := 0;
    if not pg_try_advisory_xact_lock(hashtext('ulak_cb'), p_endpoint_id::integer) then
        return;
    end if;
    select e.* into v_endpoint
    from ulak.endpoints e
    where e.id = p_endpoint_id and e.enabled
    for no key update skip locked;
    if not found then
        return;
    end if;
    circuit_state := v_endpoint.circuit_state;
    if circuit_state <> 'closed' then
        if not ulak._may_probe(v_endpoint, p_now) then
            return;
        end if;
        v_quota := 1;
    end if;
    if v_endpoint.max_in_flight is not null then
        v_quota := least(v_quota, v_endpoint.max_in_flight - ulak._count_in_flight(p_endpoint_id, v_endpoint.max_in_flight));
    end if;
    quota := greatest(least(v_quota, floor(ulak._rate_tokens(v_endpoint, p_now))), 0);
end
$plpgsql$;

create or replace function ulak._count_in_flight(p_endpoint_id bigint, p_at_most integer)
returns bigint
language sql
stable
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
as $sql$
    select count(*)
    from (select from ulak.queue q where q.status = 'processing' and q.endpoint_id = p_endpoint_id limit p_at_most) f
$sql$;

-- An open circuit gets a probe once its cooldown is over. A half-open one whose probe is no longer in flight (its worker
-- died, it was deleted, it expired) gets another instead of waiting for ever.
create or replace function ulak._may_probe(p_endpoint ulak.endpoints, p_now timestamptz)
returns boolean
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    if p_endpoint.circuit_state = 'open' then
        return p_endpoint.circuit_half_open_at <= p_now;
    end if;
    return not exists (
        select
        from ulak.queue q
        where q.id = p_endpoint.circuit_probe_id
            and q.attempts = p_endpoint.circuit_probe_attempt
            and q.status is not distinct from 'processing'
            and q.lease_until > p_now
    );
end
$plpgsql$;

-- Whether messages that were due before a time are still waiting: one probe per priority for those that are due, one for
-- those behind another of their ordering key.
create or replace function ulak._has_held(p_endpoint_id bigint, p_before timestamptz)
returns boolean
language plpgsql
stable
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
as $plpgsql$
begin
    return exists (
        select
        from generate_series(0, 10) p(priority)
        cross join lateral (
            (
                select q.next_retry_at as due_at
                from ulak.queue q
                where q.status = 'pending' and q.endpoint_id = p_endpoint_id and q.priority = p.priority
                order by q.next_retry_at
                limit 1
            )
            union all
            (
                select q.created_at
                from ulak.queue q
                where q.status = 'pending'
                    and q.endpoint_id = p_endpoint_id
                    and q.priority = p.priority
                    and q.next_retry_at = 'infinity'
                order by q.id
                limit 1
            )
        ) m
        where m.due_at < p_before
    );
end
$plpgsql$;

-- Tokens in the endpoint's bucket. Without a burst of its own it holds a tenth of a second's worth, at least one: enough
-- that workers which look every few milliseconds lose none.
create or replace function ulak._rate_tokens(p_endpoint ulak.endpoints, p_now timestamptz)
returns double precision
language plpgsql
immutable
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_limit jsonb := p_endpoint.config -> 'rate_limit';
    v_rate double precision;
    v_burst double precision;
begin
    if v_limit is not null then
        v_rate := (v_limit -> 'limit')::double precision
            / case v_limit ->> 'interval' when 'hour' then 3600 when 'minute' then 60 else 1 end;
        v_burst := greatest(coalesce((v_limit -> 'burst')::double precision, v_rate / 10), 1);
    end if;
    if p_endpoint.release_rate < coalesce(v_rate, 'infinity') then
        v_rate := p_endpoint.release_rate;
        v_burst := greatest(v_rate / 10, 1);
    end if;
    if v_rate is null then
        return 'infinity';
    end if;
    return least(
        v_burst,
        coalesce(
            nullif(p_endpoint.rate_tokens, 'infinity')
                + v_rate * greatest(extract(epoch from p_now - p_endpoint.rate_refilled_at), 0),
            v_burst
        )
    );
end
$plpgsql$;

-- The breaker's rules of an endpoint: its own keys over the settings.
create or replace function ulak._circuit_rules(p_config jsonb)
returns jsonb
language sql
stable
as $sql$
    select jsonb_build_object(
        'mode', 'consecutive',
        'threshold', ulak.setting('circuit_breaker_threshold')::integer,
        'cooldown', ulak.setting('circuit_breaker_cooldown')::integer,
        'counts', ulak.setting('circuit_breaker_counts'),
        'window', 60,
        'min_requests', 20,
        'failure_rate', 0.5
    ) || coalesce(p_config -> 'circuit_breaker', '{}')
$sql$;

-- Whether a delivery means something to the breaker.
create or replace function ulak._counts_deliveries(p_endpoint ulak.endpoints)
returns boolean
language sql
immutable
as $sql$
    select p_endpoint.circuit_state <> 'closed'
        or p_endpoint.circuit_failure_count > 0
        or coalesce(p_endpoint.config #>> '{circuit_breaker,mode}', '') = 'rate'
$sql$;

-- An endpoint that is well and stays well isn't written but once a second, so its row is no hot spot.
create or replace function ulak._notes_deliveries(p_endpoint ulak.endpoints, p_now timestamptz)
returns boolean
language sql
stable
as $sql$
    select ulak._counts_deliveries(p_endpoint)
        or coalesce(p_endpoint.last_success_at, '-infinity') <= p_now - interval '1 second'
$sql$;

-- Outcomes in their order of arrival; a null error is a delivery. Endpoints are locked in the order of their ids: two
-- workers that meet the same endpoints can't wait for each other.
create or replace function ulak._record_outcomes(
    p_endpoint_ids bigint[],
    p_ids bigint[],
    p_attempts integer[],
    p_errors text[],
    p_now timestamptz
)
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_endpoint_id bigint;
begin
    for v_endpoint_id in
        select e.id
        from ulak.endpoints e
        join (
            select o.endpoint_id, bool_or(o.error is not null) as failed
            from unnest(p_endpoint_ids, p_errors) o(endpoint_id, error)
            group by o.endpoint_id
        ) o on o.endpoint_id = e.id
        where o.failed or ulak._notes_deliveries(e, p_now)
        order by e.id
    loop
        perform ulak._apply_outcomes(
            v_endpoint_id,
            array_agg(o.id order by o.place),
            array_agg(o.attempt order by o.place),
            array_agg(o.error order by o.place),
            p_now
        )
        from unnest(p_endpoint_ids, p_ids, p_attempts, p_errors) with ordinality o(endpoint_id, id, attempt, error, place)
        where o.endpoint_id = v_endpoint_id;
    end loop;
end
$plpgsql$;

-- Only the probe decides in a half-open circuit, and nothing does in an open one: answers to requests that were under way
-- when it opened come too late. A null id stands for the probe.
create or replace function ulak._apply_outcomes(
    p_endpoint_id bigint,
    p_ids bigint[],
    p_attempts integer[],
    p_errors text[],
    p_now timestamptz
)
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_endpoint ulak.endpoints := ulak._lock_endpoint(p_endpoint_id);
    v_rules jsonb := ulak._circuit_rules(v_endpoint.config);
    v_failed boolean;
    v_probe boolean;
begin
    for i in 1..cardinality(p_errors) loop
        if p_errors[i] is null then
            v_endpoint.last_success_at := p_now;
        else
            v_endpoint.last_failure_at := p_now;
            v_endpoint.last_error := p_errors[i];
        end if;
        -- null: a message's own fault. It doesn't count, but shows that the receiver is alive.
        v_failed := case
            when p_errors[i] is null then false
            when starts_with(p_errors[i], '[RETRYABLE]') or v_rules ->> 'counts' = 'all' then true
        end;
        if v_endpoint.circuit_state = 'closed' then
            v_endpoint := ulak._count_outcome(v_endpoint, v_rules, v_failed, p_now);
        elsif v_endpoint.circuit_state = 'half_open' then
            v_probe := p_ids[i] is null
                or (p_ids[i], p_attempts[i]) = (v_endpoint.circuit_probe_id, v_endpoint.circuit_probe_attempt);
            if v_probe and v_failed then
                v_endpoint := ulak._open_circuit(v_endpoint, v_rules, p_now);
            elsif v_probe then
                v_endpoint := ulak._close_circuit(v_endpoint, 'circuit.closed', p_now);
            end if;
        end if;
    end loop;

    perform ulak._store_circuit(v_endpoint);
end
$plpgsql$;

create or replace function ulak._count_outcome(
    p_endpoint ulak.endpoints,
    p_rules jsonb,
    p_failed boolean,
    p_now timestamptz
)
returns ulak.endpoints
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_window interval := make_interval(secs => (p_rules -> 'window')::double precision);
    v_trips boolean;
begin
    if p_failed is null then
        return p_endpoint;
    end if;
    p_endpoint.circuit_failure_count := case when p_failed then p_endpoint.circuit_failure_count + 1 else 0 end;
    if p_rules ->> 'mode' = 'rate' then
        if p_endpoint.circuit_window_started_at is null or p_endpoint.circuit_window_started_at <= p_now - v_window then
            p_endpoint.circuit_window_started_at := p_now;
            p_endpoint.circuit_window_requests := 0;
            p_endpoint.circuit_window_failures := 0;
        end if;
        p_endpoint.circuit_window_requests := p_endpoint.circuit_window_requests + 1;
        p_endpoint.circuit_window_failures := p_endpoint.circuit_window_failures + p_failed::integer;
        v_trips := p_failed
            and p_endpoint.circuit_window_requests >= (p_rules -> 'min_requests')::integer
            and p_endpoint.circuit_window_failures
                >= (p_rules -> 'failure_rate')::double precision * p_endpoint.circuit_window_requests;
    else
        v_trips := p_endpoint.circuit_failure_count >= (p_rules -> 'threshold')::integer;
    end if;
    if v_trips then
        return ulak._open_circuit(p_endpoint, p_rules, p_now);
    end if;
    return p_endpoint;
end
$plpgsql$;

create or replace function ulak._open_circuit(p_endpoint ulak.endpoints, p_rules jsonb, p_now timestamptz)
returns ulak.endpoints
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    perform ulak._log_circuit('circuit.opened', p_endpoint, 'open', p_now);
    p_endpoint.circuit_state := 'open';
    p_endpoint.circuit_opened_at := p_now;
    p_endpoint.circuit_half_open_at := p_now + make_interval(secs => (p_rules -> 'cooldown')::double precision);
    p_endpoint.circuit_probe_id := null;
    p_endpoint.circuit_probe_attempt := null;
    p_endpoint.circuit_window_started_at := null;
    return p_endpoint;
end
$plpgsql$;

create or replace function ulak._close_circuit(p_endpoint ulak.endpoints, p_event text, p_now timestamptz)
returns ulak.endpoints
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    perform ulak._log_circuit(p_event, p_endpoint, 'closed', p_now);
    p_endpoint.circuit_state := 'closed';
    p_endpoint.circuit_failure_count := 0;
    p_endpoint.circuit_opened_at := null;
    p_endpoint.circuit_half_open_at := null;
    p_endpoint.circuit_probe_id := null;
    p_endpoint.circuit_probe_attempt := null;
    p_endpoint.circuit_window_started_at := null;
    return p_endpoint;
end
$plpgsql$;

create or replace function ulak._store_circuit(p_endpoint ulak.endpoints)
returns void
language sql
set search_path = pg_catalog, pg_temp
as $sql$
    update ulak.endpoints e
    set circuit_state = p_endpoint.circuit_state,
        circuit_failure_count = p_endpoint.circuit_failure_count,
        circuit_opened_at = p_endpoint.circuit_opened_at,
        circuit_half_open_at = p_endpoint.circuit_half_open_at,
        circuit_probe_id = p_endpoint.circuit_probe_id,
        circuit_probe_attempt = p_endpoint.circuit_probe_attempt,
        circuit_window_started_at = p_endpoint.circuit_window_started_at,
        circuit_window_requests = p_endpoint.circuit_window_requests,
        circuit_window_failures = p_endpoint.circuit_window_failures,
        last_success_at = p_endpoint.last_success_at,
        last_failure_at = p_endpoint.last_failure_at,
        last_error = p_endpoint.last_error
    where e.id = p_endpoint.id
$sql$;

create or replace function ulak._log_circuit(
    p_event text,
    p_endpoint ulak.endpoints,
    p_new_state text,
    p_now timestamptz
)
returns void
language sql
set search_path = pg_catalog, pg_temp
as $sql$
    insert into ulak.event_log (event, endpoint_id, endpoint_name, old_value, new_value, created_at)
    values (
        p_event,
        p_endpoint.id,
        p_endpoint.name,
        ulak._circuit_value(p_endpoint.circuit_state, p_endpoint.circuit_failure_count),
        ulak._circuit_value(p_new_state, case when p_new_state = 'closed' then 0 else p_endpoint.circuit_failure_count end),
        p_now
    );
    select ulak._tell_circuit(p_endpoint, p_new_state, p_now)
$sql$;

create or replace function ulak._circuit_value(p_state text, p_failures integer)
returns jsonb
language sql
immutable
as $sql$
    select jsonb_build_object('circuit_state', p_state, 'failures', p_failures)
$sql$;

create or replace function ulak.update_circuit_breaker(
    p_endpoint_id bigint,
    p_success boolean,
    p_now timestamptz default clock_timestamp()
)
returns text
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    if not exists (select from ulak.endpoints e where e.id = p_endpoint_id) then
        raise exception 'endpoint % does not exist', p_endpoint_id
            using errcode = '42704', hint = 'select id, name from ulak.endpoints;';
    end if;
    perform ulak._apply_outcomes(
        p_endpoint_id,
        array[null::bigint],
        array[null::integer],
        array[case when p_success then null else '[RETRYABLE] reported' end],
        p_now
    );
    return (select e.circuit_state from ulak.endpoints e where e.id = p_endpoint_id);
end
$plpgsql$;

comment on function ulak.update_circuit_breaker(bigint, boolean, timestamptz) is
    'reports one outcome of a delivery to an endpoint''s circuit breaker and returns its state; '
    'complete() and fail() do so by themselves';

create or replace function ulak.reset_circuit_breaker(p_name text, p_now timestamptz default clock_timestamp())
returns boolean
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_endpoint ulak.endpoints := ulak._lock_endpoint(p_name);
begin
    perform ulak._store_circuit(ulak._close_circuit(v_endpoint, 'circuit.reset', p_now));
    return v_endpoint.circuit_state <> 'closed';
end
$plpgsql$;

comment on function ulak.reset_circuit_breaker(text, timestamptz) is
    'closes an endpoint''s circuit at once and clears its counters; false if it was closed already';

create or replace function ulak.disable_endpoint(p_name text, p_now timestamptz default clock_timestamp())
returns boolean
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_endpoint ulak.endpoints := ulak._lock_endpoint(p_name);
begin
    return ulak._switch_endpoint(v_endpoint, false, null, 'disabled by ' || session_user, p_now);
end
$plpgsql$;

comment on function ulak.disable_endpoint(text, timestamptz) is
    'stops deliveries to an endpoint; messages for it are still accepted, and held; false if it was disabled already';

create or replace function ulak.enable_endpoint(
    p_name text,
    p_rate double precision default null,
    p_now timestamptz default clock_timestamp()
)
returns boolean
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_endpoint ulak.endpoints := ulak._lock_endpoint(p_name);
begin
    if not (p_rate > 0 and p_rate < 'infinity') then
        raise exception 'the rate must be above 0 messages a second'
            using errcode = '22023', hint = 'Leave it out to release what was held as fast as it goes.';
    end if;
    return ulak._switch_endpoint(v_endpoint, true, p_rate, 'enabled by ' || session_user, p_now);
end
$plpgsql$;

comment on function ulak.enable_endpoint(text, double precision, timestamptz) is
    'resumes deliveries to an endpoint, what was held at p_rate messages a second if given; false if it was enabled already';

create or replace function ulak._lock_endpoint(p_name text)
returns ulak.endpoints
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_endpoint ulak.endpoints := ulak._lock_endpoint((select e.id from ulak.endpoints e where e.name = p_name));
begin
    if v_endpoint.id is null then
        perform ulak._raise_unknown_endpoint(p_name);
    end if;
    return v_endpoint;
end
$plpgsql$;

-- The breaker's lock, then the row; null if there is no such endpoint. Who locks several takes them in the order of
-- their ids, and messages before endpoints: so nobody can wait in a circle.
create or replace function ulak._lock_endpoint(p_id bigint)
returns ulak.endpoints
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_endpoint ulak.endpoints;
begin
    perform pg_advisory_xact_lock(hashtext('ulak_cb'), p_id::integer);
    select e.* into v_endpoint
    from ulak.endpoints e
    where e.id = p_id
    for no key update;
    return v_endpoint;
end
$plpgsql$;

create or replace function ulak._switch_endpoint(
    p_endpoint ulak.endpoints,
    p_enabled boolean,
    p_rate double precision,
    p_reason text,
    p_now timestamptz
)
returns boolean
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    update ulak.endpoints e
    set enabled = p_enabled,
        release_rate = p_rate,
        release_before = case when p_rate is not null then p_now end,
        rate_tokens = case when p_rate is null then e.rate_tokens else 0 end,
        rate_refilled_at = case when p_rate is null then e.rate_refilled_at else p_now end,
        updated_at = p_now
    where e.id = p_endpoint.id and (e.enabled <> p_enabled or e.release_rate is distinct from p_rate);
    if p_endpoint.enabled = p_enabled then
        return false;
    end if;
    insert into ulak.event_log (event, endpoint_id, endpoint_name, old_value, new_value, detail, created_at)
    values (
        case when p_enabled then 'endpoint.enabled' else 'endpoint.disabled' end,
        p_endpoint.id,
        p_endpoint.name,
        jsonb_build_object('enabled', p_endpoint.enabled),
        jsonb_build_object('enabled', p_enabled),
        jsonb_strip_nulls(jsonb_build_object('reason', p_reason, 'rate', p_rate)),
        p_now
    );
    if not p_enabled then
        perform ulak._tell_disabled(p_endpoint, p_reason, p_now);
    end if;
    return true;
end
$plpgsql$;
-- Settling: what happened to claimed messages, one statement for many of them.

-- Each statement matches id, worker, attempt and status: a zombie, even the same worker's earlier claim, changes nothing.
-- Two spellings make sure of the primary key, whatever the planner thinks of the queue's size. `status is not distinct
-- from` instead of `=`: a partial index's condition can't be proved from it; with `=` all messages in flight were walked
-- once per row. `id between x and x` instead of `=`: nothing can be merged by it; with `=` a plan that was made for an
-- empty queue read all of the queue in the order of its ids.

-- Outcomes in their order of arrival. A null error is a delivery; the prefix of the others decides. Returns the ids that
-- were settled: the rest had been taken away from the worker.
create or replace function ulak._settle_many(
    p_worker text,
    p_ids bigint[],
    p_attempts integer[],
    p_errors text[] default null,
    p_retry_after integer[] default null,
    p_responses jsonb[] default null,
    p_now timestamptz default clock_timestamp()
)
returns bigint[]
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
set plan_cache_mode = force_generic_plan
as $plpgsql$
declare
    v_ids bigint[];
    v_endpoint_ids bigint[];
    -- Of what was settled, in the arrays that were given; where all are alike, the first stands for each.
    v_places bigint[];
    v_keys text[];
    v_key_endpoint_ids bigint[];
    v_dead bigint[];
begin
    if p_errors is null and p_responses is null and p_attempts[1] = all (p_attempts) then
        -- Nothing but deliveries at the same attempt, as most are: without a row per outcome it takes a tenth less.
        with settled as (
            update ulak.queue q
            set status = 'completed',
                completed_at = p_now,
                updated_at = p_now,
                response = null,
                locked_by = null,
                lease_until = null
            where q.id = any (p_ids)
                and q.attempts = p_attempts[1]
                and q.locked_by = p_worker
                and q.status is not distinct from 'processing'
            returning q.id, q.endpoint_id, q.ordering_key
        )
        select
            coalesce(array_agg(s.id), '{}'),
            array_agg(s.endpoint_id),
            array_fill(1::bigint, array[count(*)::integer]),
            array_agg(s.ordering_key) filter (where s.ordering_key is not null),
            array_agg(s.endpoint_id) filter (where s.ordering_key is not null)
        into v_ids, v_endpoint_ids, v_places, v_keys, v_key_endpoint_ids
        from settled s;
    else
        with settled as (
            update ulak.queue q
            set status = 'completed',
                completed_at = p_now,
                updated_at = p_now,
                response = o.response,
                locked_by = null,
                lease_until = null
            from unnest(p_ids, p_attempts, p_errors, p_responses) with ordinality o(id, attempt, error, response, place)
            where o.error is null
                and q.id between o.id and o.id
                and q.attempts = o.attempt
                and q.locked_by = p_worker
                and q.status is not distinct from 'processing'
            returning q.id, q.endpoint_id, q.ordering_key, o.place
        )
        select
            coalesce(array_agg(s.id), '{}'),
            array_agg(s.endpoint_id),
            array_agg(s.place),
            array_agg(s.ordering_key) filter (where s.ordering_key is not null),
            array_agg(s.endpoint_id) filter (where s.ordering_key is not null)
        into v_ids, v_endpoint_ids, v_places, v_keys, v_key_endpoint_ids
        from settled s;
    end if;

    if p_errors is not null then
        with settled as materialized (
            select d.id, d.endpoint_id, d.place, null as ordering_key, false as is_dead
            from unnest(v_ids, v_endpoint_ids, v_places) d(id, endpoint_id, place)
            union all
            select f.id, f.endpoint_id, f.place, case when f.is_dead then f.ordering_key end, f.is_dead
            from ulak._fail_rows(
                array_fill(p_worker, array[cardinality(p_ids)]),
                p_ids,
                p_attempts,
                p_errors,
                p_retry_after,
                p_responses,
                p_now
            ) f
        )
        select
            coalesce(array_agg(s.id order by s.place), '{}'),
            array_agg(s.endpoint_id order by s.place),
            array_agg(s.place order by s.place),
            v_keys || array_agg(s.ordering_key) filter (where s.ordering_key is not null),
            v_key_endpoint_ids || array_agg(s.endpoint_id) filter (where s.ordering_key is not null),
            array_agg(s.id) filter (where s.is_dead)
        into v_ids, v_endpoint_ids, v_places, v_keys, v_key_endpoint_ids, v_dead
        from settled s;
    end if;

    if v_keys is not null then
        perform ulak._promote_heads(v_key_endpoint_ids, v_keys, p_now);
    end if;
    if v_ids <> '{}'
        and (
            p_errors is not null
            or exists (select from ulak.endpoints e where e.id = any (v_endpoint_ids) and ulak._notes_deliveries(e, p_now))
        )
    then
        perform ulak._record_outcomes(
            v_endpoint_ids,
            v_ids,
            array(select p_attempts[p] from unnest(v_places) p),
            array(select p_errors[p] from unnest(v_places) p),
            p_now
        );
    end if;
    if v_dead is not null then
        perform ulak._announce_dead(v_dead, p_now);
    end if;
    return v_ids;
end
$plpgsql$;

-- Failures, reported or found by recovery, all take this way: retry after a delay, or the dead-letter queue. The caller
-- promotes what waited behind a dead message and announces it.
create or replace function ulak._fail_rows(
    p_workers text[],
    p_ids bigint[],
    p_attempts integer[],
    p_errors text[],
    p_retry_after integer[],
    p_responses jsonb[],
    p_now timestamptz
)
returns table (place bigint, id bigint, endpoint_id bigint, ordering_key text, is_dead boolean)
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
set plan_cache_mode = force_generic_plan
as $plpgsql$
declare
    v_defaults jsonb := ulak._retry_defaults();
    v_places bigint[];
    v_ids bigint[];
    v_endpoint_ids bigint[];
    v_keys text[];
    v_are_dead boolean[];
    v_dead bigint[];
begin
    with held as materialized (
        select
            o.place,
            o.error,
            o.retry_after,
            o.response,
            q.id,
            q.retry_count,
            v_defaults || coalesce(e.retry_policy, '{}') as policy
        from unnest(p_workers, p_ids, p_attempts, p_errors, p_retry_after, p_responses)
            with ordinality o(worker, id, attempt, error, retry_after, response, place)
        join ulak.queue q on q.id between o.id and o.id
        left join ulak.endpoints e on e.id = q.endpoint_id
        where o.error is not null
            and q.attempts = o.attempt
            and q.locked_by is not distinct from o.worker
            and q.status is not distinct from 'processing'
        for update of q
    ),
    decided as materialized (
        select
            h.*,
            h.error ~ '^\[(PERMANENT|DISABLE)\]' or h.retry_count >= (h.policy -> 'max_retries')::integer as is_dead
        from held h
    ),
    moved as (
        update ulak.queue q
        set status = case when d.is_dead then 'failed' else 'pending' end,
            retry_count = q.retry_count + (not d.is_dead)::integer,
            next_retry_at = case
                when d.is_dead then q.next_retry_at
                else greatest(
                    q.scheduled_at,
                    p_now + coalesce(
                        make_interval(secs => case when d.retry_after > 86400 then 86400 else d.retry_after end),
                        ulak._backoff(d.policy, d.retry_count)
                    )
                )
            end,
            last_error = d.error,
            first_failed_at = coalesce(q.first_failed_at, p_now),
            failed_at = case when d.is_dead then p_now end,
            response = coalesce(d.response, q.response),
            updated_at = p_now,
            locked_by = null,
            lease_until = null
        from decided d
        where q.id between d.id and d.id
        returning d.place, q.id, q.endpoint_id, q.ordering_key, d.is_dead, q.attempts, q.processing_started_at, d.error
    ),
    noted as (
        insert into ulak.attempts (message_id, attempt, started_at, ended_at, error)
        select m.id, m.attempts, coalesce(m.processing_started_at, p_now), p_now, m.error
        from moved m
    )
    select
        array_agg(m.place),
        array_agg(m.id),
        array_agg(m.endpoint_id),
        array_agg(m.ordering_key),
        array_agg(m.is_dead),
        array_agg(m.id) filter (where m.is_dead)
    into v_places, v_ids, v_endpoint_ids, v_keys, v_are_dead, v_dead
    from moved m;

    if v_dead is not null then
        perform ulak._bury(v_dead, p_now);
    end if;
    return query
    select f.*
    from unnest(v_places, v_ids, v_endpoint_ids, v_keys, v_are_dead) f;
end
$plpgsql$;

create or replace function ulak._release_many(
    p_worker text,
    p_ids bigint[],
    p_attempts integer[],
    p_delay interval,
    p_now timestamptz default clock_timestamp()
)
returns bigint[]
language sql
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_hashjoin = off
set enable_mergejoin = off
as $sql$
    with released as (
        update ulak.queue q
        set status = 'pending',
            next_retry_at = greatest(p_now + p_delay, q.scheduled_at),
            updated_at = p_now,
            locked_by = null,
            lease_until = null
        from unnest(p_ids, p_attempts) r(id, attempt)
        where q.id between r.id and r.id
            and q.attempts = r.attempt
            and q.locked_by = p_worker
            and q.status is not distinct from 'processing'
        returning q.id
    )
    select coalesce(array_agg(r.id), '{}')
    from released r
$sql$;

create or replace function ulak._heartbeat_many(
    p_worker text,
    p_ids bigint[],
    p_attempts integer[],
    p_lease interval default null,
    p_now timestamptz default clock_timestamp()
)
returns bigint[]
language sql
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_hashjoin = off
set enable_mergejoin = off
as $sql$
    with renewed as (
        update ulak.queue q
        set lease_until = p_now + coalesce(p_lease, make_interval(secs => ulak.setting('stale_recovery_timeout')::integer))
        from unnest(p_ids, p_attempts) r(id, attempt)
        where q.id between r.id and r.id
            and q.attempts = r.attempt
            and q.locked_by = p_worker
            and q.status is not distinct from 'processing'
            -- A lease that ran out is lost, even if nobody has noticed yet.
            and q.lease_until > p_now
        returning q.id
    )
    select coalesce(array_agg(r.id), '{}')
    from renewed r
$sql$;
-- Ordering keys: when the head of a key is done, the next message of the key becomes due.

-- A message behind another of its key has next_retry_at = infinity and costs a claim nothing. Senders of a key are
-- serialised, so the first committed row of a key is its head, whatever is still uncommitted.

-- Makes heads due, but for those that another session holds, and tells which. Nobody waits here: the caller holds
-- messages that it settled or took out, and the other session may be after those. The callers pin the plan.
create or replace function ulak._promote_free_heads(
    p_endpoint_ids bigint[],
    p_keys text[],
    p_now timestamptz,
    out promoted integer,
    out held_endpoint_ids bigint[],
    out held_keys text[],
    out empty_endpoint_ids bigint[],
    out empty_keys text[]
)
language plpgsql
as $plpgsql$
begin
    with head as materialized (
        select k.endpoint_id, k.ordering_key, h.id, h.status = 'pending' and h.next_retry_at = 'infinity' as waits
        from (
            select distinct u.endpoint_id, u.ordering_key
            from unnest(p_endpoint_ids, p_keys) u(endpoint_id, ordering_key)
        ) k
        left join lateral (
            select q.id, q.next_retry_at, q.status
            from ulak.queue q
            where q.endpoint_id = k.endpoint_id
                -- Not `=`: then the order of ids alone would do, and all of the queue might be read in it.
                and q.ordering_key between k.ordering_key and k.ordering_key
                and q.status in ('pending', 'processing')
            order by q.ordering_key, q.id
            limit 1
        ) h on true
    ),
    locked as (
        select q.id
        from ulak.queue q
        where q.id = any (array(select h.id from head h where h.waits))
            and q.status is not distinct from 'pending'
            and q.next_retry_at = 'infinity'
        for update skip locked
    ),
    -- A head keeps the place in the line that it had when it was sent.
    moved as (
        update ulak.queue q
        set next_retry_at = greatest(q.created_at, q.scheduled_at), updated_at = p_now
        from locked l
        where q.id between l.id and l.id
        returning q.id
    ),
    seen as materialized (
        select
            h.endpoint_id,
            h.ordering_key,
            h.id is null as is_empty,
            h.waits and h.id not in (select m.id from moved m) as is_held
        from head h
    )
    select
        (select count(*) from moved m),
        array_agg(s.endpoint_id) filter (where s.is_held),
        array_agg(s.ordering_key) filter (where s.is_held),
        array_agg(s.endpoint_id) filter (where s.is_empty),
        array_agg(s.ordering_key) filter (where s.is_empty)
    into promoted, held_endpoint_ids, held_keys, empty_endpoint_ids, empty_keys
    from seen s;
end
$plpgsql$;

-- What can't be done now gets a note, and claim looks again.
create or replace function ulak._promote_heads(p_endpoint_ids bigint[], p_keys text[], p_now timestamptz)
returns integer
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set plan_cache_mode = force_generic_plan
as $plpgsql$
declare
    v_seen record;
    v_again record;
begin
    v_seen := ulak._promote_free_heads(p_endpoint_ids, p_keys, p_now);
    if v_seen.empty_keys is not null then
        -- No message of the key is left that we can see. One whose sender hasn't committed yet was queued behind the
        -- head that is now done, and nobody else would wake it. If nobody holds the key, look again.
        with key as materialized (
            select
                k.endpoint_id,
                k.ordering_key,
                pg_try_advisory_xact_lock(
                    hashtext('ulak_key'), ulak._ordering_lock(k.endpoint_id, k.ordering_key)
                ) as is_free
            from unnest(v_seen.empty_endpoint_ids, v_seen.empty_keys) k(endpoint_id, ordering_key)
        ),
        noted as (
            insert into ulak.ordering_wakeups (endpoint_id, ordering_key)
            select k.endpoint_id, k.ordering_key
            from key k
            where not k.is_free
        )
        select
            array_agg(k.endpoint_id) filter (where k.is_free) as endpoint_ids,
            array_agg(k.ordering_key) filter (where k.is_free) as keys
        into v_again
        from key k;
        if v_again.keys is not null then
            v_again := ulak._promote_free_heads(v_again.endpoint_ids, v_again.keys, p_now);
            v_seen.promoted := v_seen.promoted + v_again.promoted;
            v_seen.held_endpoint_ids := v_seen.held_endpoint_ids || v_again.held_endpoint_ids;
            v_seen.held_keys := v_seen.held_keys || v_again.held_keys;
        end if;
    end if;

    if v_seen.held_keys is not null then
        insert into ulak.ordering_wakeups (endpoint_id, ordering_key)
        select k.endpoint_id, k.ordering_key
        from unnest(v_seen.held_endpoint_ids, v_seen.held_keys) k(endpoint_id, ordering_key);
    end if;
    return v_seen.promoted;
end
$plpgsql$;

-- Looks again once the sender has gone and nobody else holds the head. Until then a note stays as it is.
create or replace function ulak._wake_ordering_keys(p_now timestamptz)
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set plan_cache_mode = force_generic_plan
as $plpgsql$
declare
    v_free record;
    v_seen record;
begin
    with note as (
        select w.id, w.endpoint_id, w.ordering_key
        from ulak.ordering_wakeups w
        for update skip locked
    )
    select array_agg(n.id) as ids, array_agg(n.endpoint_id) as endpoint_ids, array_agg(n.ordering_key) as keys
    into v_free
    from note n
    where pg_try_advisory_xact_lock(hashtext('ulak_key'), ulak._ordering_lock(n.endpoint_id, n.ordering_key));
    if v_free.ids is null then
        return;
    end if;
    v_seen := ulak._promote_free_heads(v_free.endpoint_ids, v_free.keys, p_now);
    delete from ulak.ordering_wakeups w
    where w.id = any (v_free.ids)
        and (w.endpoint_id, w.ordering_key) not in (
            select k.endpoint_id, k.ordering_key
            from unnest(v_seen.held_endpoint_ids, v_seen.held_keys) k(endpoint_id, ordering_key)
        );
end
$plpgsql$;

-- The safety net: keys whose head waits for a message that is gone, because somebody deleted it by hand. Maintenance calls
-- it; it visits each live key once.
create or replace function ulak._promote_orphans(p_now timestamptz default clock_timestamp())
returns integer
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
as $plpgsql$
declare
    v_endpoint_ids bigint[];
    v_keys text[];
begin
    with recursive key as (
        (
            select q.endpoint_id, q.ordering_key, q.next_retry_at
            from ulak.queue q
            where q.ordering_key is not null and q.status in ('pending', 'processing')
            order by q.endpoint_id, q.ordering_key, q.id
            limit 1
        )
        union all
        select n.endpoint_id, n.ordering_key, n.next_retry_at
        from key k
        cross join lateral (
            select q.endpoint_id, q.ordering_key, q.next_retry_at
            from ulak.queue q
            where q.ordering_key is not null
                and q.status in ('pending', 'processing')
                and (q.endpoint_id, q.ordering_key) > (k.endpoint_id, k.ordering_key)
            order by q.endpoint_id, q.ordering_key, q.id
            limit 1
        ) n
    )
    select array_agg(k.endpoint_id), array_agg(k.ordering_key) into v_endpoint_ids, v_keys
    from key k
    where k.next_retry_at = 'infinity';
    if v_keys is null then
        return 0;
    end if;
    return ulak._promote_heads(v_endpoint_ids, v_keys, p_now);
end
$plpgsql$;
-- Retry delays: how long a failed message waits.

create or replace function ulak.retry_delay(p_policy jsonb, p_retry_count integer)
returns interval
language plpgsql
volatile
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_violation text[] := ulak._retry_policy_violation(p_policy);
begin
    if v_violation is not null then
        perform ulak._raise_violation('retry policy', v_violation);
    end if;
    return ulak._backoff(ulak._retry_defaults() || coalesce(p_policy, '{}'), p_retry_count);
end
$plpgsql$;

comment on function ulak.retry_delay(jsonb, integer) is
    'how long a message waits after it failed for the n-th time (from 0) under this retry policy; '
    'keys that are missing come from the settings';

-- A policy whose every key comes from the settings; an endpoint's own keys are laid over it.
create or replace function ulak._retry_defaults()
returns jsonb
language sql
stable
as $sql$
    select jsonb_build_object(
        'max_retries', ulak.setting('default_max_retries')::integer,
        'backoff', 'exponential',
        'base_delay_seconds', ulak.setting('retry_base_delay')::integer,
        'max_delay_seconds', ulak.setting('retry_max_delay')::integer,
        'increment_seconds', ulak.setting('retry_increment')::integer,
        'jitter', 'none'
    )
$sql$;

-- Takes a policy with all keys. Powers stop at 10: 2^10 base delays are beyond any cap, 2^1000 beyond any number.
create or replace function ulak._backoff(p_policy jsonb, p_retry_count integer)
returns interval
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_base double precision := p_policy -> 'base_delay_seconds';
    v_cap double precision := p_policy -> 'max_delay_seconds';
    v_step integer := greatest(p_retry_count, 0);
    v_seconds double precision;
begin
    case p_policy ->> 'backoff'
        when 'fixed' then
            v_seconds := v_base;
        when 'linear' then
            v_seconds := least(v_base + v_step * (p_policy -> 'increment_seconds')::double precision, v_cap);
        when 'quadratic' then
            v_seconds := least(v_base * power(v_step + 1.0, 2), v_cap);
        when 'schedule' then
            v_seconds := p_policy #> array['schedule', least(v_step, jsonb_array_length(p_policy -> 'schedule') - 1)::text];
        else
            v_seconds := case when v_step > 10 then v_cap else least(v_base * power(2.0, v_step), v_cap) end;
    end case;
    return make_interval(
        secs => case p_policy ->> 'jitter'
            when 'full' then v_seconds * random()
            when 'equal' then v_seconds * (0.5 + random() / 2)
            else v_seconds
        end
    );
end
$plpgsql$;
-- Recovery: messages whose worker went silent, and messages that outlived their time.

-- A lease that ran out is a failure that nobody lived to report, and takes the same way as one that was.
-- `skip locked`: two sweeps at once recover each message once, and a worker that is settling right now wins.
create or replace function ulak.recover_stale_messages(
    p_now timestamptz default clock_timestamp(),
    p_limit integer default 10000
)
returns integer
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
as $plpgsql$
declare
    v_ids bigint[];
    v_attempts integer[];
    v_workers text[];
    v_recovered integer;
    v_keys text[];
    v_endpoint_ids bigint[];
    v_dead bigint[];
begin
    -- What has no lease was changed by hand, and nobody holds it.
    update ulak.queue q
    set lease_until = p_now
    where q.id in (
        select n.id
        from ulak.queue n
        where n.status = 'processing' and n.lease_until is null
        for update skip locked
    );

    select array_agg(s.id), array_agg(s.attempts), array_agg(s.locked_by) into v_ids, v_attempts, v_workers
    from (
        select q.id, q.attempts, q.locked_by
        from ulak.queue q
        where q.status = 'processing' and q.lease_until <= p_now
        order by q.endpoint_id, q.lease_until
        limit p_limit
        for update skip locked
    ) s;
    if v_ids is null then
        return 0;
    end if;

    select
        count(*),
        array_agg(f.ordering_key) filter (where f.is_dead and f.ordering_key is not null),
        array_agg(f.endpoint_id) filter (where f.is_dead and f.ordering_key is not null),
        array_agg(f.id) filter (where f.is_dead)
    into v_recovered, v_keys, v_endpoint_ids, v_dead
    from ulak._fail_rows(
        v_workers,
        v_ids,
        v_attempts,
        array(select format('[RETRYABLE] lease expired: worker "%s" went silent', coalesce(w, 'nobody')) from unnest(v_workers) w),
        null,
        null,
        p_now
    ) f;
    if v_keys is not null then
        perform ulak._promote_heads(v_endpoint_ids, v_keys, p_now);
    end if;
    if v_dead is not null then
        perform ulak._announce_dead(v_dead, p_now);
    end if;
    return v_recovered;
end
$plpgsql$;

comment on function ulak.recover_stale_messages(timestamptz, integer) is
    'takes back messages whose lease ran out and retries them as failures; returns how many';

create or replace function ulak.mark_expired_messages(
    p_now timestamptz default clock_timestamp(),
    p_limit integer default 10000
)
returns integer
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
as $plpgsql$
declare
    v_expired integer;
    v_keys text[];
    v_endpoint_ids bigint[];
begin
    with late as (
        select q.id
        from ulak.queue q
        where q.status = 'pending' and q.expires_at <= p_now
        order by q.expires_at
        limit p_limit
        for update skip locked
    ),
    expired as (
        update ulak.queue q
        set status = 'expired', updated_at = p_now
        from late l
        where q.id between l.id and l.id
        returning q.endpoint_id, q.ordering_key
    )
    select
        count(*),
        array_agg(e.ordering_key) filter (where e.ordering_key is not null),
        array_agg(e.endpoint_id) filter (where e.ordering_key is not null)
    into v_expired, v_keys, v_endpoint_ids
    from expired e;
    if v_keys is not null then
        perform ulak._promote_heads(v_endpoint_ids, v_keys, p_now);
    end if;
    return v_expired;
end
$plpgsql$;

comment on function ulak.mark_expired_messages(timestamptz, integer) is
    'marks waiting messages whose expires_at has passed as expired: they are never delivered; returns how many';
-- The dead-letter queue: burying messages, and bringing them back.

-- Copies messages that have just failed for good, and logs them.
create or replace function ulak._bury(p_ids bigint[], p_now timestamptz)
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
as $plpgsql$
declare
    v_dead record;
begin
    insert into ulak.dlq (
        original_message_id,
        endpoint_id,
        endpoint_name,
        protocol,
        message_id,
        original_created_at,
        failed_at,
        archived_at,
        first_failed_at,
        scheduled_at,
        expires_at,
        correlation_id,
        generation,
        attempts,
        retry_count,
        priority,
        payload,
        last_error,
        idempotency_key,
        payload_hash,
        ordering_key,
        headers,
        metadata,
        response,
        failure_history
    )
    select
        q.id,
        q.endpoint_id,
        coalesce(e.name, '(dropped)'),
        coalesce(e.protocol, '(dropped)'),
        q.message_id,
        q.created_at,
        q.failed_at,
        p_now,
        q.first_failed_at,
        q.scheduled_at,
        q.expires_at,
        q.correlation_id,
        q.generation,
        q.attempts,
        q.retry_count,
        q.priority,
        q.payload,
        q.last_error,
        q.idempotency_key,
        q.payload_hash,
        q.ordering_key,
        q.headers,
        q.metadata,
        q.response,
        q.failure_history
    from ulak.queue q
    left join ulak.endpoints e on e.id = q.endpoint_id
    where q.id = any (p_ids)
    order by q.id;

    insert into ulak.event_log (event, endpoint_id, endpoint_name, message_id, detail, created_at)
    select
        'message.dead',
        q.endpoint_id,
        e.name,
        q.id,
        jsonb_build_object('attempts', q.attempts, 'error', q.last_error),
        p_now
    from ulak.queue q
    left join ulak.endpoints e on e.id = q.endpoint_id
    where q.id = any (p_ids)
    order by q.id;

    for v_dead in
        select q.id, e.name as endpoint, q.attempts, q.last_error
        from ulak.queue q
        left join ulak.endpoints e on e.id = q.endpoint_id
        where q.id = any (p_ids)
        order by q.id
    loop
        raise log 'ulak: dead letter: %', jsonb_build_object(
            'message', v_dead.id,
            'endpoint', v_dead.endpoint,
            'attempts', v_dead.attempts,
            'error', v_dead.last_error
        );
    end loop;
    perform ulak._tell_dead(p_ids, p_now);
end
$plpgsql$;

-- What dead messages mean for their endpoints. The last step of every caller: it locks endpoints.
create or replace function ulak._announce_dead(p_ids bigint[], p_now timestamptz)
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
as $plpgsql$
declare
    v_dead record;
    v_endpoint ulak.endpoints;
begin
    for v_dead in
        select
            q.endpoint_id,
            count(*) as messages,
            max(q.id) as last_id,
            bool_or(starts_with(q.last_error, '[DISABLE]')) as is_gone
        from ulak.queue q
        where q.id = any (p_ids)
        group by q.endpoint_id
        order by q.endpoint_id
    loop
        v_endpoint := ulak._lock_endpoint(v_dead.endpoint_id);
        -- A receiver that says 410 Gone wants no more.
        if v_dead.is_gone and v_endpoint.enabled and (v_endpoint.config -> 'auto_disable_on_gone')::boolean then
            perform ulak._switch_endpoint(v_endpoint, false, null, 'the receiver answered 410 Gone', p_now);
        end if;
        -- At most once a second and endpoint: NOTIFY takes a lock that all databases of the server share.
        if v_endpoint.id is not null and coalesce(v_endpoint.dead_notified_at, '-infinity') <= p_now - interval '1 second' then
            update ulak.endpoints e
            set dead_notified_at = p_now
            where e.id = v_endpoint.id;
            perform pg_notify(
                'ulak_events',
                jsonb_build_object(
                    'event', 'message.dead',
                    'endpoint', v_endpoint.name,
                    'messages', v_dead.messages,
                    'last', v_dead.last_id
                )::text
            );
        end if;
    end loop;
end
$plpgsql$;

create or replace function ulak.archive_single_to_dlq(
    p_message_id bigint,
    p_reason text default null,
    p_now timestamptz default clock_timestamp()
)
returns bigint
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_message record;
begin
    update ulak.queue q
    set status = 'failed',
        failed_at = p_now,
        first_failed_at = coalesce(q.first_failed_at, p_now),
        updated_at = p_now,
        last_error = coalesce('[PERMANENT] ' || p_reason, q.last_error, '[PERMANENT] taken out by ' || session_user)
    where q.id = p_message_id and q.status is not distinct from 'pending'
    returning q.endpoint_id, q.ordering_key into v_message;
    if not found then
        perform ulak._raise_not_waiting(p_message_id);
    end if;
    perform ulak._bury(array[p_message_id], p_now);
    if v_message.ordering_key is not null then
        perform ulak._promote_heads(array[v_message.endpoint_id], array[v_message.ordering_key], p_now);
    end if;
    perform ulak._announce_dead(array[p_message_id], p_now);
    return (select max(d.id) from ulak.dlq d where d.original_message_id = p_message_id);
end
$plpgsql$;

comment on function ulak.archive_single_to_dlq(bigint, text, timestamptz) is
    'takes one waiting message out of the queue into the dead-letter queue and returns its id there';

create or replace function ulak._raise_not_waiting(p_message_id bigint)
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_status text := (select q.status from ulak.queue q where q.id = p_message_id);
begin
    if v_status is null then
        raise exception 'message % is not in the queue', p_message_id
            using errcode = 'P0002', hint = format('select * from ulak.archive where id = %s;', p_message_id);
    end if;
    raise exception 'message % is not waiting', p_message_id
        using errcode = '55000', detail = format('Its status is %s.', v_status);
end
$plpgsql$;

create or replace function ulak.dlq_summary()
returns table (
    endpoint text,
    failed bigint,
    redriven bigint,
    oldest timestamptz,
    newest timestamptz
)
language sql
stable
security definer
set search_path = pg_catalog, pg_temp
as $sql$
    select
        d.endpoint_name,
        count(*) filter (where d.status = 'failed'),
        count(*) filter (where d.status = 'redriven'),
        min(d.failed_at),
        max(d.failed_at)
    from ulak.dlq d
    group by d.endpoint_name
    order by 2 desc, 1
$sql$;

comment on function ulak.dlq_summary() is 'dead letters per endpoint: waiting for a decision, redriven, and their time range';

create or replace function ulak.mark_handled(p_consumer text, p_key text)
returns boolean
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    if p_consumer is null or p_key is null then
        raise exception 'consumer and key must not be null' using errcode = '22004';
    end if;
    perform ulak._check_key('consumer', p_consumer);
    perform ulak._check_key('key', p_key);
    insert into ulak.handled (consumer, key)
    values (p_consumer, p_key)
    on conflict do nothing;
    return found;
end
$plpgsql$;

comment on function ulak.mark_handled(text, text) is
    'a consumer''s inbox: true the first time a key is seen, false ever after; part of the caller''s transaction';
-- Redrive: dead letters go back into the queue as new messages.

create or replace function ulak.redrive_message(
    p_dlq_id bigint,
    p_by text default session_user,
    p_now timestamptz default clock_timestamp()
)
returns bigint
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_letter ulak.dlq;
begin
    if ulak._redrive_rows(array[p_dlq_id], null, p_by, null, p_now) = 1 then
        return (select d.redriven_message_id from ulak.dlq d where d.id = p_dlq_id);
    end if;
    select d.* into v_letter
    from ulak.dlq d
    where d.id = p_dlq_id;
    if not found then
        raise exception 'dead letter % does not exist', p_dlq_id
            using errcode = 'P0002', hint = 'select * from ulak.dlq_summary();';
    elsif v_letter.status = 'failed' then
        raise exception 'the endpoint of dead letter % does not exist', p_dlq_id
            using errcode = '42704',
                detail = format('It was "%s".', v_letter.endpoint_name),
                hint = 'Send its payload to another endpoint with ulak.send().';
    end if;
    raise exception 'dead letter % was redriven already', p_dlq_id
        using errcode = '55000',
            detail = format(
                'By %s at %s, as message %s.',
                v_letter.redriven_by,
                v_letter.redriven_at,
                v_letter.redriven_message_id
            );
end
$plpgsql$;

comment on function ulak.redrive_message(bigint, text, timestamptz) is
    'puts one dead letter back into the queue with a fresh retry budget and returns its new message id';

create or replace function ulak.redrive_endpoint(p_name text)
returns integer
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    if p_name is null then
        perform ulak._raise_unknown_endpoint(p_name);
    end if;
    return (select r.messages from ulak.redrive(p_endpoint => p_name) r);
end
$plpgsql$;

comment on function ulak.redrive_endpoint(text) is
    'puts all dead letters of an endpoint back into the queue, in the order they were created; returns how many';

create or replace function ulak.redrive_all()
returns integer
language sql
security definer
set search_path = pg_catalog, pg_temp
as $sql$
    select r.messages from ulak.redrive() r
$sql$;

comment on function ulak.redrive_all() is 'puts all dead letters back into the queue; returns how many';

create or replace function ulak.redrive(
    p_endpoint text default null,
    p_since timestamptz default null,
    p_until timestamptz default null,
    p_error_like text default null,
    p_filter jsonpath default null,
    p_limit integer default null,
    p_rate double precision default null,
    p_dry_run boolean default false,
    p_by text default session_user,
    p_new_generation bigint default null,
    p_now timestamptz default clock_timestamp()
)
returns table (messages integer, sample jsonb, command text)
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_ids bigint[];
begin
    if p_limit < 1 or p_rate <= 0 then
        raise exception 'limit and rate must be above 0'
            using errcode = '22023', detail = format('The limit is %s, the rate is %s.', p_limit, p_rate);
    end if;
    if p_endpoint is not null then
        perform ulak._wait_for_endpoint(p_endpoint);
    end if;
    v_ids := array(
        select d.id
        from ulak.dlq d
        join ulak.endpoints e on e.id = d.endpoint_id
        where d.status = 'failed'
            and (p_endpoint is null or e.name = p_endpoint)
            and (p_since is null or d.failed_at >= p_since)
            and (p_until is null or d.failed_at < p_until)
            and (p_error_like is null or d.last_error like p_error_like)
            and (p_filter is null or jsonb_path_exists(d.payload, p_filter, silent => true))
        order by d.original_message_id
        limit p_limit
    );
    messages := cardinality(v_ids);
    sample := (
        select jsonb_agg(
            jsonb_build_object(
                'dlq_id', d.id,
                'endpoint', d.endpoint_name,
                'failed_at', d.failed_at,
                'last_error', d.last_error
            )
            order by d.original_message_id
        )
        from ulak.dlq d
        where d.id = any (v_ids[1:5])
    );
    if p_dry_run then
        command := ulak._redrive_command(
            p_endpoint, p_since, p_until, p_error_like, p_filter, p_limit, p_rate, p_by, p_new_generation
        );
    elsif messages > 0 then
        messages := ulak._redrive_rows(v_ids, p_rate, p_by, p_new_generation, p_now);
    end if;
    return next;
end
$plpgsql$;

comment on function ulak.redrive(
    text, timestamptz, timestamptz, text, jsonpath, integer, double precision, boolean, text, bigint, timestamptz
) is
    'puts the dead letters that match all filters back into the queue, at p_rate a second if given; '
    'with p_dry_run it only counts them, shows a sample and the command to run';

-- The call that a dry run stands for.
create or replace function ulak._redrive_command(
    p_endpoint text,
    p_since timestamptz,
    p_until timestamptz,
    p_error_like text,
    p_filter jsonpath,
    p_limit integer,
    p_rate double precision,
    p_by text,
    p_new_generation bigint
)
returns text
language sql
stable
as $sql$
    select format('select * from ulak.redrive(%s);', string_agg(format('%s => %L', a.name, a.value), ', ' order by a.place))
    from unnest(
        array[
            'p_endpoint', 'p_since', 'p_until', 'p_error_like', 'p_filter', 'p_limit', 'p_rate', 'p_by', 'p_new_generation'
        ],
        array[
            p_endpoint,
            p_since::text,
            p_until::text,
            p_error_like,
            p_filter::text,
            p_limit::text,
            p_rate::text,
            p_by,
            p_new_generation::text
        ]
    ) with ordinality a(name, value, place)
    where a.value is not null
$sql$;

-- The guarded update is the lock: of two operators only one sees status 'failed'. New ids are drawn in the order the
-- messages were created, under the locks of their ordering keys.
create or replace function ulak._redrive_rows(
    p_dlq_ids bigint[],
    p_rate double precision,
    p_by text,
    p_new_generation bigint,
    p_now timestamptz
)
returns integer
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_dlq_ids bigint[];
    v_new_ids bigint[];
    v_count integer;
    v_endpoint_ids bigint[];
    v_keys text[];
begin
    perform ulak._lock_for_requeue(array_agg(d.endpoint_id), array_agg(d.ordering_key))
    from ulak.dlq d
    where d.id = any (p_dlq_ids);
    v_dlq_ids := array(
        select d.id
        from ulak.dlq d
        join ulak.endpoints e on e.id = d.endpoint_id
        where d.id = any (p_dlq_ids) and d.status = 'failed'
        order by d.original_message_id
        for update of d
    );
    v_count := cardinality(v_dlq_ids);
    if v_count = 0 then
        return 0;
    end if;
    v_new_ids := array(select nextval('ulak.queue_id_seq') from generate_series(1, v_count));
    perform ulak._require_room(v_new_ids[v_count], v_count);

    with numbered as materialized (
        select n.*
        from unnest(v_dlq_ids, v_new_ids) with ordinality n(id, new_id, place)
    ),
    marked as (
        update ulak.dlq d
        set status = 'redriven', redriven_at = p_now, redriven_by = p_by, redriven_message_id = n.new_id
        from numbered n
        where d.id = n.id
        returning d.*
    ),
    queued as (
        insert into ulak.queue (
            id,
            endpoint_id,
            message_id,
            payload,
            priority,
            scheduled_at,
            next_retry_at,
            created_at,
            updated_at,
            correlation_id,
            ordering_key,
            generation,
            headers,
            metadata,
            failure_history
        )
        select
            m.redriven_message_id,
            m.endpoint_id,
            m.message_id,
            m.payload,
            m.priority,
            t.scheduled_at,
            case when m.ordering_key is null then coalesce(t.scheduled_at, p_now) else 'infinity' end,
            p_now,
            p_now,
            m.correlation_id,
            m.ordering_key,
            coalesce(p_new_generation, m.generation),
            m.headers,
            m.metadata,
            ulak._with_cycle(m)
        from marked m
        join numbered n on n.id = m.id
        cross join lateral (select p_now + make_interval(secs => (n.place - 1) / p_rate)) t(scheduled_at)
        returning endpoint_id, ordering_key
    ),
    logged as (
        insert into ulak.event_log (event, endpoint_id, endpoint_name, message_id, detail, created_at)
        select
            'message.redriven',
            m.endpoint_id,
            m.endpoint_name,
            m.redriven_message_id,
            jsonb_build_object('dlq_id', m.id, 'original_message_id', m.original_message_id, 'by', p_by),
            p_now
        from marked m
    )
    select array_agg(q.endpoint_id), array_agg(q.ordering_key) into v_endpoint_ids, v_keys
    from queued q
    where q.ordering_key is not null;

    if v_keys is not null then
        perform ulak._promote_heads(v_endpoint_ids, v_keys, p_now);
    end if;
    return v_count;
end
$plpgsql$;

-- The locks that send() takes, for many messages at once and always in the same order.
create or replace function ulak._lock_for_requeue(p_endpoint_ids bigint[], p_keys text[])
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_locks integer[] := array(
        select distinct ulak._ordering_lock(u.endpoint_id, u.ordering_key)
        from unnest(p_endpoint_ids, p_keys) u(endpoint_id, ordering_key)
        where u.ordering_key is not null
        order by 1
    );
begin
    perform ulak._check_ordering_keys(cardinality(v_locks));
    perform pg_advisory_xact_lock_shared(hashtext('ulak_endpoint_id'), t.endpoint_id::integer)
    from (select distinct u.endpoint_id from unnest(p_endpoint_ids) u(endpoint_id) order by 1) t;
    perform pg_advisory_xact_lock(hashtext('ulak_key'), l)
    from unnest(v_locks) l;
end
$plpgsql$;

-- The history of a message with its last cycle added; the newest 20 are kept.
create or replace function ulak._with_cycle(p_letter ulak.dlq)
returns jsonb
language sql
stable
as $sql$
    select jsonb_agg(c.cycle order by c.place)
    from (
        select h.cycle, h.place
        from jsonb_array_elements(
            coalesce(p_letter.failure_history, '[]') || jsonb_build_array(
                jsonb_build_object(
                    'attempts', p_letter.attempts,
                    'retry_count', p_letter.retry_count,
                    'last_error', p_letter.last_error,
                    'first_failed_at', p_letter.first_failed_at,
                    'failed_at', p_letter.failed_at,
                    'generation', p_letter.generation,
                    'redriven_at', p_letter.redriven_at,
                    'redriven_by', p_letter.redriven_by
                )
            )
        ) with ordinality h(cycle, place)
        order by h.place desc
        limit 20
    ) c
$sql$;
-- Operator events: what happens to endpoints and messages, delivered by ulak itself to whoever subscribes.

-- They are code, not data: a dump leaves them out, and an upgrade brings new ones.
insert into ulak.event_types as t (name, description, created_at)
values
    ('ulak.endpoint.opened', 'the circuit of an endpoint opened: deliveries to it pause', '-infinity'),
    ('ulak.endpoint.closed', 'the circuit of an endpoint closed again', '-infinity'),
    ('ulak.endpoint.disabled', 'an endpoint was disabled, by an administrator or because it answered 410 Gone', '-infinity'),
    ('ulak.message.dead', 'a message became a dead letter', '-infinity')
on conflict (name) do update set description = excluded.description;

create or replace function ulak._has_subscribers(p_event_type text)
returns boolean
language sql
stable
as $sql$
    select exists (select from ulak.subscriptions s where s.event_type = p_event_type)
$sql$;

-- One event about each of some endpoints: element i of the arrays is one event. Never to the endpoint that it is about, and
-- without a wait or an error that would hold up a settle: if the queue is full or a receiver is just being dropped, the
-- log says that it was left out. metadata marks such messages, so that nothing is told about their own fate.
create or replace function ulak._tell_operators(
    p_event_type text,
    p_endpoint_ids bigint[],
    p_payloads jsonb[],
    p_now timestamptz
)
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_receivers bigint[];
    v_payloads jsonb[];
    v_ids bigint[];
begin
    select array_agg(r.id order by v.place, r.id), array_agg(v.payload order by v.place, r.id)
    into v_receivers, v_payloads
    from unnest(p_endpoint_ids, p_payloads) with ordinality v(endpoint_id, payload, place)
    cross join lateral unnest(ulak._subscribed_endpoints(p_event_type, v.payload)) r(id)
    where r.id <> v.endpoint_id
        and pg_try_advisory_xact_lock_shared(hashtext('ulak_endpoint_id'), r.id::integer);
    if v_receivers is null then
        return;
    end if;
    v_ids := array(select nextval('ulak.queue_id_seq') from generate_series(1, cardinality(v_receivers)));
    if ulak._has_room(v_ids[cardinality(v_ids)]) is not true then
        begin
            perform ulak._require_room(v_ids[cardinality(v_ids)], cardinality(v_ids));
        exception
            when configuration_limit_exceeded then
                raise log 'ulak: the queue is full: % event(s) % were not sent', cardinality(v_ids), p_event_type;
                insert into ulak.event_log (event, detail, created_at)
                values (
                    'operator_event.skipped',
                    jsonb_build_object('event_type', p_event_type, 'messages', cardinality(v_ids), 'reason', sqlerrm),
                    p_now
                );
                return;
        end;
    end if;
    insert into ulak.queue (id, endpoint_id, payload, metadata, next_retry_at, created_at, updated_at)
    select m.id, e.id, m.payload, jsonb_build_object('event_type', p_event_type), p_now, p_now, p_now
    from unnest(v_ids, v_receivers, v_payloads) m(id, endpoint_id, payload)
    join ulak.endpoints e on e.id = m.endpoint_id;
end
$plpgsql$;

-- The breaker calls it at every transition; a probe that failed again is none that operators need to hear of.
create or replace function ulak._tell_circuit(p_endpoint ulak.endpoints, p_new_state text, p_now timestamptz)
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_event_type text := case
        when p_new_state = 'open' and p_endpoint.circuit_state = 'closed' then 'ulak.endpoint.opened'
        when p_new_state = 'closed' and p_endpoint.circuit_state <> 'closed' then 'ulak.endpoint.closed'
    end;
begin
    if v_event_type is not null and ulak._has_subscribers(v_event_type) then
        perform ulak._tell_operators(
            v_event_type,
            array[p_endpoint.id],
            array[jsonb_strip_nulls(jsonb_build_object(
                'type', v_event_type,
                'at', p_now,
                'endpoint', p_endpoint.name,
                'failures', p_endpoint.circuit_failure_count,
                'error', case when p_new_state = 'open' then p_endpoint.last_error end
            ))],
            p_now
        );
    end if;
end
$plpgsql$;

create or replace function ulak._tell_disabled(p_endpoint ulak.endpoints, p_reason text, p_now timestamptz)
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    if ulak._has_subscribers('ulak.endpoint.disabled') then
        perform ulak._tell_operators(
            'ulak.endpoint.disabled',
            array[p_endpoint.id],
            array[jsonb_build_object(
                'type', 'ulak.endpoint.disabled', 'at', p_now, 'endpoint', p_endpoint.name, 'reason', p_reason
            )],
            p_now
        );
    end if;
end
$plpgsql$;

create or replace function ulak._tell_dead(p_ids bigint[], p_now timestamptz)
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
as $plpgsql$
declare
    v_endpoint_ids bigint[];
    v_payloads jsonb[];
begin
    if not ulak._has_subscribers('ulak.message.dead') then
        return;
    end if;
    select
        array_agg(q.endpoint_id order by q.id),
        array_agg(
            jsonb_build_object(
                'type', 'ulak.message.dead',
                'at', p_now,
                'endpoint', e.name,
                'message', q.id,
                'message_id', q.message_id,
                'attempts', q.attempts,
                'error', q.last_error
            )
            order by q.id
        )
    into v_endpoint_ids, v_payloads
    from ulak.queue q
    left join ulak.endpoints e on e.id = q.endpoint_id
    where q.id = any (p_ids) and not coalesce(starts_with(q.metadata ->> 'event_type', 'ulak.'), false);
    if v_payloads is not null then
        perform ulak._tell_operators('ulak.message.dead', v_endpoint_ids, v_payloads, p_now);
    end if;
end
$plpgsql$;
-- Archiving: finished messages leave the queue, oldest first.

-- One statement deletes and inserts, so a message is in one of both tables at any time and after any crash. Rows are
-- found in index order and deleted by their address: no plan that depends on statistics. p_after is where the batch
-- before has ended, so that a batch doesn't walk over the corpses of all earlier ones while vacuum is held back.
create or replace function ulak._archive_batch(
    p_before timestamptz,
    p_after timestamptz,
    p_limit integer,
    p_now timestamptz,
    out moved integer,
    out reached timestamptz
)
language sql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set enable_sort = off
set jit = off
as $sql$
    with finished as (
        delete from ulak.queue d
        where d.ctid = any (array(
            select q.ctid
            from ulak.queue q
            where q.status in ('completed', 'failed', 'expired')
                and q.updated_at >= p_after
                and q.updated_at < p_before
            order by q.updated_at
            limit p_limit
            for update skip locked
        ))
        returning d.*
    ),
    archived as (
        insert into ulak.archive (
            id,
            endpoint_id,
            message_id,
            next_retry_at,
            created_at,
            updated_at,
            lease_until,
            processing_started_at,
            completed_at,
            failed_at,
            first_failed_at,
            scheduled_at,
            expires_at,
            correlation_id,
            generation,
            attempts,
            retry_count,
            priority,
            status,
            payload,
            locked_by,
            last_error,
            idempotency_key,
            payload_hash,
            ordering_key,
            headers,
            metadata,
            response,
            failure_history,
            archived_at
        )
        select
            f.id,
            f.endpoint_id,
            f.message_id,
            f.next_retry_at,
            f.created_at,
            f.updated_at,
            f.lease_until,
            f.processing_started_at,
            f.completed_at,
            f.failed_at,
            f.first_failed_at,
            f.scheduled_at,
            f.expires_at,
            f.correlation_id,
            f.generation,
            f.attempts,
            f.retry_count,
            f.priority,
            f.status,
            f.payload,
            f.locked_by,
            f.last_error,
            f.idempotency_key,
            f.payload_hash,
            f.ordering_key,
            f.headers,
            f.metadata,
            f.response,
            f.failure_history,
            p_now
        from finished f
        returning archive.updated_at
    )
    select count(*)::integer, max(a.updated_at)
    from archived a
$sql$;

create or replace function ulak.archive_completed_messages(
    p_older_than_seconds integer default 3600,
    p_batch_size integer default 1000,
    p_now timestamptz default clock_timestamp()
)
returns integer
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_age integer := coalesce(p_older_than_seconds, ulak.setting('archive_after')::integer);
begin
    if v_age < 0 then
        raise exception 'p_older_than_seconds must not be negative, got %', v_age
            using errcode = '22023', hint = 'select ulak.archive_completed_messages(3600);';
    end if;
    perform ulak._require_positive('p_batch_size', p_batch_size);
    return b.moved
    from ulak._archive_batch(p_now - make_interval(secs => v_age), '-infinity', p_batch_size, p_now) b;
end
$plpgsql$;

comment on function ulak.archive_completed_messages(integer, integer, timestamptz) is
    'moves up to p_batch_size messages that finished p_older_than_seconds ago (null: setting archive_after) to ulak.archive; returns how many';

create or replace function ulak._require_positive(p_name text, p_value integer)
returns void
language plpgsql
immutable
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    if p_value is null or p_value < 1 then
        raise exception '% must be 1 or more, got %', p_name, coalesce(p_value::text, 'null') using errcode = '22023';
    end if;
end
$plpgsql$;
-- The archive's months: made ahead of time, filled from the default partition where needed, dropped when old.

-- Months begin at midnight UTC whatever the session's time zone; functions that compute one set it for themselves.
-- Writers lock ulak.archive first and a partition next, and so does everything here. Nothing here waits for a lock
-- longer than lock_timeout, because all who come later would wait behind it: maintenance tries again a minute later.

create or replace view ulak._archive_partitions as
select
    c.oid as relation,
    c.relname::text as name,
    to_timestamp(c.relname || ' 00 +00', '"archive_"YYYY_MM HH24 TZH') as month
from pg_catalog.pg_inherits i
join pg_catalog.pg_class c on c.oid = i.inhrelid
where i.inhparent = 'ulak.archive'::regclass
    and c.relname ~ '^archive_[0-9]{4}_[0-9]{2}$';

comment on view ulak._archive_partitions is 'the months that ulak.archive has; private to ulak';
comment on column ulak._archive_partitions.relation is 'the partition';
comment on column ulak._archive_partitions.name is 'archive_YYYY_MM';
comment on column ulak._archive_partitions.month is 'its first instant';

create or replace function ulak.maintain_archive_partitions(
    p_months_ahead integer default 3,
    p_now timestamptz default clock_timestamp()
)
returns integer
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_month timestamptz;
    v_made integer := 0;
begin
    if p_months_ahead is null or p_months_ahead not between 0 and 120 then
        raise exception 'p_months_ahead must be between 0 and 120, got %', coalesce(p_months_ahead::text, 'null')
            using errcode = '22023';
    end if;
    for v_month in select m from ulak._missing_archive_months(p_months_ahead, p_now) m loop
        v_made := v_made + ulak._make_archive_partition(v_month);
    end loop;
    return v_made;
end
$plpgsql$;

comment on function ulak.maintain_archive_partitions(integer, timestamptz) is
    'makes the archive''s partitions of this month, the next ones, and those of messages in archive_default, which move '
    'there; returns how many';

-- This month and the next ones, those that maintenance slept through (a year at most), and those found in the default.
create or replace function ulak._missing_archive_months(p_months_ahead integer, p_now timestamptz)
returns setof timestamptz
language sql
stable
set search_path = pg_catalog, pg_temp
set timezone = 'UTC'
set lock_timeout = '500ms'
as $sql$
    with this as (
        select date_trunc('month', p_now) as month
    ),
    wanted as (
        select generate_series(
            greatest(
                t.month - interval '12 months',
                least(t.month, (select max(p.month) + interval '1 month' from ulak._archive_partitions p))
            ),
            t.month + make_interval(months => p_months_ahead),
            interval '1 month'
        ) as month
        from this t
        union
        select date_trunc('month', d.created_at)
        from ulak.archive_default d
        where isfinite(d.created_at)
    )
    select w.month
    from wanted w
    where not exists (select from ulak._archive_partitions p where p.month = w.month)
    order by w.month
$sql$;

create or replace function ulak._make_archive_partition(p_month timestamptz)
returns integer
language plpgsql
strict
set search_path = pg_catalog, pg_temp
set timezone = 'UTC'
set datestyle = 'ISO'
set lock_timeout = '500ms'
as $plpgsql$
declare
    v_name text := to_char(p_month, '"archive_"YYYY_MM');
    v_end timestamptz := p_month + interval '1 month';
begin
    -- Two at once: the second finds the month made. Writers of other months don't notice any of this.
    lock table only ulak.archive in share update exclusive mode;
    if exists (select from ulak._archive_partitions p where p.name = v_name) then
        return 0;
    end if;
    perform ulak._create_archive_table(v_name, p_month, v_end);

    -- No row of this month may enter the default partition between the move and the attachment.
    lock table ulak.archive_default in share row exclusive mode;
    if exists (select from ulak.archive_default d where d.created_at >= p_month and d.created_at < v_end) then
        perform ulak._move_from_default(v_name, p_month, v_end);
        -- A query that was planned without the new partition must not run once its rows have left the default.
        lock table only ulak.archive in access exclusive mode;
    end if;
    -- The check constraint spares this a scan of the new partition.
    execute format('alter table ulak.archive attach partition ulak.%I for values from (%L) to (%L)', v_name, p_month, v_end);
    execute format('alter table ulak.%I drop constraint archive_month', v_name);
    return 1;
exception
    when lock_not_available then
        perform ulak._raise_archive_is_busy(format('Partition %s was not made.', v_name));
end
$plpgsql$;

create or replace function ulak._create_archive_table(p_name text, p_from timestamptz, p_to timestamptz)
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    if to_regclass(format('ulak.%I', p_name)) is not null then
        raise exception 'table ulak.% exists but is no partition of ulak.archive', p_name
            using errcode = '42P07',
                hint = format(
                    'alter table ulak.archive attach partition ulak.%1$I for values from (%2$L) to (%3$L); '
                    'or: alter table ulak.%1$I rename to %4$I;',
                    p_name, p_from, p_to, p_name || '_old'
                );
    end if;
    execute format(
        'create table ulak.%I (like ulak.archive including all excluding indexes, '
        'constraint archive_month check (created_at >= %L and created_at < %L))',
        p_name, p_from, p_to
    );
    -- Unnamed: PostgreSQL finds names that are free, whatever indexes an administrator has given the parent.
    execute format(
        'create index on ulak.%I using brin (created_at) with (pages_per_range = 64, autosummarize = on)', p_name
    );
    execute format('create index on ulak.%I (id)', p_name);
end
$plpgsql$;

create or replace function ulak._move_from_default(p_name text, p_from timestamptz, p_to timestamptz)
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    execute format(
        $sql$
            with moved as (
                delete from ulak.archive_default d
                where d.created_at >= $1 and d.created_at < $2
                returning d.*
            )
            insert into ulak.%I
            select m.* from moved m
        $sql$,
        p_name
    )
    using p_from, p_to;
end
$plpgsql$;

create or replace function ulak.cleanup_old_archive_partitions(
    p_retention_months integer default null,
    p_now timestamptz default clock_timestamp()
)
returns integer
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_months integer := coalesce(p_retention_months, ulak.setting('archive_retention_months')::integer);
    v_month timestamptz;
    v_dropped integer := 0;
begin
    perform ulak._require_positive('p_retention_months', v_months);
    for v_month in select m from ulak._old_archive_months(v_months, p_now) m loop
        v_dropped := v_dropped + ulak._drop_archive_partition(v_month);
    end loop;
    return v_dropped;
end
$plpgsql$;

comment on function ulak.cleanup_old_archive_partitions(integer, timestamptz) is
    'drops the archive''s months that ended p_retention_months (null: setting archive_retention_months) before this '
    'month began; returns how many';

-- With 6 months in July: December and all before it.
create or replace function ulak._old_archive_months(p_retention_months integer, p_now timestamptz)
returns setof timestamptz
language sql
stable
set search_path = pg_catalog, pg_temp
set timezone = 'UTC'
as $sql$
    select p.month
    from ulak._archive_partitions p
    where p.month < date_trunc('month', p_now) - make_interval(months => p_retention_months)
    order by p.month
$sql$;

create or replace function ulak._drop_archive_partition(p_month timestamptz)
returns integer
language plpgsql
strict
set search_path = pg_catalog, pg_temp
set timezone = 'UTC'
set lock_timeout = '500ms'
as $plpgsql$
declare
    v_name text := to_char(p_month, '"archive_"YYYY_MM');
    v_rows bigint := (select c.reltuples from pg_catalog.pg_class c where c.oid = format('ulak.%I', v_name)::regclass);
begin
    -- Held for the change of the catalog only: files are removed after commit, when locks are gone.
    lock table only ulak.archive in access exclusive mode;
    execute format('drop table ulak.%I', v_name);
    insert into ulak.event_log (event, detail)
    values ('archive.dropped', jsonb_build_object('partition', v_name, 'rows_about', greatest(v_rows, 0)));
    return 1;
exception
    when lock_not_available then
        perform ulak._raise_archive_is_busy(format('Partition %s was not dropped.', v_name));
end
$plpgsql$;

create or replace function ulak._raise_archive_is_busy(p_detail text)
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    raise exception 'ulak.archive is in use'
        using errcode = '55P03',
            detail = p_detail,
            hint = 'Maintenance tries again every minute. Who uses it: select pid, mode, relation::regclass '
                'from pg_locks where relation::regclass::text like ''ulak.archive%'';';
end
$plpgsql$;
-- Replay: archived messages go into the queue once more, as new messages.

create or replace function ulak.replay_message(
    p_archive_id bigint,
    p_new_message_id boolean default false,
    p_now timestamptz default clock_timestamp()
)
returns bigint
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_message record;
    v_endpoint_name text;
    v_new_id bigint;
begin
    select a.endpoint_id, a.created_at into v_message
    from ulak.archive a
    where a.id = p_archive_id;
    if not found then
        perform ulak._raise_not_archived(p_archive_id);
    end if;
    v_endpoint_name := ulak._lock_endpoint_for_replay(v_message.endpoint_id);
    v_new_id := (
        ulak._replay(
            v_message.endpoint_id,
            array[p_archive_id],
            v_message.created_at,
            v_message.created_at,
            p_new_message_id,
            p_now
        )
    )[1];
    insert into ulak.event_log (event, endpoint_id, endpoint_name, message_id, detail)
    values (
        'message.replayed',
        v_message.endpoint_id,
        v_endpoint_name,
        v_new_id,
        jsonb_build_object('archive_id', p_archive_id, 'new_message_id', p_new_message_id)
    );
    return v_new_id;
end
$plpgsql$;

comment on function ulak.replay_message(bigint, boolean, timestamptz) is
    'queues an archived message again under a new id, which it returns; with its message_id, so that a receiver can drop '
    'it, or with a new one';

create or replace function ulak.replay_range(
    p_endpoint_id bigint,
    p_from_ts timestamptz,
    p_to_ts timestamptz,
    p_status text default null,
    p_new_message_id boolean default false,
    p_limit integer default null,
    p_dry_run boolean default false,
    p_now timestamptz default clock_timestamp()
)
returns integer
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_endpoint_name text;
    v_found record;
    v_new_ids bigint[];
begin
    perform ulak._check_replay(p_from_ts, p_to_ts, p_status, p_limit);
    v_endpoint_name := ulak._lock_endpoint_for_replay(p_endpoint_id);
    select coalesce(array_agg(f.id order by f.id), '{}') as ids, min(f.created_at) as first, max(f.created_at) as last
    into v_found
    from (
        select a.id, a.created_at
        from ulak.archive a
        where a.endpoint_id = p_endpoint_id
            and a.created_at >= p_from_ts
            and a.created_at < p_to_ts
            and (p_status is null or a.status = p_status)
        order by a.id
        limit p_limit
    ) f;
    if p_dry_run or v_found.ids = '{}' then
        return cardinality(v_found.ids);
    end if;

    v_new_ids := ulak._replay(p_endpoint_id, v_found.ids, v_found.first, v_found.last, p_new_message_id, p_now);
    insert into ulak.event_log (event, endpoint_id, endpoint_name, detail)
    values (
        'messages.replayed',
        p_endpoint_id,
        v_endpoint_name,
        jsonb_build_object(
            'messages', cardinality(v_new_ids),
            'from', p_from_ts,
            'to', p_to_ts,
            'status', p_status,
            'limit', p_limit,
            'new_message_id', p_new_message_id,
            'first_archive_id', v_found.ids[1],
            'last_archive_id', v_found.ids[cardinality(v_found.ids)],
            'first_id', v_new_ids[1],
            'last_id', v_new_ids[cardinality(v_new_ids)]
        )
    );
    return cardinality(v_new_ids);
end
$plpgsql$;

comment on function ulak.replay_range(bigint, timestamptz, timestamptz, text, boolean, integer, boolean, timestamptz) is
    'queues the archived messages of an endpoint again that were created from p_from_ts up to, not including, p_to_ts, '
    'in their old order; returns how many';

create or replace function ulak._check_replay(
    p_from_ts timestamptz,
    p_to_ts timestamptz,
    p_status text,
    p_limit integer
)
returns void
language plpgsql
immutable
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    if p_from_ts is null or p_to_ts is null then
        raise exception 'a range to replay needs both ends'
            using errcode = '22004', hint = 'Use ''-infinity'' or ''infinity'' for an open end.';
    end if;
    if p_from_ts >= p_to_ts then
        raise exception 'the range to replay is empty'
            using errcode = '22023',
                detail = format('It goes from %s up to, not including, %s.', p_from_ts, p_to_ts);
    end if;
    if p_status not in ('completed', 'failed', 'expired') then
        raise exception 'no archived message has status "%"', p_status
            using errcode = '22023', hint = 'completed, failed, expired, or null for all of them.';
    end if;
    if p_limit is not null then
        perform ulak._require_positive('p_limit', p_limit);
    end if;
end
$plpgsql$;

-- The archived messages with these ids, all of one endpoint and created between p_first and p_last (which leads to their
-- partitions). Returns the new ids in the order of the old ones. Each message is looked up by its id: without statistics the
-- planner has been seen to go through a whole month once per message.
create or replace function ulak._replay(
    p_endpoint_id bigint,
    p_archive_ids bigint[],
    p_first timestamptz,
    p_last timestamptz,
    p_new_message_id boolean,
    p_now timestamptz
)
returns bigint[]
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
as $plpgsql$
declare
    v_count integer := cardinality(p_archive_ids);
    v_keys text[];
    v_key_endpoint_ids bigint[];
    v_ids bigint[];
begin
    v_keys := array(
        select distinct a.ordering_key
        from ulak.archive a
        where a.id = any (p_archive_ids)
            and a.created_at between p_first and p_last
            and a.ordering_key is not null
    );
    v_key_endpoint_ids := array_fill(p_endpoint_id, array[cardinality(v_keys)]);
    perform ulak._lock_for_requeue(v_key_endpoint_ids, v_keys);

    -- After the locks on the keys: the order of ids is the order of commits.
    v_ids := array(select nextval('ulak.queue_id_seq') from generate_series(1, v_count));
    perform ulak._require_room(v_ids[v_count], v_count);
    perform ulak._insert_replayed(p_archive_ids, v_ids, p_first, p_last, p_new_message_id, p_now);
    if v_keys <> '{}' then
        perform ulak._promote_heads(v_key_endpoint_ids, v_keys, p_now);
    end if;
    return v_ids;
end
$plpgsql$;

-- Budget, deadline, schedule and idempotency key start afresh. A message with an ordering key is queued behind what the key
-- has; its first one is promoted afterwards.
create or replace function ulak._insert_replayed(
    p_archive_ids bigint[],
    p_ids bigint[],
    p_first timestamptz,
    p_last timestamptz,
    p_new_message_id boolean,
    p_now timestamptz
)
returns void
language sql
set search_path = pg_catalog, pg_temp
as $sql$
    insert into ulak.queue (
        id,
        endpoint_id,
        message_id,
        next_retry_at,
        created_at,
        updated_at,
        correlation_id,
        generation,
        priority,
        payload,
        ordering_key,
        headers,
        metadata,
        failure_history
    )
    select
        n.id,
        a.endpoint_id,
        case when p_new_message_id then gen_random_uuid() else a.message_id end,
        case when a.ordering_key is null then p_now else 'infinity' end,
        p_now,
        p_now,
        a.correlation_id,
        a.generation,
        a.priority,
        a.payload,
        a.ordering_key,
        a.headers,
        a.metadata,
        case when a.status = 'failed' then ulak._archived_history(a, p_now) else a.failure_history end
    from unnest(p_archive_ids, p_ids) n(archive_id, id)
    join ulak.archive a on a.id = n.archive_id and a.created_at between p_first and p_last
$sql$;

-- A failed cycle becomes part of the message's history, as redrive does it.
create or replace function ulak._archived_history(p_message ulak.archive, p_now timestamptz)
returns jsonb
language sql
stable
as $sql$
    select ulak._with_cycle(
        jsonb_populate_record(
            null::ulak.dlq,
            jsonb_build_object(
                'attempts', p_message.attempts,
                'retry_count', p_message.retry_count,
                'last_error', p_message.last_error,
                'first_failed_at', p_message.first_failed_at,
                'failed_at', p_message.failed_at,
                'generation', p_message.generation,
                'failure_history', p_message.failure_history,
                'redriven_at', p_now,
                'redriven_by', session_user
            )
        )
    )
$sql$;

-- As a sender does, and against drop_endpoint(). Returns the endpoint's name.
create or replace function ulak._lock_endpoint_for_replay(p_endpoint_id bigint)
returns text
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_name text;
begin
    perform pg_advisory_xact_lock_shared(hashtext('ulak_endpoint_id'), p_endpoint_id::integer);
    select e.name into v_name
    from ulak.endpoints e
    where e.id = p_endpoint_id;
    if not found then
        raise exception 'endpoint % does not exist', coalesce(p_endpoint_id::text, 'null')
            using errcode = '42704',
                detail = 'Its archived messages can be read in ulak.archive, but there is nowhere to send them.',
                hint = 'select id, name from ulak.endpoints;';
    end if;
    return v_name;
end
$plpgsql$;

-- Each key takes an entry of the server's lock table, which is of a fixed size: replaying or redriving everything of an
-- endpoint with a million keys would fill it for everybody.
create or replace function ulak._check_ordering_keys(p_count integer)
returns void
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_most integer := current_setting('max_locks_per_transaction')::bigint * current_setting('max_connections')::bigint / 4;
begin
    if p_count > v_most then
        raise exception 'these messages have % ordering keys, too many for one transaction', p_count
            using errcode = '54000',
                detail = format('%s fill a quarter of the server''s lock table.', v_most),
                hint = 'Take a shorter range, pass p_limit, or raise max_locks_per_transaction.';
    end if;
end
$plpgsql$;

create or replace function ulak._raise_not_archived(p_id bigint)
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_status text := (select q.status from ulak.queue q where q.id = p_id);
begin
    raise exception 'message % is not in the archive', coalesce(p_id::text, 'null')
        using errcode = 'P0002',
            detail = case
                when v_status in ('pending', 'processing') then format('It is in the queue, %s.', v_status)
                when v_status is not null
                    then format('It is in the queue, %s. Maintenance archives it %s s after its end.', v_status, ulak.setting('archive_after'))
                else 'There is no such message, or its month has been dropped.'
            end,
            hint = case
                when v_status = 'failed'
                    then format('select ulak.redrive_message(id) from ulak.dlq where original_message_id = %s;', p_id)
                when v_status in ('completed', 'expired') then 'select ulak.archive_completed_messages(0);'
                else 'select id, status, created_at from ulak.archive order by created_at desc limit 20;'
            end;
end
$plpgsql$;
-- Which cluster delivers: a dump that was restored elsewhere stays silent until ulak.adopt().

-- Not immutable in the strict sense: pg_resetwal changes it, with the server down. Declared so, it is read once per
-- cached plan and not on every claim.
create or replace function ulak._system_identifier()
returns bigint
language sql
immutable
as $sql$
    select c.system_identifier
    from pg_catalog.pg_control_system() c
$sql$;

create or replace function ulak._is_adopted()
returns boolean
language plpgsql
stable
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    return not exists (
        select
        from ulak.cluster_identity i
        where i.system_identifier <> ulak._system_identifier()
    );
end
$plpgsql$;

create or replace function ulak.adopt()
returns bigint
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_before jsonb;
    v_released bigint;
begin
    -- Of two at once, the second waits and then finds nothing to do.
    lock table ulak.cluster_identity in share row exclusive mode;
    if ulak._is_adopted() then
        return 0;
    end if;
    with gone as (
        delete from ulak.cluster_identity i
        returning i.system_identifier
    )
    select jsonb_agg(g.system_identifier::text) into v_before
    from gone g;
    insert into ulak.cluster_identity (system_identifier)
    values (ulak._system_identifier());

    v_released := ulak._count_live(null);
    insert into ulak.event_log (event, old_value, new_value, detail)
    values (
        'cluster.adopted',
        v_before,
        jsonb_build_array(ulak._system_identifier()::text),
        jsonb_build_object('released', v_released)
    );
    return v_released;
end
$plpgsql$;

comment on function ulak.adopt() is
    'makes this cluster the one that delivers, after a dump was restored here or after pg_upgrade; returns how many messages were held, 0 if none had been';
-- The worker that lives in the database: its procedure, and what it asks of SQL besides claiming and settling.

create or replace procedure ulak.run_worker(p_slot integer default null, p_seconds double precision default null)
language plpython3u
as $python$
    plpy.execute("select ulak._load_python()")
    from ulak import database

    database.run(p_slot, p_seconds, plpy.execute("select ulak._worker_stamp() as stamp")[0]["stamp"])
$python$;

comment on procedure ulak.run_worker(integer, double precision) is
    'delivers messages until just after the next full minute, or for p_seconds; p_slot is the worker''s number, '
    'by default the first that is free';

-- What a worker runs. One that finds another stamp leaves, so that the next run starts with the new code.
create or replace function ulak._stamp_of(p_version text)
returns text
language sql
-- Not immutable: a plan that a worker keeps would keep the stamp, too.
stable
as $sql$
    select ulak._python_stamp() operator(pg_catalog.||) ' ' operator(pg_catalog.||) p_version
$sql$;

create or replace function ulak._worker_stamp()
returns text
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    return ulak._stamp_of(e.extversion) from pg_extension e where e.extname = 'ulak';
end
$plpgsql$;

-- Takes a slot that no other session runs, and sets the session up; no row if there is none.
create or replace function ulak._take_worker_slot(p_slot integer, p_seconds double precision)
returns table (slot integer, name text, seconds double precision)
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    -- The jobs of start() name their slot.
    v_is_scheduled boolean := p_slot is not null and current_setting('application_name') = 'pg_cron';
begin
    if p_slot is not null and p_slot not between 1 and 32 then
        raise exception 'worker slots are numbered from 1 to 32'
            using errcode = '22023', detail = format('The slot given is %s.', p_slot);
    end if;
    for v_slot in coalesce(p_slot, 1)..coalesce(p_slot, 32) loop
        if pg_try_advisory_lock(hashtext('ulak_worker'), v_slot) then
            slot := v_slot;
            name := format('worker %s, pid %s', v_slot, pg_backend_pid());
            -- A run ends just after the minute's tick: pg_cron has queued the next one by then and starts it at once.
            -- Not all at the same moment, so that somebody is always there.
            seconds := coalesce(p_seconds, 60 + 0.2 * v_slot - extract(second from clock_timestamp()));
            perform set_config(s.name, s.value, false) from ulak._worker_parameters() s;
            perform set_config('application_name', format('ulak %s', name), false);
            perform ulak._register_worker(slot, name, v_is_scheduled);
            return next;
            return;
        end if;
    end loop;
end
$plpgsql$;

create or replace function ulak._worker_parameters()
returns table (name text, value text)
language sql
immutable
set search_path = pg_catalog, pg_temp
as $sql$
    values
        -- A crash that loses a commit also ends the worker, and the message is sent again.
        ('synchronous_commit', 'off'),
        -- The workers of a parallel query talk by the signal that a bell holds back.
        ('max_parallel_workers_per_gather', '0'),
        -- Compiling plans costs more than it saves in statements this short.
        ('jit', 'off'),
        -- A plan that was made for an empty queue is used for a full one.
        ('enable_seqscan', 'off'),
        ('enable_bitmapscan', 'off'),
        ('plan_cache_mode', 'force_generic_plan'),
        -- Somebody who holds a lock on one endpoint must not hold up the others.
        ('lock_timeout', '250ms'),
        -- Whatever the database's own defaults are.
        ('default_transaction_isolation', 'read committed'),
        ('default_transaction_read_only', 'off'),
        ('datestyle', 'ISO')
$sql$;

create or replace function ulak._register_worker(p_slot integer, p_worker text, p_is_scheduled boolean)
returns void
language sql
security definer
set search_path = pg_catalog, pg_temp
as $sql$
    insert into ulak.workers as w (
        slot, name, pid, state, started_at, last_activity, heartbeat_at, is_scheduled, version
    )
    select p_slot, p_worker, pg_backend_pid(), 'running', t.now, t.now, t.now, p_is_scheduled, e.extversion
    from clock_timestamp() t(now), pg_extension e
    where e.extname = 'ulak'
    on conflict (slot) do update
    set name = excluded.name,
        pid = excluded.pid,
        state = excluded.state,
        started_at = excluded.started_at,
        heartbeat_at = excluded.heartbeat_at,
        in_flight = 0,
        is_scheduled = excluded.is_scheduled,
        version = excluded.version
$sql$;

-- For a session that goes on after its worker, such as an administrator's psql.
create or replace function ulak._leave_worker_slot(p_slot integer)
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    perform pg_advisory_unlock(hashtext('ulak_worker'), p_slot);
    if exists (
        select
        from pg_locks l
        where l.locktype = 'advisory'
            and l.pid = pg_backend_pid()
            and l.classid = hashtext('ulak_poller')::bigint & 4294967295
    ) then
        perform pg_advisory_unlock(hashtext('ulak_poller'), 0);
    end if;
    unlisten ulak_bell;
    perform set_config(s.name, s.reset_val, false)
    from pg_settings s
    where lower(s.name) in (select p.name from ulak._worker_parameters() p union all values ('application_name'));
end
$plpgsql$;

-- What the worker needs to know, and a text that changes whenever a setting does.
create or replace function ulak._worker_options()
returns table (settings jsonb, version text, fingerprint text)
language sql
stable
security definer
set search_path = pg_catalog, pg_temp
as $sql$
    select
        (
            select jsonb_object_agg(s.name, ulak.setting(s.name))
            from unnest(array[
                'batch_size',
                'capture_response',
                'cloudevents_source',
                'http_allow_internal_urls',
                'http_allowed_networks',
                'http_connect_timeout',
                'http_timeout',
                'lease_seconds',
                'poll_interval',
                'poll_interval_busy',
                'response_body_max_size',
                'worker_concurrency'
            ]) s(name)
        ),
        e.extversion,
        ulak._settings_fingerprint()
    from pg_extension e
    where e.extname = 'ulak'
$sql$;

create or replace function ulak._settings_fingerprint()
returns text
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    return coalesce(string_agg(v.name || '=' || v.value, ' ' order by v.name), '') from ulak.setting_values v;
end
$plpgsql$;

-- Asked several times a second: whether to go on. `stop` when stop() was called since the run began. pg_cron may have
-- begun it before stop() and have it registered only now: nobody could ask it to leave.
create or replace function ulak._worker_check(p_slot integer, p_stamp text)
returns table (leave text, settings text)
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    return query
    select
        case
            when w.stop_requested_at >= w.started_at then 'stop'
            when w.is_scheduled and p_slot > s.workers and w.started_at < s.changed_at + interval '1 minute' then 'stop'
            when p_stamp <> ulak._stamp_of(e.extversion) then 'restart'
        end,
        ulak._settings_fingerprint()
    from pg_extension e
    left join ulak.workers w on w.slot = p_slot
    left join ulak.schedule s on true
    where e.extname = 'ulak';
end
$plpgsql$;

-- Where a worker without work spends its time: looks at the senders' sequence until it moves. Here and not in Python, and
-- without a query, because what has slept must be fetched into the processor's caches again, and this is little.
create or replace function ulak._await_send(p_last_sent bigint, p_interval double precision, p_seconds double precision)
returns bigint
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_sequence oid := 'ulak.queue_id_seq'::regclass;
    v_looks integer := greatest(1, ceil(p_seconds / p_interval));
    v_interval double precision := p_seconds / v_looks;
    v_sent bigint;
    v_slept text;
begin
    for v_look in 1..v_looks loop
        v_slept := pg_sleep(v_interval);
        v_sent := coalesce(pg_sequence_last_value(v_sequence), 0);
        exit when v_sent <> p_last_sent;
    end loop;
    return v_sent;
end
$plpgsql$;

-- A worker's sign of life, with its counters since the last one.
create or replace function ulak._worker_report(p_slot integer, p_worker text, p_progress jsonb, p_stats jsonb)
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_now timestamptz := clock_timestamp();
    v_processed bigint := (p_progress -> 'processed')::bigint;
begin
    update ulak.workers w
    set state = p_progress ->> 'state',
        last_activity = case when v_processed > 0 then v_now else w.last_activity end,
        heartbeat_at = v_now,
        in_flight = (p_progress -> 'in_flight')::integer,
        messages_processed = w.messages_processed + v_processed,
        error_count = w.error_count + (p_progress -> 'failed')::bigint,
        last_error = coalesce(p_progress ->> 'last_error', w.last_error)
    where w.slot = p_slot and w.name = p_worker;
    if jsonb_array_length(p_stats) > 0 then
        perform ulak._add_endpoint_stats(p_stats, date_trunc('minute', v_now));
    end if;
end
$plpgsql$;

create or replace function ulak._add_endpoint_stats(p_stats jsonb, p_minute timestamptz)
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    insert into ulak.endpoint_stats as s (
        endpoint_id, minute, delivered, failed, latency_total_ms, latency_histogram
    )
    select a.endpoint_id, p_minute, a.delivered, a.failed, a.latency_total_ms, a.latency_histogram
    from jsonb_to_recordset(p_stats) a(
        endpoint_id bigint,
        delivered bigint,
        failed bigint,
        latency_total_ms double precision,
        latency_histogram bigint[]
    )
    on conflict (endpoint_id, minute) do update
    set delivered = s.delivered + excluded.delivered,
        failed = s.failed + excluded.failed,
        latency_total_ms = s.latency_total_ms + excluded.latency_total_ms,
        latency_histogram = array(
            select coalesce(h.before, 0) + coalesce(h.now, 0)
            from unnest(s.latency_histogram, excluded.latency_histogram) with ordinality h(before, now, bucket)
            order by h.bucket
        );

    insert into ulak.endpoint_totals as t (endpoint_id, delivered, failed, latency_total_ms, latency_histogram)
    select a.endpoint_id, a.delivered, a.failed, a.latency_total_ms, a.latency_histogram
    from jsonb_to_recordset(p_stats) a(
        endpoint_id bigint,
        delivered bigint,
        failed bigint,
        latency_total_ms double precision,
        latency_histogram bigint[]
    )
    on conflict (endpoint_id) do update
    set delivered = t.delivered + excluded.delivered,
        failed = t.failed + excluded.failed,
        latency_total_ms = t.latency_total_ms + excluded.latency_total_ms,
        latency_histogram = array(
            select coalesce(h.before, 0) + coalesce(h.now, 0)
            from unnest(t.latency_histogram, excluded.latency_histogram) with ordinality h(before, now, bucket)
            order by h.bucket
        );
end
$plpgsql$;

-- Endpoints that must not be sent to now, though messages for them were claimed a moment ago.
create or replace function ulak._blocked_endpoints(p_ids bigint[])
returns table (id bigint, state text)
language sql
stable
security definer
set search_path = pg_catalog, pg_temp
as $sql$
    select e.id, case when e.enabled then e.circuit_state else 'disabled' end
    from ulak.endpoints e
    where e.id = any (p_ids) and (not e.enabled or e.circuit_state <> 'closed')
$sql$;

-- Every worker asks every ten seconds, and one does it.
create or replace function ulak._sweep()
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    if pg_try_advisory_xact_lock(hashtext('ulak_sweep'), 0) then
        perform ulak.recover_stale_messages(), ulak.mark_expired_messages();
    end if;
end
$plpgsql$;

-- A session's lock: it goes to another worker when this one ends, however it ends.
create or replace function ulak._become_poller()
returns boolean
language sql
set search_path = pg_catalog, pg_temp
as $sql$
    select pg_try_advisory_lock(hashtext('ulak_poller'), 0)
$sql$;

create or replace function ulak._ping(p_endpoint_id bigint)
returns text
language plpython3u
as $python$
    plpy.execute("select ulak._load_python()")
    from ulak import database

    return database.ping(p_endpoint_id)
$python$;

create or replace function ulak.ping(p_endpoint text)
returns table (outcome text, status integer, milliseconds double precision, error text, response jsonb)
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_endpoint ulak.endpoints;
begin
    select e.* into v_endpoint
    from ulak.endpoints e
    where e.name = p_endpoint;
    if not found then
        perform ulak._raise_unknown_endpoint(p_endpoint);
    elsif v_endpoint.protocol <> 'http' then
        raise exception 'endpoint "%" is not an http endpoint', p_endpoint
            using errcode = '22023', detail = format('Its protocol is %s.', v_endpoint.protocol);
    end if;
    return query
    select a.outcome, a.status, a.milliseconds, a.error, a.response
    from jsonb_to_record(ulak._ping(v_endpoint.id)::jsonb) a(
        outcome text,
        status integer,
        milliseconds double precision,
        error text,
        response jsonb
    );
end
$plpgsql$;

comment on function ulak.ping(text) is
    'sends one signed test request to an endpoint now and returns its outcome; neither queue nor circuit breaker notice';
-- Retention of what grows: dead letters, log, attempts, counters, samples and inbox. The archive's months are dropped whole.

create or replace function ulak.cleanup_dlq(
    p_retention_days integer default null,
    p_now timestamptz default clock_timestamp()
)
returns integer
language sql
security definer
set search_path = pg_catalog, pg_temp
as $sql$
    select ulak._cleanup('dlq', p_retention_days, null, p_now)
$sql$;

comment on function ulak.cleanup_dlq(integer, timestamptz) is
    'deletes dead letters older than p_retention_days (null: setting dlq_retention_days); returns how many';

create or replace function ulak.cleanup_event_log(
    p_retention_days integer default null,
    p_now timestamptz default clock_timestamp()
)
returns integer
language sql
security definer
set search_path = pg_catalog, pg_temp
as $sql$
    select ulak._cleanup('event_log', p_retention_days, null, p_now)
$sql$;

comment on function ulak.cleanup_event_log(integer, timestamptz) is
    'deletes entries of ulak.event_log older than p_retention_days (null: setting event_log_retention_days); returns how many';

create or replace function ulak.cleanup_endpoint_stats(
    p_retention_days integer default null,
    p_now timestamptz default clock_timestamp()
)
returns integer
language sql
security definer
set search_path = pg_catalog, pg_temp
as $sql$
    select ulak._cleanup('endpoint_stats', p_retention_days, null, p_now)
$sql$;

comment on function ulak.cleanup_endpoint_stats(integer, timestamptz) is
    'deletes counters of ulak.endpoint_stats older than p_retention_days (null: setting stats_retention_days); returns how many';

create or replace function ulak.cleanup_inbox(
    p_retention_days integer default null,
    p_now timestamptz default clock_timestamp()
)
returns integer
language sql
security definer
set search_path = pg_catalog, pg_temp
as $sql$
    select ulak._cleanup('handled', p_retention_days, null, p_now)
$sql$;

comment on function ulak.cleanup_inbox(integer, timestamptz) is
    'forgets keys of mark_handled() older than p_retention_days (null: setting inbox_retention_days); returns how many';

-- At most p_limit rows (null: all), oldest first, in the order of the index on the time.
create or replace function ulak._cleanup(p_table text, p_retention_days integer, p_limit integer, p_now timestamptz)
returns integer
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set enable_sort = off
as $plpgsql$
declare
    v_setting text;
    v_column text;
    v_days integer;
    v_deleted integer;
begin
    case p_table
        when 'dlq' then
            v_setting := 'dlq_retention_days';
            v_column := 'archived_at';
        when 'event_log' then
            v_setting := 'event_log_retention_days';
            v_column := 'created_at';
        when 'attempts' then
            v_setting := 'event_log_retention_days';
            v_column := 'ended_at';
        when 'endpoint_stats' then
            v_setting := 'stats_retention_days';
            v_column := 'minute';
        when 'traffic' then
            v_setting := 'stats_retention_days';
            v_column := 'minute';
        when 'backlog_samples' then
            v_setting := 'stats_retention_days';
            v_column := 'sampled_at';
        when 'handled' then
            v_setting := 'inbox_retention_days';
            v_column := 'handled_at';
    end case;
    v_days := coalesce(p_retention_days, ulak.setting(v_setting)::integer);
    perform ulak._require_positive('p_retention_days', v_days);
    execute format(
        $sql$
            delete from ulak.%1$I
            where ctid = any (array(
                select t.ctid
                from ulak.%1$I t
                where t.%2$I < $1
                order by t.%2$I
                limit $2
                for update skip locked
            ))
        $sql$,
        p_table,
        v_column
    )
    using p_now - make_interval(days => v_days), p_limit;
    get diagnostics v_deleted = row_count;
    return v_deleted;
end
$plpgsql$;
-- Maintenance: everything that has to happen every minute, in short transactions, one run at a time.

-- The steps in the order in which they run, and last the queue's VACUUM, which no procedure can do.
create or replace view ulak.maintenance_status as
select
    s.step,
    s.what,
    case
        when r.step is null then 'never ran'
        when r.last_error_at >= r.started_at then 'failed'
        when r.started_at < now() - interval '5 minutes' then 'late'
        when not r.finished then 'behind'
        else 'ok'
    end as state,
    r.started_at,
    r.duration,
    r.rows,
    r.last_error,
    r.last_error_at,
    r.runs,
    r.errors,
    r.total_rows
from (
    values
        (1, 'recover', 'takes back messages whose lease ran out'),
        (2, 'expire', 'marks messages that were not delivered in time'),
        (3, 'partitions', 'makes the archive''s next months and empties archive_default'),
        (4, 'archive', 'moves finished messages to the archive'),
        (5, 'archive_retention', 'drops old months of the archive'),
        (6, 'dlq_retention', 'deletes old dead letters'),
        (7, 'event_log_retention', 'deletes old log entries'),
        (8, 'stats_retention', 'deletes old counters'),
        (9, 'inbox_retention', 'forgets old keys of mark_handled()'),
        (10, 'ordering', 'every ten minutes: wakes ordering keys whose first message was deleted by hand'),
        (11, 'attempts_retention', 'forgets old failed attempts'),
        (12, 'samples', 'counts what waits for each endpoint, and sums up the last minutes'),
        (13, 'samples_retention', 'deletes old counts of what waited'),
        (14, 'secrets', 'forgets signing secrets whose grace after a rotation is over')
) s (place, step, what)
left join ulak.maintenance_runs r on r.step = s.step
union all
select
    'vacuum',
    'a job of its own: frees the place of messages that have left the queue',
    case
        when v.last_run is null then 'never ran'
        when v.last_run < now() - interval '5 minutes' and v.n_dead_tup > 10000 then 'late'
        else 'ok'
    end,
    v.last_run,
    null,
    null,
    null,
    null,
    v.vacuum_count + v.autovacuum_count,
    null,
    null
from (
    select t.*, greatest(t.last_vacuum, t.last_autovacuum) as last_run
    from pg_catalog.pg_stat_all_tables t
    where t.relid = 'ulak.queue'::regclass
) v;

comment on view ulak.maintenance_status is 'steps of maintenance: when each last ran, for how long, what it did, what went wrong';
comment on column ulak.maintenance_status.step is 'name of the step';
comment on column ulak.maintenance_status.what is 'what it does';
comment on column ulak.maintenance_status.state is 'ok; failed: see last_error; late: no run for 5 minutes; behind: ran out of time and goes on in the next run; never ran';
comment on column ulak.maintenance_status.started_at is 'when its last run began';
comment on column ulak.maintenance_status.duration is 'how long that took';
comment on column ulak.maintenance_status.rows is 'messages, rows or partitions that it changed';
comment on column ulak.maintenance_status.last_error is 'its last error, also after later runs that went well';
comment on column ulak.maintenance_status.last_error_at is 'when that was';
comment on column ulak.maintenance_status.runs is 'how often it ran';
comment on column ulak.maintenance_status.errors is 'how many errors it met';
comment on column ulak.maintenance_status.total_rows is 'what it changed in all its runs';

-- No SECURITY DEFINER, no SET clause, no exception block: each would forbid the commits. The step's function has them.
create or replace procedure ulak.run_maintenance(
    p_now timestamptz default null,
    p_budget interval default '45 seconds'
)
language plpgsql
as $plpgsql$
declare
    v_deadline timestamptz := clock_timestamp() + coalesce(p_budget, '45 seconds');
    v_step text;
    v_started_at timestamptz;
    v_outcome text;
    v_reached timestamptz;
begin
    if not ulak._is_adopted() then
        raise notice 'the messages of another cluster were restored here: nothing is done'
            using hint = 'If this cluster is to deliver them: select ulak.adopt();';
        return;
    end if;
    foreach v_step in array array(select s.step from ulak.maintenance_status s where s.step <> 'vacuum') loop
        v_started_at := clock_timestamp();
        v_reached := '-infinity';
        -- Every step gets its turn, if only for one batch.
        loop
            select s.outcome, s.reached into v_outcome, v_reached
            from ulak._maintenance_step(v_step, v_started_at, v_reached, coalesce(p_now, clock_timestamp())) s;
            commit;
            exit when v_outcome <> 'more' or clock_timestamp() >= v_deadline;
        end loop;
        if v_outcome = 'busy' then
            raise notice 'another run of maintenance is under way';
            return;
        end if;
    end loop;
end
$plpgsql$;

comment on procedure ulak.run_maintenance(timestamptz, interval) is
    'what pg_cron calls every minute: recovery, expiry, archive, retention; starts no further batch after p_budget';

-- One batch of one step. The lock is the transaction's, not the session's: a run that is cancelled can't leave it behind.
-- Whoever comes between two batches of a run takes over, and the run leaves.
create or replace function ulak._maintenance_step(
    p_step text,
    p_started_at timestamptz,
    p_after timestamptz,
    p_now timestamptz,
    out outcome text,
    out reached timestamptz
)
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '2s'
as $plpgsql$
declare
    v_batch_started_at timestamptz := clock_timestamp();
    v_month timestamptz;
    v_rows bigint := 0;
    v_more boolean;
    v_error text;
    v_detail text;
begin
    if not pg_try_advisory_xact_lock(hashtext('ulak_maintenance'), 0) then
        outcome := 'busy';
        return;
    end if;
    -- Where the installation took itself for a restore, it left this to the first run.
    insert into ulak.cluster_identity (system_identifier)
    select ulak._system_identifier()
    where not exists (select from ulak.cluster_identity);
    -- A crash that loses such a commit loses a move as a whole; the next run does it again.
    perform set_config('synchronous_commit', 'off', true);
    begin
        v_month := ulak._maintenance_month(p_step, p_after, p_now);
        select w.rows, w.more, w.reached into v_rows, v_more, reached
        from ulak._maintenance_work(p_step, v_month, p_after, p_now) w;
    exception
        when others then
            get stacked diagnostics v_error = message_text, v_detail = pg_exception_detail;
            v_error := concat_ws(' ', v_error, nullif(v_detail, ''));
            -- A month that can't be made or dropped doesn't hold up the next one.
            v_more := v_month is not null;
            reached := v_month;
    end;
    perform ulak._record_maintenance(
        p_step, p_started_at, clock_timestamp() - v_batch_started_at, v_rows, not v_more, v_error
    );
    outcome := case when v_more then 'more' else 'done' end;
end
$plpgsql$;

-- The next month that a step has to make or drop; null for steps that don't go by month.
create or replace function ulak._maintenance_month(p_step text, p_after timestamptz, p_now timestamptz)
returns timestamptz
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    if p_step = 'partitions' then
        return min(m) from ulak._missing_archive_months(3, p_now) m where m > p_after;
    end if;
    if p_step = 'archive_retention' then
        return min(m)
        from ulak._old_archive_months(ulak.setting('archive_retention_months')::integer, p_now) m
        where m > p_after;
    end if;
    return null;
end
$plpgsql$;

create or replace function ulak._maintenance_work(
    p_step text,
    p_month timestamptz,
    p_after timestamptz,
    p_now timestamptz,
    out rows bigint,
    out more boolean,
    out reached timestamptz
)
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_batch constant integer := 2000;
begin
    reached := coalesce(p_month, p_after);
    case p_step
        when 'recover' then
            rows := ulak.recover_stale_messages(p_now, v_batch);
        when 'expire' then
            rows := ulak.mark_expired_messages(p_now, v_batch);
        when 'partitions' then
            rows := ulak._make_archive_partition(p_month);
        when 'archive_retention' then
            rows := ulak._drop_archive_partition(p_month);
        when 'archive' then
            select b.moved, b.reached into rows, reached
            from ulak._archive_batch(
                p_now - make_interval(secs => ulak.setting('archive_after')::integer), p_after, v_batch, p_now
            ) b;
        when 'dlq_retention' then
            rows := ulak._cleanup('dlq', null, v_batch, p_now);
        when 'event_log_retention' then
            rows := ulak._cleanup('event_log', null, v_batch, p_now);
        when 'stats_retention' then
            rows := ulak._cleanup('endpoint_stats', null, v_batch, p_now);
        when 'inbox_retention' then
            rows := ulak._cleanup('handled', null, v_batch, p_now);
        when 'attempts_retention' then
            rows := ulak._cleanup('attempts', null, v_batch, p_now);
        when 'samples' then
            rows := ulak._sample_backlog(p_now);
        when 'samples_retention' then
            rows := ulak._cleanup('backlog_samples', null, v_batch, p_now);
            perform ulak._cleanup('traffic', null, v_batch, p_now);
        when 'secrets' then
            rows := ulak._forget_old_secrets(p_now);
        when 'ordering' then
            rows := case when extract(minute from p_now)::integer % 10 = 0 then ulak._promote_orphans(p_now) else 0 end;
    end case;
    rows := coalesce(rows, 0);
    more := p_month is not null or (rows = v_batch and p_step <> 'samples');
end
$plpgsql$;

-- Batches of one run share its start and add up. An error that goes on every minute is in the event log once.
create or replace function ulak._record_maintenance(
    p_step text,
    p_started_at timestamptz,
    p_duration interval,
    p_rows bigint,
    p_finished boolean,
    p_error text
)
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    if p_error is not null then
        raise warning 'maintenance step % failed: %', p_step, p_error;
        insert into ulak.event_log (event, detail)
        select 'maintenance.failed', jsonb_build_object('step', p_step, 'error', p_error)
        where not exists (
            select
            from ulak.maintenance_runs r
            where r.step = p_step and r.last_error = p_error and r.last_error_at >= r.started_at
        );
    end if;
    insert into ulak.maintenance_runs as r
        (step, started_at, duration, rows, finished, last_error, last_error_at, runs, errors, total_rows)
    values (
        p_step,
        p_started_at,
        p_duration,
        p_rows,
        p_finished,
        p_error,
        case when p_error is not null then clock_timestamp() end,
        1,
        (p_error is not null)::integer,
        p_rows
    )
    on conflict (step) do update
    set started_at = excluded.started_at,
        duration = excluded.duration
            + case when r.started_at = excluded.started_at then r.duration else interval '0' end,
        rows = excluded.rows + case when r.started_at = excluded.started_at then r.rows else 0 end,
        finished = excluded.finished,
        last_error = coalesce(excluded.last_error, r.last_error),
        last_error_at = coalesce(excluded.last_error_at, r.last_error_at),
        runs = r.runs + (r.started_at <> excluded.started_at)::integer,
        errors = r.errors + excluded.errors,
        total_rows = r.total_rows + excluded.rows;
end
$plpgsql$;

-- For a job of its own that runs as the tables' owner, every minute. Autovacuum learns of the workers' dead rows late, and
-- may be busy elsewhere. With nothing to do it takes a millisecond, and as long as dead rows are on less than 2% of the
-- pages it leaves the indexes alone, so it needs no condition. `parallel 0`: setting up helpers takes longer than the
-- work. `truncate off`: no exclusive lock, and the queue will need the place again.
create or replace function ulak._vacuum_command()
returns text
language sql
immutable
as $sql$
    select 'vacuum (skip_locked, truncate off, parallel 0) '
        'ulak.queue, ulak.ordering_wakeups, ulak.endpoints, ulak.endpoint_stats, ulak.endpoint_totals, ulak.workers, '
        'ulak.maintenance_runs'
$sql$;
-- Scheduling: start() and stop() put the workers and the maintenance into pg_cron, or say what to run where it lives.

create or replace function ulak.start(p_workers integer default null)
returns table (item text, status text, detail text, fix text)
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_workers integer := coalesce(p_workers, ulak.setting('workers')::integer);
    v_checks jsonb;
begin
    if v_workers not between 1 and 32 then
        raise exception 'the number of workers must be between 1 and 32'
            using errcode = '22023', detail = format('It is %s.', v_workers), hint = 'To have none: select * from ulak.stop();';
    end if;
    perform pg_advisory_xact_lock(hashtext('ulak_schedule'), 0);
    v_checks := (select jsonb_agg(to_jsonb(c)) from ulak._check_schedule(v_workers) c);
    return query
    select c.item, c.status, c.detail, c.fix
    from jsonb_to_recordset(v_checks) c(item text, status text, detail text, fix text);

    if v_checks @> '[{"status": "problem"}]' then
        return query values (
            'schedule', 'not done', 'nothing was scheduled', 'select * from ulak.start(); -- after mending the problems above'
        );
    elsif ulak._has_pg_cron() then
        return query
        select s.item, s.status, s.detail, null::text
        from ulak._schedule_jobs(v_workers) s;
    else
        return query
        select
            'schedule',
            'to do',
            format('pg_cron lives in database "%s", where a superuser has to run this', current_setting('cron.database_name')),
            concat_ws(
                E'\n',
                format('\connect %I', current_setting('cron.database_name')),
                ulak._unschedule_command(),
                string_agg(ulak._schedule_command(j.jobname, j.command, j.username, j.database), E'\n')
            )
        from ulak._wanted_jobs(v_workers) j;
        return query
        select w.name, 'done', 'asked to leave', null::text
        from ulak._limit_workers(v_workers) w;
    end if;
end
$plpgsql$;

comment on function ulak.start(integer) is
    'has pg_cron run the workers and the maintenance; returns what it did and what is wrong, each with its fix. '
    'Repeating it changes nothing, another number rescales';

create or replace function ulak.stop()
returns table (item text, status text, detail text, fix text)
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_id bigint;
    v_name text;
begin
    perform pg_advisory_xact_lock(hashtext('ulak_schedule'), 0);
    if ulak._has_pg_cron() then
        for v_id, v_name in execute format('select jobid, jobname::text from cron.job where %s order by jobname', ulak._is_our_job())
        loop
            execute 'select cron.unschedule($1::bigint)' using v_id;
            return query values (v_name, 'done', 'unscheduled', null::text);
        end loop;
    elsif current_setting('cron.database_name', true) is not null then
        return query values (
            'schedule',
            'to do',
            format('pg_cron lives in database "%s", where a superuser has to run this', current_setting('cron.database_name')),
            format('\connect %I', current_setting('cron.database_name')) || E'\n' || ulak._unschedule_command()
        );
    end if;
    return query
    select w.name, 'done', 'asked to leave', null::text
    from ulak._limit_workers(0) w;
end
$plpgsql$;

comment on function ulak.stop() is
    'takes the workers and the maintenance out of pg_cron and asks running workers to leave; messages stay in the queue';

-- Asks the workers of other slots to leave, and notes it for those that pg_cron is just starting.
create or replace function ulak._limit_workers(p_workers integer)
returns table (name text)
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    insert into ulak.schedule (workers)
    values (p_workers)
    on conflict (is_only) do update
    set workers = excluded.workers, changed_at = excluded.changed_at;

    return query
    update ulak.workers w
    set stop_requested_at = clock_timestamp()
    where w.slot > p_workers and w.state = 'running'
    returning w.name;
    perform ulak._ring();
end
$plpgsql$;

-- Asks for the extension, not for its schema: anybody may make a schema of that name, and what is in it would run with
-- our rights.
create or replace function ulak._has_pg_cron()
returns boolean
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select exists (select from pg_extension e where e.extname = 'pg_cron')
$sql$;

-- Several databases may have their ulak in one pg_cron, so the names of jobs carry the database's.
create or replace function ulak._job_name(p_what text)
returns text
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select format('ulak %s in %s', p_what, current_database())
$sql$;

-- What a job of cron.job is recognised by, as a condition in SQL.
create or replace function ulak._is_our_job()
returns text
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select format(
        'substring(jobname from %L) = %L', '^ulak (?:worker \d+|maintenance|vacuum|log) in (.*)$', current_database()
    )
$sql$;

-- The jobs as they should be.
create or replace function ulak._wanted_jobs(p_workers integer)
returns table (jobname text, command text, username text, database text)
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select ulak._job_name('worker ' || n), format('call ulak.run_worker(%s)', n), 'ulak_worker', current_database()::text
    from generate_series(1, p_workers) n
    union all
    select ulak._job_name('maintenance'), 'call ulak.run_maintenance()', 'ulak_worker', current_database()::text
    union all
    -- The table's owner: nobody else may VACUUM it.
    select ulak._job_name('vacuum'), ulak._vacuum_command(), pg_get_userbyid(c.relowner), current_database()::text
    from pg_class c
    where c.oid = 'ulak.queue'::regclass
    union all
    -- pg_cron logs each run of each job and never forgets. Runs that failed to start have no time, but their number.
    select
        ulak._job_name('log'),
        format(
            'delete from cron.job_run_details d where (d.jobid in (select jobid from cron.job where %s) '
            'or d.command like ''call ulak.run\_%%'' and d.jobid not in (select jobid from cron.job)) '
            'and d.runid < (select max(r.runid) from cron.job_run_details r where r.start_time < now() - interval ''1 hour'')',
            ulak._is_our_job()
        ),
        pg_get_userbyid(c.relowner),
        current_setting('cron.database_name', true)
    from pg_class c
    where c.oid = 'ulak.queue'::regclass
$sql$;

create or replace function ulak._schedule_command(p_jobname text, p_command text, p_username text, p_database text)
returns text
language sql
immutable
set search_path = pg_catalog, pg_temp
as $sql$
    select format(
        'select cron.schedule_in_database(%L, ''* * * * *'', %L, %L, %L);', p_jobname, p_command, p_database, p_username
    )
$sql$;

create or replace function ulak._unschedule_command()
returns text
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select format('select cron.unschedule(jobid) from cron.job where %s;', ulak._is_our_job())
$sql$;

-- Makes pg_cron's jobs equal to the wanted ones. It reads them when it is told of a change, and version 1.4 was seen to
-- miss that while much else changed in the catalog. So jobs that are right already are written as well, and a second
-- start() reaches it.
create or replace function ulak._schedule_jobs(p_workers integer)
returns table (item text, status text, detail text)
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_job record;
begin
    for v_job in execute
        'select j.jobid, w.* from ulak._wanted_jobs($1) w left join cron.job j on j.jobname = w.jobname '
        'and j.command = w.command and j.username = w.username and j.database = w.database and j.active '
        'order by w.jobname'
        using p_workers
    loop
        if v_job.jobid is null then
            execute 'select cron.unschedule(j.jobid) from cron.job j where j.jobname = $1' using v_job.jobname;
            execute ulak._schedule_command(v_job.jobname, v_job.command, v_job.username, v_job.database);
        else
            execute 'select cron.alter_job($1::bigint, active => true)' using v_job.jobid;
        end if;
        return query values (
            v_job.jobname,
            case when v_job.jobid is null then 'done' else 'unchanged' end,
            format('every minute as %s: %s', v_job.username, v_job.command)
        );
    end loop;
    for v_job in execute format(
        'select jobid, jobname::text from cron.job where %s and jobname not in (select w.jobname from ulak._wanted_jobs($1) w) '
        'order by jobname',
        ulak._is_our_job()
    ) using p_workers
    loop
        execute 'select cron.unschedule($1::bigint)' using v_job.jobid;
        return query values (v_job.jobname, 'done', 'unscheduled');
    end loop;
    return query
    select w.name, 'done', 'asked to leave'
    from ulak._limit_workers(p_workers) w;
end
$plpgsql$;

-- What has to be right before anything is scheduled, as rows: ok, or a problem and its fix, which psql can run.
create or replace function ulak._check_schedule(p_workers integer)
returns table (item text, status text, detail text, fix text)
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_is_usable boolean := not exists (
        select from ulak._check_pg_cron(p_workers) c where c.item = 'pg_cron' and c.status = 'problem'
    );
begin
    return query
    select c.item, c.status, c.detail, c.fix
    from ulak._check_python() c;
    return query
    select c.item, c.status, c.detail, c.fix
    from ulak._check_pg_cron(p_workers) c;
    if v_is_usable and not coalesce(current_setting('cron.use_background_workers', true)::boolean, false) then
        return query
        select c.item, c.status, c.detail, c.fix
        from pg_class q
        cross join lateral (values ('ulak_worker'), (pg_get_userbyid(q.relowner))) u(name)
        cross join lateral ulak._check_login(u.name) c
        where q.oid = 'ulak.queue'::regclass;
    end if;
    if not ulak._is_adopted() then
        return query values (
            'cluster',
            'warning',
            'these messages were restored from another cluster: they are held',
            'select ulak.adopt(); -- if this cluster is to deliver them'
        );
    end if;
end
$plpgsql$;

create or replace function ulak._check_python()
returns table (item text, status text, detail text, fix text)
language plpython3u
as $python$
    import sys

    yield "plpython3u", "ok", "Python " + sys.version.split()[0], None
    try:
        import pycurl
    except ImportError as error:
        yield "pycurl", "problem", str(error), "-- as root on the server: apt-get install python3-pycurl"
    else:
        yield "pycurl", "ok", " ".join(pycurl.version.split()[:2]), None
$python$;

-- In its libpq mode pg_cron logs in as the role that a job runs as. This does the same.
create or replace function ulak._check_login(p_user text)
returns table (item text, status text, detail text, fix text)
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_is_local boolean := current_setting('cron.host') ~ '^(/|$)';
    v_answer jsonb := ulak._log_in(p_user, current_database())::jsonb;
begin
    if v_answer ? 'problem' then
        return query values (
            'login',
            'problem',
            v_answer ->> 'problem',
            case
                when (select r.rolcanlogin from pg_roles r where r.rolname = p_user) then format(
                    'select pg_reload_conf(); -- after adding a line to %s, such as: %s %I %I%s trust; or put its password '
                    'into ~/.pgpass of the server''s user',
                    current_setting('hba_file'),
                    case when v_is_local then 'local' else 'host' end,
                    current_database(),
                    p_user,
                    case when v_is_local then '' else ' 127.0.0.1/32' end
                )
                else format('alter role %I login;', p_user)
            end
        );
        return;
    end if;
    return query values ('login', 'ok', format('%s can log in', p_user), null::text);
    -- A run takes a minute, and longer if a receiver does.
    if p_user = 'ulak_worker' and (v_answer -> 'statement_timeout')::integer between 1 and 599999 then
        return query values (
            'statement_timeout',
            'problem',
            format('it would end a worker''s run after %s s', round((v_answer -> 'statement_timeout')::numeric / 1000, 1)),
            format('alter role %I in database %I set statement_timeout = 0;', p_user, current_database())
        );
    end if;
end
$plpgsql$;

create or replace function ulak._log_in(p_user text, p_database text)
returns text
language plpython3u
as $python$
    import json

    plpy.execute("select ulak._load_python()")
    from ulak import login

    setting = plpy.prepare("select current_setting($1, true) as value", ["text"])

    def current(name):
        return plpy.execute(setting, [name])[0]["value"] or ""

    host = current("cron.host") or current("unix_socket_directories").split(",")[0].strip()
    parameters = {"host": host, "port": current("port"), "dbname": p_database, "user": p_user, "connect_timeout": "5"}
    try:
        timeout = login.ask(parameters, "select setting from pg_catalog.pg_settings where name = 'statement_timeout'")
        return json.dumps({"statement_timeout": int(timeout)})
    except login.LoginError as error:
        return json.dumps({"problem": str(error)})
$python$;

-- The part that needs no Python: is pg_cron there, does it run, and in a mode that suits us.
create or replace function ulak._check_pg_cron(p_workers integer)
returns table (item text, status text, detail text, fix text)
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    -- Anybody may set a parameter of this name where pg_cron isn't loaded.
    v_home text := case
        when current_setting('shared_preload_libraries') ~ '\mpg_cron\M' then current_setting('cron.database_name', true)
    end;
    v_version text := (select substring(e.extversion from '^\d+\.\d+') from pg_extension e where e.extname = 'pg_cron');
    v_libpq boolean := not coalesce(current_setting('cron.use_background_workers', true)::boolean, false);
    v_needed integer := p_workers + 3;
begin
    if v_home is null then
        return query values (
            'pg_cron',
            'problem',
            'it is not loaded',
            format(
                'alter system set shared_preload_libraries = %s; -- after installing postgresql-%s-cron; then restart the server. '
                'Or let another scheduler run each minute: call ulak.run_worker(); call ulak.run_maintenance();',
                (
                    select string_agg(quote_literal(btrim(l.name)), ', ' order by l.place)
                    from unnest(
                        string_to_array(nullif(current_setting('shared_preload_libraries'), ''), ',') || 'pg_cron'::text
                    ) with ordinality l (name, place)
                ),
                current_setting('server_version_num')::integer / 10000
            )
        );
        return;
    elsif v_home = current_database() and v_version is null then
        return query values ('pg_cron', 'problem', 'it is loaded, but not created', 'create extension pg_cron;');
        return;
    elsif string_to_array(v_version, '.')::integer[] < array[1, 4] then
        return query values (
            'pg_cron',
            'problem',
            format('version %s is older than 1.4', v_version),
            'alter extension pg_cron update; -- after installing a newer one'
        );
        return;
    end if;
    if not exists (select from pg_stat_activity a where a.backend_type = 'pg_cron launcher') then
        return query values (
            'pg_cron',
            'problem',
            'its scheduler is not running',
            '-- restart the server. Its log says why "pg_cron" stopped: it does so when its database is dropped'
        );
        return;
    end if;
    return query values ('pg_cron', 'ok', coalesce('version ' || v_version, format('in database "%s"', v_home)), null::text);

    if not v_libpq and string_to_array(coalesce(v_version, '1.4'), '.')::integer[] < array[1, 5] then
        return query values (
            'mode',
            'problem',
            'pg_cron 1.4 makes every job wait for the longest one when cron.use_background_workers is on',
            'alter system set cron.use_background_workers = off; -- then restart the server'
        );
    else
        return query values ('mode', 'ok', case when v_libpq then 'libpq' else 'background workers' end, null::text);
    end if;

    -- Beside the jobs there are pg_cron's own process and that of logical replication.
    if not v_libpq and current_setting('max_worker_processes')::integer < v_needed + 2 then
        return query values (
            'max_worker_processes',
            'problem',
            format('%s jobs and 2 other processes need %s, it is %s', v_needed, v_needed + 2, current_setting('max_worker_processes')),
            format('alter system set max_worker_processes = %s; -- then restart the server', v_needed + 2)
        );
    end if;
    -- What it may be depends on the above: one after the other.
    if current_setting('cron.max_running_jobs')::integer < v_needed
        and (select s.max_val::integer from pg_settings s where s.name = 'cron.max_running_jobs') >= v_needed
    then
        return query values (
            'max_running_jobs',
            'problem',
            format('%s workers and 3 other jobs need %s, it is %s', p_workers, v_needed,
                current_setting('cron.max_running_jobs')),
            format('alter system set cron.max_running_jobs = %s; -- then restart the server', v_needed)
        );
    end if;
    if not current_setting('cron.launch_active_jobs', true)::boolean then
        return query values (
            'launch_active_jobs',
            'problem',
            'pg_cron is told to start no job',
            'alter system set cron.launch_active_jobs = on; select pg_reload_conf();'
        );
    end if;
end
$plpgsql$;
-- The backlog: how much waits for each endpoint, and since when, at a cost that doesn't follow its length.

-- Counted exactly as long as that is cheap: 10,000 messages, shared by the endpoints that have some. Beyond that the
-- count of the last minute is what is known. All of it is read from partial indexes, whatever the statistics say.
create or replace function ulak._backlog(p_endpoint_id bigint default null, p_now timestamptz default clock_timestamp())
returns table (
    endpoint_id bigint,
    waiting bigint,
    is_estimate boolean,
    -- When the oldest message was sent, and since when one waits that is due.
    oldest_at timestamptz,
    due_since timestamptz,
    in_flight bigint,
    dead bigint
)
language plpgsql
stable
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
set plan_cache_mode = force_generic_plan
as $plpgsql$
#variable_conflict use_column
begin
    return query
    -- The first row of each (endpoint, priority), as a claim finds them.
    with recursive level as (
        (
            select q.endpoint_id, q.priority, q.next_retry_at
            from ulak.queue q
            where q.status = 'pending' and q.endpoint_id >= coalesce(p_endpoint_id, 0)
            order by q.endpoint_id, q.priority desc, q.next_retry_at, q.id
            limit 1
        )
        union all
        select n.endpoint_id, n.priority, n.next_retry_at
        from level l
        cross join lateral (
            (
                select q.endpoint_id, q.priority, q.next_retry_at
                from ulak.queue q
                where q.status = 'pending' and q.endpoint_id = l.endpoint_id and q.priority < l.priority
                order by q.priority desc, q.next_retry_at, q.id
                limit 1
            )
            union all
            (
                select q.endpoint_id, q.priority, q.next_retry_at
                from ulak.queue q
                where q.status = 'pending' and q.endpoint_id > l.endpoint_id and p_endpoint_id is null
                order by q.endpoint_id, q.priority desc, q.next_retry_at, q.id
                limit 1
            )
            limit 1
        ) n
    ),
    pending as materialized (
        select l.endpoint_id, min(l.next_retry_at) as first_due
        from level l
        where p_endpoint_id is null or l.endpoint_id = p_endpoint_id
        group by l.endpoint_id
    ),
    share as materialized (
        select
            greatest(100, 10000 / greatest((select count(*) from pending p), 1)) as size,
            greatest(100, 10000 / greatest((select count(*) from ulak.endpoints e), 1)) as dead
    )
    select
        e.id,
        case when c.messages > b.size then greatest(s.waiting, c.messages) else coalesce(c.messages, 0) end,
        coalesce(c.messages > b.size, false),
        o.created_at,
        case when least(p.first_due, o.due_at) <= p_now then least(p.first_due, o.due_at) end,
        f.messages,
        case when d.messages > b.dead then greatest(s.dead, d.messages) else d.messages end
    from ulak.endpoints e
    cross join share b
    left join pending p on p.endpoint_id = e.id
    left join lateral (
        select count(*) as messages, min(q.id) as first_id
        from (
            select q.id
            from ulak.queue q
            where q.status = 'pending' and q.endpoint_id = p.endpoint_id
            limit (select b.size + 1 from share b)
        ) q
    ) c on p.endpoint_id is not null
    left join lateral (
        select s.waiting, s.dead, s.oldest_id
        from ulak.backlog_samples s
        where s.endpoint_id = e.id
        order by s.sampled_at desc
        limit 1
    ) s on true
    -- Ids are drawn in the order of sending. What waits for its schedule isn't late.
    left join lateral (
        select
            q.created_at,
            case when q.scheduled_at is null or q.scheduled_at <= p_now then greatest(q.created_at, q.scheduled_at) end as due_at
        from ulak.queue q
        where q.id = case when c.messages > b.size then s.oldest_id else c.first_id end
            and q.status is not distinct from 'pending'
    ) o on true
    cross join lateral (
        select count(*) as messages
        from (
            select
            from ulak.queue q
            where q.status = 'processing' and q.endpoint_id = e.id
            limit 10000
        ) q
    ) f
    cross join lateral (
        select count(*) as messages
        from (
            select
            from ulak.dlq d
            where d.status = 'failed' and d.endpoint_id = e.id
            limit (select b.dead + 1 from share b)
        ) d
    ) d
    where p_endpoint_id is null or e.id = p_endpoint_id;
end
$plpgsql$;

-- Maintenance counts every minute. Endpoints with nothing that waits get a row as well, so that a curve falls to 0. Rows
-- that vacuum hasn't seen yet take long to count: after p_budget the rest, longest not counted first, is left to the next run.
create or replace function ulak._sample_backlog(
    p_now timestamptz default clock_timestamp(),
    p_budget interval default '5 seconds'
)
returns integer
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
set plan_cache_mode = force_generic_plan
as $plpgsql$
declare
    v_deadline timestamptz := clock_timestamp() + p_budget;
    v_endpoint_id bigint;
    v_sampled integer := 0;
begin
    for v_endpoint_id in
        select e.id
        from ulak.endpoints e
        left join lateral (
            select s.sampled_at
            from ulak.backlog_samples s
            where s.endpoint_id = e.id
            order by s.sampled_at desc
            limit 1
        ) s on true
        order by s.sampled_at nulls first, e.id
    loop
        exit when clock_timestamp() >= v_deadline;
        insert into ulak.backlog_samples (endpoint_id, sampled_at, waiting, dead, oldest_id)
        select v_endpoint_id, p_now, w.waiting, d.dead, w.oldest_id
        from (
            select count(*) as waiting, min(q.id) as oldest_id
            from ulak.queue q
            where q.status = 'pending' and q.endpoint_id = v_endpoint_id
        ) w
        cross join (
            select count(*) as dead
            from ulak.dlq d
            where d.status = 'failed' and d.endpoint_id = v_endpoint_id
        ) d
        on conflict do nothing;
        v_sampled := v_sampled + 1;
    end loop;
    perform ulak._sum_traffic(p_now);
    return v_sampled;
end
$plpgsql$;

-- Minutes from here on may still change, or aren't in ulak.traffic yet: what a worker counts is there once it commits.
create or replace function ulak._traffic_is_final_before()
returns timestamptz
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select coalesce(max(t.minute) - interval '5 minutes', '-infinity')
    from ulak.traffic t
$sql$;

-- The minutes that aren't final, all endpoints together.
create or replace function ulak._recent_traffic(p_from timestamptz default '-infinity')
returns table (minute timestamptz, delivered bigint, failed bigint, latency_histogram bigint[])
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select
        t.minute,
        sum(t.delivered)::bigint,
        sum(t.failed)::bigint,
        array[
            sum(t.latency_histogram[1]), sum(t.latency_histogram[2]), sum(t.latency_histogram[3]),
            sum(t.latency_histogram[4]), sum(t.latency_histogram[5]), sum(t.latency_histogram[6]),
            sum(t.latency_histogram[7]), sum(t.latency_histogram[8]), sum(t.latency_histogram[9]),
            sum(t.latency_histogram[10]), sum(t.latency_histogram[11]), sum(t.latency_histogram[12]),
            sum(t.latency_histogram[13]), sum(t.latency_histogram[14]), sum(t.latency_histogram[15]),
            sum(t.latency_histogram[16]), sum(t.latency_histogram[17]), sum(t.latency_histogram[18]),
            sum(t.latency_histogram[19]), sum(t.latency_histogram[20]), sum(t.latency_histogram[21]),
            sum(t.latency_histogram[22])
        ]::bigint[]
    from ulak.endpoint_stats t
    where t.minute >= greatest(p_from, ulak._traffic_is_final_before())
    group by t.minute
$sql$;

create or replace function ulak._sum_traffic(p_now timestamptz)
returns void
language sql
set search_path = pg_catalog, pg_temp
as $sql$
    insert into ulak.traffic as t (minute, delivered, failed, latency_histogram, waiting)
    select m.minute, coalesce(r.delivered, 0), coalesce(r.failed, 0), coalesce(r.latency_histogram, '{}'), w.waiting
    from ulak._recent_traffic() r
    full join (
        -- Where a sample is missing because time ran out, the one before it is what is known.
        select date_trunc('minute', p_now) as minute, sum(s.waiting)::bigint as waiting
        from ulak.endpoints e
        cross join lateral (
            select s.waiting
            from ulak.backlog_samples s
            where s.endpoint_id = e.id and s.sampled_at <= p_now
            order by s.sampled_at desc
            limit 1
        ) s
    ) w on w.minute = r.minute
    cross join lateral (select coalesce(r.minute, w.minute)) m (minute)
    on conflict (minute) do update
    set delivered = excluded.delivered,
        failed = excluded.failed,
        latency_histogram = excluded.latency_histogram,
        waiting = coalesce(excluded.waiting, t.waiting)
$sql$;

-- What waits until when, counted up to a bound: 5,000 messages, shared by the (endpoint, priority) pairs that have some.
create or replace function ulak._retry_schedule(p_now timestamptz default clock_timestamp())
returns table (endpoint text, due text, messages bigint, is_estimate boolean, first_at timestamptz, last_at timestamptz)
language plpgsql
stable
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
set plan_cache_mode = force_generic_plan
as $plpgsql$
#variable_conflict use_column
begin
    return query
    with recursive level as (
        (
            select q.endpoint_id, q.priority
            from ulak.queue q
            where q.status = 'pending'
            order by q.endpoint_id, q.priority desc
            limit 1
        )
        union all
        select n.endpoint_id, n.priority
        from level l
        cross join lateral (
            (
                select q.endpoint_id, q.priority
                from ulak.queue q
                where q.status = 'pending' and q.endpoint_id = l.endpoint_id and q.priority < l.priority
                order by q.priority desc
                limit 1
            )
            union all
            (
                select q.endpoint_id, q.priority
                from ulak.queue q
                where q.status = 'pending' and q.endpoint_id > l.endpoint_id
                order by q.endpoint_id, q.priority desc
                limit 1
            )
            limit 1
        ) n
    ),
    share as materialized (
        select greatest(100, 5000 / greatest(count(*), 1)) as size
        from level l
    ),
    span (place, due, after, until) as (
        values
            (1, 'now', '-infinity'::timestamptz, p_now),
            (2, 'within a minute', p_now, p_now + interval '1 minute'),
            (3, 'within 5 minutes', p_now + interval '1 minute', p_now + interval '5 minutes'),
            (4, 'within an hour', p_now + interval '5 minutes', p_now + interval '1 hour'),
            (5, 'within a day', p_now + interval '1 hour', p_now + interval '1 day'),
            (6, 'later', p_now + interval '1 day', timestamptz '294276-01-01 00:00:00+00'),
            (7, 'behind another of its ordering key', timestamptz '294276-01-01 00:00:00+00', timestamptz 'infinity')
    )
    select
        coalesce(e.name, format('(endpoint %s, dropped)', l.endpoint_id)),
        s.due,
        sum(least(c.messages, (select b.size from share b)))::bigint,
        bool_or(c.messages > (select b.size from share b)),
        min(c.first_at),
        case when bool_or(c.messages > (select b.size from share b)) then null else max(c.last_at) end
    from level l
    cross join span s
    cross join lateral (
        select
            count(*) as messages,
            min(nullif(q.next_retry_at, 'infinity')) as first_at,
            max(nullif(q.next_retry_at, 'infinity')) as last_at
        from (
            select q.next_retry_at
            from ulak.queue q
            where q.status = 'pending'
                and q.endpoint_id = l.endpoint_id
                and q.priority = l.priority
                and q.next_retry_at > s.after
                and q.next_retry_at <= s.until
            order by q.next_retry_at
            limit (select b.size + 1 from share b)
        ) q
    ) c
    left join ulak.endpoints e on e.id = l.endpoint_id
    where c.messages > 0
    group by l.endpoint_id, e.name, s.place, s.due
    order by 1, s.place;
end
$plpgsql$;

create or replace view ulak.retry_schedule as
select r.endpoint, r.due, r.messages, r.is_estimate, r.first_at, r.last_at
from ulak._retry_schedule() r;

comment on view ulak.retry_schedule is 'how many messages wait until when, per endpoint';
comment on column ulak.retry_schedule.endpoint is 'name of the endpoint';
comment on column ulak.retry_schedule.due is 'when they are due: now, within a minute, and so on, or behind an earlier message of their ordering key';
comment on column ulak.retry_schedule.messages is 'how many';
comment on column ulak.retry_schedule.is_estimate is 'true: there are more, they were not counted';
comment on column ulak.retry_schedule.first_at is 'when the first of them is due';
comment on column ulak.retry_schedule.last_at is 'when the last of them is due; null if not all were counted';
-- How endpoints are doing: backlog, rates, latency and state of each, the worst first.

create or replace function ulak.get_endpoint_health(
    p_name text default null,
    p_now timestamptz default clock_timestamp()
)
returns table (
    endpoint_name text,
    protocol text,
    enabled boolean,
    circuit_state text,
    circuit_failure_count integer,
    last_success_at timestamptz,
    last_failure_at timestamptz,
    pending_messages bigint,
    oldest_pending_message timestamptz,
    pending_is_estimate boolean,
    due_since timestamptz,
    in_flight bigint,
    dead_letters bigint,
    delivered_per_second double precision,
    failed_percent double precision,
    p50_ms double precision,
    p95_ms double precision,
    next_probe_at timestamptz,
    last_error text,
    state text,
    last_hour bigint[]
)
language plpgsql
stable
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
set plan_cache_mode = force_generic_plan
as $plpgsql$
#variable_conflict use_column
declare
    v_endpoint_id bigint;
    v_from timestamptz := date_trunc('minute', p_now) - interval '59 minutes';
begin
    if p_name is not null then
        select e.id into v_endpoint_id
        from ulak.endpoints e
        where e.name = p_name;
        if not found then
            perform ulak._raise_unknown_endpoint(p_name);
        end if;
    end if;
    return query
    select
        f.name,
        f.protocol,
        f.enabled,
        f.circuit_state,
        f.circuit_failure_count,
        f.last_success_at,
        f.last_failure_at,
        f.waiting,
        f.oldest_at,
        f.is_estimate,
        f.due_since,
        f.in_flight,
        f.dead,
        f.per_second,
        f.failed_percent,
        f.p50_ms,
        f.p95_ms,
        case when f.circuit_state = 'open' then f.circuit_half_open_at end,
        f.last_error,
        f.state,
        h.delivered
    from ulak._endpoint_facts(v_endpoint_id, p_now) f
    -- Three minutes each: as wide as a sparkline may be.
    cross join lateral (
        select array_agg(coalesce(d.delivered, 0) order by n) as delivered
        from generate_series(0, 19) n
        left join (
            select floor(extract(epoch from t.minute - v_from) / 180)::integer as n, sum(t.delivered)::bigint as delivered
            from ulak.endpoint_stats t
            where t.endpoint_id = f.id and t.minute >= v_from and t.minute <= p_now
            group by 1
        ) d using (n)
    ) h
    order by ulak._pain(f.state, f.waiting) desc, f.due_since nulls last, f.waiting desc, f.name;
end
$plpgsql$;

comment on function ulak.get_endpoint_health(text, timestamptz) is
    'how one endpoint, or each, is doing: what waits and since when, rates and latency of the last minutes, circuit, last error; '
    'the worst first';

-- What all the others look at.
create or replace function ulak._endpoint_facts(p_endpoint_id bigint, p_now timestamptz)
returns table (
    id bigint,
    name text,
    protocol text,
    enabled boolean,
    circuit_state text,
    circuit_failure_count integer,
    circuit_half_open_at timestamptz,
    created_at timestamptz,
    last_success_at timestamptz,
    last_failure_at timestamptz,
    last_error text,
    waiting bigint,
    is_estimate boolean,
    oldest_at timestamptz,
    due_since timestamptz,
    in_flight bigint,
    dead bigint,
    per_second double precision,
    failed_percent double precision,
    p50_ms double precision,
    p95_ms double precision,
    state text
)
language plpgsql
stable
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
set plan_cache_mode = force_generic_plan
as $plpgsql$
#variable_conflict use_column
begin
    return query
    select
        e.id,
        e.name,
        e.protocol,
        e.enabled,
        e.circuit_state,
        e.circuit_failure_count,
        e.circuit_half_open_at,
        e.created_at,
        e.last_success_at,
        e.last_failure_at,
        e.last_error,
        b.waiting,
        b.is_estimate,
        b.oldest_at,
        b.due_since,
        b.in_flight,
        b.dead,
        r.per_second,
        r.failed_percent,
        ulak._percentile(r.histogram, 0.50),
        ulak._percentile(r.histogram, 0.95),
        ulak._endpoint_state(e.enabled, e.circuit_state, b.due_since, r.failed_percent, r.per_second, p_now)
    from ulak._backlog(p_endpoint_id, p_now) b
    join ulak.endpoints e on e.id = b.endpoint_id
    cross join lateral ulak._recent_rates(e.id, p_now) r;
end
$plpgsql$;

-- A sliding minute out of two counted ones. Failures and latency over five minutes: one minute of them says little.
create or replace function ulak._recent_rates(
    p_endpoint_id bigint,
    p_now timestamptz,
    out per_second double precision,
    out failed_percent double precision,
    out histogram bigint[]
)
language sql
stable
as $sql$
    select
        case
            when coalesce(sum(t.delivered) filter (where t.minute < c.minute and t.minute >= c.minute - interval '1 minute'), 0) = 0
                then coalesce(sum(t.delivered) filter (where t.minute = c.minute), 0) / greatest(c.seconds, 10)
            else (
                sum(t.delivered) filter (where t.minute < c.minute and t.minute >= c.minute - interval '1 minute')
                    * (60 - c.seconds) / 60
                + coalesce(sum(t.delivered) filter (where t.minute = c.minute), 0)
            ) / 60
        end,
        100.0 * sum(t.failed) / nullif(sum(t.failed) + sum(t.delivered), 0),
        array[
            sum(t.latency_histogram[1]), sum(t.latency_histogram[2]), sum(t.latency_histogram[3]),
            sum(t.latency_histogram[4]), sum(t.latency_histogram[5]), sum(t.latency_histogram[6]),
            sum(t.latency_histogram[7]), sum(t.latency_histogram[8]), sum(t.latency_histogram[9]),
            sum(t.latency_histogram[10]), sum(t.latency_histogram[11]), sum(t.latency_histogram[12]),
            sum(t.latency_histogram[13]), sum(t.latency_histogram[14]), sum(t.latency_histogram[15]),
            sum(t.latency_histogram[16]), sum(t.latency_histogram[17]), sum(t.latency_histogram[18]),
            sum(t.latency_histogram[19]), sum(t.latency_histogram[20]), sum(t.latency_histogram[21]),
            sum(t.latency_histogram[22])
        ]::bigint[]
    from (
        select date_trunc('minute', p_now) as minute, extract(second from p_now)::double precision as seconds
    ) c
    left join ulak.endpoint_stats t
        on t.endpoint_id = p_endpoint_id and t.minute > c.minute - interval '5 minutes' and t.minute <= c.minute
    group by c.minute, c.seconds
$sql$;

-- Element 1 counts what took less than 1 ms, element i what took from 2^(i-2) to 2^(i-1) ms. Within an element the times
-- are taken to be spread evenly.
create or replace function ulak._percentile(p_histogram bigint[], p_fraction double precision)
returns double precision
language plpgsql
immutable
as $plpgsql$
declare
    v_count bigint;
    v_all bigint := 0;
    v_wanted double precision;
    v_below bigint := 0;
    v_from double precision;
begin
    foreach v_count in array coalesce(p_histogram, '{}') loop
        v_all := v_all + coalesce(v_count, 0);
    end loop;
    if v_all = 0 then
        return null;
    end if;
    v_wanted := p_fraction * v_all;
    for i in 1..cardinality(p_histogram) loop
        if p_histogram[i] > 0 and v_below + p_histogram[i] >= v_wanted then
            v_from := case when i = 1 then 0 else 2.0 ^ (i - 2) end;
            return v_from + (2.0 ^ (i - 1) - v_from) * (v_wanted - v_below) / p_histogram[i];
        end if;
        v_below := v_below + coalesce(p_histogram[i], 0);
    end loop;
end
$plpgsql$;

-- One word for an endpoint. Late: a message that is due has waited for more than a minute.
create or replace function ulak._endpoint_state(
    p_enabled boolean,
    p_circuit_state text,
    p_due_since timestamptz,
    p_failed_percent double precision,
    p_per_second double precision,
    p_now timestamptz
)
returns text
language sql
immutable
as $sql$
    select case
        when not p_enabled then 'disabled'
        when p_circuit_state <> 'closed' then p_circuit_state
        when p_due_since < p_now - interval '1 minute' then 'late'
        when p_failed_percent >= 5 then 'failing'
        when p_per_second > 0 then 'flowing'
        else 'idle'
    end
$sql$;

create or replace function ulak._pain(p_state text, p_waiting bigint)
returns integer
language sql
immutable
set search_path = pg_catalog, pg_temp
as $sql$
    select case p_state
        when 'open' then 7
        when 'half_open' then 6
        when 'late' then 5
        when 'failing' then 4
        when 'disabled' then case when p_waiting > 0 then 3 else 0 end
        when 'flowing' then 2
        else 1
    end
$sql$;
-- ulak.top: all endpoints at a glance, for \watch.

create or replace function ulak._top(p_now timestamptz default clock_timestamp())
returns table (
    endpoint text,
    state text,
    waiting text,
    oldest_wait text,
    in_flight bigint,
    per_second numeric,
    failed_percent numeric,
    p50 text,
    p95 text,
    breaker text,
    last_hour text,
    last_error text
)
language sql
stable
security definer
set search_path = pg_catalog, pg_temp
as $sql$
    select
        h.endpoint_name,
        ulak._state_glyph(h.state) || ' ' || h.state,
        lpad(case when h.pending_is_estimate then '~' else '' end || ulak._thousands(h.pending_messages), 10),
        lpad(coalesce(ulak._short_duration(p_now - h.due_since), ''), 7),
        h.in_flight,
        round(h.delivered_per_second::numeric, 1),
        round(h.failed_percent::numeric, 1),
        lpad(coalesce(ulak._short_duration(make_interval(secs => h.p50_ms / 1000)), ''), 6),
        lpad(coalesce(ulak._short_duration(make_interval(secs => h.p95_ms / 1000)), ''), 6),
        case h.circuit_state
            when 'open' then 'open, ' || case
                when h.next_probe_at <= p_now then 'probe due'
                else 'probe in ' || ulak._short_duration(h.next_probe_at - p_now)
            end
            when 'half_open' then 'probing'
            else case when h.circuit_failure_count > 0 then format('closed, %s failed', h.circuit_failure_count) else 'closed' end
        end,
        ulak._sparkline(h.last_hour),
        case
            when length(h.last_error) > 40 then left(h.last_error, 39) || '…'
            else h.last_error
        end
    from ulak.get_endpoint_health(null, p_now) h
$sql$;

create or replace view ulak.top as
select
    t.endpoint,
    t.state,
    t.waiting,
    t.oldest_wait,
    t.in_flight,
    t.per_second,
    t.failed_percent,
    t.p50,
    t.p95,
    t.breaker,
    t.last_hour,
    t.last_error
from ulak._top() t;

comment on view ulak.top is 'all endpoints at a glance, the worst first; in psql: select * from ulak.top \watch 2';
comment on column ulak.top.endpoint is 'name of the endpoint';
comment on column ulak.top.state is '● flowing, · idle, ▲ failing (5% or more) or late (due for over a minute), ◐ half_open, ○ open, ■ disabled';
comment on column ulak.top.waiting is 'messages that wait; ~ is the count of the last minute';
comment on column ulak.top.oldest_wait is 'how long the oldest message that is due has waited';
comment on column ulak.top.in_flight is 'messages that a worker holds';
comment on column ulak.top.per_second is 'deliveries per second in the last minute (http endpoints)';
comment on column ulak.top.failed_percent is 'share of attempts that failed in the last five minutes';
comment on column ulak.top.p50 is 'half of the requests of the last five minutes took less';
comment on column ulak.top.p95 is '95% of the requests of the last five minutes took less';
comment on column ulak.top.breaker is 'state of the circuit breaker, and when an open one sends its next probe';
comment on column ulak.top.last_hour is 'deliveries of the last hour, three minutes per sign';
comment on column ulak.top.last_error is 'last failure, cut at 40 characters';

create or replace function ulak._state_glyph(p_state text)
returns text
language sql
immutable
set search_path = pg_catalog, pg_temp
as $sql$
    select case p_state
        when 'flowing' then '●'
        when 'idle' then '·'
        when 'half_open' then '◐'
        when 'open' then '○'
        when 'disabled' then '■'
        else '▲'
    end
$sql$;

create or replace function ulak._thousands(p_number numeric)
returns text
language sql
immutable
set search_path = pg_catalog, pg_temp
as $sql$
    select to_char(p_number, 'FM999,999,999,990')
$sql$;

-- The two largest units: 850ms, 12.3s, 3m 12s, 5h 2m, 4d 7h.
create or replace function ulak._short_duration(p_interval interval)
returns text
language plpgsql
immutable
as $plpgsql$
declare
    v_seconds numeric := extract(epoch from p_interval);
begin
    if v_seconds is null then
        return null;
    end if;
    v_seconds := greatest(v_seconds, 0);
    return case
        when v_seconds < 0.01 then to_char(v_seconds * 1000, 'FM990.0') || 'ms'
        when v_seconds < 1 then round(v_seconds * 1000) || 'ms'
        when v_seconds < 60 then to_char(trunc(v_seconds, 1), 'FM990.0') || 's'
        when v_seconds < 3600 then format('%sm %ss', div(v_seconds, 60), floor(v_seconds % 60))
        when v_seconds < 86400 then format('%sh %sm', div(v_seconds, 3600), div(v_seconds % 3600, 60))
        else format('%sd %sh', div(v_seconds, 86400), div(v_seconds % 86400, 3600))
    end;
end
$plpgsql$;

-- A dot is none at all; the lowest bar is at least one.
create or replace function ulak._sparkline(p_values bigint[])
returns text
language plpgsql
immutable
as $plpgsql$
declare
    v_line text := '';
    v_value bigint;
    v_most bigint := 0;
begin
    foreach v_value in array p_values loop
        v_most := greatest(v_most, v_value);
    end loop;
    foreach v_value in array p_values loop
        v_line := v_line || case
            when v_value = 0 then '·'
            else substr('▁▂▃▄▅▆▇█', least(8, 1 + (8 * v_value / v_most)::integer), 1)
        end;
    end loop;
    return v_line;
end
$plpgsql$;
-- Workers and components: one row each, for people and for probes.

create or replace function ulak.get_worker_status(p_now timestamptz default clock_timestamp())
returns table (
    pid integer,
    state text,
    started_at timestamptz,
    messages_processed bigint,
    last_activity timestamptz,
    error_count bigint,
    last_error text,
    slot integer,
    name text,
    heartbeat_at timestamptz,
    in_flight integer,
    version text
)
language sql
stable
security definer
set search_path = pg_catalog, pg_temp
as $sql$
    select
        w.pid,
        case
            when w.state = 'stopped' then 'stopped'
            when not ulak._is_alive(w, p_now) then 'lost'
            when w.stop_requested_at >= w.started_at then 'leaving'
            else 'running'
        end,
        w.started_at,
        w.messages_processed,
        w.last_activity,
        w.error_count,
        w.last_error,
        w.slot,
        w.name,
        w.heartbeat_at,
        w.in_flight,
        w.version
    from ulak.workers w
    order by w.slot
$sql$;

comment on function ulak.get_worker_status(timestamptz) is
    'worker slots: running, leaving (stop() was called), stopped (the run is over), or lost (no sign of life for 15 seconds)';

-- A worker gives a sign of life twice a second. Its slot is empty for a moment between two runs.
create or replace function ulak._is_alive(p_worker ulak.workers, p_now timestamptz)
returns boolean
language sql
immutable
as $sql$
    select p_worker.heartbeat_at > p_now - interval '15 seconds'
        and (p_worker.state = 'running' or coalesce(p_worker.stop_requested_at < p_worker.started_at, true))
$sql$;

create or replace function ulak._count_alive(p_now timestamptz)
returns bigint
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select count(*)
    from ulak.workers w
    where ulak._is_alive(w, p_now)
$sql$;

create or replace function ulak.health_check(p_now timestamptz default clock_timestamp())
returns table (component text, status text, details text, checked_at timestamptz)
language sql
stable
security definer
set search_path = pg_catalog, pg_temp
as $sql$
    with health as materialized (
        select f.*
        from ulak._endpoint_facts(null, p_now) f
    ),
    queue as (
        select
            coalesce(sum(h.waiting), 0) as waiting,
            coalesce(sum(h.in_flight), 0) as in_flight,
            coalesce(sum(h.dead), 0) as dead,
            min(h.due_since) filter (where h.enabled) as due_since,
            count(*) filter (where h.protocol = 'http') as http,
            count(*) as endpoints,
            string_agg(h.name, ', ' order by h.name) filter (where h.circuit_state <> 'closed') as troubled,
            nullif(ulak.setting('max_queue_size')::bigint, 0) as most
        from health h
    ),
    maintenance as (
        select
            case
                when bool_and(m.state = 'never ran') then 'it never ran'
                else string_agg(format('%s %s', m.step, m.state), ', ') filter (where m.state in ('failed', 'late', 'never ran'))
            end as trouble,
            bool_or(m.state = 'failed') as failed,
            max(m.started_at) as last_run
        from ulak.maintenance_status m
        where m.step <> 'vacuum'
    ),
    checked (place, component, status, details) as (
        select
            1,
            'workers',
            case when ulak._count_alive(p_now) > 0 or q.http = 0 then 'ok' else 'critical' end,
            format('%s alive', ulak._count_alive(p_now))
        from queue q
        union all
        select
            2,
            'queue',
            case
                when q.waiting + q.in_flight >= q.most then 'critical'
                when q.due_since < p_now - interval '5 minutes' or q.waiting + q.in_flight > 0.8 * q.most then 'warning'
                else 'ok'
            end,
            concat_ws(
                ', ',
                format('%s waiting', q.waiting),
                format('%s in flight', q.in_flight),
                'oldest due for ' || ulak._short_duration(p_now - q.due_since)
            )
        from queue q
        union all
        select
            3,
            'endpoints',
            case when q.troubled is null then 'ok' else 'warning' end,
            concat_ws(', ', ulak._counted(q.endpoints, 'endpoint'), 'circuit not closed: ' || q.troubled)
        from queue q
        union all
        select 4, 'dlq', case when q.dead = 0 then 'ok' else 'warning' end, ulak._counted(q.dead, 'dead letter')
        from queue q
        union all
        select
            5,
            'maintenance',
            case when m.failed then 'critical' when m.trouble is not null then 'warning' else 'ok' end,
            coalesce(m.trouble, 'last run ' || ulak._short_duration(p_now - m.last_run) || ' ago')
        from maintenance m
        union all
        select 6, 'archive', case when a.problem is null then 'ok' else 'warning' end, coalesce(a.problem, 'partitions are in place')
        from (select string_agg(p.finding, ', ') from ulak._check_partitions(p_now) p) a (problem)
        union all
        select
            7,
            'cluster',
            case when ulak._is_adopted() then 'ok' else 'critical' end,
            case
                when ulak._is_adopted() then 'this cluster delivers'
                else 'messages of another cluster were restored here and are held until ulak.adopt()'
            end
    )
    select c.component, c.status, c.details, p_now
    from checked c
    order by c.place
$sql$;

comment on function ulak.health_check(timestamptz) is
    'one row per component with ok, warning or critical; ulak.doctor() says what to do about it';

create or replace function ulak._counted(p_count numeric, p_what text)
returns text
language sql
immutable
set search_path = pg_catalog, pg_temp
as $sql$
    select p_count || ' ' || p_what || case when p_count = 1 then '' else 's' end
$sql$;

create or replace function ulak._check_partitions(p_now timestamptz)
returns table (finding text)
language sql
stable
set search_path = pg_catalog, pg_temp
set timezone = 'UTC'
as $sql$
    select format('partition %s is missing', to_char(m.month, '"archive_"YYYY_MM'))
    from (
        values (date_trunc('month', p_now)), (date_trunc('month', p_now) + interval '1 month')
    ) m (month)
    where not exists (select from ulak._archive_partitions p where p.month = m.month)
    union all
    select 'archive_default is not empty: it holds months that have no partition'
    where exists (select from ulak.archive_default)
$sql$;
-- Metrics: gauges and counters as rows, and as text for Prometheus.

create or replace function ulak.metrics(p_now timestamptz default clock_timestamp())
returns table (metric_name text, metric_value double precision, labels jsonb, metric_type text)
language sql
stable
security definer
set search_path = pg_catalog, pg_temp
as $sql$
    with health as materialized (
        select f.*, jsonb_build_object('endpoint', f.name) as labels
        from ulak._endpoint_facts(null, p_now) f
    )
    select m.name, m.value::double precision, m.labels, d.type
    from (
        select v.name, v.value, '{}'::jsonb as labels
        from (
            select
                coalesce(sum(h.waiting), 0) as waiting,
                coalesce(sum(h.in_flight), 0) as in_flight,
                coalesce(sum(h.dead), 0) as dead,
                coalesce(extract(epoch from p_now - min(h.oldest_at)), 0) as age,
                coalesce(extract(epoch from p_now - min(h.due_since)), 0) as delay
            from health h
        ) q
        cross join lateral (
            values
                ('queue_depth', q.waiting + q.in_flight),
                ('oldest_message_age_seconds', q.age),
                ('delivery_delay_seconds', q.delay),
                ('dlq_depth', q.dead),
                ('queue_limit', ulak.setting('max_queue_size')::numeric),
                ('message_ids_total', (select s.last_value from ulak.queue_id_seq s)),
                ('workers_alive', ulak._count_alive(p_now)),
                ('cluster_adopted', ulak._is_adopted()::integer),
                ('archive_partitions_missing', (select count(*) from ulak._check_partitions(p_now))),
                ('queue_live_rows', pg_stat_get_live_tuples('ulak.queue'::regclass)),
                ('queue_dead_rows', pg_stat_get_dead_tuples('ulak.queue'::regclass))
        ) v (name, value)
        union all
        select v.name, v.value, h.labels
        from health h
        cross join lateral (
            values
                ('queue_depth_by_endpoint', h.waiting + h.in_flight),
                ('in_flight_by_endpoint', h.in_flight),
                ('dlq_depth_by_endpoint', h.dead),
                ('delivery_delay_by_endpoint_seconds', coalesce(extract(epoch from p_now - h.due_since), 0)),
                ('endpoint_circuit_state', case h.circuit_state when 'closed' then 0 when 'half_open' then 1 else 2 end),
                ('endpoint_circuit_failures', h.circuit_failure_count),
                ('endpoint_enabled', h.enabled::integer)
        ) v (name, value)
        union all
        select v.name, v.value, jsonb_build_object('slot', w.slot::text)
        from ulak.workers w
        cross join lateral (
            values
                ('worker_in_flight', w.in_flight),
                ('worker_messages_total', w.messages_processed),
                ('worker_errors_total', w.error_count),
                ('worker_heartbeat_age_seconds', greatest(extract(epoch from p_now - w.heartbeat_at), 0))
        ) v (name, value)
        union all
        select v.name, v.value, jsonb_build_object('step', r.step)
        from ulak.maintenance_runs r
        cross join lateral (
            values
                ('maintenance_age_seconds', greatest(extract(epoch from p_now - r.started_at), 0)),
                ('maintenance_duration_seconds', extract(epoch from r.duration)),
                ('maintenance_errors_total', r.errors),
                ('maintenance_rows_total', r.total_rows)
        ) v (name, value)
        union all
        select t.name, t.value::numeric, t.labels
        from ulak._delivery_metrics() t
    ) m
    join ulak._metric_definitions() d on d.name = m.name
    order by d.place, m.labels ->> 'endpoint', m.labels ->> 'slot', m.labels ->> 'step', (m.labels ->> 'le')::double precision
$sql$;

comment on function ulak.metrics(timestamptz) is
    'gauges and counters as rows: name, value, labels and type; endpoint_circuit_state is 0 closed, 1 half_open, 2 open';

-- Counters of deliveries, and their latency as a cumulative histogram in seconds.
create or replace function ulak._delivery_metrics()
returns table (name text, value double precision, labels jsonb)
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    with total as materialized (
        select t.*, jsonb_build_object('endpoint', e.name) as labels
        from ulak.endpoints e
        join ulak.endpoint_totals t on t.endpoint_id = e.id
    )
    select v.name, v.value, t.labels
    from total t
    cross join lateral (
        values
            ('delivered_total', t.delivered::double precision),
            ('failed_attempts_total', t.failed),
            ('delivery_duration_seconds_sum', t.latency_total_ms / 1000),
            ('delivery_duration_seconds_count', (select coalesce(sum(h), 0) from unnest(t.latency_histogram) h))
    ) v (name, value)
    union all
    select
        'delivery_duration_seconds_bucket',
        sum(h.requests) over (partition by t.endpoint_id order by h.bucket),
        t.labels || jsonb_build_object(
            'le', case when h.bucket = cardinality(t.latency_histogram) then '+Inf' else (2 ^ (h.bucket - 1) / 1000)::text end
        )
    from total t
    cross join lateral unnest(t.latency_histogram) with ordinality h (requests, bucket)
$sql$;

-- In the order in which they are told. A histogram's three series share a definition in Prometheus.
create or replace function ulak._metric_definitions()
returns table (place integer, name text, type text, help text)
language sql
immutable
set search_path = pg_catalog, pg_temp
as $sql$
    values
        (1, 'queue_depth', 'gauge', 'messages that wait or are in flight'),
        (2, 'queue_limit', 'gauge', 'setting max_queue_size; 0 is no limit'),
        (3, 'oldest_message_age_seconds', 'gauge', 'age of the oldest message that waits'),
        (4, 'delivery_delay_seconds', 'gauge', 'how long the oldest message that is due has waited'),
        (5, 'dlq_depth', 'gauge', 'dead letters that nobody has redriven'),
        (6, 'message_ids_total', 'counter', 'ids given to messages, those of rolled back transactions included'),
        (7, 'queue_depth_by_endpoint', 'gauge', 'messages that wait or are in flight, per endpoint'),
        (8, 'in_flight_by_endpoint', 'gauge', 'messages that a worker holds, per endpoint'),
        (9, 'dlq_depth_by_endpoint', 'gauge', 'dead letters that nobody has redriven, per endpoint'),
        (10, 'delivery_delay_by_endpoint_seconds', 'gauge', 'how long the oldest message that is due has waited, per endpoint'),
        (11, 'endpoint_circuit_state', 'gauge', '0 closed, 1 half_open, 2 open'),
        (12, 'endpoint_circuit_failures', 'gauge', 'consecutive failures that the circuit breaker has counted'),
        (13, 'endpoint_enabled', 'gauge', '1 enabled, 0 disabled'),
        (14, 'delivered_total', 'counter', 'messages delivered by workers'),
        (15, 'failed_attempts_total', 'counter', 'attempts of workers that failed'),
        (16, 'delivery_duration_seconds_bucket', 'histogram', 'time of requests'),
        (17, 'delivery_duration_seconds_sum', 'histogram', 'time of requests'),
        (18, 'delivery_duration_seconds_count', 'histogram', 'time of requests'),
        (19, 'workers_alive', 'gauge', 'workers with a sign of life in the last 15 seconds'),
        (20, 'worker_in_flight', 'gauge', 'messages that a worker holds, per slot'),
        (21, 'worker_messages_total', 'counter', 'messages settled, per slot'),
        (22, 'worker_errors_total', 'counter', 'failed deliveries, per slot'),
        (23, 'worker_heartbeat_age_seconds', 'gauge', 'time since the last sign of life, per slot'),
        (24, 'maintenance_age_seconds', 'gauge', 'time since the last run, per step'),
        (25, 'maintenance_duration_seconds', 'gauge', 'duration of the last run, per step'),
        (26, 'maintenance_errors_total', 'counter', 'errors, per step'),
        (27, 'maintenance_rows_total', 'counter', 'rows changed, per step'),
        (28, 'archive_partitions_missing', 'gauge', 'problems with partitions of the archive'),
        (29, 'queue_live_rows', 'gauge', 'rows of ulak.queue, as the statistics system knows them'),
        (30, 'queue_dead_rows', 'gauge', 'dead rows of ulak.queue, as the statistics system knows them'),
        (31, 'cluster_adopted', 'gauge', '1: this cluster delivers; 0: restored messages are held until ulak.adopt()')
$sql$;

create or replace function ulak.metrics_text(p_now timestamptz default clock_timestamp())
returns text
language sql
stable
security definer
set search_path = pg_catalog, pg_temp
as $sql$
    select string_agg(f.lines, '' order by f.place)
    from (
        select
            min(d.place) as place,
            format(E'# HELP ulak_%1$s %2$s\n# TYPE ulak_%1$s %3$s\n', s.family, min(d.help), min(d.type))
                || string_agg(
                    format(E'ulak_%s%s %s\n', m.metric_name, l.labels, m.metric_value),
                    ''
                    order by m.place
                ) as lines
        from ulak.metrics(p_now) with ordinality m (metric_name, metric_value, labels, metric_type, place)
        join ulak._metric_definitions() d on d.name = m.metric_name
        cross join lateral (
            select case d.type when 'histogram' then regexp_replace(d.name, '_(bucket|sum|count)$', '') else d.name end
        ) s (family)
        cross join lateral (
            select '{' || string_agg(
                format('%s="%s"', l.key, replace(replace(replace(l.value, '\', '\\'), '"', '\"'), E'\n', '\n')),
                ','
                order by l.key
            ) || '}'
            from jsonb_each_text(m.labels) l
        ) l (labels)
        group by s.family
    ) f
$sql$;

comment on function ulak.metrics_text(timestamptz) is
    'metrics() in the text format that Prometheus scrapes, each name with the prefix ulak_';
-- The story of one message: where it came from, what was tried, and what happens next or why nothing will.

-- A message wherever it is: in the queue, in the archive, or only among the dead letters. Without its payload.
create or replace function ulak._find_message(p_id bigint)
returns table (
    place text,
    id bigint,
    endpoint_id bigint,
    status text,
    created_at timestamptz,
    updated_at timestamptz,
    next_retry_at timestamptz,
    scheduled_at timestamptz,
    expires_at timestamptz,
    processing_started_at timestamptz,
    completed_at timestamptz,
    failed_at timestamptz,
    lease_until timestamptz,
    locked_by text,
    attempts integer,
    retry_count integer,
    priority smallint,
    ordering_key text,
    last_error text,
    event_type text,
    failure_history jsonb,
    archived_at timestamptz
)
language sql
stable
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
as $sql$
    select
        'queue', q.id, q.endpoint_id, q.status, q.created_at, q.updated_at, q.next_retry_at, q.scheduled_at, q.expires_at,
        q.processing_started_at, q.completed_at, q.failed_at, q.lease_until, q.locked_by, q.attempts, q.retry_count,
        q.priority, q.ordering_key, q.last_error, q.metadata ->> 'event_type', q.failure_history, null::timestamptz
    from ulak.queue q
    where q.id = p_id
    union all
    select
        'archive', a.id, a.endpoint_id, a.status, a.created_at, a.updated_at, a.next_retry_at, a.scheduled_at, a.expires_at,
        a.processing_started_at, a.completed_at, a.failed_at, a.lease_until, a.locked_by, a.attempts, a.retry_count,
        a.priority, a.ordering_key, a.last_error, a.metadata ->> 'event_type', a.failure_history, a.archived_at
    from ulak.archive a
    where a.id = p_id
    union all
    select
        'dlq', d.original_message_id, d.endpoint_id, 'failed', d.original_created_at, d.failed_at, null, d.scheduled_at,
        d.expires_at, null, null, d.failed_at, null, null, d.attempts, d.retry_count, d.priority, d.ordering_key, d.last_error,
        d.metadata ->> 'event_type', d.failure_history, d.archived_at
    from ulak.dlq d
    where d.original_message_id = p_id
    limit 1
$sql$;

create or replace function ulak.explain(p_id bigint, p_now timestamptz default clock_timestamp())
returns table (at timestamptz, what text)
language plpgsql
stable
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
as $plpgsql$
#variable_conflict use_column
declare
    v_message record;
    v_endpoint text;
begin
    select m.* into v_message
    from ulak._find_message(p_id) m;
    if not found then
        perform ulak._raise_unknown_message(p_id);
    end if;
    v_endpoint := coalesce(
        (select format('endpoint "%s"', e.name) from ulak.endpoints e where e.id = v_message.endpoint_id),
        format('endpoint %s, which does not exist any more', v_message.endpoint_id)
    );

    return query
    select s.at, s.what
    from (
        select 1 as place, 0::bigint as step, c.at, c.what
        from ulak._explain_cycles(v_message.failure_history) c
        union all
        select
            2,
            0,
            v_message.created_at,
            concat_ws(
                ', ',
                coalesce(
                    ulak._explain_origin(p_id, v_message.endpoint_id) || ' to ' || v_endpoint,
                    case when starts_with(v_message.event_type, 'ulak.') then v_message.event_type || ', ' else '' end
                        || 'sent to ' || v_endpoint
                ),
                case when v_message.priority > 0 then format('priority %s', v_message.priority) end,
                'ordering key "' || v_message.ordering_key || '"',
                'not before ' || v_message.scheduled_at,
                'not after ' || v_message.expires_at
            )
        union all
        select 3, a.attempt, a.ended_at, ulak._explain_attempt(a)
        from ulak.attempts a
        where a.message_id = p_id
        union all
        select 4, e.step, e.at, e.what
        from ulak._explain_end(
            p_id, v_message.place, v_message.status, v_message.created_at, v_message.updated_at, v_message.completed_at,
            v_message.processing_started_at, v_message.failed_at, v_message.expires_at, v_message.attempts,
            v_message.last_error, v_message.archived_at
        ) with ordinality e (at, what, step)
    ) s
    order by s.place, s.step, s.at;

    return query
    select n.at, n.what
    from ulak._explain_next(p_id, v_message.place, v_message.status, p_now) n;
end
$plpgsql$;

comment on function ulak.explain(bigint, timestamptz) is
    'the story of one message, by the id that send() returned: where it came from, what was tried, and last what happens '
    'next and when, or why nothing will';

create or replace function ulak._raise_unknown_message(p_id bigint)
returns void
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    raise exception 'message % is not known', coalesce(p_id::text, 'null')
        using errcode = 'P0002',
            detail = case
                when p_id between 1 and (select s.last_value from ulak.queue_id_seq s)
                    then 'The transaction that sent it was rolled back or has not committed yet, or its month has been dropped from the archive.'
                else 'No message has had this id.'
            end,
            hint = 'Pass the id that send() returned.';
end
$plpgsql$;

-- Cycles that failed before this one; a redrive or a replay took them along.
create or replace function ulak._explain_cycles(p_history jsonb)
returns table (at timestamptz, what text)
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select c.failed_at, format('an earlier cycle ended after %s: %s', ulak._attempts(c.attempts), c.last_error)
    from jsonb_to_recordset(coalesce(p_history, '[]')) c (attempts integer, last_error text, failed_at timestamptz)
$sql$;

create or replace function ulak._attempts(p_count integer)
returns text
language sql
immutable
as $sql$
    select case when p_count = 1 then '1 attempt' else format('%s attempts', p_count) end
$sql$;

-- Null if an application sent it.
create or replace function ulak._explain_origin(p_id bigint, p_endpoint_id bigint)
returns text
language sql
stable
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
as $sql$
    (
        select case l.event
            when 'message.redriven' then format(
                'redriven by %s from dead letter %s, which was message %s,',
                l.detail ->> 'by', l.detail ->> 'dlq_id', l.detail ->> 'original_message_id'
            )
            else format('replayed by %s from archived message %s', l.actor, l.detail ->> 'archive_id')
        end
        from ulak.event_log l
        where l.message_id = p_id and l.event in ('message.redriven', 'message.replayed')
        order by l.id
        limit 1
    )
    union all
    (
        select format('replayed by %s with %s others', l.actor, (l.detail -> 'messages')::integer - 1)
        from ulak.event_log l
        where l.event in ('message.replayed', 'messages.replayed')
            and l.event = 'messages.replayed'
            and l.endpoint_id = p_endpoint_id
            and p_id between (l.detail -> 'first_id')::bigint and (l.detail -> 'last_id')::bigint
        order by l.id
        limit 1
    )
    limit 1
$sql$;

create or replace function ulak._explain_attempt(p_attempt ulak.attempts)
returns text
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select format(
        'attempt %s failed after %s: %s',
        p_attempt.attempt,
        ulak._short_duration(p_attempt.ended_at - p_attempt.started_at),
        p_attempt.error
    )
$sql$;

-- How it ended, if it has.
create or replace function ulak._explain_end(
    p_id bigint,
    p_place text,
    p_status text,
    p_created_at timestamptz,
    p_updated_at timestamptz,
    p_completed_at timestamptz,
    p_processing_started_at timestamptz,
    p_failed_at timestamptz,
    p_expires_at timestamptz,
    p_attempts integer,
    p_last_error text,
    p_archived_at timestamptz
)
returns table (at timestamptz, what text)
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $plpgsql$
#variable_conflict use_column
begin
    case p_status
        when 'completed' then
            return query values (
                p_completed_at,
                format(
                    'delivered in attempt %s, which took %s; %s after it was sent',
                    p_attempts,
                    ulak._short_duration(p_completed_at - p_processing_started_at),
                    ulak._short_duration(p_completed_at - p_created_at)
                )
            );
        when 'expired' then
            return query values (p_updated_at, format('expired: it was not delivered by %s', p_expires_at));
        when 'failed' then
            return query values (
                p_failed_at, format('given up after %s: %s', ulak._attempts(p_attempts), p_last_error)
            );
            return query
            select d.redriven_at, format('redriven by %s as message %s', d.redriven_by, d.redriven_message_id)
            from ulak.dlq d
            where d.original_message_id = p_id and d.status = 'redriven';
        else
            null;
    end case;
    if p_place = 'archive' then
        return query values (p_archived_at, 'archived');
        return query
        select l.created_at, format('replayed by %s as message %s', l.actor, l.message_id)
        from ulak.event_log l
        where l.event in ('message.replayed', 'messages.replayed')
            and l.event = 'message.replayed'
            and l.detail -> 'archive_id' = to_jsonb(p_id);
    end if;
end
$plpgsql$;
-- What happens to a message next, and when, or why nothing will: the last line of ulak.explain().

create or replace function ulak._explain_next(p_id bigint, p_place text, p_status text, p_now timestamptz)
returns table (at timestamptz, what text)
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $plpgsql$
#variable_conflict use_column
declare
    v_letter record;
begin
    if p_status = 'pending' then
        return query select n.at, n.what from ulak._explain_waiting(p_id, p_now) n;
    elsif p_status = 'processing' then
        return query select n.at, n.what from ulak._explain_in_flight(p_id, p_now) n;
    elsif p_status = 'failed' then
        select d.id, d.status, d.redriven_message_id into v_letter
        from ulak.dlq d
        where d.original_message_id = p_id
        order by d.id desc
        limit 1;
        return query values (
            null::timestamptz,
            case
                when v_letter.id is null then 'next: nothing. Its dead letter was deleted after dlq_retention_days'
                when v_letter.status = 'redriven'
                    then format('next: it goes on as another message: select * from ulak.explain(%s);', v_letter.redriven_message_id)
                else format('next: nothing, it is dead letter %1$s. To try again: select ulak.redrive_message(%1$s);', v_letter.id)
            end
        );
    else
        return query values (
            null::timestamptz,
            case
                when p_place = 'queue' then format(
                    'next: nothing but the archive, %s s after its end',
                    ulak.setting('archive_after')
                )
                else format('next: nothing. To send it again: select ulak.replay_message(%s);', p_id)
            end
        );
    end if;
end
$plpgsql$;

create or replace function ulak._explain_in_flight(p_id bigint, p_now timestamptz)
returns table (at timestamptz, what text)
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select v.at, v.what
    from ulak.queue q
    cross join lateral (
        values
            (1, q.processing_started_at, format('attempt %s: leased by %s until %s', q.attempts, q.locked_by, q.lease_until)),
            (
                2,
                greatest(q.lease_until, p_now),
                case
                    when q.lease_until > p_now then format(
                        'next: its worker settles it or renews the lease; if it goes silent, the message is taken back when the lease is over, in %s',
                        ulak._short_duration(q.lease_until - p_now)
                    )
                    else 'next: the lease ran out. A worker or maintenance takes it back and retries it'
                        || case when ulak._count_alive(p_now) = 0 then ', but no worker is alive: call ulak.run_maintenance();' else '' end
                end
            )
    ) v (place, at, what)
    where q.id = p_id
    order by v.place
$sql$;

-- The reasons are looked at in the order in which they keep a message: what nobody will lift by itself comes first.
create or replace function ulak._explain_waiting(p_id bigint, p_now timestamptz)
returns table (at timestamptz, what text)
language plpgsql
stable
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
as $plpgsql$
#variable_conflict use_column
declare
    v_message ulak.queue;
    v_endpoint ulak.endpoints;
    v_head record;
begin
    select q.* into v_message from ulak.queue q where q.id = p_id;
    select e.* into v_endpoint from ulak.endpoints e where e.id = v_message.endpoint_id;
    select q.id, q.status into v_head
    from ulak.queue q
    where q.endpoint_id = v_message.endpoint_id
        and q.ordering_key = v_message.ordering_key
        and q.status in ('pending', 'processing')
    order by q.id
    limit 1;
    if v_endpoint.id is null then
        return query values (null::timestamptz, format(
            'next: nothing, its endpoint was dropped. To take it out: select ulak.archive_single_to_dlq(%s, ''endpoint dropped'');', p_id
        ));
    elsif not ulak._is_adopted() then
        return query values (null::timestamptz,
            'next: nothing, messages of another cluster are held. If this cluster is to deliver them: select ulak.adopt();');
    elsif v_message.expires_at <= p_now then
        return query values (v_message.expires_at, 'next: it has expired; a worker or maintenance marks it within a minute');
    elsif not v_endpoint.enabled then
        return query values (null::timestamptz, format(
            'next: nothing, endpoint "%1$s" is disabled. To release what it holds: select ulak.enable_endpoint(%1$L);', v_endpoint.name
        ));
    elsif v_head.id < p_id then
        return query values (null::timestamptz, format(
            'next: it waits for its ordering key "%1$s" behind message %2$s, which is %3$s: select * from ulak.explain(%2$s);',
            v_message.ordering_key, v_head.id, v_head.status
        ));
    else
        return query select n.at, n.what from ulak._explain_turn(v_message, v_endpoint, p_now) n;
    end if;
end
$plpgsql$;

-- Reasons that pass by themselves, and then: a worker's next turn.
create or replace function ulak._explain_turn(p_message ulak.queue, p_endpoint ulak.endpoints, p_now timestamptz)
returns table (at timestamptz, what text)
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $plpgsql$
#variable_conflict use_column
declare
    v_due timestamptz := p_message.next_retry_at;
    v_tokens double precision := ulak._rate_tokens(p_endpoint, p_now);
    v_rate double precision := ulak._rate_per_second(p_endpoint);
    v_ready timestamptz := p_now + make_interval(secs => (1 - v_tokens) / v_rate);
begin
    if v_due > p_now then
        return query values (v_due, format(
            case
                when p_message.retry_count > 0 then 'next: retry %3$s of %4$s, in %1$s'
                when p_message.attempts > 0 then 'next: it was given back unworked and is tried again in %1$s'
                else 'next: it is scheduled, in %1$s'
            end,
            ulak._short_duration(v_due - p_now), v_due, p_message.retry_count,
            (ulak._retry_defaults() || coalesce(p_endpoint.retry_policy, '{}')) ->> 'max_retries'
        ));
    elsif p_endpoint.protocol = 'http' and ulak._count_alive(p_now) = 0 then
        return query values (null::timestamptz, 'next: nothing, no worker is alive: select * from ulak.start();');
    elsif p_endpoint.circuit_state = 'open' and p_endpoint.circuit_half_open_at > p_now then
        return query values (p_endpoint.circuit_half_open_at, format(
            'next: the circuit of endpoint "%s" is open; one message is sent as a probe in %s',
            p_endpoint.name, ulak._short_duration(p_endpoint.circuit_half_open_at - p_now)
        ));
    elsif p_endpoint.circuit_state <> 'closed' then
        return query values (p_now, case
            when p_endpoint.circuit_state = 'half_open' then format(
                'next: message %s probes the circuit of endpoint "%s"; if it gets through, the others follow',
                p_endpoint.circuit_probe_id, p_endpoint.name
            )
            else format('next: the circuit of endpoint "%s" is due for a probe, with a worker''s next claim', p_endpoint.name)
        end);
    elsif v_tokens < 1 then
        return query values (v_ready, format(
            'next: endpoint "%s" is limited to %s messages a second; the next may go in %s',
            p_endpoint.name, round(v_rate::numeric, 2), ulak._short_duration(v_ready - p_now)
        ));
    elsif ulak._count_in_flight(p_endpoint.id, p_endpoint.max_in_flight) >= p_endpoint.max_in_flight then
        return query values (p_now, format(
            'next: endpoint "%s" has its %s messages in flight; the next goes when one of them ends',
            p_endpoint.name, p_endpoint.max_in_flight
        ));
    else
        return query values (p_now, ulak._explain_line(p_endpoint, p_now));
    end if;
end
$plpgsql$;

-- It is due and nothing holds it.
create or replace function ulak._explain_line(p_endpoint ulak.endpoints, p_now timestamptz)
returns text
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select case
        when p_endpoint.protocol = 'pull' then 'next: an external worker claims it'
        when h.waiting > 100 and h.per_second >= 1 then format(
            'next: a worker takes it in its turn; %s wait for this endpoint, at %s a second all are out in about %s',
            h.waiting,
            round(h.per_second::numeric),
            ulak._short_duration(make_interval(secs => h.waiting / h.per_second))
        )
        else 'next: a worker takes it at its next turn'
    end
    from ulak._endpoint_facts(p_endpoint.id, p_now) h
$sql$;

-- Null if nothing limits it.
create or replace function ulak._rate_per_second(p_endpoint ulak.endpoints)
returns double precision
language sql
immutable
set search_path = pg_catalog, pg_temp
as $sql$
    select least(
        p_endpoint.release_rate,
        (p_endpoint.config #> '{rate_limit,limit}')::double precision
            / case p_endpoint.config #>> '{rate_limit,interval}' when 'hour' then 3600 when 'minute' then 60 else 1 end
    )
$sql$;
-- Attempts of one message, also those of its earlier cycles: when, how long, with what outcome.

create or replace function ulak.history(p_id bigint, p_now timestamptz default clock_timestamp())
returns table (
    message bigint,
    attempt integer,
    started_at timestamptz,
    ended_at timestamptz,
    outcome text,
    milliseconds numeric,
    error text
)
language plpgsql
stable
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
as $plpgsql$
#variable_conflict use_column
begin
    if not exists (select from ulak._find_message(p_id)) then
        perform ulak._raise_unknown_message(p_id);
    end if;
    return query
    with recursive cycle as (
        select p_id as id
        union all
        select coalesce(l.detail -> 'original_message_id', l.detail -> 'archive_id')::bigint
        from cycle c
        join ulak.event_log l on l.message_id = c.id and l.event in ('message.redriven', 'message.replayed')
    ),
    tried as (
        select c.id, a.attempt, a.started_at, a.ended_at, 'failed' as outcome, a.error
        from cycle c
        join ulak.attempts a on a.message_id = c.id
        union all
        select
            c.id,
            m.attempts,
            m.processing_started_at,
            m.completed_at,
            case m.status when 'completed' then 'delivered' else 'in flight' end,
            null
        from cycle c
        cross join lateral ulak._find_message(c.id) m
        where m.status in ('completed', 'processing')
    )
    select
        t.id,
        t.attempt,
        t.started_at,
        t.ended_at,
        t.outcome,
        round(extract(epoch from coalesce(t.ended_at, p_now) - t.started_at) * 1000, 1),
        t.error
    from tried t
    order by t.started_at, t.id, t.attempt;
end
$plpgsql$;

comment on function ulak.history(bigint, timestamptz) is
    'attempts of one message and of the dead letters or archived messages that it was made from: time, outcome, '
    'milliseconds from claim to settlement, error';
-- doctor(): what is wrong, how bad it is, and the SQL that mends it.

create or replace function ulak.doctor(p_now timestamptz default clock_timestamp())
returns table (severity text, "check" text, finding text, fix text)
language plpgsql
stable
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
as $plpgsql$
begin
    return query
    with problem as (
        select f.* from ulak._doctor_cluster() f
        union all
        select f.* from ulak._doctor_workers(p_now) f
        union all
        select f.* from ulak._doctor_maintenance(p_now) f
        union all
        select f.* from ulak._doctor_endpoints(p_now) f
        union all
        select f.* from ulak._doctor_dlq(p_now) f
        union all
        select f.* from ulak._doctor_vacuum(p_now) f
        union all
        select f.* from ulak._doctor_settings() f
        union all
        select f.* from ulak._doctor_signatures() f
    )
    select f.severity, f.check_name, f.finding, f.fix
    from problem f
    -- Causes before what follows from them.
    order by
        array_position(array['critical', 'warning', 'info'], f.severity),
        array_position(array['cluster', 'pg_cron', 'workers', 'settings', 'maintenance', 'circuit', 'queue', 'backlog'], f.check_name),
        f.check_name,
        f.finding;
    if not found then
        return query values ('ok', 'all', 'nothing is wrong', null::text);
    end if;
end
$plpgsql$;

comment on function ulak.doctor(timestamptz) is
    'looks for what is wrong, the worst first; fix is SQL to run, what it can''t do is in a comment';

create or replace function ulak._doctor_cluster()
returns table (severity text, check_name text, finding text, fix text)
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select
        'critical',
        'cluster',
        'these messages were restored from another cluster: nothing is delivered',
        'select ulak.adopt(); -- if this cluster is to deliver them'
    where not ulak._is_adopted()
$sql$;

-- Whoever has workers needn't have pg_cron. A scheduler that doesn't run will be missed within a minute all the same.
create or replace function ulak._doctor_workers(p_now timestamptz)
returns table (severity text, check_name text, finding text, fix text)
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $plpgsql$
#variable_conflict use_column
declare
    v_workers integer := ulak.setting('workers')::integer;
    v_alive bigint := ulak._count_alive(p_now);
    v_is_scheduled boolean := false;
begin
    if not exists (select from ulak.endpoints e where e.protocol = 'http') then
        return;
    end if;
    return query
    select case when v_alive = 0 then 'critical' else 'warning' end, c.item, c.detail, c.fix
    from ulak._check_pg_cron(v_workers) c
    where c.status = 'problem' and (v_alive = 0 or c.detail <> 'it is not loaded');

    if ulak._has_pg_cron() then
        execute 'select exists (select from cron.job j where j.database = $1 and j.jobname like $2 and j.active)'
            into v_is_scheduled
            using current_database(), 'ulak worker %';
    end if;
    if v_alive = 0 then
        return query values (
            'critical',
            'workers',
            case
                when v_is_scheduled then 'no worker is alive, though pg_cron has jobs for them: cron.job_run_details says why'
                when ulak._has_pg_cron() then 'no worker is alive, and pg_cron has no job for one'
                else 'no worker is alive'
            end || coalesce(
                '; the last sign of life was ' || ulak._short_duration(p_now - (select max(w.heartbeat_at) from ulak.workers w)) || ' ago',
                ''
            ),
            case
                when v_is_scheduled
                    then 'select status, return_message, start_time from cron.job_run_details order by runid desc limit 5; '
                        '-- if there is none: select * from ulak.start();'
                else 'select * from ulak.start();'
            end
        );
    elsif ulak._has_pg_cron() and not v_is_scheduled then
        return query values ('warning', 'workers', 'workers run, but pg_cron has no job that will start the next ones', 'select * from ulak.start();');
    end if;

    return query
    select
        'warning',
        'workers',
        format('%s went silent %s ago', w.name, ulak._short_duration(p_now - w.heartbeat_at)),
        format('select * from ulak.start(); -- its messages go back when their leases are over')
    from ulak.get_worker_status(p_now) w
    where w.state = 'lost' and v_alive > 0;
end
$plpgsql$;

create or replace function ulak._doctor_maintenance(p_now timestamptz)
returns table (severity text, check_name text, finding text, fix text)
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select 'warning', 'partitions', p.finding, 'select ulak.maintain_archive_partitions();'
    from ulak._check_partitions(p_now) p
    union all
    select
        case when m.failed then 'critical' else 'warning' end,
        'maintenance',
        m.trouble,
        'call ulak.run_maintenance();'
    from (
        select
            case
                when count(*) = 0 then case when exists (select from ulak.endpoints) then 'run_maintenance() never ran' end
                when bool_and(s.is_late) then 'run_maintenance() last ran ' || ulak._short_duration(p_now - max(s.started_at)) || ' ago'
                else string_agg(
                    case
                        when s.is_failed then format('%s failed: %s', s.step, s.last_error)
                        else format('%s last ran %s ago', s.step, ulak._short_duration(p_now - s.started_at))
                    end,
                    '; '
                    order by s.step
                ) filter (where s.is_failed or s.is_late)
            end as trouble,
            bool_or(s.is_failed and not s.is_late) as failed
        from (
            select
                r.step,
                r.started_at,
                r.last_error,
                coalesce(r.last_error_at >= r.started_at, false) as is_failed,
                r.started_at < p_now - interval '5 minutes' as is_late
            from ulak.maintenance_runs r
        ) s
    ) m
    where m.trouble is not null
$sql$;

create or replace function ulak._doctor_endpoints(p_now timestamptz)
returns table (severity text, check_name text, finding text, fix text)
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    with health as materialized (
        select f.*
        from ulak._endpoint_facts(null, p_now) f
    )
    select
        'critical',
        'circuit',
        format(
            'endpoint "%s" is %s and has had no success for %s, %s messages wait: %s',
            h.name,
            h.circuit_state,
            ulak._short_duration(p_now - coalesce(h.last_success_at, h.created_at)),
            ulak._thousands(h.waiting),
            coalesce(h.last_error, 'no error is known')
        ),
        format(
            'select * from ulak.ping(%1$L); -- when it answers again: select ulak.reset_circuit_breaker(%1$L);',
            h.name
        )
    from health h
    where h.circuit_state <> 'closed' and coalesce(h.last_success_at, h.created_at) < p_now - interval '10 minutes'
    union all
    select
        case when h.due_since < p_now - interval '1 hour' then 'critical' else 'warning' end,
        'backlog',
        format(
            'the oldest message for endpoint "%s" has waited for %s, %s%s wait',
            h.name,
            ulak._short_duration(p_now - h.due_since),
            case when h.is_estimate then 'about ' else '' end,
            ulak._thousands(h.waiting)
        ),
        format(
            'select x.* from ulak.queue q cross join lateral ulak.explain(q.id) x where q.endpoint_id = %s and q.status = ''pending'' '
            'order by q.priority desc, q.next_retry_at, q.id limit 5;',
            h.id
        )
    from health h
    where h.enabled and h.due_since < p_now - interval '15 minutes'
    union all
    select
        'info',
        'disabled',
        format('endpoint "%s" is disabled and holds %s messages', h.name, ulak._thousands(h.waiting)),
        format('select ulak.enable_endpoint(%L); -- p_rate => 100 releases them at 100 a second', h.name)
    from health h
    where not h.enabled and h.waiting > 0
    union all
    select
        case when f.live >= f.most then 'critical' else 'warning' end,
        'queue',
        format('%s of %s messages that the queue may hold are in it', ulak._thousands(f.live), ulak._thousands(f.most)),
        format('select ulak.configure(''max_queue_size'', ''%s'');', f.most * 2)
    from (
        select sum(h.waiting + h.in_flight) as live, ulak.setting('max_queue_size')::bigint as most
        from health h
    ) f
    where f.most > 0 and f.live > 0.8 * f.most
    union all
    select
        'warning',
        'dropped endpoint',
        format('messages wait for endpoint %s, which does not exist', o.endpoint_id),
        format(
            'select ulak.archive_single_to_dlq(id, ''endpoint dropped'') from ulak.queue where endpoint_id = %s and status = ''pending'';',
            o.endpoint_id
        )
    from ulak._orphaned_endpoints() o
$sql$;

-- Ids of endpoints that messages wait for and that are gone: only somebody who deletes rows by hand gets there.
create or replace function ulak._orphaned_endpoints()
returns table (endpoint_id bigint)
language sql
stable
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $sql$
    with recursive present as (
        (
            select q.endpoint_id
            from ulak.queue q
            where q.status = 'pending'
            order by q.endpoint_id
            limit 1
        )
        union all
        select (
            select q.endpoint_id
            from ulak.queue q
            where q.status = 'pending' and q.endpoint_id > p.endpoint_id
            order by q.endpoint_id
            limit 1
        )
        from present p
        where p.endpoint_id is not null
    )
    select p.endpoint_id
    from present p
    where p.endpoint_id is not null and not exists (select from ulak.endpoints e where e.id = p.endpoint_id)
$sql$;

-- Growing: more entered in the last hour than in the one before. Both are counted up to a bound.
create or replace function ulak._doctor_dlq(p_now timestamptz)
returns table (severity text, check_name text, finding text, fix text)
language sql
stable
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $sql$
    select
        'warning',
        'dlq',
        format(
            'the dead-letter queue grows: %s%s entered in the last hour, %s in the hour before; most often: %s',
            n.letters, case when n.letters > 5000 then ' or more' else '' end, b.letters, n.error
        ),
        format(
            'select * from ulak.redrive(p_endpoint => %L, p_since => %L, p_dry_run => true);', n.endpoint, p_now - interval '1 hour'
        )
    from (
        select count(*) as letters, mode() within group (order by d.endpoint_name) as endpoint,
            mode() within group (order by d.last_error) as error
        from (
            select d.endpoint_name, d.last_error, d.status
            from ulak.dlq d
            where d.archived_at > p_now - interval '1 hour' and d.archived_at <= p_now
            limit 5001
        ) d
        where d.status = 'failed'
    ) n
    cross join (
        select count(*) as letters
        from (
            select
            from ulak.dlq d
            where d.archived_at > p_now - interval '2 hours' and d.archived_at <= p_now - interval '1 hour'
            limit 5001
        ) d
    ) b
    where n.letters >= 10 and n.letters > b.letters
    union all
    select
        'warning',
        'dlq',
        format(
            'dead letters that nobody has redriven are deleted in %s, the oldest is of endpoint "%s"',
            ulak._short_duration(d.archived_at + r.kept - p_now), d.endpoint_name
        ),
        'select * from ulak.dlq_summary(); -- then: select * from ulak.redrive(p_endpoint => ..., p_dry_run => true);'
    from (select make_interval(days => ulak.setting('dlq_retention_days')::integer) as kept) r
    cross join lateral (
        select d.archived_at, d.endpoint_name, d.status
        from (
            select d.archived_at, d.endpoint_name, d.status
            from ulak.dlq d
            where d.archived_at < p_now - r.kept * 0.9
            order by d.archived_at
            limit 5000
        ) d
        where d.status = 'failed'
        order by d.archived_at
        limit 1
    ) d
$sql$;

create or replace function ulak._doctor_settings()
returns table (severity text, check_name text, finding text, fix text)
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select s.severity, 'settings', s.finding, s.fix
    from (
        values
            (
                'critical',
                not current_setting('fsync')::boolean,
                'fsync is off: a crash of the server can lose messages that were accepted',
                'alter system set fsync = on; -- then: select pg_reload_conf();'
            ),
            (
                'warning',
                not current_setting('autovacuum')::boolean,
                'autovacuum is off: the queue''s dead rows pile up',
                'alter system set autovacuum = on; -- then: select pg_reload_conf();'
            ),
            (
                'warning',
                ulak.setting('http_allow_internal_urls')::boolean,
                'http_allow_internal_urls is on: whoever may set a url can reach internal services',
                'select ulak.configure(''http_allow_internal_urls'', ''false''); -- and name the networks in http_allowed_networks'
            ),
            (
                'warning',
                ulak.setting('max_queue_size')::integer = 0,
                'max_queue_size is 0: a receiver that is down can fill the disk',
                'select ulak.configure(''max_queue_size'', null);'
            ),
            (
                'warning',
                ulak.setting('default_max_retries')::integer = 0,
                'default_max_retries is 0: the first timeout makes a dead letter',
                'select ulak.configure(''default_max_retries'', null);'
            ),
            (
                'warning',
                ulak.setting('retry_base_delay')::integer > ulak.setting('retry_max_delay')::integer,
                'retry_base_delay is above retry_max_delay: every retry waits for the latter',
                'select ulak.configure(''retry_base_delay'', null), ulak.configure(''retry_max_delay'', null);'
            ),
            (
                'info',
                ulak.setting('poll_interval')::integer > 1000,
                'poll_interval is above a second: a message that comes after a pause waits that long',
                'select ulak.configure(''poll_interval'', null);'
            )
    ) s (severity, is_wrong, finding, fix)
    where s.is_wrong
$sql$;

-- Endpoints that anybody on the way could read or imitate. Internal hosts are left to their administrators.
create or replace function ulak._doctor_signatures()
returns table (severity text, check_name text, finding text, fix text)
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    with public_endpoint as materialized (
        select e.name, e.config, ulak._put_secrets(e.config, ulak._secret_values(ulak._secret_names(e.config))) ->> 'signing_secret' as secret
        from ulak.endpoints e
        where e.protocol = 'http' and e.enabled and ulak._is_public_url(e.config ->> 'url')
    )
    select
        'warning',
        'signature',
        format('endpoint "%s" is public and its requests are not signed: anybody could send such requests to it', p.name),
        format('select ulak.rotate_secret(%L); -- returns the secret for the receiver', p.name)
    from public_endpoint p
    where p.secret is null
    union all
    select
        'warning',
        'signature',
        format('endpoint "%s" is public and signed with a short secret of %s bytes', p.name, s.bytes),
        format('select ulak.rotate_secret(%L); -- both secrets sign for 24 hours', p.name)
    from public_endpoint p
    cross join lateral (
        select case
            when starts_with(p.secret, 'whsec_') then length(rtrim(substr(p.secret, 7), '=')) * 3 / 4
            else octet_length(p.secret)
        end
    ) s (bytes)
    where s.bytes < 24
    union all
    select
        'warning',
        'transport',
        format('endpoint "%s" is public and reached without TLS: everybody on the way can read the messages', p.name),
        format(
            'update ulak.endpoints set config = jsonb_set(config, ''{url}'', to_jsonb(%L::text)) where name = %L; -- if it answers there',
            regexp_replace(p.config ->> 'url', '^http:', 'https:', 'i'),
            p.name
        )
    from public_endpoint p
    where p.config ->> 'url' ~* '^http:'
    union all
    select
        'warning',
        'transport',
        format('endpoint "%s" is public and its certificate is not verified', p.name),
        format('update ulak.endpoints set config = config - ''ssl_verify'' where name = %L;', p.name)
    from public_endpoint p
    where p.config -> 'ssl_verify' = 'false'
$sql$;

-- By its looks: a name with a dot that isn't kept for internal use, or an address outside of the private ranges.
create or replace function ulak._is_public_url(p_url text)
returns boolean
language sql
immutable
set search_path = pg_catalog, pg_temp
as $sql$
    select case
        when h.host ~ '^[0-9.]+$' then h.host !~ '^(0|10|127|169\.254|192\.168|172\.(1[6-9]|2[0-9]|3[01])|100\.(6[4-9]|[7-9][0-9]|1[01][0-9]|12[0-7]))\.'
        when h.host ~ '^\[' then h.host !~* '^\[(::1?|f[cd][0-9a-f]{2}:.*|fe[89ab][0-9a-f]:.*)\]$'
        else h.host ~ '\.' and h.host !~* '\.(local|localhost|internal|intranet|lan|home|corp|private|test)\.?$'
    end
    from (select substring(p_url from '^[A-Za-z]+://(\[[^\]]*\]|[^/:?#]+)')) h (host)
$sql$;
-- Who keeps vacuum from removing dead rows, and what it costs the queue.

-- Everything whose snapshot or transaction is older than rows that could go. Sessions of other databases don't hold back
-- this one's tables; a standby that sends its horizon, and a slot that keeps one, do.
create or replace function ulak._vacuum_blockers(p_now timestamptz)
returns table (who text, xmin_age integer, since timestamptz, fix text)
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select
        format(
            'session %s of %s%s, %s, in its transaction for %s',
            a.pid,
            a.usename,
            coalesce(format(' (%s)', nullif(a.application_name, '')), ''),
            a.state,
            ulak._short_duration(p_now - a.xact_start)
        ),
        greatest(age(a.backend_xmin), age(a.backend_xid)),
        a.xact_start,
        format('select pg_terminate_backend(%s);', a.pid)
    from pg_stat_activity a
    where a.datname = current_database()
        and a.backend_type = 'client backend'
        and a.pid <> pg_backend_pid()
        and (a.backend_xmin is not null or a.backend_xid is not null)
        -- What vacuum itself sees doesn't hold vacuum back.
        and a.query !~* '^\s*vacuum'
    union all
    select
        format('prepared transaction "%s" of %s, %s old', x.gid, x.owner, ulak._short_duration(p_now - x.prepared)),
        age(x.transaction),
        x.prepared,
        format('rollback prepared %L; -- or: commit prepared %L;', x.gid, x.gid)
    from pg_prepared_xacts x
    where x.database = current_database()
    union all
    select
        format('replication slot "%s", %s', s.slot_name, case when s.active then 'active' else 'without a standby' end),
        age(s.xmin),
        null,
        case
            when s.active then format('select pg_terminate_backend(%s); -- and turn hot_standby_feedback off on the standby', s.active_pid)
            else format('select pg_drop_replication_slot(%L); -- if its standby is gone for good', s.slot_name)
        end
    from pg_replication_slots s
    where s.xmin is not null
    union all
    select
        format('standby "%s" at %s, by hot_standby_feedback', r.application_name, coalesce(host(r.client_addr), 'local')),
        age(r.backend_xmin),
        null,
        format('select pg_terminate_backend(%s); -- and end the long query there, or turn hot_standby_feedback off', r.pid)
    from pg_stat_replication r
    where r.backend_xmin is not null
$sql$;

-- Vacuum runs every minute: dead rows that are still there after it are held back by somebody, or it doesn't run.
create or replace function ulak._doctor_vacuum(p_now timestamptz)
returns table (severity text, check_name text, finding text, fix text)
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    with dead as materialized (
        select t.rows, t.vacuumed_at
        from (
            select
                pg_stat_get_dead_tuples('ulak.queue'::regclass) as rows,
                greatest(
                    pg_stat_get_last_vacuum_time('ulak.queue'::regclass),
                    pg_stat_get_last_autovacuum_time('ulak.queue'::regclass)
                ) as vacuumed_at
        ) t
        where t.rows >= 10000
    ),
    old as materialized (
        select b.*
        from ulak._vacuum_blockers(p_now) b
        where coalesce(b.since, '-infinity') < p_now - interval '1 minute'
    ),
    blocker as materialized (
        select b.*
        from old b
        where b.xmin_age > 0
        order by b.xmin_age desc
        limit 3
    )
    select
        'warning',
        'vacuum',
        format('%s dead rows of ulak.queue are held back by %s', ulak._thousands(d.rows), b.who),
        b.fix
    from dead d
    cross join blocker b
    union all
    select
        'warning',
        'vacuum',
        format(
            '%s dead rows of ulak.queue were not vacuumed; the last vacuum %s',
            ulak._thousands(d.rows),
            coalesce('was ' || ulak._short_duration(p_now - d.vacuumed_at) || ' ago', 'is not known')
        ),
        'vacuum ulak.queue;'
    from dead d
    where not exists (select from blocker) and coalesce(d.vacuumed_at, '-infinity') < p_now - interval '5 minutes'
    union all
    -- Nothing is dead yet, but it will be.
    select
        'warning',
        'vacuum',
        format('vacuum will be held back by %s', b.who),
        b.fix
    from old b
    where not exists (select from dead) and b.since < p_now - interval '1 hour'
$sql$;
-- help(): what there is, from the comments in the catalog.

create or replace function ulak.help(p_name text default null)
returns table (name text, kind text, usage text, description text, roles text)
language plpgsql
stable
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
#variable_conflict use_column
declare
    v_name text := lower(regexp_replace(btrim(p_name), '^ulak\.|\(.*$', '', 'gi'));
begin
    if v_name is null then
        return query
        select t.name, t.kind, t.usage, t.description, t.roles
        from ulak._help_topics() t
        where t.kind <> 'setting'
        order by array_position(array['function', 'procedure', 'view', 'table'], t.kind), t.name, t.usage;
        return;
    end if;
    if not exists (select from ulak._help_topics() t where t.name = v_name or starts_with(t.name, v_name || '_')) then
        raise exception 'no help for %', coalesce('"' || left(p_name, 200) || '"', 'null')
            using errcode = '42704',
                detail = 'Functions, procedures, views, tables and settings of ulak have help.',
                hint = ulak._did_you_mean(v_name, array(select t.name from ulak._help_topics() t));
    end if;
    return query
    with chosen as (
        select t.*, row_number() over (order by t.name <> v_name, t.name, t.usage) as place
        from ulak._help_topics() t
        where t.name = v_name or starts_with(t.name, v_name || '_')
    ),
    line as (
        select c.place, 0 as number, c.name, c.kind, c.usage, c.description, c.roles
        from chosen c
        union all
        -- The parameters or columns of the one that was asked for.
        select
            c.place,
            a.number,
            '  ' || a.name,
            'parameter',
            format_type(a.type, null)
                || coalesce(', default ' || regexp_replace(pg_get_function_arg_default(c.id, a.number::integer), '::[a-z ]+$', ''), ''),
            null,
            null
        from chosen c
        join pg_proc p on p.oid = c.id
        cross join lateral unnest(p.proargnames, p.proargtypes::oid[]) with ordinality a (name, type, number)
        where c.name = v_name and a.type is not null
        union all
        select
            c.place, a.attnum, '  ' || a.attname, 'column', format_type(a.atttypid, a.atttypmod), col_description(a.attrelid, a.attnum), null
        from chosen c
        join pg_attribute a on a.attrelid = c.id and a.attnum > 0 and not a.attisdropped
        where c.name = v_name and c.kind in ('table', 'view')
    )
    select l.name, l.kind, l.usage, l.description, l.roles
    from line l
    order by l.place, l.number;
end
$plpgsql$;

comment on function ulak.help(text) is
    'what ulak offers, with who may use it; help(''redrive'') shows the functions, tables and settings of that name';

-- Names with a leading underscore are private, and partitions are part of their table.
create or replace function ulak._help_topics()
returns table (name text, kind text, usage text, description text, roles text, id oid)
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select
        p.proname::text,
        case p.prokind when 'p' then 'procedure' else 'function' end,
        case p.prokind when 'p' then 'call ulak.' else 'ulak.' end || format('%s(%s)', p.proname, (
            select concat_ws(
                ', ',
                string_agg(a.name, ', ' order by a.number) filter (where a.number <= p.pronargs - p.pronargdefaults),
                '[' || string_agg(a.name, ', ' order by a.number) filter (where a.number > p.pronargs - p.pronargdefaults) || ']'
            )
            from unnest(p.proargnames) with ordinality a (name, number)
            -- The time is for tests.
            where a.number <= p.pronargs and a.name <> 'p_now'
        )),
        obj_description(p.oid, 'pg_proc'),
        (
            select string_agg(r.role, ', ' order by r.role)
            from unnest(array['ulak_admin', 'ulak_application', 'ulak_monitor', 'ulak_worker']) r (role)
            where has_function_privilege(r.role, p.oid, 'execute')
        ),
        p.oid
    from pg_proc p
    where p.pronamespace = 'ulak'::regnamespace and p.proname not like '\_%'
    union all
    select
        c.relname::text,
        case c.relkind when 'v' then 'view' else 'table' end,
        format('select * from ulak.%I;', c.relname),
        obj_description(c.oid, 'pg_class'),
        (
            select string_agg(r.role, ', ' order by r.role)
            from unnest(array['ulak_admin', 'ulak_application', 'ulak_monitor', 'ulak_worker']) r (role)
            where has_table_privilege(r.role, c.oid, 'select')
        ),
        c.oid
    from pg_class c
    where c.relnamespace = 'ulak'::regnamespace
        and c.relkind in ('r', 'p', 'v')
        and not c.relispartition
        and c.relname not like '\_%'
        and obj_description(c.oid, 'pg_class') not like '%private to ulak'
    union all
    select
        s.name,
        'setting',
        format('select ulak.configure(%L, %L);', s.name, s.value),
        concat_ws('; ', s.description, ulak._setting_range(s)),
        'ulak_admin',
        null
    from ulak.settings s
$sql$;
-- curl(): the request of a message as a command for the shell, to see what the receiver sees.

create or replace function ulak.curl(p_id bigint)
returns text
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
as $plpgsql$
declare
    v_message record;
    v_protocol text;
begin
    select m.* into v_message
    from ulak._message_to_send(p_id) m;
    if not found then
        perform ulak._raise_unknown_message(p_id);
    end if;
    select e.protocol into v_protocol
    from ulak.endpoints e
    where e.id = v_message.endpoint_id;
    if v_protocol is distinct from 'http' then
        raise exception 'message % is not sent over http', p_id
            using errcode = '22023',
                detail = coalesce(format('The protocol of its endpoint is %s.', v_protocol), 'Its endpoint was dropped.');
    end if;
    return ulak._curl(
        jsonb_build_object(
            'message', v_message.message,
            'endpoint', (select to_jsonb(c) from ulak._endpoint_configs(array[v_message.endpoint_id]) c),
            'settings', (select jsonb_object_agg(s.name, ulak.setting(s.name)) from ulak.settings s),
            'version', (select e.extversion from pg_extension e where e.extname = 'ulak')
        )
    );
end
$plpgsql$;

comment on function ulak.curl(bigint) is
    'the request of a message as a curl command, with its payload and with secrets masked';

-- JSON values go as texts, as the worker gets them: what is signed and sent is PostgreSQL's own spelling of them.
create or replace function ulak._message_to_send(p_id bigint)
returns table (endpoint_id bigint, message jsonb)
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select
        m.endpoint_id,
        jsonb_build_object(
            'id', p_id,
            'message_id', m.message_id,
            'attempt', greatest(m.attempts, 1),
            'payload', m.payload::text,
            'headers', m.headers::text,
            'metadata', m.metadata::text,
            'correlation_id', m.correlation_id,
            'ordering_key', m.ordering_key,
            'created_at', m.created_at::text
        )
    from (
        select q.endpoint_id, q.message_id, q.attempts, q.payload, q.headers, q.metadata, q.correlation_id, q.ordering_key,
            q.created_at
        from ulak.queue q
        where q.id = p_id
        union all
        select a.endpoint_id, a.message_id, a.attempts, a.payload, a.headers, a.metadata, a.correlation_id, a.ordering_key,
            a.created_at
        from ulak.archive a
        where a.id = p_id
        union all
        select d.endpoint_id, d.message_id, d.attempts, d.payload, d.headers, d.metadata, d.correlation_id, d.ordering_key,
            d.original_created_at
        from ulak.dlq d
        where d.original_message_id = p_id
        limit 1
    ) m
$sql$;

create or replace function ulak._curl(p_request jsonb)
returns text
language plpython3u
set search_path = pg_catalog, pg_temp
as $python$
    plpy.execute("select ulak._load_python()")
    import json
    import time
    from ulak import preview

    return preview.curl(json.loads(p_request), time.time())
$python$;
-- report(): one page of HTML about the last hours. SQL gathers, Python draws.

create or replace function ulak.report(p_hours integer default 6, p_now timestamptz default clock_timestamp())
returns text
language plpgsql
stable
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    if p_hours is null or p_hours not between 1 and 168 then
        raise exception 'p_hours must be between 1 and 168, got %', coalesce(p_hours::text, 'null')
            using errcode = '22023', hint = 'select ulak.report(24);';
    end if;
    return ulak._draw_report(ulak._report_data(p_hours, p_now));
end
$plpgsql$;

comment on function ulak.report(integer, timestamptz) is
    'the last hours as one page of HTML that needs nothing else: psql -Atc ''select ulak.report()'' > report.html';

create or replace function ulak._draw_report(p_data jsonb)
returns text
language plpython3u
set search_path = pg_catalog, pg_temp
as $python$
    plpy.execute("select ulak._load_python()")
    import json
    from ulak import report

    return report.render(json.loads(p_data))
$python$;

create or replace function ulak._report_data(p_hours integer, p_now timestamptz)
returns jsonb
language sql
stable
set search_path = pg_catalog, pg_temp
set timezone = 'UTC'
as $sql$
    select jsonb_build_object(
        'database', current_database(),
        'version', (select e.extversion from pg_extension e where e.extname = 'ulak'),
        'server', current_setting('server_version'),
        'now', p_now,
        'hours', p_hours,
        'traffic', ulak._report_traffic(p_hours, p_now),
        'endpoints', (
            select coalesce(jsonb_agg(to_jsonb(h) order by h.place), '[]')
            from ulak.get_endpoint_health(null, p_now) with ordinality h (
                name, protocol, enabled, circuit_state, circuit_failure_count, last_success_at, last_failure_at, waiting, oldest_at,
                is_estimate, due_since, in_flight, dead, per_second, failed_percent, p50_ms, p95_ms, next_probe_at, last_error,
                state, last_hour, place
            )
            where h.place <= 50
        ),
        'endpoint_count', (select count(*) from ulak.endpoints),
        'findings', (
            select coalesce(jsonb_agg(to_jsonb(d) order by d.place), '[]')
            from ulak.doctor(p_now) with ordinality d (severity, check_name, finding, fix, place)
        ),
        'dead', ulak._report_dead(),
        'workers', (
            select coalesce(jsonb_agg(to_jsonb(w) order by w.slot), '[]')
            from ulak.get_worker_status(p_now) w
        ),
        'maintenance', (
            select coalesce(jsonb_agg(to_jsonb(m)), '[]')
            from ulak.maintenance_status m
        ),
        'partitions', (
            select coalesce(jsonb_agg(jsonb_build_object(
                'name', c.relname,
                'rows', greatest(c.reltuples, 0),
                'bytes', pg_total_relation_size(c.oid)
            ) order by c.relname), '[]')
            from pg_inherits i
            join pg_class c on c.oid = i.inhrelid
            where i.inhparent = 'ulak.archive'::regclass
        ),
        'queue_bytes', pg_total_relation_size('ulak.queue')
    )
$sql$;

-- All endpoints together, in 60 steps of whole minutes.
create or replace function ulak._report_traffic(p_hours integer, p_now timestamptz)
returns jsonb
language sql
stable
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
as $sql$
    with span as materialized (
        select
            date_trunc('minute', p_now) - make_interval(hours => p_hours) + interval '1 minute' as starts_at,
            make_interval(mins => p_hours) as step,
            ulak._traffic_is_final_before() as final_before
    ),
    counted as materialized (
        select
            floor(extract(epoch from t.minute - s.starts_at) / (60 * p_hours))::integer as n,
            sum(t.delivered) as delivered,
            sum(t.failed) as failed,
            max(t.waiting) as waiting,
            array[
                sum(t.latency_histogram[1]), sum(t.latency_histogram[2]), sum(t.latency_histogram[3]),
                sum(t.latency_histogram[4]), sum(t.latency_histogram[5]), sum(t.latency_histogram[6]),
                sum(t.latency_histogram[7]), sum(t.latency_histogram[8]), sum(t.latency_histogram[9]),
                sum(t.latency_histogram[10]), sum(t.latency_histogram[11]), sum(t.latency_histogram[12]),
                sum(t.latency_histogram[13]), sum(t.latency_histogram[14]), sum(t.latency_histogram[15]),
                sum(t.latency_histogram[16]), sum(t.latency_histogram[17]), sum(t.latency_histogram[18]),
                sum(t.latency_histogram[19]), sum(t.latency_histogram[20]), sum(t.latency_histogram[21]),
                sum(t.latency_histogram[22])
            ]::bigint[] as histogram
        from span s
        cross join lateral (
            select t.minute, t.delivered, t.failed, t.latency_histogram, t.waiting
            from ulak.traffic t
            where t.minute >= s.starts_at and t.minute <= p_now and t.minute < s.final_before
            union all
            select t.minute, t.delivered, t.failed, t.latency_histogram, null
            from ulak._recent_traffic(s.starts_at) t
            where t.minute <= p_now
            union all
            select t.minute, 0, 0, '{}', t.waiting
            from ulak.traffic t
            where t.minute >= s.starts_at and t.minute <= p_now and t.minute >= s.final_before
        ) t
        group by 1
    )
    select jsonb_agg(
        jsonb_build_object(
            'at', s.starts_at + n * s.step,
            'seconds', extract(epoch from least(s.starts_at + (n + 1) * s.step, p_now) - (s.starts_at + n * s.step)),
            'delivered', coalesce(c.delivered, 0),
            'failed', coalesce(c.failed, 0),
            'p50_ms', ulak._percentile(c.histogram, 0.50),
            'p95_ms', ulak._percentile(c.histogram, 0.95),
            'waiting', c.waiting
        )
        order by n
    )
    from span s
    cross join generate_series(0, 59) n
    left join counted c using (n)
$sql$;

-- The newest dead letters by endpoint and cause; numbers in an error don't make another cause.
create or replace function ulak._report_dead()
returns jsonb
language sql
stable
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $sql$
    select coalesce(jsonb_agg(to_jsonb(g) order by g.letters desc, g.endpoint, g.cause), '[]')
    from (
        select d.endpoint_name as endpoint, c.cause, count(*) as letters, min(d.failed_at) as first_at, max(d.failed_at) as last_at
        from (
            select d.endpoint_name, d.last_error, d.failed_at, d.status
            from ulak.dlq d
            order by d.archived_at desc
            limit 5000
        ) d
        cross join lateral (
            select left(regexp_replace(
                coalesce(d.last_error, 'unknown'), '[0-9a-f]{8}-[0-9a-f-]{27}|(?<!HTTP )\m[0-9]+', '#', 'g'
            ), 160)
        ) c (cause)
        where d.status = 'failed'
        group by d.endpoint_name, c.cause
        order by letters desc, d.endpoint_name, c.cause
        limit 12
    ) g
$sql$;
-- Who may do what, in one list. Nothing is granted to PUBLIC.

-- What an earlier version granted and this one doesn't must go too, so an upgrade starts from nothing.
revoke all on schema ulak from public, ulak_admin, ulak_application, ulak_monitor, ulak_worker;
revoke all on all tables in schema ulak from public, ulak_admin, ulak_application, ulak_monitor, ulak_worker;
revoke all on all sequences in schema ulak from public, ulak_admin, ulak_application, ulak_monitor, ulak_worker;
revoke all on all routines in schema ulak from public, ulak_admin, ulak_application, ulak_monitor, ulak_worker;

grant usage on schema ulak to ulak_admin, ulak_application, ulak_monitor, ulak_worker;

-- An administrator may call every public function. The others get what is listed; a name stands for all its signatures.
do $plpgsql$
declare
    v_role text;
    v_names text[];
    v_unknown text;
    v_routine text;
begin
    for v_role, v_names in
        values
            ('ulak_admin', (
                select array_agg(distinct p.proname::text)
                from pg_proc p
                where p.pronamespace = 'ulak'::regnamespace and p.proname not like '\_%'
            )),
            -- A procedure that commits runs with the rights of its caller, and so do its parts.
            ('ulak_admin', array['_is_adopted', '_maintenance_step']),
            -- A view runs its functions with the rights of its reader.
            ('ulak_admin', array['_top', '_retry_schedule']),
            ('ulak_application', array[
                'send', 'send_with_options', 'send_batch', 'send_batch_with_priority',
                'publish', 'publish_batch',
                'message_status', 'mark_handled', 'setting', 'help'
            ]),
            ('ulak_monitor', array[
                'dlq_summary', 'message_status', 'retry_delay', 'setting', 'help',
                'get_endpoint_health', 'get_worker_status', 'health_check', 'metrics', 'metrics_text', 'doctor',
                'explain', 'history', 'report', '_top', '_retry_schedule'
            ]),
            ('ulak_worker', array[
                'claim', 'heartbeat', 'complete', 'fail', 'release', 'retry_delay', 'mark_handled', 'setting', 'help',
                'recover_stale_messages', 'mark_expired_messages', 'update_circuit_breaker',
                'run_maintenance', '_is_adopted', '_maintenance_step',
                -- What the worker and the maintenance in the database are made of.
                '_load_python', '_python_source', '_python_stamp',
                '_claim', '_settle_many', '_release_many', '_heartbeat_many', '_endpoint_configs',
                'run_worker', '_take_worker_slot', '_leave_worker_slot', '_worker_parameters', '_register_worker',
                '_stamp_of', '_worker_stamp', '_worker_options', '_worker_check', '_worker_report', '_await_send',
                '_set_bell', '_listen', '_light_turn',
                '_blocked_endpoints', '_sweep', '_become_poller'
            ])
    loop
        select n into v_unknown
        from unnest(v_names) n
        where not exists (select from pg_proc p where p.pronamespace = 'ulak'::regnamespace and p.proname = n);
        if found then
            raise exception 'ulak.% is granted to % but does not exist', v_unknown, v_role;
        end if;
        for v_routine in
            select p.oid::regprocedure
            from pg_proc p
            where p.pronamespace = 'ulak'::regnamespace and p.proname = any (v_names)
        loop
            execute format('grant execute on routine %s to %I', v_routine, v_role);
        end loop;
    end loop;
end
$plpgsql$;

-- Tables and views. ulak.secrets is granted to nobody.
grant select on
    ulak.queue,
    ulak.dlq,
    ulak.archive,
    ulak.endpoints,
    ulak.setting_values,
    ulak.event_types,
    ulak.subscriptions,
    ulak.handled
to ulak_admin;
grant update (config, retry_policy, description) on ulak.endpoints to ulak_admin;

grant select on
    ulak.settings,
    ulak.endpoint_list,
    ulak.event_log,
    ulak.endpoint_stats,
    ulak.endpoint_totals,
    ulak.backlog_samples,
    ulak.traffic,
    ulak.attempts,
    ulak.workers,
    ulak.maintenance_status,
    ulak.top,
    ulak.retry_schedule
to ulak_admin, ulak_monitor;

grant select on ulak.maintenance_status to ulak_worker;

grant select on ulak.settings, ulak.endpoint_list to ulak_application;

-- Whether anybody has sent lately; a look of the worker.
grant select on ulak.queue_id_seq to ulak_worker;
-- This month's partition of the archive and the next three, at installation and at each upgrade.

-- They leave the extension at once: pg_dump then carries them as the ordinary tables that they are. A dump that is being
-- restored (it turns row_security off) brings its own.
do $plpgsql$
declare
    v_name text;
begin
    if not current_setting('row_security')::boolean then
        return;
    end if;
    perform ulak.maintain_archive_partitions();
    for v_name in
        select p.name
        from ulak._archive_partitions p
        where exists (
            select
            from pg_catalog.pg_depend d
            where d.classid = 'pg_catalog.pg_class'::pg_catalog.regclass and d.objid = p.relation and d.deptype = 'e'
        )
    loop
        execute pg_catalog.format('alter extension ulak drop table ulak.%I', v_name);
    end loop;
end
$plpgsql$;
-- Workers that run the version before leave when this is committed.
select ulak._ring();
