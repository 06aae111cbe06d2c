-- From 0.2.0 to 0.3.0: what replaying sql/code can't do. Each step says what it locks, and for how long.

-- Lock the tables that senders and workers use before anything else: sessions take them in either order, and would deadlock with an
-- upgrade that held one and waited for another. Each try is short, and everybody else goes on in between. From here on senders and
-- workers wait until the upgrade commits.
do $plpgsql$
begin
    perform set_config('lock_timeout', '100ms', true);
    for v_try in 1..300 loop
        begin
            lock table ulak.queue, ulak.endpoints, ulak.workers in access exclusive mode;
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
comment on column ulak.workers.suspicion is 'runs in turn that ended with an error of the worker''s own code; from 2 on it holds one message at a time';

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

-- An application's function (begin atomic) may depend on these by their oids. They go unless one does.
do $plpgsql$
declare
    v_function text;
begin
    foreach v_function in array array[
        'ulak._publish_of_0_1_0(text, jsonb)',
        'ulak._send_of_0_1_0(text, jsonb, integer, timestamptz, text, uuid, timestamptz, text, jsonb, jsonb)'
    ]
    loop
        begin
            execute 'drop function ' || v_function;
        exception
            when dependent_objects_still_exist then
                null;
        end;
    end loop;
end
$plpgsql$;

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
