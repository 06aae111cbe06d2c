-- The jobs of pg_cron: which ones there should be, which there are, and how to change them, here or in pg_cron's database.

-- Looks for the extension, not for its schema: anybody may create a schema of that name, and its functions would run with our rights.
create or replace function ulak_private.has_pg_cron()
returns boolean
language sql
stable
as $sql$
    select exists (select from pg_extension e where e.extname = 'pg_cron')
$sql$;

-- Several databases may use ulak with one pg_cron, so job names contain the database.
create or replace function ulak_private.job_name(p_what text)
returns text
language sql
stable
as $sql$
    select format('ulak %s in %s', p_what, current_database())
$sql$;

-- An SQL expression over cron.job: the database whose ulak the job belongs to; null if the job isn't ulak's.
create or replace function ulak_private.database_of_job()
returns text
language sql
immutable
as $sql$
    select format('substring(jobname from %L)', E'^ulak (?:worker \\d+|watcher|reboot|maintenance|vacuum|log|recurring [A-Za-z0-9._-]+) in (.*)$')
$sql$;

-- The jobs of ulak, of all databases of the server. Empty if pg_cron lives in another database.
create or replace function ulak_private.jobs()
returns table (
    jobid bigint,
    jobname text,
    of_database text,
    schedule text,
    command text,
    username text,
    database text,
    nodename text,
    nodeport integer,
    active boolean
)
language plpgsql
stable
as $plpgsql$
begin
    if ulak_private.has_pg_cron() then
        return query execute format(
            'select jobid, jobname::text, %1$s, schedule, command, username, database, nodename, nodeport, active '
            'from cron.job where %1$s is not null',
            ulak_private.database_of_job()
        );
    end if;
end
$plpgsql$;

-- The role of jobs that don't need the owner's rights.
create or replace function ulak_private.job_role()
returns text
language sql
stable
as $sql$
    select 'ulak_worker'
$sql$;

-- Why and where somebody else has to run a command.
create or replace function ulak_private.elsewhere()
returns text
language sql
stable
as $sql$
    select format('pg_cron lives in database "%s", where a superuser has to run this', current_setting('cron.database_name', true))
$sql$;

-- One line for psql that evaluates the expression and runs the result in pg_cron's database. Several lines couldn't be pasted from psql's
-- table.
create or replace function ulak_private.fix_elsewhere(p_commands text)
returns text
language sql
stable
as $sql$
    select format(
        E'select %s as ulak \\gset \\c %I \\\\ :ulak \\c %I', p_commands, current_setting('cron.database_name', true), current_database()
    )
$sql$;

-- The SQL to run in pg_cron's database so that its jobs are the wanted ones; for null, to remove all but recurring messages.
create or replace function ulak_private.commands_elsewhere(p_workers integer)
returns text
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select concat_ws(
        E'\n',
        case when p_workers is not null then 'create extension if not exists pg_cron;' end,
        format(
            'select cron.unschedule(jobid) from cron.job where %s = %L%s;',
            ulak_private.database_of_job(),
            current_database(),
            case when p_workers is null then format(' and jobname not like %L', 'ulak recurring %') end
        ),
        (
            select string_agg(ulak_private.schedule_command(j.jobname, j.schedule, j.command, j.username, j.database), E'\n')
            from ulak_private.wanted_jobs(p_workers) j
            where p_workers is not null
        )
    )
$sql$;

-- The version of the extension, or of the library if it lives in another database.
create or replace function ulak_private.pg_cron_version()
returns text
language sql
stable
as $sql$
    select substring(coalesce(e.extversion, a.default_version) from E'^\\d+\\.\\d+')
    from pg_available_extensions a
    left join pg_extension e on e.extname = a.name
    where a.name = 'pg_cron'
$sql$;

-- Whether pg_cron has schedules in seconds. Earlier versions start jobs only at the full minute and with the server, so workers need a
-- watcher.
create or replace function ulak_private.has_seconds()
returns boolean
language sql
stable
as $sql$
    select coalesce(string_to_array(ulak_private.pg_cron_version(), '.')::integer[] >= array[1, 5], false)
$sql$;

-- The jobs as they should be. Each command pins its search_path, or names nothing that a search_path could change.
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
as $sql$
    with job (what, schedule, command, is_owners, database) as (
        -- The next run starts as soon as the last one has ended, or two seconds later if it ended too soon.
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
        -- pg_cron logs every run and never deletes the log. Runs that failed to start have no time, so this goes by their numbers.
        -- Plain SQL, because pg_cron's database may not have ulak.
        select
            'log',
            '* * * * *',
            format(
                'set transaction_read_only = off; set search_path = pg_catalog, pg_temp; '
                'delete from cron.job_run_details d where (d.jobid in (select jobid from cron.job where %s = %L) '
                'or d.command like ''call ulak.%%'' and d.jobid not in (select jobid from cron.job)) '
                'and d.runid < (select max(r.runid) from cron.job_run_details r where r.start_time < now() - interval ''1 hour'')',
                ulak_private.database_of_job(),
                current_database()
            ),
            true,
            current_setting('cron.database_name', true)
        union all
        select
            'recurring ' || r.name,
            r.cron,
            -- Works with default_transaction_read_only = on, too: inside a function it would be too late to change that.
            format('set transaction_read_only = off; select ulak_private.send_recurring(%L)', r.name),
            false,
            current_database()
        from ulak.recurring r
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
$sql$;

create or replace function ulak_private.schedule_command(
    p_jobname text, p_schedule text, p_command text, p_username text, p_database text
)
returns text
language sql
immutable
as $sql$
    select format(
        'select cron.schedule_in_database(%L, %L, %L, %L, %L);', p_jobname, p_schedule, p_command, p_database, p_username
    )
$sql$;

-- A job stores the address of the server that it was created on. After a promotion or a restore this corrects it.
create or replace function ulak_private.put_job(
    p_jobid bigint, p_jobname text, p_schedule text, p_command text, p_username text, p_database text
)
returns void
language plpgsql
as $plpgsql$
begin
    if p_jobid is null then
        execute ulak_private.schedule_command(p_jobname, p_schedule, p_command, p_username, p_database);
    else
        execute 'update cron.job set schedule = $2, command = $3, database = $4, nodename = $5, nodeport = $6, active = true where jobid = $1'
            using p_jobid, p_schedule, p_command, p_database, current_setting('cron.host', true), current_setting('port')::integer;
    end if;
end
$plpgsql$;

-- Makes pg_cron's jobs equal to the wanted ones. pg_cron reads its jobs when it is notified of a change. Version 1.4 was seen to miss that
-- while the catalog changed a lot, so correct jobs are written as well: a second start() notifies it again. Jobs of databases that don't
-- exist in this cluster are removed, too: they were dropped, or a restore brought the jobs.
create or replace function ulak_private.schedule_jobs(p_workers integer)
returns table (item text, status text, detail text)
language plpgsql
as $plpgsql$
declare
    v_job record;
begin
    for v_job in
        select
            j.jobid,
            w.*,
            (j.schedule, j.command, j.database, j.active) is not distinct from (w.schedule, w.command, w.database, true) as is_right,
            (j.nodename, j.nodeport) is not distinct from (w.nodename, w.nodeport) as is_here,
            concat_ws(':', j.nodename, j.nodeport) as place
        from ulak_private.wanted_jobs(p_workers) w
        left join ulak_private.jobs() j on j.jobname = w.jobname and j.username = w.username
        order by w.jobname
    loop
        perform ulak_private.put_job(v_job.jobid, v_job.jobname, v_job.schedule, v_job.command, v_job.username, v_job.database);
        return query values (
            v_job.jobname,
            case when v_job.is_right and v_job.is_here then 'unchanged' else 'done' end,
            format('%s as %s: %s', v_job.schedule, v_job.username, ulak_private.cut(v_job.command, 60))
                || case when v_job.jobid is not null and not v_job.is_here then format(' (it ran on %s)', v_job.place) else '' end
        );
    end loop;
    for v_job in
        select j.jobid, j.jobname
        from ulak_private.jobs() j
        where (j.of_database = current_database() or j.of_database not in (select d.datname from pg_database d))
            and (j.jobname, j.username) not in (select w.jobname, w.username from ulak_private.wanted_jobs(p_workers) w)
        order by j.jobname
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

-- Jobs with the address of another server, and how many there are for each. Jobs of other databases count, too: a restore may have brought
-- them from a cluster that is still alive, where they would run.
create or replace function ulak_private.misplaced_jobs()
returns table (place text, jobs bigint)
language sql
stable
as $sql$
    select concat_ws(':', j.nodename, j.nodeport), count(*)
    from ulak_private.jobs() j
    where not ulak_private.has_background_workers()
        and (j.nodename, j.nodeport) is distinct from (current_setting('cron.host', true), current_setting('port')::integer)
    group by 1
$sql$;

-- Gives all jobs the address of this server: for start(), adopt(), and for maintenance if background workers or another scheduler run it.
create or replace function ulak_private.bring_jobs_here()
returns bigint
language plpgsql
as $plpgsql$
declare
    v_jobs bigint := 0;
begin
    if exists (select from ulak_private.misplaced_jobs()) then
        execute format(
            'update cron.job set nodename = $1, nodeport = $2 where %s is not null and (nodename, nodeport) is distinct from ($1, $2)',
            ulak_private.database_of_job()
        ) using current_setting('cron.host'), current_setting('port')::integer;
        get diagnostics v_jobs = row_count;
    end if;
    return v_jobs;
end
$plpgsql$;

-- DROP DATABASE waits until every process has answered a signal, and pg_cron 1.4 answers at the next full minute only. Notified of a change,
-- it reads its jobs and answers. (The update changes no row: the table's trigger fires for each statement.)
create or replace function ulak_private.wake_pg_cron()
returns void
language plpgsql
as $plpgsql$
begin
    if ulak_private.has_pg_cron() and exists (select from pg_stat_activity a where a.wait_event = 'ProcSignalBarrier') then
        execute 'update cron.job set active = active where false';
    end if;
end
$plpgsql$;
