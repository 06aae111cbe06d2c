-- The keys of an mqtt endpoint's config. The worker publishes each message to a topic.

create or replace function ulak_private.mqtt_config_schema()
returns jsonb
language sql
immutable
as $sql$
    select $json${
        "required": ["broker", "topic"],
        "properties": {
            "broker": {"type": "string", "maxLength": 253},
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
    }$json$::pg_catalog.jsonb
$sql$;

create or replace function ulak_private.mqtt_config_rules()
returns table (keys text, refused text, problem text, hint text)
language sql
immutable
as $sql$
    values
        ('broker', ulak_private.bad_host_condition(), 'must be the name or the address of a host', 'Such as "broker.example.com" or "10.0.0.5".'),
        ('topic,will_topic', 'KEY like_regex "[+#]"', 'must not have a wildcard (+ or #)', 'A message is published to one topic.'),
        ('will_payload,will_qos,will_retain', 'exists(KEY) && !exists($.will_topic)', 'has no effect without will_topic', null),
        ('username', 'exists($.password) && !exists(KEY)', 'is required beside password', null),
        (
            'client_id', '$.clean_session == false && !exists(KEY)', 'is required with "clean_session": false',
            'The broker finds a session by the id of its client.'
        )
$sql$;
