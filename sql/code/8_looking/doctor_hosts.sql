-- Endpoints that may no longer be reached because a setting was changed.

create or replace function ulak_private.doctor_hosts()
returns table (severity text, check_name text, finding text, fix text)
language sql
stable
as $sql$
    select
        'warning',
        'hosts',
        format('endpoint "%s": http_allowed_hosts does not list its %s', e.name, string_agg(format('%s (%s)', h.key, h.host), ', ' order by h.key, h.host)),
        format('select ulak.configure(''http_allowed_hosts'', %L); -- or give it another config', concat_ws(',', a.allowed, string_agg(distinct h.host, ',') filter (where h.host <> '***')))
    from (select ulak_private.stored_setting('http_allowed_hosts')) a(allowed)
    cross join ulak.endpoints e
    cross join lateral (
        -- If the url is a secret, so is its host.
        select f.key, case when e.config #> string_to_array(f.key, '.') ? '$secret' then '***' else f.host end
        from ulak_private.config_hosts(e.protocol, ulak_private.put_secrets(e.config, ulak_private.secret_values(ulak_private.secret_names(e.config)))) f
        where not ulak_private.is_listed(f.host, a.allowed)
    ) h(key, host)
    where a.allowed <> '' and e.enabled
    group by e.name, a.allowed
    union all
    select
        'warning',
        'hosts',
        format('endpoint "%s" gets no requests: secret "%s" is bound to no hosts, and require_bound_secrets is on', e.name, v.name),
        format('-- select ulak.set_secret(%L, ''...'', p_hosts => ''{...}''); with its value and the hosts of this endpoint', v.name)
    from ulak.endpoints e
    join ulak_private.secrets v on v.hosts is null and v.name = any (ulak_private.secret_names(e.config))
    where ulak_private.stored_setting('require_bound_secrets')::boolean and e.enabled and strpos(e.config::text, '"$secret"') > 0
$sql$;
