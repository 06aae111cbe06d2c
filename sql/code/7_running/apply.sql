-- apply() and config(): the configuration as one document. config_kinds.sql has the kinds of its entries.

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

-- Runs with the caller's rights, and so do watch() and unwatch(): PostgreSQL itself checks the rights on the tables. All the rest is done by
-- apply_config().
create or replace function ulak.apply(p_config jsonb, p_dry_run boolean default false, p_prune boolean default false)
returns table (kind text, name text, action text, changed text[], before jsonb, after jsonb, fix text)
language plpgsql
set search_path = pg_catalog, pg_temp
set intervalstyle = 'postgres'
as $plpgsql$
declare
    v_done jsonb;
    v_step jsonb;
begin
    begin
        v_done := ulak_private.apply_config(p_config, coalesce(p_prune, false));
        for v_step in select s from jsonb_array_elements(v_done) s where s ? 'change' loop
            v_done := v_done || ulak_private.apply_watch(v_step);
        end loop;
        perform ulak_private.refuse_document(v_done);
        if p_dry_run then
            -- The changes are rolled back with this block; v_done stays.
            raise sqlstate 'UL001';
        end if;
    exception
        when sqlstate 'UL001' then
            null;
    end;
    return query
    select c.kind, c.name, c.action, c.changed, c.before, c.after, c.fix
    from jsonb_to_recordset(v_done) c(kind text, name text, action text, changed text[], before jsonb, after jsonb, fix text)
    where c.action is not null;
end
$plpgsql$;

comment on function ulak.apply(jsonb, boolean, boolean) is
    'makes the configuration match a document, all of it or nothing, and returns the changes; p_prune also removes entries '
    'that the document does not name, of the kinds that it has; p_dry_run changes nothing';

-- What was done, as an array: changes, and the watches that apply() has to make or end with its caller's rights.
create or replace function ulak_private.apply_config(p_config jsonb, p_prune boolean)
returns jsonb
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set intervalstyle = 'postgres'
as $plpgsql$
declare
    v_wanted jsonb;
    v_steps jsonb;
    v_step jsonb;
    v_done jsonb;
begin
    -- The kinds; the entries are checked one by one.
    perform ulak_private.raise_violation('document', ulak_private.json_violation(
        (
            select jsonb_build_object(
                'type', 'object', 'additionalProperties', false, 'properties', jsonb_object_agg(s.key, jsonb_build_object('type', s.value -> 'type'))
            )
            from jsonb_each(ulak_private.document_schema()) s
        ),
        coalesce(p_config, 'null')
    ));
    perform ulak_private.lock('configs');
    if p_config ? 'schedules' then
        perform ulak_private.lock('schedule');
    end if;
    v_wanted := ulak_private.wanted_entries(p_config);
    v_done := jsonb_path_query_array(v_wanted, '$[*] ? (exists (@.refusal))');
    v_steps := ulak_private.config_steps(p_config, v_wanted, p_prune and v_done = '[]');
    perform ulak_private.lock_changed_endpoints(v_steps);
    for v_step in select s from jsonb_array_elements(v_steps) s loop
        v_done := v_done || case
            when v_step ->> 'kind' = 'watches' then v_step || jsonb_build_object('change', ulak_private.step_change(v_step))
            else ulak_private.run_step(v_step)
        end;
    end loop;
    perform ulak_private.refuse_document(v_done);
    return v_done;
end
$plpgsql$;

-- If entries are refused, one error names all of them.
create or replace function ulak_private.refuse_document(p_done jsonb)
returns void
language plpgsql
immutable
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_refusals text[] := array(
        select format('%s %s: %s', r ->> 'kind', r ->> 'name', r ->> 'refusal') from jsonb_array_elements(p_done) r where r ? 'refusal'
    );
begin
    if v_refusals <> '{}' then
        raise exception 'the document is refused: % of its entries cannot be applied', cardinality(v_refusals)
            using errcode = '22023', detail = array_to_string(v_refusals, E'\n'), hint = 'Correct them; nothing was changed.';
    end if;
end
$plpgsql$;

-- A row or an entry with the keys of its schema only, without nulls and defaults.
create or replace function ulak_private.lean(p_value jsonb, p_schema jsonb)
returns jsonb
language sql
immutable
as $sql$
    select case
        when jsonb_typeof(p_value) <> 'object' then p_value
        else coalesce(
            (
                select jsonb_object_agg(p.key, p_value -> p.key)
                from jsonb_each(p_schema -> 'properties') p
                where p_value -> p.key <> 'null' and p_value -> p.key is distinct from p.value -> 'default'
            ),
            '{}'
        )
    end
$sql$;

-- The name of an entry in a list: the values of the keys that identify it.
create or replace function ulak_private.entry_name(p_identity text[], p_value jsonb)
returns text
language sql
immutable
as $sql$
    select coalesce(jsonb_object_agg(e.key, e.value), '{}')::text
    from jsonb_each(case when jsonb_typeof(p_value) = 'object' then p_value end) e
    where e.key = any (p_identity)
$sql$;

-- The existing entries of a kind, with their rows. If several have one name, the oldest counts.
create or replace function ulak_private.config_entries(p_kind text)
returns table (name text, value jsonb, old_row jsonb)
language plpgsql
stable
as $plpgsql$
declare
    v_kind record;
begin
    select k.* into v_kind from ulak_private.config_kinds() k where k.kind = p_kind;
    return query execute format(
        $$
            select distinct on (n.name) n.name, e.value, l.old_row
            from (%s) l(name, old_row)
            cross join lateral (select ulak_private.lean(l.old_row, $1)) e(value)
            cross join lateral (select coalesce(l.name, ulak_private.entry_name($2, e.value))) n(name)
            order by n.name, (l.old_row ->> 'id')::bigint
        $$,
        v_kind.listing
    )
    using v_kind.schema, v_kind.identity;
end
$plpgsql$;

-- The entries of a document, each with kind, name, and its value as config_entries() would list it, or a refusal.
create or replace function ulak_private.wanted_entries(p_config jsonb)
returns jsonb
language sql
as $sql$
    select coalesce(jsonb_agg(case when w.number > 1 then '{"refusal": "it is given twice"}' || (w.entry - 'value') else w.entry end), '[]')
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
as $plpgsql$
declare
    v_kind record;
    v_entry jsonb;
    v_value jsonb;
    v_detail text;
    v_hint text;
begin
    select k.* into v_kind from ulak_private.config_kinds() k where k.kind = p_kind;
    v_entry := jsonb_build_object('kind', p_kind, 'name', coalesce(p_name, ulak_private.entry_name(v_kind.identity, p_value)));
    perform ulak_private.raise_violation('entry', ulak_private.json_violation(v_kind.schema, p_value));
    execute v_kind.canonical into v_value using p_name, p_value;
    v_value := ulak_private.lean(v_value, v_kind.schema);
    return v_entry || jsonb_build_object('name', coalesce(p_name, ulak_private.entry_name(v_kind.identity, v_value)), 'value', v_value);
exception
    -- These errors aren't the entry's fault: another try may succeed.
    when transaction_rollback or insufficient_resources or operator_intervention or system_error or internal_error or lock_not_available then
        raise;
    when others then
        get stacked diagnostics v_detail = pg_exception_detail, v_hint = pg_exception_hint;
        v_entry := ulak_private.refusal(v_entry, sqlerrm, v_detail, v_hint);
        return v_entry;
end
$plpgsql$;

-- The steps from what is there to what is wanted, in their order: kind, name, old and new value, and the old row.
create or replace function ulak_private.config_steps(p_config jsonb, p_wanted jsonb, p_prune boolean)
returns jsonb
language sql
as $sql$
    select coalesce(
        jsonb_agg(
            jsonb_build_object('kind', k.kind, 'name', e.name, 'old', e.old, 'new', e.new, 'row', e.old_row)
            order by case when k.kind = 'settings' then 0 when e.new is null then 100 - k.place else k.place end, e.name
        ),
        '[]'
    )
    from ulak_private.config_kinds() k
    cross join lateral (
        select coalesce(o.name, w.name), o.value, w.value, o.old_row
        from ulak_private.config_entries(k.kind) o
        full join (
            select w.name, w.value from jsonb_to_recordset(p_wanted) w(kind text, name text, value jsonb) where w.kind = k.kind
        ) w on w.name = o.name
        where o.value is distinct from w.value
    ) e(name, old, new, old_row)
    where p_config ? k.kind and (e.new is not null or p_prune)
$sql$;

-- Endpoints are locked in the order of their ids, as everywhere. Another max_pending may change any of them.
create or replace function ulak_private.lock_changed_endpoints(p_steps jsonb)
returns void
language plpgsql
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

-- The change that a step has made, or a refusal. action is null if there was nothing to do.
create or replace function ulak_private.run_step(p_step jsonb)
returns jsonb
language plpgsql
as $plpgsql$
declare
    v_change jsonb := ulak_private.step_change(p_step);
    v_is_removal boolean := v_change ->> 'action' = 'drop';
    v_statement text := (
        select case when v_is_removal then c.removal else c.put end from ulak_private.config_changes() c where c.kind = p_step ->> 'kind'
    );
    v_done text;
    v_fix text;
    v_detail text;
    v_hint text;
begin
    execute v_statement into v_done, v_fix using p_step ->> 'name', nullif(p_step -> 'new', 'null'), nullif(p_step -> 'row', 'null');
    return v_change || jsonb_build_object('fix', v_fix) || case when v_is_removal then jsonb_build_object('action', v_done) else '{}' end;
exception
    -- These errors aren't the entry's fault: another try may succeed.
    when transaction_rollback or insufficient_resources or operator_intervention or system_error or internal_error or lock_not_available then
        raise;
    when others then
        get stacked diagnostics v_detail = pg_exception_detail, v_hint = pg_exception_hint;
        v_change := ulak_private.refusal(p_step, sqlerrm, v_detail, v_hint);
        return v_change;
end
$plpgsql$;

-- A step as apply() returns it.
create or replace function ulak_private.step_change(p_step jsonb)
returns jsonb
language sql
immutable
as $sql$
    select jsonb_build_object(
        'kind', p_step -> 'kind',
        'name', p_step -> 'name',
        'action', case when s.new is null then 'drop' when s.old is null then 'create' else 'alter' end,
        'changed', ulak_private.changed_paths(s.old, s.new),
        'before', ulak_private.shown_entry(p_step ->> 'kind', s.old),
        'after', ulak_private.shown_entry(p_step ->> 'kind', s.new)
    )
    from (select nullif(p_step -> 'old', 'null'), nullif(p_step -> 'new', 'null')) s(old, new)
$sql$;

-- One line: the document's error has one for each entry.
create or replace function ulak_private.refusal(p_step jsonb, p_message text, p_detail text, p_hint text)
returns jsonb
language sql
immutable
set search_path = pg_catalog, pg_temp
as $sql$
    select jsonb_build_object(
        'kind', p_step -> 'kind',
        'name', p_step -> 'name',
        'refusal', regexp_replace(concat_ws('. ', p_message, nullif(rtrim(p_detail, '.'), ''), nullif(p_hint, '')), E'\\s+', ' ', 'g')
    )
$sql$;

-- With the caller's rights, as apply() runs. A watch that changes is ended and made anew.
create or replace function ulak_private.apply_watch(p_step jsonb)
returns jsonb
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_new jsonb := nullif(p_step -> 'new', 'null');
    v_old_id bigint := p_step -> 'row' ->> 'id';
    v_detail text;
    v_hint text;
begin
    if v_old_id is not null then
        perform ulak.unwatch(v_old_id);
    end if;
    if v_new is not null then
        perform ulak.watch(
            (v_new ->> 'table')::regclass,
            v_new ->> 'event_type',
            coalesce(ulak_private.texts(v_new -> 'operations'), '{insert,update,delete}'),
            ulak_private.texts(v_new -> 'columns'),
            ulak_private.texts(v_new -> 'changed'),
            (v_new ->> 'condition')::jsonpath,
            ulak_private.texts(v_new -> 'ordering_key')
        );
    end if;
    return p_step -> 'change';
exception
    -- As in run_step().
    when transaction_rollback or insufficient_resources or operator_intervention or system_error or internal_error or lock_not_available then
        raise;
    when others then
        get stacked diagnostics v_detail = pg_exception_detail, v_hint = pg_exception_hint;
        p_step := ulak_private.refusal(p_step, sqlerrm, v_detail, v_hint);
        return p_step;
end
$plpgsql$;

-- The keys that differ; for objects, their keys that differ: {config.timeout,description}.
create or replace function ulak_private.changed_paths(p_old jsonb, p_new jsonb)
returns text[]
language sql
immutable
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

-- An entry as apply() shows it: credentials are masked, and urls are cut after the host.
create or replace function ulak_private.shown_entry(p_kind text, p_value jsonb)
returns jsonb
language plpgsql
immutable
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
