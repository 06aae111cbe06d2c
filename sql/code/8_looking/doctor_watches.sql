-- Watched tables of which nothing is published, or not all.

create or replace function ulak_private.doctor_watches()
returns table (severity text, check_name text, finding text, fix text)
language sql
stable
as $sql$
    select 'warning', 'watch', f.finding, f.fix
    from ulak.watches w
    join ulak_private.watched_tables() t on t.id = w.id
    cross join lateral (
        select
            format('watch %s publishes nothing: table %s or its triggers are gone', w.id, w.table_name),
            format('select ulak.unwatch(%s); -- and watch() it again, if it is still there', w.id)
        where t.table_id is null
        union all
        select
            format('watch %s of table %s publishes nothing: event type "%s" is gone', w.id, t.table_id::regclass, w.event_type),
            format('select ulak.create_event_type(%L); -- or select ulak.unwatch(%s);', w.event_type, w.id)
        where not exists (select from ulak.event_types e where e.name = w.event_type) and t.table_id is not null
        union all
        select
            format('watch %s of table %s leaves out what is gone from it: column %s', w.id, t.table_id::regclass, string_agg(c.name, ', ' order by c.name)),
            format('select ulak.unwatch(%s); -- and watch() it again, with the columns that it has now', w.id)
        from ulak_private.watched_columns(w, t.table_id) c
        where c.attname is null and t.table_id is not null
        having count(*) > 0
    ) f (finding, fix)
$sql$;
