-- Scheduling: start() and stop() put the workers and the maintenance into pg_cron, or say what to run where it lives.

create or replace function ulak.start(p_workers integer default null)
returns table (item text, status text, detail text, fix text)
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_workers integer := coalesce(p_workers, ulak_private.default_workers());
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
                || case when not ulak_private.is_pg_cron_loaded() then '. Any other scheduler can run, each minute: ' || ulak_private.minutely_calls() else '' end,
            'select * from ulak.start(); -- after mending the problems above, in their order'
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
end
$plpgsql$;

comment on function ulak.start(integer) is
    'lets pg_cron run the workers and the maintenance; returns what it did and what is wrong, each with its fix. '
    'Repeating it changes nothing, another number rescales. 0: only the maintenance, and nodes deliver';

create or replace function ulak.stop()
returns table (item text, status text, detail text, fix text)
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_id bigint;
    v_name text;
begin
    perform ulak_private.lock('schedule');
    perform ulak_private.wait_for_workers_to_leave();
    if ulak_private.has_pg_cron() then
        for v_id, v_name in execute format(
            'select jobid, jobname::text from cron.job where %s and not (%s) is true order by jobname',
            ulak_private.is_our_job(),
            ulak_private.is_recurring_job()
        )
        loop
            execute 'select cron.unschedule($1::bigint)' using v_id;
            return query values (v_name, 'done', 'unscheduled', null::text);
        end loop;
    elsif current_setting('cron.database_name', true) is not null then
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
    'unschedules the workers and the maintenance in pg_cron, asks running workers to leave and nodes to wait for start(); messages stay in '
    'the queue, and what schedule() began goes on sending';

-- pg_cron ends the run of a job that is unscheduled where a background worker runs it: in the midst of its deliveries. So the
-- workers leave first. They can't see what this transaction has written, but that it holds this lock.
create or replace function ulak_private.wait_for_workers_to_leave()
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
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
set search_path = pg_catalog, pg_temp
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
set search_path = pg_catalog, pg_temp
as $sql$
    select coalesce(current_setting('cron.use_background_workers', true)::boolean, false)
$sql$;

-- Asks the workers of other slots to leave, and notes it for those that pg_cron is just starting. Nodes are not counted: they leave
-- when everything stops.
create or replace function ulak_private.limit_workers(p_workers integer, p_is_stop boolean default false)
returns table (name text, is_node boolean)
language plpgsql
set search_path = pg_catalog, pg_temp
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

-- Asks for the extension, not for its schema: anybody may make a schema of that name, and what is in it would run with
-- our rights.
create or replace function ulak_private.has_pg_cron()
returns boolean
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select exists (select from pg_extension e where e.extname = 'pg_cron')
$sql$;

-- Several databases may have their ulak in one pg_cron, so the names of jobs carry the database's.
create or replace function ulak_private.job_name(p_what text)
returns text
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select format('ulak %s in %s', p_what, current_database())
$sql$;

-- The SQL condition that recognises our jobs in cron.job.
create or replace function ulak_private.is_our_job()
returns text
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select format('%s = %L', ulak_private.database_of_job(), current_database())
$sql$;

-- Jobs of a database that isn't in this cluster: a restore brought them, or it was dropped.
create or replace function ulak_private.is_stray_job()
returns text
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select format('%s not in (select datname from pg_catalog.pg_database)', ulak_private.database_of_job())
$sql$;

create or replace function ulak_private.database_of_job()
returns text
language sql
immutable
set search_path = pg_catalog, pg_temp
as $sql$
    select format('substring(jobname from %L)', E'^ulak (?:worker \\d+|watcher|reboot|maintenance|vacuum|log|recurring [A-Za-z0-9._-]+) in (.*)$')
$sql$;

create or replace function ulak_private.default_workers()
returns integer
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select ulak.setting('workers')::integer
$sql$;

-- The role of jobs that don't need the owner's rights.
create or replace function ulak_private.job_role()
returns text
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select 'ulak_worker'
$sql$;

-- The command that pg_cron would run.
create or replace function ulak_private.minutely_calls()
returns text
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select case when ulak_private.has_python() then 'call ulak.run_worker(); ' else '' end || 'call ulak.run_maintenance();'
$sql$;

-- The role that can do what can't be done from here.
create or replace function ulak_private.elsewhere()
returns text
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select format('pg_cron lives in database "%s", where a superuser has to run this', current_setting('cron.database_name', true))
$sql$;

-- One line for psql: fetches what the expression returns, and runs that where pg_cron lives. What psql shows of several lines
-- couldn't be pasted.
create or replace function ulak_private.fix_elsewhere(p_commands text)
returns text
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select format(
        E'select %s as ulak \\gset \\c %I \\\\ :ulak \\c %I', p_commands, current_setting('cron.database_name', true), current_database()
    )
$sql$;

-- The SQL to run where pg_cron lives, to make its jobs equal to the wanted ones; for null, to remove them.
create or replace function ulak_private.commands_elsewhere(p_workers integer)
returns text
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select case
        when p_workers is null then format(
            'select cron.unschedule(jobid) from cron.job where %s and not (%s) is true;', ulak_private.is_our_job(), ulak_private.is_recurring_job()
        )
        else concat_ws(
            E'\n',
            'create extension if not exists pg_cron;',
            ulak_private.unschedule_command(),
            (
                select string_agg(ulak_private.schedule_command(j.jobname, j.schedule, j.command, j.username, j.database), E'\n')
                from ulak_private.wanted_jobs(p_workers) j
            )
        )
    end
$sql$;

-- How a parameter of the server is set. One that no library has defined yet needs a stand-in.
create or replace function ulak_private.server_fix(p_name text, p_value text, p_then text default null)
returns text
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select concat_ws(
        ' ',
        case when not exists (select from pg_settings s where s.name = p_name) then format('set %s = %s;', p_name, p_value) end,
        format('alter system set %s = %s;', p_name, p_value),
        p_then
    )
$sql$;

-- How the server is restarted, in a shell: Debian's way, if it is a cluster of Debian's.
create or replace function ulak_private.restart(out detail text, out fix text)
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select
        'the server reads these when it starts; as ' || case when c.part is null then ulak_private.system_user() else 'root' end || ', in a shell:',
        case
            when c.part is null then format(
                '%s/pg_ctl -D %s restart', (select b.setting from pg_config b where b.name = 'BINDIR'), ulak_private.in_shell(current_setting('data_directory'))
            )
            else format('pg_ctlcluster %s %s restart', c.part[1], c.part[2])
        end
    from (select regexp_match(current_setting('config_file'), '^/etc/postgresql/([^/]+)/([^/]+)/postgresql.conf$')) c (part)
$sql$;

-- A word of a shell's.
create or replace function ulak_private.in_shell(p_text text)
returns text
language sql
immutable
set search_path = pg_catalog, pg_temp
as $sql$
    select case when p_text ~ '^[A-Za-z0-9_./:@%+-]+$' then p_text else '''' || replace(p_text, '''', E'''\\''''') || '''' end
$sql$;

-- A text as a line of a table shows it.
create or replace function ulak_private.cut(p_text text, p_length integer)
returns text
language sql
immutable
set search_path = pg_catalog, pg_temp
as $sql$
    select case when length(t.line) > p_length then left(t.line, p_length - 3) || '...' else t.line end
    from (select regexp_replace(p_text, E'\\s+', ' ', 'g')) t (line)
$sql$;

-- The value of a parameter in the configuration files as they are now, and whether it needs a restart. Null: it isn't set.
create or replace function ulak_private.given_setting(p_name text, out setting text, out is_pending boolean)
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select
        case when s.source in ('command line', 'environment variable') then s.setting else f.setting end,
        coalesce(s.source not in ('command line', 'environment variable') and not f.applied, false)
    from (values (p_name)) given (name)
    left join pg_settings s on s.name = given.name
    left join lateral (
        select f.setting, f.applied
        from pg_file_settings f
        where lower(f.name collate "C") = given.name
        order by f.seqno desc
        limit 1
    ) f on true
$sql$;

-- The version of the extension, or of the library if it lives in another database.
create or replace function ulak_private.pg_cron_version()
returns text
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select substring(coalesce(e.extversion, a.default_version) from E'^\\d+\\.\\d+')
    from pg_available_extensions a
    left join pg_extension e on e.extname = a.name
    where a.name = 'pg_cron'
$sql$;

-- Whether pg_cron knows schedules in seconds. Before, it starts nothing but at the full minute and with the server, and workers
-- need a watcher.
create or replace function ulak_private.has_seconds()
returns boolean
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select coalesce(string_to_array(ulak_private.pg_cron_version(), '.')::integer[] >= array[1, 5], false)
$sql$;

-- The jobs as they should be. Each is the call of one routine that pins its search_path, or a text that none can bend.
create or replace function ulak_private.wanted_jobs(p_workers integer)
returns table (
    jobname text,
    schedule text,
    command text,
    username text,
    database text,
    nodename text,
    nodeport integer
)
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    with job (what, schedule, command, is_owners, database) as (
        -- A run that has ended is followed by the next at once, and one that ended too soon after two seconds.
        select
            'worker ' || n,
            case when ulak_private.has_seconds() then '2 seconds' else '* * * * *' end,
            format('call ulak.run_worker(%s, p_is_scheduled => true)', n),
            false,
            current_database()
        from generate_series(1, p_workers) n
        union all
        select w.what, w.schedule, 'call ulak_private.watch_workers()', false, current_database()
        from (values ('watcher', '* * * * *'), ('reboot', '@reboot')) w(what, schedule)
        where p_workers > 0 and not ulak_private.has_seconds()
        union all
        select 'maintenance', '* * * * *', 'call ulak.run_maintenance()', false, current_database()
        union all
        -- Only the owner may VACUUM a table.
        select 'vacuum', '* * * * *', ulak_private.vacuum_command(), true, current_database()
        union all
        -- pg_cron logs each run of each job and never forgets. Runs that failed to start have no time, but their number.
        -- A text of its own, since there may be no ulak where pg_cron lives.
        select
            'log',
            '* * * * *',
            format(
                'set transaction_read_only = off; set search_path = pg_catalog, pg_temp; '
                'delete from cron.job_run_details d where (d.jobid in (select jobid from cron.job where %s) '
                'or d.command like ''call ulak.%%'' and d.jobid not in (select jobid from cron.job)) '
                'and d.runid < (select max(r.runid) from cron.job_run_details r where r.start_time < now() - interval ''1 hour'')',
                ulak_private.is_our_job()
            ),
            true,
            current_setting('cron.database_name', true)
    )
    select
        ulak_private.job_name(j.what),
        j.schedule,
        j.command,
        case when j.is_owners then pg_get_userbyid(c.relowner) else ulak_private.job_role() end,
        j.database,
        current_setting('cron.host', true),
        current_setting('port')::integer
    from job j
    cross join pg_class c
    where c.oid = 'ulak_private.deliveries'::regclass
    union all
    select r.jobname, r.schedule, r.command, r.username, r.database, current_setting('cron.host', true), current_setting('port')::integer
    from ulak_private.recurring_jobs() r
$sql$;

create or replace function ulak_private.schedule_command(
    p_jobname text, p_schedule text, p_command text, p_username text, p_database text
)
returns text
language sql
immutable
set search_path = pg_catalog, pg_temp
as $sql$
    select format(
        'select cron.schedule_in_database(%L, %L, %L, %L, %L);', p_jobname, p_schedule, p_command, p_database, p_username
    )
$sql$;

create or replace function ulak_private.unschedule_command()
returns text
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select format('select cron.unschedule(jobid) from cron.job where %s;', ulak_private.is_our_job())
$sql$;

-- Makes pg_cron's jobs equal to the wanted ones. A job remembers the address of the server that it was made on: one that was
-- promoted or restored elsewhere is put right. pg_cron reads its jobs when it is told of a change, and version 1.4 was seen to
-- miss that while much else changed in the catalog. So jobs that are right already are written as well, and a second
-- start() reaches it.
create or replace function ulak_private.schedule_jobs(p_workers integer)
returns table (item text, status text, detail text)
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_job record;
begin
    for v_job in execute
        'select j.jobid, w.*, (j.schedule, j.command, j.database, j.active) '
        'is not distinct from (w.schedule, w.command, w.database, true) as is_right, '
        '(j.nodename, j.nodeport) is not distinct from (w.nodename, w.nodeport) as is_here, '
        'concat_ws('':'', j.nodename, j.nodeport) as place '
        'from ulak_private.wanted_jobs($1) w left join cron.job j on j.jobname = w.jobname and j.username = w.username '
        'order by w.jobname'
        using p_workers
    loop
        if v_job.jobid is null then
            execute ulak_private.schedule_command(v_job.jobname, v_job.schedule, v_job.command, v_job.username, v_job.database);
        else
            execute 'update cron.job set schedule = $2, command = $3, database = $4, nodename = $5, nodeport = $6, active = true '
                'where jobid = $1'
                using v_job.jobid, v_job.schedule, v_job.command, v_job.database, v_job.nodename, v_job.nodeport;
        end if;
        return query values (
            v_job.jobname,
            case when v_job.is_right and v_job.is_here then 'unchanged' else 'done' end,
            format('%s as %s: %s', v_job.schedule, v_job.username, ulak_private.cut(v_job.command, 60))
                || case when v_job.jobid is not null and not v_job.is_here then format(' (it ran on %s)', v_job.place) else '' end
        );
    end loop;
    for v_job in execute format(
        'select jobid, jobname::text from cron.job where (%s or %s) and (jobname, username) not in '
        '(select w.jobname, w.username from ulak_private.wanted_jobs($1) w) order by jobname',
        ulak_private.is_our_job(),
        ulak_private.is_stray_job()
    ) using p_workers
    loop
        perform ulak_private.wait_for_workers_to_leave();
        execute 'select cron.unschedule($1::bigint)' using v_job.jobid;
        return query values (v_job.jobname, 'done', 'unscheduled');
    end loop;
    perform ulak_private.bring_jobs_here();
    return query
    select w.name, 'done', 'asked to leave'
    from ulak_private.limit_workers(p_workers) w;
end
$plpgsql$;

-- Where jobs run that are not on this server, and how many: pg_cron goes by an address of its own for each. Those of other
-- databases count, too: a restore may have brought them from a cluster that is still alive, and they would run there.
create or replace function ulak_private.misplaced_jobs()
returns table (place text, jobs bigint)
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    if ulak_private.has_pg_cron() and not ulak_private.has_background_workers() then
        return query execute format(
            'select concat_ws('':'', j.nodename, j.nodeport), count(*) from cron.job j '
            'where %s is not null and (j.nodename, j.nodeport) is distinct from ($1, $2) group by 1',
            ulak_private.database_of_job()
        ) using current_setting('cron.host', true), current_setting('port')::integer;
    end if;
end
$plpgsql$;

-- For start(), adopt(), and for maintenance: it comes here where another scheduler than pg_cron runs it, or background workers did.
create or replace function ulak_private.bring_jobs_here()
returns bigint
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_jobs bigint := 0;
begin
    if exists (select from ulak_private.misplaced_jobs()) then
        execute format(
            'update cron.job j set nodename = $1, nodeport = $2 '
            'where %s is not null and (j.nodename, j.nodeport) is distinct from ($1, $2)',
            ulak_private.database_of_job()
        ) using current_setting('cron.host'), current_setting('port')::integer;
        get diagnostics v_jobs = row_count;
    end if;
    return v_jobs;
end
$plpgsql$;

-- DROP DATABASE waits until every process has answered, and pg_cron 1.4 answers only when it has something to do: at
-- the next full minute. Told that its jobs have changed, it reads them and answers. (No row is touched: the table's trigger
-- is for each statement.)
create or replace function ulak_private.wake_pg_cron()
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    if ulak_private.has_pg_cron() and exists (select from pg_stat_activity a where a.wait_event = 'ProcSignalBarrier') then
        execute 'update cron.job set active = active where false';
    end if;
end
$plpgsql$;

-- Starts the watcher now instead of at the next minute, unless there is one. False if it could not be done.
create or replace function ulak_private.launch_watcher()
returns boolean
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_error text;
begin
    if not exists (select from ulak_private.watchers()) then
        v_error := ulak_private.launch();
        if v_error is not null then
            raise warning 'workers start at the next full minute: %', v_error;
        end if;
    end if;
    return v_error is null;
end
$plpgsql$;

-- Each second, by one worker: the watcher sees to the workers, and they see to the watcher. So whichever of them is left brings back
-- the others. Where a login fails, pg_cron starts the watcher at the next full minute.
create or replace function ulak_private.keep_watcher()
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    if exists (select from ulak_private.schedule s where s.is_watched) and not exists (select from ulak_private.watchers()) then
        perform ulak_private.launch();
    end if;
end
$plpgsql$;

create or replace function ulak_private.launch()
returns text
language plpython3u
as $python$
    plpy.execute("select ulak_private.load_python()")
    from ulak import entry_points

    return entry_points.launch_watcher()
$python$;

-- pg_cron's launcher comes a moment after the server, and tries again each second where its database wasn't there yet.
create or replace function ulak_private.await_launcher()
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    for v_look in 1..30 loop
        exit when not ulak_private.is_pg_cron_loaded()
            or exists (select from pg_stat_activity a where a.backend_type = 'pg_cron launcher');
        perform pg_sleep(0.1), pg_stat_clear_snapshot();
    end loop;
end
$plpgsql$;

-- Everything that has to be right before something is scheduled, in the order in which it is mended: ok, or a problem and its fix,
-- one line that can be pasted into psql or, where the detail says so, into a shell.
create or replace function ulak_private.check_schedule(p_workers integer)
returns table (item text, status text, detail text, fix text)
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_checks jsonb := '[]';
begin
    -- A node has its own.
    if p_workers > 0 then
        v_checks := v_checks || (
            select jsonb_agg(to_jsonb(c))
            from (
                select 1 as step, p.item, p.status, p.detail, p.fix
                from ulak_private.check_python() p
                union all
                select
                    1,
                    m.package,
                    'warning',
                    format('it is not installed; needed for %s of protocol %s; as root, in a shell:', ulak_private.counted(m.endpoints, 'endpoint'), m.protocol),
                    format('apt-get install -y %s', m.package)
                from ulak_private.missing_clients() m
            ) c
        );
    end if;
    v_checks := v_checks || coalesce((
        select jsonb_agg(to_jsonb(c))
        from ulak_private.pg_cron_steps(p_workers, ulak_private.is_pg_cron_created()) c
    ), '[]');
    if not ulak_private.wants_background_workers() then
        v_checks := v_checks || coalesce((
            select jsonb_agg(to_jsonb(c))
            from pg_class q
            cross join lateral (values ('ulak_worker'), (pg_get_userbyid(q.relowner))) u(name)
            cross join lateral ulak_private.login_steps(u.name) c
            where q.oid = 'ulak_private.deliveries'::regclass
        ), '[]');
    end if;
    return query
    select c.item, c.status, c.detail, c.fix
    from ulak_private.in_order(v_checks) c;
    return query
    select c.item, c.status, c.detail, c.fix
    from ulak_private.check_adopted() c;
end
$plpgsql$;

-- The steps of a mending: 1 packages, 2 parameters, 3 a restart for them, 4 parameters that are possible only then, 5 a restart for
-- those, 6 what the running server needs, 7 a look into its files.
create or replace function ulak_private.in_order(p_checks jsonb)
returns table (item text, status text, detail text, fix text)
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    with checks as (
        select c.*
        from rows from (jsonb_to_recordset(p_checks) as (step integer, item text, status text, detail text, fix text))
            with ordinality c(step, item, status, detail, fix, place)
    ),
    further as (
        select distinct on (c.step)
            c.step + 1 as step,
            case when c.step = 6 then 'login' else 'restart' end as item,
            'problem' as status,
            case when c.step = 6 then 'the server reads these files when it is told to' else r.detail end as detail,
            case when c.step = 6 then 'select pg_reload_conf();' else r.fix end as fix
        from checks c
        cross join ulak_private.restart() r
        where c.status = 'problem'
            and (c.step in (2, 4) or c.step = 6 and c.fix ~ E'^\\\\! ')
            and not exists (select from checks k where k.status = 'problem' and k.step = c.step + 1)
    )
    select c.item, c.status, c.detail, c.fix
    from (
        select distinct on (a.step, a.item, a.detail, a.fix) a.*
        from (
            select k.step, k.item, k.status, k.detail, k.fix, k.place from checks k
            union all
            select f.step, f.item, f.status, f.detail, f.fix, null from further f
        ) a
    ) c
    -- Items that are in order come first.
    order by c.status = 'problem', c.step, c.place
$sql$;

create or replace function ulak_private.check_python()
returns table (item text, status text, detail text, fix text)
language plpython3u
as $python$
    import sys

    yield "plpython3u", "ok", "Python " + sys.version.split()[0], None
    try:
        import pycurl
    except ImportError as error:
        yield "pycurl", "problem", f"{error}; as root, in a shell:", "apt-get install -y python3-pycurl"
    else:
        yield "pycurl", "ok", " ".join(pycurl.version.split()[:2]), None
$python$;

-- A worker's run is one statement of a minute or longer. A timer that was set when it began can't be lifted from inside, so no time-out may
-- hold for its sessions to begin with. Of all that is set by ALTER, what is set for a role in a database counts most.
create or replace function ulak_private.lift_timeout()
returns table (item text, status text, detail text)
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_is_done boolean := exists (
        select
        from pg_db_role_setting s
        join pg_database d on d.oid = s.setdatabase
        where d.datname = current_database() and s.setrole = 'ulak_worker'::regrole and 'statement_timeout=0' = any (s.setconfig)
    );
begin
    if not v_is_done then
        execute format('alter role ulak_worker in database %I set statement_timeout = 0', current_database());
    end if;
    return query values (
        'statement_timeout',
        case when v_is_done then 'unchanged' else 'done' end,
        'ulak_worker has none in this database: it would end the workers'' runs'
    );
end
$plpgsql$;

-- The time-out that ends a worker's run; null if none does, or if it can't be seen from this session.
create or replace function ulak_private.run_timeout()
returns interval
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select nullif(case when t.value ~ '^[0-9]+$' then t.value || ' ms' else t.value end::interval, interval '0')
    from (
        select coalesce(
            (
                select split_part(c.setting, '=', 2)
                from pg_db_role_setting s
                cross join lateral unnest(s.setconfig) c(setting)
                where s.setdatabase in (0, (select d.oid from pg_database d where d.datname = current_database()))
                    and s.setrole in (0, 'ulak_worker'::regrole)
                    and split_part(c.setting, '=', 1) = 'statement_timeout'
                order by s.setrole <> 0 desc, s.setdatabase <> 0 desc
                limit 1
            ),
            (
                select s.setting
                from pg_settings s
                where s.name = 'statement_timeout' and s.source in ('default', 'configuration file', 'command line')
            )
        )
    ) t (value)
$sql$;

-- In its libpq mode pg_cron logs in as the role that a job runs as. This does the same.
create or replace function ulak_private.check_login(p_user text)
returns table (item text, status text, detail text, fix text)
language sql
set search_path = pg_catalog, pg_temp
as $sql$
    select c.item, c.status, c.detail, c.fix
    from ulak_private.login_steps(p_user) c
$sql$;

create or replace function ulak_private.login_steps(p_user text)
returns table (step integer, item text, status text, detail text, fix text)
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_host text := (select p.host from ulak_private.login_parameters() p);
    v_problem text := ulak_private.log_in(p_user);
begin
    if v_problem is not null then
        return query
        select *
        from ulak_private.login_problem(p_user, v_host, ulak_private.cut(coalesce(substring(v_problem from 'FATAL: *(.*)'), v_problem), 90));
        return;
    end if;
    return query values (6, 'login', 'ok', format('%s can log in', p_user), null::text);
end
$plpgsql$;

-- The narrowest way to let a role in: background workers, which need no login, where pg_cron has good ones; else the
-- operating system's user over a socket; else a password.
create or replace function ulak_private.login_problem(p_user text, p_host text, p_reason text)
returns table (step integer, item text, status text, detail text, fix text)
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_socket text := ulak_private.socket();
    v_rule record;
begin
    if not (select r.rolcanlogin from pg_roles r where r.rolname = p_user) then
        return query values (6, 'login', 'problem', p_reason, format('alter role %I login;', p_user));
    elsif ulak_private.has_seconds() then
        return query values (
            2, 'login', 'problem', format('%s; background workers need no login', p_reason), ulak_private.server_fix('cron.use_background_workers', 'on')
        );
    elsif p_host !~ '^/' and v_socket is null then
        return query values
            (6, 'login', 'problem', p_reason, format(E'\\password %I', p_user)),
            (
                6,
                'password',
                'problem',
                format('it is found in ~/.pgpass, mode 0600, of the operating system''s user %s:', ulak_private.system_user()),
                format(E'\\! echo %s:%s:*:%s:PASSWORD >> ~%s/.pgpass', p_host, current_setting('port'), p_user, ulak_private.system_user())
            );
    else
        if p_host !~ '^/' then
            return query values (
                2, 'cron.host', 'problem', format('%s; over a socket no password is needed', p_reason), ulak_private.server_fix('cron.host', quote_literal(v_socket))
            );
        end if;
        select * into v_rule
        from ulak_private.login_rule(p_user) r;
        if v_rule.map is null then
            return query values (
                6,
                'login',
                'problem',
                ulak_private.cut(concat_ws('; ', p_reason, v_rule.why), 140),
                format(
                    E'\\! sed -i %s %s',
                    ulak_private.in_shell(format('1i local %s %s peer map=ulak', ulak_private.in_file(current_database()), ulak_private.in_file(p_user))),
                    ulak_private.in_shell(current_setting('hba_file'))
                )
            );
        end if;
        if not v_rule.is_mapped then
            return query values (
                6,
                'login',
                'problem',
                format('map "%s" has no line that lets %s in as %s', coalesce(v_rule.map, 'ulak'), ulak_private.system_user(), p_user),
                format(
                    E'\\! echo %s >> %s',
                    ulak_private.in_shell(concat_ws(' ', coalesce(v_rule.map, 'ulak'), ulak_private.system_user(), ulak_private.in_file(p_user))),
                    ulak_private.in_shell(current_setting('ident_file'))
                )
            );
        end if;
        if v_rule.map is not null and v_rule.is_mapped then
            return query values (7, 'login', 'problem', format('%s; its files were changed since', p_reason), 'select pg_reload_conf();');
        end if;
    end if;
end
$plpgsql$;

-- A name as pg_hba.conf and pg_ident.conf take it.
create or replace function ulak_private.in_file(p_name text)
returns text
language sql
immutable
set search_path = pg_catalog, pg_temp
as $sql$
    select case when p_name ~ '^[A-Za-z_][A-Za-z0-9_]*$' and p_name not in ('all', 'sameuser', 'samerole', 'replication') then p_name else format('"%s"', p_name) end
$sql$;

-- Which line of pg_hba.conf decides about a role's login over the socket, as the file is now: its map, if it is one that goes by the
-- operating system's user, and whether the map lets the server's user in.
create or replace function ulak_private.login_rule(p_user text, out map text, out is_mapped boolean, out why text)
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select
        r.map,
        exists (
            select
            from pg_ident_file_mappings m
            where m.map_name = coalesce(r.map, 'ulak')
                and m.error is null
                and m.sys_name = ulak_private.system_user()
                and m.pg_username in (p_user, 'all')
        ),
        case when r.line is not null then format('line %s of pg_hba.conf decides: %s', r.line_number, r.line) end
    from (values (1)) one
    left join (
        select
            h.line_number,
            concat_ws(' ', h.type, array_to_string(h.database, ','), array_to_string(h.user_name, ','), h.auth_method,
                array_to_string(h.options, ' ')) as line,
            case
                when h.auth_method = 'peer' then (select substring(o from '^map=(.*)$') from unnest(h.options) o where o like 'map=%')
            end as map
        from pg_hba_file_rules h
        where h.error is null
            and h.type = 'local'
            and h.database && array['all', current_database()::text]
            and (
                h.user_name && array['all', p_user]
                or exists (
                    select
                    from unnest(h.user_name) u(name)
                    join pg_roles g on u.name = '+' || g.rolname
                    where pg_has_role(p_user, g.oid, 'member')
                )
            )
        order by h.line_number
        limit 1
    ) r on true
$sql$;

create or replace function ulak_private.system_user()
returns text
language plpython3u
as $python$
    import os
    import pwd

    return pwd.getpwuid(os.geteuid()).pw_name
$python$;

create or replace function ulak_private.socket()
returns text
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select nullif(btrim(split_part(current_setting('unix_socket_directories'), ',', 1)), '')
$sql$;

-- Where pg_cron would look for this server. The settings are a superuser's to read.
create or replace function ulak_private.login_parameters()
returns table (host text, port text, database text)
language sql
stable
security definer
set search_path = pg_catalog, pg_temp
as $sql$
    select
        coalesce(
            nullif((ulak_private.given_setting('cron.host')).setting, ''),
            case when ulak_private.is_pg_cron_loaded() then nullif(current_setting('cron.host', true), '') end,
            ulak_private.socket(),
            'localhost'
        ),
        current_setting('port'),
        current_database()::text
$sql$;

create or replace function ulak_private.log_in(p_user text)
returns text
language plpython3u
as $python$
    plpy.execute("select ulak_private.load_python()")
    from ulak import entry_points

    return entry_points.log_in(p_user)
$python$;

-- Anybody may set a parameter of its where it isn't loaded.
create or replace function ulak_private.is_pg_cron_loaded()
returns boolean
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select current_setting('shared_preload_libraries') ~ E'\\mpg_cron\\M'
$sql$;

-- How pg_cron shall run its jobs: as it is told to; by background workers, which need no login, where nobody has told it yet; but not
-- by those of 1.4, which wait for each other.
create or replace function ulak_private.wants_background_workers()
returns boolean
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select ulak_private.has_seconds() and coalesce((ulak_private.given_setting('cron.use_background_workers')).setting::boolean, not ulak_private.is_pg_cron_loaded())
$sql$;

-- Whether pg_cron was created in its database, which may be another one: then as a login there tells. Null: it can't be known.
create or replace function ulak_private.is_pg_cron_created()
returns boolean
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    if not ulak_private.is_pg_cron_loaded() then
        return false;
    elsif current_setting('cron.database_name') = current_database() then
        return ulak_private.has_pg_cron();
    end if;
    return ulak_private.ask(
        coalesce(ulak_private.socket(), 'localhost'),
        current_setting('cron.database_name'),
        (select pg_get_userbyid(c.relowner) from pg_class c where c.oid = 'ulak_private.deliveries'::regclass),
        'select pg_catalog.count(*) from pg_catalog.pg_extension where extname = ''pg_cron'''
    ) = '1';
end
$plpgsql$;

-- The answer of a session of this role in another database. Null: it can't be opened.
create or replace function ulak_private.ask(p_host text, p_database text, p_user text, p_query text)
returns text
language plpython3u
as $python$
    plpy.execute("select ulak_private.load_python()")
    from ulak import entry_points

    return entry_points.ask({"host": p_host, "dbname": p_database, "user": p_user}, p_query)
$python$;

-- The part that needs no login: is pg_cron there, does it run, and in a mode that suits us.
create or replace function ulak_private.check_pg_cron(p_workers integer)
returns table (item text, status text, detail text, fix text)
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select o.item, o.status, o.detail, o.fix
    from ulak_private.in_order(coalesce((select jsonb_agg(to_jsonb(c)) from ulak_private.pg_cron_steps(p_workers, null) c), '[]')) o
$sql$;

create or replace function ulak_private.pg_cron_steps(p_workers integer, p_is_created boolean)
returns table (step integer, item text, status text, detail text, fix text)
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_is_loaded boolean := ulak_private.is_pg_cron_loaded();
    v_version text := ulak_private.pg_cron_version();
    v_given_home text := (ulak_private.given_setting('cron.database_name')).setting;
    v_home text := coalesce(v_given_home, 'postgres');
    v_is_here boolean;
    v_background boolean := coalesce((ulak_private.given_setting('cron.use_background_workers')).setting::boolean, false);
    v_wants_background boolean := ulak_private.wants_background_workers();
begin
    if not ulak_private.has_pg_cron() and exists (select from pg_extension e where e.extname = 'pg_cron') then
        return query
        select 6, 'pg_cron', 'problem', format('role %I may not use it', o.name), format('grant usage on schema cron to %I; -- by an administrator of the server', o.name)
        from (select pg_get_userbyid(c.relowner) from pg_class c where c.oid = 'ulak_private.deliveries'::regclass) o (name);
        return;
    end if;
    if v_version is null then
        return query
        select 1, p.name, 'problem', 'it is not installed; as root, in a shell:', format('apt-get install -y %s', p.name)
        from (select format('postgresql-%s-cron', current_setting('server_version_num')::integer / 10000)) p (name);
    elsif string_to_array(v_version, '.')::integer[] < array[1, 4] then
        return query values (
            6, 'pg_cron', 'problem', format('version %s is older than 1.4', v_version), 'alter extension pg_cron update; -- after installing a newer one'
        );
    end if;
    return query
    select *
    from ulak_private.library_steps();
    -- It serves all databases of the server, so an existing cron.database_name stays.
    if v_home <> current_database() and (
        not exists (select from pg_database d where d.datname = v_home)
        or v_given_home is null and p_is_created is false
    ) then
        return query values (
            2,
            'cron.database_name',
            'problem',
            case
                when exists (select from pg_database d where d.datname = v_home) then format('pg_cron would look for its jobs in database "%s"', v_home)
                else format('pg_cron looks for its jobs in database "%s", which does not exist', v_home)
            end,
            ulak_private.server_fix('cron.database_name', quote_literal(current_database()))
        );
        v_home := current_database();
    end if;
    if v_background <> v_wants_background then
        return query values (
            2,
            'mode',
            'problem',
            case
                when v_background then 'pg_cron 1.4 makes every job wait for the longest one when cron.use_background_workers is on'
                else 'pg_cron would log in for each job; background workers need no login'
            end,
            ulak_private.server_fix('cron.use_background_workers', case when v_wants_background then 'on' else 'off' end)
        );
    elsif v_is_loaded then
        return query values (2, 'mode', 'ok', case when v_background then 'background workers' else 'libpq' end, null::text);
    end if;
    if not v_wants_background and not v_is_loaded and (ulak_private.given_setting('cron.host')).setting is null then
        return query
        select 2, 'cron.host', 'problem', 'pg_cron would log in by TCP; over a socket no password is needed', ulak_private.server_fix('cron.host', quote_literal(p.host))
        from ulak_private.login_parameters() p
        where p.host ~ '^/';
    end if;
    return query
    select *
    from ulak_private.limit_steps(p_workers, v_wants_background);
    v_is_here := v_home = current_database();
    if v_is_here and not ulak_private.has_pg_cron() then
        return query values (
            6,
            'pg_cron',
            'problem',
            case when v_is_loaded then 'it is loaded, but not created' else 'once it is loaded, it has to be created' end,
            'create extension pg_cron;'
        );
    elsif not v_is_here and p_is_created is false then
        return query values (
            6,
            'pg_cron',
            'problem',
            format('it is not created in database "%s", where it lives', v_home),
            format(E'\\c %I \\\\ create extension pg_cron; \\c %I', v_home, current_database())
        );
    elsif v_is_loaded and not exists (select from pg_stat_activity a where a.backend_type = 'pg_cron launcher') then
        return query
        select 3, 'pg_cron', 'problem', 'its scheduler is not running: ' || r.detail, r.fix
        from ulak_private.restart() r;
    elsif v_is_loaded then
        return query values (1, 'pg_cron', 'ok', case when v_is_here then 'version ' || v_version else format('in database "%s"', v_home) end, null::text);
    end if;
end
$plpgsql$;

-- Whether the server loads pg_cron, and whether it has to be restarted for what stands in its files.
create or replace function ulak_private.library_steps()
returns table (step integer, item text, status text, detail text, fix text)
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_libraries text := coalesce((ulak_private.given_setting('shared_preload_libraries')).setting, '');
begin
    if v_libraries !~ E'\\mpg_cron\\M' then
        return query values (
            2,
            'pg_cron',
            'problem',
            'it is not loaded',
            ulak_private.server_fix(
                'shared_preload_libraries',
                (
                    select string_agg(quote_literal(btrim(l.name)), ', ' order by l.place)
                    from unnest(string_to_array(nullif(v_libraries, ''), ',') || 'pg_cron'::text) with ordinality l (name, place)
                )
            )
        );
    elsif not ulak_private.is_pg_cron_loaded() then
        return query
        select 3, 'pg_cron', 'problem', 'it is configured, but not loaded: ' || r.detail, r.fix
        from ulak_private.restart() r;
    elsif exists (
        select
        from pg_settings s
        cross join lateral ulak_private.given_setting(s.name) g
        where g.is_pending and (s.name like 'cron.%' or s.name = 'max_worker_processes')
    ) then
        return query
        select 3, 'restart', 'problem', r.detail, r.fix
        from ulak_private.restart() r;
    end if;
end
$plpgsql$;

create or replace function ulak_private.limit_steps(p_workers integer, p_background boolean)
returns table (step integer, item text, status text, detail text, fix text)
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_processes integer := coalesce((ulak_private.given_setting('max_worker_processes')).setting, '8')::integer;
    v_jobs integer := coalesce(
        (ulak_private.given_setting('cron.max_running_jobs')).setting::integer,
        case when p_background then least(5, v_processes - 1) else least(32, current_setting('max_connections')::integer) end
    );
    -- Beside the workers: maintenance, vacuum, log, and the watcher of those who don't know seconds.
    v_others integer := case when ulak_private.has_seconds() or p_workers = 0 then 3 else 4 end;
    v_needed integer := p_workers + v_others;
begin
    -- Beside the jobs there are pg_cron's own process and that of logical replication.
    if p_background and v_processes < v_needed + 2 then
        return query values (
            2,
            'max_worker_processes',
            'problem',
            format('%s jobs and 2 other processes need %s, it is %s', v_needed, v_needed + 2, v_processes),
            ulak_private.server_fix('max_worker_processes', (v_needed + 2)::text)
        );
    end if;
    if v_jobs < v_needed then
        return query values (
            -- Its possible values depend on the settings above.
            case when v_needed > (select s.max_val::integer from pg_settings s where s.name = 'cron.max_running_jobs') then 4 else 2 end,
            'max_running_jobs',
            'problem',
            format('%s workers and %s other jobs need %s, it is %s', p_workers, v_others, v_needed, v_jobs),
            ulak_private.server_fix('cron.max_running_jobs', v_needed::text)
        );
    end if;
    if not coalesce((ulak_private.given_setting('cron.launch_active_jobs')).setting::boolean, true) then
        return query values (
            6,
            'launch_active_jobs',
            'problem',
            'pg_cron is told to start no job',
            ulak_private.server_fix('cron.launch_active_jobs', 'on', 'select pg_reload_conf();')
        );
    end if;
end
$plpgsql$;
