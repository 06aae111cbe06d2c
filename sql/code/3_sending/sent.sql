-- The messages that this transaction has sent so far, for tests that roll back.

-- It shows payloads, even those that a trigger has sent with its owner's rights. So the caller needs the right to read messages.
create or replace function ulak.sent()
returns table (
    id bigint,
    endpoint text,
    event_type text,
    payload jsonb,
    headers jsonb,
    metadata jsonb,
    priority smallint,
    scheduled_at timestamptz,
    expires_at timestamptz,
    idempotency_key text,
    correlation_id uuid,
    ordering_key text,
    status text
)
language plpgsql
stable
security definer
set search_path = pg_catalog, pg_temp
set jit = off
as $plpgsql$
#variable_conflict use_column
begin
    if not ulak_private.may_read('ulak.queue') then
        raise exception 'messages may not be read by "%"', ulak_private.caller()
            using errcode = '42501',
                detail = 'sent() shows payloads, which need the right to read ulak.queue.',
                hint = format('In a database for tests: grant select on ulak.queue to %I;', ulak_private.caller());
    end if;
    return query
    select
        m.id, n.name, e.metadata ->> 'event_type', e.payload, e.headers, e.metadata, m.priority, m.scheduled_at, m.expires_at,
        m.idempotency_key, m.correlation_id, m.ordering_key, m.status
    from (
        select
            q.id, q.endpoint_id, q.event_id, q.priority, q.scheduled_at, q.expires_at, q.idempotency_key, q.correlation_id, q.ordering_key, q.status
        from ulak_private.deliveries q
        where coalesce(q.event_created_at, q.created_at) = now()
        union all
        select
            a.id, a.endpoint_id, a.event_id, a.priority, a.scheduled_at, a.expires_at, a.idempotency_key, a.correlation_id, a.ordering_key, a.status
        from ulak_private.archived a
        where a.created_at = now() and a.event_created_at is null
    ) m
    join ulak_private.events e on e.id = m.event_id and e.created_at = now()
    join ulak.endpoints n on n.id = m.endpoint_id
    where ulak_private.is_own_row(e.xmin)
    order by m.id;
end
$plpgsql$;

comment on function ulak.sent() is
    'what this transaction has sent so far, in the order of sending, for tests that roll back; needs the right to read '
    'ulak.queue';

-- Whether the current transaction, or one of its subtransactions, inserted a visible row with this xmin: then the number is that of the
-- transaction or a later one, and the transaction with that number is still in progress.
create or replace function ulak_private.is_own_row(p_xmin xid)
returns boolean
language plpgsql
stable
as $plpgsql$
declare
    v_own bigint := pg_current_xact_id_if_assigned()::text::bigint;
    -- xmin has 32 bits, which wrap around.
    v_distance bigint := (p_xmin::text::bigint - v_own) & 4294967295;
begin
    return coalesce(
        case when v_distance < 2147483648 then pg_xact_status((v_own + v_distance)::text::xid8) = 'in progress' end,
        false
    );
end
$plpgsql$;
