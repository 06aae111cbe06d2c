-- Leasing: the messages that a claim has locked go to its worker.

-- Called within claim() or work(), whose planner settings hold. p_turn.tids are the messages, p_turn.places the endpoint of each.
create or replace function ulak_private.lease_messages(
    p_turn ulak_private.turn,
    p_worker text,
    -- Null: as the setting stale_recovery_timeout says.
    p_lease interval,
    p_now timestamptz
)
returns setof ulak_private.leased
language plpgsql
as $plpgsql$
declare
    v_lease_until timestamptz := p_now
        + coalesce(p_lease, make_interval(secs => ulak_private.stored_setting('stale_recovery_timeout')::integer));
begin
    return query
    with leased as (
        update ulak_private.deliveries q
        set status = 'processing',
            attempts = q.attempts + 1,
            locked_by = p_worker,
            lease_until = v_lease_until,
            processing_started_at = p_now,
            updated_at = p_now
        from unnest(p_turn.tids, p_turn.places) l(tid, place)
        where q.ctid = l.tid
        returning
            q.id, q.message_id, q.attempts, q.endpoint_id, q.correlation_id, q.ordering_key, q.priority,
            q.idempotency_key, q.created_at, q.expires_at, q.lease_until, q.next_retry_at, q.generation, q.event_id, q.event_created_at, l.place
    )
    select
        m.id,
        m.message_id,
        m.attempts,
        m.endpoint_id,
        p_turn.names[m.place],
        p_turn.config_versions[m.place],
        e.payload,
        -- A probe waits as long as the endpoint allows: a message's own shorter time-out would say nothing about the receiver.
        case
            when p_turn.are_probes[m.place] then ulak_private.sent_headers(e.headers - ':timeout', m.generation, m.id, m.attempts)
            else ulak_private.sent_headers(e.headers, m.generation, m.id, m.attempts)
        end,
        e.metadata,
        m.correlation_id,
        m.ordering_key,
        m.priority,
        m.idempotency_key,
        m.created_at,
        m.expires_at,
        m.lease_until,
        case when p_turn.are_probes[m.place] then 'half_open' else 'closed' end,
        m.next_retry_at,
        p_turn.may_have_more[m.place],
        p_turn.left_out_others
    from leased m
    left join lateral ulak_private.event_of(
        m.event_id, coalesce(m.event_created_at, m.created_at), p_turn.first_event_at, p_turn.last_event_at
    ) e on true;

    if true = any (p_turn.are_metered) then
        perform ulak_private.charge(p_turn.endpoint_ids, p_turn.are_metered, p_turn.counts, p_turn.ids, p_turn.places, p_now);
    end if;
end
$plpgsql$;

-- The event of a message. p_first and p_last are parameters of the calling statement, so that only the partitions of these months are opened.
-- Stable, so that it is inlined.
create or replace function ulak_private.event_of(p_id bigint, p_at timestamptz, p_first timestamptz, p_last timestamptz)
returns table (payload jsonb, headers jsonb, metadata jsonb)
language sql
stable
as $sql$
    select e.payload, e.headers, e.metadata
    from ulak_private.events e
    where e.id = p_id
        -- Not `=`: then the partition would be worked out anew for each message, which takes as long as reading it.
        and e.created_at is not distinct from p_at
        and e.created_at between p_first and p_last
    -- Forces one look-up per message: a plan that was made for few events would join with all of them.
    limit 1
$sql$;
