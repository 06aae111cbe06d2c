-- Endpoints that don't deliver, and what fills the queue.

create or replace function ulak_private.doctor_endpoints(p_facts ulak_private.endpoint_fact[], p_now timestamptz)
returns table (severity text, check_name text, finding text, fix text)
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select f.* from ulak_private.doctor_circuits(p_facts, p_now) f
    union all
    select f.* from ulak_private.doctor_failing(p_facts, p_now) f
    union all
    select f.* from ulak_private.doctor_backlog(p_facts, p_now) f
    union all
    select f.* from ulak_private.doctor_disabled(p_facts, p_now) f
    union all
    select f.* from ulak_private.doctor_queue_size(p_facts) f
    union all
    select f.* from ulak_private.doctor_max_pending(p_facts, p_now) f
    union all
    select f.* from ulak_private.doctor_dropped_endpoints() f
    union all
    select f.* from ulak_private.doctor_stuck_keys(p_facts, p_now) f
    union all
    select f.* from ulak_private.doctor_heads(p_facts, p_now) f
    union all
    select f.* from ulak_private.doctor_held_keys(p_now) f
    union all
    select f.* from ulak_private.doctor_disable_after(p_now) f
$sql$;

-- Endpoints that will be disabled, or were, because their receiver stays broken.
create or replace function ulak_private.doctor_disable_after(p_now timestamptz)
returns table (severity text, check_name text, finding text, fix text)
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select
        'warning',
        'disable_after',
        format(
            'endpoint "%s" has had no success for %s (%s) and will be disabled in %s: %s',
            f.endpoint_name,
            ulak_private.short_duration(p_now - f.since),
            ulak_private.counted(f.failures, 'failure'),
            ulak_private.short_duration(greatest(f.disable_at - p_now, '0')),
            coalesce(f.last_error, 'no error is known')
        ),
        format('select * from ulak.ping(%L);', f.endpoint_name)
    from ulak_private.failing_endpoints(p_now) f
    where f.failures >= 20
    union all
    select
        'warning',
        'disable_after',
        format('endpoint "%s" was disabled because its receiver stayed broken: %s', e.name, coalesce(e.last_error, 'no error is known')),
        format('select * from ulak.ping(%1$L); -- when it answers again: select ulak.enable_endpoint(%1$L);', e.name)
    from ulak.endpoints e
    where not e.enabled and e.failing_told = 100
$sql$;

create or replace function ulak_private.doctor_circuits(p_facts ulak_private.endpoint_fact[], p_now timestamptz)
returns table (severity text, check_name text, finding text, fix text)
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
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
            coalesce('the last success was ' || ulak_private.short_duration(p_now - h.last_success_at) || ' ago', 'no delivery to it has ever succeeded'),
            coalesce(h.last_error, 'no error is known')
        ),
        format(
            'select * from ulak.ping(%1$L); -- when it answers again: select ulak.reset_circuit_breaker(%1$L);',
            h.name
        )
    from unnest(p_facts) h
    cross join lateral ulak_private.advice(h.name, h.last_error) a
    where h.circuit_state <> 'closed'
$sql$;

-- Endpoints that had nothing but failures in five minutes and no success since. Failures that don't go away by themselves, and
-- those of an endpoint that never succeeded, are told at once, others from the third on.
create or replace function ulak_private.doctor_failing(p_facts ulak_private.endpoint_fact[], p_now timestamptz)
returns table (severity text, check_name text, finding text, fix text)
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select
        'warning',
        'failing',
        format(
            'endpoint "%s" fails: %s. %sthe last one was %s ago: %s',
            h.name,
            a.cause,
            case when h.failed_attempts > 0 then format('%s in five minutes, %s succeeded; ', ulak_private.counted(h.failed_attempts, 'attempt'), case when h.last_success_at is null then 'none ever' else 'none' end) else '' end,
            ulak_private.short_duration(p_now - h.last_failure_at),
            h.last_error
        ),
        a.fix
    from (
        select h.*
        from unnest(p_facts) h
        where h.enabled
            and h.protocol = any (ulak_private.worker_protocols())
            and h.circuit_state = 'closed'
            and (h.last_success_at is null or h.last_failure_at > least(h.last_success_at, p_now))
            and h.last_failure_at > p_now - interval '1 day'
            and coalesce(h.last_failed_percent, 100) = 100
    ) h
    cross join lateral ulak_private.advice(h.name, h.last_error) a
    where (a.is_lasting or h.last_success_at is null or h.failed_attempts >= 3)
        and not (a.cause ~ 'address is blocked$' and ulak_private.is_unblocked(h.last_error))
$sql$;

create or replace function ulak_private.doctor_backlog(p_facts ulak_private.endpoint_fact[], p_now timestamptz)
returns table (severity text, check_name text, finding text, fix text)
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
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
    from unnest(p_facts) h
    where h.enabled and h.due_since < p_now - interval '5 minutes'
$sql$;

create or replace function ulak_private.doctor_disabled(p_facts ulak_private.endpoint_fact[], p_now timestamptz)
returns table (severity text, check_name text, finding text, fix text)
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
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
    from unnest(p_facts) h
    where not h.enabled and h.waiting > 0
$sql$;

create or replace function ulak_private.doctor_queue_size(p_facts ulak_private.endpoint_fact[])
returns table (severity text, check_name text, finding text, fix text)
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select
        case when f.live >= f.most then 'critical' else 'warning' end,
        'queue',
        format(
            'the queue holds %s of at most %s messages, most of them for %s',
            ulak_private.thousands(f.live), ulak_private.thousands(f.most), f.fillers
        ),
        format('select ulak.configure(''max_queue_size'', ''%s'');', f.most * 2)
    from (
        select
            q.waiting + q.in_flight as live,
            ulak.setting('max_queue_size')::bigint as most,
            (
                select string_agg(format('"%s" (%s)', t.name, ulak_private.thousands(t.messages)), ', ' order by t.messages desc, t.name)
                from (
                    select h.name, h.waiting + h.in_flight as messages
                    from unnest(p_facts) h
                    where h.waiting + h.in_flight > 0
                    order by 2 desc, 1
                    limit 3
                ) t
            ) as fillers
        from ulak_private.queue_facts(p_facts) q
    ) f
    where f.most > 0 and f.live > 0.8 * f.most
$sql$;

create or replace function ulak_private.doctor_max_pending(p_facts ulak_private.endpoint_fact[], p_now timestamptz)
returns table (severity text, check_name text, finding text, fix text)
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
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
    from unnest(p_facts) h
    where h.waiting >= h.max_pending
$sql$;

create or replace function ulak_private.doctor_dropped_endpoints()
returns table (severity text, check_name text, finding text, fix text)
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select
        'warning',
        'dropped endpoint',
        format('messages wait for endpoint %s, which does not exist', o.endpoint_id),
        format(
            'select ulak.archive_single_to_dlq(id, ''endpoint dropped'') from ulak.queue where endpoint_id = %s and status = ''pending'';',
            o.endpoint_id
        )
    from ulak_private.orphaned_endpoints() o
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
