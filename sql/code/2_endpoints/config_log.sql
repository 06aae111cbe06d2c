-- The keys of a log endpoint's config. The worker writes each message as one line of JSON to the server's log: for
-- development, and to see what would be sent.

create or replace function ulak_private.log_config_schema()
returns jsonb
language sql
immutable
as $sql$
    select $json${"properties": {"max_bytes": {"type": "integer", "minimum": 0, "maximum": 100000}}}$json$::pg_catalog.jsonb
$sql$;

-- Its keys don't depend on each other.
create or replace function ulak_private.log_config_rules()
returns table (keys text, refused text, problem text, hint text)
language sql
immutable
as $sql$
    select null, null, null, null where false
$sql$;
