-- Maintenance: everything that has to happen every minute, in short transactions, one run at a time.

-- The steps in the order in which they run. The last one is a VACUUM, which a procedure can't do.
create or replace view ulak.maintenance_status as
select
    s.step,
    s.what,
    case
        when r.started_at is null then 'never ran'
        when r.last_error_at >= r.started_at then 'failed'
        when r.started_at < now() - interval '5 minutes' and r.is_needed then 'late'
        when not r.finished then 'behind'
        else 'ok'
    end as state,
    r.started_at,
    r.duration,
    r.rows,
    r.last_error,
    r.last_error_at,
    r.runs,
    r.errors,
    r.total_rows
from (
    values
        (1, 'clock', 'corrects times in the future after the clock was set back'),
        (2, 'recover', 'takes back messages whose lease ran out'),
        (3, 'expire', 'marks messages that were not delivered in time'),
        (4, 'partitions', 'creates the next months and empties the default partitions'),
        (5, 'idempotency_keys', 'forgets idempotency keys that are free again'),
        (6, 'archive_retention', 'drops old months of the archive'),
        (7, 'dlq_retention', 'deletes old dead letters'),
        (8, 'event_log_retention', 'deletes old log entries'),
        (9, 'stats_retention', 'sums minutes up to hours after two days, and deletes old counters'),
        (10, 'inbox_retention', 'forgets old keys of mark_handled()'),
        (11, 'ordering', 'makes parked messages due that wait behind nothing, and forgets unused ordering keys'),
        (12, 'attempts_retention', 'forgets old failed attempts'),
        (13, 'samples', 'counts what waits for each endpoint, sums up the last minutes, tells operators of dead letters, and disables endpoints that stay broken (disable_after)'),
        (14, 'samples_retention', 'keeps one sample an hour after two days, and deletes old ones'),
        (15, 'secrets', 'forgets signing secrets whose grace after a rotation is over'),
        (16, 'orphans', 'makes dead letters of messages whose endpoint was dropped while they were being sent, or was disabled because it stays broken, if its config says so'),
        (17, 'schedule', 'puts right what pg_cron remembers of the server that its jobs ran on'),
        (18, 'vacuum', 'a job of its own: frees the space of messages that have left the queue')
) s (place, step, what)
left join (
    select m.*, true as is_needed
    from ulak_private.maintenance_runs m
    union all
    select 'vacuum', greatest(t.last_vacuum, t.last_autovacuum), null, null, true, null, null, t.vacuum_count + t.autovacuum_count, null, null, t.n_dead_tup > 10000
    from pg_catalog.pg_stat_all_tables t
    where t.relid = 'ulak_private.deliveries'::regclass
) r on r.step = s.step
order by s.place;

comment on view ulak.maintenance_status is 'steps of maintenance: when each last ran, how long it took, what it did, what went wrong';
call ulak_private.describe('ulak.maintenance_status', 'ulak_private.maintenance_runs');
comment on column ulak.maintenance_status.what is 'what it does';
comment on column ulak.maintenance_status.state is 'ok; failed: see last_error; late: no run for 5 minutes; behind: ran out of time and goes on in the next run; never ran';

-- Without SECURITY DEFINER, SET clause and exception block, because each of them forbids commits; maintenance_step() has them. Until the
-- search_path is pinned, every name is qualified, even the types of variables.
create or replace procedure ulak.run_maintenance(
    p_now timestamptz default null,
    p_budget interval default '45 seconds'
)
language plpgsql
as $plpgsql$
declare
    v_search_path pg_catalog.text := pg_catalog.current_setting('search_path');
    v_isolation pg_catalog.text := pg_catalog.current_setting('default_transaction_isolation');
    v_deadline pg_catalog.timestamptz;
    v_step pg_catalog.text;
    v_started_at pg_catalog.timestamptz;
    v_outcome pg_catalog.text;
    v_reached pg_catalog.timestamptz;
    v_was_read_only pg_catalog.bool;
begin
    perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', false);
    -- This only checks. If p_now is null, each batch uses the time at which it begins.
    perform ulak_private.clock(p_now);
    perform ulak_private.check_interval('p_budget', coalesce(p_budget, '45 seconds'), interval '1 day');
    v_deadline := clock_timestamp() + coalesce(p_budget, '45 seconds');
    if not ulak_private.is_adopted() then
        raise notice 'the messages here were restored or recovered, and are held: nothing is done'
            using hint = 'If this cluster is to deliver them: select ulak.adopt();';
        perform set_config('search_path', v_search_path, false);
        return;
    end if;
    v_was_read_only := ulak_private.leave_read_only();
    perform set_config('default_transaction_isolation', 'read committed', false);
    commit;
    foreach v_step in array array(select s.step from ulak.maintenance_status s where s.step <> 'vacuum') loop
        v_started_at := clock_timestamp();
        v_reached := '-infinity';
        -- Every step gets its turn, if only for one batch.
        loop
            select s.outcome, s.reached into v_outcome, v_reached
            from ulak_private.maintenance_step(v_step, v_started_at, v_reached, coalesce(p_now, clock_timestamp())) s;
            commit;
            exit when v_outcome <> 'more' or clock_timestamp() >= v_deadline;
        end loop;
        if v_outcome = 'busy' then
            raise notice 'another run of maintenance is under way';
            exit;
        end if;
    end loop;
    if v_was_read_only then
        perform set_config('default_transaction_read_only', 'on', false);
    end if;
    perform set_config('default_transaction_isolation', v_isolation, false);
    perform set_config('search_path', v_search_path, false);
end
$plpgsql$;

comment on procedure ulak.run_maintenance(timestamptz, interval) is
    'what pg_cron calls every minute: recovery, expiry, retention, partitions; starts no new batch after p_budget';

-- One batch of one step. The lock belongs to the transaction, so a cancelled run can't leave it behind. A run that starts between two
-- batches of another one takes over, and the other one ends.
create or replace function ulak_private.maintenance_step(
    p_step text,
    p_started_at timestamptz,
    p_after timestamptz,
    p_now timestamptz,
    out outcome text,
    out reached timestamptz
)
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '2s'
as $plpgsql$
declare
    v_batch_started_at timestamptz := clock_timestamp();
    v_month timestamptz;
    v_rows bigint := 0;
    v_more boolean;
    v_error text;
    v_detail text;
begin
    p_now := ulak_private.clock(p_now);
    if not ulak_private.try_lock('maintenance') then
        outcome := 'busy';
        return;
    end if;
    perform ulak_private.follow_cluster();
    -- A crash may lose such a commit, but only as a whole; the next run repeats the batch.
    perform set_config('synchronous_commit', 'off', true);
    begin
        v_month := ulak_private.maintenance_month(p_step, p_after, p_now);
        select w.rows, w.more, w.reached into v_rows, v_more, reached
        from ulak_private.maintenance_work(p_step, v_month, p_after, p_now) w;
    exception
        when others then
            get stacked diagnostics v_error = message_text, v_detail = pg_exception_detail;
            v_error := concat_ws(' ', v_error, nullif(v_detail, ''));
            -- If a month can't be created or dropped, the next one is tried, unless a lock was the reason: that blocks all months.
            v_more := v_month is not null and sqlstate <> '55P03';
            reached := v_month;
    end;
    perform ulak_private.record_maintenance(
        p_step, p_started_at, clock_timestamp() - v_batch_started_at, v_rows, not v_more, v_error
    );
    outcome := case when v_more then 'more' else 'done' end;
end
$plpgsql$;

-- The next month that a step has to create or drop; null for steps that don't work by month.
create or replace function ulak_private.maintenance_month(p_step text, p_after timestamptz, p_now timestamptz)
returns timestamptz
language sql
stable
as $sql$
    select case p_step
        when 'partitions' then (select min(m) from ulak_private.missing_archive_months(3, p_now) m where m > p_after)
        when 'archive_retention' then (
            select min(m) from ulak_private.old_archive_months(ulak.setting('archive_retention_months')::integer, p_now) m where m > p_after
        )
    end
$sql$;

create or replace function ulak_private.maintenance_work(
    p_step text,
    p_month timestamptz,
    p_after timestamptz,
    p_now timestamptz,
    out rows bigint,
    out more boolean,
    out reached timestamptz
)
language plpgsql
as $plpgsql$
declare
    v_batch constant integer := 2000;
begin
    reached := coalesce(p_month, p_after);
    case
        when p_step = 'clock' then
            select b.messages, b.more into rows, more from ulak_private.bring_back(p_now) b;
        when p_step = 'recover' then
            rows := ulak.recover_stale_messages(p_now, v_batch);
            more := rows = v_batch;
        when p_step = 'expire' then
            rows := ulak.mark_expired_messages(p_now, v_batch);
            more := rows = v_batch;
        when p_step = 'partitions' then
            rows := ulak_private.make_archive_partition(p_month);
        when p_step = 'archive_retention' then
            rows := ulak_private.drop_archive_partition(p_month);
        when p_step = 'idempotency_keys' then
            rows := ulak_private.forget_idempotency_keys(p_now, v_batch);
            more := rows = v_batch;
        when exists (select from ulak_private.retention_facts() f where f.step = p_step) then
            -- The size of a roll-up's batch depends on how many rows its endpoints have.
            select sum(c.deleted + u.rows), bool_or(c.deleted = f.batch or u.rows > 0), max(u.reached) into rows, more, reached
            from ulak_private.retention_facts() f
            cross join lateral ulak_private.cleanup(f.name, null, f.batch, p_now) c(deleted)
            cross join lateral ulak_private.roll_up(f.name, p_after, p_now) u
            where f.step = p_step;
        when p_step = 'samples' then
            -- First, because it locks endpoints and waits.
            perform ulak_private.disable_broken(p_now);
            rows := ulak_private.sample_backlog(p_now);
            perform ulak_private.tell_digests(p_now);
        when p_step = 'orphans' then
            rows := ulak_private.bury_orphans(p_now, v_batch) + ulak_private.bury_abandoned(p_now, v_batch);
            more := rows >= v_batch;
        when p_step = 'secrets' then
            rows := ulak_private.forget_old_secrets(p_now);
        when p_step = 'schedule' then
            rows := ulak_private.bring_jobs_here();
        when p_step = 'ordering' then
            rows := ulak_private.unpark_orphans(p_now);
            perform ulak_private.forget_ordering_keys();
    end case;
    rows := coalesce(rows, 0);
    more := p_month is not null or coalesce(more, false);
end
$plpgsql$;

-- Batches of one run have the same p_started_at and add up. An error that repeats every minute is logged once.
create or replace function ulak_private.record_maintenance(
    p_step text,
    p_started_at timestamptz,
    p_duration interval,
    p_rows bigint,
    p_finished boolean,
    p_error text
)
returns void
language plpgsql
as $plpgsql$
begin
    if p_error is not null then
        perform ulak_private.warn(format('ulak: maintenance step %s failed: %s', p_step, p_error));
        insert into ulak.event_log (event, detail)
        select 'maintenance.failed', jsonb_build_object('step', p_step, 'error', p_error)
        where not exists (
            select
            from ulak_private.maintenance_runs r
            where r.step = p_step and r.last_error = p_error and r.last_error_at >= r.started_at
        );
    end if;
    insert into ulak_private.maintenance_runs as r
        (step, started_at, duration, rows, finished, last_error, last_error_at, runs, errors, total_rows)
    values (
        p_step,
        p_started_at,
        p_duration,
        p_rows,
        p_finished,
        p_error,
        case when p_error is not null then clock_timestamp() end,
        1,
        (p_error is not null)::integer,
        p_rows
    )
    on conflict (step) do update
    set started_at = excluded.started_at,
        duration = excluded.duration
            + case when r.started_at = excluded.started_at then r.duration else interval '0' end,
        rows = excluded.rows + case when r.started_at = excluded.started_at then r.rows else 0 end,
        finished = excluded.finished,
        last_error = coalesce(excluded.last_error, r.last_error),
        last_error_at = coalesce(excluded.last_error_at, r.last_error_at),
        runs = r.runs + (r.started_at <> excluded.started_at)::integer,
        errors = r.errors + excluded.errors,
        total_rows = r.total_rows + excluded.rows;
end
$plpgsql$;

-- For a job of its own that runs every minute as the tables' owner. Autovacuum hears of the workers' dead rows late, and may be busy
-- elsewhere. With nothing to do this takes a millisecond, and while less than 2% of the pages have dead rows it skips the indexes, so it
-- needs no condition. `parallel 0`: setting up parallel workers takes longer than the work. `truncate off`: no exclusive lock, and the
-- queue will need the space again.
create or replace function ulak_private.vacuum_command()
returns text
language sql
immutable
set search_path = pg_catalog, pg_temp
as $sql$
    select 'vacuum (skip_locked, truncate off, parallel 0) '
        'ulak_private.deliveries, ulak_private.idempotency_keys, ulak_private.ordering_keys, ulak.endpoints, ulak.endpoint_stats, ulak.endpoint_totals, ulak.workers, '
        'ulak_private.maintenance_runs'
$sql$;
