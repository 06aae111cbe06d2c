-- The jobs of pg_cron: which ones there should be, and how they are made so, here or where pg_cron lives.

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

-- The SQL that tells which database's ulak a job of cron.job belongs to; null: it isn't ulak's.
create or replace function ulak_private.database_of_job()
returns text
language sql
immutable
set search_path = pg_catalog, pg_temp
as $sql$
    select format('substring(jobname from %L)', E'^ulak (?:worker \\d+|watcher|reboot|maintenance|vacuum|log|recurring [A-Za-z0-9._-]+) in (.*)$')
$sql$;

-- pg_cron's jobs that are ulak's; none where pg_cron lives in another database. Those of other databases are among them.
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
set search_path = pg_catalog, pg_temp
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
set search_path = pg_catalog, pg_temp
as $sql$
    select 'ulak_worker'
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

-- The SQL to run where pg_cron lives, to make its jobs equal to the wanted ones; for null, to remove them, but for recurring messages.
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
            -- Also where default_transaction_read_only is on, which a function would find too late.
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
set search_path = pg_catalog, pg_temp
as $sql$
    select format(
        'select cron.schedule_in_database(%L, %L, %L, %L, %L);', p_jobname, p_schedule, p_command, p_database, p_username
    )
$sql$;

-- A job remembers the address of the server that it was made on: one that was promoted or restored elsewhere is put right.
create or replace function ulak_private.put_job(
    p_jobid bigint, p_jobname text, p_schedule text, p_command text, p_username text, p_database text
)
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
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

-- Makes pg_cron's jobs equal to the wanted ones. pg_cron reads its jobs when it is told of a change, and version 1.4 was seen to miss that
-- while much else changed in the catalog. So jobs that are right already are written as well, and a second start() reaches it. Jobs of a
-- database that isn't in this cluster go, too: a restore brought them, or it was dropped.
create or replace function ulak_private.schedule_jobs(p_workers integer)
returns table (item text, status text, detail text)
language plpgsql
set search_path = pg_catalog, pg_temp
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

-- Where jobs run that are not on this server, and how many: pg_cron goes by an address of its own for each. Those of other
-- databases count, too: a restore may have brought them from a cluster that is still alive, and they would run there.
create or replace function ulak_private.misplaced_jobs()
returns table (place text, jobs bigint)
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select concat_ws(':', j.nodename, j.nodeport), count(*)
    from ulak_private.jobs() j
    where not ulak_private.has_background_workers()
        and (j.nodename, j.nodeport) is distinct from (current_setting('cron.host', true), current_setting('port')::integer)
    group by 1
$sql$;

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
            'update cron.job set nodename = $1, nodeport = $2 where %s is not null and (nodename, nodeport) is distinct from ($1, $2)',
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
