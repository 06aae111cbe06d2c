-- The protocols that an endpoint may have, and what its config and retry policy may hold, whatever the protocol. Checks are made
-- on the config with its secrets put in.

-- Every protocol, and what the rest of the SQL has to know of it:
--   is_delivered: workers deliver it, and it has a transport in plpython/ulak/transports/registry.py; else external workers claim it;
--   host_key: the key of a config that holds its hosts;
--   has_rules: a config has rules beyond its schema. The shape of the config of protocol x is _x_config_schema(), the rules are
--     _x_config_violation(config);
--   secret_places: where a credential belongs, by its path in the config; * is any key. A secret elsewhere would be told to everybody
--     who may see what is made of it: the source of an event, the name of a topic.
create or replace function ulak_private.protocol_facts()
returns table (protocol text, is_delivered boolean, host_key text, has_rules boolean, secret_places text[])
language sql
immutable
as $sql$
    values
        ('http', true, 'url', true, array[
            'url', 'headers/*', 'body/*', 'signing_secret', 'proxy/url', 'proxy/username', 'proxy/password', 'auth/username', 'auth/password', 'auth/token',
            'auth/token_url', 'auth/client_id', 'auth/client_secret', 'auth/access_key', 'auth/secret_key', 'auth/session_token'
        ]),
        ('log', true, null, false, '{}'),
        ('amqp', true, 'host', true, '{username,password}'),
        ('kafka', true, 'broker', true, array[
            'headers/*', 'options/sasl.username', 'options/sasl.password', 'options/ssl.ca.pem', 'options/ssl.certificate.pem',
            'options/ssl.key.pem', 'options/ssl.key.password'
        ]),
        ('mqtt', true, 'broker', true, '{username,password}'),
        ('nats', true, 'url', true, '{headers/*,token,username,password,nkey_seed}'),
        ('redis', true, 'host', true, '{username,password}'),
        ('pull', false, null, false, '{}')
$sql$;

create or replace function ulak_private.worker_protocols()
returns text[]
language sql
immutable
as $sql$
    select array(select p.protocol from ulak_private.protocol_facts() p where p.is_delivered)
$sql$;

create or replace function ulak_private.protocols()
returns text[]
language sql
immutable
as $sql$
    select array(select p.protocol from ulak_private.protocol_facts() p)
$sql$;

-- The shape of a config: what its protocol asks for, and what all have in common. null: not a protocol.
create or replace function ulak_private.config_schema(p_protocol text)
returns jsonb
language plpgsql
immutable
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_schema jsonb;
begin
    if p_protocol = any (ulak_private.protocols()) then
        execute format('select ulak_private.%I()', format('%s_config_schema', p_protocol)) into v_schema;
    end if;
    return ulak_private.with_properties(v_schema, ulak_private.delivery_config_schema());
end
$plpgsql$;

-- Where a config says that its endpoint delivers to, without path, query and user: they may hold a token. null: nowhere, or it is a
-- secret.
create or replace function ulak_private.hosts(p_hosts jsonb)
returns text
language sql
immutable
set search_path = pg_catalog, pg_temp
as $sql$
    select case
        -- In the path of a url a comma separates nothing.
        when p_hosts #>> '{}' ~* '^https?://' then substring(p_hosts #>> '{}' from '^[A-Za-z]+://[^/?#]+')
        when jsonb_typeof(p_hosts) in ('string', 'array') then (
            select string_agg(concat(m.parts[1], m.parts[2]), ',' order by l.place)
            from ulak_private.listed(p_hosts) with ordinality l(host, place)
            cross join regexp_match(l.host, '^([A-Za-z]+://)?(?:[^/?#]*@)?([^/?#]+)') m(parts)
            where m.parts is not null
        )
    end
$sql$;

-- A schema of an object with further properties, which other schemas have as well.
create or replace function ulak_private.with_properties(p_schema jsonb, p_properties jsonb)
returns jsonb
language sql
immutable
set search_path = pg_catalog, pg_temp
as $sql$
    select jsonb_set(p_schema, '{properties}', (p_schema -> 'properties') || p_properties)
$sql$;

-- Keys that govern claiming, whatever the protocol.
create or replace function ulak_private.delivery_config_schema()
returns jsonb
language sql
immutable
as $sql$
    select $json${
        "max_in_flight": {"type": "integer", "minimum": 1, "maximum": 10000},
        "max_pending": {"type": "integer", "minimum": 1, "maximum": 2147483647},
        "when_full": {"enum": ["refuse", "dead_letter"]},
        "disable_after": {"type": "string", "pattern": "^[1-9][0-9]{0,3} (hour|day|week)s?$"},
        "when_disabled": {"enum": ["hold", "dead_letter"]},
        "on_dead": {"enum": ["continue", "hold"]},
        "announce": {"type": "array", "minItems": 1, "items": {"enum": ["delivered", "dead", "expired", "cancelled"]}},
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

create or replace function ulak_private.retry_policy_schema()
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
create or replace function ulak_private.config_violation(p_protocol text, p_config jsonb)
returns text[]
language plpgsql
immutable
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_method text := upper(p_config ->> 'method' collate "C");
    v_violation text[] := ulak_private.json_violation(
        ulak_private.config_schema(p_protocol),
        -- The method of http may be written in lower case; no other protocol has such a key.
        case
            when jsonb_typeof(p_config -> 'method') = 'string' then jsonb_set(p_config, '{method}', to_jsonb(v_method))
            else p_config
        end
    );
begin
    v_violation := coalesce(
        v_violation,
        ulak_private.circuit_breaker_violation(p_config -> 'circuit_breaker'),
        ulak_private.disable_after_violation(p_protocol, p_config)
    );
    if v_violation is null and exists (select from ulak_private.protocol_facts() p where p.protocol = p_protocol and p.has_rules) then
        execute format('select ulak_private.%I($1)', format('%s_config_violation', p_protocol)) into v_violation using p_config;
    end if;
    return v_violation;
end
$plpgsql$;

-- A key that has no effect beside the others is a mistake that would go unnoticed.
create or replace function ulak_private.circuit_breaker_violation(p_breaker jsonb)
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

create or replace function ulak_private.retry_policy_violation(p_policy jsonb)
returns text[]
language plpgsql
immutable
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_violation text[] := ulak_private.json_violation(ulak_private.retry_policy_schema(), p_policy);
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

create or replace function ulak_private.raise_violation(p_what text, p_violation text[])
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
    select ulak_private.check_config(p_protocol, p_config, null, null)
$sql$;

comment on function ulak.validate_endpoint_config(text, jsonb) is
    'true if create_endpoint() would accept this config; otherwise the error that it would raise';

-- True, or an error that says what is wrong where. p_endpoint_id and p_old: the endpoint that is altered, and its config until now.
create or replace function ulak_private.check_config(p_protocol text, p_config jsonb, p_endpoint_id bigint, p_old jsonb)
returns boolean
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_violation text[];
    v_config jsonb;
begin
    if p_protocol is null or p_protocol <> all(ulak_private.protocols()) then
        raise exception 'unknown protocol %', coalesce(quote_literal(p_protocol), 'null')
            using
                errcode = '22023',
                detail = format(
                    '%s: workers deliver. pull: external workers claim.', array_to_string(ulak_private.worker_protocols(), ', ')
                ),
                hint = ulak_private.did_you_mean(p_protocol, ulak_private.protocols());
    end if;
    v_violation := ulak_private.secrets_violation(p_protocol, p_config, p_endpoint_id, p_old);
    if v_violation is null then
        v_config := ulak_private.with_secrets(coalesce(p_config, 'null'));
        v_violation := coalesce(
            ulak_private.body_secrets_violation(p_config),
            ulak_private.config_violation(p_protocol, v_config),
            ulak_private.hosts_violation(p_protocol, v_config, p_config, p_old),
            -- A config that stays as it is doesn't use its secrets in another way: set_secret() looks after those.
            case when p_config is distinct from p_old then ulak_private.misplaced_violation(p_protocol, v_config, p_config) end
        );
    end if;
    if v_violation is not null then
        perform ulak_private.raise_violation(format('config of %s endpoint', p_protocol), v_violation);
    end if;
    return true;
end
$plpgsql$;
