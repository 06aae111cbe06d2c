-- Guards of the installation, and the roles that everything else is granted to.

\echo Use "CREATE EXTENSION ulak" to load this file. \quit

do $plpgsql$
declare
    v_role text;
    v_schema text;
    v_owner text;
begin
    if current_setting('server_version_num')::integer < 150000 then
        raise exception 'ulak needs PostgreSQL 15 or newer'
            using
                errcode = 'feature_not_supported',
                detail = format('This server is PostgreSQL %s.', current_setting('server_version'));
    end if;

    -- The schema's owner could replace its functions, and our Python runs as the server's user.
    select n.nspname, pg_get_userbyid(n.nspowner) into v_schema, v_owner
    from pg_catalog.pg_namespace n
    where n.nspname in ('ulak', 'ulak_private')
    order by n.nspname
    limit 1;
    if found then
        raise exception 'schema "%" exists already', v_schema
            using
                errcode = 'duplicate_schema',
                detail = format('It belongs to role %I. The extension only installs into a schema of its own making.', v_owner),
                hint = format('Look at what is in it, then: drop schema %1$s; or: alter schema %1$s rename to %1$s_old;', v_schema);
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
create schema ulak_private;
comment on schema ulak is 'Transactional outbox: ulak.send() in your transaction, delivery by ulak.run_worker(). Start with ulak.help().';
comment on schema ulak_private is 'The inside of ulak. What users call and read is in schema ulak.';
