-- The part of JSON Schema that ulak supports: for payloads of events, configs of endpoints and retry policies.

-- The first violation of p_schema in p_value, as {path below $, problem, hint}; null if there is none. It says what was expected where, and
-- never shows the value, which may be a secret. This runs for every value of every published payload, so it uses plain expressions only,
-- which PL/pgSQL evaluates without the executor, and builds the path on the way back from a violation. As in the standard, a keyword
-- doesn't apply to values of other types.
create or replace function ulak_private.json_violation(p_schema jsonb, p_value jsonb)
returns text[]
language plpgsql
immutable
as $plpgsql$
declare
    v_type text := jsonb_typeof(p_value);
    v_problem text;
begin
    if p_schema = 'false' then
        return array['', 'is not allowed', null];
    elsif p_schema ? 'type' and not p_schema -> 'type' ? v_type
        and not (p_schema -> 'type' ? 'integer' and v_type = 'number' and p_value::numeric = trunc(p_value::numeric))
    then
        return array['', 'must be of type ' || ulak_private.json_list(p_schema -> 'type', ' or '), null];
    elsif p_schema ? 'const' and p_value <> p_schema -> 'const' then
        return array['', 'must be ' || (p_schema -> 'const')::text, null];
    elsif p_schema ? 'enum' and not ulak_private.json_has_element(p_schema -> 'enum', p_value) then
        return array['', 'must be one of ' || ulak_private.json_list(p_schema -> 'enum', ', '), null];
    elsif v_type = 'object' then
        return ulak_private.json_object_violation(p_schema, p_value);
    elsif v_type = 'array' then
        return ulak_private.json_array_violation(p_schema, p_value);
    elsif v_type = 'string' and p_schema ?| '{minLength,maxLength,pattern}' then
        v_problem := ulak_private.json_string_problem(p_schema, p_value #>> '{}');
    elsif v_type = 'number' and p_schema ?| '{minimum,maximum,exclusiveMinimum,exclusiveMaximum}' then
        v_problem := ulak_private.json_number_problem(p_schema, p_value::numeric);
    end if;
    if v_problem is not null then
        return array['', v_problem, null];
    end if;
    return null;
end
$plpgsql$;

create or replace function ulak_private.json_object_violation(p_schema jsonb, p_object jsonb)
returns text[]
language plpgsql
immutable
as $plpgsql$
declare
    v_properties jsonb := coalesce(p_schema -> 'properties', '{}');
    v_others jsonb := p_schema -> 'additionalProperties';
    v_key text;
    v_value jsonb;
    v_violation text[];
begin
    for v_key, v_value in select o.key, o.value from jsonb_each(p_object) as o loop
        if v_properties ? v_key then
            v_violation := ulak_private.json_violation(v_properties -> v_key, v_value);
        elsif v_others = 'false' then
            return array[
                ulak_private.json_path_step(v_key),
                'is not a known key',
                ulak_private.did_you_mean(v_key, array(select jsonb_object_keys(v_properties)))
            ];
        elsif v_others is not null then
            v_violation := ulak_private.json_violation(v_others, v_value);
        end if;
        if v_violation is not null then
            v_violation[1] := ulak_private.json_path_step(v_key) || v_violation[1];
            return v_violation;
        end if;
    end loop;
    -- Checked after the keys that are present: "ulr is not a known key" says more than "url is required".
    if p_schema ? 'required' then
        for v_key in select jsonb_array_elements_text(p_schema -> 'required') loop
            if not p_object ? v_key then
                return array[ulak_private.json_path_step(v_key), 'is required', null];
            end if;
        end loop;
    end if;
    return null;
end
$plpgsql$;

create or replace function ulak_private.json_array_violation(p_schema jsonb, p_array jsonb)
returns text[]
language plpgsql
immutable
as $plpgsql$
declare
    v_length integer := jsonb_array_length(p_array);
    v_number integer := 0;
    v_value jsonb;
    v_violation text[];
begin
    if v_length < (p_schema ->> 'minItems')::numeric then
        return array['', format('must have at least %s items', p_schema ->> 'minItems'), null];
    elsif v_length > (p_schema ->> 'maxItems')::numeric then
        return array['', format('must have at most %s items', p_schema ->> 'maxItems'), null];
    elsif p_schema ? 'items' then
        for v_value in select jsonb_array_elements(p_array) loop
            v_violation := ulak_private.json_violation(p_schema -> 'items', v_value);
            if v_violation is not null then
                v_violation[1] := '[' || v_number || ']' || v_violation[1];
                return v_violation;
            end if;
            v_number := v_number + 1;
        end loop;
    end if;
    return null;
end
$plpgsql$;

create or replace function ulak_private.json_string_problem(p_schema jsonb, p_text text)
returns text
language plpgsql
immutable
as $plpgsql$
begin
    return case
        when char_length(p_text) < (p_schema ->> 'minLength')::numeric
            then format('must have at least %s characters', p_schema ->> 'minLength')
        when char_length(p_text) > (p_schema ->> 'maxLength')::numeric
            then format('must have at most %s characters', p_schema ->> 'maxLength')
        when p_text !~ (p_schema ->> 'pattern')
            then format('must match the pattern %s', p_schema ->> 'pattern')
    end;
end
$plpgsql$;

create or replace function ulak_private.json_number_problem(p_schema jsonb, p_number numeric)
returns text
language plpgsql
immutable
as $plpgsql$
begin
    return case
        when p_number < (p_schema ->> 'minimum')::numeric
            then format('must be at least %s', p_schema ->> 'minimum')
        when p_number > (p_schema ->> 'maximum')::numeric
            then format('must be at most %s', p_schema ->> 'maximum')
        when p_number <= (p_schema ->> 'exclusiveMinimum')::numeric
            then format('must be greater than %s', p_schema ->> 'exclusiveMinimum')
        when p_number >= (p_schema ->> 'exclusiveMaximum')::numeric
            then format('must be less than %s', p_schema ->> 'exclusiveMaximum')
    end;
end
$plpgsql$;

-- Containment would do for scalars, but it finds {"a": 1} in [{"a": 1, "b": 2}].
create or replace function ulak_private.json_has_element(p_array jsonb, p_value jsonb)
returns boolean
language plpgsql
immutable
as $plpgsql$
begin
    if jsonb_typeof(p_value) in ('object', 'array') then
        return exists (select from jsonb_array_elements(p_array) as e where e = p_value);
    end if;
    return p_array @> p_value;
end
$plpgsql$;

-- .name, or ["a name with other characters"].
create or replace function ulak_private.json_path_step(p_key text)
returns text
language sql
immutable
as $sql$
    select case
        when p_key ~ '^[A-Za-z_$][A-Za-z0-9_$-]{0,63}$' then '.' || p_key
        else '[' || to_jsonb(left(p_key, 64))::text || ']'
    end
$sql$;

create or replace function ulak_private.json_list(p_values jsonb, p_separator text)
returns text
language sql
immutable
as $sql$
    select case jsonb_typeof(p_values)
        when 'array' then (select string_agg(coalesce(v #>> '{}', 'null'), p_separator) from jsonb_array_elements(p_values) as v)
        else p_values #>> '{}'
    end
$sql$;

-- The keywords of one level of a schema. Annotations are accepted and ignored. Everything else is refused, even "format": the schema's
-- author expects it to be checked.
create or replace function ulak_private.json_schema_keywords()
returns jsonb
language sql
immutable
as $sql$
    select $json${
        "type": ["object", "boolean"],
        "additionalProperties": false,
        "properties": {
            "type": {
                "type": ["string", "array"],
                "pattern": "^(object|array|string|number|integer|boolean|null)$",
                "minItems": 1,
                "items": {"enum": ["object", "array", "string", "number", "integer", "boolean", "null"]}
            },
            "const": true,
            "enum": {"type": "array", "minItems": 1},
            "required": {"type": "array", "items": {"type": "string"}},
            "properties": {"type": "object", "additionalProperties": {"type": ["object", "boolean"]}},
            "additionalProperties": {"type": ["object", "boolean"]},
            "items": {"type": ["object", "boolean"]},
            "minItems": {"type": "integer", "minimum": 0},
            "maxItems": {"type": "integer", "minimum": 0},
            "minLength": {"type": "integer", "minimum": 0},
            "maxLength": {"type": "integer", "minimum": 0},
            "pattern": {"type": "string"},
            "minimum": {"type": "number"},
            "maximum": {"type": "number"},
            "exclusiveMinimum": {"type": "number"},
            "exclusiveMaximum": {"type": "number"},
            "$schema": {"type": "string"},
            "$id": {"type": "string"},
            "$comment": {"type": "string"},
            "title": {"type": "string"},
            "description": {"type": "string"},
            "default": true,
            "examples": {"type": "array"}
        }
    }$json$::pg_catalog.jsonb
$sql$;

-- Raises if ulak could not enforce the schema to the letter; true otherwise.
create or replace function ulak_private.check_json_schema(p_schema jsonb, p_path text default '$')
returns boolean
language plpgsql
immutable
as $plpgsql$
declare
    v_violation text[] := ulak_private.json_violation(ulak_private.json_schema_keywords(), p_schema);
    v_key text;
    v_child jsonb;
begin
    if v_violation is null and not ulak_private.is_pattern(p_schema ->> 'pattern') then
        v_violation := array['.pattern', 'is not a valid regular expression of PostgreSQL', null];
    end if;
    if v_violation is not null then
        raise exception 'invalid JSON Schema: % %', p_path || v_violation[1], v_violation[2]
            using
                errcode = '22023',
                detail = 'ulak enforces these keywords and refuses others: type, const, enum, required, properties, '
                    'additionalProperties, items, minItems, maxItems, minLength, maxLength, pattern, minimum, maximum, '
                    'exclusiveMinimum, exclusiveMaximum.',
                hint = coalesce(v_violation[3], 'Correct the schema at this path.');
    end if;
    if jsonb_typeof(p_schema) = 'object' then
        for v_key, v_child in
            select '.properties' || ulak_private.json_path_step(p.key), p.value from jsonb_each(p_schema -> 'properties') as p
            union all
            select '.' || k, p_schema -> k from unnest(array['additionalProperties', 'items']) as k where p_schema ? k
        loop
            perform ulak_private.check_json_schema(v_child, p_path || v_key);
        end loop;
    end if;
    return true;
end
$plpgsql$;

create or replace function ulak_private.is_pattern(p_pattern text)
returns boolean
language plpgsql
immutable
as $plpgsql$
begin
    perform '' ~ p_pattern;
    return true;
exception
    when invalid_regular_expression then
        return false;
end
$plpgsql$;
