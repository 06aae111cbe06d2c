-- Replay: archived messages go into the queue once more, as new messages.

create or replace function ulak.replay_message(
    p_archive_id bigint,
    p_new_message_id boolean default false,
    p_now timestamptz default clock_timestamp()
)
returns bigint
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_message record;
    v_endpoint_name text;
    v_new_id bigint;
begin
    p_now := ulak_private.clock(p_now);
    select a.endpoint_id, a.created_at into v_message
    from ulak.archive a
    where a.id = p_archive_id;
    if not found then
        perform ulak_private.raise_not_archived(p_archive_id);
    end if;
    v_endpoint_name := ulak_private.endpoint_name(v_message.endpoint_id);
    v_new_id := (
        ulak_private.replay(
            v_message.endpoint_id,
            array[p_archive_id],
            v_message.created_at,
            v_message.created_at,
            p_new_message_id,
            v_message.endpoint_id,
            p_now,
            array['failed', 'discarded']
        )
    )[1];
    if v_new_id is null then
        perform ulak_private.raise_redriven(d)
        from ulak_private.letters d
        where d.original_message_id = p_archive_id and d.redriven_message_id is distinct from p_archive_id;
    end if;
    insert into ulak.event_log (event, endpoint_id, endpoint_name, message_id, detail)
    values (
        'message.replayed',
        v_message.endpoint_id,
        v_endpoint_name,
        v_new_id,
        jsonb_build_object('archive_id', p_archive_id, 'new_message_id', p_new_message_id)
    );
    return v_new_id;
end
$plpgsql$;

comment on function ulak.replay_message(bigint, boolean, timestamptz) is
    'queues an archived message again under a new id, which it returns. It keeps its message_id, so that the receiver can '
    'drop a duplicate, unless p_new_message_id is true. Its dead letter, if there is one, counts as redriven';

create or replace function ulak.replay_range(
    p_endpoint_id bigint,
    p_from_ts timestamptz,
    p_to_ts timestamptz,
    p_status text default null,
    p_new_message_id boolean default false,
    p_limit integer default null,
    p_dry_run boolean default false,
    p_to text default null,
    p_filter jsonpath default null,
    p_now timestamptz default clock_timestamp()
)
returns integer
language sql
security definer
set search_path = pg_catalog, pg_temp
as $sql$
    select b.messages
    from ulak_private.bulk(
        'replay_range',
        (
            select to_json(g)
            from (select ulak_private.endpoint_name(p_endpoint_id) as p_endpoint, p_from_ts, p_to_ts, p_status, p_limit, p_to, p_filter, p_new_message_id) g
        ),
        p_dry_run,
        p_now
    ) b
$sql$;

comment on function ulak.replay_range(bigint, timestamptz, timestamptz, text, boolean, integer, boolean, text, jsonpath, timestamptz) is
    'queues the finished messages of an endpoint again that were created between p_from_ts and p_to_ts (not including '
    'p_to_ts), in their old order, each once, for the same endpoint or for p_to. Cancelled messages are left out unless '
    'p_status asks for them, and so are discarded dead letters, and always those that were redriven. The others then count as '
    'redriven, unless they went to another endpoint. Returns how many';

create or replace function ulak.replay_range(
    p_endpoint text,
    p_from_ts timestamptz,
    p_to_ts timestamptz,
    p_status text default null,
    p_new_message_id boolean default false,
    p_limit integer default null,
    p_dry_run boolean default false,
    p_to text default null,
    p_filter jsonpath default null,
    p_now timestamptz default clock_timestamp()
)
returns integer
language sql
security definer
set search_path = pg_catalog, pg_temp
as $sql$
    select ulak.replay_range(
        ulak_private.endpoint_id(p_endpoint), p_from_ts, p_to_ts, p_status, p_new_message_id, p_limit, p_dry_run, p_to, p_filter, p_now
    )
$sql$;

comment on function ulak.replay_range(text, timestamptz, timestamptz, text, boolean, integer, boolean, text, jsonpath, timestamptz) is
    'the same for the endpoint of this name';

create or replace function ulak.replay_plan(
    p_endpoint text,
    p_from_ts timestamptz,
    p_to_ts timestamptz,
    p_status text default null,
    p_limit integer default null,
    p_to text default null,
    p_filter jsonpath default null
)
returns table (messages integer, sample jsonb, command text)
language sql
security definer
set search_path = pg_catalog, pg_temp
as $sql$
    select b.*
    from ulak_private.bulk(
        'replay_range',
        (select to_json(g) from (select p_endpoint, p_from_ts, p_to_ts, p_status, p_limit, p_to, p_filter) g),
        true,
        null
    ) b
$sql$;

comment on function ulak.replay_plan(text, timestamptz, timestamptz, text, integer, text, jsonpath) is
    'what replay_range() would do: how many messages, a sample of them and the command to run';

create or replace function ulak_private.check_replay(p_from_ts timestamptz, p_to_ts timestamptz, p_status text)
returns void
language plpgsql
immutable
as $plpgsql$
begin
    if p_from_ts is null or p_to_ts is null then
        raise exception 'a range to replay needs both ends'
            using errcode = '22004', hint = 'Use ''-infinity'' or ''infinity'' for an open end.';
    end if;
    if p_from_ts >= p_to_ts then
        raise exception 'the range to replay is empty'
            using errcode = '22023',
                detail = format('It goes from %s up to, not including, %s.', p_from_ts, p_to_ts);
    end if;
    if p_status not in ('completed', 'failed', 'expired', 'cancelled', 'discarded') then
        raise exception 'no archived message has status "%"', p_status
            using errcode = '22023', hint = 'completed, failed, expired, cancelled, discarded, or null for all but the cancelled and discarded ones.';
    end if;
end
$plpgsql$;

-- For bulk(): the messages with these ids.
create or replace function ulak_private.replay_rows(p_given json, p_archive_ids bigint[], p_first timestamptz, p_last timestamptz, p_now timestamptz)
returns integer
language plpgsql
as $plpgsql$
declare
    v_endpoint_id bigint := ulak_private.endpoint_id(p_given ->> 'p_endpoint');
    v_target_id bigint := ulak_private.endpoint_id(coalesce(p_given ->> 'p_to', p_given ->> 'p_endpoint'));
    v_new_ids bigint[];
begin
    v_new_ids := ulak_private.replay(
        v_endpoint_id,
        p_archive_ids,
        p_first,
        p_last,
        (p_given ->> 'p_new_message_id')::boolean,
        v_target_id,
        p_now,
        array[case when p_given ->> 'p_status' = 'discarded' then 'discarded' else 'failed' end]
    );
    if v_new_ids <> '{}' then
        insert into ulak.event_log (event, endpoint_id, endpoint_name, detail)
        values (
            'messages.replayed',
            v_endpoint_id,
            p_given ->> 'p_endpoint',
            jsonb_build_object(
                'messages', cardinality(v_new_ids),
                'from', p_given -> 'p_from_ts',
                'to', p_given -> 'p_to_ts',
                'status', p_given -> 'p_status',
                'limit', p_given -> 'p_limit',
                'filter', p_given -> 'p_filter',
                'endpoint', p_given -> 'p_to',
                'new_message_id', p_given -> 'p_new_message_id',
                'first_archive_id', p_archive_ids[1],
                'last_archive_id', p_archive_ids[cardinality(p_archive_ids)],
                'first_id', v_new_ids[1],
                'last_id', v_new_ids[cardinality(v_new_ids)]
            )
        );
    end if;
    return cardinality(v_new_ids);
end
$plpgsql$;

-- Queues archived messages of one endpoint for p_target_id, and returns the new ids in the order of the old ones. All were created between
-- p_first and p_last, so that only these months are read. If the target is their own endpoint, messages whose dead letter has a status
-- other than p_letters are left out. A letter that held its ordering key and was redriven as the same message doesn't count: that message
-- has ended again since. Messages are looked up by id: without statistics, the planner was seen to scan a whole month per message.
create or replace function ulak_private.replay(
    p_endpoint_id bigint,
    p_archive_ids bigint[],
    p_first timestamptz,
    p_last timestamptz,
    p_new_message_id boolean,
    p_target_id bigint,
    p_now timestamptz,
    p_letters text[]
)
returns bigint[]
language plpgsql
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
as $plpgsql$
declare
    v_count integer;
    v_keys text[];
    v_taken bigint[];
    v_ids bigint[];
begin
    v_keys := array(
        select distinct a.ordering_key
        from ulak.archive a
        where a.id = any (p_archive_ids)
            and a.created_at between p_first and p_last
            and a.ordering_key is not null
    );
    perform ulak_private.lock_ordering_keys(array_fill(p_target_id, array[cardinality(v_keys)]), v_keys);

    -- As in redrive_rows(), the lock decides: if two operators replay or redrive a dead letter, the second finds it redriven.
    with letters as materialized (
        select d.original_message_id, d.status
        from ulak_private.letters d
        where d.original_message_id = any (p_archive_ids)
            and d.redriven_message_id is distinct from d.original_message_id
            and p_target_id = p_endpoint_id
        order by d.original_message_id
        for update
    )
    select array_agg(l.original_message_id) into v_taken
    from letters l
    where l.status <> all (p_letters);
    if v_taken is not null then
        p_archive_ids := array(
            select a.id from unnest(p_archive_ids) with ordinality a(id, place) where a.id <> all (v_taken) order by a.place
        );
    end if;
    v_count := cardinality(p_archive_ids);
    if v_count = 0 then
        return '{}';
    end if;

    -- Ids are drawn after the keys are locked: the order of ids is the order of commits.
    v_ids := array(select nextval('ulak.queue_id_seq') from generate_series(1, v_count));
    perform ulak_private.check_backpressure(v_ids[v_count], v_count);
    perform ulak_private.insert_replayed(p_archive_ids, v_ids, p_first, p_last, p_new_message_id, p_target_id, p_now);
    update ulak_private.letters d
    set status = 'redriven', redriven_at = p_now, redriven_by = ulak_private.caller(), redriven_message_id = n.id
    from unnest(p_archive_ids, v_ids) n(archive_id, id)
    where d.original_message_id = n.archive_id
        and d.redriven_message_id is distinct from d.original_message_id
        and p_target_id = p_endpoint_id;
    return v_ids;
end
$plpgsql$;

-- The new messages have a fresh retry budget, and no deadline, schedule or idempotency key. Those with an ordering key go to its end. An event
-- can't be changed, so a message gets one of its own where it may not have the old one: with p_new_message_id, because receivers of CloudEvents
-- drop duplicates by the event's id; and at another endpoint, if a header of the event is not a message's to set there.
create or replace function ulak_private.insert_replayed(
    p_archive_ids bigint[],
    p_ids bigint[],
    p_first timestamptz,
    p_last timestamptz,
    p_new_message_id boolean,
    p_target_id bigint,
    p_now timestamptz
)
returns void
language sql
as $sql$
    with replayed as materialized (
        select
            n.id as new_id, a as old, e.payload, e.headers - h.foreign_names as headers, e.metadata, e.sent_by, e.max_retries,
            -- Not if somebody has deleted the event: then there is nothing to copy.
            (p_new_message_id or h.foreign_names <> '{}') and e.id is not null as has_own
        from unnest(p_archive_ids, p_ids) n(archive_id, id)
        join ulak_private.archived a on a.id = n.archive_id and a.created_at between p_first and p_last
        left join lateral (
            select e.*
            from ulak_private.events e
            where (p_new_message_id or p_target_id <> a.endpoint_id)
                and e.id = a.event_id
                and e.created_at = coalesce(a.event_created_at, a.created_at)
        ) e on true
        cross join lateral (
            select case when p_target_id <> a.endpoint_id then ulak_private.credential_headers(p_target_id, e.headers) else '{}' end
        ) h(foreign_names)
    ),
    own as (
        insert into ulak_private.events (id, created_at, payload, headers, metadata, sent_by, max_retries)
        select
            r.new_id,
            p_now,
            r.payload,
            case when p_new_message_id then r.headers - 'ulak-event-id' else r.headers end,
            r.metadata,
            r.sent_by,
            r.max_retries
        from replayed r
        where r.has_own
    )
    insert into ulak_private.deliveries (
        id,
        event_id,
        event_created_at,
        made_from,
        endpoint_id,
        message_id,
        next_retry_at,
        created_at,
        updated_at,
        correlation_id,
        generation,
        priority,
        ordering_key,
        failure_history
    )
    select
        r.new_id,
        case when r.has_own then r.new_id else (r.old).event_id end,
        case when not r.has_own then coalesce((r.old).event_created_at, (r.old).created_at) end,
        (r.old).id,
        p_target_id,
        case when p_new_message_id then gen_random_uuid() else (r.old).message_id end,
        p_now,
        p_now,
        p_now,
        (r.old).correlation_id,
        (r.old).generation,
        (r.old).priority,
        (r.old).ordering_key,
        -- A failed cycle becomes part of the message's history, as redrive does it.
        case
            when (r.old).status = 'failed' then ulak_private.with_cycle(
                jsonb_populate_record(
                    null::ulak_private.letters,
                    to_jsonb(r.old) || jsonb_build_object('redriven_at', p_now, 'redriven_by', ulak_private.caller())
                )
            )
            else (r.old).failure_history
        end
    from replayed r
$sql$;

-- Raises unless there is such an endpoint.
create or replace function ulak_private.endpoint_name(p_endpoint_id bigint)
returns text
language plpgsql
as $plpgsql$
declare
    v_name text;
begin
    select e.name into v_name
    from ulak.endpoints e
    where e.id = p_endpoint_id;
    if not found then
        raise exception 'endpoint % does not exist', coalesce(p_endpoint_id::text, 'null')
            using errcode = '42704',
                detail = 'Its archived messages can be read in ulak.archive, but they can''t be sent anywhere.',
                hint = 'select id, name from ulak.endpoints;';
    end if;
    return v_name;
end
$plpgsql$;

create or replace function ulak_private.raise_not_archived(p_id bigint)
returns void
language plpgsql
as $plpgsql$
declare
    v_status text := (select q.status from ulak_private.deliveries q where q.id = p_id);
    v_hint text := case v_status
        when 'pending' then format('To send it now: select ulak.reschedule(%s, now());', p_id)
        when 'processing' then format('To see what becomes of it: select * from ulak.explain(%s);', p_id)
        when 'held' then format('It is a dead letter that holds its ordering key: select ulak.redrive_message(id) from ulak.dlq where original_message_id = %s;', p_id)
        else 'select id, status, created_at from ulak.archive order by created_at desc limit 20;'
    end;
begin
    raise exception 'message % is not in the archive', coalesce(p_id::text, 'null')
        using errcode = 'P0002',
            detail = case
                when v_status is not null then format('It is in the queue, %s.', v_status)
                else 'There is no such message, or its month has been dropped.'
            end,
            hint = v_hint;
end
$plpgsql$;
