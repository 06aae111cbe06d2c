-- The backlog: how much waits for each endpoint, and since when, at a cost that doesn't follow its length.

-- The first message of each (endpoint, priority) that has some pending, found by hopping from pair to pair in the index.
create or replace function ulak_private.pending_levels(p_endpoint_id bigint default null)
returns table (endpoint_id bigint, priority smallint, first_due timestamptz)
language plpgsql
stable
set enable_seqscan = off
set enable_bitmapscan = off
set enable_nestloop = on
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
set plan_cache_mode = force_generic_plan
as $plpgsql$
#variable_conflict use_column
begin
    return query
    with recursive level as (
        (
            select q.endpoint_id, q.priority, q.next_retry_at
            from ulak_private.deliveries q
            where q.status = 'pending' and q.endpoint_id >= coalesce(p_endpoint_id, 0)
            order by q.endpoint_id, q.priority desc, q.next_retry_at, q.id
            limit 1
        )
        union all
        select n.endpoint_id, n.priority, n.next_retry_at
        from level l
        cross join lateral (
            (
                select q.endpoint_id, q.priority, q.next_retry_at
                from ulak_private.deliveries q
                where q.status = 'pending' and q.endpoint_id = l.endpoint_id and q.priority < l.priority
                order by q.priority desc, q.next_retry_at, q.id
                limit 1
            )
            union all
            (
                select q.endpoint_id, q.priority, q.next_retry_at
                from ulak_private.deliveries q
                where q.status = 'pending' and q.endpoint_id > l.endpoint_id and p_endpoint_id is null
                order by q.endpoint_id, q.priority desc, q.next_retry_at, q.id
                limit 1
            )
            limit 1
        ) n
    )
    select l.endpoint_id, l.priority, l.next_retry_at
    from level l
    where p_endpoint_id is null or l.endpoint_id = p_endpoint_id;
end
$plpgsql$;

-- The last count for an endpoint. `between` instead of `=`: with `=`, and the statistics of an empty table, the planner may read all
-- samples by their time, once per endpoint.
create or replace function ulak_private.last_sample(p_endpoint_id bigint, p_now timestamptz)
returns setof ulak.backlog_samples
language sql
stable
as $sql$
    select s.*
    from ulak.backlog_samples s
    where s.endpoint_id between p_endpoint_id and p_endpoint_id and s.sampled_at <= p_now
    order by s.endpoint_id desc, s.sampled_at desc
    limit 1
$sql$;

-- How much waits for each endpoint, is in flight, and is dead. Only endpoint_facts() calls it, under its plan settings.
create or replace function ulak_private.backlog(p_endpoint_id bigint default null, p_now timestamptz default clock_timestamp())
returns table (
    endpoint_id bigint,
    waiting bigint,
    is_estimate boolean,
    -- When the oldest message was sent, and when the first of those that are due became due.
    oldest_at timestamptz,
    due_since timestamptz,
    in_flight bigint,
    dead bigint,
    dead_is_estimate boolean,
    -- When the oldest of them was first due, before its retries.
    waiting_since timestamptz,
    -- When an estimate was counted; null: there is no count, only more messages than were counted now.
    sampled_at timestamptz,
    dead_sampled_at timestamptz
)
language plpgsql
stable
as $plpgsql$
#variable_conflict use_column
declare
    v_first bigint := coalesce(p_endpoint_id, 0);
    v_last bigint := coalesce(p_endpoint_id, 9223372036854775807);
begin
    return query
    with pending as materialized (
        select l.endpoint_id, min(l.first_due) as first_due
        from ulak_private.pending_levels(p_endpoint_id) l
        group by l.endpoint_id
    ),
    flight as materialized (
        select q.endpoint_id, count(*) as messages
        from ulak_private.deliveries q
        where q.status = 'processing' and q.endpoint_id between v_first and v_last
        group by q.endpoint_id
    )
    select
        e.id,
        coalesce(c.messages, 0),
        coalesce(c.is_estimate, false),
        o.created_at,
        case when p.first_due <= p_now then p.first_due end,
        coalesce(f.messages, 0),
        coalesce(d.messages, 0),
        coalesce(d.is_estimate, false),
        case when least(p.first_due, o.due_at) <= p_now then least(p.first_due, o.due_at) end,
        c.sampled_at,
        d.sampled_at
    from ulak.endpoints e
    left join flight f on f.endpoint_id = e.id
    left join pending p on p.endpoint_id = e.id
    left join ulak_private.count_by_endpoint('waiting', array(select p.endpoint_id from pending p), p_now) c on c.endpoint_id = e.id
    left join ulak_private.count_by_endpoint(
        'dead', array(select e.id from ulak.endpoints e where e.id between v_first and v_last), p_now
    ) d on d.endpoint_id = e.id
    -- Ids are drawn in the order of sending. A message that waits for its schedule isn't late.
    left join lateral (
        select
            q.created_at,
            case when q.scheduled_at is null or q.scheduled_at <= p_now then greatest(q.created_at, q.scheduled_at) end as due_at
        from ulak_private.deliveries q
        where q.id = c.first_id and q.status is not distinct from 'pending'
        limit 1
    ) o on true
    where e.id between v_first and v_last;
end
$plpgsql$;

-- How many messages wait, or are dead. At most 10,000 are counted. If there are more, each endpoint gets an equal share of the 10,000,
-- but at least 10; what some don't need, the others share. An endpoint with more than its share is told by its last sample.
create or replace function ulak_private.count_by_endpoint(p_what text, p_endpoint_ids bigint[], p_now timestamptz)
returns table (endpoint_id bigint, messages bigint, first_id bigint, is_estimate boolean, sampled_at timestamptz)
language plpgsql
stable
as $plpgsql$
#variable_conflict use_column
declare
    v_share bigint;
begin
    select case when count(*) <= 10000 then 10000 else greatest(10, 10000 / cardinality(p_endpoint_ids)) end into v_share
    from (select min(i), max(i) from unnest(p_endpoint_ids) i) e (first, last)
    cross join lateral ulak_private.some_messages(p_what, e.first, e.last, 10001);
    return query
    with counted as materialized (
        select c.endpoint_id, c.messages, c.first_id
        from ulak_private.count_up_to(v_share, p_what, p_endpoint_ids) c
    ),
    larger as materialized (
        select array_agg(c.endpoint_id) as endpoint_ids, greatest(v_share, 10000 / greatest(count(*), 1)) as share
        from counted c
        where c.messages > v_share
    ),
    recounted as materialized (
        select c.endpoint_id, c.messages, c.first_id
        from larger l
        cross join lateral ulak_private.count_up_to(l.share, p_what, l.endpoint_ids) c
        where l.share > v_share
    ),
    known as materialized (
        select c.endpoint_id, m.messages, coalesce(r.first_id, c.first_id) as first_id, m.messages > (select l.share from larger l) as is_cut
        from counted c
        left join recounted r on r.endpoint_id = c.endpoint_id
        cross join lateral (select coalesce(r.messages, c.messages)) m (messages)
        where m.messages > 0
    )
    select
        k.endpoint_id,
        greatest(k.messages, s.messages),
        case when k.is_cut then s.oldest_id else k.first_id end,
        k.is_cut,
        case when s.messages >= k.messages then s.sampled_at end
    from known k
    left join lateral (
        select case p_what when 'waiting' then s.waiting else s.dead end as messages, s.oldest_id, s.sampled_at
        from ulak_private.last_sample(k.endpoint_id, p_now) s
        where k.is_cut
    ) s on true;
end
$plpgsql$;

-- These two have no SET clause, so that they become part of their query: each look-up with a limit is a probe of a partial index,
-- independent of statistics.
create or replace function ulak_private.count_up_to(p_most bigint, p_what text, p_endpoint_ids bigint[])
returns table (endpoint_id bigint, messages bigint, first_id bigint)
language sql
stable
as $sql$
    select e.id, c.messages, c.first_id
    from unnest(p_endpoint_ids) e (id)
    cross join lateral (
        select count(*) as messages, min(m.id) as first_id
        from ulak_private.some_messages(p_what, e.id, e.id, p_most + 1) m
    ) c
$sql$;

create or replace function ulak_private.some_messages(p_what text, p_first_endpoint_id bigint, p_last_endpoint_id bigint, p_limit bigint)
returns table (id bigint)
language sql
stable
as $sql$
    (
        select q.id
        from ulak_private.deliveries q
        where p_what = 'waiting' and q.status = 'pending' and q.endpoint_id between p_first_endpoint_id and p_last_endpoint_id
        limit p_limit
    )
    union all
    (
        -- An index-only scan: the index doesn't hold the id.
        select null
        from ulak_private.letters d
        where p_what = 'dead' and d.status = 'failed' and d.endpoint_id between p_first_endpoint_id and p_last_endpoint_id
        limit p_limit
    )
$sql$;
