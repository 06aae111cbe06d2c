-- Nodes: workers that are processes of their own, on any machine, and log in as members of ulak_node. They claim, settle and report
-- by the functions that the worker in the database uses; here is what is theirs alone.

-- As a worker's session, but for what is true of a backend alone: a crash of the server doesn't end a node, which would settle by a
-- lease that the server has forgotten. So its commits are synchronous.
create or replace function ulak_private.node_parameters()
returns table (name text, value text)
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select p.name, p.value
    from ulak_private.worker_parameters() p
    where p.name not in ('synchronous_commit', 'client_connection_check_interval')
    union all
    values
        -- The server's own setting, if that waits for a standby.
        ('synchronous_commit', case when current_setting('synchronous_commit') = 'off' then 'on' else current_setting('synchronous_commit') end),
        -- A node that is cut off must not keep what it has locked: its session ends with its connection.
        ('client_connection_check_interval', '5s'),
        ('idle_in_transaction_session_timeout', '10s'),
        ('tcp_keepalives_idle', '10'),
        ('tcp_keepalives_interval', '5'),
        ('tcp_keepalives_count', '3'),
        ('tcp_user_timeout', '20s'),
        -- Overrides the role's own setting: no statement of a node takes this long. The server ends a statement before the node gives up
        -- the server (ANSWER_SECONDS in plpython/ulak/worker/tuning.py), so that the node can give back what it holds.
        ('statement_timeout', '8s'),
        ('idle_session_timeout', '0')
$sql$;

create or replace function ulak_private.enter_node_session()
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    perform set_config(s.name, s.value, false)
    from ulak_private.node_parameters() s
    where current_setting(s.name, true) is not null;
end
$plpgsql$;

-- Whether stop() was called, and no start() since. Nodes deliver before the first start(), too: somebody has started them.
create or replace function ulak_private.is_stopped()
returns boolean
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select exists (select from ulak_private.schedule s where s.is_stopped)
$sql$;

-- Takes the first number that no other node has; no row while stop() holds. Workers in the database have the slots 1 to 32, nodes those
-- from 101 on, so that neither takes a number from the other. p_host comes from another machine: only harmless characters of it are kept.
create or replace function ulak_private.take_node_slot(p_host text)
returns table (slot integer, name text)
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_host text := left(regexp_replace(coalesce(p_host, ''), '[^A-Za-z0-9._:-]', '?', 'g'), 64);
begin
    if ulak_private.is_stopped() then
        return;
    end if;
    -- A session is one node: the numbers are for all.
    if exists (select from ulak.workers w where w.slot > 100 and w.pid = pg_backend_pid() and ulak_private.is_taken(w)) then
        raise exception 'this session is a node already' using errcode = '55000', hint = 'select ulak_private.leave_node_slot(slot);';
    end if;
    for v_slot in 101..1100 loop
        name := format('node %s on %s, pid %s', v_slot - 100, v_host, pg_backend_pid());
        if ulak_private.register_worker(v_slot, name, false, v_host) then
            slot := v_slot;
            perform set_config('application_name', format('ulak node %s on %s', v_slot - 100, v_host), false);
            return next;
            return;
        end if;
    end loop;
    raise exception 'there are 1000 nodes already' using errcode = '53400';
end
$plpgsql$;

-- For a session that waits for start().
create or replace function ulak_private.leave_node_slot(p_slot integer)
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    perform ulak_private.unregister_worker(p_slot);
    unlisten ulak_bell;
    perform set_config('application_name', 'ulak node', false);
end
$plpgsql$;

-- Nodes come and go: the number of a lost node isn't waited for.
create or replace function ulak_private.forget_nodes()
returns void
language sql
set search_path = pg_catalog, pg_temp
as $sql$
    delete from ulak.workers w
    where w.host is not null and w.heartbeat_at < clock_timestamp() - interval '1 hour' and not ulak_private.is_taken(w)
$sql$;

create or replace function ulak_private.count_nodes(p_now timestamptz)
returns bigint
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select count(*)
    from ulak.workers w
    where w.host is not null and ulak_private.is_alive(w, p_now)
$sql$;
