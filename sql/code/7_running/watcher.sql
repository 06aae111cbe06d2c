-- The watcher: brings back workers between two full minutes, where pg_cron starts nothing.

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
