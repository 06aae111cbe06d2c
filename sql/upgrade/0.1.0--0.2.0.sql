-- From 0.1.0 to 0.2.0: what replaying sql/code can't do. Each step says what it locks, and for how long.

-- The tables that senders and workers use, before anything else: they take them in either order, so who waited for the second
-- with the first in hand would wait in a circle. Each try is short, and everybody goes on in between. From here on senders and
-- workers wait until the upgrade commits.
do $plpgsql$
begin
    perform set_config('lock_timeout', '100ms', true);
    for v_try in 1..300 loop
        begin
            lock table
                ulak.queue, ulak.endpoints, ulak.workers, ulak.subscriptions, ulak.ordering_wakeups, ulak.endpoint_stats, ulak.traffic,
                ulak.cluster_identity, ulak.archive_default
                in access exclusive mode;
            perform set_config('lock_timeout', '0', true);
            return;
        exception
            when lock_not_available then
                perform pg_sleep(0.05);
        end;
    end loop;
    raise exception 'a transaction that uses ulak does not end'
        using
            errcode = '55P03',
            hint = 'select pid, state, xact_start, query from pg_stat_activity where xact_start < now() - interval ''10 s'';';
end
$plpgsql$;

-- Named locks: a new, empty table.

create table ulak.locks (
    name text primary key
);

comment on table ulak.locks is 'one row per thing that one transaction at a time may do; private to ulak';
comment on column ulak.locks.name is 'what the row''s lock stands for, as in sql/code/05_locks.sql';
select pg_catalog.pg_extension_config_dump('ulak.locks', 'where false');

drop function ulak._lock_configs();

-- Sending, ordering and claiming. New columns without a default, new and empty tables: endpoints are locked for an instant.

drop function ulak._admit(bigint, integer, timestamptz);
drop function ulak._close_circuit(ulak.endpoints, text, timestamptz);
drop function ulak._may_probe(ulak.endpoints, timestamptz);
-- Locks ulak.endpoints, which is ours already; nothing is rewritten.
alter table ulak.endpoints add column slow_start_limit integer;
comment on column ulak.endpoints.slow_start_limit is 'most messages in flight while a circuit that has closed is eased back into traffic; null: no such limit';

-- Locks ulak.endpoints, as above.
alter table ulak.endpoints add column max_pending integer;
comment on column ulak.endpoints.max_pending is 'most messages that may wait for it: the config''s max_pending, else the setting; null: any number';
create table ulak.endpoint_headroom (
    endpoint_id bigint primary key references ulak.endpoints (id) on delete cascade,
    safe_to bigint not null default 0,
    overflow_logged_at timestamptz
);
comment on table ulak.endpoint_headroom is 'how far send() may go without probing what waits for an endpoint; private to ulak';
comment on column ulak.endpoint_headroom.endpoint_id is 'an endpoint with max_pending';
comment on column ulak.endpoint_headroom.safe_to is 'messages with ids up to this one fit for certain';
comment on column ulak.endpoint_headroom.overflow_logged_at is 'last line of the server''s log about messages that did not fit: at most one a minute';
select pg_catalog.pg_extension_config_dump('ulak.endpoint_headroom', '');

-- Locks the sequence against other changes of its definition; senders read and set it as ever.
comment on sequence ulak.queue_headroom is 'how far send() may go without probing the queue; private to ulak';

create unlogged sequence ulak.claim_position;
create unlogged sequence ulak.pull_position;
create type ulak._place as (priority smallint, due_at timestamptz, id bigint);
create type ulak._rooms as (endpoint_ids bigint[], rooms integer[], others integer);
create table ulak.ordering_keys (
    endpoint_id bigint not null,
    ordering_key text collate "C" not null,
    primary key (endpoint_id, ordering_key)
);
comment on sequence ulak.claim_position is 'endpoint at which the last claim of a worker ended; private to ulak';
comment on sequence ulak.pull_position is 'endpoint at which the last claim() over pull endpoints ended; private to ulak';
comment on type ulak._place is 'a place in the index of waiting messages';
comment on type ulak._rooms is 'how many messages a worker has room for: of some endpoints, and of each of the others';
comment on table ulak.ordering_keys is 'ordering keys in use, for their locks; private to ulak';
comment on column ulak.ordering_keys.endpoint_id is 'the endpoint of the key';
comment on column ulak.ordering_keys.ordering_key is 'the key';
select pg_catalog.pg_extension_config_dump('ulak.claim_position', '');
select pg_catalog.pg_extension_config_dump('ulak.pull_position', '');
select pg_catalog.pg_extension_config_dump('ulak.ordering_keys', 'where false');

-- What waited at infinity goes on waiting, parked: nothing else is known about it. What was noted is made due.
update ulak.queue q
set next_retry_at = greatest(q.created_at, q.scheduled_at)
where q.status = 'pending'
    and q.next_retry_at = 'infinity'
    and (q.endpoint_id, q.ordering_key) in (select w.endpoint_id, w.ordering_key from ulak.ordering_wakeups w);
-- A table that is dropped as it is stays among those that pg_dump is to carry.
alter extension ulak drop sequence ulak.ordering_wakeups_id_seq;
alter extension ulak drop table ulak.ordering_wakeups;
drop table ulak.ordering_wakeups;

drop function ulak._claim(text, integer, text, bigint, interval, bigint, timestamptz, bigint[], integer[], integer, bigint, smallint, timestamptz, bigint);
drop function ulak._only_pair(integer, text, bigint, timestamptz, bigint[], integer[], integer, bigint, smallint, timestamptz, bigint);
drop function ulak._allot(integer, text, bigint, bigint, timestamptz, bigint[], integer[], integer);
drop function ulak._require_endpoints(bigint[]);
alter function ulak._is_behind(bigint, text) reset all;
drop function ulak._ordering_lock(bigint, text);
drop function ulak._promote_free_heads(bigint[], text[], timestamptz);
drop function ulak._promote_heads(bigint[], text[], timestamptz);
drop function ulak._wake_ordering_keys(timestamptz);
drop function ulak._promote_orphans(timestamptz);
drop function ulak._lock_for_requeue(bigint[], text[]);
drop function ulak._lock_endpoint_for_replay(bigint);
drop function ulak._check_ordering_keys(integer);

-- Publishing and sending many. New types; nobody waits.
create type ulak._message as (
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
comment on type ulak._message is 'one of many messages that are sent together; private to ulak';
create type ulak._mailing as (messages ulak._message[], places integer[], endpoint_ids bigint[]);
comment on type ulak._mailing is 'messages and their recipients: the message at places[i] goes to endpoint_ids[i]; private to ulak';
-- These have more parameters now. The old ones stay under another name, for statements that are in the middle of calling them and for what
-- applications have built on them: both know them by their oids.
alter function ulak.publish(text, jsonb) rename to _publish_of_0_1_0;
comment on function ulak._publish_of_0_1_0(text, jsonb) is null;
alter function ulak.send(text, jsonb, integer, timestamptz, text, uuid, timestamptz, text, jsonb, jsonb) rename to _send_of_0_1_0;
comment on function ulak._send_of_0_1_0(text, jsonb, integer, timestamptz, text, uuid, timestamptz, text, jsonb, jsonb) is null;

-- "cloudevents": true alone meant structured events and means binary ones now. Receivers go on getting what they got. Locks
-- ulak.endpoints, which is ours already.
update ulak.endpoints e
set config = e.config || '{"cloudevents_mode": "structured"}'
where e.protocol = 'http' and e.config -> 'cloudevents' = 'true' and not e.config ? 'cloudevents_mode';

-- Locks ulak.subscriptions, which is ours already; nothing is rewritten.
alter table ulak.subscriptions add column enabled boolean not null default true, add column description text;
comment on column ulak.subscriptions.enabled is 'false: it is passed over, and what is published meanwhile is not sent later';
comment on column ulak.subscriptions.description is 'free text for people';

-- Recurring messages: a new, empty table. Its foreign key locks ulak.endpoints, which is ours already.
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
comment on column ulak.recurring.endpoint_id is 'the endpoint that it goes to; it goes with it';
comment on column ulak.recurring.payload is 'the body';
comment on column ulak.recurring.priority is 'as for send()';
comment on column ulak.recurring.ordering_key is 'as for send()';
comment on column ulak.recurring.headers is 'as for send()';
comment on column ulak.recurring.metadata is 'as for send()';
comment on column ulak.recurring.expires_after is 'how long each of the messages may be delivered; null: for ever';
comment on column ulak.recurring.last_sent_at is 'when pg_cron last called';
comment on column ulak.recurring.created_at is 'when it was first scheduled';
select pg_catalog.pg_extension_config_dump('ulak.recurring', '');

-- Roles and the gate.

-- Roles of the cluster; sql/code/07_roles.sql looks at those that are there already. Nobody waits.
do $plpgsql$
begin
    if to_regrole('ulak_consumer') is null then
        create role ulak_consumer nologin;
    end if;
    if to_regrole('ulak_node') is null then
        create role ulak_node nologin;
    end if;
exception
    when duplicate_object or unique_violation then
        null;
end
$plpgsql$;

-- A new, empty table. Its foreign key locks ulak.endpoints against writers (share row exclusive) until the upgrade commits.
create table ulak.endpoint_grants (
    endpoint_id bigint not null references ulak.endpoints (id) on delete cascade,
    role_name text not null,
    granted_at timestamptz not null default now(),
    granted_by text not null default session_user,
    primary key (endpoint_id, role_name)
);

comment on table ulak.endpoint_grants is 'endpoints that members of ulak_consumer may work off. Change it with ulak.grant_endpoint() and ulak.revoke_endpoint()';
comment on column ulak.endpoint_grants.endpoint_id is 'the endpoint';
comment on column ulak.endpoint_grants.role_name is 'name of the role whose members may; a role that is renamed loses it';
comment on column ulak.endpoint_grants.granted_at is 'when it was granted';
comment on column ulak.endpoint_grants.granted_by is 'the session user who granted it';
select pg_catalog.pg_extension_config_dump('ulak.endpoint_grants', '');

drop function ulak._are_networks(text);
drop function ulak._how_to_free(bigint, text, boolean);

-- As configure() stores networks now: 10.1/16 was accepted, and no worker understood it. One row, if any.
-- Locks that row.
update ulak.setting_values v
set value = coalesce(
    (
        select string_agg(n.network::cidr::text, ',' order by n.place)
        from unnest(string_to_array(v.value, ',')) with ordinality n(network, place)
    ),
    ''
)
where v.name = 'http_allowed_networks';

-- Workers and their schedule. The column locks ulak.workers for a moment: workers report once a second, and wait for so long.
-- Workers of 0.1.0 held their slots by advisory locks; they leave when they see the new version.

-- Locks ulak.workers, which is ours already.
alter table ulak.workers add column backend_start timestamptz, add column limited_by text, add column host text;
comment on column ulak.workers.backend_start is 'when that backend was started, as in pg_stat_activity: a pid alone comes again';
comment on column ulak.workers.limited_by is 'why it has fewer requests in flight than worker_concurrency allows';
comment on table ulak.workers is 'worker slots and who runs them, in the database and on nodes';
comment on column ulak.workers.slot is 'number of the slot, from 1; those of nodes from 101';
comment on column ulak.workers.host is 'machine of a node, as it calls itself; null for workers in the database';
-- Locks ulak.schedule for a moment: only start(), stop() and workers that begin use it.
alter table ulak.schedule add column is_stopped boolean not null default false;
comment on column ulak.schedule.workers is 'how many workers pg_cron is to run; 0 after stop() and start(0)';
comment on column ulak.schedule.is_stopped is 'stop() was called last: nodes wait for start()';
update ulak.schedule set is_stopped = true where workers = 0;

drop procedure ulak.run_worker(integer, double precision);
drop function ulak._take_worker_slot(integer, double precision);
drop function ulak._register_worker(integer, text, boolean);
drop function ulak._limit_workers(integer);
drop function ulak.get_worker_status(timestamptz);
drop function ulak._schedule_command(text, text, text, text);
drop function ulak._wanted_jobs(integer);
drop function ulak._log_in(text, text);

drop function ulak._endpoint_configs(bigint[], timestamptz);
-- It takes one parameter more, with a default: workers of 0.1.0 that call it once more find the new one.
drop function ulak._light_turn(text, bigint, integer, interval, bigint[], integer[], timestamptz);

-- Looks and statistics.

-- Functions whose parameters or result have changed. Locks nothing but themselves; a look that is under way ends first where it
-- reads the view.

-- Locks ulak.endpoints, which is ours already; nothing is rewritten.
alter table ulak.endpoints
    add column dead_log_started_at timestamptz,
    add column dead_log_letters integer,
    add column circuit_broken_since timestamptz;
-- Rows whose circuit isn't closed; nobody else can have them locked.
update ulak.endpoints set circuit_broken_since = circuit_opened_at where circuit_state <> 'closed';
comment on column ulak.endpoints.dead_log_started_at is 'start of the minute whose dead letters dead_log_letters counts';
comment on column ulak.endpoints.dead_log_letters is 'dead letters of that minute: the first ten have a line of the server''s log each';
comment on column ulak.endpoints.circuit_broken_since is 'since when the breaker has not been closed; null while it is';

-- Locks ulak.endpoint_stats, which is ours already; nothing is rewritten.
alter table ulak.endpoint_stats add column latency_max_ms double precision;
-- Locks ulak.traffic, which is ours already; nothing is rewritten.
alter table ulak.traffic add column latency_max_ms double precision;
comment on column ulak.endpoint_stats.latency_max_ms is 'the longest of the requests'' times; null before version 0.2.0';
comment on column ulak.traffic.latency_max_ms is 'the longest of the requests'' times; null before version 0.2.0';
comment on column ulak.traffic.latency_histogram is 'requests by time: element 100 + i counts those from 2^((i-1)/4) to 2^(i/4) ms, element 100 those below 1 ms, element 185 the rest. Elements 1 to 22 are of version 0.1.0: element i from 2^(i-2) to 2^(i-1) ms';
comment on column ulak.endpoint_totals.latency_histogram is 'requests by time: element 100 + i counts those from 2^((i-1)/4) to 2^(i/4) ms, element 100 those below 1 ms, element 185 the rest. Elements 1 to 22 are of version 0.1.0: element i from 2^(i-2) to 2^(i-1) ms';

drop view ulak.top;
drop function ulak._backlog(bigint, timestamptz);
drop function ulak._recent_traffic(timestamptz);
drop function ulak._endpoint_state(boolean, text, timestamptz, double precision, double precision, timestamptz);
drop function ulak._top(timestamptz);
drop function ulak._endpoint_facts(bigint, timestamptz);
drop function ulak._recent_rates(bigint, timestamptz);
drop function ulak._percentile(bigint[], double precision);
drop function ulak.metrics(timestamptz);
drop function ulak.metrics_text(timestamptz);
drop function ulak._delivery_metrics();
drop function ulak._metric_definitions();
drop function ulak._doctor_endpoints(timestamptz);
drop function ulak._doctor_dlq(timestamptz);

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
    dead bigint,
    dead_is_estimate boolean,
    waiting_since timestamptz,
    sampled_at timestamptz,
    dead_sampled_at timestamptz,
    circuit_broken_since timestamptz,
    max_pending integer
);

comment on type ulak._endpoint_fact is 'what the looks know of an endpoint; private to ulak';

-- Comments: each locks its table against other changes of it (share update exclusive) for a moment; rows are read and written meanwhile.

comment on column ulak.endpoints.protocol is 'a worker delivers (http, log, or that of a broker), or external workers call ulak.claim() (pull)';
comment on table ulak.backlog_samples is 'messages that wait and dead letters per endpoint, counted by maintenance every minute and written when they have changed, once an hour at least while there are any; after two days one row an hour, for stats_retention_days';
comment on column ulak.backlog_samples.sampled_at is 'when they were counted; after two days the start of that hour, whose last count it is';
comment on table ulak.traffic is 'all endpoints together, summed up by maintenance every minute, for stats_retention_days; the last two minutes may still change';
comment on table ulak.endpoint_stats is 'deliveries per endpoint and minute; after two days per endpoint and hour, for stats_retention_days. Minutes without any have no row';
comment on column ulak.endpoint_stats.minute is 'start of the minute, or of the hour';
comment on column ulak.endpoint_stats.latency_histogram is 'requests by time: element 100 + i counts those from 2^((i-1)/4) to 2^(i/4) ms, element 100 those below 1 ms, element 185 the rest. Elements 1 to 22 are of version 0.1.0: element i from 2^(i-2) to 2^(i-1) ms';
comment on column ulak.queue.metadata is 'the sender''s own notes, not sent, but for event_type: it is the type of a CloudEvent';

-- The archive and its months have copies of the queue's comments.
do $plpgsql$
declare
    v_table regclass;
begin
    for v_table in
        select t.relid from pg_partition_tree('ulak.archive') t where t.relid <> 'ulak.archive_default'::regclass
    loop
        execute format(
            'comment on column %s.metadata is %L',
            v_table,
            col_description('ulak.queue'::regclass, (
                select a.attnum from pg_attribute a where a.attrelid = 'ulak.queue'::regclass and a.attname = 'metadata'
            ))
        );
    end loop;
end
$plpgsql$;

-- Times, archive and maintenance.

drop function ulak._require_positive(text, integer);
drop function ulak._archive_batch(timestamptz, timestamptz, integer, timestamptz);
drop function ulak._cleanup(text, integer, integer, timestamptz);

-- Taking back and finding.

create sequence ulak.messages_cancelled;
comment on sequence ulak.messages_cancelled is 'messages cancelled so far, also by transactions that rolled back; private to ulak';
select pg_catalog.pg_extension_config_dump('ulak.messages_cancelled', '');

-- Locks ulak.dlq until the upgrade commits, and reads it once to see that each status is known: 0.4 s for a million dead letters.
-- Senders don't use it; a worker that buries a message waits.
alter table ulak.dlq
    add column discarded_at timestamptz,
    add column discarded_by text,
    drop constraint dlq_status_is_known,
    add constraint dlq_status_is_known check (status in ('failed', 'redriven', 'discarded'));
comment on column ulak.dlq.status is 'failed, redriven or discarded';
comment on column ulak.dlq.discarded_at is 'when it was given up';
comment on column ulak.dlq.discarded_by is 'who gave it up';

-- For the index below to be sorted in memory; it holds until the script ends. Locks nothing.
select pg_catalog.set_config(
    'maintenance_work_mem',
    greatest(pg_catalog.pg_size_bytes(pg_catalog.current_setting('maintenance_work_mem')), 256 * 1024 * 1024) / 1024 || 'kB',
    true
);
-- Reads the queue once, which is ours already: 0.2 s for a million messages without a correlation id, 0.7 s if all have one.
create index queue_correlation_idx on ulak.queue (correlation_id) where correlation_id is not null;

-- A comment each: locks nothing that anybody waits for.
do $plpgsql$
declare
    v_relation regclass;
begin
    for v_relation in
        select 'ulak.queue'::regclass
        union all
        select t.relid from pg_catalog.pg_partition_tree('ulak.archive') t where t.relid <> 'ulak.archive_default'::regclass
    loop
        execute format(
            'comment on column %s.status is %L', v_relation, 'pending, processing, completed, failed or expired; in the archive also cancelled'
        );
    end loop;
end
$plpgsql$;

drop function ulak._redrive_command(text, timestamptz, timestamptz, text, jsonpath, integer, double precision, text, bigint);
drop function ulak.dlq_summary();

-- Workers of 0.1.0 that are settling find the new one, which takes one parameter more.
drop function ulak._settle_many(text, bigint[], integer[], text[], integer[], jsonb[], timestamptz);

-- Nothing called them. Locks nothing but themselves.

drop function ulak._setting_integer(text);
drop function ulak._json_schema_violation(jsonb, jsonb);

-- Which cluster delivers. A new table; nobody waits.
create table ulak.cluster_home (
    system_identifier bigint primary key,
    table_oid oid not null
);
insert into ulak.cluster_home (system_identifier, table_oid)
select c.system_identifier, 'ulak.cluster_home'::regclass
from pg_catalog.pg_control_system() c;
comment on table ulak.cluster_home is 'cluster whose files these tables are part of, as it was last seen; private to ulak';
comment on column ulak.cluster_home.system_identifier is 'as in pg_control_system()';
comment on column ulak.cluster_home.table_oid is 'of this table when the row was written: another one was restored from a dump';
select pg_catalog.pg_extension_config_dump('ulak.cluster_home', 'where false');

-- So that a publication for all tables lets maintenance and adopt() do their work. Locks both, which are ours already.
alter table ulak.cluster_identity replica identity full;
alter table ulak.archive_default replica identity full;
