-- What fills the queue, and what waits for too long.

create or replace function ulak_private.doctor_queue(p_facts ulak_private.endpoint_fact[], p_now timestamptz)
returns table (severity text, check_name text, finding text, fix text)
language sql
stable
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
    union all
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
    from unnest(p_facts) h
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
$sql$;

-- Endpoints that no longer exist, but for which messages wait. This happens only if rows were deleted by hand.
create or replace function ulak_private.orphaned_endpoints()
returns table (endpoint_id bigint)
language sql
stable
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = on
set jit = off
as $sql$
    select distinct l.endpoint_id
    from ulak_private.pending_levels() l
    where not exists (select from ulak.endpoints e where e.id = l.endpoint_id)
$sql$;
