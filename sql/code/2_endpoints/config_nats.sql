-- The keys of a nats endpoint's config. The worker publishes each message to a subject.

create or replace function ulak_private.nats_config_schema()
returns jsonb
language sql
immutable
set search_path = pg_catalog, pg_temp
as $sql$
    select ulak_private.with_properties(
        $json${
            "type": "object",
            "required": ["url", "subject"],
            "additionalProperties": false,
            "properties": {
                "url": {"type": ["string", "array"], "minLength": 1, "minItems": 1, "maxItems": 100, "items": {"type": "string"}},
                "subject": {"type": "string", "minLength": 1, "maxLength": 1024},
                "allow_separators": {"type": "boolean"},
                "jetstream": {"type": "boolean"},
                "stream": {"type": "string", "pattern": "^[^ .*>/\\\\[:cntrl:]]{1,255}$"},
                "token": {"type": "string", "minLength": 1, "maxLength": 4096},
                "username": {"type": "string", "minLength": 1, "maxLength": 1024},
                "password": {"type": "string", "minLength": 1, "maxLength": 4096},
                "nkey_seed": {"type": "string", "pattern": "^SU[A-Z2-7]{56}$"},
                "credentials_file": {"type": "string", "pattern": "^/.*[.]creds$"},
                "headers": {"type": "object", "additionalProperties": {"type": "string"}},
                "timeout": {"type": "number", "minimum": 0.1, "maximum": 300},
                "options": {
                    "type": "object",
                    "additionalProperties": false,
                    "properties": {
                        "ping_interval": {"type": ["integer", "string"], "minimum": 100, "maximum": 9999999, "pattern": "^[1-9][0-9]{2,6}$"},
                        "max_pings_out": {"type": ["integer", "string"], "minimum": 1, "maximum": 99, "pattern": "^[1-9][0-9]?$"},
                        "max_reconnect": {"type": ["integer", "string"], "pattern": "^(-1|[0-9]{1,9})$"},
                        "reconnect_wait": {"type": ["integer", "string"], "pattern": "^[0-9]{1,9}$"},
                        "io_buf_size": {"type": ["integer", "string"], "pattern": "^[0-9]{1,9}$"}
                    }
                }
            }
        }$json$::jsonb,
        ulak_private.cloudevents_config_schema() || ulak_private.broker_tls_config_schema()
    )
$sql$;

-- As ulak_private.config_violation(), for a config that has the right shape.
create or replace function ulak_private.nats_config_violation(p_config jsonb)
returns text[]
language sql
immutable
set search_path = pg_catalog, pg_temp
as $sql$
    select coalesce(
        ulak_private.nats_url_violation(p_config -> 'url'),
        ulak_private.route_violation('.subject', p_config ->> 'subject'),
        ulak_private.nats_login_violation(p_config),
        ulak_private.broker_headers_violation(p_config -> 'headers', '^(ulak-|ce-|nats-|content-type$)'),
        ulak_private.tls_violation(p_config),
        ulak_private.cloudevents_violation(p_config),
        case
            -- Names in braces are filled in from the message's metadata; the worker checks the result.
            when regexp_replace(p_config ->> 'subject', E'\\{[^}]*\\}', 'x', 'g') ~ E'[[:space:]*>]|^\\.|\\.\\.|\\.$' then array[
                '.subject',
                'must not have spaces, wildcards (* or >) or empty tokens',
                'A message is published to one subject, such as "orders.{event_type}".'
            ]
            when p_config ->> 'subject' ~ E'^(\\$(?!KV\\.)|_INBOX\\.)' then
                array['.subject', 'must not be one of the server''s own ($JS., $SYS., _INBOX.)', null]
            when p_config ? 'stream' and p_config -> 'jetstream' = 'false' then
                array['.stream', 'has no effect with "jetstream": false', null]
        end
    )
$sql$;

create or replace function ulak_private.nats_url_violation(p_url jsonb)
returns text[]
language sql
immutable
set search_path = pg_catalog, pg_temp
as $sql$
    select case
        when u.url ~ '@' then
            array['.url', 'must not have credentials', 'They belong in "username" and "password", or in "token".']
        else
            array['.url', 'must be nats://host:port, or several with commas between', 'Such as "nats://n1.example.com:4222,nats://n2.example.com:4222".']
    end
    from ulak_private.listed(p_url) u(url)
    where u.url !~ E'^((nats|tls)://)?([A-Za-z0-9._-]{1,253}|\\[[0-9A-Fa-f:.]+\\])(:[0-9]{1,5})?/?$'
        or substring(u.url from ':([0-9]{1,5})/?$')::integer not between 1 and 65535
    limit 1
$sql$;

-- A server accepts one of them, and which one is unpredictable.
create or replace function ulak_private.nats_login_violation(p_config jsonb)
returns text[]
language sql
immutable
set search_path = pg_catalog, pg_temp
as $sql$
    select coalesce(
        ulak_private.required_beside(p_config, 'username', 'password'),
        ulak_private.required_beside(p_config, 'password', 'username'),
        case
            when cardinality(k.given) > 1 then
                array['.' || k.given[2], format('must not stand beside %s', k.given[1]), 'An endpoint has one way to log in.']
            when p_config ->> 'credentials_file' ~ E'\\.\\.' then
                array['.credentials_file', 'must not have ".."', null]
        end
    )
    from (
        select array(
            select w.key
            from unnest(array['credentials_file', 'nkey_seed', 'token', 'username']) with ordinality w(key, place)
            where p_config ? w.key
            order by w.place
        )
    ) k(given)
$sql$;
