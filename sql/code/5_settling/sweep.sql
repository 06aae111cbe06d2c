-- The sweep: every ten seconds one worker looks for messages that a crash, a rollback or a skipped lock has left behind.

insert into ulak_private.sweep_state default values
on conflict (is_only) do nothing;

-- All workers and nodes call this, and one at a time does the work.
create or replace function ulak_private.sweep()
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    if ulak_private.try_lock('sweep') then
        perform ulak_private.bring_back(clock_timestamp());
        perform ulak_private.recover_from(array_agg(w.name), clock_timestamp())
        from ulak.workers w
        where ulak_private.is_dead(w)
        having count(*) > 0;
        perform ulak.recover_stale_messages(), ulak.mark_expired_messages(), ulak_private.unpark_orphans();
        perform ulak_private.forget_nodes();
    end if;
end
$plpgsql$;

-- After the clock was set back, messages wait for times from a clock that was ahead. updated_at tells when a message's times were
-- written, so they are moved back by as much as updated_at is ahead: retries wait, and leases last, as long as originally intended.
-- Times that the sender asked for (scheduled_at, expires_at) stay.
--
-- One call checks p_most messages, newest first, and returns whether there are more. It checks none unless the latest time that a sweep
-- has seen, or the time of the newest messages, is ahead. Transactions that began before the clock was set back may commit later, so the
-- checks start over until the clock has caught up, but for no longer than an hour.
create or replace function ulak_private.bring_back(p_now timestamptz, p_most integer default 10000, out messages bigint, out more boolean)
language plpgsql
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
as $plpgsql$
declare
    v_state ulak_private.sweep_state;
    v_latest_at timestamptz;
    v_first_id bigint;
begin
    messages := 0;
    more := false;
    select s.* into v_state
    from ulak_private.sweep_state s
    for update skip locked;
    if not found then
        return;
    end if;
    v_latest_at := greatest(
        v_state.latest_at,
        (select max(n.created_at) from (select q.created_at from ulak_private.deliveries q order by q.id desc limit 10) n)
    );
    if not coalesce(ulak_private.is_ahead(v_latest_at, p_now), false) or v_state.set_back_at <= p_now - interval '1 hour' then
        update ulak_private.sweep_state s
        set latest_at = p_now, set_back_at = null, set_back_by = null, next_id = null;
        return;
    end if;
    if v_state.set_back_at is null or ulak_private.is_ahead(v_state.set_back_at, p_now) then
        v_state.set_back_at := p_now;
        v_state.set_back_by := v_latest_at - p_now;
        insert into ulak.event_log (event, detail, created_at)
        values ('clock.set_back', jsonb_build_object('seconds', round(extract(epoch from v_state.set_back_by), 3)), ulak_private.log_time(p_now));
        perform ulak_private.warn(format('ulak: the clock was set back by %s: messages with times in the future are corrected', v_state.set_back_by));
    end if;

    with looked as materialized (
        select q.id, greatest(q.updated_at, q.created_at) as written_at
        from ulak_private.deliveries q
        where q.id < coalesce(v_state.next_id, 9223372036854775807)
        order by q.id desc
        limit p_most
    ),
    held as materialized (
        select q.id
        from looked l
        join ulak_private.deliveries q on q.id between l.id and l.id
        where ulak_private.is_ahead(l.written_at, p_now)
        for update of q skip locked
    ),
    moved as (
        update ulak_private.deliveries q
        set next_retry_at = greatest(q.scheduled_at, q.next_retry_at - (greatest(q.updated_at, q.created_at) - p_now)),
            lease_until = q.lease_until - (greatest(q.updated_at, q.created_at) - p_now),
            created_at = least(q.created_at, p_now),
            -- The event keeps its time, by which it is looked up.
            event_created_at = coalesce(q.event_created_at, q.created_at),
            updated_at = p_now
        from held h
        where q.id between h.id and h.id and ulak_private.is_ahead(greatest(q.updated_at, q.created_at), p_now)
        returning q.id
    )
    select (select count(*) from moved), case when count(*) = p_most then min(l.id) end into messages, v_first_id
    from looked l;
    more := v_first_id is not null;
    update ulak_private.sweep_state s
    set latest_at = v_latest_at, set_back_at = v_state.set_back_at, set_back_by = v_state.set_back_by, next_id = v_first_id;
end
$plpgsql$;
