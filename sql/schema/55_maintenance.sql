-- The last run of each step of maintenance, and the cluster that these messages belong to.

create table ulak_private.maintenance_runs (
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
create table ulak_private.cluster_identity (
    system_identifier bigint not null,
    recorded_at timestamptz not null default now()
);

-- adopt() deletes from it, also where a publication is for all tables.
alter table ulak_private.cluster_identity replica identity full;

-- A dump that is being restored (it turns row_security off) brings the row of its own cluster.
insert into ulak_private.cluster_identity (system_identifier)
select c.system_identifier
from pg_catalog.pg_control_system() c
where current_setting('row_security')::boolean;

-- No dump of the extension carries this table, but pg_upgrade, which takes every table's file along. So after pg_upgrade both tables
-- name the cluster that was, and after a restore only the other one does: that is how the two are told apart. A dump of the plain
-- installation carries all tables; there a restored row has the oid of a table that was, while pg_upgrade keeps oids.
create table ulak_private.cluster_home (
    system_identifier bigint primary key,
    table_oid oid not null,
    timeline integer
);

insert into ulak_private.cluster_home (system_identifier, table_oid, timeline)
select c.system_identifier, 'ulak_private.cluster_home'::regclass, ('x' || left(pg_catalog.pg_walfile_name(pg_catalog.pg_current_wal_insert_lsn()), 8))::bit(32)::integer
from pg_catalog.pg_control_system() c;

-- Where the next sweep goes on, and what it knows of the clock. One row, which code/5_settling/sweep.sql makes.
create table ulak_private.sweep_state (
    is_only boolean primary key default true check (is_only),
    endpoint_id bigint,
    ordering_key text,
    latest_at timestamptz,
    set_back_at timestamptz,
    set_back_by interval,
    next_id bigint
) with (fillfactor = 50);

comment on table ulak_private.maintenance_runs is 'last run of each step of run_maintenance()';
comment on column ulak_private.maintenance_runs.step is 'name of the step';
comment on column ulak_private.maintenance_runs.started_at is 'when its last run began';
comment on column ulak_private.maintenance_runs.duration is 'how long that took, all batches together';
comment on column ulak_private.maintenance_runs.rows is 'messages, rows or partitions that it changed';
comment on column ulak_private.maintenance_runs.finished is 'false: it ran out of time and goes on in the next run';
comment on column ulak_private.maintenance_runs.last_error is 'last error of this step, kept after later runs that succeeded';
comment on column ulak_private.maintenance_runs.last_error_at is 'when that was';
comment on column ulak_private.maintenance_runs.runs is 'how often it ran';
comment on column ulak_private.maintenance_runs.errors is 'how many of its runs ended in an error';
comment on column ulak_private.maintenance_runs.total_rows is 'what it changed in all its runs';
comment on table ulak_private.sweep_state is 'where the next sweep goes on, and what it knows of the clock; private to ulak';
comment on column ulak_private.sweep_state.is_only is 'true: there is one row';
comment on column ulak_private.sweep_state.endpoint_id is 'with ordering_key: the ordering key that the last sweep ended at; null if it looked at all of them';
comment on column ulak_private.sweep_state.ordering_key is 'see endpoint_id';
comment on column ulak_private.sweep_state.latest_at is 'the latest time that a sweep has seen';
comment on column ulak_private.sweep_state.set_back_at is 'when a sweep found that the clock was set back, by the clock as it is since; null: it was not';
comment on column ulak_private.sweep_state.set_back_by is 'by how much';
comment on column ulak_private.sweep_state.next_id is 'messages from here on were looked at for times that lie ahead; null: the next look begins with the newest';
comment on table ulak_private.cluster_identity is 'cluster that delivers these messages; another cluster''s identifier in it means that they are held until adopt()';
comment on column ulak_private.cluster_identity.system_identifier is 'as in pg_control_system()';
comment on column ulak_private.cluster_identity.recorded_at is 'when it was written';
comment on table ulak_private.cluster_home is 'cluster whose files these tables are part of, as it was last seen; private to ulak';
comment on column ulak_private.cluster_home.system_identifier is 'as in pg_control_system()';
comment on column ulak_private.cluster_home.table_oid is 'of this table when the row was written: another one was restored from a dump';
comment on column ulak_private.cluster_home.timeline is 'the last one of PostgreSQL''s timelines that this cluster was seen to deliver on; recovery to a target after it means that messages are held until adopt()';
