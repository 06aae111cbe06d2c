-- Config keys that several protocols share, and their rules.

-- Keys that govern claiming, whatever the protocol; keys of events, for the protocols that CloudEvents has a binding for; keys of TLS, for
-- the brokers that the worker dials itself (librdkafka has options of its own).
create or replace function ulak_private.shared_config_keys()
returns jsonb
language sql
immutable
as $sql$
    select $json${
        "delivery": {
            "max_in_flight": {"type": "integer", "minimum": 1, "maximum": 10000},
            "max_pending": {"type": "integer", "minimum": 1, "maximum": 2147483647},
            "when_full": {"enum": ["refuse", "dead_letter"]},
            "disable_after": {"type": "string", "pattern": "^[1-9][0-9]{0,3} (hour|day|week)s?$"},
            "when_disabled": {"enum": ["hold", "dead_letter"]},
            "on_dead": {"enum": ["continue", "hold"]},
            "announce": {"type": "array", "minItems": 1, "items": {"enum": ["delivered", "dead", "expired", "cancelled"]}},
            "rate_limit": {
                "type": "object", "required": ["limit"], "additionalProperties": false,
                "properties": {
                    "limit": {"type": "integer", "minimum": 1, "maximum": 1000000},
                    "interval": {"enum": ["second", "minute", "hour"]},
                    "burst": {"type": "integer", "minimum": 1, "maximum": 1000000}
                }
            },
            "circuit_breaker": {
                "type": "object", "additionalProperties": false,
                "properties": {
                    "threshold": {"type": "integer", "minimum": 1, "maximum": 1000},
                    "cooldown": {"type": "integer", "minimum": 5, "maximum": 3600},
                    "counts": {"enum": ["retryable", "all"]},
                    "slow_start": {"type": "boolean"},
                    "mode": {"enum": ["consecutive", "rate"]},
                    "window": {"type": "integer", "minimum": 1, "maximum": 3600},
                    "min_requests": {"type": "integer", "minimum": 1, "maximum": 1000000},
                    "failure_rate": {"type": "number", "exclusiveMinimum": 0, "maximum": 1}
                }
            }
        },
        "cloudevents": {
            "cloudevents": {"type": "boolean"},
            "cloudevents_mode": {"enum": ["structured", "binary"]},
            "cloudevents_type": {"type": "string", "minLength": 1, "maxLength": 2048},
            "cloudevents_source": {"type": "string", "minLength": 1, "maxLength": 2048},
            "cloudevents_subject": {"type": "string", "minLength": 1, "maxLength": 2048}
        },
        "tls": {
            "tls": {"type": "boolean"},
            "tls_ca_cert": {"type": "string", "minLength": 1},
            "tls_cert": {"type": "string", "minLength": 1},
            "tls_key": {"type": "string", "minLength": 1}
        }
    }$json$::pg_catalog.jsonb
$sql$;

-- These apply to every protocol that has the key.
create or replace function ulak_private.shared_config_rules()
returns table (keys text, refused text, problem text, hint text)
language sql
immutable
as $sql$
    values
        ('when_disabled', 'exists(KEY) && !exists($.disable_after)', 'has no effect without "disable_after"', null),
        (
            'circuit_breaker.window,circuit_breaker.min_requests,circuit_breaker.failure_rate',
            'exists(KEY) && !($.circuit_breaker.mode == "rate")', 'has no effect without "mode": "rate"', null
        ),
        ('circuit_breaker.threshold', 'exists(KEY) && $.circuit_breaker.mode == "rate"', 'has no effect with "mode": "rate"', null),
        (
            'cloudevents_type,cloudevents_source,cloudevents_subject,routing_key,topic,key,subject,stream_key',
            $$KEY like_regex "[\x01-\x1f\x7f]"$$, 'must not have control characters', null
        ),
        -- Keys that say where in a broker a message goes.
        (
            'routing_key,topic,key,subject,stream_key', 'exists(KEY ? (!(@ like_regex "^([^{}]|[{][A-Za-z_][A-Za-z0-9_.-]*[}])*$")))',
            'has a brace that does not enclose a name', 'Such as "orders.{event_type}": the name of a field of the message''s metadata.'
        ),
        ('host', ulak_private.bad_host_condition(), 'must be the name or the address of a host', 'Such as "broker.example.com" or "10.0.0.5".'),
        -- The worker checks the files, since it is the one that reads them.
        ('tls_ca_cert,tls_cert,tls_key,tls_verify_peer,tls_insecure', 'exists(KEY) && !($.tls == true)', 'has no effect without "tls": true', null),
        ('tls_cert', 'exists($.tls_key) && !exists(KEY)', 'is required beside tls_key', null)
$sql$;

-- Conditions that several rules use, as the jsonpath of their column `refused`: what isn't a host, a server or a list of servers. A host is a
-- name or an address, without scheme, user or port.
create or replace function ulak_private.bad_host_condition()
returns text
language sql
immutable
as $sql$
    select 'exists(KEY ? (!(@ like_regex "^([A-Za-z0-9_]([A-Za-z0-9._-]*[A-Za-z0-9_])?|[0-9A-Fa-f:.]+)$")))'
$sql$;

-- One server or several, separated by commas. HOST in the pattern stands for a name or an address, PORT for 1 to 65535.
create or replace function ulak_private.bad_servers_condition(p_pattern text)
returns text
language sql
immutable
as $sql$
    select ulak_private.bad_server_condition(format(' *%1$s *(, *%1$s *)*', replace(p_pattern, 'HOST', '([A-Za-z0-9._-]+|[[][0-9A-Fa-f:.]+[]])')))
$sql$;

create or replace function ulak_private.bad_server_condition(p_pattern text)
returns text
language sql
immutable
as $sql$
    select format(
        'exists(KEY ? (!(@ like_regex "^%s$")))',
        replace(p_pattern, 'PORT', '(?![0-9]{6})0*([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])')
    )
$sql$;

-- The first bad header of a config, as config_violation() returns it.
create or replace function ulak_private.headers_violation(p_protocol text, p_config jsonb)
returns text[]
language plpgsql
immutable
as $plpgsql$
declare
    v_key text;
    v_value text;
    v_name text;
    v_seen text[] := '{}';
    v_problem text;
begin
    for v_key, v_value in select h.key, h.value from jsonb_each_text(p_config -> 'headers') h loop
        v_name := lower(v_key collate "C");
        v_problem := case
            when v_key = '' or ulak_private.has_control_characters(v_key) then 'is not a valid header name'
            when p_protocol = 'http' and not ulak_private.is_header_name(v_key) then 'is not a valid header name'
            when not ulak_private.is_header_value(v_value) then 'must not have line breaks or other control characters'
            when p_protocol = 'http' and v_name = any (ulak_private.reserved_headers()) then 'is a header that ulak sets itself'
            when p_protocol = 'kafka' and v_name ~ '^(ulak-|ce_|content-type$)' then 'is a header that ulak sets itself'
            when p_protocol = 'nats' and v_name ~ '^(ulak-|ce-|nats-|content-type$)' then 'is a header that ulak sets itself'
            when v_name = 'authorization' and p_config ? 'auth' then 'is set by "auth" already'
            when v_name = ulak_private.signature_header(p_config) then 'is set by "signature" already'
            when p_protocol = 'http' and v_name = any (v_seen) then 'is given twice'
        end;
        if v_problem is not null then
            return array['.headers' || ulak_private.json_path_step(v_key), v_problem, null];
        end if;
        v_seen := v_seen || v_name;
    end loop;
    return null;
end
$plpgsql$;

-- The servers of a list: a text, separated by commas, or an array of such texts.
create or replace function ulak_private.listed(p_servers jsonb)
returns setof text
language sql
immutable
as $sql$
    select btrim(s.server)
    from jsonb_array_elements_text(case jsonb_typeof(p_servers) when 'array' then p_servers else jsonb_build_array(p_servers) end) e(list),
        unnest(string_to_array(e.list, ',')) s(server)
$sql$;
