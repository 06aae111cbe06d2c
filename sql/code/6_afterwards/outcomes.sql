-- Outcomes: if an endpoint's config has "announce", ulak publishes what became of its messages, for the application that sent them.

-- archive_rows() calls this for messages that leave the queue, if one of their endpoints announces something. Dead letters are announced
-- by tell_of_dead_letters() instead. p_since is when the first of the messages was sent: earlier months of the archive aren't read.
create or replace function ulak_private.announce_outcomes(p_ids bigint[], p_since timestamptz, p_now timestamptz)
returns void
language plpgsql
set enable_seqscan = off
set jit = off
as $plpgsql$
declare
    v_outcome text;
    v_endpoint_ids bigint[];
    v_payloads jsonb[];
begin
    for v_outcome, v_endpoint_ids, v_payloads in
        select
            o.outcome,
            array_agg(a.endpoint_id order by a.id),
            array_agg(
                ulak_private.announcement(
                    jsonb_strip_nulls(jsonb_build_object(
                        'endpoint', e.name,
                        'message', a.id,
                        'message_id', a.message_id,
                        'event_type', left(a.metadata ->> 'event_type', 200),
                        'correlation_id', a.correlation_id,
                        'sender', a.sent_by,
                        'attempts', a.attempts,
                        'error', case when a.status <> 'completed' then a.last_error end
                    )),
                    o.outcome,
                    a.metadata,
                    a.response,
                    p_now
                )
                order by a.id
            )
        from ulak.archive a
        join ulak.endpoints e on e.id = a.endpoint_id
        cross join lateral (select case a.status when 'completed' then 'delivered' else a.status end) o(outcome)
        where a.id = any (p_ids)
            and a.created_at >= p_since
            and e.config -> 'announce' ? o.outcome
            and a.status <> 'failed'
            -- No loops: announcements aren't announced.
            and not ulak_private.is_own_event(a.metadata)
        group by o.outcome
    loop
        -- Owed even if the queue is full: each replaces a message that has just ended.
        perform ulak_private.tell_operators('ulak.message.' || v_outcome, v_endpoint_ids, v_payloads, true, p_now);
    end loop;
end
$plpgsql$;

create or replace function ulak_private.announcement(p_facts jsonb, p_outcome text, p_metadata jsonb, p_response jsonb, p_now timestamptz)
returns jsonb
language sql
stable
as $sql$
    select jsonb_build_object('type', 'ulak.message.' || p_outcome, 'at', p_now, 'status', p_outcome)
        || p_facts
        || case when p_metadata is not null then jsonb_build_object('metadata', p_metadata) else '{}' end
        || case when p_response is not null then jsonb_build_object('response', p_response) else '{}' end
$sql$;
