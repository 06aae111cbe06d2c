-- The worker: the procedure that runs it in the database, and the functions that workers and nodes call besides claiming and settling.

-- A procedure that commits can't have a SET clause, so it pins the search_path itself, with qualified names only: the owner of the database
-- may have set a path with other people's objects on it.
create or replace procedure ulak.run_worker(
    p_slot integer default null,
    p_seconds double precision default null,
    p_is_scheduled boolean default false
)
language plpython3u
as $python$
    before = plpy.execute("select pg_catalog.current_setting('search_path') as path")[0]["path"]
    plpy.execute("select pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', false)")
    plpy.execute(plpy.prepare("select ulak_private.check_run($1, $2)", ["int4", "float8"]), [p_slot, p_seconds])
    plpy.execute("select ulak_private.load_python()")
    from ulak import entry_points

    stamp = plpy.execute("select ulak_private.worker_stamp() as stamp")[0]["stamp"]
    entry_points.run(p_slot, p_seconds, p_is_scheduled, stamp, before)
$python$;

comment on procedure ulak.run_worker(integer, double precision, boolean) is
    'delivers messages until just after the next full minute, or for p_seconds; p_slot is the worker''s number, by default '
    'the first free one; p_is_scheduled is for the jobs of start()';

-- Called first: a refused call leaves the session as it was.
create or replace function ulak_private.check_run(p_slot integer, p_seconds double precision)
returns void
language plpgsql
immutable
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    if p_slot is not null and p_slot not between 1 and 32 then
        raise exception 'worker slots are numbered from 1 to 32'
            using errcode = '22023', detail = format('The slot given is %s.', p_slot);
    end if;
    if p_seconds not between 0 and 31536000 then
        raise exception 'the run of a worker must last between 0 seconds and a year'
            using errcode = '22023', detail = format('p_seconds is %s.', p_seconds);
    end if;
end
$plpgsql$;

-- Identifies the code that a worker runs. A worker that finds another stamp leaves, so that the next run starts with the new code.
create or replace function ulak_private.stamp_of(p_version text)
returns text
language sql
-- Not immutable: a worker's cached plan would keep the old stamp.
stable
as $sql$
    select ulak_private.python_stamp() operator(pg_catalog.||) ' ' operator(pg_catalog.||) p_version
$sql$;

create or replace function ulak_private.worker_stamp()
returns text
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    return ulak_private.stamp_of(ulak_private.version());
end
$plpgsql$;

-- Some databases are read-only by default. True if this transaction is; the next one isn't any more.
create or replace function ulak_private.leave_read_only()
returns boolean
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    return current_setting('transaction_read_only') = 'on'
        and set_config('default_transaction_read_only', 'off', false) = 'off';
end
$plpgsql$;

-- In a transaction of its own: it takes effect in the next one.
create or replace function ulak_private.enter_worker_session(p_name text default 'worker')
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    perform set_config(s.name, s.value, false)
    from ulak_private.worker_parameters() s
    where current_setting(s.name, true) is not null;
    perform set_config('application_name', format('ulak %s', p_name), false);
end
$plpgsql$;

create or replace function ulak_private.worker_parameters()
returns table (name text, value text)
language sql
immutable
set search_path = pg_catalog, pg_temp
as $sql$
    values
        -- A crash that loses a commit also ends the worker, and the message is sent again.
        ('synchronous_commit', 'off'),
        -- Parallel queries need a signal that a listening worker blocks.
        ('max_parallel_workers_per_gather', '0'),
        -- Compiling plans costs more than it saves in statements this short.
        ('jit', 'off'),
        -- A plan that was made for an empty queue is used for a full one.
        ('enable_seqscan', 'off'),
        ('enable_bitmapscan', 'off'),
        ('plan_cache_mode', 'force_generic_plan'),
        -- A session that locks one endpoint must not hold up the others.
        ('lock_timeout', '250ms'),
        -- Whatever the database's own defaults are.
        ('default_transaction_isolation', 'read committed'),
        ('default_transaction_read_only', 'off'),
        ('datestyle', 'ISO'),
        -- The session that started the run may end before it.
        ('client_connection_check_interval', '0'),
        -- Since 17.
        ('transaction_timeout', '0')
$sql$;

-- The settings that a worker needs, and a fingerprint that changes with any setting. Claims compare it, see session_settings.
create or replace function ulak_private.worker_options()
returns table (settings jsonb, version text, fingerprint text)
language sql
security definer
set search_path = pg_catalog, pg_temp
as $sql$
    select
        (
            select jsonb_object_agg(s.name, ulak.setting(s.name))
            from unnest(array[
                'batch_size',
                'capture_response',
                'cloudevents_source',
                'http_allow_internal_urls',
                'http_allowed_hosts',
                'http_allowed_networks',
                'http_connect_timeout',
                'http_timeout',
                'lease_seconds',
                'poll_interval',
                'poll_interval_busy',
                'response_body_max_size',
                'turn_interval',
                'worker_concurrency'
            ]) s(name)
        ),
        ulak_private.version(),
        set_config('ulak_private.settings', (select s.fingerprint from ulak_private.session_settings s), false)
$sql$;

-- Whether a setting has changed since this session's worker last read them. A claim checks this in the snapshot that it finds its messages in,
-- or a later one, and claims nothing if it is true. So a setting that was committed before a message was sent holds for that message. A view,
-- because a function would take a tenth of the time of a claim of one message.
create or replace view ulak_private.session_settings as
select s.fingerprint, coalesce(nullif(current_setting('ulak_private.settings', true), '') <> s.fingerprint, false) as are_old
from (
    -- No texts in order: that takes a fifth of the time of a claim of one message.
    select coalesce(bit_xor(hashtextextended(v.name || '=' || v.value, 0)), 0)::text as fingerprint
    from ulak.setting_values v
) s;

comment on view ulak_private.session_settings is
    'a hash of all settings that were changed, and whether it isn''t the one that this session''s worker goes by; private to ulak';
comment on column ulak_private.session_settings.fingerprint is 'a hash of all settings that were changed, with their values';
comment on column ulak_private.session_settings.are_old is 'this session''s worker has asked for them before one was changed; false in other sessions';

create or replace function ulak_private.has_old_settings()
returns boolean
language plpgsql
stable
as $plpgsql$
begin
    return s.are_old from ulak_private.session_settings s;
end
$plpgsql$;

-- Called ten times a second, or once a second by a worker that listens: whether it has to leave, and whether settings have changed.
create or replace function ulak_private.worker_check(p_slot integer, p_stamp text)
returns table (leave text, settings text)
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    return query
    select
        case
            when w.stop_requested_at >= w.started_at then 'stop'
            -- The node was silent for so long that its row was deleted.
            when w.slot is null and p_slot > 100 then 'restart'
            -- Another session took the slot, because this one seemed to hang.
            when w.pid <> pg_backend_pid() then 'restart'
            when w.is_scheduled and not ulak_private.is_wanted(p_slot) then 'stop'
            when w.host is not null and ulak_private.is_stopped() then 'stop'
            when p_stamp <> ulak_private.stamp_of(ulak_private.version()) then 'restart'
        end,
        -- A worker whose session lost its settings in a rollback has to read them again.
        case when ulak_private.has_old_settings() then 'others' else coalesce(current_setting('ulak_private.settings', true), '') end
    from (values (p_slot)) s (slot)
    left join ulak.workers w on w.slot = s.slot;
end
$plpgsql$;

-- Endpoints that must not be sent to any more, though messages for them were claimed a moment ago.
create or replace function ulak_private.blocked_endpoints(p_ids bigint[])
returns table (id bigint, state text)
language sql
stable
security definer
set search_path = pg_catalog, pg_temp
as $sql$
    select e.id, case when e.enabled then e.circuit_state else 'disabled' end
    from ulak.endpoints e
    where e.id = any (p_ids) and (not e.enabled or e.circuit_state <> 'closed')
$sql$;

-- One worker polls often for new messages: the live one with the lowest number. Called each second, and a function in SQL would be planned
-- each time.
create or replace function ulak_private.is_poller(p_slot integer)
returns boolean
language plpgsql
stable
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    return not exists (select from ulak.workers w where w.slot < p_slot and ulak_private.is_taken(w));
end
$plpgsql$;
