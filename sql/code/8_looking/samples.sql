-- What maintenance counts every minute: the backlog of each endpoint, and the traffic of all of them together.

-- 100 endpoints at a time. An endpoint gets a row when its numbers have changed, and once an hour while something waits, so its last
-- row always holds. Rows that vacuum hasn't seen yet take long to count: after p_budget the rest is left to the next run, which starts
-- with other endpoints.
create or replace function ulak_private.sample_backlog(
    p_now timestamptz default clock_timestamp(),
    p_budget interval default '5 seconds'
)
returns integer
language plpgsql
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

-- All endpoints. Each minute starts at another one, so that the budget doesn't always run out for the same ones.
create or replace function ulak_private.sample_order(p_now timestamptz)
returns bigint[]
language sql
stable
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

-- The last minutes, all endpoints together. They may still change: a worker's counts appear when it commits.
create or replace function ulak_private.recent_traffic(p_from timestamptz default '-infinity')
returns table (minute timestamptz, delivered bigint, failed bigint, latency_histogram bigint[], latency_max_ms double precision)
language sql
stable
as $sql$
    select
        t.minute, sum(t.delivered)::bigint, sum(t.failed)::bigint, ulak_private.sum_histograms(t.latency_histogram), max(t.latency_max_ms)
    from ulak.endpoint_stats t
    where t.minute >= greatest(p_from, (select max(f.minute) - interval '2 minutes' from ulak.traffic f))
    group by t.minute
$sql$;

-- ulak.traffic, with the last minutes as they are now.
create or replace function ulak_private.traffic_between(p_from timestamptz, p_until timestamptz)
returns setof ulak.traffic
language sql
stable
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
as $sql$
    insert into ulak.traffic as t (minute, delivered, failed, latency_histogram, waiting, latency_max_ms)
    select
        m.minute, coalesce(r.delivered, 0), coalesce(r.failed, 0), coalesce(r.latency_histogram, '{}'), w.waiting, r.latency_max_ms
    from ulak_private.recent_traffic() r
    full join (
        -- An endpoint without a sample of this minute has not changed, or the budget ran out: its last sample counts.
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
