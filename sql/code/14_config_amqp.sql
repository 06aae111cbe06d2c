-- The keys of an amqp endpoint's config. The worker publishes to RabbitMQ, which confirms each message.

create or replace function ulak._amqp_config_schema()
returns jsonb
language sql
immutable
set search_path = pg_catalog, pg_temp
as $sql$
    select ulak._with_properties(
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
        ulak._cloudevents_config_schema() || ulak._broker_tls_config_schema()
    )
$sql$;

-- As ulak._config_violation(), for a config that has the right shape.
create or replace function ulak._amqp_config_violation(p_config jsonb)
returns text[]
language sql
immutable
set search_path = pg_catalog, pg_temp
as $sql$
    select coalesce(
        ulak._host_violation('.host', p_config ->> 'host'),
        ulak._route_violation('.routing_key', p_config ->> 'routing_key'),
        ulak._required_beside(p_config, 'username', 'password'),
        ulak._required_beside(p_config, 'password', 'username'),
        ulak._cloudevents_violation(p_config),
        case
            when coalesce(p_config ->> 'exchange', '') = '' and coalesce(p_config ->> 'routing_key', '') = '' then array[
                '.routing_key',
                'is required without an exchange',
                'RabbitMQ''s default exchange takes it for the name of a queue.'
            ]
            when coalesce(p_config ->> 'exchange', '') = '' and p_config ? 'exchange_type' then
                array['.exchange_type', 'has no effect without an exchange', null]
            when ulak._has_control_characters(p_config ->> 'exchange') then
                array['.exchange', 'must not have control characters', null]
            -- RabbitMQ has its own of these names, and lets nobody declare one.
            when p_config ->> 'exchange' ~ '^amq[.]' and p_config ? 'exchange_type' then array[
                '.exchange_type',
                'must not be given for an exchange that is RabbitMQ''s own',
                'It is there already.'
            ]
        end,
        ulak._tls_violation(p_config)
    )
$sql$;
