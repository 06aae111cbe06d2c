-- A worker's turn: outcomes are settled, and as many messages as there is room for are claimed, in one call and one commit.

-- Outcomes are passed as to settle_many(). Without p_ids nothing is settled, without p_wish nothing is claimed. p_wake_ups asks the senders
-- of the next 16 ids to notify.
create or replace function ulak_private.worker_turn(
    p_worker text,
    p_ids bigint[] default null,
    p_attempts integer[] default null,
    p_errors text[] default null,
    p_retry_after integer[] default null,
    p_responses jsonb[] default null,
    p_requests integer[] default null,
    p_wish ulak_private.wish default null,
    p_wake_ups boolean default false,
    p_now timestamptz default null,
    -- The id that was drawn last, and the id up to which senders notify; both as of before the claim.
    out last_sent bigint,
    out notified_to bigint,
    out claimed ulak_private.claimed,
    -- No message was waiting, not even for a later time.
    out is_empty boolean
)
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_sequence oid := 'ulak.queue_id_seq'::regclass;
    v_settled bigint[];
begin
    if p_now is not null then
        p_now := ulak_private.clock(p_now);
    end if;
    if p_ids is not null then
        v_settled := ulak_private.settle_many(p_worker, p_ids, p_attempts, p_errors, p_retry_after, p_responses, p_now, p_requests);
    end if;
    last_sent := coalesce(pg_sequence_last_value(v_sequence), 0);
    if p_wake_ups then
        notified_to := setval('ulak_private.bell', last_sent + 16);
        -- Read again: a sender either has drawn its id by now, or will see that it must notify.
        last_sent := coalesce(pg_sequence_last_value(v_sequence), 0);
    end if;
    if p_wish is null then
        return;
    end if;
    -- Nobody has sent. Most new messages are claimed by claim_new().
    if p_wish.behind = last_sent then
        return;
    end if;
    -- Much cheaper than a claim that finds nothing. Not while the session has resume points (remember_places()): then an old snapshot holds
    -- vacuum back, and this query, too, would pass the entry of every message claimed since.
    is_empty := coalesce(current_setting('ulak_private.resume_points', true), '') = ''
        and not exists (select from ulak_private.deliveries q where q.status = 'pending');
    if not is_empty then
        p_wish.protocols := coalesce(p_wish.protocols, ulak_private.worker_protocols());
        claimed := ulak_private.claim_due(p_worker, p_wish, p_now);
    end if;
end
$plpgsql$;

-- ulak_private.claim(), with its result as columns.
create or replace function ulak_private.claim_due(p_worker text, p_wish ulak_private.wish, p_now timestamptz)
returns ulak_private.claimed
language plpgsql
as $plpgsql$
declare
    v_claimed ulak_private.claimed;
begin
    select
        count(c.id)::integer,
        coalesce(bool_or(c.left_out_others), false),
        array_agg(c.id),
        array_agg(c.message_id),
        array_agg(c.attempt),
        array_agg(c.endpoint_id),
        array_agg(c.config_version),
        -- A missing body becomes '', too: its message is read separately and fails alone.
        array_agg(case when octet_length(c.payload) <= p_wish.longest then c.payload else '' end),
        case when count(c.headers) > 0 then array_agg(case when octet_length(c.headers) > p_wish.longest then '' else c.headers end) end,
        case when count(c.metadata) > 0 then array_agg(case when octet_length(c.metadata) > p_wish.longest then '' else c.metadata end) end,
        case when count(c.correlation_id) > 0 then array_agg(c.correlation_id) end,
        case when count(c.ordering_key) > 0 then array_agg(c.ordering_key) end,
        array_agg(c.created_at),
        array_agg(distinct c.endpoint_id) filter (where c.may_have_more)
    into v_claimed
    from (
        select
            c.id,
            c.message_id,
            c.attempt,
            c.endpoint_id,
            c.config_version,
            -- Texts that are large when stored are skipped here. The length is checked again above: a few stored bytes may become a megabyte.
            case when pg_column_size(c.payload) <= p_wish.longest then c.payload::text end as payload,
            case when pg_column_size(c.headers) > p_wish.longest then '' else c.headers::text end as headers,
            case when pg_column_size(c.metadata) > p_wish.longest then '' else c.metadata::text end as metadata,
            c.correlation_id,
            case when c.ordering_key is not null and p_wish.longest < 0 then '' else c.ordering_key end as ordering_key,
            c.created_at,
            c.may_have_more,
            c.left_out_others
        from ulak_private.claim(
            p_worker => p_worker,
            p_limit => p_wish.most,
            p_lease => p_wish.lease,
            p_endpoint_ids => p_wish.endpoint_ids,
            p_protocols => p_wish.protocols,
            p_now => p_now,
            p_rooms => p_wish.rooms,
            p_most_endpoints => p_wish.most_endpoints,
            p_most_visits => p_wish.most_visits
        ) c
        -- Keeps the planner from producing each text twice.
        offset 0
    ) c;
    return v_claimed;
end
$plpgsql$;

-- The texts of one claimed message, for messages that are too large to be read together. If the texts are larger than
-- anything that can be sent, the error affects this message alone.
create or replace function ulak_private.read_claimed(p_worker text, p_id bigint, p_attempt integer)
returns table (payload text, headers text, metadata text, ordering_key text)
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    -- The largest max_payload_size is 100 MB.
    v_largest integer := 134217728;
    v_message record;
begin
    select q.payload, ulak_private.sent_headers(q.headers, q.generation, q.id, q.attempts) as headers, q.metadata, q.ordering_key into strict v_message
    from ulak.queue q
    where q.id = p_id and q.locked_by = p_worker and q.attempts = p_attempt;
    if v_message.payload is null then
        raise exception 'its body is gone: its month of ulak_private.events was dropped or detached' using errcode = 'P0002';
    end if;
    -- The stored sizes, before anything is converted to text.
    if greatest(pg_column_size(v_message.payload), pg_column_size(v_message.headers), pg_column_size(v_message.metadata)) <= v_largest then
        payload := v_message.payload::text;
        headers := v_message.headers::text;
        metadata := v_message.metadata::text;
        ordering_key := v_message.ordering_key;
    end if;
    if payload is null or greatest(octet_length(payload), octet_length(headers), octet_length(metadata)) > v_largest then
        raise exception 'its payload, headers or metadata are larger than 128 MB'
            using errcode = '54000';
    end if;
    return next;
end
$plpgsql$;
