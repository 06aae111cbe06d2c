-- Finding messages by the data that their sender has, wherever they are: in the queue, among the dead letters, in the archive.

-- Members of ulak_application find everybody's messages, except those of restricted endpoints that they may not send to, and never see
-- payload, headers, metadata or response. Each call is planned for its filters: a correlation id is looked up in an index of the queue;
-- anything else scans the queue, which takes 0.1 s for a million messages: less than an index on message_id would cost all senders
-- together. The archive is indexed by id and time only, so it is searched no further back than a day unless p_since is given.
create or replace function ulak.find_messages(
    p_endpoint text default null,
    p_idempotency_key text default null,
    p_correlation_id uuid default null,
    p_message_id uuid default null,
    p_status text default null,
    p_since timestamptz default null,
    p_limit integer default 100,
    p_now timestamptz default clock_timestamp()
)
returns table (
    id bigint,
    message_id uuid,
    endpoint text,
    status text,
    priority smallint,
    attempts integer,
    retry_count integer,
    next_retry_at timestamptz,
    last_error text,
    idempotency_key text,
    correlation_id uuid,
    ordering_key text,
    created_at timestamptz,
    updated_at timestamptz,
    scheduled_at timestamptz,
    expires_at timestamptz,
    completed_at timestamptz,
    failed_at timestamptz,
    dlq_id bigint,
    dlq_status text,
    redriven_message_id bigint,
    sent_by text
)
language plpgsql
stable
security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_custom_plan
set jit = off
as $plpgsql$
#variable_conflict use_column
declare
    v_endpoint_id bigint := case when p_endpoint is not null then ulak_private.endpoint_id(p_endpoint) end;
    v_hidden_ids bigint[] := case
        when ulak_private.caller_has('ulak_monitor') then '{}'
        else array(select e.id from ulak.endpoints e where e.is_restricted and not ulak_private.may_send(e.id))
    end;
    v_since timestamptz := coalesce(p_since, ulak_private.finite_time(p_now) - interval '24 hours');
begin
    perform ulak_private.check_integer('p_limit', p_limit, 1, 10000);
    if v_endpoint_id = any (v_hidden_ids) then
        perform ulak_private.raise_not_granted(p_endpoint, 'send');
    end if;
    if p_status not in ('pending', 'processing', 'held', 'completed', 'failed', 'expired', 'cancelled') then
        raise exception 'no message has status "%"', left(p_status, 64)
            using errcode = '22023', hint = 'pending, processing, held, completed, failed, expired or cancelled.';
    end if;
    return query
    with found as materialized (
        select m.*
        from (
            select
                q.id, q.message_id, q.endpoint_id, q.status, q.priority, q.attempts, q.retry_count, q.next_retry_at, q.last_error, q.idempotency_key,
                q.correlation_id, q.ordering_key, q.created_at, q.updated_at, q.scheduled_at, q.expires_at, q.completed_at, q.failed_at, q.event_id,
                coalesce(q.event_created_at, q.created_at) as event_created_at, true as is_unfinished
            from ulak_private.deliveries q
            union all
            select
                a.id, a.message_id, a.endpoint_id, a.status, a.priority, a.attempts, a.retry_count, a.next_retry_at, a.last_error, a.idempotency_key,
                a.correlation_id, a.ordering_key, a.created_at, a.updated_at, a.scheduled_at, a.expires_at, a.completed_at, a.failed_at, a.event_id,
                coalesce(a.event_created_at, a.created_at), false
            from ulak_private.archived a
            union all
            select
                d.original_message_id, d.message_id, d.endpoint_id, 'failed', d.priority, d.attempts, d.retry_count, null, d.last_error, d.idempotency_key,
                d.correlation_id, d.ordering_key, d.original_created_at, d.failed_at, d.scheduled_at, d.expires_at, null, d.failed_at, d.event_id,
                coalesce(d.event_created_at, d.original_created_at), false
            -- Messages that only exist as a dead letter.
            from ulak_private.letters d
            where not exists (select from ulak_private.deliveries q where q.id = d.original_message_id)
                and not exists (select from ulak_private.archived a where a.id = d.original_message_id and a.created_at = d.original_created_at)
        ) m
        where m.endpoint_id <> all (v_hidden_ids)
            and (v_endpoint_id is null or m.endpoint_id = v_endpoint_id)
            and (p_idempotency_key is null or m.idempotency_key = p_idempotency_key)
            and (p_correlation_id is null or m.correlation_id = p_correlation_id)
            and (p_message_id is null or m.message_id = p_message_id)
            and (p_status is null or m.status = p_status)
            and (m.created_at >= v_since or m.is_unfinished and p_since is null)
        order by m.id desc
        limit p_limit
    )
    select
        f.id, f.message_id, e.name, f.status, f.priority, f.attempts, f.retry_count,
        case when f.status = 'pending' then f.next_retry_at end,
        f.last_error, f.idempotency_key, f.correlation_id, f.ordering_key, f.created_at, f.updated_at, f.scheduled_at,
        f.expires_at, f.completed_at, f.failed_at, d.id, d.status, d.redriven_message_id,
        (select v.sent_by from ulak_private.events v where v.id = f.event_id and v.created_at = f.event_created_at)
    from found f
    left join ulak.endpoints e on e.id = f.endpoint_id
    left join lateral (
        select d.id, d.status, d.redriven_message_id
        from ulak_private.letters d
        where f.status in ('failed', 'held') and d.original_message_id = f.id
        order by d.id desc
        limit 1
    ) d on true
    order by f.id desc;
end
$plpgsql$;

comment on function ulak.find_messages(text, text, uuid, uuid, text, timestamptz, integer, timestamptz) is
    'finds messages by endpoint, idempotency key, correlation id, message_id (webhook-id) and status, newest first; without '
    'payload, headers and response. Finished messages and dead letters are searched from p_since on, by default one day back';

-- For monitors: shows no payload, and has no filter that would reveal one.
create or replace function ulak.find_letters(
    p_endpoint text default null,
    p_error_like text default null,
    p_since timestamptz default null,
    p_until timestamptz default null,
    p_status text default 'failed',
    p_limit integer default 100
)
returns table (
    id bigint,
    message bigint,
    message_id uuid,
    endpoint text,
    status text,
    attempts integer,
    created_at timestamptz,
    failed_at timestamptz,
    last_error text,
    redriven_message_id bigint
)
language plpgsql
stable
security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_custom_plan
set jit = off
as $plpgsql$
#variable_conflict use_column
begin
    perform ulak_private.check_integer('p_limit', p_limit, 1, 10000);
    if p_status not in ('failed', 'redriven', 'discarded') then
        raise exception 'no dead letter has status "%"', left(p_status, 64)
            using errcode = '22023', hint = 'failed, redriven or discarded.';
    end if;
    return query
    select d.id, d.original_message_id, d.message_id, coalesce(e.name, d.endpoint_name), d.status, d.attempts, d.original_created_at, d.failed_at,
        d.last_error, d.redriven_message_id
    from ulak_private.letters d
    left join ulak.endpoints e on e.id = d.endpoint_id
    where (p_endpoint is null or coalesce(e.name, d.endpoint_name) = p_endpoint)
        and (p_error_like is null or d.last_error like p_error_like)
        and (p_since is null or d.failed_at >= p_since)
        and (p_until is null or d.failed_at < p_until)
        and (p_status is null or d.status = p_status)
    order by d.id desc
    limit p_limit;
end
$plpgsql$;

comment on function ulak.find_letters(text, text, timestamptz, timestamptz, text, integer) is
    'finds dead letters by endpoint, error, time and status, newest first; without payload and headers';
