-- The keys of an http endpoint's config.

create or replace function ulak_private.http_config_schema()
returns jsonb
language sql
immutable
as $sql$
    select $json${
        "required": ["url"],
        "properties": {
            "url": {"type": "string", "maxLength": 8192},
            "method": {"enum": ["POST", "PUT", "PATCH", "DELETE"]},
            "headers": {"type": "object", "additionalProperties": {"type": "string"}},
            "timeout": {"type": "number", "minimum": 0.1, "maximum": 300},
            "connect_timeout": {"type": "number", "minimum": 0.1, "maximum": 60},
            "signing_secret": {"type": "string"},
            "signature": {
                "type": "object", "required": ["scheme"], "additionalProperties": false,
                "properties": {
                    "scheme": {"enum": ["standard", "ed25519", "github", "hmac"]},
                    "header": {"type": "string", "minLength": 1, "maxLength": 100},
                    "prefix": {"type": "string", "maxLength": 100},
                    "encoding": {"enum": ["hex", "base64"]},
                    "algorithm": {"enum": ["sha1", "sha256", "sha512"]}
                }
            },
            "auth": {
                "type": "object", "required": ["type"], "additionalProperties": false,
                "properties": {
                    "type": {"enum": ["basic", "bearer", "oauth2", "aws_sigv4"]},
                    "username": {"type": "string", "minLength": 1},
                    "password": {"type": "string"},
                    "token": {"type": "string", "minLength": 1},
                    "token_url": {"type": "string", "maxLength": 8192},
                    "client_id": {"type": "string", "minLength": 1},
                    "client_secret": {"type": "string", "minLength": 1},
                    "scope": {"type": "string"},
                    "audience": {"type": "string", "minLength": 1},
                    "credentials": {"enum": ["header", "body"]},
                    "access_key": {"type": "string", "minLength": 1},
                    "secret_key": {"type": "string", "minLength": 1},
                    "region": {"type": "string", "pattern": "^[a-z0-9-]+$"},
                    "service": {"type": "string", "pattern": "^[a-z0-9-]+$"},
                    "session_token": {"type": "string", "minLength": 1}
                }
            },
            "tls_client_cert": {"type": "string", "minLength": 1},
            "tls_client_key": {"type": "string", "minLength": 1},
            "tls_ca_bundle": {"type": "string", "minLength": 1},
            "tls_pinned_public_key": {"type": "string", "minLength": 1},
            "ssl_verify": {"type": "boolean"},
            "proxy": {
                "type": "object", "required": ["url"], "additionalProperties": false,
                "properties": {
                    "url": {"type": "string", "maxLength": 8192},
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
    }$json$::pg_catalog.jsonb
$sql$;

-- Headers that ulak or libcurl sets. Neither a config nor a message may set them.
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

-- The header that carries the signature, in lower case; null: webhook-signature.
create or replace function ulak_private.signature_header(p_config jsonb)
returns text
language sql
immutable
as $sql$
    select case p_config -> 'signature' ->> 'scheme'
        when 'github' then 'x-hub-signature-256'
        when 'hmac' then lower(p_config -> 'signature' ->> 'header' collate "C")
    end
$sql$;

-- A url must not have a user, which would end up in logs, nor anything that two parsers could read differently.
create or replace function ulak_private.http_url_rules()
returns table (keys text, refused text, problem text, hint text)
language sql
immutable
as $sql$
    select
        'url,proxy.url,auth.token_url', u.refused, u.problem,
        'Such as https://example.com/hooks; percent-encode the path, put credentials in "auth".'
    from (
        values
            ($$KEY like_regex "[^\x21-\x7e]" flag "s"$$, 'must not have spaces, control characters or characters beyond ASCII'),
            ($$KEY like_regex "[\\\\#]"$$, 'must not have a fragment or a backslash'),
            ('exists(KEY ? (!(@ like_regex "^https?://" flag "i")))', 'must start with http:// or https://'),
            ('KEY like_regex "^[^/]*//[^/?]*@"', 'must not have a user or a password'),
            (
                ulak_private.bad_server_condition('[^/]*//([A-Za-z0-9._~-]+|[[][0-9A-Fa-f:.]+[]])(:PORT)?([/?].*)?'),
                'must have a valid host, and no port or one from 1 to 65535'
            )
    ) u(refused, problem)
$sql$;

create or replace function ulak_private.http_config_rules()
returns table (keys text, refused text, problem text, hint text)
language sql
immutable
as $sql$
    select u.* from ulak_private.http_url_rules() u
    union all
    values
        ('proxy', 'exists(KEY.username) && !exists(KEY.password)', 'must have both username and password, or neither', null),
        ('proxy', 'exists(KEY.password) && !exists(KEY.username)', 'must have both username and password, or neither', null),
        ('proxy.type', 'KEY == "http" && $.proxy.url like_regex "^https:" flag "i"', 'must be the scheme of the proxy''s url', 'It can be left out.'),
        ('proxy.type', 'KEY == "https" && $.proxy.url like_regex "^http:" flag "i"', 'must be the scheme of the proxy''s url', 'It can be left out.'),
        ('auth.username,auth.password', '$.auth.type == "basic" && !exists(KEY)', 'is required', null),
        ('auth.username,auth.password', 'exists(KEY) && $.auth.type != "basic"', 'has no effect without "type": "basic"', null),
        ('auth.token', '$.auth.type == "bearer" && !exists(KEY)', 'is required', null),
        ('auth.token', 'exists(KEY) && $.auth.type != "bearer"', 'has no effect without "type": "bearer"', null),
        ('auth.token_url,auth.client_id,auth.client_secret', '$.auth.type == "oauth2" && !exists(KEY)', 'is required', null),
        (
            'auth.token_url,auth.client_id,auth.client_secret,auth.scope,auth.audience,auth.credentials', 'exists(KEY) && $.auth.type != "oauth2"',
            'has no effect without "type": "oauth2"', null
        ),
        ('auth.access_key,auth.secret_key,auth.region,auth.service', '$.auth.type == "aws_sigv4" && !exists(KEY)', 'is required', null),
        (
            'auth.access_key,auth.secret_key,auth.region,auth.service,auth.session_token', 'exists(KEY) && $.auth.type != "aws_sigv4"',
            'has no effect without "type": "aws_sigv4"', null
        ),
        ('auth.username', 'KEY like_regex ":"', 'must not have a colon', null),
        (
            'auth.username,auth.password,auth.token,auth.client_id,auth.client_secret,auth.scope,auth.audience,auth.access_key,auth.secret_key,auth.session_token',
            $$KEY like_regex "[\x01-\x1f\x7f]"$$, 'must not have line breaks or other control characters', null
        ),
        ('tls_client_cert', 'exists($.tls_client_key) && !exists(KEY)', 'is required beside tls_client_key', null),
        ('permanent_on', 'KEY[*] == $.retry_on[*]', 'has a status that retry_on has too', null),
        -- A secret as Standard Webhooks writes it, or any text of 8 characters. 16 bytes are 22 characters of base64; padding may be missing.
        (
            'signing_secret',
            'exists(KEY ? (@ starts with "whsec_" && !(@ like_regex "^whsec_([A-Za-z0-9+/]{4}){5}([A-Za-z0-9+/]{4})*[A-Za-z0-9+/]{2,4}={0,2}$")))',
            'must be whsec_ and at least 16 bytes in base64', 'Let ulak make one: leave it out, then select ulak.rotate_secret(''endpoint'');'
        ),
        (
            'signing_secret',
            'exists(KEY ? (@ starts with "whsk_" && !(@ like_regex "^whsk_([A-Za-z0-9+/]{43}=?|[A-Za-z0-9+/]{86}(==)?)$")))',
            'must be whsk_ and an Ed25519 key of 32 or 64 bytes in base64',
            'Let ulak make one: leave it out, with "signature": {"scheme": "ed25519"}, then select ulak.rotate_secret(''endpoint'');'
        ),
        (
            'signing_secret', $$exists(KEY ? (!(@ like_regex "^[^\x01-\x1f\x7f]{8}[^\x01-\x1f\x7f]*$")))$$,
            'must have at least 8 characters and no control characters', null
        ),
        (
            'signing_secret', 'KEY starts with "whsk_" && ($.signature.scheme == "hmac" || $.signature.scheme == "github")',
            'is an Ed25519 key, which makes no HMAC', 'Use "signature": {"scheme": "ed25519"}.'
        ),
        (
            'signature.header,signature.prefix,signature.encoding,signature.algorithm', 'exists(KEY) && $.signature.scheme != "hmac"',
            'has no effect without "scheme": "hmac"', null
        ),
        ('signature.header', '$.signature.scheme == "hmac" && !exists(KEY)', 'is required with "scheme": "hmac"', 'Such as "x-signature".'),
        ('signature.header', 'exists(KEY ? (!(@ like_regex "^[!#$%&''*+.^_`|~0-9A-Za-z-]+$")))', 'is not a valid header name', null),
        (
            'signature.header',
            format('KEY like_regex "^((ulak|ce)-|(authorization|content-type|user-agent|%s)$)" flag "i"', array_to_string(ulak_private.reserved_headers(), '|')),
            'is a header that ulak sets itself', null
        ),
        ('signature.prefix', $$KEY like_regex "[^\x20-\x7e]" flag "s"$$, 'must be printable ASCII', null)
$sql$;
