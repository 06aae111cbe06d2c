-- Nodes: workers that run as processes of their own, on any machine, and log in as members of ulak_node. They call the same functions as a
-- worker in the database; this file has what only nodes need.

-- As for a worker's session, except what holds for a backend only. A node survives a crash of the server, and would then settle by a lease
-- that the server has lost. So its commits are synchronous.
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
        -- The server's own setting may wait for a standby.
        ('synchronous_commit', case when current_setting('synchronous_commit') = 'off' then 'on' else current_setting('synchronous_commit') end),
        -- A node that is cut off must not keep its locks: its session ends with the connection.
        ('client_connection_check_interval', '5s'),
        ('idle_in_transaction_session_timeout', '10s'),
        ('tcp_keepalives_idle', '10'),
        ('tcp_keepalives_interval', '5'),
        ('tcp_keepalives_count', '3'),
        ('tcp_user_timeout', '20s'),
        -- No statement of a node takes this long. The server cancels a statement before the node gives up on the server (ANSWER_SECONDS in
        -- plpython/ulak/node/session.py), so that the node can still release its messages.
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

-- Whether stop() was called, and no start() since. Before the first start() nodes deliver: somebody started them on purpose.
create or replace function ulak_private.is_stopped()
returns boolean
language sql
stable
as $sql$
    select exists (select from ulak_private.schedule s where s.is_stopped)
$sql$;

-- Takes the first free number; no row after stop(). Workers in the database have slots 1 to 32, nodes those from 101 on, so they never
-- compete. p_host comes from another machine: only harmless characters are kept.
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
    -- One session can't use up the numbers: it is one node.
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

-- Frees the numbers of nodes that were lost.
create or replace function ulak_private.forget_nodes()
returns void
language sql
as $sql$
    delete from ulak.workers w
    where w.host is not null and w.heartbeat_at < clock_timestamp() - interval '1 hour' and not ulak_private.is_taken(w)
$sql$;

create or replace function ulak_private.count_nodes(p_now timestamptz)
returns bigint
language sql
stable
as $sql$
    select count(*)
    from ulak.workers w
    where w.host is not null and ulak_private.is_alive(w, p_now)
$sql$;
