-- Backpressure of one endpoint: a receiver that is down must not fill the queue for the others.

-- As for the whole queue (3_sending/backpressure.sql), a probe's reserve is a promise: the next ids, as many as the reserve, can't exceed
-- the limit, whichever endpoints they are for. Sends compare their id with the last id of that promise.

create or replace function ulak_private.max_pending(p_config jsonb)
returns integer
language sql
stable
as $sql$
    select coalesce((p_config -> 'max_pending')::integer, nullif(ulak_private.stored_setting('max_pending')::integer, 0))
$sql$;

-- Called after a change of the setting.
create or replace function ulak_private.apply_max_pending()
returns void
language plpgsql
as $plpgsql$
begin
    update ulak.endpoints e
    set max_pending = ulak_private.max_pending(e.config)
    where e.max_pending is distinct from ulak_private.max_pending(e.config);
    perform ulak_private.forget_endpoint_headroom(array(select e.id from ulak.endpoints e where e.max_pending is not null));
end
$plpgsql$;

create or replace function ulak_private.forget_endpoint_headroom(p_endpoint_ids bigint[])
returns void
language sql
as $sql$
    insert into ulak_private.endpoint_headroom (endpoint_id)
    select n.id
    from unnest(p_endpoint_ids) n(id)
    order by n.id
    on conflict (endpoint_id) do update set safe_to = 0
$sql$;

-- How many of p_count new messages, with ids up to p_last_id, fit behind those that wait for the endpoint. If not all of them fit, the
-- endpoint's config decides: the send fails, or the messages that don't fit become dead letters.
create or replace function ulak_private.pending_room(p_endpoint_id bigint, p_last_id bigint, p_count integer)
returns integer
language plpgsql
as $plpgsql$
declare
    v_endpoint record;
    v_room bigint;
begin
    if p_last_id <= (select h.safe_to from ulak_private.endpoint_headroom h where h.endpoint_id = p_endpoint_id) then
        return p_count;
    end if;
    select e.name, e.max_pending, e.config ->> 'when_full' as when_full into v_endpoint
    from ulak.endpoints e
    where e.id = p_endpoint_id;
    -- An administrator has lifted the limit since the sender read it.
    if v_endpoint.max_pending is null then
        return p_count;
    end if;
    v_room := ulak_private.probe_reserve(v_endpoint.max_pending, p_count, p_endpoint_id);
    if v_room >= p_count then
        perform ulak_private.remember_endpoint_headroom(p_endpoint_id, p_last_id + v_room - p_count);
    elsif v_endpoint.when_full is distinct from 'dead_letter' then
        raise exception 'endpoint "%" is full', v_endpoint.name
            using
                errcode = '53400',
                detail = format(
                    '%s more would exceed its max_pending, which is %s; %s wait for it.',
                    p_count,
                    v_endpoint.max_pending,
                    v_endpoint.max_pending - v_room
                ),
                hint = 'Try again later. An administrator can turn messages beyond the limit into dead letters: "when_full": "dead_letter".';
    end if;
    return least(v_room, p_count);
end
$plpgsql$;

-- The new messages that no longer fit, per full endpoint: the last ones.
create or replace function ulak_private.overflow(p_ids bigint[], p_endpoint_ids bigint[])
returns bigint[]
language sql
as $sql$
    select array(
        select m.id
        from (
            select m.endpoint_id, array_agg(m.id order by m.id) as ids
            from unnest(p_ids, p_endpoint_ids) m(id, endpoint_id)
            join ulak.endpoints e on e.id = m.endpoint_id and e.max_pending is not null
            group by m.endpoint_id
        ) f
        cross join lateral unnest(
            f.ids[ulak_private.pending_room(f.endpoint_id, p_ids[cardinality(p_ids)], cardinality(f.ids)) + 1:]
        ) m(id)
    )
$sql$;

-- No session waits here: if the row is locked, it is skipped, and the next send probes again. A result from an older snapshot
-- isn't remembered.
create or replace function ulak_private.remember_endpoint_headroom(p_endpoint_id bigint, p_safe_to bigint)
returns void
language sql
as $sql$
    update ulak_private.endpoint_headroom h
    set safe_to = p_safe_to
    from (
        select r.endpoint_id
        from ulak_private.endpoint_headroom r
        where r.endpoint_id = p_endpoint_id and current_setting('transaction_isolation') = 'read committed'
        for no key update skip locked
    ) r
    where h.endpoint_id = r.endpoint_id
$sql$;

-- Makes dead letters of messages that were queued as failed because their endpoint is full.
create or replace function ulak_private.bury_overflow(p_ids bigint[])
returns void
language plpgsql
as $plpgsql$
begin
    update ulak_private.deliveries q
    set status = ulak_private.dead_status(q.endpoint_id, q.ordering_key),
        failed_at = now(),
        first_failed_at = now(),
        last_error = format('[PERMANENT] endpoint "%s" is full: its max_pending is %s', e.name, e.max_pending)
    from ulak.endpoints e
    where q.id = any (p_ids) and e.id = q.endpoint_id;
    perform ulak_private.bury(p_ids, now());
    perform ulak_private.archive_dead(p_ids, now());
end
$plpgsql$;
