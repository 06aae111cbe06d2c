-- The checks of start(): PL/Python, pg_cron, logins, the server's parameters and limits. What counts is what the running server has.

create or replace function ulak_private.check_schedule(p_workers integer)
returns table (item text, status text, detail text, fix text)
language plpgsql
as $plpgsql$
begin
    -- Nodes bring their own Python.
    if p_workers > 0 then
        return query select p.* from ulak_private.check_python() p;
    end if;
    return query select c.* from ulak_private.check_pg_cron(p_workers) c;
    return query select l.* from ulak_private.check_login() l;
    return query
    select 'cluster', 'warning', h.reason || ': they are held', 'select ulak.adopt(); -- if this cluster is to deliver them'
    from ulak_private.held_because() h (reason)
    where h.reason is not null;
end
$plpgsql$;

-- What workers in the database need.
create or replace function ulak_private.check_python()
returns table (item text, status text, detail text, fix text)
language sql
as $sql$
    select f.item, f.status, f.detail, case when f.status = 'problem' then ulak_private.package_fix('python3-pycurl') end
    from ulak_private.find_python() f
    union all
    select
        m.package,
        'warning',
        format('it is not installed; needed for %s of protocol %s', ulak_private.counted(m.endpoints, 'endpoint'), m.protocol),
        ulak_private.package_fix(m.package)
    from ulak_private.missing_clients() m
$sql$;

create or replace function ulak_private.find_python()
returns table (item text, status text, detail text)
language plpython3u
as $python$
    import sys

    yield "plpython3u", "ok", "Python " + sys.version.split()[0]
    try:
        import pycurl
    except ImportError as error:
        yield "pycurl", "problem", str(error)
    else:
        yield "pycurl", "ok", " ".join(pycurl.version.split()[:2])
$python$;

-- Whether pg_cron is there and runs, in a suitable mode, and may run enough jobs at once. Each check is a row, which is returned if `applies`
-- is true.
create or replace function ulak_private.check_pg_cron(p_workers integer)
returns table (item text, status text, detail text, fix text)
language plpgsql
stable
as $plpgsql$
declare
    v_version text := ulak_private.pg_cron_version();
    v_setup text := ulak_private.setup_fix(p_workers);
    v_home text;
    v_has_home boolean;
    v_is_missing boolean;
    v_runs boolean;
    v_background boolean;
    v_is_slow boolean;
    -- Besides the workers: maintenance, vacuum, log, and the watcher for versions of pg_cron without schedules in seconds.
    v_others integer := case when ulak_private.has_seconds() or p_workers = 0 then 3 else 4 end;
    v_needed integer := p_workers + v_others;
begin
    if v_version is null then
        return query
        select 'pg_cron', 'problem', 'it is not installed', ulak_private.package_fix(format('postgresql-%s-cron', s.number / 10000))
        from (select current_setting('server_version_num')::integer) s (number);
        return;
    elsif not ulak_private.is_pg_cron_loaded() then
        return query values ('pg_cron', 'problem', 'it is not loaded', v_setup);
        return;
    elsif not ulak_private.has_pg_cron() and exists (select from pg_extension e where e.extname = 'pg_cron') then
        return query
        select 'pg_cron', 'problem', format('role %I may not use it', o.name), format('grant usage on schema cron to %I; -- by an administrator of the server', o.name)
        from (select pg_get_userbyid(c.relowner) from pg_class c where c.oid = 'ulak_private.deliveries'::regclass) o (name);
        return;
    end if;
    v_home := current_setting('cron.database_name');
    v_has_home := exists (select from pg_database d where d.datname = v_home);
    v_is_missing := v_home = current_database() and not ulak_private.has_pg_cron();
    v_runs := exists (select from pg_stat_activity a where a.backend_type = 'pg_cron launcher');
    v_background := ulak_private.has_background_workers();
    v_is_slow := v_background and not ulak_private.has_seconds();
    return query
    select c.item, c.status, c.detail, c.fix
    from (
        values
            (
                'pg_cron', 'problem', string_to_array(v_version, '.')::integer[] < array[1, 4],
                format('version %s is older than 1.4', v_version), 'alter extension pg_cron update; -- after installing a newer one'
            ),
            (
                'cron.database_name', 'problem', not v_has_home,
                format('pg_cron looks for its jobs in database "%s", which does not exist', v_home), v_setup
            ),
            ('pg_cron', 'problem', v_is_missing, 'it is loaded, but not created', 'create extension pg_cron;'),
            ('pg_cron', 'problem', v_has_home and not v_is_missing and not v_runs, 'its scheduler is not running', v_setup),
            (
                'pg_cron', 'ok', v_has_home and not v_is_missing and v_runs,
                case when v_home = current_database() then 'version ' || v_version else format('in database "%s"', v_home) end, null
            ),
            (
                'mode', 'problem', v_is_slow,
                'pg_cron 1.4 makes every job wait for the longest one when cron.use_background_workers is on', v_setup
            ),
            ('mode', 'ok', not v_is_slow, case when v_background then 'background workers' else 'libpq' end, null),
            -- Besides the jobs, pg_cron itself and logical replication need a process each.
            (
                'max_worker_processes', 'problem', v_background and not v_is_slow and current_setting('max_worker_processes')::integer < v_needed + 2,
                format('%s jobs and 2 other processes need %s, it is %s', v_needed, v_needed + 2, current_setting('max_worker_processes')), v_setup
            ),
            (
                'max_running_jobs', 'problem', current_setting('cron.max_running_jobs')::integer < v_needed,
                format('%s workers and %s other jobs need %s, it is %s', p_workers, v_others, v_needed, current_setting('cron.max_running_jobs')), v_setup
            ),
            -- Since 1.5.
            (
                'launch_active_jobs', 'problem', not coalesce(current_setting('cron.launch_active_jobs', true)::boolean, true),
                'pg_cron is told to start no job', ulak_private.parameter_fix('cron.launch_active_jobs = on')
            )
    ) c(item, status, applies, detail, fix)
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
