-- ulak @version@ without PL/Python, for servers where you are no superuser. Built by `make sql`; run it by psql, as the role that is to
-- own it:
--
--     psql -d shop -f ulak-plain-@version@.sql
--
-- The same script installs and upgrades, in one transaction. It needs the rights to create roles and to create a schema in this
-- database, and membership in pg_monitor. Nodes deliver; @left_out@ are left out.

\set ON_ERROR_STOP on
\set QUIET on

begin;

set local client_min_messages = warning;
set local search_path = pg_catalog, pg_temp;
set local standard_conforming_strings = on;
-- Functions call each other, whatever their order.
set local check_function_bodies = off;

-- What is here: '' for nothing, or the version of a plain installation. Whatever else has the name of our schema is left to
-- sql/schema/00_guard.sql.
do $plpgsql$
declare
    v_installed text := '';
begin
    if exists (select from pg_extension e where e.extname = 'ulak') then
        raise exception 'ulak is installed here as an extension'
            using errcode = '55000', hint = 'alter extension ulak update;';
    end if;
    if exists (
        select
        from pg_namespace n
        join pg_proc p on p.proowner = n.nspowner and p.proname = 'has_python'
        join pg_namespace s on s.oid = p.pronamespace and s.nspowner = n.nspowner and s.nspname = 'ulak_private'
        where n.nspname = 'ulak'
    ) then
        -- Nothing in the schema of another role is called.
        if not exists (select from pg_namespace n where n.nspname = 'ulak' and n.nspowner = to_regrole(quote_ident(current_user))) then
            raise exception 'ulak belongs to another role here'
                using
                    errcode = '42501',
                    detail = (select format('Its owner is %I, you are %I.', pg_get_userbyid(n.nspowner), current_user) from pg_namespace n where n.nspname = 'ulak'),
                    hint = (select format('Run this script as %I.', pg_get_userbyid(n.nspowner)) from pg_namespace n where n.nspname = 'ulak');
        end if;
        v_installed := ulak_private.version();
        if v_installed <> all (array[@versions@]) then
            raise exception 'ulak % is installed here, and this script can''t make % of it', v_installed, '@version@'
                using errcode = '55000', hint = 'Run the script of that version or of a later one.';
        end if;
    end if;
    if not pg_has_role(current_user, 'pg_monitor', 'usage') then
        raise exception 'role "%" does not have the rights of pg_monitor', current_user
            using
                errcode = '42501',
                detail = 'ulak looks at settings and sessions with the rights of its owner: whether pg_cron runs, whether a node is alive.',
                -- As ulak_private.grant_command() has it, which isn't here yet.
                hint = format(
                    case
                        when current_setting('server_version_num')::integer >= 160000 then 'grant pg_monitor to %1$I with inherit true;'
                        when (select r.rolinherit from pg_roles r where r.rolname = current_user) then 'grant pg_monitor to %1$I;'
                        else 'grant pg_monitor to %1$I; alter role %1$I inherit;'
                    end || ' -- by the administrator of the server',
                    current_user
                );
    end if;
    perform set_config('ulak.installed', v_installed, true);
end
$plpgsql$;

