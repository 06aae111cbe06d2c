-- The watcher: restarts workers between full minutes, when pg_cron 1.4 starts nothing.

-- Starts the watcher now instead of at the next full minute, unless one is running. False if that failed.
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

-- Called each second by one worker. The watcher restarts workers, and workers restart the watcher, so any survivor brings back the others.
-- If the login fails, pg_cron starts the watcher at the next full minute.
create or replace function ulak_private.keep_watcher()
returns void
language plpgsql
as $plpgsql$
begin
    if exists (select from ulak_private.schedule s where s.is_watched) then
        if not exists (select from ulak_private.watchers()) then
            perform ulak_private.launch();
        end if;
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

-- pg_cron's launcher starts a moment after the server, and retries each second while its database doesn't exist.
create or replace function ulak_private.await_launcher()
returns void
language plpgsql
as $plpgsql$
begin
    for v_look in 1..30 loop
        exit when not ulak_private.is_pg_cron_loaded()
            or exists (select from pg_stat_activity a where a.backend_type = 'pg_cron launcher');
        perform pg_sleep(0.1), pg_stat_clear_snapshot();
    end loop;
end
$plpgsql$;

-- Keeps the workers of start() alive until just after the next full minute: pg_cron 1.4 starts jobs only at the full minute and with the
-- server. Later versions need no watcher: they have schedules in seconds.
create or replace procedure ulak_private.watch_workers()
language plpython3u
as $python$
    plpy.execute("select pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', false)")
    plpy.execute("select ulak_private.load_python()")
    from ulak import entry_points

    entry_points.watch(plpy.execute("select ulak_private.worker_stamp() as stamp")[0]["stamp"])
$python$;

-- The watchers of this database. Other roles can't pretend to be one: the role is checked.
create or replace function ulak_private.watchers()
returns table (pid integer, backend_start timestamptz)
language sql
stable
as $sql$
    select a.pid, a.backend_start
    from pg_stat_activity a
    where a.datname = current_database() and a.usename = 'ulak_worker' and a.application_name = 'ulak watcher'
$sql$;

create or replace function ulak_private.await_schedule()
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = 0
as $plpgsql$
begin
    perform ulak_private.lock('schedule');
end
$plpgsql$;

-- The slots of start() that have no worker, and whether this watcher should leave.
create or replace function ulak_private.missing_workers(p_stamp text)
returns table (leave boolean, slots integer[])
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_workers integer := coalesce((select s.workers from ulak_private.schedule s), 0);
begin
    perform ulak_private.wake_pg_cron();
    -- Of two watchers the older one leaves: the other one runs into the next minute.
    leave := v_workers = 0 or p_stamp <> ulak_private.worker_stamp() or exists (
        select
        from pg_stat_get_activity(pg_backend_pid()) m
        join ulak_private.watchers() w on (w.backend_start, w.pid) > (m.backend_start, m.pid)
    );
    slots := array(
        select n
        from generate_series(1, v_workers) n
        where not exists (select from ulak.workers w where w.slot = n and ulak_private.is_taken(w))
    );
    return next;
end
$plpgsql$;
