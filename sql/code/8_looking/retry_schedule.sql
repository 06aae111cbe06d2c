-- ulak.retry_schedule: when the messages that wait are due.

-- When the waiting messages of some endpoints, or of all (null), are due. At most 5,000 are counted: each (endpoint, priority) pair gets
-- an equal share, but at least 10. Only the spans from the first message of a pair to its last are read.
create or replace function ulak_private.schedule_of(p_endpoint_ids bigint[], p_now timestamptz)
returns table (endpoint text, due text, messages bigint, is_estimate boolean, first_at timestamptz, last_at timestamptz)
language plpgsql
stable
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
            sum(least(p.messages, b.size))::bigint as messages,
            bool_or(c.is_cut) as is_cut,
            min(c.first_at) filter (where p.place < 7) as first_at,
            max(c.last_at) filter (where p.place < 7 and not c.is_cut) as last_at
        from level l
        cross join (select greatest(10, 5000 / greatest(count(*), 1)) from level l) b (size)
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
            l.endpoint_id, l.priority, s.after, s.until, s.may_be_behind, s.place = 7, b.size
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

-- The messages of one endpoint and priority that are due in a span, up to p_most. It becomes part of its query: it has no SET clause, and
-- no argument of the call may be a subquery. The first branch reads the index alone.
create or replace function ulak_private.due_within(
    p_endpoint_id bigint,
    p_priority smallint,
    p_after timestamptz,
    p_until timestamptz,
    -- Some of those that are due may wait behind others of their ordering key; all of them do.
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
        -- A sender queues each message as due. If it is behind another one of its key, the claim that finds it parks it.
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
