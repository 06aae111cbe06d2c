-- Who may install this, where, and the roles that everything else is granted to.

\echo Use "CREATE EXTENSION ulak" to load this file. \quit

do $plpgsql$
declare
    v_role text;
begin
    if current_setting('server_version_num')::integer < 150000 then
        raise exception 'ulak needs PostgreSQL 15 or newer'
            using
                errcode = 'feature_not_supported',
                detail = format('This server is PostgreSQL %s.', current_setting('server_version'));
    end if;

    -- Whoever owns the schema could replace what is in it, and our Python runs as the server's user.
    if exists (select from pg_catalog.pg_namespace where nspname = 'ulak') then
        raise exception 'schema "ulak" exists already'
            using
                errcode = 'duplicate_schema',
                detail = (
                    select format('It belongs to role %I. The extension only installs into a schema of its own making.', pg_get_userbyid(nspowner))
                    from pg_catalog.pg_namespace
                    where nspname = 'ulak'
                ),
                hint = 'Look at what is in it, then: drop schema ulak; or: alter schema ulak rename to ulak_old;';
    end if;

    -- Roles belong to the whole cluster: another database may have made them, and DROP EXTENSION leaves them.
    -- sql/code/1_foundations/roles.sql looks at those that are there already.
    foreach v_role in array array['ulak_admin', 'ulak_application', 'ulak_consumer', 'ulak_monitor', 'ulak_node', 'ulak_worker'] loop
        begin
            if to_regrole(v_role) is null then
                -- pg_cron logs in as the role that a job runs as. Without a password it gets in only where pg_hba.conf says so.
                execute format('create role %I %s', v_role, case when v_role = 'ulak_worker' then 'login' else 'nologin' end);
            end if;
        exception
            when duplicate_object or unique_violation then
                null;
        end;
    end loop;
end
$plpgsql$;

create schema ulak;
comment on schema ulak is 'Transactional outbox: ulak.send() in your transaction, delivery by ulak.run_worker(). Start with ulak.help().';
