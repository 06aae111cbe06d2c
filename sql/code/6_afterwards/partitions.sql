-- The months of the archive and of events: made ahead of time, filled from the default partition where needed, dropped when old.

-- Months begin at midnight UTC, whatever the session's time zone: functions that compute a month set their own.
-- Writers lock the partitioned table first and a partition next, and so does everything here. Nothing here waits for a lock
-- longer than lock_timeout, because later sessions would queue up behind it: maintenance tries again a minute later.

create or replace view ulak_private.month_partitions as
select
    i.inhparent::regclass as parent,
    c.oid as relation,
    c.relname::text as name,
    to_timestamp(right(c.relname, 7) || ' 00 +00', 'YYYY_MM HH24 TZH') as month
from pg_catalog.pg_inherits i
join pg_catalog.pg_class c on c.oid = i.inhrelid
where (i.inhparent = 'ulak_private.archived'::regclass and c.relname ~ '^archive_[0-9]{4}_[0-9]{2}$')
    or (i.inhparent = 'ulak_private.events'::regclass and c.relname ~ '^events_[0-9]{4}_[0-9]{2}$');

comment on view ulak_private.month_partitions is 'the months that the archive and events have; private to ulak';
comment on column ulak_private.month_partitions.parent is 'ulak_private.archived or ulak_private.events';
comment on column ulak_private.month_partitions.relation is 'the partition';
comment on column ulak_private.month_partitions.name is 'archive_YYYY_MM or events_YYYY_MM';
comment on column ulak_private.month_partitions.month is 'its first instant';

create or replace function ulak.maintain_archive_partitions(
    p_months_ahead integer default 3,
    p_now timestamptz default clock_timestamp()
)
returns integer
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    p_now := ulak_private.clock(p_now);
    perform ulak_private.check_integer('p_months_ahead', p_months_ahead, 0, 120);
    return coalesce(sum(ulak_private.make_archive_partition(m)), 0) from ulak_private.missing_archive_months(p_months_ahead, p_now) m;
end
$plpgsql$;

comment on function ulak.maintain_archive_partitions(integer, timestamptz) is
    'creates the archive''s partitions for this month, for the next p_months_ahead, and for messages in archive_default, '
    'which it moves there; returns how many';

-- This month and the next ones, those that maintenance slept through (a year at most), and those found in a default partition.
create or replace function ulak_private.missing_archive_months(p_months_ahead integer, p_now timestamptz)
returns setof timestamptz
language sql
stable
set timezone = 'UTC'
set lock_timeout = '500ms'
as $sql$
    with this as (
        select date_trunc('month', p_now) as month
    ),
    wanted as (
        select generate_series(
            greatest(
                t.month - interval '12 months',
                least(t.month, (select max(p.month) + interval '1 month' from ulak_private.month_partitions p))
            ),
            t.month + make_interval(months => p_months_ahead),
            interval '1 month'
        ) as month
        from this t
        union
        select date_trunc('month', d.created_at)
        from ulak_private.archive_default d
        where isfinite(d.created_at)
        union
        select date_trunc('month', d.created_at)
        from ulak_private.events_default d
        where isfinite(d.created_at)
    )
    select w.month
    from wanted w
    where (select count(*) from ulak_private.month_partitions p where p.month = w.month) < 2
    order by w.month
$sql$;

-- Returns 1, or 0 if the month was there.
create or replace function ulak_private.make_archive_partition(p_month timestamptz)
returns integer
language plpgsql
strict
set timezone = 'UTC'
set datestyle = 'ISO'
set lock_timeout = '500ms'
as $plpgsql$
declare
    v_month text := to_char(p_month, 'YYYY_MM');
    v_end timestamptz := p_month + interval '1 month';
    v_made boolean;
begin
    v_made := ulak_private.make_partition('ulak_private.archived', 'ulak_private.archive_default', 'archive_' || v_month, p_month, v_end);
    v_made := ulak_private.make_partition('ulak_private.events', 'ulak_private.events_default', 'events_' || v_month, p_month, v_end) or v_made;
    return v_made::integer;
exception
    when lock_not_available then
        perform ulak_private.raise_archive_is_busy(format('Month %s was not created.', v_month));
end
$plpgsql$;

create or replace function ulak_private.make_partition(p_parent regclass, p_default regclass, p_name text, p_from timestamptz, p_to timestamptz)
returns boolean
language plpgsql
as $plpgsql$
declare
    v_has_rows boolean;
begin
    -- If two sessions do this at once, the second finds that the month exists. Writers of other months aren't blocked.
    execute format('lock table only %s in share update exclusive mode', p_parent);
    if exists (select from ulak_private.month_partitions p where p.name = p_name) then
        return false;
    end if;
    perform ulak_private.create_month_table(p_parent, p_name, p_from, p_to);

    -- No row of this month may enter the default partition between the move and the attachment.
    execute format('lock table %s in share row exclusive mode', p_default);
    execute format('select exists (select from %s d where d.created_at >= $1 and d.created_at < $2)', p_default)
    into v_has_rows
    using p_from, p_to;
    if v_has_rows then
        execute format(
            $sql$
                with moved as (
                    delete from %s d
                    where d.created_at >= $1 and d.created_at < $2
                    returning d.*
                )
                insert into ulak_private.%I
                select m.* from moved m
            $sql$,
            p_default,
            p_name
        )
        using p_from, p_to;
        -- A query that was planned without the new partition must not run once its rows have left the default.
        execute format('lock table only %s in access exclusive mode', p_parent);
    end if;
    -- Thanks to its check constraint, the new partition isn't scanned.
    execute format('alter table %s attach partition ulak_private.%I for values from (%L) to (%L)', p_parent, p_name, p_from, p_to);
    execute format('alter table ulak_private.%I drop constraint archive_month', p_name);
    return true;
end
$plpgsql$;

create or replace function ulak_private.create_month_table(p_parent regclass, p_name text, p_from timestamptz, p_to timestamptz)
returns void
language plpgsql
as $plpgsql$
begin
    if to_regclass(format('ulak_private.%I', p_name)) is not null then
        raise exception 'table ulak_private.% exists but is not a partition of %', p_name, p_parent
            using errcode = '42P07',
                hint = format(
                    'alter table %5$s attach partition ulak_private.%1$I for values from (%2$L) to (%3$L); '
                    'or: alter table ulak_private.%1$I rename to %4$I;',
                    p_name, p_from, p_to, p_name || '_old', p_parent
                );
    end if;
    execute format(
        'create table ulak_private.%I (like %s including all excluding indexes, '
        'constraint archive_month check (created_at >= %L and created_at < %L))',
        p_name, p_parent, p_from, p_to
    );
    -- Without names: PostgreSQL picks free ones, whatever indexes an administrator has added to the parent.
    execute format('create index on ulak_private.%I (id)', p_name);
    if p_parent = 'ulak_private.archived'::regclass then
        execute format(
            'create index on ulak_private.%I using brin (created_at) with (pages_per_range = 64, autosummarize = on)', p_name
        );
        execute format('create index on ulak_private.%I (event_created_at) where event_created_at is not null', p_name);
    end if;
end
$plpgsql$;

create or replace function ulak.cleanup_old_archive_partitions(
    p_retention_months integer default null,
    p_now timestamptz default clock_timestamp()
)
returns integer
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_months integer := coalesce(p_retention_months, ulak.setting('archive_retention_months')::integer);
begin
    p_now := ulak_private.clock(p_now);
    perform ulak_private.check_integer('p_retention_months', v_months, 1, 1200);
    return coalesce(sum(ulak_private.drop_archive_partition(m)), 0) from ulak_private.old_archive_months(v_months, p_now) m;
end
$plpgsql$;

comment on function ulak.cleanup_old_archive_partitions(integer, timestamptz) is
    'drops the archive''s months that ended p_retention_months (null: setting archive_retention_months) before this '
    'month began; returns how many';

-- With 6 months in July: December and all before it. Events that something still needs keep their month.
create or replace function ulak_private.old_archive_months(p_retention_months integer, p_now timestamptz)
returns setof timestamptz
language sql
stable
set timezone = 'UTC'
as $sql$
    select p.month
    from ulak_private.month_partitions p
    where p.month < date_trunc('month', p_now) - make_interval(months => p_retention_months)
    group by p.month
    having bool_or(p.parent = 'ulak_private.archived'::regclass) or not ulak_private.needs_events(p.month)
    order by p.month
$sql$;

-- Whether an event of that month is still needed: by an unfinished message, by a dead letter, or by a later redrive or replay of it.
create or replace function ulak_private.needs_events(p_month timestamptz)
returns boolean
language sql
stable
set timezone = 'UTC'
as $sql$
    select exists (
        select
        from ulak_private.deliveries q
        where coalesce(q.event_created_at, q.created_at) >= p_month
            and coalesce(q.event_created_at, q.created_at) < p_month + interval '1 month'
    ) or exists (
        select
        from ulak_private.letters d
        where coalesce(d.event_created_at, d.original_created_at) >= p_month
            and coalesce(d.event_created_at, d.original_created_at) < p_month + interval '1 month'
    ) or exists (
        select
        from ulak_private.archived a
        where a.event_created_at >= p_month
            and a.event_created_at < p_month + interval '1 month'
            and a.created_at >= p_month + interval '1 month'
    )
$sql$;

-- No event of the month can become needed while this runs: a redrive or a replay starts from a row that needs the event already. The
-- exception is a replay from the month itself, which the lock on the archive prevents.
create or replace function ulak_private.drop_archive_partition(p_month timestamptz)
returns integer
language plpgsql
strict
set timezone = 'UTC'
set lock_timeout = '100ms'
as $plpgsql$
declare
    v_partition record;
begin
    -- An older snapshot doesn't see rows that have come to need an event since.
    if current_setting('transaction_isolation') <> 'read committed' then
        raise exception 'months can be dropped only in a transaction at read committed'
            using errcode = '25001', hint = 'set transaction isolation level read committed;';
    end if;
    -- Held for the catalog change only: files are removed after commit, when the locks are gone.
    lock table only ulak_private.archived in access exclusive mode;
    for v_partition in
        select p.name, c.reltuples
        from ulak_private.month_partitions p
        join pg_catalog.pg_class c on c.oid = p.relation
        where p.month = p_month and (p.parent = 'ulak_private.archived'::regclass or not ulak_private.needs_events(p_month))
        -- The archive first: events of its messages go with them.
        order by p.parent = 'ulak_private.events'::regclass
    loop
        execute format('drop table ulak_private.%I', v_partition.name);
        insert into ulak.event_log (event, detail)
        values (
            'archive.dropped',
            jsonb_build_object('partition', v_partition.name, 'rows_about', greatest(v_partition.reltuples, 0)::bigint)
        );
    end loop;
    return 1;
exception
    when lock_not_available then
        perform ulak_private.raise_archive_is_busy(format('Month %s was not dropped.', to_char(p_month, 'YYYY_MM')));
end
$plpgsql$;

create or replace function ulak_private.raise_archive_is_busy(p_detail text)
returns void
language plpgsql
as $plpgsql$
begin
    raise exception 'ulak.archive is in use'
        using errcode = '55P03',
            detail = p_detail,
            hint = 'Maintenance tries again every minute. To see which sessions use it: select pid, mode, relation::regclass '
                'from pg_locks where relation::regclass::text ~ ''^ulak_private.(archive|events)'';';
end
$plpgsql$;
