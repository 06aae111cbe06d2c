-- Many messages at once: purge(), discard(), redrive() and retry_now() choose by the same filters and show what they chose in a dry run.

create or replace function ulak.purge(
    p_endpoint text,
    p_since timestamptz default null,
    p_until timestamptz default null,
    p_filter jsonpath default null,
    p_priority integer default null,
    p_limit integer default null,
    p_dry_run boolean default false,
    p_by text default ulak_private.caller(),
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
        'purge',
        json_build_object(
            'p_endpoint', p_endpoint,
            'p_since', p_since,
            'p_until', p_until,
            'p_filter', p_filter::text,
            'p_priority', p_priority,
            'p_ids', p_ids,
            'p_limit', p_limit,
            'p_by', p_by
        ),
        p_dry_run,
        p_now
    ) b
$sql$;

comment on function ulak.purge(
    text, timestamptz, timestamptz, jsonpath, integer, integer, boolean, text, bigint[], timestamptz
) is
    'cancels the messages that wait for an endpoint and match all filters (times are when they were sent); with p_dry_run it '
    'only counts them, and shows a sample and the command to run';

create or replace function ulak.retry_now(
    p_endpoint text,
    p_since timestamptz default null,
    p_until timestamptz default null,
    p_error_like text default null,
    p_filter jsonpath default null,
    p_limit integer default null,
    p_rate double precision default null,
    p_dry_run boolean default false,
    p_by text default ulak_private.caller(),
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
        'retry_now',
        json_build_object(
            'p_endpoint', p_endpoint,
            'p_since', p_since,
            'p_until', p_until,
            'p_error_like', p_error_like,
            'p_filter', p_filter::text,
            'p_ids', p_ids,
            'p_limit', p_limit,
            'p_rate', p_rate,
            'p_by', p_by
        ),
        p_dry_run,
        p_now
    ) b
$sql$;

comment on function ulak.retry_now(
    text, timestamptz, timestamptz, text, jsonpath, integer, double precision, boolean, text, bigint[], timestamptz
) is
    'makes messages due now that wait for a retry to an endpoint and match all filters (times are when they were sent): all '
    'at once, or p_rate a second. An open circuit stays open. With p_dry_run it only counts them, and shows a sample and the '
    'command to run';

create or replace function ulak.discard(
    p_endpoint text default null,
    p_since timestamptz default null,
    p_until timestamptz default null,
    p_error_like text default null,
    p_filter jsonpath default null,
    p_limit integer default null,
    p_dry_run boolean default false,
    p_by text default ulak_private.caller(),
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
        'discard',
        json_build_object(
            'p_endpoint', p_endpoint,
            'p_since', p_since,
            'p_until', p_until,
            'p_error_like', p_error_like,
            'p_filter', p_filter::text,
            'p_ids', p_ids,
            'p_limit', p_limit,
            'p_by', p_by
        ),
        p_dry_run,
        p_now
    ) b
$sql$;

comment on function ulak.discard(
    text, timestamptz, timestamptz, text, jsonpath, integer, boolean, text, bigint[], timestamptz
) is
    'gives up the dead letters that match all filters, which are those of redrive(); they are marked as discarded and kept '
    'until their retention ends. With p_dry_run it only counts them, and shows a sample and the command to run';

-- p_given are the parameters of the public function by their names, in the order in which a dry run spells them.
create or replace function ulak_private.bulk(p_action text, p_given json, p_dry_run boolean, p_now timestamptz)
returns table (messages integer, sample jsonb, command text)
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_is_of_letters boolean := p_action in ('redrive', 'discard');
    v_filter jsonpath := ulak_private.condition((p_given ->> 'p_filter')::jsonpath, 'filter');
    v_rate double precision := p_given ->> 'p_rate';
    v_by text := p_given ->> 'p_by';
    v_ids bigint[];
begin
    p_now := ulak_private.clock(p_now);
    if p_given ->> 'p_limit' is not null then
        perform ulak_private.check_integer('p_limit', (p_given ->> 'p_limit')::integer, 1);
    end if;
    if p_given ->> 'p_priority' is not null then
        perform ulak_private.check_priority((p_given ->> 'p_priority')::integer);
    end if;
    perform ulak_private.check_rate(v_rate), ulak_private.check_generation((p_given ->> 'p_new_generation')::bigint);
    perform ulak_private.check_choice(p_action, p_given ->> 'p_endpoint', p_given ->> 'p_ids' is not null);
    v_ids := case
        when v_is_of_letters then ulak_private.matching_letters(p_given, v_filter, p_action = 'discard')
        else ulak_private.matching_messages(p_given, v_filter, case p_action when 'retry_now' then p_now end)
    end;
    messages := cardinality(v_ids);
    sample := case when v_is_of_letters then ulak_private.sample_of_letters(v_ids[1:5]) else ulak_private.sample_of_messages(v_ids[1:5]) end;
    if p_dry_run then
        command := ulak_private.command(p_action, p_given);
    elsif messages > 0 then
        messages := case p_action
            when 'redrive' then ulak_private.redrive_rows(v_ids, v_rate, v_by, (p_given ->> 'p_new_generation')::bigint, p_now)
            when 'discard' then ulak_private.discard_rows(v_ids, v_by, p_now)
            when 'purge' then ulak_private.cancel(ulak_private.lock_pending(v_ids), v_by, p_now)
            when 'retry_now' then ulak_private.retry_rows(ulak_private.lock_pending(v_ids), v_rate, p_now)
        end;
        -- The others log each message.
        if p_action in ('purge', 'retry_now') then
            insert into ulak.event_log (event, endpoint_id, endpoint_name, detail, created_at)
            select
                case p_action when 'purge' then 'messages.purged' else 'messages.retried' end,
                (select e.id from ulak.endpoints e where e.name = p_given ->> 'p_endpoint'),
                p_given ->> 'p_endpoint',
                jsonb_build_object('messages', messages)
                    || (
                        select jsonb_object_agg(substr(g.key, 3), g.value)
                        from jsonb_each(jsonb_strip_nulls(p_given::jsonb)) g
                        where g.key <> 'p_endpoint'
                    ),
                ulak_private.log_time(p_now);
        end if;
    end if;
    return next;
end
$plpgsql$;

-- Letters of an endpoint that was dropped can be discarded. Messages are never purged or retried for all endpoints in one call.
create or replace function ulak_private.check_choice(p_action text, p_endpoint text, p_has_ids boolean)
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    if p_endpoint is null and (p_has_ids or p_action in ('redrive', 'discard')) then
        return;
    end if;
    if p_action <> 'discard' or not exists (select from ulak_private.letters d where d.endpoint_name = p_endpoint) then
        perform ulak_private.endpoint_id(p_endpoint);
    end if;
end
$plpgsql$;

-- Dead letters that match all filters, in the order in which their messages were sent; with those of endpoints that were dropped, or without.
create or replace function ulak_private.matching_letters(p_given json, p_filter jsonpath, p_with_dropped boolean)
returns bigint[]
language plpgsql
stable
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_custom_plan
set jit = off
as $plpgsql$
declare
    v_endpoint text := p_given ->> 'p_endpoint';
    v_since timestamptz := p_given ->> 'p_since';
    v_until timestamptz := p_given ->> 'p_until';
    v_error_like text := p_given ->> 'p_error_like';
    v_ids bigint[] := ulak_private.ids(p_given -> 'p_ids');
begin
    return array(
        select d.id
        from ulak.dlq d
        left join ulak.endpoints e on e.id = d.endpoint_id
        where d.status = 'failed'
            and (p_with_dropped or e.id is not null)
            and (v_endpoint is null or coalesce(e.name, d.endpoint_name) = v_endpoint)
            and (v_since is null or d.failed_at >= v_since)
            and (v_until is null or d.failed_at < v_until)
            and (v_error_like is null or d.last_error like v_error_like)
            and (v_ids is null or d.id = any (v_ids))
            and (p_filter is null or jsonb_path_match_tz(d.payload, p_filter, '{}', true))
        order by d.original_message_id
        limit (p_given ->> 'p_limit')::integer
    );
end
$plpgsql$;

-- Messages that wait and match all filters; with p_backoff_at those that wait for a retry at that time, and not for a time that somebody set
-- nor for others of their ordering key.
create or replace function ulak_private.matching_messages(p_given json, p_filter jsonpath, p_backoff_at timestamptz)
returns bigint[]
language plpgsql
stable
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_custom_plan
set jit = off
as $plpgsql$
declare
    v_endpoint_id bigint := (select e.id from ulak.endpoints e where e.name = p_given ->> 'p_endpoint');
    v_priority integer := p_given ->> 'p_priority';
    v_since timestamptz := p_given ->> 'p_since';
    v_until timestamptz := p_given ->> 'p_until';
    v_error_like text := p_given ->> 'p_error_like';
    v_ids bigint[] := ulak_private.ids(p_given -> 'p_ids');
begin
    return array(
        select q.id
        from ulak.queue q
        where q.status = 'pending'
            and (v_endpoint_id is null or q.endpoint_id = v_endpoint_id)
            and (v_priority is null or q.priority = v_priority)
            and (v_since is null or q.created_at >= v_since)
            and (v_until is null or q.created_at < v_until)
            and (v_error_like is null or q.last_error like v_error_like)
            and (v_ids is null or q.id = any (v_ids))
            and (
                p_backoff_at is null
                or q.attempts > 0
                and q.next_retry_at > p_backoff_at
                and q.next_retry_at < 'infinity'
                and coalesce(q.scheduled_at <= p_backoff_at, true)
            )
            and (p_filter is null or jsonb_path_match_tz(q.payload, p_filter, '{}', true))
        order by q.id
        limit (p_given ->> 'p_limit')::integer
    );
end
$plpgsql$;

create or replace function ulak_private.ids(p_ids json)
returns bigint[]
language sql
immutable
set search_path = pg_catalog, pg_temp
as $sql$
    select case when json_typeof(p_ids) = 'array' then array(select i::bigint from json_array_elements_text(p_ids) i) end
$sql$;

-- Skips messages that a worker or an application has locked at this moment.
create or replace function ulak_private.lock_pending(p_ids bigint[])
returns bigint[]
language sql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
as $sql$
    select array(
        select q.id
        from ulak_private.deliveries q
        where q.id = any (p_ids) and q.status is not distinct from 'pending'
        order by q.id
        for update skip locked
    )
$sql$;

create or replace function ulak_private.retry_rows(p_ids bigint[], p_rate double precision, p_now timestamptz)
returns integer
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
as $plpgsql$
declare
    v_count integer;
begin
    perform ulak_private.check_ahead(p_now + make_interval(secs => (cardinality(p_ids) - 1) / p_rate), p_now);
    update ulak_private.deliveries q
    set next_retry_at = p_now + coalesce(make_interval(secs => (n.place - 1) / p_rate), '0'), updated_at = p_now
    from unnest(p_ids) with ordinality n(id, place)
    where q.id between n.id and n.id and q.status is not distinct from 'pending';
    get diagnostics v_count = row_count;
    return v_count;
end
$plpgsql$;

-- The guarded update is the lock: a letter is redriven or discarded, once.
create or replace function ulak_private.discard_rows(p_dlq_ids bigint[], p_by text, p_now timestamptz)
returns integer
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_ids bigint[];
begin
    with held as materialized (
        select d.id
        from ulak_private.letters d
        where d.id = any (p_dlq_ids) and d.status = 'failed'
        order by d.original_message_id
        for update
    ),
    marked as (
        update ulak_private.letters d
        set status = 'discarded', discarded_at = p_now, discarded_by = p_by, is_holding = false
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
            ulak_private.log_time(p_now)
        from marked m
    )
    select coalesce(array_agg(m.original_message_id), '{}') into v_ids
    from marked m;
    perform ulak_private.release_held(v_ids, p_now);
    return cardinality(v_ids);
end
$plpgsql$;

create or replace function ulak_private.sample_of_letters(p_dlq_ids bigint[])
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
        ) || ulak_private.shown_payload(d.payload)
        order by d.original_message_id
    )
    from ulak.dlq d
    where d.id = any (p_dlq_ids)
$sql$;

create or replace function ulak_private.sample_of_messages(p_ids bigint[])
returns jsonb
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select jsonb_agg(
        jsonb_build_object(
            'id', q.id,
            'created_at', q.created_at,
            'priority', q.priority,
            'attempts', q.attempts,
            'last_error', q.last_error
        ) || ulak_private.shown_payload(q.payload)
        order by q.id
    )
    from ulak.queue q
    where q.id = any (p_ids)
$sql$;

-- For roles that may read it, as {"payload": ...}; of a long one, the beginning.
create or replace function ulak_private.shown_payload(p_payload jsonb)
returns jsonb
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select case
        when not ulak_private.may_read('ulak.messages') then '{}'
        when length(p_payload::text) > 1000 then jsonb_build_object('payload', left(p_payload::text, 1000) || '...')
        else jsonb_build_object('payload', p_payload)
    end
$sql$;

-- The call that a dry run is a preview of.
create or replace function ulak_private.command(p_function text, p_given json)
returns text
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select format(
        'select * from ulak.%s(%s);',
        p_function,
        string_agg(
            format('%s => %L', g.key, case json_typeof(g.value) when 'array' then translate(g.value::text, '[]', '{}') else g.value #>> '{}' end),
            ', ' order by g.place
        )
    )
    from json_each(p_given) with ordinality g(key, value, place)
    -- These two have no default for it.
    where json_typeof(g.value) <> 'null' or g.key = 'p_endpoint' and p_function in ('purge', 'retry_now')
$sql$;
