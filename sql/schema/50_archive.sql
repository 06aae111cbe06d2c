-- The archive: finished messages by month of creation, until retention drops the month.

create table ulak.archive (
    like ulak.queue including comments including defaults,
    archived_at timestamptz not null default now()
) partition by range (created_at);

alter table ulak.archive alter column id drop default;

create table ulak.archive_default partition of ulak.archive default;

-- Maintenance moves its rows. Where a publication is for all tables, a table whose rows can't be told apart lets nobody do that.
alter table ulak.archive_default replica identity full;

-- Each partition has these two indexes of its own (ulak._create_archive_table() makes those of the months), and the
-- parent has none: pg_dump writes the months' indexes out, and a parent that has them already, because CREATE EXTENSION
-- made it, would have given them to the months by then. The restore would stop at "already exists".

-- Months are written once and read by time: a block range index is a fraction of a B-tree and as good for that.
create index archive_default_created_at_idx on ulak.archive_default using brin (created_at)
    with (pages_per_range = 64, autosummarize = on);

-- replay_message() and explain() look a message up by id.
create index archive_default_id_idx on ulak.archive_default (id);

comment on table ulak.archive is 'finished messages in monthly partitions archive_YYYY_MM (UTC)';
comment on column ulak.archive.archived_at is 'when it left ulak.queue';
comment on table ulak.archive_default is 'messages whose month has no partition yet; maintenance moves them';
