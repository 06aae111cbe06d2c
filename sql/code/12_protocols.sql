-- The protocols that an endpoint may have, and what its config and retry policy may hold, whatever the protocol. Checks are made
-- on the config with its secrets put in.

-- Those that a worker delivers; each has a transport in plpython/ulak/transports.py. Endpoints of the others are claimed by
-- external workers.
create or replace function ulak._worker_protocols()
returns text[]
language sql
immutable
as $sql$
    select array['http', 'log', 'amqp', 'kafka', 'mqtt', 'nats', 'redis']
$sql$;

create or replace function ulak._protocols()
returns text[]
language sql
immutable
set search_path = pg_catalog, pg_temp
as $sql$
    select ulak._worker_protocols() || array['pull']
$sql$;

-- The shape of a config: what its protocol asks for, and what all have in common. null: not a protocol.
create or replace function ulak._config_schema(p_protocol text)
returns jsonb
language sql
immutable
set search_path = pg_catalog, pg_temp
as $sql$
    select ulak._with_properties(
        case p_protocol
            when 'http' then ulak._http_config_schema()
            when 'log' then ulak._log_config_schema()
            when 'amqp' then ulak._amqp_config_schema()
            when 'kafka' then ulak._kafka_config_schema()
            when 'mqtt' then ulak._mqtt_config_schema()
            when 'nats' then ulak._nats_config_schema()
            when 'redis' then ulak._redis_config_schema()
            when 'pull' then ulak._pull_config_schema()
        end,
        ulak._delivery_config_schema()
    )
$sql$;

-- A schema of an object with further properties, which other schemas have as well.
create or replace function ulak._with_properties(p_schema jsonb, p_properties jsonb)
returns jsonb
language sql
immutable
set search_path = pg_catalog, pg_temp
as $sql$
    select jsonb_set(p_schema, '{properties}', (p_schema -> 'properties') || p_properties)
$sql$;

-- Keys that govern claiming, whatever the protocol.
create or replace function ulak._delivery_config_schema()
returns jsonb
language sql
immutable
as $sql$
    select $json${
        "max_in_flight": {"type": "integer", "minimum": 1, "maximum": 10000},
        "max_pending": {"type": "integer", "minimum": 1, "maximum": 2147483647},
        "when_full": {"enum": ["refuse", "dead_letter"]},
        "rate_limit": {
            "type": "object",
            "required": ["limit"],
            "additionalProperties": false,
            "properties": {
                "limit": {"type": "integer", "minimum": 1, "maximum": 1000000},
                "interval": {"enum": ["second", "minute", "hour"]},
                "burst": {"type": "integer", "minimum": 1, "maximum": 1000000}
            }
        },
        "circuit_breaker": {
            "type": "object",
            "additionalProperties": false,
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
    }$json$::pg_catalog.jsonb
$sql$;

create or replace function ulak._retry_policy_schema()
returns jsonb
language sql
immutable
as $sql$
    select $json${
        "type": "object",
        "additionalProperties": false,
        "properties": {
            "max_retries": {"type": "integer", "minimum": 0, "maximum": 1000},
            "backoff": {"enum": ["exponential", "linear", "fixed", "quadratic", "schedule"]},
            "base_delay_seconds": {"type": "integer", "minimum": 1, "maximum": 3600},
            "max_delay_seconds": {"type": "integer", "minimum": 1, "maximum": 86400},
            "increment_seconds": {"type": "integer", "minimum": 1, "maximum": 3600},
            "schedule": {
                "type": "array",
                "minItems": 1,
                "maxItems": 1000,
                "items": {"type": "integer", "minimum": 0, "maximum": 2592000}
            },
            "jitter": {"enum": ["none", "full", "equal"]}
        }
    }$json$::pg_catalog.jsonb
$sql$;

-- {path, problem, hint} of the first thing wrong with a config, or null. The config has its secrets put in.
create or replace function ulak._config_violation(p_protocol text, p_config jsonb)
returns text[]
language plpgsql
immutable
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_method text := upper(p_config ->> 'method' collate "C");
    v_violation text[] := ulak._json_violation(
        ulak._config_schema(p_protocol),
        -- The method of http may be written in lower case; no other protocol has such a key.
        case
            when jsonb_typeof(p_config -> 'method') = 'string' then jsonb_set(p_config, '{method}', to_jsonb(v_method))
            else p_config
        end
    );
begin
    v_violation := coalesce(v_violation, ulak._circuit_breaker_violation(p_config -> 'circuit_breaker'));
    return coalesce(
        v_violation,
        case p_protocol
            when 'http' then ulak._http_config_violation(p_config)
            when 'amqp' then ulak._amqp_config_violation(p_config)
            when 'kafka' then ulak._kafka_config_violation(p_config)
            when 'mqtt' then ulak._mqtt_config_violation(p_config)
            when 'nats' then ulak._nats_config_violation(p_config)
            when 'redis' then ulak._redis_config_violation(p_config)
        end
    );
end
$plpgsql$;

-- A key that has no effect beside the others is a mistake that nobody would notice.
create or replace function ulak._circuit_breaker_violation(p_breaker jsonb)
returns text[]
language plpgsql
immutable
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_key text;
begin
    if p_breaker ->> 'mode' is distinct from 'rate' then
        foreach v_key in array array['window', 'min_requests', 'failure_rate'] loop
            if p_breaker ? v_key then
                return array['.circuit_breaker.' || v_key, 'has no effect without "mode": "rate"', null];
            end if;
        end loop;
    elsif p_breaker ? 'threshold' then
        return array['.circuit_breaker.threshold', 'has no effect with "mode": "rate"', null];
    end if;
    return null;
end
$plpgsql$;

create or replace function ulak._retry_policy_violation(p_policy jsonb)
returns text[]
language plpgsql
immutable
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_violation text[] := ulak._json_violation(ulak._retry_policy_schema(), p_policy);
begin
    if v_violation is not null then
        return v_violation;
    elsif p_policy ->> 'backoff' = 'schedule' and not p_policy ? 'schedule' then
        return array['.schedule', 'is required with "backoff": "schedule"', null];
    elsif p_policy ? 'schedule' and p_policy ->> 'backoff' is distinct from 'schedule' then
        return array['.schedule', 'has no effect without "backoff": "schedule"', null];
    elsif (p_policy ->> 'base_delay_seconds')::numeric > (p_policy ->> 'max_delay_seconds')::numeric then
        return array['.base_delay_seconds', 'must not exceed max_delay_seconds', null];
    end if;
    return null;
end
$plpgsql$;

create or replace function ulak._raise_violation(p_what text, p_violation text[])
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    raise exception 'invalid %: $% %', p_what, p_violation[1], p_violation[2]
        using
            errcode = '22023',
            hint = coalesce(p_violation[3], 'Correct the value at this path.');
end
$plpgsql$;

create or replace function ulak.validate_endpoint_config(p_protocol text, p_config jsonb)
returns boolean
language sql
security definer
set search_path = pg_catalog, pg_temp
as $sql$
    select ulak._check_config(p_protocol, p_config, null, null)
$sql$;

comment on function ulak.validate_endpoint_config(text, jsonb) is
    'true if create_endpoint() would accept this config; otherwise the error that it would raise';

-- True, or an error that says what is wrong where. p_endpoint_id and p_old: the endpoint that is altered, and its config until now.
create or replace function ulak._check_config(p_protocol text, p_config jsonb, p_endpoint_id bigint, p_old jsonb)
returns boolean
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_violation text[];
begin
    if p_protocol is null or p_protocol <> all(ulak._protocols()) then
        raise exception 'unknown protocol %', coalesce(quote_literal(p_protocol), 'null')
            using
                errcode = '22023',
                detail = format(
                    '%s: the worker delivers. pull: external workers fetch.', array_to_string(ulak._worker_protocols(), ', ')
                ),
                hint = ulak._did_you_mean(p_protocol, ulak._protocols());
    end if;
    v_violation := coalesce(
        ulak._secrets_violation(p_protocol, p_config, p_endpoint_id, p_old),
        ulak._config_violation(p_protocol, ulak._with_secrets(coalesce(p_config, 'null')))
    );
    if v_violation is not null then
        perform ulak._raise_violation(format('config of %s endpoint', p_protocol), v_violation);
    end if;
    return true;
end
$plpgsql$;
