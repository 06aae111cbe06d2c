-- Every lock that ulak takes, and the order in which they are taken. tests/conventions/test_locks.py keeps both lists true.
--
-- Named locks are rows of ulak.locks, held until the transaction ends:
--
--     name            who holds it
--     configs         whoever changes a config or a secret: a config is valid for the secrets that it names
--     schedule        start() and stop(), schedule() and unschedule(), and for an instant a worker that waits until they are done
--     maintenance     one batch of maintenance; who finds it taken leaves
--     sweep           one worker that takes back what others left; who finds it taken leaves
--
-- Locks that a function takes by name of their mode. "Waits": for whoever has the row or the table. "Skips": what is locked is
-- left to who has it, so nobody waits.
--
--     function                        what it locks, and how
--     _lock                           a named lock; waits
--     _try_lock                       a named lock; skips
--     _forget_headroom                table ulak.setting_values (share update exclusive), with a change of max_queue_size; waits. Senders see
--                                     it in pg_locks, and remember nothing that follows from the old limit
--     _lock_ordering_key              the row of an ordering key: senders of one key, until they commit; waits
--     _forget_idempotency_keys        rows of keys that are free again, to delete them; skips
--     _forget_ordering_keys           rows of keys that nobody uses any more, to delete them; skips
--     _lock_due                       messages that a claim takes; skips
--     reschedule                      a message that waits, to give it another time; waits for a claim or another change of it
--     _archive_finished               messages that 0.2.0 has finished, to archive them; skips
--     _lock_pending                   messages that wait, to purge or retry them; skips
--     _park                           heads of ordering keys, shared, while others are parked behind them; skips
--     _bring_back                     the row of ulak.sweep_state, and messages that are dated ahead; skips
--     _unpark_orphans                 the row of ulak.sweep_state; skips
--     _unpark_heads                   parked heads of ordering keys; skips
--     _fail_rows                      messages that failed, to decide about their retries; waits for a heartbeat at most
--     recover_stale_messages          messages whose lease ran out; skips
--     _recover_from                   messages of workers that died; skips
--     mark_expired_messages           messages past their expires_at; skips
--     _bury_orphans                   messages whose endpoint was dropped; skips
--     _redrive_rows                   dead letters; waits: of two operators, the second finds them redriven
--     _replay                         dead letters of archived messages; waits: as _redrive_rows
--     _discard_rows                   dead letters; waits: of two operators, the second finds them discarded
--     _archive_batch                  finished messages; skips
--     _cleanup                        rows past their retention; skips
--     drop_event_type                 the event type's row; waits for subscribe()
--     _lock_event_type                the event type's row: subscribe(), grants; waits for others of it
--     alter_subscription              the same
--     _keep_endpoint                  an endpoint's row, so that it isn't dropped meanwhile (key share); waits for drop_endpoint() only
--     _lock_endpoint                  an endpoint's row: circuit, limits, grants, switching, dropping, rotating; waits
--     _renew_configs                  endpoints that name a secret, in the order of their ids; waits
--     _endpoints_in_turn              endpoints, for a claim under a limit; skips
--     _note_success                   endpoints whose last success is old; skips
--     _close_dead_logs                endpoints whose dead letters were left out of the server's log; skips
--     _log_overflow                   rows of ulak.endpoint_headroom of endpoints that are full, once a minute; skips
--     _remember_endpoint_headroom     an endpoint's row of ulak.endpoint_headroom; skips
--     _wait_for_breaker_lock          the advisory lock of an endpoint's breaker, before the endpoint's row; waits 0.1 s, once in a transaction
--     _show_breaker_lock              the same; skips
--     _make_partition                 tables ulak._archived and ulak._events (share update exclusive; access exclusive if their default partitions have
--                                     rows of the month) and those partitions (share row exclusive); waits half a second
--     _drop_archive_partition         tables ulak._archived and ulak._events (access exclusive); waits half a second
--     _follow_cluster                 table ulak.cluster_identity (share row exclusive), by the first maintenance after pg_upgrade; waits
--     adopt                           table ulak.cluster_identity (share row exclusive); waits for another adopt()
--     _wait_for_workers_to_leave      table ulak.schedule (exclusive), in stop() where background workers run the jobs: workers see it in
--                                     pg_locks, and leave before their jobs are unscheduled; waits
--
-- An update locks its rows too: messages by settling, heartbeats and the turn in light traffic, each the worker's own; ulak.workers by
-- the session that has the number; ulak.endpoints by alter_endpoint() and whoever called _lock_endpoint() before.
--
-- The order: a named lock, then ordering keys by endpoint and key, then messages and dead letters, then endpoints by ascending id, each
-- the advisory lock of its breaker before its row. Who
-- has a later one never waits for an earlier one. A claim never waits at all. The row of an event type comes before endpoints, too:
-- subscribe() takes both.

insert into ulak.locks (name)
values ('configs'), ('schedule'), ('maintenance'), ('sweep')
on conflict (name) do nothing;

-- Waits until nobody else holds it.
create or replace function ulak._lock(p_name text)
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    perform from ulak.locks l where l.name = p_name for update;
    if not found then
        raise exception 'there is no lock "%"', p_name using errcode = '42704';
    end if;
end
$plpgsql$;

-- False if somebody else holds it.
create or replace function ulak._try_lock(p_name text)
returns boolean
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    perform from ulak.locks l where l.name = p_name for update skip locked;
    return found;
end
$plpgsql$;
