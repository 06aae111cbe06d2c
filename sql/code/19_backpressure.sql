-- Backpressure: a queue that is full refuses messages, and a queue that isn't costs a send one comparison.

-- Counting the queue takes time in proportion to its size. So a count is turned into a promise: with c live messages and
-- a limit of L, the next L - c ids can't overflow the queue whatever happens meanwhile. Sends compare their id with the
-- end of that promise (ulak.queue_headroom) and come here only past it.
create or replace function ulak._require_room(p_last_id bigint, p_count integer)
returns boolean
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_limit bigint := ulak.setting('max_queue_size')::bigint;
    -- An administrator's own SET holds for that session, so its verdicts aren't for others to remember.
    v_shared boolean := v_limit = ulak._stored_setting('max_queue_size')::bigint;
    v_headroom bigint := (select h.last_value from ulak.queue_headroom h);
    v_clock bigint := extract(epoch from clock_timestamp()) * 1000;
    v_live bigint;
begin
    if v_limit = 0 then
        if v_shared then
            perform setval('ulak.queue_headroom', 9223372036854775807);
        end if;
        return true;
    end if;
    if v_shared and p_last_id <= v_headroom then
        return true;
    end if;
    if v_shared and v_clock < -v_headroom then
        perform ulak._raise_queue_full(v_limit, p_count);
    end if;

    v_live := ulak._count_live(v_limit);
    if v_live + p_count > v_limit then
        -- Remembered for a second, so that many senders at a full queue don't all count it.
        if v_shared and v_live >= v_limit then
            perform setval('ulak.queue_headroom', -(v_clock + 1000));
        end if;
        perform ulak._raise_queue_full(v_limit, p_count);
    end if;
    -- An old snapshot's count misses messages that have ids below ours.
    if v_shared and current_setting('transaction_isolation') = 'read committed' then
        perform setval('ulak.queue_headroom', p_last_id + v_limit - v_live - p_count);
    end if;
    return true;
end
$plpgsql$;

-- Live messages, counted up to a limit, in index order of what is live: completed rows don't cost.
create or replace function ulak._count_live(p_at_most bigint)
returns bigint
language sql
stable
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
as $sql$
    select
        (select count(*) from (select from ulak.queue q where q.status = 'pending' limit p_at_most) p)
        + (select count(*) from (select from ulak.queue q where q.status = 'processing' limit p_at_most) p)
$sql$;

create or replace function ulak._raise_queue_full(p_limit bigint, p_count integer)
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    raise exception 'the queue is full'
        using errcode = '53400',
            detail = format('%s more would exceed max_queue_size, which is %s.', p_count, p_limit),
            hint = 'Try again later. An administrator can see what waits: select * from ulak.get_endpoint_health();';
end
$plpgsql$;

-- After a change of the limit, the next send counts again.
create or replace function ulak._forget_headroom()
returns void
language sql
security definer
set search_path = pg_catalog, pg_temp
as $sql$
    select setval('ulak.queue_headroom', 0)
$sql$;
