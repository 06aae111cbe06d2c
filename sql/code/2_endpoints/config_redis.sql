-- The keys of a redis endpoint's config. The worker adds each message to a stream.

create or replace function ulak_private.redis_config_schema()
returns jsonb
language sql
immutable
as $sql$
    select $json${
        "required": ["host", "stream_key"],
        "properties": {
            "host": {"type": "string", "maxLength": 253},
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
    }$json$::pg_catalog.jsonb
$sql$;

create or replace function ulak_private.redis_config_rules()
returns table (keys text, refused text, problem text, hint text)
language sql
immutable
as $sql$
    values
        ('password', 'exists($.username) && !exists(KEY)', 'is required beside username', null),
        ('minid', 'exists(KEY) && exists($.maxlen)', 'has no effect beside maxlen', 'A stream is trimmed by one of them.'),
        ('maxlen_approximate', 'exists(KEY) && !exists($.maxlen) && !exists($.minid)', 'has no effect without maxlen or minid', null)
$sql$;
