-- Dead rows of the queue, and what keeps vacuum from removing them.

-- Every transaction or snapshot that is older than dead rows. Sessions of other databases don't hold back this one's tables; standbys with
-- hot_standby_feedback and replication slots do.
create or replace function ulak_private.vacuum_blockers(p_now timestamptz)
returns table (who text, xmin_age integer, since timestamptz, fix text)
language sql
stable
as $sql$
    select
        format(
            '%s, %s, in its transaction for %s',
            ulak_private.session_name(a.pid, a.usename, a.application_name),
            a.state,
            ulak_private.short_duration(p_now - a.xact_start)
        ),
        greatest(age(a.backend_xmin), age(a.backend_xid)),
        a.xact_start,
        format('select pg_terminate_backend(%s);', a.pid)
    from pg_stat_activity a
    where a.datname = current_database()
        and a.backend_type = 'client backend'
        and a.pid <> pg_backend_pid()
        and (a.backend_xmin is not null or a.backend_xid is not null)
        -- Vacuum's own snapshot doesn't hold vacuum back.
        and a.query !~* E'^\\s*vacuum'
    union all
    select
        format('prepared transaction "%s" of %s, %s old', x.gid, x.owner, ulak_private.short_duration(p_now - x.prepared)),
        age(x.transaction),
        x.prepared,
        format('rollback prepared %L; -- or: commit prepared %L;', x.gid, x.gid)
    from pg_prepared_xacts x
    where x.database = current_database()
    union all
    select
        format('replication slot "%s", %s', s.slot_name, case when s.active then 'active' else 'without a standby' end),
        age(s.xmin),
        null,
        case
            when s.active then format('select pg_terminate_backend(%s); -- and turn hot_standby_feedback off on the standby', s.active_pid)
            else format('select pg_drop_replication_slot(%L); -- if its standby is gone for good', s.slot_name)
        end
    from pg_replication_slots s
    where s.xmin is not null
    union all
    select
        format('standby "%s" at %s, by hot_standby_feedback', r.application_name, coalesce(host(r.client_addr), 'local')),
        age(r.backend_xmin),
        null,
        format('select pg_terminate_backend(%s); -- and end the long query there, or turn hot_standby_feedback off', r.pid)
    from pg_stat_replication r
    where r.backend_xmin is not null
$sql$;

-- Vacuum runs every minute: dead rows that are still there are held back, or vacuum doesn't run.
create or replace function ulak_private.doctor_vacuum(p_now timestamptz)
returns table (severity text, check_name text, finding text, fix text)
language sql
stable
as $sql$
    with dead as materialized (
        select t.rows, t.vacuumed_at
        from (
            select
                pg_stat_get_dead_tuples('ulak_private.deliveries'::regclass) as rows,
                greatest(
                    pg_stat_get_last_vacuum_time('ulak_private.deliveries'::regclass),
                    pg_stat_get_last_autovacuum_time('ulak_private.deliveries'::regclass)
                ) as vacuumed_at
        ) t
        where t.rows >= 10000
    ),
    old as materialized (
        select b.*
        from ulak_private.vacuum_blockers(p_now) b
        where coalesce(b.since, '-infinity') < p_now - interval '1 minute'
    ),
    blocker as materialized (
        select b.*
        from old b
        where b.xmin_age > 0
        order by b.xmin_age desc
        limit 3
    )
    select
        'warning',
        'vacuum',
        format('%s dead rows of ulak.queue are held back by %s', ulak_private.thousands(d.rows), b.who),
        b.fix
    from dead d
    cross join blocker b
    union all
    select
        'warning',
        'vacuum',
        format(
            '%s dead rows of ulak.queue were not vacuumed; the last vacuum %s',
            ulak_private.thousands(d.rows),
            coalesce('was ' || ulak_private.short_duration(p_now - d.vacuumed_at) || ' ago', 'is not known')
        ),
        'vacuum ulak_private.deliveries;'
    from dead d
    where not exists (select from blocker) and coalesce(d.vacuumed_at, '-infinity') < p_now - interval '5 minutes'
    union all
    -- Nothing is dead yet, but it will be.
    select
        'warning',
        'vacuum',
        format('vacuum will be held back by %s', b.who),
        b.fix
    from old b
    where not exists (select from dead) and b.since < p_now - interval '1 hour'
$sql$;
