-- Templates of bodies: plpython/ulak/transports/http/template.py fills them in for each request of an http endpoint.

-- What is wrong with a template, as config_violation() returns it. Paths are a subset of jsonpath that walks the payload once.
create or replace function ulak_private.template_violation(p_config jsonb)
returns text[]
language plpgsql
immutable
as $plpgsql$
declare
    v_body jsonb := p_config -> 'body';
    v_content_type text := (
        select max(h.value) from jsonb_each_text(p_config -> 'headers') h where lower(h.key collate "C") = 'content-type'
    );
    v_places integer := 0;
    v_shown text;
    v_value jsonb;
    v_text text;
    v_path jsonb;
begin
    if v_body is null then
        return null;
    elsif octet_length(v_body::text) > 65536 then
        return array['.body', 'must have at most 65536 bytes', null];
    elsif (p_config ->> 'batch_size')::integer > 1 then
        return array['.body', 'cannot be combined with batches', 'Leave out "batch_size".'];
    elsif jsonb_path_exists(v_body, '$.**{32 to last}') then
        return array['.body', 'is nested too deeply', 'A template has at most 32 levels.'];
    elsif jsonb_typeof(v_body) = 'string' and v_content_type is null then
        return array['.body', 'is a text, so "headers" must have its "content-type"', 'Such as "application/x-www-form-urlencoded".'];
    elsif jsonb_typeof(v_body) = 'string' and p_config -> 'cloudevents' = 'true' then
        return array['.body', 'must be JSON to be the data of a CloudEvent', null];
    end if;
    for v_shown, v_value in select n.shown, n.value from ulak_private.json_nodes(jsonb_build_object('body', v_body), '$path') n loop
        v_text := case when jsonb_typeof(v_value) = 'string' then v_value #>> '{}' end;
        v_path := case when jsonb_typeof(v_value) = 'object' then v_value -> '$path' end;
        if v_path is not null and v_value - array['$path', 'missing'] <> '{}' then
            return array[v_shown, 'has other keys than "$path" and "missing"', null];
        elsif jsonb_typeof(v_path) <> 'string'
            or v_path #>> '{}' !~ E'^\\$(\\.[A-Za-z_][A-Za-z0-9_]*|\\."[^"\\\\]*"|\\[[0-9]{1,9}\\]|\\[\\*\\]|\\.\\*)*$'
        then
            return array[v_shown || '."$path"', 'is not a path of members, [0], [*] and .*', 'Such as $.items[*].sku'];
        elsif regexp_replace(
            v_text,
            E'\\{\\{|\\}\\}|\\{((payload|metadata)(\\.[^{}.|]+)*|id|message_id|correlation_id|ordering_key|created_at)(\\|[^{}]*)?\\}',
            '',
            'g'
        ) ~ '[{}]' then
            return array[
                v_shown,
                'has a place that is not known',
                'Places are such as {payload.order.id}, {metadata.tenant}, {message_id}, or {payload.name|none} with a default; write {{ and }} for braces.'
            ];
        end if;
        v_places := v_places + case when v_path is null then coalesce(length(v_text) - length(replace(v_text, '{', '')), 0) else 1 end;
    end loop;
    if v_places > 200 then
        return array['.body', 'must have at most 200 places to fill', null];
    end if;
    return null;
end
$plpgsql$;

-- The first secret in a body whose value has braces, as config_violation() returns it. They would be read as a place to fill, and the text that
-- is sent instead would not be masked. p_config still names its secrets.
create or replace function ulak_private.body_secrets_violation(p_config jsonb)
returns text[]
language sql
stable
as $sql$
    select array[
        s.shown,
        format('names secret "%s", whose value has braces', s.name),
        'In a body they mark places to fill. Send it in a header, or use a value without them.'
    ]
    from ulak_private.secrets_in(p_config) s
    join ulak_private.secrets v on v.name = s.name
    where s.place like 'body/%' and v.value ~ '[{}]'
    order by s.place
    limit 1
$sql$;

-- Bodies of subscriptions. An endpoint has one body for each event type or pattern, however many subscriptions it has.

-- Raises if the body of one of its subscriptions doesn't fit. Bodies name no secrets: set_secret() looks only into configs.
create or replace function ulak_private.check_bodies(p_endpoint ulak.endpoints)
returns void
language plpgsql
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
        perform ulak_private.raise_violation(format('subscription of endpoint "%s" to "%s"', p_endpoint.name, v_event_type), v_violation);
    end loop;
    -- The same limit as for a config.
    perform ulak_private.check_bytes('the bodies of an endpoint''s subscriptions', octet_length(ulak_private.bodies(p_endpoint.id)::text), 262144);
end
$plpgsql$;

-- The bodies of an endpoint's subscriptions, as a part of its config for workers: {} or {"bodies": {"order.*": ...}}.
create or replace function ulak_private.bodies(p_endpoint_id bigint)
returns jsonb
language sql
stable
as $sql$
    select case when count(*) > 0 then jsonb_build_object('bodies', jsonb_object_agg(coalesce(s.event_type, s.pattern), s.body)) else '{}' end
    from ulak.subscriptions s
    where s.endpoint_id = p_endpoint_id and s.body is not null and s.enabled
$sql$;

-- Workers read the endpoint's config again, and the endpoint's trigger checks the bodies. Rows of a restore were valid before.
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
