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
language plpgsql
stable
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
as $plpgsql$
#variable_conflict use_column
begin
    return query
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
    from ulak.messages m
    left join ulak.endpoints e on e.id = m.endpoint_id
    where m.id = p_id and (e.is_restricted is not true or ulak_private.may_look(e.id));
end
$plpgsql$;

comment on function ulak.message_status(bigint) is
    'the status of a message, by the id that send() returned; no row if its month has been dropped from the archive';
