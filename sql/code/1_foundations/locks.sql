-- Every lock that ulak takes, and the order in which they are taken. tests/conventions/test_locks.py keeps both lists true.
--
-- Named locks are rows of ulak_private.locks, held until the transaction ends:
--
--     name            who holds it
--     configs         changes of configs, secrets and subscriptions: a config is valid for the secrets that it names and for the bodies of its
--                     subscriptions; apply()
--     schedule        start() and stop(), schedule() and unschedule(), apply() of a document with schedules, and for an instant a worker that waits until they are done
--     maintenance     one batch of maintenance; a second run leaves
--     sweep           one worker that recovers what others left; a second one leaves
--
-- The locks of each function. "Waits": until the row or the table is free. "Skips": leaves a locked row to the session that holds it,
-- and doesn't wait.
--
--     function                        what it locks, and how
--     lock                            a named lock; waits
--     try_lock                        a named lock; skips
--     forget_headroom                 table ulak.setting_values (share update exclusive), with a change of max_queue_size; waits. Senders see
--                                     it in pg_locks, and remember nothing that follows from the old limit
--     lock_ordering_key               the row of an ordering key: senders of one key, until they commit; waits
--     forget_idempotency_keys         rows of keys that are free again, to delete them; skips
--     forget_ordering_keys            rows of keys that nobody uses any more, to delete them; skips
--     new_messages                    messages that were just sent; skips
--     due_messages                    messages that a claim takes; skips
--     reschedule                      a message that waits, to give it another time; waits for a claim or another change of it
--     take_place                      a message that waits, to replace or cancel it; waits for a claim or another change of it
--     lock_pending                    messages that wait, to purge or retry them; skips
--     park                            heads of ordering keys, shared, while others are parked behind them; skips
--     bring_back                      the row of ulak_private.sweep_state, and messages that are dated ahead; skips
--     unpark_orphans                  the row of ulak_private.sweep_state; skips
--     unpark_heads                    parked heads of ordering keys; skips
--     decide_failures                 messages that failed, to decide about their retries; waits for a heartbeat at most
--     recover_stale_messages          messages whose lease ran out; skips
--     take_over                       messages whose lease of an external worker ran out; skips
--     recover_from                    messages of workers that died; skips
--     mark_expired_messages           messages past their expires_at; skips
--     bury_orphans                    messages whose endpoint was dropped; skips
--     bury_abandoned                  messages that wait for an endpoint that disable_after has disabled; skips
--     redrive_rows                    dead letters; waits: of two operators, the second finds them redriven
--     replay                          dead letters of archived messages; waits: as redrive_rows
--     discard_rows                    dead letters; waits: of two operators, the second finds them discarded
--     cleanup                         rows past their retention; skips
--     drop_event_type                 the event type's row; waits for subscribe()
--     lock_event_type                 the event type's row: subscribe(), watch(), grants; waits for others of it
--     alter_subscription              the same
--     keep_endpoint                   an endpoint's row, so that it isn't dropped meanwhile (key share); waits for drop_endpoint() only
--     lock_endpoint                   an endpoint's row: circuit, limits, grants, switching, dropping, rotating; waits
--     renew_configs                   endpoints that name a secret, in the order of their ids; waits
--     admit_limited                   an endpoint, for a claim under a limit; skips
--     note_success                    endpoints whose last success is old; skips
--     remember_endpoint_headroom      an endpoint's row of ulak_private.endpoint_headroom; skips
--     wait_for_breaker_lock           the advisory lock of an endpoint's breaker, before the endpoint's row; waits 0.1 s, once in a transaction
--     try_breaker_lock                the same; skips
--     make_partition                  tables ulak_private.archived and ulak_private.events (share update exclusive; access exclusive if their default partitions have
--                                     rows of the month) and those partitions (share row exclusive); waits half a second
--     drop_archive_partition          tables ulak_private.archived and ulak_private.events (access exclusive); waits half a second
--     follow_cluster                  table ulak_private.cluster_identity (share row exclusive), by the first maintenance after pg_upgrade; waits
--     adopt                           table ulak_private.cluster_identity (share row exclusive); waits for another adopt()
--     wait_for_workers_to_leave       table ulak_private.schedule (exclusive), in stop() where background workers run the jobs: workers see it in
--                                     pg_locks, and leave before their jobs are unscheduled; waits
--
-- An update locks its rows too: messages by settling and heartbeats, each the worker's own; ulak.workers by
-- the session that has the number; ulak.endpoints by alter_endpoint() and every caller of lock_endpoint().
--
-- The order: a named lock, then ordering keys by endpoint and key, then messages and dead letters, then endpoints by ascending id, each
-- the advisory lock of its breaker before its row. A session that holds a later one never waits for an earlier one. The row of an event type
-- comes before endpoints, too: subscribe() takes both.
--
-- A claim goes the other way: it takes the endpoint's row, if that is free, and then tries the advisory lock. That can't deadlock, because a
-- claim waits for nothing: it skips a row that is locked, and goes on without an advisory lock that isn't free. So a settle that holds the
-- advisory lock and waits for the row waits for a session that doesn't wait. A claim is the last step of its transaction (worker_turn(),
-- work()): nothing that waits comes after it. An application can break this rule: if one transaction claims from endpoint A and then
-- settles for B, and another one claims from B and then settles for A, PostgreSQL may end one of them as a deadlock (40P01).

insert into ulak_private.locks (name)
values ('configs'), ('schedule'), ('maintenance'), ('sweep')
on conflict (name) do nothing;

-- Waits until no other session holds it.
create or replace function ulak_private.lock(p_name text)
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    perform from ulak_private.locks l where l.name = p_name for update;
    if not found then
        raise exception 'there is no lock "%"', p_name using errcode = '42704';
    end if;
end
$plpgsql$;

-- False if another session holds it.
create or replace function ulak_private.try_lock(p_name text)
returns boolean
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    perform from ulak_private.locks l where l.name = p_name for update skip locked;
    return found;
end
$plpgsql$;
