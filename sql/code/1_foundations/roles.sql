-- Checks the roles that everything is granted to. They belong to the whole cluster: somebody with CREATEROLE may have created them before
-- us, and DROP EXTENSION leaves them.

-- Whether a dump is being restored: the dump turns row_security off. Anybody may do that, and a database's owner for all of its sessions,
-- so it counts only if a superuser has SET it.
create or replace function ulak_private.is_restore()
returns boolean
language plpgsql
stable
as $plpgsql$
begin
    return current_setting('row_security') = 'off'
        and exists (select from pg_roles r where r.rolname = session_user and r.rolsuper)
        and exists (select from pg_settings s where s.name = 'row_security' and s.source in ('session', 'client'));
end
$plpgsql$;

create or replace function ulak_private.roles()
returns text[]
language sql
immutable
as $sql$
    select array['ulak_admin', 'ulak_application', 'ulak_consumer', 'ulak_monitor', 'ulak_node', 'ulak_worker']
$sql$;

-- Only a superuser may read this.
create or replace function ulak_private.roles_with_password()
returns table (name text)
language sql
stable
as $sql$
    select a.rolname::text from pg_authid a where a.rolname = any (ulak_private.roles()) and a.rolpassword is not null
$sql$;

-- Problems of the roles, and the statements that fix them. is_usual: a problem only if the role hasn't been used yet; later on, operators
-- do this on purpose.
create or replace function ulak_private.role_problems()
returns table (role text, problem text, remedy text, is_usual boolean)
language sql
stable
as $sql$
    with role as (
        select r.* from pg_roles r where r.rolname = any (ulak_private.roles())
    ),
    member as (
        select
            r.rolname,
            m.rolname as member,
            m.rolsuper,
            a.admin_option,
            -- Since PostgreSQL 16, revoke takes back what the revoking role granted, or for a superuser, what the server's first role did.
            case
                when a.grantor <> 10 and current_setting('server_version_num')::integer >= 160000
                    then format(' granted by %I', pg_get_userbyid(a.grantor))
            end as granted_by
        from role r
        join pg_auth_members a on a.roleid = r.oid
        join pg_roles m on m.oid = a.member
        -- The schema's owner can do everything in it anyway.
        where m.oid <> (select n.nspowner from pg_namespace n where n.nspname = 'ulak')
    )
    select r.rolname::text, a.problem, format('alter role %I %s;', r.rolname, a.remedy), false
    from role r
    cross join lateral (
        values
            (r.rolsuper, 'is a superuser', 'nosuperuser'),
            (r.rolcreaterole, 'may make or change roles', 'nocreaterole'),
            (r.rolcreatedb, 'may make databases', 'nocreatedb'),
            (r.rolreplication, 'may replicate', 'noreplication'),
            (r.rolbypassrls, 'may pass by row security', 'nobypassrls'),
            (r.rolcanlogin and r.rolname <> 'ulak_worker', 'can log in', 'nologin')
    ) a(is_problem, problem, remedy)
    where a.is_problem
    union all
    select r.rolname, 'has a password', format('alter role %I password null;', r.rolname), r.rolname = 'ulak_worker'
    from role r
    where r.rolname in (select p.name from ulak_private.roles_with_password() p)
    union all
    select m.rolname, format('has the member %I', m.member), format('revoke %I from %I%s;', m.rolname, m.member, m.granted_by), true
    from member m
    where m.rolname in ('ulak_admin', 'ulak_node', 'ulak_worker') and not m.admin_option and not m.rolsuper and m.member <> all (ulak_private.roles())
    union all
    -- After its members: it can't be revoked while there are grants of its own.
    select m.rolname, format('can be granted by %I', m.member), format('revoke admin option for %I from %I%s;', m.rolname, m.member, m.granted_by), false
    from member m
    where m.admin_option and not m.rolsuper
    union all
    select r.rolname, format('is a member of %I', g.rolname), format('revoke %I from %I;', g.rolname, r.rolname), false
    from role r
    join pg_auth_members a on a.member = r.oid
    join pg_roles g on g.oid = a.roleid
    where g.rolsuper
        or g.rolname = any (ulak_private.roles())
        or g.rolname in ('pg_execute_server_program', 'pg_read_server_files', 'pg_write_server_files')
    union all
    -- A role that can log in may set these for its own sessions, and pg_cron starts sessions of ulak_worker.
    select
        r.rolname,
        format('begins its sessions with %s', c.setting),
        format(
            'alter role %I%s reset %s;',
            r.rolname,
            (select format(' in database %I', d.datname) from pg_database d where d.oid = s.setdatabase),
            split_part(c.setting, '=', 1)
        ),
        false
    from role r
    join pg_db_role_setting s on s.setrole = r.oid
    cross join lateral unnest(s.setconfig) c(setting)
    where r.rolname = 'ulak_worker'
        and (split_part(c.setting, '=', 1) in ('search_path', 'role') or split_part(c.setting, '=', 1) like '%preload_libraries')
$sql$;

-- What gives a role the rights of another one. To be a member isn't enough: a member may inherit nothing, and since PostgreSQL 16 the role that
-- makes another one is such a member of it.
create or replace function ulak_private.grant_command(p_role text, p_to text)
returns text
language sql
stable
as $sql$
    select format(
        case
            when current_setting('server_version_num')::integer >= 160000 then 'grant %1$I to %2$I with inherit true;'
            when exists (select from pg_roles r where r.rolname = p_to and not r.rolinherit) then 'grant %1$I to %2$I; alter role %2$I inherit;'
            else 'grant %1$I to %2$I;'
        end,
        p_role,
        p_to
    )
$sql$;

-- Whether the caller may read this table or view, so that hints name only what the caller can read. Not for hot paths.
create or replace function ulak_private.may_read(p_relation text)
returns boolean
language sql
stable
as $sql$
    select has_table_privilege(ulak_private.caller(), p_relation, 'select')
$sql$;

-- A role with grants here is ours, from an earlier version. A role with grants in another database probably is, and may have members and a
-- password by now. The installing superuser can confirm that everything is as intended.
do $plpgsql$
declare
    v_problem record;
    v_is_tolerated boolean;
    v_problems text[];
    v_remedies text[];
    -- Only a superuser could set this parameter for the sessions of others.
    v_is_accepted boolean := ulak_private.is_restore() or coalesce(pg_catalog.current_setting('ulak.accept_roles', true), '') = 'on';
begin
    for v_problem in
        select
            p.*,
            exists (
                select
                from pg_catalog.pg_namespace n
                cross join lateral pg_catalog.aclexplode(n.nspacl) a
                where n.nspname = 'ulak' and a.grantee = pg_catalog.to_regrole(p.role)
            ) as is_ours,
            exists (
                select
                from pg_catalog.pg_shdepend d
                join pg_catalog.pg_database o on o.oid = d.dbid
                where d.refclassid = 'pg_catalog.pg_authid'::pg_catalog.regclass
                    and d.refobjid = pg_catalog.to_regrole(p.role)
                    and d.deptype = 'a'
                    and o.datname <> pg_catalog.current_database()
            ) as is_used_elsewhere
        from ulak_private.role_problems() p
    loop
        continue when v_problem.is_usual and v_problem.is_ours;
        v_is_tolerated := v_is_accepted or v_problem.is_ours or (v_problem.is_usual and v_problem.is_used_elsewhere);
        if v_is_tolerated then
            raise warning 'role % %', v_problem.role, v_problem.problem using hint = v_problem.remedy;
        else
            v_problems := v_problems || pg_catalog.format('%s %s', v_problem.role, v_problem.problem);
            v_remedies := v_remedies || v_problem.remedy;
        end if;
    end loop;
    if v_problems is not null then
        raise exception 'a role that ulak uses exists already, and not as ulak would have made it'
            using
                errcode = '55000',
                detail = pg_catalog.array_to_string(v_problems, ', ') || '.',
                hint = pg_catalog.array_to_string(v_remedies, ' ')
                    || ' Or, if all of it is as you want it: set ulak.accept_roles = on;';
    end if;
end
$plpgsql$;
