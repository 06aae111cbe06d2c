-- The archive's months: made ahead of time, filled from the default partition where needed, dropped when old.

-- Months begin at midnight UTC whatever the session's time zone; functions that compute one set it for themselves.
-- Writers lock ulak.archive first and a partition next, and so does everything here. Nothing here waits for a lock
-- longer than lock_timeout, because all who come later would wait behind it: maintenance tries again a minute later.

create or replace view ulak._archive_partitions as
select
    c.oid as relation,
    c.relname::text as name,
    to_timestamp(c.relname || ' 00 +00', '"archive_"YYYY_MM HH24 TZH') as month
from pg_catalog.pg_inherits i
join pg_catalog.pg_class c on c.oid = i.inhrelid
where i.inhparent = 'ulak.archive'::regclass
    and c.relname ~ '^archive_[0-9]{4}_[0-9]{2}$';

comment on view ulak._archive_partitions is 'the months that ulak.archive has; private to ulak';
comment on column ulak._archive_partitions.relation is 'the partition';
comment on column ulak._archive_partitions.name is 'archive_YYYY_MM';
comment on column ulak._archive_partitions.month is 'its first instant';

create or replace function ulak.maintain_archive_partitions(
    p_months_ahead integer default 3,
    p_now timestamptz default clock_timestamp()
)
returns integer
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_month timestamptz;
    v_made integer := 0;
begin
    p_now := ulak._clock(p_now);
    perform ulak._check_integer('p_months_ahead', p_months_ahead, 0, 120);
    for v_month in select m from ulak._missing_archive_months(p_months_ahead, p_now) m loop
        v_made := v_made + ulak._make_archive_partition(v_month);
    end loop;
    return v_made;
end
$plpgsql$;

comment on function ulak.maintain_archive_partitions(integer, timestamptz) is
    'makes the archive''s partitions of this month, the next ones, and those of messages in archive_default, which move '
    'there; returns how many';

-- This month and the next ones, those that maintenance slept through (a year at most), and those found in the default.
create or replace function ulak._missing_archive_months(p_months_ahead integer, p_now timestamptz)
returns setof timestamptz
language sql
stable
set search_path = pg_catalog, pg_temp
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
                least(t.month, (select max(p.month) + interval '1 month' from ulak._archive_partitions p))
            ),
            t.month + make_interval(months => p_months_ahead),
            interval '1 month'
        ) as month
        from this t
        union
        select date_trunc('month', d.created_at)
        from ulak.archive_default d
        where isfinite(d.created_at)
    )
    select w.month
    from wanted w
    where not exists (select from ulak._archive_partitions p where p.month = w.month)
    order by w.month
$sql$;

create or replace function ulak._make_archive_partition(p_month timestamptz)
returns integer
language plpgsql
strict
set search_path = pg_catalog, pg_temp
set timezone = 'UTC'
set datestyle = 'ISO'
set lock_timeout = '500ms'
as $plpgsql$
declare
    v_name text := to_char(p_month, '"archive_"YYYY_MM');
    v_end timestamptz := p_month + interval '1 month';
begin
    -- Two at once: the second finds the month made. Writers of other months don't notice any of this.
    lock table only ulak.archive in share update exclusive mode;
    if exists (select from ulak._archive_partitions p where p.name = v_name) then
        return 0;
    end if;
    perform ulak._create_archive_table(v_name, p_month, v_end);

    -- No row of this month may enter the default partition between the move and the attachment.
    lock table ulak.archive_default in share row exclusive mode;
    if exists (select from ulak.archive_default d where d.created_at >= p_month and d.created_at < v_end) then
        perform ulak._move_from_default(v_name, p_month, v_end);
        -- A query that was planned without the new partition must not run once its rows have left the default.
        lock table only ulak.archive in access exclusive mode;
    end if;
    -- The check constraint spares this a scan of the new partition.
    execute format('alter table ulak.archive attach partition ulak.%I for values from (%L) to (%L)', v_name, p_month, v_end);
    execute format('alter table ulak.%I drop constraint archive_month', v_name);
    return 1;
exception
    when lock_not_available then
        perform ulak._raise_archive_is_busy(format('Partition %s was not made.', v_name));
end
$plpgsql$;

create or replace function ulak._create_archive_table(p_name text, p_from timestamptz, p_to timestamptz)
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    if to_regclass(format('ulak.%I', p_name)) is not null then
        raise exception 'table ulak.% exists but is no partition of ulak.archive', p_name
            using errcode = '42P07',
                hint = format(
                    'alter table ulak.archive attach partition ulak.%1$I for values from (%2$L) to (%3$L); '
                    'or: alter table ulak.%1$I rename to %4$I;',
                    p_name, p_from, p_to, p_name || '_old'
                );
    end if;
    execute format(
        'create table ulak.%I (like ulak.archive including all excluding indexes, '
        'constraint archive_month check (created_at >= %L and created_at < %L))',
        p_name, p_from, p_to
    );
    -- Unnamed: PostgreSQL finds names that are free, whatever indexes an administrator has given the parent.
    execute format(
        'create index on ulak.%I using brin (created_at) with (pages_per_range = 64, autosummarize = on)', p_name
    );
    execute format('create index on ulak.%I (id)', p_name);
end
$plpgsql$;

create or replace function ulak._move_from_default(p_name text, p_from timestamptz, p_to timestamptz)
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    execute format(
        $sql$
            with moved as (
                delete from ulak.archive_default d
                where d.created_at >= $1 and d.created_at < $2
                returning d.*
            )
            insert into ulak.%I
            select m.* from moved m
        $sql$,
        p_name
    )
    using p_from, p_to;
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
    v_month timestamptz;
    v_dropped integer := 0;
begin
    p_now := ulak._clock(p_now);
    perform ulak._check_integer('p_retention_months', v_months, 1, 1200);
    for v_month in select m from ulak._old_archive_months(v_months, p_now) m loop
        v_dropped := v_dropped + ulak._drop_archive_partition(v_month);
    end loop;
    return v_dropped;
end
$plpgsql$;

comment on function ulak.cleanup_old_archive_partitions(integer, timestamptz) is
    'drops the archive''s months that ended p_retention_months (null: setting archive_retention_months) before this '
    'month began; returns how many';

-- With 6 months in July: December and all before it.
create or replace function ulak._old_archive_months(p_retention_months integer, p_now timestamptz)
returns setof timestamptz
language sql
stable
set search_path = pg_catalog, pg_temp
set timezone = 'UTC'
as $sql$
    select p.month
    from ulak._archive_partitions p
    where p.month < date_trunc('month', p_now) - make_interval(months => p_retention_months)
    order by p.month
$sql$;

create or replace function ulak._drop_archive_partition(p_month timestamptz)
returns integer
language plpgsql
strict
set search_path = pg_catalog, pg_temp
set timezone = 'UTC'
set lock_timeout = '500ms'
as $plpgsql$
declare
    v_name text := to_char(p_month, '"archive_"YYYY_MM');
    v_rows bigint := (select c.reltuples from pg_catalog.pg_class c where c.oid = format('ulak.%I', v_name)::regclass);
begin
    -- Held for the change of the catalog only: files are removed after commit, when locks are gone.
    lock table only ulak.archive in access exclusive mode;
    execute format('drop table ulak.%I', v_name);
    insert into ulak.event_log (event, detail)
    values ('archive.dropped', jsonb_build_object('partition', v_name, 'rows_about', greatest(v_rows, 0)));
    return 1;
exception
    when lock_not_available then
        perform ulak._raise_archive_is_busy(format('Partition %s was not dropped.', v_name));
end
$plpgsql$;

create or replace function ulak._raise_archive_is_busy(p_detail text)
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    raise exception 'ulak.archive is in use'
        using errcode = '55P03',
            detail = p_detail,
            hint = 'Maintenance tries again every minute. Who uses it: select pid, mode, relation::regclass '
                'from pg_locks where relation::regclass::text like ''ulak.archive%'';';
end
$plpgsql$;
