-- Taking back: what wasn't sent yet is cancelled, by those who could send it.

-- A message that waits is nobody's, so whoever changes its row first has it: the guarded statement below and the claim lock the
-- same row, and only one of them finds it pending.
create or replace function ulak.cancel(p_id bigint, p_now timestamptz default clock_timestamp())
returns boolean
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    perform ulak._refuse_operator_event(p_id);
    return ulak._cancel(array[p_id], session_user, ulak._clock(p_now)) = 1;
end
$plpgsql$;

comment on function ulak.cancel(bigint, timestamptz) is
    'takes back a message that waits: it is archived as cancelled and not tried (again); false if it is too late: in flight, '
    'finished or unknown. What waits for a retry may have reached its receiver already';

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
    v_endpoint_id bigint := ulak._endpoint_id(p_endpoint);
    v_id bigint;
begin
    if p_idempotency_key is null then
        raise exception 'the idempotency key is null'
            using errcode = '22004', hint = 'A message without one is cancelled by its id: select ulak.cancel(...);';
    end if;
    select q.id into v_id
    from ulak.queue q
    where q.endpoint_id = v_endpoint_id
        and q.idempotency_key = p_idempotency_key
        and q.status in ('pending', 'processing', 'completed');
    return ulak.cancel(v_id, p_now);
end
$plpgsql$;

comment on function ulak.cancel_by_key(text, text, timestamptz) is
    'cancel() by the endpoint and the idempotency key that the message was sent with; the key is free again';

-- Applications may take back what they could have sent, and that isn't an event of ulak's own.
create or replace function ulak._refuse_operator_event(p_id bigint)
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    if not pg_has_role(session_user, 'ulak_admin', 'member')
        and exists (select from ulak.queue q where q.id = p_id and starts_with(q.metadata ->> 'event_type', 'ulak.'))
    then
        raise exception 'message % is an event of ulak itself', p_id
            using errcode = '42501', detail = 'Operators subscribe to these; only an administrator may change them.';
    end if;
end
$plpgsql$;

-- Cancels those of these messages that wait, and returns how many they were. They go into the archive at once: the indexes on
-- what is finished needn't know them, and their idempotency keys are free. The columns are those that the queue has.
create or replace function ulak._cancel(p_ids bigint[], p_by text, p_now timestamptz)
returns integer
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
as $plpgsql$
declare
    v_columns text;
    v_values text;
    v_count integer;
    v_endpoint_ids bigint[];
    v_keys text[];
begin
    select
        string_agg(quote_ident(a.attname), ', ' order by a.attnum),
        string_agg(
            case a.attname
                when 'status' then quote_literal('cancelled')
                when 'updated_at' then '$2'
                else 'g.' || quote_ident(a.attname)
            end,
            ', ' order by a.attnum
        )
    into v_columns, v_values
    from pg_attribute a
    where a.attrelid = 'ulak.queue'::regclass and a.attnum > 0 and not a.attisdropped;

    execute format(
        $sql$
            with gone as (
                delete from ulak.queue q
                where q.id = any ($1) and q.status is not distinct from 'pending'
                returning q.*
            ),
            archived as (
                insert into ulak.archive (%s, archived_at)
                select %s, $2 from gone g
            ),
            logged as (
                insert into ulak.event_log (event, endpoint_id, endpoint_name, message_id, detail, created_at)
                select
                    'message.cancelled',
                    g.endpoint_id,
                    (select e.name from ulak.endpoints e where e.id = g.endpoint_id),
                    g.id,
                    jsonb_build_object('by', $3, 'attempts', g.attempts),
                    ulak._log_time($2)
                from gone g
            )
            select
                count(nextval('ulak.messages_cancelled')),
                array_agg(g.endpoint_id) filter (where g.ordering_key is not null),
                array_agg(g.ordering_key) filter (where g.ordering_key is not null)
            from gone g
        $sql$,
        v_columns,
        v_values
    )
    into v_count, v_endpoint_ids, v_keys
    using p_ids, p_now, p_by;

    -- Whoever waited behind one of them is next.
    if v_keys is not null then
        perform ulak._unpark_heads(v_endpoint_ids, v_keys, p_now);
    end if;
    return v_count;
end
$plpgsql$;
