-- Archiving: a message that is finished leaves the queue at once. Its event stays where it is.

-- One statement deletes and inserts, so a message is in exactly one of the two tables at any time, even after a crash. Without p_attempts
-- the messages are finished, and move as they are. With p_attempts they were delivered by p_worker, and become completed; outcomes with an
-- error are skipped, and so are messages that the worker no longer holds. places are the messages' positions in the arrays.
--
-- The spellings `id between x and x` and `status is not distinct from` make sure that the primary key is used, whatever size the planner
-- assumes (sql/README.md, "Rules for plans").
create or replace function ulak_private.archive_rows(
    p_ids bigint[],
    p_now timestamptz,
    p_worker text default null,
    p_attempts integer[] default null,
    p_errors text[] default null,
    p_responses jsonb[] default null,
    out ids bigint[],
    out endpoint_ids bigint[],
    out places bigint[],
    -- Only of messages with an ordering key.
    out ordering_keys text[],
    out ordered_endpoint_ids bigint[],
    -- Endpoints whose row a delivery changes; see success_changes_endpoint().
    out changed_endpoint_ids bigint[]
)
language plpgsql
as $plpgsql$
declare
    v_idempotency_keys text[];
    v_keyed_ids bigint[];
    v_keyed_endpoint_ids bigint[];
    v_since timestamptz;
    v_is_announced boolean;
begin
    with gone as (
        delete from ulak_private.deliveries q
        -- Only one array is unnested, and its number leads to the elements of the others: each array takes 1.5 us a message.
        using unnest(p_ids) with ordinality o(id, place)
        where q.id between o.id and o.id
            and (
                p_attempts is null
                or p_errors[o.place] is null
                and q.attempts = p_attempts[o.place]
                and q.locked_by = p_worker
                and q.status is not distinct from 'processing'
            )
        returning q.*, o.place
    ),
    archived as (
        insert into ulak_private.archived (
            id, endpoint_id, message_id, event_id, event_created_at, made_from, generation, correlation_id, created_at,
            scheduled_at, expires_at, next_retry_at, processing_started_at, first_failed_at, failed_at, attempts, retry_count,
            last_error, failure_history, priority, payload_hash, idempotency_key, ordering_key,
            status, updated_at, completed_at, response, archived_at
        )
        select
            g.id, g.endpoint_id, g.message_id, g.event_id, g.event_created_at, g.made_from, g.generation, g.correlation_id, g.created_at,
            g.scheduled_at, g.expires_at, g.next_retry_at, g.processing_started_at, g.first_failed_at, g.failed_at, g.attempts, g.retry_count,
            g.last_error, g.failure_history, g.priority, g.payload_hash, g.idempotency_key, g.ordering_key,
            case when p_attempts is null then g.status else 'completed' end,
            case when p_attempts is null then g.updated_at else p_now end,
            case when p_attempts is null then g.completed_at else p_now end,
            case when p_attempts is null then g.response else p_responses[g.place] end,
            p_now
        from gone g
    )
    select
        coalesce(array_agg(g.id), '{}'),
        array_agg(g.endpoint_id),
        array_agg(g.place),
        array_agg(g.ordering_key) filter (where g.ordering_key is not null),
        array_agg(g.endpoint_id) filter (where g.ordering_key is not null),
        array_agg(g.idempotency_key) filter (where g.idempotency_key is not null),
        array_agg(g.id) filter (where g.idempotency_key is not null),
        array_agg(g.endpoint_id) filter (where g.idempotency_key is not null),
        min(g.created_at)
    into
        ids, endpoint_ids, places, ordering_keys, ordered_endpoint_ids, v_idempotency_keys, v_keyed_ids, v_keyed_endpoint_ids, v_since
    from gone g;

    if v_idempotency_keys is not null then
        -- The key of a delivered message is kept for archive_after seconds. All other keys become free at once.
        perform ulak_private.free_keys(
            v_idempotency_keys,
            v_keyed_ids,
            v_keyed_endpoint_ids,
            case
                when p_attempts is null then '-infinity'
                else p_now + make_interval(secs => ulak_private.stored_setting('archive_after')::integer)
            end
        );
    end if;
    select bool_or(e.config ? 'announce'), array_agg(e.id) filter (where ulak_private.success_changes_endpoint(e, p_now))
    into v_is_announced, changed_endpoint_ids
    from ulak.endpoints e
    where e.id = any (endpoint_ids);
    if v_is_announced then
        perform ulak_private.announce_outcomes(ids, v_since, p_now);
    end if;
end
$plpgsql$;

-- Archives messages that have just ended, and makes those that waited behind them due. Returns how many were archived.
create or replace function ulak_private.end_messages(p_ids bigint[], p_now timestamptz)
returns integer
language plpgsql
as $plpgsql$
declare
    v_gone record := ulak_private.archive_rows(p_ids, p_now);
begin
    if v_gone.ordering_keys is not null then
        perform ulak_private.unpark_heads(v_gone.ordered_endpoint_ids, v_gone.ordering_keys, p_now);
    end if;
    return cardinality(v_gone.ids);
end
$plpgsql$;

create or replace function ulak_private.free_keys(p_keys text[], p_ids bigint[], p_endpoint_ids bigint[], p_at timestamptz)
returns void
language plpgsql
as $plpgsql$
begin
    update ulak_private.idempotency_keys k
    set free_at = p_at
    from unnest(p_keys, p_ids, p_endpoint_ids) g(idempotency_key, id, endpoint_id)
    where k.endpoint_id = g.endpoint_id
        and k.idempotency_key = g.idempotency_key collate "C"
        and k.message_id = g.id;
end
$plpgsql$;

-- Deletes the keys of messages that were delivered long enough ago, or that ended otherwise. A key that a sender is just taking is skipped.
create or replace function ulak_private.forget_idempotency_keys(p_before timestamptz, p_limit integer)
returns integer
language plpgsql
set enable_seqscan = off
as $plpgsql$
declare
    v_count integer;
begin
    delete from ulak_private.idempotency_keys k
    where k.ctid = any (array(
        select f.ctid
        from ulak_private.idempotency_keys f
        where f.free_at <= p_before
        order by f.free_at
        limit p_limit
        for update skip locked
    ));
    get diagnostics v_count = row_count;
    return v_count;
end
$plpgsql$;

create or replace function ulak.archive_completed_messages(
    p_older_than_seconds integer default 3600,
    p_batch_size integer default 1000,
    p_now timestamptz default clock_timestamp()
)
returns integer
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_after integer := ulak.setting('archive_after')::integer;
    v_age integer := coalesce(p_older_than_seconds, v_after);
begin
    p_now := ulak_private.clock(p_now);
    perform ulak_private.check_integer('p_older_than_seconds', v_age, 0);
    perform ulak_private.check_integer('p_batch_size', p_batch_size, 1);
    perform ulak_private.forget_idempotency_keys(p_now + make_interval(secs => v_after - v_age), p_batch_size);
    return 0;
end
$plpgsql$;

comment on function ulak.archive_completed_messages(integer, integer, timestamptz) is
    'frees up to p_batch_size idempotency keys of messages that were delivered p_older_than_seconds ago (null: setting archive_after); returns 0, '
    'because a message that is finished is in the archive at once';
