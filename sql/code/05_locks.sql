-- Every lock that ulak takes, and the order in which they are taken.
--
-- Named locks are rows of ulak.locks, held until the transaction ends:
--
--     name            who holds it
--     configs         whoever changes a config or a secret: a config is valid for the secrets that it names
--     schedule        start() and stop()
--     maintenance     one batch of maintenance; who finds it taken leaves
--     sweep           one worker that takes back what others left; who finds it taken leaves
--
-- A change of max_queue_size locks the table ulak.setting_values (share update exclusive): senders see it in pg_locks, and
-- remember nothing that follows from the old limit.
--
-- stop(), where background workers run the jobs, locks the table ulak.schedule (exclusive): workers see it in pg_locks, and leave
-- before their jobs are unscheduled.
--
-- Locks on rows of other tables, by those who change them: ulak.ordering_keys (senders of one key), ulak.queue (messages),
-- ulak.endpoints (circuit breaker, rate limit), ulak.workers (a session that takes a slot, or reports).
--
-- The order: a named lock, then an ordering key, then messages, then endpoints by ascending id. A claim never waits: it
-- skips what is locked.

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
