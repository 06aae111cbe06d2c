-- The views that users read: ulak.queue, ulak.archive, both as ulak.messages, and ulak.dlq, each message with its payload, headers and metadata,
-- wherever those are stored.

-- Made of the tables' own columns and comments, so that a column is spelled once, in sql/schema. Payload, headers and metadata are
-- look-ups of their own: a query that doesn't ask for them has the plan that it would have on the table alone.
do $plpgsql$
declare
    v_view text;
    v_table text;
    v_created_at text;
    v_comment text;
    v_column text;
    v_columns text;
begin
    for v_view, v_table, v_created_at, v_comment in
        values
            ('queue', 'deliveries', 'created_at', 'every message that is not finished: it waits, or it is in flight'),
            ('archive', 'archived', 'created_at', 'finished messages, by month (UTC)'),
            (
                'dlq',
                'letters',
                'original_created_at',
                'messages that could not be delivered, with all that is needed to send them again'
            )
    loop
        select string_agg(
            case
                when a.attname in ('payload', 'headers', 'metadata') then format(
                    'coalesce(m.%1$I, (select e.%1$I from ulak_private.events e '
                    'where e.id = m.event_id and e.created_at = coalesce(m.event_created_at, m.%2$I))) as %1$I',
                    a.attname,
                    v_created_at
                )
                when a.attname = 'failure_history' then $$coalesce(m.failure_history, '[]') as failure_history$$
                else format('m.%I', a.attname)
            end,
            ', ' order by a.attnum
        )
        into v_columns
        from pg_catalog.pg_attribute a
        where a.attrelid = format('ulak_private.%I', v_table)::regclass
            and a.attnum > 0
            and not a.attisdropped
            and a.attname not in ('event_id', 'event_created_at');
        execute format(
            'create or replace view ulak.%1$I as select %2$s, '
            '(select e.sent_by from ulak_private.events e '
            'where e.id = m.event_id and e.created_at = coalesce(m.event_created_at, m.%3$I)) as sent_by, '
            '(select e.max_retries from ulak_private.events e '
            'where e.id = m.event_id and e.created_at = coalesce(m.event_created_at, m.%3$I)) as max_retries '
            'from ulak_private.%4$I m',
            v_view,
            v_columns,
            v_created_at,
            v_table
        );
        execute format('comment on view ulak.%I is %L', v_view, v_comment);
        for v_column, v_comment in
            select a.attname, pg_catalog.col_description(a.attrelid, a.attnum)
            from pg_catalog.pg_attribute a
            where a.attrelid = format('ulak_private.%I', v_table)::regclass
                and a.attnum > 0
                and not a.attisdropped
                and a.attname not in ('event_id', 'event_created_at')
            union all
            select 'sent_by', 'the role that sent it: the one that was set, else the one that logged in; null: sent by 0.2.0'
            union all
            select 'max_retries', 'its own number of retries, as asked for by the sender; null: as the endpoint''s retry policy says'
        loop
            execute format('comment on column ulak.%I.%I is %L', v_view, v_column, v_comment);
        end loop;
    end loop;
    select string_agg(quote_ident(a.attname), ', ' order by a.attnum) into v_columns
    from pg_catalog.pg_attribute a
    join pg_catalog.pg_attribute o on o.attrelid = 'ulak.archive'::regclass and o.attname = a.attname
    where a.attrelid = 'ulak.queue'::regclass and a.attnum > 0;
    execute format('create or replace view ulak.messages as select %1$s from ulak.queue union all select %1$s from ulak.archive', v_columns);
    for v_column, v_comment in
        select m.attname, pg_catalog.col_description(a.attrelid, a.attnum)
        from pg_catalog.pg_attribute m
        join pg_catalog.pg_attribute a on a.attrelid = 'ulak.queue'::regclass and a.attname = m.attname
        where m.attrelid = 'ulak.messages'::regclass and m.attnum > 0
    loop
        execute format('comment on column ulak.messages.%I is %L', v_column, v_comment);
    end loop;
end
$plpgsql$;

comment on view ulak.messages is 'every message, whether it waits, is in flight or is finished: ulak.queue and ulak.archive';
