-- Settings that are dangerous, or have no effect.

create or replace function ulak_private.doctor_settings()
returns table (severity text, check_name text, finding text, fix text)
language sql
stable
as $sql$
    select s.severity, 'settings', s.finding, s.fix
    from (
        values
            (
                'critical',
                not current_setting('fsync')::boolean,
                'fsync is off: a crash of the server can lose messages that were accepted',
                ulak_private.parameter_fix('fsync = on')
            ),
            (
                'warning',
                not current_setting('autovacuum')::boolean,
                'autovacuum is off: the queue''s dead rows pile up',
                ulak_private.parameter_fix('autovacuum = on')
            ),
            (
                'warning',
                ulak.setting('http_allow_internal_urls')::boolean,
                'http_allow_internal_urls is on: anybody who may set a url can reach internal services',
                'select ulak.configure(''http_allow_internal_urls'', ''false''); -- and name the networks in http_allowed_networks'
            ),
            (
                'warning',
                ulak.setting('max_queue_size')::integer = 0,
                'max_queue_size is 0: a receiver that is down can fill the disk',
                'select ulak.configure(''max_queue_size'', null);'
            ),
            (
                'warning',
                ulak.setting('default_max_retries')::integer = 0,
                'default_max_retries is 0: the first time-out makes a message a dead letter',
                'select ulak.configure(''default_max_retries'', null);'
            ),
            (
                'warning',
                ulak.setting('retry_base_delay')::integer > ulak.setting('retry_max_delay')::integer,
                'retry_base_delay is above retry_max_delay: every retry waits for the latter',
                'select ulak.configure(''retry_base_delay'', null), ulak.configure(''retry_max_delay'', null);'
            ),
            (
                'info',
                ulak.setting('poll_interval')::integer > 1000,
                'poll_interval is above a second: a message that arrives after a pause waits that long',
                'select ulak.configure(''poll_interval'', null);'
            )
    ) s (severity, is_wrong, finding, fix)
    where s.is_wrong
    union all
    select
        'warning',
        'settings',
        case
            -- The value of anything else may be a secret.
            when n.name is null then format('the server''s parameter ulak.%s has no effect: there is no setting of that name', p.name)
            else format('the server''s parameter ulak.%s (%s) has no effect: the setting is %s', p.name, p.value, ulak.setting(p.name))
        end,
        case
            when n.name is null then format('-- remove it from the server''s files, or: alter database %I reset ulak.%I;', current_database(), p.name)
            else format('select ulak.configure(%L, %L); -- if you want this value; then remove the parameter', p.name, p.value)
        end
    from ulak_private.server_parameters() p
    left join ulak.settings n on n.name = p.name
    where p.value <> ''
$sql$;

-- Parameters ulak.x, which have no effect, wherever they are set. PostgreSQL doesn't list those of this session or of the server's command
-- line: of these, only the ones with the name of a setting are found.
create or replace function ulak_private.server_parameters()
returns table (name text, value text)
language plpgsql
stable
as $plpgsql$
#variable_conflict use_column
begin
    return query
    select n.name, current_setting('ulak.' || n.name, true)
    from ulak.settings n
    union
    select p.name, p.value
    from pg_db_role_setting r
    cross join unnest(r.setconfig) c(parameter)
    cross join lateral (
        select lower(substr(split_part(c.parameter, '=', 1), 6) collate "C"), substr(c.parameter, strpos(c.parameter, '=') + 1)
    ) p(name, value)
    where r.setdatabase in (0, (select d.oid from pg_database d where d.datname = current_database()))
        and c.parameter ilike 'ulak.%'
        -- These have an effect.
        and p.name not in ('accept_roles', 'traceparent', 'tracestate');
    if has_function_privilege('pg_show_all_file_settings()', 'execute') then
        return query
        select p.name, f.setting
        from pg_file_settings f
        cross join lateral (select lower(substr(f.name, 6) collate "C")) p(name)
        where f.name ilike 'ulak.%'
            and p.name not in ('accept_roles', 'traceparent', 'tracestate')
            -- The others were found above, unless the server hasn't read them yet.
            and not exists (select from ulak.settings n where n.name = p.name);
    end if;
end
$plpgsql$;
