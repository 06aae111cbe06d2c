-- What has to be right before anything is delivered: cluster, clock, roles, the first steps.

create or replace function ulak_private.doctor_cluster()
returns table (severity text, check_name text, finding text, fix text)
language sql
stable
as $sql$
    select
        'critical',
        'cluster',
        b.reason || ': nothing is delivered',
        'select ulak.adopt(); -- if this cluster is to deliver them'
    from ulak_private.held_because() b(reason)
    where b.reason is not null
$sql$;

-- A clock that was set back leaves times behind that lie in the future.
create or replace function ulak_private.doctor_clock(p_now timestamptz)
returns table (severity text, check_name text, finding text, fix text)
language sql
stable
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

create or replace function ulak_private.doctor_setup()
returns table (severity text, check_name text, finding text, fix text)
language sql
stable
as $sql$
    select 'warning', 'roles', format('role %s %s', p.role, p.problem), p.remedy
    from ulak_private.role_problems() p
    where not p.is_usual
    union all
    -- A dump contains no roles. These have grants here, or have sent messages that are held until adopt().
    select
        case when ulak_private.is_adopted() then 'warning' else 'critical' end,
        'missing roles',
        format('role %I %s, but does not exist in this cluster', m.name, string_agg(distinct m.use, ' and ' order by m.use)),
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
    union all
    -- The first steps. Once there is an endpoint, doctor_workers() takes over.
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
