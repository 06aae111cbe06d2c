-- Archiving: finished messages leave the queue, oldest first.

-- One statement deletes and inserts, so a message is in one of both tables at any time and after any crash. Rows are
-- found in index order and deleted by their address: no plan that depends on statistics. p_after is where the batch
-- before has ended, so that a batch doesn't walk over the dead rows of all earlier ones while vacuum is held back.
-- A batch has p_limit rows, and about p_bytes if that is given: 2,000 messages of 100 kB would be one transaction of 200 MB.
-- What they weigh is asked of the rows alone, which know it, and not of the values stored outside of them.
create or replace function ulak._archive_batch(
    p_before timestamptz,
    p_after timestamptz,
    p_limit integer,
    p_bytes bigint,
    p_now timestamptz,
    out moved integer,
    out reached timestamptz,
    out more boolean
)
language sql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set enable_sort = off
set jit = off
as $sql$
    with fitting as materialized (
        select count(*) filter (where w.bytes_before < p_bytes) as rows, count(*) as seen
        from (
            select sum(b.bytes) over (order by q.updated_at rows unbounded preceding) - b.bytes as bytes_before
            from ulak.queue q
            cross join lateral (
                select
                    pg_column_size(q.payload)
                    + coalesce(pg_column_size(q.response), 0)
                    + coalesce(pg_column_size(q.failure_history), 0) as bytes
            ) b
            where q.status in ('completed', 'failed', 'expired')
                and q.updated_at >= p_after
                and q.updated_at < p_before
            order by q.updated_at
            limit p_limit
        ) w
    ),
    finished as (
        delete from ulak.queue d
        where d.ctid = any (array(
            select q.ctid
            from ulak.queue q
            where q.status in ('completed', 'failed', 'expired')
                and q.updated_at >= p_after
                and q.updated_at < p_before
            order by q.updated_at
            limit case when p_bytes is null then p_limit else (select f.rows from fitting f) end
            for update skip locked
        ))
        returning d.*
    ),
    archived as (
        insert into ulak.archive (
            id,
            endpoint_id,
            message_id,
            next_retry_at,
            created_at,
            updated_at,
            lease_until,
            processing_started_at,
            completed_at,
            failed_at,
            first_failed_at,
            scheduled_at,
            expires_at,
            correlation_id,
            generation,
            attempts,
            retry_count,
            priority,
            status,
            payload,
            locked_by,
            last_error,
            idempotency_key,
            payload_hash,
            ordering_key,
            headers,
            metadata,
            response,
            failure_history,
            archived_at
        )
        select
            f.id,
            f.endpoint_id,
            f.message_id,
            f.next_retry_at,
            f.created_at,
            f.updated_at,
            f.lease_until,
            f.processing_started_at,
            f.completed_at,
            f.failed_at,
            f.first_failed_at,
            f.scheduled_at,
            f.expires_at,
            f.correlation_id,
            f.generation,
            f.attempts,
            f.retry_count,
            f.priority,
            f.status,
            f.payload,
            f.locked_by,
            f.last_error,
            f.idempotency_key,
            f.payload_hash,
            f.ordering_key,
            f.headers,
            f.metadata,
            f.response,
            f.failure_history,
            p_now
        from finished f
        returning archive.updated_at
    )
    select
        count(*)::integer,
        max(a.updated_at),
        count(*) > 0
        and case
            when p_bytes is null then count(*) = p_limit
            else (select f.rows < f.seen or f.seen = p_limit from fitting f)
        end
    from archived a
$sql$;

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
    v_age integer := coalesce(p_older_than_seconds, ulak.setting('archive_after')::integer);
begin
    p_now := ulak._clock(p_now);
    perform ulak._check_integer('p_older_than_seconds', v_age, 0);
    perform ulak._check_integer('p_batch_size', p_batch_size, 1);
    return b.moved
    from ulak._archive_batch(p_now - make_interval(secs => v_age), '-infinity', p_batch_size, null, p_now) b;
end
$plpgsql$;

comment on function ulak.archive_completed_messages(integer, integer, timestamptz) is
    'moves up to p_batch_size messages that finished p_older_than_seconds ago (null: setting archive_after) to ulak.archive; returns how many';
