-- The keys of an amqp endpoint's config. The worker publishes to RabbitMQ, which confirms each message.

create or replace function ulak_private.amqp_config_schema()
returns jsonb
language sql
immutable
set search_path = pg_catalog, pg_temp
as $sql$
    select ulak_private.with_properties(
        $json${
            "type": "object",
            "required": ["host"],
            "additionalProperties": false,
            "properties": {
                "host": {"type": "string", "minLength": 1},
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
        }$json$::jsonb,
        ulak_private.cloudevents_config_schema() || ulak_private.broker_tls_config_schema()
    )
$sql$;

-- As ulak_private.config_violation(), for a config that has the right shape.
create or replace function ulak_private.amqp_config_violation(p_config jsonb)
returns text[]
language sql
immutable
set search_path = pg_catalog, pg_temp
as $sql$
    select coalesce(
        ulak_private.host_violation('.host', p_config ->> 'host'),
        ulak_private.route_violation('.routing_key', p_config ->> 'routing_key'),
        ulak_private.required_beside(p_config, 'username', 'password'),
        ulak_private.required_beside(p_config, 'password', 'username'),
        ulak_private.cloudevents_violation(p_config),
        case
            when coalesce(p_config ->> 'exchange', '') = '' and coalesce(p_config ->> 'routing_key', '') = '' then array[
                '.routing_key',
                'is required without an exchange',
                'RabbitMQ''s default exchange takes it for the name of a queue.'
            ]
            when coalesce(p_config ->> 'exchange', '') = '' and p_config ? 'exchange_type' then
                array['.exchange_type', 'has no effect without an exchange', null]
            when ulak_private.has_control_characters(p_config ->> 'exchange') then
                array['.exchange', 'must not have control characters', null]
            -- Exchanges with these names are RabbitMQ's own and can't be declared.
            when p_config ->> 'exchange' ~ '^amq[.]' and p_config ? 'exchange_type' then array[
                '.exchange_type',
                'must not be given for an exchange that is RabbitMQ''s own',
                'It is there already.'
            ]
        end,
        ulak_private.tls_violation(p_config)
    )
$sql$;
