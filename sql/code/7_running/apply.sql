-- apply() and config(): what is configured, as one document. config_kinds.sql has the kinds of its entries.

create or replace function ulak.config()
returns jsonb
language sql
security definer
set search_path = pg_catalog, pg_temp
set intervalstyle = 'postgres'
as $sql$
    select jsonb_object_agg(
        k.kind,
        case
            when k.identity is null
                then coalesce((select jsonb_object_agg(e.name, ulak_private.without_credentials(e.value)) from ulak_private.config_entries(k.kind) e), '{}')
            else coalesce((select jsonb_agg(e.value order by e.name) from ulak_private.config_entries(k.kind) e), '[]')
        end
    )
    from ulak_private.config_kinds() k
$sql$;

comment on function ulak.config() is
    'everything that is configured, as a document for apply(): settings, endpoints, event types, subscriptions, schedules, grants and watches; secrets by '
    'name only, and *** in place of credentials in plain text';

create or replace function ulak.apply(p_config jsonb, p_dry_run boolean default false, p_prune boolean default false)
returns table (kind text, name text, action text, changed text[], before jsonb, after jsonb, fix text)
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set intervalstyle = 'postgres'
as $plpgsql$
declare
    v_changes jsonb;
begin
    begin
        v_changes := ulak_private.apply_config(p_config, coalesce(p_prune, false));
        if p_dry_run then
            -- What was done is undone with this block; v_changes stays.
            raise sqlstate 'UL001';
        end if;
    exception
        when sqlstate 'UL001' then
            null;
    end;
    return query
    select c.kind, c.name, c.action, c.changed, c.before, c.after, c.fix
    from jsonb_to_recordset(v_changes) c(kind text, name text, action text, changed text[], before jsonb, after jsonb, fix text);
end
$plpgsql$;

comment on function ulak.apply(jsonb, boolean, boolean) is
    'makes the configuration match a document, all of it or nothing, and returns the changes; p_prune also removes entries '
    'that the document does not name, of the kinds that it has; p_dry_run changes nothing';

-- The changes, as an array. If entries are refused, it raises one error that tells each of them.
create or replace function ulak_private.apply_config(p_config jsonb, p_prune boolean)
returns jsonb
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_wanted jsonb;
    v_steps jsonb;
    v_step jsonb;
    v_done jsonb[] := '{}';
begin
    perform ulak_private.check_document(p_config);
    perform ulak_private.lock('configs');
    if p_config ? 'schedules' then
        perform ulak_private.lock('schedule');
    end if;
    v_wanted := ulak_private.wanted_entries(p_config);
    v_steps := ulak_private.config_steps(
        p_config, v_wanted, p_prune and not jsonb_path_exists(v_wanted, '$[*].refusal')
    );
    perform ulak_private.lock_changed_endpoints(v_steps);
    for v_step in select s from jsonb_array_elements(v_steps) s loop
        v_done := v_done || ulak_private.run_step(v_step);
    end loop;
    perform ulak_private.raise_refusals(
        array(
            select r ->> 'refusal' from jsonb_array_elements(v_wanted) r where r ? 'refusal'
            union all
            select d ->> 'refusal' from unnest(v_done) d where d ? 'refusal'
        )
    );
    return coalesce((select jsonb_agg(d) from unnest(v_done) d where d ->> 'action' is not null), '[]');
end
$plpgsql$;

create or replace function ulak_private.check_document(p_config jsonb)
returns void
language plpgsql
immutable
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_kinds text[] := array(select k.kind from ulak_private.config_kinds() k);
    v_violation text[] := ulak_private.json_violation(
        jsonb_build_object(
            'type', 'object',
            'additionalProperties', false,
            'properties', (
                select jsonb_object_agg(k.kind, jsonb_build_object('type', case when k.identity is null then 'object' else 'array' end))
                from ulak_private.config_kinds() k
            )
        ),
        coalesce(p_config, 'null')
    );
begin
    if v_violation is not null then
        v_violation[3] := coalesce(v_violation[3], format('It may have: %s. select ulak.config(); has one of each.', array_to_string(v_kinds, ', ')));
        perform ulak_private.raise_violation('document', v_violation);
    end if;
end
$plpgsql$;

-- A value without what is only said by the way: nulls and defaults.
create or replace function ulak_private.lean(p_value jsonb, p_defaults jsonb)
returns jsonb
language sql
immutable
set search_path = pg_catalog, pg_temp
as $sql$
    select case
        when jsonb_typeof(p_value) <> 'object' then p_value
        else coalesce(
            (select jsonb_object_agg(e.key, e.value) from jsonb_each(p_value) e where e.value <> 'null' and e.value is distinct from p_defaults -> e.key),
            '{}'
        )
    end
$sql$;

-- The name of an entry that has none: the values that tell it from others.
create or replace function ulak_private.entry_name(p_identity text[], p_value jsonb)
returns text
language sql
immutable
set search_path = pg_catalog, pg_temp
as $sql$
    select coalesce(jsonb_object_agg(e.key, e.value), '{}')::text
    from jsonb_each(case when jsonb_typeof(p_value) = 'object' then p_value end) e
    where e.key = any (p_identity)
$sql$;

-- The entries of a kind that there are.
create or replace function ulak_private.config_entries(p_kind text)
returns table (name text, value jsonb)
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_kind record;
begin
    select k.* into v_kind from ulak_private.config_kinds() k where k.kind = p_kind;
    for name, value in execute v_kind.listing loop
        value := ulak_private.lean(value, v_kind.defaults);
        name := coalesce(name, ulak_private.entry_name(v_kind.identity, value));
        return next;
    end loop;
end
$plpgsql$;

-- The entries of a document: kind, name, and the value as it is listed once it is there, or a refusal.
create or replace function ulak_private.wanted_entries(p_config jsonb)
returns jsonb
language sql
set search_path = pg_catalog, pg_temp
as $sql$
    select coalesce(
        jsonb_agg(
            case
                when w.number = 1 or w.entry ? 'refusal' then w.entry
                else jsonb_build_object('refusal', format('%s %s: it is given twice', w.entry ->> 'kind', w.entry ->> 'name'))
            end
        ),
        '[]'
    )
    from (
        select e.entry, row_number() over (partition by e.entry -> 'kind', e.entry -> 'name') as number
        from ulak_private.config_kinds() k
        cross join lateral (
            select ulak_private.wanted_entry(k.kind, o.key, o.value)
            from jsonb_each(case when k.identity is null then p_config -> k.kind end) o
            union all
            select ulak_private.wanted_entry(k.kind, null, a)
            from jsonb_array_elements(case when k.identity is not null then p_config -> k.kind end) a
        ) e(entry)
    ) w
$sql$;

create or replace function ulak_private.wanted_entry(p_kind text, p_name text, p_value jsonb)
returns jsonb
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_kind record;
    v_violation text[];
    v_value jsonb;
begin
    select k.* into v_kind from ulak_private.config_kinds() k where k.kind = p_kind;
    v_violation := ulak_private.json_violation(v_kind.schema, p_value);
    if v_violation is not null then
        perform ulak_private.raise_violation('entry', v_violation);
    end if;
    execute v_kind.canonical into v_value using p_name, p_value;
    v_value := ulak_private.lean(v_value, v_kind.defaults);
    return jsonb_build_object('kind', p_kind, 'name', coalesce(p_name, ulak_private.entry_name(v_kind.identity, v_value)), 'value', v_value);
exception
    when others then
        if ulak_private.is_passing(sqlstate) then
            raise;
        end if;
        return ulak_private.refusal(p_kind, coalesce(p_name, ulak_private.entry_name(v_kind.identity, p_value)), sqlerrm);
end
$plpgsql$;

-- What has to be done so that the entries are as wanted, in its order: kind, name, old and new.
create or replace function ulak_private.config_steps(p_config jsonb, p_wanted jsonb, p_prune boolean)
returns jsonb
language sql
set search_path = pg_catalog, pg_temp
as $sql$
    select coalesce(
        jsonb_agg(
            jsonb_build_object('kind', k.kind, 'name', e.name, 'old', e.old, 'new', e.new)
            order by case when k.kind = 'settings' then 0 when e.new is null then 100 - k.place else k.place end, e.name
        ),
        '[]'
    )
    from ulak_private.config_kinds() k
    cross join lateral (
        select coalesce(o.name, w.name), o.value, w.value
        from ulak_private.config_entries(k.kind) o
        full join (
            select w.name, w.value from jsonb_to_recordset(p_wanted) w(kind text, name text, value jsonb) where w.kind = k.kind
        ) w on w.name = o.name
        where o.value is distinct from w.value
    ) e(name, old, new)
    where p_config ? k.kind and (e.new is not null or p_prune)
$sql$;

-- In the order of their ids, as everybody who locks several endpoints does. Another max_pending may change any of them.
create or replace function ulak_private.lock_changed_endpoints(p_steps jsonb)
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    perform ulak_private.lock_endpoint(e.id)
    from (
        select e.id
        from ulak.endpoints e
        where e.name in (
            select case s ->> 'kind' when 'endpoints' then s ->> 'name' when 'grants' then coalesce(nullif(s -> 'new', 'null'), s -> 'old') ->> 'endpoint' end
            from jsonb_array_elements(p_steps) s
        )
            or jsonb_path_exists(p_steps, '$[*] ? (@.kind == "settings" && @.name == "max_pending")')
        order by e.id
    ) e;
end
$plpgsql$;

-- The change that it has made, or a refusal. Without an action, nothing had to be done.
create or replace function ulak_private.run_step(p_step jsonb)
returns jsonb
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_kind record;
    v_name text;
    v_old jsonb := nullif(p_step -> 'old', 'null');
    v_new jsonb := nullif(p_step -> 'new', 'null');
    v_action text := case when v_old is null then 'create' else 'alter' end;
    v_done text;
    v_fix text;
begin
    select k.* into v_kind from ulak_private.config_kinds() k where k.kind = p_step ->> 'kind';
    v_name := case when v_kind.identity is null then p_step ->> 'name' end;
    if v_new is null then
        execute v_kind.removal into v_action, v_fix using v_name, v_old;
    else
        execute v_kind.put into v_done, v_fix using v_name, v_new, v_old;
    end if;
    return jsonb_build_object(
        'kind', v_kind.kind,
        'name', p_step -> 'name',
        'action', v_action,
        'changed', case when v_action = 'alter' then to_jsonb(ulak_private.changed_paths(v_old, v_new)) end,
        'before', ulak_private.shown_entry(v_kind.kind, v_old),
        'after', ulak_private.shown_entry(v_kind.kind, v_new),
        'fix', v_fix
    );
exception
    when others then
        if ulak_private.is_passing(sqlstate) then
            raise;
        end if;
        return ulak_private.refusal(v_kind.kind, p_step ->> 'name', sqlerrm);
end
$plpgsql$;

-- By keys, and where objects differ, by theirs.
create or replace function ulak_private.changed_paths(p_old jsonb, p_new jsonb)
returns text[]
language sql
immutable
set search_path = pg_catalog, pg_temp
as $sql$
    select array_agg(concat_ws('.', k.key, s.key) order by k.key, s.key)
    from jsonb_array_elements_text(
        case when jsonb_typeof(p_old) = 'object' and jsonb_typeof(p_new) = 'object' then ulak_private.changed_keys(p_old, p_new) end
    ) k(key)
    cross join lateral jsonb_array_elements_text(
        case
            when jsonb_typeof(p_old -> k.key) = 'object' and jsonb_typeof(p_new -> k.key) = 'object'
                then ulak_private.changed_keys(p_old -> k.key, p_new -> k.key)
            else '[null]'
        end
    ) s(key)
$sql$;

-- An entry for logs: without credentials, and urls without what follows the host.
create or replace function ulak_private.shown_entry(p_kind text, p_value jsonb)
returns jsonb
language plpgsql
immutable
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_key text;
begin
    if p_kind = 'endpoints' then
        p_value := ulak_private.without_credentials(p_value);
        foreach v_key in array array['url', 'proxy.url', 'auth.token_url'] loop
            if p_value -> 'config' #>> string_to_array(v_key, '.') ~* '^https?://[^/?]+[/?].' then
                p_value := jsonb_set(
                    p_value,
                    '{config}' || string_to_array(v_key, '.'),
                    to_jsonb(ulak_private.hosts(p_value -> 'config' #> string_to_array(v_key, '.')) || '/***')
                );
            end if;
        end loop;
    elsif jsonb_typeof(p_value -> 'headers') = 'object' then
        p_value := jsonb_set(p_value, '{headers}', coalesce((select jsonb_object_agg(h, '***') from jsonb_object_keys(p_value -> 'headers') h), '{}'));
    end if;
    return p_value;
end
$plpgsql$;

-- Errors that aren't the entry's, by their SQLSTATE: another try may succeed.
create or replace function ulak_private.is_passing(p_state text)
returns boolean
language sql
immutable
set search_path = pg_catalog, pg_temp
as $sql$
    select p_state ~ '^(40|53|57|58|XX)' or p_state = '55P03'
$sql$;

create or replace function ulak_private.refusal(p_kind text, p_name text, p_message text)
returns jsonb
language sql
immutable
set search_path = pg_catalog, pg_temp
as $sql$
    select jsonb_build_object('refusal', format('%s %s: %s', p_kind, p_name, p_message))
$sql$;

create or replace function ulak_private.raise_refusals(p_refusals text[])
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    if p_refusals <> '{}' then
        raise exception 'the document is refused: % of its entries cannot be applied', cardinality(p_refusals)
            using errcode = '22023', detail = array_to_string(p_refusals, E'\n'), hint = 'Correct them; nothing was changed.';
    end if;
end
$plpgsql$;
