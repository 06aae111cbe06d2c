-- The bell: who sends while the worker sleeps wakes it. NOTIFY has its price, one commit at a time through a lock of the whole
-- database: so only the first few after the worker has fallen asleep pay it, and in a busy queue nobody does.

-- Whether a worker sleeps that hasn't heard of this id.
create or replace function ulak._is_awaited(p_id bigint)
returns boolean
language sql
as $sql$
    select p_id <= pg_sequence_last_value('ulak.bell')
$sql$;

-- Every NOTIFY of ulak, heard when the transaction commits. A notification queue that fills up is somebody else's problem,
-- which isn't to become the problem of whoever sends or settles.
create or replace function ulak._notify(p_channel text, p_payload text)
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    if pg_notification_queue_usage() < 0.5 then
        perform pg_notify(p_channel, p_payload);
    end if;
end
$plpgsql$;

-- Not where transactions may be prepared: one that has notified couldn't.
create or replace function ulak._ring()
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    if current_setting('max_prepared_transactions')::integer = 0 then
        perform ulak._notify('ulak_bell', '');
    end if;
end
$plpgsql$;

-- From now on the next 16 ids ring. last_sent is read after the bell was set: a sender either has drawn its id by now, or will
-- see the bell. Whatever else is pending, also for a later time, is worth a claim, which costs three times as much.
create or replace function ulak._set_bell(out rings_to bigint, out last_sent bigint, out has_pending boolean)
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_sequence oid := 'ulak.queue_id_seq'::regclass;
begin
    rings_to := setval('ulak.bell', coalesce(pg_sequence_last_value(v_sequence), 0) + 16);
    last_sent := coalesce(pg_sequence_last_value(v_sequence), 0);
    has_pending := exists (select from ulak.queue q where q.status = 'pending');
end
$plpgsql$;

-- Makes this session one that hears the bell, from its next commit on; false where nobody rings, where what is sent is held
-- until adopt(), and in background workers, which can't LISTEN.
create or replace function ulak._listen()
returns boolean
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    if current_setting('max_prepared_transactions')::integer > 0
        or not ulak._is_adopted()
        or exists (select from pg_stat_activity a where a.pid = pg_backend_pid() and a.backend_type <> 'client backend')
    then
        return false;
    end if;
    listen ulak_bell;
    return true;
end
$plpgsql$;
