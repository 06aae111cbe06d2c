-- The backlog: how much waits for each endpoint, and since when, at a cost that doesn't follow its length.

-- The first message of each (endpoint, priority) that has some pending, found by hopping from pair to pair in the index.
create or replace function ulak_private.pending_levels(p_endpoint_id bigint default null)
returns table (endpoint_id bigint, priority smallint, first_due timestamptz)
language plpgsql
stable
set search_path = pg_catalog, pg_temp
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

-- The last count for an endpoint. Not `=`: then the order of times alone would do, and where the statistics are of an empty
-- table, all samples might be read in it, for each endpoint. Without a search_path of its own, so that it becomes part of its query.
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

-- How much waits for each endpoint, is in flight, and is dead. The plan is a matter of endpoint_facts(), which alone calls it.
create or replace function ulak_private.backlog(p_endpoint_id bigint default null, p_now timestamptz default clock_timestamp())
returns table (
    endpoint_id bigint,
    waiting bigint,
    is_estimate boolean,
    -- When the oldest message was sent, and since when one waits that is due.
    oldest_at timestamptz,
    due_since timestamptz,
    in_flight bigint,
    dead bigint,
    dead_is_estimate boolean,
    -- Since when the oldest message waits that is due or was so before its retries.
    waiting_since timestamptz,
    -- When an estimate was counted; null: there are more than were counted now, and that is all that is known.
    sampled_at timestamptz,
    dead_sampled_at timestamptz
)
language plpgsql
stable
set search_path = pg_catalog, pg_temp
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
    -- Ids are drawn in the order of sending. What waits for its schedule isn't late.
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

-- How many messages wait, or are dead. They are counted as long as that is cheap: 10,000 in all. If there are more, the endpoints share
-- them, what some leave over is shared by the others, and each gets 10 at least. If an endpoint has more than its share, the count of the
-- last minute is what is known.
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
-- whatever the statistics say.
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
        -- Without its id the index is enough.
        select null
        from ulak_private.letters d
        where p_what = 'dead' and d.status = 'failed' and d.endpoint_id between p_first_endpoint_id and p_last_endpoint_id
        limit p_limit
    )
$sql$;

-- Maintenance counts every minute, 100 endpoints at a time. An endpoint gets a row when its numbers have changed, and once an
-- hour while something waits: what was last written is what is so. Rows that vacuum hasn't seen yet take long to count: after
-- p_budget the rest is left to the next run, which begins with other endpoints.
create or replace function ulak_private.sample_backlog(
    p_now timestamptz default clock_timestamp(),
    p_budget interval default '5 seconds'
)
returns integer
language plpgsql
set search_path = pg_catalog, pg_temp
set jit = off
as $plpgsql$
declare
    v_deadline timestamptz := clock_timestamp() + p_budget;
    v_ids bigint[] := ulak_private.sample_order(p_now);
    v_sampled integer := 0;
begin
    for v_place in 1..cardinality(v_ids) by 100 loop
        exit when clock_timestamp() >= v_deadline;
        v_sampled := v_sampled + ulak_private.sample_endpoints(v_ids[v_place : v_place + 99], p_now);
    end loop;
    perform ulak_private.sum_traffic(p_now);
    return v_sampled;
end
$plpgsql$;

-- All endpoints, a prime number of them further each minute, so that it isn't always the same that time runs out for.
create or replace function ulak_private.sample_order(p_now timestamptz)
returns bigint[]
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select i.ids[i.start + 1 :] || i.ids[: i.start]
    from (
        select
            coalesce(array_agg(e.id order by e.id), '{}') as ids,
            (floor(extract(epoch from p_now) / 60)::bigint * 7919 % greatest(count(*), 1))::integer as start
        from ulak.endpoints e
    ) i
$sql$;

create or replace function ulak_private.sample_endpoints(p_endpoint_ids bigint[], p_now timestamptz)
returns integer
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
set plan_cache_mode = force_generic_plan
as $plpgsql$
declare
    v_sampled integer;
begin
    insert into ulak.backlog_samples (endpoint_id, sampled_at, waiting, dead, oldest_id)
    select i.endpoint_id, p_now, w.waiting, d.dead, w.oldest_id
    from unnest(p_endpoint_ids) i (endpoint_id)
    cross join lateral (
        select count(*) as waiting, min(q.id) as oldest_id
        from ulak_private.deliveries q
        where q.status = 'pending' and q.endpoint_id = i.endpoint_id
    ) w
    cross join lateral (
        select count(*) as dead
        from ulak_private.letters d
        where d.status = 'failed' and d.endpoint_id = i.endpoint_id
    ) d
    left join lateral ulak_private.last_sample(i.endpoint_id, p_now) s on true
    where (w.waiting, d.dead, w.oldest_id) is distinct from (coalesce(s.waiting, 0), coalesce(s.dead, 0), s.oldest_id)
        or (w.waiting + d.dead > 0 and s.sampled_at < date_trunc('hour', p_now, 'UTC'))
    on conflict do nothing;
    get diagnostics v_sampled = row_count;
    return v_sampled;
end
$plpgsql$;

-- The minutes that aren't final yet, all endpoints together: what a worker counts is there once it commits.
create or replace function ulak_private.recent_traffic(p_from timestamptz default '-infinity')
returns table (minute timestamptz, delivered bigint, failed bigint, latency_histogram bigint[], latency_max_ms double precision)
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select
        t.minute, sum(t.delivered)::bigint, sum(t.failed)::bigint, ulak_private.sum_histograms(t.latency_histogram), max(t.latency_max_ms)
    from ulak.endpoint_stats t
    where t.minute >= greatest(p_from, (select max(f.minute) - interval '2 minutes' from ulak.traffic f))
    group by t.minute
$sql$;

-- ulak.traffic as it will be.
create or replace function ulak_private.traffic_between(p_from timestamptz, p_until timestamptz)
returns setof ulak.traffic
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select
        coalesce(r.minute, t.minute),
        coalesce(r.delivered, t.delivered),
        coalesce(r.failed, t.failed),
        coalesce(r.latency_histogram, t.latency_histogram),
        t.waiting,
        case when r.minute is null then t.latency_max_ms else r.latency_max_ms end
    from (select t.* from ulak.traffic t where t.minute between p_from and p_until) t
    full join (select r.* from ulak_private.recent_traffic(p_from) r where r.minute <= p_until) r on r.minute = t.minute
$sql$;

create or replace function ulak_private.sum_traffic(p_now timestamptz)
returns void
language sql
set search_path = pg_catalog, pg_temp
as $sql$
    insert into ulak.traffic as t (minute, delivered, failed, latency_histogram, waiting, latency_max_ms)
    select
        m.minute, coalesce(r.delivered, 0), coalesce(r.failed, 0), coalesce(r.latency_histogram, '{}'), w.waiting, r.latency_max_ms
    from ulak_private.recent_traffic() r
    full join (
        -- The last sample is what is known, whether it is missing for this minute because nothing changed or because time ran out.
        select date_trunc('minute', p_now) as minute, sum(s.waiting)::bigint as waiting
        from ulak.endpoints e
        cross join lateral ulak_private.last_sample(e.id, p_now) s
    ) w on w.minute = r.minute
    cross join lateral (select coalesce(r.minute, w.minute)) m (minute)
    on conflict (minute) do update
    set delivered = excluded.delivered,
        failed = excluded.failed,
        latency_histogram = excluded.latency_histogram,
        waiting = coalesce(excluded.waiting, t.waiting),
        latency_max_ms = excluded.latency_max_ms
$sql$;

-- When waiting messages of some endpoints, or of all (null), are due, counted up to a bound: 5,000 messages, shared by the (endpoint,
-- priority) pairs that have some, and 10 for each at least. Of a pair only the spans from its first message to its last are looked at.
create or replace function ulak_private.schedule_of(p_endpoint_ids bigint[], p_now timestamptz)
returns table (endpoint text, due text, messages bigint, is_estimate boolean, first_at timestamptz, last_at timestamptz)
language plpgsql
stable
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
set plan_cache_mode = force_generic_plan
as $plpgsql$
#variable_conflict use_column
begin
    return query
    with level as materialized (
        select l.endpoint_id, l.priority, l.first_due
        from ulak_private.pending_levels() l
        where p_endpoint_ids is null
        union all
        select l.endpoint_id, l.priority, l.first_due
        from unnest(p_endpoint_ids) e(id)
        cross join lateral ulak_private.pending_levels(e.id) l
    ),
    share as materialized (
        select greatest(10, 5000 / greatest(count(*), 1)) as size
        from level l
    ),
    span (place, due, after, until) as (
        values
            (1, 'now', '-infinity'::timestamptz, p_now),
            (2, 'within a minute', p_now, p_now + interval '1 minute'),
            (3, 'within 5 minutes', p_now + interval '1 minute', p_now + interval '5 minutes'),
            (4, 'within an hour', p_now + interval '5 minutes', p_now + interval '1 hour'),
            (5, 'within a day', p_now + interval '1 hour', p_now + interval '24 hours'),
            (6, 'later', p_now + interval '24 hours', timestamptz '294276-01-01 00:00:00+00'),
            (7, 'behind another of its ordering key', timestamptz '294276-01-01 00:00:00+00', timestamptz 'infinity')
    )
    select coalesce(e.name, format('(endpoint %s, dropped)', g.endpoint_id)), d.due, g.messages, g.is_cut, g.first_at, g.last_at
    from (
        select
            l.endpoint_id,
            p.place,
            sum(least(p.messages, (select b.size from share b)))::bigint as messages,
            bool_or(c.is_cut) as is_cut,
            min(c.first_at) filter (where p.place < 7) as first_at,
            max(c.last_at) filter (where p.place < 7 and not c.is_cut) as last_at
        from level l
        cross join lateral (
            select
                q.next_retry_at as last_due,
                exists (
                    select
                    from ulak_private.deliveries h
                    where h.endpoint_id = l.endpoint_id
                        and h.ordering_key is not null
                        and h.status in ('pending', 'processing')
                ) as has_keys
            from ulak_private.deliveries q
            where q.status = 'pending' and q.endpoint_id = l.endpoint_id and q.priority = l.priority
            order by q.next_retry_at desc
            limit 1
        ) m
        cross join lateral (
            select s.place, s.after, s.until, s.place = 1 and m.has_keys as may_be_behind
            from span s
            where s.until >= l.first_due and s.after < m.last_due
            offset 0
        ) s
        cross join lateral ulak_private.due_within(
            l.endpoint_id, l.priority, s.after, s.until, s.may_be_behind, s.place = 7, (select b.size from share b)
        ) c
        cross join lateral (values (s.place, c.others), (7, c.behind)) p(place, messages)
        where p.messages > 0
        group by l.endpoint_id, p.place
    ) g
    join span d on d.place = g.place
    left join ulak.endpoints e on e.id = g.endpoint_id
    order by 1, d.place;
end
$plpgsql$;

-- What is due in a span, of one endpoint and priority, up to p_most messages. Without a SET clause, so that it becomes part of its query.
create or replace function ulak_private.due_within(
    p_endpoint_id bigint,
    p_priority smallint,
    p_after timestamptz,
    p_until timestamptz,
    -- Some that are due may wait behind others of their ordering key, or all of them do.
    p_may_be_behind boolean,
    p_is_parked boolean,
    p_most bigint
)
returns table (others bigint, behind bigint, is_cut boolean, first_at timestamptz, last_at timestamptz)
language sql
stable
as $sql$
    select
        count(*) filter (where not q.is_behind) as others,
        count(*) filter (where q.is_behind) as behind,
        count(*) > p_most as is_cut,
        min(q.next_retry_at) filter (where not q.is_behind) as first_at,
        max(q.next_retry_at) filter (where not q.is_behind) as last_at
    from (
        (
            select q.next_retry_at, p_is_parked as is_behind
            from ulak_private.deliveries q
            where not p_may_be_behind
                and q.status = 'pending'
                and q.endpoint_id = p_endpoint_id
                and q.priority = p_priority
                and q.next_retry_at > p_after
                and q.next_retry_at <= p_until
            order by q.next_retry_at
            limit p_most + 1
        )
        union all
        -- A sender queues its message as due; the claim that meets it behind another parks it.
        (
            select
                q.next_retry_at,
                q.ordering_key is not null
                    and q.id <> (
                        select h.id
                        from ulak_private.deliveries h
                        where h.endpoint_id = p_endpoint_id
                            and h.ordering_key between q.ordering_key and q.ordering_key
                            and h.status in ('pending', 'processing', 'held')
                        order by h.ordering_key, h.id
                        limit 1
                    )
            from ulak_private.deliveries q
            where p_may_be_behind
                and q.status = 'pending'
                and q.endpoint_id = p_endpoint_id
                and q.priority = p_priority
                and q.next_retry_at <= p_until
            order by q.next_retry_at
            limit p_most + 1
        )
    ) q
$sql$;

create or replace function ulak_private.retry_schedule(p_now timestamptz default clock_timestamp())
returns table (endpoint text, due text, messages bigint, is_estimate boolean, first_at timestamptz, last_at timestamptz)
language sql
stable
security definer
set search_path = pg_catalog, pg_temp
as $sql$
    select s.endpoint, s.due, s.messages, s.is_estimate, s.first_at, s.last_at
    from ulak_private.schedule_of(null, p_now) s
$sql$;

create or replace view ulak.retry_schedule as
select r.*
from ulak_private.retry_schedule() r;

comment on view ulak.retry_schedule is 'how many messages are due when, per endpoint';
comment on column ulak.retry_schedule.endpoint is 'name of the endpoint';
comment on column ulak.retry_schedule.due is 'when they are due: now, within a minute, and so on, or behind an earlier message of their ordering key';
comment on column ulak.retry_schedule.messages is 'how many';
comment on column ulak.retry_schedule.is_estimate is 'true: there are more, they were not counted';
comment on column ulak.retry_schedule.first_at is 'when the first of them is due';
comment on column ulak.retry_schedule.last_at is 'when the last of them is due; null if not all were counted';
