-- Hosts: which ones a config names, and whether they may be called. The worker checks again before it connects
-- (plpython/ulak/safety/hosts.py), also to the other brokers that a cluster names.

-- The hosts that a config calls, without brackets, port and final dot, and the keys that name them. p_config has its secrets filled in.
create or replace function ulak_private.config_hosts(p_protocol text, p_config jsonb)
returns table (key text, host text)
language sql
immutable
as $sql$
    select k.key, h.host
    from (
        select p.host_key from ulak_private.protocol_facts() p where p.protocol = p_protocol
        union all
        select k from unnest('{proxy.url,auth.token_url}'::text[]) k where p_protocol = 'http'
    ) k(key)
    cross join lateral (select p_config #> string_to_array(k.key, '.')) v(value)
    -- A url may have commas in its path.
    cross join lateral (
        select v.value #>> '{}' where p_protocol = 'http' and jsonb_typeof(v.value) = 'string'
        union all
        select l from ulak_private.listed(v.value) l where p_protocol <> 'http' and jsonb_typeof(v.value) in ('string', 'array')
    ) s(server)
    cross join lateral ulak_private.host_of(s.server) h(host)
$sql$;

-- The host of a url, of host:port, or of a host alone, which may be an IPv6 address.
create or replace function ulak_private.host_of(p_server text)
returns text
language sql
immutable
as $sql$
    select lower(rtrim(coalesce(m.parts[1], m.parts[2], m.parts[3]), '.') collate "C")
    from regexp_match(p_server, E'^(?:[A-Za-z]+://)?(?:\\[([0-9A-Fa-f:.]+)\\]|([0-9A-Fa-f:]*:[0-9A-Fa-f.]*:[0-9A-Fa-f:.]*$)|([^][/?#:]+))') m(parts)
$sql$;

-- A list of hosts, normalised for comparison; null if one is not valid. *.example.com stands for every name that ends in .example.com.
create or replace function ulak_private.host_list(p_hosts text[])
returns text
language sql
immutable
as $sql$
    select case
        when count(*) = count(*) filter (
            where h.host ~ E'^((\\*\\.)?[a-z0-9_]([a-z0-9._-]*[a-z0-9_])?|[0-9a-f:.]+)$' and length(h.host) <= 255
        )
            then coalesce(string_agg(h.host, ',' order by h.place), '')
    end
    from unnest(p_hosts) with ordinality g(host, place)
    cross join lateral (
        select lower(rtrim(regexp_replace(btrim(g.host), E'^\\[(.*)\\]$', E'\\1'), '.') collate "C"), g.place
    ) h(host, place)
$sql$;

create or replace function ulak_private.is_listed(p_host text, p_list text)
returns boolean
language sql
immutable
as $sql$
    select exists (
        select
        from unnest(string_to_array(p_list, ',')) l(name)
        where p_host = l.name or (starts_with(l.name, '*.') and right(p_host, length(l.name) - 1) = substr(l.name, 2))
    )
$sql$;

-- The first host that may not be called, as config_violation() returns it. p_config has its secrets filled in; p_written and p_old still name
-- them. A key that hasn't changed is left to the worker: otherwise no other key could be changed once the list of hosts became shorter.
create or replace function ulak_private.hosts_violation(p_protocol text, p_config jsonb, p_written jsonb, p_old jsonb)
returns text[]
language plpgsql
stable
as $plpgsql$
declare
    v_allowed text := nullif(ulak_private.stored_setting('http_allowed_hosts'), '');
begin
    if v_allowed is null then
        return null;
    end if;
    return (
        select array[
            '.' || h.key,
            'leads to a host that http_allowed_hosts does not list',
            -- The host of a secret url is secret, too.
            case
                when w.value ? '$secret' then 'Add its host to the setting http_allowed_hosts.'
                else format('To allow it: select ulak.configure(''http_allowed_hosts'', %L);', concat_ws(',', v_allowed, h.host))
            end
        ]
        from ulak_private.config_hosts(p_protocol, p_config) h
        cross join lateral (select string_to_array(h.key, '.')) k(path)
        cross join lateral (select p_written #> k.path) w(value)
        where not ulak_private.is_listed(h.host, v_allowed) and w.value is distinct from p_old #> k.path
        limit 1
    );
end
$plpgsql$;
