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

-- Times, archive and maintenance.

drop function ulak._require_positive(text, integer);
drop function ulak._archive_batch(timestamptz, timestamptz, integer, timestamptz);
drop function ulak._cleanup(text, integer, integer, timestamptz);
