-- Leases as external workers use them: claim, heartbeat, complete, fail, release.

create or replace function ulak.claim(
    p_worker text,
    p_limit integer default 1,
    p_endpoint text default null,
    p_lease interval default null,
    p_generation bigint default null,
    p_now timestamptz default clock_timestamp()
)
returns table (
    id bigint,
    message_id uuid,
    attempt integer,
    endpoint text,
    payload jsonb,
    headers jsonb,
    metadata jsonb,
    correlation_id uuid,
    ordering_key text,
    idempotency_key text,
    priority smallint,
    created_at timestamptz,
    expires_at timestamptz,
    lease_until timestamptz
)
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
#variable_conflict use_column
declare
    v_endpoint_id bigint;
    -- Endpoints to claim from; null: all in turn.
    v_endpoint_ids bigint[];
begin
    p_now := ulak_private.clock(p_now);
    perform ulak_private.check_claim(p_worker, p_limit, p_lease);
    if p_endpoint is not null then
        select e.id into v_endpoint_id
        from ulak.endpoints e
        where e.name = p_endpoint;
        perform ulak_private.require_endpoint(v_endpoint_id, p_endpoint);
        if v_endpoint_id is null then
            perform ulak_private.raise_unknown_endpoint(p_endpoint);
        end if;
        v_endpoint_ids := array[v_endpoint_id];
    elsif not ulak_private.works_everywhere() then
        -- In random order: otherwise the same first endpoints would use up a small limit each time.
        v_endpoint_ids := array(
            select g.id
            from ulak_private.granted_endpoints() g(id)
            join ulak.endpoints e on e.id = g.id
            where e.protocol = 'pull'
            order by random()
        );
    end if;
    return query
    select
        c.id,
        c.message_id,
        c.attempt,
        e.name,
        c.payload,
        c.headers,
        c.metadata,
        c.correlation_id,
        c.ordering_key,
        c.idempotency_key,
        c.priority,
        c.created_at,
        c.expires_at,
        c.lease_until
    from ulak_private.claim(
        p_worker,
        p_limit,
        ulak_private.exact(p_lease),
        v_endpoint_ids,
        -- Endpoints of all other protocols are left to ulak's own workers and nodes, unless one is asked for by name.
        case when p_endpoint is null then array['pull'] end,
        p_generation,
        p_now,
        -- Who gets nothing doesn't know that he ought to ask again at once.
        p_most_visits => 1000000
    ) with ordinality c
    join ulak.endpoints e on e.id = c.endpoint_id
    -- Endpoints take turns.
    order by row_number() over (partition by c.endpoint_id order by c.ordinality), c.ordinality;
end
$plpgsql$;

comment on function ulak.claim(text, integer, text, interval, bigint, timestamptz) is
    'leases up to p_limit due messages to p_worker, of all pull endpoints or of the one that is named; for members of '
    'ulak_consumer, of those that were granted';

create or replace function ulak_private.check_claim(p_worker text, p_limit integer, p_lease interval)
returns void
language plpgsql
immutable
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    if coalesce(p_worker, '') = '' then
        raise exception 'a worker needs a name'
            using errcode = '22023', hint = 'Use one name per process, such as host and pid: it fences the lease.';
    elsif octet_length(p_worker) > 512 then
        raise exception 'the name of a worker is longer than 512 bytes'
            using errcode = '22023', detail = format('It has %s.', octet_length(p_worker));
    end if;
    if p_limit is null or p_limit not between 1 and 10000 then
        raise exception 'the limit of a claim must be between 1 and 10000'
            using errcode = '22023', detail = format('It is %s.', coalesce(p_limit::text, 'null'));
    end if;
    if p_lease <= interval '0' or p_lease > interval '1 day' then
        raise exception 'a lease must be above 0 and at most a day'
            using errcode = '22023', detail = format('It is %s.', p_lease), hint = 'Use heartbeat() for longer work.';
    end if;
end
$plpgsql$;

create or replace function ulak.heartbeat(
    p_id bigint,
    p_worker text,
    p_attempt integer,
    p_lease interval default null,
    p_now timestamptz default clock_timestamp()
)
returns boolean
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    p_now := ulak_private.clock(p_now);
    perform ulak_private.check_claim(p_worker, 1, p_lease), ulak_private.require_message(p_id);
    return cardinality(ulak_private.heartbeat_many(p_worker, array[p_id], array[p_attempt], ulak_private.exact(p_lease), p_now)) = 1;
end
$plpgsql$;

comment on function ulak.heartbeat(bigint, text, integer, interval, timestamptz) is
    'extends a lease from now on; false if it is lost, then stop working on the message';

create or replace function ulak.complete(
    p_id bigint,
    p_worker text,
    p_attempt integer,
    p_response jsonb default null,
    p_now timestamptz default clock_timestamp()
)
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    p_now := ulak_private.clock(p_now);
    perform ulak_private.require_message(p_id);
    if ulak_private.settle_many(p_worker, array[p_id], array[p_attempt], null, null, array[ulak_private.kept_response(p_response)], p_now) = '{}' then
        perform ulak_private.raise_stale_report(p_id, p_worker, p_attempt);
    end if;
end
$plpgsql$;

comment on function ulak.complete(bigint, text, integer, jsonb, timestamptz) is
    'reports a message as done; an error (55000) if the lease is lost. A response that is larger than max_payload_size, or nested deeper '
    'than max_json_depth, is left out';

-- What a worker reports is kept if it can be read: no longer as text than a payload, nor nested deeper. The work is done all the same, so
-- an error, and with it another attempt, would help nobody.
create or replace function ulak_private.kept_response(p_response jsonb)
returns jsonb
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_limit integer;
begin
    if p_response is null then
        return null;
    end if;
    v_limit := ulak.setting('max_payload_size')::integer;
    if pg_column_size(p_response) <= v_limit and octet_length(p_response::text) <= v_limit then
        perform ulak_private.check_depth('response', array[p_response]);
        return p_response;
    end if;
    return '{"truncated": true}';
exception
    -- Deeper than that, or beyond a gigabyte as text.
    when program_limit_exceeded then
        return '{"truncated": true}';
end
$plpgsql$;

create or replace function ulak.fail(
    p_id bigint,
    p_worker text,
    p_attempt integer,
    p_error text,
    p_retry_after interval default null,
    p_permanent boolean default false,
    p_now timestamptz default clock_timestamp()
)
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_reason text := coalesce(ulak_private.error_line(ulak_private.without_message(p_error, p_id)), 'no reason given');
    -- A worker may name the class itself.
    v_error text := case
        when p_permanent and not starts_with(v_reason, '[DISABLE]') then '[PERMANENT] ' || ulak_private.without_class(v_reason)
        when v_reason ~ E'^\\[(RETRYABLE|PERMANENT|DISABLE)\\]' then v_reason
        else '[RETRYABLE] ' || v_reason
    end;
begin
    perform ulak_private.require_message(p_id);
    p_now := ulak_private.clock(p_now);
    if p_retry_after is not null then
        perform ulak_private.check_interval('p_retry_after', p_retry_after, interval '1 day');
    end if;
    if ulak_private.settle_many(
        p_worker,
        array[p_id],
        array[p_attempt],
        array[v_error],
        array[ceil(extract(epoch from p_retry_after))::integer],
        null,
        p_now
    ) = '{}' then
        perform ulak_private.raise_stale_report(p_id, p_worker, p_attempt);
    end if;
end
$plpgsql$;

comment on function ulak.fail(bigint, text, integer, text, interval, boolean, timestamptz) is
    'reports a failure: the message is retried by its endpoint''s policy, or goes to the dead-letter queue if p_permanent '
    'or out of retries; an error (55000) if the lease is lost';

-- A worker's reason without what it repeats of the message, or of a secret that its endpoint's config names: monitors and the log show it.
-- As the worker in the database hides it: texts and numbers of four characters and more, and nothing is left of a reason that quotes a piece
-- of a longer text.
create or replace function ulak_private.without_message(p_error text, p_id bigint)
returns text
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_reason text := left(p_error, 4000);
    v_lower text := lower(v_reason collate "C");
    v_message record;
    v_sent text[];
    v_value text;
begin
    select q.payload, q.headers, e.config into v_message
    from ulak.queue q
    left join ulak.endpoints e on e.id = q.endpoint_id
    where q.id = p_id;
    if v_reason is null or not found then
        return v_reason;
    elsif pg_column_size(v_message.payload) > 1048576 then
        return 'the reason is left out: the payload is too large to be searched for in it';
    end if;
    v_sent := array(
        select distinct lower(s.value collate "C")
        from (
            select v #>> '{}'
            from jsonb_path_query(jsonb_build_array(v_message.payload, v_message.headers), 'strict $.**') v
            where jsonb_typeof(v) in ('string', 'number')
            union all
            -- Keys that are data, not names of fields.
            select k #>> '{}'
            from jsonb_path_query(v_message.payload, 'strict $.** ? (@.type() == "object").keyvalue().key') k
            where k #>> '{}' !~ '^[A-Za-z_$][A-Za-z_.$-]*$'
            union all
            select v.value
            from jsonb_each_text(ulak_private.secret_values(ulak_private.secret_names(v_message.config))) v
        ) s(value)
        where length(s.value) >= 4
    );
    for v_value in select s from unnest(v_sent) s where strpos(v_lower, s) > 0 order by length(s) desc loop
        v_reason := regexp_replace(v_reason, '***=' || v_value, '****', 'gi');
    end loop;
    v_lower := lower(v_reason collate "C");
    if exists (
        select
        from generate_series(1, length(v_lower) - 11, 12) w(place)
        cross join unnest(v_sent) s(value)
        where length(s.value) >= 12 and strpos(s.value, substr(v_lower, w.place, 12)) > 0
    ) then
        return 'the reason is left out: it repeats the payload';
    end if;
    return v_reason;
end
$plpgsql$;

-- On one line, and cut where it gets too long, as the worker in the database writes errors: they are shown in every look, kept with
-- each failed cycle, and written to the server's log. What XML and terminals can't bear is left out, and so is what nobody sees: as
-- plpython/ulak/safety/text.py does it. Only UTF-8 numbers its characters so.
create or replace function ulak_private.error_line(p_error text)
returns text
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select case when length(e.line) > 1000 then left(e.line, 1000) || '...' else e.line end
    from (
        select regexp_replace(
            left(p_error, 4000),
            case
                when getdatabaseencoding() <> 'UTF8' then E'[\\x01-\\x1f\\x7f]+'
                else E'[\\u0001-\\u001f\\u007f-\\u009f\\u00ad\\u061c\\u180e\\u200b-\\u200f\\u2028-\\u202e\\u2060-\\u206f\\ufdd0-\\ufdef\\ufeff\\ufff9-\\ufffb'
                    || (
                        select string_agg(format(E'\\U%s-\\U%s', lpad(to_hex(p * 65536 + 65534), 8, '0'), lpad(to_hex(p * 65536 + 65535), 8, '0')), '')
                        from generate_series(0, 16) p
                    )
                    || E'\\U000e0000-\\U000e007f]+'
            end,
            ' ',
            'g'
        )
    ) e (line)
$sql$;

create or replace function ulak_private.without_class(p_error text)
returns text
language sql
immutable
as $sql$
    select regexp_replace(p_error, E'^\\[(RETRYABLE|PERMANENT)\\]\\s*', '')
$sql$;

create or replace function ulak.release(
    p_id bigint,
    p_worker text,
    p_attempt integer,
    p_delay interval default '0',
    p_now timestamptz default clock_timestamp()
)
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    perform ulak_private.require_message(p_id);
    p_now := ulak_private.clock(p_now);
    perform ulak_private.check_interval('p_delay', p_delay, interval '1 day');
    if ulak_private.release_many(p_worker, array[p_id], array[p_attempt], ulak_private.exact(p_delay), p_now) = '{}' then
        perform ulak_private.raise_stale_report(p_id, p_worker, p_attempt);
    end if;
end
$plpgsql$;

comment on function ulak.release(bigint, text, integer, interval, timestamptz) is
    'gives a message back unworked, without spending its retries; an error (55000) if the lease is lost';

create or replace function ulak_private.raise_stale_report(p_id bigint, p_worker text, p_attempt integer)
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_message record;
begin
    select m.id, m.status, m.attempts, m.locked_by into v_message
    from ulak.messages m
    where m.id = p_id;
    raise exception 'worker "%" does not hold message % in attempt %', left(p_worker, 512), p_id, p_attempt
        using errcode = '55000',
            detail = case
                when v_message.id is null then 'There is no such message.'
                when v_message.status <> 'processing'
                    then format('It is %s after %s attempts.', v_message.status, v_message.attempts)
                else format('It is held by "%s" in attempt %s.', v_message.locked_by, v_message.attempts)
            end,
            hint = 'The lease ran out or the message was settled before. Drop the result: nothing was changed.';
end
$plpgsql$;
