-- help(): what there is, from the comments in the catalog.

create or replace function ulak.help(p_name text default null)
returns table (name text, kind text, usage text, description text, roles text)
language plpgsql
stable
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
#variable_conflict use_column
declare
    v_name text := nullif(lower(regexp_replace(btrim(p_name), E'^ulak\\.|\\(.*$', '', 'gi') collate "C"), '');
begin
    if v_name is null then
        return query
        select t.name, t.kind, t.usage, t.description, t.roles
        from ulak_private.help_topics() t
        where t.kind <> 'setting'
        order by array_position(array['function', 'procedure', 'view', 'table'], t.kind), t.name, t.usage;
        return;
    end if;
    return query
    with matching as (
        select
            t.*,
            case
                when t.name = v_name or starts_with(t.name, v_name || '_') then 1
                when strpos(t.name, v_name) > 0 then 2
                when strpos(lower(t.description collate "C"), v_name) > 0 then 3
            end as rank
        from ulak_private.help_topics() t
    ),
    -- Names that begin with the word; else names that contain it; else descriptions.
    chosen as (
        select m.*, row_number() over (order by m.name <> v_name, m.name, m.usage) as place
        from matching m
        where m.rank = (select min(o.rank) from matching o)
    ),
    line as (
        select c.place, 0 as number, c.name, c.kind, c.usage, c.description, c.roles
        from chosen c
        union all
        -- The parameters or columns of the one that was asked for.
        select
            c.place,
            a.number,
            '  ' || a.name,
            'parameter',
            format_type(a.type, null)
                || coalesce(', default ' || regexp_replace(pg_get_function_arg_default(c.id, a.number::integer), '::[a-z ]+$', ''), ''),
            (
                select h.description
                from ulak_private.parameter_help() h
                where h.parameter = a.name and (h.function_name is null or h.function_name = c.name)
                order by h.function_name nulls last
                limit 1
            ),
            null
        from chosen c
        join pg_proc p on p.oid = c.id
        cross join lateral unnest(p.proargnames, p.proargtypes::oid[]) with ordinality a (name, type, number)
        where c.name = v_name and a.type is not null
        union all
        select
            c.place, a.attnum, '  ' || a.attname, 'column', format_type(a.atttypid, a.atttypmod), col_description(a.attrelid, a.attnum), null
        from chosen c
        join pg_attribute a on a.attrelid = c.id and a.attnum > 0 and not a.attisdropped
        where c.name = v_name and c.kind in ('table', 'view')
    )
    select l.name, l.kind, l.usage, l.description, l.roles
    from line l
    order by l.place, l.number;
    if not found then
        raise exception 'no help for "%"', left(p_name, 200)
            using errcode = '42704',
                detail = 'Functions, procedures, views, tables and settings of ulak have help.',
                hint = ulak_private.did_you_mean(v_name, array(select t.name from ulak_private.help_topics() t));
    end if;
end
$plpgsql$;

comment on function ulak.help(text) is
    'everything that ulak offers, and the roles that may use it; help(''redrive'') shows the functions, tables and settings of that name, and searches if there is none';

-- Functions that an upgrade keeps for sessions of the release before have a leading underscore, or no comment.
create or replace function ulak_private.help_topics()
returns table (name text, kind text, usage text, description text, roles text, id oid)
language sql
stable
as $sql$
    select
        p.proname::text,
        case p.prokind when 'p' then 'procedure' else 'function' end,
        case p.prokind when 'p' then 'call ulak.' else 'ulak.' end || format('%s(%s)', p.proname, (
            select concat_ws(
                ', ',
                string_agg(a.name, ', ' order by a.number) filter (where a.number <= p.pronargs - p.pronargdefaults),
                '[' || string_agg(a.name, ', ' order by a.number) filter (where a.number > p.pronargs - p.pronargdefaults) || ']'
            )
            from unnest(p.proargnames) with ordinality a (name, number)
            -- The time is for tests.
            where a.number <= p.pronargs and a.name <> 'p_now'
        )),
        obj_description(p.oid, 'pg_proc'),
        (
            select string_agg(r.role, ', ' order by r.role)
            from unnest(ulak_private.roles()) r (role)
            where has_function_privilege(r.role, p.oid, 'execute')
        ),
        p.oid
    from pg_proc p
    where p.pronamespace = 'ulak'::regnamespace and p.proname not like E'\\_%'
    union all
    select
        c.relname::text,
        case c.relkind when 'v' then 'view' else 'table' end,
        format('select * from ulak.%I;', c.relname),
        obj_description(c.oid, 'pg_class'),
        (
            select string_agg(r.role, ', ' order by r.role)
            from unnest(ulak_private.roles()) r (role)
            where has_table_privilege(r.role, c.oid, 'select')
        ),
        c.oid
    from pg_class c
    where c.relnamespace = 'ulak'::regnamespace
        and c.relkind in ('r', 'p', 'v')
        and obj_description(c.oid, 'pg_class') is not null
    union all
    select
        s.name,
        'setting',
        format('select ulak.configure(%L, %L);', s.name, s.value),
        concat_ws('; ', s.description, ulak_private.setting_range(s)),
        'ulak_admin',
        null
    from ulak.settings s
$sql$;
