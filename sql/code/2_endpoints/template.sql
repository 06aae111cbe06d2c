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

-- Bodies of subscriptions. A filter says which events come, a body how they look: an endpoint has one body for an event type or pattern.

-- Raises unless its subscriptions have bodies that fit its config. They name no secrets: set_secret() looks for those in configs.
create or replace function ulak_private.check_bodies(p_endpoint ulak.endpoints)
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_event_type text;
    v_bodies jsonb[];
    v_violation text[];
begin
    for v_event_type, v_bodies in
        select coalesce(s.event_type, s.pattern), array_agg(distinct s.body)
        from ulak.subscriptions s
        where s.endpoint_id = p_endpoint.id and s.body is not null
        group by 1
        order by 1
    loop
        v_violation := case
            when p_endpoint.protocol <> 'http' then array['.body', 'is for http endpoints', 'Leave it out.']
            when exists (select from ulak.event_types t where t.name = v_event_type and strpos(t.name, '*') > 0)
                then array['.body', 'is not for event types with * in their names', null]
            when cardinality(v_bodies) > 1 then array[
                '.body', 'is another than that of the endpoint''s other subscription to it', 'Give both the same, or use an endpoint for each.'
            ]
            when jsonb_typeof(v_bodies[1]) not in ('object', 'array', 'string') then array['.body', 'must be an object, an array or a text', null]
            when ulak_private.secret_names(v_bodies[1]) <> '{}' then array[
                '.body', 'must not name a secret', 'A body with a secret can be in the config of an endpoint.'
            ]
            else ulak_private.template_violation(p_endpoint.config || jsonb_build_object('body', v_bodies[1]))
        end;
        if v_violation is not null then
            perform ulak_private.raise_violation(format('subscription of endpoint "%s" to "%s"', p_endpoint.name, v_event_type), v_violation);
        end if;
    end loop;
    -- As a config.
    perform ulak_private.check_bytes('the bodies of an endpoint''s subscriptions', octet_length(ulak_private.bodies(p_endpoint.id)::text), 262144);
end
$plpgsql$;

-- As part of an endpoint's config, for workers, by event type or pattern: {} or {"bodies": {"order.*": ...}}.
create or replace function ulak_private.bodies(p_endpoint_id bigint)
returns jsonb
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select case when count(*) > 0 then jsonb_build_object('bodies', jsonb_object_agg(coalesce(s.event_type, s.pattern), s.body)) else '{}' end
    from ulak.subscriptions s
    where s.endpoint_id = p_endpoint_id and s.body is not null and s.enabled
$sql$;

-- Workers read the endpoint's config anew, and its own trigger checks the bodies. A restore brings rows that were valid.
create or replace function ulak_private.renew_bodies()
returns trigger
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    if (old.body is not null or new.body is not null) and not ulak_private.is_restore() then
        update ulak.endpoints as e
        set config_version = e.config_version + 1
        where e.id = coalesce(new.endpoint_id, old.endpoint_id);
    end if;
    return null;
end
$plpgsql$;

create or replace trigger bodies_are_valid
    after insert or update or delete on ulak.subscriptions
    for each row
    execute function ulak_private.renew_bodies();
