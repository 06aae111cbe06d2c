-- Watching tables: the changes of a statement become events, published as one set in the same transaction.

-- Runs with the caller's rights: PostgreSQL itself checks the right to create triggers on the table, and the caller must be able to read
-- the columns that are sent. Roles that write to the table later need no rights for this.
create or replace function ulak.watch(
    p_table regclass,
    p_event_type text,
    p_operations text[] default '{insert,update,delete}',
    p_columns text[] default null,
    p_changed text[] default null,
    p_condition jsonpath default null,
    p_ordering_key text[] default null
)
returns bigint
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_id bigint;
    v_column text;
    v_operation text;
begin
    v_id := ulak_private.add_watch(p_table, p_event_type, p_operations, p_columns, p_changed, p_condition, p_ordering_key);
    -- A condition reads every column, and the ordering key is the primary key unless another is given.
    select a.attname into v_column
    from pg_attribute as a
    where a.attrelid = p_table
        and a.attnum > 0
        and not a.attisdropped
        and (
            p_columns is null
            or p_condition is not null
            or a.attname = any (p_columns || p_changed || p_ordering_key)
            or p_ordering_key is null and exists (
                select from pg_index as i where i.indrelid = p_table and i.indisprimary and a.attnum = any (i.indkey)
            )
        )
        and not (has_column_privilege(p_table, a.attnum, 'select') and has_column_privilege(ulak_private.caller(), p_table, a.attnum, 'select'))
    limit 1;
    if found then
        raise exception 'column "%" of table % may not be read by "%"', v_column, p_table, ulak_private.caller()
            using
                errcode = '42501',
                detail = 'A watch sends what its creator may read. With a condition, that is every column; without p_ordering_key, the primary key, too.',
                hint = format('The table''s owner can: grant select on %s to %I;', p_table, ulak_private.caller());
    end if;
    if row_security_active(p_table) or ulak_private.row_security_applies(p_table, ulak_private.caller()) then
        raise exception 'row security hides rows of table % from "%"', p_table, ulak_private.caller()
            using
                errcode = '42501',
                detail = 'A watch sends every row that changes, also those that its creator may not see.',
                hint = 'Its owner, or a role with BYPASSRLS, can watch it.';
    end if;
    for v_operation in select distinct o.operation from unnest(p_operations) as o (operation) loop
        execute format(
            'create trigger %I after %s on %s %s for each statement execute function ulak_private.publish_changes(%s)',
            format('ulak_watch_%s_%s', v_id, v_operation),
            v_operation,
            p_table,
            case v_operation
                when 'insert' then 'referencing new table as ulak_new_rows'
                when 'update' then 'referencing old table as ulak_old_rows new table as ulak_new_rows'
                when 'delete' then 'referencing old table as ulak_old_rows'
            end,
            v_id
        );
    end loop;
    -- Checked after the triggers are created: their lock makes concurrent watch() calls of a table wait for each other.
    if exists (
        select from ulak_private.watched_tables() as w where w.table_id = p_table and w.event_type = p_event_type and w.id <> v_id
    ) then
        raise exception 'table % is watched for "%" already', p_table, p_event_type
            using
                errcode = '23505',
                hint = format('To change it, first: select ulak.unwatch(%L, %L);', p_table, p_event_type);
    end if;
    return v_id;
end
$plpgsql$;

comment on function ulak.watch(regclass, text, text[], text[], text[], jsonpath, text[]) is
    'publishes the changes of a table as events from now on; returns the number of the watch. The caller needs the rights to create triggers on '
    'the table and to read what is sent';

create or replace function ulak.unwatch(p_id bigint)
returns boolean
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_trigger record;
begin
    -- Without its watch, a trigger does nothing. Only the table's owner may drop it.
    for v_trigger in select t.tgname, t.tgrelid::regclass as table_name from ulak_private.watch_triggers() as t where t.watch_id = p_id loop
        if pg_has_role((select c.relowner from pg_class as c where c.oid = v_trigger.table_name), 'usage') then
            execute format('drop trigger %I on %s', v_trigger.tgname, v_trigger.table_name);
        else
            raise notice 'trigger "%" of table % stays, and does nothing', v_trigger.tgname, v_trigger.table_name
                using hint = format('Its owner can: drop trigger %I on %s;', v_trigger.tgname, v_trigger.table_name);
        end if;
    end loop;
    return ulak_private.remove_watch(p_id);
end
$plpgsql$;

comment on function ulak.unwatch(bigint) is 'ends a watch; false if there is none with this number';

create or replace function ulak.unwatch(p_table regclass, p_event_type text)
returns boolean
language plpgsql
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    return coalesce(
        (
            select ulak.unwatch(w.id)
            from ulak_private.watched_tables() as w
            where w.table_id = p_table and w.event_type = p_event_type
        ),
        false
    );
end
$plpgsql$;

comment on function ulak.unwatch(regclass, text) is 'ends the watch of a table for an event type; false if there is none';

-- As row_security_active(), but for any role.
create or replace function ulak_private.row_security_applies(p_table regclass, p_role name)
returns boolean
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select c.relrowsecurity and not (r.rolsuper or r.rolbypassrls) and (c.relforcerowsecurity or not pg_has_role(r.oid, c.relowner, 'usage'))
    from pg_class as c, pg_roles as r
    where c.oid = p_table and r.rolname = p_role
$sql$;

create or replace function ulak_private.check_watch(
    p_table regclass,
    p_operations text[],
    p_columns text[],
    p_changed text[],
    p_ordering_key text[]
)
returns void
language plpgsql
as $plpgsql$
declare
    v_column text;
    v_kind "char";
begin
    select c.relkind into v_kind
    from pg_class as c
    where c.oid = p_table and c.relpersistence <> 't' and c.relnamespace not in ('ulak'::regnamespace, 'ulak_private'::regnamespace);
    if v_kind is null or v_kind not in ('r', 'p') then
        raise exception '% can''t be watched', coalesce(p_table::text, 'null')
            using
                errcode = '42809',
                detail = 'Only tables and partitioned tables are watched: no views, no foreign or temporary tables, and none of ulak''s own.';
    end if;
    if p_operations is null or p_operations = '{}' or not p_operations <@ '{insert,update,delete,truncate}' then
        raise exception 'operations must be some of insert, update, delete and truncate'
            using errcode = '22023', detail = format('They are %s.', coalesce(p_operations::text, 'null'));
    end if;
    if 'update' = any (p_operations) and not exists (select from pg_index as i where i.indrelid = p_table and i.indisprimary) then
        raise exception 'table % has no primary key', p_table
            using
                errcode = '55000',
                detail = 'The old and the new form of an updated row are paired by it.',
                hint = 'Add a primary key, or watch only inserts and deletes: p_operations => ''{insert,delete}''.';
    end if;
    select n.name into v_column
    from unnest(p_columns || p_changed || p_ordering_key) as n (name)
    where not exists (
        select from pg_attribute as a where a.attrelid = p_table and a.attname = n.name and a.attnum > 0 and not a.attisdropped
    )
    limit 1;
    if found then
        raise exception 'table % has no column %', p_table, coalesce('"' || v_column || '"', 'null')
            using
                errcode = '42703',
                hint = ulak_private.did_you_mean(v_column, array(
                    select a.attname::text from pg_attribute as a where a.attrelid = p_table and a.attnum > 0 and not a.attisdropped
                ));
    end if;
end
$plpgsql$;

create or replace function ulak_private.add_watch(
    p_table regclass,
    p_event_type text,
    p_operations text[],
    p_columns text[],
    p_changed text[],
    p_condition jsonpath,
    p_ordering_key text[]
)
returns bigint
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
declare
    v_bindings jsonb := (
        select jsonb_object_agg(a.attname, a.attnum)
        from pg_attribute as a
        where a.attrelid = p_table and a.attnum > 0 and not a.attisdropped
    );
    v_id bigint;
begin
    perform ulak_private.check_watch(p_table, p_operations, p_columns, p_changed, p_ordering_key);
    perform ulak_private.refuse_reserved_event_type(p_event_type);
    perform ulak_private.lock_event_type(p_event_type);
    perform ulak_private.require_condition(p_condition);
    insert into ulak.watches (table_name, event_type, operations, columns, changed, condition, ordering_key, bound_to, bindings)
    values (
        p_table::text,
        p_event_type,
        array(select distinct o.operation from unnest(p_operations) as o (operation) order by 1),
        -- Columns that are added to the table later are not sent.
        coalesce(p_columns, array(select k.key from jsonb_each(v_bindings) as k order by k.value)),
        nullif(p_changed, '{}'),
        p_condition,
        p_ordering_key,
        p_table,
        v_bindings
    )
    returning id into v_id;
    return v_id;
end
$plpgsql$;

create or replace function ulak_private.remove_watch(p_id bigint)
returns boolean
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $plpgsql$
begin
    delete from ulak.watches where id = p_id;
    return found;
end
$plpgsql$;

-- The triggers of all watches.
create or replace function ulak_private.watch_triggers()
returns table (watch_id bigint, tgrelid oid, tgname name, is_on boolean)
language sql
stable
set search_path = pg_catalog, pg_temp
as $sql$
    select a.number::bigint, t.tgrelid, t.tgname, t.tgenabled <> 'D'
    from pg_trigger as t
    -- Administrators could create other triggers, with any arguments. Each argument ends with a zero byte.
    cross join lateral substring(encode(t.tgargs, 'escape') from E'^([0-9]{1,18})\\\\000$') as a (number)
    where t.tgfoid = 'ulak_private.publish_changes()'::regprocedure and a.number is not null
$sql$;

-- Each watch with the table that its triggers are on; null if the triggers or the table are gone.
create or replace function ulak_private.watched_tables()
returns table (id bigint, table_id oid, event_type text)
language sql
stable
security definer
set search_path = pg_catalog, pg_temp
as $sql$
    select
        w.id,
        (
            select t.tgrelid
            from ulak_private.watch_triggers() as t
            where t.watch_id = w.id
            order by t.tgrelid <> w.bound_to, t.tgrelid
            limit 1
        ),
        w.event_type
    from ulak.watches as w
$sql$;

-- The columns that a watch names, and their current names in the table; null if a column was dropped.
create or replace function ulak_private.watched_columns(p_watch ulak.watches, p_table oid)
returns table (name text, attname name, atttypid oid)
language sql
stable
as $sql$
    select n.name, a.attname, a.atttypid
    from (select distinct n.name from unnest(p_watch.columns || p_watch.changed || p_watch.ordering_key) as n (name)) as n
    left join pg_attribute as a on a.attrelid = p_table
        and a.attnum > 0
        and not a.attisdropped
        and case when p_watch.bound_to = p_table then a.attnum = (p_watch.bindings ->> n.name)::smallint else a.attname = n.name end
$sql$;

create or replace view ulak.watch_list as
select
    w.id,
    coalesce(t.table_id::regclass::text, w.table_name) as table_name,
    w.event_type,
    w.operations,
    w.columns,
    w.changed,
    w.condition,
    w.ordering_key,
    w.created_by,
    w.created_at
from ulak.watches as w
join ulak_private.watched_tables() as t on t.id = w.id;

comment on view ulak.watch_list is 'tables whose changes become events';
call ulak_private.describe('ulak.watch_list', 'ulak.watches');
comment on column ulak.watch_list.id is 'number of the watch; unwatch() takes it';
comment on column ulak.watch_list.table_name is 'the table, as it is called now';

-- Whether a trigger is one that watch() has made. Anybody who may execute publish_changes() can make others: on another table, or without
-- the transition tables that changes_query() reads. A watch is bound to its table; in a restored database that one is gone.
create or replace function ulak_private.is_trigger_of(p_watch ulak.watches, p_table oid, p_name name, p_operation text)
returns boolean
language sql
stable
as $sql$
    select exists (
        select
        from pg_trigger as t
        join pg_class as c on c.oid = t.tgrelid and c.relpersistence <> 't' and c.relkind in ('r', 'p')
        where t.tgrelid = p_table
            and t.tgname = p_name
            and t.tgname = format('ulak_watch_%s_%s', p_watch.id, p_operation)
            and t.tgfoid = 'ulak_private.publish_changes()'::regprocedure
            and t.tgqual is null
            -- After each statement.
            and t.tgtype & 67 = 0
            and p_operation = any (p_watch.operations)
            and t.tgoldtable is not distinct from case when p_operation in ('update', 'delete') then 'ulak_old_rows' end
            and t.tgnewtable is not distinct from case when p_operation in ('insert', 'update') then 'ulak_new_rows' end
    )
        and (
            p_watch.bound_to = p_table
            or not exists (select from ulak_private.watch_triggers() as t where t.tgrelid = p_watch.bound_to and t.watch_id = p_watch.id)
        )
$sql$;

-- The trigger's function. It runs with the rights of ulak's owner, so that writers need none. If the watch or the event type is gone,
-- nothing is published and no error raised: doctor() reports it, and writers could do nothing about it.
--
-- The transition tables are the only names here that pg_catalog lacks. Where one is missing, its name would lead to a temporary relation of
-- the session that writes, and a trigger can be replaced while its statement runs: so pg_trigger alone doesn't tell that it is there.
create or replace function ulak_private.publish_changes()
returns trigger
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set jit = off
-- Values and ordering keys have the same text whichever role writes.
set datestyle = 'ISO, YMD'
set timezone = 'UTC'
set intervalstyle = 'postgres'
set extra_float_digits = 1
set bytea_output = 'hex'
as $plpgsql$
declare
    v_watch ulak.watches;
    v_payloads jsonb[];
    v_keys text[];
begin
    if to_regclass('pg_temp.ulak_old_rows') is not null or to_regclass('pg_temp.ulak_new_rows') is not null then
        raise exception 'a temporary relation stands where the changed rows of a watched table are'
            using
                errcode = '42P07',
                detail = 'Whoever made it would have it read with the rights of ulak''s owner.',
                hint = 'Drop pg_temp.ulak_old_rows and pg_temp.ulak_new_rows, or give them other names.';
    end if;
    select w.* into v_watch
    from ulak.watches as w
    join ulak.event_types as t on t.name = w.event_type
    where w.id = case when tg_argv[0] ~ '^[0-9]{1,18}$' then tg_argv[0]::bigint end
        and ulak_private.is_trigger_of(w, tg_relid, tg_name, lower(tg_op collate "C"));
    if not found then
        return null;
    end if;
    -- The transition tables are only visible here. The query is planned once per statement, however many rows that has changed.
    execute ulak_private.changes_query(v_watch, tg_relid, lower(tg_op collate "C"), format('%s.%s', tg_table_schema, tg_table_name))
    into v_payloads, v_keys
    using v_watch.condition, v_watch.operations;
    if v_payloads is not null then
        perform ulak_private.publish_watched(v_watch.event_type, v_payloads, v_keys);
    end if;
    return null;
end
$plpgsql$;

-- The query over the transition tables: payloads and ordering keys of all relevant changes, as two arrays.
create or replace function ulak_private.changes_query(p_watch ulak.watches, p_table oid, p_operation text, p_name text)
returns text
language plpgsql
stable
as $plpgsql$
declare
    v_row text := ulak_private.row_query(p_watch, p_table);
    v_is_paired boolean := p_operation = 'update' and exists (select from pg_index as i where i.indrelid = p_table and i.indisprimary);
    -- Rows n as they are now and o as they were. An operation that has only one side is joined with no rows of the other.
    v_rows text := case
        when p_operation = 'truncate' then format('(%s) as n cross join (%1$s) as o', 'select null::jsonb as sent, null as ordering_key')
        when p_operation = 'delete' then format('(%s from ulak_old_rows as r) as o left join (%1$s from ulak_old_rows as r) as n on false', v_row)
        when v_is_paired then format('(%s from ulak_new_rows as r) as n full join (%1$s from ulak_old_rows as r) as o on o.primary_key = n.primary_key', v_row)
        -- Inserts, and updates of a table whose primary key has been dropped since.
        else format('(%s from ulak_new_rows as r) as n left join (%1$s from ulak_new_rows as r) as o on false', v_row)
    end;
    -- An update of a row's primary key counts as a delete and an insert.
    v_operation text := case
        when v_is_paired then 'case when o.sent is null then ''insert'' when n.sent is null then ''delete'' else ''update'' end'
        else quote_literal(p_operation)
    end;
begin
    return format(
        'select array_agg(c.payload), array_agg(c.ordering_key) from ('
        'select jsonb_build_object(''operation'', %1$s, ''table'', %2$L)'
        ' || case when o.sent is null then ''{}'' else jsonb_build_object(''old'', o.sent) end'
        ' || case when n.sent is null then ''{}'' else jsonb_build_object(''new'', n.sent) end as payload,'
        ' coalesce(n.ordering_key, o.ordering_key) as ordering_key'
        ' from %3$s where %1$s = any ($2)%4$s%5$s) as c',
        v_operation,
        p_name,
        v_rows,
        case when v_is_paired then format(
            ' and (o.sent is null or n.sent is null or o.%1$s is distinct from n.%1$s)', case when p_watch.changed is null then 'sent' else 'watched' end
        ) end,
        case
            when p_watch.condition is not null and p_operation <> 'truncate'
                then ' and jsonb_path_match_tz(jsonb_build_object(''old'', o.whole, ''new'', n.whole), $1, ''{}'', true)'
        end
    );
end
$plpgsql$;

-- The values needed of a row r of a transition table. Objects are built from named columns only, so nothing else of the row is read.
create or replace function ulak_private.row_query(p_watch ulak.watches, p_table oid)
returns text
language sql
stable
as $sql$
    with column_now as materialized (
        select c.name, ulak_private.column_value(c.attname, c.atttypid) as value, format('concat(r.%I)', c.attname) as text
        from ulak_private.watched_columns(p_watch, p_table) as c
        where c.attname is not null
    ),
    key_column as (
        select format('concat(r.%I)', a.attname) as text, k.place
        from pg_index as i
        cross join lateral unnest(i.indkey::smallint[]) with ordinality as k (attnum, place)
        join pg_attribute as a on a.attrelid = i.indrelid and a.attnum = k.attnum
        where i.indrelid = p_table and i.indisprimary and k.place <= i.indnkeyatts
    ),
    key as (
        select ulak_private.key_text(array(select k.text from key_column as k order by k.place)) as primary_key
    )
    select format(
        'select %s as sent, %s as watched, %s as whole, %s as primary_key, nullif(%s, '''') as ordering_key',
        ulak_private.object_of(p_watch.columns, (select jsonb_object_agg(c.name, c.value) from column_now as c)),
        ulak_private.object_of(p_watch.changed, (select jsonb_object_agg(c.name, c.value) from column_now as c)),
        case
            when p_watch.condition is null then 'null::jsonb'
            else (
                select ulak_private.object_of(array_agg(a.attname::text order by a.attnum), jsonb_object_agg(a.attname, ulak_private.column_value(a.attname, a.atttypid)))
                from pg_attribute as a
                where a.attrelid = p_table and a.attnum > 0 and not a.attisdropped
            )
        end,
        k.primary_key,
        case
            when p_watch.ordering_key is null then k.primary_key
            else ulak_private.key_text(array(
                select c.text
                from unnest(p_watch.ordering_key) with ordinality as o (name, place)
                join column_now as c on c.name = o.name
                order by o.place
            ))
        end
    )
    from key as k
$sql$;

-- A JSON object of columns, each under the name that the watch has for it. Columns that the table no longer has are left out.
create or replace function ulak_private.object_of(p_names text[], p_values jsonb)
returns text
language sql
stable
as $sql$
    select coalesce(
        format(
            -- s alone would be the column of that name, if there is one.
            '(select to_jsonb(s.*) from (select %s) as s)',
            string_agg(format('%s as %I', p_values ->> n.name, n.name), ', ' order by n.place) filter (where p_values ? n.name)
        ),
        '''{}''::jsonb'
    )
    from unnest(p_names) with ordinality as n (name, place)
$sql$;

-- to_jsonb() calls a type's cast to json if there is one, and the type's owner may create it: that would run others' code with the rights of
-- ulak's owner. So only types of superusers, and of ulak's owner, are converted to JSON. Any other value is sent as text, which uses no cast.
create or replace function ulak_private.column_value(p_column name, p_type oid)
returns text
language sql
stable
as $sql$
    with recursive part as (
        select t.oid, t.typowner, t.typtype, t.typbasetype, t.typelem, t.typrelid
        from pg_type as t
        where t.oid = p_type
        union
        select t.oid, t.typowner, t.typtype, t.typbasetype, t.typelem, t.typrelid
        from part as p
        join pg_type as t on t.oid in (p.typbasetype, p.typelem)
            or t.oid in (select a.atttypid from pg_attribute as a where a.attrelid = p.typrelid and a.attnum > 0 and not a.attisdropped)
    )
    select format(
        case
            -- A domain is converted to JSON like its base type.
            when bool_and(p.typtype = 'd' or r.rolsuper or p.typowner = (select d.proowner from pg_proc as d where d.oid = 'ulak_private.publish_changes()'::regprocedure))
                then 'r.%1$I'
            else 'case when r.%1$I is not null then concat(r.%1$I) end'
        end,
        p_column
    )
    from part as p
    join pg_roles as r on r.oid = p.typowner
$sql$;

-- One text from the values of a key; a long one is replaced by its hash.
create or replace function ulak_private.key_text(p_texts text[])
returns text
language sql
immutable
as $sql$
    select case
        when cardinality(p_texts) = 0 then 'null::text'
        else format('ulak_private.short_key(%s)', case
            when cardinality(p_texts) = 1 then p_texts[1] else format('array_to_json(array[%s])::text', array_to_string(p_texts, ', '))
        end)
    end
$sql$;

create or replace function ulak_private.short_key(p_key text)
returns text
language sql
immutable
as $sql$
    select case when octet_length(p_key) <= 512 then p_key else encode(sha256(convert_to(p_key, 'UTF8')), 'hex') end
$sql$;

-- publish_batch() for one event type. Rights aren't checked: the creator of the watch had them.
create or replace function ulak_private.publish_watched(p_event_type text, p_payloads jsonb[], p_keys text[])
returns void
language plpgsql
as $plpgsql$
declare
    v_event_types text[] := array_fill(p_event_type, array[cardinality(p_payloads)]);
    v_schema jsonb := (select t.schema from ulak.event_types as t where t.name = p_event_type);
    v_places integer[];
    v_endpoint_ids bigint[];
begin
    perform ulak_private.check_payloads(p_payloads);
    if v_schema is not null then
        perform ulak_private.check_event(p_event_type, v_schema, p.payload, '$') from unnest(p_payloads) as p (payload);
    end if;
    select r.places, r.endpoint_ids into v_places, v_endpoint_ids from ulak_private.recipients(v_event_types, p_payloads) as r;
    if v_places is not null then
        perform ulak_private.post_events(
            array(
                select (null, m.payload, 0, null, null, null, null, m.ordering_key, null, null)::ulak_private.message
                from unnest(p_payloads, p_keys) with ordinality as m (payload, ordering_key, place)
                order by m.place
            ),
            v_event_types,
            array_fill(null::uuid, array[cardinality(p_payloads)]),
            v_places,
            v_endpoint_ids
        );
    end if;
end
$plpgsql$;
