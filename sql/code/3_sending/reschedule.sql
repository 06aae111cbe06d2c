-- Changing the time or the priority of waiting messages.

-- A message of an ordering key keeps its place in the key, which is that of its id, whatever its time: the ones behind it wait for it. A
-- parked message is made due at its new time, too, and the claim that finds it parks it again. It can't stay parked: a session that settles
-- the message before it while this transaction is open finds it locked and skips it.

create or replace function ulak.reschedule(p_id bigint, p_at timestamptz, p_now timestamptz default clock_timestamp())
returns boolean
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_message record;
begin
    p_now := ulak_private.clock(p_now);
    if p_at is null then
        raise exception 'the time is null' using errcode = '22004', hint = 'To send it at once: now().';
    elsif not ulak_private.is_sane_time(p_at) then
        raise exception 'the time must be between the years 1970 and 9000'
            using errcode = '22023', detail = format('It is %s.', p_at), hint = 'To never send it: select ulak.cancel(...);';
    end if;
    perform ulak_private.check_ahead(p_at, p_now);
    perform ulak_private.require_changeable(p_id);
    select q.endpoint_id, q.expires_at into v_message
    from ulak_private.deliveries q
    where q.id = p_id and q.status is not distinct from 'pending'
    for no key update;
    if not found then
        return false;
    elsif v_message.expires_at <= p_at then
        raise exception 'the message would expire before it is due'
            using errcode = '22023',
                detail = format('It expires at %s.', v_message.expires_at),
                hint = 'Give an earlier time, or cancel it and send another one.';
    end if;
    update ulak_private.deliveries q
    set scheduled_at = p_at, next_retry_at = greatest(p_at, q.created_at), updated_at = p_now
    where q.id = p_id;
    perform ulak_private.log_change('message.rescheduled', p_id, v_message.endpoint_id, jsonb_build_object('at', p_at), p_now);
    return true;
end
$plpgsql$;

comment on function ulak.reschedule(bigint, timestamptz, timestamptz) is
    'changes when a waiting message is due, also one that waits for a retry; the time must be before it expires. False if it '
    'is too late: in flight, finished or unknown. The order within its ordering key stays the same';

create or replace function ulak.reprioritise(p_id bigint, p_priority integer, p_now timestamptz default clock_timestamp())
returns boolean
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_endpoint_id bigint;
begin
    p_now := ulak_private.clock(p_now);
    perform ulak_private.check_priority(p_priority);
    perform ulak_private.require_changeable(p_id);
    update ulak_private.deliveries q
    set priority = p_priority,
        next_retry_at = case
            when q.next_retry_at = 'infinity' then greatest(q.created_at, q.scheduled_at) else q.next_retry_at
        end,
        updated_at = p_now
    where q.id = p_id and q.status is not distinct from 'pending'
    returning q.endpoint_id into v_endpoint_id;
    if not found then
        return false;
    end if;
    perform ulak_private.log_change(
        'message.reprioritised', p_id, v_endpoint_id, jsonb_build_object('priority', p_priority), p_now
    );
    return true;
end
$plpgsql$;

comment on function ulak.reprioritise(bigint, integer, timestamptz) is
    'changes the priority of a waiting message, 0 to 10; false if it is too late: in flight, finished or unknown. The order '
    'within its ordering key stays the same';

create or replace function ulak_private.log_change(
    p_event text,
    p_id bigint,
    p_endpoint_id bigint,
    p_new_value jsonb,
    p_now timestamptz
)
returns void
language sql
as $sql$
    insert into ulak.event_log (event, endpoint_id, endpoint_name, message_id, new_value, created_at)
    values (
        p_event,
        p_endpoint_id,
        (select e.name from ulak.endpoints e where e.id = p_endpoint_id),
        p_id,
        p_new_value,
        ulak_private.log_time(p_now)
    )
$sql$;
