-- The worker: the procedure that runs it in the database, and what it asks of SQL besides claiming and settling, which nodes ask as well.

-- A procedure that commits can't have a SET clause, so its first statements pin the search_path themselves. They are the same
-- whatever path the session came with: a database's owner may set one, and objects of others may be on it.
create or replace procedure ulak.run_worker(
    p_slot integer default null,
    p_seconds double precision default null,
    p_is_scheduled boolean default false
)
language plpython3u
as $python$
    before = plpy.execute("select pg_catalog.current_setting('search_path') as path")[0]["path"]
    plpy.execute("select pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', false)")
    plpy.execute(plpy.prepare("select ulak_private.check_run($1, $2)", ["int4", "float8"]), [p_slot, p_seconds])
    plpy.execute("select ulak_private.load_python()")
    from ulak import entry_points

    stamp = plpy.execute("select ulak_private.worker_stamp() as stamp")[0]["stamp"]
    entry_points.run(p_slot, p_seconds, p_is_scheduled, stamp, before)
$python$;

comment on procedure ulak.run_worker(integer, double precision, boolean) is
    'delivers messages until just after the next full minute, or for p_seconds; p_slot is the worker''s number, by default '
    'the first free one; p_is_scheduled is for the jobs of start()';

-- Before anything else is done: a call that is refused leaves the session as it was.
create or replace function ulak_private.check_run(p_slot integer, p_seconds double precision)
returns void
language plpgsql
immutable
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    if p_slot is not null and p_slot not between 1 and 32 then
        raise exception 'worker slots are numbered from 1 to 32'
            using errcode = '22023', detail = format('The slot given is %s.', p_slot);
    end if;
    if p_seconds not between 0 and 31536000 then
        raise exception 'the run of a worker must last between 0 seconds and a year'
            using errcode = '22023', detail = format('p_seconds is %s.', p_seconds);
    end if;
end
$plpgsql$;

-- Keeps the workers of start() alive until just after the next full minute: pg_cron 1.4 starts jobs at the full minute and
-- when the server starts, and nothing in between. Later versions need no watcher, they know seconds.
create or replace procedure ulak_private.watch_workers()
language plpython3u
as $python$
    plpy.execute("select pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', false)")
    plpy.execute("select ulak_private.load_python()")
    from ulak import entry_points

    entry_points.watch(plpy.execute("select ulak_private.worker_stamp() as stamp")[0]["stamp"])
$python$;

-- What a worker runs. One that finds another stamp leaves, so that the next run starts with the new code.
create or replace function ulak_private.stamp_of(p_version text)
returns text
language sql
-- Not immutable: a plan that a worker keeps would keep the stamp, too.
stable
as $sql$
    select ulak_private.python_stamp() operator(pg_catalog.||) ' ' operator(pg_catalog.||) p_version
$sql$;

create or replace function ulak_private.worker_stamp()
returns text
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    return ulak_private.stamp_of(ulak_private.version());
end
$plpgsql$;

-- True if this transaction may not write, and the next one may: some databases are read-only by default.
create or replace function ulak_private.leave_read_only()
returns boolean
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    return current_setting('transaction_read_only') = 'on'
        and set_config('default_transaction_read_only', 'off', false) = 'off';
end
$plpgsql$;

-- In a transaction of its own: whether a transaction may write is settled when it begins.
create or replace function ulak_private.enter_worker_session(p_name text default 'worker')
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    perform set_config(s.name, s.value, false)
    from ulak_private.worker_parameters() s
    where current_setting(s.name, true) is not null;
    perform set_config('application_name', format('ulak %s', p_name), false);
end
$plpgsql$;

-- Takes a slot that no other session runs; no row if there is none, and a row of nulls if start() or stop() don't want the run.
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
            -- Not all at the same moment, so that somebody is always there.
            seconds := coalesce(p_seconds, 60 + 0.2 * v_slot - extract(second from clock_timestamp()));
            perform set_config('application_name', format('ulak %s', name), false);
            return next;
            return;
        end if;
    end loop;
end
$plpgsql$;

create or replace function ulak_private.worker_parameters()
returns table (name text, value text)
language sql
immutable
set search_path = pg_catalog, pg_temp
as $sql$
    values
        -- A crash that loses a commit also ends the worker, and the message is sent again.
        ('synchronous_commit', 'off'),
        -- The workers of a parallel query talk by the signal that a listening worker holds back.
        ('max_parallel_workers_per_gather', '0'),
        -- Compiling plans costs more than it saves in statements this short.
        ('jit', 'off'),
        -- A plan that was made for an empty queue is used for a full one.
        ('enable_seqscan', 'off'),
        ('enable_bitmapscan', 'off'),
        ('plan_cache_mode', 'force_generic_plan'),
        -- A session that locks one endpoint must not hold up the others.
        ('lock_timeout', '250ms'),
        -- Whatever the database's own defaults are.
        ('default_transaction_isolation', 'read committed'),
        ('default_transaction_read_only', 'off'),
        ('datestyle', 'ISO'),
        -- The session that started the run may end before it.
        ('client_connection_check_interval', '0'),
        -- Since 17.
        ('transaction_timeout', '0')
$sql$;

-- Whether the session that wrote this row is still there. A pid alone comes again.
create or replace function ulak_private.has_backend(p_worker ulak.workers)
returns boolean
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select exists (
        select
        from pg_stat_get_activity(p_worker.pid) a
        where a.backend_start = p_worker.backend_start
            -- A role that may not see other sessions knows nothing but the pid.
            or a.backend_start is null
            or p_worker.backend_start is null
    )
$sql$;

-- Whether a slot has its worker. One that has been silent for this long hangs, and another one takes its place: should it wake
-- up, it finds that and leaves, and whatever it still does is fenced off.
create or replace function ulak_private.is_taken(p_worker ulak.workers)
returns boolean
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select p_worker.state = 'running'
        and p_worker.heartbeat_at > clock_timestamp() - interval '2 minutes'
        and ulak_private.has_backend(p_worker)
$sql$;

-- Whether pg_cron is to run this slot. It may have begun a run before stop(), or before a start() with fewer workers.
create or replace function ulak_private.is_wanted(p_slot integer)
returns boolean
language sql
stable
security definer
set search_path = pg_catalog, pg_temp
as $sql$
    select not ulak_private.is_stopping() and not exists (select from ulak_private.schedule s where s.workers < p_slot)
$sql$;

-- Whether this server knows that the worker's session is over, and with it every request that it had under way. Not so for a node,
-- which lives on without its session, nor for what another server has written down before this one was promoted.
create or replace function ulak_private.is_dead(p_worker ulak.workers)
returns boolean
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select p_worker.state = 'running'
        and p_worker.host is null
        and p_worker.timeline is not distinct from ulak_private.timeline()
        and not ulak_private.has_backend(p_worker)
$sql$;

-- True if this session has the slot now. The conflict locks the row, and of two sessions the second one sees the first.
-- What a dead worker held is recovered by the worker that takes its place.
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
        -- That was for the run before.
        stop_requested_at = null
    where not ulak_private.is_taken(w);
    if not found then
        return false;
    end if;
    if v_dead is not null then
        begin
            perform ulak_private.recover_from(array[v_dead], clock_timestamp());
        exception
            -- An endpoint is locked. Their leases run out.
            when lock_not_available then
                null;
        end;
    end if;
    return true;
end
$plpgsql$;

-- For a session that goes on after its worker, such as an administrator's psql.
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

-- Notes that a limit of the operating system leaves the worker fewer requests than it was configured for. Each run notes it; the event log
-- has it once, until it is another limit.
create or replace function ulak_private.note_limit(p_slot integer, p_limited_by text)
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    update ulak.workers w
    set limited_by = p_limited_by
    where w.slot = p_slot and w.pid = pg_backend_pid() and w.limited_by is distinct from p_limited_by;
    if found and p_limited_by is not null then
        insert into ulak.event_log (event, detail)
        values ('worker.limited', jsonb_build_object('slot', p_slot, 'limited_by', p_limited_by));
    end if;
end
$plpgsql$;

-- A worker that could not report its end, because a lock was taken, does it here.
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

-- Sessions that watch the workers of this database. Nobody else has this role to show.
create or replace function ulak_private.watchers()
returns table (pid integer, backend_start timestamptz)
language sql
stable
set search_path = pg_catalog, pg_temp
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

-- Which slots of start() nobody runs, and whether a watcher has anything to watch at all.
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
    -- Of two watchers the one that came first leaves: the other will be there in the next minute, too.
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

-- What the worker needs to know, and a text that changes whenever a setting does. The session's claims go by it, see has_old_settings().
create or replace function ulak_private.worker_options()
returns table (settings jsonb, version text, fingerprint text)
language sql
security definer
set search_path = pg_catalog, pg_temp
as $sql$
    select
        (
            select jsonb_object_agg(s.name, ulak.setting(s.name))
            from unnest(array[
                'batch_size',
                'capture_response',
                'cloudevents_source',
                'http_allow_internal_urls',
                'http_allowed_hosts',
                'http_allowed_networks',
                'http_connect_timeout',
                'http_timeout',
                'lease_seconds',
                'poll_interval',
                'poll_interval_busy',
                'response_body_max_size',
                'turn_interval',
                'worker_concurrency'
            ]) s(name)
        ),
        ulak_private.version(),
        set_config('ulak_private.settings', ulak_private.settings_fingerprint(), false)
$sql$;

-- Whether a setting has changed since this session's worker has asked for them. A claim looks with the snapshot of its messages, or a later
-- one, and then claims nothing: so a setting that was committed before a message was sent holds for that message. A view, because a claim
-- of one message spends a tenth of its time in functions that ask for it.
create or replace view ulak_private.session_settings as
select s.fingerprint, coalesce(nullif(current_setting('ulak_private.settings', true), '') <> s.fingerprint, false) as are_old
from (
    select count(*) || coalesce(string_agg(' ' || v.name || '=' || v.value, '' order by v.name), '') as fingerprint
    from ulak.setting_values v
) s;

comment on view ulak_private.session_settings is
    'all settings that were changed as one text, and whether it isn''t the one that this session''s worker goes by; private to ulak';
comment on column ulak_private.session_settings.fingerprint is 'all settings that were changed, with their values';
comment on column ulak_private.session_settings.are_old is 'this session''s worker has asked for them before one was changed; false in other sessions';

create or replace function ulak_private.settings_fingerprint()
returns text
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    return s.fingerprint from ulak_private.session_settings s;
end
$plpgsql$;

create or replace function ulak_private.has_old_settings()
returns boolean
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    return s.are_old from ulak_private.session_settings s;
end
$plpgsql$;

-- Asked ten times a second, or each second by a worker that listens: whether to go on. `stop` when stop() was called since the run began.
create or replace function ulak_private.worker_check(p_slot integer, p_stamp text)
returns table (leave text, settings text)
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    return query
    select
        case
            when w.stop_requested_at >= w.started_at then 'stop'
            -- The node was silent for so long that it was forgotten.
            when w.slot is null and p_slot > 100 then 'restart'
            -- Another session took the slot, because this one seemed to hang.
            when w.pid <> pg_backend_pid() then 'restart'
            when w.is_scheduled and not ulak_private.is_wanted(p_slot) then 'stop'
            when w.host is not null and ulak_private.is_stopped() then 'stop'
            when p_stamp <> ulak_private.stamp_of(ulak_private.version()) then 'restart'
        end,
        -- A worker whose session knows of no settings, because they were rolled back, has to ask for them again.
        case when ulak_private.has_old_settings() then 'others' else coalesce(current_setting('ulak_private.settings', true), '') end
    from (values (p_slot)) s (slot)
    left join ulak.workers w on w.slot = s.slot;
end
$plpgsql$;

-- Where a worker without work spends its time: looks at the senders' sequence until it moves. Here and not in Python, and
-- without a query, because what has slept must be fetched into the processor's caches again, and this is little.
create or replace function ulak_private.await_send(p_last_sent bigint, p_interval double precision, p_seconds double precision)
returns bigint
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_sequence oid := 'ulak.queue_id_seq'::regclass;
    v_looks integer := greatest(1, ceil(p_seconds / p_interval));
    v_interval double precision := p_seconds / v_looks;
    v_sent bigint;
    v_slept text;
begin
    for v_look in 1..v_looks loop
        v_slept := pg_sleep(v_interval);
        v_sent := coalesce(pg_sequence_last_value(v_sequence), 0);
        exit when v_sent <> p_last_sent;
    end loop;
    return v_sent;
end
$plpgsql$;

-- A worker's sign of life, with its counters since the last one.
create or replace function ulak_private.worker_report(p_slot integer, p_worker text, p_progress jsonb, p_stats jsonb)
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_now timestamptz := clock_timestamp();
    v_processed bigint := (p_progress -> 'processed')::bigint;
begin
    update ulak.workers w
    set state = p_progress ->> 'state',
        last_activity = case when v_processed > 0 then v_now else w.last_activity end,
        heartbeat_at = v_now,
        in_flight = (p_progress -> 'in_flight')::integer,
        messages_processed = w.messages_processed + v_processed,
        error_count = w.error_count + (p_progress -> 'failed')::bigint,
        last_error = coalesce(p_progress ->> 'last_error', w.last_error),
        clock_ahead = make_interval(secs => (p_progress ->> 'clock_ahead')::double precision),
        suspicion = coalesce((p_progress -> 'suspicion')::integer, w.suspicion)
    where w.slot = p_slot and w.name = p_worker;
    if p_progress ? 'broken_by' then
        perform ulak_private.note_broken_run(p_slot, p_worker, p_progress, v_now);
    end if;
    if jsonb_array_length(p_stats) > 0 then
        perform ulak_private.add_endpoint_stats(p_stats, date_trunc('minute', v_now));
    end if;
    if p_progress ->> 'state' = 'running' and ulak_private.is_poller(p_slot) then
        perform ulak_private.keep_watcher();
    end if;
end
$plpgsql$;

-- A run that ended with an error. doctor() tells of it for an hour, and counts those that came within an hour of the one before.
create or replace function ulak_private.note_broken_run(p_slot integer, p_worker text, p_progress jsonb, p_now timestamptz)
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_error text := ulak_private.error_line(p_progress ->> 'broken_by');
begin
    update ulak.workers w
    set broken_runs = case when w.broken_at > p_now - interval '1 hour' then w.broken_runs else 0 end + 1,
        broken_at = p_now,
        broken_by = v_error
    where w.slot = p_slot and w.name = p_worker;
    insert into ulak.event_log (event, detail)
    values ('worker.broke_off', jsonb_build_object('worker', p_worker, 'error', v_error, 'messages', p_progress -> 'held'));
end
$plpgsql$;

-- How many runs of this slot in turn ended with an error of the worker's own code. From 2 on it holds one message at a time.
create or replace function ulak_private.suspicion(p_slot integer)
returns integer
language sql
stable
security definer
set search_path = pg_catalog, pg_temp
as $sql$
    select coalesce(max(w.suspicion), 0)
    from ulak.workers w
    where w.slot = p_slot
$sql$;

-- For each endpoint that the worker has sent to since it last told: read once, added to the minute and to the total.
create or replace function ulak_private.add_endpoint_stats(p_stats jsonb, p_minute timestamptz)
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    with added as materialized (
        select a.*
        from jsonb_to_recordset(p_stats) a(
            endpoint_id bigint,
            delivered bigint,
            failed bigint,
            latency_total_ms double precision,
            latency_max_ms double precision,
            latency_histogram bigint[]
        )
    ),
    minute as (
        insert into ulak.endpoint_stats as s (
            endpoint_id, minute, delivered, failed, latency_total_ms, latency_histogram, latency_max_ms
        )
        select a.endpoint_id, p_minute, a.delivered, a.failed, a.latency_total_ms, a.latency_histogram, a.latency_max_ms
        from added a
        on conflict (endpoint_id, minute) do update
        set delivered = s.delivered + excluded.delivered,
            failed = s.failed + excluded.failed,
            latency_total_ms = s.latency_total_ms + excluded.latency_total_ms,
            latency_histogram = ulak_private.add_histograms(s.latency_histogram, excluded.latency_histogram),
            -- A minute that 0.1.0 began has none.
            latency_max_ms = case when s.latency_max_ms is not null then greatest(s.latency_max_ms, excluded.latency_max_ms) end
    )
    insert into ulak.endpoint_totals as t (endpoint_id, delivered, failed, latency_total_ms, latency_histogram)
    select a.endpoint_id, a.delivered, a.failed, a.latency_total_ms, a.latency_histogram
    from added a
    on conflict (endpoint_id) do update
    set delivered = t.delivered + excluded.delivered,
        failed = t.failed + excluded.failed,
        latency_total_ms = t.latency_total_ms + excluded.latency_total_ms,
        latency_histogram = ulak_private.add_histograms(t.latency_histogram, excluded.latency_histogram);
end
$plpgsql$;

-- Endpoints that must not be sent to now, though messages for them were claimed a moment ago.
create or replace function ulak_private.blocked_endpoints(p_ids bigint[])
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

-- One worker looks often for new messages: the one with the lowest number that is alive.
create or replace function ulak_private.is_poller(p_slot integer)
returns boolean
language sql
stable
security definer
set search_path = pg_catalog, pg_temp
as $sql$
    select not exists (select from ulak.workers w where w.slot < p_slot and ulak_private.is_taken(w))
$sql$;

create or replace function ulak_private.ping(p_endpoint_id bigint)
returns text
language plpython3u
as $python$
    plpy.execute("select ulak_private.load_python()")
    from ulak import entry_points

    return entry_points.ping(p_endpoint_id)
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
        perform ulak_private.raise_unknown_endpoint(p_endpoint);
    elsif v_endpoint.protocol <> all (ulak_private.worker_protocols()) then
        raise exception 'no worker delivers to endpoint "%"', p_endpoint
            using errcode = '22023', detail = format('Its protocol is %s.', v_endpoint.protocol);
    end if;
    return query
    select a.outcome, a.status, a.milliseconds, a.error, a.response
    from jsonb_to_record(ulak_private.ping(v_endpoint.id)::jsonb) a(
        outcome text,
        status integer,
        milliseconds double precision,
        error text,
        response jsonb
    );
end
$plpgsql$;

comment on function ulak.ping(text) is
    'sends one test message to an endpoint now, signed like any other, and returns its outcome; it affects neither the queue nor the circuit breaker';
