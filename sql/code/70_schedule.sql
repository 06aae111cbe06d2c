-- Scheduling: start() and stop() put the workers and the maintenance into pg_cron, or say what to run where it lives.

create or replace function ulak.start(p_workers integer default null)
returns table (item text, status text, detail text, fix text)
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_workers integer := coalesce(p_workers, ulak.setting('workers')::integer);
    v_checks jsonb;
begin
    if v_workers not between 1 and 32 then
        raise exception 'the number of workers must be between 1 and 32'
            using errcode = '22023', detail = format('It is %s.', v_workers), hint = 'To have none: select * from ulak.stop();';
    end if;
    perform ulak._lock('schedule');
    v_checks := (select jsonb_agg(to_jsonb(c)) from ulak._check_schedule(v_workers) c);
    return query
    select c.item, c.status, c.detail, c.fix
    from jsonb_to_recordset(v_checks) c(item text, status text, detail text, fix text);

    if v_checks @> '[{"status": "problem"}]' then
        return query values (
            'schedule', 'not done', 'nothing was scheduled', 'select * from ulak.start(); -- after mending the problems above'
        );
    elsif ulak._has_pg_cron() then
        return query
        select s.item, s.status, s.detail, null::text
        from ulak._schedule_jobs(v_workers) s;
    else
        return query
        select
            'schedule',
            'to do',
            format('pg_cron lives in database "%s", where a superuser has to run this', current_setting('cron.database_name')),
            concat_ws(
                E'\n',
                format(E'\\connect %I', current_setting('cron.database_name')),
                ulak._unschedule_command(),
                string_agg(ulak._schedule_command(j.jobname, j.command, j.username, j.database), E'\n')
            )
        from ulak._wanted_jobs(v_workers) j;
        return query
        select w.name, 'done', 'asked to leave', null::text
        from ulak._limit_workers(v_workers) w;
    end if;
end
$plpgsql$;

comment on function ulak.start(integer) is
    'has pg_cron run the workers and the maintenance; returns what it did and what is wrong, each with its fix. '
    'Repeating it changes nothing, another number rescales';

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
    perform ulak._lock('schedule');
    if ulak._has_pg_cron() then
        for v_id, v_name in execute format('select jobid, jobname::text from cron.job where %s order by jobname', ulak._is_our_job())
        loop
            execute 'select cron.unschedule($1::bigint)' using v_id;
            return query values (v_name, 'done', 'unscheduled', null::text);
        end loop;
    elsif current_setting('cron.database_name', true) is not null then
        return query values (
            'schedule',
            'to do',
            format('pg_cron lives in database "%s", where a superuser has to run this', current_setting('cron.database_name')),
            format(E'\\connect %I', current_setting('cron.database_name')) || E'\n' || ulak._unschedule_command()
        );
    end if;
    return query
    select w.name, 'done', 'asked to leave', null::text
    from ulak._limit_workers(0) w;
end
$plpgsql$;

comment on function ulak.stop() is
    'takes the workers and the maintenance out of pg_cron and asks running workers to leave; messages stay in the queue';

-- Asks the workers of other slots to leave, and notes it for those that pg_cron is just starting.
create or replace function ulak._limit_workers(p_workers integer)
returns table (name text)
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    insert into ulak.schedule (workers)
    values (p_workers)
    on conflict (is_only) do update
    set workers = excluded.workers, changed_at = excluded.changed_at;

    return query
    update ulak.workers w
    set stop_requested_at = clock_timestamp()
    where w.slot > p_workers and w.state = 'running'
    returning w.name;
    perform ulak._ring();
end
$plpgsql$;

-- Asks for the extension, not for its schema: anybody may make a schema of that name, and what is in it would run with
-- our rights.
create or replace function ulak._has_pg_cron()
returns boolean
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select exists (select from pg_extension e where e.extname = 'pg_cron')
$sql$;

-- Several databases may have their ulak in one pg_cron, so the names of jobs carry the database's.
create or replace function ulak._job_name(p_what text)
returns text
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select format('ulak %s in %s', p_what, current_database())
$sql$;

-- What a job of cron.job is recognised by, as a condition in SQL.
create or replace function ulak._is_our_job()
returns text
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select format(
        'substring(jobname from %L) = %L', E'^ulak (?:worker \\d+|maintenance|vacuum|log) in (.*)$', current_database()
    )
$sql$;

-- The jobs as they should be.
create or replace function ulak._wanted_jobs(p_workers integer)
returns table (jobname text, command text, username text, database text)
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select ulak._job_name('worker ' || n), format('call ulak.run_worker(%s)', n), 'ulak_worker', current_database()::text
    from generate_series(1, p_workers) n
    union all
    select ulak._job_name('maintenance'), 'call ulak.run_maintenance()', 'ulak_worker', current_database()::text
    union all
    -- The table's owner: nobody else may VACUUM it.
    select ulak._job_name('vacuum'), ulak._vacuum_command(), pg_get_userbyid(c.relowner), current_database()::text
    from pg_class c
    where c.oid = 'ulak.queue'::regclass
    union all
    -- pg_cron logs each run of each job and never forgets. Runs that failed to start have no time, but their number.
    select
        ulak._job_name('log'),
        format(
            'delete from cron.job_run_details d where (d.jobid in (select jobid from cron.job where %s) '
            'or starts_with(d.command, ''call ulak.run_'') and d.jobid not in (select jobid from cron.job)) '
            'and d.runid < (select max(r.runid) from cron.job_run_details r where r.start_time < now() - interval ''1 hour'')',
            ulak._is_our_job()
        ),
        pg_get_userbyid(c.relowner),
        current_setting('cron.database_name', true)
    from pg_class c
    where c.oid = 'ulak.queue'::regclass
$sql$;

create or replace function ulak._schedule_command(p_jobname text, p_command text, p_username text, p_database text)
returns text
language sql
immutable
set search_path = pg_catalog, pg_temp
as $sql$
    select format(
        'select cron.schedule_in_database(%L, ''* * * * *'', %L, %L, %L);', p_jobname, p_command, p_database, p_username
    )
$sql$;

create or replace function ulak._unschedule_command()
returns text
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select format('select cron.unschedule(jobid) from cron.job where %s;', ulak._is_our_job())
$sql$;

-- Makes pg_cron's jobs equal to the wanted ones. It reads them when it is told of a change, and version 1.4 was seen to
-- miss that while much else changed in the catalog. So jobs that are right already are written as well, and a second
-- start() reaches it.
create or replace function ulak._schedule_jobs(p_workers integer)
returns table (item text, status text, detail text)
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_job record;
begin
    for v_job in execute
        'select j.jobid, w.* from ulak._wanted_jobs($1) w left join cron.job j on j.jobname = w.jobname '
        'and j.command = w.command and j.username = w.username and j.database = w.database and j.active '
        'order by w.jobname'
        using p_workers
    loop
        if v_job.jobid is null then
            execute 'select cron.unschedule(j.jobid) from cron.job j where j.jobname = $1' using v_job.jobname;
            execute ulak._schedule_command(v_job.jobname, v_job.command, v_job.username, v_job.database);
        else
            execute 'select cron.alter_job($1::bigint, active => true)' using v_job.jobid;
        end if;
        return query values (
            v_job.jobname,
            case when v_job.jobid is null then 'done' else 'unchanged' end,
            format('every minute as %s: %s', v_job.username, v_job.command)
        );
    end loop;
    for v_job in execute format(
        'select jobid, jobname::text from cron.job where %s and jobname not in (select w.jobname from ulak._wanted_jobs($1) w) '
        'order by jobname',
        ulak._is_our_job()
    ) using p_workers
    loop
        execute 'select cron.unschedule($1::bigint)' using v_job.jobid;
        return query values (v_job.jobname, 'done', 'unscheduled');
    end loop;
    return query
    select w.name, 'done', 'asked to leave'
    from ulak._limit_workers(p_workers) w;
end
$plpgsql$;

-- What has to be right before anything is scheduled, as rows: ok, or a problem and its fix, which psql can run.
create or replace function ulak._check_schedule(p_workers integer)
returns table (item text, status text, detail text, fix text)
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_is_usable boolean := not exists (
        select from ulak._check_pg_cron(p_workers) c where c.item = 'pg_cron' and c.status = 'problem'
    );
begin
    return query
    select c.item, c.status, c.detail, c.fix
    from ulak._check_python() c;
    return query
    select c.item, c.status, c.detail, c.fix
    from ulak._check_pg_cron(p_workers) c;
    if v_is_usable and not coalesce(current_setting('cron.use_background_workers', true)::boolean, false) then
        return query
        select c.item, c.status, c.detail, c.fix
        from pg_class q
        cross join lateral (values ('ulak_worker'), (pg_get_userbyid(q.relowner))) u(name)
        cross join lateral ulak._check_login(u.name) c
        where q.oid = 'ulak.queue'::regclass;
    end if;
    if not ulak._is_adopted() then
        return query values (
            'cluster',
            'warning',
            'these messages were restored from another cluster: they are held',
            'select ulak.adopt(); -- if this cluster is to deliver them'
        );
    end if;
end
$plpgsql$;

create or replace function ulak._check_python()
returns table (item text, status text, detail text, fix text)
language plpython3u
as $python$
    import sys

    yield "plpython3u", "ok", "Python " + sys.version.split()[0], None
    try:
        import pycurl
    except ImportError as error:
        yield "pycurl", "problem", str(error), "-- as root on the server: apt-get install python3-pycurl"
    else:
        yield "pycurl", "ok", " ".join(pycurl.version.split()[:2]), None
$python$;

-- In its libpq mode pg_cron logs in as the role that a job runs as. This does the same.
create or replace function ulak._check_login(p_user text)
returns table (item text, status text, detail text, fix text)
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_is_local boolean := current_setting('cron.host') ~ '^(/|$)';
    v_answer jsonb := ulak._log_in(p_user, current_database())::jsonb;
begin
    if v_answer ? 'problem' then
        return query values (
            'login',
            'problem',
            v_answer ->> 'problem',
            case
                when (select r.rolcanlogin from pg_roles r where r.rolname = p_user) then format(
                    'select pg_reload_conf(); -- after adding a line to %s, such as: %s %I %I%s trust; or put its password '
                    'into ~/.pgpass of the server''s user',
                    current_setting('hba_file'),
                    case when v_is_local then 'local' else 'host' end,
                    current_database(),
                    p_user,
                    case when v_is_local then '' else ' 127.0.0.1/32' end
                )
                else format('alter role %I login;', p_user)
            end
        );
        return;
    end if;
    return query values ('login', 'ok', format('%s can log in', p_user), null::text);
    -- A run takes a minute, and longer if a receiver does.
    if p_user = 'ulak_worker' and (v_answer -> 'statement_timeout')::integer between 1 and 599999 then
        return query values (
            'statement_timeout',
            'problem',
            format('it would end a worker''s run after %s s', round((v_answer -> 'statement_timeout')::numeric / 1000, 1)),
            format('alter role %I in database %I set statement_timeout = 0;', p_user, current_database())
        );
    end if;
end
$plpgsql$;

create or replace function ulak._log_in(p_user text, p_database text)
returns text
language plpython3u
as $python$
    import json

    plpy.execute("select ulak._load_python()")
    from ulak import login

    setting = plpy.prepare("select current_setting($1, true) as value", ["text"])

    def current(name):
        return plpy.execute(setting, [name])[0]["value"] or ""

    host = current("cron.host") or current("unix_socket_directories").split(",")[0].strip()
    parameters = {"host": host, "port": current("port"), "dbname": p_database, "user": p_user, "connect_timeout": "5"}
    try:
        timeout = login.ask(parameters, "select setting from pg_catalog.pg_settings where name = 'statement_timeout'")
        return json.dumps({"statement_timeout": int(timeout)})
    except login.LoginError as error:
        return json.dumps({"problem": str(error)})
$python$;

-- The part that needs no Python: is pg_cron there, does it run, and in a mode that suits us.
create or replace function ulak._check_pg_cron(p_workers integer)
returns table (item text, status text, detail text, fix text)
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    -- Anybody may set a parameter of this name where pg_cron isn't loaded.
    v_home text := case
        when current_setting('shared_preload_libraries') ~ E'\\mpg_cron\\M' then current_setting('cron.database_name', true)
    end;
    v_version text := (select substring(e.extversion from E'^\\d+\\.\\d+') from pg_extension e where e.extname = 'pg_cron');
    v_libpq boolean := not coalesce(current_setting('cron.use_background_workers', true)::boolean, false);
    v_needed integer := p_workers + 3;
begin
    if v_home is null then
        return query values (
            'pg_cron',
            'problem',
            'it is not loaded',
            format(
                'alter system set shared_preload_libraries = %s; -- after installing postgresql-%s-cron; then restart the server. '
                'Or let another scheduler run each minute: call ulak.run_worker(); call ulak.run_maintenance();',
                (
                    select string_agg(quote_literal(btrim(l.name)), ', ' order by l.place)
                    from unnest(
                        string_to_array(nullif(current_setting('shared_preload_libraries'), ''), ',') || 'pg_cron'::text
                    ) with ordinality l (name, place)
                ),
                current_setting('server_version_num')::integer / 10000
            )
        );
        return;
    elsif v_home = current_database() and v_version is null then
        return query values ('pg_cron', 'problem', 'it is loaded, but not created', 'create extension pg_cron;');
        return;
    elsif string_to_array(v_version, '.')::integer[] < array[1, 4] then
        return query values (
            'pg_cron',
            'problem',
            format('version %s is older than 1.4', v_version),
            'alter extension pg_cron update; -- after installing a newer one'
        );
        return;
    end if;
    if not exists (select from pg_stat_activity a where a.backend_type = 'pg_cron launcher') then
        return query values (
            'pg_cron',
            'problem',
            'its scheduler is not running',
            '-- restart the server. Its log says why "pg_cron" stopped: it does so when its database is dropped'
        );
        return;
    end if;
    return query values ('pg_cron', 'ok', coalesce('version ' || v_version, format('in database "%s"', v_home)), null::text);

    if not v_libpq and string_to_array(coalesce(v_version, '1.4'), '.')::integer[] < array[1, 5] then
        return query values (
            'mode',
            'problem',
            'pg_cron 1.4 makes every job wait for the longest one when cron.use_background_workers is on',
            'alter system set cron.use_background_workers = off; -- then restart the server'
        );
    else
        return query values ('mode', 'ok', case when v_libpq then 'libpq' else 'background workers' end, null::text);
    end if;

    -- Beside the jobs there are pg_cron's own process and that of logical replication.
    if not v_libpq and current_setting('max_worker_processes')::integer < v_needed + 2 then
        return query values (
            'max_worker_processes',
            'problem',
            format('%s jobs and 2 other processes need %s, it is %s', v_needed, v_needed + 2, current_setting('max_worker_processes')),
            format('alter system set max_worker_processes = %s; -- then restart the server', v_needed + 2)
        );
    end if;
    -- What it may be depends on the above: one after the other.
    if current_setting('cron.max_running_jobs')::integer < v_needed
        and (select s.max_val::integer from pg_settings s where s.name = 'cron.max_running_jobs') >= v_needed
    then
        return query values (
            'max_running_jobs',
            'problem',
            format('%s workers and 3 other jobs need %s, it is %s', p_workers, v_needed,
                current_setting('cron.max_running_jobs')),
            format('alter system set cron.max_running_jobs = %s; -- then restart the server', v_needed)
        );
    end if;
    if not current_setting('cron.launch_active_jobs', true)::boolean then
        return query values (
            'launch_active_jobs',
            'problem',
            'pg_cron is told to start no job',
            'alter system set cron.launch_active_jobs = on; select pg_reload_conf();'
        );
    end if;
end
$plpgsql$;
