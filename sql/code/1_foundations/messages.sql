-- The views that users read: ulak.queue, ulak.archive, both as ulak.messages, and ulak.dlq, each message with its payload, headers and metadata,
-- wherever those are stored.

-- Gives the columns of a view the comments of the columns of that name: of the first of these tables that has one.
create or replace procedure ulak_private.describe(p_view regclass, variadic p_tables regclass[])
language plpgsql
as $plpgsql$
declare
    v_column text;
    v_comment text;
begin
    for v_column, v_comment in
        select distinct on (v.attnum) v.attname, pg_catalog.col_description(a.attrelid, a.attnum)
        from pg_catalog.pg_attribute v
        join pg_catalog.pg_attribute a on a.attrelid = any (p_tables) and a.attname = v.attname
        where v.attrelid = p_view and v.attnum > 0
        order by v.attnum, array_position(p_tables, a.attrelid::regclass)
    loop
        execute format('comment on column %s.%I is %L', p_view, v_column, v_comment);
    end loop;
end
$plpgsql$;

-- Built from the tables' own columns and comments, so that each column is defined once, in sql/schema. Payload, headers and metadata are
-- subqueries: a query that doesn't select them has the same plan as on the table alone.
do $plpgsql$
declare
    v_view text;
    v_table text;
    v_created_at text;
    v_comment text;
    v_columns text;
begin
    for v_view, v_table, v_created_at, v_comment in
        values
            ('queue', 'deliveries', 'created_at', 'every message that is not finished: it waits, it is in flight, or it holds its ordering key'),
            ('archive', 'archived', 'created_at', 'finished messages, by month (UTC)'),
            (
                'dlq',
                'letters',
                'original_created_at',
                'messages that could not be delivered, with all that is needed to send them again'
            )
    loop
        -- The table's own columns, and those that only events have.
        with stored as (
            select a.attname, a.attnum, a.attrelid = 'ulak_private.events'::regclass as is_of_event
            from pg_catalog.pg_attribute a
            where a.attnum > 0
                and not a.attisdropped
                and (
                    a.attrelid = format('ulak_private.%I', v_table)::regclass and a.attname not in ('event_id', 'event_created_at')
                    or a.attrelid = 'ulak_private.events'::regclass and not exists (
                        select
                        from pg_catalog.pg_attribute d
                        where d.attrelid = 'ulak_private.deliveries'::regclass and d.attname = a.attname
                    )
                )
        )
        select string_agg(
            case
                when s.is_of_event then format(
                    '(select e.%1$I from ulak_private.events e '
                    'where e.id = m.event_id and e.created_at = coalesce(m.event_created_at, m.%2$I)) as %1$I',
                    s.attname,
                    v_created_at
                )
                when s.attname = 'failure_history' then $$coalesce(m.failure_history, '[]') as failure_history$$
                else format('m.%I', s.attname)
            end,
            ', ' order by s.is_of_event, s.attnum
        )
        into v_columns
        from stored s;
        execute format('create or replace view ulak.%I as select %s from ulak_private.%I m', v_view, v_columns, v_table);
        execute format('comment on view ulak.%I is %L', v_view, v_comment);
        call ulak_private.describe(format('ulak.%I', v_view)::regclass, format('ulak_private.%I', v_table)::regclass, 'ulak_private.events');
    end loop;
    select string_agg(quote_ident(a.attname), ', ' order by a.attnum) into v_columns
    from pg_catalog.pg_attribute a
    join pg_catalog.pg_attribute o on o.attrelid = 'ulak.archive'::regclass and o.attname = a.attname
    where a.attrelid = 'ulak.queue'::regclass and a.attnum > 0;
    execute format('create or replace view ulak.messages as select %1$s from ulak.queue union all select %1$s from ulak.archive', v_columns);
    call ulak_private.describe('ulak.messages', 'ulak.queue');
end
$plpgsql$;

comment on view ulak.messages is 'every message, whether it waits, is in flight or is finished: ulak.queue and ulak.archive';
