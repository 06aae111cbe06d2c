-- The story of one message: where it came from, what was tried, and what happens next or why nothing will.

-- A message wherever it is: in the queue, in the archive, or only among the dead letters.
create or replace function ulak_private.find_message(p_id bigint)
returns setof ulak_private.known_message
language sql
stable
as $sql$
    select
        m.endpoint_id, m.message_id, m.status, m.created_at, m.updated_at, m.scheduled_at, m.expires_at, m.processing_started_at,
        m.completed_at, m.failed_at, m.attempts, m.priority, m.ordering_key, m.correlation_id, m.generation, m.last_error, m.failure_history,
        m.payload, m.headers, m.metadata, m.sent_by
    from ulak.messages m
    where m.id = p_id
    union all
    select
        d.endpoint_id, d.message_id, 'failed', d.original_created_at, d.failed_at, d.scheduled_at, d.expires_at, null,
        null, d.failed_at, d.attempts, d.priority, d.ordering_key, d.correlation_id, d.generation, d.last_error, d.failure_history,
        d.payload, d.headers, d.metadata, d.sent_by
    from ulak.dlq d
    where d.original_message_id = p_id
    limit 1
$sql$;

create or replace function ulak_private.raise_unknown_message(p_id bigint)
returns void
language plpgsql
stable
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
    v_message ulak_private.known_message;
begin
    p_now := ulak_private.finite_time(p_now);
    select m.* into v_message
    from ulak_private.find_message(p_id) m;
    if not found then
        perform ulak_private.raise_unknown_message(p_id);
    end if;
    perform ulak_private.require_sender(p_id, v_message.endpoint_id, p_is_look => true);
    return query
    select s.at, s.what
    from (
        select 1 as place, 0::bigint as step, v_message.created_at, ulak_private.explain_sent(p_id, v_message)
        union all
        select
            2,
            a.attempt,
            a.ended_at,
            format('attempt %s failed after %s: %s', a.attempt, ulak_private.short_duration(a.ended_at - a.started_at), a.error)
        from ulak.attempts a
        where a.message_id = p_id
        union all
        -- A redrive or a replay copied these from the message before, or from this one if it held its ordering key.
        select 3, 0, c.failed_at, format('an earlier cycle ended after %s: %s', ulak_private.counted(c.attempts, 'attempt'), c.last_error)
        from jsonb_to_recordset(v_message.failure_history) c (attempts integer, last_error text, failed_at timestamptz)
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
                -- A message that held its key continues under its own id.
                or l.event = 'message.redriven' and l.detail ->> 'original_message_id' = p_id::text
            )
        union all
        select 5, e.step, e.at, e.what
        from ulak_private.explain_end(p_id, v_message) with ordinality e (at, what, step)
    ) s (place, step, at, what)
    -- Everything but earlier cycles comes after the send, whatever the clock said.
    order by greatest(s.at, case when s.place <> 3 then v_message.created_at end), s.place, s.step;

    return query
    select n.at, n.what
    from ulak_private.explain_next(p_id, v_message.status, p_now) n;
end
$plpgsql$;

comment on function ulak.explain(bigint, timestamptz) is
    'the story of one message, by the id that send() returned: where it came from, what was tried, and what happens next and '
    'when, or why nothing will';

create or replace function ulak_private.explain_sent(p_id bigint, p_message ulak_private.known_message)
returns text
language sql
stable
as $sql$
    select concat_ws(
        ', ',
        case
            when o.origin is not null then format('%s to %s, first sent by %s', o.origin, e.name, p_message.sent_by)
            when starts_with(p_message.metadata ->> 'event_type', 'ulak.') then format('%s, sent to %s', p_message.metadata ->> 'event_type', e.name)
            else format('sent by %s to %s', p_message.sent_by, e.name)
        end,
        case when p_message.priority > 0 then format('priority %s', p_message.priority) end,
        'ordering key "' || p_message.ordering_key || '"',
        'not before ' || p_message.scheduled_at,
        'not after ' || p_message.expires_at
    )
    from ulak_private.explain_origin(p_id, p_message.endpoint_id) o (origin)
    cross join (
        select coalesce(
            (select format('endpoint "%s"', e.name) from ulak.endpoints e where e.id = p_message.endpoint_id),
            format('endpoint %s, which no longer exists', p_message.endpoint_id)
        )
    ) e (name)
$sql$;

-- Null if an application sent it.
create or replace function ulak_private.explain_origin(p_id bigint, p_endpoint_id bigint)
returns text
language sql
stable
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
    -- The event log no longer knows who did it.
    select format('made from message %s by a redrive or a replay', m.made_from)
    from ulak_private.made_from(p_id) m(made_from)
    where m.made_from is not null
    limit 1
$sql$;

-- How it ended, or who has it now.
create or replace function ulak_private.explain_end(p_id bigint, p_message ulak_private.known_message)
returns table (at timestamptz, what text)
language sql
stable
as $sql$
    select
        p_message.completed_at,
        format(
            'delivered in attempt %s, which took %s; %s after it was sent',
            p_message.attempts,
            ulak_private.short_duration(p_message.completed_at - p_message.processing_started_at),
            ulak_private.short_duration(p_message.completed_at - p_message.created_at)
        )
    where p_message.status = 'completed'
    union all
    select p_message.updated_at, concat('cancelled', ' by ' || max(l.detail ->> 'by'), case
        when p_message.attempts > 0 then format(' after %s', ulak_private.counted(p_message.attempts, 'attempt')) else ' before its first attempt'
    end)
    from ulak.event_log l
    where l.message_id = p_id and l.event = 'message.cancelled'
    having p_message.status = 'cancelled'
    union all
    select p_message.updated_at, format('expired: it was not delivered by %s', p_message.expires_at)
    where p_message.status = 'expired'
    union all
    select p_message.failed_at, format('given up after %s: %s', ulak_private.counted(p_message.attempts, 'attempt'), p_message.last_error)
    where p_message.status in ('failed', 'held')
    union all
    select q.processing_started_at, format('attempt %s: leased by %s until %s', q.attempts, q.locked_by, q.lease_until)
    from ulak_private.deliveries q
    where q.id = p_id and p_message.status = 'processing'
    union all
    select
        coalesce(d.discarded_at, d.redriven_at),
        case d.status
            when 'discarded' then format('discarded by %s', d.discarded_by)
            else format('redriven by %s as message %s', d.redriven_by, d.redriven_message_id)
        end
    from ulak.dlq d
    where d.original_message_id = p_id
        and p_message.status in ('failed', 'held')
        and (d.status = 'discarded' or d.status = 'redriven' and d.redriven_message_id <> p_id)
    union all
    select l.created_at, format('replayed by %s as message %s', l.actor, l.message_id)
    from ulak.event_log l
    where l.event in ('message.replayed', 'messages.replayed')
        and l.event = 'message.replayed'
        and l.detail -> 'archive_id' = to_jsonb(p_id)
$sql$;
