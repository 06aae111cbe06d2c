-- The story of one message: where it came from, what was tried, and what happens next or why nothing will.

-- A message wherever it is: in the queue, in the archive, or only among the dead letters. Without its payload.
create or replace function ulak_private.find_message(p_id bigint)
returns table (
    place text,
    id bigint,
    endpoint_id bigint,
    status text,
    created_at timestamptz,
    updated_at timestamptz,
    next_retry_at timestamptz,
    scheduled_at timestamptz,
    expires_at timestamptz,
    processing_started_at timestamptz,
    completed_at timestamptz,
    failed_at timestamptz,
    lease_until timestamptz,
    locked_by text,
    attempts integer,
    retry_count integer,
    priority smallint,
    ordering_key text,
    last_error text,
    event_type text,
    failure_history jsonb,
    archived_at timestamptz,
    sent_by text
)
language sql
stable
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
as $sql$
    select
        'queue', q.id, q.endpoint_id, q.status, q.created_at, q.updated_at, q.next_retry_at, q.scheduled_at, q.expires_at,
        q.processing_started_at, q.completed_at, q.failed_at, q.lease_until, q.locked_by, q.attempts, q.retry_count,
        q.priority, q.ordering_key, q.last_error, q.metadata ->> 'event_type', q.failure_history, null::timestamptz,
        q.sent_by
    from ulak.queue q
    where q.id = p_id
    union all
    select
        'archive', a.id, a.endpoint_id, a.status, a.created_at, a.updated_at, a.next_retry_at, a.scheduled_at, a.expires_at,
        a.processing_started_at, a.completed_at, a.failed_at, a.lease_until, a.locked_by, a.attempts, a.retry_count,
        a.priority, a.ordering_key, a.last_error, a.metadata ->> 'event_type', a.failure_history, a.archived_at,
        a.sent_by
    from ulak.archive a
    where a.id = p_id
    union all
    select
        'dlq', d.original_message_id, d.endpoint_id, 'failed', d.original_created_at, d.failed_at, null, d.scheduled_at,
        d.expires_at, null, null, d.failed_at, null, null, d.attempts, d.retry_count, d.priority, d.ordering_key, d.last_error,
        d.metadata ->> 'event_type', d.failure_history, d.archived_at, d.sent_by
    from ulak.dlq d
    where d.original_message_id = p_id
    limit 1
$sql$;

create or replace function ulak.explain(p_id bigint, p_now timestamptz default clock_timestamp())
returns table (at timestamptz, what text)
language plpgsql
stable
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
as $plpgsql$
#variable_conflict use_column
declare
    v_message record;
    v_endpoint text;
begin
    p_now := ulak_private.finite_time(p_now);
    select m.* into v_message
    from ulak_private.find_message(p_id) m;
    if not found then
        perform ulak_private.raise_unknown_message(p_id);
    end if;
    perform ulak_private.require_sender(p_id, v_message.endpoint_id, p_is_look => true);
    v_endpoint := coalesce(
        (select format('endpoint "%s"', e.name) from ulak.endpoints e where e.id = v_message.endpoint_id),
        format('endpoint %s, which no longer exists', v_message.endpoint_id)
    );

    return query
    select s.at, s.what
    from (
        select 1 as place, 0::bigint as step, c.at, c.what
        from ulak_private.explain_cycles(v_message.failure_history) c
        union all
        select
            2,
            0,
            v_message.created_at,
            concat_ws(
                ', ',
                coalesce(
                    ulak_private.explain_origin(p_id, v_message.endpoint_id) || ' to ' || v_endpoint,
                    case
                        when starts_with(v_message.event_type, 'ulak.') then format('%s, sent to %s', v_message.event_type, v_endpoint)
                        else concat('sent ', 'by ' || v_message.sent_by || ' ', 'to ', v_endpoint)
                    end
                ),
                case when ulak_private.explain_origin(p_id, v_message.endpoint_id) is not null then 'first sent by ' || v_message.sent_by end,
                case when v_message.priority > 0 then format('priority %s', v_message.priority) end,
                'ordering key "' || v_message.ordering_key || '"',
                'not before ' || v_message.scheduled_at,
                'not after ' || v_message.expires_at
            )
        union all
        select 3, a.attempt, a.ended_at, ulak_private.explain_attempt(a)
        from ulak.attempts a
        where a.message_id = p_id
        union all
        select 4, 0, l.created_at, case l.event
            when 'message.redriven' then format('redriven by %s', l.detail ->> 'by')
            when 'message.rescheduled' then format('rescheduled by %s, not before %s', l.actor, l.new_value ->> 'at')
            else format('given priority %s by %s', l.new_value ->> 'priority', l.actor)
        end
        from ulak.event_log l
        where l.message_id = p_id
            and (
                l.event in ('message.rescheduled', 'message.reprioritised')
                -- A message that held its key goes on under its id.
                or l.event = 'message.redriven' and l.detail ->> 'original_message_id' = p_id::text
            )
        union all
        select 4, e.step, e.at, e.what
        from ulak_private.explain_end(
            p_id, v_message.place, v_message.status, v_message.created_at, v_message.updated_at, v_message.completed_at,
            v_message.processing_started_at, v_message.failed_at, v_message.expires_at, v_message.attempts,
            v_message.last_error, v_message.archived_at
        ) with ordinality e (at, what, step)
    ) s
    order by s.place, s.step, s.at;

    return query
    select n.at, n.what
    from ulak_private.explain_next(p_id, v_message.place, v_message.status, p_now) n;
end
$plpgsql$;

comment on function ulak.explain(bigint, timestamptz) is
    'the story of one message, by the id that send() returned: where it came from, what was tried, and what happens next and '
    'when, or why nothing will';

create or replace function ulak_private.raise_unknown_message(p_id bigint)
returns void
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    raise exception 'message % is not known', coalesce(p_id::text, 'null')
        using errcode = 'P0002',
            detail = case
                when p_id between 1 and (select s.last_value from ulak.queue_id_seq s)
                    then 'The transaction that sent it was rolled back or has not committed yet, or its month has been dropped from the archive.'
                else 'No message has had this id.'
            end,
            hint = 'Pass the id that send() returned.';
end
$plpgsql$;

-- Cycles that failed before this one; a redrive or a replay took them along.
create or replace function ulak_private.explain_cycles(p_history jsonb)
returns table (at timestamptz, what text)
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select c.failed_at, format('an earlier cycle ended after %s: %s', ulak_private.attempts(c.attempts), c.last_error)
    from jsonb_to_recordset(coalesce(p_history, '[]')) c (attempts integer, last_error text, failed_at timestamptz)
$sql$;

create or replace function ulak_private.attempts(p_count integer)
returns text
language sql
immutable
as $sql$
    select case when p_count = 1 then '1 attempt' else format('%s attempts', p_count) end
$sql$;

-- Null if an application sent it.
create or replace function ulak_private.explain_origin(p_id bigint, p_endpoint_id bigint)
returns text
language sql
stable
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
as $sql$
    (
        select case l.event
            when 'message.redriven' then format(
                'redriven by %s from dead letter %s, which was message %s,',
                l.detail ->> 'by', l.detail ->> 'dlq_id', l.detail ->> 'original_message_id'
            )
            else format('replayed by %s from archived message %s', l.actor, l.detail ->> 'archive_id')
        end
        from ulak.event_log l
        where l.message_id = p_id
            and l.event in ('message.redriven', 'message.replayed')
            and l.detail ->> 'original_message_id' is distinct from p_id::text
        order by l.id
        limit 1
    )
    union all
    (
        select format('replayed by %s', l.actor) || case m.others
            when 0 then ''
            when 1 then ' with 1 other'
            else format(' with %s others', m.others)
        end
        from ulak.event_log l
        cross join lateral (select (l.detail -> 'messages')::integer - 1) m(others)
        where l.event in ('message.replayed', 'messages.replayed')
            and l.event = 'messages.replayed'
            and l.endpoint_id = p_endpoint_id
            and p_id between (l.detail -> 'first_id')::bigint and (l.detail -> 'last_id')::bigint
        order by l.id
        limit 1
    )
    union all
    -- The event log has forgotten who.
    select format('made from message %s by a redrive or a replay', m.made_from)
    from ulak_private.made_from(p_id) m(made_from)
    where m.made_from is not null
    limit 1
$sql$;

create or replace function ulak_private.explain_attempt(p_attempt ulak.attempts)
returns text
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select format(
        'attempt %s failed after %s: %s',
        p_attempt.attempt,
        ulak_private.short_duration(p_attempt.ended_at - p_attempt.started_at),
        p_attempt.error
    )
$sql$;

-- How it ended, if it has.
create or replace function ulak_private.explain_end(
    p_id bigint,
    p_place text,
    p_status text,
    p_created_at timestamptz,
    p_updated_at timestamptz,
    p_completed_at timestamptz,
    p_processing_started_at timestamptz,
    p_failed_at timestamptz,
    p_expires_at timestamptz,
    p_attempts integer,
    p_last_error text,
    p_archived_at timestamptz
)
returns table (at timestamptz, what text)
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $plpgsql$
#variable_conflict use_column
begin
    case p_status
        when 'completed' then
            return query values (
                p_completed_at,
                format(
                    'delivered in attempt %s, which took %s; %s after it was sent',
                    p_attempts,
                    ulak_private.short_duration(p_completed_at - p_processing_started_at),
                    ulak_private.short_duration(p_completed_at - p_created_at)
                )
            );
        when 'cancelled' then
            return query
            select p_updated_at, concat('cancelled', ' by ' || max(l.detail ->> 'by'), case
                when p_attempts > 0 then format(' after %s', ulak_private.attempts(p_attempts)) else ' before its first attempt'
            end)
            from ulak.event_log l
            where l.message_id = p_id and l.event = 'message.cancelled';
        when 'expired' then
            return query values (p_updated_at, format('expired: it was not delivered by %s', p_expires_at));
        when 'failed', 'held' then
            return query values (
                p_failed_at, format('given up after %s: %s', ulak_private.attempts(p_attempts), p_last_error)
            );
            return query
            select d.redriven_at, format('redriven by %s as message %s', d.redriven_by, d.redriven_message_id)
            from ulak.dlq d
            where d.original_message_id = p_id and d.status = 'redriven' and d.redriven_message_id <> p_id;
            return query
            select d.discarded_at, format('discarded by %s', d.discarded_by)
            from ulak.dlq d
            where d.original_message_id = p_id and d.status = 'discarded';
        else
            null;
    end case;
    if p_place = 'archive' then
        return query
        select l.created_at, format('replayed by %s as message %s', l.actor, l.message_id)
        from ulak.event_log l
        where l.event in ('message.replayed', 'messages.replayed')
            and l.event = 'message.replayed'
            and l.detail -> 'archive_id' = to_jsonb(p_id);
    end if;
end
$plpgsql$;
