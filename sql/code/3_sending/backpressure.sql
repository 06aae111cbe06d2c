-- Backpressure: a full queue refuses messages; while it isn't full, the check costs a send one comparison.

-- n more messages fit below a limit of L if there is no live message at offset L - n. Such a probe walks over all live messages, so a send
-- doesn't make one each time. A probe asks for a larger reserve r: if there is no live message at offset L - r, the next r ids can't overflow
-- the queue. The last of these ids is kept in the sequence ulak_private.queue_headroom. Sends compare their id with it, and the first one past
-- it probes again. Sessions that probe at the same moment don't see each other's messages, and may overshoot the limit by these.

-- Whether a message with this id fits without another probe. False doesn't mean that the queue is full: ask check_backpressure().
create or replace function ulak_private.has_room(p_last_id bigint)
returns boolean
language sql
as $sql$
    select coalesce(p_last_id <= pg_sequence_last_value('ulak_private.queue_headroom'), false)
$sql$;

-- Raises unless p_count messages, with ids up to p_last_id, fit into the queue.
create or replace function ulak_private.check_backpressure(p_last_id bigint, p_count integer)
returns void
language plpgsql
as $plpgsql$
declare
    v_limit bigint := ulak.setting('max_queue_size')::bigint;
    v_headroom bigint := pg_sequence_last_value('ulak_private.queue_headroom');
    v_clock bigint := extract(epoch from clock_timestamp()) * 1000;
    v_reserve bigint;
begin
    if p_last_id <= v_headroom then
        return;
    end if;
    if v_limit = 0 then
        perform ulak_private.remember_headroom(9223372036854775807, v_limit);
        return;
    end if;
    -- A negative headroom is the time until which the queue counts as full, at most a second ahead. If it is further ahead, the clock has
    -- been set back since.
    if -v_headroom - v_clock between 1 and 10000 then
        perform ulak_private.raise_queue_full(v_limit, p_count);
    end if;

    v_reserve := ulak_private.probe_reserve(v_limit, p_count);
    perform ulak_private.remember_headroom(
        case
            when v_reserve >= p_count then p_last_id + v_reserve - p_count
            -- Senders to a full queue don't probe it again for about ten times as long as the probe takes. For a small queue this isn't
            -- remembered, so senders notice at once when there is room.
            when v_reserve = 0 and v_limit >= 1000 then -(v_clock + least(v_limit / 1000, 1000))
        end,
        v_limit
    );
    if v_reserve < p_count then
        perform ulak_private.raise_queue_full(v_limit, p_count);
    end if;
end
$plpgsql$;

-- How many messages fit below a limit, for a sender that has p_count of them. The limit applies to the whole queue (pending and
-- processing), or to the messages that wait for one endpoint. A result of p_count or more: they fit, and so do this many in all, which is
-- at least half of the free room or half of the limit. A smaller result: they don't fit, and exactly this many would.
--
-- The reserves form a ladder: half of the limit, a quarter ... p_count. Offsets rise from rung to rung, so one cursor serves all probes:
-- each continues where the last one ended, and the whole ladder costs no more than its last probe alone.
create or replace function ulak_private.probe_reserve(p_limit bigint, p_count integer, p_endpoint_id bigint default null)
returns bigint
language plpgsql
set enable_seqscan = off
set jit = off
as $plpgsql$
declare
    v_live refcursor;
    v_reserve bigint := greatest(p_limit / 2, p_count);
    v_passed bigint := 0;
    v_further bigint := 0;
begin
    if p_endpoint_id is null then
        open v_live no scroll for
            select true from ulak_private.deliveries q where q.status = 'pending'
            union all
            select true from ulak_private.deliveries q where q.status = 'processing';
    else
        open v_live no scroll for select true from ulak_private.deliveries q where q.status = 'pending' and q.endpoint_id = p_endpoint_id;
    end if;

    while v_reserve <= p_limit loop
        -- The row at offset p_limit - v_reserve, counted from the rows already passed.
        move relative p_limit - v_reserve + 1 - v_passed in v_live;
        if not found then
            close v_live;
            return v_reserve;
        end if;
        v_passed := p_limit - v_reserve + 1;
        exit when v_reserve = p_count;
        v_reserve := greatest(v_reserve / 2, p_count);
    end loop;

    if v_passed < p_limit then
        move forward p_limit - v_passed in v_live;
        get diagnostics v_further = row_count;
    end if;
    close v_live;
    return p_limit - v_passed - v_further;
end
$plpgsql$;

-- A sequence isn't transactional: it keeps its value even if this transaction fails, and regardless of what others commit. So results from
-- an older snapshot aren't remembered, nor those from a limit that is no longer, or not yet, visible to everybody: the lock is checked
-- before the limit, and a transaction that changes the limit keeps the lock until others see the change.
create or replace function ulak_private.remember_headroom(p_headroom bigint, p_limit bigint)
returns void
language plpgsql
as $plpgsql$
begin
    if p_headroom is null or current_setting('transaction_isolation') <> 'read committed' then
        return;
    end if;
    perform setval('ulak_private.queue_headroom', p_headroom);
    if ulak_private.limit_is_changing() or ulak_private.stored_setting('max_queue_size')::bigint <> p_limit then
        perform setval('ulak_private.queue_headroom', 0);
    end if;
end
$plpgsql$;

-- After a change of the limit, the next send probes again.
create or replace function ulak_private.forget_headroom()
returns void
language plpgsql
as $plpgsql$
begin
    lock table ulak.setting_values in share update exclusive mode;
    perform setval('ulak_private.queue_headroom', 0);
end
$plpgsql$;

-- Whether an open transaction, our own included, has changed the limit. Vacuum takes the same lock, which costs the next send an
-- unnecessary probe.
create or replace function ulak_private.limit_is_changing()
returns boolean
language sql
as $sql$
    select exists (
        select
        from pg_locks l
        where l.locktype = 'relation'
            and l.database = (select d.oid from pg_database d where d.datname = current_database())
            and l.relation = 'ulak.setting_values'::regclass
            and l.mode = 'ShareUpdateExclusiveLock'
            and l.granted
    )
$sql$;

create or replace function ulak_private.raise_queue_full(p_limit bigint, p_count integer)
returns void
language plpgsql
as $plpgsql$
begin
    raise exception 'queue backpressure: % more message% would exceed the limit of %',
        p_count, case when p_count > 1 then 's' else '' end, p_limit
        using errcode = '53400',
            detail = concat_ws(
                ' ', format('max_queue_size is %s.', p_limit), 'Most wait for ' || ulak_private.fullest_endpoints() || '.'
            ),
            hint = 'This is backpressure: try again later, when receivers have caught up. '
                || 'An administrator can see what waits: select * from ulak.get_endpoint_health();';
end
$plpgsql$;

-- The three endpoints with the most waiting messages when maintenance last counted, as text. Null if it hasn't counted yet, or if there are
-- so many endpoints that this would slow down each refused sender.
create or replace function ulak_private.fullest_endpoints()
returns text
language plpgsql
stable
set enable_seqscan = off
set jit = off
as $plpgsql$
begin
    return (
        select string_agg(format('"%s" (%s)', f.name, f.waiting), ', ' order by f.waiting desc, f.name)
        from (
            select e.name, s.waiting
            from (select e.id, e.name from ulak.endpoints e limit 1000) e
            cross join lateral ulak_private.last_sample(e.id, 'infinity') s
            where s.waiting > 0 and (select count(*) from (select from ulak.endpoints e limit 1001) e) <= 1000
            order by s.waiting desc, e.name
            limit 3
        ) f
    );
end
$plpgsql$;
