-- ping(): one message to an endpoint at once, past the queue.

create or replace function ulak_private.ping(p_endpoint_id bigint)
returns text
language plpython3u
as $python$
    plpy.execute("select ulak_private.load_python()")
    from ulak import entry_points

    return entry_points.ping(p_endpoint_id)
$python$;

create or replace function ulak.ping(p_endpoint text)
returns table (outcome text, status integer, milliseconds double precision, error text, response jsonb)
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_endpoint ulak.endpoints;
begin
    select e.* into v_endpoint
    from ulak.endpoints e
    where e.name = p_endpoint;
    if not found then
        perform ulak_private.raise_unknown_endpoint(p_endpoint);
    elsif v_endpoint.protocol <> all (ulak_private.worker_protocols()) then
        raise exception 'no worker delivers to endpoint "%"', p_endpoint
            using errcode = '22023', detail = format('Its protocol is %s.', v_endpoint.protocol);
    end if;
    return query
    select a.outcome, a.status, a.milliseconds, a.error, a.response
    from jsonb_to_record(ulak_private.ping(v_endpoint.id)::jsonb) a(
        outcome text,
        status integer,
        milliseconds double precision,
        error text,
        response jsonb
    );
end
$plpgsql$;

comment on function ulak.ping(text) is
    'sends one test message to an endpoint now, signed like any other, and returns its outcome; it affects neither the queue nor the circuit breaker';
