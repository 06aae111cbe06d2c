-- Templates: the body of an http endpoint's requests, made of the message by plpython/ulak/transports/http/template.py.

-- As ulak_private.config_violation(). At most 64 kB, 32 levels and 200 places; a path is a part of jsonpath that walks the payload once.
create or replace function ulak_private.template_violation(p_config jsonb)
returns text[]
language plpgsql
immutable
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_body jsonb := p_config -> 'body';
    v_content_type text := (
        select max(h.value) from jsonb_each_text(p_config -> 'headers') h where lower(h.key collate "C") = 'content-type'
    );
    v_violation text[];
begin
    if v_body is null then
        return null;
    elsif octet_length(v_body::text) > 65536 then
        return array['.body', 'must have at most 65536 bytes', null];
    elsif (p_config ->> 'batch_size')::integer > 1 then
        return array['.body', 'cannot be combined with batches', 'Leave out "batch_size".'];
    elsif jsonb_typeof(v_body) = 'string' and v_content_type is null then
        return array['.body', 'is a text, so "headers" must have its "content-type"', 'Such as "application/x-www-form-urlencoded".'];
    elsif jsonb_typeof(v_body) = 'string' and coalesce((p_config -> 'cloudevents')::boolean, false) then
        return array['.body', 'must be JSON to be the data of a CloudEvent', null];
    end if;
    select n.violation into v_violation
    from ulak_private.template_nodes(v_body) n
    where n.violation is not null
    order by n.number
    limit 1;
    if v_violation is null and (select sum(n.places) from ulak_private.template_nodes(v_body) n) > 200 then
        return array['.body', 'must have at most 200 places to fill', null];
    end if;
    return v_violation;
end
$plpgsql$;

-- The parts of a template, each with the number of its places and what is wrong with it.
create or replace function ulak_private.template_nodes(p_body jsonb)
returns table (number bigint, places integer, violation text[])
language sql
immutable
set search_path = pg_catalog, pg_temp
-- As secrets_in().
set jit = off
as $sql$
    with recursive node(path, value, depth) as (
        select '.body', p_body, 1
        union all
        select n.path || i.step, i.value, n.depth + 1
        from node n
        cross join lateral (
            select ulak_private.json_path_step(o.key) as step, o.value
            from jsonb_each(case when jsonb_typeof(n.value) = 'object' and not n.value ? '$path' then n.value end) o
            union all
            select format('[%s]', a.place - 1), a.value
            from jsonb_array_elements(case when jsonb_typeof(n.value) = 'array' then n.value end) with ordinality a(value, place)
        ) i
        where n.depth <= 32
    ),
    told as (
        select
            row_number() over () as number,
            n.*,
            case when jsonb_typeof(n.value) = 'string' then n.value #>> '{}' end as text,
            jsonb_typeof(n.value) = 'object' and n.value ? '$path' as is_path
        from node n
    )
    select
        t.number,
        t.is_path::integer + coalesce(length(t.text) - length(replace(t.text, '{', '')), 0),
        case
            when t.depth > 32 then array[t.path, 'is nested too deeply', 'A template has at most 32 levels.']
            when t.is_path and t.value - array['$path', 'missing'] <> '{}'
                then array[t.path, 'has other keys than "$path" and "missing"', null]
            when t.is_path and (
                jsonb_typeof(t.value -> '$path') <> 'string'
                or t.value ->> '$path' !~ E'^\\$(\\.[A-Za-z_][A-Za-z0-9_]*|\\."[^"\\\\]*"|\\[[0-9]{1,9}\\]|\\[\\*\\]|\\.\\*)*$'
            )
                then array[t.path || '."$path"', 'is not a path of members, [0], [*] and .*', 'Such as $.items[*].sku']
            when regexp_replace(
                t.text,
                E'\\{\\{|\\}\\}|\\{((payload|metadata)(\\.[^{}.|]+)*|id|message_id|correlation_id|ordering_key|created_at)(\\|[^{}]*)?\\}',
                '',
                'g'
            ) ~ '[{}]' then array[
                t.path,
                'has a place that is not known',
                'Places are such as {payload.order.id}, {metadata.tenant}, {message_id}, or {payload.name|none} with a default; write {{ and }} for braces.'
            ]
        end
    from told t
$sql$;

-- A secret that would be read as a part of the template, in the form of ulak_private.config_violation(): what is sent would be another text,
-- and nothing would mask it. p_config has its secrets by name.
create or replace function ulak_private.body_secrets_violation(p_config jsonb)
returns text[]
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select array[
        '.' || replace(s.place, '/', '.'),
        format('names secret "%s", whose value has braces', s.name),
        'In a body they mark places to fill. Send it in a header, or use a value without them.'
    ]
    from ulak_private.secrets_in(p_config) s
    join ulak_private.secrets v on v.name = s.name
    where s.place like 'body/%' and v.value ~ '[{}]'
    order by s.place
    limit 1
$sql$;
