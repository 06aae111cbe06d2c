-- The dead-letter queue: what becomes of messages that ulak gives up on.

-- Makes a letter of each message that has just failed for good. announce_dead() archives the messages later.
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
    perform ulak_private.tell_dead(p_ids, p_now);
end
$plpgsql$;

-- The facts that a pager needs to route an alert about new dead letters, and to link to them: the same in the operator event, the
-- event log, the notification and the line of the server's log. No payload.
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

-- Reports dead messages and archives them. Callers of bury() call this last, because it locks endpoints; senders don't call it at all
-- (bury_overflow).
create or replace function ulak_private.announce_dead(p_ids bigint[], p_now timestamptz)
returns void
language plpgsql
set enable_seqscan = off
as $plpgsql$
declare
    v_dead record;
    v_endpoint ulak.endpoints;
begin
    for v_dead in
        select
            q.endpoint_id,
            count(*) as messages,
            max(q.id) as last_id,
            bool_or(starts_with(q.last_error, '[DISABLE]')) as is_gone
        from ulak_private.deliveries q
        where q.id = any (p_ids)
        group by q.endpoint_id
        order by q.endpoint_id
    loop
        v_endpoint := ulak_private.lock_endpoint(v_dead.endpoint_id);
        -- A receiver that answers 410 Gone wants no more messages.
        if v_dead.is_gone and v_endpoint.enabled and (v_endpoint.config -> 'auto_disable_on_gone')::boolean then
            perform ulak_private.switch_endpoint(v_endpoint, false, null, 'the receiver answered 410 Gone', p_now);
        end if;
        perform ulak_private.log_dead(v_endpoint, p_ids, v_dead.endpoint_id, p_now);
        -- At most once a second per endpoint (per batch, if it was dropped): NOTIFY takes a lock that all databases of the server share.
        if coalesce(
            v_endpoint.dead_notified_at <= p_now - interval '1 second' or ulak_private.is_ahead(v_endpoint.dead_notified_at, p_now), true
        ) then
            update ulak.endpoints e
            set dead_notified_at = p_now
            where e.id = v_endpoint.id;
            perform ulak_private.notify_dead(v_dead.last_id, v_dead.messages);
        end if;
    end loop;
    perform ulak_private.archive_dead(p_ids, p_now);
end
$plpgsql$;

-- With the facts of the last dead letter. A notification is limited to 8,000 bytes.
create or replace function ulak_private.notify_dead(p_last_id bigint, p_messages bigint)
returns void
language sql
as $sql$
    select ulak_private.notify('ulak_events', (f.facts - 'message' || jsonb_build_object(
        'event', 'message.dead',
        'messages', p_messages,
        'last', p_last_id,
        'error', left(f.facts ->> 'error', 500)
    ))::text)
    from ulak_private.dead_facts(array[p_last_id]) f
$sql$;

-- Writes dead letters of an endpoint to the server's log: a line each for the first ten of a minute. The rest is counted, and reported in
-- one line after the minute is over, with the next dead letter or by maintenance. The caller has locked the endpoint.
create or replace function ulak_private.log_dead(p_endpoint ulak.endpoints, p_ids bigint[], p_endpoint_id bigint, p_now timestamptz)
returns void
language plpgsql
set enable_seqscan = off
as $plpgsql$
declare
    v_most constant integer := 10;
    v_before integer := 0;
    v_ids bigint[];
    v_letters integer;
    v_facts jsonb;
begin
    if p_endpoint.dead_log_started_at > p_now - interval '1 minute' and p_endpoint.dead_log_started_at <= p_now then
        v_before := p_endpoint.dead_log_letters;
    else
        perform ulak_private.log_left_out(p_endpoint.name, p_endpoint.dead_log_letters - v_most, p_endpoint.dead_log_started_at);
    end if;
    v_ids := array(
        select q.id from ulak_private.deliveries q where q.id = any (p_ids) and q.endpoint_id = p_endpoint_id order by q.id
    );
    v_letters := cardinality(v_ids);
    for v_facts in
        select f.facts from ulak_private.dead_facts(v_ids[1:v_most - v_before]) f order by f.id
    loop
        perform ulak_private.log('ulak: dead letter: ' || v_facts::text);
    end loop;
    -- A dropped endpoint has no counters.
    if p_endpoint.id is null then
        perform ulak_private.log_left_out('(dropped)', v_letters - v_most, p_now);
    end if;
    update ulak.endpoints e
    set dead_log_started_at = case when v_before > 0 then p_endpoint.dead_log_started_at else p_now end,
        dead_log_letters = v_before + v_letters
    where e.id = p_endpoint.id;
end
$plpgsql$;

create or replace function ulak_private.log_left_out(p_endpoint text, p_letters integer, p_since timestamptz)
returns void
language sql
as $sql$
    select ulak_private.log('ulak: dead letters left out of this log: ' || jsonb_build_object(
        'endpoint', p_endpoint, 'letters', p_letters, 'since', p_since
    )::text)
    where p_letters > 0
$sql$;

-- For maintenance: reports the lines left out of a minute that no later dead letter has closed. Locked endpoints are left to the next run.
create or replace function ulak_private.close_dead_logs(p_now timestamptz)
returns void
language plpgsql
as $plpgsql$
declare
    v_endpoint record;
begin
    for v_endpoint in
        select e.id, e.name, e.dead_log_letters, e.dead_log_started_at
        from ulak.endpoints e
        where e.dead_log_letters > 10 and e.dead_log_started_at <= p_now - interval '1 minute'
        order by e.id
        for no key update skip locked
    loop
        perform ulak_private.log_left_out(v_endpoint.name, v_endpoint.dead_log_letters - 10, v_endpoint.dead_log_started_at);
        update ulak.endpoints e
        set dead_log_started_at = null, dead_log_letters = null
        where e.id = v_endpoint.id;
    end loop;
end
$plpgsql$;

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
    perform ulak_private.announce_dead(v_ids, p_now);
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
