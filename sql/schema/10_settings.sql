-- Settings that somebody changed. Names, defaults and ranges are code (sql/code/1_foundations/settings.sql), not rows:
-- an upgrade can change them, and a restored dump never collides with them.

create table ulak.setting_values (
    name text primary key,
    value text not null,
    updated_at timestamptz not null default now(),
    -- As ulak_private.caller() has it.
    updated_by text not null default case when current_setting('role') = 'none' then session_user else current_setting('role') end
);

comment on table ulak.setting_values is 'settings that differ from their default. Change them with ulak.configure(); read them in ulak.settings';
comment on column ulak.setting_values.name is 'the setting''s name, as in ulak.settings';
comment on column ulak.setting_values.value is 'its value as text, in the setting''s unit';
comment on column ulak.setting_values.updated_at is 'when it was last changed';
comment on column ulak.setting_values.updated_by is 'the role that changed it';
