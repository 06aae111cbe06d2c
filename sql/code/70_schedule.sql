-- Scheduling: start() and stop() put the workers and the maintenance into pg_cron, or say what to run where it lives.

create or replace function ulak.start(p_workers integer default null)
returns table (item text, status text, detail text, fix text)
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_workers integer := coalesce(p_workers, ulak._default_workers());
    v_checks jsonb;
    v_is_watched boolean;
begin
    if v_workers not between 0 and 32 then
        raise exception 'the number of workers must be between 0 and 32'
            using errcode = '22023', detail = format('It is %s.', v_workers), hint = 'To stop delivery: select * from ulak.stop();';
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
        v_is_watched := v_workers = 0 or ulak._has_seconds() or ulak._launch_watcher();
        return query
        select
            'workers',
            'ok',
            case
                when v_workers = 0 then 'none in the database: delivery is left to nodes'
                else format(
                    '%s: %s begin %s',
                    ulak._counted(v_workers, 'worker'),
                    case when ulak._count_alive(clock_timestamp()) > 0 then 'those that are missing' else 'they' end,
                    case when v_is_watched then 'within a few seconds after this transaction commits' else b.starts end
                )
            end,
            null::text
        from ulak._workers_begin(clock_timestamp()) b;
    else
        return query
        select
            'schedule',
            'to do',
            ulak._elsewhere(),
            concat_ws(
                E'\n',
                format(E'\\connect %I', current_setting('cron.database_name')),
                ulak._unschedule_command(),
                string_agg(ulak._schedule_command(j.jobname, j.schedule, j.command, j.username, j.database), E'\n'),
                case
                    when v_workers > 0 and not ulak._has_seconds()
                        then format(E'\\connect %I\nselect ulak._launch_watcher();', current_database())
                end
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
    perform ulak._lock('schedule');
    perform ulak._wait_for_workers_to_leave();
    if ulak._has_pg_cron() then
        for v_id, v_name in execute format(
            'select jobid, jobname::text from cron.job where %s and not (%s) is true order by jobname',
            ulak._is_our_job(),
            ulak._is_recurring_job()
        )
        loop
            execute 'select cron.unschedule($1::bigint)' using v_id;
            return query values (v_name, 'done', 'unscheduled', null::text);
        end loop;
    elsif current_setting('cron.database_name', true) is not null then
        return query values (
            'schedule',
            'to do',
            ulak._elsewhere(),
            format(E'\\connect %I', current_setting('cron.database_name')) || E'\n' || format(
                'select cron.unschedule(jobid) from cron.job where %s and not (%s) is true;',
                ulak._is_our_job(),
                ulak._is_recurring_job()
            )
        );
    end if;
    return query
    select w.name, 'done', case when w.is_node then 'asked to wait for start()' else 'asked to leave' end, null::text
    from ulak._limit_workers(0, true) w;
end
$plpgsql$;

comment on function ulak.stop() is
    'takes the workers and the maintenance out of pg_cron, asks running workers to leave and nodes to wait for start(); messages stay in '
    'the queue, and what schedule() began goes on sending';

-- pg_cron ends the run of a job that is unscheduled where a background worker runs it: in the midst of its deliveries. So the
-- workers leave first. They can't see what this transaction has written, but that it holds this lock.
create or replace function ulak._wait_for_workers_to_leave()
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    if not ulak._has_background_workers() then
        return;
    end if;
    lock table ulak.schedule in exclusive mode;
    for v_look in 1..100 loop
        exit when not exists (select from ulak.workers w where w.is_scheduled and ulak._is_taken(w));
        perform pg_sleep(0.05), pg_stat_clear_snapshot();
    end loop;
end
$plpgsql$;

create or replace function ulak._is_stopping()
returns boolean
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    return ulak._has_background_workers() and exists (
        select
        from pg_locks l
        join pg_database d on d.oid = l.database and d.datname = current_database()
        where l.locktype = 'relation'
            and l.relation = 'ulak.schedule'::regclass
            and l.mode = 'ExclusiveLock'
            and l.granted
    );
end
$plpgsql$;

create or replace function ulak._has_background_workers()
returns boolean
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select coalesce(current_setting('cron.use_background_workers', true)::boolean, false)
$sql$;

-- Asks the workers of other slots to leave, and notes it for those that pg_cron is just starting. Nodes are not counted: they leave
-- when everything stops.
create or replace function ulak._limit_workers(p_workers integer, p_is_stop boolean default false)
returns table (name text, is_node boolean)
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    insert into ulak.schedule (workers, is_stopped)
    values (p_workers, p_is_stop)
    on conflict (is_only) do update
    set workers = excluded.workers, changed_at = excluded.changed_at, is_stopped = excluded.is_stopped;

    return query
    update ulak.workers w
    set stop_requested_at = clock_timestamp()
    where w.slot > p_workers and w.state = 'running' and (w.host is null or p_is_stop)
    returning w.name, w.host is not null;
    perform ulak._wake_workers();
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
    select format('%s = %L', ulak._database_of_job(), current_database())
$sql$;

-- Jobs of a database that isn't in this cluster: a restore brought them, or it was dropped.
create or replace function ulak._is_stray_job()
returns text
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select format('%s not in (select datname from pg_catalog.pg_database)', ulak._database_of_job())
$sql$;

create or replace function ulak._database_of_job()
returns text
language sql
immutable
set search_path = pg_catalog, pg_temp
as $sql$
    select format('substring(jobname from %L)', E'^ulak (?:worker \\d+|watcher|reboot|maintenance|vacuum|log|recurring [A-Za-z0-9._-]+) in (.*)$')
$sql$;

create or replace function ulak._default_workers()
returns integer
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select ulak.setting('workers')::integer
$sql$;

-- Whom the jobs run as that need no rights of the owner.
create or replace function ulak._job_role()
returns text
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select 'ulak_worker'
$sql$;

-- Who can do what can't be done from here.
create or replace function ulak._elsewhere()
returns text
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select format('pg_cron lives in database "%s", where a superuser has to run this', current_setting('cron.database_name', true))
$sql$;

-- How a parameter of the server is set.
create or replace function ulak._server_fix(p_name text, p_value text, p_then text default 'then restart the server')
returns text
language sql
immutable
set search_path = pg_catalog, pg_temp
as $sql$
    select format('alter system set %s = %s; -- %s', p_name, p_value, p_then)
$sql$;

-- Of the extension, or of the library where it lives in another database.
create or replace function ulak._pg_cron_version()
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
create or replace function ulak._has_seconds()
returns boolean
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select coalesce(string_to_array(ulak._pg_cron_version(), '.')::integer[] >= array[1, 5], false)
$sql$;

-- The jobs as they should be. Each is the call of one routine that pins its search_path, or a text that none can bend.
create or replace function ulak._wanted_jobs(p_workers integer)
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
            case when ulak._has_seconds() then '2 seconds' else '* * * * *' end,
            format('call ulak.run_worker(%s, p_is_scheduled => true)', n),
            false,
            current_database()
        from generate_series(1, p_workers) n
        union all
        select w.what, w.schedule, 'call ulak._watch_workers()', false, current_database()
        from (values ('watcher', '* * * * *'), ('reboot', '@reboot')) w(what, schedule)
        where p_workers > 0 and not ulak._has_seconds()
        union all
        select 'maintenance', '* * * * *', 'call ulak.run_maintenance()', false, current_database()
        union all
        -- Nobody else may VACUUM a table.
        select 'vacuum', '* * * * *', ulak._vacuum_command(), true, current_database()
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
                ulak._is_our_job()
            ),
            true,
            current_setting('cron.database_name', true)
    )
    select
        ulak._job_name(j.what),
        j.schedule,
        j.command,
        case when j.is_owners then pg_get_userbyid(c.relowner) else ulak._job_role() end,
        j.database,
        current_setting('cron.host', true),
        current_setting('port')::integer
    from job j
    cross join pg_class c
    where c.oid = 'ulak.queue'::regclass
    union all
    select r.jobname, r.schedule, r.command, r.username, r.database, current_setting('cron.host', true), current_setting('port')::integer
    from ulak._recurring_jobs() r
$sql$;

create or replace function ulak._schedule_command(
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

create or replace function ulak._unschedule_command()
returns text
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select format('select cron.unschedule(jobid) from cron.job where %s;', ulak._is_our_job())
$sql$;

-- Makes pg_cron's jobs equal to the wanted ones. A job remembers the address of the server that it was made on: one that was
-- promoted or restored elsewhere is put right. pg_cron reads its jobs when it is told of a change, and version 1.4 was seen to
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
        'select j.jobid, w.*, (j.schedule, j.command, j.database, j.active) '
        'is not distinct from (w.schedule, w.command, w.database, true) as is_right, '
        '(j.nodename, j.nodeport) is not distinct from (w.nodename, w.nodeport) as is_here, '
        'concat_ws('':'', j.nodename, j.nodeport) as place '
        'from ulak._wanted_jobs($1) w left join cron.job j on j.jobname = w.jobname and j.username = w.username '
        'order by w.jobname'
        using p_workers
    loop
        if v_job.jobid is null then
            execute ulak._schedule_command(v_job.jobname, v_job.schedule, v_job.command, v_job.username, v_job.database);
        else
            execute 'update cron.job set schedule = $2, command = $3, database = $4, nodename = $5, nodeport = $6, active = true '
                'where jobid = $1'
                using v_job.jobid, v_job.schedule, v_job.command, v_job.database, v_job.nodename, v_job.nodeport;
        end if;
        return query values (
            v_job.jobname,
            case when v_job.is_right and v_job.is_here then 'unchanged' else 'done' end,
            format('%s as %s: %s', v_job.schedule, v_job.username, v_job.command)
                || case when v_job.jobid is not null and not v_job.is_here then format(' (it ran on %s)', v_job.place) else '' end
        );
    end loop;
    for v_job in execute format(
        'select jobid, jobname::text from cron.job where (%s or %s) and (jobname, username) not in '
        '(select w.jobname, w.username from ulak._wanted_jobs($1) w) order by jobname',
        ulak._is_our_job(),
        ulak._is_stray_job()
    ) using p_workers
    loop
        perform ulak._wait_for_workers_to_leave();
        execute 'select cron.unschedule($1::bigint)' using v_job.jobid;
        return query values (v_job.jobname, 'done', 'unscheduled');
    end loop;
    perform ulak._bring_jobs_here();
    return query
    select w.name, 'done', 'asked to leave'
    from ulak._limit_workers(p_workers) w;
end
$plpgsql$;

-- Where jobs run that are not on this server, and how many: pg_cron goes by an address of its own for each. Those of other
-- databases count, too: a restore may have brought them from a cluster that is still alive, and they would run there.
create or replace function ulak._misplaced_jobs()
returns table (place text, jobs bigint)
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    if ulak._has_pg_cron() and not ulak._has_background_workers() then
        return query execute format(
            'select concat_ws('':'', j.nodename, j.nodeport), count(*) from cron.job j '
            'where %s is not null and (j.nodename, j.nodeport) is distinct from ($1, $2) group by 1',
            ulak._database_of_job()
        ) using current_setting('cron.host', true), current_setting('port')::integer;
    end if;
end
$plpgsql$;

-- For start(), adopt(), and for maintenance: it comes here where another scheduler than pg_cron runs it, or background workers did.
create or replace function ulak._bring_jobs_here()
returns bigint
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_jobs bigint := 0;
begin
    if exists (select from ulak._misplaced_jobs()) then
        execute format(
            'update cron.job j set nodename = $1, nodeport = $2 '
            'where %s is not null and (j.nodename, j.nodeport) is distinct from ($1, $2)',
            ulak._database_of_job()
        ) using current_setting('cron.host'), current_setting('port')::integer;
        get diagnostics v_jobs = row_count;
    end if;
    return v_jobs;
end
$plpgsql$;

-- Who drops a database waits until every process has answered, and pg_cron 1.4 answers only when it has something to do: at
-- the next full minute. Told that its jobs have changed, it reads them and answers. (No row is touched: the table's trigger
-- is for each statement.)
create or replace function ulak._wake_pg_cron()
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    if ulak._has_pg_cron() and exists (select from pg_stat_activity a where a.wait_event = 'ProcSignalBarrier') then
        execute 'update cron.job set active = active where false';
    end if;
end
$plpgsql$;

-- Starts the watcher now instead of at the next minute, unless there is one. False if it could not be done.
create or replace function ulak._launch_watcher()
returns boolean
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_error text;
begin
    if not exists (select from ulak._watchers()) then
        v_error := ulak._launch();
        if v_error is not null then
            raise warning 'workers start at the next full minute: %', v_error;
        end if;
    end if;
    return v_error is null;
end
$plpgsql$;

create or replace function ulak._launch()
returns text
language plpython3u
as $python$
    plpy.execute("select ulak._load_python()")
    from ulak import entry_points

    return entry_points.launch_watcher()
$python$;

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
    -- A node has its own.
    if p_workers > 0 then
        return query
        select c.item, c.status, c.detail, c.fix
        from ulak._check_python() c;
        return query
        select
            m.package,
            'warning',
            format('it is not installed on this server; needed for %s of protocol %s', ulak._counted(m.endpoints, 'endpoint'), m.protocol),
            format('-- as root on the server: apt-get install %s', m.package)
        from ulak._missing_clients() m;
    end if;
    return query
    select c.item, c.status, c.detail, c.fix
    from ulak._check_pg_cron(p_workers) c;
    if v_is_usable and not ulak._has_background_workers() then
        return query
        select c.item, c.status, c.detail, c.fix
        from pg_class q
        cross join lateral (values ('ulak_worker'), (pg_get_userbyid(q.relowner))) u(name)
        cross join lateral ulak._check_login(u.name) c
        where q.oid = 'ulak.queue'::regclass;
    end if;
    return query
    select c.item, c.status, c.detail, c.fix
    from ulak._check_adopted() c;
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
    v_answer jsonb := ulak._log_in(p_user)::jsonb;
    v_timeout numeric;
begin
    if v_answer ? 'problem' then
        return query values (
            'login',
            'problem',
            concat_ws('; ', v_answer ->> 'problem', ulak._login_rule(p_user)),
            ulak._login_fix(p_user)
        );
        return;
    end if;
    return query values ('login', 'ok', format('%s can log in', p_user), null::text);
    -- A run takes a minute, and longer if a receiver does.
    v_timeout := extract(epoch from (v_answer ->> 'statement_timeout')::interval);
    if p_user = 'ulak_worker' and v_timeout > 0 and v_timeout < 600 then
        return query values (
            'statement_timeout',
            'problem',
            format('it would end a worker''s run after %s s', round(v_timeout, 1)),
            format('alter role %I in database %I set statement_timeout = 0;', p_user, current_database())
        );
    end if;
end
$plpgsql$;

-- Which line of pg_hba.conf decides about a role, as the file is now, and what its map lacks.
create or replace function ulak._login_rule(p_user text)
returns text
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select concat_ws(
        '; ',
        format('line %s of %s decides: %s', r.line_number, current_setting('hba_file'), r.line),
        case
            when r.auth_method = 'peer' and r.map is null and p_user <> ulak._system_user()
                then format('it has no map that lets %s in as %s', ulak._system_user(), p_user)
            when r.auth_method = 'peer' and not exists (
                select
                from pg_ident_file_mappings m
                where m.map_name = r.map
                    and m.error is null
                    and m.sys_name = ulak._system_user()
                    and m.pg_username in (p_user, 'all')
            ) and r.map is not null
                then format(
                    'map "%s" in %s has no line that lets %s in as %s',
                    r.map, current_setting('ident_file'), ulak._system_user(), p_user
                )
        end
    )
    from (
        select
            h.line_number,
            h.auth_method,
            concat_ws(' ', h.type, array_to_string(h.database, ','), array_to_string(h.user_name, ','), h.address, h.auth_method,
                array_to_string(h.options, ' ')) as line,
            (select substring(o from '^map=(.*)$') from unnest(h.options) o where o like 'map=%') as map
        from pg_hba_file_rules h
        where h.error is null
            and (h.type = 'local') = (select p.host ~ '^/' from ulak._login_parameters() p)
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
    ) r
$sql$;

-- What lets a role in without letting in others: by the operating system's user over a socket, else by a password.
create or replace function ulak._login_fix(p_user text)
returns text
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_is_local boolean := (select p.host ~ '^/' from ulak._login_parameters() p);
    v_system_user text := ulak._system_user();
begin
    if not (select r.rolcanlogin from pg_roles r where r.rolname = p_user) then
        return format('alter role %I login;', p_user);
    elsif v_is_local then
        return format(
            'select pg_reload_conf(); -- after adding to %s, above any other line for it (such as "local all all peer"): '
            '"local %s %s peer map=ulak"; and to %s: "ulak %s %s"',
            current_setting('hba_file'), quote_ident(current_database()), quote_ident(p_user),
            current_setting('ident_file'), v_system_user, quote_ident(p_user)
        );
    end if;
    return format(
        'alter role %1$I password ''...''; -- and put %2$s:%3$s:%4$s:%1$s:... into ~/.pgpass of the operating system''s user %5$s '
        '(mode 0600). Or, better: alter system set cron.host = %6$L; then restart the server',
        p_user, current_setting('cron.host'), current_setting('port'), current_database(), v_system_user,
        btrim(split_part(current_setting('unix_socket_directories'), ',', 1))
    );
end
$plpgsql$;

create or replace function ulak._system_user()
returns text
language plpython3u
as $python$
    import os
    import pwd

    return pwd.getpwuid(os.geteuid()).pw_name
$python$;

-- Where pg_cron would look for this server. The settings are a superuser's to read.
create or replace function ulak._login_parameters()
returns table (host text, port text, database text)
language sql
stable
security definer
set search_path = pg_catalog, pg_temp
as $sql$
    select
        coalesce(
            nullif(current_setting('cron.host', true), ''),
            nullif(btrim(split_part(current_setting('unix_socket_directories'), ',', 1)), ''),
            'localhost'
        ),
        current_setting('port'),
        current_database()::text
$sql$;

create or replace function ulak._log_in(p_user text)
returns text
language plpython3u
as $python$
    plpy.execute("select ulak._load_python()")
    from ulak import entry_points

    return entry_points.log_in(p_user)
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
    v_version text := case when ulak._has_pg_cron() then ulak._pg_cron_version() end;
    v_libpq boolean := not ulak._has_background_workers();
    -- Beside the workers: maintenance, vacuum, log, and the watcher of those who don't know seconds.
    v_others integer := case when ulak._has_seconds() or p_workers = 0 then 3 else 4 end;
    v_needed integer := p_workers + v_others;
begin
    if v_home is null then
        return query values (
            'pg_cron',
            'problem',
            'it is not loaded',
            ulak._server_fix(
                'shared_preload_libraries',
                (
                    select string_agg(quote_literal(btrim(l.name)), ', ' order by l.place)
                    from unnest(
                        string_to_array(nullif(current_setting('shared_preload_libraries'), ''), ',') || 'pg_cron'::text
                    ) with ordinality l (name, place)
                ),
                format(
                    'after installing postgresql-%s-cron; then restart the server. Or let another scheduler run each minute: %scall ulak.run_maintenance();',
                    current_setting('server_version_num')::integer / 10000,
                    case when ulak._has_python() then 'call ulak.run_worker(); ' else '' end
                )
            )
        );
        return;
    elsif not ulak._has_pg_cron() and exists (select from pg_extension e where e.extname = 'pg_cron') then
        return query
        select
            'pg_cron',
            'problem',
            format('role %I may not use it', o.name),
            format('grant usage on schema cron to %I; -- by an administrator of the server', o.name)
        from (select pg_get_userbyid(c.relowner) from pg_class c where c.oid = 'ulak.queue'::regclass) o (name);
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

    if not v_libpq and not ulak._has_seconds() then
        return query values (
            'mode',
            'problem',
            'pg_cron 1.4 makes every job wait for the longest one when cron.use_background_workers is on',
            ulak._server_fix('cron.use_background_workers', 'off')
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
            ulak._server_fix('max_worker_processes', (v_needed + 2)::text)
        );
    end if;
    -- What it may be depends on the above: one after the other.
    if current_setting('cron.max_running_jobs')::integer < v_needed
        and (select s.max_val::integer from pg_settings s where s.name = 'cron.max_running_jobs') >= v_needed
    then
        return query values (
            'max_running_jobs',
            'problem',
            format('%s workers and %s other jobs need %s, it is %s', p_workers, v_others, v_needed,
                current_setting('cron.max_running_jobs')),
            ulak._server_fix('cron.max_running_jobs', v_needed::text)
        );
    end if;
    if not current_setting('cron.launch_active_jobs', true)::boolean then
        return query values (
            'launch_active_jobs',
            'problem',
            'pg_cron is told to start no job',
            ulak._server_fix('cron.launch_active_jobs', 'on', 'then: select pg_reload_conf();')
        );
    end if;
end
$plpgsql$;
