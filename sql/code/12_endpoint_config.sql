-- What an endpoint's config and retry policy may hold. Checks are made on the config with its secrets put in.

create or replace function ulak._protocols()
returns text[]
language sql
immutable
as $sql$
    select array['http', 'pull']
$sql$;

-- The shape of a config. null: not a protocol.
create or replace function ulak._config_schema(p_protocol text)
returns jsonb
language sql
immutable
set search_path = pg_catalog, pg_temp
as $sql$
    select case p_protocol
        when 'http' then ulak._http_config_schema() || jsonb_build_object(
            'properties', ulak._http_config_schema() -> 'properties' || ulak._delivery_config_schema()
        )
        when 'pull' then jsonb_build_object(
            'type', 'object', 'additionalProperties', false, 'properties', ulak._delivery_config_schema()
        )
    end
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

create or replace function ulak._http_config_schema()
returns jsonb
language sql
immutable
as $sql$
    select $json${
        "type": "object",
        "required": ["url"],
        "additionalProperties": false,
        "properties": {
            "url": {"type": "string"},
            "method": {"enum": ["POST", "PUT", "PATCH", "DELETE"]},
            "headers": {"type": "object", "additionalProperties": {"type": "string"}},
            "timeout": {"type": "number", "minimum": 0.1, "maximum": 300},
            "connect_timeout": {"type": "number", "minimum": 0.1, "maximum": 60},
            "signing_secret": {"type": "string"},
            "cloudevents": {"type": "boolean"},
            "cloudevents_mode": {"enum": ["structured", "binary"]},
            "cloudevents_type": {"type": "string", "minLength": 1, "maxLength": 2048},
            "cloudevents_source": {"type": "string", "minLength": 1, "maxLength": 2048},
            "cloudevents_subject": {"type": "string", "minLength": 1, "maxLength": 2048},
            "signature": {
                "type": "object",
                "required": ["scheme"],
                "additionalProperties": false,
                "properties": {
                    "scheme": {"enum": ["standard", "github", "hmac"]},
                    "header": {"type": "string", "minLength": 1, "maxLength": 100},
                    "prefix": {"type": "string", "maxLength": 100},
                    "encoding": {"enum": ["hex", "base64"]},
                    "algorithm": {"enum": ["sha1", "sha256", "sha512"]}
                }
            },
            "auth": {
                "type": "object",
                "required": ["type"],
                "properties": {"type": {"enum": ["basic", "bearer", "oauth2", "aws_sigv4"]}}
            },
            "tls_client_cert": {"type": "string", "minLength": 1},
            "tls_client_key": {"type": "string", "minLength": 1},
            "tls_ca_bundle": {"type": "string", "minLength": 1},
            "tls_pinned_public_key": {"type": "string", "minLength": 1},
            "ssl_verify": {"type": "boolean"},
            "proxy": {
                "type": "object",
                "required": ["url"],
                "additionalProperties": false,
                "properties": {
                    "url": {"type": "string"},
                    "type": {"enum": ["http", "https"]},
                    "username": {"type": "string"},
                    "password": {"type": "string"},
                    "no_proxy": {"type": "string"},
                    "ca_bundle": {"type": "string", "minLength": 1},
                    "ssl_verify": {"type": "boolean"}
                }
            },
            "auto_disable_on_gone": {"type": "boolean"},
            "batch_size": {"type": "integer", "minimum": 1, "maximum": 10000},
            "batch_format": {"enum": ["cloudevents", "json"]},
            "retry_on": {
                "type": "array",
                "items": {"type": ["integer", "string"], "minimum": 100, "maximum": 599, "pattern": "^[345]xx$"}
            },
            "permanent_on": {
                "type": "array",
                "items": {"type": ["integer", "string"], "minimum": 100, "maximum": 599, "pattern": "^[345]xx$"}
            }
        }
    }$json$::pg_catalog.jsonb
$sql$;

create or replace function ulak._auth_schema(p_type text)
returns jsonb
language sql
immutable
set search_path = pg_catalog, pg_temp
as $sql$
    select $json${
        "basic": {
            "required": ["username", "password"],
            "additionalProperties": false,
            "properties": {
                "type": true,
                "username": {"type": "string", "minLength": 1},
                "password": {"type": "string"}
            }
        },
        "bearer": {
            "required": ["token"],
            "additionalProperties": false,
            "properties": {"type": true, "token": {"type": "string", "minLength": 1}}
        },
        "oauth2": {
            "required": ["token_url", "client_id", "client_secret"],
            "additionalProperties": false,
            "properties": {
                "type": true,
                "token_url": {"type": "string"},
                "client_id": {"type": "string", "minLength": 1},
                "client_secret": {"type": "string", "minLength": 1},
                "scope": {"type": "string"},
                "audience": {"type": "string", "minLength": 1},
                "credentials": {"enum": ["header", "body"]}
            }
        },
        "aws_sigv4": {
            "required": ["access_key", "secret_key", "region", "service"],
            "additionalProperties": false,
            "properties": {
                "type": true,
                "access_key": {"type": "string", "minLength": 1},
                "secret_key": {"type": "string", "minLength": 1},
                "region": {"type": "string", "pattern": "^[a-z0-9-]+$"},
                "service": {"type": "string", "pattern": "^[a-z0-9-]+$"},
                "session_token": {"type": "string", "minLength": 1}
            }
        }
    }$json$::pg_catalog.jsonb -> p_type
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

-- Headers that ulak or libcurl sets: a config or a message must not.
create or replace function ulak._reserved_headers()
returns text[]
language sql
immutable
as $sql$
    select array[
        'host', 'content-length', 'transfer-encoding', 'connection', 'keep-alive', 'proxy-connection', 'te', 'trailer',
        'upgrade', 'expect', 'accept-encoding', 'webhook-id', 'webhook-timestamp', 'webhook-signature', 'ulak-attempt'
    ]
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
        -- A method may be written in lower case.
        case
            when jsonb_typeof(p_config -> 'method') = 'string' then jsonb_set(p_config, '{method}', to_jsonb(v_method))
            else p_config
        end
    );
begin
    v_violation := coalesce(v_violation, ulak._circuit_breaker_violation(p_config -> 'circuit_breaker'));
    if p_protocol = 'http' and v_violation is null then
        v_violation := coalesce(
            ulak._url_violation('.url', p_config ->> 'url'),
            ulak._headers_violation(p_config -> 'headers', p_config ? 'auth'),
            ulak._auth_violation(p_config -> 'auth'),
            ulak._signing_secret_violation(p_config ->> 'signing_secret'),
            ulak._signature_violation(p_config),
            ulak._proxy_violation(p_config -> 'proxy'),
            ulak._http_keys_violation(p_config)
        );
    end if;
    return v_violation;
end
$plpgsql$;

-- No userinfo (it would end in logs), nothing that two parsers could read in two ways.
create or replace function ulak._url_violation(p_path text, p_url text)
returns text[]
language plpgsql
immutable
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_authority text := substring(p_url from '^[Hh][Tt][Tt][Pp][Ss]?://([^/?#]*)');
    v_port text := substring(v_authority from ':([0-9]{1,5})$');
    v_problem text;
begin
    if p_url is null then
        return null;
    end if;
    v_problem := case
        when length(p_url) > 8192 then 'must have at most 8192 characters'
        when p_url ~ E'[^\\x21-\\x7e]' then 'must not have spaces, control characters or characters beyond ASCII'
        when p_url ~ E'[\\\\#]' then 'must not have a fragment or a backslash'
        when v_authority is null then 'must start with http:// or https://'
        when v_authority ~ '@' then 'must not have a user or a password'
        when v_authority !~ E'^([A-Za-z0-9._~-]+|\\[[0-9A-Fa-f:.]+\\])(:[0-9]{1,5})?$'
            then 'must have a valid host, and digits as port'
        when v_port::integer not between 1 and 65535 then 'must have a port from 1 to 65535'
    end;
    if v_problem is not null then
        return array[
            p_path,
            v_problem,
            'Such as https://example.com/hooks; percent-encode the path, put credentials in "auth".'
        ];
    end if;
    return null;
end
$plpgsql$;

create or replace function ulak._headers_violation(p_headers jsonb, p_has_auth boolean)
returns text[]
language plpgsql
immutable
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_name text;
    v_value text;
    v_seen text[] := array[]::text[];
    v_problem text;
begin
    for v_name, v_value in select h.key, h.value from jsonb_each_text(p_headers) as h loop
        v_problem := case
            when v_name !~ '^[!#$%&''*+.^_`|~0-9A-Za-z-]+$' then 'is not a valid header name'
            when v_value ~ E'[\\x01-\\x08\\x0a-\\x1f\\x7f]' then 'must not have line breaks or other control characters'
            when lower(v_name collate "C") = any(ulak._reserved_headers()) then 'is a header that ulak sets itself'
            when lower(v_name collate "C") = 'authorization' and p_has_auth then 'is set by "auth" already'
            when lower(v_name collate "C") = any(v_seen) then 'is given twice'
        end;
        if v_problem is not null then
            return array['.headers' || ulak._json_path_step(v_name), v_problem, null];
        end if;
        v_seen := v_seen || lower(v_name collate "C");
    end loop;
    return null;
end
$plpgsql$;

create or replace function ulak._auth_violation(p_auth jsonb)
returns text[]
language plpgsql
immutable
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_violation text[] := ulak._json_violation(ulak._auth_schema(p_auth ->> 'type'), p_auth);
begin
    if v_violation is not null then
        v_violation[1] := '.auth' || v_violation[1];
        return v_violation;
    elsif p_auth ->> 'username' ~ ':' then
        return array['.auth.username', 'must not have a colon', null];
    end if;
    return coalesce(
        (
            select array['.auth.' || a.key, 'must not have line breaks or other control characters', null]
            from jsonb_each_text(p_auth) as a
            where a.value ~ E'[\\x01-\\x1f\\x7f]'
            limit 1
        ),
        ulak._url_violation('.auth.token_url', p_auth ->> 'token_url')
    );
end
$plpgsql$;

create or replace function ulak._proxy_violation(p_proxy jsonb)
returns text[]
language plpgsql
immutable
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    if p_proxy ? 'username' <> p_proxy ? 'password' then
        return array['.proxy', 'must have both username and password, or neither', null];
    elsif lower(split_part(p_proxy ->> 'url', ':', 1) collate "C") <> p_proxy ->> 'type' then
        return array['.proxy.type', 'must be the scheme of the proxy''s url', 'It can be left out.'];
    end if;
    return ulak._url_violation('.proxy.url', p_proxy ->> 'url');
end
$plpgsql$;

-- As Standard Webhooks writes secrets (whsec_ and base64), or any text that isn't trivially short.
create or replace function ulak._signing_secret_violation(p_secret text)
returns text[]
language plpgsql
immutable
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    if starts_with(p_secret, 'whsec_') then
        -- 16 bytes are 22 characters; padding is often lost on the way.
        if p_secret !~ '^whsec_[A-Za-z0-9+/]{22,}={0,2}$' or length(rtrim(p_secret, '=')) % 4 = 3 then
            return array[
                '.signing_secret',
                'must be whsec_ and at least 16 bytes in base64',
                'Let ulak make one: leave it out, then select ulak.rotate_secret(''endpoint'');'
            ];
        end if;
    elsif length(p_secret) < 8 or p_secret ~ E'[\\x01-\\x1f\\x7f]' then
        return array['.signing_secret', 'must have at least 8 characters and no control characters', null];
    end if;
    return null;
end
$plpgsql$;

-- Where the signature goes, in lower case, if it isn't webhook-signature.
create or replace function ulak._signature_header(p_config jsonb)
returns text
language sql
immutable
as $sql$
    select case p_config -> 'signature' ->> 'scheme'
        when 'github' then 'x-hub-signature-256'
        when 'hmac' then lower(p_config -> 'signature' ->> 'header' collate "C")
    end
$sql$;

create or replace function ulak._signature_violation(p_config jsonb)
returns text[]
language plpgsql
immutable
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_signature jsonb := p_config -> 'signature';
    v_header text := ulak._signature_header(p_config);
    v_key text;
begin
    if v_signature ->> 'scheme' <> 'hmac' then
        select k into v_key from jsonb_object_keys(v_signature) k where k <> 'scheme' limit 1;
        if found then
            return array['.signature.' || v_key, 'has no effect without "scheme": "hmac"', null];
        end if;
    elsif not v_signature ? 'header' then
        return array['.signature.header', 'is required with "scheme": "hmac"', 'Such as "x-signature".'];
    elsif v_header !~ '^[!#$%&''*+.^_`|~0-9a-z-]+$' then
        return array['.signature.header', 'is not a valid header name', null];
    elsif v_header = any (ulak._reserved_headers() || array['authorization', 'content-type', 'user-agent']) or v_header ~ '^(ulak|ce)-' then
        return array['.signature.header', 'is a header that ulak sets itself', null];
    elsif v_signature ->> 'prefix' ~ E'[^\\x20-\\x7e]' then
        return array['.signature.prefix', 'must be printable ASCII', null];
    end if;
    if exists (select from jsonb_object_keys(p_config -> 'headers') h where lower(h collate "C") = v_header) then
        return array['.signature', format('sets the header %s, which "headers" has too', v_header), null];
    end if;
    return null;
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

create or replace function ulak._http_keys_violation(p_config jsonb)
returns text[]
language plpgsql
immutable
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    if exists (select from jsonb_array_elements(p_config -> 'retry_on') as r where p_config -> 'permanent_on' @> r) then
        return array['.permanent_on', 'has a status that retry_on has too', null];
    elsif p_config ? 'tls_client_key' and not p_config ? 'tls_client_cert' then
        return array['.tls_client_cert', 'is required beside tls_client_key', null];
    end if;
    return (
        select array['.' || k.key, 'must not have control characters', null]
        from unnest(array['cloudevents_type', 'cloudevents_source', 'cloudevents_subject']) k(key)
        where p_config ->> k.key ~ E'[\\x01-\\x1f\\x7f]'
        limit 1
    );
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

-- True, or an error that says what is wrong where.
create or replace function ulak.validate_endpoint_config(p_protocol text, p_config jsonb)
returns boolean
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_violation text[];
begin
    if p_protocol is null or p_protocol <> all(ulak._protocols()) then
        raise exception 'unknown protocol %', coalesce(quote_literal(p_protocol), 'null')
            using
                errcode = '22023',
                detail = 'http: the worker delivers. pull: external workers fetch.',
                hint = ulak._did_you_mean(p_protocol, ulak._protocols());
    end if;
    v_violation := ulak._config_violation(p_protocol, ulak._with_secrets(coalesce(p_config, 'null')));
    if v_violation is not null then
        perform ulak._raise_violation(format('config of %s endpoint', p_protocol), v_violation);
    end if;
    return true;
end
$plpgsql$;

comment on function ulak.validate_endpoint_config(text, jsonb) is
    'true if create_endpoint() would accept this config; otherwise the error that it would raise';
