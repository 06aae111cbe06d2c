-- purge(), retry_now() and discard(): many messages at once, chosen by filters (bulk.sql).

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
        (select to_json(g) from (select p_endpoint, p_since, p_until, p_filter, p_priority, p_ids, p_limit, p_by) g),
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
        (select to_json(g) from (select p_endpoint, p_since, p_until, p_error_like, p_filter, p_ids, p_limit, p_rate, p_by) g),
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
        (select to_json(g) from (select p_endpoint, p_since, p_until, p_error_like, p_filter, p_ids, p_limit, p_by) g),
        p_dry_run,
        p_now
    ) b
$sql$;

comment on function ulak.discard(
    text, timestamptz, timestamptz, text, jsonpath, integer, boolean, text, bigint[], timestamptz
) is
    'gives up the dead letters that match all filters, which are those of redrive(), and at least one; they are marked as discarded and kept '
    'until their retention ends. With p_dry_run it only counts them, and shows a sample and the command to run';

-- Skips messages that a worker or an application has locked.
create or replace function ulak_private.lock_pending(p_ids bigint[])
returns bigint[]
language sql
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

-- The guarded update is the lock: a letter is redriven or discarded once, never both.
create or replace function ulak_private.discard_rows(p_dlq_ids bigint[], p_by text, p_now timestamptz)
returns integer
language plpgsql
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
