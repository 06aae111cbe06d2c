-- Fixes to paste: how to set a parameter, how to restart the server, how to quote for a shell.

-- How to set a parameter of the server. If no library has defined it yet, it has to be set in the session first.
create or replace function ulak_private.server_fix(p_name text, p_value text, p_then text default null)
returns text
language sql
stable
as $sql$
    select concat_ws(
        ' ',
        case when not exists (select from pg_settings s where s.name = p_name) then format('set %s = %s;', p_name, p_value) end,
        format('alter system set %s = %s;', p_name, p_value),
        p_then
    )
$sql$;

-- How to restart the server in a shell: with Debian's tools, if Debian's tools created the cluster.
create or replace function ulak_private.restart(out detail text, out fix text)
language sql
stable
as $sql$
    select
        'the server reads these when it starts; as ' || case when c.part is null then ulak_private.system_user() else 'root' end || ', in a shell:',
        case
            when c.part is null then format(
                '%s/pg_ctl -D %s restart', (select b.setting from pg_config b where b.name = 'BINDIR'), ulak_private.in_shell(current_setting('data_directory'))
            )
            else format('pg_ctlcluster %s %s restart', c.part[1], c.part[2])
        end
    from (select regexp_match(current_setting('config_file'), '^/etc/postgresql/([^/]+)/([^/]+)/postgresql.conf$')) c (part)
$sql$;

-- Quotes a word for a shell.
create or replace function ulak_private.in_shell(p_text text)
returns text
language sql
immutable
as $sql$
    select case when p_text ~ '^[A-Za-z0-9_./:@%+-]+$' then p_text else '''' || replace(p_text, '''', E'''\\''''') || '''' end
$sql$;

-- Makes one line of a text, and cuts it.
create or replace function ulak_private.cut(p_text text, p_length integer)
returns text
language sql
immutable
as $sql$
    select case when length(t.line) > p_length then left(t.line, p_length - 3) || '...' else t.line end
    from (select regexp_replace(p_text, E'\\s+', ' ', 'g')) t (line)
$sql$;

-- The value of a parameter in the configuration files as they are now, and whether it needs a restart. Null: it isn't set.
create or replace function ulak_private.given_setting(p_name text, out setting text, out is_pending boolean)
language sql
stable
as $sql$
    select
        case when s.source in ('command line', 'environment variable') then s.setting else f.setting end,
        coalesce(s.source not in ('command line', 'environment variable') and not f.applied, false)
    from (values (p_name)) given (name)
    left join pg_settings s on s.name = given.name
    left join lateral (
        select f.setting, f.applied
        from pg_file_settings f
        where lower(f.name collate "C") = given.name
        order by f.seqno desc
        limit 1
    ) f on true
$sql$;
