-- "disable_after" in a config: the endpoint is disabled after so long without a success, and subscribers are warned before.

-- Maintenance looks at the statistics once a minute, so that settling has nothing more to count. The time begins with the first failure after
-- the last success, or after the endpoint was enabled or altered. Statistics are deleted after a while, so failing_since keeps that time.
-- failing_told is the last percentage of it that subscribers were told; 100: the endpoint was disabled.

-- Endpoints with "disable_after" that are failing: since when, how often, and how much of the time is over.
create or replace function ulak_private.failing_endpoints(p_now timestamptz)
returns table (
    endpoint_id bigint,
    endpoint_name text,
    since timestamptz,
    failures bigint,
    disable_at timestamptz,
    percent integer,
    -- Whether failing_since is up to date, and what subscribers were told.
    is_known boolean,
    told smallint,
    last_error text
)
language sql
stable
set enable_seqscan = on
set jit = off
as $sql$
    select
        e.id,
        e.name,
        w.since,
        f.failures,
        w.since + l.wait,
        (100 * extract(epoch from p_now - w.since) / extract(epoch from l.wait))::integer,
        coalesce(e.failing_since = w.since, false),
        case when e.failing_since = w.since then e.failing_told end,
        e.last_error
    from ulak.endpoints e
    cross join lateral (select (e.config ->> 'disable_after')::interval, greatest(e.last_success_at, e.updated_at)) l(wait, well_at)
    cross join lateral (
        -- Whole minutes after the last success: failures in the same minute may have come before it.
        select min(s.minute), coalesce(sum(s.failed), 0)
        from ulak.endpoint_stats s
        where s.endpoint_id = e.id and s.minute > l.well_at and s.failed > 0
    ) f(first_at, failures)
    cross join lateral (select case when e.failing_since > l.well_at then e.failing_since else f.first_at end) w(since)
    where e.config ? 'disable_after' and e.enabled and w.since <= p_now
$sql$;

-- For maintenance. At least 20 failures: a receiver that gets a message a week isn't broken after two.
create or replace function ulak_private.disable_broken(p_now timestamptz)
returns void
language plpgsql
as $plpgsql$
declare
    v_least constant bigint := 20;
    v_failing record;
    v_stage integer;
    v_endpoint ulak.endpoints;
begin
    for v_failing in
        select f.* from ulak_private.failing_endpoints(p_now) f order by f.endpoint_id
    loop
        v_stage := case
            when v_failing.failures < v_least then null
            when v_failing.percent >= 100 then 100
            when v_failing.percent >= 90 then 90
            when v_failing.percent >= 50 then 50
        end;
        continue when v_failing.is_known and v_stage is not distinct from v_failing.told;
        v_endpoint := ulak_private.lock_endpoint(v_failing.endpoint_id);
        -- Meanwhile it may have been enabled, altered or dropped, or may have answered.
        continue when v_endpoint.id is null or not v_endpoint.enabled
            or coalesce(greatest(v_endpoint.last_success_at, v_endpoint.updated_at) >= v_failing.since, false);
        if v_stage = 100 then
            perform ulak_private.switch_endpoint(
                v_endpoint,
                false,
                null,
                format('no success since %s: %s', v_failing.since, ulak_private.counted(v_failing.failures, 'failure')),
                p_now
            );
        elsif v_stage > coalesce(v_failing.told, 0) then
            perform ulak_private.tell_failing(v_failing.endpoint_id, to_jsonb(v_failing), p_now);
        end if;
        update ulak.endpoints e
        set failing_since = v_failing.since, failing_told = v_stage
        where e.id = v_failing.endpoint_id;
    end loop;
end
$plpgsql$;

create or replace function ulak_private.tell_failing(p_endpoint_id bigint, p_failing jsonb, p_now timestamptz)
returns void
language plpgsql
as $plpgsql$
declare
    v_facts jsonb := jsonb_strip_nulls(jsonb_build_object(
        'endpoint', p_failing -> 'endpoint_name',
        'since', p_failing -> 'since',
        'failures', p_failing -> 'failures',
        'percent', p_failing -> 'percent',
        'disable_at', p_failing -> 'disable_at',
        'error', p_failing -> 'last_error'
    ));
begin
    insert into ulak.event_log (event, endpoint_id, endpoint_name, detail, created_at)
    values ('endpoint.failing', p_endpoint_id, v_facts ->> 'endpoint', v_facts - 'endpoint', ulak_private.log_time(p_now));
    perform ulak_private.tell_of_endpoint('ulak.endpoint.failing', p_endpoint_id, v_facts, p_now);
end
$plpgsql$;

-- For maintenance: messages that wait for an endpoint that was disabled this way become dead letters if its config says so.
create or replace function ulak_private.bury_abandoned(p_now timestamptz, p_limit integer)
returns integer
language sql
set enable_seqscan = off
as $sql$
    select ulak_private.give_up(
        array(
            select q.id
            from ulak.endpoints e
            join ulak_private.deliveries q on q.endpoint_id = e.id and q.status = 'pending'
            where not e.enabled and e.failing_told = 100 and e.config ->> 'when_disabled' = 'dead_letter'
            limit p_limit
            for update of q skip locked
        ),
        'its endpoint was disabled because the receiver stayed broken',
        p_now
    )
$sql$;
