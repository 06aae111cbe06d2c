-- doctor(): problems, how bad they are, and the SQL that fixes them.

create or replace function ulak.doctor(p_now timestamptz default clock_timestamp())
returns table (severity text, "check" text, finding text, fix text)
language plpgsql
stable
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    return query
    select f.severity, f.check_name, f.finding, f.fix
    from ulak_private.doctor(array(select f from ulak_private.endpoint_facts(null, p_now) f), p_now) f;
end
$plpgsql$;

comment on function ulak.doctor(timestamptz) is
    'lists problems, the worst first, at most 20 per check; fix is the SQL that solves it, with a comment for what SQL can''t do';

create or replace function ulak_private.doctor(p_facts ulak_private.endpoint_fact[], p_now timestamptz)
returns table (severity text, check_name text, finding text, fix text)
language plpgsql
stable
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
as $plpgsql$
#variable_conflict use_column
begin
    p_now := ulak_private.finite_time(p_now);
    return query
    with problem as materialized (
        select f.severity, f.check_name, f.finding, f.fix from ulak_private.trouble(p_facts, p_now) f
        union all
        select f.* from ulak_private.doctor_settings() f
        union all
        select f.* from ulak_private.doctor_signatures() f
        union all
        select f.* from ulak_private.doctor_roles() f
        union all
        select f.* from ulak_private.doctor_missing_roles() f
        union all
        select f.* from ulak_private.doctor_setup() f
    ),
    counted as (
        select
            p.*,
            row_number() over (partition by p.severity, p.check_name order by p.finding) as place,
            count(*) over (partition by p.severity, p.check_name) as alike
        from problem p
    ),
    -- Thousands of one kind would hide the others.
    shown as (
        select c.severity, c.check_name, c.finding, c.fix, c.place
        from counted c
        where c.place <= 20
        union all
        select c.severity, c.check_name, format('and %s more like these', ulak_private.thousands(c.alike - 20)), null, 21
        from counted c
        where c.place = 21
    )
    select f.severity, f.check_name, f.finding, f.fix
    from shown f
    -- Causes before what follows from them.
    order by
        array_position(array['critical', 'warning', 'info'], f.severity),
        array_position(array['missing roles', 'cluster', 'clock', 'pg_cron', 'workers', 'settings', 'maintenance', 'circuit', 'failing', 'ordering key', 'session', 'queue', 'backlog'], f.check_name),
        f.check_name,
        f.place;
    if not found then
        return query values ('ok', 'all', 'nothing is wrong', null::text);
    end if;
end
$plpgsql$;

-- Problems that stop deliveries, or will: the findings of doctor() that health_check() uses, too, with the component that
-- each belongs to.
create or replace function ulak_private.trouble(p_facts ulak_private.endpoint_fact[], p_now timestamptz)
returns table (component text, severity text, check_name text, finding text, fix text)
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select 'cluster', f.* from ulak_private.doctor_cluster() f
    union all
    select 'maintenance', f.* from ulak_private.doctor_clock(p_now) f
    union all
    select 'workers', f.* from ulak_private.doctor_workers(p_now) f
    union all
    select case f.check_name when 'partitions' then 'archive' else 'maintenance' end, f.* from ulak_private.doctor_maintenance(p_now) f
    union all
    select case when f.check_name in ('queue', 'backlog', 'ordering', 'dropped endpoint') then 'queue' else 'endpoints' end, f.*
    from ulak_private.doctor_endpoints(p_facts, p_now) f
    union all
    select 'dlq', f.* from ulak_private.doctor_dlq(p_facts, p_now) f
    union all
    select 'queue', f.* from ulak_private.doctor_vacuum(p_now) f
    union all
    select 'queue', f.* from ulak_private.doctor_locks(p_now) f
    union all
    select 'queue', f.* from ulak_private.doctor_sessions(p_now) f
$sql$;

create or replace function ulak_private.doctor_cluster()
returns table (severity text, check_name text, finding text, fix text)
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select
        'critical',
        'cluster',
        b.reason || ': nothing is delivered',
        'select ulak.adopt(); -- if this cluster is to deliver them'
    from ulak_private.held_because() b(reason)
    where b.reason is not null
$sql$;

-- Times that were written by a clock that was ahead lie in the future now.
create or replace function ulak_private.doctor_clock(p_now timestamptz)
returns table (severity text, check_name text, finding text, fix text)
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select
        'warning',
        'clock',
        format(
            'the server''s clock was set back by %s%s: messages with times in the future are corrected within a minute',
            ulak_private.short_duration(coalesce(s.set_back_by, l.latest_at - p_now)),
            coalesce(', ' || ulak_private.short_duration(p_now - s.set_back_at) || ' ago', '')
        ),
        '-- make sure that the clock is right, and never jumps by more than a second: chronyc tracking, or timedatectl'
    from ulak_private.sweep_state s
    cross join lateral (
        select greatest(
            s.latest_at, (select max(w.heartbeat_at) from ulak.workers w), (select max(r.started_at) from ulak_private.maintenance_runs r)
        )
    ) l (latest_at)
    where s.set_back_at is not null or ulak_private.is_ahead(l.latest_at, p_now)
$sql$;

create or replace function ulak_private.doctor_roles()
returns table (severity text, check_name text, finding text, fix text)
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select 'warning', 'roles', format('role %s %s', p.role, p.problem), p.remedy
    from ulak_private.role_problems() p
    where not p.is_usual
$sql$;

-- Roles are no part of a dump. These have grants here, or have sent what is held until adopt(); where they are missing nobody can log in to send.
create or replace function ulak_private.doctor_missing_roles()
returns table (severity text, check_name text, finding text, fix text)
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select
        case when ulak_private.is_adopted() then 'warning' else 'critical' end,
        'missing roles',
        format('role %I %s, and does not exist in this cluster', m.name, string_agg(distinct m.use, ' and ' order by m.use)),
        format('create role %I login in role %s; -- then its password', m.name, string_agg(distinct m.role, ', ' order by m.role))
    from (
        select g.role_name, r.role, 'has grants on endpoints'
        from ulak.endpoint_grants g
        cross join lateral (
            select 'ulak_consumer' where g.may_work
            union all
            select 'ulak_application' where g.may_send
        ) r (role)
        union all
        select g.role_name, 'ulak_application', 'has grants on event types'
        from ulak.event_type_grants g
        union all
        select q.sent_by, 'ulak_application', 'has sent messages that wait'
        from (select q.sent_by from ulak.queue q where not ulak_private.is_adopted() order by q.id desc limit 1000) q
    ) m (name, role, use)
    where m.name is not null and to_regrole(quote_ident(m.name)) is null
    group by m.name
$sql$;

-- The steps that are missing before anything can be delivered. With an endpoint, doctor_workers() goes on from here.
create or replace function ulak_private.doctor_setup()
returns table (severity text, check_name text, finding text, fix text)
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select 'info', f.item, f.finding, f.fix
    from (
        select
            'endpoints',
            'there is no endpoint yet: nothing can be sent',
            'select ulak.create_endpoint(''orders'', ''http'', ''{"url": "https://example.com/hook"}''); -- with the url of your receiver'
        union all
        select c.item, c.detail, c.fix
        from ulak_private.check_pg_cron(ulak_private.default_workers()) c
        where c.status = 'problem' and ulak_private.default_workers() > 0
    ) f (item, finding, fix)
    where not exists (select from ulak.endpoints)
$sql$;

-- Workers don't need pg_cron: another scheduler may run them. If it stops, that is noticed within a minute.
create or replace function ulak_private.doctor_workers(p_now timestamptz)
returns table (severity text, check_name text, finding text, fix text)
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $plpgsql$
#variable_conflict use_column
declare
    -- After start(0) nodes deliver.
    v_workers integer := coalesce((select s.workers from ulak_private.schedule s where not s.is_stopped), ulak_private.default_workers());
    v_alive bigint := ulak_private.count_alive(p_now);
    v_nodes bigint := ulak_private.count_nodes(p_now);
    v_lost_at timestamptz := (select max(w.heartbeat_at) from ulak.workers w);
    v_is_scheduled boolean;
    v_is_new boolean;
    v_starts text;
begin
    if not exists (select from ulak.endpoints e where e.protocol = any (ulak_private.worker_protocols())) then
        return;
    end if;
    return query
    select case when v_alive = 0 then 'critical' else 'warning' end, c.item, c.detail, c.fix
    from ulak_private.check_pg_cron(v_workers) c
    where c.status = 'problem' and (v_alive = 0 or ulak_private.is_pg_cron_loaded());

    return query
    select
        case when v_alive = 0 then 'critical' else 'warning' end,
        'pg_cron',
        format('%s jobs run on %s, which is not this server: it was promoted, restored or moved', m.jobs, m.place),
        'select * from ulak.start();'
    from ulak_private.misplaced_jobs() m;

    return query
    select
        'warning',
        'pg_cron',
        format('session %s waits for pg_cron, which answers at the next full minute: %s', a.pid, left(a.query, 60)),
        -- It changes nothing, but makes pg_cron answer. Later versions than 1.4 do so by themselves.
        ulak_private.fix_elsewhere('$$update cron.job set active = active where false;$$')
    from pg_stat_activity a
    where a.wait_event = 'ProcSignalBarrier' and not ulak_private.has_pg_cron() and not ulak_private.has_seconds();

    return query
    select
        'warning',
        'workers',
        format(
            '%s is not installed on this server: no worker in the database delivers to the %s of protocol %s',
            m.package, ulak_private.counted(m.endpoints, 'endpoint'), m.protocol
        ),
        format('-- as root on the server: apt-get install %s', m.package)
    from ulak_private.missing_clients() m
    -- A node has its own.
    where v_workers > 0;

    return query
    select
        case when t.timeout < interval '1 minute' then 'critical' else 'warning' end,
        'workers',
        format('statement_timeout ends each run of a worker after %s, and what it has in flight is sent again', ulak_private.short_duration(t.timeout)),
        'select * from ulak.start(); -- lifts it for ulak_worker in this database'
    from (select ulak_private.run_timeout()) t (timeout)
    where v_workers > 0 and t.timeout < interval '10 minutes' and ulak_private.has_python();

    return query
    select
        'warning',
        'workers',
        format('%s is slower than it could be: %s', w.name, w.limited_by),
        format(
            '-- raise the limit of open files for %s (systemd: LimitNOFILE=65536 in its unit), then restart it',
            coalesce('the node on ' || w.host, 'the server')
        )
    from ulak.workers w
    where w.limited_by is not null and ulak_private.is_alive(w, p_now);

    return query
    select
        'warning',
        'workers',
        format(
            'the clock of %s is %s %s the server''s',
            w.host, ulak_private.short_duration(greatest(w.clock_ahead, -w.clock_ahead)), case when w.clock_ahead > '0' then 'ahead of' else 'behind' end
        ),
        format('-- on %s, as root: timedatectl set-ntp true', w.host)
    from ulak.workers w
    where abs(extract(epoch from w.clock_ahead)) > 1 and ulak_private.is_alive(w, p_now);

    return query
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
    where w.broken_at > p_now - interval '1 hour';

    select b.is_scheduled, b.is_new, b.starts into v_is_scheduled, v_is_new, v_starts
    from ulak_private.workers_begin(p_now) b;
    if v_alive = 0 and v_is_new then
        return query values (
            'info',
            'workers',
            format('no worker is alive yet: start() was called %s ago, and they begin %s', ulak_private.short_duration(p_now - (select s.changed_at from ulak_private.schedule s)), v_starts),
            null::text
        );
    elsif v_alive = 0 then
        return query values (
            'critical',
            'workers',
            case
                when not ulak_private.has_python() then 'no node is alive'
                when v_workers = 0 then 'no node is alive, and start(0) left delivery to nodes'
                when v_is_scheduled and v_lost_at > p_now - interval '75 seconds' then 'no worker is alive; the next one starts ' || v_starts
                when v_is_scheduled and ulak_private.has_pg_cron()
                    then 'no worker is alive, though pg_cron has jobs for them: cron.job_run_details says why'
                when ulak_private.is_pg_cron_loaded() and not ulak_private.has_pg_cron() and exists (select from ulak_private.schedule c where c.workers > 0)
                    then 'no worker is alive, though start() was called: its jobs have to be created where pg_cron lives'
                when ulak_private.has_pg_cron() then 'no worker is alive, and pg_cron has no job for one'
                else 'no worker is alive'
            end || coalesce(
                '; the last sign of life was ' || ulak_private.short_duration(p_now - v_lost_at) || ' ago',
                ''
            ),
            case
                when not ulak_private.has_python() and ulak_private.is_stopped() then 'select * from ulak.start(0); -- stop() was called, and nodes wait'
                when not ulak_private.has_python() then format('-- start a node: python3 worker.py --dsn "... dbname=%s"', current_database())
                when v_workers = 0 then 'select * from ulak.start(2); -- to deliver in the database; or start a node'
                when v_is_scheduled and ulak_private.has_pg_cron()
                    then 'select status, return_message, start_time from cron.job_run_details order by runid desc limit 5; '
                        '-- if there is none: select * from ulak.start();'
                else 'select * from ulak.start();'
            end
        );
    elsif ulak_private.has_pg_cron() and not v_is_scheduled and v_nodes < v_alive then
        return query values ('warning', 'workers', 'workers run, but pg_cron has no job that will start the next ones', 'select * from ulak.start();');
    end if;

    return query
    select
        'warning',
        'workers',
        format('%s went silent %s ago', w.name, ulak_private.short_duration(p_now - w.heartbeat_at))
            || case when w.host is null then coalesce('; the next one starts ' || v_starts, '') else '' end,
        case
            when w.host is null then 'select * from ulak.start(); -- its messages are recovered when the next one takes its place, or when their leases run out'
            else format('-- look at the node on %s; its messages are recovered when their leases run out', w.host)
        end
    from ulak.get_worker_status(p_now) w
    where w.state = 'lost' and v_alive > 0;
end
$plpgsql$;

-- Whether pg_cron is to run workers, when it starts the next one, and whether that is still to come since start() was called.
create or replace function ulak_private.workers_begin(p_now timestamptz)
returns table (is_scheduled boolean, is_new boolean, starts text)
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_minute timestamptz := date_trunc('minute', p_now) + interval '1 minute';
begin
    if ulak_private.has_pg_cron() then
        execute 'select exists (select from cron.job j where j.database = $1 and j.jobname like $2 and j.active)'
            into is_scheduled
            using current_database(), 'ulak worker %';
    else
        -- Its jobs can't be seen from here, but whether they have started a worker since start() said what to run there.
        is_scheduled := ulak_private.is_pg_cron_loaded() and exists (
            select
            from ulak_private.schedule s
            where s.workers > 0 and exists (select from ulak.workers w where w.host is null and w.started_at >= s.changed_at)
        );
    end if;
    is_new := is_scheduled and exists (
        select
        from ulak_private.schedule s
        where s.workers > 0
            and s.changed_at > p_now - interval '75 seconds'
            and not ulak_private.is_ahead(s.changed_at, p_now)
            and not exists (select from ulak.workers w where w.started_at >= s.changed_at)
    );
    if is_scheduled then
        starts := case
            when ulak_private.has_seconds() or exists (select from ulak_private.watchers()) then 'within a few seconds'
            else format('at %s, in %s', to_char(v_minute, 'HH24:MI:SS'), ulak_private.short_duration(v_minute - p_now))
        end;
    end if;
    return next;
end
$plpgsql$;

create or replace function ulak_private.doctor_maintenance(p_now timestamptz)
returns table (severity text, check_name text, finding text, fix text)
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select 'warning', 'partitions', p.finding, 'select ulak.maintain_archive_partitions();'
    from ulak_private.check_partitions(p_now) p
    union all
    select
        case when m.failed then 'critical' else 'warning' end,
        'maintenance',
        m.trouble,
        'call ulak.run_maintenance();'
    from (
        select
            case
                -- pg_cron begins at the next full minute.
                when count(*) = 0 then (
                    select 'run_maintenance() never ran'
                    where exists (select from ulak.endpoints)
                        and not exists (select from ulak_private.schedule c where c.changed_at > p_now - interval '2 minutes' and not c.is_stopped)
                )
                when bool_and(s.is_late) then 'run_maintenance() last ran ' || ulak_private.short_duration(p_now - max(s.started_at)) || ' ago'
                else string_agg(
                    case
                        when s.is_failed then format('%s failed: %s', s.step, s.last_error)
                        else format('%s last ran %s ago', s.step, ulak_private.short_duration(p_now - s.started_at))
                    end,
                    '; '
                    order by s.step
                ) filter (where s.is_failed or s.is_late)
            end as trouble,
            bool_or(s.is_failed and not s.is_late) as failed
        from (
            select
                r.step,
                r.started_at,
                r.last_error,
                coalesce(r.last_error_at >= r.started_at, false) as is_failed,
                r.started_at < p_now - interval '5 minutes' as is_late
            from ulak_private.maintenance_runs r
        ) s
    ) m
    where m.trouble is not null
$sql$;

create or replace function ulak_private.doctor_endpoints(p_facts ulak_private.endpoint_fact[], p_now timestamptz)
returns table (severity text, check_name text, finding text, fix text)
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    with health as materialized (
        select f.*
        from unnest(p_facts) f
    ),
    -- Keys are looked at only where something was sent more than a minute ago.
    keys as materialized (
        select k.*, h.name
        from (select 10000 as most where exists (select from health h where h.oldest_at < p_now - interval '1 minute')) l
        cross join lateral ulak_private.live_keys(null, null, l.most) k
        join health h on h.id = k.endpoint_id
    )
    select
        case when h.circuit_broken_since <= p_now - interval '10 minutes' then 'critical' else 'warning' end,
        'circuit',
        format(
            'the circuit of endpoint "%s" opened %s ago%s: %s. %s %s, %s: %s',
            h.name,
            ulak_private.short_duration(p_now - h.circuit_broken_since),
            case when h.circuit_state = 'half_open' then ' and is being probed' else '' end,
            a.cause,
            ulak_private.known_count(h.waiting, h.is_estimate, h.sampled_at, p_now),
            case when h.waiting = 1 then 'message waits' else 'messages wait' end,
            coalesce('the last success was ' || ulak_private.short_duration(p_now - h.last_success_at) || ' ago', 'it never succeeded'),
            coalesce(h.last_error, 'no error is known')
        ),
        format(
            'select * from ulak.ping(%1$L); -- when it answers again: select ulak.reset_circuit_breaker(%1$L);',
            h.name
        )
    from health h
    cross join lateral ulak_private.advice(h.name, h.last_error) a
    where h.circuit_state <> 'closed'
    union all
    -- Nothing but failures, and no success since: at once what only somebody can mend and what never succeeded, the rest when it goes on.
    select
        'warning',
        'failing',
        format(
            'endpoint "%s" fails: %s. %sthe last one was %s ago: %s',
            h.name,
            a.cause,
            case when h.failed > 0 then format('%s in five minutes, %s succeeded; ', ulak_private.counted(h.failed, 'attempt'), case when h.last_success_at is null then 'none ever' else 'none' end) else '' end,
            ulak_private.short_duration(p_now - h.last_failure_at),
            h.last_error
        ),
        a.fix
    from (
        select h.*, r.failed
        from health h
        left join ulak_private.recent_rates(null, p_now) r on r.endpoint_id = h.id
        where h.enabled
            and h.protocol = any (ulak_private.worker_protocols())
            and h.circuit_state = 'closed'
            and (h.last_success_at is null or h.last_failure_at > least(h.last_success_at, p_now))
            and h.last_failure_at > p_now - interval '1 day'
            and coalesce(r.last_failed_percent, 100) = 100
    ) h
    cross join lateral ulak_private.advice(h.name, h.last_error) a
    where (a.is_lasting or h.last_success_at is null or h.failed >= 3)
        and not (a.cause ~ 'address is blocked$' and ulak_private.is_unblocked(h.last_error))
    union all
    select
        case when h.due_since < p_now - interval '1 hour' then 'critical' else 'warning' end,
        'backlog',
        format(
            'the oldest due message for endpoint "%s" has waited for %s; %s in all',
            h.name,
            ulak_private.short_duration(p_now - h.due_since),
            ulak_private.known_count(h.waiting, h.is_estimate, h.sampled_at, p_now) || case when h.waiting = 1 then ' waits' else ' wait' end
        ),
        format(
            'select x.* from ulak.queue q cross join lateral ulak.explain(q.id) x where q.endpoint_id = %s and q.status = ''pending'' '
            'order by q.priority desc, q.next_retry_at, q.id limit 5;',
            h.id
        )
    from health h
    where h.enabled and h.due_since < p_now - interval '5 minutes'
    union all
    select
        'info',
        'disabled',
        format(
            'endpoint "%s" is disabled and holds %s %s',
            h.name,
            ulak_private.known_count(h.waiting, h.is_estimate, h.sampled_at, p_now),
            case when h.waiting = 1 then 'message' else 'messages' end
        ),
        format('select ulak.enable_endpoint(%L); -- p_rate => 100 releases them at 100 a second', h.name)
    from health h
    where not h.enabled and h.waiting > 0
    union all
    select
        case when f.live >= f.most then 'critical' else 'warning' end,
        'queue',
        format(
            '%s of %s messages that the queue may hold are in it, most of them for %s',
            ulak_private.thousands(f.live), ulak_private.thousands(f.most), f.fillers
        ),
        format('select ulak.configure(''max_queue_size'', ''%s'');', f.most * 2)
    from (
        select
            sum(h.waiting + h.in_flight) as live,
            ulak.setting('max_queue_size')::bigint as most,
            (
                select string_agg(format('"%s" (%s)', t.name, ulak_private.thousands(t.messages)), ', ' order by t.messages desc, t.name)
                from (
                    select h.name, h.waiting + h.in_flight as messages
                    from health h
                    where h.waiting + h.in_flight > 0
                    order by 2 desc, 1
                    limit 3
                ) t
            ) as fillers
        from health h
    ) f
    where f.most > 0 and f.live > 0.8 * f.most
    union all
    select
        'warning',
        'queue',
        format(
            'endpoint "%s" is full: %s for it, its max_pending is %s',
            h.name,
            ulak_private.known_count(h.waiting, h.is_estimate, h.sampled_at, p_now) || case when h.waiting = 1 then ' message waits' else ' messages wait' end,
            ulak_private.thousands(h.max_pending)
        ),
        format('select * from ulak.get_endpoint_health(%L); -- it drains when the receiver recovers. To let more wait: "max_pending" in its config', h.name)
    from health h
    where h.waiting >= h.max_pending
    union all
    select
        'warning',
        'dropped endpoint',
        format('messages wait for endpoint %s, which does not exist', o.endpoint_id),
        format(
            'select ulak.archive_single_to_dlq(id, ''endpoint dropped'') from ulak.queue where endpoint_id = %s and status = ''pending'';',
            o.endpoint_id
        )
    from ulak_private.orphaned_endpoints() o
    union all
    select
        'warning',
        'ordering',
        format(
            'message %s is the first of ordering key "%s" for endpoint "%s" and was due %s ago, but no worker has taken it',
            k.message_id, k.ordering_key, h.name, ulak_private.short_duration(p_now - k.due_at)
        ),
        format('select * from ulak.explain(%s); -- then: call ulak.run_maintenance();', k.message_id)
    from (
        select h.id, h.name
        from health h
        where h.enabled and h.circuit_state = 'closed' and h.waiting_since < p_now - interval '15 minutes'
        order by h.waiting_since
        limit 50
    ) h
    cross join lateral ulak_private.stuck_ordering_keys(h.id, p_now) k
    union all
    -- A sweep finds these within ten seconds.
    select
        'warning',
        'ordering',
        format(
            'message %s is parked behind others of ordering key "%s" for endpoint "%s", but there are none: no sweep has made it due',
            k.head, k.ordering_key, k.name
        ),
        'call ulak.run_maintenance();'
    from keys k
    where k.is_parked and k.changed_at < p_now - interval '1 minute'
    union all
    -- As its sender wanted it, but not always the senders of those behind it.
    select
        'info',
        'ordering',
        format(
            'message %s holds up ordering key "%s" for endpoint "%s": it is due in %s, and others wait behind it',
            k.head, k.ordering_key, k.name, ulak_private.short_duration(q.next_retry_at - p_now)
        ),
        format('select * from ulak.explain(%1$s); -- to send it now: select ulak.reschedule(%1$s, now()); to take it back: select ulak.cancel(%1$s);', k.head)
    from keys k
    join ulak_private.deliveries q on q.id = k.head
    where not k.is_parked
        and q.status = 'pending'
        and q.next_retry_at > p_now + interval '1 hour'
        and exists (
            select
            from ulak_private.deliveries b
            where b.endpoint_id = k.endpoint_id
                and b.ordering_key = k.ordering_key
                and b.status in ('pending', 'processing')
                and b.id > k.head
        )
$sql$;

-- Ids of missing endpoints that messages wait for: that takes rows deleted by hand.
create or replace function ulak_private.orphaned_endpoints()
returns table (endpoint_id bigint)
language sql
stable
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = on
set jit = off
as $sql$
    select distinct l.endpoint_id
    from ulak_private.pending_levels() l
    where not exists (select from ulak.endpoints e where e.id = l.endpoint_id)
$sql$;

-- Keys of an endpoint whose first message should have gone long ago: something keeps it. The first twenty messages of each priority
-- are looked at.
create or replace function ulak_private.stuck_ordering_keys(p_endpoint_id bigint, p_now timestamptz)
returns table (message_id bigint, ordering_key text, due_at timestamptz)
language sql
stable
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
as $sql$
    select q.id, q.ordering_key, q.due_at
    from ulak_private.pending_levels(p_endpoint_id) l
    cross join lateral (
        select q.id, q.ordering_key, q.next_retry_at as due_at
        from ulak_private.deliveries q
        where q.status = 'pending'
            and q.endpoint_id = l.endpoint_id
            and q.priority = l.priority
            and q.next_retry_at < p_now - interval '15 minutes'
        order by q.next_retry_at, q.id
        limit 20
    ) q
    where q.ordering_key is not null
        and not exists (select from ulak_private.earlier_of_key(q.id, l.endpoint_id, q.ordering_key))
    order by q.due_at, q.id
    limit 3
$sql$;

-- Anybody can take an advisory lock. Changes of a circuit breaker wait for its lock for 0.1 s, other tools perhaps longer.
create or replace function ulak_private.doctor_locks(p_now timestamptz)
returns table (severity text, check_name text, finding text, fix text)
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select
        'warning',
        'locks',
        format(
            'session %s of %s has held the lock of the circuit breaker of %s for %s',
            a.pid,
            a.usename,
            coalesce(format('endpoint "%s"', e.name), 'no endpoint'),
            ulak_private.short_duration(p_now - h.since)
        ),
        format('select pg_terminate_backend(%s);', a.pid)
    from pg_locks l
    join pg_stat_activity a on a.pid = l.pid
    cross join lateral (select coalesce(a.xact_start, a.state_change)) h (since)
    left join ulak.endpoints e on e.id = l.objid::bigint
    where l.locktype = 'advisory'
        and l.database = (select d.oid from pg_database d where d.datname = current_database())
        and l.classid = (hashtext('ulak_cb')::bigint & 4294967295)::oid
        and l.objsubid = 2
        and l.granted
        and l.pid <> pg_backend_pid()
        and h.since < p_now - interval '5 seconds'
$sql$;

-- Growing: more entered in the last hour than in the one before. Both are counted up to a bound. What doesn't grow waits for
-- a person's decision all the same.
create or replace function ulak_private.doctor_dlq(p_facts ulak_private.endpoint_fact[], p_now timestamptz)
returns table (severity text, check_name text, finding text, fix text)
language sql
stable
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $sql$
    with entered as materialized (
        select n.letters, b.letters as before, n.endpoint, n.error, n.letters >= 10 and n.letters > b.letters as is_growing
        from (
            select count(*) as letters, mode() within group (order by d.endpoint_name) as endpoint,
                mode() within group (order by d.last_error) as error
            from (
                select d.endpoint_name, d.last_error, d.status
                from ulak.dlq d
                where d.archived_at > p_now - interval '1 hour' and d.archived_at <= p_now
                limit 5001
            ) d
            where d.status = 'failed'
        ) n
        cross join (
            select count(*) as letters
            from (
                select
                from ulak.dlq d
                where d.archived_at > p_now - interval '2 hours' and d.archived_at <= p_now - interval '1 hour'
                limit 5001
            ) d
        ) b
    )
    select
        'warning',
        'dlq',
        format(
            'the dead-letter queue grows: %s%s entered in the last hour, %s in the hour before; most often: %s',
            n.letters, case when n.letters > 5000 then ' or more' else '' end, n.before, n.error
        ),
        format(
            'select * from ulak.redrive(p_endpoint => %L, p_since => %L, p_dry_run => true);', n.endpoint, p_now - interval '1 hour'
        )
    from entered n
    where n.is_growing
    union all
    select
        'warning',
        'dlq',
        format(
            case
                when d.letters = 1 then '%s dead letter waits for a decision, of endpoint "%s"'
                when d.endpoints = 1 then '%s dead letters wait for a decision, of endpoint "%s"'
                else '%s dead letters wait for a decision, most of them of endpoint "%s"'
            end,
            ulak_private.known_count(d.letters, d.is_estimate, d.sampled_at, p_now),
            d.endpoint
        ),
        format('select * from ulak.redrive(p_endpoint => %L, p_dry_run => true);', d.endpoint)
    from (
        select
            sum(f.dead) as letters,
            count(*) as endpoints,
            bool_or(f.dead_is_estimate) as is_estimate,
            min(f.dead_sampled_at) as sampled_at,
            (array_agg(f.name order by f.dead desc, f.name))[1] as endpoint
        from unnest(p_facts) f
        where f.dead > 0
    ) d
    where d.letters > 0 and not (select n.is_growing from entered n)
    union all
    select
        'warning',
        'dlq',
        format(
            'dead letters that nobody has redriven are deleted in %s, the oldest is of endpoint "%s"',
            ulak_private.short_duration(d.archived_at + r.kept - p_now), d.endpoint_name
        ),
        'select * from ulak.dlq_summary(); -- then: select * from ulak.redrive(p_endpoint => ..., p_dry_run => true);'
    from (select make_interval(hours => 24 * ulak.setting('dlq_retention_days')::integer) as kept) r
    cross join lateral (
        select d.archived_at, d.endpoint_name, d.status
        from (
            select d.archived_at, d.endpoint_name, d.status
            from ulak.dlq d
            where d.archived_at < p_now - r.kept * 0.9
            order by d.archived_at
            limit 5000
        ) d
        where d.status = 'failed'
        order by d.archived_at
        limit 1
    ) d
$sql$;

create or replace function ulak_private.doctor_settings()
returns table (severity text, check_name text, finding text, fix text)
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select s.severity, 'settings', s.finding, s.fix
    from (
        values
            (
                'critical',
                not current_setting('fsync')::boolean,
                'fsync is off: a crash of the server can lose messages that were accepted',
                ulak_private.server_fix('fsync', 'on', '-- then: select pg_reload_conf();')
            ),
            (
                'warning',
                not current_setting('autovacuum')::boolean,
                'autovacuum is off: the queue''s dead rows pile up',
                ulak_private.server_fix('autovacuum', 'on', '-- then: select pg_reload_conf();')
            ),
            (
                'warning',
                ulak.setting('http_allow_internal_urls')::boolean,
                'http_allow_internal_urls is on: anybody who may set a url can reach internal services',
                'select ulak.configure(''http_allow_internal_urls'', ''false''); -- and name the networks in http_allowed_networks'
            ),
            (
                'warning',
                ulak.setting('max_queue_size')::integer = 0,
                'max_queue_size is 0: a receiver that is down can fill the disk',
                'select ulak.configure(''max_queue_size'', null);'
            ),
            (
                'warning',
                ulak.setting('default_max_retries')::integer = 0,
                'default_max_retries is 0: the first time-out makes a message a dead letter',
                'select ulak.configure(''default_max_retries'', null);'
            ),
            (
                'warning',
                ulak.setting('retry_base_delay')::integer > ulak.setting('retry_max_delay')::integer,
                'retry_base_delay is above retry_max_delay: every retry waits for the latter',
                'select ulak.configure(''retry_base_delay'', null), ulak.configure(''retry_max_delay'', null);'
            ),
            (
                'info',
                ulak.setting('poll_interval')::integer > 1000,
                'poll_interval is above a second: a message that arrives after a pause waits that long',
                'select ulak.configure(''poll_interval'', null);'
            )
    ) s (severity, is_wrong, finding, fix)
    where s.is_wrong
    union all
    -- Parameters of this session, which show what the server's files and ALTER DATABASE say, and those of other roles.
    select
        'warning',
        'settings',
        format('the server''s parameter ulak.%s (%s) has no effect: the setting is %s', p.name, p.value, ulak.setting(p.name)),
        format('select ulak.configure(%L, %L); -- if that is what you want; then take the parameter out', p.name, p.value)
    from (
        select n.name, current_setting('ulak.' || n.name, true) as value
        from ulak.settings n
        union
        select n.name, split_part(c.parameter, '=', 2)
        from pg_db_role_setting r
        cross join unnest(r.setconfig) c(parameter)
        join ulak.settings n on split_part(c.parameter, '=', 1) = 'ulak.' || n.name
        where r.setdatabase in (0, (select d.oid from pg_database d where d.datname = current_database()))
    ) p
    where p.value <> ''
$sql$;

-- Endpoints that anybody on the way could read or imitate. Internal hosts are left to their administrators.
create or replace function ulak_private.doctor_signatures()
returns table (severity text, check_name text, finding text, fix text)
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    with public_endpoint as materialized (
        select
            e.name,
            e.config,
            case when jsonb_typeof(e.config -> 'signing_secret') = 'string' then e.config ->> 'signing_secret' else s.value end as secret
        from ulak.endpoints e
        left join ulak_private.secrets s on s.name = e.config #>> '{signing_secret,$secret}'
        where e.protocol = 'http' and e.enabled and ulak_private.is_public_url(e.config ->> 'url')
    )
    select
        'warning',
        'signature',
        format('endpoint "%s" is public and its requests are not signed: anybody could send such requests to it', p.name),
        format('select ulak.rotate_secret(%L); -- returns the secret for the receiver', p.name)
    from public_endpoint p
    where p.secret is null
    union all
    select
        'warning',
        'signature',
        format('endpoint "%s" is public and signed with a short secret of %s bytes', p.name, s.bytes),
        format('select ulak.rotate_secret(%L); -- both secrets sign for 24 hours', p.name)
    from public_endpoint p
    cross join lateral (
        select case
            when starts_with(p.secret, 'whsec_') then length(rtrim(substr(p.secret, 7), '=')) * 3 / 4
            else octet_length(p.secret)
        end
    ) s (bytes)
    where s.bytes < 24
    union all
    select
        'warning',
        'transport',
        format('endpoint "%s" is public and reached without TLS: anybody on the way can read its messages', p.name),
        -- Without the url: its path and query may hold a token.
        format(
            'update ulak.endpoints set config = jsonb_set(config, ''{url}'', '
            'to_jsonb(regexp_replace(config ->> ''url'', ''^http:'', ''https:'', ''i''))) where name = %L; -- if it answers there',
            p.name
        )
    from public_endpoint p
    where p.config ->> 'url' ~* '^http:'
    union all
    select
        'warning',
        'transport',
        format('endpoint "%s" is public and its certificate is not verified', p.name),
        format('update ulak.endpoints set config = config - ''ssl_verify'' where name = %L;', p.name)
    from public_endpoint p
    where p.config -> 'ssl_verify' = 'false'
$sql$;

-- By its looks: a name with a dot that isn't kept for internal use, or an address outside of the private ranges.
create or replace function ulak_private.is_public_url(p_url text)
returns boolean
language sql
immutable
as $sql$
    select case
        when h.host ~ '^[0-9.]+$' then h.host !~ E'^(0|10|127|169\\.254|192\\.168|172\\.(1[6-9]|2[0-9]|3[01])|100\\.(6[4-9]|[7-9][0-9]|1[01][0-9]|12[0-7]))\\.'
        when h.host ~ E'^\\[' then h.host !~* E'^\\[(::1?|f[cd][0-9a-f]{2}:.*|fe[89ab][0-9a-f]:.*)\\]$'
        else h.host ~ E'\\.' and h.host !~* E'\\.(local|localhost|internal|intranet|lan|home|corp|private|test)\\.?$'
    end
    from (select substring(p_url from E'^[A-Za-z]+://(\\[[^\\]]*\\]|[^/:?#]+)')) h (host)
$sql$;
