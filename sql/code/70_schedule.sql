-- Scheduling: start() and stop() put the workers and the maintenance into pg_cron, or say what to run where it lives.

create or replace function ulak.start(p_workers integer default null)
returns table (item text, status text, detail text, fix text)
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_workers integer := coalesce(p_workers, ulak.setting('workers')::integer);
    v_is_ready boolean;
begin
    if v_workers not between 1 and 32 then
        raise exception 'the number of workers must be between 1 and 32'
            using errcode = '22023', detail = format('It is %s.', v_workers), hint = 'To have none: select * from ulak.stop();';
    end if;
    perform pg_advisory_xact_lock(hashtext('ulak_schedule'), 0);
    if ulak._let_worker_log_in() then
        -- The check below logs in as it, which works once this is committed.
        return query values ('role', 'done', 'ulak_worker may log in now, as pg_cron has to', 'select * from ulak.start();');
        return;
    end if;
    return query
    select c.item, c.status, c.detail, c.fix
    from ulak._check_schedule(v_workers) c;
    v_is_ready := not exists (select from ulak._check_schedule(v_workers) c where c.status = 'problem');

    if not v_is_ready then
        return query values (
            'schedule', 'not done', 'nothing was scheduled', 'Mend the problems above, then: select * from ulak.start();'
        );
    elsif to_regclass('cron.job') is not null then
        return query
        select s.item, s.status, s.detail, null::text
        from ulak._schedule_jobs(v_workers) s;
    else
        return query
        select
            'schedule',
            'to do',
            format('pg_cron lives in database "%s"', current_setting('cron.database_name')),
            format(
                'In database "%s", as a superuser: %s',
                current_setting('cron.database_name'),
                string_agg(ulak._schedule_command(j.jobname, j.command, j.username, j.database), ' ')
            )
        from ulak._wanted_jobs(v_workers) j;
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
    v_job record;
begin
    perform pg_advisory_xact_lock(hashtext('ulak_schedule'), 0);
    if to_regclass('cron.job') is not null then
        for v_job in execute 'select jobid, jobname::text from cron.job where database = $1 and jobname like $2 order by jobname'
            using current_database(), 'ulak %'
        loop
            execute 'select cron.unschedule($1::bigint)' using v_job.jobid;
            return query values (v_job.jobname, 'done', 'unscheduled', null::text);
        end loop;
    elsif current_setting('cron.database_name', true) is not null then
        return query values (
            'schedule',
            'to do',
            format('pg_cron lives in database "%s"', current_setting('cron.database_name')),
            format(
                'In database "%s", as a superuser: select cron.unschedule(jobid) from cron.job '
                'where database = %L and jobname like ''ulak %%'';',
                current_setting('cron.database_name'),
                current_database()
            )
        );
    end if;
    return query
    select w.name, 'done', 'asked to leave', null::text
    from ulak._ask_workers_to_leave(0) w;
end
$plpgsql$;

comment on function ulak.stop() is
    'takes the workers and the maintenance out of pg_cron and asks running workers to leave; messages stay in the queue';

create or replace function ulak._ask_workers_to_leave(p_above_slot integer)
returns table (name text)
language sql
set search_path = pg_catalog, pg_temp
as $sql$
    update ulak.workers w
    set stop_requested_at = clock_timestamp()
    where w.slot > p_above_slot and w.state = 'running'
    returning w.name
$sql$;

-- The jobs as they should be. Several databases may have their ulak in one pg_cron, so names carry the database's.
create or replace function ulak._wanted_jobs(p_workers integer)
returns table (jobname text, command text, username text, database text)
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select format('ulak worker %s in %s', n, current_database()), format('call ulak.run_worker(%s)', n), 'ulak_worker',
        current_database()::text
    from generate_series(1, p_workers) n
    union all
    select format('ulak maintenance in %s', current_database()), 'call ulak.run_maintenance()', 'ulak_worker',
        current_database()::text
    union all
    -- The table's owner: nobody else may VACUUM it.
    select format('ulak vacuum in %s', current_database()), ulak._vacuum_command(), c.relowner::regrole::text,
        current_database()::text
    from pg_class c
    where c.oid = 'ulak.queue'::regclass
    union all
    -- pg_cron logs each run of each job and never forgets.
    select format('ulak log in %s', current_database()),
        'delete from cron.job_run_details d using cron.job j where j.jobid = d.jobid and j.jobname like ''ulak %'' '
        'and d.end_time < now() - interval ''1 hour''',
        c.relowner::regrole::text,
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

-- Makes pg_cron's jobs equal to the wanted ones and touches nothing that is right already.
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
            execute 'select cron.unschedule(j.jobid) from cron.job j where j.jobname = $1 and j.database = $2'
                using v_job.jobname, v_job.database;
            execute ulak._schedule_command(v_job.jobname, v_job.command, v_job.username, v_job.database);
        end if;
        return query values (
            v_job.jobname,
            case when v_job.jobid is null then 'done' else 'unchanged' end,
            format('every minute as %s: %s', v_job.username, v_job.command)
        );
    end loop;
    for v_job in execute
        'select j.jobid, j.jobname::text from cron.job j where j.jobname like $1 and j.database = $2 '
        'and not exists (select from ulak._wanted_jobs($3) w where w.jobname = j.jobname) order by j.jobname'
        using 'ulak worker %', current_database(), p_workers
    loop
        execute 'select cron.unschedule($1::bigint)' using v_job.jobid;
        return query values (v_job.jobname, 'done', 'unscheduled');
    end loop;
    return query
    select w.name, 'done', 'asked to leave'
    from ulak._ask_workers_to_leave(p_workers) w;
end
$plpgsql$;

-- In its libpq mode pg_cron logs in as the role that a job runs as.
create or replace function ulak._let_worker_log_in()
returns boolean
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    if current_setting('cron.use_background_workers', true)::boolean is distinct from false
        or (select r.rolcanlogin from pg_roles r where r.rolname = 'ulak_worker')
    then
        return false;
    end if;
    alter role ulak_worker login;
    return true;
end
$plpgsql$;

-- What has to be right before anything is scheduled, as rows: ok, or a problem and its fix, which psql can run.
create or replace function ulak._check_schedule(p_workers integer)
returns table (item text, status text, detail text, fix text)
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_is_usable boolean := not exists (select from ulak._check_pg_cron(p_workers) c where c.item = 'pg_cron' and c.status = 'problem');
    v_user text;
begin
    return query
    select
        'pycurl',
        case when p.problem is null then 'ok' else 'problem' end,
        coalesce(p.problem, p.version),
        case when p.problem is not null then '-- as root on the server: apt-get install python3-pycurl' end
    from ulak._check_pycurl() p;

    return query
    select c.item, c.status, c.detail, c.fix
    from ulak._check_pg_cron(p_workers) c;

    if v_is_usable and not coalesce(current_setting('cron.use_background_workers', true)::boolean, false) then
        foreach v_user in array array['ulak_worker', (
            select c.relowner::regrole::text from pg_class c where c.oid = 'ulak.queue'::regclass
        )] loop
            return query
            select
                'login',
                case when p.problem is null then 'ok' else 'problem' end,
                coalesce(p.problem, format('%s can log in', v_user)),
                case when p.problem is not null then
                    format(
                        'select pg_reload_conf(); -- after adding a line to %s, such as: %s %s %s trust; or put its password '
                        'into ~/.pgpass of the server''s user',
                        current_setting('hba_file'),
                        case when current_setting('cron.host') ~ '^(/|$)' then 'local' else 'host' end,
                        current_database(),
                        v_user || case when current_setting('cron.host') ~ '^(/|$)' then '' else ' 127.0.0.1/32' end
                    )
                end
            from (select ulak._login_problem(v_user, current_database()) as problem) p;
        end loop;
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

-- The part that needs no Python: is pg_cron there, does it run, and in a mode that suits us.
create or replace function ulak._check_pg_cron(p_workers integer)
returns table (item text, status text, detail text, fix text)
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_home text := current_setting('cron.database_name', true);
    v_version text := (select substring(e.extversion from '^\d+\.\d+') from pg_extension e where e.extname = 'pg_cron');
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

    if current_setting('cron.max_running_jobs')::integer < v_needed then
        return query values (
            'max_running_jobs',
            'problem',
            format('%s workers and 3 other jobs need %s, it is %s', p_workers, v_needed,
                current_setting('cron.max_running_jobs')),
            format('alter system set cron.max_running_jobs = %s; -- then restart the server', v_needed)
        );
    end if;
end
$plpgsql$;

create or replace function ulak._check_pycurl(out version text, out problem text)
language plpython3u
as $python$
    try:
        import pycurl
    except ImportError as error:
        return {"version": None, "problem": f"Python of the server has no pycurl: {error}"}
    return {"version": pycurl.version.split(" ")[0] + " " + pycurl.version.split(" ")[1], "problem": None}
$python$;

-- Tries what pg_cron will do.
create or replace function ulak._login_problem(p_user text, p_database text)
returns text
language plpython3u
as $python$
    plpy.execute("select ulak._load_python()")
    from ulak import login

    setting = plpy.prepare("select current_setting($1, true) as value", ["text"])

    def current(name):
        return plpy.execute(setting, [name])[0]["value"] or ""

    host = current("cron.host") or current("unix_socket_directories").split(",")[0].strip()
    return login.problem(
        {"host": host, "port": current("port"), "dbname": p_database, "user": p_user, "connect_timeout": "5"}
    )
$python$;
