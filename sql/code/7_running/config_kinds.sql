-- The kinds of entries in a document of apply(): what an entry may hold, and the statements that list, write and remove it. They call
-- public functions, so that the same checks apply.

-- The parts of a document, as JSON Schema.
create or replace function ulak_private.document_schema()
returns jsonb
language sql
immutable
as $sql$
    select $json${
        "settings": {"type": "object", "additionalProperties": {"type": ["string", "number", "boolean"]}},
        "endpoints": {"type": "object", "additionalProperties": {
            "type": "object", "required": ["protocol"], "additionalProperties": false,
            "properties": {
                "protocol": {"type": "string"},
                "config": {"type": "object", "default": {}},
                "retry_policy": {"type": "object", "default": {}},
                "description": {"type": "string", "default": ""},
                "enabled": {"type": "boolean", "default": true}
            }
        }},
        "event_types": {"type": "object", "additionalProperties": {
            "type": "object",
            "additionalProperties": false,
            "properties": {"description": {"type": "string", "default": ""}, "schema": {"type": "object", "default": {}}}
        }},
        "subscriptions": {"type": "array", "items": {
            "type": "object", "required": ["event_type", "endpoint"], "additionalProperties": false,
            "properties": {
                "event_type": {"type": "string"},
                "endpoint": {"type": "string"},
                "filter": {"default": {}},
                "predicate": {"type": "string", "default": "true"},
                "body": {},
                "description": {"type": "string", "default": ""},
                "enabled": {"type": "boolean", "default": true}
            }
        }},
        "schedules": {"type": "object", "additionalProperties": {
            "type": "object", "required": ["cron", "endpoint"], "additionalProperties": false,
            "properties": {
                "cron": {"type": "string"},
                "endpoint": {"type": "string"},
                "payload": {},
                "priority": {"type": "integer", "minimum": -2147483648, "maximum": 2147483647, "default": 0},
                "ordering_key": {"type": "string"},
                "headers": {"type": "object"},
                "metadata": {"type": "object"},
                "expires_after": {"type": "string"}
            }
        }},
        "grants": {"type": "array", "items": {
            "type": "object", "required": ["role", "right"], "additionalProperties": false,
            "properties": {
                "role": {"type": "string"},
                "right": {"enum": ["send", "work", "publish"]},
                "endpoint": {"type": "string"},
                "event_type": {"type": "string"}
            }
        }},
        "watches": {"type": "array", "items": {
            "type": "object", "required": ["table", "event_type"], "additionalProperties": false,
            "properties": {
                "table": {"type": "string"},
                "event_type": {"type": "string"},
                "operations": {
                    "type": "array", "items": {"enum": ["insert", "update", "delete", "truncate"]}, "default": ["delete", "insert", "update"]
                },
                "columns": {"type": "array", "items": {"type": "string"}},
                "changed": {"type": "array", "items": {"type": "string"}, "default": []},
                "condition": {"type": "string"},
                "ordering_key": {"type": "array", "items": {"type": "string"}}
            }
        }}
    }$json$::pg_catalog.jsonb
$sql$;

-- kind: the key of the document. Entries are written in the order of place, and removed in the reverse order; settings come first.
-- identity: null if the document has entries by name. Otherwise it has a list, and these keys identify an entry.
-- listing: the name (null with an identity) and the row of each existing entry. Keys that the schema doesn't have are ignored.
-- canonical: turns an entry of a document ($1 name, $2 entry) into what listing would return for it.
-- schema: of one entry.
create or replace function ulak_private.config_kinds()
returns table (kind text, place integer, identity text[], listing text, canonical text, schema jsonb)
language sql
immutable
as $sql$
    select k.*, coalesce(s.schema -> 'items', s.schema -> 'additionalProperties')
    from (
        values
            (
                'settings', 1, null::text[],
                'select v.name, to_jsonb(v.value) from ulak.setting_values v',
                $$select to_jsonb(ulak_private.checked_setting($1, $2 #>> '{}', format('select * from ulak.settings where name = %L;', $1)))$$
            ),
            (
                'endpoints', 2, null,
                $$select e.name, to_jsonb(e) || jsonb_build_object('config', ulak_private.portable_config(e.id, e.config)) from ulak.endpoints e$$,
                'select ulak_private.with_stored_credentials($1, $2)'
            ),
            (
                'event_types', 3, null,
                $$select t.name, to_jsonb(t) from ulak.event_types t where not starts_with(lower(t.name collate "C"), 'ulak.')$$,
                'select $2 where $1 is not null'
            ),
            (
                'subscriptions', 4, '{event_type,endpoint,filter,predicate}',
                'select null, to_jsonb(s) from ulak.subscription_list s',
                $$select $2 || jsonb_build_object('predicate', ($2 ->> 'predicate')::jsonpath::text)$$
            ),
            (
                'schedules', 5, null,
                'select r.name, to_jsonb(r) from ulak.recurring_list r',
                $$select $2 || jsonb_build_object('expires_after', ($2 ->> 'expires_after')::interval::text)$$
            ),
            (
                'grants', 6, '{role,endpoint,event_type,right}',
                $$
                    select null, jsonb_build_object('role', g.role_name, 'endpoint', e.name, 'right', r.name)
                    from ulak.endpoint_grants g
                    join ulak.endpoints e on e.id = g.endpoint_id
                    cross join lateral (values ('send', g.may_send), ('work', g.may_work)) r(name, is_granted)
                    where r.is_granted
                    union all
                    select null, jsonb_build_object('role', g.role_name, 'event_type', g.event_type, 'right', 'publish')
                    from ulak.event_type_grants g
                $$,
                'select ulak_private.checked_grant($2)'
            ),
            (
                'watches', 7, '{table,event_type}',
                $$select null, to_jsonb(w) || jsonb_build_object('table', w.table_name) from ulak.watch_list w$$,
                'select ulak_private.canonical_watch($2)'
            )
    ) k(kind, place, identity, listing, canonical)
    cross join lateral (select ulak_private.document_schema() -> k.kind) s(schema)
$sql$;

-- The statements that write an entry (put) and remove it; watches are apply_watch()'s. $1 is its name, $2 the new entry, $3 the old row, or null. The first column of a
-- removal says what was done, null if nothing was; the second column of both is what has to be run by hand.
create or replace function ulak_private.config_changes()
returns table (kind text, put text, removal text)
language sql
immutable
as $sql$
    values
        (
            'settings',
            $$select ulak.configure($1, $2 #>> '{}')$$,
            $$select case when ulak.configure($1, null) is not null then 'reset' end$$
        ),
        (
            'endpoints',
            'select ulak_private.put_endpoint($1, $2, $3)',
            'select ulak_private.remove_endpoint($1)'
        ),
        (
            'event_types',
            $$
                select case
                    when $3 is null then ulak.create_event_type($1, $2 ->> 'description', $2 -> 'schema')
                    else ulak.alter_event_type($1, coalesce($2 ->> 'description', ''), coalesce($2 -> 'schema', '{}'))::text
                end
            $$,
            $$select case when ulak.drop_event_type($1) then 'drop' end$$
        ),
        (
            'subscriptions',
            $$
                select ulak.alter_subscription(
                    coalesce(
                        ($3 ->> 'id')::bigint,
                        ulak.subscribe($2 ->> 'event_type', $2 ->> 'endpoint', $2 -> 'filter', ($2 ->> 'predicate')::jsonpath)
                    ),
                    p_enabled => coalesce(($2 ->> 'enabled')::boolean, true),
                    p_description => coalesce($2 ->> 'description', ''),
                    p_body => coalesce($2 -> 'body', 'null')
                )
            $$,
            $$select case when ulak.unsubscribe(($3 ->> 'id')::bigint) then 'drop' end$$
        ),
        (
            'schedules',
            $$
                select 'scheduled', string_agg(s.fix, ' ')
                from ulak.schedule(
                    $1, $2 ->> 'cron', $2 ->> 'endpoint', coalesce($2 -> 'payload', 'null'), coalesce(($2 ->> 'priority')::integer, 0),
                    $2 ->> 'ordering_key', $2 -> 'headers', $2 -> 'metadata', ($2 ->> 'expires_after')::interval
                ) s
            $$,
            $$select 'drop', string_agg(s.fix, ' ') from ulak.unschedule($1) s$$
        ),
        (
            'grants',
            $$
                select case
                    when $2 ? 'event_type' then ulak.grant_event_type($2 ->> 'event_type', $2 ->> 'role')
                    else ulak.grant_endpoint($2 ->> 'endpoint', $2 ->> 'role', $2 ->> 'right')
                end
            $$,
            $$
                select 'revoke'
                where case
                    when $3 ? 'event_type' then ulak.revoke_event_type($3 ->> 'event_type', $3 ->> 'role')
                    else ulak.revoke_endpoint($3 ->> 'endpoint', $3 ->> 'role', $3 ->> 'right')
                end
            $$
        )
$sql$;

create or replace function ulak_private.checked_grant(p_entry jsonb)
returns jsonb
language plpgsql
immutable
as $plpgsql$
declare
    v_key text := case p_entry ->> 'right' when 'publish' then 'event_type' else 'endpoint' end;
begin
    if not p_entry ? v_key then
        perform ulak_private.raise_violation('grant', array['.' || v_key, format('is required with "right": "%s"', p_entry ->> 'right'), null]);
    elsif p_entry ?& '{endpoint,event_type}' then
        perform ulak_private.raise_violation('grant', array['', 'must not name both an endpoint and an event type', null]);
    end if;
    return p_entry;
end
$plpgsql$;

-- Endpoints.

-- A config without the signing secret that rotate_secret() made: each system has its own and keeps it.
create or replace function ulak_private.portable_config(p_id bigint, p_config jsonb)
returns jsonb
language sql
immutable
as $sql$
    select case
        when p_config #>> '{signing_secret,$secret}' = ulak_private.signing_secret_name(p_id) then p_config - 'signing_secret'
        else p_config
    end
$sql$;

create or replace function ulak_private.put_endpoint(p_name text, p_entry jsonb, p_row jsonb)
returns text
language plpgsql
as $plpgsql$
declare
    v_is_enabled boolean := coalesce((p_entry ->> 'enabled')::boolean, true);
begin
    perform ulak.create_endpoint(
        p_name,
        p_entry ->> 'protocol',
        coalesce(p_entry -> 'config', '{}'),
        p_entry -> 'retry_policy',
        p_entry ->> 'description',
        p_if_exists => 'replace'
    );
    if v_is_enabled <> coalesce((p_row ->> 'enabled')::boolean, true) then
        if v_is_enabled then
            perform ulak.enable_endpoint(p_name);
        else
            perform ulak.disable_endpoint(p_name);
        end if;
    end if;
    return p_name;
end
$plpgsql$;

-- An endpoint that still has messages is disabled instead, and the messages are held.
create or replace function ulak_private.remove_endpoint(p_name text)
returns text
language plpgsql
as $plpgsql$
begin
    perform ulak.drop_endpoint(p_name);
    return 'drop';
exception
    when object_in_use then
        return case when ulak.disable_endpoint(p_name) then 'disable' end;
end
$plpgsql$;

-- Credentials that stand in a config in plain text, by their path. A document never shows them.
create or replace function ulak_private.credentials_in(p_protocol text, p_config jsonb)
returns table (path text[], value text)
language sql
immutable
as $sql$
    select n.path, n.value #>> '{}'
    from ulak_private.protocol_facts() f
    cross join lateral ulak_private.json_nodes(p_config, '$secret') n
    where f.protocol = p_protocol
        and jsonb_typeof(n.value) = 'string'
        and exists (
            select
            from unnest(f.secret_places) s(place)
            where case
                when s.place like '%/*'
                    then s.place = n.path[1] || '/*' and n.path[cardinality(n.path)] ~* '(auth|cookie|key|pass|secret|signature|token)'
                else s.place = array_to_string(n.path, '/') and s.place !~ '(url|username|client_id|ca.pem|certificate.pem)$'
            end
        )
$sql$;

-- An entry with *** in place of its credentials.
create or replace function ulak_private.without_credentials(p_entry jsonb)
returns jsonb
language plpgsql
immutable
as $plpgsql$
declare
    v_path text[];
begin
    for v_path in select c.path from ulak_private.credentials_in(p_entry ->> 'protocol', p_entry -> 'config') c loop
        p_entry := jsonb_set(p_entry, '{config}' || v_path, '"***"');
    end loop;
    return p_entry;
end
$plpgsql$;

-- An entry with the endpoint's own credentials in place of ***. If the entry doesn't say whether it is enabled, the endpoint stays as it is.
create or replace function ulak_private.with_stored_credentials(p_name text, p_entry jsonb)
returns jsonb
language plpgsql
stable
as $plpgsql$
declare
    v_id bigint;
    v_stored jsonb;
    v_is_enabled boolean;
    v_path text[];
begin
    select e.id, e.config, e.enabled into v_id, v_stored, v_is_enabled
    from ulak.endpoints e
    where e.name = p_name and e.protocol = p_entry ->> 'protocol';
    p_entry := jsonb_build_object('enabled', v_is_enabled) || p_entry;
    if p_entry ? 'config' then
        p_entry := jsonb_set(p_entry, '{config}', ulak_private.portable_config(v_id, p_entry -> 'config'));
        if p_entry #> '{config,signing_secret}' = 'null' then
            p_entry := p_entry #- '{config,signing_secret}';
        end if;
    end if;
    for v_path in
        select c.path from ulak_private.credentials_in(p_entry ->> 'protocol', p_entry -> 'config') c where c.value = '***'
    loop
        if v_stored #> v_path is null then
            perform ulak_private.raise_violation(
                'endpoint',
                array['.config.' || array_to_string(v_path, '.'), 'is masked, and there is no value to keep', 'Name a secret: {"$secret": "name"}.']
            );
        end if;
        p_entry := jsonb_set(p_entry, '{config}' || v_path, v_stored #> v_path);
    end loop;
    return p_entry;
end
$plpgsql$;

-- Watches.

-- An entry without columns gets all columns of the table, as in watch().
create or replace function ulak_private.canonical_watch(p_entry jsonb)
returns jsonb
language plpgsql
stable
as $plpgsql$
declare
    v_table regclass := to_regclass(p_entry ->> 'table');
begin
    if v_table is null then
        raise exception 'unknown table %', p_entry ->> 'table'
            using errcode = '42P01', hint = 'Name it with its schema, such as public.orders.';
    end if;
    return jsonb_build_object(
        'columns', (
            select jsonb_agg(a.attname order by a.attnum)
            from pg_attribute a
            where a.attrelid = v_table and a.attnum > 0 and not a.attisdropped
        )
    ) || p_entry || jsonb_build_object(
        'table', v_table::text,
        'operations', (
            select jsonb_agg(distinct o) from jsonb_array_elements_text(coalesce(p_entry -> 'operations', '["insert", "update", "delete"]')) o
        ),
        'condition', (p_entry ->> 'condition')::jsonpath::text
    );
end
$plpgsql$;

create or replace function ulak_private.texts(p_array jsonb)
returns text[]
language sql
immutable
set search_path = pg_catalog, pg_temp
as $sql$
    select case when p_array is not null then array(select jsonb_array_elements_text(p_array)) end
$sql$;
