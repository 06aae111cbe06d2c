-- Endpoints: create, alter, drop. A trigger checks them, so that an administrator's plain UPDATE is checked, too.

create or replace function ulak.create_endpoint(
    p_name text,
    p_protocol text,
    p_config jsonb,
    p_retry_policy jsonb default null,
    p_description text default null,
    p_if_exists text default 'refuse'
)
returns bigint
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_id bigint;
    v_protocol text;
begin
    if p_if_exists is null or p_if_exists not in ('refuse', 'replace') then
        raise exception 'invalid p_if_exists'
            using errcode = '22023', detail = 'It is refuse, which is an error, or replace.', hint = 'p_if_exists => ''replace''';
    end if;
    perform ulak_private.lock('configs');
    select e.id, e.protocol into v_id, v_protocol from ulak.endpoints e where e.name = p_name;
    if not found then
        insert into ulak.endpoints (name, protocol, config, retry_policy, description)
        values (p_name, p_protocol, coalesce(p_config, '{}'), p_retry_policy, p_description)
        returning id into v_id;
    elsif p_if_exists = 'refuse' then
        raise exception 'endpoint "%" already exists', p_name
            using
                errcode = '23505',
                detail = format('It is endpoint %s, protocol %s.', v_id, v_protocol),
                hint = format('select ulak.alter_endpoint(%L, ...); or p_if_exists => ''replace''', p_name);
    elsif v_protocol is distinct from p_protocol then
        -- The messages that wait were sent for this protocol.
        raise exception 'the protocol of endpoint "%" can not be changed', p_name
            using
                errcode = '22023',
                detail = format('It is %s.', v_protocol),
                hint = format('Create another endpoint, or drop this one first: select ulak.drop_endpoint(%L);', p_name);
    else
        update ulak.endpoints e
        set config = coalesce(p_config, '{}'), retry_policy = p_retry_policy, description = p_description
        where e.id = v_id;
    end if;
    return v_id;
end
$plpgsql$;

comment on function ulak.create_endpoint(text, text, jsonb, jsonb, text, text) is
    'creates an endpoint and returns its id; refuses a config or retry policy that is not valid; with p_if_exists => ''replace'', one of this '
    'name and protocol gets the config, retry policy and description';

create or replace function ulak.alter_endpoint(
    p_name text,
    p_config jsonb default null,
    p_retry_policy jsonb default null,
    p_description text default null,
    p_merge jsonb default null
)
returns boolean
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    if p_merge is not null and (p_config is not null or jsonb_typeof(p_merge) <> 'object') then
        raise exception 'p_merge takes an object, and stands for p_config'
            using errcode = '22023', hint = format('select ulak.alter_endpoint(%L, p_merge => ''{"timeout": 8}'');', p_name);
    end if;
    perform ulak_private.lock('configs');
    update ulak.endpoints
    set config = coalesce(
            p_config,
            -- Only the trigger knows what it means to drop this one.
            ulak_private.merged(config, p_merge) || case when p_merge -> 'signing_secret' = 'null' then '{"signing_secret": null}'::jsonb else '{}' end,
            config
        ),
        retry_policy = coalesce(p_retry_policy, retry_policy),
        description = coalesce(p_description, description)
    where name = p_name;
    if not found then
        perform ulak_private.raise_unknown_endpoint(p_name);
    end if;
    return true;
end
$plpgsql$;

comment on function ulak.alter_endpoint(text, jsonb, jsonb, text, jsonb) is
    'replaces an endpoint''s config, retry policy or description; null leaves one as it is, ''{}'' clears the retry policy. '
    'p_merge sets single keys of the config, and removes those that are null. A signing secret that rotate_secret() made stays unless the '
    'config has another one, or null';

-- JSON Merge Patch (RFC 7396), but {"$secret": "name"} counts as one value: it replaces what was there.
create or replace function ulak_private.merged(p_value jsonb, p_patch jsonb)
returns jsonb
language plpgsql
immutable
as $plpgsql$
declare
    v_key text;
    v_patch jsonb;
begin
    if p_patch is null or jsonb_typeof(p_patch) <> 'object' or p_patch ? '$secret' then
        return p_patch;
    elsif jsonb_typeof(p_value) is distinct from 'object' or p_value ? '$secret' then
        p_value := '{}';
    end if;
    for v_key, v_patch in select p.key, p.value from jsonb_each(p_patch) p loop
        p_value := case
            when v_patch = 'null' then p_value - v_key
            else p_value || jsonb_build_object(v_key, ulak_private.merged(p_value -> v_key, v_patch))
        end;
    end loop;
    return p_value;
end
$plpgsql$;

create or replace function ulak.drop_endpoint(p_name text)
returns boolean
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_id bigint;
    v_subscriptions bigint;
begin
    perform ulak_private.lock('configs');
    v_id := (ulak_private.lock_endpoint(p_name)).id;
    perform ulak_private.require_unused(v_id, p_name);
    select count(*) into v_subscriptions from ulak.subscriptions as s where s.endpoint_id = v_id;
    -- Its subscriptions go with it, by their foreign key.
    delete from ulak.endpoints where id = v_id;
    delete from ulak_private.secrets where name = ulak_private.signing_secret_name(v_id);
    insert into ulak.event_log (event, endpoint_id, endpoint_name, detail)
    values ('endpoint.dropped', v_id, p_name, jsonb_build_object('subscriptions', v_subscriptions));
    if v_subscriptions > 0 then
        raise notice 'dropped with endpoint "%": %', p_name, ulak_private.counted(v_subscriptions, 'subscription');
    end if;
    return true;
end
$plpgsql$;

comment on function ulak.drop_endpoint(text) is
    'removes an endpoint and its subscriptions; refuses while messages wait for it or dead letters of it are unresolved';

-- The endpoint's id. Until the caller commits, it can't be dropped; nothing else waits.
create or replace function ulak_private.keep_endpoint(p_name text)
returns bigint
language plpgsql
as $plpgsql$
declare
    v_id bigint;
begin
    select e.id into v_id from ulak.endpoints as e where e.name = p_name for key share;
    if not found then
        perform ulak_private.raise_unknown_endpoint(p_name);
    end if;
    return v_id;
end
$plpgsql$;

-- Raises while the endpoint has messages that couldn't be delivered or redriven without it. Partial indexes count them, so finished messages
-- cost nothing.
create or replace function ulak_private.require_unused(p_id bigint, p_name text)
returns void
language plpgsql
set enable_seqscan = off
as $plpgsql$
declare
    v_waiting bigint;
    v_in_flight bigint;
    v_dead bigint;
begin
    if current_setting('transaction_isolation') <> 'read committed' then
        raise exception 'drop_endpoint() needs a transaction at read committed'
            using errcode = '25001', hint = 'Call it in a transaction of its own: its counts must see the latest messages.';
    end if;
    perform ulak_private.require_no_open_sender(p_name);
    select
        (select count(*) from ulak_private.deliveries as q where q.status = 'pending' and q.endpoint_id = p_id),
        (select count(*) from ulak_private.deliveries as q where q.status = 'processing' and q.endpoint_id = p_id),
        (select count(*) from ulak_private.letters as d where d.status = 'failed' and d.endpoint_id = p_id)
    into v_waiting, v_in_flight, v_dead;
    if v_waiting + v_in_flight + v_dead > 0 then
        raise exception 'endpoint "%" is in use', p_name
            using
                errcode = '55006',
                detail = format('Waiting messages: %s; in flight: %s; unresolved dead letters: %s.', v_waiting, v_in_flight, v_dead),
                hint = format(
                    case
                        when v_waiting + v_in_flight > 0
                            then 'Let the worker deliver them, or take back what waits, after a dry run: select * from ulak.purge(%1$L, p_dry_run => true);'
                        else 'Send them again: select ulak.redrive_endpoint(%1$L); or give them up: select * from ulak.discard(%1$L);'
                    end,
                    p_name
                );
    end if;
end
$plpgsql$;

-- Messages of an open transaction can't be seen yet, and senders take no lock on the endpoint. So a drop waits up to a second for transactions
-- that have written to the queue to end. A message that slips through becomes a dead letter (ulak_private.bury_orphans).
create or replace function ulak_private.require_no_open_sender(p_name text)
returns void
language plpgsql
as $plpgsql$
declare
    v_until timestamptz := clock_timestamp() + interval '1 second';
    v_open text[] := ulak_private.open_senders();
begin
    loop
        v_open := array(select unnest(v_open) intersect select unnest(ulak_private.open_senders()));
        exit when v_open = '{}';
        if clock_timestamp() > v_until then
            raise exception 'an open transaction may have sent to endpoint "%"', p_name
                using
                    errcode = '55006',
                    detail = format('These have written to ulak.queue: %s.', array_to_string(v_open, ', ')),
                    hint = 'Try again when they have ended: select pid, state, query from pg_stat_activity; select * from pg_prepared_xacts;';
        end if;
        perform pg_sleep(0.01);
    end loop;
end
$plpgsql$;

-- Other open transactions that have written to the queue, by session and transaction.
create or replace function ulak_private.open_senders()
returns text[]
language sql
as $sql$
    select array(
        select distinct format('%s, transaction %s', coalesce('session ' || l.pid, 'prepared'), l.virtualtransaction)
        from pg_locks l
        where l.locktype = 'relation'
            and l.database = (select d.oid from pg_database d where d.datname = current_database())
            and l.relation = 'ulak_private.deliveries'::regclass
            and l.mode = 'RowExclusiveLock'
            and l.pid is distinct from pg_backend_pid()
    )
$sql$;

-- No lock, so that senders don't wait for administrators: a message that is sent while its endpoint is dropped becomes a dead letter
-- (ulak_private.bury_orphans).
create or replace function ulak_private.endpoint_id(p_endpoint text)
returns bigint
language plpgsql
as $plpgsql$
declare
    v_endpoint_id bigint;
begin
    select e.id into v_endpoint_id
    from ulak.endpoints e
    where e.name = p_endpoint;
    if not found then
        perform ulak_private.raise_unknown_endpoint(p_endpoint);
    end if;
    return v_endpoint_id;
end
$plpgsql$;

create or replace function ulak_private.lock_endpoint(p_name text)
returns ulak.endpoints
language plpgsql
as $plpgsql$
declare
    v_endpoint ulak.endpoints := ulak_private.lock_endpoint((select e.id from ulak.endpoints e where e.name = p_name));
begin
    if v_endpoint.id is null then
        perform ulak_private.raise_unknown_endpoint(p_name);
    end if;
    return v_endpoint;
end
$plpgsql$;

-- Locks the row; null if there is no such endpoint. To avoid deadlocks, lock several in the order of their ids, and messages before endpoints.
create or replace function ulak_private.lock_endpoint(p_id bigint)
returns ulak.endpoints
language plpgsql
as $plpgsql$
declare
    v_endpoint ulak.endpoints;
begin
    perform ulak_private.take_breaker_lock(p_id);
    select e.* into v_endpoint
    from ulak.endpoints e
    where e.id = p_id
    for no key update;
    return v_endpoint;
end
$plpgsql$;

create or replace function ulak_private.raise_unknown_endpoint(p_name text)
returns void
language plpgsql
as $plpgsql$
begin
    raise exception 'unknown endpoint %', coalesce('"' || left(p_name, 200) || '"', 'null')
        using
            errcode = '42704',
            detail = 'Endpoints are created by ulak.create_endpoint()'
                || case when ulak_private.may_read('ulak.endpoint_list') then '; select name from ulak.endpoint_list; lists them.' else '.' end,
            hint = ulak_private.did_you_mean(p_name, array(select e.name from ulak.endpoints as e));
end
$plpgsql$;

create or replace function ulak_private.check_endpoint()
returns trigger
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    -- Rows of a restore were valid when they were stored, and their secrets come after them.
    if tg_op = 'INSERT' and ulak_private.is_restore() then
        return new;
    end if;
    if new.name is null
        or length(new.name) not between 1 and 200
        or ulak_private.has_control_characters(new.name)
        or new.name <> btrim(new.name)
    then
        raise exception 'invalid endpoint name'
            using
                errcode = '22023',
                detail = 'A name has 1 to 200 characters, no control characters, no spaces around it.',
                hint = 'Such as: billing-webhook';
    end if;
    new.config := ulak_private.keep_signing_secret(new.id, case when tg_op = 'UPDATE' then old.config else '{}' end, new.config);
    -- Every worker reads a config that has changed, and other messages wait meanwhile.
    perform ulak_private.check_bytes('the config of an endpoint', octet_length(new.config::text), 262144),
        ulak_private.check_bytes('the description of an endpoint', octet_length(new.description), 10000);
    if ulak_private.secret_names(new.config) <> '{}' then
        perform ulak_private.lock('configs');
    end if;
    perform ulak_private.check_config(new.protocol, new.config, new.id, case when tg_op = 'UPDATE' then old.config end);
    perform ulak_private.check_bodies(new);
    perform ulak_private.check_retry_policy(new.retry_policy);
    new.max_pending := ulak_private.max_pending(new.config);
    if tg_op = 'UPDATE' then
        new.updated_at := now();
        -- Workers cache configs by this number, so it must never stand for two of them.
        new.config_version := greatest(
            new.config_version,
            old.config_version + ((new.protocol, new.config, new.retry_policy)
                is distinct from (old.protocol, old.config, old.retry_policy))::integer
        );
    end if;
    return new;
end
$plpgsql$;

-- A config doesn't name the signing secret that rotate_secret() made, because nobody wrote it there. So it stays when the config is replaced,
-- until a config names another one, or null.
create or replace function ulak_private.keep_signing_secret(p_id bigint, p_old jsonb, p_new jsonb)
returns jsonb
language plpgsql
as $plpgsql$
declare
    v_own jsonb := jsonb_build_object('signing_secret', jsonb_build_object('$secret', ulak_private.signing_secret_name(p_id)));
begin
    if p_old @> v_own and jsonb_typeof(p_new) = 'object' and not p_new ? 'signing_secret' then
        return p_new || v_own;
    elsif p_new -> 'signing_secret' = 'null' then
        delete from ulak_private.secrets s where s.name = ulak_private.signing_secret_name(p_id);
        return p_new - 'signing_secret';
    end if;
    return p_new;
end
$plpgsql$;

-- The log names the keys that changed, never their values.
create or replace function ulak_private.log_endpoint()
returns trigger
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    if new.max_pending is not null and not ulak_private.is_restore() then
        perform ulak_private.forget_endpoint_headroom(array[new.id]);
    end if;
    if tg_op = 'INSERT' and not ulak_private.is_restore() then
        insert into ulak.event_log (event, endpoint_id, endpoint_name, detail)
        values ('endpoint.created', new.id, new.name, jsonb_build_object('protocol', new.protocol));
    elsif tg_op = 'UPDATE' and (new.name, new.protocol, new.config, new.retry_policy, new.description)
        is distinct from (old.name, old.protocol, old.config, old.retry_policy, old.description)
    then
        insert into ulak.event_log (event, endpoint_id, endpoint_name, detail)
        values (
            'endpoint.altered',
            new.id,
            new.name,
            jsonb_build_object(
                'config', ulak_private.changed_keys(old.config, new.config),
                'retry_policy', ulak_private.changed_keys(old.retry_policy, new.retry_policy),
                'config_version', new.config_version
            )
        );
    end if;
    return null;
end
$plpgsql$;

create or replace function ulak_private.changed_keys(p_old jsonb, p_new jsonb)
returns jsonb
language sql
immutable
as $sql$
    select coalesce(jsonb_agg(coalesce(o.key, n.key) order by coalesce(o.key, n.key)), '[]')
    from jsonb_each(p_old) as o
    full join jsonb_each(p_new) as n on n.key = o.key
    where o.value is distinct from n.value
$sql$;

-- What a config shows to roles that may not read it: numbers, switches, status codes and hosts.
create or replace function ulak_private.shown_config(p_config jsonb)
returns jsonb
language sql
immutable
security definer
set search_path = pg_catalog, pg_temp
as $sql$
    select coalesce(jsonb_object_agg(c.key, coalesce(i.shown, c.shown)), '{}')
    from (
        select
            t.key,
            t.value,
            case
                when jsonb_typeof(t.value) in ('number', 'boolean') then t.value
                when t.key in ('retry_on', 'permanent_on', 'announce', 'on_dead', 'disable_after', 'when_disabled') then t.value
                when t.key = any (array(select p.host_key from ulak_private.protocol_facts() p)) then coalesce(to_jsonb(ulak_private.hosts(t.value)), '"***"')
                else '"***"'
            end as shown
        from jsonb_each(p_config) t
    ) c
    left join lateral (
        select jsonb_object_agg(i.key, case when jsonb_typeof(i.value) in ('number', 'boolean') then i.value else '"***"' end) as shown
        from jsonb_each(case when jsonb_typeof(c.value) = 'object' then c.value end) i
    ) i on true
$sql$;

create or replace view ulak.endpoint_list as
select
    e.id,
    e.name,
    e.protocol,
    e.enabled,
    e.description,
    e.circuit_state,
    e.circuit_failure_count,
    e.circuit_opened_at,
    e.circuit_half_open_at,
    e.last_success_at,
    e.last_failure_at,
    e.created_at,
    e.updated_at,
    ulak_private.shown_config(e.config) as config,
    case when e.enabled then e.failing_since + (e.config ->> 'disable_after')::interval end as disable_at
from ulak.endpoints as e;

comment on view ulak.endpoint_list is 'endpoints without anything secret: texts in the config are masked, except hosts; urls are cut after the host';
call ulak_private.describe('ulak.endpoint_list', 'ulak.endpoints');
comment on column ulak.endpoint_list.disable_at is 'when it will be disabled unless it answers: disable_after has begun; null: it has not';
comment on column ulak.endpoint_list.config is 'the config with *** for every text except hosts';
