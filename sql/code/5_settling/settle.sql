-- Settling: stores the outcomes of claimed messages, many in one statement.

-- Each statement matches id, worker, attempt and status: a zombie, even the same worker's earlier claim, changes nothing.
-- Two spellings make sure that the primary key is used, whatever size the planner assumes. `status is not distinct from`
-- instead of `=` can't prove a partial index's condition; with `=` all messages in flight were read once per row.
-- `id between x and x` instead of `=` rules out a merge join; with `=` a plan that was made for an empty queue read the
-- whole queue in the order of its ids.

-- Takes outcomes in their order of arrival. A null error means delivered; the prefix of an error decides whether to retry.
-- Returns the ids that were settled; the worker had lost the rest.
create or replace function ulak_private.settle(
    p_worker text,
    p_ids bigint[],
    p_attempts integer[],
    p_errors text[],
    p_retry_after integer[],
    p_responses jsonb[],
    p_now timestamptz,
    -- Outcomes with the same number came from one request; null: each from its own.
    p_requests integer[] default null
)
returns bigint[]
language plpgsql
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
set plan_cache_mode = force_generic_plan
as $plpgsql$
declare
    -- Null attempts would mean that the messages are finished and move as they are; an empty array settles nothing.
    v_gone record := ulak_private.archive_rows(p_ids, p_now, p_worker, coalesce(p_attempts, '{}'), p_errors, p_responses);
    v_dead bigint[];
begin
    if p_errors is not null then
        with settled as materialized (
            select d.id, d.endpoint_id, d.place, null as ordering_key, false as is_dead
            from unnest(v_gone.ids, v_gone.endpoint_ids, v_gone.places) d(id, endpoint_id, place)
            union all
            select f.id, f.endpoint_id, f.place, case when f.is_dead then f.ordering_key end, f.is_dead
            from ulak_private.fail_rows(
                array_fill(p_worker, array[cardinality(p_ids)]),
                p_ids,
                p_attempts,
                p_errors,
                p_retry_after,
                p_responses,
                p_now
            ) f
        )
        select
            coalesce(array_agg(s.id order by s.place), '{}'),
            array_agg(s.endpoint_id order by s.place),
            array_agg(s.place order by s.place),
            v_gone.ordering_keys || array_agg(s.ordering_key) filter (where s.ordering_key is not null),
            v_gone.ordered_endpoint_ids || array_agg(s.endpoint_id) filter (where s.ordering_key is not null),
            array_agg(s.id) filter (where s.is_dead)
        into v_gone.ids, v_gone.endpoint_ids, v_gone.places, v_gone.ordering_keys, v_gone.ordered_endpoint_ids, v_dead
        from settled s;
    end if;

    if v_gone.ordering_keys is not null then
        perform ulak_private.unpark_heads(v_gone.ordered_endpoint_ids, v_gone.ordering_keys, p_now);
    end if;
    if p_errors is not null or v_gone.changed_endpoint_ids is not null then
        perform ulak_private.record_requests(v_gone.endpoint_ids, v_gone.ids, v_gone.places, p_attempts, p_errors, p_requests, p_now);
    end if;
    if v_dead is not null then
        perform ulak_private.disable_gone(v_dead, p_now);
        perform ulak_private.archive_dead(v_dead, p_now);
    end if;
    return v_gone.ids;
end
$plpgsql$;

-- The same for workers and nodes.
create or replace function ulak_private.settle_many(
    p_worker text,
    p_ids bigint[],
    p_attempts integer[],
    p_errors text[] default null,
    p_retry_after integer[] default null,
    p_responses jsonb[] default null,
    p_now timestamptz default clock_timestamp(),
    p_requests integer[] default null
)
returns bigint[]
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    return ulak_private.settle(p_worker, p_ids, p_attempts, p_errors, p_retry_after, p_responses, ulak_private.clock(p_now), p_requests);
end
$plpgsql$;

-- Tells circuit breakers of settled messages. A breaker counts requests, so one message stands for each request: one that was delivered if
-- there is any, else one that could be sent. If all were delivered, endpoints that don't change are skipped.
create or replace function ulak_private.record_requests(
    p_endpoint_ids bigint[],
    p_ids bigint[],
    p_places bigint[],
    p_attempts integer[],
    p_errors text[],
    p_requests integer[],
    p_now timestamptz
)
returns void
language plpgsql
as $plpgsql$
declare
    -- Endpoints whose row a delivery changes, and those of them whose circuit breaker it changes.
    v_noting bigint[];
    v_counting bigint[];
begin
    if p_errors is null then
        select array_agg(e.id), array_agg(e.id) filter (where ulak_private.success_changes_breaker(e)) into v_noting, v_counting
        from ulak.endpoints e
        where e.id = any (p_endpoint_ids) and ulak_private.success_changes_endpoint(e, p_now);
        if v_counting is null then
            perform ulak_private.note_success(v_noting, p_now);
            return;
        end if;
    end if;
    perform ulak_private.record_outcomes(
        array_agg(r.endpoint_id order by r.place),
        array_agg(r.id order by r.place),
        array_agg(p_attempts[r.place] order by r.place),
        array_agg(p_errors[r.place] order by r.place),
        p_now
    )
    from (
        select distinct on (coalesce(p_requests[s.place], s.place)) s.endpoint_id, s.id, s.place
        from unnest(p_endpoint_ids, p_ids, p_places) s(endpoint_id, id, place)
        order by coalesce(p_requests[s.place], s.place), p_errors[s.place] is not null, ulak_private.is_messages_fault(p_errors[s.place]), s.place
    ) r;
end
$plpgsql$;

-- Every failure, reported or found by recovery, ends here: in a retry after a delay, or in the dead-letter queue. The
-- caller unparks messages behind a dead one in its ordering key (unpark_heads) and archives the dead (archive_dead).
create or replace function ulak_private.fail_rows(
    p_workers text[],
    p_ids bigint[],
    p_attempts integer[],
    p_errors text[],
    p_retry_after integer[],
    p_responses jsonb[],
    p_now timestamptz
)
returns table (place bigint, id bigint, endpoint_id bigint, ordering_key text, is_dead boolean)
language plpgsql
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
set plan_cache_mode = force_generic_plan
as $plpgsql$
declare
    v_defaults jsonb := ulak_private.retry_defaults();
    v_places bigint[];
    v_ids bigint[];
    v_endpoint_ids bigint[];
    v_keys text[];
    v_are_dead boolean[];
    v_dead bigint[];
begin
    with decided as materialized (
        select d.*
        from ulak_private.decide_failures(p_workers, p_ids, p_attempts, p_errors, p_retry_after, p_responses, v_defaults) d
    ),
    moved as (
        update ulak_private.deliveries q
        set status = case when d.is_dead then d.dead_status else 'pending' end,
            retry_count = q.retry_count + (not d.is_dead)::integer,
            next_retry_at = case
                when d.is_dead then q.next_retry_at
                else greatest(
                    q.scheduled_at,
                    p_now + coalesce(
                        make_interval(secs => case when d.retry_after > 86400 then 86400 else d.retry_after end),
                        ulak_private.backoff(d.policy, d.retry_count)
                    )
                )
            end,
            last_error = d.error,
            first_failed_at = coalesce(q.first_failed_at, p_now),
            failed_at = case when d.is_dead then p_now end,
            response = coalesce(d.response, q.response),
            updated_at = p_now,
            locked_by = null,
            lease_until = null
        from decided d
        where q.id between d.id and d.id
        returning d.place, q.id, q.endpoint_id, q.ordering_key, d.is_dead, q.attempts, q.processing_started_at, d.error
    ),
    noted as (
        insert into ulak.attempts (message_id, attempt, started_at, ended_at, error)
        select m.id, m.attempts, coalesce(m.processing_started_at, p_now), p_now, m.error
        from moved m
    )
    select
        array_agg(m.place),
        array_agg(m.id),
        array_agg(m.endpoint_id),
        array_agg(m.ordering_key),
        array_agg(m.is_dead),
        array_agg(m.id) filter (where m.is_dead)
    into v_places, v_ids, v_endpoint_ids, v_keys, v_are_dead, v_dead
    from moved m;

    if v_dead is not null then
        perform ulak_private.bury(v_dead, p_now);
    end if;
    return query
    select f.*
    from unnest(v_places, v_ids, v_endpoint_ids, v_keys, v_are_dead) f;
end
$plpgsql$;

-- Locks the failed messages and decides about each by its endpoint's retry policy. Stable, so that it is inlined into the calling query: a
-- stable function that isn't inlined can't lock rows.
create or replace function ulak_private.decide_failures(
    p_workers text[],
    p_ids bigint[],
    p_attempts integer[],
    p_errors text[],
    p_retry_after integer[],
    p_responses jsonb[],
    p_defaults jsonb
)
returns table (
    place bigint,
    error text,
    retry_after integer,
    response jsonb,
    id bigint,
    retry_count integer,
    policy jsonb,
    dead_status text,
    is_dead boolean
)
language sql
stable
as $sql$
    select
        o.place,
        o.error,
        o.retry_after,
        o.response,
        q.id,
        q.retry_count,
        p.policy,
        case when q.ordering_key is not null and e.config ->> 'on_dead' = 'hold' then 'held' else 'failed' end,
        o.error ~ E'^\\[(PERMANENT|DISABLE)\\]' or q.retry_count >= coalesce(v.max_retries, (p.policy -> 'max_retries')::integer)
    from unnest(p_workers, p_ids, p_attempts, p_errors, p_retry_after, p_responses)
        with ordinality o(worker, id, attempt, error, retry_after, response, place)
    join ulak_private.deliveries q on q.id between o.id and o.id
    left join ulak.endpoints e on e.id = q.endpoint_id
    cross join lateral (select p_defaults || coalesce(e.retry_policy, '{}') offset 0) p(policy)
    left join lateral (
        select v.max_retries
        from ulak_private.events v
        where v.id = q.event_id and v.created_at = coalesce(q.event_created_at, q.created_at)
        -- As in event_of().
        limit 1
    ) v on true
    where o.error is not null
        and q.attempts = o.attempt
        and q.locked_by is not distinct from o.worker
        and q.status is not distinct from 'processing'
    for update of q
$sql$;
