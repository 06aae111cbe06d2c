-- Client libraries of protocols. Only who delivers over a protocol needs its library, so a missing one is told and prevents nothing else.

create or replace function ulak._missing_client(p_protocol text)
returns text
language plpython3u
as $python$
    plpy.execute("select ulak._load_python()")
    from ulak import transports

    return transports.missing_client(p_protocol)
$python$;

-- Protocols of enabled endpoints whose client this server lacks. That of http is looked for by start() in any case, and log has none.
create or replace function ulak._missing_clients()
returns table (protocol text, package text, endpoints bigint)
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select u.protocol, m.package, u.endpoints
    from (
        select e.protocol, count(*) as endpoints
        from ulak.endpoints e
        where e.enabled and e.protocol = any (ulak._worker_protocols()) and e.protocol not in ('http', 'log')
        group by e.protocol
    ) u
    cross join lateral ulak._missing_client(u.protocol) m(package)
    where m.package is not null
$sql$;
