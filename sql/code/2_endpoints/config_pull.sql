-- The config of a pull endpoint has no keys of its own. External workers claim its messages.

create or replace function ulak_private.pull_config_schema()
returns jsonb
language sql
immutable
as $sql$
    select $json${"properties": {}}$json$::pg_catalog.jsonb
$sql$;

create or replace function ulak_private.pull_config_rules()
returns table (keys text, refused text, problem text, hint text)
language sql
immutable
as $sql$
    values ('disable_after', 'exists(KEY)', 'has no effect with protocol pull', 'External workers know by themselves when to stop.')
$sql$;
