-- Workers' reports about themselves and their deliveries.

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
    backend_start timestamptz,
    limited_by text,
    host text,
    clock_ahead interval,
    broken_runs integer not null default 0,
    broken_at timestamptz,
    broken_by text,
    suspicion integer not null default 0,
    timeline integer,
    constraint workers_state_is_known check (
        state in (
            'running', -- run_worker -> here
            'stopped'  -- left in good order; a row that says running and whose backend is gone died
        )
    )
);

-- The last request of start() or stop(): one row, or none before the first start().
create table ulak_private.schedule (
    is_only boolean primary key default true check (is_only),
    workers integer not null,
    changed_at timestamptz not null default clock_timestamp(),
    is_stopped boolean not null default false,
    is_watched boolean not null default false
);

-- Per endpoint and minute; workers add to it about once a second, so it never slows a settle. After two days maintenance makes one
-- row of an hour.
create table ulak.endpoint_stats (
    endpoint_id bigint not null,
    minute timestamptz not null,
    delivered bigint not null default 0,
    failed bigint not null default 0,
    latency_total_ms double precision not null default 0,
    latency_histogram bigint[] not null default '{}',
    latency_max_ms double precision,
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

comment on table ulak.workers is 'worker slots and the sessions that hold them, in the database and on nodes';
comment on column ulak.workers.slot is 'number of the slot, from 1; those of nodes from 101';
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
comment on column ulak.workers.is_scheduled is 'true: pg_cron runs it for start(); false: another scheduler does';
comment on column ulak.workers.version is 'version of the extension that it runs';
comment on column ulak.workers.backend_start is 'when that backend was started, as in pg_stat_activity: pids are reused';
comment on column ulak.workers.limited_by is 'why it has fewer requests in flight than worker_concurrency allows';
comment on column ulak.workers.host is 'machine of a node, as it calls itself; null for workers in the database';
comment on column ulak.workers.clock_ahead is 'by how much the clock of a node''s machine was ahead of the server''s at the last sign of life; its requests carry the server''s time';
comment on column ulak.workers.timeline is 'of the server when the worker came: a server that was promoted since knows nothing of its session';
comment on column ulak.workers.broken_runs is 'runs of this slot that ended with an error, each within an hour of the one before';
comment on column ulak.workers.broken_at is 'when the last of them did';
comment on column ulak.workers.broken_by is 'its error';
comment on column ulak.workers.suspicion is 'consecutive runs that ended with an error in the worker''s own code; from 2 on it holds one message at a time';
comment on table ulak_private.schedule is 'what start() and stop() last requested; private to ulak';
comment on column ulak_private.schedule.is_only is 'true: there is one row';
comment on column ulak_private.schedule.changed_at is 'when that was';
comment on column ulak_private.schedule.workers is 'how many workers pg_cron is to run; 0 after stop() and start(0)';
comment on column ulak_private.schedule.is_stopped is 'stop() was called last: nodes wait for start()';
comment on column ulak_private.schedule.is_watched is 'workers need a watcher: pg_cron starts nothing between two full minutes';
comment on table ulak.endpoint_stats is 'deliveries per endpoint and minute; after two days per endpoint and hour, for stats_retention_days. Minutes without any have no row';
comment on column ulak.endpoint_stats.endpoint_id is 'the endpoint';
comment on column ulak.endpoint_stats.minute is 'start of the minute, or of the hour';
comment on column ulak.endpoint_stats.delivered is 'messages delivered';
comment on column ulak.endpoint_stats.failed is 'attempts that failed';
comment on column ulak.endpoint_stats.latency_total_ms is 'sum of the requests'' times';
comment on column ulak.endpoint_stats.latency_histogram is 'requests by time: element 1 counts those below 1 ms, element 1 + i those from 2^((i-1)/4) to 2^(i/4) ms, element 86 the rest';
comment on column ulak.endpoint_stats.latency_max_ms is 'the longest of the requests'' times';
comment on table ulak.handled is 'keys that mark_handled() has seen';
comment on column ulak.handled.consumer is 'who handled it';
comment on column ulak.handled.key is 'what was handled';
comment on column ulak.handled.handled_at is 'when';
