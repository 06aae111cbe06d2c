-- Retention of what grows: dead letters, log, attempts, counters, samples and inbox. The archive's months are dropped whole.

create or replace function ulak.cleanup_dlq(
    p_retention_days integer default null,
    p_now timestamptz default clock_timestamp()
)
returns integer
language sql
security definer
set search_path = pg_catalog, pg_temp
as $sql$
    select ulak._cleanup('dlq', p_retention_days, null, ulak._clock(p_now))
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
    select ulak._cleanup('event_log', p_retention_days, null, ulak._clock(p_now))
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
    select ulak._cleanup('endpoint_stats', p_retention_days, null, ulak._clock(p_now))
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
    select ulak._cleanup('handled', p_retention_days, null, ulak._clock(p_now))
$sql$;

comment on function ulak.cleanup_inbox(integer, timestamptz) is
    'forgets keys of mark_handled() older than p_retention_days (null: setting inbox_retention_days); returns how many';

-- At most p_limit rows (null: all), oldest first, in the order of the index on the time.
create or replace function ulak._cleanup(p_table text, p_retention_days integer, p_limit integer, p_now timestamptz)
returns integer
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set enable_sort = off
as $plpgsql$
declare
    v_setting text;
    v_column text;
    v_days integer;
    v_deleted integer;
begin
    case p_table
        when 'dlq' then
            v_setting := 'dlq_retention_days';
            v_column := 'archived_at';
        when 'event_log' then
            v_setting := 'event_log_retention_days';
            v_column := 'created_at';
        when 'attempts' then
            v_setting := 'event_log_retention_days';
            v_column := 'ended_at';
        when 'endpoint_stats' then
            v_setting := 'stats_retention_days';
            v_column := 'minute';
        when 'traffic' then
            v_setting := 'stats_retention_days';
            v_column := 'minute';
        when 'backlog_samples' then
            v_setting := 'stats_retention_days';
            v_column := 'sampled_at';
        when 'handled' then
            v_setting := 'inbox_retention_days';
            v_column := 'handled_at';
    end case;
    v_days := coalesce(p_retention_days, ulak.setting(v_setting)::integer);
    perform ulak._check_integer('p_retention_days', v_days, 1, 36500);
    execute format(
        $sql$
            delete from ulak.%1$I
            where ctid = any (array(
                select t.ctid
                from ulak.%1$I t
                where t.%2$I < $1
                order by t.%2$I
                limit $2
                for update skip locked
            ))
        $sql$,
        p_table,
        v_column
    )
    using p_now - make_interval(hours => 24 * v_days), p_limit;
    get diagnostics v_deleted = row_count;
    return v_deleted;
end
$plpgsql$;
