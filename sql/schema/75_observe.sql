-- History for administrators: failed attempts, and the size of the backlog minute by minute.

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

-- Counting a long backlog takes time in proportion to it, so maintenance counts once a minute and others read the result. A row says
-- what is so until the next one.
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
    waiting bigint,
    latency_max_ms double precision
) with (fillfactor = 50);

-- Counters that only rise, as Prometheus wants them: ulak.endpoint_stats forgets.
create table ulak.endpoint_totals (
    endpoint_id bigint primary key,
    delivered bigint not null default 0,
    failed bigint not null default 0,
    latency_total_ms double precision not null default 0,
    latency_histogram bigint[] not null default '{}'
) with (fillfactor = 50);

-- The facts about an endpoint that looks show: gathered once, and handed to each part of a look that shows several.
create type ulak_private.endpoint_fact as (
    id bigint,
    name text,
    protocol text,
    enabled boolean,
    circuit_state text,
    circuit_failure_count integer,
    next_probe_at timestamptz,
    last_success_at timestamptz,
    last_failure_at timestamptz,
    last_error text,
    waiting bigint,
    is_estimate boolean,
    oldest_at timestamptz,
    due_since timestamptz,
    in_flight bigint,
    dead bigint,
    dead_is_estimate boolean,
    waiting_since timestamptz,
    sampled_at timestamptz,
    dead_sampled_at timestamptz,
    circuit_broken_since timestamptz,
    max_pending integer,
    -- Deliveries per second; attempts of the last five minutes that failed, in percent, and of the last minute that has any; how many.
    per_second double precision,
    failed_percent double precision,
    last_failed_percent double precision,
    failed_attempts bigint,
    state text
);

-- What explain(), history() and curl() know of a message, wherever it is.
create type ulak_private.known_message as (
    endpoint_id bigint,
    message_id uuid,
    status text,
    created_at timestamptz,
    updated_at timestamptz,
    scheduled_at timestamptz,
    expires_at timestamptz,
    processing_started_at timestamptz,
    completed_at timestamptz,
    failed_at timestamptz,
    attempts integer,
    priority smallint,
    ordering_key text,
    correlation_id uuid,
    generation bigint,
    last_error text,
    failure_history jsonb,
    payload jsonb,
    headers jsonb,
    metadata jsonb,
    sent_by text
);

-- Replays of a range are logged once, not once per message: this leads to the entry.
create index event_log_replays_idx on ulak.event_log (created_at)
    where event in ('message.replayed', 'messages.replayed');

comment on table ulak.attempts is 'attempts that failed, for event_log_retention_days or dlq_retention_days, whichever is longer, and as long as their dead letter; ulak.history() shows them with the successful ones';
comment on column ulak.attempts.message_id is 'ulak.queue.id of the message';
comment on column ulak.attempts.attempt is 'number of the attempt, as in ulak.queue.attempts';
comment on column ulak.attempts.started_at is 'when it was claimed';
comment on column ulak.attempts.ended_at is 'when the failure was settled, or found by recovery';
comment on column ulak.attempts.error is 'what ulak.queue.last_error was after it';
comment on table ulak.backlog_samples is 'messages that wait and dead letters per endpoint, counted by maintenance every minute and written when they have changed, once an hour at least while there are any; after two days one row an hour, for stats_retention_days';
comment on column ulak.backlog_samples.endpoint_id is 'the endpoint';
comment on column ulak.backlog_samples.sampled_at is 'when they were counted; after two days, the start of the hour whose last count it is';
comment on column ulak.backlog_samples.waiting is 'messages that were pending';
comment on column ulak.backlog_samples.dead is 'dead letters that nobody has redriven';
comment on column ulak.backlog_samples.oldest_id is 'lowest id of those that were pending';
comment on table ulak.traffic is 'all endpoints together, summed up by maintenance every minute, for stats_retention_days; the last two minutes may still change';
comment on column ulak.traffic.minute is 'start of the minute';
comment on column ulak.traffic.delivered is 'messages delivered';
comment on column ulak.traffic.failed is 'attempts that failed';
comment on column ulak.traffic.latency_histogram is 'requests by time: element 1 counts those below 1 ms, element 1 + i those from 2^((i-1)/4) to 2^(i/4) ms, element 86 the rest';
comment on column ulak.traffic.waiting is 'messages that were pending when maintenance last counted';
comment on column ulak.traffic.latency_max_ms is 'the longest of the requests'' times';
comment on table ulak.endpoint_totals is 'deliveries per endpoint since it was created; only rises';
comment on column ulak.endpoint_totals.endpoint_id is 'the endpoint';
comment on column ulak.endpoint_totals.delivered is 'messages delivered';
comment on column ulak.endpoint_totals.failed is 'attempts that failed';
comment on column ulak.endpoint_totals.latency_total_ms is 'sum of the requests'' times';
comment on column ulak.endpoint_totals.latency_histogram is 'requests by time: element 1 counts those below 1 ms, element 1 + i those from 2^((i-1)/4) to 2^(i/4) ms, element 86 the rest';
comment on type ulak_private.known_message is 'what the looks know of a message; private to ulak';
comment on type ulak_private.endpoint_fact is 'what the looks know of an endpoint; private to ulak';
