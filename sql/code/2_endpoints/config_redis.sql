-- The keys of a redis endpoint's config. The worker adds each message to a stream.

create or replace function ulak_private.redis_config_schema()
returns jsonb
language sql
immutable
set search_path = pg_catalog, pg_temp
as $sql$
    select ulak_private.with_properties(
        $json${
            "type": "object",
            "required": ["host", "stream_key"],
            "additionalProperties": false,
            "properties": {
                "host": {"type": "string"},
                "port": {"type": "integer", "minimum": 1, "maximum": 65535},
                "db": {"type": "integer", "minimum": 0, "maximum": 1000000},
                "username": {"type": "string", "minLength": 1, "maxLength": 1024},
                "password": {"type": "string", "minLength": 1, "maxLength": 4096},
                "stream_key": {"type": "string", "minLength": 1, "maxLength": 1024},
                "allow_separators": {"type": "boolean"},
                "maxlen": {"type": "integer", "minimum": 1, "maximum": 9007199254740991},
                "maxlen_approximate": {"type": "boolean"},
                "minid": {"type": "string", "pattern": "^[0-9]{1,20}(-[0-9]{1,20})?$"},
                "nomkstream": {"type": "boolean"},
                "connect_timeout": {"type": "number", "minimum": 0.1, "maximum": 60},
                "command_timeout": {"type": "number", "minimum": 0.1, "maximum": 300}
            }
        }$json$::jsonb,
        ulak_private.broker_tls_config_schema()
    )
$sql$;

-- As ulak_private.config_violation(), for a config that has the right shape.
create or replace function ulak_private.redis_config_violation(p_config jsonb)
returns text[]
language sql
immutable
set search_path = pg_catalog, pg_temp
as $sql$
    select coalesce(
        ulak_private.host_violation('.host', p_config ->> 'host'),
        ulak_private.route_violation('.stream_key', p_config ->> 'stream_key'),
        ulak_private.tls_violation(p_config),
        ulak_private.required_beside(p_config, 'username', 'password'),
        case
            when p_config ? 'maxlen' and p_config ? 'minid'
                then array['.minid', 'has no effect beside maxlen', 'A stream is trimmed by one of them.']
            when p_config ? 'maxlen_approximate' and not p_config ?| array['maxlen', 'minid']
                then array['.maxlen_approximate', 'has no effect without maxlen or minid', null]
        end
    )
$sql$;
