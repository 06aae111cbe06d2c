-- What an operator gives up: messages that wait are purged, dead letters are discarded. Neither is deleted.

create or replace function ulak.purge(
    p_endpoint text,
    p_since timestamptz default null,
    p_until timestamptz default null,
    p_filter jsonpath default null,
    p_priority integer default null,
    p_limit integer default null,
    p_dry_run boolean default false,
    p_by text default ulak._caller(),
    p_now timestamptz default clock_timestamp()
)
returns table (messages integer, sample jsonb, command text)
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
as $plpgsql$
declare
    v_endpoint_id bigint := ulak._endpoint_id(p_endpoint);
    v_ids bigint[];
begin
    p_now := ulak._clock(p_now);
    if p_limit is not null then
        perform ulak._check_integer('p_limit', p_limit, 1);
    end if;
    if p_priority is not null then
        perform ulak._check_priority(p_priority);
    end if;
    v_ids := array(
        select q.id
        from ulak.queue q
        where q.status = 'pending'
            and q.endpoint_id = v_endpoint_id
            and (p_priority is null or q.priority = p_priority)
            and (p_since is null or q.created_at >= p_since)
            and (p_until is null or q.created_at < p_until)
            and (p_filter is null or jsonb_path_exists_tz(q.payload, p_filter, silent => true))
        order by q.id
        limit p_limit
    );
    messages := cardinality(v_ids);
    sample := (
        select jsonb_agg(
            jsonb_build_object(
                'id', q.id, 'created_at', q.created_at, 'priority', q.priority, 'attempts', q.attempts, 'last_error', q.last_error
            )
            order by q.id
        )
        from ulak._deliveries q
        where q.id = any (v_ids[1:5])
    );
    if p_dry_run then
        command := ulak._command(
            'purge',
            array['p_endpoint', 'p_since', 'p_until', 'p_filter', 'p_priority', 'p_limit', 'p_by'],
            array[p_endpoint, p_since::text, p_until::text, p_filter::text, p_priority::text, p_limit::text, p_by]
        );
    elsif messages > 0 then
        -- What a worker or an application holds at this moment isn't waited for.
        messages := ulak._cancel(
            array(
                select q.id
                from ulak._deliveries q
                where q.id = any (v_ids) and q.status is not distinct from 'pending'
                for update skip locked
            ),
            p_by,
            p_now
        );
        insert into ulak.event_log (event, endpoint_id, endpoint_name, detail, created_at)
        values (
            'messages.purged',
            v_endpoint_id,
            p_endpoint,
            jsonb_strip_nulls(jsonb_build_object(
                'messages', messages,
                'by', p_by,
                'since', p_since,
                'until', p_until,
                'filter', p_filter::text,
                'priority', p_priority,
                'limit', p_limit
            )),
            ulak._log_time(p_now)
        );
    end if;
    return next;
end
$plpgsql$;

comment on function ulak.purge(
    text, timestamptz, timestamptz, jsonpath, integer, integer, boolean, text, timestamptz
) is
    'cancels the messages that wait for an endpoint and match all filters (times are when they were sent); with p_dry_run it only '
    'counts them, shows a sample and the command to run';

create or replace function ulak.discard(
    p_endpoint text default null,
    p_since timestamptz default null,
    p_until timestamptz default null,
    p_error_like text default null,
    p_filter jsonpath default null,
    p_limit integer default null,
    p_dry_run boolean default false,
    p_by text default ulak._caller(),
    p_now timestamptz default clock_timestamp()
)
returns table (messages integer, sample jsonb, command text)
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_ids bigint[];
begin
    p_now := ulak._clock(p_now);
    if p_limit is not null then
        perform ulak._check_integer('p_limit', p_limit, 1);
    end if;
    -- Letters of an endpoint that was dropped can be discarded, too.
    if p_endpoint is not null and not exists (select from ulak._letters d where d.endpoint_name = p_endpoint) then
        perform ulak._endpoint_id(p_endpoint);
    end if;
    v_ids := ulak._matching_letters(p_endpoint, p_since, p_until, p_error_like, p_filter, p_limit, true);
    messages := cardinality(v_ids);
    sample := ulak._sample_of_letters(v_ids[1:5]);
    if p_dry_run then
        command := ulak._command(
            'discard',
            array['p_endpoint', 'p_since', 'p_until', 'p_error_like', 'p_filter', 'p_limit', 'p_by'],
            array[p_endpoint, p_since::text, p_until::text, p_error_like, p_filter::text, p_limit::text, p_by]
        );
    elsif messages > 0 then
        messages := ulak._discard_rows(v_ids, p_by, p_now);
    end if;
    return next;
end
$plpgsql$;

comment on function ulak.discard(
    text, timestamptz, timestamptz, text, jsonpath, integer, boolean, text, timestamptz
) is
    'gives up the dead letters that match all filters, as those of redrive(): they stay until retention, marked as discarded; with '
    'p_dry_run it only counts them, shows a sample and the command to run';

-- The guarded update is the lock: a letter is redriven or discarded, once.
create or replace function ulak._discard_rows(p_dlq_ids bigint[], p_by text, p_now timestamptz)
returns integer
language sql
set search_path = pg_catalog, pg_temp
as $sql$
    with held as materialized (
        select d.id
        from ulak._letters d
        where d.id = any (p_dlq_ids) and d.status = 'failed'
        order by d.original_message_id
        for update
    ),
    marked as (
        update ulak._letters d
        set status = 'discarded', discarded_at = p_now, discarded_by = p_by
        from held h
        where d.id = h.id
        returning d.id, d.endpoint_id, d.endpoint_name, d.original_message_id
    ),
    logged as (
        insert into ulak.event_log (event, endpoint_id, endpoint_name, message_id, detail, created_at)
        select
            'message.discarded',
            m.endpoint_id,
            m.endpoint_name,
            m.original_message_id,
            jsonb_build_object('dlq_id', m.id, 'by', p_by),
            ulak._log_time(p_now)
        from marked m
    )
    select count(*)::integer
    from marked
$sql$;

create or replace function ulak._sample_of_letters(p_dlq_ids bigint[])
returns jsonb
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select jsonb_agg(
        jsonb_build_object(
            'dlq_id', d.id,
            'endpoint', d.endpoint_name,
            'failed_at', d.failed_at,
            'last_error', d.last_error
        )
        order by d.original_message_id
    )
    from ulak._letters d
    where d.id = any (p_dlq_ids)
$sql$;

-- The call that a dry run stands for.
create or replace function ulak._command(p_function text, p_names text[], p_values text[])
returns text
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select format(
        'select * from ulak.%s(%s);', p_function, string_agg(format('%s => %L', a.name, a.value), ', ' order by a.place)
    )
    from unnest(p_names, p_values) with ordinality a(name, value, place)
    where a.value is not null
$sql$;
