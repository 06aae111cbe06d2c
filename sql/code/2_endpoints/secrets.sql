-- Secrets: values that configs name as {"$secret": "name"}, and signing secrets that can be rotated.

create or replace function ulak.set_secret(p_name text, p_value text, p_hosts text[] default null)
returns boolean
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_hosts text;
begin
    perform ulak_private.lock('configs');
    if p_name is null or p_name !~ '^[A-Za-z0-9._/-]{1,200}$' then
        raise exception 'invalid name of a secret'
            using
                errcode = '22023',
                detail = 'A name has 1 to 200 letters, digits and . _ / - only.',
                hint = 'Such as: billing-api-key';
    elsif coalesce(p_value, '') = '' then
        raise exception 'the value of secret "%" is empty', p_name
            using
                errcode = '22023',
                detail = case when p_hosts is null then 'It has at least one character.' else 'To bind it to other hosts its value is needed, too.' end,
                hint = format('To remove it: select ulak.drop_secret(%L);', p_name);
    end if;
    perform ulak_private.check_bytes('a secret', octet_length(p_value), 65536);
    v_hosts := ulak_private.bound_hosts(p_name, p_hosts);
    insert into ulak_private.secrets (name, value, hosts)
    values (p_name, p_value, v_hosts)
    on conflict (name) do update
    set value = excluded.value, hosts = excluded.hosts, previous_value = null, previous_until = null, updated_at = now();
    perform ulak_private.check_uses(p_name);
    perform ulak_private.renew_configs(p_name);
    insert into ulak.event_log (event, detail)
    values ('secret.set', jsonb_strip_nulls(jsonb_build_object('secret', p_name, 'hosts', v_hosts)));
    return true;
end
$plpgsql$;

comment on function ulak.set_secret(text, text, text[]) is
    'stores a value that configs can name as {"$secret": "name"}; replaces an earlier value at once; with p_hosts, no other host gets it or what is made of it';

create or replace function ulak.drop_secret(p_name text)
returns boolean
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_endpoints text;
begin
    perform ulak_private.lock('configs');
    select string_agg(e.name, ', ' order by e.name) into v_endpoints
    from ulak.endpoints as e
    where p_name = any (ulak_private.secret_names(e.config));
    if v_endpoints is not null then
        raise exception 'secret "%" is in use', p_name
            using
                errcode = '55006',
                detail = format('It is named by the config of: %s.', v_endpoints),
                hint = 'Give those endpoints a config without it first: select ulak.alter_endpoint(...);';
    end if;
    delete from ulak_private.secrets where name = p_name;
    if not found then
        perform ulak_private.raise_unknown_secret(p_name);
    end if;
    insert into ulak.event_log (event, detail) values ('secret.dropped', jsonb_build_object('secret', p_name));
    return true;
end
$plpgsql$;

comment on function ulak.drop_secret(text) is 'removes a secret that no config names any more';

create or replace function ulak.rotate_secret(
    p_endpoint text,
    p_grace interval default '24 hours',
    p_new_secret text default null,
    p_now timestamptz default now()
)
returns text
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_endpoint ulak.endpoints;
    v_new text := p_new_secret;
    v_config jsonb;
    v_old text;
    v_secret text;
begin
    p_now := ulak_private.clock(p_now);
    perform ulak_private.lock('configs');
    v_endpoint := ulak_private.lock_endpoint(p_endpoint);
    if v_endpoint.protocol <> 'http' then
        raise exception 'endpoint "%" does not sign its requests', p_endpoint
            using errcode = '22023', detail = format('Its protocol is %s.', v_endpoint.protocol);
    end if;
    perform ulak_private.check_interval('p_grace', p_grace, interval '3650 days');
    v_new := coalesce(
        v_new, ulak_private.new_signing_secret(case when v_endpoint.config -> 'signature' ->> 'scheme' = 'ed25519' then 'whsk_' else 'whsec_' end)
    );
    -- A secret that stands in the config itself moves to the table, which has room for two values.
    v_secret := coalesce(v_endpoint.config -> 'signing_secret' ->> '$secret', ulak_private.signing_secret_name(v_endpoint.id));
    v_config := ulak_private.with_secrets(v_endpoint.config);
    v_old := v_config ->> 'signing_secret';
    insert into ulak_private.secrets (name, value, previous_value, previous_until, hosts)
    values (
        v_secret,
        v_new,
        v_old,
        case when v_old is not null then p_now + ulak_private.exact(p_grace) end,
        case
            when ulak_private.stored_setting('require_bound_secrets')::boolean
                then (select string_agg(distinct h, ',') from ulak_private.secret_hosts('http', v_config, 'signing_secret') h)
        end
    )
    on conflict (name) do update
    set value = excluded.value,
        previous_value = excluded.previous_value,
        previous_until = excluded.previous_until,
        updated_at = now();
    if v_endpoint.config -> 'signing_secret' ? '$secret' then
        perform ulak_private.renew_configs(v_secret);
    else
        update ulak.endpoints
        set config = config || jsonb_build_object('signing_secret', jsonb_build_object('$secret', v_secret))
        where id = v_endpoint.id;
    end if;
    insert into ulak.event_log (event, endpoint_id, endpoint_name, detail)
    values ('secret.rotated', v_endpoint.id, p_endpoint, jsonb_build_object('secret', v_secret, 'grace', p_grace));
    -- Of an Ed25519 key the public half only, as Standard Webhooks writes it.
    return case when starts_with(v_new, 'whsk_') then 'whpk_' || encode(ulak_private.public_key(v_new), 'base64') else v_new end;
end
$plpgsql$;

comment on function ulak.rotate_secret(text, interval, text, timestamptz) is
    'gives an endpoint a new signing secret and returns it (of an Ed25519 key, the public half); requests carry both '
    'signatures until the grace period is over';

-- For maintenance: old signing secrets are deleted when their grace period is over.
create or replace function ulak_private.forget_old_secrets(p_now timestamptz default now())
returns integer
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_names text[];
begin
    if not exists (select from ulak_private.secrets as s where s.previous_until <= p_now) then
        return 0;
    end if;
    perform ulak_private.lock('configs');
    with forgotten as (
        update ulak_private.secrets as s
        set previous_value = null, previous_until = null
        where s.previous_until <= p_now
        returning s.name
    )
    select array_agg(f.name) into v_names from forgotten as f;
    perform ulak_private.renew_configs(n) from unnest(v_names) as n;
    return coalesce(cardinality(v_names), 0);
end
$plpgsql$;

-- What workers read: configs with their secrets filled in, and the signing secrets, newest first. Values of secrets leave the database only
-- this way, so this is where secrets that are bound to other hosts are held back. In PL/pgSQL, because planning takes 1.6 ms: an SQL function
-- would be planned again in each call.
create or replace function ulak_private.endpoint_configs(
    p_ids bigint[],
    p_now timestamptz default clock_timestamp()
)
returns table (
    id bigint,
    name text,
    config_version bigint,
    config jsonb,
    signing_secrets text[],
    -- The values of its secrets, so that the worker can mask them in errors and responses.
    secrets text[],
    protocol text,
    -- Why config is null: a host would get a secret that is bound to others.
    problem text,
    -- The hosts that its secrets are bound to, a list for each secret: a cluster may name further brokers.
    bound text[]
)
language plpgsql
stable
security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
as $plpgsql$
#variable_conflict use_column
begin
    return query
    select
        e.id,
        e.name,
        e.config_version,
        case
            when r.problem is not null then null
            when exists (select from ulak.subscriptions s where s.endpoint_id = e.id and s.body is not null)
                then coalesce(r.config, e.config) || ulak_private.bodies(e.id)
            else coalesce(r.config, e.config)
        end,
        case
            when r.problem is null and e.config ? 'signing_secret' then array_remove(
                array[
                    coalesce(r.config, e.config) ->> 'signing_secret',
                    (
                        select s.previous_value
                        from ulak_private.secrets as s
                        where s.name = e.config -> 'signing_secret' ->> '$secret' and s.previous_until > ulak_private.clock(p_now)
                    )
                ],
                null
            )
            else '{}'
        end,
        case when r.secrets is null or r.problem is not null then '{}' else array(select v.value from jsonb_each_text(r.secrets) as v) end,
        e.protocol,
        r.problem,
        coalesce(r.bound, '{}')
    from ulak.endpoints as e
    cross join (select ulak_private.stored_setting('require_bound_secrets')::boolean) as q (is_required)
    -- A worker may read thousands of configs, and most of them name no secret.
    left join lateral (
        select
            s.secrets,
            c.config,
            case
                when b.bound <> '{}' or q.is_required then (
                    select format('secret "%s" is %s', m.name, m.reason)
                    from ulak_private.misplaced_secrets(e.protocol, c.config, e.config) m
                    limit 1
                )
            end as problem,
            b.bound
        from ulak_private.secret_names(e.config) as n (names)
        cross join lateral (
            select array(select b.hosts from ulak_private.secrets b where b.name = any (n.names) and b.hosts is not null order by b.name)
        ) as b (bound)
        cross join lateral ulak_private.secret_values(n.names) as s (secrets)
        cross join lateral (select ulak_private.put_secrets(e.config, s.secrets)) as c (config)
        where strpos(e.config::text, '"$secret"') > 0
        offset 0
    ) as r on true
    where e.id = any(p_ids);
end
$plpgsql$;

-- 256 bits out of 366 random ones; gen_random_uuid() is PostgreSQL's own strong source. They are a private key of Ed25519 as well.
create or replace function ulak_private.new_signing_secret(p_prefix text)
returns text
language sql
volatile
as $sql$
    select p_prefix || encode(
        sha256(uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid())),
        'base64'
    )
$sql$;

create or replace function ulak_private.signing_secret_name(p_endpoint_id bigint)
returns text
language sql
immutable
as $sql$
    select 'ulak/endpoint/' || p_endpoint_id || '/signing_secret'
$sql$;

-- Workers read the configs again, and the endpoints' trigger checks them with the secret's new value. Endpoints are locked in the order of
-- their ids, as everywhere.
create or replace function ulak_private.renew_configs(p_secret text)
returns void
language sql
as $sql$
    with named as (
        select e.id
        from ulak.endpoints as e
        where p_secret = any (ulak_private.secret_names(e.config))
        order by e.id
        for no key update
    )
    update ulak.endpoints as e
    set config_version = e.config_version + 1
    from named as n
    where e.id = n.id
$sql$;

create or replace function ulak_private.secret_names(p_config jsonb)
returns text[]
language sql
immutable
as $sql$
    select array(select distinct n #>> '{}' from jsonb_path_query(p_config, '$.**."$secret"') as n)
$sql$;

create or replace function ulak_private.secret_values(p_names text[])
returns jsonb
language sql
stable
as $sql$
    select coalesce(jsonb_object_agg(s.name, s.value), '{}') from ulak_private.secrets as s where s.name = any(p_names)
$sql$;

-- The config with its secrets filled in, to be checked. An unknown name is an error.
create or replace function ulak_private.with_secrets(p_config jsonb)
returns jsonb
language plpgsql
stable
as $plpgsql$
declare
    v_names text[] := ulak_private.secret_names(p_config);
    v_values jsonb;
begin
    if v_names = '{}' or jsonb_typeof(p_config) <> 'object' then
        return p_config;
    end if;
    v_values := ulak_private.secret_values(v_names);
    perform ulak_private.raise_unknown_secret(n) from unnest(v_names) n where not v_values ? n;
    return ulak_private.put_secrets(p_config, v_values);
end
$plpgsql$;

-- Every value inside a JSON object, down to 33 levels, with its path: as jsonb_set() takes it, and as errors show it. The walk doesn't descend
-- into objects that have the key p_leaf.
create or replace function ulak_private.json_nodes(p_object jsonb, p_leaf text)
returns table (path text[], shown text, value jsonb)
language sql
immutable
-- The planner overestimates recursion so much that JIT would compile this, for 20 ms, each time an endpoint is written.
set jit = off
as $sql$
    with recursive node(path, shown, value) as (
        select array[o.key], ulak_private.json_path_step(o.key), o.value
        from jsonb_each(case when jsonb_typeof(p_object) = 'object' then p_object end) o
        union all
        select n.path || i.key, n.shown || i.step, i.value
        from node n
        cross join lateral (
            select o.key, ulak_private.json_path_step(o.key), o.value
            from jsonb_each(case when jsonb_typeof(n.value) = 'object' and not n.value ? p_leaf then n.value end) o
            union all
            select (a.place - 1)::text, format('[%s]', a.place - 1), a.value
            from jsonb_array_elements(case when jsonb_typeof(n.value) = 'array' then n.value end) with ordinality a(value, place)
        ) i(key, step, value)
        where cardinality(n.path) <= 32
    )
    select n.path, n.shown, n.value from node n
$sql$;

-- Where a config names secrets: as protocol_facts() writes places, and as errors show them. name is null if the object is malformed.
create or replace function ulak_private.secrets_in(p_config jsonb)
returns table (place text, shown text, name text, path text[])
language sql
immutable
as $sql$
    select
        array_to_string(n.path, '/'),
        n.shown,
        case when jsonb_typeof(n.value -> '$secret') = 'string' and n.value - '$secret' = '{}' then n.value ->> '$secret' end,
        n.path
    from ulak_private.json_nodes(p_config, '$secret') n
    where jsonb_typeof(n.value) = 'object' and n.value ? '$secret'
$sql$;

-- The first secret that a config must not name there, as config_violation() returns it. Names under ulak/ are made by rotate_secret(), and each belongs to one endpoint.
create or replace function ulak_private.secrets_violation(p_protocol text, p_config jsonb, p_endpoint_id bigint)
returns text[]
language sql
immutable
as $sql$
    select case
        when s.name is null then array[s.shown, 'does not name a secret', 'A secret is an object with the one key "$secret" and a text, such as {"$secret": "api-key"}.']
        when not l.is_allowed then array[s.shown, 'must not be a secret', 'A secret can stand for: ' || nullif(array_to_string(f.secret_places, ', '), '') || '.']
        else array[
            s.shown,
            'names a secret that belongs to another endpoint',
            'Names under ulak/ are made by rotate_secret() for one endpoint: store the value under a name of your own, with set_secret().'
        ]
    end
    from ulak_private.secrets_in(p_config) s
    join ulak_private.protocol_facts() f on f.protocol = p_protocol
    cross join lateral (
        select s.place like any (array(select replace(replace(p, '_', E'\\_'), '*', '%') from unnest(f.secret_places) p))
    ) l(is_allowed)
    where s.name is null
        or not l.is_allowed
        or s.name like 'ulak/%' and (s.place, s.name) is distinct from ('signing_secret', ulak_private.signing_secret_name(p_endpoint_id))
    order by s.place
    limit 1
$sql$;

create or replace function ulak_private.put_secrets(p_config jsonb, p_secrets jsonb)
returns jsonb
language plpgsql
immutable
as $plpgsql$
declare
    v_path text[];
    v_name text;
begin
    for v_path, v_name in select s.path, s.name from ulak_private.secrets_in(p_config) s loop
        p_config := jsonb_set(p_config, v_path, coalesce(p_secrets -> v_name, 'null'));
    end loop;
    return p_config;
end
$plpgsql$;

create or replace function ulak_private.raise_unknown_secret(p_name text)
returns void
language plpgsql
stable
as $plpgsql$
begin
    raise exception 'unknown secret %', coalesce('"' || left(p_name, 200) || '"', 'null')
        using
            errcode = '42704',
            detail = 'Secrets are created by ulak.set_secret().',
            hint = ulak_private.did_you_mean(p_name, array(select s.name from ulak_private.secrets as s));
end
$plpgsql$;
