-- Slots: the numbers of workers in ulak.workers, and how a session takes and leaves one.

-- Takes a free slot; no row if there is none, and a row of nulls if start() or stop() don't want this run.
create or replace function ulak_private.take_worker_slot(p_slot integer, p_seconds double precision, p_is_scheduled boolean)
returns table (slot integer, name text, seconds double precision)
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    if p_is_scheduled and not ulak_private.is_wanted(p_slot) then
        return next;
        return;
    end if;
    for v_slot in coalesce(p_slot, 1)..coalesce(p_slot, 32) loop
        name := format('worker %s, pid %s', v_slot, pg_backend_pid());
        if ulak_private.register_worker(v_slot, name, p_is_scheduled) then
            slot := v_slot;
            -- A run ends just after the minute's tick: pg_cron has queued the next one by then and starts it at once.
            -- Runs of different slots end at different moments, so that some worker is always there.
            seconds := coalesce(p_seconds, 60 + 0.2 * v_slot - extract(second from clock_timestamp()));
            perform set_config('application_name', format('ulak %s', name), false);
            return next;
            return;
        end if;
    end loop;
end
$plpgsql$;

-- Whether the session that wrote this row still exists. A pid alone may be reused.
create or replace function ulak_private.has_backend(p_worker ulak.workers)
returns boolean
language sql
stable
as $sql$
    select exists (
        select
        from pg_stat_get_activity(p_worker.pid) a
        where a.backend_start = p_worker.backend_start
            -- A role without the right to see other sessions only sees the pid.
            or a.backend_start is null
            or p_worker.backend_start is null
    )
$sql$;

-- Whether a slot has a worker. A worker that is silent for this long hangs, and another one takes its place. If it wakes up, it notices and
-- leaves; its late settlements are fenced off.
create or replace function ulak_private.is_taken(p_worker ulak.workers)
returns boolean
language sql
stable
as $sql$
    select p_worker.state = 'running'
        and p_worker.heartbeat_at > clock_timestamp() - interval '2 minutes'
        and ulak_private.has_backend(p_worker)
$sql$;

-- Whether start() wants this slot. pg_cron may have started the run before stop(), or before a start() with fewer workers.
create or replace function ulak_private.is_wanted(p_slot integer)
returns boolean
language sql
stable
security definer
set search_path = pg_catalog, pg_temp
as $sql$
    select not ulak_private.is_stopping() and not exists (select from ulak_private.schedule s where s.workers < p_slot)
$sql$;

-- Whether this server knows that the worker's session has ended, and all its requests with it. It can't know that of a node, which survives
-- its session, nor of rows written by another server before this one was promoted.
create or replace function ulak_private.is_dead(p_worker ulak.workers)
returns boolean
language sql
stable
as $sql$
    select p_worker.state = 'running'
        and p_worker.host is null
        and p_worker.timeline is not distinct from ulak_private.timeline()
        and not ulak_private.has_backend(p_worker)
$sql$;

-- True if this session now has the slot. The conflict locks the row: of two sessions, the second one sees the first. The new worker recovers
-- the messages that a dead one held.
create or replace function ulak_private.register_worker(p_slot integer, p_worker text, p_is_scheduled boolean, p_host text default null)
returns boolean
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_dead text := (select w.name from ulak.workers w where w.slot = p_slot and ulak_private.is_dead(w));
begin
    insert into ulak.workers as w (
        slot, name, pid, state, started_at, last_activity, heartbeat_at, is_scheduled, version, backend_start, host, timeline
    )
    select p_slot, p_worker, a.pid, 'running', t.now, t.now, t.now, p_is_scheduled, ulak_private.version(), a.backend_start, p_host, ulak_private.timeline()
    from clock_timestamp() t(now), pg_stat_get_activity(pg_backend_pid()) a
    on conflict (slot) do update
    set name = excluded.name,
        pid = excluded.pid,
        state = excluded.state,
        started_at = excluded.started_at,
        heartbeat_at = excluded.heartbeat_at,
        in_flight = 0,
        is_scheduled = excluded.is_scheduled,
        version = excluded.version,
        backend_start = excluded.backend_start,
        host = excluded.host,
        clock_ahead = null,
        timeline = excluded.timeline,
        -- The request was for the previous run.
        stop_requested_at = null
    where not ulak_private.is_taken(w);
    if not found then
        return false;
    end if;
    if v_dead is not null then
        begin
            perform ulak_private.recover_from(array[v_dead], clock_timestamp());
        exception
            -- An endpoint is locked. The messages are recovered when their leases expire.
            when lock_not_available then
                null;
        end;
    end if;
    return true;
end
$plpgsql$;

-- For sessions that continue after the run, such as an administrator's psql.
create or replace function ulak_private.leave_worker_slot(p_slot integer)
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    perform ulak_private.unregister_worker(p_slot);
    unlisten ulak_bell;
    perform set_config('ulak_private.settings', '', false);
    perform set_config(s.name, s.reset_val, false)
    from pg_settings s
    where lower(s.name collate "C") in (select p.name from ulak_private.worker_parameters() p union all values ('application_name'));
end
$plpgsql$;

-- For a worker that could not report its end because of a lock.
create or replace function ulak_private.unregister_worker(p_slot integer)
returns void
language sql
security definer
set search_path = pg_catalog, pg_temp
as $sql$
    update ulak.workers w
    set state = 'stopped'
    where w.slot = p_slot and w.pid = pg_backend_pid() and w.state <> 'stopped'
$sql$;
