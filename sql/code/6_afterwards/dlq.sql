-- The dead-letter queue: what becomes of messages that ulak gives up on.

-- Makes a letter of each message that has just failed for good, with an entry in the event log and an event for operators. The caller
-- archives the messages at its end (archive_dead).
create or replace function ulak_private.bury(p_ids bigint[], p_now timestamptz)
returns void
language plpgsql
set enable_seqscan = off
as $plpgsql$
begin
    insert into ulak_private.letters (
        original_message_id,
        endpoint_id,
        endpoint_name,
        protocol,
        message_id,
        original_created_at,
        failed_at,
        archived_at,
        first_failed_at,
        scheduled_at,
        expires_at,
        correlation_id,
        generation,
        attempts,
        retry_count,
        priority,
        last_error,
        idempotency_key,
        payload_hash,
        ordering_key,
        response,
        failure_history,
        is_holding,
        event_id,
        event_created_at,
        made_from
    )
    select
        q.id,
        q.endpoint_id,
        coalesce(e.name, '(dropped)'),
        coalesce(e.protocol, '(dropped)'),
        q.message_id,
        q.created_at,
        q.failed_at,
        p_now,
        q.first_failed_at,
        q.scheduled_at,
        q.expires_at,
        q.correlation_id,
        q.generation,
        q.attempts,
        q.retry_count,
        q.priority,
        q.last_error,
        q.idempotency_key,
        q.payload_hash,
        q.ordering_key,
        q.response,
        q.failure_history,
        q.status = 'held',
        q.event_id,
        q.event_created_at,
        q.made_from
    from ulak_private.deliveries q
    left join ulak.endpoints e on e.id = q.endpoint_id
    where q.id = any (p_ids)
    order by q.id;
    insert into ulak.event_log (event, endpoint_id, endpoint_name, message_id, detail, created_at)
    select 'message.dead', f.endpoint_id, e.name, f.id, f.facts - array['endpoint', 'message'], ulak_private.log_time(p_now)
    from ulak_private.dead_facts(p_ids) f
    left join ulak.endpoints e on e.id = f.endpoint_id
    order by f.id;
    perform ulak_private.tell_of_dead_letters(p_ids, p_now);
end
$plpgsql$;

-- The facts that a pager needs to route an alert about new dead letters, and to link to them: the same in the operator event and the event
-- log. No payload.
create or replace function ulak_private.dead_facts(p_ids bigint[])
returns table (id bigint, endpoint_id bigint, facts jsonb)
language sql
stable
set enable_seqscan = off
as $sql$
    select
        d.original_message_id,
        d.endpoint_id,
        jsonb_strip_nulls(jsonb_build_object(
            'endpoint', d.endpoint_name,
            'message', d.original_message_id,
            'message_id', d.message_id,
            'dlq_id', d.id,
            'event_type', left(d.metadata ->> 'event_type', 200),
            'correlation_id', d.correlation_id,
            'sender', d.sent_by,
            'attempts', d.attempts,
            'error_class', lower(substring(d.last_error from E'^\\[([A-Z]+)\\]') collate "C"),
            'error', d.last_error
        ))
    from ulak.dlq d
    -- A message that holds its ordering key may have been a dead letter before.
    where d.original_message_id = any (p_ids) and d.status = 'failed'
$sql$;

-- An error without its numbers, so that errors of one cause are equal.
create or replace function ulak_private.cause(p_error text)
returns text
language sql
immutable
as $sql$
    select left(regexp_replace(p_error, E'[0-9a-f]{8}-[0-9a-f-]{27}|(?<!HTTP )\\m[0-9]+', '#', 'g'), 160)
$sql$;

-- Turns those of the messages that are waiting into dead letters and returns how many. Without p_error they keep their last error.
create or replace function ulak_private.give_up(p_ids bigint[], p_error text, p_now timestamptz)
returns integer
language plpgsql
set enable_seqscan = off
as $plpgsql$
declare
    v_ids bigint[];
    v_endpoint_ids bigint[];
    v_keys text[];
begin
    with given_up as (
        update ulak_private.deliveries q
        set status = ulak_private.dead_status(q.endpoint_id, q.ordering_key),
            -- The message may be parked.
            next_retry_at = p_now,
            failed_at = p_now,
            first_failed_at = coalesce(q.first_failed_at, p_now),
            updated_at = p_now,
            last_error = coalesce('[PERMANENT] ' || p_error, q.last_error, '[PERMANENT] removed from the queue by ' || ulak_private.caller())
        where q.id = any (p_ids) and q.status is not distinct from 'pending'
        returning q.id, q.endpoint_id, q.ordering_key
    )
    select
        array_agg(g.id),
        array_agg(g.endpoint_id) filter (where g.ordering_key is not null),
        array_agg(g.ordering_key) filter (where g.ordering_key is not null)
    into v_ids, v_endpoint_ids, v_keys
    from given_up g;
    if v_ids is null then
        return 0;
    end if;
    perform ulak_private.bury(v_ids, p_now);
    if v_keys is not null then
        perform ulak_private.unpark_heads(v_endpoint_ids, v_keys, p_now);
    end if;
    perform ulak_private.archive_dead(v_ids, p_now);
    return cardinality(v_ids);
end
$plpgsql$;

create or replace function ulak.archive_single_to_dlq(
    p_message_id bigint,
    p_reason text default null,
    p_now timestamptz default clock_timestamp()
)
returns bigint
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_status text;
begin
    if ulak_private.give_up(array[p_message_id], ulak_private.error_line(p_reason), ulak_private.clock(p_now)) = 1 then
        return (select max(d.id) from ulak_private.letters d where d.original_message_id = p_message_id);
    end if;
    select m.status into v_status
    from ulak.messages m
    where m.id = p_message_id;
    if not found then
        raise exception 'message % does not exist', p_message_id
            using errcode = 'P0002', detail = 'There is no such message, or its month has been dropped.';
    end if;
    raise exception 'message % is not waiting', p_message_id
        using errcode = '55000', detail = format('Its status is %s.', v_status);
end
$plpgsql$;

comment on function ulak.archive_single_to_dlq(bigint, text, timestamptz) is
    'moves one waiting message to the dead-letter queue and returns its id there';

create or replace function ulak.dlq_summary()
returns table (
    endpoint text,
    failed bigint,
    redriven bigint,
    oldest timestamptz,
    newest timestamptz,
    discarded bigint
)
language sql
stable
security definer
set search_path = pg_catalog, pg_temp
as $sql$
    select
        d.endpoint_name,
        count(*) filter (where d.status = 'failed'),
        count(*) filter (where d.status = 'redriven'),
        min(d.failed_at),
        max(d.failed_at),
        count(*) filter (where d.status = 'discarded')
    from ulak_private.letters d
    group by d.endpoint_name
    order by 2 desc, 1
$sql$;

comment on function ulak.dlq_summary() is 'dead letters per endpoint: waiting for a decision, redriven, their time range, and discarded';
