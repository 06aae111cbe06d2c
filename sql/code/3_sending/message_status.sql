-- The status of a message, for the application that sent it; shows no payload.

create or replace function ulak.message_status(p_id bigint)
returns table (
    id bigint,
    endpoint text,
    status text,
    attempts integer,
    retry_count integer,
    next_retry_at timestamptz,
    last_error text,
    created_at timestamptz,
    completed_at timestamptz,
    failed_at timestamptz
)
language sql
stable
security definer
set search_path = pg_catalog, pg_temp
as $sql$
    select
        m.id,
        e.name,
        m.status,
        m.attempts,
        m.retry_count,
        case when m.status = 'pending' then m.next_retry_at end,
        m.last_error,
        m.created_at,
        m.completed_at,
        m.failed_at
    from (
        select q.id, q.endpoint_id, q.status, q.attempts, q.retry_count, q.next_retry_at, q.last_error, q.created_at,
            q.completed_at, q.failed_at
        from ulak_private.deliveries q
        where q.id = p_id
        union all
        select a.id, a.endpoint_id, a.status, a.attempts, a.retry_count, a.next_retry_at, a.last_error, a.created_at,
            a.completed_at, a.failed_at
        from ulak.archive a
        where a.id = p_id
    ) m
    left join ulak.endpoints e on e.id = m.endpoint_id
    where e.is_restricted is not true or ulak_private.may_look(e.id)
$sql$;

comment on function ulak.message_status(bigint) is
    'the status of a message, by the id that send() returned; no row if its month has been dropped from the archive';
