-- Cancelling messages that haven't been sent yet, for applications that could have sent them.

-- No session owns a waiting message, so the first one to change its row wins: the guarded statement below and the claim lock the same row,
-- and only one of them finds it pending.
create or replace function ulak.cancel(p_id bigint, p_now timestamptz default clock_timestamp())
returns boolean
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    perform ulak_private.require_changeable(p_id);
    return ulak_private.cancel(array[p_id], ulak_private.caller(), ulak_private.clock(p_now)) = 1;
end
$plpgsql$;

comment on function ulak.cancel(bigint, timestamptz) is
    'cancels a waiting message: it is archived as cancelled and not tried again; false if it is too late: in flight, finished'
    ' or unknown. A message that waits for a retry may already have reached its receiver';

create or replace function ulak.cancel_by_key(
    p_endpoint text,
    p_idempotency_key text,
    p_now timestamptz default clock_timestamp()
)
returns boolean
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
as $plpgsql$
declare
    v_endpoint_id bigint := ulak_private.sendable_endpoint(p_endpoint);
    v_id bigint;
begin
    if p_idempotency_key is null then
        raise exception 'the idempotency key is null'
            using errcode = '22004', hint = 'A message without one is cancelled by its id: select ulak.cancel(...);';
    end if;
    select k.message_id into v_id
    from ulak_private.idempotency_keys k
    where k.endpoint_id = v_endpoint_id and k.idempotency_key = p_idempotency_key;
    return ulak.cancel(v_id, p_now);
end
$plpgsql$;

comment on function ulak.cancel_by_key(text, text, timestamptz) is
    'cancel() by the endpoint and the idempotency key that the message was sent with; the key is free again';

-- Applications may change messages that they could have sent themselves, except ulak's own events.
create or replace function ulak_private.require_changeable(p_id bigint)
returns void
language plpgsql
as $plpgsql$
begin
    perform ulak_private.require_sender(q.id, q.endpoint_id) from ulak_private.deliveries q where q.id = p_id;
    if not ulak_private.caller_has('ulak_admin')
        and exists (select from ulak.queue q where q.id = p_id and starts_with(q.metadata ->> 'event_type', 'ulak.'))
    then
        raise exception 'message % is an event of ulak itself', p_id
            using errcode = '42501', detail = 'Operators subscribe to these; only an administrator may change them.';
    end if;
end
$plpgsql$;

-- Cancels those of these messages that wait, and returns their number. Their idempotency keys become free.
create or replace function ulak_private.cancel(p_ids bigint[], p_by text, p_now timestamptz)
returns integer
language plpgsql
set enable_seqscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
as $plpgsql$
declare
    v_ids bigint[];
begin
    with cancelled as (
        update ulak_private.deliveries q
        set status = 'cancelled', updated_at = p_now
        where q.id = any (p_ids) and q.status is not distinct from 'pending'
        returning q.id, q.endpoint_id, q.attempts
    ),
    logged as (
        insert into ulak.event_log (event, endpoint_id, endpoint_name, message_id, detail, created_at)
        select
            'message.cancelled',
            c.endpoint_id,
            (select e.name from ulak.endpoints e where e.id = c.endpoint_id),
            c.id,
            jsonb_build_object('by', p_by, 'attempts', c.attempts),
            ulak_private.log_time(p_now)
        from cancelled c
    )
    select array_agg(c.id) filter (where nextval('ulak_private.messages_cancelled') > 0) into v_ids
    from cancelled c;
    return ulak_private.end_messages(v_ids, p_now);
end
$plpgsql$;
