-- Wildcards: a subscription to "order.*" gets every event whose type starts with "order.", one to "*" every event of applications.

-- Few patterns can match an event type: one for each of its dots, and "*". They are looked up by equality, so the cost of publishing
-- depends on the matches, not on the number of other patterns. ulak's own events need "ulak.*" or longer: they are for operators.
create or replace function ulak_private.patterns_of(p_event_type text)
returns text[]
language plpgsql
immutable
as $plpgsql$
declare
    v_parts text[] := string_to_array(p_event_type, '.');
    v_prefix text := '';
    v_patterns text[] := case when v_parts[1] = 'ulak' and cardinality(v_parts) > 1 then '{}'::text[] else '{*}'::text[] end;
begin
    for v_place in 1 .. cardinality(v_parts) - 1 loop
        v_prefix := v_prefix || v_parts[v_place] || '.';
        v_patterns := v_patterns || (v_prefix || '*');
    end loop;
    return v_patterns;
end
$plpgsql$;

-- The subscriptions to an event type by its name or by a pattern.
create or replace function ulak_private.subscriptions_to(p_event_type text)
returns setof ulak.subscriptions
language sql
stable
as $sql$
    select s.* from ulak.subscriptions s where s.event_type = p_event_type and s.enabled
    union all
    select s.* from ulak.subscriptions s where s.pattern = any (ulak_private.patterns_of(p_event_type)) and s.enabled
$sql$;

-- The same for several event types, each once. Always uses the indexes: the plan is kept, and the number of subscriptions may grow.
create or replace function ulak_private.subscriptions_to_each(p_event_types text[])
returns table (event_type text, endpoint_id bigint, filter jsonb, predicate jsonpath)
language plpgsql
stable
set enable_seqscan = off
set enable_hashjoin = off
set enable_nestloop = on
set plan_cache_mode = force_generic_plan
as $plpgsql$
begin
    return query
    select t.event_type, s.endpoint_id, s.filter, s.predicate
    from (select distinct t.event_type from unnest(p_event_types) as t (event_type)) as t
    cross join lateral ulak_private.subscriptions_to(t.event_type) as s;
end
$plpgsql$;

-- The pattern, if this is one, else null.
create or replace function ulak_private.as_pattern(p_event_type text)
returns text
language plpgsql
stable
as $plpgsql$
begin
    if strpos(p_event_type, '*') = 0 then
        return null;
    elsif p_event_type !~ E'^([^*\\x01-\\x20\\x7f]{1,199}\\.)?\\*$' then
        raise exception 'invalid pattern "%"', left(p_event_type, 200)
            using
                errcode = '22023',
                detail = 'A pattern is * alone, or a beginning that ends in a dot, and a *.',
                hint = 'Such as: order.* for order.placed and order.item.added, or * for every event.';
    end if;
    return p_event_type;
end
$plpgsql$;
