-- What workers and nodes report: heartbeats, counters, limits that slow them down, runs that ended with an error.

-- Records that a limit of the operating system allows the worker fewer requests than configured. Each run reports it; the event log gets an
-- entry when the limit changes.
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

-- A worker's heartbeat, with its counters since the last one.
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

-- A run that ended with an error. doctor() reports it for an hour. Runs that fail within an hour of the previous failure are counted together.
create or replace function ulak_private.note_broken_run(p_slot integer, p_worker text, p_progress jsonb, p_now timestamptz)
returns void
language plpgsql
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

-- How many consecutive runs of this slot ended with an error in the worker's own code. From 2 on, it claims one message at a time.
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

-- Adds a worker's counters of each endpoint to the minute and to the total.
create or replace function ulak_private.add_endpoint_stats(p_stats jsonb, p_minute timestamptz)
returns void
language plpgsql
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
            latency_max_ms = greatest(s.latency_max_ms, excluded.latency_max_ms)
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
