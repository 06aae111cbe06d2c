-- start() and stop(): they change the jobs of pg_cron, or return what to run in pg_cron's database.

create or replace function ulak.start(p_workers integer default null)
returns table (item text, status text, detail text, fix text)
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_workers integer := coalesce(p_workers, ulak_private.default_workers());
    v_calls text := case when ulak_private.has_python() then 'call ulak.run_worker(); ' else '' end || 'call ulak.run_maintenance();';
    v_checks jsonb;
    v_is_watched boolean;
begin
    if v_workers not between 0 and 32 then
        raise exception 'the number of workers must be between 0 and 32'
            using errcode = '22023', detail = format('It is %s.', v_workers), hint = 'To stop delivery: select * from ulak.stop();';
    end if;
    perform ulak_private.lock('schedule');
    perform ulak_private.await_launcher();
    v_checks := (select jsonb_agg(to_jsonb(c)) from ulak_private.check_schedule(v_workers) c);
    return query
    select c.item, c.status, c.detail, c.fix
    from jsonb_to_recordset(v_checks) c(item text, status text, detail text, fix text);

    if v_checks @> '[{"status": "problem"}]' then
        return query values (
            'schedule',
            'not done',
            'nothing was scheduled'
                || case when not ulak_private.is_pg_cron_loaded() then '. Any other scheduler can run, each minute: ' || v_calls else '' end,
            'select * from ulak.start(); -- after mending the problems above'
        );
        return;
    end if;
    if v_workers > 0 then
        return query select t.item, t.status, t.detail, null::text from ulak_private.lift_timeout() t;
    end if;
    if ulak_private.has_pg_cron() then
        return query
        select s.item, s.status, s.detail, null::text
        from ulak_private.schedule_jobs(v_workers) s;
        v_is_watched := v_workers = 0 or ulak_private.has_seconds() or ulak_private.launch_watcher();
        return query
        select
            'workers',
            'ok',
            case
                when v_workers = 0 then 'none in the database: delivery is left to nodes'
                else format(
                    '%s: %s begin %s',
                    ulak_private.counted(v_workers, 'worker'),
                    case when ulak_private.count_alive(clock_timestamp()) > 0 then 'those that are missing' else 'they' end,
                    case when v_is_watched then 'within a few seconds after this transaction commits' else b.starts end
                )
            end,
            null::text
        from ulak_private.workers_begin(clock_timestamp()) b;
    else
        return query values (
            'schedule',
            'to do',
            ulak_private.elsewhere(),
            ulak_private.fix_elsewhere(format('ulak_private.commands_elsewhere(%s)', v_workers))
                || case when v_workers > 0 and not ulak_private.has_seconds() then E' \\\\ select ulak_private.launch_watcher();' else '' end
        );
        return query
        select w.name, 'done', 'asked to leave', null::text
        from ulak_private.limit_workers(v_workers) w;
    end if;
    return query select 'alerts', 'info', a.finding, a.fix from ulak_private.missing_alerts() a;
end
$plpgsql$;

comment on function ulak.start(integer) is
    'lets pg_cron run the workers and the maintenance; returns what it did and what is wrong, each with its fix. Calling it '
    'again changes nothing, unless the number of workers is another one. 0: only the maintenance runs, and nodes deliver';

create or replace function ulak.stop()
returns table (item text, status text, detail text, fix text)
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_job record;
begin
    perform ulak_private.lock('schedule');
    perform ulak_private.wait_for_workers_to_leave();
    for v_job in
        select j.jobid, j.jobname
        from ulak_private.jobs() j
        where j.of_database = current_database() and j.jobname not like 'ulak recurring %'
        order by j.jobname
    loop
        execute 'select cron.unschedule($1::bigint)' using v_job.jobid;
        return query values (v_job.jobname, 'done', 'unscheduled', null::text);
    end loop;
    if not ulak_private.has_pg_cron() and current_setting('cron.database_name', true) is not null then
        return query values (
            'schedule',
            'to do',
            ulak_private.elsewhere(),
            ulak_private.fix_elsewhere('ulak_private.commands_elsewhere(null)')
        );
    end if;
    return query
    select w.name, 'done', case when w.is_node then 'asked to wait for start()' else 'asked to leave' end, null::text
    from ulak_private.limit_workers(0, true) w;
end
$plpgsql$;

comment on function ulak.stop() is
    'unschedules the workers and the maintenance in pg_cron, asks running workers to leave and nodes to wait for start(). '
    'Messages stay in the queue; recurring messages of schedule() are still sent';

-- If background workers run the jobs, pg_cron kills the run of a job that is unscheduled, in the middle of its deliveries. So the workers
-- have to leave first. They can't see what this transaction has written, but they see that it holds this lock.
create or replace function ulak_private.wait_for_workers_to_leave()
returns void
language plpgsql
as $plpgsql$
begin
    if not ulak_private.has_background_workers() then
        return;
    end if;
    lock table ulak_private.schedule in exclusive mode;
    for v_look in 1..100 loop
        exit when not exists (select from ulak.workers w where w.is_scheduled and ulak_private.is_taken(w));
        perform pg_sleep(0.05), pg_stat_clear_snapshot();
    end loop;
end
$plpgsql$;

create or replace function ulak_private.is_stopping()
returns boolean
language plpgsql
stable
as $plpgsql$
begin
    return ulak_private.has_background_workers() and exists (
        select
        from pg_locks l
        join pg_database d on d.oid = l.database and d.datname = current_database()
        where l.locktype = 'relation'
            and l.relation = 'ulak_private.schedule'::regclass
            and l.mode = 'ExclusiveLock'
            and l.granted
    );
end
$plpgsql$;

create or replace function ulak_private.has_background_workers()
returns boolean
language sql
stable
as $sql$
    select coalesce(current_setting('cron.use_background_workers', true)::boolean, false)
$sql$;

-- Asks workers above this number to leave, and notes it for those that pg_cron is just starting. Nodes leave only at stop().
create or replace function ulak_private.limit_workers(p_workers integer, p_is_stop boolean default false)
returns table (name text, is_node boolean)
language plpgsql
as $plpgsql$
begin
    insert into ulak_private.schedule (workers, is_stopped, is_watched)
    values (p_workers, p_is_stop, p_workers > 0 and not ulak_private.has_seconds())
    on conflict (is_only) do update
    set workers = excluded.workers,
        changed_at = excluded.changed_at,
        is_stopped = excluded.is_stopped,
        is_watched = excluded.is_watched;

    return query
    update ulak.workers w
    set stop_requested_at = clock_timestamp()
    where w.slot > p_workers and w.state = 'running' and (w.host is null or p_is_stop)
    returning w.name, w.host is not null;
    perform ulak_private.wake_workers();
end
$plpgsql$;

create or replace function ulak_private.default_workers()
returns integer
language sql
stable
as $sql$
    select ulak.setting('workers')::integer
$sql$;

-- Whether pg_cron has jobs for workers, whether none has started yet since start() was called, and when the next one starts.
create or replace function ulak_private.workers_begin(p_now timestamptz)
returns table (is_scheduled boolean, is_new boolean, starts text)
language plpgsql
stable
as $plpgsql$
declare
    v_minute timestamptz := date_trunc('minute', p_now) + interval '1 minute';
begin
    if ulak_private.has_pg_cron() then
        is_scheduled := exists (select from ulak_private.jobs() j where j.database = current_database() and j.jobname like 'ulak worker %' and j.active);
    else
        -- The jobs can't be seen from here. But if a worker has started since start() returned what to run, they exist.
        is_scheduled := ulak_private.is_pg_cron_loaded() and exists (
            select
            from ulak_private.schedule s
            where s.workers > 0 and exists (select from ulak.workers w where w.host is null and w.started_at >= s.changed_at)
        );
    end if;
    is_new := is_scheduled and exists (
        select
        from ulak_private.schedule s
        where s.workers > 0
            and s.changed_at > p_now - interval '75 seconds'
            and not ulak_private.is_ahead(s.changed_at, p_now)
            and not exists (select from ulak.workers w where w.started_at >= s.changed_at)
    );
    if is_scheduled then
        starts := case
            when ulak_private.has_seconds() or exists (select from ulak_private.watchers()) then 'within a few seconds'
            else format('at %s, in %s', to_char(v_minute, 'HH24:MI:SS'), ulak_private.short_duration(v_minute - p_now))
        end;
    end if;
    return next;
end
$plpgsql$;
