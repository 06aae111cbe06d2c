-- Config keys that several protocols share: events, TLS, hosts, and where in a broker a message goes.

-- For the protocols that CloudEvents has a binding for.
create or replace function ulak_private.cloudevents_config_schema()
returns jsonb
language sql
immutable
as $sql$
    select $json${
        "cloudevents": {"type": "boolean"},
        "cloudevents_mode": {"enum": ["structured", "binary"]},
        "cloudevents_type": {"type": "string", "minLength": 1, "maxLength": 2048},
        "cloudevents_source": {"type": "string", "minLength": 1, "maxLength": 2048},
        "cloudevents_subject": {"type": "string", "minLength": 1, "maxLength": 2048}
    }$json$::pg_catalog.jsonb
$sql$;

create or replace function ulak_private.cloudevents_violation(p_config jsonb)
returns text[]
language sql
immutable
set search_path = pg_catalog, pg_temp
as $sql$
    select array['.' || k.key, 'must not have control characters', null]
    from unnest(array['cloudevents_type', 'cloudevents_source', 'cloudevents_subject']) k(key)
    where ulak_private.has_control_characters(p_config ->> k.key)
    limit 1
$sql$;

-- The first key has no meaning without the second.
create or replace function ulak_private.required_beside(p_config jsonb, p_key text, p_required text)
returns text[]
language sql
immutable
set search_path = pg_catalog, pg_temp
as $sql$
    select case
        when p_config ? p_key and not p_config ? p_required
            then array['.' || p_required, format('is required beside %s', p_key), null]
    end
$sql$;

-- For the brokers that the worker dials itself; librdkafka has options of its own.
create or replace function ulak_private.broker_tls_config_schema()
returns jsonb
language sql
immutable
as $sql$
    select $json${
        "tls": {"type": "boolean"},
        "tls_ca_cert": {"type": "string", "minLength": 1},
        "tls_cert": {"type": "string", "minLength": 1},
        "tls_key": {"type": "string", "minLength": 1}
    }$json$::pg_catalog.jsonb
$sql$;

-- A topic, a stream or a routing key: what stands in braces is the name of a field of the message's metadata.
create or replace function ulak_private.route_violation(p_path text, p_route text)
returns text[]
language sql
immutable
set search_path = pg_catalog, pg_temp
as $sql$
    select case
        when ulak_private.has_control_characters(p_route) then array[p_path, 'must not have control characters', null]
        when regexp_replace(p_route, E'\\{[A-Za-z_][A-Za-z0-9_.-]*\\}', '', 'g') ~ '[{}]' then array[
            p_path,
            'has a brace that does not enclose a name',
            'Such as "orders.{event_type}": the name of a field of the message''s metadata.'
        ]
    end
$sql$;

-- A host by its name or address, without a scheme, a user or a port.
create or replace function ulak_private.host_violation(p_path text, p_host text)
returns text[]
language sql
immutable
set search_path = pg_catalog, pg_temp
as $sql$
    select case
        when p_host !~ E'^([A-Za-z0-9_]([A-Za-z0-9._-]*[A-Za-z0-9_])?|[0-9A-Fa-f:.]+)$' or length(p_host) > 253 then
            array[p_path, 'must be the name or the address of a host', 'Such as "broker.example.com" or "10.0.0.5".']
    end
$sql$;

-- The keys of TLS mean something only with it; files are judged by the worker, which reads them.
create or replace function ulak_private.tls_violation(p_config jsonb)
returns text[]
language sql
immutable
set search_path = pg_catalog, pg_temp
as $sql$
    select case
        when p_config -> 'tls' is distinct from 'true' then (
            select array['.' || k, 'has no effect without "tls": true', null]
            from jsonb_object_keys(p_config) k
            where starts_with(k, 'tls_')
            order by k
            limit 1
        )
        else ulak_private.required_beside(p_config, 'tls_key', 'tls_cert')
    end
$sql$;

-- Servers: a text with commas between, or an array of such texts.
create or replace function ulak_private.listed(p_servers jsonb)
returns setof text
language sql
immutable
set search_path = pg_catalog, pg_temp
as $sql$
    select btrim(s.server)
    from jsonb_array_elements_text(case jsonb_typeof(p_servers) when 'array' then p_servers else jsonb_build_array(p_servers) end) e(list),
        unnest(string_to_array(e.list, ',')) s(server)
$sql$;

-- Headers for every message. p_own: names that the protocol or ulak sets itself, in lower case.
create or replace function ulak_private.broker_headers_violation(p_headers jsonb, p_own text)
returns text[]
language sql
immutable
set search_path = pg_catalog, pg_temp
as $sql$
    select array[
        '.headers' || ulak_private.json_path_step(h.key),
        case
            when ulak_private.has_control_characters(h.key) or h.key = '' then 'is not a valid header name'
            when not ulak_private.is_header_value(h.value) then 'must not have line breaks or other control characters'
            else 'is a header that ulak sets itself'
        end,
        null
    ]
    from jsonb_each_text(p_headers) h
    where ulak_private.has_control_characters(h.key)
        or h.key = ''
        or not ulak_private.is_header_value(h.value)
        or lower(h.key collate "C") ~ p_own
    limit 1
$sql$;
