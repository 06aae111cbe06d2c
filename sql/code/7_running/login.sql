-- Whether pg_cron can log in as the role of its jobs, and which line of pg_hba.conf prevents it.

-- In its libpq mode pg_cron logs in as the role that a job runs as. This tries the same login.
create or replace function ulak_private.login_steps(p_user text)
returns table (step integer, item text, status text, detail text, fix text)
language plpgsql
as $plpgsql$
declare
    v_problem text := ulak_private.log_in(p_user);
begin
    if v_problem is null then
        return query values (6, 'login', 'ok', format('%s can log in', p_user), null::text);
    else
        return query
        select *
        from ulak_private.login_problem(p_user, ulak_private.cut(coalesce(substring(v_problem from 'FATAL: *(.*)'), v_problem), 90));
    end if;
end
$plpgsql$;

-- The most restrictive way that works: background workers, which need no login, since pg_cron 1.5; else peer authentication over a socket;
-- else a password.
create or replace function ulak_private.login_problem(p_user text, p_reason text)
returns table (step integer, item text, status text, detail text, fix text)
language plpgsql
stable
as $plpgsql$
declare
    v_host text := (select p.host from ulak_private.login_parameters() p);
    v_socket text := ulak_private.socket();
    v_system_user text := ulak_private.system_user();
    v_way text := case
        when not (select r.rolcanlogin from pg_roles r where r.rolname = p_user) then 'role'
        when ulak_private.has_seconds() then 'background workers'
        when v_host !~ '^/' and v_socket is null then 'password'
        else 'socket'
    end;
    v_rule record := ulak_private.login_rule(p_user);
    v_map text := coalesce(v_rule.map, 'ulak');
begin
    return query
    select c.step, c.item, 'problem', c.detail, c.fix
    from (
        values
            ('role', 6, 'login', true, p_reason, format('alter role %I login;', p_user)),
            (
                'background workers', 2, 'login', true,
                format('%s; background workers need no login', p_reason), ulak_private.server_fix('cron.use_background_workers', 'on')
            ),
            ('password', 6, 'login', true, p_reason, format(E'\\password %I', p_user)),
            (
                'password', 6, 'password', true,
                format('it is found in ~/.pgpass, mode 0600, of the operating system''s user %s:', v_system_user),
                format(E'\\! echo %s:%s:*:%s:PASSWORD >> ~%s/.pgpass', v_host, current_setting('port'), p_user, v_system_user)
            ),
            (
                'socket', 2, 'cron.host', v_host !~ '^/',
                format('%s; over a socket no password is needed', p_reason), ulak_private.server_fix('cron.host', quote_literal(v_socket))
            ),
            (
                'socket', 6, 'login', v_rule.map is null,
                ulak_private.cut(concat_ws('; ', p_reason, v_rule.why), 140),
                format(
                    E'\\! sed -i %s %s',
                    ulak_private.in_shell(format('1i local %s %s peer map=ulak', ulak_private.in_file(current_database()), ulak_private.in_file(p_user))),
                    ulak_private.in_shell(current_setting('hba_file'))
                )
            ),
            (
                'socket', 6, 'login', not v_rule.is_mapped,
                format('map "%s" has no line that lets %s in as %s', v_map, v_system_user, p_user),
                format(
                    E'\\! echo %s >> %s',
                    ulak_private.in_shell(concat_ws(' ', v_map, v_system_user, ulak_private.in_file(p_user))),
                    ulak_private.in_shell(current_setting('ident_file'))
                )
            ),
            (
                'socket', 7, 'login', v_rule.map is not null and v_rule.is_mapped,
                format('%s; its files were changed since', p_reason), 'select pg_reload_conf();'
            )
    ) c(way, step, item, applies, detail, fix)
    where c.way = v_way and c.applies;
end
$plpgsql$;

-- Quotes a name for pg_hba.conf and pg_ident.conf.
create or replace function ulak_private.in_file(p_name text)
returns text
language sql
immutable
as $sql$
    select case when p_name ~ '^[A-Za-z_][A-Za-z0-9_]*$' and p_name not in ('all', 'sameuser', 'samerole', 'replication') then p_name else format('"%s"', p_name) end
$sql$;

-- The line of pg_hba.conf, as the file is now, that decides about a role's login over the socket; its map, if the method is peer; and whether
-- that map admits the server's operating-system user.
create or replace function ulak_private.login_rule(p_user text, out map text, out is_mapped boolean, out why text)
language sql
stable
as $sql$
    select
        r.map,
        exists (
            select
            from pg_ident_file_mappings m
            where m.map_name = coalesce(r.map, 'ulak')
                and m.error is null
                and m.sys_name = ulak_private.system_user()
                and m.pg_username in (p_user, 'all')
        ),
        case when r.line is not null then format('line %s of pg_hba.conf decides: %s', r.line_number, r.line) end
    from (values (1)) one
    left join (
        select
            h.line_number,
            concat_ws(' ', h.type, array_to_string(h.database, ','), array_to_string(h.user_name, ','), h.auth_method,
                array_to_string(h.options, ' ')) as line,
            case
                when h.auth_method = 'peer' then (select substring(o from '^map=(.*)$') from unnest(h.options) o where o like 'map=%')
            end as map
        from pg_hba_file_rules h
        where h.error is null
            and h.type = 'local'
            and h.database && array['all', current_database()::text]
            and (
                h.user_name && array['all', p_user]
                or exists (
                    select
                    from unnest(h.user_name) u(name)
                    join pg_roles g on u.name = '+' || g.rolname
                    where pg_has_role(p_user, g.oid, 'member')
                )
            )
        order by h.line_number
        limit 1
    ) r on true
$sql$;

create or replace function ulak_private.system_user()
returns text
language plpython3u
as $python$
    import os
    import pwd

    return pwd.getpwuid(os.geteuid()).pw_name
$python$;

create or replace function ulak_private.socket()
returns text
language sql
stable
as $sql$
    select nullif(btrim(split_part(current_setting('unix_socket_directories'), ',', 1)), '')
$sql$;

-- Where pg_cron connects to. Only superusers may read its settings.
create or replace function ulak_private.login_parameters()
returns table (host text, port text, database text)
language sql
stable
security definer
set search_path = pg_catalog, pg_temp
as $sql$
    select
        coalesce(
            nullif((ulak_private.given_setting('cron.host')).setting, ''),
            case when ulak_private.is_pg_cron_loaded() then nullif(current_setting('cron.host', true), '') end,
            ulak_private.socket(),
            'localhost'
        ),
        current_setting('port'),
        current_database()::text
$sql$;

create or replace function ulak_private.log_in(p_user text)
returns text
language plpython3u
as $python$
    plpy.execute("select ulak_private.load_python()")
    from ulak import entry_points

    return entry_points.log_in(p_user)
$python$;
