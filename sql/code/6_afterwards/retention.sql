-- Retention of dead letters, event log, attempts, counters, samples and inbox. (Months of the archive are dropped whole.) Counters and
-- samples are kept per minute for two days, and per hour after that.

create or replace function ulak.cleanup_dlq(
    p_retention_days integer default null,
    p_now timestamptz default clock_timestamp()
)
returns integer
language sql
security definer
set search_path = pg_catalog, pg_temp
as $sql$
    select ulak_private.cleanup('ulak_private.letters', p_retention_days, null, ulak_private.clock(p_now))
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
    select ulak_private.cleanup('ulak.event_log', p_retention_days, null, ulak_private.clock(p_now))
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
    select ulak_private.cleanup('ulak.endpoint_stats', p_retention_days, null, ulak_private.clock(p_now))
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
    select ulak_private.cleanup('ulak.handled', p_retention_days, null, ulak_private.clock(p_now))
$sql$;

comment on function ulak.cleanup_inbox(integer, timestamptz) is
    'deletes keys of mark_handled() older than p_retention_days (null: setting inbox_retention_days); returns how many';

-- At most p_limit rows (null: all), oldest first, in the order of the index on the time; returns how many.
create or replace function ulak_private.cleanup(p_table text, p_retention_days integer, p_limit integer, p_now timestamptz)
returns integer
language plpgsql
set enable_seqscan = off
set enable_bitmapscan = off
set enable_sort = off
as $plpgsql$
declare
    v_fact record;
    v_days integer;
    v_count integer;
begin
    select f.* into strict v_fact
    from ulak_private.retention_facts() f
    where f.name = p_table;
    v_days := coalesce(p_retention_days, ulak.setting(v_fact.setting)::integer);
    perform ulak_private.check_integer('p_retention_days', v_days, 1, 36500);
    execute format(
        $sql$
            delete from %1$s
            where ctid = any (array(
                select t.ctid
                from %1$s t
                where t.%2$I < $1 and not (%3$s)
                order by t.%2$I
                limit $2
                for update of t skip locked
            ))
        $sql$,
        p_table,
        v_fact.time_column,
        v_fact.unless
    )
    using p_now - make_interval(hours => 24 * v_days), p_limit;
    get diagnostics v_count = row_count;
    return v_count;
end
$plpgsql$;

-- The tables that a step of maintenance deletes old rows from: the setting with their retention, their time column, the size of a batch, and
-- which old rows t stay. Tables that are rolled up after two days name the columns of the hourly row, and their values from the rows g.
create or replace function ulak_private.retention_facts()
returns table (step text, name text, setting text, time_column text, batch integer, unless text, hourly_columns text, hourly_values text)
language sql
stable
as $sql$
    values
        (
            'dlq_retention',
            'ulak_private.letters',
            'dlq_retention_days',
            'archived_at',
            2000,
            -- Messages wait behind it.
            't.is_holding',
            null,
            null
        ),
        (
            'attempts_retention',
            'ulak.attempts',
            -- By the longer setting: fewer attempts are looked at that must stay for their dead letter.
            case
                when ulak.setting('dlq_retention_days')::integer > ulak.setting('event_log_retention_days')::integer then 'dlq_retention_days'
                else 'event_log_retention_days'
            end,
            'ended_at',
            2000,
            'exists (select from ulak_private.letters d where d.original_message_id = t.message_id)',
            null,
            null
        ),
        ('event_log_retention', 'ulak.event_log', 'event_log_retention_days', 'created_at', 2000, 'false', null, null),
        (
            'stats_retention',
            'ulak.endpoint_stats',
            'stats_retention_days',
            'minute',
            2000,
            'false',
            'delivered, failed, latency_total_ms, latency_histogram, latency_max_ms',
            'sum(g.delivered), sum(g.failed), sum(g.latency_total_ms), ulak_private.sum_histograms(g.latency_histogram), max(g.latency_max_ms)'
        ),
        ('samples_retention', 'ulak.traffic', 'stats_retention_days', 'minute', 2000, 'false', null, null),
        (
            'samples_retention',
            'ulak.backlog_samples',
            'stats_retention_days',
            'sampled_at',
            2000,
            'false',
            'waiting, dead, oldest_id',
            -- The last sample of the hour.
            '(array_agg(g.waiting order by g.sampled_at desc))[1], (array_agg(g.dead order by g.sampled_at desc))[1], '
            '(array_agg(g.oldest_id order by g.sampled_at desc))[1]'
        ),
        ('inbox_retention', 'ulak.handled', 'inbox_retention_days', 'handled_at', 2000, 'false', null, null)
$sql$;

-- One batch: up to 200 endpoints of the first hour that ended two days ago and still has rows per minute. The rows of an endpoint become one,
-- at the start of the hour, so sums over hours and days don't change. The search starts at the oldest row or at p_after, whichever is later.
-- `reached` is the hour, for the next batch; null when there is none.
create or replace function ulak_private.roll_up(
    p_table text,
    p_after timestamptz,
    p_now timestamptz,
    out rows bigint,
    out reached timestamptz
)
language plpgsql
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
as $plpgsql$
declare
    v_fact record;
    v_endpoint_ids bigint[];
begin
    select f.* into strict v_fact
    from ulak_private.retention_facts() f
    where f.name = p_table;
    rows := 0;
    if v_fact.hourly_columns is null then
        return;
    end if;
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
        v_fact.time_column
    )
    into reached, v_endpoint_ids
    using p_after, p_now;
    execute format(
        $sql$
            with gone as (
                delete from %1$s t
                using unnest($1) i(endpoint_id)
                where t.endpoint_id = i.endpoint_id and t.%2$I >= $2 and t.%2$I < $2 + interval '1 hour'
                returning t.*
            ),
            kept as (
                insert into %1$s (endpoint_id, %2$I, %3$s)
                select g.endpoint_id, $2, %4$s
                from gone g
                group by g.endpoint_id
            )
            select count(*) from gone
        $sql$,
        p_table,
        v_fact.time_column,
        v_fact.hourly_columns,
        v_fact.hourly_values
    )
    into rows
    using v_endpoint_ids, reached;
end
$plpgsql$;
