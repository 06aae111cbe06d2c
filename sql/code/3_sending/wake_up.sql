-- Waking a worker: a sender notifies it if it sleeps. NOTIFY is expensive, since transactions that notify commit one at a time, under a
-- lock of the whole server. So only the first few senders after a worker's request notify, and in a busy queue none do. The sequence
-- ulak_private.bell holds the id up to which senders notify.

-- Whether a worker has asked to be notified of this id.
create or replace function ulak_private.wants_wake_up(p_id bigint)
returns boolean
language sql
as $sql$
    select p_id <= pg_sequence_last_value('ulak_private.bell')
$sql$;

-- The only NOTIFY of ulak, delivered when the transaction commits. Channels have no rights: anybody may listen, so it says nothing but that
-- there is something to do, and anybody may notify, so workers only look again. Does nothing if the server allows prepared transactions,
-- since a transaction that has notified can't be prepared, nor if another application fills up the notification queue: that must not stop
-- senders or settling.
create or replace function ulak_private.wake_workers()
returns void
language plpgsql
as $plpgsql$
begin
    if current_setting('max_prepared_transactions')::integer = 0 and pg_notification_queue_usage() < 0.5 then
        perform pg_notify('ulak_bell', '');
    end if;
end
$plpgsql$;

-- From now on the senders of the next 16 ids notify. The last id is read after the request was made: a sender either has drawn its id by
-- now, or will see the request.
create or replace function ulak_private.request_wake_ups()
returns bigint
language plpgsql
as $plpgsql$
declare
    v_sequence constant regclass := 'ulak.queue_id_seq';
begin
    perform setval('ulak_private.bell', coalesce(pg_sequence_last_value(v_sequence), 0) + 16);
    return coalesce(pg_sequence_last_value(v_sequence), 0);
end
$plpgsql$;

-- Subscribes this session to notifications, from its next commit on. False if senders don't notify, if messages are held until adopt(), and
-- in background workers, which can't LISTEN.
create or replace function ulak_private.listen()
returns boolean
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    if current_setting('max_prepared_transactions')::integer > 0
        or not ulak_private.is_adopted()
        or exists (select from pg_stat_activity a where a.pid = pg_backend_pid() and a.backend_type <> 'client backend')
    then
        return false;
    end if;
    listen ulak_bell;
    return true;
end
$plpgsql$;

-- External workers wait on their own: a function that waits holds a snapshot, which holds back vacuum. While nothing is sent, a consumer sleeps
-- for a second at most and is woken by the next sender, as workers are. While others send, the consumer that last found a message looks again
-- after 3 ms, and all others after 0.1 s: senders of a busy queue notify nobody, and a message whose id was drawn before the consumer's
-- request, and that commits after it, is found by the next claim. So many consumers cost little more than one, whose caches stay warm.
create or replace function ulak.listen()
returns double precision
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_sent bigint := coalesce(pg_sequence_last_value('ulak.queue_id_seq'::regclass), 0);
    v_now bigint := extract(epoch from clock_timestamp()) * 1000000;
    -- The session's memory: the last id that was sent, and when it first saw that id.
    v_memory bigint[] := nullif(current_setting('ulak_private.waiting', true), '');
begin
    if v_memory[1] = v_sent and v_now - v_memory[2] >= 100000 and current_setting('max_prepared_transactions')::integer = 0 then
        listen ulak_bell;
        -- A sender that has drawn an id in the meantime might not notify.
        return case when ulak_private.request_wake_ups() = v_sent then 1 else 0 end;
    elsif v_memory[1] is distinct from v_sent then
        perform set_config('ulak_private.waiting', array[v_sent, v_now]::text, false);
    end if;
    return case when pg_sequence_last_value('ulak_private.last_finder'::regclass) = pg_backend_pid() then 0.003 else 0.1 end;
end
$plpgsql$;

comment on function ulak.listen() is
    'for an external worker that found nothing to do: PostgreSQL notifies this session on the channel ulak_bell when '
    'something is sent. Returns how many seconds to wait for that before the next claim. Needs a session of its own '
    '(PgBouncer: session mode); wait in the client, outside of a transaction';
