-- The worker that lives in the database: its procedure, and what it asks of SQL besides claiming and settling.

create or replace procedure ulak.run_worker(p_slot integer default null, p_seconds double precision default null)
language plpython3u
as $python$
    plpy.execute("select ulak._load_python()")
    from ulak import database

    database.run(p_slot, p_seconds, plpy.execute("select ulak._python_stamp() as stamp")[0]["stamp"])
$python$;

comment on procedure ulak.run_worker(integer, double precision) is
    'delivers messages until just after the next full minute, or for p_seconds; p_slot is the worker''s number, '
    'by default the first that is free';

-- Takes a slot that no other session runs, sets the session up, and says what the worker needs to know.
create or replace function ulak._take_worker_slot(p_slot integer, p_seconds double precision)
returns table (slot integer, name text, settings jsonb, version text, seconds double precision)
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    if p_slot is not null and p_slot not between 1 and 32 then
        raise exception 'worker slots are numbered from 1 to 32'
            using errcode = '22023', detail = format('The slot given is %s.', p_slot);
    end if;
    -- Commits of the worker needn't reach the disk at once: a crash that loses one also ends the worker, and the message is
    -- sent again. Compiling plans costs more than it saves in statements this short.
    perform set_config('synchronous_commit', 'off', false), set_config('jit', 'off', false);
    for v_slot in coalesce(p_slot, 1)..coalesce(p_slot, 32) loop
        if pg_try_advisory_lock(hashtext('ulak_worker'), v_slot) then
            slot := v_slot;
            name := format('worker %s, pid %s', v_slot, pg_backend_pid());
            settings := ulak._worker_settings();
            version := (select e.extversion from pg_extension e where e.extname = 'ulak');
            -- A run ends just after the minute's tick: pg_cron has queued the next one by then and starts it at once.
            seconds := coalesce(p_seconds, 60.2 - extract(second from clock_timestamp()));
            perform set_config('application_name', format('ulak %s', name), false);
            return next;
            return;
        end if;
    end loop;
end
$plpgsql$;

-- For a session that goes on after its worker, such as an administrator's psql.
create or replace function ulak._leave_worker_slot(p_slot integer)
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    perform pg_advisory_unlock(hashtext('ulak_worker'), p_slot);
    if exists (
        select
        from pg_locks l
        where l.locktype = 'advisory'
            and l.pid = pg_backend_pid()
            and l.classid = hashtext('ulak_poller')::bigint & 4294967295
    ) then
        perform pg_advisory_unlock(hashtext('ulak_poller'), 0);
    end if;
    perform set_config(s.name, s.reset_val, false)
    from pg_settings s
    where s.name in ('synchronous_commit', 'jit', 'application_name');
end
$plpgsql$;

create or replace function ulak._worker_settings()
returns jsonb
language sql
stable
security definer
set search_path = pg_catalog, pg_temp
as $sql$
    select jsonb_object_agg(s.name, ulak.setting(s.name))
    from unnest(array[
        'batch_size',
        'capture_response',
        'cloudevents_source',
        'http_allow_internal_urls',
        'http_allowed_networks',
        'http_connect_timeout',
        'http_timeout',
        'lease_seconds',
        'poll_interval',
        'poll_interval_busy',
        'response_body_max_size',
        'worker_concurrency'
    ]) s(name)
$sql$;

-- A worker's sign of life, with its counters since the last one. It is told to leave when stop() was called or when the
-- extension carries other Python than it runs.
create or replace function ulak._worker_report(p_slot integer, p_worker text, p_progress jsonb, p_stats jsonb)
returns table (leave text, settings jsonb)
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_now timestamptz := clock_timestamp();
    v_processed bigint := (p_progress -> 'processed')::bigint;
    v_stop_requested boolean;
begin
    insert into ulak.workers as w (
        slot, name, pid, state, started_at, last_activity, heartbeat_at, in_flight, messages_processed, error_count, last_error,
        version
    )
    values (
        p_slot,
        p_worker,
        pg_backend_pid(),
        p_progress ->> 'state',
        v_now,
        v_now,
        v_now,
        (p_progress -> 'in_flight')::integer,
        v_processed,
        (p_progress -> 'failed')::bigint,
        p_progress ->> 'last_error',
        (select e.extversion from pg_extension e where e.extname = 'ulak')
    )
    on conflict (slot) do update
    set name = excluded.name,
        pid = excluded.pid,
        state = excluded.state,
        started_at = case when w.name = excluded.name and w.state = 'running' then w.started_at else v_now end,
        last_activity = case when v_processed > 0 then v_now else w.last_activity end,
        heartbeat_at = v_now,
        in_flight = excluded.in_flight,
        messages_processed = w.messages_processed + v_processed,
        error_count = w.error_count + excluded.error_count,
        last_error = coalesce(excluded.last_error, w.last_error),
        version = excluded.version
    returning w.stop_requested_at >= w.started_at into v_stop_requested;

    perform ulak._add_endpoint_stats(p_stats, date_trunc('minute', v_now));
    leave := case
        when v_stop_requested then 'stop'
        when p_progress ->> 'stamp' <> ulak._python_stamp() then 'restart'
    end;
    settings := ulak._worker_settings();
    return next;
end
$plpgsql$;

create or replace function ulak._add_endpoint_stats(p_stats jsonb, p_minute timestamptz)
returns void
language sql
set search_path = pg_catalog, pg_temp
as $sql$
    insert into ulak.endpoint_stats as s (
        endpoint_id, minute, delivered, failed, latency_total_ms, latency_histogram
    )
    select a.endpoint_id, p_minute, a.delivered, a.failed, a.latency_total_ms, a.latency_histogram
    from jsonb_to_recordset(p_stats) a(
        endpoint_id bigint,
        delivered bigint,
        failed bigint,
        latency_total_ms double precision,
        latency_histogram bigint[]
    )
    on conflict (endpoint_id, minute) do update
    set delivered = s.delivered + excluded.delivered,
        failed = s.failed + excluded.failed,
        latency_total_ms = s.latency_total_ms + excluded.latency_total_ms,
        latency_histogram = array(
            select coalesce(h.before, 0) + coalesce(h.now, 0)
            from unnest(s.latency_histogram, excluded.latency_histogram) with ordinality h(before, now, bucket)
            order by h.bucket
        )
$sql$;

-- Endpoints that must not be sent to now, though messages for them were claimed a moment ago.
create or replace function ulak._blocked_endpoints(p_ids bigint[])
returns table (id bigint, state text)
language sql
stable
security definer
set search_path = pg_catalog, pg_temp
as $sql$
    select e.id, case when e.enabled then e.circuit_state else 'disabled' end
    from ulak.endpoints e
    where e.id = any (p_ids) and (not e.enabled or e.circuit_state <> 'closed')
$sql$;

-- Every worker asks every ten seconds, and one does it.
create or replace function ulak._sweep()
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    if pg_try_advisory_xact_lock(hashtext('ulak_sweep'), 0) then
        perform ulak.recover_stale_messages(), ulak.mark_expired_messages();
    end if;
end
$plpgsql$;

-- A session's lock: it goes to another worker when this one ends, however it ends.
create or replace function ulak._become_poller()
returns boolean
language sql
set search_path = pg_catalog, pg_temp
as $sql$
    select pg_try_advisory_lock(hashtext('ulak_poller'), 0)
$sql$;

create or replace function ulak._ping(p_endpoint_id bigint)
returns text
language plpython3u
as $python$
    plpy.execute("select ulak._load_python()")
    from ulak import database

    return database.ping(p_endpoint_id)
$python$;

create or replace function ulak.ping(p_endpoint text)
returns table (outcome text, status integer, milliseconds double precision, error text, response jsonb)
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_endpoint ulak.endpoints;
begin
    select e.* into v_endpoint
    from ulak.endpoints e
    where e.name = p_endpoint;
    if not found then
        perform ulak._raise_unknown_endpoint(p_endpoint);
    elsif v_endpoint.protocol <> 'http' then
        raise exception 'endpoint "%" is not an http endpoint', p_endpoint
            using errcode = '22023', detail = format('Its protocol is %s.', v_endpoint.protocol);
    end if;
    return query
    select a.outcome, a.status, a.milliseconds, a.error, a.response
    from jsonb_to_record(ulak._ping(v_endpoint.id)::jsonb) a(
        outcome text,
        status integer,
        milliseconds double precision,
        error text,
        response jsonb
    );
end
$plpgsql$;

comment on function ulak.ping(text) is
    'sends one signed test request to an endpoint now and returns its outcome; neither queue nor circuit breaker notice';
