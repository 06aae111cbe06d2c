-- Settings that are dangerous, or have no effect.

create or replace function ulak_private.doctor_settings()
returns table (severity text, check_name text, finding text, fix text)
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select s.severity, 'settings', s.finding, s.fix
    from (
        values
            (
                'critical',
                not current_setting('fsync')::boolean,
                'fsync is off: a crash of the server can lose messages that were accepted',
                ulak_private.server_fix('fsync', 'on', '-- then: select pg_reload_conf();')
            ),
            (
                'warning',
                not current_setting('autovacuum')::boolean,
                'autovacuum is off: the queue''s dead rows pile up',
                ulak_private.server_fix('autovacuum', 'on', '-- then: select pg_reload_conf();')
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
    -- Parameters of this session, which show what the server's files and ALTER DATABASE say, and those of other roles.
    select
        'warning',
        'settings',
        format('the server''s parameter ulak.%s (%s) has no effect: the setting is %s', p.name, p.value, ulak.setting(p.name)),
        format('select ulak.configure(%L, %L); -- if that is what you want; then take the parameter out', p.name, p.value)
    from (
        select n.name, current_setting('ulak.' || n.name, true) as value
        from ulak.settings n
        union
        select n.name, split_part(c.parameter, '=', 2)
        from pg_db_role_setting r
        cross join unnest(r.setconfig) c(parameter)
        join ulak.settings n on split_part(c.parameter, '=', 1) = 'ulak.' || n.name
        where r.setdatabase in (0, (select d.oid from pg_database d where d.datname = current_database()))
    ) p
    where p.value <> ''
$sql$;
