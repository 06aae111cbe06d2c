-- The keys of a kafka endpoint's config. The worker hands its messages to librdkafka's idempotent producer.

create or replace function ulak_private.kafka_config_schema()
returns jsonb
language sql
immutable
as $sql$
    select pg_catalog.jsonb_set(
        $json${
            "required": ["broker", "topic"],
            "properties": {
                "broker": {"type": ["string", "array"], "minLength": 1, "minItems": 1, "maxItems": 100, "items": {"type": "string"}},
                "topic": {"type": "string", "minLength": 1, "maxLength": 1000},
                "allow_separators": {"type": "boolean"},
                "key": {"type": "string", "minLength": 1, "maxLength": 1000},
                "partition": {"type": "integer", "minimum": 0, "maximum": 2147483647},
                "headers": {"type": "object", "additionalProperties": {"type": "string"}}
            }
        }$json$,
        '{properties,options}',
        ulak_private.kafka_options_schema()
    )
$sql$;

-- The settings of librdkafka that a config may choose, with librdkafka's names and ranges. Missing on purpose: settings that run a command,
-- load a library or read a file that ulak doesn't check (plugins, engines, Kerberos, key stores), that call a server that ulak doesn't check
-- (OAUTHBEARER), or that break a promise (fewer acknowledgements, no idempotence).
create or replace function ulak_private.kafka_options_schema()
returns jsonb
language sql
immutable
as $sql$
    select $json${
        "type": "object", "additionalProperties": false,
        "properties": {
            "client.id": {"type": "string", "minLength": 1, "maxLength": 255},
            "security.protocol": {"enum": ["plaintext", "ssl", "sasl_plaintext", "sasl_ssl", "PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"]},
            "sasl.mechanism": {"enum": ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"]},
            "sasl.mechanisms": {"enum": ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"]},
            "sasl.username": {"type": "string", "minLength": 1},
            "sasl.password": {"type": "string", "minLength": 1},
            "ssl.ca.location": {"type": "string", "minLength": 1},
            "ssl.ca.pem": {"type": "string", "minLength": 1},
            "ssl.certificate.location": {"type": "string", "minLength": 1},
            "ssl.certificate.pem": {"type": "string", "minLength": 1},
            "ssl.key.location": {"type": "string", "minLength": 1},
            "ssl.key.pem": {"type": "string", "minLength": 1},
            "ssl.key.password": {"type": "string", "minLength": 1},
            "ssl.cipher.suites": {"type": "string", "minLength": 1},
            "ssl.curves.list": {"type": "string", "minLength": 1},
            "ssl.sigalgs.list": {"type": "string", "minLength": 1},
            "ssl.endpoint.identification.algorithm": {"enum": ["https", "none"]},
            "enable.ssl.certificate.verification": {"enum": [true, false, "true", "false"]},
            "acks": {"enum": ["all", "-1", -1]},
            "request.required.acks": {"enum": ["all", "-1", -1]},
            "enable.idempotence": {"enum": [true, "true"]},
            "message.timeout.ms": {"type": "integer", "minimum": 1000, "maximum": 300000},
            "delivery.timeout.ms": {"type": "integer", "minimum": 1000, "maximum": 300000},
            "request.timeout.ms": {"type": "integer", "minimum": 1, "maximum": 300000},
            "socket.timeout.ms": {"type": "integer", "minimum": 10, "maximum": 300000},
            "socket.connection.setup.timeout.ms": {"type": "integer", "minimum": 1000, "maximum": 60000},
            "socket.keepalive.enable": {"enum": [true, false, "true", "false"]},
            "socket.nagle.disable": {"enum": [true, false, "true", "false"]},
            "broker.address.family": {"enum": ["any", "v4", "v6"]},
            "connections.max.idle.ms": {"type": "integer", "minimum": 0, "maximum": 2147483647},
            "reconnect.backoff.ms": {"type": "integer", "minimum": 0, "maximum": 60000},
            "reconnect.backoff.max.ms": {"type": "integer", "minimum": 100, "maximum": 60000},
            "retries": {"type": "integer", "minimum": 1, "maximum": 2147483647},
            "message.send.max.retries": {"type": "integer", "minimum": 1, "maximum": 2147483647},
            "retry.backoff.ms": {"type": "integer", "minimum": 1, "maximum": 60000},
            "metadata.max.age.ms": {"type": "integer", "minimum": 1000, "maximum": 86400000},
            "topic.metadata.refresh.interval.ms": {"type": "integer", "minimum": 1000, "maximum": 3600000},
            "topic.metadata.propagation.max.ms": {"type": "integer", "minimum": 0, "maximum": 3600000},
            "linger.ms": {"type": "integer", "minimum": 0, "maximum": 900},
            "queue.buffering.max.ms": {"type": "integer", "minimum": 0, "maximum": 900},
            "batch.size": {"type": "integer", "minimum": 1, "maximum": 2147483647},
            "batch.num.messages": {"type": "integer", "minimum": 1, "maximum": 1000000},
            "message.max.bytes": {"type": "integer", "minimum": 1000, "maximum": 1000000000},
            "max.in.flight": {"type": "integer", "minimum": 1, "maximum": 5},
            "max.in.flight.requests.per.connection": {"type": "integer", "minimum": 1, "maximum": 5},
            "compression.type": {"enum": ["none", "gzip", "snappy", "lz4", "zstd"]},
            "compression.codec": {"enum": ["none", "gzip", "snappy", "lz4", "zstd"]},
            "compression.level": {"type": "integer", "minimum": -1, "maximum": 12},
            "partitioner": {"enum": ["random", "consistent", "consistent_random", "murmur2", "murmur2_random", "fnv1a", "fnv1a_random"]},
            "sticky.partitioning.linger.ms": {"type": "integer", "minimum": 0, "maximum": 900000}
        }
    }$json$::pg_catalog.jsonb
$sql$;

create or replace function ulak_private.kafka_config_rules()
returns table (keys text, refused text, problem text, hint text)
language sql
immutable
as $sql$
    with option(name, key) as (
        select o, format('options."%s"', o) from pg_catalog.jsonb_object_keys(ulak_private.kafka_options_schema() -> 'properties') o
    ),
    -- Two names for one setting: librdkafka would take the one that comes last.
    twice(name, other) as (
        values
            ('acks', 'request.required.acks'),
            ('sasl.mechanism', 'sasl.mechanisms'),
            ('message.timeout.ms', 'delivery.timeout.ms'),
            ('retries', 'message.send.max.retries'),
            ('linger.ms', 'queue.buffering.max.ms'),
            ('max.in.flight', 'max.in.flight.requests.per.connection'),
            ('compression.type', 'compression.codec'),
            ('ssl.ca.location', 'ssl.ca.pem'),
            ('ssl.certificate.location', 'ssl.certificate.pem'),
            ('ssl.key.location', 'ssl.key.pem')
    )
    values
        (
            'broker', ulak_private.bad_servers_condition('HOST:PORT'), 'must be host:port, or several of them with commas between',
            'Such as "kafka1.example.com:9092,kafka2.example.com:9092".'
        ),
        -- Names in braces are filled in from the message's metadata; the worker checks the result.
        (
            'topic', 'exists(KEY ? (!(@ like_regex "^([A-Za-z0-9._-]|[{][^}]*[}])*$") || @ like_regex "^[^{]{250}|^[.][.]?$"))',
            'must have at most 249 characters, of letters, digits, dot, underscore and hyphen', null
        ),
        (
            'options."reconnect.backoff.ms"', 'KEY > $.options."reconnect.backoff.max.ms"', 'must not exceed reconnect.backoff.max.ms', null
        ),
        (
            'options."sasl.username",options."sasl.password"', '$.options."security.protocol" like_regex "^sasl_" flag "i" && !exists(KEY)',
            'is required with "security.protocol": "sasl_ssl" or "sasl_plaintext"', null
        ),
        (
            'options."sasl.mechanism"',
            '$.options."security.protocol" like_regex "^sasl_" flag "i" && !exists(KEY) && !exists($.options."sasl.mechanisms")',
            'is required with "security.protocol": "sasl_ssl" or "sasl_plaintext"', 'PLAIN, SCRAM-SHA-256 or SCRAM-SHA-512.'
        ),
        (
            'options."ssl.key.location"',
            '(exists($.options."ssl.certificate.location") || exists($.options."ssl.certificate.pem")) && !exists(KEY) && !exists($.options."ssl.key.pem")',
            'is required beside a certificate, or ssl.key.pem', null
        ),
        (
            'options."ssl.certificate.location"',
            '(exists($.options."ssl.key.location") || exists($.options."ssl.key.pem")) && !exists(KEY) && !exists($.options."ssl.certificate.pem")',
            'is required beside a key, or ssl.certificate.pem', null
        )
    union all
    select format('options."%s"', t.other), format('exists(KEY) && exists($.options."%s")', t.name), 'must not stand beside ' || t.name, null
    from twice t
    union all
    -- PEM has line breaks.
    select o.key, $$KEY like_regex "[\x01-\x1f\x7f]"$$, 'must not have control characters', null from option o where o.name not like '%.pem'
    union all
    -- Without an error nobody would notice that the connection is not encrypted or not authenticated.
    select
        o.key, 'exists(KEY) && !($.options."security.protocol" like_regex "ssl$" flag "i")',
        'has no effect without "security.protocol": "ssl" or "sasl_ssl"', null
    from option o
    where o.name ~ '^(ssl|enable[.]ssl)[.]'
    union all
    select
        o.key, 'exists(KEY) && !($.options."security.protocol" like_regex "^sasl_" flag "i")',
        'has no effect without "security.protocol": "sasl_ssl" or "sasl_plaintext"', null
    from option o
    where o.name ~ '^sasl[.]'
$sql$;
