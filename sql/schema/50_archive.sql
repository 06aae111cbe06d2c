-- The archive: finished messages by month of creation, until retention drops the month.

create table ulak.archive (
    like ulak.queue including comments including defaults,
    archived_at timestamptz not null default now()
) partition by range (created_at);

alter table ulak.archive alter column id drop default;

-- Months are written once and read by time: a block range index is a fraction of a B-tree and as good for that.
create index archive_created_at_idx on ulak.archive using brin (created_at)
    with (pages_per_range = 64, autosummarize = on);

-- replay_message() and explain() look a message up by id.
create index archive_id_idx on ulak.archive (id);

create table ulak.archive_default partition of ulak.archive default;

comment on table ulak.archive is 'finished messages in monthly partitions archive_YYYY_MM (UTC)';
comment on column ulak.archive.archived_at is 'when it left ulak.queue';
comment on table ulak.archive_default is 'messages whose month has no partition yet; maintenance moves them';
