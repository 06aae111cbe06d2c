-- Secrets that are bound to hosts: set_secret(name, value, p_hosts => '{api.example.com}'). Whatever a config says, no other host gets such a
-- secret, nor a signature or a token made with it: a host could forward the signature, and a token is as good as the secret.

-- The hosts that would see the secret at this place of a config. p_config has its secrets filled in.
create or replace function ulak_private.secret_hosts(p_protocol text, p_config jsonb, p_place text)
returns setof text
language sql
immutable
as $sql$
    select h.host
    from ulak_private.config_hosts(p_protocol, p_config) h
    where case
        when p_protocol <> 'http' or h.key = 'proxy.url' then true
        when h.key = 'auth.token_url' then p_place like 'auth/%'
        else p_place not like 'proxy/%'
    end
$sql$;

-- The secrets that a config uses where they are not allowed, the reason, and the hosts that they are bound to. p_config has its secrets
-- filled in; p_written still names them.
create or replace function ulak_private.misplaced_secrets(p_protocol text, p_config jsonb, p_written jsonb)
returns table (shown text, name text, hosts text, reason text)
language sql
stable
as $sql$
    select
        s.shown, s.name, v.hosts,
        case when v.hosts is null then 'bound to no hosts, and require_bound_secrets is on' else 'bound to other hosts' end
    from ulak_private.secrets_in(p_written) s
    join ulak_private.secrets v on v.name = s.name
    where case
        when v.hosts is null then ulak_private.stored_setting('require_bound_secrets')::boolean
        else exists (
            select from ulak_private.secret_hosts(p_protocol, p_config, s.place) h where ulak_private.is_listed(h, v.hosts) is not true
        )
    end
    order by s.place
$sql$;

-- The first of them, as config_violation() returns it. p_name: look at this secret only.
create or replace function ulak_private.misplaced_violation(p_protocol text, p_config jsonb, p_written jsonb, p_name text default null)
returns text[]
language sql
stable
as $sql$
    select array[
        m.shown,
        format('names secret "%s", which is %s', m.name, m.reason),
        coalesce(format('It may be used with: %s. ', replace(m.hosts, ',', ', ')), '') || format(
            'Whoever knows its value can bind it to the hosts of this config, a proxy and a token server included: '
            'select ulak.set_secret(%L, ''...'', p_hosts => ''{api.example.com}'');',
            m.name
        )
    ]
    from ulak_private.misplaced_secrets(p_protocol, p_config, p_written) m
    where p_name is null or m.name = p_name
    limit 1
$sql$;

-- The hosts that set_secret() stores; null: any host.
create or replace function ulak_private.bound_hosts(p_name text, p_hosts text[])
returns text
language plpgsql
stable
as $plpgsql$
declare
    v_hosts text;
begin
    if p_hosts is null then
        select s.hosts into v_hosts from ulak_private.secrets s where s.name = p_name;
    else
        v_hosts := ulak_private.host_list(p_hosts);
        if v_hosts is null then
            raise exception 'invalid hosts of secret "%"', p_name
                using
                    errcode = '22023',
                    detail = 'p_hosts takes names of hosts without a port, such as api.example.com or *.example.com, or addresses.',
                    hint = format('select ulak.set_secret(%L, ''...'', p_hosts => ''{api.example.com}'');', p_name);
        end if;
        v_hosts := nullif(v_hosts, '');
    end if;
    if v_hosts is null and ulak_private.stored_setting('require_bound_secrets')::boolean then
        raise exception 'secret "%" has to be bound to hosts', p_name
            using
                errcode = '22023',
                detail = 'The setting require_bound_secrets is on.',
                hint = format('select ulak.set_secret(%L, ''...'', p_hosts => ''{api.example.com}'');', p_name);
    end if;
    return v_hosts;
end
$plpgsql$;

-- Raises if an endpoint that names this secret may not use it with its new value or hosts, or would call a host that is not allowed.
create or replace function ulak_private.check_uses(p_name text)
returns void
language plpgsql
stable
as $plpgsql$
declare
    v_endpoint text;
    v_violation text[];
begin
    select e.name, v.violation into v_endpoint, v_violation
    from ulak.endpoints e
    cross join lateral (select ulak_private.with_secrets(e.config)) c(config)
    cross join lateral (
        select coalesce(
            ulak_private.misplaced_violation(e.protocol, c.config, e.config, p_name),
            -- Without its secrets as the old config, so that every key that is a secret counts as changed.
            ulak_private.hosts_violation(e.protocol, c.config, e.config, ulak_private.put_secrets(e.config, '{}'))
        )
    ) v(violation)
    where p_name = any (ulak_private.secret_names(e.config)) and v.violation is not null
    order by e.name
    limit 1;
    perform ulak_private.raise_violation(format('value or hosts of secret "%s" for endpoint "%s"', p_name, v_endpoint), v_violation);
end
$plpgsql$;
