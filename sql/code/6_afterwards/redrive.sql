-- Redrive: dead letters go back into the queue as new messages.

create or replace function ulak.redrive_message(
    p_dlq_id bigint,
    p_by text default ulak_private.caller(),
    p_now timestamptz default clock_timestamp(),
    p_new_generation bigint default null
)
returns bigint
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_letter ulak_private.letters;
begin
    p_now := ulak_private.clock(p_now);
    if ulak_private.redrive_rows(array[p_dlq_id], null, p_by, p_new_generation, p_now) = 1 then
        return (select d.redriven_message_id from ulak_private.letters d where d.id = p_dlq_id);
    end if;
    select d.* into v_letter
    from ulak_private.letters d
    where d.id = p_dlq_id;
    if not found then
        raise exception 'dead letter % does not exist', p_dlq_id
            using errcode = 'P0002', hint = 'select * from ulak.dlq_summary();';
    elsif v_letter.status = 'failed' then
        raise exception 'the endpoint of dead letter % does not exist', p_dlq_id
            using errcode = '42704',
                detail = format('It was "%s".', v_letter.endpoint_name),
                hint = 'Send its payload to another endpoint with ulak.send().';
    end if;
    if v_letter.status = 'discarded' then
        raise exception 'dead letter % was discarded', p_dlq_id
            using errcode = '55000',
                detail = format('By %s at %s.', v_letter.discarded_by, v_letter.discarded_at),
                hint = format(
                    'It is kept in the archive: select ulak.replay_message(%s);',
                    v_letter.original_message_id
                );
    end if;
    perform ulak_private.raise_redriven(v_letter);
end
$plpgsql$;

comment on function ulak.redrive_message(bigint, text, timestamptz, bigint) is
    'puts one dead letter back into the queue with a fresh retry budget and returns its new message id; as a message of '
    'p_new_generation, if given';

create or replace function ulak_private.raise_redriven(p_letter ulak_private.letters)
returns void
language plpgsql
as $plpgsql$
begin
    raise exception 'dead letter % was already redriven', p_letter.id
        using errcode = '55000',
            detail = format(
                'By %s at %s, as message %s.', p_letter.redriven_by, p_letter.redriven_at, p_letter.redriven_message_id
            ),
            hint = format('select * from ulak.explain(%s);', p_letter.redriven_message_id);
end
$plpgsql$;

create or replace function ulak.redrive_endpoint(p_name text)
returns integer
language sql
security definer
set search_path = pg_catalog, pg_temp
as $sql$
    -- To redrive(), null is every endpoint.
    select r.messages
    from ulak_private.endpoint_id(p_name)
    cross join ulak.redrive(p_endpoint => p_name) r
$sql$;

comment on function ulak.redrive_endpoint(text) is
    'puts all dead letters of an endpoint back into the queue, in the order in which they were created; returns how many';

create or replace function ulak.redrive_all()
returns integer
language sql
security definer
set search_path = pg_catalog, pg_temp
as $sql$
    select r.messages from ulak.redrive() r
$sql$;

comment on function ulak.redrive_all() is 'puts all dead letters back into the queue; returns how many';

create or replace function ulak.redrive(
    p_endpoint text default null,
    p_since timestamptz default null,
    p_until timestamptz default null,
    p_error_like text default null,
    p_filter jsonpath default null,
    p_limit integer default null,
    p_rate double precision default null,
    p_dry_run boolean default false,
    p_by text default ulak_private.caller(),
    p_new_generation bigint default null,
    p_ids bigint[] default null,
    p_now timestamptz default clock_timestamp()
)
returns table (messages integer, sample jsonb, command text)
language sql
security definer
set search_path = pg_catalog, pg_temp
as $sql$
    select b.*
    from ulak_private.bulk(
        'redrive',
        (select to_json(g) from (select p_endpoint, p_since, p_until, p_error_like, p_filter, p_ids, p_limit, p_rate, p_by, p_new_generation) g),
        p_dry_run,
        p_now
    ) b
$sql$;

comment on function ulak.redrive(
    text, timestamptz, timestamptz, text, jsonpath, integer, double precision, boolean, text, bigint, bigint[], timestamptz
) is
    'puts the dead letters that match all filters back into the queue, at p_rate a second if given; with p_dry_run it only '
    'counts them, and shows a sample and the command to run';

-- The guarded update is the lock: of two operators only one sees status 'failed'. New ids are drawn in the order the
-- messages were created, under the locks of their ordering keys.
create or replace function ulak_private.redrive_rows(
    p_dlq_ids bigint[],
    p_rate double precision,
    p_by text,
    p_new_generation bigint,
    p_now timestamptz
)
returns integer
language plpgsql
as $plpgsql$
declare
    v_dlq_ids bigint[];
    v_new_ids bigint[];
    v_count integer;
begin
    perform ulak_private.check_generation(p_new_generation);
    perform ulak_private.lock_ordering_keys(array_agg(d.endpoint_id), array_agg(d.ordering_key))
    from ulak_private.letters d
    where d.id = any (p_dlq_ids);
    v_dlq_ids := array(
        select d.id
        from ulak_private.letters d
        join ulak.endpoints e on e.id = d.endpoint_id
        where d.id = any (p_dlq_ids) and d.status = 'failed'
        order by d.original_message_id
        for update of d
    );
    v_count := cardinality(v_dlq_ids);
    if v_count = 0 then
        return 0;
    end if;
    perform ulak_private.check_ahead(p_now + make_interval(secs => (v_count - 1) / p_rate), p_now);
    v_new_ids := array(
        select coalesce(q.id, nextval('ulak.queue_id_seq'))
        from unnest(v_dlq_ids) with ordinality n(id, place)
        join ulak_private.letters d on d.id = n.id
        -- A message that holds its ordering key keeps its id, and so its place.
        left join ulak_private.deliveries q on d.is_holding and q.id = d.original_message_id and q.status is not distinct from 'held'
        order by n.place
    );
    perform ulak_private.check_backpressure((select max(i) from unnest(v_new_ids) i), v_count);

    perform ulak_private.queue_redriven(v_dlq_ids, v_new_ids, p_rate, p_by, p_new_generation, p_now);
    perform ulak_private.redrive_held(v_dlq_ids, p_rate, p_new_generation, p_now);
    return v_count;
end
$plpgsql$;

-- Queues locked letters as messages with the given ids, at the given rate. The message of a letter that holds its key is in the queue already.
create or replace function ulak_private.queue_redriven(
    p_dlq_ids bigint[],
    p_new_ids bigint[],
    p_rate double precision,
    p_by text,
    p_new_generation bigint,
    p_now timestamptz
)
returns void
language sql
as $sql$
    with numbered as materialized (
        select n.id, n.new_id, p_now + make_interval(secs => (n.place - 1) / p_rate) as scheduled_at
        from unnest(p_dlq_ids, p_new_ids) with ordinality n(id, new_id, place)
    ),
    marked as (
        update ulak_private.letters d
        set status = 'redriven', redriven_at = p_now, redriven_by = p_by, redriven_message_id = n.new_id, is_holding = false
        from numbered n
        where d.id = n.id
        returning d.*
    ),
    queued as (
        insert into ulak_private.deliveries (
            id,
            endpoint_id,
            message_id,
            priority,
            scheduled_at,
            next_retry_at,
            created_at,
            updated_at,
            correlation_id,
            ordering_key,
            generation,
            event_id,
            event_created_at,
            made_from,
            failure_history
        )
        select
            m.redriven_message_id,
            m.endpoint_id,
            m.message_id,
            m.priority,
            n.scheduled_at,
            coalesce(n.scheduled_at, p_now),
            p_now,
            p_now,
            m.correlation_id,
            m.ordering_key,
            coalesce(p_new_generation, m.generation),
            m.event_id,
            coalesce(m.event_created_at, m.original_created_at),
            m.original_message_id,
            ulak_private.with_cycle(m)
        from marked m
        join numbered n on n.id = m.id
        where m.redriven_message_id <> m.original_message_id
    )
    insert into ulak.event_log (event, endpoint_id, endpoint_name, message_id, detail, created_at)
    select
        'message.redriven',
        m.endpoint_id,
        m.endpoint_name,
        m.redriven_message_id,
        jsonb_build_object('dlq_id', m.id, 'original_message_id', m.original_message_id, 'by', p_by),
        ulak_private.log_time(p_now)
    from marked m
$sql$;

-- The history of a message with its last cycle added; the newest 20 are kept.
create or replace function ulak_private.with_cycle(p_letter ulak_private.letters)
returns jsonb
language sql
stable
as $sql$
    select jsonb_agg(c.cycle order by c.place)
    from (
        select h.cycle, h.place
        from jsonb_array_elements(
            coalesce(p_letter.failure_history, '[]') || jsonb_build_array(
                jsonb_build_object(
                    'attempts', p_letter.attempts,
                    'retry_count', p_letter.retry_count,
                    'last_error', p_letter.last_error,
                    'first_failed_at', p_letter.first_failed_at,
                    'failed_at', p_letter.failed_at,
                    'generation', p_letter.generation,
                    'redriven_at', p_letter.redriven_at,
                    'redriven_by', p_letter.redriven_by
                )
            )
        ) with ordinality h(cycle, place)
        order by h.place desc
        limit 20
    ) c
$sql$;
