-- Client libraries of protocols. Only workers that deliver over a protocol need its library; a missing one is reported and stops nothing else.

create or replace function ulak_private.missing_client(p_protocol text, p_keys text[])
returns text
language plpython3u
as $python$
    plpy.execute("select ulak_private.load_python()")
    from ulak.transports import registry as transports

    return transports.missing_client(p_protocol, p_keys)
$python$;

-- Packages that this server lacks for its enabled endpoints. What a protocol needs may depend on the keys of a config. start() always checks
-- for pycurl itself, so for http only the package for Ed25519 is looked for here.
create or replace function ulak_private.missing_clients()
returns table (protocol text, package text, endpoints bigint)
language sql
stable
as $sql$
    select u.protocol, m.package, sum(u.endpoints)::bigint
    from (
        select e.protocol, k.keys, count(*) as endpoints
        from ulak.endpoints e
        cross join lateral (select array(select jsonb_object_keys(e.config) order by 1)) k(keys)
        where e.enabled and e.protocol = any (ulak_private.worker_protocols()) and e.protocol not in ('http', 'log')
        group by e.protocol, k.keys
        union all
        select 'http', array['ed25519'], count(*)
        from ulak.endpoints e
        where e.enabled
            and e.protocol = 'http'
            and (
                starts_with(e.config ->> 'signing_secret', 'whsk_')
                or exists (
                    select
                    from ulak_private.secrets s
                    where s.name = e.config -> 'signing_secret' ->> '$secret' and (starts_with(s.value, 'whsk_') or starts_with(s.previous_value, 'whsk_'))
                )
            )
        having count(*) > 0
    ) u
    cross join lateral ulak_private.missing_client(u.protocol, u.keys) m(package)
    where m.package is not null
    group by u.protocol, m.package
$sql$;
