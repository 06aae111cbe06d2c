-- The keys of a nats endpoint's config. The worker publishes each message to a subject.

create or replace function ulak_private.nats_config_schema()
returns jsonb
language sql
immutable
as $sql$
    select $json${
        "required": ["url", "subject"],
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
                "type": "object", "additionalProperties": false,
                "properties": {
                    "ping_interval": {"type": "integer", "minimum": 100, "maximum": 9999999},
                    "max_pings_out": {"type": "integer", "minimum": 1, "maximum": 99},
                    "max_reconnect": {"type": "integer", "minimum": -1, "maximum": 999999999},
                    "reconnect_wait": {"type": "integer", "minimum": 0, "maximum": 999999999},
                    "io_buf_size": {"type": "integer", "minimum": 0, "maximum": 999999999}
                }
            }
        }
    }$json$::pg_catalog.jsonb
$sql$;

create or replace function ulak_private.nats_config_rules()
returns table (keys text, refused text, problem text, hint text)
language sql
immutable
as $sql$
    values
        ('url', 'KEY like_regex "@"', 'must not have credentials', 'They belong in "username" and "password", or in "token".'),
        (
            'url', ulak_private.bad_servers_condition('((nats|tls)://)?HOST(:PORT)?/?'), 'must be nats://host:port, or several with commas between',
            'Such as "nats://n1.example.com:4222,nats://n2.example.com:4222".'
        ),
        -- Names in braces are filled in from the message's metadata; the worker checks the result.
        (
            'subject', 'KEY like_regex "[[:space:]*>]|^[.]|[.][.]|[.]$"', 'must not have spaces, wildcards (* or >) or empty tokens',
            'A message is published to one subject, such as "orders.{event_type}".'
        ),
        ('subject', 'KEY like_regex "^([$](?!KV[.])|_INBOX[.])"', 'must not be one of the server''s own ($JS., $SYS., _INBOX.)', null),
        ('stream', 'exists(KEY) && $.jetstream == false', 'has no effect with "jetstream": false', null),
        ('password', 'exists($.username) && !exists(KEY)', 'is required beside username', null),
        ('username', 'exists($.password) && !exists(KEY)', 'is required beside password', null),
        -- A server takes one of several credentials, and it is unpredictable which.
        (
            'nkey_seed,token,username', 'exists(KEY) && exists($.credentials_file)', 'must not stand beside credentials_file',
            'An endpoint has one way to log in.'
        ),
        ('token,username', 'exists(KEY) && exists($.nkey_seed)', 'must not stand beside nkey_seed', 'An endpoint has one way to log in.'),
        ('username', 'exists(KEY) && exists($.token)', 'must not stand beside token', 'An endpoint has one way to log in.'),
        ('credentials_file', 'KEY like_regex "[.][.]"', 'must not have ".."', null)
$sql$;
