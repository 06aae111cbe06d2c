-- The protocols that an endpoint may have, and what its config and retry policy may hold, whatever the protocol. Checks are made
-- on the config with its secrets put in.

-- Every protocol, and what the rest of the SQL has to know of it:
--   is_delivered: workers deliver it, and it has a transport in plpython/ulak/transports/registry.py; else external workers claim it;
--   host_key: the key of a config that holds its hosts;
--   secret_places: where a credential belongs, by its path in the config; * is any key. A secret elsewhere would be told to everybody
--     who may see what is made of it: the source of an event, the name of a topic.
create or replace function ulak_private.protocol_facts()
returns table (protocol text, is_delivered boolean, host_key text, secret_places text[])
language sql
immutable
as $sql$
    values
        ('http', true, 'url', array[
            'url', 'headers/*', 'body/*', 'signing_secret', 'proxy/url', 'proxy/username', 'proxy/password', 'auth/username', 'auth/password', 'auth/token',
            'auth/token_url', 'auth/client_id', 'auth/client_secret', 'auth/access_key', 'auth/secret_key', 'auth/session_token'
        ]),
        ('log', true, null, '{}'),
        ('amqp', true, 'host', '{username,password}'),
        ('kafka', true, 'broker', array[
            'headers/*', 'options/sasl.username', 'options/sasl.password', 'options/ssl.ca.pem', 'options/ssl.certificate.pem',
            'options/ssl.key.pem', 'options/ssl.key.password'
        ]),
        ('mqtt', true, 'broker', '{username,password}'),
        ('nats', true, 'url', '{headers/*,token,username,password,nkey_seed}'),
        ('redis', true, 'host', '{username,password}'),
        ('pull', false, null, '{}')
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

-- The shape of a config: what its protocol asks for, and what all have in common. null: not a protocol.
create or replace function ulak_private.config_schema(p_protocol text)
returns jsonb
language plpgsql
immutable
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_schema jsonb;
begin
    if p_protocol = any (ulak_private.protocols()) then
        execute format('select ulak_private.%I()', format('%s_config_schema', p_protocol)) into v_schema;
    end if;
    return ulak_private.with_properties(v_schema, ulak_private.delivery_config_schema());
end
$plpgsql$;

-- Where a config says that its endpoint delivers to, without path, query and user: they may hold a token. null: nowhere, or it is a
-- secret.
create or replace function ulak_private.hosts(p_hosts jsonb)
returns text
language sql
immutable
set search_path = pg_catalog, pg_temp
as $sql$
    select case
        -- In the path of a url a comma separates nothing.
        when p_hosts #>> '{}' ~* '^https?://' then substring(p_hosts #>> '{}' from '^[A-Za-z]+://[^/?#]+')
        when jsonb_typeof(p_hosts) in ('string', 'array') then (
            select string_agg(concat(m.parts[1], m.parts[2]), ',' order by l.place)
            from ulak_private.listed(p_hosts) with ordinality l(host, place)
            cross join regexp_match(l.host, '^([A-Za-z]+://)?(?:[^/?#]*@)?([^/?#]+)') m(parts)
            where m.parts is not null
        )
    end
$sql$;

-- A schema of an object with further properties, which other schemas have as well.
create or replace function ulak_private.with_properties(p_schema jsonb, p_properties jsonb)
returns jsonb
language sql
immutable
set search_path = pg_catalog, pg_temp
as $sql$
    select jsonb_set(p_schema, '{properties}', (p_schema -> 'properties') || p_properties)
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

-- {path, problem, hint} of the first thing wrong with a config, or null. The config has its secrets put in.
create or replace function ulak_private.config_violation(p_protocol text, p_config jsonb)
returns text[]
language plpgsql
immutable
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_schema jsonb := ulak_private.config_schema(p_protocol);
    v_config jsonb := ulak_private.normal_config(v_schema, p_config);
begin
    return coalesce(
        ulak_private.json_violation(v_schema, v_config),
        ulak_private.auth_violation(v_config -> 'auth'),
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

-- A method may be written in lower case, and a number among the options, which are texts to librdkafka, as a text.
create or replace function ulak_private.normal_config(p_schema jsonb, p_config jsonb)
returns jsonb
language plpgsql
immutable
set search_path = pg_catalog, pg_temp
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

-- The first rule that a value breaks, as ulak_private.config_violation(). A rule is a row of a function: refused is a condition of jsonpath that
-- must not be true of the value, and KEY in it stands for the path of each of its keys.
create or replace function ulak_private.rule_violation(p_rules text, p_value jsonb)
returns text[]
language plpgsql
immutable
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_violation text[];
begin
    execute format(
        $$
            select array[regexp_replace('.' || k.key, '[.]("[^"]*")', E'[\\1]'), r.problem, r.hint]
            from ulak_private.%I() r
            cross join unnest(string_to_array(r.keys, ',')) k(key)
            where jsonb_path_match($1, replace(r.refused, 'KEY', '$.' || k.key)::jsonpath, '{}', true)
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

create or replace function ulak_private.retry_policy_violation(p_policy jsonb)
returns text[]
language sql
immutable
set search_path = pg_catalog, pg_temp
as $sql$
    select coalesce(
        ulak_private.json_violation(ulak_private.retry_policy_schema(), p_policy),
        ulak_private.rule_violation('retry_policy_rules', p_policy)
    )
$sql$;

create or replace function ulak_private.raise_violation(p_what text, p_violation text[])
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    raise exception 'invalid %: $% %', p_what, p_violation[1], p_violation[2]
        using
            errcode = '22023',
            hint = coalesce(p_violation[3], 'Correct the value at this path.');
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

-- True, or an error that says what is wrong where. p_endpoint_id and p_old: the endpoint that is altered, and its config until now.
create or replace function ulak_private.check_config(p_protocol text, p_config jsonb, p_endpoint_id bigint, p_old jsonb)
returns boolean
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_violation text[];
    v_config jsonb;
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
    v_violation := ulak_private.secrets_violation(p_protocol, p_config, p_endpoint_id, p_old);
    if v_violation is null then
        v_config := ulak_private.with_secrets(coalesce(p_config, 'null'));
        v_violation := coalesce(
            ulak_private.body_secrets_violation(p_config),
            ulak_private.config_violation(p_protocol, v_config),
            ulak_private.hosts_violation(p_protocol, v_config, p_config, p_old),
            -- A config that stays as it is doesn't use its secrets in another way: set_secret() looks after those.
            case when p_config is distinct from p_old then ulak_private.misplaced_violation(p_protocol, v_config, p_config) end
        );
    end if;
    if v_violation is not null then
        perform ulak_private.raise_violation(format('config of %s endpoint', p_protocol), v_violation);
    end if;
    return true;
end
$plpgsql$;
