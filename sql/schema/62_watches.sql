-- Watched tables: whose changes become events. The triggers on the table lead here by the watch's id, so the table may be renamed.

create table ulak.watches (
    id bigint generated always as identity primary key,
    table_name text not null,
    event_type text not null,
    operations text[] not null,
    columns text[] not null,
    changed text[],
    condition jsonpath,
    ordering_key text[],
    -- The table and its columns by their numbers, to follow renames. A restored table has another oid: then names count.
    bound_to oid not null,
    bindings jsonb not null,
    -- As ulak_private.caller() has it.
    created_by text not null default case when current_setting('role') = 'none' then session_user else current_setting('role') end,
    created_at timestamptz not null default now()
);

comment on table ulak.watches is 'tables whose changes become events. Change it with ulak.watch() and ulak.unwatch(); read ulak.watch_list';
comment on column ulak.watches.id is 'number of the watch; its triggers pass it';
comment on column ulak.watches.table_name is 'the table, by the name that it had when it was first watched';
comment on column ulak.watches.event_type is 'the event type that its changes are published as';
comment on column ulak.watches.operations is 'insert, update, delete, truncate: which of them become events';
comment on column ulak.watches.columns is 'the columns that are sent, by the names that they had then';
comment on column ulak.watches.changed is 'an update counts if one of these has changed; null: if one of columns has';
comment on column ulak.watches.condition is 'only changes for which this jsonpath predicate over {"old": ..., "new": ...} is true; null: all';
comment on column ulak.watches.ordering_key is 'columns whose values are the ordering key; null: the primary key; empty: none';
comment on column ulak.watches.bound_to is 'oid of the table that bindings are about';
comment on column ulak.watches.bindings is 'the number of each column by its name';
comment on column ulak.watches.created_by is 'the role that created it';
comment on column ulak.watches.created_at is 'when it was created';
