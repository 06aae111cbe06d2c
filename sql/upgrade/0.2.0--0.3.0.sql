-- From 0.2.0 to 0.3.0: what replaying sql/code can't do. Each step says what it locks, and for how long.

-- What is private moves there, at the end (0.2.0--0.3.0.move.sql). A schema's owner could replace what is in it, so an existing one is refused.
create schema ulak_private;
comment on schema ulak_private is 'The inside of ulak. What users call and read is in schema ulak.';

-- Lock the tables that senders and workers use before anything else: sessions take them in either order, and would deadlock with an
-- upgrade that held one and waited for another. Each try is short, and everybody else goes on in between. From here on senders and
-- workers wait until the upgrade commits.
do $plpgsql$
begin
    perform set_config('lock_timeout', '100ms', true);
    for v_try in 1..300 loop
        begin
            lock table
                ulak.queue, ulak.dlq, ulak.archive, ulak.endpoints, ulak.workers, ulak.event_log, ulak.setting_values, ulak.endpoint_grants,
                ulak.event_types, ulak.subscriptions, ulak.locks, ulak.ordering_keys, ulak.endpoint_headroom, ulak.secrets, ulak.schedule, ulak.cluster_home,
                ulak.cluster_identity, ulak.maintenance_runs
            in access exclusive mode;
            -- Sequences can't be locked by name.
            alter sequence ulak.bell set schema ulak_private;
            alter sequence ulak.claim_position set schema ulak_private;
            alter sequence ulak.messages_cancelled set schema ulak_private;
            alter sequence ulak.pull_position set schema ulak_private;
            alter sequence ulak.queue_headroom set schema ulak_private;
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

-- Locks: ulak.workers, which is locked above. A column without a default: the table isn't rewritten.
alter table ulak.workers add column clock_ahead interval;
comment on column ulak.workers.clock_ahead is 'by how much the clock of a node''s machine was ahead of the server''s at the last sign of life; its requests carry the server''s time';

-- Locks ulak.cluster_home, which claims read: they wait, as they do already. The cluster delivers on the timeline that it has now.
alter table ulak.cluster_home add column timeline integer;
update ulak.cluster_home
set timeline = ('x' || left(pg_catalog.pg_walfile_name(pg_catalog.pg_current_wal_insert_lsn()), 8))::bit(32)::integer;
comment on column ulak.cluster_home.timeline is 'the last one of PostgreSQL''s timelines that this cluster was seen to deliver on; recovery to a target after it means that messages are held until adopt()';

-- The lock is held already, and the table has a row for each worker.
alter table ulak.workers
    add column broken_runs integer not null default 0,
    add column broken_at timestamptz,
    add column broken_by text,
    add column suspicion integer not null default 0;
comment on column ulak.workers.broken_runs is 'runs of this slot that ended with an error, each within an hour of the one before';
comment on column ulak.workers.broken_at is 'when the last of them did';
comment on column ulak.workers.broken_by is 'its error';
comment on column ulak.workers.suspicion is 'consecutive runs that ended with an error in the worker''s own code; from 2 on it holds one message at a time';

-- What 0.1.0 counted, in the elements of today; the longest time is taken to be the end of the last element. Locks the rows that it changes,
-- which nobody writes while the tables above are locked. It reads the counters of endpoints that 0.1.0 delivered to, and none of others.
update ulak.traffic t
set latency_histogram = ulak._fine_histogram(t.latency_histogram),
    latency_max_ms = greatest(t.latency_max_ms, (
        select 2 ^ ((max(e) - 100) / 4.0::double precision)
        from ulak._fine_histogram(t.latency_histogram) h
        cross join generate_series(100, 185) e
        where h[e] > 0
    ))
where array_lower(t.latency_histogram, 1) < 100;
update ulak.endpoint_stats s
set latency_histogram = ulak._fine_histogram(s.latency_histogram),
    latency_max_ms = greatest(s.latency_max_ms, (
        select 2 ^ ((max(e) - 100) / 4.0::double precision)
        from ulak._fine_histogram(s.latency_histogram) h
        cross join generate_series(100, 185) e
        where h[e] > 0
    ))
where array_lower(s.latency_histogram, 1) < 100
    and s.endpoint_id in (select t.endpoint_id from ulak.endpoint_totals t where array_lower(t.latency_histogram, 1) < 100);
update ulak.endpoint_totals t
set latency_histogram = ulak._fine_histogram(t.latency_histogram)
where array_lower(t.latency_histogram, 1) < 100;
comment on column ulak.traffic.latency_histogram is 'requests by time: element 100 + i counts those from 2^((i-1)/4) to 2^(i/4) ms, element 100 those below 1 ms, element 185 the rest';
comment on column ulak.traffic.latency_max_ms is 'the longest of the requests'' times';
comment on column ulak.endpoint_totals.latency_histogram is 'requests by time: element 100 + i counts those from 2^((i-1)/4) to 2^(i/4) ms, element 100 those below 1 ms, element 185 the rest';
comment on column ulak.endpoint_stats.latency_histogram is 'requests by time: element 100 + i counts those from 2^((i-1)/4) to 2^(i/4) ms, element 100 those below 1 ms, element 185 the rest';
comment on column ulak.endpoint_stats.latency_max_ms is 'the longest of the requests'' times';

-- 0.2.0 kept these for sessions that were still running functions of 0.1.0.
drop function ulak._claim(text, integer, text, interval, bigint[], integer[], integer, bigint, smallint, timestamptz, bigint);
drop function ulak._become_poller();
drop function ulak._is_awaited(bigint);
drop function ulak._ring();
drop function ulak._set_bell();
drop function ulak._wait_for_endpoint(text);
drop function ulak._is_behind(bigint, text);
drop function ulak._publish(text, jsonb);
drop function ulak._count_live(bigint);

-- Sessions of 0.2.0 still call these: 0.2.0--0.3.0.sessions.sql has them.
drop function ulak._missing_client(text);
drop function ulak._require_room(bigint, integer);
drop function ulak._refuse_operator_event(bigint);
drop function ulak._check_login(text);
drop function ulak._is_charged(ulak.endpoints);
drop function ulak._counts_deliveries(ulak.endpoints);
drop function ulak._notes_deliveries(ulak.endpoints, timestamptz);

comment on column ulak.endpoints.config is 'how to reach the receiver. Validated key by key; {"$secret": "name"} stands for a value in ulak_private.secrets';
comment on column ulak.locks.name is 'what the row''s lock stands for, as in sql/code/1_foundations/locks.sql';

-- No lock but the one that is held already.
comment on column ulak.endpoints.circuit_probe_id is 'message that probes a half-open breaker, or did so last';

-- A new table: nobody waits.
create table ulak.sweep_state (
    is_only boolean primary key default true check (is_only),
    endpoint_id bigint,
    ordering_key text,
    latest_at timestamptz,
    set_back_at timestamptz,
    set_back_by interval,
    next_id bigint
) with (fillfactor = 50);

comment on table ulak.sweep_state is 'where the next sweep goes on, and what it knows of the clock; private to ulak';
comment on column ulak.sweep_state.is_only is 'true: there is one row';
comment on column ulak.sweep_state.endpoint_id is 'with ordering_key: the ordering key that the last sweep ended at; null if it looked at all of them';
comment on column ulak.sweep_state.ordering_key is 'see endpoint_id';
comment on column ulak.sweep_state.latest_at is 'the latest time that a sweep has seen';
comment on column ulak.sweep_state.set_back_at is 'when a sweep found that the clock was set back, by the clock as it is since; null: it was not';
comment on column ulak.sweep_state.set_back_by is 'by how much';
comment on column ulak.sweep_state.next_id is 'messages from here on were looked at for times that lie ahead; null: the next look begins with the newest';
select pg_catalog.pg_extension_config_dump('ulak.sweep_state', 'where false');

-- A value of metadata may no longer hold what parts a route, unless the config allows it. Endpoints that are there go on as before: the key
-- is added where it makes a difference. No lock but the one that is held already; the check of 0.2.0 doesn't know the key.
alter table ulak.endpoints disable trigger endpoints_are_valid;
update ulak.endpoints e
set config = e.config || '{"allow_separators": true}', config_version = e.config_version + 1
from (
    select r.id, r.route, regexp_replace(r.route #>> '{}', E'\\{[^}]*\\}', '', 'g') as texts
    from (
        select o.id, coalesce(o.config -> 'topic', o.config -> 'stream_key', o.config -> 'routing_key') as route
        from ulak.endpoints o
        where o.protocol in ('kafka', 'redis', 'amqp', 'mqtt')
    ) r
) r
where e.id = r.id
    and (
        jsonb_typeof(r.route) <> 'string'
        or r.texts ~ '[/:]' and r.route #>> '{}' like '%{%'
        or r.texts like '%.%' and regexp_replace(r.route #>> '{}', E'\\{event_type\\}', '', 'g') like '%{%'
    );
alter table ulak.endpoints enable trigger endpoints_are_valid;

-- Only start() called these, which says more now.
drop function ulak._login_rule(text);
drop function ulak._login_fix(text);

-- Neither rewrites its table. ulak.workers is locked already; ulak.schedule is read by workers and changed by start() and stop(), which wait
-- from here on until the upgrade commits.
alter table ulak.workers add column timeline integer;
alter table ulak.schedule add column is_watched boolean not null default false;
comment on column ulak.workers.timeline is 'of the server when the worker came: a server that was promoted since knows nothing of its session';
comment on column ulak.schedule.is_watched is 'workers need a watcher: pg_cron starts nothing between two full minutes';

-- Messages: new, empty tables for what was sent and for idempotency keys.

-- An event has the id of its first delivery. Months are made and dropped together with those of the archive
-- (sql/code/6_afterwards/partitions.sql), but none is dropped as long as something needs an event of it.
create table ulak._events (
    id bigint not null,
    created_at timestamptz not null default now(),
    payload jsonb not null,
    headers jsonb,
    metadata jsonb,
    -- As ulak._caller() has it. Once for all deliveries, also for those of a redrive or a replay.
    sent_by text default case when current_setting('role') = 'none' then session_user else current_setting('role') end,
    max_retries smallint
) partition by range (created_at);

create table ulak._events_default partition of ulak._events default;
-- Nobody waits for the lock of a table that is new.
create index _events_default_id_idx on ulak._events_default (id);
-- Maintenance moves its rows. Where a publication is for all tables, a table whose rows can't be told apart lets nobody do that. Nobody
-- waits for its lock.
alter table ulak._events_default replica identity full;

-- Idempotency keys in use. A row of its own and not an index on deliveries: a delivered message leaves them, but keeps its key for
-- archive_after seconds, because a client that repeats its request a moment after the delivery must get the same answer as one
-- that repeats it a moment before.
create table ulak._idempotency_keys (
    endpoint_id bigint not null,
    idempotency_key text collate "C" not null,
    message_id bigint not null,
    payload_hash text not null,
    free_at timestamptz,
    sent_by text
);

comment on table ulak._events is 'what was sent: payload, headers and metadata, once for all endpoints that it goes to; private to ulak';
comment on column ulak._events.id is 'the id of its first message';
comment on column ulak._events.created_at is 'start of the transaction that sent it';
comment on column ulak._events.payload is 'the body';
comment on column ulak._events.headers is 'extra request headers';
comment on column ulak._events.metadata is 'the sender''s own notes';
comment on column ulak._events.sent_by is 'the role that sent it: the one that was set, else the one that logged in; null: sent by 0.2.0';
comment on column ulak._events.max_retries is 'its own number of retries, as asked for by the sender; null: as the endpoint''s retry policy says';
comment on table ulak._events_default is 'events whose month has no partition yet; maintenance moves them; private to ulak';
comment on table ulak._idempotency_keys is 'idempotency keys in use; private to ulak';
comment on column ulak._idempotency_keys.endpoint_id is 'the endpoint of the key';
comment on column ulak._idempotency_keys.idempotency_key is 'the key';
comment on column ulak._idempotency_keys.message_id is 'the message that was sent with it';
comment on column ulak._idempotency_keys.payload_hash is 'sha256 of that message''s payload';
comment on column ulak._idempotency_keys.free_at is 'when the key of a delivered message is free again; null while the message is live';
comment on column ulak._idempotency_keys.sent_by is 'the role that uses the key; null: taken by 0.2.0, any role may use it';

select pg_catalog.pg_extension_config_dump('ulak._events_default', '');
select pg_catalog.pg_extension_config_dump('ulak._idempotency_keys', '');

-- The tables of messages get other names, and views have theirs. All three are locked already; nothing is rewritten. What was sent by
-- 0.2.0 keeps its body in its row, and is delivered from there.
alter table ulak.queue rename to _deliveries;
alter index ulak.queue_pkey rename to _deliveries_pkey;
alter index ulak.queue_pending_idx rename to deliveries_pending_idx;
alter index ulak.queue_processing_idx rename to deliveries_processing_idx;
alter index ulak.queue_finished_idx rename to deliveries_finished_idx;
alter index ulak.queue_expiry_idx rename to deliveries_expiry_idx;
-- Made anew, since dead letters may hold their keys: takes as long as a look at all waiting messages.
drop index ulak.queue_ordering_idx;
create index deliveries_ordering_idx on ulak._deliveries (endpoint_id, ordering_key, id)
    where ordering_key is not null and status in ('pending', 'processing', 'held');
alter index ulak.queue_correlation_idx rename to deliveries_correlation_idx;
drop index ulak.queue_idempotency_idx;
alter table ulak.dlq rename to _letters;
alter table ulak.archive rename to _archived;
alter table ulak._deliveries alter column payload drop not null, add column event_id bigint, add column event_created_at timestamptz, add column made_from bigint;
alter table ulak._letters
    alter column payload drop not null, add column is_holding boolean not null default false, add column event_id bigint,
    add column event_created_at timestamptz, add column made_from bigint;
create index dlq_holding_idx on ulak._letters (endpoint_id) where is_holding;
alter table ulak._archived alter column payload drop not null, add column event_id bigint, add column event_created_at timestamptz, add column made_from bigint;

-- Locks the archive, which is ours already. Reads the rows of this month; those of earlier ones need no index.
do $plpgsql$
declare
    v_partition text;
begin
    for v_partition in
        select p.name
        from ulak._archive_partitions p
        where p.month >= date_trunc('month', now(), 'UTC')
    loop
        execute format('create index on ulak.%I (event_created_at) where event_created_at is not null', v_partition);
        execute format($$comment on column ulak.%I.event_id is 'as in ulak.queue'$$, v_partition);
        execute format($$comment on column ulak.%I.event_created_at is 'as in ulak.queue'$$, v_partition);
        execute format($$comment on column ulak.%I.made_from is 'as in ulak.queue'$$, v_partition);
        execute format($$comment on column ulak.%I.status is 'pending, processing or held (a dead letter that holds its ordering key); in the archive completed, failed, expired or cancelled'$$, v_partition);
        execute format(
            $$comment on column ulak.%I.idempotency_key is 'one message per endpoint and key, until archive_after seconds after its delivery'$$,
            v_partition
        );
        execute format(
            $$comment on column ulak.%I.generation is 'sent as ulak-generation; claim() can be limited to one generation, so that old and new consumers each get their own'$$,
            v_partition
        );
    end loop;
end
$plpgsql$;

-- Of the archive, which is locked already.
create index archive_default_event_created_at_idx on ulak.archive_default (event_created_at) where event_created_at is not null;

-- Waits for nobody: the queue is locked already. Takes as long as there are messages with an idempotency key.
insert into ulak._idempotency_keys (endpoint_id, idempotency_key, message_id, payload_hash, free_at)
select
    q.endpoint_id,
    q.idempotency_key,
    q.id,
    q.payload_hash,
    case when q.status = 'completed' then q.completed_at + make_interval(secs => ulak.setting('archive_after')::integer) end
from ulak._deliveries q
where q.idempotency_key is not null and q.status in ('pending', 'processing', 'completed');
-- Of the same table, which nobody waits for: indexes that are made at once take a part of the time.
alter table ulak._idempotency_keys add primary key (endpoint_id, idempotency_key);
create index _idempotency_keys_free_at_idx on ulak._idempotency_keys (free_at) where free_at is not null;

comment on table ulak._deliveries is 'the state of every unfinished message; private to ulak: read ulak.queue';
comment on column ulak._deliveries.status is 'pending, processing or held (a dead letter that holds its ordering key); in the archive completed, failed, expired or cancelled';
comment on column ulak._deliveries.idempotency_key is 'one message per endpoint and key, until archive_after seconds after its delivery';
comment on table ulak._archived is 'finished messages in monthly partitions archive_YYYY_MM (UTC); private to ulak: read ulak.archive';
comment on table ulak.archive_default is 'finished messages whose month has no partition yet; maintenance moves them';
comment on column ulak._archived.archived_at is 'when it left ulak.queue';
comment on column ulak._deliveries.event_id is 'the event that it is a delivery of; null: sent by 0.2.0';
comment on column ulak._deliveries.event_created_at is 'when that event was sent, if not with this message: it was redriven or replayed';
comment on column ulak._deliveries.made_from is 'the message that a redrive or a replay made this one from';
comment on column ulak._archived.event_id is 'as in ulak.queue';
comment on column ulak._archived.event_created_at is 'as in ulak.queue';
comment on column ulak._archived.made_from is 'as in ulak.queue';
comment on column ulak._letters.is_holding is 'true: what follows in its ordering key waits until it is redriven or discarded';
comment on column ulak._letters.event_id is 'as in ulak.queue';
comment on column ulak._letters.event_created_at is 'as in ulak.queue';
comment on column ulak._letters.made_from is 'as in ulak.queue';
comment on table ulak._letters is 'dead letters; private to ulak: read ulak.dlq';
comment on column ulak._archived.status is 'pending, processing or held (a dead letter that holds its ordering key); in the archive completed, failed, expired or cancelled';
comment on column ulak._archived.idempotency_key is 'one message per endpoint and key, until archive_after seconds after its delivery';

drop function ulak._insert_messages(ulak._mailing, boolean);
drop function ulak._insert_unless_known(bigint[], ulak._mailing);
drop function ulak._new_rows(bigint[], ulak._mailing);
drop function ulak._first_of_idempotency_key(bigint, text, text, text);
drop function ulak._enqueue_many(bigint[], jsonb[], integer, text[]);
drop function ulak._send(text, jsonb, integer, timestamptz, text, uuid, timestamptz, text, jsonb, jsonb);
drop function ulak._enqueue_once(ulak._mailing);
drop function ulak._enqueue(ulak._message[]);
drop function ulak._enqueue(ulak._mailing);
drop function ulak._check_idempotency_keys(bigint[], text[], text[]);
drop function ulak._archive_batch(timestamptz, timestamptz, integer, bigint, timestamptz);
drop function ulak._create_archive_table(text, timestamptz, timestamptz);
drop function ulak._move_from_default(text, timestamptz, timestamptz);
drop view ulak._archive_partitions;

-- Takes the statuses of dead letters now, with a default.
drop function ulak._replay(bigint, bigint[], timestamptz, timestamptz, boolean, timestamptz);

comment on table ulak.attempts is 'attempts that failed, for event_log_retention_days or dlq_retention_days, whichever is longer, and as long as their dead letter; ulak.history() shows them with the successful ones';
drop function ulak._take_turn(integer, bigint[], text[], bigint, timestamptz, ulak._rooms, ulak._place, integer, integer);
drop function ulak._lock_due(bigint[], smallint[], timestamptz[], bigint[], integer[], bigint, timestamptz, integer);

-- Has another parameter now. What an application's function (begin atomic) depends on by its oid stays under another name
-- (0.2.0--0.3.0.sessions.sql).
alter function ulak.redrive_message(bigint, text, timestamptz) rename to _redrive_message_of_0_2_0;

-- Grants to send, and the role that counts. All of these are locked since the beginning; columns with a constant default rewrite no table.
alter table ulak.endpoints
    add column is_restricted boolean not null default false, add column failing_since timestamptz, add column failing_told smallint;
alter table ulak.event_types add column is_restricted boolean not null default false;
alter table ulak.endpoint_grants
    add column may_work boolean not null default true,
    add column may_send boolean not null default false,
    alter column granted_by set default case when current_setting('role') = 'none' then session_user else current_setting('role') end;
alter table ulak.setting_values
    alter column updated_by set default case when current_setting('role') = 'none' then session_user else current_setting('role') end;
alter table ulak.event_log
    alter column actor set default case when current_setting('role') = 'none' then session_user else current_setting('role') end;
create index endpoints_restricted_idx on ulak.endpoints (id) where is_restricted;
create index endpoints_max_pending_idx on ulak.endpoints (id) where max_pending is not null;
create index endpoints_announcing_idx on ulak.endpoints (id) where config ? 'announce';

comment on column ulak.endpoints.is_restricted is 'true: only roles with a grant may send to it';
comment on column ulak.endpoints.failing_since is 'first failure after the last success, for endpoints with disable_after; exact to a minute';
comment on column ulak.endpoints.failing_told is 'how much of disable_after was over when subscribers were told last: 50 or 90 percent; 100: it was disabled by it';
comment on column ulak.event_types.is_restricted is 'true: only roles of ulak.event_type_grants may publish it';
comment on table ulak.endpoint_grants is 'roles that may claim from an endpoint, and roles that may send to a restricted one. Change it with ulak.grant_endpoint() and ulak.revoke_endpoint()';
comment on column ulak.endpoint_grants.granted_at is 'when the first of both rights was granted';
comment on column ulak.endpoint_grants.granted_by is 'the role that granted it';
comment on column ulak.endpoint_grants.may_work is 'true: the role may claim and settle its messages';
comment on column ulak.endpoint_grants.may_send is 'true: the role may send to it; once one role is allowed to, the others no longer are';
comment on column ulak.setting_values.updated_by is 'the role that changed it';
comment on column ulak.event_log.actor is 'the role that caused it: the one that was set, else the one that logged in';

-- A new table: nobody waits.
create table ulak.event_type_grants (
    event_type text not null references ulak.event_types (name) on delete cascade,
    role_name text not null,
    granted_at timestamptz not null default now(),
    -- As ulak._caller() has it.
    granted_by text not null default case when current_setting('role') = 'none' then session_user else current_setting('role') end,
    primary key (event_type, role_name)
);

comment on table ulak.event_type_grants is 'roles that may publish restricted event types. Change it with ulak.grant_event_type() and ulak.revoke_event_type()';
comment on column ulak.event_type_grants.event_type is 'the event type';
comment on column ulak.event_type_grants.role_name is 'name of the role whose members may; a role that is renamed loses it';
comment on column ulak.event_type_grants.granted_at is 'when it was granted';
comment on column ulak.event_type_grants.granted_by is 'the role that granted it';
select pg_catalog.pg_extension_config_dump('ulak.event_type_grants', '');

drop function ulak.grant_endpoint(text, text);
drop function ulak.revoke_endpoint(text, text);
drop function ulak.find_messages(text, text, uuid, uuid, text, timestamptz, integer, timestamptz);
drop function ulak._find_message(bigint);

-- They take p_ids now, and share what chooses.
drop function ulak.purge(text, timestamptz, timestamptz, jsonpath, integer, integer, boolean, text, timestamptz);
drop function ulak.discard(text, timestamptz, timestamptz, text, jsonpath, integer, boolean, text, timestamptz);
drop function ulak.redrive(text, timestamptz, timestamptz, text, jsonpath, integer, double precision, boolean, text, bigint, timestamptz);
drop function ulak._matching_letters(text, timestamptz, timestamptz, text, jsonpath, integer, boolean);
drop function ulak._sample_of_letters(bigint[]);
drop function ulak._command(text, text[], text[]);
drop function ulak._check_predicate(jsonpath);
drop function ulak.replay_range(bigint, timestamptz, timestamptz, text, boolean, integer, boolean, timestamptz);
drop function ulak.replay_range(text, timestamptz, timestamptz, text, boolean, integer, boolean, timestamptz);
drop function ulak._insert_replayed(bigint[], bigint[], timestamptz, timestamptz, boolean, timestamptz);
drop function ulak._check_replay(timestamptz, timestamptz, text, integer);
drop function ulak._archived_history(ulak._archived, timestamptz);

-- A claim remembers in its session where it ended. A new type: nobody waits.
create type ulak._resume_point as (endpoint_id bigint, priority smallint, due_at timestamptz, id bigint);
comment on type ulak._resume_point is 'where a session''s claims of an endpoint and a priority go on; private to ulak';
create type ulak._turn as (
    -- Of each endpoint.
    endpoint_ids bigint[],
    names text[],
    config_versions bigint[],
    are_probes boolean[],
    are_metered boolean[],
    nexts ulak._place[],
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
comment on type ulak._turn is 'a claim under way: the endpoints whose turn it is, with where the next message of each is, how many it may still get and how many it has got; the messages, each with the place of its endpoint; when the first and the last of their events were sent; whether as many endpoints were found as a claim may have, whether another walk would find nobody else, and whether others may have something due; private to ulak';
drop function ulak._claim(text, integer, interval, bigint[], text[], bigint, timestamptz, ulak._rooms, ulak._place, integer, integer);
drop function ulak._endpoints_in_turn(bigint, integer, integer, integer, bigint[], text[], timestamptz, ulak._rooms, ulak._place);
drop function ulak._next_level(bigint, smallint, timestamptz);

-- Rights are checked for all messages of a call at once. Sessions of 0.2.0 find these in 0.2.0--0.3.0.sessions.sql.
drop function ulak._granted_endpoints();
drop function ulak._require_endpoint(bigint, text);
drop function ulak._require_message(bigint);

-- Two more parameters: a generation, and retries of its own. What an application's function (begin atomic) depends on by its oid stays under another
-- name, and calls the new one (0.2.0--0.3.0.sessions.sql). No lock that anybody waits for.
alter function ulak.send(
    text, jsonb, integer, timestamptz, text, uuid, timestamptz, text, jsonb, jsonb, text, text, text, double precision
) rename to _send_of_0_2_0;
alter function ulak.send_many(text[], jsonb, integer, timestamptz, text, uuid, timestamptz, text, jsonb, jsonb) rename to _send_many_of_0_2_0;
alter function ulak.publish(text, jsonb, integer, timestamptz, text, uuid, timestamptz, text, jsonb, jsonb, uuid) rename to _publish_of_0_2_0;
comment on function ulak._send_of_0_2_0(
    text, jsonb, integer, timestamptz, text, uuid, timestamptz, text, jsonb, jsonb, text, text, text, double precision
) is null;
comment on function ulak._send_many_of_0_2_0(text[], jsonb, integer, timestamptz, text, uuid, timestamptz, text, jsonb, jsonb) is null;
comment on function ulak._publish_of_0_2_0(text, jsonb, integer, timestamptz, text, uuid, timestamptz, text, jsonb, jsonb, uuid) is null;
drop function ulak._send_request(ulak._message, boolean, text, text, double precision);
comment on column ulak._deliveries.generation is 'sent as ulak-generation; claim() can be limited to one generation, so that old and new consumers each get their own';
comment on column ulak._archived.generation is 'sent as ulak-generation; claim() can be limited to one generation, so that old and new consumers each get their own';

-- It shows traces and spans now.
drop function ulak.history(bigint, timestamptz);

-- They take p_limit now.
drop function ulak.metrics(timestamptz, interval);
drop function ulak.metrics_text(timestamptz, interval);
drop function ulak._metric_values(timestamptz, interval);

-- Looks are built on more facts, and on fewer functions. Types: nobody waits.
create type ulak._known_message as (
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
    generation integer,
    last_error text,
    failure_history jsonb,
    payload jsonb,
    headers jsonb,
    metadata jsonb,
    sent_by text
);
comment on type ulak._known_message is 'what the looks know of a message; private to ulak';
alter type ulak._endpoint_fact drop attribute created_at;
alter type ulak._endpoint_fact rename attribute circuit_half_open_at to next_probe_at;
alter type ulak._endpoint_fact
    add attribute per_second double precision,
    add attribute failed_percent double precision,
    add attribute last_failed_percent double precision,
    add attribute failed_attempts bigint,
    add attribute state text;
drop function ulak._endpoint_health(ulak._endpoint_fact[], bigint, integer, timestamptz);
drop function ulak._endpoint_state(boolean, text, timestamptz, double precision, boolean, double precision, bigint, timestamptz);
drop function ulak._pain(text, bigint);
drop function ulak._traffic_is_final_before();
drop function ulak._report_circuits();
drop function ulak._metric_definitions();
drop function ulak._raise_undefined_metric(text);
drop function ulak._explain_cycles(jsonb);
drop function ulak._explain_attempt(ulak.attempts);
drop function ulak._explain_end(
    bigint, text, text, timestamptz, timestamptz, timestamptz, timestamptz, timestamptz, timestamptz, integer, text, timestamptz
);
drop function ulak._explain_next(bigint, text, text, timestamptz);
drop function ulak._explain_in_flight(bigint, timestamptz);
drop function ulak._explain_waiting(bigint, timestamptz);
drop function ulak._explain_turn(ulak._deliveries, ulak.endpoints, timestamptz);
drop function ulak._doctor_roles();

-- Plainer words. Nobody waits for these locks but another upgrade, vacuum or create index.
comment on column ulak.recurring.expires_after is 'how long each message may be delivered; null: forever';
comment on column ulak.subscriptions.enabled is 'false: it is skipped, and events published meanwhile are not sent later';
comment on column ulak.recurring.endpoint_id is 'the endpoint that it goes to; dropping the endpoint removes it';
comment on column ulak.workers.backend_start is 'when that backend was started, as in pg_stat_activity: pids are reused';
comment on table ulak.workers is 'worker slots and the sessions that hold them, in the database and on nodes';
comment on column ulak.backlog_samples.sampled_at is 'when they were counted; after two days, the start of the hour whose last count it is';
comment on column ulak.workers.is_scheduled is 'true: pg_cron runs it for start(); false: another scheduler does';
comment on column ulak.maintenance_runs.last_error is 'last error of this step, kept after later runs that succeeded';
comment on table ulak.schedule is 'what start() and stop() last requested; private to ulak';

-- Wildcards and bodies. The table is locked since the beginning; nothing is rewritten, and the index is empty.
alter table ulak.subscriptions add column pattern text, add column body jsonb, alter column event_type drop not null;
create index subscriptions_pattern on ulak.subscriptions (pattern) where pattern is not null;
comment on column ulak.subscriptions.event_type is 'the event type that is subscribed to; null: pattern says which';
comment on column ulak.subscriptions.pattern is 'order.* for all event types that start with order., or * for all but ulak''s own; null: event_type alone';
comment on column ulak.subscriptions.body is 'template of the body of its events, in place of the endpoint''s own; null: none';
comment on column ulak.endpoints.config_version is 'rises with each change of config, retry_policy, a secret that the config names, or the body of a subscription; workers cache by it';
drop function ulak.subscribe(text, text, jsonb, jsonpath);
drop function ulak.alter_subscription(bigint, jsonb, jsonpath, boolean, text);

-- Watched tables. A new table: nobody waits.
create table ulak.watches (
    id bigint generated always as identity primary key,
    table_name text not null,
    event_type text not null,
    operations text[] not null,
    columns text[] not null,
    changed text[],
    condition jsonpath,
    ordering_key text[],
    -- The table and its columns by their numbers, to follow renames. A restored table has another oid: then names count.
    bound_to oid not null,
    bindings jsonb not null,
    -- As ulak._caller() has it.
    created_by text not null default case when current_setting('role') = 'none' then session_user else current_setting('role') end,
    created_at timestamptz not null default now()
);

comment on table ulak.watches is 'tables whose changes become events. Change it with ulak.watch() and ulak.unwatch(); read ulak.watch_list';
comment on column ulak.watches.id is 'number of the watch; its triggers pass it';
comment on column ulak.watches.table_name is 'the table, by the name that it had when it was first watched';
comment on column ulak.watches.event_type is 'the event type that its changes are published as';
comment on column ulak.watches.operations is 'insert, update, delete, truncate: which of them become events';
comment on column ulak.watches.columns is 'the columns that are sent, by the names that they had then';
comment on column ulak.watches.changed is 'an update counts if one of these has changed; null: if one of columns has';
comment on column ulak.watches.condition is 'only changes for which this jsonpath predicate over {"old": ..., "new": ...} is true; null: all';
comment on column ulak.watches.ordering_key is 'columns whose values are the ordering key; null: the primary key; empty: none';
comment on column ulak.watches.bound_to is 'oid of the table that bindings are about';
comment on column ulak.watches.bindings is 'the number of each column by its name';
comment on column ulak.watches.created_by is 'the role that created it';
comment on column ulak.watches.created_at is 'when it was created';
select pg_catalog.pg_extension_config_dump('ulak.watches', '');
select pg_catalog.pg_extension_config_dump('ulak.watches_id_seq', '');

-- A new table: nobody waits.
create table ulak._dead_counts (
    endpoint_id bigint not null,
    endpoint_name text not null,
    event_type text,
    cause text,
    letters integer not null,
    counted_at timestamptz not null
);
alter table ulak._dead_counts replica identity full;

comment on table ulak._dead_counts is 'dead letters that the next digest for operators tells of; private to ulak';
comment on column ulak._dead_counts.endpoint_id is 'the endpoint they were for';
comment on column ulak._dead_counts.endpoint_name is 'its name';
comment on column ulak._dead_counts.event_type is 'their event type, if they have one';
comment on column ulak._dead_counts.cause is 'their error; numbers are left out';
comment on column ulak._dead_counts.letters is 'how many';
comment on column ulak._dead_counts.counted_at is 'when';
select pg_catalog.pg_extension_config_dump('ulak._dead_counts', '');

-- The external worker that found something last looks again soon. A new sequence: nobody waits.
create unlogged sequence ulak_private.last_finder;
comment on sequence ulak_private.last_finder is 'process id of the external worker that found something last; private to ulak';
select pg_catalog.pg_extension_config_dump('ulak_private.last_finder', '');
drop function ulak._request_wake_ups();

-- What a claim returns: nobody waits.
create type ulak._leased as (
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
comment on type ulak._leased is 'a message that a claim has leased, or a row without one that only says left_out_others; private to ulak';

-- A worker's turn is one function for all traffic. What it asks for, and what it gets: nobody waits.
drop function ulak._light_turn(text, bigint, integer, interval, bigint[], integer[], timestamptz, text[]);
create type ulak._wish as (
    most integer,
    rooms ulak._rooms,
    lease interval,
    protocols text[],
    behind bigint,
    endpoint_ids bigint[],
    most_endpoints integer,
    most_visits integer,
    longest integer
);
create type ulak._claimed as (
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

comment on type ulak._wish is 'what a worker may claim: nothing if no id behind this one has been drawn (null: whatever is due); texts of more bytes than longest are left out; private to ulak';
comment on type ulak._claimed is 'what it got, as columns with an element for each message; a column of nothing but nulls is null; have_more: endpoints that got all that they may have; private to ulak';

-- Secrets may be bound to hosts. ulak.secrets is locked above; a column without a default: the table isn't rewritten. Workers get more
-- with a config: 0.2.0--0.3.0.sessions.sql has the function as 0.2.0 calls it.
alter table ulak.secrets add column hosts text;
comment on column ulak.secrets.hosts is 'the only hosts that may learn of it, separated by commas; null: any';
drop function ulak.set_secret(text, text);
drop function ulak.create_endpoint(text, text, jsonb, jsonb, text);
drop function ulak.alter_endpoint(text, jsonb, jsonb, text);
drop function ulak._endpoint_configs(bigint[], timestamptz);

-- One function for all tables now. A step of maintenance that is under way notes an error, and the next run does its work.
drop function ulak._roll_up_stats(timestamptz, timestamptz);
drop function ulak._roll_up_samples(timestamptz, timestamptz);
drop function ulak._next_roll_up(text, text, timestamptz, timestamptz);
drop function ulak._cleanup(text, integer, integer, bigint, timestamptz);

-- ulak_private.jobs() reads pg_cron's jobs now, and recurring messages are among the wanted ones.
drop function ulak._is_our_job();
drop function ulak._is_stray_job();
drop function ulak._is_recurring_job();
drop function ulak._unschedule_command();
drop function ulak._recurring_job(text);
drop function ulak._recurring_jobs();

-- It is told whether events are owed now. Sessions of 0.2.0 find it in 0.2.0--0.3.0.sessions.sql.
drop function ulak._tell_operators(text, bigint[], jsonb[], timestamptz);
