-- The checks of start(): PL/Python, pg_cron, the server's parameters and limits.

-- All checks, in the order in which problems should be fixed. A fix is one line to paste into psql or, if the detail says so, into a shell.
create or replace function ulak_private.check_schedule(p_workers integer)
returns table (item text, status text, detail text, fix text)
language sql
as $sql$
    select c.item, c.status, c.detail, c.fix
    from ulak_private.in_order((
        select jsonb_agg(to_jsonb(s))
        from (
            select * from ulak_private.python_steps(p_workers)
            union all
            select * from ulak_private.pg_cron_steps(p_workers, ulak_private.is_pg_cron_created())
            union all
            select l.*
            from pg_class q
            cross join lateral (values ('ulak_worker'), (pg_get_userbyid(q.relowner))) u(name)
            cross join lateral ulak_private.login_steps(u.name) l
            where q.oid = 'ulak_private.deliveries'::regclass and not ulak_private.wants_background_workers()
        ) s
    )) c
    union all
    select 'cluster', 'warning', h.reason || ': they are held', 'select ulak.adopt(); -- if this cluster is to deliver them'
    from ulak_private.held_because() h (reason)
    where h.reason is not null
$sql$;

-- The checks that need no login: whether pg_cron is there and runs, in a suitable mode.
create or replace function ulak_private.check_pg_cron(p_workers integer)
returns table (item text, status text, detail text, fix text)
language sql
stable
as $sql$
    select c.item, c.status, c.detail, c.fix
    from ulak_private.in_order((select jsonb_agg(to_jsonb(s)) from ulak_private.pg_cron_steps(p_workers, null) s)) c
$sql$;

-- Sorts checks by the order of their fixes: 1 packages, 2 parameters, 3 a restart for them, 4 parameters that are possible only then,
-- 5 a restart for those, 6 changes in the running server, 7 a reload of its files.
create or replace function ulak_private.in_order(p_checks jsonb)
returns table (item text, status text, detail text, fix text)
language sql
stable
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
    -- Passed checks come first.
    order by c.status = 'problem', c.step, c.place
$sql$;

-- What workers in the database need. Nodes bring their own Python.
create or replace function ulak_private.python_steps(p_workers integer)
returns table (step integer, item text, status text, detail text, fix text)
language sql
as $sql$
    select 1, p.item, p.status, p.detail, p.fix
    from ulak_private.check_python() p
    where p_workers > 0
    union all
    select
        1,
        m.package,
        'warning',
        format('it is not installed; needed for %s of protocol %s; as root, in a shell:', ulak_private.counted(m.endpoints, 'endpoint'), m.protocol),
        format('apt-get install -y %s', m.package)
    from ulak_private.missing_clients() m
    where p_workers > 0
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

-- In these functions each check is a row, which is returned if `applies` is true.
create or replace function ulak_private.pg_cron_steps(p_workers integer, p_is_created boolean)
returns table (step integer, item text, status text, detail text, fix text)
language plpgsql
stable
as $plpgsql$
begin
    if not ulak_private.has_pg_cron() and exists (select from pg_extension e where e.extname = 'pg_cron') then
        return query
        select 6, 'pg_cron', 'problem', format('role %I may not use it', o.name), format('grant usage on schema cron to %I; -- by an administrator of the server', o.name)
        from (select pg_get_userbyid(c.relowner) from pg_class c where c.oid = 'ulak_private.deliveries'::regclass) o (name);
    else
        return query select * from ulak_private.presence_steps(p_is_created);
        return query select * from ulak_private.limit_steps(p_workers);
    end if;
end
$plpgsql$;

-- Whether pg_cron is installed, loaded by the server, created in the database that it looks for jobs in, and running.
create or replace function ulak_private.presence_steps(p_is_created boolean)
returns table (step integer, item text, status text, detail text, fix text)
language plpgsql
stable
as $plpgsql$
declare
    v_version text := ulak_private.pg_cron_version();
    v_package text := format('postgresql-%s-cron', current_setting('server_version_num')::integer / 10000);
    v_libraries text := coalesce((ulak_private.given_setting('shared_preload_libraries')).setting, '');
    v_is_given boolean := v_libraries ~ E'\\mpg_cron\\M';
    v_is_loaded boolean := ulak_private.is_pg_cron_loaded();
    v_restart record := ulak_private.restart();
    v_given_home text := (ulak_private.given_setting('cron.database_name')).setting;
    v_home text := coalesce(v_given_home, 'postgres');
    v_has_home boolean := exists (select from pg_database d where d.datname = v_home);
    -- pg_cron serves all databases of the server, so an existing cron.database_name stays.
    v_moves boolean := v_home <> current_database() and (not v_has_home or v_given_home is null and p_is_created is false);
    v_is_here boolean := v_moves or v_home = current_database();
    v_is_missing boolean := case when v_is_here then not ulak_private.has_pg_cron() else p_is_created is false end;
    v_runs boolean := exists (select from pg_stat_activity a where a.backend_type = 'pg_cron launcher');
    v_is_pending boolean := exists (
        select
        from pg_settings s
        cross join lateral ulak_private.given_setting(s.name) g
        where g.is_pending and (s.name like 'cron.%' or s.name = 'max_worker_processes')
    );
begin
    return query
    select c.step, c.item, c.status, c.detail, c.fix
    from (
        values
            (1, v_package, 'problem', v_version is null, 'it is not installed; as root, in a shell:', 'apt-get install -y ' || v_package),
            (
                6, 'pg_cron', 'problem', string_to_array(v_version, '.')::integer[] < array[1, 4],
                format('version %s is older than 1.4', v_version), 'alter extension pg_cron update; -- after installing a newer one'
            ),
            (
                2, 'pg_cron', 'problem', not v_is_given,
                'it is not loaded', ulak_private.server_fix('shared_preload_libraries', ulak_private.with_library(v_libraries, 'pg_cron'))
            ),
            (3, 'pg_cron', 'problem', v_is_given and not v_is_loaded, 'it is configured, but not loaded: ' || v_restart.detail, v_restart.fix),
            (3, 'restart', 'problem', v_is_given and v_is_loaded and v_is_pending, v_restart.detail, v_restart.fix),
            (
                2, 'cron.database_name', 'problem', v_moves,
                format(
                    case when v_has_home then 'pg_cron would look for its jobs in database "%s"' else 'pg_cron looks for its jobs in database "%s", which does not exist' end,
                    v_home
                ),
                ulak_private.server_fix('cron.database_name', quote_literal(current_database()))
            ),
            (
                6, 'pg_cron', 'problem', v_is_missing and v_is_here,
                case when v_is_loaded then 'it is loaded, but not created' else 'once it is loaded, it has to be created' end, 'create extension pg_cron;'
            ),
            (
                6, 'pg_cron', 'problem', v_is_missing and not v_is_here,
                format('it is not created in database "%s", where it lives', v_home),
                format(E'\\c %I \\\\ create extension pg_cron; \\c %I', v_home, current_database())
            ),
            (3, 'pg_cron', 'problem', not v_is_missing and v_is_loaded and not v_runs, 'its scheduler is not running: ' || v_restart.detail, v_restart.fix),
            (
                1, 'pg_cron', 'ok', not v_is_missing and v_is_loaded and v_runs,
                case when v_is_here then 'version ' || v_version else format('in database "%s"', v_home) end, null
            )
    ) c(step, item, status, applies, detail, fix)
    where c.applies;
end
$plpgsql$;

create or replace function ulak_private.with_library(p_libraries text, p_name text)
returns text
language sql
immutable
as $sql$
    select string_agg(quote_literal(btrim(l.name)), ', ' order by l.place)
    from unnest(string_to_array(nullif(p_libraries, ''), ',') || p_name) with ordinality l(name, place)
$sql$;

-- How pg_cron runs its jobs, by background workers or by logins, and whether it may run enough of them at once.
create or replace function ulak_private.limit_steps(p_workers integer)
returns table (step integer, item text, status text, detail text, fix text)
language plpgsql
stable
as $plpgsql$
declare
    v_is_loaded boolean := ulak_private.is_pg_cron_loaded();
    v_background boolean := coalesce((ulak_private.given_setting('cron.use_background_workers')).setting::boolean, false);
    v_wanted boolean := ulak_private.wants_background_workers();
    v_given_host text := (ulak_private.given_setting('cron.host')).setting;
    v_host text := (select p.host from ulak_private.login_parameters() p);
    v_processes integer := coalesce((ulak_private.given_setting('max_worker_processes')).setting, '8')::integer;
    v_jobs integer := coalesce(
        (ulak_private.given_setting('cron.max_running_jobs')).setting::integer,
        case when v_wanted then least(5, v_processes - 1) else least(32, current_setting('max_connections')::integer) end
    );
    -- The highest value that is possible until max_worker_processes is raised and the server restarted.
    v_most_jobs integer := (select s.max_val::integer from pg_settings s where s.name = 'cron.max_running_jobs');
    -- Besides the workers: maintenance, vacuum, log, and the watcher for versions of pg_cron without schedules in seconds.
    v_others integer := case when ulak_private.has_seconds() or p_workers = 0 then 3 else 4 end;
    v_needed integer := p_workers + v_others;
begin
    return query
    select c.step, c.item, c.status, c.detail, c.fix
    from (
        values
            (
                2, 'mode', 'problem', v_background <> v_wanted,
                case
                    when v_background then 'pg_cron 1.4 makes every job wait for the longest one when cron.use_background_workers is on'
                    else 'pg_cron would log in for each job; background workers need no login'
                end,
                ulak_private.server_fix('cron.use_background_workers', case when v_wanted then 'on' else 'off' end)
            ),
            (2, 'mode', 'ok', v_background = v_wanted and v_is_loaded, case when v_background then 'background workers' else 'libpq' end, null),
            (
                2, 'cron.host', 'problem', not v_wanted and not v_is_loaded and v_given_host is null and v_host ~ '^/',
                'pg_cron would log in by TCP; over a socket no password is needed', ulak_private.server_fix('cron.host', quote_literal(v_host))
            ),
            -- Besides the jobs, pg_cron itself and logical replication need a process each.
            (
                2, 'max_worker_processes', 'problem', v_wanted and v_processes < v_needed + 2,
                format('%s jobs and 2 other processes need %s, it is %s', v_needed, v_needed + 2, v_processes),
                ulak_private.server_fix('max_worker_processes', (v_needed + 2)::text)
            ),
            (
                case when v_needed > v_most_jobs then 4 else 2 end, 'max_running_jobs', 'problem', v_jobs < v_needed,
                format('%s workers and %s other jobs need %s, it is %s', p_workers, v_others, v_needed, v_jobs),
                ulak_private.server_fix('cron.max_running_jobs', v_needed::text)
            ),
            (
                6, 'launch_active_jobs', 'problem', not coalesce((ulak_private.given_setting('cron.launch_active_jobs')).setting::boolean, true),
                'pg_cron is told to start no job', ulak_private.server_fix('cron.launch_active_jobs', 'on', 'select pg_reload_conf();')
            )
    ) c(step, item, status, applies, detail, fix)
    where c.applies;
end
$plpgsql$;

-- A worker's run is one statement of a minute or longer. It can't lift a statement_timeout that was running when it began, so its sessions
-- must start without one. A setting for a role in a database overrides all other settings made by ALTER.
create or replace function ulak_private.lift_timeout()
returns table (item text, status text, detail text)
language plpgsql
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

-- The statement_timeout that would end a worker's run; null if there is none, or if this session can't see it.
create or replace function ulak_private.run_timeout()
returns interval
language sql
stable
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

-- The parameters of pg_cron prove nothing: while it isn't loaded, any session can set them.
create or replace function ulak_private.is_pg_cron_loaded()
returns boolean
language sql
stable
as $sql$
    select current_setting('shared_preload_libraries') ~ E'\\mpg_cron\\M'
$sql$;

-- Whether pg_cron should run its jobs by background workers. If that isn't configured, it should: they need no login. In 1.4 it shouldn't:
-- there they wait for each other.
create or replace function ulak_private.wants_background_workers()
returns boolean
language sql
stable
as $sql$
    select ulak_private.has_seconds() and coalesce((ulak_private.given_setting('cron.use_background_workers')).setting::boolean, not ulak_private.is_pg_cron_loaded())
$sql$;

-- Whether the extension pg_cron exists in pg_cron's database. For another database a login finds out; null if that fails.
create or replace function ulak_private.is_pg_cron_created()
returns boolean
language plpgsql
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

-- The result of a query in another database; null if the role can't log in.
create or replace function ulak_private.ask(p_host text, p_database text, p_user text, p_query text)
returns text
language plpython3u
as $python$
    plpy.execute("select ulak_private.load_python()")
    from ulak import entry_points

    return entry_points.ask({"host": p_host, "dbname": p_database, "user": p_user}, p_query)
$python$;
