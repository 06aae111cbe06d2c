-- From 0.1.0 to 0.2.0: what replaying sql/code can't do. Each step says what it locks, and for how long.

-- Locks: a new, empty table; nobody waits.

create table ulak.locks (
    name text primary key
);

comment on table ulak.locks is 'one row per thing that one transaction at a time may do; private to ulak';
comment on column ulak.locks.name is 'what the row''s lock stands for, as in sql/code/05_locks.sql';
select pg_catalog.pg_extension_config_dump('ulak.locks', 'where false');

drop function ulak._lock_configs();

-- Sending, ordering and claiming.

-- Roles and the gate.

-- Workers and their schedule.

-- Looks and statistics.

-- Functions whose parameters or result have changed. Locks nothing but themselves; a look that is under way ends first where it
-- reads the view.

drop view ulak.top;
drop function ulak._top(timestamptz);
drop function ulak._endpoint_facts(bigint, timestamptz);
drop function ulak._recent_rates(bigint, timestamptz);
drop function ulak._percentile(bigint[], double precision);
drop function ulak.metrics(timestamptz);
drop function ulak.metrics_text(timestamptz);
drop function ulak._delivery_metrics();
drop function ulak._metric_definitions();
drop function ulak._doctor_endpoints(timestamptz);

-- What the looks know of an endpoint: gathered once, and handed to each part of a look that shows several.
create type ulak._endpoint_fact as (
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
    dead bigint
);

comment on type ulak._endpoint_fact is 'what the looks know of an endpoint; private to ulak';

-- Comments: each locks its table against other changes of it (share update exclusive) for a moment; rows are read and written meanwhile.

comment on table ulak.backlog_samples is 'messages that wait and dead letters per endpoint, counted by maintenance every minute and written when they have changed, once an hour at least while there are any; after two days one row an hour, for stats_retention_days';
comment on column ulak.backlog_samples.sampled_at is 'when they were counted; after two days the start of that hour, whose last count it is';
comment on table ulak.traffic is 'all endpoints together, summed up by maintenance every minute, for stats_retention_days; the last two minutes may still change';
comment on table ulak.endpoint_stats is 'deliveries per endpoint and minute; after two days per endpoint and hour, for stats_retention_days. Minutes without any have no row';
comment on column ulak.endpoint_stats.minute is 'start of the minute, or of the hour';
comment on column ulak.endpoint_stats.latency_histogram is 'requests by time: element i counts those from 2^(i-2) to 2^(i-1) ms; what is missing at the end is 0';

-- Times, archive and maintenance.
