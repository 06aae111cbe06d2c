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

-- Workers and their schedule. The column locks ulak.workers for a moment: workers report once a second, and wait for so long.
-- Workers of 0.1.0 held their slots by advisory locks; they leave when they see the new version.

alter table ulak.workers add column backend_start timestamptz, add column limited_by text;
comment on column ulak.workers.backend_start is 'when that backend was started, as in pg_stat_activity: a pid alone comes again';
comment on column ulak.workers.limited_by is 'why it has fewer requests in flight than worker_concurrency allows';

drop procedure ulak.run_worker(integer, double precision);
drop function ulak._take_worker_slot(integer, double precision);
drop function ulak._register_worker(integer, text, boolean);
drop function ulak._become_poller();
drop function ulak._schedule_command(text, text, text, text);
drop function ulak._wanted_jobs(integer);
drop function ulak._log_in(text, text);

-- Looks and statistics.

-- Times, archive and maintenance.
