-- The protocols, and how a config and a retry policy are checked. A config is checked with its secrets filled in.

-- Every protocol, and what the rest of the SQL has to know of it:
--   is_delivered: workers deliver it, and it has a transport in plpython/ulak/transports/registry.py; else external workers claim it;
--   host_key: the key of a config that holds its hosts;
--   shared_keys: which keys of shared_config_keys() a config of protocol x may have beside those of x_config_schema();
--   secret_places: the paths where a config may name a secret; * is any key. Elsewhere it would be visible: in the source of an event, in the
--     name of a topic;
--   reserved_headers: names of headers, as header_key() spells them, that command the broker: a message could reach other queues, or purge a stream;
--   attribute_prefix: what the names of a CloudEvent's attributes begin with among its headers; null: it carries no CloudEvents.
create or replace function ulak_private.protocol_facts()
returns table (protocol text, is_delivered boolean, host_key text, shared_keys text[], secret_places text[], reserved_headers text, attribute_prefix text)
language sql
immutable
as $sql$
    values
        ('http', true, 'url', array['cloudevents'], array[
            'url', 'headers/*', 'body/*', 'signing_secret', 'proxy/url', 'proxy/username', 'proxy/password', 'auth/username', 'auth/password', 'auth/token',
            'auth/token_url', 'auth/client_id', 'auth/client_secret', 'auth/access_key', 'auth/secret_key', 'auth/session_token'
        ], null, 'ce-'),
        ('log', true, null, '{}', '{}', null, null),
        ('amqp', true, 'host', '{cloudevents,tls}', '{username,password}', '^b?cc$', 'cloudevents-'),
        ('kafka', true, 'broker', array['cloudevents'], array[
            'headers/*', 'options/sasl.username', 'options/sasl.password', 'options/ssl.ca.pem', 'options/ssl.certificate.pem',
            'options/ssl.key.pem', 'options/ssl.key.password'
        ], null, 'ce-'),
        ('mqtt', true, 'broker', '{cloudevents,tls}', '{username,password}', null, ''),
        ('nats', true, 'url', '{cloudevents,tls}', '{headers/*,token,username,password,nkey_seed}', '^nats-', 'ce-'),
        ('redis', true, 'host', '{tls}', '{username,password}', null, null),
        ('pull', false, null, '{}', '{}', null, null)
$sql$;

create or replace function ulak_private.worker_protocols()
returns text[]
language sql
immutable
as $sql$
    select array(select p.protocol from ulak_private.protocol_facts() p where p.is_delivered)
$sql$;

create or replace function ulak_private.protocols()
returns text[]
language sql
immutable
as $sql$
    select array(select p.protocol from ulak_private.protocol_facts() p)
$sql$;

-- The shape of a config: the keys of its protocol, and those that it shares with others. null: not a protocol.
create or replace function ulak_private.config_schema(p_protocol text)
returns jsonb
language plpgsql
immutable
as $plpgsql$
declare
    v_schema jsonb;
    v_shared text;
begin
    if p_protocol = any (ulak_private.protocols()) then
        execute format('select ulak_private.%I()', format('%s_config_schema', p_protocol)) into v_schema;
    end if;
    foreach v_shared in array '{delivery}' || (select p.shared_keys from ulak_private.protocol_facts() p where p.protocol = p_protocol) loop
        v_schema := jsonb_set(v_schema, '{properties}', (v_schema -> 'properties') || (ulak_private.shared_config_keys() -> v_shared));
    end loop;
    return v_schema || '{"type": "object", "additionalProperties": false}';
end
$plpgsql$;

-- The hosts of a config as people see them: without path, query and user, which may hold a token. null: there are none, or they are secret.
create or replace function ulak_private.hosts(p_hosts jsonb)
returns text
language sql
immutable
as $sql$
    select case
        -- A url may have commas in its path.
        when p_hosts #>> '{}' ~* '^https?://' then substring(p_hosts #>> '{}' from '^[A-Za-z]+://[^/?#]+')
        when jsonb_typeof(p_hosts) in ('string', 'array') then (
            select string_agg(concat(m.parts[1], m.parts[2]), ',' order by l.place)
            from ulak_private.listed(p_hosts) with ordinality l(host, place)
            cross join regexp_match(l.host, '^([A-Za-z]+://)?(?:[^/?#]*@)?([^/?#]+)') m(parts)
            where m.parts is not null
        )
    end
$sql$;

create or replace function ulak_private.retry_policy_schema()
returns jsonb
language sql
immutable
as $sql$
    select $json${
        "type": "object",
        "additionalProperties": false,
        "properties": {
            "max_retries": {"type": "integer", "minimum": 0, "maximum": 1000},
            "backoff": {"enum": ["exponential", "linear", "fixed", "quadratic", "schedule"]},
            "base_delay_seconds": {"type": "integer", "minimum": 1, "maximum": 3600},
            "max_delay_seconds": {"type": "integer", "minimum": 1, "maximum": 86400},
            "increment_seconds": {"type": "integer", "minimum": 1, "maximum": 3600},
            "schedule": {
                "type": "array",
                "minItems": 1,
                "maxItems": 1000,
                "items": {"type": "integer", "minimum": 0, "maximum": 2592000}
            },
            "jitter": {"enum": ["none", "full", "equal"]}
        }
    }$json$::pg_catalog.jsonb
$sql$;

-- The first thing that is wrong with a config, as {path, problem, hint}; null if it is right. The config has its secrets filled in.
create or replace function ulak_private.config_violation(p_protocol text, p_config jsonb)
returns text[]
language plpgsql
immutable
as $plpgsql$
declare
    v_schema jsonb := ulak_private.config_schema(p_protocol);
    v_config jsonb := ulak_private.normal_config(v_schema, p_config);
begin
    return coalesce(
        ulak_private.json_violation(v_schema, v_config),
        ulak_private.rule_violation('shared_config_rules', v_config),
        ulak_private.rule_violation(p_protocol || '_config_rules', v_config),
        case
            when (v_config ->> 'disable_after')::interval > interval '90 days'
                then array['.disable_after', 'must be at most 90 days', 'Such as "5 days".']
        end,
        ulak_private.headers_violation(p_protocol, v_config),
        ulak_private.template_violation(v_config)
    );
end
$plpgsql$;

-- The method may be written in lower case. Options may have numbers as texts, as librdkafka has them.
create or replace function ulak_private.normal_config(p_schema jsonb, p_config jsonb)
returns jsonb
language plpgsql
immutable
as $plpgsql$
declare
    v_key text;
    v_value text;
begin
    if jsonb_typeof(p_config -> 'method') = 'string' then
        p_config := jsonb_set(p_config, '{method}', to_jsonb(upper(p_config ->> 'method' collate "C")));
    end if;
    if jsonb_typeof(p_config -> 'options') = 'object' then
        for v_key, v_value in select o.key, o.value from jsonb_each_text(p_config -> 'options') o loop
            if p_schema #>> array['properties', 'options', 'properties', v_key, 'type'] = 'integer' and v_value ~ '^-?[0-9]{1,18}$' then
                p_config := jsonb_set(p_config, array['options', v_key], to_jsonb(v_value::bigint));
            end if;
        end loop;
    end if;
    return p_config;
end
$plpgsql$;

-- The first rule that a value breaks, as config_violation() returns it. Rules are the rows of the function p_rules: refused is a jsonpath
-- condition that must not be true of the value; KEY in it stands for the path of the key. A row with several keys is a rule for each.
create or replace function ulak_private.rule_violation(p_rules text, p_value jsonb)
returns text[]
language plpgsql
immutable
as $plpgsql$
declare
    v_violation text[];
begin
    execute format(
        $$
            select array[regexp_replace('.' || k.key, '[.]("[^"]*")', E'[\\1]'), r.problem, r.hint]
            from ulak_private.%I() r
            cross join unnest(string_to_array(r.keys, ',')) k(key)
            -- First what is cheap: a rule about a key that isn't there is broken only if it asks for the key.
            where case
                when $1 ? split_part(k.key, '.', 1) or strpos(r.refused, '!exists(KEY') > 0
                    then jsonb_path_match($1, replace(r.refused, 'KEY', '$.' || k.key)::jsonpath, '{}', true)
            end
            limit 1
        $$,
        p_rules
    )
    into v_violation
    using p_value;
    return v_violation;
end
$plpgsql$;

create or replace function ulak_private.retry_policy_rules()
returns table (keys text, refused text, problem text, hint text)
language sql
immutable
as $sql$
    values
        ('schedule', '$.backoff == "schedule" && !exists(KEY)', 'is required with "backoff": "schedule"', null),
        ('schedule', 'exists(KEY) && !($.backoff == "schedule")', 'has no effect without "backoff": "schedule"', null),
        ('base_delay_seconds', 'KEY > $.max_delay_seconds', 'must not exceed max_delay_seconds', null)
$sql$;

create or replace function ulak_private.check_retry_policy(p_policy jsonb)
returns void
language sql
as $sql$
    select ulak_private.raise_violation(
        'retry policy',
        coalesce(
            ulak_private.json_violation(ulak_private.retry_policy_schema(), p_policy),
            ulak_private.rule_violation('retry_policy_rules', p_policy)
        )
    )
$sql$;

-- Does nothing if there is no violation.
create or replace function ulak_private.raise_violation(p_what text, p_violation text[])
returns void
language plpgsql
as $plpgsql$
begin
    if p_violation is not null then
        raise exception 'invalid %: $% %', p_what, p_violation[1], p_violation[2]
            using
                errcode = '22023',
                hint = coalesce(p_violation[3], 'Correct the value at this path.');
    end if;
end
$plpgsql$;

create or replace function ulak.validate_endpoint_config(p_protocol text, p_config jsonb)
returns boolean
language sql
security definer
set search_path = pg_catalog, pg_temp
as $sql$
    select ulak_private.check_config(p_protocol, p_config, null, null)
$sql$;

comment on function ulak.validate_endpoint_config(text, jsonb) is
    'true if create_endpoint() would accept this config; otherwise the error that it would raise';

-- True, or an error that says what is wrong and where. p_endpoint_id and p_old: the endpoint that is altered, and its old config.
create or replace function ulak_private.check_config(p_protocol text, p_config jsonb, p_endpoint_id bigint, p_old jsonb)
returns boolean
language plpgsql
as $plpgsql$
declare
    v_violation text[];
    v_config jsonb := coalesce(p_config, 'null');
    v_has_secrets boolean := ulak_private.secret_names(p_config) <> '{}';
begin
    if p_protocol is null or p_protocol <> all(ulak_private.protocols()) then
        raise exception 'unknown protocol %', coalesce(quote_literal(p_protocol), 'null')
            using
                errcode = '22023',
                detail = format(
                    '%s: workers deliver. pull: external workers claim.', array_to_string(ulak_private.worker_protocols(), ', ')
                ),
                hint = ulak_private.did_you_mean(p_protocol, ulak_private.protocols());
    end if;
    if v_has_secrets then
        v_violation := ulak_private.secrets_violation(p_protocol, p_config, p_endpoint_id);
        if v_violation is null then
            v_config := ulak_private.with_secrets(v_config);
            v_violation := ulak_private.body_secrets_violation(p_config);
        end if;
    end if;
    v_violation := coalesce(
        v_violation,
        ulak_private.config_violation(p_protocol, v_config),
        ulak_private.hosts_violation(p_protocol, v_config, p_config, p_old),
        -- set_secret() checks the configs that don't change.
        case when v_has_secrets and p_config is distinct from p_old then ulak_private.misplaced_violation(p_protocol, v_config, p_config) end
    );
    perform ulak_private.raise_violation(format('config of %s endpoint', p_protocol), v_violation);
    return true;
end
$plpgsql$;
