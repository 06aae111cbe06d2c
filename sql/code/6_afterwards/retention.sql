-- Retention of what grows: dead letters, log, attempts, counters, samples and inbox. The archive's months are dropped whole. Counters
-- and samples are kept by the minute for two days, and then by the hour.

create or replace function ulak.cleanup_dlq(
    p_retention_days integer default null,
    p_now timestamptz default clock_timestamp()
)
returns integer
language sql
security definer
set search_path = pg_catalog, pg_temp
as $sql$
    select c.deleted from ulak_private.cleanup('ulak_private.letters', p_retention_days, null, null, ulak_private.clock(p_now)) c
$sql$;

comment on function ulak.cleanup_dlq(integer, timestamptz) is
    'deletes dead letters older than p_retention_days (null: setting dlq_retention_days); returns how many';

create or replace function ulak.cleanup_event_log(
    p_retention_days integer default null,
    p_now timestamptz default clock_timestamp()
)
returns integer
language sql
security definer
set search_path = pg_catalog, pg_temp
as $sql$
    select c.deleted from ulak_private.cleanup('ulak.event_log', p_retention_days, null, null, ulak_private.clock(p_now)) c
$sql$;

comment on function ulak.cleanup_event_log(integer, timestamptz) is
    'deletes entries of ulak.event_log older than p_retention_days (null: setting event_log_retention_days); returns how many';

create or replace function ulak.cleanup_endpoint_stats(
    p_retention_days integer default null,
    p_now timestamptz default clock_timestamp()
)
returns integer
language sql
security definer
set search_path = pg_catalog, pg_temp
as $sql$
    select c.deleted from ulak_private.cleanup('ulak.endpoint_stats', p_retention_days, null, null, ulak_private.clock(p_now)) c
$sql$;

comment on function ulak.cleanup_endpoint_stats(integer, timestamptz) is
    'deletes counters of ulak.endpoint_stats older than p_retention_days (null: setting stats_retention_days); returns how many';

create or replace function ulak.cleanup_inbox(
    p_retention_days integer default null,
    p_now timestamptz default clock_timestamp()
)
returns integer
language sql
security definer
set search_path = pg_catalog, pg_temp
as $sql$
    select c.deleted from ulak_private.cleanup('ulak.handled', p_retention_days, null, null, ulak_private.clock(p_now)) c
$sql$;

comment on function ulak.cleanup_inbox(integer, timestamptz) is
    'deletes keys of mark_handled() older than p_retention_days (null: setting inbox_retention_days); returns how many';

-- At most p_limit rows (null: all), and about p_bytes if given, oldest first, in the order of the index on the time.
create or replace function ulak_private.cleanup(
    p_table text,
    p_retention_days integer,
    p_limit integer,
    p_bytes bigint,
    p_now timestamptz,
    out deleted integer,
    out more boolean
)
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set enable_sort = off
as $plpgsql$
declare
    v_fact record;
    v_days integer;
begin
    select f.* into strict v_fact
    from ulak_private.retention_facts() f
    where f.name = p_table;
    v_days := coalesce(p_retention_days, ulak.setting(v_fact.setting)::integer);
    perform ulak_private.check_integer('p_retention_days', v_days, 1, 36500);
    execute format(
        $sql$
            with fitting as materialized (
                select count(*) filter (where w.bytes_before < $3) as rows, count(*) as seen
                from (
                    select sum(b.bytes) over (order by t.%2$I rows unbounded preceding) - b.bytes as bytes_before
                    from %1$s t
                    cross join lateral (select %3$s as bytes) b
                    where t.%2$I < $1 and not (%4$s)
                    order by t.%2$I
                    limit $2
                ) w
            ),
            gone as (
                delete from %1$s
                where ctid = any (array(
                    select t.ctid
                    from %1$s t
                    where t.%2$I < $1 and not (%4$s)
                    order by t.%2$I
                    limit case when $3 is null then $2 else (select f.rows from fitting f) end
                    for update of t skip locked
                ))
                returning 1
            )
            select
                count(*),
                count(*) > 0
                and case when $3 is null then count(*) = $2 else (select f.rows < f.seen or f.seen = $2 from fitting f) end
            from gone
        $sql$,
        p_table,
        v_fact.time_column,
        v_fact.bytes,
        v_fact.unless
    )
    into deleted, more
    using p_now - make_interval(hours => 24 * v_days), p_limit::bigint, p_bytes;
end
$plpgsql$;

-- Which setting says how long the rows of a table are kept, the column of their time, the size of a row (0: small), and which rows stay although
-- they are old.
create or replace function ulak_private.retention_facts()
returns table (name text, setting text, time_column text, bytes text, unless text)
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    values
        (
            'ulak_private.letters',
            'dlq_retention_days',
            'archived_at',
            'coalesce(pg_column_size(t.payload), 0) + coalesce(pg_column_size(t.failure_history), 0)',
            -- Others wait for it, or will.
            't.is_holding'
        ),
        (
            'ulak.attempts',
            -- By the longer one, so that few are looked at that stay because their dead letter came long after them.
            case
                when ulak.setting('dlq_retention_days')::integer > ulak.setting('event_log_retention_days')::integer then 'dlq_retention_days'
                else 'event_log_retention_days'
            end,
            'ended_at',
            '0',
            'exists (select from ulak_private.letters d where d.original_message_id = t.message_id)'
        ),
        ('ulak.event_log', 'event_log_retention_days', 'created_at', '0', 'false'),
        ('ulak.endpoint_stats', 'stats_retention_days', 'minute', '0', 'false'),
        ('ulak.traffic', 'stats_retention_days', 'minute', '0', 'false'),
        ('ulak.backlog_samples', 'stats_retention_days', 'sampled_at', '0', 'false'),
        ('ulak.handled', 'inbox_retention_days', 'handled_at', '0', 'false')
$sql$;

-- Rolling up is done by batches: of the first hour that is over for two days and still has minutes, 200 endpoints at most. Their rows
-- become one, at the start of the hour, so that sums over hours and days stay what they were. `reached` is that hour, for the next
-- batch; null when there is none.
create or replace function ulak_private.roll_up_stats(
    p_after timestamptz,
    p_now timestamptz,
    out rows bigint,
    out reached timestamptz
)
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
as $plpgsql$
declare
    v_endpoint_ids bigint[];
begin
    select b.hour, b.endpoint_ids into reached, v_endpoint_ids
    from ulak_private.next_roll_up('ulak.endpoint_stats', 'minute', p_after, p_now) b;
    with gone as (
        delete from ulak.endpoint_stats t
        using unnest(v_endpoint_ids) i (endpoint_id)
        where t.endpoint_id = i.endpoint_id and t.minute >= reached and t.minute < reached + interval '1 hour'
        returning t.*
    ),
    kept as (
        insert into ulak.endpoint_stats (
            endpoint_id, minute, delivered, failed, latency_total_ms, latency_histogram, latency_max_ms
        )
        select
            g.endpoint_id,
            reached,
            sum(g.delivered),
            sum(g.failed),
            sum(g.latency_total_ms),
            ulak_private.sum_histograms(g.latency_histogram),
            max(g.latency_max_ms)
        from gone g
        group by g.endpoint_id
    )
    select count(*) into rows
    from gone;
end
$plpgsql$;

-- The same for samples: of each hour the last sample stays, dated to the start of the hour.
create or replace function ulak_private.roll_up_samples(
    p_after timestamptz,
    p_now timestamptz,
    out rows bigint,
    out reached timestamptz
)
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
as $plpgsql$
declare
    v_endpoint_ids bigint[];
begin
    select b.hour, b.endpoint_ids into reached, v_endpoint_ids
    from ulak_private.next_roll_up('ulak.backlog_samples', 'sampled_at', p_after, p_now) b;
    with gone as (
        delete from ulak.backlog_samples s
        using unnest(v_endpoint_ids) i (endpoint_id)
        where s.endpoint_id = i.endpoint_id and s.sampled_at >= reached and s.sampled_at < reached + interval '1 hour'
        returning s.*
    ),
    kept as (
        insert into ulak.backlog_samples (endpoint_id, sampled_at, waiting, dead, oldest_id)
        select distinct on (g.endpoint_id) g.endpoint_id, reached, g.waiting, g.dead, g.oldest_id
        from gone g
        order by g.endpoint_id, g.sampled_at desc
    )
    select count(*) into rows
    from gone;
end
$plpgsql$;

-- The hour of the next batch, and its endpoints. Hours are looked at from that of the oldest row, or p_after, whichever is later, to
-- the last that ended two days ago.
create or replace function ulak_private.next_roll_up(
    p_table text,
    p_column text,
    p_after timestamptz,
    p_now timestamptz,
    out hour timestamptz,
    out endpoint_ids bigint[]
)
language plpgsql
stable
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $plpgsql$
begin
    execute format(
        $sql$
            select h, array(
                select distinct m.endpoint_id
                from (
                    select t.endpoint_id
                    from %1$s t
                    where t.%2$I > h and t.%2$I < h + interval '1 hour'
                    order by t.%2$I
                    limit 200
                ) m
            )
            from generate_series(
                date_trunc('hour', greatest((select min(t.%2$I) from %1$s t), nullif($1, '-infinity')), 'UTC'),
                date_trunc('hour', $2 - interval '2 days', 'UTC') - interval '1 hour',
                interval '1 hour'
            ) h
            where exists (select from %1$s t where t.%2$I > h and t.%2$I < h + interval '1 hour')
            order by h
            limit 1
        $sql$,
        p_table,
        p_column
    )
    into hour, endpoint_ids
    using p_after, p_now;
end
$plpgsql$;
