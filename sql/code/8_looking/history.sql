-- The attempts of one message and of the messages that it was made from: when, how long, with what outcome.

create or replace function ulak.history(p_id bigint, p_now timestamptz default clock_timestamp())
returns table (
    message bigint,
    attempt integer,
    started_at timestamptz,
    ended_at timestamptz,
    outcome text,
    milliseconds numeric,
    error text,
    trace_id text,
    span_id text
)
language plpgsql
stable
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
as $plpgsql$
#variable_conflict use_column
begin
    p_now := ulak_private.finite_time(p_now);
    if not exists (select from ulak_private.find_message(p_id)) then
        perform ulak_private.raise_unknown_message(p_id);
    end if;
    return query
    with recursive cycle as (
        select p_id as id
        union all
        select m.made_from
        from cycle c
        cross join lateral ulak_private.made_from(c.id) m(made_from)
        where m.made_from is not null
    ),
    found as materialized (
        select
            c.id,
            m.*,
            ulak_private.trace_id(ulak_private.sent_headers(m.headers, m.generation, c.id, greatest(m.attempts, 1)) ->> 'traceparent') as trace_id
        from cycle c
        left join lateral ulak_private.find_message(c.id) m on true
    ),
    tried as (
        select f.id, f.trace_id, a.attempt, a.started_at, a.ended_at, 'failed' as outcome, a.error
        from found f
        join ulak.attempts a on a.message_id = f.id
        union all
        select
            f.id,
            f.trace_id,
            f.attempts,
            f.processing_started_at,
            f.completed_at,
            case f.status when 'completed' then 'delivered' else 'in flight' end,
            null
        from found f
        where f.status in ('completed', 'processing')
        union all
        select f.id, f.trace_id, null, f.updated_at, f.updated_at, 'cancelled', null
        from found f
        where f.status = 'cancelled'
    )
    select
        t.id,
        t.attempt,
        t.started_at,
        t.ended_at,
        t.outcome,
        round(extract(epoch from coalesce(t.ended_at, p_now) - t.started_at) * 1000, 1),
        t.error,
        t.trace_id,
        case when t.attempt is not null then ulak_private.span_id(t.trace_id, t.id, t.attempt) end
    from tried t
    order by t.started_at, t.id, t.attempt;
end
$plpgsql$;

comment on function ulak.history(bigint, timestamptz) is
    'attempts of one message and of the dead letters or archived messages that it was made from: time, outcome, '
    'milliseconds from claim to settlement, error, and the trace and span that the receiver got';

-- The message that a redrive or a replay made this one from; null if an application sent it.
create or replace function ulak_private.made_from(p_id bigint)
returns bigint
language sql
stable
as $sql$
    select coalesce(
        (select q.made_from from ulak_private.deliveries q where q.id = p_id),
        (select a.made_from from ulak_private.archived a where a.id = p_id),
        (select max(d.made_from) from ulak_private.letters d where d.original_message_id = p_id)
    )
$sql$;
