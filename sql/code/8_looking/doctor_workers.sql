-- Workers, nodes, and pg_cron, which starts the workers. Another scheduler may start them instead.

create or replace function ulak_private.doctor_workers(p_now timestamptz)
returns table (severity text, check_name text, finding text, fix text)
language plpgsql
stable
as $plpgsql$
declare
    -- After start(0) nodes deliver.
    v_workers integer := coalesce((select s.workers from ulak_private.schedule s where not s.is_stopped), ulak_private.default_workers());
    v_alive bigint := ulak_private.count_alive(p_now);
begin
    if not exists (select from ulak.endpoints e where e.protocol = any (ulak_private.worker_protocols())) then
        return;
    end if;
    return query
    select f.* from ulak_private.doctor_pg_cron(v_workers, v_alive) f
    union all
    select f.* from ulak_private.doctor_runs(v_alive, p_now) f
    union all
    select f.* from ulak_private.doctor_alive(v_workers, v_alive, p_now) f;
end
$plpgsql$;

create or replace function ulak_private.doctor_pg_cron(p_workers integer, p_alive bigint)
returns table (severity text, check_name text, finding text, fix text)
language sql
stable
as $sql$
    select case when p_alive = 0 then 'critical' else 'warning' end, c.item, c.detail, c.fix
    from ulak_private.check_pg_cron(p_workers) c
    where c.status = 'problem' and (p_alive = 0 or ulak_private.is_pg_cron_loaded())
    union all
    select
        case when p_alive = 0 then 'critical' else 'warning' end,
        'pg_cron',
        format('%s jobs run on %s, which is not this server: it was promoted, restored or moved', m.jobs, m.place),
        'select * from ulak.start();'
    from ulak_private.misplaced_jobs() m
    union all
    select
        'warning',
        'pg_cron',
        format('session %s waits for pg_cron, which answers at the next full minute: %s', a.pid, left(a.query, 60)),
        -- This changes nothing, but makes pg_cron answer. Versions after 1.4 answer by themselves.
        ulak_private.fix_elsewhere('$$update cron.job set active = active where false;$$')
    from pg_stat_activity a
    where a.wait_event = 'ProcSignalBarrier' and not ulak_private.has_pg_cron() and not ulak_private.has_seconds()
    union all
    -- A node has its own client libraries.
    select
        'warning',
        'workers',
        format(
            '%s is not installed on this server: no worker in the database delivers to the %s of protocol %s',
            m.package, ulak_private.counted(m.endpoints, 'endpoint'), m.protocol
        ),
        ulak_private.package_fix(m.package)
    from ulak_private.missing_clients() m
    where p_workers > 0
    union all
    select
        case when t.timeout < interval '1 minute' then 'critical' else 'warning' end,
        'workers',
        format('statement_timeout ends each run of a worker after %s, and what it has in flight is sent again', ulak_private.short_duration(t.timeout)),
        'select * from ulak.start(); -- lifts it for ulak_worker in this database'
    from (select ulak_private.run_timeout()) t (timeout)
    where p_workers > 0 and t.timeout < interval '10 minutes' and ulak_private.has_python()
$sql$;

-- What workers and nodes report about themselves, and which of them went silent.
create or replace function ulak_private.doctor_runs(p_alive bigint, p_now timestamptz)
returns table (severity text, check_name text, finding text, fix text)
language sql
stable
as $sql$
    select
        'warning',
        'workers',
        format('%s is slower than it could be: %s', w.name, w.limited_by),
        format(
            '-- raise the limit of open files for %s (systemd: LimitNOFILE=65536 in its unit), then restart it',
            coalesce('the node on ' || w.host, 'the server')
        )
    from ulak.workers w
    where w.limited_by is not null and ulak_private.is_alive(w, p_now)
    union all
    select
        'warning',
        'workers',
        format(
            'the clock of %s is %s %s the server''s',
            w.host, ulak_private.short_duration(greatest(w.clock_ahead, -w.clock_ahead)), case when w.clock_ahead > '0' then 'ahead of' else 'behind' end
        ),
        format('-- on %s, as root: timedatectl set-ntp true', w.host)
    from ulak.workers w
    where abs(extract(epoch from w.clock_ahead)) > 1 and ulak_private.is_alive(w, p_now)
    union all
    select
        'warning',
        'workers',
        format(
            '%s of %s ended with an error, the last one %s ago: %s',
            ulak_private.counted(w.broken_runs, 'run'), split_part(w.name, ',', 1), ulak_private.short_duration(p_now - w.broken_at), w.broken_by
        ),
        'select created_at, detail from ulak.event_log where event = ''worker.broke_off'' order by id desc limit 10; '
        '-- this is a bug in ulak, please report it; a message that causes it becomes a dead letter'
    from ulak.workers w
    where w.broken_at > p_now - interval '1 hour'
    union all
    select
        'warning',
        'workers',
        format('%s went silent %s ago', w.name, ulak_private.short_duration(p_now - w.heartbeat_at))
            || case when w.host is null then coalesce('; the next one starts ' || b.starts, '') else '' end,
        case
            when w.host is null then 'select * from ulak.start(); -- its messages are recovered when the next one takes its place, or when their leases run out'
            else format('-- look at the node on %s; its messages are recovered when their leases run out', w.host)
        end
    from ulak.get_worker_status(p_now) w
    cross join ulak_private.workers_begin(p_now) b
    where w.state = 'lost' and p_alive > 0
$sql$;

-- Whether a worker or a node is alive, and whether the next one will be started.
create or replace function ulak_private.doctor_alive(p_workers integer, p_alive bigint, p_now timestamptz)
returns table (severity text, check_name text, finding text, fix text)
language sql
stable
as $sql$
    select
        'info',
        'workers',
        format(
            'no worker is alive yet: start() was called %s ago, and they begin %s',
            ulak_private.short_duration(p_now - (select s.changed_at from ulak_private.schedule s)), b.starts
        ),
        null
    from ulak_private.workers_begin(p_now) b
    where p_alive = 0 and b.is_new
    union all
    select
        'critical',
        'workers',
        d.finding || coalesce('; the last sign of life was ' || ulak_private.short_duration(p_now - l.lost_at) || ' ago', ''),
        d.fix
    from ulak_private.workers_begin(p_now) b
    cross join (select max(w.heartbeat_at) from ulak.workers w) l (lost_at)
    cross join lateral ulak_private.nobody_alive(p_workers, b.is_scheduled, b.starts, l.lost_at > p_now - interval '75 seconds') d
    where p_alive = 0 and not b.is_new
    union all
    select 'warning', 'workers', 'workers run, but pg_cron has no job that will start the next ones', 'select * from ulak.start();'
    from ulak_private.workers_begin(p_now) b
    where p_alive > ulak_private.count_nodes(p_now) and ulak_private.has_pg_cron() and not b.is_scheduled
$sql$;

-- Why none may be alive, and what to do: the first line that applies.
create or replace function ulak_private.nobody_alive(p_workers integer, p_is_scheduled boolean, p_starts text, p_was_just_lost boolean)
returns table (finding text, fix text)
language sql
stable
as $sql$
    select d.finding, d.fix
    from (
        select
            ulak_private.has_python(),
            ulak_private.has_pg_cron(),
            ulak_private.is_stopped(),
            ulak_private.is_pg_cron_loaded()
                and not ulak_private.has_pg_cron()
                and exists (select from ulak_private.schedule c where c.workers > 0),
            'select * from ulak.start();',
            'select status, return_message, start_time from cron.job_run_details order by runid desc limit 5; '
            '-- if there is none: select * from ulak.start();'
    ) s (has_python, has_pg_cron, is_stopped, is_elsewhere, start, runs)
    cross join lateral (
        values
            (1, not s.has_python and s.is_stopped, 'no node is alive', 'select * from ulak.start(0); -- stop() was called, and nodes wait'),
            (2, not s.has_python, 'no node is alive', format('-- start a node: python3 worker.py --dsn "... dbname=%s"', current_database())),
            (3, p_workers = 0, 'no node is alive, and start(0) left delivery to nodes', 'select * from ulak.start(2); -- to deliver in the database; or start a node'),
            (4, p_is_scheduled and p_was_just_lost, 'no worker is alive; the next one starts ' || p_starts, case when s.has_pg_cron then s.runs else s.start end),
            (5, p_is_scheduled and s.has_pg_cron, 'no worker is alive, though pg_cron has jobs for them: cron.job_run_details says why', s.runs),
            (6, s.is_elsewhere, 'no worker is alive, though start() was called: its jobs have to be created where pg_cron lives', s.start),
            (7, s.has_pg_cron, 'no worker is alive, and pg_cron has no job for one', s.start),
            (8, true, 'no worker is alive', s.start)
    ) d (place, applies, finding, fix)
    where d.applies
    order by d.place
    limit 1
$sql$;
