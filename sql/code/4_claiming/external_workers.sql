-- The functions that external workers call, beside work(): claim(), heartbeat(), complete(), fail(), release(), and the same for many messages.

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
begin
    perform ulak_private.check_claim(p_worker, p_limit, p_lease);
    return query
    select
        w.id, w.message_id, w.attempt, w.endpoint, w.payload, w.headers, w.metadata, w.correlation_id, w.ordering_key,
        w.idempotency_key, w.priority, w.created_at, w.expires_at, w.lease_until
    from ulak.work(p_worker, p_limit, p_endpoint, p_lease => p_lease, p_generation => p_generation, p_now => p_now) w;
end
$plpgsql$;

comment on function ulak.claim(text, integer, text, interval, bigint, timestamptz) is
    'leases up to p_limit due messages to p_worker: from all pull endpoints, or from the one that is named; for members of '
    'ulak_consumer, from those granted to them. A message whose lease has expired is due at once';

create or replace function ulak_private.check_claim(p_worker text, p_limit integer, p_lease interval)
returns void
language plpgsql
immutable
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
    perform ulak_private.check_claim(p_worker, 1, p_lease);
    return cardinality(ulak_private.heartbeat_many(p_worker, ulak_private.workable_messages(array[p_id]), array[p_attempt], ulak_private.exact(p_lease), p_now)) = 1;
end
$plpgsql$;

comment on function ulak.heartbeat(bigint, text, integer, interval, timestamptz) is
    'extends a lease, counted from now, by p_lease, or else by as much as the claim or the last heartbeat asked for; false if the lease is lost: stop working on the message';

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
    if ulak_private.settle_reports(p_worker, array[p_id], array[p_attempt], null, null, array[p_response], p_now) = '{}' then
        perform ulak_private.raise_stale_report(p_id, p_worker, p_attempt);
    end if;
end
$plpgsql$;

comment on function ulak.complete(bigint, text, integer, jsonb, timestamptz) is
    'reports a message as done; an error (55000) if the lease is lost. A response that is larger than max_payload_size, or nested deeper '
    'than max_json_depth, is left out';

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
    v_error text := coalesce(p_error, 'no reason given');
begin
    p_now := ulak_private.clock(p_now);
    if p_permanent and not starts_with(v_error, '[DISABLE]') then
        v_error := '[PERMANENT] ' || ulak_private.without_class(v_error);
    end if;
    if ulak_private.settle_reports(
        p_worker, array[p_id], array[p_attempt], array[v_error], array[p_retry_after], null, p_now
    ) = '{}' then
        perform ulak_private.raise_stale_report(p_id, p_worker, p_attempt);
    end if;
end
$plpgsql$;

comment on function ulak.fail(bigint, text, integer, text, interval, boolean, timestamptz) is
    'reports a failure: the message is retried by its endpoint''s policy, or goes to the dead-letter queue if p_permanent is '
    'true or no retries are left; an error (55000) if the lease is lost';

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
    p_now := ulak_private.clock(p_now);
    perform ulak_private.check_interval('p_delay', p_delay, interval '1 day');
    if ulak_private.release_many(p_worker, ulak_private.workable_messages(array[p_id]), array[p_attempt], ulak_private.exact(p_delay), p_now) = '{}' then
        perform ulak_private.raise_stale_report(p_id, p_worker, p_attempt);
    end if;
end
$plpgsql$;

comment on function ulak.release(bigint, text, integer, interval, timestamptz) is
    'returns a message to the queue unprocessed, without spending a retry; an error (55000) if the lease is lost';

create or replace function ulak_private.raise_stale_report(p_id bigint, p_worker text, p_attempt integer)
returns void
language plpgsql
as $plpgsql$
declare
    v_message record;
begin
    select m.id, m.endpoint_id, m.status, m.attempts, m.locked_by into v_message
    from ulak.messages m
    where m.id = p_id;
    if not ulak_private.may_work(v_message.endpoint_id) then
        perform ulak_private.raise_foreign_message(p_id);
    end if;
    raise exception 'worker "%" does not hold message % in attempt %', left(p_worker, 512), p_id, p_attempt
        using errcode = '55000',
            detail = case
                when v_message.id is null then 'There is no such message.'
                when v_message.status <> 'processing'
                    then format('It is %s after %s.', v_message.status, ulak_private.counted(v_message.attempts, 'attempt'))
                else format('It is held by "%s" in attempt %s.', v_message.locked_by, v_message.attempts)
            end,
            hint = 'The lease ran out or the message was settled before. Drop the result: nothing was changed.';
end
$plpgsql$;

-- The same for many messages in one call. Each function returns for every message whether the worker still held it: a lost lease is no error.
-- They have names of their own, because PostgreSQL couldn't choose between two functions of one name if a client sends its parameters
-- without types.

-- True, or an error.
create or replace function ulak_private.check_reports(
    p_ids bigint[],
    p_attempts integer[],
    p_errors text[] default null,
    p_retry_after interval[] default null,
    p_responses jsonb[] default null
)
returns boolean
language plpgsql
immutable
as $plpgsql$
begin
    if p_ids is null or cardinality(p_ids) is distinct from cardinality(p_attempts) then
        raise exception 'each message needs its attempt'
            using
                errcode = '22023',
                detail = format(
                    'There are %s ids and %s attempts.',
                    coalesce(cardinality(p_ids)::text, 'no'),
                    coalesce(cardinality(p_attempts)::text, 'no')
                ),
                hint = 'Give both as claim() returned them, in the same order.';
    elsif cardinality(p_ids) > 10000 then
        raise exception 'more than 10000 messages in one call'
            using errcode = '22023', detail = format('There are %s.', cardinality(p_ids)), hint = 'Report them in several calls.';
    end if;
    -- A missing error would count as done.
    if cardinality(p_ids) <> any (array[cardinality(p_errors), cardinality(p_retry_after), cardinality(p_responses)]) then
        raise exception 'there must be as many errors, delays and responses as messages'
            using
                errcode = '22023',
                detail = format(
                    'There are %s messages, %s errors, %s delays and %s responses.',
                    cardinality(p_ids),
                    coalesce(cardinality(p_errors)::text, 'no'),
                    coalesce(cardinality(p_retry_after)::text, 'no'),
                    coalesce(cardinality(p_responses)::text, 'no')
                ),
                hint = 'Give them in the order of the ids, null for a message that has none, or leave the whole array out.';
    end if;
    return true;
end
$plpgsql$;

-- Whether each report settled its message. If a message is reported for two attempts, only the report of the later attempt counts.
create or replace function ulak_private.answers(p_ids bigint[], p_attempts integer[], p_settled bigint[])
returns table (id bigint, attempt integer, is_settled boolean)
language sql
immutable
as $sql$
    select
        r.id,
        r.attempt,
        -- Usually all reports settled their messages. This avoids a search for each, which takes 36 ms for 5,000.
        cardinality(p_settled) = cardinality(p_ids)
            or coalesce(r.id = any (p_settled) and r.attempt = max(r.attempt) over (partition by r.id), false)
    from unnest(p_ids, p_attempts) with ordinality r(id, attempt, place)
    order by r.place
$sql$;

create or replace function ulak.heartbeat_many(
    p_worker text,
    p_ids bigint[],
    p_attempts integer[],
    p_lease interval default null,
    p_now timestamptz default clock_timestamp()
)
returns table (id bigint, is_held boolean)
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_held bigint[];
begin
    p_now := ulak_private.clock(p_now);
    perform ulak_private.check_claim(p_worker, 1, p_lease), ulak_private.check_reports(p_ids, p_attempts);
    v_held := ulak_private.heartbeat_many(p_worker, ulak_private.workable_messages(p_ids), p_attempts, ulak_private.exact(p_lease), p_now);
    return query select r.id, r.is_settled from ulak_private.answers(p_ids, p_attempts, v_held) r;
end
$plpgsql$;

comment on function ulak.heartbeat_many(text, bigint[], integer[], interval, timestamptz) is
    'extends many leases, as heartbeat() does; is_held is false for a message whose lease is lost: stop working on it';

create or replace function ulak.complete_many(
    p_worker text,
    p_ids bigint[],
    p_attempts integer[],
    p_responses jsonb[] default null,
    p_now timestamptz default clock_timestamp()
)
returns table (id bigint, is_settled boolean)
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_settled bigint[];
begin
    p_now := ulak_private.clock(p_now);
    v_settled := ulak_private.settle_reports(p_worker, p_ids, p_attempts, null, null, p_responses, p_now);
    return query select r.id, r.is_settled from ulak_private.answers(p_ids, p_attempts, v_settled) r;
end
$plpgsql$;

comment on function ulak.complete_many(text, bigint[], integer[], jsonb[], timestamptz) is
    'reports many messages as done; is_settled is false for a message whose lease is lost: its result does not count';

create or replace function ulak.fail_many(
    p_worker text,
    p_ids bigint[],
    p_attempts integer[],
    p_errors text[],
    p_retry_after interval[] default null,
    p_now timestamptz default clock_timestamp()
)
returns table (id bigint, is_settled boolean)
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_settled bigint[];
begin
    p_now := ulak_private.clock(p_now);
    v_settled := ulak_private.settle_reports(
        p_worker,
        p_ids,
        p_attempts,
        -- A report without a reason is still a failure.
        case
            when p_errors is null then array_fill('no reason given'::text, array[cardinality(p_ids)])
            else array(select coalesce(e.error, 'no reason given') from unnest(p_errors) with ordinality e(error, place) order by e.place)
        end,
        p_retry_after,
        null,
        p_now
    );
    return query select r.id, r.is_settled from ulak_private.answers(p_ids, p_attempts, v_settled) r;
end
$plpgsql$;

comment on function ulak.fail_many(text, bigint[], integer[], text[], interval[], timestamptz) is
    'reports many failures: each message is retried by its endpoint''s policy, or after its p_retry_after; an error that starts with [PERMANENT] '
    'sends it to the dead-letter queue at once. is_settled is false for a message whose lease is lost';

create or replace function ulak.release_many(
    p_worker text,
    p_ids bigint[],
    p_attempts integer[],
    p_delay interval default '0',
    p_now timestamptz default clock_timestamp()
)
returns table (id bigint, is_settled boolean)
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_settled bigint[];
begin
    p_now := ulak_private.clock(p_now);
    perform ulak_private.check_reports(p_ids, p_attempts);
    perform ulak_private.check_interval('p_delay', p_delay, interval '1 day');
    v_settled := ulak_private.release_many(p_worker, ulak_private.workable_messages(p_ids), p_attempts, ulak_private.exact(p_delay), p_now);
    return query select r.id, r.is_settled from ulak_private.answers(p_ids, p_attempts, v_settled) r;
end
$plpgsql$;

comment on function ulak.release_many(text, bigint[], integer[], interval, timestamptz) is
    'returns many messages to the queue unprocessed, without spending a retry; is_settled is false for a message whose lease '
    'is lost';

-- Settles an external worker's reports. A null error means that the message is done.
create or replace function ulak_private.settle_reports(
    p_worker text,
    p_ids bigint[],
    p_attempts integer[],
    p_errors text[],
    p_retry_after interval[],
    p_responses jsonb[],
    p_now timestamptz
)
returns bigint[]
language plpgsql
as $plpgsql$
declare
    -- Not `perform`, which takes ten times as long.
    v_is_valid boolean := ulak_private.check_reports(p_ids, p_attempts, p_errors, p_retry_after, p_responses);
    v_retry_after integer[];
    v_secrets text[];
begin
    if not ulak_private.works_everywhere() then
        p_ids := ulak_private.workable_messages(p_ids);
    end if;
    if p_retry_after is not null then
        perform ulak_private.check_interval('p_retry_after', r, interval '1 day') from unnest(p_retry_after) r where r is not null;
        v_retry_after := array(select ceil(extract(epoch from r))::integer from unnest(p_retry_after) r);
    end if;
    -- A client may pass an error for each message although none has failed.
    if num_nonnulls(variadic p_errors) = 0 then
        p_errors := null;
    elsif p_errors is not null then
        v_secrets := ulak_private.secrets_of(p_ids);
        p_errors := array(
            select case when e.error is not null then ulak_private.reported_error(e.error, v_secrets) end
            from unnest(p_errors) with ordinality e(error, place)
            order by e.place
        );
    end if;
    if p_responses is not null then
        p_responses := array(select ulak_private.kept_response(r) from unnest(p_responses) r);
    end if;
    -- Settling reads attempts by their number.
    if array_ndims(p_attempts) > 1 or array_lower(p_attempts, 1) <> 1 then
        p_attempts := array(select a from unnest(p_attempts) a);
    end if;
    return ulak_private.settle(p_worker, p_ids, p_attempts, p_errors, v_retry_after, p_responses, p_now);
end
$plpgsql$;
