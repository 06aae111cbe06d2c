-- The keys of an http endpoint's config.

create or replace function ulak_private.http_config_schema()
returns jsonb
language sql
immutable
set search_path = pg_catalog, pg_temp
as $sql$
    select ulak_private.with_properties(
        $json${
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
                "signature": {
                    "type": "object",
                    "required": ["scheme"],
                    "additionalProperties": false,
                    "properties": {
                        "scheme": {"enum": ["standard", "ed25519", "github", "hmac"]},
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
                "body": {"type": ["object", "array", "string"]},
                "batch_size": {"type": "integer", "minimum": 1, "maximum": 10000},
                "batch_format": {"enum": ["cloudevents", "json", "envelope"]},
                "retry_on": {
                    "type": "array",
                    "items": {"type": ["integer", "string"], "minimum": 100, "maximum": 599, "pattern": "^[345]xx$"}
                },
                "permanent_on": {
                    "type": "array",
                    "items": {"type": ["integer", "string"], "minimum": 100, "maximum": 599, "pattern": "^[345]xx$"}
                }
            }
        }$json$::jsonb,
        ulak_private.cloudevents_config_schema()
    )
$sql$;

create or replace function ulak_private.auth_schema(p_type text)
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

-- Headers that ulak or libcurl sets: a config or a message must not.
create or replace function ulak_private.reserved_headers()
returns text[]
language sql
immutable
as $sql$
    select array[
        'host', 'content-length', 'transfer-encoding', 'connection', 'keep-alive', 'proxy-connection', 'te', 'trailer',
        'upgrade', 'expect', 'accept-encoding', 'webhook-id', 'webhook-timestamp', 'webhook-signature', 'ulak-attempt'
    ]
$sql$;

-- No userinfo (it would end in logs), nothing that two parsers could read in two ways.
create or replace function ulak_private.url_violation(p_path text, p_url text)
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

create or replace function ulak_private.headers_violation(p_headers jsonb, p_has_auth boolean)
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
            when not ulak_private.is_header_name(v_name) then 'is not a valid header name'
            when not ulak_private.is_header_value(v_value) then 'must not have line breaks or other control characters'
            when lower(v_name collate "C") = any(ulak_private.reserved_headers()) then 'is a header that ulak sets itself'
            when lower(v_name collate "C") = 'authorization' and p_has_auth then 'is set by "auth" already'
            when lower(v_name collate "C") = any(v_seen) then 'is given twice'
        end;
        if v_problem is not null then
            return array['.headers' || ulak_private.json_path_step(v_name), v_problem, null];
        end if;
        v_seen := v_seen || lower(v_name collate "C");
    end loop;
    return null;
end
$plpgsql$;

create or replace function ulak_private.auth_violation(p_auth jsonb)
returns text[]
language plpgsql
immutable
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_violation text[] := ulak_private.json_violation(ulak_private.auth_schema(p_auth ->> 'type'), p_auth);
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
            where ulak_private.has_control_characters(a.value)
            limit 1
        ),
        ulak_private.url_violation('.auth.token_url', p_auth ->> 'token_url')
    );
end
$plpgsql$;

create or replace function ulak_private.proxy_violation(p_proxy jsonb)
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
    return ulak_private.url_violation('.proxy.url', p_proxy ->> 'url');
end
$plpgsql$;

-- As Standard Webhooks writes secrets (whsec_ and base64), or any text that isn't trivially short.
create or replace function ulak_private.signing_secret_violation(p_secret text)
returns text[]
language plpgsql
immutable
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    if starts_with(p_secret, 'whsk_') then
        if p_secret !~ '^whsk_([A-Za-z0-9+/]{43}=?|[A-Za-z0-9+/]{86}(==)?)$' then
            return array[
                '.signing_secret',
                'must be whsk_ and an Ed25519 key of 32 or 64 bytes in base64',
                'Let ulak make one: leave it out, with "signature": {"scheme": "ed25519"}, then select ulak.rotate_secret(''endpoint'');'
            ];
        end if;
    elsif starts_with(p_secret, 'whsec_') then
        -- 16 bytes are 22 characters; padding is often lost on the way.
        if p_secret !~ '^whsec_[A-Za-z0-9+/]{22,}={0,2}$' or length(rtrim(p_secret, '=')) % 4 = 3 then
            return array[
                '.signing_secret',
                'must be whsec_ and at least 16 bytes in base64',
                'Let ulak make one: leave it out, then select ulak.rotate_secret(''endpoint'');'
            ];
        end if;
    elsif length(p_secret) < 8 or ulak_private.has_control_characters(p_secret) then
        return array['.signing_secret', 'must have at least 8 characters and no control characters', null];
    end if;
    return null;
end
$plpgsql$;

-- Where the signature goes, in lower case, if it isn't webhook-signature.
create or replace function ulak_private.signature_header(p_config jsonb)
returns text
language sql
immutable
set search_path = pg_catalog, pg_temp
as $sql$
    select case p_config -> 'signature' ->> 'scheme'
        when 'github' then 'x-hub-signature-256'
        when 'hmac' then lower(p_config -> 'signature' ->> 'header' collate "C")
    end
$sql$;

create or replace function ulak_private.signature_violation(p_config jsonb)
returns text[]
language plpgsql
immutable
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_signature jsonb := p_config -> 'signature';
    v_header text := ulak_private.signature_header(p_config);
    v_key text;
begin
    if v_signature ->> 'scheme' <> 'hmac' then
        select k into v_key from jsonb_object_keys(v_signature) k where k <> 'scheme' limit 1;
        if found then
            return array['.signature.' || v_key, 'has no effect without "scheme": "hmac"', null];
        end if;
    elsif not v_signature ? 'header' then
        return array['.signature.header', 'is required with "scheme": "hmac"', 'Such as "x-signature".'];
    elsif not ulak_private.is_header_name(v_header) then
        return array['.signature.header', 'is not a valid header name', null];
    elsif v_header = any (ulak_private.reserved_headers() || array['authorization', 'content-type', 'user-agent']) or v_header ~ '^(ulak|ce)-' then
        return array['.signature.header', 'is a header that ulak sets itself', null];
    elsif v_signature ->> 'prefix' ~ E'[^\\x20-\\x7e]' then
        return array['.signature.prefix', 'must be printable ASCII', null];
    end if;
    if v_header is not null and starts_with(p_config ->> 'signing_secret', 'whsk_') then
        return array['.signing_secret', 'is an Ed25519 key, which makes no HMAC', 'Use "signature": {"scheme": "ed25519"}.'];
    end if;
    if exists (select from jsonb_object_keys(p_config -> 'headers') h where lower(h collate "C") = v_header) then
        return array['.signature', format('sets the header %s, which "headers" has too', v_header), null];
    end if;
    return null;
end
$plpgsql$;

create or replace function ulak_private.http_keys_violation(p_config jsonb)
returns text[]
language sql
immutable
set search_path = pg_catalog, pg_temp
as $sql$
    select coalesce(
        (
            select array['.permanent_on', 'has a status that retry_on has too', null]
            where exists (select from jsonb_array_elements(p_config -> 'retry_on') as r where p_config -> 'permanent_on' @> r)
        ),
        ulak_private.required_beside(p_config, 'tls_client_key', 'tls_client_cert'),
        ulak_private.cloudevents_violation(p_config)
    )
$sql$;

-- As ulak_private.config_violation(), for a config that has the right shape.
create or replace function ulak_private.http_config_violation(p_config jsonb)
returns text[]
language sql
immutable
set search_path = pg_catalog, pg_temp
as $sql$
    select coalesce(
        ulak_private.url_violation('.url', p_config ->> 'url'),
        ulak_private.headers_violation(p_config -> 'headers', p_config ? 'auth'),
        ulak_private.auth_violation(p_config -> 'auth'),
        ulak_private.signing_secret_violation(p_config ->> 'signing_secret'),
        ulak_private.signature_violation(p_config),
        ulak_private.proxy_violation(p_config -> 'proxy'),
        ulak_private.http_keys_violation(p_config),
        ulak_private.template_violation(p_config)
    )
$sql$;
