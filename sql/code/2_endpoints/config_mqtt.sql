-- The keys of an mqtt endpoint's config. The worker publishes each message to a topic.

create or replace function ulak_private.mqtt_config_schema()
returns jsonb
language sql
immutable
set search_path = pg_catalog, pg_temp
as $sql$
    select ulak_private.with_properties(
        $json${
            "type": "object",
            "required": ["broker", "topic"],
            "additionalProperties": false,
            "properties": {
                "broker": {"type": "string"},
                "port": {"type": "integer", "minimum": 1, "maximum": 65535},
                "topic": {"type": "string", "minLength": 1, "maxLength": 16000},
                "allow_separators": {"type": "boolean"},
                "qos": {"enum": [0, 1, 2]},
                "retain": {"type": "boolean"},
                "client_id": {"type": "string", "minLength": 1, "maxLength": 1000},
                "username": {"type": "string", "minLength": 1, "maxLength": 1024},
                "password": {"type": "string", "minLength": 1, "maxLength": 4096},
                "clean_session": {"type": "boolean"},
                "timeout": {"type": "number", "minimum": 0.1, "maximum": 300},
                "will_topic": {"type": "string", "minLength": 1, "maxLength": 16000},
                "will_payload": {"type": "string", "maxLength": 16000},
                "will_qos": {"enum": [0, 1, 2]},
                "will_retain": {"type": "boolean"},
                "tls_insecure": {"type": "boolean"}
            }
        }$json$::jsonb,
        ulak_private.cloudevents_config_schema() || ulak_private.broker_tls_config_schema()
    )
$sql$;

-- As ulak_private.config_violation(), for a config that has the right shape.
create or replace function ulak_private.mqtt_config_violation(p_config jsonb)
returns text[]
language sql
immutable
set search_path = pg_catalog, pg_temp
as $sql$
    select coalesce(
        ulak_private.host_violation('.broker', p_config ->> 'broker'),
        ulak_private.route_violation('.topic', p_config ->> 'topic'),
        ulak_private.tls_violation(p_config),
        (
            select array['.' || t.key, 'must not have a wildcard (+ or #)', 'A message is published to one topic.']
            from unnest(array['topic', 'will_topic']) t(key)
            where p_config ->> t.key ~ '[+#]'
            limit 1
        ),
        (
            select array['.' || k.key, 'has no effect without will_topic', null]
            from unnest(array['will_payload', 'will_qos', 'will_retain']) k(key)
            where p_config ? k.key and not p_config ? 'will_topic'
            limit 1
        ),
        ulak_private.required_beside(p_config, 'password', 'username'),
        ulak_private.cloudevents_violation(p_config),
        case
            when p_config -> 'clean_session' = 'false' and not p_config ? 'client_id'
                then array['.client_id', 'is required with "clean_session": false', 'The broker finds a session by the id of its client.']
        end
    )
$sql$;
