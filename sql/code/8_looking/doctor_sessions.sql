-- Sessions that hold up messages without knowing it.

create or replace function ulak_private.doctor_sessions(p_now timestamptz)
returns table (severity text, check_name text, finding text, fix text)
language sql
stable
as $sql$
    -- Senders of one ordering key wait for each other's commits. A session that waits for a key's row has a lock on the table of keys, and
    -- on no row of another table.
    with waiting as materialized (
        select w.pid, w.waitstart, t.page, t.tuple
        from pg_locks w
        left join pg_locks t on t.pid = w.pid and t.locktype = 'tuple' and t.relation = 'ulak_private.ordering_keys'::regclass
        where not w.granted
            and w.locktype in ('transactionid', 'tuple')
            and w.waitstart <= p_now - interval '1 second'
            and exists (
                select
                from pg_locks r
                where r.pid = w.pid
                    and r.locktype = 'relation'
                    and r.relation = 'ulak_private.ordering_keys'::regclass
                    and r.database = (select d.oid from pg_database d where d.datname = current_database())
            )
            and not exists (
                select
                from pg_locks o
                where o.pid = w.pid and o.locktype = 'tuple' and o.relation <> 'ulak_private.ordering_keys'::regclass
            )
    )
    select
        'warning',
        'ordering key',
        format(
            '%s, %s for %s, holds %s: %s, the first for %s',
            ulak_private.session_name(a.pid, a.usename, a.application_name),
            a.state,
            ulak_private.short_duration(p_now - a.state_change),
            coalesce(
                (
                    select format('ordering key "%s" of endpoint "%s"', k.ordering_key, e.name)
                    from ulak_private.ordering_keys k
                    join ulak.endpoints e on e.id = k.endpoint_id
                    where k.ctid = any (array_agg(format('(%s,%s)', w.page, w.tuple)::tid) filter (where w.page is not null))
                    limit 1
                ),
                'an ordering key'
            ),
            case when count(*) = 1 then 'a sender waits' else format('%s senders wait', count(*)) end,
            ulak_private.short_duration(p_now - min(w.waitstart))
        ),
        format('select pg_terminate_backend(%s); -- or let it commit', a.pid)
    from waiting w
    cross join lateral unnest(pg_blocking_pids(w.pid)) b (pid)
    join pg_stat_activity a on a.pid = b.pid
    -- A session that waits itself is not the cause.
    where not exists (select from waiting o where o.pid = b.pid)
    group by a.pid, a.usename, a.application_name, a.state, a.state_change
    union all
    select
        'warning',
        'session',
        format(
            '%s has sent messages and has been idle in its transaction for %s: they are delivered after it commits',
            ulak_private.session_name(a.pid, a.usename, a.application_name),
            ulak_private.short_duration(p_now - a.state_change)
        ),
        format('select pg_terminate_backend(%s); -- or let it commit. Its messages are lost with its transaction', a.pid)
    from pg_stat_activity a
    where a.datname = current_database()
        and a.state in ('idle in transaction', 'idle in transaction (aborted)')
        and a.state_change <= p_now - interval '1 minute'
        and exists (
            select
            from pg_locks l
            where l.pid = a.pid and l.locktype = 'relation' and l.relation = 'ulak_private.deliveries'::regclass and l.mode = 'RowExclusiveLock'
        )
$sql$;

-- Anybody can take an advisory lock. Changes of a circuit breaker wait for its lock for 0.1 s, other tools perhaps longer.
create or replace function ulak_private.doctor_locks(p_now timestamptz)
returns table (severity text, check_name text, finding text, fix text)
language sql
stable
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

create or replace function ulak_private.session_name(p_pid integer, p_user name, p_application text)
returns text
language sql
immutable
as $sql$
    select format('session %s of %s', p_pid, p_user) || coalesce(' (' || nullif(p_application, '') || ')', '')
$sql$;
