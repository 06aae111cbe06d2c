-- The keys of a kafka endpoint's config. The worker hands its messages to librdkafka's idempotent producer.

create or replace function ulak_private.kafka_config_schema()
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
                "broker": {"type": ["string", "array"], "minLength": 1, "minItems": 1, "maxItems": 100, "items": {"type": "string"}},
                "topic": {"type": "string", "minLength": 1, "maxLength": 1000},
                "allow_separators": {"type": "boolean"},
                "key": {"type": "string", "minLength": 1, "maxLength": 1000},
                "partition": {"type": "integer", "minimum": 0, "maximum": 2147483647},
                "headers": {"type": "object", "additionalProperties": {"type": "string"}}
            }
        }$json$::jsonb,
        jsonb_build_object('options', ulak_private.kafka_options_schema()) || ulak_private.cloudevents_config_schema()
    )
$sql$;

-- librdkafka's settings that a config may choose, by its names and within its ranges. Left out: what would run a command, load a
-- library or read a file that isn't judged (plugins, engines, Kerberos, key stores), ask a server that isn't judged (OAUTHBEARER), or
-- undo a promise (fewer acknowledgements, no idempotence).
create or replace function ulak_private.kafka_options_schema()
returns jsonb
language sql
immutable
as $sql$
    select $json${
        "type": "object",
        "additionalProperties": false,
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
            "message.timeout.ms": {"type": ["integer", "string"], "minimum": 1000, "maximum": 300000, "pattern": "^[0-9]{1,9}$"},
            "delivery.timeout.ms": {"type": ["integer", "string"], "minimum": 1000, "maximum": 300000, "pattern": "^[0-9]{1,9}$"},
            "request.timeout.ms": {"type": ["integer", "string"], "minimum": 1, "maximum": 300000, "pattern": "^[0-9]{1,9}$"},
            "socket.timeout.ms": {"type": ["integer", "string"], "minimum": 10, "maximum": 300000, "pattern": "^[0-9]{1,9}$"},
            "socket.connection.setup.timeout.ms": {"type": ["integer", "string"], "minimum": 1000, "maximum": 60000, "pattern": "^[0-9]{1,9}$"},
            "socket.keepalive.enable": {"enum": [true, false, "true", "false"]},
            "socket.nagle.disable": {"enum": [true, false, "true", "false"]},
            "broker.address.family": {"enum": ["any", "v4", "v6"]},
            "connections.max.idle.ms": {"type": ["integer", "string"], "minimum": 0, "maximum": 2147483647, "pattern": "^[0-9]{1,9}$"},
            "reconnect.backoff.ms": {"type": ["integer", "string"], "minimum": 0, "maximum": 60000, "pattern": "^[0-9]{1,9}$"},
            "reconnect.backoff.max.ms": {"type": ["integer", "string"], "minimum": 100, "maximum": 60000, "pattern": "^[0-9]{1,9}$"},
            "retries": {"type": ["integer", "string"], "minimum": 1, "maximum": 2147483647, "pattern": "^[0-9]{1,9}$"},
            "message.send.max.retries": {"type": ["integer", "string"], "minimum": 1, "maximum": 2147483647, "pattern": "^[0-9]{1,9}$"},
            "retry.backoff.ms": {"type": ["integer", "string"], "minimum": 1, "maximum": 60000, "pattern": "^[0-9]{1,9}$"},
            "metadata.max.age.ms": {"type": ["integer", "string"], "minimum": 1000, "maximum": 86400000, "pattern": "^[0-9]{1,9}$"},
            "topic.metadata.refresh.interval.ms": {"type": ["integer", "string"], "minimum": 1000, "maximum": 3600000, "pattern": "^[0-9]{1,9}$"},
            "topic.metadata.propagation.max.ms": {"type": ["integer", "string"], "minimum": 0, "maximum": 3600000, "pattern": "^[0-9]{1,9}$"},
            "linger.ms": {"type": ["integer", "string"], "minimum": 0, "maximum": 900, "pattern": "^[0-9]{1,9}$"},
            "queue.buffering.max.ms": {"type": ["integer", "string"], "minimum": 0, "maximum": 900, "pattern": "^[0-9]{1,9}$"},
            "batch.size": {"type": ["integer", "string"], "minimum": 1, "maximum": 2147483647, "pattern": "^[0-9]{1,9}$"},
            "batch.num.messages": {"type": ["integer", "string"], "minimum": 1, "maximum": 1000000, "pattern": "^[0-9]{1,9}$"},
            "message.max.bytes": {"type": ["integer", "string"], "minimum": 1000, "maximum": 1000000000, "pattern": "^[0-9]{1,9}$"},
            "max.in.flight": {"type": ["integer", "string"], "minimum": 1, "maximum": 5, "pattern": "^[0-9]{1,9}$"},
            "max.in.flight.requests.per.connection": {"type": ["integer", "string"], "minimum": 1, "maximum": 5, "pattern": "^[0-9]{1,9}$"},
            "compression.type": {"enum": ["none", "gzip", "snappy", "lz4", "zstd"]},
            "compression.codec": {"enum": ["none", "gzip", "snappy", "lz4", "zstd"]},
            "compression.level": {"type": ["integer", "string"], "minimum": -1, "maximum": 12, "pattern": "^(-1|[0-9]{1,9})$"},
            "partitioner": {"enum": ["random", "consistent", "consistent_random", "murmur2", "murmur2_random", "fnv1a", "fnv1a_random"]},
            "sticky.partitioning.linger.ms": {"type": ["integer", "string"], "minimum": 0, "maximum": 900000, "pattern": "^[0-9]{1,9}$"}
        }
    }$json$::pg_catalog.jsonb
$sql$;

-- librdkafka's settings are texts to it, so a number may be written as one; its range holds all the same.
create or replace function ulak_private.kafka_options_violation(p_options jsonb)
returns text[]
language plpgsql
immutable
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_schema jsonb := ulak_private.kafka_options_schema() -> 'properties';
    v_key text;
    v_value text;
    v_violation text[];
    v_pair text[];
begin
    for v_key, v_value in select o.key, o.value from jsonb_each_text(p_options) o loop
        if v_schema -> v_key -> 'type' ? 'integer' then
            v_violation := ulak_private.json_violation(v_schema -> v_key, to_jsonb(v_value::numeric));
            if v_violation is not null then
                v_violation[1] := '.options' || ulak_private.json_path_step(v_key);
                return v_violation;
            end if;
        -- PEM has lines.
        elsif ulak_private.has_control_characters(case when v_key like '%.pem' then translate(v_value, E'\r\n', '') else v_value end) then
            return array['.options' || ulak_private.json_path_step(v_key), 'must not have control characters', null];
        end if;
    end loop;
    -- librdkafka has two names for these, and would take whichever comes last.
    foreach v_pair slice 1 in array array[
        array['acks', 'request.required.acks'],
        array['sasl.mechanism', 'sasl.mechanisms'],
        array['message.timeout.ms', 'delivery.timeout.ms'],
        array['retries', 'message.send.max.retries'],
        array['linger.ms', 'queue.buffering.max.ms'],
        array['max.in.flight', 'max.in.flight.requests.per.connection'],
        array['compression.type', 'compression.codec'],
        array['ssl.ca.location', 'ssl.ca.pem'],
        array['ssl.certificate.location', 'ssl.certificate.pem'],
        array['ssl.key.location', 'ssl.key.pem']
    ] loop
        if p_options ?& v_pair then
            return array['.options' || ulak_private.json_path_step(v_pair[2]), format('must not stand beside %s', v_pair[1]), null];
        end if;
    end loop;
    if (p_options ->> 'reconnect.backoff.ms')::numeric > (p_options ->> 'reconnect.backoff.max.ms')::numeric then
        return array['.options' || ulak_private.json_path_step('reconnect.backoff.ms'), 'must not exceed reconnect.backoff.max.ms', null];
    end if;
    return null;
end
$plpgsql$;

create or replace function ulak_private.kafka_security_violation(p_options jsonb)
returns text[]
language plpgsql
immutable
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_protocol text := lower(p_options ->> 'security.protocol' collate "C");
    v_key text;
begin
    if starts_with(v_protocol, 'sasl_') then
        foreach v_key in array array['sasl.username', 'sasl.password'] loop
            if not p_options ? v_key then
                return array['.options' || ulak_private.json_path_step(v_key), format('is required with "security.protocol": "%s"', v_protocol), null];
            end if;
        end loop;
        if not p_options ?| array['sasl.mechanism', 'sasl.mechanisms'] then
            return array[
                '.options' || ulak_private.json_path_step('sasl.mechanism'),
                format('is required with "security.protocol": "%s"', v_protocol),
                'PLAIN, SCRAM-SHA-256 or SCRAM-SHA-512.'
            ];
        end if;
    end if;
    -- A key without effect is a mistake that would go unnoticed, and here it would leave a connection open to all.
    for v_key in select o from jsonb_object_keys(p_options) o loop
        if v_key ~ E'^(ssl\\.|enable\\.ssl)' and coalesce(v_protocol not in ('ssl', 'sasl_ssl'), true) then
            return array['.options' || ulak_private.json_path_step(v_key), 'has no effect without "security.protocol": "ssl" or "sasl_ssl"', null];
        elsif v_key ~ E'^sasl\\.' and not coalesce(starts_with(v_protocol, 'sasl_'), false) then
            return array['.options' || ulak_private.json_path_step(v_key), 'has no effect without "security.protocol": "sasl_ssl" or "sasl_plaintext"', null];
        end if;
    end loop;
    if p_options ?| array['ssl.certificate.location', 'ssl.certificate.pem'] <> p_options ?| array['ssl.key.location', 'ssl.key.pem'] then
        return array['.options', 'must have both a certificate and its key, or neither', null];
    end if;
    return null;
end
$plpgsql$;

create or replace function ulak_private.kafka_broker_violation(p_broker jsonb)
returns text[]
language plpgsql
immutable
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_broker text;
begin
    for v_broker in
        select b.broker
        from ulak_private.listed(p_broker) b(broker)
    loop
        if v_broker !~ E'^([A-Za-z0-9._-]{1,255}|\\[[0-9A-Fa-f:.]+\\]):[0-9]{1,5}$'
            or substring(v_broker from ':([0-9]{1,5})$')::integer not between 1 and 65535
        then
            return array['.broker', 'must be host:port, or several of them with commas between', 'Such as "kafka1.example.com:9092,kafka2.example.com:9092".'];
        end if;
    end loop;
    return null;
end
$plpgsql$;

-- Only the parts that don't come from a message's metadata; the worker checks the whole.
create or replace function ulak_private.kafka_topic_violation(p_topic text)
returns text[]
language sql
immutable
set search_path = pg_catalog, pg_temp
as $sql$
    select case
        when regexp_replace(p_topic, E'\\{[^}]*\\}', '', 'g') !~ '^[A-Za-z0-9._-]{0,249}$' or p_topic in ('.', '..') then
            array['.topic', 'must have at most 249 characters, of letters, digits, dot, underscore and hyphen', null]
    end
$sql$;

-- As ulak_private.config_violation(), for a config that has the right shape.
create or replace function ulak_private.kafka_config_violation(p_config jsonb)
returns text[]
language sql
immutable
set search_path = pg_catalog, pg_temp
as $sql$
    select coalesce(
        ulak_private.kafka_broker_violation(p_config -> 'broker'),
        ulak_private.route_violation('.topic', p_config ->> 'topic'),
        ulak_private.kafka_topic_violation(p_config ->> 'topic'),
        ulak_private.route_violation('.key', p_config ->> 'key'),
        ulak_private.broker_headers_violation(p_config -> 'headers', '^(ulak-|ce_|content-type$)'),
        ulak_private.kafka_options_violation(p_config -> 'options'),
        ulak_private.kafka_security_violation(p_config -> 'options'),
        ulak_private.cloudevents_violation(p_config)
    )
$sql$;
