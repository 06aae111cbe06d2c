-- With "on_dead": "hold" in the config, a dead message holds its ordering key: the messages behind it wait until its letter is redriven or
-- discarded.

-- Such a message isn't archived. It stays in ulak_private.deliveries with status 'held', as the head of its key (5_settling/ordering.sql).
-- It can't be claimed, cancelled or expired. Its letter has is_holding set, and retention doesn't delete it. A redrive makes the same row
-- due again. Discarding the letter archives the row, and the next message becomes the head.

-- The status that a message gets when ulak gives it up.
create or replace function ulak_private.dead_status(p_endpoint_id bigint, p_ordering_key text)
returns text
language sql
stable
as $sql$
    select case
        when p_ordering_key is not null
            and exists (select from ulak.endpoints e where e.id = p_endpoint_id and e.config ->> 'on_dead' = 'hold')
            then 'held'
        else 'failed'
    end
$sql$;

-- Dead messages leave the queue, unless they hold their key.
create or replace function ulak_private.archive_dead(p_ids bigint[], p_now timestamptz)
returns void
language sql
as $sql$
    select ulak_private.archive_rows(
        array(select q.id from ulak_private.deliveries q where q.id = any (p_ids) and q.status is distinct from 'held'), p_now
    )
$sql$;

-- Lets go of the keys that these messages hold. Their letters were just discarded; the caller has locked them.
create or replace function ulak_private.release_held(p_ids bigint[], p_now timestamptz)
returns void
language plpgsql
set enable_seqscan = off
as $plpgsql$
declare
    v_ids bigint[];
begin
    with released as (
        update ulak_private.deliveries q
        set status = 'failed', updated_at = p_now
        where q.id = any (p_ids) and q.status is not distinct from 'held'
        returning q.id
    )
    select array_agg(r.id) into v_ids
    from released r;
    perform ulak_private.end_messages(v_ids, p_now);
end
$plpgsql$;

-- Redrives letters that hold their key: their messages become due again, with a fresh retry budget. attempts is kept, it only rises.
create or replace function ulak_private.redrive_held(p_dlq_ids bigint[], p_rate double precision, p_new_generation bigint, p_now timestamptz)
returns void
language sql
set enable_seqscan = off
as $sql$
    update ulak_private.deliveries q
    set status = 'pending',
        next_retry_at = coalesce(l.due_at, p_now),
        scheduled_at = l.due_at,
        expires_at = null,
        retry_count = 0,
        failed_at = null,
        first_failed_at = null,
        last_error = null,
        response = null,
        generation = coalesce(p_new_generation, q.generation),
        failure_history = ulak_private.with_cycle(d),
        updated_at = p_now
    from (
        select n.dlq_id, p_now + make_interval(secs => (n.place - 1) / p_rate) as due_at
        from unnest(p_dlq_ids) with ordinality n(dlq_id, place)
    ) l
    join ulak_private.letters d on d.id = l.dlq_id
    where q.id = d.original_message_id and q.status is not distinct from 'held'
$sql$;

-- How many messages wait behind this one in its ordering key; 1000 means at least that many.
create or replace function ulak_private.count_behind(p_id bigint, p_endpoint_id bigint, p_ordering_key text)
returns bigint
language sql
stable
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $sql$
    select count(*)
    from (
        select
        from ulak_private.deliveries q
        where q.endpoint_id = p_endpoint_id
            and q.ordering_key = p_ordering_key
            and q.status in ('pending', 'processing', 'held')
            and q.id > p_id
        limit 1000
    ) b
$sql$;

create or replace function ulak_private.waiting_behind(p_messages bigint)
returns text
language sql
immutable
as $sql$
    select case
        when p_messages = 0 then 'no message waits behind it'
        when p_messages = 1 then '1 message waits behind it'
        when p_messages < 1000 then format('%s messages wait behind it', p_messages)
        else '1000 messages or more wait behind it'
    end
$sql$;
