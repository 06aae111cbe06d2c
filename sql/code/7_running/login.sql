-- How pg_cron logs in as the role of its jobs, and which line of pg_hba.conf stands in the way.

-- In its libpq mode pg_cron logs in as the role that a job runs as. This does the same.
create or replace function ulak_private.login_steps(p_user text)
returns table (step integer, item text, status text, detail text, fix text)
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_host text := (select p.host from ulak_private.login_parameters() p);
    v_problem text := ulak_private.log_in(p_user);
begin
    if v_problem is not null then
        return query
        select *
        from ulak_private.login_problem(p_user, v_host, ulak_private.cut(coalesce(substring(v_problem from 'FATAL: *(.*)'), v_problem), 90));
        return;
    end if;
    return query values (6, 'login', 'ok', format('%s can log in', p_user), null::text);
end
$plpgsql$;

-- The narrowest way to let a role in: background workers, which need no login, where pg_cron has good ones; else the
-- operating system's user over a socket; else a password.
create or replace function ulak_private.login_problem(p_user text, p_host text, p_reason text)
returns table (step integer, item text, status text, detail text, fix text)
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_socket text := ulak_private.socket();
    v_rule record;
begin
    if not (select r.rolcanlogin from pg_roles r where r.rolname = p_user) then
        return query values (6, 'login', 'problem', p_reason, format('alter role %I login;', p_user));
    elsif ulak_private.has_seconds() then
        return query values (
            2, 'login', 'problem', format('%s; background workers need no login', p_reason), ulak_private.server_fix('cron.use_background_workers', 'on')
        );
    elsif p_host !~ '^/' and v_socket is null then
        return query values
            (6, 'login', 'problem', p_reason, format(E'\\password %I', p_user)),
            (
                6,
                'password',
                'problem',
                format('it is found in ~/.pgpass, mode 0600, of the operating system''s user %s:', ulak_private.system_user()),
                format(E'\\! echo %s:%s:*:%s:PASSWORD >> ~%s/.pgpass', p_host, current_setting('port'), p_user, ulak_private.system_user())
            );
    else
        if p_host !~ '^/' then
            return query values (
                2, 'cron.host', 'problem', format('%s; over a socket no password is needed', p_reason), ulak_private.server_fix('cron.host', quote_literal(v_socket))
            );
        end if;
        select * into v_rule
        from ulak_private.login_rule(p_user) r;
        if v_rule.map is null then
            return query values (
                6,
                'login',
                'problem',
                ulak_private.cut(concat_ws('; ', p_reason, v_rule.why), 140),
                format(
                    E'\\! sed -i %s %s',
                    ulak_private.in_shell(format('1i local %s %s peer map=ulak', ulak_private.in_file(current_database()), ulak_private.in_file(p_user))),
                    ulak_private.in_shell(current_setting('hba_file'))
                )
            );
        end if;
        if not v_rule.is_mapped then
            return query values (
                6,
                'login',
                'problem',
                format('map "%s" has no line that lets %s in as %s', coalesce(v_rule.map, 'ulak'), ulak_private.system_user(), p_user),
                format(
                    E'\\! echo %s >> %s',
                    ulak_private.in_shell(concat_ws(' ', coalesce(v_rule.map, 'ulak'), ulak_private.system_user(), ulak_private.in_file(p_user))),
                    ulak_private.in_shell(current_setting('ident_file'))
                )
            );
        end if;
        if v_rule.map is not null and v_rule.is_mapped then
            return query values (7, 'login', 'problem', format('%s; its files were changed since', p_reason), 'select pg_reload_conf();');
        end if;
    end if;
end
$plpgsql$;

-- A name as pg_hba.conf and pg_ident.conf take it.
create or replace function ulak_private.in_file(p_name text)
returns text
language sql
immutable
set search_path = pg_catalog, pg_temp
as $sql$
    select case when p_name ~ '^[A-Za-z_][A-Za-z0-9_]*$' and p_name not in ('all', 'sameuser', 'samerole', 'replication') then p_name else format('"%s"', p_name) end
$sql$;

-- Which line of pg_hba.conf decides about a role's login over the socket, as the file is now: its map, if it is one that goes by the
-- operating system's user, and whether the map lets the server's user in.
create or replace function ulak_private.login_rule(p_user text, out map text, out is_mapped boolean, out why text)
language sql
stable
set search_path = pg_catalog, pg_temp
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
set search_path = pg_catalog, pg_temp
as $sql$
    select nullif(btrim(split_part(current_setting('unix_socket_directories'), ',', 1)), '')
$sql$;

-- Where pg_cron would look for this server. The settings are a superuser's to read.
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
