-- Ordering keys that don't go on.

create or replace function ulak_private.doctor_stuck_keys(p_facts ulak_private.endpoint_fact[], p_now timestamptz)
returns table (severity text, check_name text, finding text, fix text)
language sql
stable
as $sql$
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
        from unnest(p_facts) h
        where h.enabled and h.circuit_state = 'closed' and h.waiting_since < p_now - interval '15 minutes'
        order by h.waiting_since
        limit 50
    ) h
    cross join lateral ulak_private.stuck_ordering_keys(h.id, p_now) k
    union all
    -- Letters that hold a key for which others wait.
    select
        'warning',
        'ordering',
        format(
            'dead letter %s of endpoint "%s" has held ordering key "%s" for %s, and %s',
            d.id,
            d.endpoint_name,
            d.ordering_key,
            ulak_private.short_duration(p_now - d.failed_at),
            ulak_private.waiting_behind(w.messages)
        ),
        format(
            'select ulak.redrive_message(%1$s); -- or give it up, and the next one goes: select * from ulak.discard(p_ids => ''{%1$s}'');',
            d.id
        )
    from (
        select d.*
        from ulak_private.letters d
        where d.is_holding
        order by d.id
        limit 1000
    ) d
    cross join lateral ulak_private.count_behind(d.original_message_id, d.endpoint_id, d.ordering_key) w(messages)
    where w.messages > 0
$sql$;

-- Keys of an endpoint whose first message was due long ago and still waits. Only the first twenty messages of each priority are checked.
create or replace function ulak_private.stuck_ordering_keys(p_endpoint_id bigint, p_now timestamptz)
returns table (message_id bigint, ordering_key text, due_at timestamptz)
language sql
stable
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

-- First messages of keys that are parked by mistake, or that are due much later than the messages behind them. At most 10,000 keys are
-- checked, and none if no message is older than a minute.
create or replace function ulak_private.doctor_heads(p_facts ulak_private.endpoint_fact[], p_now timestamptz)
returns table (severity text, check_name text, finding text, fix text)
language sql
stable
as $sql$
    with keys as materialized (
        select k.*, h.name
        from (select 10000 as most where exists (select from unnest(p_facts) h where h.oldest_at < p_now - interval '1 minute')) l
        cross join lateral ulak_private.live_keys(null, null, l.most) k
        join unnest(p_facts) h on h.id = k.endpoint_id
    )
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
    -- Its sender wanted the delay; the senders of the messages behind it may not know of it.
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
