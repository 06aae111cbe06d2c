-- The archive: finished messages by month of creation, until retention drops the month.

create table ulak_private.archived (
    like ulak_private.deliveries including comments including defaults,
    archived_at timestamptz not null default now()
) partition by range (created_at);

alter table ulak_private.archived alter column id drop default;

create table ulak_private.archive_default partition of ulak_private.archived default;

-- Maintenance moves its rows. Where a publication is for all tables, a table whose rows can't be told apart lets nobody do that.
alter table ulak_private.archive_default replica identity full;

-- Each partition has these indexes of its own (ulak_private.create_month_table() makes those of the months), and the
-- parent has none: pg_dump writes the months' indexes out, and a parent that has them already, because CREATE EXTENSION
-- made it, would have given them to the months by then. The restore would stop at "already exists".

-- Months are written once and read by time: a block range index is a fraction of a B-tree and as good for that.
create index archive_default_created_at_idx on ulak_private.archive_default using brin (created_at)
    with (pages_per_range = 64, autosummarize = on);

-- replay_message() and explain() look a message up by id.
create index archive_default_id_idx on ulak_private.archive_default (id);

-- For retention: what was redriven or replayed needs an event of an earlier month.
create index archive_default_event_created_at_idx on ulak_private.archive_default (event_created_at) where event_created_at is not null;

comment on table ulak_private.archived is 'finished messages in monthly partitions archive_YYYY_MM (UTC); private to ulak: read ulak.archive';
comment on table ulak_private.archive_default is 'finished messages whose month has no partition yet; maintenance moves them';
comment on column ulak_private.archived.archived_at is 'when it left ulak.queue';
