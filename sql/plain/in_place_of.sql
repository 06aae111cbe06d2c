-- What the plain script has in place of the function of the same name in sql/code: what needs no superuser. Every other PL/Python
-- function becomes one that says that it needs PL/Python.

create or replace function ulak_private.version()
returns text
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    return '@version@';
end
$plpgsql$;

create or replace function ulak_private.has_python()
returns boolean
language sql
immutable
as $sql$
    select false
$sql$;

-- Who owns the table could write it anyway.
create or replace function ulak_private.log_time(p_now timestamptz)
returns timestamptz
language sql
volatile
set search_path = pg_catalog, pg_temp
as $sql$
    select case
        when pg_has_role(session_user, (select n.nspowner from pg_namespace n where n.nspname = 'ulak'), 'usage') then p_now
        else clock_timestamp()
    end
$sql$;

-- It can't be known.
create or replace function ulak_private.roles_with_password()
returns table (name text)
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select null::text where false
$sql$;

-- In SQL the wait has a snapshot, which holds back vacuum for a tenth of a second at most.
create or replace procedure ulak_private.await_delivery(p_id bigint, p_seconds double precision, inout p_status text, inout p_problem text)
language plpgsql
as $plpgsql$
declare
    v_pause pg_catalog.float8 := 0.002;
    v_until pg_catalog.timestamptz := pg_catalog.clock_timestamp() operator(pg_catalog.+) pg_catalog.make_interval(secs => p_seconds);
    v_left pg_catalog.float8;
begin
    loop
        p_status := (select m.status from ulak.message_status(p_id) m);
        if p_status is null then
            p_problem := 'unknown';
            return;
        end if;
        v_left := pg_catalog.date_part('epoch', v_until operator(pg_catalog.-) pg_catalog.clock_timestamp());
        exit when p_status operator(pg_catalog.<>) 'pending' and p_status operator(pg_catalog.<>) 'processing'
            or v_left operator(pg_catalog.<=) 0;
        commit;
        perform pg_catalog.pg_sleep(least(v_pause, v_left));
        commit;
        v_pause := least(v_pause operator(pg_catalog.*) 2, 0.1);
    end loop;
end
$plpgsql$;

-- An administrator of the server has to grant it.
create or replace function ulak_private.has_pg_cron()
returns boolean
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select exists (
        select
        from pg_extension e
        join pg_namespace n on n.nspname = 'cron' and has_schema_privilege(n.oid, 'usage')
        where e.extname = 'pg_cron'
    )
$sql$;

-- Nodes deliver.
create or replace function ulak_private.default_workers()
returns integer
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select 0
$sql$;

-- Only a superuser may have a job run as somebody else.
create or replace function ulak_private.job_role()
returns text
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select pg_get_userbyid(c.relowner)::text from pg_class c where c.oid = 'ulak.queue'::regclass
$sql$;

create or replace function ulak_private.elsewhere()
returns text
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select format('pg_cron lives in database "%s", where %s has to run this', current_setting('cron.database_name', true), ulak_private.job_role())
$sql$;

create or replace function ulak_private.setup_fix(p_workers integer default null)
returns text
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select '-- the way your service does it: '
        || case when ulak_private.is_pg_cron_loaded() then 'change its configuration, and restart' else 'load pg_cron and restart' end
$sql$;

create or replace function ulak_private.parameter_fix(p_parameter text)
returns text
language sql
immutable
set search_path = pg_catalog, pg_temp
as $sql$
    select '-- the way your service does it: set ' || p_parameter
$sql$;

create or replace function ulak_private.package_fix(p_package text)
returns text
language sql
immutable
set search_path = pg_catalog, pg_temp
as $sql$
    select '-- the way your service does it: install ' || case when p_package like 'postgresql-%-cron' then 'pg_cron' else p_package end
$sql$;

create or replace function ulak_private.check_python()
returns table (item text, status text, detail text, fix text)
language sql
set search_path = pg_catalog, pg_temp
as $sql$
    select
        'workers',
        'problem',
        'ulak is installed here without PL/Python: no worker can run in this database, nodes deliver',
        'select * from ulak.start(0); -- has pg_cron run the maintenance'
$sql$;

-- Nothing here depends on a login of ours: pg_cron is as the provider has it.
create or replace function ulak_private.check_login()
returns table (item text, status text, detail text, fix text)
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
end
$plpgsql$;

-- Only a superuser may change a row of cron.job. What is scheduled again by the same role
-- replaces the job of that name.
create or replace function ulak_private.schedule_command(
    p_jobname text, p_schedule text, p_command text, p_username text, p_database text
)
returns text
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select case
        when ulak_private.has_pg_cron() then format('select cron.schedule(%L, %L, %L);', p_jobname, p_schedule, p_command)
        else format('select cron.schedule_in_database(%L, %L, %L, %L);', p_jobname, p_schedule, p_command, p_database)
    end
$sql$;

create or replace function ulak_private.put_job(
    p_jobid bigint, p_jobname text, p_schedule text, p_command text, p_username text, p_database text
)
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    execute ulak_private.schedule_command(p_jobname, p_schedule, p_command, p_username, p_database);
end
$plpgsql$;

-- pg_cron's rows are not ours to change.
create or replace function ulak_private.bring_jobs_here()
returns bigint
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    return 0;
end
$plpgsql$;

create or replace function ulak_private.misplaced_jobs()
returns table (place text, jobs bigint)
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    return;
end
$plpgsql$;

create or replace function ulak_private.wake_pg_cron()
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
end
$plpgsql$;
