-- The keys of an amqp endpoint's config. The worker publishes to RabbitMQ, which confirms each message.

create or replace function ulak_private.amqp_config_schema()
returns jsonb
language sql
immutable
as $sql$
    select $json${
        "required": ["host"],
        "properties": {
            "host": {"type": "string", "maxLength": 253},
            "port": {"type": "integer", "minimum": 1, "maximum": 65535},
            "vhost": {"type": "string", "minLength": 1, "maxLength": 255},
            "username": {"type": "string", "minLength": 1},
            "password": {"type": "string"},
            "exchange": {"type": "string", "maxLength": 255},
            "exchange_type": {"enum": ["direct", "topic", "fanout", "headers"]},
            "routing_key": {"type": "string", "maxLength": 255},
            "allow_separators": {"type": "boolean"},
            "persistent": {"type": "boolean"},
            "mandatory": {"type": "boolean"},
            "heartbeat": {"type": "integer", "minimum": 0, "maximum": 3600},
            "frame_max": {"type": "integer", "minimum": 4096, "maximum": 2147483647},
            "timeout": {"type": "number", "minimum": 0.1, "maximum": 300},
            "tls_verify_peer": {"type": "boolean"}
        }
    }$json$::pg_catalog.jsonb
$sql$;

create or replace function ulak_private.amqp_config_rules()
returns table (keys text, refused text, problem text, hint text)
language sql
immutable
as $sql$
    values
        ('password', 'exists($.username) && !exists(KEY)', 'is required beside username', null),
        ('username', 'exists($.password) && !exists(KEY)', 'is required beside password', null),
        (
            'routing_key', '!exists(KEY ? (@ != "")) && !exists($.exchange ? (@ != ""))', 'is required without an exchange',
            'RabbitMQ''s default exchange takes it for the name of a queue.'
        ),
        ('exchange_type', 'exists(KEY) && !exists($.exchange ? (@ != ""))', 'has no effect without an exchange', null),
        ('exchange', $$KEY like_regex "[\x01-\x1f\x7f]"$$, 'must not have control characters', null),
        -- RabbitMQ refuses to declare its own exchanges.
        (
            'exchange_type', 'exists(KEY) && $.exchange starts with "amq."', 'must not be given for an exchange that is RabbitMQ''s own',
            'It is there already.'
        )
$sql$;
